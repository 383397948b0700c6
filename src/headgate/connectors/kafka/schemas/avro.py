"""Kafka's values of Avro: decoded in bulk, and encoded with the package fastavro; plain ones, and with a registry.

With a registry a value begins with a zero byte and the id of its schema in four bytes, or the header
``__value_schema_id`` has that, or the schema's GUID. Values of each schema are decoded together, into the reader's
schema. New ids are asked for while the pipeline runs. The schema of values that are written is the user's, or made from
the columns: then every field may be null, and a list of keys and values is an array of records.
"""

from __future__ import annotations

import importlib
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headgate.codec.avro import DecodedValues, UnreadableSchemaError, decode_values
from headgate.codec.avro_schema import AvroField, AvroType, parse_schema
from headgate.connectors.files.line_decoders import Decoded, Refused
from headgate.connectors.kafka.schemas.frames import FRAME_BYTES, ID_HEADER, KEY_ID_HEADER, NO_FRAME
from headgate.connectors.kafka.schemas.schema_registry import RegistryClient
from headgate.distribution import install_command
from headgate.errors import UsageError

_ID_MAGIC, _GUID_MAGIC = 0, 1

_Rows: TypeAlias = npt.NDArray[np.int64]
_Key: TypeAlias = int | str
"""An id, or a GUID."""


