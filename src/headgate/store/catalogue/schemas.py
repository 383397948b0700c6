"""The schemas of streams in the tables: that of now, and those before it.

Counterpart: ``sql`` calls these inside its transactions; ``protocol.store.columns`` decides. Source: S76 of
docs/spec/stream-store.md. Never forgets a schema of a stream that is there: a chunk, or a program, may have it.
"""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
from sqlalchemy.engine import Connection

from headgate.errors import UsageError
from headgate.protocol.store.columns import Incompatible, Unchanged, update
from headgate.store.catalogue import tables as t
from headgate.store.catalogue.streams import check_takes_events
from headgate.store.evolving import columns_of
from headgate.store.schemas import check_added_may_be_null, encode_schema, merged_schema, plain_schema
from headgate.store.streams import StreamInfo


def update_schema(connection: Connection, stream: StreamInfo, wanted: pa.Schema, *, is_whole: bool) -> StreamInfo:
    """Give a stream other columns, unless it has them; see ``Catalogue.update_schema``."""
    check_takes_events(connection, stream)
    check_added_may_be_null(stream.name, stream.schema, wanted)
    schema = plain_schema(wanted)
    schema = schema if is_whole else merged_schema(stream.schema, schema)
    answer = update(columns_of(stream.schema), columns_of(schema), stream.routing_key)
    if isinstance(answer, Incompatible):
        raise UsageError(f"stream '{stream.name}' cannot be updated: {answer.problem}")
    if isinstance(answer, Unchanged):
        return stream
    former = {"stream_id": stream.stream_id, "version": stream.schema_version, "schema": encode_schema(stream.schema)}
    connection.execute(t.former_schemas.insert().values(former))
    version = stream.schema_version + 1
    connection.execute(
        t.streams.update()
        .where(t.streams.c.id == stream.stream_id)
        .values(schema=encode_schema(schema), schema_version=version)
    )
    return replace(stream, schema=schema, schema_version=version)
