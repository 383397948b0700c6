"""Transactions that one process writes: open, spilled to chunks, prepared, committed or aborted.

Counterpart: ``protocol.store.transactions`` decides, ``catalogue`` records. Source: S12 to S18 and S70 of
docs/spec/stream-store.md. An open transaction writes nothing to the catalogue: until ``prepare`` its chunks are
orphans below ``<stream>/txn/<owner>/<epoch>/``, which ``Transactions.recover`` of a newer epoch sweeps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

import pyarrow as pa

from headgate.errors import StorageError, UsageError
from headgate.store.catalogue.records import ChunkRecord
from headgate.store.chunks import (
    FLUSH_BYTES,
    check_events,
    chunk_path,
    delete_quietly,
    encode_batches,
    owner_directory,
    transaction_directory,
)
from headgate.store.core import Spill, StoreCore
from headgate.store.routing import hash_text
from headgate.store.schema_conversion import SchemaHistory
from headgate.store.schemas import check_same_schema, schema_difference
from headgate.store.streams import StreamInfo


def check_schema_at_begin(stream: StreamInfo, schemas: SchemaHistory, what: str, schema: pa.Schema) -> None:
    """Check that events of a transaction have the schema that its stream had when it began, or a former one (S78)."""
    if not schema_difference(stream.schema, schema):
        return
    version = schemas.fitting(schema)
    if version is None:
        check_same_schema(stream.name, stream.schema, schema)
    elif version > stream.schema_version:
        raise UsageError(
            f"{what} began before stream '{stream.name}' got the columns of these events; write them in another one"
        )


class Transaction:
    """An open transaction. ``write`` and ``seal`` belong to one thread, ``prepare`` to any one after ``seal``."""

    def __init__(self, core: StoreCore, stream: StreamInfo, name: str, owner: str, epoch: int) -> None:
        """Use ``Transactions.begin``."""
        self.stream = stream
        self.name = name
        self.owner = owner
        self.epoch = epoch
        self.events_count = 0
        self._core = core
        self._schemas = SchemaHistory(core.catalogue, stream)
        self._buffer: list[pa.RecordBatch] = []
        self._buffered_bytes = 0
        self._written: list[ChunkRecord] = []
        self._part: Spill | None = None
        self._is_open = True
        self._is_aborted = False
        self._may_be_prepared = False
        # without a routing key all of a transaction goes to one segment, in order (S2)
        self._fallback = hash_text(f"{owner}/{epoch}/{name}" if name else core.new_name())

    def write(self, batch: pa.RecordBatch) -> None:
        """Add events. Memory stays bounded: large transactions are written as they come, still invisible.

        Raises:
            UsageError: other schema, too large an event, or the transaction is not open.
            StorageError: an earlier part could not be written, and nothing of ``batch`` was taken: repeat it, or give
                up with ``abort``.
        """
        if not self._is_open:
            raise UsageError(f"transaction '{self.name}' of stream '{self.stream.name}' takes no more events")  # S12
        check_schema_at_begin(self.stream, self._schemas, f"transaction '{self.name}'", batch.schema)
        check_events(self.stream.name, batch)
        if batch.num_rows == 0:
            return
        is_full = self._buffered_bytes + batch.nbytes >= FLUSH_BYTES
        if is_full:
            self._wait_for_spill()  # one at a time: bounded, and in order
        self._buffer.append(batch)
        self.events_count += batch.num_rows
        self._buffered_bytes += batch.nbytes
        if is_full:
            self._part = self._core.spills.begin(self._buffer, self._write_chunk)
            self._buffer, self._buffered_bytes = [], 0

    def seal(self, name: str | None = None) -> None:
        """Take no more events; give it its final name. No I/O."""
        self._is_open = False
        if name is not None:
            self.name = name

    def prepare(self) -> None:
        """Make it durable, immutable and still invisible (S12). May be repeated after it raised.

        Raises:
            StorageError: it is not prepared, or its outcome is unknown; repeating is safe.
            FencedError: a newer epoch of the owner exists.
        """
        self.seal()
        if self._is_aborted:
            raise UsageError(f"transaction '{self.name}' of stream '{self.stream.name}' was aborted; begin another one")
        if not self.name:
            raise UsageError(f"a transaction of '{self.owner}' needs a name before it can be prepared")
        self._wait_for_spill()
        if self._buffer:
            self._write_chunk(self._buffer)
            self._buffer = []
        self._may_be_prepared = True
        now_ms = self._core.clock.wall_ms()
        self._core.catalogue.prepare(self.stream, self.name, self.owner, self.epoch, self._written, now_ms)

    def abort(self) -> None:
        """Drop the transaction and its files. It is open, or ``prepare`` raised; one that is prepared is aborted, too.

        Raises:
            FencedError, CorruptionError, StorageError: ``prepare`` was tried; see ``Transactions.abort``.
        """
        self.seal()
        if self._may_be_prepared:  # then its files may belong to the store: only a recorded verdict frees them
            now_ms = self._core.clock.wall_ms()
            orphans = self._core.catalogue.abort(self.stream.name, self.name, self.owner, self.epoch, now_ms)
            delete_quietly(self._core.storage, orphans)
        self._is_aborted = True
        self._buffer = []
        if self._part is not None:
            self._part.is_written()  # wait for it
            self._part = None
        delete_quietly(self._core.storage, [chunk.path for chunk in self._written])
        self._written = []

    def _write_chunk(self, batches: Sequence[pa.RecordBatch]) -> None:
        encoded = encode_batches(self.stream, batches, self._fallback)
        base = owner_directory(self.stream.stream_id, self.owner).partition("/")[2]
        path = chunk_path(self.stream.stream_id, f"{base}/{self.epoch}", self._core.new_name())
        self._core.storage.put(path, encoded.chunk.buffers)
        self._written.append(encoded.record(path))

    def _wait_for_spill(self) -> None:
        """Wait for the part being written; write it again if that failed."""
        if self._part is None:
            return
        if not self._part.is_written():
            self._write_chunk(self._part.batches)
        self._part = None


_CHUNK = re.compile(r"([0-9]+)/[^/]+\.chunk")
"""What this module writes below an owner's directory: epoch and file."""


