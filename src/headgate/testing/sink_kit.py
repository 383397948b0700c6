"""Conformance kit for two-phase sinks: killed at every point, the output is that of completed checkpoints.

Counterpart: ``connectors.base.Sink``; a fake coordinator plays the runtime in this process, a "kill" abandons all live
objects. Source: K1–K8 of docs/spec/two-phase-commit.md and the kill points of its conformance list.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pyarrow as pa

from headgate.codec.life import encode_life
from headgate.connectors.base import Committer, HoldingWriter, MakingSink, OwnedSink, Sink, SinkContext, SinkWriter
from headgate.connectors.custom.fence import Fence, owner_of
from headgate.connectors.custom.owned import RememberingSink
from headgate.errors import FencedError, HeadgateError, StorageError
from headgate.model.ids import CheckpointId, Generation
from headgate.model.life import Life, Owner
from headgate.model.manifest import Committable
from headgate.operators.base import RestoredState
from headgate.protocol.checkpoints.commit import CommitPermit
from headgate.protocol.supervision import lives

SCHEMA = pa.schema([pa.field("number", pa.int64()), pa.field("text", pa.large_string())])
"""Records that the kit writes: ``number`` counts from 0, ``text`` is its decimal form."""

PIPELINE = "kit"
NODE = "sink"


@dataclass(frozen=True, slots=True)
class Target:
    """One fresh, empty target.

    Attributes:
        sink: writes to it.
        read: returns the committed records as dicts, as a foreign reader sees them.
        leftovers: returns the names of prepared or open things and temporary files that are there.
        lose_prepared: makes the target forget or abort what is prepared; None when it cannot.
        take: a consumer takes away all that is visible; None where there is no such consumer.
    """

    sink: Sink
    read: Callable[[], Sequence[dict[str, Any]]]
    leftovers: Callable[[], Sequence[str]] = tuple
    lose_prepared: Callable[[], None] | None = None
    take: Callable[[], None] | None = None


class KillPoint(Enum):
    """Where all processes die."""

    WRITING = "during write"
    PREPARED_SOME = "after some subtasks prepared"
    PREPARED_ALL = "after all prepared, before the checkpoint completed"
    COMPLETED = "after the checkpoint completed, before its commit"
    COMMITTED_SOME = "between two commits"
    COMMITTED = "after the commit, before anybody knows"
    RECOVERED = "during restore, before the commits are repeated"
    RECOMMITTED = "during restore, after the commits were repeated"


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """What a completed checkpoint remembers: the source's position, everything to commit, what writers hold back."""

    checkpoint: CheckpointId
    position: int
    committables: tuple[Committable, ...]
    states: tuple[tuple[int, bytes], ...] = ()
    parallelism: int = 0

    @property
    def shown(self) -> int:
        """Below this position every record is visible after the commit."""
        return 0 if self.states else self.position


