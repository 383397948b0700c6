"""Pipelines that copy a stream of the store into a topic of Kafka or a stream of Pravega, or back.

A copy follows its input and is stopped when a completed checkpoint has all that was there at its start, so that a later
run goes on from there: one whose input ends has finished for good.

Records have one of two forms. A stream with a column ``value``, and beside it only what a record of Kafka has, or the
routing key ``key`` of Pravega, holds records as they are. A stream with other columns holds the fields of JSON objects,
for Pravega with the routing key among them, because it does not keep keys.
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from typing import Literal, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from headgate.api.pipeline import Pipeline
from headgate.api.state_access import read_state
from headgate.codec.arrow import MOMENT
from headgate.codec.kafka.messages import LATEST
from headgate.codec.kafka.record_batch import HEADERS_TYPE
from headgate.connectors.files.line_decoders import JsonDecoder
from headgate.connectors.kafka.client import KafkaClient, addresses
from headgate.connectors.kafka.connection import NO_SECURITY, KafkaSecurity
from headgate.connectors.kafka.formats import METADATA, RAW, VALUE
from headgate.connectors.kafka.outgoing_records import RecordColumns
from headgate.connectors.kafka.sink import KafkaSink
from headgate.connectors.kafka.source import Kafka, partition_of
from headgate.connectors.kafka.source import Position as TopicPosition
from headgate.connectors.pravega.controller import Controller, StreamName
from headgate.connectors.pravega.scaled_stream import Position as PravegaPosition
from headgate.connectors.pravega.scaled_stream import segment_of
from headgate.connectors.pravega.segment_store import tail
from headgate.connectors.pravega.sink import PravegaSink
from headgate.connectors.pravega.source import Pravega
from headgate.connectors.streams.segments import first_needed, places_of
from headgate.connectors.streams.stream_sink import StreamSink
from headgate.connectors.streams.stream_source import StreamSource
from headgate.dataclass import dataclass
from headgate.environment import SYSTEM_ENVIRONMENT
from headgate.errors import HeadgateError, UsageError
from headgate.model.progress import PipelineHandle
from headgate.operators.schemas import canonical_schema
from headgate.store.store import Store
from headgate.store.streams import StreamInfo

LOOK_S = 0.1
"""Between two looks for a new checkpoint."""

SOURCE = "source"
"""The node that reads."""

Direction: TypeAlias = Literal["to-stream", "from-stream"]


class StreamCopy(ABC):
    """A copy between a stream of the store and one of another system.

    Attributes:
        direction: whether the stream of the store is written or read.
        stream, store: the stream, as for ``StreamSource``.
        name: of the pipeline; "": made from what is copied.
    """

    direction: Direction
    stream: str
    store: str
    name: str

    @property
    @abstractmethod
    def other(self) -> str:
        """The stream of the other system, in words."""

    @property
    @abstractmethod
    def pipeline_name(self) -> str:
        """The name, under which the copy has its checkpoints."""

    @abstractmethod
    def pipeline(self) -> Pipeline:
        """Return the pipeline.

        Raises:
            UsageError: one of the two streams is missing, or records of the one cannot be records of the other.
        """

    @abstractmethod
    def end_elsewhere(self) -> Mapping[int, int] | None:
        """Return where the stream of the other system ends now; None: it ends for good, so the copy ends with it."""

    @abstractmethod
    def is_past_elsewhere(self, end: Mapping[int, int], positions: Mapping[str, bytes]) -> bool:
        """Whether everything in front of ``end`` in the stream of the other system is copied at ``positions``."""

    def named(self, what: str) -> str:
        """Return the name of the pipeline that copies ``what`` of the other system."""
        words = re.sub(r"[^A-Za-z0-9_-]+", "-", f"copy-{what}-{self.direction}")[:60]
        identity = "\0".join((self.direction, what, self.stream, self.store))
        return self.name or f"{words}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"

    def find_stream(self) -> StreamInfo | None:
        """Return the stream of the store, if it is there.

        Raises:
            UsageError: it is to be read, and there is no such store.
        """
        if not Store.exists(self.store):
            if self.direction == "from-stream":
                raise UsageError(f"there is no stream store at {self.store}; --store names another one")
            return None
        store = Store.shared(self.store)
        known = {one.name for one in store.list_streams()}
        return store.find(self.stream) if self.stream in known else None

    def find_input(self) -> StreamInfo:
        """Return the stream of the store that is read.

        Raises:
            UsageError: it is not there.
        """
        found = self.find_stream()
        return Store.shared(self.store).find(self.stream) if found is None else found  # which says what there is

    def end(self) -> Mapping[int, int] | None:
        """Return where the input ends now: partition or segment → position. None: the copy ends by itself."""
        if self.direction == "to-stream":
            return self.end_elsewhere()
        return dict(Store.shared(self.store).tail(self.stream).positions)

    def is_past(self, end: Mapping[int, int], checkpoints: str, checkpoint: int) -> bool:
        """Whether everything in front of ``end`` is copied by a completed checkpoint below ``checkpoints``."""
        where = f"{checkpoints.rstrip('/')}/{self.pipeline_name}"
        rows = read_state(where, SOURCE, "positions", id=checkpoint, columns=["split", "position"]).iter_rows()
        positions = dict(rows)
        if self.direction == "to-stream":
            return self.is_past_elsewhere(end, positions)
        store = Store.shared(self.store)
        layout, extents = store.pipelines.layout_and_extents(store.find(self.stream))
        reached = first_needed(layout, extents, places_of(self.stream, positions))
        return all(reached.get(number, 0) >= position for number, position in end.items())

    def stop_at(self, end: Mapping[int, int] | None, handle: PipelineHandle, checkpoints: str) -> bool:
        """Stop a run when it has copied everything in front of ``end``. Return whether it has, when it has ended."""
        seen, is_past = None, False
        with suppress(HeadgateError):  # the run itself says how it ended
            while handle.wait(LOOK_S) is None:
                done = handle.progress.last_checkpoint
                if end is not None and done is not None and done.checkpoint != seen and not is_past:
                    seen = done.checkpoint
                    with suppress(HeadgateError):  # it may have been removed meanwhile: a newer one is there then
                        is_past = self.is_past(end, checkpoints, seen)
                    if is_past:
                        handle.stop()
        return is_past

    def release(self) -> None:
        """Let the stream go that was read: until the copy is run again, it needs nothing of it."""
        if self.direction == "from-stream":
            store, holder = Store.shared(self.store), f"{self.pipeline_name}/{SOURCE}"
            if holder in store.holds(self.stream):
                store.release(self.stream, holder=holder)


@dataclass(frozen=True, slots=True)
class AsJson:
    """Records of a stream as records of another system: JSON, and the routing key as text."""

    stream: str
    key: str | None
    timestamp: str | None = None

    def schema(self) -> pa.Schema:
        """Return what is made."""
        key = [] if self.key is None else [("key", pa.large_string())]
        time = [] if self.timestamp is None else [("timestamp", MOMENT)]
        return pa.schema([(VALUE, pa.large_binary()), *key, *time])

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        for field, column in zip(batch.schema, batch.columns, strict=True):
            if _has_odd_number(column):
                raise UsageError(
                    f"column '{field.name}' of stream '{self.stream}' has a number that is NaN or infinite, which JSON "
                    "cannot hold; copy a stream without it"
                )
        columns = [RecordColumns().values_of(batch)]
        if self.key is not None:
            columns.append(batch.column(self.key).cast(pa.large_string()))
        if self.timestamp is not None:
            column = batch.column(self.timestamp)
            columns.append(column.cast(MOMENT) if column.type.tz else column.cast(pa.int64()).cast(MOMENT))
        return pa.RecordBatch.from_arrays(columns, schema=self.schema())


def _has_odd_number(column: pa.Array) -> bool:
    if pa.types.is_floating(column.type):
        return not pc.all(pc.is_finite(column), min_count=0).as_py()
    if pa.types.is_struct(column.type) or pa.types.is_large_list(column.type):
        inner = column.flatten()
        return any(map(_has_odd_number, inner if isinstance(inner, list) else [inner]))
    return False


COPIED = ("key", "timestamp", "headers")
"""What is copied beside the value; where a record was is not."""

TOPIC_COLUMNS = pa.schema(
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
        return f"topic {self.topic}"

    @property
    def pipeline_name(self) -> str:
        """See ``StreamCopy``. Brokers of a cluster may come and go."""
        return self.named(self.topic) + (f"-{self.target_id}" if self.target_id else "")

    def pipeline(self) -> Pipeline:
        return self._to_stream() if self.direction == "to-stream" else self._to_topic()

    def _to_stream(self) -> Pipeline:
        if self.partitions:
            raise UsageError(f"--partitions is for a topic that is written, and topic '{self.topic}' is read")
        found = self.find_stream()
        columns = canonical_schema(TOPIC_COLUMNS if found is None else found.schema)
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
        return self._end_of_topic()

    def is_past_elsewhere(self, end: Mapping[int, int], positions: Mapping[str, bytes]) -> bool:
        reached = {
            partition_of(split)[1]: TopicPosition.decode(split, data).offset for split, data in positions.items()
        }
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


KEY = "key"

PRAVEGA_COLUMNS = pa.schema([(VALUE, pa.large_binary())])
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
        return f"stream {self.pravega} of Pravega"

    @property
    def pipeline_name(self) -> str:
        """See ``StreamCopy``. The controller may move."""
        return self.named(self.pravega)

    def pipeline(self) -> Pipeline:
        StreamName.parse(self.pravega)
        return self._to_stream() if self.direction == "to-stream" else self._from_stream()

    def _to_stream(self) -> Pipeline:
        if self.segments:
            raise UsageError(f"--segments is for a stream of Pravega that is written, and {self.pravega} is read")
        found = self.find_stream()
        columns = canonical_schema(PRAVEGA_COLUMNS if found is None else found.schema)
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
        client, stream = Controller(self.controller), StreamName.parse(self.pravega)
        try:
            return tail(client, stream, SYSTEM_ENVIRONMENT) if client.current(stream) else None
        finally:
            client.close()

    def is_past_elsewhere(self, end: Mapping[int, int], positions: Mapping[str, bytes]) -> bool:
        """See ``StreamCopy``. A segment that has no position was not begun, or what follows it was."""
        reached = {segment_of(split): PravegaPosition.decode(split, data).offset for split, data in positions.items()}
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
