"""Pipelines that copy a stream of the store into a stream of Pravega, or a stream of Pravega into one of the store.

Events have one of two forms. A stream with one column ``value``, or with ``value`` of bytes and its routing key
``key``, holds events as they are. A stream with other columns holds the fields of JSON objects, with the routing key
among them, because Pravega does not keep keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from headgate.api.copies.stream_copy import SOURCE, AsJson, Direction, StreamCopy
from headgate.api.pipeline import Pipeline
from headgate.connectors.files.line_decoders import JsonDecoder
from headgate.connectors.kafka.formats import RAW, VALUE
from headgate.connectors.pravega.controller import Controller, StreamName
from headgate.connectors.pravega.scaled_stream import Position, segment_of
from headgate.connectors.pravega.segment_store import tail
from headgate.connectors.pravega.sink import PravegaSink
from headgate.connectors.pravega.source import Pravega
from headgate.connectors.streams.stream_sink import StreamSink
from headgate.connectors.streams.stream_source import StreamSource
from headgate.environment import SYSTEM_ENVIRONMENT
from headgate.errors import UsageError
from headgate.operators.schemas import canonical_schema

KEY = "key"

COLUMNS = pa.schema([(VALUE, pa.large_binary())])
"""Of a stream that is created for one of Pravega. It has one segment, so that what was in order stays in order."""


@dataclass(slots=True)
class PravegaCopy(StreamCopy):
    """A copy between a stream of Pravega and one of the store.

    Attributes:
        direction, stream, store, name: see ``StreamCopy``.
        pravega: scope and name of the stream of Pravega.
        controller: ``host:port``.
        segments: create a missing stream of Pravega with so many segments; 0: it must exist.
    """

    direction: Direction
    pravega: str
    stream: str
    controller: str
    store: str
    segments: int = 0
    name: str = ""

    @property
    def other(self) -> str:
        """See ``StreamCopy``."""
        return f"stream {self.pravega} of Pravega"

    @property
    def pipeline_name(self) -> str:
        """See ``StreamCopy``. The controller may move."""
        return self.named(self.pravega)

    def pipeline(self) -> Pipeline:
        """See ``StreamCopy``."""
        StreamName.parse(self.pravega)
        return self._to_stream() if self.direction == "to-stream" else self._from_stream()

    def _to_stream(self) -> Pipeline:
        if self.segments:
            raise UsageError(f"--segments is for a stream of Pravega that is written, and {self.pravega} is read")
        found = self.find_stream()
        columns = canonical_schema(COLUMNS if found is None else found.schema)
        if _is_raw(columns):
            form = RAW if pa.types.is_large_binary(columns.field(VALUE).type) else "text"
            source = Pravega(self.controller, self.pravega, format=form)
        else:
            if _is_raw_with_key(columns, None if found is None else found.routing_key):
                raise UsageError(
                    f"stream '{self.stream}' has a column '{KEY}', and Pravega does not keep the keys of events; copy "
                    f"to a stream with the column '{VALUE}' alone, or to one with the fields of JSON objects"
                )
            JsonDecoder(columns, ())
            source = Pravega(self.controller, self.pravega, format="json", schema=columns)
        pipeline = Pipeline(self.pipeline_name)
        records = pipeline.source(source, name=SOURCE)
        created = {"segments": 1} if found is None else {}
        records.sink(StreamSink(self.stream, self.store, **created))  # type: ignore[arg-type]
        return pipeline

    def _from_stream(self) -> Pipeline:
        found = self.find_input()
        columns, key = canonical_schema(found.schema), found.routing_key
        pipeline = Pipeline(self.pipeline_name)
        records = pipeline.source(StreamSource(self.stream, self.store), name=SOURCE)
        if not _is_raw(columns) and not _is_raw_with_key(columns, key):
            JsonDecoder(columns, ())
            convert = AsJson(self.stream, key)
            records = records.map_batches(convert, convert.schema(), as_arrow=True)
            key = None if key is None else KEY
        sink = PravegaSink(self.controller, self.pravega, value=VALUE, key=key, create=self.segments)
        records.sink(sink)
        return pipeline

    def end_elsewhere(self) -> Mapping[int, int] | None:
        """See ``StreamCopy``."""
        client, stream = Controller(self.controller), StreamName.parse(self.pravega)
        try:
            return tail(client, stream, SYSTEM_ENVIRONMENT) if client.current(stream) else None
        finally:
            client.close()

    def is_past_elsewhere(self, end: Mapping[int, int], positions: Mapping[str, bytes]) -> bool:
        """See ``StreamCopy``. A segment that has no position was not begun, or what follows it was."""
        reached = {segment_of(split): Position.decode(split, data).offset for split, data in positions.items()}
        client, stream = Controller(self.controller), StreamName.parse(self.pravega)

        def is_read_to(segment: int, position: int) -> bool:
            if segment in reached:
                return reached[segment] >= position
            return any(is_read_to(one, 0) for one in client.successors(stream, segment))

        try:
            return all(is_read_to(segment, position) for segment, position in end.items())
        finally:
            client.close()


def _is_raw(columns: pa.Schema) -> bool:
    """Whether a stream holds events as they are."""
    dtype = columns.field(0).type
    return columns.names == [VALUE] and bool(pa.types.is_large_binary(dtype) or pa.types.is_large_string(dtype))


def _is_raw_with_key(columns: pa.Schema, routing_key: str | None) -> bool:
    """Whether a stream holds events as they are, each with its key."""
    return (
        routing_key == KEY
        and sorted(columns.names) == sorted((KEY, VALUE))
        and bool(pa.types.is_large_string(columns.field(KEY).type))
        and bool(pa.types.is_large_binary(columns.field(VALUE).type))
    )
