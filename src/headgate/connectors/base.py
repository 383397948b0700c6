"""The contract of sources and sinks: what the runtime calls, and what it gives them.

A ``Source`` or ``Sink`` is plain configuration that travels to the workers; ``open`` makes the live half.

Exactly-once, source side: a reader's ``positions`` are part of every snapshot and given back on restore; the reader
then delivers exactly what followed them. Splits are owned by a deterministic rule (``owner_of_split``), so that no
assignment has to be agreed upon.

Exactly-once, sink side: ``seal`` at the barrier closes the current transaction in memory, ``prepare`` (in an upload
thread) makes it durable and invisible and returns the committable's payload, which goes into the snapshot; the
coordinator commits with ``Sink.open_committer`` once the checkpoint is completed (docs/spec/two-phase-commit.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import pyarrow as pa

from headgate.environment import SYSTEM_CLOCK
from headgate.errors import UsageError
from headgate.model.config import Duration, duration_ms
from headgate.model.ids import CheckpointId, Generation
from headgate.model.lineage import Location, Relocation
from headgate.model.manifest import Committable, SnapshotPart
from headgate.model.pipeline_identity import NO_GENERATION, Life, Mine, Owner, Target
from headgate.operators.base import RestoredState
from headgate.protocol.checkpoints.commit import CommitPermit
from headgate.state.snapshot import FrozenState


@dataclass(frozen=True, slots=True)
class SourceContext:
    """What a reader may know.

    Attributes:
        positions: the union over all former subtasks, or None on a first start.
        clock_ms: only goes forward; it is no date (``Clock.monotonic_ms``).
        life: which life of the pipeline it is; "": nobody knows, nothing is recorded in its name.
        takes_checkpoints: from time to time, not only when somebody asks or at the end.
        schema: what ``Source.schema`` returned when the pipeline was built; None: nobody knows. What the source reads
            may have other columns by now.
        relocation: what was read when the positions were taken, if the program names other places now (EV17).
    """

    pipeline: str
    node: str
    subtask_index: int
    parallelism: int
    positions: dict[str, bytes] | None
    generation: Generation = NO_GENERATION
    clock_ms: Callable[[], int] = SYSTEM_CLOCK.monotonic_ms
    life: str = ""
    takes_checkpoints: bool = True
    schema: pa.Schema | None = None
    relocation: Relocation | None = None


@dataclass(frozen=True, slots=True)
class SourceBatch:
    """Records of exactly one split.

    Attributes:
        split: the split's name, stable across restarts.
        batch: records in canonical types with ``Source.schema()``; may have 0 rows.
        bad: bad records met on the way (``operators.bad_records.SCHEMA``), or None.
        is_split_finished: the split will never deliver anything again.
    """

    split: str
    batch: pa.RecordBatch
    bad: pa.RecordBatch | None = None
    is_split_finished: bool = False


class SourceReader(Protocol):
    """Reads the splits that one subtask owns. All calls come from the mailbox thread, except none.

    A class that derives from it has ended without splits, is polled again after 100 ms, and has nothing to close (N71).
    """

    def splits(self) -> Sequence[str]:
        """Return the names of the splits owned now (finished ones excluded). Cheap."""

    def poll(self) -> SourceBatch | None:
        """Return the next records without blocking for more than a few milliseconds, or None if there are none.

        Each call advances the positions past what it returns. After a call that raised the reader is unusable: every
        further one raises, too (N23, ``connectors.breaking_reader``).
        """

    def is_finished(self) -> bool:
        """Whether all input has ended for good (a bounded source)."""
        return not self.splits()

    def positions(self) -> dict[str, bytes]:
        """Return ``split → position`` of every split owned, finished ones too: where reading would continue."""

    def wakeup_ms(self) -> int:
        """Return how long a mailbox with nothing to do may sleep before it polls again."""
        return 100

    def close(self) -> None:
        """Release resources."""


class Source(Protocol):
    """Configuration of a source."""

    def schema(self) -> pa.Schema:
        """Return the schema of the records, in canonical types. May read metadata; called in the driver.

        Raises:
            UsageError: unreadable path, unknown stream: what, where and what to do.
        """

    def identity(self) -> str:
        """Return a text that changes when positions of an old checkpoint would no longer mean the same."""

    def open(self, context: SourceContext) -> SourceReader:
        """Return a live reader at ``context.positions`` (or at the configured start)."""


@dataclass(frozen=True, slots=True)
class SinkContext:
    """What a sink's writer may know. ``clock_ms`` only goes forward; it is no date (``Clock.monotonic_ms``)."""

    pipeline: str
    node: str
    subtask_index: int
    parallelism: int
    generation: Generation
    schema: pa.Schema
    clock_ms: Callable[[], int] = SYSTEM_CLOCK.monotonic_ms


