"""Streams, their segments and their schemas in the tables.

Counterpart: ``sql`` calls these inside its transactions; ``protocol.store.schema_update`` decides about schemas.
Source: §2, CT6 and S76 of docs/spec/stream-store.md. Never touches chunk files, and never forgets a schema of a stream
that is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from headgate.errors import CorruptionError, UsageError
from headgate.protocol.store.layouts import Layout, ScalingPolicy, Segment, first_layout, gaps_between
from headgate.protocol.store.schema_update import Incompatible, Unchanged, update
from headgate.protocol.store.transactions import Status
from headgate.protocol.store.truncation import Extent
from headgate.store.catalogue import tables as t
from headgate.store.catalogue.base import Catalogue
from headgate.store.catalogue.tables import checked_row, checked_values
from headgate.store.streams import (
    OtherLayoutError,
    RetentionPolicy,
    StreamDefinition,
    StreamInfo,
    check_added_may_be_null,
    check_open,
    check_same_schema,
    columns_of,
    decode_retention,
    decode_scaling,
    decode_schema,
    encode_retention,
    encode_scaling,
    encode_schema,
    merged_schema,
    newest_matching,
    no_such_stream,
    plain_schema,
    schema_difference,
)


@t.implements(Catalogue.create_stream)
def create_stream(connection: Connection, wanted: StreamDefinition, now_ms: int, *, if_not_exists: bool) -> StreamInfo:
    """Create a stream; with ``if_not_exists`` return the one there is when it fits."""
    where = t.store_of(connection)
    row = connection.execute(sa.select(t.streams).where(t.streams.c.name == wanted.name)).one_or_none()
    if row is not None:
        if not if_not_exists:
            raise UsageError(f"stream '{wanted.name}' exists already in {where}; delete it or choose another name")
        found = stream_info(connection, row)
        had = find_schemas(connection, found)
        # any schema that it has had will do: the program may be older than the last update (S76)
        if newest_matching(had, lambda schema: schema_difference(schema, wanted.schema)) is None:
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
            retention=encode_retention(wanted.retention),
            scaling=encode_scaling(wanted.scaling),
            scaled_ms=now_ms,
        )
    )
    stream_id = inserted_id(result)
    rows = [
        {
            "stream_id": stream_id,
            "segment_id": segment.segment_id,
            "key_low": segment.key_low,
            "key_high": segment.key_high,
            "created_epoch": segment.created_epoch,
            "end_position": 0,
        }
        for segment in layout.segments
    ]
    connection.execute(t.segments.insert(), rows)
    return find_stream(connection, wanted.name)


def inserted_id(result: sa.CursorResult[Any]) -> int:
    """Return the number the database gave to the one row inserted."""
    key = result.inserted_primary_key
    assert key is not None, "one row was inserted, and got a number"
    return int(key[0])


@t.implements(Catalogue.find_stream)
def find_stream(connection: Connection, name: str) -> StreamInfo:
    """Return the stream without its counts.

    Raises:
        UsageError: there is none; the message names those there are.
    """
    found = find_stream_or_none(connection, name)
    if found is None:
        names = connection.scalars(sa.select(t.streams.c.name).order_by(t.streams.c.name)).all()
        raise no_such_stream(name, t.store_of(connection), names)
    return with_segments(connection, found)


def find_stream_or_none(connection: Connection, name: str) -> StreamInfo | None:
    """Return the stream without counts and segments; None: there is none."""
    row = connection.execute(_NAMED, {"name": name}).one_or_none()
    return None if row is None else stream_info(connection, row)


@t.implements(Catalogue.describe_stream)
def describe_stream(connection: Connection, name: str) -> StreamInfo:
    """Return a stream with its counts."""
    (found,) = with_counts(connection, [find_stream(connection, name)])
    return found


@t.implements(Catalogue.list_streams)
def list_streams(connection: Connection, scope: str) -> list[StreamInfo]:
    """Return the streams by name, with their counts."""
    query = sa.select(t.streams).order_by(t.streams.c.name)
    if scope:
        query = query.where(t.streams.c.name.startswith(scope.rstrip("/") + "/", autoescape=True))
    return with_counts(connection, [stream_info(connection, row) for row in connection.execute(query).all()])


@t.implements(Catalogue.layout)
def layout(connection: Connection, name: str) -> Layout:
    """Return the segments of a stream, those of former layouts included."""
    return find_layout(connection, find_stream(connection, name))


@t.implements(Catalogue.layout_and_extents)
def layout_and_extents(connection: Connection, stream: StreamInfo) -> tuple[Layout, dict[int, Extent]]:
    """Return the present segments of a stream, with head and end of each."""
    epoch, _ = look(connection, stream)
    return find_layout(connection, replace(stream, layout_epoch=epoch)), extents(connection, stream)


@t.implements(Catalogue.extents)
def extents(connection: Connection, stream: StreamInfo) -> dict[int, Extent]:
    """Return head and end of every segment."""
    found = find_extents(connection, t.segments.c.stream_id == stream.stream_id)
    if not found:
        raise UsageError(f"stream '{stream.name}' was deleted")
    return found


def find_extents(connection: Connection, *of: sa.ColumnElement[bool]) -> dict[int, Extent]:
    """Return head and end of the segments that fulfil conditions."""
    columns = (t.segments.c.segment_id, t.segments.c.head_position, t.segments.c.end_position)
    rows = connection.execute(sa.select(*columns).where(*of).order_by(t.segments.c.segment_id)).all()
    return {number: Extent(head, end) for number, head, end in (t.checked_row(row, int, int, int) for row in rows)}


def with_segments(connection: Connection, info: StreamInfo) -> StreamInfo:
    """Return ``info`` with the segments of its present layout filled in, and when a lease is over.

    Raises:
        CorruptionError: not every key is in one of them.
    """
    rows = connection.execute(_PRESENT, {"stream_id": info.stream_id}).all()
    (due_ms,) = checked_row(connection.execute(_LEASE_DUE, {"stream_id": info.stream_id}).one(), int | None)
    segments = tuple(_segment(row) for row in rows)
    _check_layout(info, gaps_between(segments))
    return replace(info, segments=segments, lease_due_ms=due_ms)


def find_layout(connection: Connection, stream: StreamInfo) -> Layout:
    """Return the segments of a stream, those of former layouts included.

    Raises:
        CorruptionError: in some layout, not every key is in one of them: who read the others would miss events.
    """
    layout = recorded_layout(connection, stream)
    _check_layout(stream, layout.problems())
    return layout


def _check_layout(stream: StreamInfo, problems: Sequence[str]) -> None:
    if problems:
        where = f"the layout of stream '{stream.name}'"
        raise CorruptionError(where, 0, "segments that take every key once", f"that {problems[0]}")


def recorded_layout(connection: Connection, stream: StreamInfo) -> Layout:
    """Return what is recorded of a stream's segments, whether it can be or not."""
    query = sa.select(*_SEGMENT).where(t.segments.c.stream_id == stream.stream_id).order_by(t.segments.c.segment_id)
    return Layout(stream.layout_epoch, tuple(_segment(row) for row in connection.execute(query).all()))


