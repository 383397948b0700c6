"""A writer outside transactions: buffers batches, flushes them as one chunk, acknowledges what is durable.

Counterpart: ``reader``. Source: S7 to S10, S36 and S38 of docs/spec/stream-store.md.
Never acknowledges before chunk and catalogue are synced, and never appends twice what it retries.
"""

from __future__ import annotations

import secrets
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from headgate.errors import FencedError, UsageError
from headgate.store import tables as t
from headgate.store.catalogue import Catalogue
from headgate.store.chunks import (
    FLUSH_BYTES,
    BatchChunk,
    assign_positions,
    delete_quietly,
    encode_batches,
    find_chunk,
    insert_chunk,
    new_chunk_path,
)
from headgate.store.limits import check_event_sizes
from headgate.store.routing import hash_text
from headgate.store.schemas import check_same_schema
from headgate.store.storage import Storage
from headgate.store.streams import StreamInfo, check_writable


@dataclass(frozen=True, slots=True)
class AppendedRange:
    """Where events of one append are: ``events_count`` of ``segment`` from ``start`` on."""

    segment: int
    start: int
    events_count: int


@dataclass(frozen=True, slots=True)
class Appended:
    """A durable append. ``is_duplicate``: its sequence number was there already, nothing was added (S7)."""

    ranges: tuple[AppendedRange, ...] = ()
    is_duplicate: bool = False


@dataclass(slots=True)
class _Pending:
    batch: pa.RecordBatch
    future: Future[Appended]
    sequence: int


@dataclass(slots=True)
class _Attempt:
    """One flush; kept until its outcome is known, so that a retry cannot append twice."""

    path: str
    items: list[_Pending]
    encoded: BatchChunk
    last_sequence: int = field(default=0)


