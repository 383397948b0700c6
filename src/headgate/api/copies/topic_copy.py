"""Pipelines that copy a topic of Kafka into a stream of the store, or a stream into a topic.

Records have one of two forms. A stream with a column ``value``, and beside it only what a record of Kafka has, holds
records as they are. A stream with other columns holds the fields of JSON objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from headgate.api.copies.stream_copy import SOURCE, AsJson, Direction, StreamCopy
from headgate.api.pipeline import Pipeline
from headgate.codec.arrow import MOMENT
from headgate.codec.kafka.messages import LATEST
from headgate.codec.kafka.record_batch import HEADERS_TYPE
from headgate.connectors.files.line_decoders import JsonDecoder
from headgate.connectors.kafka.client import KafkaClient, addresses
from headgate.connectors.kafka.formats import METADATA, RAW, VALUE
from headgate.connectors.kafka.security import NO_SECURITY, KafkaSecurity
from headgate.connectors.kafka.sink import KafkaSink
from headgate.connectors.kafka.source import Kafka, Position, partition_of
from headgate.connectors.streams.stream_sink import StreamSink
from headgate.connectors.streams.stream_source import StreamSource
from headgate.errors import UsageError
from headgate.operators.schemas import canonical_schema

COPIED = ("key", "timestamp", "headers")
"""What is copied beside the value; where a record was is not."""

COLUMNS = pa.schema(
    [
        ("key", pa.large_string()),
        (VALUE, pa.large_binary()),
        ("timestamp", MOMENT),
        ("headers", HEADERS_TYPE),
    ]
)
"""Of a stream that is created for a topic. Its routing key is ``key``, so that records of a key stay in order."""


@dataclass(slots=True)
class TopicCopy(StreamCopy):
    """A copy between a topic and a stream.

    Attributes:
        direction, stream, store, name: see ``StreamCopy``.
        topic, brokers, security: the topic, as for ``KafkaSink``.
        partitions: create a missing topic with so many partitions; 0: it must exist.
        target_id: of a topic that is written, which ``pipeline`` finds. The name of the pipeline ends with it: a topic
            that was deleted and created again gets everything, by a copy of its own.
    """

    direction: Direction
    topic: str
    stream: str
    brokers: str
    store: str
    partitions: int = 0
    security: KafkaSecurity = NO_SECURITY
    name: str = ""
    target_id: str = ""

    @property
    def other(self) -> str:
        """See ``StreamCopy``."""
        return f"topic {self.topic}"

    @property
    def pipeline_name(self) -> str:
        """See ``StreamCopy``. Brokers of a cluster may come and go."""
        return self.named(self.topic) + (f"-{self.target_id}" if self.target_id else "")

    def pipeline(self) -> Pipeline:
        """See ``StreamCopy``."""
        return self._to_stream() if self.direction == "to-stream" else self._to_topic()

    def _to_stream(self) -> Pipeline:
        if self.partitions:
            raise UsageError(f"--partitions is for a topic that is written, and topic '{self.topic}' is read")
        found = self.find_stream()
        columns = canonical_schema(COLUMNS if found is None else found.schema)
        if is_json := not _holds_records(columns):
            JsonDecoder(columns, ())
            options: dict[str, object] = {"format": "json", "schema": columns}
        else:
            options = {"format": RAW, "metadata": [name for name in columns.names if name != VALUE]}
        source = Kafka(self.brokers, self.topic, security=self.security, **options)  # type: ignore[arg-type]
        pipeline = Pipeline(self.pipeline_name)
        records = pipeline.source(source, name=SOURCE)
        if not is_json:
            records = records.map_batches(_AsColumns(self.topic, self.stream, columns), columns, as_arrow=True)
        created = {"routing_key": "key", "segments": len(self._end_of_topic())} if found is None else {}
        records.sink(StreamSink(self.stream, self.store, **created))  # type: ignore[arg-type]
        return pipeline

    def _to_topic(self) -> Pipeline:
        found = self.find_input()
        columns = canonical_schema(found.schema)
        self._find_topic()
        pipeline = Pipeline(self.pipeline_name)
        records = pipeline.source(StreamSource(self.stream, self.store), name=SOURCE)
        if _holds_records(columns):
            beside = [name for name in COPIED if name in columns.names]
        else:
            JsonDecoder(columns, ())
            convert = AsJson(self.stream, found.routing_key, "timestamp" if _has_time(columns) else None)
            records = records.map_batches(convert, convert.schema(), as_arrow=True)
            beside = [name for name in convert.schema().names if name != VALUE]
        options = {name: name for name in beside}
        sink = KafkaSink(
            self.brokers,
            self.topic,
            value=VALUE,
            security=self.security,
            **options,  # type: ignore[arg-type]
        )
        records.sink(sink)
        return pipeline

    def _find_topic(self) -> None:
        """Find the topic that is written, or create it."""
        client = KafkaClient(addresses(self.brokers), self.security)
        try:
            if self.partitions and self.topic not in client.topics([self.topic]):
                client.create_topic(self.topic, self.partitions)
            self.target_id = client.topic(self.topic).id.hex[:8]
        finally:
            client.close()

    def _end_of_topic(self) -> dict[int, int]:
        client = Kafka(self.brokers, self.topic, security=self.security).client()
        try:
            topic = client.topic(self.topic)
            return client.list_offsets(topic, dict.fromkeys(topic.leaders, LATEST))
        finally:
            client.close()

    def end_elsewhere(self) -> Mapping[int, int]:
        """See ``StreamCopy``."""
        return self._end_of_topic()

    def is_past_elsewhere(self, end: Mapping[int, int], positions: Mapping[str, bytes]) -> bool:
        """See ``StreamCopy``."""
        reached = {partition_of(split)[1]: Position.decode(split, data).offset for split, data in positions.items()}
        return all(reached.get(number, 0) >= position for number, position in end.items())


def _holds_records(columns: pa.Schema) -> bool:
    """Whether a stream holds records as they are."""
    return (
        VALUE in columns.names
        and all(name == VALUE or _fits(columns.field(name).type, name) for name in columns.names)
        and _is_bytes(columns.field(VALUE).type)
    )


def _fits(dtype: pa.DataType, name: str) -> bool:
    wanted = METADATA.get(name)
    return wanted is not None and (dtype == wanted or (_is_bytes(wanted) and _is_bytes(dtype)))


def _is_bytes(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_large_binary(dtype) or pa.types.is_large_string(dtype))


def _has_time(columns: pa.Schema) -> bool:
    return "timestamp" in columns.names and bool(pa.types.is_timestamp(columns.field("timestamp").type))


@dataclass(frozen=True, slots=True)
class _AsColumns:
    """Records of a topic in the types of a stream's columns."""

    topic: str
    stream: str
    columns: pa.Schema

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        columns = []
        for field in self.columns:
            column = batch.column(field.name)
            try:
                columns.append(column.cast(field.type))
            except pa.ArrowInvalid as error:
                raise UsageError(
                    f"topic '{self.topic}' has a {field.name} that is not UTF-8, and column '{field.name}' of stream "
                    f"'{self.stream}' is text; copy to a stream whose column '{field.name}' is binary"
                ) from error
        return pa.RecordBatch.from_arrays(columns, schema=self.columns)
