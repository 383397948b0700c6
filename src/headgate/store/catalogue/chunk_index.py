"""Chunks, their parts and the numbers of their writers in the tables: where every event is, and how far event time is.

Counterpart: ``sql`` calls these inside its transactions. Source: rules S9, S14 and S90 to S93 of
docs/spec/stream-store.md. Never reads or writes a chunk file, and never lets an older epoch of a writer pass. The event
time of a stream, which its writers note, never goes back.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from headgate.codec.chunk import PartEntry
from headgate.errors import CorruptionError, FencedError, TruncatedError, UsageError
from headgate.store.catalogue import tables as t
from headgate.store.catalogue.base import Catalogue
from headgate.store.catalogue.records import AppendFound, ChunkRecord, Numbers, PartsFound, StoredPart
from headgate.store.catalogue.stream_rows import check_takes_events, check_writable, inserted_id
from headgate.store.catalogue.tables import checked_row
from headgate.store.streams import RemovedFileError, StreamInfo


@t.implements(Catalogue.register_writer)
def register_writer(connection: Connection, stream: StreamInfo, writer_id: str, epoch: int) -> int:
    """Fence older epochs of the writer id (S9); return its last sequence number."""
    where = (t.writers.c.stream_id == stream.stream_id, t.writers.c.writer_id == writer_id)
    row = connection.execute(sa.select(t.writers).where(*where)).one_or_none()
    if row is None:
        key = {"stream_id": stream.stream_id, "writer_id": writer_id}
        connection.execute(t.writers.insert().values(**key, epoch=epoch, sequence=0))
        return 0
    if row.epoch > epoch:
        raise FencedError(f"writer '{writer_id}' of stream '{stream.name}'", epoch, row.epoch)
    connection.execute(t.writers.update().where(*where).values(epoch=epoch))
    return int(row.sequence)


def advance_writer(connection: Connection, stream: StreamInfo, numbers: Numbers) -> None:
    """Compare-and-set the last sequence number, in the transaction that appends."""
    where = (t.writers.c.stream_id == stream.stream_id, t.writers.c.writer_id == numbers.writer_id)
    row = connection.execute(sa.select(t.writers).where(*where)).one_or_none()
    who = f"writer '{numbers.writer_id}' of stream '{stream.name}'"
    if row is None:
        raise CorruptionError(who, 0, "its numbers in the catalogue", "none")
    if row.epoch != numbers.epoch:
        raise FencedError(who, numbers.epoch, row.epoch)
    if row.sequence != numbers.first - 1:
        raise UsageError(f"{who} is used twice at the same time; give each a writer id or epoch of its own")
    connection.execute(t.writers.update().where(*where).values(sequence=numbers.last))


_PATHS_AT_A_TIME = 500


@t.implements(Catalogue.append)
def append(
    connection: Connection,
    stream: StreamInfo,
    chunk: ChunkRecord,
    numbers: Numbers | None,
    now_ms: int,
    is_timed: bool = False,
) -> dict[int, int]:
    """Record a durable chunk and make its parts visible."""
    # layout, fence and numbers are checked in the transaction that makes the events visible: nothing
    # can change in between (S9)
    check_writable(connection, stream)
    if numbers is not None:
        advance_writer(connection, stream, numbers)
    chunk_id = insert_chunk(connection, stream.stream_id, chunk)
    placed = [(chunk_id, entry) for entry in chunk.entries]
    event_ms = event_time(connection, stream.stream_id) if is_timed else None
    return assign_positions(connection, stream.stream_id, placed, now_ms, event_ms)


def insert_chunk(connection: Connection, stream_id: int, chunk: ChunkRecord) -> int:
    """Record a chunk file, without its parts; return its number.

    Raises:
        RemovedFileError: it was condemned.
    """
    if _is_condemned(connection, chunk.path):
        raise RemovedFileError(
            f"the file {chunk.path} was removed as an orphan before its events were recorded, so none of them is in "
            "the store: write them again, and remove orphans only while no process writes"
        )
    values = {
        "stream_id": stream_id,
        "file": chunk.path,
        "size_bytes": chunk.size_bytes,
        "schema_version": chunk.schema_version,
    }
    return inserted_id(connection.execute(t.chunks.insert().values(values)))


def assign_positions(
    connection: Connection,
    stream_id: int,
    parts: Sequence[tuple[int, PartEntry]],
    now_ms: int,
    event_ms: int | None = None,
) -> dict[int, int]:
    """Make (chunk number, part) visible at the ends of their segments, in order (S14: all with this transaction).

    The date that is recorded with them is never before that of what the stream has already. ``event_ms``: see
    ``parts``.

    Returns:
        segment → position of its first new event.

    Raises:
        CorruptionError: a segment of the layout by which they were routed is lost.
    """
    touched = sorted({entry.segment for _, entry in parts})
    columns = (t.segments.c.segment_id, t.segments.c.end_position, t.segments.c.latest_ms)
    found = connection.execute(sa.select(*columns).where(*t.open_segments(stream_id))).all()
    for row in found:
        checked_row(row, int, int, int)
    ends: dict[int, int] = {row.segment_id: row.end_position for row in found}
    lost = [segment for segment in touched if segment not in ends]
    if lost:
        where = f"the layout of stream {stream_id}"
        raise CorruptionError(where, 0, f"segment {lost[0]} among those that take events", "none")
    visible_ms = max([now_ms, *(row.latest_ms for row in found)])
    first = {segment: ends[segment] for segment in touched}
    rows = []
    for chunk_id, entry in parts:
        place = {"stream_id": stream_id, "start": ends[entry.segment], "visible_ms": visible_ms, "event_ms": event_ms}
        rows.append(place | part_row(chunk_id, entry))
        ends[entry.segment] += entry.events_count
    if rows:
        connection.execute(t.parts.insert(), rows)
        connection.execute(
            t.segments.update()
            .where(t.segments.c.stream_id == stream_id, t.segments.c.segment_id == sa.bindparam("at"))
            .values(end_position=sa.bindparam("now"), latest_ms=visible_ms),
            [{"at": segment, "now": ends[segment]} for segment in touched],
        )
    return first


@t.implements(Catalogue.chunk_paths)
def chunk_paths(connection: Connection, below: str = "") -> set[str]:
    """Return the recorded chunk files below a directory."""
    query = sa.select(t.chunks.c.file)
    if below:
        query = query.where(t.chunks.c.file.startswith(f"{below}/", autoescape=True))
    return set(t.checked_values(connection.scalars(query), str))


@t.implements(Catalogue.known_chunks)
def known_chunks(connection: Connection, paths: Collection[str]) -> set[str]:
    """Return those of these files that are recorded."""
    found: set[str] = set()
    ordered = sorted(paths)
    for at in range(0, len(ordered), _PATHS_AT_A_TIME):
        some = t.chunks.c.file.in_(ordered[at : at + _PATHS_AT_A_TIME])
        found.update(connection.scalars(sa.select(t.chunks.c.file).where(some)))
    return found


@t.implements(Catalogue.condemn)
def condemn(connection: Connection, paths: Collection[str]) -> set[str]:
    """Return those of these files that are not recorded. They never will be from now on."""
    # in one transaction, and `insert_chunk` looks at it in its own: a file is recorded or removed, never both
    condemned = set(paths) - known_chunks(connection, paths)
    left = sorted(condemned)
    for at in range(0, len(left), _PATHS_AT_A_TIME):
        some = left[at : at + _PATHS_AT_A_TIME]
        listed = set(connection.scalars(sa.select(t.garbage.c.path).where(t.garbage.c.path.in_(some))))
        # the entry of a truncation stays as it is: `find_append` tells the two kinds apart by the stream
        new = [{"path": path, "stream_id": t.NO_STREAM} for path in some if path not in listed]
        if new:
            connection.execute(t.garbage.insert(), new)
    return condemned


def _is_condemned(connection: Connection, path: str) -> bool:
    return connection.scalar(_OF_GARBAGE, {"path": path}) == t.NO_STREAM


_OF_GARBAGE = sa.select(t.garbage.c.stream_id).where(t.garbage.c.path == sa.bindparam("path"))


@t.implements(Catalogue.find_append)
def find_append(connection: Connection, path: str) -> AppendFound:
    """Return what became of the append of a chunk."""
    chunk_id = connection.scalar(sa.select(t.chunks.c.id).where(t.chunks.c.file == path))
    if chunk_id is None:
        of_stream = connection.scalar(_OF_GARBAGE, {"path": path})
        is_truncated = of_stream is not None and of_stream != t.NO_STREAM
        return AppendFound(is_truncated=is_truncated, is_condemned=of_stream == t.NO_STREAM)
    # Its first parts may have been truncated, its last ones not before all of a segment's are.
    query = (
        sa.select(t.parts.c.segment_id, sa.func.max(t.parts.c.start + t.parts.c.events_count))
        .where(t.parts.c.chunk_id == chunk_id)
        .group_by(t.parts.c.segment_id)
    )
    return AppendFound({int(row[0]): int(row[1]) for row in connection.execute(query)})


@t.implements(Catalogue.parts)
def find_parts(connection: Connection, stream: StreamInfo, segment: int, position: int, limit: int) -> PartsFound:
    """Return the parts of a segment that hold events from ``position`` on. One that is closed has an end.

    Raises:
        UsageError: the stream was deleted.
        TruncatedError: the segment begins after ``position``.
        CorruptionError: the row of the next one holds what it never holds.
    """
    head = connection.scalar(_HEAD, {"stream_id": stream.stream_id, "segment": segment})
    if head is not None and position < head:
        raise TruncatedError(stream.name, segment, position, head)
    values = {"stream_id": stream.stream_id, "segment": segment, "position": position, "most": limit}
    rows = connection.execute(_PARTS, values).all()
    parts = tuple(stored_part(row) for row in itertools.takewhile(is_sound_part, rows))
    if parts:  # those before the damage are read; the next look begins with it
        end = parts[-1].end
        # there may be more of them: then only the segment knows its end
        if len(parts) == limit:
            ended = connection.execute(_ENDED, {"stream_id": stream.stream_id, "segment": segment}).one_or_none()
            end = end if ended is None else max(end, checked_row(ended, bool, int | None, int, int | None)[2])
        return PartsFound(parts, is_at_end=False, end=end)
    if rows:
        where = f"the catalogue's part of stream '{stream.name}', segment {segment}, from position {position} on"
        raise CorruptionError(where, 0, "where its events are", str(tuple(rows[0])))
    row = connection.execute(_ENDED, {"stream_id": stream.stream_id, "segment": segment}).one_or_none()
    if row is None:
        if connection.scalar(sa.select(t.streams.c.id).where(t.streams.c.id == stream.stream_id)) is not None:
            raise CorruptionError(f"the layout of stream '{stream.name}'", 0, f"segment {segment}", "none")
        raise UsageError(f"stream '{stream.name}' was deleted while it was read")
    is_sealed, closed_epoch, end, event_ms = checked_row(row, bool, int | None, int, int | None)
    return PartsFound((), is_at_end=is_sealed or closed_epoch is not None, end=end, event_ms=event_ms)


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
    return StoredPart(row.start, row.file, part_entry(row), row.schema_version, row.visible_ms, row.event_ms)


def is_sound_part(row: Any) -> bool:
    """Whether a row for ``stored_part`` holds what it must: SQLite keeps anything in any column."""
    return tuple(map(type, row[:-1])) == _TYPES and isinstance(row[-1], int | None)


STORED_PARTS = sa.select(
    t.parts.c.segment_id,
    t.parts.c.start,
    t.parts.c.events_count,
    t.parts.c.offset,
    t.parts.c.size_bytes,
    t.parts.c.checksum,
    t.chunks.c.file,
    t.chunks.c.schema_version,
    t.parts.c.visible_ms,
    t.parts.c.event_ms,
).join_from(t.parts, t.chunks, t.parts.c.chunk_id == t.chunks.c.id)
"""What ``stored_part`` takes."""

_TYPES = (int, int, int, int, int, bytes, str, int, int)

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
        # by the index: the end of a part alone would have all parts before the position looked at
        t.parts.c.start >= sa.func.coalesce(_first, 0),
        t.parts.c.start + t.parts.c.events_count > sa.bindparam("position"),
    )
    .order_by(t.parts.c.start)
    .limit(sa.bindparam("most"))
)
_HEAD = sa.select(t.segments.c.head_position).where(
    t.segments.c.stream_id == sa.bindparam("stream_id"), t.segments.c.segment_id == sa.bindparam("segment")
)
_ENDED = (
    sa.select(t.streams.c.is_sealed, t.segments.c.closed_epoch, t.segments.c.end_position, t.segments.c.event_ms)
    .join_from(t.streams, t.segments, t.streams.c.id == t.segments.c.stream_id)
    .where(t.streams.c.id == sa.bindparam("stream_id"), t.segments.c.segment_id == sa.bindparam("segment"))
)


EVENT_MS_MIN = -(1 << 62)
"""Earlier than any event: its writers have come nowhere yet."""

SILENT_MS = 600_000
"""An owner that has noted nothing for so long no longer holds the stream back."""


@t.implements(Catalogue.note_time)
def note_time(
    connection: Connection,
    stream: StreamInfo,
    owner: str,
    event_ms: int,
    now_ms: int,
    *,
    writer: tuple[str, int] | None,
) -> None:
    """Record how far ``owner`` has come with what is in the stream by now."""
    check_takes_events(connection, stream)
    if writer is not None:
        writer_id, epoch = writer
        where = (t.writers.c.stream_id == stream.stream_id, t.writers.c.writer_id == writer_id)
        newest = connection.scalar(sa.select(t.writers.c.epoch).where(*where))
        if newest is not None and newest != epoch:
            raise FencedError(f"writer '{writer_id}' of stream '{stream.name}'", epoch, newest)
    note(connection, stream.stream_id, owner, event_ms, now_ms, {})


@t.implements(Catalogue.forget_time)
def forget_time(connection: Connection, stream: StreamInfo, owner: str) -> None:
    """Let ``owner`` no longer hold the stream back."""
    connection.execute(t.event_times.delete().where(*_of(stream.stream_id, owner)))


def note(
    connection: Connection, stream_id: int, owner: str, event_ms: int, now_ms: int, before: Mapping[int, int]
) -> None:
    """Record how far ``owner`` has come; the stream has come as far as the last of its owners (S90).

    ``before``: where the segments ended. The time holds after all that was committed with it, not between.
    """
    _set(connection, stream_id, owner, max(event_ms, EVENT_MS_MIN), now_ms)
    recent = (t.event_times.c.noted_ms >= now_ms - SILENT_MS, t.event_times.c.owner != t.OF_THE_STREAM)
    lowest = sa.select(sa.func.min(t.event_times.c.event_ms)).where(t.event_times.c.stream_id == stream_id, *recent)
    # one that was silent for long may come back with an earlier time, and the stream's never goes back
    found = max(int(connection.scalars(lowest).one()), event_time(connection, stream_id))
    _set(connection, stream_id, t.OF_THE_STREAM, found, now_ms)
    connection.execute(t.segments.update().where(*t.open_segments(stream_id)).values(event_ms=found))
    for segment, end in segment_ends(connection, stream_id).items():
        if end > before.get(segment, 0):
            of_segment = (t.parts.c.stream_id == stream_id, t.parts.c.segment_id == segment)
            last = sa.select(sa.func.max(t.parts.c.start)).where(*of_segment)
            start = connection.scalars(last).one()  # none, where all of them were truncated
            connection.execute(t.parts.update().where(*of_segment, t.parts.c.start == start).values(event_ms=found))


def event_time(connection: Connection, stream_id: int) -> int:
    """Return how far a stream has come in event time; writers that say so may be anywhere at first."""
    found = connection.scalar(sa.select(t.event_times.c.event_ms).where(*_of(stream_id, t.OF_THE_STREAM)))
    return EVENT_MS_MIN if found is None else int(found)


def segment_ends(connection: Connection, stream_id: int) -> dict[int, int]:
    """Return where each open segment ends."""
    columns = (t.segments.c.segment_id, t.segments.c.end_position)
    return {
        int(row[0]): int(row[1]) for row in connection.execute(sa.select(*columns).where(*t.open_segments(stream_id)))
    }


def _of(stream_id: int, owner: str) -> tuple[sa.ColumnElement[bool], sa.ColumnElement[bool]]:
    return t.event_times.c.stream_id == stream_id, t.event_times.c.owner == owner


def _set(connection: Connection, stream_id: int, owner: str, event_ms: int, now_ms: int) -> None:
    connection.execute(t.event_times.delete().where(*_of(stream_id, owner)))
    row = {"stream_id": stream_id, "owner": owner, "event_ms": event_ms, "noted_ms": now_ms}
    connection.execute(t.event_times.insert().values(row))
