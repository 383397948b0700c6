"""Which columns of a record become key, value, headers, timestamp, topic and partition of a record of Kafka."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headgate.codec.kafka.record_batch import HEADERS_TYPE, NO_TIMESTAMP
from headgate.connectors.encode import check_json
from headgate.connectors.kafka.changes import (
    check_keys_of_records,
    envelope_schema,
    envelopes,
    is_bytes,
    keys_of_records,
    lines_of,
    upsert_values,
    without_update_before,
)
from headgate.connectors.kafka.fetcher import Partition
from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.operators.changes import OP

_SEED, _M, _R = 0x9747B28C, np.uint32(0x5BD1E995), np.uint32(24)
"""Constants of murmur2."""


@dataclass(frozen=True, slots=True)
class RecordColumns:
    """The names of the columns; "" for none.

    Attributes:
        value: its bytes are the value; "": the value is the record as JSON, without ``beside``.
        topic: with the topic of each record.
        partition: with the partition of each record.
        change_keys: the keys of a stream with changes; none: records are plain ones.
        debezium: changes are Debezium's envelopes; otherwise upserts.
        retractions: the changes have retractions.
        avro_keys: keys of changes are Avro.
        sink: the class of the sink, for errors.
    """

    value: str = ""
    key: str = ""
    headers: str = ""
    timestamp: str = ""
    topic: str = ""
    partition: str = ""
    change_keys: tuple[str, ...] = ()
    debezium: bool = False
    retractions: bool = False
    avro_keys: bool = False
    sink: str = "KafkaSink"

    @property
    def beside(self) -> tuple[str, ...]:
        """Columns that say how a record is written, and are no part of its value."""
        op = OP if self.change_keys else ""
        return tuple(name for name in (self.headers, self.timestamp, self.topic, self.partition, op) if name)

    def content(self, schema: pa.Schema) -> pa.Schema:
        """Return the columns that are part of the value of a whole record."""
        return pa.schema([field for field in schema if field.name not in self.beside])

    def values_schema(self, schema: pa.Schema) -> pa.Schema:
        """Return what the values of whole records have."""
        return envelope_schema(self.content(schema)) if self.debezium else self.content(schema)

    def check(self, schema: pa.Schema, *, is_json: bool = True) -> None:
        """Check that records of ``schema`` have these columns. ``is_json``: whether whole records are JSON.

        Raises:
            UsageError: one is missing or of a wrong type, or a record cannot be JSON.
        """
        if self.change_keys and not self.avro_keys:
            check_keys_of_records(schema, self.change_keys)
        self._check("value", self.value, schema, is_bytes, "binary or text")
        self._check("key", self.key, schema, is_bytes, "binary or text")
        self._check("headers", self.headers, schema, _is_headers, "a list of structs with a key and a value")
        self._check("timestamp", self.timestamp, schema, pa.types.is_timestamp, "a timestamp")
        self._check("topic_column", self.topic, schema, _is_text, "text")
        self._check("partition", self.partition, schema, pa.types.is_integer, "an integer")
        if self.value:
            return
        content = self.content(schema)
        if not len(content):
            raise UsageError(f"records have no column for the value of {self.sink}; select at least one more")
        if is_json:
            check_json(content)

    def _check(
        self, option: str, name: str, schema: pa.Schema, fits: Callable[[pa.DataType], bool], wanted: str
    ) -> None:
        if not name:
            return
        if name not in schema.names:
            there = ", ".join(schema.names)
            raise UsageError(
                f"{self.sink}({option}={name!r}) names a column that records do not have; they have {there}"
            )
        if not fits(dtype := schema.field(name).type):
            raise UsageError(f"{self.sink}({option}={name!r}) names a column of type {dtype}, not {wanted}; cast it")

    def values_of(self, batch: pa.RecordBatch, encode: Callable[[pa.RecordBatch], pa.Array] | None = None) -> pa.Array:
        """Return the values; null deletes the key in a compacted topic. ``encode``: for whole records; None: JSON."""
        if self.value:
            return batch.column(self.value).cast(pa.large_binary())
        content = batch.drop_columns(list(self.beside)) if self.beside else batch
        if self.debezium:
            content = envelopes(batch, content, retractions=self.retractions)
        made = lines_of if encode is None else encode
        return upsert_values(batch, content, made) if self.change_keys and not self.debezium else made(content)

    def keys_of(
        self, batch: pa.RecordBatch, encode: Callable[[pa.RecordBatch], pa.Array] | None = None
    ) -> pa.Array | None:
        """Return the keys, if there are any. ``encode``: makes those of changes; None: they are text, bytes or JSON."""
        if self.change_keys and encode is not None:
            return encode(batch.select(list(self.change_keys)))
        if self.change_keys:
            return keys_of_records(batch, self.change_keys)
        return batch.column(self.key).cast(pa.large_binary()) if self.key else None

    def timestamps_of(self, batch: pa.RecordBatch, now_ms: int) -> npt.NDArray[np.int64]:
        """Return the times in milliseconds; ``now_ms`` where there is none.

        Raises:
            UsageError: a time is the number that says that there is none.
        """
        if not self.timestamp:
            return np.full(batch.num_rows, now_ms, np.int64)
        column = batch.column(self.timestamp)
        exact = column.cast(pa.timestamp("ms", column.type.tz), safe=False).cast(pa.int64())
        if pc.any(pc.equal(exact, NO_TIMESTAMP)).as_py():
            raise UsageError(
                f"{self.sink}(timestamp={self.timestamp!r}) has the last millisecond of 1969, which says in Kafka that "
                "a record has no timestamp; make it null, or another time"
            )
        times: npt.NDArray[np.int64] = pc.fill_null(exact, now_ms).to_numpy(zero_copy_only=False)
        return times


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Records for one partition, in their order."""

    partition: Partition
    values: pa.Array
    timestamps_ms: npt.NDArray[np.int64]
    keys: pa.Array | None
    headers: pa.Array | None