class _Life:
    """The live objects of one generation."""

    def __init__(
        self, sink: Sink, generation: Generation, parallelism: int, restored: _Checkpoint, calls: int = 1
    ) -> None:
        """``calls``: so often everything is called, as if all answers but the last were lost."""
        self.generation, self.restored, self._calls = generation, restored, calls
        self.position = restored.position
        self.pending: list[Committable] = []
        if isinstance(sink, MakingSink):
            sink.make_target(SCHEMA)
        self.committer: Committer = sink.open_committer(PIPELINE, NODE, generation)
        self.writers: list[SinkWriter] = []
        self._sink, self._parallelism = sink, parallelism

    def recover(self) -> None:
        for _ in range(self._calls):
            self.committer.recover(self.restored.committables)

    def recommit(self) -> None:
        permit = CommitPermit(self.restored.checkpoint, self.generation)
        for _ in range(self._calls):
            self.committer.commit(permit, self.restored.committables)
        for index in range(self._parallelism):
            context = SinkContext(PIPELINE, NODE, index, self._parallelism, self.generation, SCHEMA)
            self.writers.append(self._sink.open(context))
            self._restore(index)

    def _restore(self, index: int) -> None:
        former = self.restored.parallelism
        mine = [
            RestoredState(subtask, former, memoryview(data))
            for subtask, data in self.restored.states
            if former != self._parallelism or subtask == index
        ]
        if mine:
            writer = self.writers[index]
            assert isinstance(writer, HoldingWriter), "a writer that cannot restore has held something back"
            writer.restore(mine)

    def finish(self) -> None:
        for writer in self.writers:
            if isinstance(writer, HoldingWriter):
                writer.finish()

    def write(self, rows: int) -> None:
        for index, writer in enumerate(self.writers):
            numbers = [n for n in range(self.position, self.position + rows) if n % len(self.writers) == index]
            if numbers:
                writer.write(pa.record_batch([numbers, [str(n) for n in numbers]], schema=SCHEMA))
        self.position += rows

    def prepare(self, checkpoint: CheckpointId, subtasks: int | None = None) -> _Checkpoint:
        states: list[tuple[int, bytes]] = []
        for index, writer in enumerate(self.writers[:subtasks]):
            sealed = writer.seal(checkpoint)
            frozen = writer.freeze() if isinstance(writer, HoldingWriter) else None
            payloads = [sealed.prepare() for _ in range(self._calls)]
            payload = payloads[-1]
            assert payloads.count(payload) == self._calls, "prepare said something else when it was repeated"
            if payload is not None:
                self.pending.append(Committable(NODE, checkpoint, index, self.generation, payload))
            if frozen is not None:
                states.append((index, b"".join(bytes(memoryview(part)) for part in frozen.encode())))
        return _Checkpoint(checkpoint, self.position, tuple(self.pending), tuple(states), self._parallelism)

    def commit(self, done: _Checkpoint) -> None:
        for _ in range(self._calls):
            self.committer.commit(CommitPermit(done.checkpoint, self.generation), done.committables)
        self.pending = [c for c in self.pending if c not in done.committables]


class _World:
    """A pipeline over a target: its durable checkpoints, and one life at a time."""

    def __init__(self, target: Target, rows: int, story: str, calls: int = 1) -> None:
        self.target, self.rows, self.story, self._calls = target, rows, story, calls
        self.completed = _Checkpoint(CheckpointId(0), 0, ())
        self._ids = itertools.count(1)
        self._generations = itertools.count(1)

    def next_life(self, parallelism: int) -> _Life:
        return _Life(self.target.sink, Generation(next(self._generations)), parallelism, self.completed, self._calls)

    def start(self, parallelism: int) -> _Life:
        life = self.next_life(parallelism)
        life.recover()
        life.recommit()
        return life

    def prepare(self, life: _Life, subtasks: int | None = None) -> _Checkpoint:
        life.write(self.rows)
        self.check_visible(0, "before the checkpoint completed")
        return life.prepare(CheckpointId(next(self._ids)), subtasks)

    def complete(self, done: _Checkpoint) -> None:
        self.completed = done

    def advance(self, life: _Life) -> None:
        """One checkpoint without trouble; its commit is repeated, late and out of order too."""
        before = self.completed
        done = self.prepare(life)
        self.complete(done)
        life.commit(done)
        self.check_visible(done.shown, "after a commit")
        life.commit(done)
        life.commit(before)
        life.committer.commit(CommitPermit(done.checkpoint, life.generation), ())
        self.check_visible(done.shown, "after repeated commits")

    def finish(self, life: _Life) -> None:
        """All input has ended: the last checkpoint shows whatever was held back."""
        life.finish()
        done = life.prepare(CheckpointId(next(self._ids)))
        assert not done.states, f"{self.story}: records are held back after all input has ended"
        self.complete(done)
        life.commit(done)

    def check_visible(self, at_least: int, when: str) -> None:
        """All records below ``at_least`` are visible, none beyond the completed checkpoint, none twice."""
        found = Counter(int(row["number"]) for row in self.target.read())
        twice = [n for n, count in found.items() if count > 1]
        early = [n for n in found if n >= self.completed.position]
        lost = [n for n in range(at_least) if n not in found]
        assert not twice, f"{self.story}: {when}: visible twice: {twice[:5]}"
        assert not early, f"{self.story}: {when}: visible without a completed checkpoint: {early[:5]}"
        assert not lost, f"{self.story}: {when}: lost: {lost[:5]}"

    def check_end(self, parallelism: int) -> None:
        """After one more restart everything completed is visible with its content, and nothing is left behind."""
        life = self.start(parallelism)
        self.finish(life)
        self.check_visible(self.completed.position, "at the end")
        assert all(row["text"] == str(row["number"]) for row in self.target.read()), f"{self.story}: content changed"
        left = list(self.target.leftovers())
        assert not left, f"{self.story}: left behind: {left[:5]}"
        for writer in life.writers:
            writer.close()
        life.committer.close()