def _segment(row: Sequence[Any]) -> Segment:
    number, key_low, key_high, created_epoch, closed_epoch = checked_row(row, int, int, int, int, int | None)
    return Segment(number, key_low, key_high, created_epoch, closed_epoch)


def stream_info(connection: Connection, row: Any) -> StreamInfo:
    """Return a row of ``streams`` as a value.

    Raises:
        CorruptionError: it is none.
    """
    named = f"{t.store_of(connection)} (stream '{row.name}')"
    checked_row((row.name, row.is_sealed, row.routing_key, row.retention, row.scaling), str, bool, *[str | None] * 3)
    checked_row((row.id, row.segments_count, row.layout_epoch, row.created_ms, row.schema_version), *[int] * 5)
    if row.segments_count < 1:
        raise CorruptionError(named, 0, "a number of segments", str(row.segments_count))
    schema = decode_schema(named, row.schema)
    if row.routing_key is not None and row.routing_key not in schema.names:
        raise CorruptionError(named, 0, f"a routing key among {', '.join(schema.names)}", repr(row.routing_key))
    return StreamInfo(
        stream_id=row.id,
        name=row.name,
        schema=schema,
        segments_count=row.segments_count,
        layout_epoch=row.layout_epoch,
        routing_key=row.routing_key,
        is_sealed=row.is_sealed,
        created_ms=row.created_ms,
        retention=decode_retention(named, row.retention),
        schema_version=row.schema_version,
        scaling=decode_scaling(named, row.scaling),
    )


def with_counts(connection: Connection, infos: Sequence[StreamInfo]) -> list[StreamInfo]:
    """Return streams with segments, heads, ends, sizes and prepared transactions filled in (many at once)."""
    # databases bound how many values one statement may have
    some = [infos[at : at + _STREAMS_AT_A_TIME] for at in range(0, len(infos), _STREAMS_AT_A_TIME)]
    return [info for each in some for info in _with_counts(connection, each)]


