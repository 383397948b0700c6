"""The transactions of a stream sink: what they are named, who writes them, and who decides them.

One transaction per checkpoint and subtask, named by its identity (S15, K8), committed by the coordinator in one step
for all subtasks (S14). Never makes output visible before its checkpoint is completed.

Counterparts: ``sink``, which opens both sides; ``headgate.store.store.Store``. Source: rules SC3 to SC6 of
docs/spec/stream-store.md.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
import pyarrow as pa

from headgate.codec.zones import unzoned_schema
from headgate.connectors.base import SealedTransaction, SinkContext
from headgate.errors import CorruptionError, StorageError
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Committable
from headgate.operators.types import canonical_schema, carried
from headgate.protocol.checkpoints.commit import CommitPermit
from headgate.protocol.store.transactions import Status
from headgate.store.evolving import newest_fit
from headgate.store.open_transaction import Transaction
from headgate.store.schemas import difference_by_name
from headgate.store.store import Store


def owner_of(pipeline: str, node: str) -> str:
    """Return the owner of all transactions of one sink of one pipeline (K8)."""
    return f"{pipeline}/{node}"


def transaction_name(owner: str, checkpoint: CheckpointId, subtask_index: int, generation: Generation) -> str:
    """Return the identity of one subtask's output of one checkpoint (S15, K8)."""
    return f"{owner}/checkpoint-{checkpoint}/subtask-{subtask_index}/generation-{generation}"


_NAME = re.compile(r"(?P<owner>.*)/checkpoint-(?P<checkpoint>[0-9]+)/subtask-[0-9]+/generation-[0-9]+", re.DOTALL)


def checkpoint_of(name: str) -> CheckpointId | None:
    """Return the checkpoint of a ``transaction_name``; None for any other name."""
    match = _NAME.fullmatch(name)
    return None if match is None else CheckpointId(int(match["checkpoint"]))


def written_as(schemas: Sequence[pa.Schema], schema: pa.Schema) -> int | None:
    """Return the newest of a stream's schemas that records of ``schema`` fit, by name; None: they fit none (SC51)."""
    return newest_fit(schemas, lambda known: misfit(known, schema))


def misfit(known: pa.Schema, schema: pa.Schema) -> str:
    """Return by which columns records of ``schema`` do not fit a stream's, or "": zones are no difference (SC53)."""
    return difference_by_name(*(unzoned_schema(canonical_schema(one)) for one in (known, schema)))


class _Payload(msgspec.Struct, frozen=True, array_like=True):
    """What a committable carries."""

    version: int
    stream: str
    name: str
    events_count: int


_PAYLOAD_VERSION = 1


class StreamSinkWriter:
    """Writes one subtask's records into the open transaction."""

    def __init__(self, store: Store, stream: str, context: SinkContext) -> None:
        """Use ``StreamSink.open``."""
        self._store = store
        self._stream = stream
        self._context = context
        self._owner = owner_of(context.pipeline, context.node)
        schemas = store.schemas(stream)
        version = written_as(schemas, context.schema)
        self._schema = schemas[-1 if version is None else version]
        self._current: Transaction | None = None

    def write(self, batch: pa.RecordBatch) -> None:
        """Add records; begins the transaction with the first ones (SC3)."""
        if batch.num_rows == 0:
            return
        if self._current is None:
            self._current = self._store.begin(self._stream, owner=self._owner, epoch=self._context.generation)
        self._current.write(carried(batch, self._schema, f"stream '{self._stream}'"))

    def seal(self, checkpoint: CheckpointId) -> SealedTransaction:
        """Close the transaction as the output of ``checkpoint``."""
        transaction, self._current = self._current, None
        if transaction is not None:
            context = self._context
            transaction.seal(transaction_name(self._owner, checkpoint, context.subtask_index, context.generation))
        return _Sealed(self._stream, transaction)

    def close(self) -> None:
        """Drop the open transaction; prepared ones stay (sinks.md, never abort what is pending)."""
        if self._current is not None:
            self._current.abort()
            self._current = None


