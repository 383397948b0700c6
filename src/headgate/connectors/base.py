"""The contract of sources, sinks and hooks: what the runtime calls, and what it gives them.

A ``Source`` or ``Sink`` is plain configuration that travels to the workers; ``open`` makes the live half.

Exactly-once, source side: a reader's ``positions`` are part of every snapshot and given back on restore; the reader
then delivers exactly what followed them. Splits are owned by a deterministic rule (``owner_of_split``), so that no
assignment has to be agreed upon.

Exactly-once, sink side: ``seal`` at the barrier closes the current transaction in memory, ``prepare`` (in an upload
thread) makes it durable and invisible and returns the committable's payload, which goes into the snapshot; the
coordinator commits with ``Sink.open_committer`` once the checkpoint is completed (docs/spec/two-phase-commit.md).

A ``CoordinatorHook`` takes part in checkpoints in the driver, for an external system (docs/spec/induced.md); modelled
on Flink's ``MasterTriggerRestoreHook`` and the ``ReaderCheckpointHook`` of Pravega's connector.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import pyarrow as pa

from headgate.environment import SYSTEM_CLOCK
from headgate.errors import UsageError
from headgate.model.config import Duration, duration_ms
from headgate.model.ids import CheckpointId, Generation
from headgate.model.lineage import Location, Relocation
from headgate.model.manifest import Committable, SnapshotPart
from headgate.model.pipeline_identity import NO_GENERATION, Mine, Owner, PipelineIdentity, Target, TargetKind
from headgate.operators.base import RestoredState
from headgate.protocol.checkpoints.commit import CommitPermit
from headgate.state.snapshot import FrozenState


@dataclass(frozen=True, slots=True)
class SourceContext:
    """What a reader may know.

    Attributes:
        positions: the union over all former subtasks, or None on a first start.
        clock_ms: only goes forward; it is no date (``Clock.monotonic_ms``).
        life: identifies the pipeline since its last reset; "": not known, and nothing is recorded in its name.
        takes_checkpoints: periodically, not only on request or at the end.
        schema: what ``Source.schema`` returned when the pipeline was built; None: not known. What the source reads
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
        bad: bad records met on the way (``operators.user_functions.BAD_RECORD_SCHEMA``), or None.
        is_split_finished: the split will never deliver anything again.
        watermark_ms: no record of the split after these is as early as that, as its writers say; None: they say
            nothing about event time.
        written_ms: when its last record was written, by the clock of what keeps it; None: not known.
    """

    split: str
    batch: pa.RecordBatch
    bad: pa.RecordBatch | None = None
    is_split_finished: bool = False
    written_ms: int | None = None
    watermark_ms: int | None = None


@dataclass(frozen=True, slots=True)
class SplitPosition:
    """How far a split was read, as numbers for people. Recovery goes by ``SourceReader.positions``.

    Attributes:
        position: where reading continues: an offset, a number of records or bytes, the highest id.
        end: the position at which the split ends now; None: not known.
        unit: what positions count: ``"records"`` or ``"bytes"``; the same for all splits of a source.
        undecided: what follows ``end`` and cannot be read until an open transaction ends.
    """

    position: int
    end: int | None = None
    unit: Literal["records", "bytes"] = "records"
    undecided: int = 0


class SourceReader(Protocol):
    """Reads the splits that one subtask owns. All calls come from the mailbox thread, except none.

    A class that derives from it has ended without splits, is polled again after 100 ms, and has nothing to close.
    """

    def splits(self) -> Sequence[str]:
        """Return the names of the splits owned now (finished ones excluded). Cheap."""

    def poll(self) -> SourceBatch | None:
        """Return the next records without blocking for more than a few milliseconds, or None if there are none.

        Each call advances the positions past what it returns. After a call that raised the reader is unusable: every
        further one raises, too (``FailStopReader``).
        """

    def is_finished(self) -> bool:
        """Whether all input has ended for good (a bounded source)."""
        return not self.splits()

    def positions(self) -> dict[str, bytes]:
        """Return ``split → position`` of every split owned, finished ones too: where reading would continue."""

    def progress(self) -> Mapping[str, SplitPosition]:
        """Return ``split → how far it was read`` of the splits that this is known of, for progress, page and metrics.

        Called twice a second between polls: it returns what ``poll`` has met, and must not wait. Default: no split.
        """
        return {}

    def wakeup_ms(self) -> int:
        """Return how long a mailbox with nothing to do may sleep before it polls again."""
        return 100

    def close(self) -> None:
        """Release resources."""


def owner_of_split(index: int, parallelism: int) -> int:
    """Return the subtask that owns the split at ``index`` of a fixed, ordered list of splits."""
    return index % parallelism


@dataclass(frozen=True, slots=True)
class HoldContext:
    """The holder: a source of a pipeline in one generation, which replaces earlier ones."""

    pipeline: str
    node: str
    life: str
    generation: Generation


class FailStopReader(ABC):
    """A reader that is unusable after its first failure, and says so each time: it never seems to be at its end.

    What the failing call had taken is neither delivered nor put back; another reader begins at the last positions
    that were asked for.
    """

    _failure: Exception | None = None

    def poll(self) -> SourceBatch | None:
        self._refuse_if_broken()
        try:
            return self._poll()
        except Exception as error:
            # kept: what this call had taken is lost to the reader, and positions would be after it
            self._failure = error
            raise

    def is_finished(self) -> bool:
        return self._failure is None and self._has_ended()

    def positions(self) -> dict[str, bytes]:
        self._refuse_if_broken()
        return self._positions()

    def progress(self) -> Mapping[str, SplitPosition]:
        return {}

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

    The position of the split is after the marker, and the split is not read on before ``read_on`` names it.
    """

    split: str
    checkpoint_id: int


