"""Markers of checkpoints in the tables: one moment of a stream, as a position in each of its segments.

Counterpart: ``sql`` calls these inside its transactions. Source: rules S60 to S64 of docs/spec/stream-store.md. Never
touches events: a marker lies between two of them, and takes no position.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from headgate.store.catalogue import tables as t
from headgate.store.catalogue.base import Frontier, Marker
from headgate.store.catalogue.kinds import all_of, of_kinds
from headgate.store.streams import StreamInfo


def mark(connection: Connection, stream: StreamInfo, owner: str, generation: int, checkpoint: int) -> dict[int, int]:
    """Record where every segment ends now, once for each checkpoint (S60, S61); return it."""
    found = _of(connection, stream, owner, generation, checkpoint)
    if found:
        return found
    ends = _ends(connection, stream)
    key = {"stream_id": stream.stream_id, "owner": owner, "generation": generation, "checkpoint": checkpoint}
    connection.execute(
        t.markers.insert(), [{**key, "segment_id": segment, "position": end} for segment, end in ends.items()]
    )
    return ends


def frontier(connection: Connection, stream: StreamInfo, owner: str, generation: int) -> Frontier:
    """Return how far a reader may read, and what markers lie in between (S62)."""
    query = (
        sa.select(t.markers.c.segment_id, t.markers.c.checkpoint, t.markers.c.position)
        .where(
            t.markers.c.stream_id == stream.stream_id,
            t.markers.c.owner == owner,
            t.markers.c.generation == generation,
        )
        .order_by(t.markers.c.checkpoint)
    )
    found: dict[int, list[Marker]] = {}
    for segment, checkpoint, position in (of_kinds(row, int, int, int) for row in connection.execute(query).all()):
        found.setdefault(segment, []).append(Marker(checkpoint, position))
    is_sealed = connection.scalar(sa.select(t.streams.c.is_sealed).where(t.streams.c.id == stream.stream_id))
    markers = {segment: tuple(of_segment) for segment, of_segment in found.items()}
    mine = (t.segments.c.stream_id == stream.stream_id, t.segments.c.closed_epoch.is_not(None))
    closed = frozenset(all_of(connection.scalars(sa.select(t.segments.c.segment_id).where(*mine)), int))
    return Frontier(_ends(connection, stream), markers, bool(is_sealed), closed)


def unmark(connection: Connection, owner: str, generation: int, first: int, last: int) -> None:
    """Forget the markers of checkpoints ``first`` to ``last`` of one generation, in all streams (S63)."""
    connection.execute(
        t.markers.delete().where(
            t.markers.c.owner == owner,
            t.markers.c.generation == generation,
            t.markers.c.checkpoint.between(first, last),
        )
    )


def unmark_others(connection: Connection, owner: str, generation: int) -> None:
    """Forget the markers of every generation of ``owner`` but this one (S63)."""
    connection.execute(t.markers.delete().where(t.markers.c.owner == owner, t.markers.c.generation != generation))


def _of(connection: Connection, stream: StreamInfo, owner: str, generation: int, checkpoint: int) -> dict[int, int]:
    query = sa.select(t.markers.c.segment_id, t.markers.c.position).where(
        t.markers.c.stream_id == stream.stream_id,
        t.markers.c.owner == owner,
        t.markers.c.generation == generation,
        t.markers.c.checkpoint == checkpoint,
    )
    return {int(row[0]): int(row[1]) for row in connection.execute(query)}


def _ends(connection: Connection, stream: StreamInfo) -> dict[int, int]:
    query = (
        sa.select(t.segments.c.segment_id, t.segments.c.end_position)
        .where(t.segments.c.stream_id == stream.stream_id)
        .order_by(t.segments.c.segment_id)
    )
    return {int(row[0]): int(row[1]) for row in connection.execute(query)}
