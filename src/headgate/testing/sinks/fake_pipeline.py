"""A fake pipeline in front of a sink, and what a test says about the sink's target.

Only completed checkpoints outlive a generation. A "kill" abandons all live objects of one. Never looks into the sink.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import pyarrow as pa

from headgate.connectors.base import (
    Committer,
    SealedTransaction,
    Sink,
    SinkContext,
    SinkWriter,
)
from headgate.errors import FencedError, HeadgateError, StorageError
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Committable, SnapshotPart
from headgate.operators.base import RestoredState
from headgate.protocol.checkpoints.commit import CommitPermit

SCHEMA = pa.schema([pa.field("number", pa.int64()), pa.field("text", pa.large_string())])
"""Records that the kit writes: ``number`` counts from 0, ``text`` is its decimal form."""

PIPELINE = "kit"
NODE = "sink"


HasFailed: TypeAlias = Callable[[], bool]


def missing_option(name: str) -> str:
    """Return why a step is left out that needs ``Target(name=…)``."""
    return f"Target({name}=...) is not given"


@dataclass(frozen=True, slots=True)
class Target:
    """A fresh, empty target of a sink, for ``check_sink``.

    Attributes:
        sink: the sink that writes to the target.
        read: returns the committed records as dicts, as an independent reader sees them.
        leftovers: returns the names of all prepared or open transactions, temporary files and connections.
        lose_prepared: makes the target forget or abort prepared transactions. None if it cannot.
        take: plays a consumer that removes all visible records. None if the target has no such consumers.
        advance_clock: advances the target's clock by this many milliseconds, so that the target ends transactions that
            have waited for longer than the sink's ``transaction_timeout``. None if the target uses no clock.
        failing: a context manager in which call number n at the target fails once with a transient error, before the
            call takes effect (False) or after it (True). It yields whether the call happened. Sinks that derive from
            ``TwoPhaseSink`` or ``LedgerSink`` do not need it.
        crash: ends the target's server at once, as by SIGKILL, and starts it again. It is called at each kill point,
            and in and after each call that fails. None if there is no server to end.
        is_ordered: whether ``read`` returns records in the order in which they became visible.
        holds_back: whether readers see nothing that was written after a transaction of others, until that is decided.
    """

    sink: Sink
    read: Callable[[], Sequence[dict[str, Any]]]
    leftovers: Callable[[], Sequence[str]] = tuple
    lose_prepared: Callable[[], None] | None = None
    take: Callable[[], None] | None = None
    advance_clock: Callable[[int], None] | None = None
    failing: Callable[[int, bool], AbstractContextManager[HasFailed]] | None = None
    crash: Callable[[], None] | None = None
    is_ordered: bool = False
    holds_back: bool = False


Result = TypeVar("Result")

NUMBERS_MAX = 1_000_000
"""Of one pipeline: those of a neighbour at the same target begin there."""


@dataclass(frozen=True, slots=True)
class Name:
    """The names under which a fake pipeline writes."""

    pipeline: str = PIPELINE
    node: str = NODE
    first: int = 0
    """Its first number."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a completed checkpoint remembers: the source's position, everything to commit, what writers hold back."""

    checkpoint: CheckpointId
    position: int
    committables: tuple[Committable, ...]
    states: tuple[tuple[int, bytes], ...] = ()
    parallelism: int = 0

    @property
    def shown(self) -> int:
        """The position below which every record is visible after the commit."""
        return 0 if self.states else self.position