Polled: TypeAlias = SourceBatch | CheckpointMarker | None
"""What ``poll`` returns."""


@runtime_checkable
class InducedReader(Protocol):
    """A reader that sets the barriers of its subtask. Triggers of the coordinator do not (C47).

    Each split that is not finished meets the marker of each checkpoint, in the order of their ids. A marker that comes
    twice, or of a checkpoint that was given up, does no harm. A checkpoint expires if its marker is not met. Everything
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


@runtime_checkable
class PausableReader(Protocol):
    """What a reader has, too, if its splits can wait for each other, so that they are read side by side (W20)."""

    def pause(self, splits: Collection[str]) -> None:
        """Return no records of these splits until the next call, which names all that are paused from then on."""

    def is_behind(self, split: str) -> bool:
        """Whether it is known that ``split`` has more records, although ``poll`` may return None now. Cheap."""


@runtime_checkable
class EncodingReader(Protocol):
    """What a reader has, too, if it may leave text encoded, as its input has it: what follows decodes what it needs."""

    def keep_text_encoded(self) -> None:
        """From now on, text columns of batches may be dictionaries of ``large_string``, with places of four bytes.

        Called before the first batch. Values that no row has may be in a dictionary.
        """


@runtime_checkable
class PartsReader(Protocol):
    """What a reader has, too, if its input has parts that are read one after the other, in all subtasks."""

    @property
    def ended_parts(self) -> int:
        """How many parts this subtask has read to their end. Cheap; asked often."""

    def begin_part(self, number: int) -> None:
        """All subtasks have read the parts in front of part ``number``, the first of which is 0, to their end.

        Called between checkpoints: each checkpoint finds all subtasks in front of it, or all after it.
        """


AnyReader: TypeAlias = SourceReader | InducedReader


class Source(ABC):
    """Base class of sources. A source is configuration that travels to the workers."""

    @abstractmethod
    def schema(self) -> pa.Schema:
        """Return the schema of the records, in canonical types. May read metadata; called in the driver.

        Raises:
            UsageError: unreadable path, unknown stream: what, where and what to do.
        """

    @abstractmethod
    def identity(self) -> str:
        """Return a text that changes when positions of an old checkpoint would no longer mean the same."""

    @abstractmethod
    def open(self, context: SourceContext) -> AnyReader:
        """Return a live reader at ``context.positions`` (or at the configured start)."""

    def how_to_end(self) -> str | None:
        """Return what gives an endless source an end, such as ``"give rows="``; None: it ends by itself."""
        return None

    def changes(self) -> tuple[tuple[str, ...], bool] | None:
        """Return keys and whether there are retractions, if it reads a stream with changes; None: plain records."""
        return None

    def project(self, columns: Sequence[str]) -> tuple[Source, pa.Schema] | None:
        """Return a source of the same records with these columns and as few others as it can, and their schema.

        Positions mean the same. Called in the driver, after ``schema``; ``columns`` are some of it. None: it reads all.
        """
        return None

    def locations(self) -> tuple[Location, ...] | None:
        """Return every place that it was given; None: its attributes tell it from others. Cheap."""
        return None

    @property
    def holds(self) -> bool:
        """Whether it keeps its input from being removed while a checkpoint needs it."""
        return False

    def hold(self, context: HoldContext, needed: Sequence[Mapping[str, bytes]]) -> None:
        """Keep the input that may be read again, and release everything else. Only if it ``holds``.

        Called in the driver, when a generation begins and from time to time. May be repeated.

        Args:
            context: the holder.
            needed: split → position, of every checkpoint that may be restored; empty: everything is needed.

        Raises:
            StorageError: the caller repeats it.
            FencedError: a later generation holds already.
        """
        raise NotImplementedError

    @property
    def publishes(self) -> bool:
        """Whether what it reads is to know how far checkpoints have read."""
        return False

    def publish(
        self, context: HoldContext, checkpoint: CheckpointId | None, positions: Mapping[str, bytes], *, begins: bool
    ) -> None:
        """Let what it reads know how far a completed checkpoint has read. Only if it ``publishes``.

        Called in the driver: when a generation begins, with what it restores, and for completed checkpoints, of which
        some may be left out when others follow soon. May be repeated.

        Args:
            context: the holder.
            checkpoint: None: a generation begins without one.
            positions: split → position; empty: nothing was read.
            begins: a generation begins there.

        Raises:
            StorageError: the caller repeats it, with a later checkpoint.
            FencedError: a later generation has published already.
            UsageError: others use what is published, too; the pipeline ends.
        """
        raise NotImplementedError

    def coordinator_hook(self) -> CoordinatorHook | None:
        """Return a hook that goes with the source, or None. Called once, when the pipeline is built."""
        return None

    def without_hook(self) -> Source:
        """Return a source of the same records that skips markers, for runs that change nothing outside."""
        return self


def check_is_source(given: object) -> None:
    """Refuse what is no source.

    Raises:
        UsageError
    """
    if not isinstance(given, Source):
        raise UsageError(
            f"a source such as headgate.TextFiles('logs/') is needed, not {type(given).__name__}; a Spark DataFrame "
            "is wrapped as headgate.DataFrameSource(df), rows as headgate.FromRows(rows); derive your own source "
            "from headgate.connectors.base.Source"
        )


@dataclass(frozen=True, slots=True)
class SinkContext:
    """What a sink's writer may know.

    Attributes:
        clock_ms: only goes forward; it is no date (``Clock.monotonic_ms``).
        event_delay_ms: by how much what windows emit may be earlier than the watermark; None: the records have no event
            times.
    """

    pipeline: str
    node: str
    subtask_index: int
    parallelism: int
    generation: Generation
    schema: pa.Schema
    clock_ms: Callable[[], int] = SYSTEM_CLOCK.monotonic_ms
    event_delay_ms: int | None = None


class SealedTransaction:
    """Base class of transactions that take no more records."""

    @property
    def pieces_count(self) -> int:
        """How many pieces of output go into the checkpoint one by one; 0: all is in what ``prepare`` returns.

        Asked for in an upload thread. With pieces only one of them has to be in memory at a time.
        """
        return 0

    def piece(self, number: int) -> bytes:
        """Return piece ``number``, the first of which is 0. May be asked for again until ``prepare`` was called.

        Raises:
            StorageError
        """
        raise NotImplementedError

    def prepare(self) -> bytes | None:
        """Make it durable but invisible; return the committable's payload, or None when it is empty (K4).

        Runs in an upload thread, when all pieces are durable. May be called again after it raised.

        Raises:
            StorageError, FencedError
        """
        raise NotImplementedError


class EmptyTransaction(SealedTransaction):
    """A transaction without output."""

    def prepare(self) -> bytes | None:
        """Return None (K4)."""
        return None


class SinkWriter:
    """Base class of writers: the output of one subtask. Called from the mailbox thread.

    A writer with ``can_hold_back`` may hold records back over several checkpoints. They are state of the pipeline
    meanwhile: what is written before a ``seal`` is afterwards either in what it returned or in what ``freeze`` returns.
    """

    can_hold_back = False

    def write(self, batch: pa.RecordBatch) -> None:
        """Add records to the current transaction."""
        raise NotImplementedError

    def on_watermark(self, watermark_ms: int) -> None:
        """Event time advanced."""

    def on_idle(self, is_idle: bool) -> None:
        """Event time does not advance for now, or does again."""

    def seal(self, checkpoint: CheckpointId) -> SealedTransaction:
        """Close the current transaction as the output of ``checkpoint`` and begin a new one. No I/O."""
        raise NotImplementedError

    def freeze(self) -> FrozenState | None:
        """Return the records held back, or None. Called directly after ``seal``, with no record in between."""
        return None

    def restore(self, states: Sequence[RestoredState]) -> None:
        """Take over the records of former subtasks that this one continues: each goes to exactly one subtask.

        Called before the first record, not at all when there is nothing. They are held back no longer.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """All input has ended: no ``seal`` holds anything back any more. May be called again."""

    def close(self) -> None:
        """Release resources; what is not prepared is abandoned."""


