"""What sources and sinks are to the runtime: the contract that all of them fulfil.

What some of them do beside it is in ``connectors.offers`` and ``connectors.owned_sinks``.

A ``Source`` or ``Sink`` is plain configuration that travels to the workers; ``open`` makes the live half.

Exactly-once, source side: a reader's ``positions`` are frozen with every snapshot and given back on restore; the
reader then delivers exactly what followed them. Splits are owned by a deterministic rule (``owner_of_split``), so
no assignment has to be agreed upon.

Exactly-once, sink side: ``seal`` at the barrier closes the current transaction in memory, ``prepare`` (in an upload
thread) makes it durable and invisible and returns the committable's payload, which goes into the snapshot; the
*coordinator* commits with ``Sink.open_committer`` once the checkpoint is completed (docs/spec/two-phase-commit.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from headgate.clock import SYSTEM_CLOCK
from headgate.model.ids import CheckpointId, Generation
from headgate.model.life import NO_GENERATION
from headgate.model.lineage import Relocation
from headgate.model.manifest import Committable
from headgate.protocol.checkpoints.commit import CommitPermit


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