def _with_counts(connection: Connection, infos: Sequence[StreamInfo]) -> list[StreamInfo]:
    numbers = [info.stream_id for info in infos]
    segments = _by_stream(connection, _EXTENTS.where(t.segments.c.stream_id.in_(numbers)))
    sizes = _by_stream(connection, _SIZES.where(t.chunks.c.stream_id.in_(numbers)))
    due = _by_stream(connection, _DUE.where(t.shared_transactions.c.stream_id.in_(numbers)))
    is_prepared = t.transactions.c.status == Status.PREPARED.value
    prepared = _by_stream(connection, _PREPARED.where(t.transactions.c.stream_id.in_(numbers), is_prepared))
    found = []
    for info in infos:
        rows = segments.get(info.stream_id, [])
        for row in rows:
            checked_row((row.head_position, row.end_position), int, int)
        present = [_segment(row[1:6]) for row in rows if row.closed_epoch is None]
        present.sort(key=lambda segment: segment.key_low)
        _check_layout(info, gaps_between(present))
        ((_, chunks_count, size_bytes),) = sizes.get(info.stream_id, [(0, 0, 0)])
        ((_, due_ms),) = due.get(info.stream_id, [(0, None)])
        checked_row((due_ms,), int | None)
        found.append(
            replace(
                info,
                segments=tuple(present),
                lease_due_ms=due_ms,
                heads=tuple(row.head_position for row in rows),
                ends=tuple(row.end_position for row in rows),
                chunks_count=chunks_count,
                size_bytes=int(size_bytes),  # a sum is no whole number to every database
                prepared_count=len(prepared.get(info.stream_id, ())),
            )
        )
    return found


def _by_stream(connection: Connection, query: sa.Select[Any]) -> dict[int, list[Any]]:
    """Return the rows of each stream; the number of the stream is their first value."""
    found: dict[int, list[Any]] = {}
    for row in connection.execute(query):
        found.setdefault(row[0], []).append(row)
    return found


@t.implements(Catalogue.schemas)
def find_schemas(connection: Connection, stream: StreamInfo) -> tuple[pa.Schema, ...]:
    """Return the schemas that a stream has had, by version.

    Raises:
        UsageError: the stream was deleted.
        CorruptionError: one is missing, so that others would be taken for it.
    """
    columns = (t.streams.c.schema, t.streams.c.schema_version)
    present = connection.execute(sa.select(*columns).where(t.streams.c.id == stream.stream_id)).one_or_none()
    if present is None:
        raise UsageError(f"stream '{stream.name}' was deleted; open it again if it was created again")
    named = f"{t.store_of(connection)} (stream '{stream.name}')"
    query = sa.select(t.former_schemas).where(t.former_schemas.c.stream_id == stream.stream_id)
    former = connection.execute(query.order_by(t.former_schemas.c.version)).all()
    found = [row.version for row in former]
    if found != list(range(present.schema_version)):
        expected = f"{present.schema_version} former schemas"
        raise CorruptionError(named, 0, expected, f"{len(found)}: {found}")
    return tuple(decode_schema(named, bytes(row.schema)) for row in (*former, present))


def check_writable(connection: Connection, stream: StreamInfo) -> None:
    """Check that events may be added that were routed by the layout that ``stream`` says.

    Raises:
        OtherLayoutError: it has another one by now.
        UsageError: the stream is sealed or was deleted.
    """
    if check_takes_events(connection, stream) != stream.layout_epoch:
        raise OtherLayoutError(f"stream '{stream.name}' has other segments than when it was opened; open it again")


def check_takes_events(connection: Connection, stream: StreamInfo) -> int:
    """Check that a stream takes events; return the number of its present layout.

    Raises:
        UsageError: it is sealed or was deleted.
    """
    epoch, is_sealed = look(connection, stream)
    check_open(replace(stream, is_sealed=is_sealed))
    return epoch


@t.implements(Catalogue.look)
def look(connection: Connection, stream: StreamInfo) -> tuple[int, bool]:
    """Return the number of the present layout, and whether the stream is sealed."""
    query = sa.select(t.streams.c.layout_epoch, t.streams.c.is_sealed).where(t.streams.c.id == stream.stream_id)
    row = connection.execute(query).one_or_none()
    if row is None:
        raise UsageError(f"stream '{stream.name}' was deleted; open it again if it was created again")
    return int(row.layout_epoch), bool(row.is_sealed)


@t.implements(Catalogue.set_retention)
def set_retention(connection: Connection, name: str, policy: RetentionPolicy | None) -> StreamInfo:
    """Set the retention policy of a stream; return the stream."""
    info = find_stream(connection, name)
    text = encode_retention(policy)
    connection.execute(t.streams.update().where(t.streams.c.id == info.stream_id).values(retention=text))
    return replace(info, retention=policy)


@t.implements(Catalogue.set_scaling)
def set_scaling(connection: Connection, name: str, policy: ScalingPolicy | None) -> StreamInfo:
    """Set the scaling policy of a stream; return the stream."""
    info = find_stream(connection, name)
    text = encode_scaling(policy)
    connection.execute(t.streams.update().where(t.streams.c.id == info.stream_id).values(scaling=text))
    return replace(info, scaling=policy)


