"""``LedgerSink``: users' sinks for targets that have transactions, but cannot prepare one.

The records of a checkpoint are kept in the checkpoint. When it is completed the driver publishes them in one
transaction of the target, together with their names: a target that has the name has the records. The shape of Flink's
``GenericWriteAheadSink``, with its two steps in one. Rules CS5 of docs/spec/connectors.md.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn, TypeAlias

import pyarrow as pa

from headgate.codec.arrow import read_stream
from headgate.connectors.base import Committer, SealedTransaction, SinkContext, SinkWriter
from headgate.connectors.fenced_sink import (
    Fence,
    FencedSink,
    OutputName,
    in_order,
    owner_of,
    transient,
    with_stored_life,
)
from headgate.connectors.spill_buffer import SpillBuffer
from headgate.errors import CorruptionError, UsageError
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Committable, SnapshotPart
from headgate.protocol.checkpoints.commit import CommitPermit

_WHOLE = b"1\n"
_INDEX = b"2\n"

PieceReader: TypeAlias = Callable[[SnapshotPart], memoryview]


class LedgerOutput:
    """The records of one subtask and checkpoint. Iterating reads them from the checkpoint, a batch at a time.

    Attributes:
        name: identifies the output; no other output ever has this name. Write it into the ledger together with the
            records.
    """

    def __init__(self, committable: Committable, read: PieceReader) -> None:
        """Look at the name; no record is read yet.

        Raises:
            CorruptionError: the payload has another form, or pieces are missing.
        """
        self._committable, self._read = committable, read
        payload = committable.payload
        end = payload.find(b"\n", len(_WHOLE))
        if not payload.startswith((_WHOLE, _INDEX)) or end < 0:
            raise self._damage("version 1 or 2 and a name", repr(payload[:20]))
        self.name = payload[len(_WHOLE) : end].decode(errors="replace")
        rest = memoryview(payload)[end + 1 :]
        self._whole = rest if payload.startswith(_WHOLE) else None
        if self._whole is None:
            self._refuse_other_count(bytes(rest[:20]).decode(errors="replace"))

    @property
    def checkpoint(self) -> int:
        """The checkpoint that the records belong to."""
        return int(self._committable.checkpoint)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Yield the records in the order in which they were written.

        Raises:
            CorruptionError: they are damaged or gone.
            StorageError: they cannot be read now.
        """
        if self._whole is not None:
            yield from self._batches(self._whole)
        for piece in self._committable.pieces:
            yield from self._batches(self._read(piece))

    def _batches(self, data: memoryview) -> Iterator[pa.RecordBatch]:
        try:
            batches = read_stream(data, is_compressed=True)[1]
        except (pa.ArrowException, OSError) as error:
            raise CorruptionError(f"output {self.name}", 0, "an Arrow stream", str(error)) from error
        yield from batches

    def _refuse_other_count(self, said: str) -> None:
        found = str(len(self._committable.pieces))
        if said != found:
            raise self._damage(f"{said} pieces", found)

    def _damage(self, expected: str, found: str) -> CorruptionError:
        one = self._committable
        return CorruptionError(f"committable of sink '{one.sink}' for checkpoint {one.checkpoint}", 0, expected, found)


def encode_whole(name: str, records: bytes) -> bytes:
    """Return the payload of output that is not in pieces."""
    return b"".join((_WHOLE, name.encode(), b"\n", records))


def encode_index(name: str, pieces_count: int) -> bytes:
    """Return the payload of output in pieces."""
    assert pieces_count > 0, "output without pieces is in its payload"
    return b"%s%s\n%d" % (_INDEX, name.encode(), pieces_count)


def checkpoint_of(name: str) -> int:
    """Return the checkpoint of a name in a ledger.

    Raises:
        UsageError: it is none.
    """
    found = OutputName.parse(name)
    if found is None:
        raise UsageError(f"'{name}' is no name of published output; names look like pipeline:sink-0000000001-00000-…")
    return found.number


INLINE_BYTES_MAX = 64 << 10
"""Output of no more bytes is no piece, but in the manifest."""


class LedgerSink(FencedSink):
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

    def may_have_forgotten(self, name: str) -> bool:
        """Return whether ``forget`` may have removed ``name`` from the ledger. Changes nothing.

        Override it if the ledger remembers the greatest ``before`` of each owner: return True only if it does not have
        the name, and ``output_checkpoint(name)`` is below. The default returns True: a checkpoint from another
        directory is then refused if it has output for the sink and the sink had another owner, whose output may
        have been forgotten.
        """
        return True

    # -- what the runtime calls -------------------------------------------------------------------------------------

    def open(self, context: SinkContext) -> SinkWriter:
        return LedgerWriter(context, self.piece_bytes)

    def open_committer(self, pipeline: str, node: str, generation: Generation) -> Committer:
        return _Committer(self, Fence(owner_of(pipeline, node), int(generation)))


