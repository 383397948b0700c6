"""``LedgerSink``: sinks of users whose targets have transactions, but cannot prepare one.

The records of a checkpoint are kept in the checkpoint. When it is completed the driver publishes them in one
transaction of the target, together with their name: a target that has the name has the records. The shape of Flink's
``GenericWriteAheadSink``, whose two steps are one here. Rules CS1–CS7 of docs/spec/connectors.md.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence

import pyarrow as pa

from headgate.connectors.base import SinkContext
from headgate.connectors.custom.fence import Fence, OutputName, in_order, owner_of, transient
from headgate.connectors.custom.owned import RememberingSink, with_life
from headgate.errors import CorruptionError, UsageError
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Committable
from headgate.protocol.checkpoints.commit import CommitPermit

_VERSION = b"1\n"


class LedgerSink(RememberingSink):
    """Derive from it for a target with ordinary transactions, such as a SQL database.

    ``publish`` writes the records of one subtask and checkpoint and their name into the target, all or nothing. All
    methods are called in the driver, each perhaps again after it raised or after its answer was lost. The records of
    one checkpoint and subtask must fit into memory; what the subtasks wrote becomes visible one after the other.

    Attributes:
        transient_errors: what the target raises when another try may help; all else stops the pipeline.
    """

    transient_errors: tuple[type[Exception], ...] = (OSError,)

    # -- what users write -------------------------------------------------------------------------------------------

    @abstractmethod
    def published(self, names: Sequence[str]) -> Collection[str]:
        """Return those of ``names`` that the target's ledger has."""

    @abstractmethod
    def publish(self, name: str, records: pa.Table, fence: Fence) -> None:
        """In one transaction: refuse an older generation, write ``records``, and write ``name`` into the ledger.

        The ledger must have a name only once: who finds it there in the same transaction writes nothing.

        Raises:
            FencedError: a newer generation claimed the target; nothing is written then.
        """

    def forget(self, owner: str, before: int) -> None:
        """Remove names of ``owner`` and checkpoints below ``before`` from the ledger: nobody asks for them any more.

        ``output_checkpoint(name)`` tells the checkpoint of a name. Default: nothing, so that a ledger grows.
        """

    def check(self, schema: pa.Schema) -> None:
        """Check, while the pipeline is being built, that such records can be written. Default: all can.

        Raises:
            UsageError
        """

    # -- what the runtime calls -------------------------------------------------------------------------------------

    def open(self, context: SinkContext) -> _Writer:
        """See ``connectors.base.Sink``."""
        return _Writer(context)

    def open_committer(self, pipeline: str, node: str, generation: Generation) -> _Committer:
        """See ``connectors.base.Sink``."""
        return _Committer(self, Fence(owner_of(pipeline, node), int(generation)))


def output_checkpoint(name: str) -> int:
    """Return the checkpoint of a name that ``LedgerSink.publish`` was given.

    Raises:
        UsageError: it is none.
    """
    found = OutputName.parse(name)
    if found is None:
        raise UsageError(f"'{name}' is no name of published output; names look like pipeline:sink-0000000001-00000-…")
    return found.number


class _Writer:
    """Keeps the records of the checkpoint that comes."""

    def __init__(self, context: SinkContext) -> None:
        self._context = context
        self._batches: list[pa.RecordBatch] = []

    def write(self, batch: pa.RecordBatch) -> None:
        """See ``SinkWriter``."""
        if batch.num_rows:
            self._batches.append(batch)

    def seal(self, checkpoint: CheckpointId) -> _Sealed:
        """See ``SinkWriter``."""
        context, batches = self._context, self._batches
        self._batches = []
        owner = owner_of(context.pipeline, context.node)
        name = OutputName(owner, int(checkpoint), context.subtask_index, int(context.generation))
        return _Sealed(str(name), context.schema, batches)

    def close(self) -> None:
        """What is not prepared is abandoned."""
        self._batches = []


class _Sealed:
    """The records of one checkpoint and subtask."""

    def __init__(self, name: str, schema: pa.Schema, batches: list[pa.RecordBatch]) -> None:
        self._name, self._schema, self._batches = name, schema, batches

    def prepare(self) -> bytes | None:
        """Return the records: durable with the snapshot whose committable this is."""
        if not self._batches:
            return None
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_stream(sink, self._schema, options=options) as writer:
            for batch in self._batches:
                writer.write_batch(batch)
        return b"".join((_VERSION, self._name.encode(), b"\n", memoryview(sink.getvalue())))


class _Committer:
    """Publishes what completed checkpoints hold (CS3, CS6)."""

    def __init__(self, sink: LedgerSink, fence: Fence) -> None:
        self._sink, self._fence = sink, fence

    def recover(self, keep: Sequence[Committable]) -> None:
        """See ``Committer``: nothing is in the target that was not published for good."""
        with transient(self._sink.transient_errors, "recover", self._fence.owner):
            self._fence = with_life(self._sink, self._fence)
            self._sink.claim(self._fence)

    def commit(self, permit: CommitPermit, committables: Sequence[Committable]) -> None:
        """See ``Committer``."""
        found = [_name_and_data(committable) for committable in in_order(permit, committables)]
        if not found:
            return
        with transient(self._sink.transient_errors, "publish", self._fence.owner):
            self._sink.claim(self._fence)  # an older generation is told so even when there is nothing left to publish
            done = set(self._sink.published([name for name, _ in found]))
            for name, data in found:
                if name not in done:
                    self._sink.publish(name, _table(name, data), self._fence)

    def forget(self, before: CheckpointId) -> None:
        """See ``ForgettingCommitter`` (K20)."""
        with transient(self._sink.transient_errors, "forget", self._fence.owner):
            self._sink.forget(self._fence.owner, int(before))

    def close(self) -> None:
        """Nothing is open."""


def _name_and_data(committable: Committable) -> tuple[str, memoryview]:
    payload = committable.payload
    end = payload.find(b"\n", len(_VERSION))
    if not payload.startswith(_VERSION) or end < 0:
        where = f"committable of sink '{committable.sink}' for checkpoint {committable.checkpoint}"
        raise CorruptionError(where, 0, "version 1 and a name", repr(payload[:20]))
    return payload[len(_VERSION) : end].decode(), memoryview(payload)[end + 1 :]


def _table(name: str, data: memoryview) -> pa.Table:
    try:
        with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
            return reader.read_all()
    except (pa.ArrowException, OSError) as error:
        raise CorruptionError(f"output {name}", 0, "an Arrow stream", str(error)) from error