class SealedTransaction(Protocol):
    """A transaction that takes no more records."""

    def prepare(self) -> bytes | None:
        """Make it durable but invisible; return the committable's payload, or None when it is empty (K4).

        Runs in an upload thread. May be called again after it raised.

        Raises:
            StorageError, FencedError
        """


class SinkWriter(Protocol):
    """Writes the output of one subtask. Called from the mailbox thread."""

    def write(self, batch: pa.RecordBatch) -> None:
        """Add records to the current transaction."""

    def seal(self, checkpoint: CheckpointId) -> SealedTransaction:
        """Close the current transaction as the output of ``checkpoint`` and begin a new one. No I/O."""

    def close(self) -> None:
        """Release resources; what is not prepared is abandoned."""


class Committer(Protocol):
    """Decides prepared transactions. Lives in the driver, called from one thread."""

    def recover(self, keep: Sequence[Committable]) -> None:
        """Fence older generations, then abort everything prepared or open of this (pipeline, sink) not in ``keep``.

        Called once per generation, before workers start and before ``commit`` of the kept ones.

        Raises:
            FencedError: a newer generation already recovered.
        """

    def commit(self, permit: CommitPermit, committables: Sequence[Committable]) -> None:
        """Make these visible, together if the target can. Idempotent: repeating it changes nothing.

        Raises:
            StorageError: transient ones are retried by the caller with the same arguments.
            CorruptionError, UsageError: the target says aborted or unknown (K5): the pipeline stops, unless the error
                is marked with ``errors.gone`` and its user would rather lose the output (K26).
        """

    def close(self) -> None:
        """Release resources."""


class Sink(Protocol):
    """Configuration of a sink."""

    def check(self, schema: pa.Schema) -> None:
        """Check, while the pipeline is being built, that records of ``schema`` can be written.

        Raises:
            UsageError
        """

    def open(self, context: SinkContext) -> SinkWriter:
        """Return a live writer."""

    def open_committer(self, pipeline: str, node: str, generation: Generation) -> Committer:
        """Return the committer of this sink for one generation of the pipeline."""


def owner_of_split(index: int, parallelism: int) -> int:
    """Return the subtask that owns the split at ``index`` of a fixed, ordered list of splits."""
    return index % parallelism


@runtime_checkable
class EndlessSource(Protocol):
    """A source that may have no end, and says so. Optional: one without this method counts as bounded (N40)."""

    def how_to_end(self) -> str | None:
        """Return what would give it an end, such as ``"give rows="``; None when it ends by itself. Cheap."""


@runtime_checkable
class LocatedConnector(Protocol):
    """A source or sink that says what it reads or writes, so that an edited program is not given another's (EV13).

    Optional: others are told apart by their attributes, where they have no names of their own.
    """

    def locations(self) -> tuple[Location, ...]:
        """Return every place that it was given. Cheap; nothing has to be there."""