class AvroDecoder:
    """See the module.

    Attributes:
        schema: of the records that it makes; a schema that is no record becomes a column ``value``.
    """

    def __init__(
        self,
        reader: AvroType,
        registry: RegistryClient | None,
        writer: AvroType | None = None,
        *,
        cuts_times: bool = False,
        id_header: str = ID_HEADER,
    ) -> None:
        """Prepare for values that are to be read as ``reader``.

        Args:
            registry: None for values without ids.
            writer: what values without ids have; None: the reader's.
            cuts_times: whether parts of a microsecond are left out of times.
            id_header: the header that may name the schema.
        """
        self._id_header = id_header
        self._reader, self._registry = reader, registry
        self._plain, self._cuts_times = writer or reader, cuts_times
        self._writers: dict[_Key, AvroType] = {}
        is_record = self._reader.kind == "record"
        self.schema = pa.schema(list(self._reader.column) if is_record else [("value", self._reader.column)])

    def decode(self, values: pa.Array, rows: _Rows, headers: pa.Array | None) -> Decoded:
        """Return the records and the refused values. ``rows``: what to call each value."""
        refused = Refused()
        parts: list[tuple[_Rows, pa.Array]] = []
        if self._registry is None:
            self._decode(values, np.arange(len(values)), 0, self._plain, parts, refused, rows)
        else:
            left = self._by_header(values, rows, headers, parts, refused)
            self._by_frame(values, left, rows, parts, refused)
        if not parts:
            return Decoded(pa.RecordBatch.from_pylist([], schema=self.schema), rows[:0], refused)
        (which, column) = parts[0]
        if len(parts) > 1:
            which = np.concatenate([some for some, _ in parts])
            order = np.argsort(which, kind="stable")
            which, column = which[order], pa.concat_arrays([some for _, some in parts]).take(pa.array(order))
        columns = column.flatten() if self._reader.kind == "record" else [column]
        return Decoded(pa.RecordBatch.from_arrays(columns, schema=self.schema), rows[which], refused)

    def _by_header(
        self,
        values: pa.Array,
        rows: _Rows,
        headers: pa.Array | None,
        parts: list[tuple[_Rows, pa.Array]],
        refused: Refused,
    ) -> _Rows:
        """Decode values whose schema a header names; return which are left."""
        everything = np.arange(len(values))
        if headers is None:
            return everything
        flat = headers.flatten()
        is_id = pc.equal(pc.struct_field(flat, "key"), self._id_header)
        if not pc.any(is_id).as_py():
            return everything
        owners = pc.list_parent_indices(headers).filter(is_id).to_numpy()
        named = pc.struct_field(flat, "value").filter(is_id).dictionary_encode()
        numbers = named.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        for number in np.unique(numbers):
            which = np.unique(owners[numbers == number])
            key = _key_of(None if number < 0 else named.dictionary[int(number)].as_py())
            self._decode_with(key, f"header {self._id_header} is damaged", values, which, 0, parts, refused, rows)
        return np.setdiff1d(everything, owners)

    def _by_frame(
        self,
        values: pa.Array,
        which: _Rows,
        rows: _Rows,
        parts: list[tuple[_Rows, pa.Array]],
        refused: Refused,
    ) -> None:
        """Decode values that begin with the id of their schema."""
        if not len(which):
            return
        offsets = np.frombuffer(values.buffers()[1], np.int64, len(values) + 1, 8 * values.offset)
        data = np.frombuffer(values.buffers()[2] or b"", np.uint8)
        begins = offsets[:-1][which]
        is_long = offsets[1:][which] - begins >= FRAME_BYTES
        is_framed = is_long.copy()
        is_framed[is_long] = data[begins[is_long]] == _ID_MAGIC
        if not is_framed.all():
            other = which[~is_framed]
            refused.add(NO_FRAME, rows[other], values.take(pa.array(other)))
            which, begins = which[is_framed], begins[is_framed]
        if not len(which):
            return
        ids = np.ascontiguousarray(data[begins[:, None] + np.arange(1, FRAME_BYTES)]).view(">u4").reshape(-1)
        for schema_id in np.unique(ids):
            some = which if (ids == schema_id).all() else which[ids == schema_id]
            self._decode_with(int(schema_id), "", values, some, FRAME_BYTES, parts, refused, rows)

    def _decode_with(
        self,
        key: _Key | None,
        damage: str,
        values: pa.Array,
        which: _Rows,
        skip: int,
        parts: list[tuple[_Rows, pa.Array]],
        refused: Refused,
        rows: _Rows,
    ) -> None:
        """Decode values whose schema has a key. ``damage``: what is wrong if there is none."""
        writer = damage if key is None else self._writer(key)
        if isinstance(writer, str):
            refused.add(writer, rows[which], values.take(pa.array(which)))
            return
        try:
            self._decode(values, which, skip, writer, parts, refused, rows)
        except UnreadableSchemaError as error:
            problem = f"its schema, {_called(key)}, does not go together with that of the source: {error}"
            refused.add(problem, rows[which], values.take(pa.array(which)))

    def _writer(self, key: _Key) -> AvroType | str:
        """Return the schema with an id, or what is wrong with it."""
        if (found := self._writers.get(key)) is not None:
            return found
        assert self._registry is not None
        known = self._registry.by_id(key) if isinstance(key, int) else self._registry.by_guid(key)
        if known is None:
            return f"its schema, {_called(key)}, is not in the registry"
        try:
            self._writers[key] = known.parse(f"its schema, {_called(key)}", is_partial=True)
        except UsageError as error:
            return str(error)
        return self._writers[key]

    def _decode(
        self,
        values: pa.Array,
        which: _Rows,
        skip: int,
        writer: AvroType,
        parts: list[tuple[_Rows, pa.Array]],
        refused: Refused,
        rows: _Rows,
    ) -> None:
        some = values if len(which) == len(values) else values.take(pa.array(which))
        found = self._read(some, skip, writer)
        column = found.column
        if found.problems:
            is_good = np.ones(len(which), np.bool_)
            for row, problem in sorted(found.problems.items()):
                is_good[row] = False
                refused.add(problem, rows[which[row : row + 1]], some.slice(row, 1))
            column, which = column.filter(pa.array(is_good)), which[is_good]
        parts.append((which, column))

    def _read(self, values: pa.Array, skip: int, writer: AvroType) -> DecodedValues:
        return decode_values(values, skip, writer, self._reader, cuts_times=self._cuts_times)


class AvroKeyDecoder(AvroDecoder):
    """Decodes keys: records with the fields of a key, or the value of its only field."""

    def __init__(self, fields: Sequence[AvroField], registry: RegistryClient, *, cuts_times: bool) -> None:
        """``fields``: of the key, as values have them; a key that lacks one is of no row, whatever its default is."""
        fields = [replace(one, has_default=False) for one in fields]
        column = pa.struct([pa.field(one.name, one.type.column) for one in fields])
        reader = AvroType("record", column, "Key", tuple(fields))
        super().__init__(reader, registry, cuts_times=cuts_times, id_header=KEY_ID_HEADER)

    def _read(self, values: pa.Array, skip: int, writer: AvroType) -> DecodedValues:
        if writer.kind == "record" or len(self._reader.fields) > 1:
            return super()._read(values, skip, writer)
        only = self._reader.fields[0].type
        found = decode_values(values, skip, writer, only, cuts_times=self._cuts_times)
        column = found.column.cast(only.column)
        return DecodedValues(pa.StructArray.from_arrays([column], fields=list(self._reader.column)), found.problems)


