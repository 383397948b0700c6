"""Which columns of a record become key, value, headers, timestamp, topic and partition of a record of Kafka."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headgate.codec.kafka.partitioner import partitions_of_keys
from headgate.codec.kafka.record_batch import HEADERS_TYPE
from headgate.connectors.encode import check_json, json_lines
from headgate.connectors.kafka.fetcher import Partition
from headgate.errors import UsageError

_NEW_LINE = 10


@dataclass(frozen=True, slots=True)
class RecordColumns:
    """The names of the columns; "" for none.

    Attributes:
        value: its bytes are the value; "": the value is the record as JSON, without ``beside``.
        topic: with the topic of each record.
        partition: with the partition of each record.
    """

    value: str = ""
    key: str = ""
    headers: str = ""
    timestamp: str = ""
    topic: str = ""
    partition: str = ""

    @property
    def beside(self) -> tuple[str, ...]:
        """Columns that say how a record is written, and are no part of its value."""
        return tuple(name for name in (self.headers, self.timestamp, self.topic, self.partition) if name)

    def check(self, schema: pa.Schema) -> None:
        """Check that records of ``schema`` have these columns.

        Raises:
            UsageError: one is missing or of a wrong type, or a record cannot be JSON.
        """
        self._check("value", self.value, schema, _is_bytes, "binary or text")
        self._check("key", self.key, schema, _is_bytes, "binary or text")
        self._check("headers", self.headers, schema, _is_headers, "a list of structs with a key and a value")
        self._check("timestamp", self.timestamp, schema, pa.types.is_timestamp, "a timestamp")
        self._check("topic_column", self.topic, schema, _is_text, "text")
        self._check("partition", self.partition, schema, pa.types.is_integer, "an integer")
        if self.value:
            return
        content = pa.schema([field for field in schema if field.name not in self.beside])
        if not len(content):
            raise UsageError("records have no column for the value of KafkaSink; select at least one more")
        check_json(content)

    def _check(
        self, option: str, name: str, schema: pa.Schema, fits: Callable[[pa.DataType], bool], wanted: str
    ) -> None:
        if not name:
            return
        if name not in schema.names:
            there = ", ".join(schema.names)
            raise UsageError(f"KafkaSink({option}={name!r}) names a column that records do not have; they have {there}")
        if not fits(dtype := schema.field(name).type):
            raise UsageError(f"KafkaSink({option}={name!r}) names a column of type {dtype}, not {wanted}; cast it")

    def values_of(self, batch: pa.RecordBatch) -> pa.Array:
        """Return the values; null deletes the key in a compacted topic."""
        if self.value:
            return batch.column(self.value).cast(pa.large_binary())
        return _lines(json_lines(batch.drop_columns(list(self.beside)) if self.beside else batch), batch.num_rows)

    def keys_of(self, batch: pa.RecordBatch) -> pa.Array | None:
        """Return the keys, if there are any."""
        return batch.column(self.key).cast(pa.large_binary()) if self.key else None

    def timestamps_of(self, batch: pa.RecordBatch, now_ms: int) -> npt.NDArray[np.int64]:
        """Return the times in milliseconds; ``now_ms`` where there is none."""
        if not self.timestamp:
            return np.full(batch.num_rows, now_ms, np.int64)
        column = batch.column(self.timestamp)
        exact = column.cast(pa.timestamp("ms", column.type.tz), safe=False).cast(pa.int64())
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

    def __init__(self, columns: RecordColumns, topic: str, partitions_count: Callable[[str], int], first: int) -> None:
        """Args:
        topic: of records that name none.
        partitions_count: how many partitions a topic has; raises UsageError if there is no such topic.
        first: the partition with which records without a key begin.
        """
        self._columns, self._topic, self._partitions_count = columns, topic, partitions_count
        self._turn = first

    def outgoing(self, batch: pa.RecordBatch, now_ms: int) -> Iterator[Outgoing]:
        """Yield the records of a batch by partition.

        Raises:
            UsageError: there is no such topic.
        """
        columns = self._columns
        values, keys = columns.values_of(batch), columns.keys_of(batch)
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
            named = batch.column(self._columns.partition).cast(pa.int64())
            chosen = np.where(
                named.is_valid().to_numpy(zero_copy_only=False),
                pc.fill_null(named, 0).to_numpy(zero_copy_only=False),
                chosen,
            )
        own = chosen[rows]
        order = np.argsort(own, kind="stable")
        found, begins = np.unique(own[order], return_index=True)
        yield from zip(found.tolist(), np.split(rows[order], begins[1:]), strict=True)


def _lines(text: bytes, count: int) -> pa.Array:
    """Return the lines of ``text``, each of which ends with a new line, as a column of bytes."""
    data = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero(data == _NEW_LINE)
    assert len(ends) == count, "a record as JSON is one line"
    bounds = np.concatenate(([0], ends - np.arange(count)))
    content = data[data != _NEW_LINE]
    return pa.Array.from_buffers(pa.large_binary(), count, [None, pa.py_buffer(bounds), pa.py_buffer(content)])


def _is_text(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_string(dtype) or pa.types.is_large_string(dtype))


def _is_bytes(dtype: pa.DataType) -> bool:
    return _is_text(dtype) or bool(pa.types.is_binary(dtype) or pa.types.is_large_binary(dtype))


def _is_headers(dtype: pa.DataType) -> bool:
    if not (pa.types.is_list(dtype) or pa.types.is_large_list(dtype)) or not pa.types.is_struct(dtype.value_type):
        return False
    entry = dtype.value_type
    names = [entry.field(index).name for index in range(entry.num_fields)]
    return names == ["key", "value"] and _is_text(entry.field(0).type) and _is_bytes(entry.field(1).type)