@dataclass(frozen=True, slots=True)
class HoldContext:
    """Who holds: a source of a pipeline, in one life of it and one generation, which replaces those before it."""

    pipeline: str
    node: str
    life: str
    generation: Generation


@runtime_checkable
class HoldingSource(Protocol):
    """A source that can keep its input from being removed while a checkpoint needs it. Optional."""

    @property
    def holds(self) -> bool:
        """Whether it is to do so."""

    def hold(self, context: HoldContext, needed: Sequence[Mapping[str, bytes]]) -> None:
        """Keep the input that somebody may read again, and nothing else any more.

        Called in the driver, when a generation begins and from time to time. May be repeated.

        Args:
            context: who holds.
            needed: split → position, of every checkpoint that may be restored; empty: everything is needed.

        Raises:
            StorageError: the caller repeats it.
            FencedError: a later generation holds already.
        """


@runtime_checkable
class PiecewiseTransaction(SealedTransaction, Protocol):
    """A transaction whose output goes into the checkpoint piece by piece, so that one of them is in memory (SF13)."""

    @property
    def pieces_count(self) -> int:
        """How many there are; 0: all of it is in what ``prepare`` returns. Asked for in an upload thread."""

    def piece(self, number: int) -> bytes:
        """Return piece ``number``, the first of which is 0. May be asked for again until ``prepare`` was called.

        Raises:
            StorageError
        """

    def prepare(self) -> bytes | None:
        """See ``SealedTransaction``. Called when all pieces are durable."""


@runtime_checkable
class HoldingWriter(SinkWriter, Protocol):
    """A writer that may hold records back over several checkpoints (D13). They are state of the pipeline meanwhile.

    What is written before a ``seal`` is afterwards either in what it returned or in what ``freeze`` returns.
    """

    def freeze(self) -> FrozenState | None:
        """Return the records held back, or None. Called directly after ``seal``, with no record in between."""

    def restore(self, states: Sequence[RestoredState]) -> None:
        """Take over the records of former subtasks that this one continues: each goes to exactly one subtask.

        Called before the first record, not at all when there is nothing. They are held back no longer (D14).
        """

    def finish(self) -> None:
        """All input has ended: no ``seal`` holds anything back any more (D14). May be called again."""


@runtime_checkable
class MakingSink(Sink, Protocol):
    """A sink that makes its target itself, once a run has begun: ``check`` comes before and writes nothing (SC7)."""

    def make_target(self, schema: pa.Schema) -> None:
        """Make the target of records of ``schema``, unless it is there, and check that they fit.

        Called in the driver for every generation, after it was claimed and before committers and writers use the
        target. May be repeated.

        Raises:
            UsageError: the target cannot be made, or became another one since ``check``.
            StorageError: the caller repeats it.
        """


@runtime_checkable
class ExpiringSink(Protocol):
    """A sink whose target ends a transaction by itself that nobody decides. Optional: one without keeps it for ever.

    Attributes:
        transaction_timeout: how long the target keeps what is open or prepared; None: for ever (CS9).
    """

    transaction_timeout: Duration | None


def transaction_timeout_ms(sink: object) -> int | None:
    """Return how long the target of ``sink`` keeps a transaction that nobody decides; None: for ever.

    Raises:
        UsageError: what the sink says is no duration, or not positive.
    """
    timeout = sink.transaction_timeout if isinstance(sink, ExpiringSink) else None
    if timeout is None:
        return None
    found = duration_ms(timeout, "transaction_timeout")
    if found < 1:
        raise UsageError("transaction_timeout must be positive; None says that the target keeps transactions for ever")
    return found


@runtime_checkable
class PiecewiseCommitter(Committer, Protocol):
    """A committer of transactions that were prepared in pieces (``Committable.pieces``)."""

    def read_pieces_with(self, read: Callable[[SnapshotPart], memoryview]) -> None:
        """Remember how a piece is read. Called once, before anything else.

        ``read`` raises StorageError, and CorruptionError if the piece is damaged or gone.
        """