def _key_of(named: bytes | None) -> _Key | None:
    """Return the id or the GUID in a header."""
    if named is not None and len(named) == FRAME_BYTES and named[0] == _ID_MAGIC:
        return int.from_bytes(named[1:], "big")
    if named is not None and len(named) == 17 and named[0] == _GUID_MAGIC:
        return str(UUID(bytes=named[1:]))
    return None


def _called(key: _Key | None) -> str:
    return f"id {key}" if isinstance(key, int) else f"GUID {key}"


_WHERE = "the schema of KafkaSink"
_NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*")
_UUID = "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$"
_NAMES_OF_TYPES: Mapping[pa.DataType, str] = {
    pa.null(): "null",
    pa.bool_(): "boolean",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.large_string(): "string",
    pa.large_binary(): "bytes",
}


def made_schema(columns: pa.Schema, topic: str) -> str:
    """Return the schema of Avro for records.

    Raises:
        UsageError: a column has a type that Avro does not have, or a name that it does not allow.
    """
    return json.dumps(_record(columns, _name_of(topic), ""))


def made_envelope(rows: pa.StructType, topic: str) -> str:
    """Return the schema of Avro for Debezium's envelopes of rows.

    Raises:
        UsageError: as for ``made_schema``.
    """
    row = _record(rows, "Value", "")
    op = {"name": "op", "type": "string"}
    fields = [
        {"name": "before", "type": ["null", row], "default": None},
        {"name": "after", "type": ["null", "Value"]},
        op,
    ]
    return json.dumps({"type": "record", "name": "Envelope", "namespace": _name_of(topic), "fields": fields})


def _name_of(topic: str) -> str:
    name = re.sub("[^A-Za-z0-9_]", "_", topic)
    return name if _NAME.fullmatch(name) else f"_{name}"


def _record(fields: Any, name: str, where: str) -> dict[str, Any]:
    made = []
    for one in fields:
        path = f"{where}{one.name}"
        if not _NAME.fullmatch(one.name):
            raise UsageError(f"column '{path}' has a name that Avro does not allow; rename it")
        inner = _type(one.type, f"{name}_{one.name}", path)
        made.append({"name": one.name, "type": inner if inner == "null" else ["null", inner], "default": None})
    return {"type": "record", "name": name, "fields": made}


def _type(dtype: pa.DataType, name: str, path: str) -> Any:
    if (known := _NAMES_OF_TYPES.get(dtype)) is not None:
        return known
    if pa.types.is_integer(dtype) and dtype != pa.uint64():
        return "int" if dtype.bit_width < 32 or dtype == pa.int32() else "long"
    if pa.types.is_decimal(dtype) and 0 <= dtype.scale <= dtype.precision:
        return {"type": "bytes", "logicalType": "decimal", "precision": dtype.precision, "scale": dtype.scale}
    if pa.types.is_timestamp(dtype):
        return {"type": "long", "logicalType": "local-timestamp-micros" if dtype.tz is None else "timestamp-micros"}
    if pa.types.is_date32(dtype):
        return {"type": "int", "logicalType": "date"}
    if pa.types.is_time64(dtype):
        return {"type": "long", "logicalType": "time-micros"}
    if pa.types.is_large_list(dtype):
        inner = _type(dtype.value_type, name, path)
        return {"type": "array", "items": inner if inner == "null" else ["null", inner]}
    if pa.types.is_struct(dtype):
        return _record(dtype, name, f"{path}.")
    raise UsageError(f"column '{path}' has type {dtype}, which Avro cannot hold; cast or drop it")