@t.implements(Catalogue.seal_stream)
def seal_stream(connection: Connection, name: str) -> None:
    """End a stream."""
    info = find_stream(connection, name)
    # a sealed stream takes no events, so a commit that was promised could not be kept
    for status in (Status.PREPARED, Status.OPEN):
        waiting = _names_of(connection, info.stream_id, status)
        if waiting:
            raise UsageError(
                f"stream '{info.name}' has {len(waiting)} {status.value} transaction(s), first '{waiting[0]}'; "
                "commit or abort them before sealing"
            )
    connection.execute(t.streams.update().where(t.streams.c.id == info.stream_id).values(is_sealed=True))


def remove_stream(connection: Connection, info: StreamInfo) -> None:
    """Remove everything the catalogue knows of a stream; its chunks are orphans afterwards."""
    own = sa.select(t.transactions.c.id).where(t.transactions.c.stream_id == info.stream_id)
    # these are found by way of the transactions, so they go before those
    for table in (t.prepared_parts, t.participants):
        connection.execute(table.delete().where(table.c.transaction_id.in_(own)))
    for table in _OF_STREAMS:
        connection.execute(table.delete().where(table.c.stream_id == info.stream_id))
    connection.execute(t.streams.delete().where(t.streams.c.id == info.stream_id))


_OF_STREAMS = (
    *(t.transactions, t.shared_transactions, t.writers, t.parts, t.chunks, t.markers, t.segments, t.event_times),
    *(t.holds, t.garbage, t.former_authors, t.passed, t.former_schemas),
)

_SEGMENT = (
    t.segments.c.segment_id,
    t.segments.c.key_low,
    t.segments.c.key_high,
    t.segments.c.created_epoch,
    t.segments.c.closed_epoch,
)
"""What a ``Segment`` is made of."""

_NAMED = sa.select(t.streams).where(t.streams.c.name == sa.bindparam("name"))
_PRESENT = sa.select(*_SEGMENT).where(*t.open_segments(sa.bindparam("stream_id"))).order_by(t.segments.c.key_low)
_LEASE_DUE = sa.select(sa.func.min(t.shared_transactions.c.due_ms)).where(
    t.shared_transactions.c.stream_id == sa.bindparam("stream_id")
)
"""What is asked of one stream nearly each time, made once: to make a query takes longer than to carry it out."""


def _names_of(connection: Connection, stream_id: int, status: Status) -> list[str]:
    """Return the transactions of a stream that are open, or prepared."""
    query = sa.select(t.transactions.c.name).where(
        t.transactions.c.stream_id == stream_id, t.transactions.c.status == status.value
    )
    return sorted(checked_values(connection.scalars(query), str))


_STREAMS_AT_A_TIME = 500

_EXTENTS = sa.select(t.segments.c.stream_id, *_SEGMENT, t.segments.c.head_position, t.segments.c.end_position).order_by(
    t.segments.c.stream_id, t.segments.c.segment_id
)
_SIZES = sa.select(
    t.chunks.c.stream_id, sa.func.count(), sa.func.coalesce(sa.func.sum(t.chunks.c.size_bytes), 0)
).group_by(t.chunks.c.stream_id)
_DUE = sa.select(t.shared_transactions.c.stream_id, sa.func.min(t.shared_transactions.c.due_ms)).group_by(
    t.shared_transactions.c.stream_id
)
_PREPARED = sa.select(t.transactions.c.stream_id, t.transactions.c.name)
"""What ``with_counts`` asks of many streams at once."""


@t.implements(Catalogue.update_schema)
def update_schema(connection: Connection, name: str, wanted: pa.Schema, *, is_whole: bool) -> StreamInfo:
    """Give a stream other columns, unless it has them."""
    stream = find_stream(connection, name)
    check_takes_events(connection, stream)
    check_added_may_be_null(stream.name, stream.schema, wanted)
    schema = plain_schema(wanted)
    schema = schema if is_whole else merged_schema(stream.schema, schema)
    answer = update(columns_of(stream.schema), columns_of(schema), stream.routing_key)
    if isinstance(answer, Incompatible):
        raise UsageError(f"stream '{stream.name}' cannot be updated: {answer.problem}")
    if isinstance(answer, Unchanged):
        return stream
    # it stays: chunks that are there are read in it, by its version
    former = {"stream_id": stream.stream_id, "version": stream.schema_version, "schema": encode_schema(stream.schema)}
    connection.execute(t.former_schemas.insert().values(former))
    version = stream.schema_version + 1
    connection.execute(
        t.streams.update()
        .where(t.streams.c.id == stream.stream_id)
        .values(schema=encode_schema(schema), schema_version=version)
    )
    return replace(stream, schema=schema, schema_version=version)