class Committer:
    """Base class of committers, which decide prepared transactions. Lives in the driver, called from one thread.

    Attributes:
        knows_outcomes: ``denial`` tells what ``commit`` would do. Of other committers it shows when they commit.
        can_forget: the target remembers how transactions were decided, and ``forget`` removes such outcomes.
    """

    knows_outcomes = False
    can_forget = False

    def read_pieces_with(self, read: Callable[[SnapshotPart], memoryview]) -> None:
        """Remember how a piece is read (``Committable.pieces``). Called once, before anything else.

        ``read`` raises StorageError, and CorruptionError if the piece is damaged or gone.
        """

    def recover(self, keep: Sequence[Committable]) -> None:
        """Fence older generations, then abort everything prepared or open of this (pipeline, sink) not in ``keep``.

        Called once per generation, before workers start and before ``commit`` of the kept ones.

        Raises:
            FencedError: a newer generation already recovered.
        """
        raise NotImplementedError

    def left_behind(self) -> str:
        """Return what is not needed any more and ``recover`` could not remove, with the reason; "" for nothing.

        Such a failure does not fail ``recover``: a run is worth more than a clean target.
        """
        return ""

    def commit(self, permit: CommitPermit, committables: Sequence[Committable]) -> None:
        """Make these visible, together if the target can. Idempotent: repeating it changes nothing.

        Raises:
            StorageError: transient ones are retried by the caller with the same arguments.
            CorruptionError, UsageError: the target says aborted or unknown (K5): the pipeline stops, unless the error
                is marked with ``errors.gone`` and its user would rather lose the output.
        """
        raise NotImplementedError

    def denial(self, committable: Committable) -> str:
        """Return why ``commit`` would raise for good, as a clause; "" if it would not. Changes nothing (SV20).

        Called before ``recover``, at the same time as committers of older generations.

        Raises:
            StorageError
        """
        raise NotImplementedError

    def may_have_forgotten(self, committable: Committable) -> bool:
        """Return whether the target may have committed this, and ``commit`` would show it twice. Changes nothing.

        Asked before ``recover``, of output that a checkpoint from another directory promised (SV20).

        Raises:
            StorageError
        """
        return self.can_forget and not self.knows_outcomes

    def forget(self, before: CheckpointId, promised: Callable[[], Sequence[Committable]]) -> None:
        """Forget outcomes that no retained checkpoint can ask for: those of checkpoints below ``before`` (K20).

        ``promised`` returns what retained checkpoints name, for targets with names that contain no checkpoint. Called
        at every start and now and then while it runs, never during ``commit``; best effort.

        Raises:
            StorageError, FencedError
        """

    def close(self) -> None:
        """Release resources."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What a reset would delete at a target.

    Attributes:
        what: for people, such as ``12 files with 1,234 records``; "" when there is nothing.
        where: the directory, stream or place it is in.
        stays: names of what others have put there.
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
"""Why a target with a forgotten owner is not emptied (SO4)."""


class Sink:
    """Base class of sinks. A sink is configuration that travels to the workers.

    A sink has at least ``open`` and ``open_committer``. The other methods have defaults; the attributes say which of
    them it has.

    Attributes:
        is_transactional: readers see output of completed checkpoints only. False: it writes at once, and may repeat it.
        transaction_timeout: after this time the target itself ends a transaction that is open or prepared (CS9). None:
            it never does.
        renews_transactions: writers renew that time until the transaction is decided, so that it counts from when
            their process ended.
        has_owner: the target remembers which pipeline writes to it: ``owner``, ``own`` and ``how_to_forget``
            (docs/spec/lives.md). A transactional sink without is refused. All these calls come from the driver,
            before a generation is claimed, and may be repeated.
        can_be_reset: the target can be emptied so that the pipeline starts over: ``holding`` and ``start_over``
            (docs/spec/starting-over.md). A pipeline with a sink that keeps output and cannot be reset cannot either.
    """

    is_transactional = True
    transaction_timeout: Duration | None = None
    renews_transactions = False
    has_owner = False
    can_be_reset = False

    def check(self, schema: pa.Schema) -> None:
        """Check, while the pipeline is being built, that records of ``schema`` can be written.

        The default accepts every schema.

        Raises:
            UsageError: they cannot.
        """

    def for_changes(self, keys: tuple[str, ...] | None, *, retractions: bool) -> Sink:
        """Return the sink that writes a stream with changes; the default writes them as records with a column ``op``.

        Args:
            keys: the columns that identify a row; none: they are not known. None: the stream has plain records.
            retractions: whether updates are two records.

        Raises:
            UsageError: it cannot write such a stream.
        """
        return self

    def make_target(self, schema: pa.Schema) -> None:
        """Make the target of records of ``schema``, unless it is there, and check that they fit.

        Called in the driver for every generation, after it was claimed and before committers and writers use the
        target. May be repeated. The default does nothing.

        Raises:
            UsageError: the target cannot be made, or became another one since ``check``.
            StorageError: the caller repeats it.
        """

    def open(self, context: SinkContext) -> SinkWriter:
        """Return a live writer."""
        raise NotImplementedError

    def open_committer(self, pipeline: str, node: str, generation: Generation) -> Committer:
        """Return the committer of this sink for one generation of the pipeline."""
        raise NotImplementedError

    def locations(self) -> tuple[Location, ...] | None:
        """Return every place that it was given; None: its attributes tell it from others. Cheap."""
        return None

    @property
    def shared_target(self) -> object:
        """Return which target it is, if ``Owner.others`` lists all sinks of a pipeline there; else None (LV11).

        Sinks of one class with the same target are then asked once.
        """
        return None

    def owner(self, pipeline: str, node: str) -> Owner:
        """Return what the target remembers; ``Owner()`` when it knows nothing of this sink. Changes nothing.

        ``others``: which other sinks of a pipeline of that name have written to the same target, as it remembers them.
        One of them may be this sink under its former name.

        Raises:
            StorageError
        """
        raise NotImplementedError

    def own(self, pipeline: str, node: str, life: PipelineIdentity) -> Owner:
        """Remember ``life`` durably, in one step, if ``ownership.may_own`` allows it; return the owner then.

        Raises:
            StorageError: the caller repeats it.
        """
        raise NotImplementedError

    def how_to_forget(self, pipeline: str, node: str) -> str:
        """Return what a user does so that the target takes the next pipeline as owner, such as a command."""
        raise NotImplementedError

    def recorded(self, node: str) -> Target:
        """Return what the sink called ``node`` writes to, as it is recorded at each start."""
        return Target(node, TargetKind.OWN, type(self).__name__)

    def holding(self, pipeline: str, node: str, mine: Mine) -> Holding:
        """Return what the target holds of this sink. Changes nothing.

        ``mine`` says whether output of an owner would go, where several sinks write to one target.

        Raises:
            CorruptionError, StorageError
        """
        raise NotImplementedError

    def start_over(self, pipeline: str, node: str, generation: Generation, life: PipelineIdentity, mine: Mine) -> None:
        """Fence all generations before ``generation``, delete what they wrote, then let ``life`` own the target.

        In this order, so that a call that was cut short can be repeated. Does nothing if ``life`` owns it already.
        ``mine`` as for ``holding``; the owner was asked a moment ago.

        Raises:
            FencedError: a newer generation owns the target.
            UsageError: output of others is among it.
            CorruptionError, StorageError: repeating is safe.
        """
        raise NotImplementedError


def check_is_sink(given: object) -> None:
    """Refuse what is no sink.

    Raises:
        UsageError
    """
    if not isinstance(given, Sink):
        raise UsageError(
            f"a sink such as headgate.StreamSink('scope/stream') is needed, not {given!r}; derive your own from "
            "headgate.TwoPhaseSink or headgate.LedgerSink"
        )


def transaction_timeout_ms(sink: Sink) -> int | None:
    """Return how long the target of ``sink`` keeps an undecided transaction; None: for ever.

    Raises:
        UsageError: the sink's timeout is no duration, or not positive.
    """
    if sink.transaction_timeout is None:
        return None
    found = duration_ms(sink.transaction_timeout, "transaction_timeout")
    if found < 1:
        raise UsageError("transaction_timeout must be positive; None says that the target keeps transactions for ever")
    return found


HOOK_TIMEOUT: Duration = "10s"


class AskAgain(Enum):
    """The type of ``ASK_AGAIN``, which ``trigger`` returns while its snapshot is not complete yet."""

    ASK_AGAIN = "ask again"


ASK_AGAIN = AskAgain.ASK_AGAIN
"""Returned by the ``trigger`` of a hook that has begun a snapshot which other processes complete. Headgate calls
``trigger`` again a few milliseconds later, until the checkpoint ends or its timeout has passed."""


@dataclass(frozen=True, slots=True)
class HookContext:
    """The run of a pipeline that calls a hook.

    Attributes:
        pipeline: the name of the pipeline.
        hook: the name under which the hook was added.
        generation: a number that rises with every start and restart of the pipeline. Pass it to the external system, so
            that the system can refuse calls of a replaced driver that is still alive somewhere.
        life: identifies the life of the pipeline; a pipeline that starts over has another life.
        home: the checkpoint directory of the pipeline, as a URL.
    """

    pipeline: str
    hook: str
    generation: int
    life: str = ""
    home: str = ""


class CoordinatorHook(ABC):
    """Base class for an external system that takes its own snapshot with every checkpoint, and goes back to it.

    The driver has one object for the whole run. A thread of the hook's own makes all calls, one after another; each
    must end within the hook's timeout. If the hook is also a ``CheckpointListener``, it hears how checkpoints end.

    Attributes:
        timeout: the timeout of each call, for a hook that a source brings along. For other hooks, the timeout of
            ``add_hook`` counts. With ``"365d"`` or more, checkpoints wait for ``trigger`` however long it takes.
    """

    timeout: Duration = HOOK_TIMEOUT

    def open(self, context: HookContext) -> None:  # noqa: B027 - a default
        """Called when a generation begins, so again with every restart. ``restore`` or ``reset`` follows.

        Default: does nothing.
        """

    @abstractmethod
    def trigger(self, checkpoint_id: int) -> bytes | AskAgain | None:
        """Take part in a checkpoint, and return the data that ``restore`` will need, at most 1 MiB.

        Headgate stores the data in the manifest. It calls ``trigger`` before it triggers any source. If ``trigger``
        raises or exceeds its timeout, the checkpoint is aborted, and ``trigger`` is called again later with a higher
        number; what the aborted call did in the external system must not matter then. A checkpoint may still be
        aborted after its ``trigger`` succeeded. If the snapshot takes a while, return ``ASK_AGAIN`` to be called
        again.
        """

    @abstractmethod
    def restore(self, checkpoint_id: int, data: bytes | None) -> None:
        """Go back to the moment at which ``trigger(checkpoint_id)`` returned ``data``: a generation begins there.

        ``data`` is None if ``trigger`` returned nothing, or if the checkpoint is older than the hook. The call may be
        repeated. A start that names a savepoint or a checkpoint passes the data that this one holds, although it has
        another number in this pipeline. The pipeline that took it may already have used the numbers that
        follow, so make sure that no reader meets markers of that pipeline.
        """

    @abstractmethod
    def reset(self) -> None:
        """Go back to the very beginning: a generation begins without any checkpoint.

        It need not be the first generation. The call may be repeated.
        """

    def close(self) -> None:  # noqa: B027 - a default
        """Called when the run has ended. Default: does nothing."""