class StreamWriter:
    """Appends to one stream; several threads may share it and then share its flushes (group commit)."""

    def __init__(self, catalogue: Catalogue, storage: Storage, stream: StreamInfo, writer_id: str, epoch: int) -> None:
        """Use ``Store.writer``."""
        self._catalogue = catalogue
        self._storage = storage
        self.stream = stream
        self._writer_id = writer_id
        self._epoch = epoch
        self._buffer_lock = threading.Lock()
        self._flush_lock = threading.Lock()
        self._buffer: list[_Pending] = []
        self._buffered_bytes = 0
        self._attempt: _Attempt | None = None
        self._turn = hash_text(writer_id or secrets.token_hex(8))
        self.next_sequence = self._register() + 1 if writer_id else 1
        """Number of the next append; after a restart, the first that the store does not have."""

    def append(self, batch: pa.RecordBatch, sequence: int | None = None) -> Future[Appended]:
        """Take events; they are durable when the future completes, at the latest with the next ``flush``.

        Args:
            batch: events with the stream's schema.
            sequence: number of this append, for writers with a stable id: one that the store has already is
                dropped (S7). Default: the next one.

        Raises:
            UsageError: other schema, an event that is too large, or a gap in the numbers.
        """
        check_same_schema(self.stream.name, self.stream.schema, batch.schema)
        check_event_sizes(self.stream.name, batch)
        future: Future[Appended] = Future()
        with self._buffer_lock:
            number = self.next_sequence if sequence is None else sequence
            if number < self.next_sequence:
                future.set_result(Appended(is_duplicate=True))
                return future
            if number > self.next_sequence:
                raise UsageError(
                    f"writer '{self._writer_id}' of stream '{self.stream.name}': append {number} came where "
                    f"{self.next_sequence} was expected; numbers must follow each other"
                )
            self.next_sequence = number + 1
            if batch.num_rows == 0 and not self._writer_id:
                future.set_result(Appended())
                return future
            self._buffer.append(_Pending(batch, future, number))
            self._buffered_bytes += batch.nbytes
            is_full = self._buffered_bytes >= FLUSH_BYTES
        if is_full:
            self.flush()
        return future

    def flush(self) -> None:
        """Make everything appended so far durable and visible; complete the futures.

        Raises:
            StorageError: nothing more was acknowledged; the events are kept, and calling again continues (S38).
            FencedError: a newer epoch of this writer id exists.
        """
        with self._flush_lock:
            if self._attempt is not None:
                self._finish(self._attempt)
            with self._buffer_lock:
                items, self._buffer, self._buffered_bytes = self._buffer, [], 0
            if items:
                self._attempt = self._begin(items)
                self._finish(self._attempt)

    def close(self) -> None:
        """Flush."""
        self.flush()

    def __enter__(self) -> StreamWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()

    def _begin(self, items: list[_Pending]) -> _Attempt:
        self._turn += 1
        batches = [item.batch for item in items]
        encoded = encode_batches(self.stream, batches, self._turn)
        path = new_chunk_path(self.stream.stream_id, "appended")
        return _Attempt(path, items, encoded, items[-1].sequence)

    def _finish(self, attempt: _Attempt) -> None:
        self._storage.put(attempt.path, attempt.encoded.chunk.buffers)  # durable before visible
        try:
            with self._catalogue.write() as connection:
                first = self._record(connection, attempt)
        except (FencedError, UsageError) as error:  # final: a retry would be refused again
            self._attempt = None
            delete_quietly(self._storage, [attempt.path])
            for item in attempt.items:
                item.future.set_exception(error)
            raise
        self._attempt = None
        starts = dict(first)
        for item, counts in zip(attempt.items, attempt.encoded.counts.tolist(), strict=True):
            ranges = []
            for segment, count in enumerate(counts):
                if count:
                    ranges.append(AppendedRange(segment, starts[segment], count))
                    starts[segment] += count
            item.future.set_result(Appended(tuple(ranges)))

    def _record(self, connection: Connection, attempt: _Attempt) -> dict[int, int]:
        stream_id = self.stream.stream_id
        known = find_chunk(connection, attempt.path)
        if known is not None:  # an earlier try took effect although it reported an error
            return _recorded_starts(connection, known)
        check_writable(connection, self.stream)
        if self._writer_id:
            self._advance(connection, attempt)
        chunk = attempt.encoded.chunk
        chunk_id = insert_chunk(connection, stream_id, attempt.path, chunk.size_bytes)
        return assign_positions(connection, stream_id, [(chunk_id, entry) for entry in chunk.entries])

    def _register(self) -> int:
        """Fence older epochs of the writer id (S9); return its last sequence number."""
        where = (t.writers.c.stream_id == self.stream.stream_id, t.writers.c.writer_id == self._writer_id)
        with self._catalogue.write() as connection:
            row = connection.execute(sa.select(t.writers).where(*where)).one_or_none()
            if row is None:
                key = {"stream_id": self.stream.stream_id, "writer_id": self._writer_id}
                connection.execute(t.writers.insert().values(**key, epoch=self._epoch, sequence=0))
                return 0
            if row.epoch > self._epoch:
                raise FencedError(f"writer '{self._writer_id}' of stream '{self.stream.name}'", self._epoch, row.epoch)
            connection.execute(t.writers.update().where(*where).values(epoch=self._epoch))
            return int(row.sequence)

    def _advance(self, connection: Connection, attempt: _Attempt) -> None:
        """Compare-and-set the last sequence number, in the transaction that appends (S7)."""
        where = (t.writers.c.stream_id == self.stream.stream_id, t.writers.c.writer_id == self._writer_id)
        row = connection.execute(sa.select(t.writers).where(*where)).one()
        who = f"writer '{self._writer_id}' of stream '{self.stream.name}'"
        if row.epoch != self._epoch:
            raise FencedError(who, self._epoch, row.epoch)
        if row.sequence != attempt.items[0].sequence - 1:
            raise UsageError(f"{who} is used twice at the same time; give each a writer id or epoch of its own")
        connection.execute(t.writers.update().where(*where).values(sequence=attempt.last_sequence))


def _recorded_starts(connection: Connection, chunk_id: int) -> dict[int, int]:
    query = (
        sa.select(t.parts.c.segment, sa.func.min(t.parts.c.start))
        .where(t.parts.c.chunk_id == chunk_id)
        .group_by(t.parts.c.segment)
    )
    return {int(row[0]): int(row[1]) for row in connection.execute(query)}