@runtime_checkable
class AskedCommitter(Committer, Protocol):
    """A committer that can be asked what it would deny. Optional: of others it is found out when they commit."""

    def denial(self, committable: Committable) -> str:
        """Return why ``commit`` would raise for good, as a clause; "" if it would not. Changes nothing (SV20).

        Called before ``recover``, beside the committers of older generations.

        Raises:
            StorageError
        """


@runtime_checkable
class ForgettingCommitter(Committer, Protocol):
    """A committer whose target remembers how each transaction was decided. Optional: one without never forgets."""

    def forget(self, before: CheckpointId) -> None:
        """Forget outcomes of checkpoints below ``before``: no checkpoint that is retained promises any of them (K20).

        Called at every start and now and then while it runs, never beside ``commit``; best effort (K25).

        Raises:
            StorageError, FencedError
        """


@runtime_checkable
class NamingCommitter(Committer, Protocol):
    """A committer whose target remembers outcomes under names that say no checkpoint. Optional."""

    def forget_all_but(self, before: CheckpointId, promised: Sequence[Committable]) -> None:
        """As ``ForgettingCommitter.forget``; ``promised``: what retained checkpoints name, which stays (K20).

        Raises:
            StorageError, FencedError
        """


@runtime_checkable
class TidyingCommitter(Committer, Protocol):
    """A committer whose ``recover`` also removes what nobody needs any more. Optional.

    What only tidies up does not fail ``recover``: a run is worth more than a clean target (K24).
    """

    def left_behind(self) -> str:
        """Return why ``recover`` had to leave something that nobody needs for the next one, "" if it did not."""


@runtime_checkable
class OwnedSink(Sink, Protocol):
    """A sink whose target remembers which life of the pipeline writes to it (docs/spec/lives.md).

    Optional: a sink without these methods is not asked, and cannot tell a pipeline that starts over from one that
    goes on. All calls come from the driver, before a generation is claimed, and may be repeated.
    """

    def owner(self, pipeline: str, node: str) -> Owner:
        """Return what the target remembers; ``Owner()`` when it knows nothing of this sink. Changes nothing.

        ``others``: which other sinks of a pipeline of that name have written to the same target, as it remembers them.
        One of them may be this sink under its former name (LV9).

        Raises:
            StorageError
        """

    def own(self, pipeline: str, node: str, life: Life) -> Owner:
        """Remember ``life`` durably, in one step, if ``lives.may_own`` says so; return who owns the target then.

        Raises:
            StorageError: the caller repeats it.
        """

    def how_to_forget(self, pipeline: str, node: str) -> str:
        """Return what a user does so that the target lets the next life have it, such as a command."""


@runtime_checkable
class NeighbouringSink(OwnedSink, Protocol):
    """A sink whose target lists all sinks of a pipeline in ``Owner.others``, so that one answer is that of all (LV11).

    Optional: without it each sink is asked for itself.
    """

    @property
    def shared_target(self) -> str:
        """Return which target it is: sinks of one class with the same one share it."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What starting over would delete at a target.

    Attributes:
        what: for people, such as ``12 files with 1,234 records``; "" when there is nothing.
        where: the directory, stream or place it is in.
        stays: names of what somebody else has put there.
        problem: why it cannot be deleted, and what to do, as a sentence; "" when it can.
    """

    what: str
    where: str
    stays: tuple[str, ...] = ()
    problem: str = ""


KEPT = (
    "was made to forget whose it is, so it keeps what it holds; to start over, empty it yourself, or give the sink "
    "another place"
)
"""What stands against a target of which nobody knows any more who wrote it (SO4)."""