class Router:
    """Chooses the partition of each record.

    The partition that the record names; otherwise that of its key, as Kafka's own clients choose it; records without
    a key go to one partition after the other, batch by batch.
    """

    def __init__(
        self,
        columns: RecordColumns,
        topic: str,
        partitions_count: Callable[[str], int],
        first: int,
        encode: Callable[[pa.RecordBatch], pa.Array] | None = None,
        encode_keys: Callable[[pa.RecordBatch], pa.Array] | None = None,
    ) -> None:
        """Args:
        topic: of records that name none.
        partitions_count: how many partitions a topic has; raises UsageError if there is no such topic.
        first: the partition with which records without a key begin.
        encode: makes the values of whole records; None: they are JSON.
        encode_keys: makes the keys of changes; None: they are text, bytes or JSON.
        """
        self._encode, self._encode_keys = encode, encode_keys
        self._columns, self._topic, self._partitions_count = columns, topic, partitions_count
        self._turn = first

    def outgoing(self, batch: pa.RecordBatch, now_ms: int) -> Iterator[Outgoing]:
        """Yield the records of a batch by partition.

        Raises:
            UsageError: there is no such topic.
        """
        columns = self._columns
        if columns.change_keys and not columns.debezium:
            batch = without_update_before(batch)
            if batch.num_rows == 0:
                return
        values, keys = columns.values_of(batch, self._encode), columns.keys_of(batch, self._encode_keys)
        times = columns.timestamps_of(batch, now_ms)
        headers = batch.column(columns.headers).cast(HEADERS_TYPE) if columns.headers else None
        for topic, rows in self._by_topic(batch):
            for partition, own in self._by_partition(topic, rows, batch, keys):
                if len(own) == batch.num_rows:
                    yield Outgoing((topic, partition), values, times, keys, headers)
                    continue
                some = pa.array(own)
                yield Outgoing(
                    (topic, partition),
                    values.take(some),
                    times[own],
                    None if keys is None else keys.take(some),
                    None if headers is None else headers.take(some),
                )

    def _by_topic(self, batch: pa.RecordBatch) -> Iterator[tuple[str, npt.NDArray[np.int64]]]:
        if not self._columns.topic:
            yield self._topic, np.arange(batch.num_rows)
            return
        names = pc.fill_null(batch.column(self._columns.topic), self._topic)
        for name in pc.unique(names).to_pylist():
            yield name, np.flatnonzero(pc.equal(names, name).to_numpy(zero_copy_only=False))

    def _by_partition(
        self, topic: str, rows: npt.NDArray[np.int64], batch: pa.RecordBatch, keys: pa.Array | None
    ) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        count = self._partitions_count(topic)
        self._turn += 1
        chosen = np.full(batch.num_rows, self._turn % count, np.int64)
        if keys is not None:
            hashed = partitions_of_keys(pc.fill_null(keys, b""), count)
            chosen = np.where(keys.is_valid().to_numpy(zero_copy_only=False), hashed, chosen)
        if self._columns.partition:
            given = batch.column(self._columns.partition)
            named = pc.fill_null(given.cast(pa.int64(), safe=False), 0).to_numpy(zero_copy_only=False)
            chosen = np.where(given.is_valid().to_numpy(zero_copy_only=False), named, chosen)
        own = chosen[rows]
        if (is_out := (own < 0) | (own >= count)).any():
            wrong = given[int(rows[is_out][0])].as_py()
            raise UsageError(
                f"{self._columns.sink}(partition={self._columns.partition!r}) has partition {wrong} for topic "
                f"'{topic}', which has the partitions 0 to {count - 1}"
            )
        order = np.argsort(own, kind="stable")
        found, begins = np.unique(own[order], return_index=True)
        yield from zip(found.tolist(), np.split(rows[order], begins[1:]), strict=True)