class SinkGeneration:
    """The live writers and committer of one generation."""

    def __init__(
        self,
        sink: Sink,
        name: Name,
        generation: Generation,
        parallelism: int,
        restored: Checkpoint,
        storage: dict[str, bytes],
        calls: int = 1,
    ) -> None:
        """Open the committer.

        Args:
            sink: what is checked.
            name: as whom it is written to.
            generation: which run this is.
            parallelism: how many writers there will be.
            restored: the checkpoint to begin with.
            storage: where pieces of output are kept, by name.
            calls: so often everything is called, as if all answers but the last were lost.
        """
        self.generation, self.restored, self._calls = generation, restored, calls
        self.position = restored.position
        self.pending: list[Committable] = []
        again(lambda: sink.make_target(SCHEMA))
        self.committer: Committer = sink.open_committer(name.pipeline, name.node, generation)
        self._storage = storage
        self.committer.read_pieces_with(lambda piece: memoryview(storage[piece.path]))
        self.writers: list[SinkWriter] = []
        self._sink, self._name, self._parallelism = sink, name, parallelism

    def recover(self) -> None:
        """Fence older generations and abort what the restored checkpoint does not keep."""
        for _ in range(self._calls):
            self.committer.recover(self.restored.committables)

    def recommit(self) -> None:
        """Commit what the restored checkpoint promises; then the writers begin."""
        permit = CommitPermit(self.restored.checkpoint, self.generation)
        for _ in range(self._calls):
            self.committer.commit(permit, self.restored.committables)
        for index in range(len(self.writers), self._parallelism):
            name = self._name
            context = SinkContext(name.pipeline, name.node, index, self._parallelism, self.generation, SCHEMA)
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
            assert writer.can_hold_back, "a writer that cannot restore has held something back"
            writer.restore(mine)

    def finish(self) -> None:
        """End the input: writers hold nothing back any more."""
        for writer in self.writers:
            writer.finish()

    def write(self, rows: int) -> None:
        """Write the next numbers; a number always goes to the same subtask."""
        for index, writer in enumerate(self.writers):
            numbers = [n for n in range(self.position, self.position + rows) if n % len(self.writers) == index]
            if numbers:
                found = [n + self._name.first for n in numbers]
                writer.write(pa.record_batch([found, [str(n) for n in found]], schema=SCHEMA))
        self.position += rows

    def prepare(self, checkpoint: CheckpointId, subtasks: int | None = None) -> Checkpoint:
        """Seal and prepare what was written, in the first ``subtasks`` of all."""
        states: list[tuple[int, bytes]] = []
        for index, writer in enumerate(self.writers[:subtasks]):
            sealed = writer.seal(checkpoint)
            frozen = writer.freeze()
            pieces = self._stored(sealed)
            payloads = [again(sealed.prepare) for _ in range(self._calls)]
            payload = payloads[-1]
            assert payloads.count(payload) == self._calls, "prepare said something else when it was repeated"
            if payload is not None:
                node = self._name.node
                self.pending.append(Committable(node, checkpoint, index, self.generation, payload, None, pieces))
            if frozen is not None:
                states.append((index, b"".join(bytes(memoryview(part)) for part in frozen.encode())))
        return Checkpoint(checkpoint, self.position, tuple(self.pending), tuple(states), self._parallelism)

    def _stored(self, sealed: SealedTransaction) -> tuple[SnapshotPart, ...]:
        """Keep the pieces of a transaction that is prepared piece by piece."""
        found: list[SnapshotPart] = []
        for number in range(sealed.pieces_count):
            tries = {bytes(sealed.piece(number)) for _ in range(self._calls)}
            assert len(tries) == 1, "a piece had other bytes when it was asked for again"
            path = f"piece-{len(self._storage)}"
            self._storage[path] = tries.pop()
            found.append(SnapshotPart(len(self._storage[path]), 0, path))
        return tuple(found)

    def commit(self, done: Checkpoint) -> None:
        """Commit what a completed checkpoint promises."""
        permit = CommitPermit(done.checkpoint, self.generation)
        for _ in range(self._calls):
            again(lambda: self.committer.commit(permit, done.committables))
        self.pending = [c for c in self.pending if c not in done.committables]

    @property
    def can_forget(self) -> bool:
        """Whether the sink can have the target forget outcomes."""
        return self.committer.can_forget

    def forget(self, retained: Sequence[Checkpoint]) -> None:
        """Let the target forget what none of ``retained`` promises (K20); do nothing if it cannot."""
        promised = [c for one in retained for c in one.committables]
        before = min([*(c.checkpoint for c in promised), *(one.checkpoint for one in retained)])
        for _ in range(self._calls):
            self.committer.forget(before, lambda: promised)

    def close(self) -> None:
        """Release everything."""
        for writer in self.writers:
            writer.close()
        self.committer.close()