class AvroEncoder:
    """Encodes records with one schema."""

    def __init__(self, text: str, columns: pa.Schema) -> None:
        """``text``: the schema; ``columns``: of the records.

        Raises:
            UsageError: the schema is none, records do not fit, or the package is not installed.
        """
        try:
            self._fastavro = importlib.import_module("fastavro")
        except ImportError as error:
            raise UsageError(
                f"format='avro' of KafkaSink needs the package fastavro: {install_command('avro')}, on every worker"
            ) from error
        self._type = parse_schema(text, _WHERE, is_partial=True)
        if self._type.kind != "record":
            raise UsageError(f"{_WHERE} is of kind {self._type.kind}, not a record with a field for each column")
        _check(pa.struct(list(columns)), self._type, "")
        given = json.loads(text)
        self._schema = self._fastavro.parse_schema(given)

    def encode(self, batch: pa.RecordBatch, head: bytes) -> pa.Array:
        """Return the values, each after ``head``.

        Raises:
            UsageError: a record has a value that the schema does not allow.
        """
        columns = [_plain(batch.column(one.name), one.type, one.name) for one in self._fields(batch)]
        names = [one.name for one in self._fields(batch)]
        rows = pa.RecordBatch.from_arrays(columns, names).to_pylist()
        out, bounds = io.BytesIO(), np.zeros(len(rows) + 1, np.int64)
        for number, row in enumerate(rows):
            out.write(head)
            try:
                self._fastavro.schemaless_writer(out, self._schema, _with_maps(row, self._type, ""))
            except (ValueError, TypeError, OverflowError, KeyError, IndexError) as error:
                raise UsageError(f"{_WHERE} does not allow a record: {error}") from error
            bounds[number + 1] = out.tell()
        return pa.Array.from_buffers(
            pa.large_binary(), len(rows), [None, pa.py_buffer(bounds), pa.py_buffer(out.getvalue())]
        )

    def _fields(self, batch: pa.RecordBatch) -> list[Any]:
        return [one for one in self._type.fields if one.name in batch.schema.names]


def _bare(avro: AvroType) -> tuple[AvroType, bool]:
    """Return the type without null, and whether values may be null."""
    if avro.kind != "union":
        return avro, avro.kind == "null"
    inner = [one for one in avro.inner if one.kind != "null"]
    return (inner[0] if inner else avro.inner[0]), len(inner) < len(avro.inner)


def _check(dtype: pa.DataType, avro: AvroType, path: str) -> None:
    """Check that a column can be written as a type."""
    if avro.kind == "union" and sum(one.kind != "null" for one in avro.inner) > 1:
        raise UsageError(f"{_WHERE} has a union of several types for column '{path}', which KafkaSink cannot write")
    bare, _ = _bare(avro)
    if bare.problem and bare.kind != "record":
        raise UsageError(f"{_WHERE} has for column '{path}' {bare.problem}")
    if pa.types.is_struct(dtype) and bare.kind == "record":
        begin, names = f"{path}." if path else "", {one.name for one in bare.fields}
        for one in dtype:
            if one.name not in names:
                raise UsageError(f"{_WHERE} has no field for column '{begin}{one.name}'; drop it, or add the field")
        for field in bare.fields:
            if dtype.get_field_index(field.name) >= 0:
                _check(dtype.field(field.name).type, field.type, f"{begin}{field.name}")
            elif not field.has_default:
                raise UsageError(f"{_WHERE} has a field '{begin}{field.name}' without a default, and records do not")
        return
    if pa.types.is_large_list(dtype) and bare.kind == "array":
        _check(dtype.value_type, bare.inner[0], path)
        return
    if pa.types.is_large_list(dtype) and bare.kind == "map" and pa.types.is_struct(dtype.value_type):
        entry = dtype.value_type
        if [one.name for one in entry] == ["key", "value"] and entry.field(0).type == pa.large_string():
            _check(entry.field(1).type, bare.inner[0], path)
            return
    is_small = pa.types.is_integer(dtype) and (dtype.bit_width < 32 or dtype == pa.int32())
    is_plain = bare.scale is None
    fits = dtype == bare.column and bare.kind not in ("record", "array", "map")
    fits |= is_plain and bare.kind == "int" and is_small
    fits |= is_plain and bare.kind == "long" and pa.types.is_integer(dtype) and dtype != pa.uint64()
    fits |= bare.kind == "double" and dtype == pa.float32()
    if not fits:
        is_logical = bare.scale is not None or pa.types.is_decimal(bare.column)
        wanted = bare.column if is_logical else bare.kind
        raise UsageError(f"{_WHERE} has the type {wanted} for column '{path}', which is of type {dtype}; cast it")


