"""From batches to chunk files and back, and the catalogue's rows about them.

Counterpart: ``writer`` and ``transactions`` write chunks, ``reader`` reads parts. Source: rules LY1 to LY4 and S36 of
docs/spec/stream-store.md. Never makes events visible by itself: a chunk without catalogue rows is an orphan.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from headgate.codec.chunk import PART_BYTES_MAX, EncodedChunk, Part, PartEntry, encode_chunk, verify_part
from headgate.errors import CorruptionError, StorageError
from headgate.storage.base import NotFound, Storage
from headgate.store import tables as t
from headgate.store.routing import segments_of
from headgate.store.streams import StreamInfo, inserted_id

PART_ROWS_MAX = 65_536
"""A reader loads and verifies a part as a whole; this bounds what one read costs."""

PART_BYTES_TARGET = 16 << 20

FLUSH_BYTES = 32 << 20
"""Buffered events are written as a chunk at this size, so that memory is bounded whatever is written."""


@dataclass(frozen=True, slots=True)
class BatchChunk:
    """Batches encoded together.

    Attributes:
        chunk: the file.
        counts: per batch and segment, the number of events (row = batch, column = segment).
    """

    chunk: EncodedChunk
    counts: npt.NDArray[np.int64]

    @property
    def events_count(self) -> int:
        """Events in the chunk."""
        return int(self.counts.sum())


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A visible part: events of one segment from position ``start``."""

    start: int
    path: str
    entry: PartEntry

    @property
    def end(self) -> int:
        """Position after its last event."""
        return self.start + self.entry.events_count


def new_chunk_path(stream_id: int, kind: str) -> str:
    """Return a fresh path; ``kind`` is a directory below the stream's."""
    return f"{stream_id}/{kind}/{secrets.token_hex(16)}.chunk"


def encode_batches(stream: StreamInfo, batches: Sequence[pa.RecordBatch], fallback: int) -> BatchChunk:
    """Encode non-empty ``batches`` as one chunk; without a routing key all goes to segment ``fallback``.

    Order within a segment is the order of the batches.
    """
    whole = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
    lengths = [batch.num_rows for batch in batches]
    counts = np.zeros((len(batches), stream.segments_count), dtype=np.int64)
    if stream.routing_key is None or stream.segments_count == 1:
        segment = fallback % stream.segments_count
        counts[:, segment] = lengths
        return BatchChunk(encode_chunk(stream.stream_id, _parts(segment, whole)), counts)
    routes = segments_of(whole.column(stream.routing_key), stream.segments_count)
    at = 0
    for row, length in enumerate(lengths):
        counts[row] = np.bincount(routes[at : at + length], minlength=stream.segments_count)
        at += length
    ordered = whole.take(pa.array(np.argsort(routes, kind="stable")))
    parts: list[Part] = []
    at = 0
    for segment, count in enumerate(counts.sum(axis=0).tolist()):
        parts += _parts(segment, ordered.slice(at, count))
        at += count
    return BatchChunk(encode_chunk(stream.stream_id, parts), counts)


def read_part(storage: Storage, part: StoredPart, schema: pa.Schema) -> pa.RecordBatch:
    """Return the events of a part, verified.

    Raises:
        CorruptionError: the file is missing, cut or changed; names file and offset.
        StorageError: it cannot be read now.
    """
    entry, where = part.entry, f"{storage.url}/{part.path}"
    if not 0 < entry.size_bytes <= PART_BYTES_MAX:  # S37
        raise CorruptionError(where, entry.offset, f"a part of at most {PART_BYTES_MAX} bytes", f"{entry.size_bytes}")
    try:
        payload = storage.get_range(part.path, entry.offset, entry.size_bytes)
    except NotFound:
        raise CorruptionError(where, 0, "a chunk that the catalogue lists", "no such file") from None
    verify_part(where, entry, payload)
    try:
        batch = pa.ipc.read_record_batch(pa.py_buffer(payload), schema)
        batch.validate()
    except (pa.ArrowException, OSError) as error:
        raise CorruptionError(where, entry.offset, f"events of {schema.names}", str(error)) from error
    if batch.num_rows != entry.events_count:
        raise CorruptionError(where, entry.offset, f"{entry.events_count} events", f"{batch.num_rows}")
    return batch


def delete_quietly(storage: Storage, paths: Sequence[str]) -> None:
    """Remove orphans; what cannot be removed now stays harmless and is found by the next sweep."""
    for path in paths:
        try:
            storage.delete(path)
        except StorageError:
            return


def insert_chunk(connection: Connection, stream_id: int, path: str, size_bytes: int) -> int:
    """Record a chunk file; return its number."""
    values = {"stream_id": stream_id, "path": path, "size_bytes": size_bytes}
    return inserted_id(connection.execute(t.chunks.insert().values(values)))


def find_chunk(connection: Connection, path: str) -> int | None:
    """Return the number of a recorded chunk file."""
    found = connection.scalar(sa.select(t.chunks.c.id).where(t.chunks.c.path == path))
    return None if found is None else int(found)


def assign_positions(connection: Connection, stream_id: int, parts: Sequence[tuple[int, PartEntry]]) -> dict[int, int]:
    """Make (chunk number, part) visible at the ends of their segments, in order (S14: all with this transaction).

    Returns:
        segment → position of its first new event.
    """
    touched = sorted({entry.segment for _, entry in parts})
    query = sa.select(t.segments.c.segment, t.segments.c.end_position).where(t.segments.c.stream_id == stream_id)
    ends = {row.segment: row.end_position for row in connection.execute(query)}
    first = {segment: ends[segment] for segment in touched}
    rows = []
    for chunk_id, entry in parts:
        rows.append(
            {
                "stream_id": stream_id,
                "start": ends[entry.segment],
                "segment": entry.segment,
                **part_row(chunk_id, entry),
            }
        )
        ends[entry.segment] += entry.events_count
    if rows:
        connection.execute(t.parts.insert(), rows)
        connection.execute(
            t.segments.update()
            .where(t.segments.c.stream_id == stream_id, t.segments.c.segment == sa.bindparam("at"))
            .values(end_position=sa.bindparam("now")),
            [{"at": segment, "now": ends[segment]} for segment in touched],
        )
    return first


def part_row(chunk_id: int, entry: PartEntry) -> dict[str, object]:
    """Return the columns that ``parts`` and ``prepared_parts`` share."""
    return {
        "segment": entry.segment,
        "events_count": entry.events_count,
        "chunk_id": chunk_id,
        "offset": entry.offset,
        "size_bytes": entry.size_bytes,
        "checksum": entry.checksum.to_bytes(8, "big"),
    }


def _parts(segment: int, batch: pa.RecordBatch) -> list[Part]:
    """Cut into serialised pieces that stay below the limits."""
    if batch.num_rows == 0:
        return []
    pieces = max(-(-batch.num_rows // PART_ROWS_MAX), -(-batch.nbytes // PART_BYTES_TARGET))
    if pieces > 1 and batch.num_rows > 1:
        rows = -(-batch.num_rows // pieces)
        rows = min(rows, batch.num_rows - 1)
        return [part for at in range(0, batch.num_rows, rows) for part in _parts(segment, batch.slice(at, rows))]
    return [Part(segment, batch.num_rows, batch.serialize())]