@runtime_checkable
class ResettableSink(OwnedSink, Protocol):
    """A sink whose target can be emptied, so that the pipeline starts over (docs/spec/starting-over.md).

    Optional: a pipeline with a sink that keeps something and has no such methods cannot be reset.
    """

    def recorded(self, node: str) -> Target:
        """Return what the sink called ``node`` writes to, as it is written down at each start."""

    def holding(self, pipeline: str, node: str, mine: Mine) -> Holding:
        """Return what is there of this sink. Changes nothing.

        ``mine`` says whose output would go, where several sinks write to one target.

        Raises:
            CorruptionError, StorageError
        """

    def start_over(self, pipeline: str, node: str, generation: Generation, life: Life, mine: Mine) -> None:
        """Fence all generations before ``generation``, delete what they wrote, then let ``life`` own the target.

        In this order, so that a call that was cut short can be repeated. Does nothing if ``life`` owns it already.
        ``mine`` as for ``holding``; whose the target is, was asked a moment ago.

        Raises:
            FencedError: a newer generation owns the target.
            UsageError: somebody else's output is among it.
            CorruptionError, StorageError: repeating is safe.
        """


class BreakingReader(ABC):
    """A reader that is unusable after its first failure, and says so each time: it never seems to be at its end (N23).

    What the failing call had taken is neither delivered nor put back; another reader begins at the last positions
    that were asked for.
    """

    _failure: Exception | None = None

    def poll(self) -> SourceBatch | None:
        """See ``SourceReader``."""
        self._refuse_if_broken()
        try:
            return self._poll()
        except Exception as error:
            self._failure = error
            raise

    def is_finished(self) -> bool:
        """See ``SourceReader``."""
        return self._failure is None and self._has_ended()

    def positions(self) -> dict[str, bytes]:
        """See ``SourceReader``."""
        self._refuse_if_broken()
        return self._positions()

    def _refuse_if_broken(self) -> None:
        if self._failure is not None:
            raise self._failure

    @abstractmethod
    def _poll(self) -> SourceBatch | None:
        """Do what ``poll`` does."""

    @abstractmethod
    def _has_ended(self) -> bool:
        """Return whether all input has ended, if nothing failed."""

    @abstractmethod
    def _positions(self) -> dict[str, bytes]:
        """Return a position for each split owned, finished ones too."""


@dataclass(frozen=True, slots=True)
class CheckpointMarker:
    """What ``poll`` returns in place of records: reading ``split`` has come to the marker of a checkpoint.

    The position of the split is behind the marker, and the split is not read on before ``read_on`` names it.
    """

    split: str
    checkpoint_id: int


Polled: TypeAlias = SourceBatch | CheckpointMarker | None
"""What ``poll`` returns."""


@runtime_checkable
class InducedReader(Protocol):
    """A reader that sets the barriers of its subtask. Triggers of the coordinator do not (C47).

    Each split that is not finished meets the marker of each checkpoint, in the order of their ids. A marker that comes
    twice, or of a checkpoint that was given up, does no harm. A checkpoint whose marker is not met expires. Everything
    else is as ``SourceReader`` says.
    """

    def splits(self) -> Sequence[str]:
        """See ``SourceReader``."""

    def poll(self) -> Polled:
        """Return the next records, or the marker that is next in a split, or None. See ``SourceReader``."""

    def read_on(self, splits: Sequence[str]) -> None:
        """Read these splits on, which stand still since their markers."""

    def is_finished(self) -> bool:
        """See ``SourceReader``."""

    def positions(self) -> dict[str, bytes]:
        """See ``SourceReader``."""

    def wakeup_ms(self) -> int:
        """See ``SourceReader``."""

    def close(self) -> None:
        """See ``SourceReader``."""


AnyReader: TypeAlias = SourceReader | InducedReader


class InducedSource(Protocol):
    """Configuration of a source whose readers set their own barriers; see ``connectors.base.Source``."""

    def schema(self) -> pa.Schema:
        """See ``Source``."""

    def identity(self) -> str:
        """See ``Source``."""

    def open(self, context: SourceContext) -> InducedReader:
        """See ``Source``."""
