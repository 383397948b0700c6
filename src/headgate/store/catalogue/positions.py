"""Chunks and their parts in the tables: where every event is.

Counterpart: ``sql`` calls these inside its transactions. Source: rules LY3, LY4 and S14 of docs/spec/stream-store.md.
Never reads or writes a chunk file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from headgate.codec.chunk import PartEntry
from headgate.errors import UsageError
from headgate.store.catalogue import tables as t
from headgate.store.catalogue.base import ChunkRecord, PartsFound, StoredPart
from headgate.store.catalogue.streams import inserted_id
from headgate.store.streams import StreamInfo


def insert_chunk(connection: Connection, stream_id: int, chunk: ChunkRecord) -> int:
    """Record a chunk file, without its parts; return its number."""
    values = {"stream_id": stream_id, "path": chunk.path, "size_bytes": chunk.size_bytes}
    return inserted_id(connection.execute(t.chunks.insert().values(values)))


def assign_positions(connection: Connection, stream_id: int, parts: Sequence[tuple[int, PartEntry]]) -> dict[int, int]:
    """Make (chunk number, part) visible at the ends of their segments, in order (S14: all with this transaction).

    Returns:
        segment → position of its first new event.
    """
    touched = sorted({entry.segment for _, entry in parts})
    query = sa.select(t.segments.c.segment_id, t.segments.c.end_position).where(t.segments.c.stream_id == stream_id)
    ends: dict[int, int] = {row.segment_id: row.end_position for row in connection.execute(query)}
    first = {segment: ends[segment] for segment in touched}
    rows = []
    for chunk_id, entry in parts:
        rows.append({"stream_id": stream_id, "start": ends[entry.segment], **part_row(chunk_id, entry)})
        ends[entry.segment] += entry.events_count
    if rows:
        connection.execute(t.parts.insert(), rows)
        connection.execute(
            t.segments.update()
            .where(t.segments.c.stream_id == stream_id, t.segments.c.segment_id == sa.bindparam("at"))
            .values(end_position=sa.bindparam("now")),
            [{"at": segment, "now": ends[segment]} for segment in touched],
        )
    return first


def recorded_starts(connection: Connection, path: str) -> dict[int, int] | None:
    """Return where the events of a chunk begin in each segment; None when it is not recorded."""
    chunk_id = connection.scalar(sa.select(t.chunks.c.id).where(t.chunks.c.path == path))
    if chunk_id is None:
        return None
    query = (
        sa.select(t.parts.c.segment_id, sa.func.min(t.parts.c.start))
        .where(t.parts.c.chunk_id == chunk_id)
        .group_by(t.parts.c.segment_id)
    )
    return {int(row[0]): int(row[1]) for row in connection.execute(query)}


def find_parts(connection: Connection, stream: StreamInfo, segment: int, position: int, limit: int) -> PartsFound:
    """Return the parts of a segment that hold events from ``position`` on.

    Raises:
        UsageError: the stream was deleted.
    """
    values = {"stream_id": stream.stream_id, "segment": segment, "position": position, "most": limit}
    parts = tuple(stored_part(row) for row in connection.execute(_PARTS, values))
    if parts:
        return PartsFound(parts, is_at_end=False)
    is_sealed = connection.scalar(_SEALED, {"stream_id": stream.stream_id})
    if is_sealed is None:
        raise UsageError(f"stream '{stream.name}' was deleted while it was read")
    return PartsFound((), bool(is_sealed))


def part_row(chunk_id: int, entry: PartEntry) -> dict[str, object]:
    """Return the columns that ``parts`` and ``prepared_parts`` share."""
    return {
        "segment_id": entry.segment,
        "events_count": entry.events_count,
        "chunk_id": chunk_id,
        "offset": entry.offset,
        "size_bytes": entry.size_bytes,
        "checksum": entry.checksum.to_bytes(8, "big"),
    }


def part_entry(row: Any) -> PartEntry:
    """Return the part that a row of either table says."""
    checksum = int.from_bytes(row.checksum, "big")
    return PartEntry(row.segment_id, row.events_count, row.offset, row.size_bytes, checksum)


def stored_part(row: Any) -> StoredPart:
    """Return the part that a row of ``parts`` with the path of its chunk says."""
    return StoredPart(row.start, row.path, part_entry(row))


STORED_PARTS = sa.select(
    t.parts.c.segment_id,
    t.parts.c.start,
    t.parts.c.events_count,
    t.parts.c.offset,
    t.parts.c.size_bytes,
    t.parts.c.checksum,
    t.chunks.c.path,
).join_from(t.parts, t.chunks, t.parts.c.chunk_id == t.chunks.c.id)
"""What ``stored_part`` takes."""

_first = (
    sa.select(sa.func.max(t.parts.c.start))
    .where(
        t.parts.c.stream_id == sa.bindparam("stream_id"),
        t.parts.c.segment_id == sa.bindparam("segment"),
        t.parts.c.start <= sa.bindparam("position"),
    )
    .scalar_subquery()
)
_PARTS = (
    STORED_PARTS.where(
        t.parts.c.stream_id == sa.bindparam("stream_id"),
        t.parts.c.segment_id == sa.bindparam("segment"),
        t.parts.c.start >= sa.func.coalesce(_first, 0),
        t.parts.c.start + t.parts.c.events_count > sa.bindparam("position"),
    )
    .order_by(t.parts.c.start)
    .limit(sa.bindparam("most"))
)
_SEALED = sa.select(t.streams.c.is_sealed).where(t.streams.c.id == sa.bindparam("stream_id"))
