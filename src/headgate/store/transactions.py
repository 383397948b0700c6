"""Transactions that one process writes: open, spilled to chunks, prepared, committed or aborted.

Counterpart: ``protocol.store.transactions`` decides, ``catalogue`` records. Source: S12 to S18 and S70 of
docs/spec/stream-store.md. An open transaction writes nothing to the catalogue: until ``prepare`` its chunks are
orphans below ``<stream>/txn/<owner>/<epoch>/``, which ``TransactionLog.recover`` of a newer epoch sweeps.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import pyarrow as pa
import xxhash

from headgate.environment import Pool, Threads, cancellable_as_here
from headgate.errors import StorageError, UsageError
from headgate.storage.base import Storage
from headgate.store.catalogue.base import Catalogue
from headgate.store.catalogue.records import ChunkRecord
from headgate.store.chunks import FLUSH_BYTES, check_events, chunk_path, delete_quietly, encode_batches
from headgate.store.routing import hash_text
from headgate.store.schema_conversion import SchemaHistory
from headgate.store.schemas import check_same_schema, schema_difference
from headgate.store.streams import StreamInfo

SPILL_THREADS = 2

WriteBatches = Callable[[Sequence[pa.RecordBatch]], None]


class Spill:
    """Batches that are being written."""

    def __init__(self, batches: Sequence[pa.RecordBatch], write: WriteBatches, threads: Threads) -> None:
        self.batches = batches
        self._write = write
        self._is_over = threads.event()
        self._is_written = False

    def run(self) -> None:
        """Write them."""
        try:
            with contextlib.suppress(Exception):  # who waits tries again, and is told
                self._write(self.batches)
                self._is_written = True
        finally:
            self._is_over.set()

    def is_written(self) -> bool:
        """Wait until the write is over; return whether it did what it should."""
        self._is_over.wait()
        return self._is_written

    def give_back(self) -> None:
        """It will not be written beside anybody."""
        self._is_over.set()


class SpillPool:
    """The threads of one store, in each process that uses it: those of a parent do not survive a fork (CT4)."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._pools: dict[int, Pool] = {}

    def begin(self, batches: Sequence[pa.RecordBatch], write: WriteBatches) -> Spill:
        """Have ``batches`` written."""
        part = Spill(batches, write, self._threads)
        try:
            self._pool().submit(cancellable_as_here(part.run))
        except RuntimeError:  # no more threads: whoever waits for it writes it
            part.give_back()
        return part

    def _pool(self) -> Pool:
        process = self._threads.process_id
        if process not in self._pools:
            self._pools = {process: self._threads.pool(SPILL_THREADS, "headgate-spill")}
        return self._pools[process]


TRANSACTIONS = "txn"
"""Directory below a stream's, of what owners of transactions write."""


def owner_directory(stream_id: int, owner: str) -> str:
    """Return where an owner's chunks are, prepared or not."""
    return f"{stream_id}/{TRANSACTIONS}/{xxhash.xxh3_64_hexdigest(owner.encode())}"


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


class Verdicts(Protocol):
    """What a transaction needs from the log: ``transactions.TransactionLog``."""

    def prepare(self, transaction: Transaction, chunks: Sequence[ChunkRecord]) -> None:
        """Record it as prepared, with the files that hold its events."""

    def abort(self, stream_name: str, name: str, owner: str, epoch: int) -> None:
        """Record it as aborted; remove its files."""


class Transaction:
    """An open transaction. ``write`` and ``seal`` belong to one thread, ``prepare`` to any one after ``seal``."""

    def __init__(
        self,
        log: Verdicts,
        storage: Storage,
        stream: StreamInfo,
        name: str,
        owner: str,
        epoch: int,
        new_name: Callable[[], str],
        spilling: SpillPool,
        schemas: SchemaHistory,
    ) -> None:
        """Use ``Store.begin``."""
        self._spilling = spilling
        self._schemas = schemas
        self.stream = stream
        self.name = name
        self.owner = owner
        self.epoch = epoch
        self.events_count = 0
        self._log = log
        self._storage = storage
        self._new_name = new_name
        self._buffer: list[pa.RecordBatch] = []
        self._buffered_bytes = 0
        self._written: list[ChunkRecord] = []
        self._part: Spill | None = None
        self._is_open = True
        self._is_aborted = False
        self._may_be_prepared = False
        # without a routing key all of a transaction goes to one segment, in order (S2)
        self._fallback = hash_text(f"{owner}/{epoch}/{name}" if name else new_name())

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
            self._finish_spill()  # one at a time: bounded, and in order
        self._buffer.append(batch)
        self.events_count += batch.num_rows
        self._buffered_bytes += batch.nbytes
        if is_full:
            self._part = self._spilling.begin(self._buffer, self._write_chunk)
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
        self._finish_spill()
        if self._buffer:
            self._write_chunk(self._buffer)
            self._buffer = []
        self._may_be_prepared = True
        self._log.prepare(self, self._written)

    def abort(self) -> None:
        """Drop the transaction and its files. It is open, or ``prepare`` raised; one that is prepared is aborted, too.

        Raises:
            FencedError, CorruptionError, StorageError: ``prepare`` was tried; see ``Store.abort_transaction``.
        """
        self.seal()
        if self._may_be_prepared:  # then its files may belong to the store: only a recorded verdict frees them
            self._log.abort(self.stream.name, self.name, self.owner, self.epoch)
        self._is_aborted = True
        self._buffer = []
        if self._part is not None:
            self._part.is_written()  # wait for it
            self._part = None
        delete_quietly(self._storage, [chunk.path for chunk in self._written])
        self._written = []

    def _write_chunk(self, batches: Sequence[pa.RecordBatch]) -> None:
        encoded = encode_batches(self.stream, batches, self._fallback)
        base = owner_directory(self.stream.stream_id, self.owner).partition("/")[2]
        path = chunk_path(self.stream.stream_id, f"{base}/{self.epoch}", self._new_name())
        self._storage.put(path, encoded.chunk.buffers)
        self._written.append(encoded.record(path))

    def _finish_spill(self) -> None:
        """Wait for the part being written; write it again if that failed."""
        if self._part is None:
            return
        if not self._part.is_written():
            self._write_chunk(self._part.batches)
        self._part = None