class _Sealed:
    def __init__(self, stream: str, transaction: Transaction | None) -> None:
        self._stream = stream
        self._transaction = transaction

    def prepare(self) -> bytes | None:
        """See ``SealedTransaction.prepare``."""
        if self._transaction is None:
            return None  # K4, SC4
        self._transaction.prepare()
        count = self._transaction.events_count
        return msgspec.msgpack.encode(_Payload(_PAYLOAD_VERSION, self._stream, self._transaction.name, count))


class StreamCommitter:
    """Decides the transactions of one sink."""

    def __init__(self, store: Store, stream: str, node: str, owner: str, generation: Generation) -> None:
        """Use ``StreamSink.open_committer``."""
        self._store = store
        self._stream = stream
        self._node = node
        self._owner = owner
        self._generation = generation
        self._left_behind = ""

    def recover(self, keep: Sequence[Committable]) -> None:
        """Fence older generations, abort all but ``keep``, remove leftovers (S15, K6).

        Raises:
            FencedError: a newer generation exists.
        """
        names = {transaction_of(c) for c in keep if c.sink == self._node}
        left: list[StorageError] = []
        self._store.recover(self._stream, owner=self._owner, epoch=self._generation, keep=names, leave=left.append)
        self._left_behind = str(left[0]) if left else ""

    def left_behind(self) -> str:
        """See ``TidyingCommitter``."""
        return self._left_behind

    def commit(self, permit: CommitPermit, committables: Sequence[Committable]) -> None:
        """Commit in one catalogue transaction: readers see all of it or nothing (S14, SC5)."""
        for committable in committables:
            assert committable.checkpoint <= permit.checkpoint  # K1
        ordered = sorted(committables, key=lambda c: (c.checkpoint, c.subtask_index))  # K2
        payloads = [_decode_payload(committable) for committable in ordered]
        names = [(payload.stream, payload.name) for payload in payloads]
        if names:
            self._store.commit_transactions(names, owner=self._owner, epoch=permit.generation)
            for stream in {stream for stream, _ in names}:
                self._store.look_after(stream)  # S71

    def denial(self, committable: Committable) -> str:
        """See ``AskedCommitter``."""
        name = transaction_of(committable)
        found = {x.name: x.status for x in self._store.list_transactions(owner=self._owner, prefix=name)}.get(name)
        if found is None:
            return f"the store found no record of the transaction {name}"
        return f"the transaction {name} was aborted" if found is Status.ABORTED else ""

    def forget(self, before: CheckpointId) -> None:
        """See ``ForgettingCommitter``."""
        decided = [x.name for x in self._store.list_transactions(owner=self._owner) if x.status.is_terminal]
        checkpoints = {name: checkpoint_of(name) for name in decided}
        names = [name for name, checkpoint in checkpoints.items() if checkpoint is not None and checkpoint < before]
        if names:
            self._store.forget_outcomes(names, owner=self._owner, epoch=self._generation)

    def close(self) -> None:
        """The store is shared by the process and stays open."""


def transaction_of(committable: Committable) -> str:
    """Return the name of the transaction that ``committable`` promises to commit.

    Raises:
        CorruptionError
    """
    return _decode_payload(committable).name


def _decode_payload(committable: Committable) -> _Payload:
    where = f"committable of sink '{committable.sink}' in checkpoint {committable.checkpoint}"
    try:
        payload = msgspec.msgpack.decode(committable.payload, type=_Payload)
    except msgspec.MsgspecError as error:
        raise CorruptionError(where, 0, "a stream transaction", str(error)) from error
    if payload.version != _PAYLOAD_VERSION:
        raise CorruptionError(where, 0, f"version {_PAYLOAD_VERSION}", f"{payload.version}")
    return payload