class Transactions:
    """Transactions of one process, by owner: ``Store.transactions``, for sinks of pipelines."""

    def __init__(self, core: StoreCore) -> None:
        self._core = core

    def begin(self, stream: str, *, owner: str, epoch: int, name: str = "") -> Transaction:
        """Begin a transaction that only this process writes; ``Store.begin_shared`` begins one that others write, too.

        You can also pass ``name`` later, to ``Transaction.seal``. The transaction leaves no trace until it is prepared.

        Raises:
            FencedError: a newer epoch of ``owner`` exists.
            UsageError: there is no such stream, it is sealed, or the name is taken.
        """
        if not owner or epoch < 0:
            raise UsageError(f"a transaction needs an owner and an epoch of at least 0, not {owner!r} and {epoch}")
        info = self._core.catalogue.begin(stream, name, owner, epoch)
        return Transaction(self._core, info, name, owner, epoch)

    def commit(self, names: Sequence[tuple[str, str]], *, owner: str, epoch: int) -> None:
        """Commit prepared transactions, given as (stream, name), in one step: readers see all of them or nothing (S14).

        Raises:
            FencedError: a newer epoch of ``owner`` exists; nothing was committed.
            CorruptionError: one is unknown or was aborted (S13); nothing was committed.
            StorageError: the outcome is unknown; repeating is safe.
        """
        self._core.catalogue.commit(names, owner, epoch, self._core.clock.wall_ms())

    def abort(self, stream: str, name: str, *, owner: str, epoch: int) -> None:
        """Abort a prepared transaction, or make sure that none can be prepared under this name.

        Raises:
            FencedError: a newer epoch of ``owner`` exists.
            CorruptionError: it was committed (S13).
        """
        orphans = self._core.catalogue.abort(stream, name, owner, epoch, self._core.clock.wall_ms())
        delete_quietly(self._core.storage, orphans)

    def forget_outcomes(self, names: Sequence[str], *, owner: str, epoch: int) -> None:
        """Forget how these transactions of ``owner`` were decided, because it will never ask again (S17).

        Raises:
            FencedError: a newer epoch of ``owner`` exists.
        """
        self._core.catalogue.forget_outcomes(names, owner, epoch)

    def fence(self, owner: str, epoch: int) -> None:
        """Refuse all older epochs of ``owner`` from now on (S18).

        Raises:
            FencedError: a newer epoch exists.
        """
        self._core.catalogue.fence(owner, epoch)

    def recover(
        self,
        stream: str,
        *,
        owner: str,
        epoch: int,
        keep: Collection[str] = (),
        leave: Callable[[StorageError], None] = lambda error: None,
    ) -> list[str]:
        """Fence older epochs, abort prepared transactions that are not in ``keep``, and remove leftovers (S43).

        ``stream`` is the stream that ``owner`` writes from now on; its transactions in other streams are aborted as
        well. Leftovers that cannot be removed now are harmless and stay for the next epoch; ``leave`` is called
        with the reason. Returns the names of the aborted transactions.

        Raises:
            FencedError: a newer epoch exists.
        """
        recovered = self._core.catalogue.recover(stream, owner, epoch, keep, self._core.clock.wall_ms())
        delete_quietly(self._core.storage, recovered.orphans)
        try:
            for info in recovered.streams:
                self._sweep(info, owner, epoch)
        except StorageError as error:
            leave(error)
        return list(recovered.aborted)

    def abort_all(self, owner: str) -> int:
        """Abort the prepared and open transactions of ``owner`` that no process will decide any more.

        Never call it while a process of the owner is alive. Returns the number of aborted transactions.
        """
        epoch = self._core.catalogue.owner(owner).generation
        waiting = [x for x in self._core.catalogue.transactions(owner, "", None) if not x.status.is_terminal]
        for transaction in waiting:
            self.abort(transaction.stream, transaction.name, owner=owner, epoch=epoch)
        return len(waiting)

    def _sweep(self, stream: StreamInfo, owner: str, epoch: int) -> None:
        """Remove chunks that older epochs left without a record: they can never be prepared any more."""
        base = owner_directory(stream.stream_id, owner)
        self._core.storage.sweep_unfinished(base)
        matches = [(path, _CHUNK.fullmatch(path[len(base) + 1 :])) for path in self._core.storage.list(base)]
        found = [path for path, match in matches if match and int(match[1]) < epoch]  # a stranger's file stays
        if found:
            known = self._core.catalogue.chunk_paths(base)
            delete_quietly(self._core.storage, [path for path in found if path not in known])


def remove_leftovers(core: StoreCore, stream_id: int, owner: str, name: str) -> None:
    """Remove what participants that died left of a transaction that has ended: nothing can record it any more."""
    with suppress(StorageError):  # then ``Store.collect_orphans`` finds it
        base = transaction_directory(stream_id, owner, name)
        found = core.storage.list(base)
        core.storage.sweep_unfinished(base)
        known = core.catalogue.known_chunks(found)  # behind the list of files
        delete_quietly(core.storage, [path for path in found if path not in known])