def _is_text(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_string(dtype) or pa.types.is_large_string(dtype))


def _is_headers(dtype: pa.DataType) -> bool:
    if not (pa.types.is_list(dtype) or pa.types.is_large_list(dtype)) or not pa.types.is_struct(dtype.value_type):
        return False
    entry = dtype.value_type
    names = [entry.field(index).name for index in range(entry.num_fields)]
    return names == ["key", "value"] and _is_text(entry.field(0).type) and is_bytes(entry.field(1).type)


def partitions_of_keys(keys: pa.Array, partitions_count: int) -> npt.NDArray[np.int64]:
    """Return the partition of each key, as Kafka's clients in Java choose it.

    It is where other programs write records of that key. A key that is null has the hash of an empty one: choose
    another way for it.
    """
    hashes = murmur2(keys) & np.uint32(0x7FFFFFFF)
    return (hashes % np.uint32(partitions_count)).astype(np.int64)


def murmur2(keys: pa.Array) -> npt.NDArray[np.uint32]:
    """Return murmur2 of each key. A step takes the next four bytes of all keys that have as many."""
    keys = keys.cast(pa.large_binary())
    offsets = np.frombuffer(keys.buffers()[1], np.int64)[keys.offset : keys.offset + len(keys) + 1]
    data = np.frombuffer(keys.buffers()[2] or b"", np.uint8)
    begin, size = offsets[:-1], np.diff(offsets)
    hashes = np.uint32(_SEED) ^ size.astype(np.uint32)
    with np.errstate(over="ignore"):
        for step in range(int(size.max(initial=0)) // 4):
            rows = np.flatnonzero(size >= 4 * (step + 1))
            at = begin[rows] + 4 * step
            word = data[at].astype(np.uint32)
            for index in (1, 2, 3):
                word |= data[at + index].astype(np.uint32) << np.uint32(8 * index)
            word *= _M
            word ^= word >> _R
            word *= _M
            hashes[rows] = hashes[rows] * _M ^ word
        rest = size % 4
        for index in (2, 1, 0):
            rows = np.flatnonzero(rest > index)
            at = begin[rows] + size[rows] - rest[rows] + index
            hashes[rows] ^= data[at].astype(np.uint32) << np.uint32(8 * index)
        rows = np.flatnonzero(rest)
        hashes[rows] *= _M
        hashes ^= hashes >> np.uint32(13)
        hashes *= _M
        hashes ^= hashes >> np.uint32(15)
    return hashes