def check_sink(
    fresh: Callable[[], Target],
    *,
    rescales: Sequence[tuple[int, int]] = ((1, 1), (2, 2), (1, 2), (5, 2), (2, 5)),
    overlaps: Sequence[int] = (1, 3),
    rows: Sequence[int] = (0, 1, 40),
) -> None:
    """Run every scenario, each on a target that ``fresh`` makes.

    Args:
        fresh: makes a new, empty target.
        rescales: parallelism before and after the kill.
        overlaps: checkpoints prepared and not completed when the kill comes.
        rows: records in each checkpoint, over all subtasks.

    Raises:
        AssertionError: the sink lost, duplicated or leaked something; the message tells the story.
    """
    for point, (before, after), overlap, count in itertools.product(KillPoint, rescales, overlaps, rows):
        story = f"killed {point.value}, parallelism {before} to {after}, {overlap} pending, {count} rows"
        try:
            check_kill(fresh(), point, before, after, overlap, count, story)
        except HeadgateError as error:
            raise AssertionError(f"{story}: the sink gave up: {error}") from error
    check_lost_answers(fresh())
    check_restarts_in_a_row(fresh())
    check_older_checkpoint(fresh())
    check_stale_generation(fresh())
    check_lost_prepared(fresh())
    check_lost_prepared_in_recovery(fresh())
    check_taken_away(fresh())
    check_owner(fresh())
    check_start_over(fresh())


def check_kill(
    target: Target, point: KillPoint, before: int, after: int, overlap: int, rows: int, story: str = ""
) -> None:
    """One kill, then a restart, a healthy checkpoint and another restart."""
    world = _World(target, rows, story or point.value)
    life = world.start(before)
    world.advance(life)
    for _ in range(overlap - 1):
        world.prepare(life)
    _die(world, life, point, after)
    life = world.start(after)
    world.check_visible(world.completed.shown, "after the restart")
    world.advance(life)
    world.check_end(before)