_CHUNK = re.compile(r"([0-9]+)/[^/]+\.chunk")
"""What this module writes below an owner's directory: epoch and file."""


class TransactionLog:
    """Transactions of one store: each method is one verb of the catalogue, with what it means for the files."""

    def __init__(
        self,
        catalogue: Catalogue,
        storage: Storage,
        now_ms: Callable[[], int],
        new_name: Callable[[], str],
        threads: Threads,
    ) -> None:
        """Use ``Store``."""
        self._spilling = SpillPool(threads)
        self._catalogue = catalogue
        self._storage = storage
        self._now_ms = now_ms
        self._new_name = new_name

    def begin(self, stream: str, name: str, owner: str, epoch: int) -> Transaction:
        """Return an open transaction.

        Raises:
            FencedError: a newer epoch of ``owner`` exists.
            UsageError: the name is taken, or the stream is sealed.
        """
        if not owner or epoch < 0:
            raise UsageError(f"a transaction needs an owner and an epoch of at least 0, not {owner!r} and {epoch}")
        info = self._catalogue.begin(stream, name, owner, epoch)
        schemas = SchemaHistory(self._catalogue, info)
        return Transaction(self, self._storage, info, name, owner, epoch, self._new_name, self._spilling, schemas)

    def prepare(self, transaction: Transaction, chunks: Sequence[ChunkRecord]) -> None:
        """Record ``transaction`` as prepared, with the durable files that hold its events (S12)."""
        x = transaction
        self._catalogue.prepare(x.stream, x.name, x.owner, x.epoch, chunks, self._now_ms())

    def commit(self, names: Sequence[tuple[str, str]], owner: str, epoch: int) -> None:
        """Commit (stream, transaction name) pairs in one step: readers see all of them or nothing (S14).

        Raises:
            FencedError: a newer epoch of ``owner`` exists; nothing was committed.
            CorruptionError: one is unknown or was aborted (S13); nothing was committed.
            StorageError: the outcome is unknown; repeating is safe.
        """
        self._catalogue.commit(names, owner, epoch, self._now_ms())

    def abort(self, stream: str, name: str, owner: str, epoch: int) -> None:
        """Abort a transaction; its events go away.

        Raises:
            FencedError: a newer epoch of ``owner`` exists.
            CorruptionError: it was committed (S13).
        """
        delete_quietly(self._storage, self._catalogue.abort(stream, name, owner, epoch, self._now_ms()))

    def recover(
        self, stream: str, owner: str, epoch: int, keep: Collection[str], leave: Callable[[StorageError], None]
    ) -> list[str]:
        """Fence older epochs, abort what ``owner`` has prepared and is not in ``keep``, sweep what is left of them.

        In every stream of the store: the owner may have written to another one before (S43). ``leave`` hears why
        something cannot be swept now; the next epoch tries again.

        Returns:
            the names aborted.

        Raises:
            FencedError: a newer epoch exists.
        """
        recovered = self._catalogue.recover(stream, owner, epoch, keep, self._now_ms())
        delete_quietly(self._storage, recovered.orphans)
        try:
            for info in recovered.streams:
                self._sweep(info, owner, epoch)
        except StorageError as error:
            leave(error)
        return list(recovered.aborted)

    def _sweep(self, stream: StreamInfo, owner: str, epoch: int) -> None:
        """Remove chunks that older epochs left without a record: they can never be prepared any more."""
        base = owner_directory(stream.stream_id, owner)
        self._storage.sweep_unfinished(base)
        matches = [(path, _CHUNK.fullmatch(path[len(base) + 1 :])) for path in self._storage.list(base)]
        found = [path for path, match in matches if match and int(match[1]) < epoch]  # a stranger's file stays
        if found:
            known = self._catalogue.chunk_paths(base)
            delete_quietly(self._storage, [path for path in found if path not in known])
