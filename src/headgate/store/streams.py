"""Streams in the catalogue: create, look up, list, seal, delete.

Counterpart: ``store.Store`` calls these inside its transactions. Source: S2, as far as docs/spec/stream-store.md
§2 says. Never touches chunk files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from headgate.errors import UsageError
from headgate.protocol.store.transactions import Status
from headgate.store import tables as t
from headgate.store.routing import check_key_type
from headgate.store.schemas import check_same_schema, decode_schema, encode_schema, plain_schema

SEGMENTS_MAX = 4_096
"""Each flush may touch all segments; more would make its catalogue transaction too long."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")
_NAME_CHARS_MAX = 200


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """A stream as it was at one moment.

    Attributes:
        name: ``scope/stream``; the scope is optional.
        ends: per segment, the position of the next event to come (= events so far).
        chunks_count, size_bytes: files that hold its events, prepared ones included.
        prepared_count: transactions that wait for a verdict.
    """

    stream_id: int
    name: str
    schema: pa.Schema
    segments_count: int
    routing_key: str | None
    is_sealed: bool
    created_ms: int
    ends: tuple[int, ...] = ()
    chunks_count: int = 0
    size_bytes: int = 0
    prepared_count: int = 0

    @property
    def events_count(self) -> int:
        """Events that readers may see."""
        return sum(self.ends)


@dataclass(frozen=True, slots=True)
class StreamDefinition:
    """What a caller wants a stream to be."""

    name: str
    schema: pa.Schema
    segments_count: int
    routing_key: str | None

    def checked(self) -> StreamDefinition:
        """Return it with a plain schema.

        Raises:
            UsageError: name, number of segments, schema or routing key cannot be.
        """
        if len(self.name) > _NAME_CHARS_MAX or not _NAME.fullmatch(self.name):
            raise UsageError(
                f"stream name {self.name!r} is not usable; use letters, digits, '_', '-' and '.', "
                "with '/' between scope and stream, such as app/logs"
            )
        if not 1 <= self.segments_count <= SEGMENTS_MAX:
            raise UsageError(f"a stream has 1 to {SEGMENTS_MAX} segments, not {self.segments_count}")
        schema = plain_schema(self.schema)
        if self.routing_key is not None:
            if self.routing_key not in schema.names:
                raise UsageError(
                    f"routing key '{self.routing_key}' is not a column of stream '{self.name}'; "
                    f"its columns are {', '.join(schema.names)}"
                )
            check_key_type(schema.field(self.routing_key).type, self.routing_key)
        return StreamDefinition(self.name, schema, self.segments_count, self.routing_key)


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
    result = connection.execute(
        t.streams.insert().values(
            name=wanted.name,
            schema=encode_schema(wanted.schema),
            segments_count=wanted.segments_count,
            routing_key=wanted.routing_key,
            is_sealed=False,
            created_ms=now_ms,
        )
    )
    stream_id = inserted_id(result)
    rows = [{"stream_id": stream_id, "segment": segment, "end_position": 0} for segment in range(wanted.segments_count)]
    connection.execute(t.segments.insert(), rows)
    return find_stream(connection, wanted.name, where)


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
        names = connection.scalars(sa.select(t.streams.c.name).order_by(t.streams.c.name).limit(20)).all()
        there = f"streams there: {', '.join(names)}" if names else "it has no streams yet"
        raise UsageError(
            f"stream '{name}' does not exist in the store at {where} ({there}); "
            f"create it with: headgate streams create {name}"
        )
    return stream_info(row, where)


def stream_info(row: Any, where: str) -> StreamInfo:
    """Return a row of ``streams`` as a value."""
    return StreamInfo(
        stream_id=row.id,
        name=row.name,
        schema=decode_schema(where, row.schema),
        segments_count=row.segments_count,
        routing_key=row.routing_key,
        is_sealed=row.is_sealed,
        created_ms=row.created_ms,
    )


def with_counts(connection: Connection, info: StreamInfo) -> StreamInfo:
    """Return ``info`` with ends, sizes and prepared transactions filled in."""
    ends = connection.scalars(
        sa.select(t.segments.c.end_position)
        .where(t.segments.c.stream_id == info.stream_id)
        .order_by(t.segments.c.segment)
    ).all()
    chunks_count, size_bytes = connection.execute(
        sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(t.chunks.c.size_bytes), 0)).where(
            t.chunks.c.stream_id == info.stream_id
        )
    ).one()
    return StreamInfo(
        info.stream_id,
        info.name,
        info.schema,
        info.segments_count,
        info.routing_key,
        info.is_sealed,
        info.created_ms,
        tuple(ends),
        chunks_count,
        size_bytes,
        len(prepared_names(connection, info.stream_id)),
    )


def prepared_names(connection: Connection, stream_id: int) -> list[str]:
    """Return the transactions of a stream that wait for a verdict."""
    query = sa.select(t.transactions.c.name).where(
        t.transactions.c.stream_id == stream_id, t.transactions.c.status == Status.PREPARED.value
    )
    return sorted(connection.scalars(query).all())


def check_writable(connection: Connection, info: StreamInfo) -> None:
    """Check that events may be added.

    Raises:
        UsageError: the stream is sealed, or was deleted.
    """
    is_sealed = connection.scalar(sa.select(t.streams.c.is_sealed).where(t.streams.c.id == info.stream_id))
    if is_sealed is None:
        raise UsageError(f"stream '{info.name}' was deleted; open it again if it was created anew")
    if is_sealed:
        raise UsageError(f"stream '{info.name}' is sealed: it takes no more events; write to another stream")


def seal_stream(connection: Connection, info: StreamInfo) -> None:
    """End a stream.

    Raises:
        UsageError: a prepared transaction waits, whose commit must not fail (S12).
    """
    waiting = prepared_names(connection, info.stream_id)
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
    for table in (t.transactions, t.writers, t.parts, t.chunks, t.segments):
        connection.execute(table.delete().where(table.c.stream_id == info.stream_id))
    connection.execute(t.streams.delete().where(t.streams.c.id == info.stream_id))