def _die(world: _World, life: _Life, point: KillPoint, after: int) -> None:
    """Go to ``point``; what is alive there is abandoned."""
    if point is KillPoint.WRITING:
        life.write(world.rows)
        return
    subtasks = len(life.writers) // 2 if point is KillPoint.PREPARED_SOME else None
    done = world.prepare(life, subtasks)
    if point in (KillPoint.PREPARED_SOME, KillPoint.PREPARED_ALL):
        return
    world.complete(done)
    if point is KillPoint.COMMITTED_SOME:
        half = done.committables[: len(done.committables) // 2]
        life.committer.commit(CommitPermit(done.checkpoint, life.generation), half)
    if point is KillPoint.COMMITTED:
        life.commit(done)
    if point in (KillPoint.RECOVERED, KillPoint.RECOMMITTED):
        second = world.next_life(after)
        second.recover()
        if point is KillPoint.RECOMMITTED:
            second.recommit()


def check_lost_answers(target: Target) -> None:
    """The answer to every call is lost once: whoever repeats it changes nothing, and hears the same."""
    world = _World(target, 6, "every answer was lost once", calls=2)
    life = world.start(2)
    world.advance(life)
    world.complete(world.prepare(life))
    life = world.start(3)
    world.check_visible(world.completed.shown, "after the restart")
    world.advance(life)
    world.check_end(2)


def check_restarts_in_a_row(target: Target) -> None:
    """Several generations begin, at any parallelism, and die before they write anything."""
    world = _World(target, 5, "restarted again and again")
    life = world.start(3)
    world.advance(life)
    world.complete(world.prepare(life))
    for parallelism in (1, 4, 2):
        world.start(parallelism)
        world.check_visible(world.completed.shown, f"after a restart at parallelism {parallelism}")
    world.advance(world.start(2))
    world.check_end(1)


def check_older_checkpoint(target: Target) -> None:
    """K7, K18: after going back to an older checkpoint new commits are not taken for old ones."""
    world = _World(target, 5, "restored from an older checkpoint")
    life = world.start(2)
    world.advance(life)
    older = world.completed
    lost = world.prepare(life)  # completed, but its manifest is damaged before anything is committed
    world.complete(lost)
    world.complete(older)
    life = world.start(2)
    world.check_visible(older.shown, "after going back")
    world.advance(life)
    world.check_end(2)


def check_stale_generation(target: Target) -> None:
    """Two generations at once: the older one changes nothing, and is told so when it commits or recovers."""
    world = _World(target, 6, "a stale generation goes on")
    old = world.start(2)
    world.advance(old)
    old.write(6)
    new = world.start(2)
    try:
        stale = old.prepare(CheckpointId(1_000))
    except FencedError:
        stale = _Checkpoint(CheckpointId(1_000), old.position, ())
    world.check_visible(world.completed.shown, "after the stale prepare")
    if stale.committables:
        _expect_fenced(lambda: old.commit(stale), "committed")
        world.check_visible(world.completed.shown, "after the stale commit")
    _expect_fenced(old.recover, "recovered")
    world.check_visible(world.completed.shown, "after the stale recovery")
    world.advance(new)
    world.check_end(2)


def _expect_fenced(attempt: Callable[[], None], what: str) -> None:
    try:
        attempt()
    except FencedError:
        return
    raise AssertionError(f"a stale generation {what} without a FencedError")


def check_owner(target: Target) -> None:
    """LV2, LV3: a target that remembers lives knows nobody at first, then the first one that comes, across restarts."""
    sink = target.sink
    if not isinstance(sink, OwnedSink):
        return
    first, second = Life("first", "/first", "kit", 1), Life("second", "/second", "kit", 2)
    assert sink.owner(PIPELINE, NODE) == Owner(), "a fresh target knows an owner"
    assert sink.own(PIPELINE, NODE, first) == Owner(first), "a fresh target does not take the life that comes"
    _World(target, 3, "the owner asks again").start(1)
    assert sink.own(PIPELINE, NODE, first).life == first, "a target does not know its owner again"
    assert sink.own(PIPELINE, NODE, second).life == first, "a target takes a second life"
    known = sink.owner(PIPELINE, NODE)
    assert (known.life, known.generation) == (first, 1), f"a target remembers {known}"
    assert sink.owner(PIPELINE, "another") == Owner(), "another sink has the same owner"


def check_start_over(target: Target) -> None:
    """LV2 to LV4: the checkpoints were removed, or others of that name are elsewhere: all numbers begin anew."""
    sink = target.sink
    if not isinstance(sink, OwnedSink):
        return
    first, second = Life("first", "/first", "kit", 1), Life("second", "/second", "kit", 2)
    sink.own(PIPELINE, NODE, first)
    world = _World(target, 5, "the pipeline was started over")
    world.advance(world.start(2))
    last = world.start(1)
    world.finish(last)
    found = sink.owner(PIPELINE, NODE)
    assert lives.objection(second, found, Generation(1)) is lives.Objection.OTHER_LIFE, f"a target remembers {found}"
    if not isinstance(sink, RememberingSink):
        return
    mine = Fence(owner_of(PIPELINE, NODE), int(found.generation), encode_life(second).decode())
    _expect_fenced(lambda: sink.claim(mine), "of another life claimed the target, in the step that looks whose it is,")
    assert sink.owner(PIPELINE, NODE) == found, "a target remembers a claim that it refused"
    sink.forget_owner(PIPELINE, NODE)
    assert sink.owner(PIPELINE, NODE) == Owner(None, found.generation, is_forgotten=True), "a target forgot its fence"
    assert sink.own(PIPELINE, NODE, second).life == second, "a target that was made to forget stays with its life"
    anew = _World(target, 5, world.story)
    while (over := anew.next_life(1)).generation <= found.generation:
        continue  # LV4: the next one that is claimed exceeds what the target has seen
    over.recover()
    over.recommit()
    _expect_fenced(last.recover, "of the former life recovered")
    over.write(5)
    over.finish()
    over.commit(over.prepare(CheckpointId(1)))
    counts = sorted(Counter(int(row["number"]) for row in target.read()).items())
    assert counts == [(n, 2) for n in range(5)], f"{world.story}: records and how often each is visible: {counts}"


def check_lost_prepared(target: Target) -> None:
    """K5: when the target lost what a completed checkpoint counts on, the commit raises instead of going on."""
    if target.lose_prepared is None:
        return
    world, life, done = _lost(target, "the target lost what was prepared")
    try:
        life.commit(done)
    except HeadgateError:
        return
    raise AssertionError(f"{world.story}: the commit reported success")


def check_lost_prepared_in_recovery(target: Target) -> None:
    """K5: the same, found by the next generation: it is told so in a way that nobody takes for worth another try."""
    if target.lose_prepared is None:
        return
    world, _, _ = _lost(target, "the target lost what was prepared, and the pipeline was started again")
    for _ in range(2):
        try:
            world.start(1)
        except FencedError as error:
            raise AssertionError(f"{world.story}: a denial looks like a newer generation: {error}") from error
        except HeadgateError as error:
            if isinstance(error, StorageError) and error.is_transient:
                raise AssertionError(f"{world.story}: a denial looks like a fault that passes: {error}") from error
        else:
            raise AssertionError(f"{world.story}: the recovery reported success")


def _lost(target: Target, story: str) -> tuple[_World, _Life, _Checkpoint]:
    assert target.lose_prepared is not None
    world = _World(target, 4, story)
    life = world.start(1)
    life.finish()  # hold nothing back, so that there is something to lose
    done = world.prepare(life)
    world.complete(done)
    target.lose_prepared()
    return world, life, done


def check_taken_away(target: Target) -> None:
    """D5: a consumer takes committed output away; commits that are repeated then neither fail nor bring it back."""
    if target.take is None:
        return
    world = _World(target, 4, "a consumer took committed output away")
    life = world.start(2)
    life.finish()
    done = world.prepare(life)
    world.complete(done)
    life.commit(done)
    world.check_visible(done.position, "before")
    target.take()
    for _ in range(2):
        life.commit(done)
        assert not target.read(), f"{world.story}: it came back after a repeated commit"
        life = world.start(2)
        assert not target.read(), f"{world.story}: it came back after a restart"
    life.finish()
    after = world.prepare(life)
    world.complete(after)
    life.commit(after)
    found = sorted(int(row["number"]) for row in target.read())
    assert found == list(range(done.position, after.position)), f"{world.story}: later output is {found}"
