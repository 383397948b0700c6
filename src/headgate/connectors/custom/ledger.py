"""``LedgerSink``: sinks of users whose targets have transactions, but cannot prepare one.

The records of a checkpoint are kept in the checkpoint. When it is completed the driver publishes them in one
transaction of the target, together with their names: a target that has the name has the records. The shape of Flink's
``GenericWriteAheadSink``, whose two steps are one here. Rules CS1–CS8 of docs/spec/connectors.md.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NoReturn

import pyarrow as pa

from headgate.connectors.base import SinkContext
from headgate.connectors.custom.fence import Fence, OutputName, in_order, owner_of, transient
from headgate.connectors.custom.output import LedgerOutput, PieceReader, checkpoint_of, encode_index, encode_whole
from headgate.connectors.custom.owned import RememberingSink, with_life
from headgate.connectors.custom.pieces import PieceBuffer
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Committable, SnapshotPart
from headgate.protocol.checkpoints.commit import CommitPermit

INLINE_BYTES_MAX = 64 << 10
"""Output of no more bytes is no piece, but in the manifest."""


class LedgerSink(RememberingSink):
    """Base class of sinks for a target with ordinary transactions, such as a SQL database.

    ``publish`` writes the records of a checkpoint and their names into the target, all or nothing. The driver calls all
    methods, and may repeat each call after it raised or after its answer was lost. However large the output of a
    checkpoint is, a worker and the driver each hold only about ``piece_bytes`` of it in memory at a time.

    Attributes:
        transient_errors: exceptions of the target after which another try may help. All others stop the pipeline.
        piece_bytes: after this many bytes of records, a new piece begins.
    """

    transient_errors: tuple[type[Exception], ...] = (OSError,)
    piece_bytes: int = 8 << 20

    # -- what users write -------------------------------------------------------------------------------------------

    @abstractmethod
    def publish(self, outputs: Sequence[LedgerOutput], fence: Fence) -> None:
        """In one transaction, compare ``fence``, then write the records and the name of each of ``outputs``.

        Skip an output if the ledger already has its name; look this up in the same transaction. Iterating over an
        output reads its records, a batch at a time. If the iteration raises, roll the transaction back.

        Raises:
            FencedError: a newer generation or another life has claimed the target (``fence.refuse_if_replaced_by``).
                Nothing must be written then.
        """

    def forget(self, owner: str, before: int) -> None:
        """Remove the names of ``owner`` that belong to checkpoints below ``before``: they are not needed any more.

        ``output_checkpoint(name)`` returns the checkpoint of a name. The default does nothing, so the ledger grows.
        """

    def check(self, schema: pa.Schema) -> None:
        """Check, while the pipeline is being built, that records of this schema can be written.

        The default accepts every schema.

        Raises:
            UsageError: they cannot.
        """

    # -- what the runtime calls -------------------------------------------------------------------------------------

    def open(self, context: SinkContext) -> _Writer:
        """See ``connectors.base.Sink``."""
        return _Writer(context, self.piece_bytes)

    def open_committer(self, pipeline: str, node: str, generation: Generation) -> _Committer:
        """See ``connectors.base.Sink``."""
        forgets = type(self).forget is not LedgerSink.forget
        kind = _ForgettingCommitter if forgets else _Committer
        return kind(self, Fence(owner_of(pipeline, node), int(generation)))


def output_checkpoint(name: str) -> int:
    """Return the checkpoint that an output belongs to, by the name that ``LedgerSink.publish`` received.

    Raises:
        UsageError: the text is not such a name.
    """
    return checkpoint_of(name)


class _Writer:
    """Keeps the records of the checkpoint that comes."""

    def __init__(self, context: SinkContext, piece_bytes: int) -> None:
        self._context, self._piece_bytes = context, piece_bytes
        self._records = self._fresh()
        self._sealed: list[_Sealed] = []

    def write(self, batch: pa.RecordBatch) -> None:
        """See ``SinkWriter``.

        Raises:
            StorageError: a temporary file cannot be written.
        """
        self._records.add(batch)

    def seal(self, checkpoint: CheckpointId) -> _Sealed:
        """See ``SinkWriter``."""
        context = self._context
        owner = owner_of(context.pipeline, context.node)
        name = OutputName(owner, int(checkpoint), context.subtask_index, int(context.generation))
        sealed = _Sealed(str(name), self._records)
        self._records = self._fresh()
        self._sealed = [one for one in self._sealed if not one.is_over]
        self._sealed.append(sealed)
        return sealed

    def close(self) -> None:
        """What is not prepared is abandoned."""
        self._records.close()
        for sealed in self._sealed:
            sealed.close()

    def _fresh(self) -> PieceBuffer:
        return PieceBuffer(self._context.schema, self._piece_bytes)


class _Sealed:
    """The records of one checkpoint and subtask: see ``PiecewiseTransaction``."""

    def __init__(self, name: str, records: PieceBuffer) -> None:
        self._name, self._records = name, records
        self._payload: bytes | None = None
        self.is_over = records.is_empty
        """Whether it was prepared, or there is nothing to prepare."""

    @property
    def pieces_count(self) -> int:
        """See ``PiecewiseTransaction``: what is small is not stored beside the manifest."""
        return 0 if self._is_small() else self._records.count

    def piece(self, number: int) -> bytes:
        """See ``PiecewiseTransaction``."""
        return self._records.piece(number)

    def prepare(self) -> bytes | None:
        """Return the records, or where they are: durable with the snapshot whose committable this is."""
        if not self.is_over:
            small = self._is_small()
            records = self._records
            self._payload = (
                encode_whole(self._name, records.piece(0)) if small else encode_index(self._name, records.count)
            )
            self.close()
        return self._payload

    def close(self) -> None:
        """Drop the records."""
        self.is_over = True
        self._records.close()

    def _is_small(self) -> bool:
        records = self._records
        return records.is_empty or (not records.has_closed and len(records.piece(0)) <= INLINE_BYTES_MAX)


class _Committer:
    """Publishes what completed checkpoints hold (CS3, CS6)."""

    def __init__(self, sink: LedgerSink, fence: Fence) -> None:
        self._sink, self._fence = sink, fence
        self._read: PieceReader = _read_nothing

    def read_pieces_with(self, read: PieceReader) -> None:
        """See ``PiecewiseCommitter``."""
        self._read = read

    def recover(self, keep: Sequence[Committable]) -> None:
        """See ``Committer``: nothing is in the target that was not published for good."""
        with transient(self._sink.transient_errors, "recover", self._fence.owner):
            self._fence = with_life(self._sink, self._fence)
            self._sink.claim(self._fence)

    def commit(self, permit: CommitPermit, committables: Sequence[Committable]) -> None:
        """See ``Committer``."""
        outputs = [LedgerOutput(committable, self._read) for committable in in_order(permit, committables)]
        if outputs:
            with transient(self._sink.transient_errors, "publish", self._fence.owner):
                self._sink.publish(outputs, self._fence)

    def close(self) -> None:
        """Nothing is open."""


class _ForgettingCommitter(_Committer):
    """Has the target forget names."""

    def forget(self, before: CheckpointId) -> None:
        """See ``ForgettingCommitter`` (K20)."""
        with transient(self._sink.transient_errors, "forget", self._fence.owner):
            self._sink.forget(self._fence.owner, int(before))


def _read_nothing(piece: SnapshotPart) -> NoReturn:
    raise AssertionError(f"nobody said how {piece.path} is read")
