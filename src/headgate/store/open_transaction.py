"""A transaction while it is written, until it is prepared.

Counterpart: ``transactions.TransactionLog`` records it. Source: S12 and S16 of docs/spec/stream-store.md.
Never leaves a record before ``prepare``, and never removes a file that the store may count on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import pyarrow as pa
import xxhash

from headgate.errors import UsageError
from headgate.storage.base import Storage
from headgate.store.catalogue.values import ChunkRecord
from headgate.store.chunks import FLUSH_BYTES, chunk_path, delete_quietly, encode_batches
from headgate.store.evolving import Schemas
from headgate.store.limits import check_events
from headgate.store.routing import hash_text
from headgate.store.schemas import check_same_schema, schema_difference
from headgate.store.spilling import Part, Spilling
from headgate.store.streams import StreamInfo

TRANSACTIONS = "txn"
"""Directory below a stream's, of what owners of transactions write."""


def owner_directory(stream_id: int, owner: str) -> str:
    """Return where an owner's chunks are, prepared or not."""
    return f"{stream_id}/{TRANSACTIONS}/{xxhash.xxh3_64_hexdigest(owner.encode())}"


def check_schema_at_begin(stream: StreamInfo, schemas: Schemas, what: str, schema: pa.Schema) -> None:
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
        spilling: Spilling,
        schemas: Schemas,
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
        self._part: Part | None = None
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
