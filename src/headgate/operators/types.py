"""Canonical Arrow types: one physical type for each meaning (OP10), so that batches flow without casts.

They are what Polars exports at its oldest compatibility level. A map is a list of its entries: Polars has no maps.
A timestamp with a zone is a moment, one without is a local time (OP11).
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from headgate.codec.zones import LOCAL_TIME, MOMENT
from headgate.errors import UsageError

MAP_FIELDS = ("key", "value")
"""Fields of the structs that the entries of a map become, as Spark's ``map_entries`` names them."""

DECIMAL_DIGITS_MAX = 38
"""Of Polars, and of Spark."""


def canonical_type(dtype: pa.DataType, what: str = "column") -> pa.DataType:
    """Return the canonical form of ``dtype``.

    Raises:
        UsageError: the type is not supported; ``what`` names the column.
    """
    if pa.types.is_string(dtype) or pa.types.is_large_string(dtype) or pa.types.is_string_view(dtype):
        return pa.large_string()
    if pa.types.is_binary(dtype) or pa.types.is_large_binary(dtype) or pa.types.is_binary_view(dtype):
        return pa.large_binary()
    if pa.types.is_dictionary(dtype):
        return canonical_type(dtype.value_type, what)
    if pa.types.is_timestamp(dtype):
        return LOCAL_TIME if dtype.tz is None else MOMENT
    if pa.types.is_list(dtype) or pa.types.is_large_list(dtype) or pa.types.is_fixed_size_list(dtype):
        return pa.large_list(canonical_type(dtype.value_type, what))
    if pa.types.is_struct(dtype):
        return pa.struct([pa.field(f.name, canonical_type(f.type, what)) for f in dtype])
    if pa.types.is_map(dtype):
        entries = zip(MAP_FIELDS, (dtype.key_type, dtype.item_type), strict=True)
        return pa.large_list(pa.struct([pa.field(name, canonical_type(inner, what)) for name, inner in entries]))
    if pa.types.is_decimal(dtype) and dtype.precision <= DECIMAL_DIGITS_MAX:
        return pa.decimal128(dtype.precision, dtype.scale)
    if pa.types.is_time(dtype):
        return pa.time64("ns")
    if pa.types.is_float16(dtype):
        return pa.float32()
    ok = (
        pa.types.is_integer(dtype)
        or pa.types.is_floating(dtype)
        or pa.types.is_boolean(dtype)
        or pa.types.is_date32(dtype)
        or pa.types.is_duration(dtype)
    )
    if not ok:
        raise UsageError(f"{what} has type {dtype}, which Headgate does not carry; cast it before the source")
    return dtype


def canonical_schema(schema: pa.Schema) -> pa.Schema:
    """Return ``schema`` in canonical types, without metadata and with every field nullable."""
    return pa.schema([pa.field(f.name, canonical_type(f.type, f"column '{f.name}'")) for f in schema])


def refuse_twice(schema: pa.Schema, where: str) -> None:
    """Refuse columns of one name.

    Raises:
        UsageError
    """
    twice = [name for name in schema.names if schema.names.count(name) > 1]
    if twice:
        raise UsageError(f"{where} has two columns '{twice[0]}'; rename one of them")


def to_canonical(batch: pa.RecordBatch, schema: pa.Schema | None = None) -> pa.RecordBatch:
    """Return ``batch`` with canonical types (of ``schema`` when given; columns in its order). No copy if equal.

    Raises:
        pyarrow.ArrowInvalid: a column has a value that its canonical type cannot hold, such as a part of a microsecond.
    """
    target = canonical_schema(batch.schema) if schema is None else schema
    if batch.schema.equals(target):
        return batch
    columns = [_as_type(batch.column(field.name), field) for field in target]
    return pa.RecordBatch.from_arrays(columns, schema=target)


def carried(batch: pa.RecordBatch, schema: pa.Schema, where: str) -> pa.RecordBatch:
    """Return ``batch`` in the types of ``schema``, which mean the same, as it comes in or goes out (OP12).

    Raises:
        UsageError: a value would become another one; ``where`` says whose it is.
    """
    try:
        return to_canonical(batch, schema)
    except pa.ArrowInvalid as error:
        raise UsageError(f"{where}: {error}; round or cast the column before") from error


def _as_type(column: pa.Array, field: pa.Field) -> pa.Array:
    if column.type.equals(field.type):
        return column
    try:
        return _with_maps(_with_lists(column), field.type).cast(field.type)
    except pa.ArrowInvalid as error:
        raise pa.ArrowInvalid(
            f"column '{field.name}' ({column.type}) has a value that {field.type} cannot hold: {error}"
        ) from error


def _with_lists(column: pa.Array) -> pa.Array:
    """Return ``column`` with the maps in it as lists of their entries, which Arrow does not cast."""
    dtype = column.type
    if pa.types.is_dictionary(dtype):
        return _with_lists(column.dictionary_decode())
    if not has_map(dtype):
        return column
    whole = pa.concat_arrays([column])  # offsets of a slice begin elsewhere
    if pa.types.is_struct(dtype):
        fields = [_with_lists(whole.field(at)) for at in range(dtype.num_fields)]
        return pa.StructArray.from_arrays(fields, names=dtype.names, mask=whole.is_null())
    if pa.types.is_map(dtype):
        fields = [_with_lists(whole.keys), _with_lists(whole.items)]
        values = pa.StructArray.from_arrays(fields, names=list(MAP_FIELDS))
    else:
        values = _with_lists(whole.values)
    return pa.LargeListArray.from_arrays(whole.offsets.cast(pa.int64()), values, mask=whole.is_null())


def _with_maps(column: pa.Array, dtype: pa.DataType) -> pa.Array:
    """Return ``column`` with its lists of entries as maps where ``dtype``, which is a stream's, has them."""
    if not has_map(dtype):
        return column
    whole = pa.concat_arrays([column])
    if pa.types.is_struct(dtype):
        fields = [_with_maps(whole.field(field.name), field.type) for field in dtype]
        return pa.StructArray.from_arrays(fields, names=[field.name for field in dtype], mask=whole.is_null())
    if not pa.types.is_map(dtype):
        values = _with_maps(whole.values, dtype.value_type)
        return pa.LargeListArray.from_arrays(whole.offsets.cast(pa.int64()), values, mask=whole.is_null())
    entries = whole.flatten()
    keys, items = (entries.field(at) for at in range(2))
    if entries.null_count or keys.null_count:
        raise pa.ArrowInvalid("a map has no key that is null")
    keys, items = _with_maps(keys, dtype.key_type).cast(dtype.key_type), _with_maps(items, dtype.item_type)
    lengths = pc.fill_null(pc.list_value_length(whole), 0)
    offsets = pa.concat_arrays([pa.array([0], pa.int64()), pc.cumulative_sum(lengths.cast(pa.int64()))])
    entry = pa.map_(dtype.key_type, dtype.item_type)
    return pa.MapArray.from_arrays(
        offsets.cast(pa.int32()), keys, items.cast(dtype.item_type), entry, mask=whole.is_null()
    )


def has_map(dtype: pa.DataType) -> bool:
    """Whether ``dtype`` is a map or has one in it."""
    if pa.types.is_struct(dtype):
        return any(has_map(field.type) for field in dtype)
    if pa.types.is_list(dtype) or pa.types.is_large_list(dtype):
        return has_map(dtype.value_type)
    return bool(pa.types.is_map(dtype))


def schema_text(schema: pa.Schema) -> str:
    """Return ``name: type, …`` for messages and manifests."""
    return ", ".join(f"{f.name}: {f.type}" for f in schema)
