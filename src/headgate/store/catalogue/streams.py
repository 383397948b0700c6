"""Streams and their segments in the tables.

Counterpart: ``sql`` calls these inside its transactions. Source: docs/spec/stream-store.md §2, and CT6.
Never touches chunk files.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from headgate.errors import UsageError
from headgate.protocol.store.transactions import Status
from headgate.store.catalogue import tables as t
from headgate.store.schemas import check_same_schema, decode_schema, encode_schema
from headgate.store.streams import (
    Layout,
    Segment,
    StreamDefinition,
    StreamInfo,
    check_open,
    first_layout,
    no_such_stream,
)


def insert_stream(
    connection: Connection, wanted: StreamDefinition, now_ms: int, *, if_not_exists: bool, where: str
) -> StreamInfo:
    """Create a stream; with ``if_not_exists`` return the one there is when it fits.

    Raises:
        UsageError: it exists, or exists with another schema or routing key.
    """
    row = connection.execute(sa.select(t.streams).where(t.streams.c.name == wanted.name)).one_or_none()
    if row is not None:
        if not if_not_exists:
            raise UsageError(f"stream '{wanted.name}' exists already in {where}; delete it or choose another name")
        found = stream_info(row, where)
        check_same_schema(found.name, found.schema, wanted.schema)
        if wanted.routing_key is not None and wanted.routing_key != found.routing_key:
            raise UsageError(
                f"stream '{found.name}' has the routing key {found.routing_key!r}, not {wanted.routing_key!r}; "
                "use that one or another stream"
            )
        return found
    layout = first_layout(wanted.segments_count)
    result = connection.execute(
        t.streams.insert().values(
            name=wanted.name,
            schema=encode_schema(wanted.schema),
            segments_count=wanted.segments_count,
            layout_epoch=layout.epoch,
            routing_key=wanted.routing_key,
            is_sealed=False,
            created_ms=now_ms,
        )
    )
    insert_segments(connection, inserted_id(result), layout.segments, {})
    return find_stream(connection, wanted.name, where)


def insert_segments(
    connection: Connection, stream_id: int, segments: tuple[Segment, ...], ends: dict[int, int]
) -> None:
    """Record segments of a stream. ``ends`` by number; 0 where it says nothing."""
    rows = [
        {
            "stream_id": stream_id,
            "segment_id": segment.segment_id,
            "key_low": segment.key_low,
            "key_high": segment.key_high,
            "created_epoch": segment.created_epoch,
            "closed_epoch": segment.closed_epoch,
            "end_position": ends.get(segment.segment_id, 0),
        }
        for segment in segments
    ]
    connection.execute(t.segments.insert(), rows)


def inserted_id(result: sa.CursorResult[Any]) -> int:
    """Return the number the database gave to the one row inserted."""
    key = result.inserted_primary_key
    assert key is not None
    return int(key[0])


def find_stream(connection: Connection, name: str, where: str) -> StreamInfo:
    """Return the stream without its counts.

    Raises:
        UsageError: there is none; the message names those there are.
    """
    row = connection.execute(sa.select(t.streams).where(t.streams.c.name == name)).one_or_none()
    if row is None:
        names = connection.scalars(sa.select(t.streams.c.name).order_by(t.streams.c.name)).all()
        raise no_such_stream(name, where, names)
    return stream_info(row, where)


def find_layout(connection: Connection, stream: StreamInfo) -> Layout:
    """Return the segments of a stream, those of former layouts included."""
    columns = (
        t.segments.c.segment_id,
        t.segments.c.key_low,
        t.segments.c.key_high,
        t.segments.c.created_epoch,
        t.segments.c.closed_epoch,
    )
    query = sa.select(*columns).where(t.segments.c.stream_id == stream.stream_id).order_by(t.segments.c.segment_id)
    return Layout(stream.layout_epoch, tuple(Segment(*row) for row in connection.execute(query)))


def stream_info(row: Any, where: str) -> StreamInfo:
    """Return a row of ``streams`` as a value."""
    return StreamInfo(
        stream_id=row.id,
        name=row.name,
        schema=decode_schema(where, row.schema),
        segments_count=row.segments_count,
        layout_epoch=row.layout_epoch,
        routing_key=row.routing_key,
        is_sealed=row.is_sealed,
        created_ms=row.created_ms,
    )


def with_counts(connection: Connection, info: StreamInfo) -> StreamInfo:
    """Return ``info`` with ends, sizes and prepared transactions filled in."""
    ends = connection.scalars(
        sa.select(t.segments.c.end_position)
        .where(t.segments.c.stream_id == info.stream_id)
        .order_by(t.segments.c.segment_id)
    ).all()
    chunks_count, size_bytes = connection.execute(
        sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(t.chunks.c.size_bytes), 0)).where(
            t.chunks.c.stream_id == info.stream_id
        )
    ).one()
    return replace(
        info,
        ends=tuple(ends),
        chunks_count=chunks_count,
        size_bytes=size_bytes,
        prepared_count=len(_prepared_names(connection, info.stream_id)),
    )


def check_writable(connection: Connection, stream: StreamInfo) -> None:
    """Check that events may be added that were routed by what ``stream`` says.

    Raises:
        UsageError: the stream is sealed, was deleted, or has another layout (CT6).
    """
    query = sa.select(t.streams.c.is_sealed, t.streams.c.layout_epoch).where(t.streams.c.id == stream.stream_id)
    row = connection.execute(query).one_or_none()
    if row is None:
        raise UsageError(f"stream '{stream.name}' was deleted; open it again if it was created anew")
    check_open(replace(stream, is_sealed=row.is_sealed))
    if row.layout_epoch != stream.layout_epoch:
        raise UsageError(f"stream '{stream.name}' has other segments than when it was opened; open it again")


def seal_stream(connection: Connection, info: StreamInfo) -> None:
    """End a stream.

    Raises:
        UsageError: a prepared transaction waits, whose commit must not fail (S12).
    """
    waiting = _prepared_names(connection, info.stream_id)
    if waiting:
        raise UsageError(
            f"stream '{info.name}' has {len(waiting)} prepared transaction(s), first '{waiting[0]}'; "
            "commit or abort them before sealing"
        )
    connection.execute(t.streams.update().where(t.streams.c.id == info.stream_id).values(is_sealed=True))


def delete_stream(connection: Connection, info: StreamInfo) -> None:
    """Remove everything the catalogue knows of a stream; its chunks are orphans afterwards."""
    own = sa.select(t.transactions.c.id).where(t.transactions.c.stream_id == info.stream_id)
    connection.execute(t.prepared_parts.delete().where(t.prepared_parts.c.transaction_id.in_(own)))
    for table in (t.transactions, t.writers, t.parts, t.chunks, t.markers, t.segments):
        connection.execute(table.delete().where(table.c.stream_id == info.stream_id))
    connection.execute(t.streams.delete().where(t.streams.c.id == info.stream_id))


def _prepared_names(connection: Connection, stream_id: int) -> list[str]:
    """Return the transactions of a stream that wait for a verdict."""
    query = sa.select(t.transactions.c.name).where(
        t.transactions.c.stream_id == stream_id, t.transactions.c.status == Status.PREPARED.value
    )
    return sorted(connection.scalars(query).all())
