"""How far a stream has come in event time, by what its writers note.

Source: S90 to S93 of docs/spec/stream-store.md. Never goes back.
"""

from __future__ import annotations

from collections.abc import Mapping

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from headgate.errors import FencedError
from headgate.store.catalogue import tables as t
from headgate.store.catalogue.base import Catalogue
from headgate.store.catalogue.stream_rows import check_takes_events
from headgate.store.streams import StreamInfo

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
