"""Conformance kits for sources: any restart, at any parallelism, delivers what followed.

Bounded sources (``check_source``) have all splits from the beginning; sources that grow (``check_late_splits``) get
splits later, which are read exactly once. Counterpart: ``connectors.base.Source``. A fake runtime polls all
readers in turn, restarts them at other parallelism, and goes back to earlier positions as after a crash.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headgate.connectors.base import (
    AnyReader,
    AskAgain,
    CheckpointMarker,
    CoordinatorHook,
    HookContext,
    InducedReader,
    Polled,
    Source,
    SourceBatch,
    SourceContext,
)
from headgate.errors import UsageError
from headgate.model.ids import Generation
from headgate.model.pipeline_identity import NO_GENERATION
from headgate.testing.source_runner import (
    SourceCheckpoint,
    SourceGeneration,
    begin_parts,
    check_crashes,
    check_same,
    is_time_for_checkpoint,
)

POLLS_MAX = 100_000
"""A bounded source that has not ended after so many polls never will."""

POLLS_FACTOR = 10
"""With restarts it may take so many times as many polls (and a hundred more), or it makes no progress."""

BACK_EVERY = 3
"""With markers, every so many generations one begins at an older checkpoint than the newest."""

RESTARTS_MAX = 40
"""Restart points tried for each parallelism; evenly spread when there are more polls."""


def check_source(
    source: Source | Callable[[], Source], parallelisms: Sequence[int] = (1, 2, 3)
) -> list[dict[str, Any]]:
    """Check that a bounded source delivers the same records with and without restarts; return the records.

    The records must be the same multiset for every parallelism and every restart. If the source brings a hook along
    that puts markers into it, each restart begins after the marker of a checkpoint, the newest or an older one, and
    the hook stays reset. If it brings none, this check is left out, and the function prints so. Sources and readers
    that are listeners are notified of how checkpoints end.

    Args:
        source: a source with bounded input. If reading changes something outside, such as a broker that forgets
            acknowledged messages, pass a function that makes the source, each time with the same records outside.
        parallelisms: numbers of subtasks. The check continues checkpoints of each number at every number.

    Raises:
        AssertionError: the records differ, or the source breaks a rule of ``SourceReader``.
        UsageError: the source is a listener and was passed itself; pass a function that makes it.
    """
    fresh = _maker(source)
    first = fresh()
    if source is first and _is_listening(first):
        raise UsageError(
            "the source hears of checkpoints, and what it does then outside is there in the next run, too; give "
            "check_source() a function that makes the source, each time with the same records outside"
        )
    schema = first.schema()
    expected, polls = _run(first, 1, lambda _: False, POLLS_MAX)
    assert first.schema().equals(schema), "schema() changed between two calls"
    hook = first.coordinator_hook()
    if hook is None:
        print("left out: markers: the source brings no hook")
    else:
        for parallelism in parallelisms:
            check_markers(first, hook, parallelism, polls, expected)
    for parallelism in parallelisms:
        polls_max = _polls_max(polls, parallelism)
        step = max(1, polls // RESTARTS_MAX)
        for restart in range(0, polls + 1, step):
            found, _ = _run(fresh(), parallelism, lambda poll, at=restart: poll == at, polls_max)  # type: ignore[misc]
            check_same(found, expected, f"parallelism {parallelism}, restart after poll {restart}")
        found, _ = _run(fresh(), parallelism, lambda _: True, polls_max, if_changed=True)
        check_same(found, expected, f"parallelism {parallelism}, restart after every poll that changed something")
    check_crashes(fresh, parallelisms, polls, lambda parallelism: _polls_max(polls, parallelism), expected)
    return expected


def _maker(source: Source | Callable[[], Source]) -> Callable[[], Source]:
    """Return a function that makes the source; a class is one, too."""
    if callable(source) and not hasattr(type(source), "open"):
        return source
    return lambda: source  # type: ignore[return-value]


def _polls_max(polls: int, parallelism: int) -> int:
    return 100 + polls * parallelism * POLLS_FACTOR


def _is_listening(source: Source) -> bool:
    life = SourceGeneration(source, NO_GENERATION, 1, SourceCheckpoint())
    life.close()
    return life.is_listening


def _run(
    source: Source,
    parallelism: int,
    restarts_after: Callable[[int], bool],
    polls_max: int,
    *,
    if_changed: bool = False,
) -> tuple[list[dict[str, Any]], int]:
    """Read with ``parallelism`` readers in turn; replace all of them where ``restarts_after`` says so.

    ``if_changed``: unless they would begin where these began. A source may need several polls to notice that its splits
    have ended, and would never end if it was restarted after each of them.
    """
    begin = SourceCheckpoint()
    life = SourceGeneration(source, NO_GENERATION, parallelism, begin)
    try:
        for poll in range(polls_max):
            if life.is_finished:
                return life.rows, poll
            life.poll(poll % parallelism)
            is_restart = restarts_after(poll)
            if is_restart or is_time_for_checkpoint(poll):
                done = life.checkpoint(poll + 1, is_polled=False)
                is_restart = is_restart and not (if_changed and done.holds_the_same_as(begin))
                if not is_restart:
                    life.tell_completed(done.number)
                    continue
                life.close()
                begin = done
                life = SourceGeneration(source, NO_GENERATION, parallelism, begin)
    finally:
        life.close()
    raise AssertionError(f"the source had not ended after {polls_max} polls")


def check_markers(
    source: Source, hook: CoordinatorHook, parallelism: int, polls: int, expected: list[dict[str, Any]]
) -> None:
    """Take one checkpoint after another, each after a different number of polls; a generation begins after each.

    Now and then it begins at the one before the newest, so that markers of the newest may come again (EI23).

    Raises:
        AssertionError: records are lost or come again, or the reader does not stop at its markers.
    """
    cut: _Cut | None = None
    completed: list[SourceCheckpoint] = []
    data: dict[int, bytes | None] = {}
    over: set[int] = set()
    for checkpoint in range(1, 2 * (polls + RESTARTS_MAX)):
        hook.open(HookContext("kit", "source", checkpoint))
        if checkpoint % BACK_EVERY == 0 and len(completed) > 1:
            over.add(completed.pop().number)  # its snapshots are damaged, say
        begin = completed[-1] if completed else SourceCheckpoint()
        if completed:
            hook.restore(begin.number, data[begin.number])
        else:
            hook.reset()
        cut = _Cut(_open(source, parallelism, begin.positions, Generation(checkpoint)), over)
        cut.read(checkpoint % 5)
        data[checkpoint] = _answer(hook, checkpoint)
        rows = (*begin.rows, *cut.to_marker(checkpoint, polls * POLLS_FACTOR + 100))
        completed.append(SourceCheckpoint(checkpoint, cut.positions(), rows))
        cut.check_standing_still(checkpoint)
        if cut.is_finished and checkpoint > BACK_EVERY:
            break
    assert cut is not None
    assert cut.is_finished, f"the source had not ended after {2 * (polls + RESTARTS_MAX)} checkpoints"
    check_same(completed[-1].rows, expected, f"parallelism {parallelism}, restart after every marker")
    hook.reset()
    hook.close()


def _answer(hook: CoordinatorHook, checkpoint: int) -> bytes | None:
    answer = hook.trigger(checkpoint)
    if isinstance(answer, AskAgain):
        raise UsageError(
            "the hook of the source wants to be asked again, until others have completed what it began; check_source() "
            "is for sources whose positions alone say where they go on"
        )
    return answer


class _Cut:
    """Readers of all subtasks between one checkpoint and the next."""

    def __init__(self, readers: list[AnyReader], over: Container[int]) -> None:
        """Read with ``readers``; markers of ``over`` mean nothing, and are read past (EI23)."""
        self._readers, self._over = readers, over
        self._rows: list[dict[str, Any]] = []
        self._still: set[str] = set()

    @property
    def is_finished(self) -> bool:
        return all(reader.is_finished() for reader in self._readers)

    def positions(self) -> dict[str, bytes]:
        return {split: at for reader in self._readers for split, at in reader.positions().items()}

    def read(self, polls: int) -> None:
        """Poll each reader so often; no checkpoint was triggered yet."""
        for reader in self._readers:
            for _ in range(polls):
                self._take(reader, None)

    def to_marker(self, checkpoint: int, polls_max: int) -> list[dict[str, Any]]:
        """Read until every split has reached the marker, or has ended; return all rows."""
        for reader in self._readers:
            polls = 0
            while not set(reader.splits()) <= self._still:
                polls += 1
                assert polls <= polls_max, (
                    f"splits {sorted(set(reader.splits()) - self._still)} did not meet the marker of {checkpoint}"
                )
                self._take(reader, checkpoint)
        return self._rows

    def check_standing_still(self, checkpoint: int) -> None:
        """After the marker nothing comes until ``read_on``, and the marker itself does not come again."""
        before = self.positions()
        for reader in self._readers:
            found: Polled = None if reader.is_finished() else reader.poll()
            assert found is None, f"the reader went on past the marker of {checkpoint}: {found}"
            if isinstance(reader, InducedReader):
                reader.read_on([split for split in reader.splits() if split in self._still])
        assert self.positions() == before, "read_on() moved the positions"
        for reader in self._readers:
            reader.close()

    def _take(self, reader: AnyReader, checkpoint: int | None) -> None:
        found: Polled = None if reader.is_finished() else reader.poll()
        if isinstance(found, CheckpointMarker):
            assert isinstance(reader, InducedReader), "a reader that meets markers needs read_on()"
            if found.checkpoint_id in self._over:
                reader.read_on([found.split])
                return
            assert found.checkpoint_id == checkpoint, f"{found} was met, and {checkpoint} was to be"
            assert found.split not in self._still, f"split {found.split} was read on past its marker"
            self._still.add(found.split)
        elif found is not None:
            assert found.split not in self._still, f"split {found.split} was read on past its marker"
            self._rows += found.batch.to_pylist()


def _open(
    source: Source,
    parallelism: int,
    positions: dict[str, bytes] | None,
    generation: Generation = NO_GENERATION,
) -> list[AnyReader]:
    contexts = [
        SourceContext("kit", "source", index, parallelism, positions, generation) for index in range(parallelism)
    ]
    return [source.open(context) for context in contexts]


IDLE_MAX = 500
"""Rounds of polls without a record, after which what is missing never comes. Readers say how long each may wait."""

QUIET_ROUNDS = 3
"""Rounds of polls without a record at the end: nothing comes again."""

LATE = 3
"""Splits that are added one after the other."""


@dataclass(frozen=True, slots=True)
class Growing:
    """A fresh source with a growing number of splits.

    Attributes:
        source: the source. It may have any number of splits at the beginning, or none. If its input ends, the next
            start reads late splits.
        records: the records that exist at the beginning, as the source delivers them.
        add: adds another split of at least two records that no other split has. Returns the records as the source
            delivers them.
        wait: lets this many milliseconds pass for the readers, so that they discover splits. The default really waits.
    """

    source: Source
    records: Sequence[Mapping[str, Any]]
    add: Callable[[], Sequence[Mapping[str, Any]]]
    wait: Callable[[int], None] = lambda ms: time.sleep(ms / 1_000)


def check_late_splits(fresh: Callable[[], Growing], parallelisms: Sequence[int] = (1, 2, 3)) -> None:
    """Check that a source delivers each record once when splits are added at any moment.

    The check adds splits at every moment, at every pair of parallelisms.

    Args:
        fresh: makes a new source with splits of its own.
        parallelisms: numbers of subtasks to begin with, and to continue with.

    Raises:
        AssertionError: records are lost or delivered twice, or a split has two owners. The message says what happened.
    """
    for before, after in itertools.product(parallelisms, repeat=2):
        for check in CHECKS:
            doc = (check.__doc__ or "").partition("\n")[0].rstrip(".")
            pipeline = GrowingPipeline(fresh(), before, f"{doc}, parallelism {before} to {after}")
            try:
                check(pipeline, after)
            finally:
                pipeline.close()


class GrowingPipeline:
    """Readers of all subtasks, what they have delivered, and a checkpoint to go back to."""

    def __init__(self, growing: Growing, parallelism: int, story: str) -> None:
        self._growing, self.story = growing, story
        self._expected = list(growing.records)
        self._positions: dict[str, bytes] | None = None
        self._kept: list[Mapping[str, Any]] = []
        """What came up to the last checkpoint."""
        self._is_cut = False
        self._start(parallelism)

    def __len__(self) -> int:
        """How many subtasks there are."""
        return len(self._readers)

    def add(self) -> None:
        """One more split is there."""
        found = list(self._growing.add())
        assert len(found) > 1, "a late split needs two records or more, so that its reader can stop between them"
        self._expected += found

    def poll(self, rounds: int = 1) -> None:
        """Poll each reader so often."""
        for _ in range(rounds):
            self._round()

    def read_all(self) -> None:
        """Read until everything has come; what has an end is started again if more has appeared meanwhile."""
        idle = 0
        is_new = False
        while len(self._rows()) < len(self._expected):
            if self._round():
                idle, is_new = 0, False
            elif all(reader.is_finished() for reader in self._readers):
                assert not is_new, f"{self.story}: lost: the source has ended, and {self._missing()}"
                self.restart(len(self._readers))
                is_new = True
            else:
                idle += 1
                assert idle <= IDLE_MAX, f"{self.story}: lost: {self._missing()}"
        self.poll(QUIET_ROUNDS)
        self._check()

    def checkpoint(self) -> None:
        """Remember where every reader is; readers that come later in the row are polled in between."""
        positions: dict[str, bytes] = {}
        kept = list(self._earlier)
        self._is_cut = True
        for index, reader in enumerate(self._readers):
            found = reader.positions()
            twice = positions.keys() & found.keys()
            assert not twice, f"{self.story}: two subtasks own split {min(twice)}"
            positions |= found
            kept += self._delivered[index]
            for other in range(index + 1, len(self._readers)):
                self._poll(other)
        self._is_cut = False
        self._positions, self._kept = positions, kept

    def crash(self, parallelism: int) -> None:
        """Go back to the last checkpoint; what came since does not count."""
        self.close()
        self._start(parallelism)

    def close(self) -> None:
        """Close all readers."""
        for reader in self._readers:
            reader.close()

    def restart(self, parallelism: int) -> None:
        """Stop with a checkpoint, and go on from it."""
        self.checkpoint()
        self.crash(parallelism)

    def _start(self, parallelism: int) -> None:
        self._growing.source.schema()  # as the driver does: it finds what is there
        self._earlier = list(self._kept)
        self._delivered: list[list[Mapping[str, Any]]] = [[] for _ in range(parallelism)]
        contexts = [SourceContext("kit", "source", index, parallelism, self._positions) for index in range(parallelism)]
        self._readers: list[Any] = [self._growing.source.open(context) for context in contexts]

    def _round(self) -> bool:
        """Poll all; wait when nothing came, as the runtime does. Return whether anything came."""
        before = len(self._rows())
        for index in range(len(self._readers)):
            self._poll(index)
        if len(self._rows()) > before:
            return True
        self._growing.wait(max(1, *(reader.wakeup_ms() for reader in self._readers)))
        return False

    def _poll(self, index: int) -> None:
        if not self._is_cut:
            begin_parts(self._readers)
        reader = self._readers[index]
        owned = set(reader.splits())
        found = None if reader.is_finished() else reader.poll()
        if isinstance(found, SourceBatch):
            owned |= set(reader.splits())
            assert found.split in owned, f"{self.story}: a batch of '{found.split}', which is not among splits()"
            self._delivered[index] += found.batch.to_pylist()

    def _rows(self) -> list[Mapping[str, Any]]:
        return [*self._earlier, *(row for rows in self._delivered for row in rows)]

    def _missing(self) -> str:
        return f"{len(self._expected) - len(self._rows())} records did not come"

    def _check(self) -> None:
        found, expected = _counted(self._rows()), _counted(self._expected)
        lost, extra = expected - found, found - expected
        assert not lost, f"{self.story}: lost: {list(lost)[:3]}"
        assert not extra, f"{self.story}: delivered again: {list(extra)[:3]}"


def _counted(rows: Sequence[Mapping[str, Any]]) -> Counter[str]:
    return Counter(repr(sorted(row.items())) for row in rows)


def check_while_others_are_read(pipeline: GrowingPipeline, after: int) -> None:
    """Splits appeared while others were read."""
    for _ in range(LATE):
        pipeline.poll()
        pipeline.add()
    pipeline.read_all()
    pipeline.restart(after)
    pipeline.read_all()


def check_after_others_ended(pipeline: GrowingPipeline, after: int) -> None:
    """Splits appeared after all others had been read to their ends."""
    for _ in range(LATE):
        pipeline.read_all()
        pipeline.add()
    pipeline.read_all()
    pipeline.restart(after)
    pipeline.add()
    pipeline.read_all()


def check_between_two_starts(pipeline: GrowingPipeline, after: int) -> None:
    """Splits appeared between two starts."""
    pipeline.poll()
    for _ in range(LATE):
        pipeline.checkpoint()
        pipeline.add()
        pipeline.crash(after)
        pipeline.poll()
    pipeline.read_all()
    pipeline.checkpoint()
    pipeline.add()
    pipeline.crash(after)
    pipeline.read_all()


def check_restarts_within_late_splits(pipeline: GrowingPipeline, after: int) -> None:
    """Restarted after every poll, with splits that appear meanwhile."""
    parallelisms = itertools.cycle((after, len(pipeline), 1, after))
    for number in range(4 * LATE):
        if number % 4 == 1:
            pipeline.add()
        pipeline.poll()
        pipeline.restart(next(parallelisms))
    pipeline.read_all()


def check_crashes_after_discovery(pipeline: GrowingPipeline, after: int) -> None:
    """Went back to before a late split was found."""
    for _ in range(LATE):
        pipeline.checkpoint()
        pipeline.add()
        pipeline.poll(3)
        pipeline.crash(after)
        pipeline.poll()
    pipeline.read_all()


CHECKS = (
    check_while_others_are_read,
    check_after_others_ended,
    check_between_two_starts,
    check_restarts_within_late_splits,
    check_crashes_after_discovery,
)