def output_checkpoint(name: str) -> int:
    """Return the checkpoint that an output belongs to, by the name that ``LedgerSink.publish`` received.

    Raises:
        UsageError: the text is not such a name.
    """
    return checkpoint_of(name)


class LedgerWriter(SinkWriter):
    """Keeps the records of the checkpoint that comes."""

    def __init__(self, context: SinkContext, piece_bytes: int) -> None:
        """``piece_bytes``: see ``LedgerSink``."""
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
        context = self._context
        owner = owner_of(context.pipeline, context.node)
        name = OutputName(owner, int(checkpoint), context.subtask_index, int(context.generation))
        # an upload thread owns this buffer from here on; later records go to another one
        sealed = _Sealed(str(name), self._records)
        self._records = self._fresh()
        # what was never prepared is dropped in ``close``
        self._sealed = [one for one in self._sealed if not one.is_over]
        self._sealed.append(sealed)
        return sealed

    def close(self) -> None:
        """What is not prepared is abandoned."""
        self._records.close()
        for sealed in self._sealed:
            sealed.close()

    def _fresh(self) -> SpillBuffer:
        return SpillBuffer(self._context.schema, self._piece_bytes)


class _Sealed(SealedTransaction):
    """The records of one checkpoint and subtask: see ``SealedTransaction``."""

    def __init__(self, name: str, records: SpillBuffer) -> None:
        self._name, self._records = name, records
        self._payload: bytes | None = None
        self.is_over = records.is_empty
        """Whether it was prepared, or there is nothing to prepare."""

    @property
    def pieces_count(self) -> int:
        """See ``SealedTransaction``: what is small is not stored beside the manifest."""
        return 0 if self._is_small() else self._records.count

    def piece(self, number: int) -> bytes:
        return self._records.piece(number)

    def prepare(self) -> bytes | None:
        """Return the records, or where they are: durable with the snapshot that has this committable."""
        # a second call returns the same payload: the records are gone by then
        if not self.is_over:
            small = self._is_small()
            records = self._records
            self._payload = (
                encode_whole(self._name, records.piece(0)) if small else encode_index(self._name, records.count)
            )
            # the pieces are durable in the checkpoint by now
            self.close()
        return self._payload

    def close(self) -> None:
        """Drop the records."""
        self.is_over = True
        self._records.close()

    def _is_small(self) -> bool:
        records = self._records
        return records.is_empty or (not records.has_spilled and len(records.piece(0)) <= INLINE_BYTES_MAX)


class _Committer(Committer):
    """Publishes what completed checkpoints hold."""

    def __init__(self, sink: LedgerSink, fence: Fence) -> None:
        self._sink, self._fence = sink, fence
        self._read: PieceReader = _read_nothing
        self.can_forget = type(sink).forget is not LedgerSink.forget

    def read_pieces_with(self, read: PieceReader) -> None:
        self._read = read

    def recover(self, keep: Sequence[Committable]) -> None:
        """See ``Committer``: nothing is in the target that was not published for good."""
        with transient(self._sink.transient_errors, "recover", self._fence.owner):
            # a fence without the life that is stored would erase the owner
            self._fence = with_stored_life(self._sink, self._fence)
            self._sink.claim(self._fence)

    def commit(self, permit: CommitPermit, committables: Sequence[Committable]) -> None:
        outputs = [LedgerOutput(committable, self._read) for committable in in_order(permit, committables)]
        if outputs:
            with transient(self._sink.transient_errors, "publish", self._fence.owner):
                self._sink.publish(outputs, self._fence)

    def may_have_forgotten(self, committable: Committable) -> bool:
        """See ``Committer``. In a target that no generation has claimed yet nothing was committed."""
        if not self.can_forget:
            return False
        with transient(self._sink.transient_errors, "look up", self._fence.owner):
            known = self._sink.claimed(self._fence.owner)
            # generation 0: a pipeline owns the target, and none of its generations could commit yet
            if known is None or not known.generation:
                return False
            return self._sink.may_have_forgotten(LedgerOutput(committable, self._read).name)

    def forget(self, before: CheckpointId, promised: Callable[[], Sequence[Committable]]) -> None:
        """See ``Committer``: each name says its checkpoint."""
        with transient(self._sink.transient_errors, "forget", self._fence.owner):
            self._sink.forget(self._fence.owner, int(before))


def _read_nothing(piece: SnapshotPart) -> NoReturn:
    raise AssertionError(f"it is not known how {piece.path} is read")
