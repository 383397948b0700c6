"""What a source, a sink, its writer or its committer may offer beside the contract (``connectors.base``).

All of it is optional: the runtime asks for each with ``isinstance``, and does without it otherwise. What a sink offers
for its target's owner is in ``connectors.owned_sinks``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import pyarrow as pa

from headgate.connectors.base import Committer, SealedTransaction, Sink, SinkWriter
from headgate.errors import UsageError
from headgate.model.config import Duration, duration_ms
from headgate.model.ids import CheckpointId, Generation
from headgate.model.lineage import Location
from headgate.model.manifest import Committable, SnapshotPart
from headgate.operators.base import RestoredState
from headgate.state.frozen import FrozenState


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