def _plain(column: pa.Array, avro: AvroType, path: str) -> pa.Array:
    """Return times as the numbers that Avro has for them.

    Raises:
        UsageError: there is a null where the schema has none, or a time that is finer than that of the schema.
    """
    bare, is_nullable = _bare(avro)
    if column.null_count and not is_nullable:
        raise UsageError(f"column '{path}' has a null, which {_WHERE} does not allow; fill it, or allow null")
    if bare.kind == "record":
        fields = [one for one in bare.fields if column.type.get_field_index(one.name) >= 0]
        if not fields:
            return column
        there = column.drop_null()
        children = [
            _plain(
                pa.array([], column.type.field(one.name).type) if not len(there) else there.field(one.name),
                one.type,
                f"{path}.{one.name}",
            )
            for one in fields
        ]
        made = pa.StructArray.from_arrays(children, [one.name for one in fields])
        return _spread(made, column)
    if bare.kind in ("array", "map"):
        there = column.drop_null()
        items, inner = there.flatten(), bare.inner[0]
        if bare.kind == "map":
            values = _plain(items.field(1), inner, path)
            items = pa.StructArray.from_arrays([items.field(0), values], ["key", "value"])
        else:
            items = _plain(items, inner, path)
        sizes = there.value_lengths().to_numpy(zero_copy_only=False)
        offsets = pa.array(np.concatenate(([0], np.cumsum(sizes))).astype(np.int64))
        return _spread(pa.LargeListArray.from_arrays(offsets, items), column)
    if bare.is_uuid and not pc.all(pc.match_substring_regex(column, _UUID), min_count=0).as_py():
        raise UsageError(f"column '{path}' has a text that is no UUID, which {_WHERE} does not allow; mend it")
    if bare.kind == "string" and pa.types.is_timestamp(column.type):
        return pc.strftime(column, "%Y-%m-%dT%H:%M:%SZ")
    if bare.scale is None:
        return column
    if pa.types.is_duration(column.type):
        return column.cast(pa.int64())
    if pa.types.is_date32(column.type):
        return column.cast(pa.int32())
    factor, divisor = bare.scale
    base = 1_000_000_000 if pa.types.is_time(column.type) else 1_000_000
    unit = {1_000: "ms", 1_000_000: "us", 1_000_000_000: "ns"}[base * divisor // factor]
    try:
        if pa.types.is_time(column.type):
            number = pa.int32() if unit == "ms" else pa.int64()
            return column.cast(pa.time32("ms") if unit == "ms" else pa.time64(unit)).cast(number)
        return column.cast(pa.timestamp(unit, column.type.tz)).cast(pa.int64())
    except pa.ArrowInvalid as error:
        raise UsageError(f"column '{path}' has a time that {_WHERE} cannot hold: {error}") from error


def _spread(there: pa.Array, column: pa.Array) -> pa.Array:
    """Return ``there`` with a null where ``column`` has one."""
    if not column.null_count:
        return there
    is_there = column.is_valid().to_numpy(zero_copy_only=False)
    return there.take(pa.array(np.cumsum(is_there) - 1, mask=~is_there))


def _with_maps(value: Any, avro: AvroType, path: str) -> Any:
    """Return a value with a dict for each map."""
    bare, _ = _bare(avro)
    if value is None:
        return None
    if bare.kind == "record":
        types = {one.name: one.type for one in bare.fields}
        return {name: _with_maps(one, types[name], f"{path}.{name}") for name, one in value.items()}
    if bare.kind == "array":
        return [_with_maps(one, bare.inner[0], path) for one in value]
    if bare.kind == "map":
        made = {one["key"]: _with_maps(one["value"], bare.inner[0], path) for one in value}
        if len(made) < len(value) or None in made:
            raise UsageError(f"column '{path[1:]}' has a map with a key that is null or there twice")
        return made
    return value
