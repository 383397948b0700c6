"""Encodes records as Kafka's values of Protobuf, with the package ptars, column by column.

A column is written as the field of its name. What Protobuf cannot hold as it is, such as a null in a field that has
none, is refused: without a word it would become zero, or be left out. Fields without a column are not set.
"""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headgate.connectors.kafka.schemas.protobuf_message import ProtobufMessage, handler_of
from headgate.errors import UsageError
from headgate.operators.schemas import MAP_FIELDS, canonical_type

CHUNK_BYTES = 64 << 20
"""Records that are encoded at once, in memory: ptars makes an array of at most 2 GiB of them."""

_TIME_US_MIN, _TIME_US_MAX = -62_135_596_800_000_000, 253_402_300_799_999_999
"""The first and the last microsecond that Protobuf has a timestamp for."""

_NUMBER = re.compile(r"0|-?[1-9]\d{0,9}")
"""How a number of an enum is written that has no name."""


class ProtobufEncoder:
    """Encodes records as one message."""

    def __init__(self, message: ProtobufMessage, columns: pa.Schema) -> None:
        """``columns``: of the records.

        Raises:
            UsageError: records do not fit, or the package is not installed.
        """
        self._handler, self._message = handler_of(message, timestamp_unit="us", enums="int32"), message
        self._fields: pa.Schema = self._handler.schema()
        self._enums = {path: dict(names) for path, names in message.enums}
        self._check(list(columns), self._fields, "")

    def encode(self, batch: pa.RecordBatch, head: bytes) -> pa.Array:
        """Return the values, each after ``head``.

        Raises:
            UsageError: a record has a value that the message cannot hold.
        """
        names = [field.name for field in self._fields if field.name in batch.schema.names]
        own = {field.name: field for field in self._fields}
        self._check_choices("", {name: batch.column(name) for name in names})
        columns = [self._fitted(batch.column(name), own[name], name) for name in names]
        fitted = pa.RecordBatch.from_arrays(columns, names)
        rows = max(1, CHUNK_BYTES * batch.num_rows // max(1, batch.nbytes))
        parts = [
            self._handler.record_batch_to_array(fitted.slice(begin, rows)) for begin in range(0, batch.num_rows, rows)
        ]
        values = pa.concat_arrays([one.cast(pa.large_binary()) for one in parts] or [pa.array([], pa.large_binary())])
        if not head:
            return values
        return pc.binary_join_element_wise(
            pa.scalar(head, pa.large_binary()), values, pa.scalar(b"", pa.large_binary())
        )

    # -- which columns fit

    def _check(self, given: list[pa.Field], fields: pa.Schema | pa.StructType, begin: str) -> None:
        """Check that the fields of a message can be made of columns."""
        wanted = {field.name: field for field in fields}
        name = self._message.name
        for column in given:
            path = f"{begin}{column.name}"
            if column.name not in wanted:
                raise UsageError(f"message {name} has no field for column '{path}'; drop it, or add the field")
            if path in self._message.cycles:
                raise UsageError(
                    f"field '{path}' of message {name} is of a message that contains itself, which KafkaSink cannot "
                    "write; drop the column"
                )
            self._check_type(column.type, wanted[column.name].type, path)
        there = {column.name for column in given}
        for path in self._message.required:
            inner = path.removeprefix(begin)
            if path.startswith(begin) and "." not in inner and inner not in there:
                raise UsageError(f"message {name} requires field '{path}', and records have no such column")

    def _check_type(self, given: pa.DataType, wanted: pa.DataType, path: str) -> None:
        if pa.types.is_struct(given) and pa.types.is_struct(wanted):
            self._check(list(given), wanted, f"{path}.")
        elif pa.types.is_map(wanted):
            entry = given.value_type if pa.types.is_large_list(given) else None
            if entry is None or not pa.types.is_struct(entry) or tuple(one.name for one in entry) != MAP_FIELDS:
                raise self._misfit(given, wanted, path)
            self._check_type(entry.field(0).type, wanted.key_type, f"{path}.key")
            self._check_type(entry.field(1).type, wanted.item_type, f"{path}.value")
        elif pa.types.is_large_list(given) and pa.types.is_large_list(wanted):
            self._check_type(given.value_type, wanted.value_type, path)
        else:
            wanted = pa.large_string() if path in self._enums else wanted
            if not _fits(given, wanted):
                raise self._misfit(given, wanted, path)

    def _misfit(self, given: pa.DataType, wanted: pa.DataType, path: str) -> UsageError:
        name = self._message.name
        return UsageError(
            f"message {name} has field '{path}' of type {wanted}, and the column is of type {given}; cast it"
        )

    # -- which values fit

    def _fitted(self, column: pa.Array, field: pa.Field, path: str) -> pa.Array:
        """Return a column as ptars takes the field."""
        if column.null_count and (not field.nullable or path in self._message.required):
            raise UsageError(
                f"column '{path}' has a null, and the field of message {self._message.name} has none; fill it, or make "
                "the field optional"
            )
        dtype = field.type
        if pa.types.is_struct(dtype):
            there = {one.name: column.field(one.name) for one in dtype if column.type.get_field_index(one.name) >= 0}
            return self._struct(there, column, dtype, path)
        if pa.types.is_map(dtype):
            return self._map(column, dtype, path)
        if pa.types.is_large_list(dtype):
            items = self._fitted(column.flatten(), dtype.value_field, path)
            return pa.LargeListArray.from_arrays(_offsets(column), items)
        if path in self._enums:
            return self._numbers(column, path)
        if pa.types.is_timestamp(dtype):
            _check_times(column, path)
        try:
            return column.cast(dtype)
        except pa.ArrowInvalid as error:
            raise UsageError(f"column '{path}' has a value that Protobuf cannot hold: {error}") from error

    def _struct(self, columns: dict[str, pa.Array], column: pa.Array, dtype: pa.StructType, path: str) -> pa.Array:
        is_there = column.is_valid()
        inner = {name: one.filter(is_there) for name, one in columns.items()}
        self._check_choices(path, inner)
        rows = pa.array(np.cumsum(is_there.to_numpy(zero_copy_only=False)) - 1, mask=column.is_null().to_numpy(False))
        fitted = [
            self._fitted(inner[field.name], field, f"{path}.{field.name}") for field in dtype if field.name in inner
        ]
        children = [one.take(rows) for one in fitted] if column.null_count else fitted
        return pa.StructArray.from_arrays(children, list(inner), mask=column.is_null())

    def _map(self, column: pa.Array, dtype: pa.MapType, path: str) -> pa.Array:
        entries = column.flatten()
        if entries.null_count:
            raise UsageError(f"column '{path}' has a map with an entry that is null; leave it out")
        keys = self._fitted(entries.field(0), pa.field("key", dtype.key_type, False), f"{path}.key")
        values = self._fitted(entries.field(1), pa.field("value", dtype.item_type, False), f"{path}.value")
        pairs = pa.table({"row": pc.list_parent_indices(column), "key": keys})
        if pairs.group_by(["row", "key"]).aggregate([]).num_rows < len(keys):
            raise UsageError(f"column '{path}' has a map with a key that is there twice; keep one of them")
        return pa.MapArray.from_arrays(_offsets(column).cast(pa.int32()), keys, values)

    def _numbers(self, column: pa.Array, path: str) -> pa.Array:
        """Return the numbers of an enum; one that has no name is itself a text, as the source gives it."""
        texts = pc.unique(column.drop_null())
        numbers = [self._number(text, path) for text in texts.to_pylist()]
        return pa.array(numbers, pa.int32()).take(pc.index_in(column, texts))

    def _number(self, text: str, path: str) -> int:
        if (known := self._enums[path].get(text)) is not None:
            return known
        if _NUMBER.fullmatch(text) and -(2**31) <= int(text) < 2**31:
            return int(text)
        raise UsageError(f"column '{path}' has {text!r}, which is none of {', '.join(self._enums[path])}")

    def _check_choices(self, path: str, columns: dict[str, pa.Array]) -> None:
        """Check that of fields that exclude each other each record has at most one."""
        for where, names in self._message.choices:
            there = [name for name in names if name in columns]
            if where != path or len(there) < 2:
                continue
            counts = sum(columns[name].is_valid().to_numpy(zero_copy_only=False).astype(np.int64) for name in there)
            if (counts > 1).any():
                raise UsageError(
                    f"a record has values for several of the columns {', '.join(there)}, of which message "
                    f"{self._message.name} has one at a time; make the others null"
                )


def _check_times(column: pa.Array, path: str) -> None:
    found = pc.min_max(column.cast(pa.int64()))
    first, last = found["min"].as_py(), found["max"].as_py()
    if first is not None and not _TIME_US_MIN <= first <= last <= _TIME_US_MAX:
        raise UsageError(f"column '{path}' has a time outside of the years 1 to 9999, which Protobuf cannot hold")


def _offsets(column: pa.Array) -> pa.Array:
    """Return where the items of each list begin, when they are one after the other."""
    sizes = column.value_lengths().to_numpy(zero_copy_only=False)
    return pa.array(np.concatenate(([0], np.cumsum(sizes))).astype(np.int64))


def _fits(given: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether each value of a column has one of the field, which a cast finds."""
    if given == wanted or given == canonical_type(wanted):
        return True
    if pa.types.is_integer(given) and pa.types.is_integer(wanted):
        if pa.types.is_signed_integer(given) == pa.types.is_signed_integer(wanted):
            return bool(given.bit_width <= wanted.bit_width)
        return bool(pa.types.is_unsigned_integer(given) and given.bit_width < wanted.bit_width)
    return bool(given == pa.float32() and wanted == pa.float64())