class FakePipeline:
    """A pipeline with one sink: its durable checkpoints, and one generation at a time."""

    def __init__(self, target: Target, rows: int, story: str, calls: int = 1, name: Name | None = None) -> None:
        """``rows`` are written for each checkpoint; ``story`` begins what is said when something is wrong."""
        self.target, self.rows, self.story, self._calls = target, rows, story, calls
        self.completed = Checkpoint(CheckpointId(0), 0, ())
        self._name = Name() if name is None else name
        self._ids = itertools.count(1)
        self._generations = itertools.count(1)
        self._storage: dict[str, bytes] = {}
        self.is_held_back = False
        """Others at the target have transactions that are not decided, and readers wait for them."""

    def go_back_to(self, older: Checkpoint) -> None:
        """Restore ``older`` next; ids go on after it, below some that the target has seen (K7)."""
        self.completed = older
        self._ids = itertools.count(older.checkpoint + 1)

    def next_generation(self, parallelism: int) -> SinkGeneration:
        """Return a generation that has not recovered yet."""
        generation = Generation(next(self._generations))
        sink, name, storage = self.target.sink, self._name, self._storage
        return SinkGeneration(sink, name, generation, parallelism, self.completed, storage, self._calls)

    def start(self, parallelism: int) -> SinkGeneration:
        """Return a generation that is ready to write."""
        run = self.next_generation(parallelism)
        run.recover()
        run.recommit()
        return run

    def next_id(self) -> CheckpointId:
        """Return the id of another checkpoint."""
        return CheckpointId(next(self._ids))

    def prepare(self, run: SinkGeneration, subtasks: int | None = None) -> Checkpoint:
        """Write the records of one checkpoint, in two batches, and prepare them."""
        run.write(self.rows // 2)
        run.write(self.rows - self.rows // 2)
        self.check_visible(0, "before the checkpoint completed")
        prepared = run.prepare(self.next_id(), subtasks)
        self.check_visible(0, "while output is prepared")
        return prepared

    def complete(self, done: Checkpoint) -> None:
        """Make ``done`` the completed checkpoint: its manifest is durable."""
        self.completed = done

    def advance(self, run: SinkGeneration) -> None:
        """Take and commit one checkpoint; its commit is repeated, also late and out of order."""
        before = self.completed
        done = self.prepare(run)
        self.complete(done)
        run.commit(done)
        self.check_visible(done.shown, "after a commit")
        run.commit(done)
        run.commit(before)
        run.committer.commit(CommitPermit(done.checkpoint, run.generation), ())
        self.check_visible(done.shown, "after repeated commits")

    def finish(self, run: SinkGeneration) -> None:
        """End the input: the last checkpoint shows everything that was held back."""
        run.finish()
        done = run.prepare(self.next_id())
        assert not done.states, f"{self.story}: records are held back after all input has ended"
        self.complete(done)
        run.commit(done)

    def check_visible(self, at_least: int, when: str) -> None:
        """All records below ``at_least`` are visible, none beyond the completed checkpoint, none twice."""
        numbers = self.numbers()
        found = Counter(numbers)
        twice = [n for n, count in found.items() if count > 1]
        early = [n for n in found if n >= self.completed.position]
        lost = [] if self.is_held_back else [n for n in range(at_least) if n not in found]
        assert not twice, f"{self.story}: {when}: visible twice: {twice[:5]}"
        assert not early, f"{self.story}: {when}: visible without a completed checkpoint: {early[:5]}"
        assert not lost, f"{self.story}: {when}: lost: {lost[:5]}"
        if self.target.is_ordered and self.rows:
            checkpoints = [n // self.rows for n in numbers]
            assert checkpoints == sorted(checkpoints), f"{self.story}: {when}: later output came before earlier output"

    def numbers(self) -> list[int]:
        """Return which records of this pipeline are visible, counted from its first."""
        first = self._name.first
        found = [int(row["number"]) - first for row in self.target.read()]
        return [n for n in found if 0 <= n < NUMBERS_MAX]

    def check_end(self, parallelism: int, *, is_alone: bool = True) -> None:
        """After one more restart everything completed is visible with its content, and nothing else is left.

        ``is_alone``: leftovers can only be this pipeline's.
        """
        run = self.start(parallelism)
        self.finish(run)
        self.check_visible(self.completed.position, "at the end")
        assert all(row["text"] == str(row["number"]) for row in self.target.read()), f"{self.story}: content changed"
        run.close()
        left = list(self.target.leftovers()) if is_alone else []
        assert not left, f"{self.story}: left behind: {left[:5]}"


def again(call: Callable[[], Result]) -> Result:
    """Return what ``call`` returns, as the runtime gets it: one error that passes is tried again."""
    try:
        return call()
    except StorageError as error:
        if not error.is_transient:
            raise
        return call()


def denial_of(call: Callable[[], object], story: str) -> HeadgateError | None:
    """Return how a sink refuses for good, None if it does not.

    Raises:
        AssertionError: what it says looks like something else, or is not one sentence.
    """
    try:
        call()
    except HeadgateError as error:
        denial = error
    else:
        return None
    text = str(denial).strip()
    assert not isinstance(denial, FencedError), f"{story}: a denial looks like a newer generation: {text}"
    passes = isinstance(denial, StorageError) and denial.is_transient
    assert not passes, f"{story}: a denial looks like a fault that passes: {text}"
    assert len(text.splitlines()) == 1, f"{story}: a denial is no sentence: {text!r}"
    return denial
