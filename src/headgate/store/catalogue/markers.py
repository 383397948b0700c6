"""Markers of checkpoints in the tables: one moment of a stream, as a position in each of its segments.

Counterpart: ``sql`` calls these inside its transactions. Source: rules S60 to S64 and S85 of docs/spec/stream-store.md.
Never touches events: a marker lies between two of them, and takes no position.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from headgate.store.catalogue import tables as t
from headgate.store.catalogue.base import Catalogue
from headgate.store.catalogue.records import Frontier, Marker
from headgate.store.catalogue.stream_rows import find_stream
from headgate.store.catalogue.tables import checked_row
from headgate.store.streams import StreamInfo


@t.implements(Catalogue.mark)
def mark(connection: Connection, stream: str, owner: str, generation: int, checkpoint: int) -> dict[int, int]:
    """Record where every segment ends now that takes events, once for each checkpoint (S60, S61); return it.

    Closed ones have ended for good: of those nothing has to be recorded (S85).
    """
    info = find_stream(connection, stream)
    found = _find_markers(connection, info, owner, generation, checkpoint)
    if found:
        return found
    query = sa.select(t.segments.c.segment_id, t.segments.c.end_position).where(*t.open_segments(info.stream_id))
    ends = dict(checked_row(row, int, int) for row in connection.execute(query).all())
    key = {"stream_id": info.stream_id, "owner": owner, "generation": generation, "checkpoint": checkpoint}
    connection.execute(
        t.markers.insert(), [{**key, "segment_id": segment, "position": end} for segment, end in ends.items()]
    )
    return ends


@t.implements(Catalogue.frontier)
def frontier(
    connection: Connection, stream: str, owner: str, generation: int, segments: Sequence[int] | None = None
) -> Frontier:
    """Return how far a reader of ``segments``, or of all, may read, and what markers lie in between (S62)."""
    info = find_stream(connection, stream)
    query = sa.select(t.markers.c.segment_id, t.markers.c.checkpoint, t.markers.c.position).where(
        t.markers.c.stream_id == info.stream_id, t.markers.c.owner == owner, t.markers.c.generation == generation
    )
    found: dict[int, dict[int, int]] = {}
    newest: dict[int, int] = {}
    for segment, checkpoint, position in (checked_row(row, int, int, int) for row in connection.execute(query).all()):
        found.setdefault(segment, {})[checkpoint] = position
        newest[checkpoint] = max(segment, newest.get(checkpoint, segment))
    ends, closed = _ends(connection, info, segments)
    for segment in closed:
        # S85: it was there when a marker names later ones, and closed when it does not name this one.
        before = {checkpoint: ends[segment] for checkpoint, last in newest.items() if segment <= last}
        if before:
            found[segment] = before | found.get(segment, {})
    markers = {x: tuple(Marker(*marker) for marker in sorted(of_x.items())) for x, of_x in sorted(found.items())}
    return Frontier(ends, markers, info.is_sealed, frozenset(closed))


@t.implements(Catalogue.unmark)
def unmark(connection: Connection, owner: str, generation: int, first: int, last: int) -> None:
    """Forget the markers of checkpoints ``first`` to ``last`` of one generation, in all streams (S63)."""
    connection.execute(
        t.markers.delete().where(
            t.markers.c.owner == owner,
            t.markers.c.generation == generation,
            t.markers.c.checkpoint.between(first, last),
        )
    )


@t.implements(Catalogue.unmark_others)
def unmark_others(connection: Connection, owner: str, generation: int) -> None:
    """Forget the markers of every generation of ``owner`` but this one (S63)."""
    connection.execute(t.markers.delete().where(t.markers.c.owner == owner, t.markers.c.generation != generation))


def _find_markers(
    connection: Connection, stream: StreamInfo, owner: str, generation: int, checkpoint: int
) -> dict[int, int]:
    query = sa.select(t.markers.c.segment_id, t.markers.c.position).where(
        t.markers.c.stream_id == stream.stream_id,
        t.markers.c.owner == owner,
        t.markers.c.generation == generation,
        t.markers.c.checkpoint == checkpoint,
    )
    return {int(row[0]): int(row[1]) for row in connection.execute(query)}


def _ends(
    connection: Connection, stream: StreamInfo, segments: Sequence[int] | None
) -> tuple[dict[int, int], list[int]]:
    """Return where these segments end, or all, and which of them are closed."""
    own = t.segments.c
    query = sa.select(own.segment_id, own.end_position, own.closed_epoch).where(own.stream_id == stream.stream_id)
    if segments is not None:
        query = query.where(own.segment_id.in_(segments))
    rows = [checked_row(row, int, int, int | None) for row in connection.execute(query.order_by(own.segment_id)).all()]
    return {number: end for number, end, _ in rows}, [number for number, _, closed in rows if closed is not None]
