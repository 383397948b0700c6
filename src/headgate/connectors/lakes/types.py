"""Which types the columns of a table have, and records in the types of a table.

Records have canonical types (``operators.schemas``). A table has fewer types: what fits without loss is widened, and
what has no counterpart is refused with a remedy. Types of the table are Arrow types here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pyarrow as pa
import pyarrow.compute as pc

from headgate.errors import UsageError

_UNSIGNED = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
}
_INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64()]

TypeChange = Callable[[pa.DataType], "pa.DataType | None"]


def delta_type(dtype: pa.DataType) -> pa.DataType | None:
    """Return the type of a column of Delta that holds a canonical type; None: there is none."""
    if pa.types.is_time(dtype):
        return None
    return _plain_type(dtype, delta_type)


def iceberg_type(dtype: pa.DataType) -> pa.DataType | None:
    """Return the type of a column of Iceberg that holds a canonical type; None: there is none."""
    if dtype in (pa.int8(), pa.int16(), pa.uint8(), pa.uint16()):
        return pa.int32()
    if pa.types.is_time(dtype):
        return pa.time64("us")
    return _plain_type(dtype, iceberg_type)


def _plain_type(dtype: pa.DataType, inner: TypeChange) -> pa.DataType | None:
    if dtype in _UNSIGNED:
        return _UNSIGNED[dtype]
    if pa.types.is_large_string(dtype):
        return pa.string()
    if pa.types.is_large_binary(dtype):
        return pa.binary()
    if pa.types.is_large_list(dtype):
        element = inner(dtype.value_type)
        return None if element is None else pa.list_(element)
    if pa.types.is_struct(dtype):
        fields = [(field.name, inner(field.type)) for field in dtype]
        if not fields or any(found is None for _, found in fields):
            return None
        return pa.struct([pa.field(name, found) for name, found in fields])
    if pa.types.is_duration(dtype) or pa.types.is_null(dtype):
        return None
    return dtype


def table_schema(schema: pa.Schema, change: TypeChange, sink: str) -> pa.Schema:
    """Return the schema of a table for records of ``schema``.

    Raises:
        UsageError: a column has a type that such tables do not have.
    """
    return pa.schema([pa.field(field.name, _changed(field, change, sink)) for field in schema])


def _changed(field: pa.Field, change: TypeChange, sink: str) -> pa.DataType:
    found = change(field.type)
    if found is None:
        raise UsageError(
            f"{sink} cannot write column '{field.name}' of type {field.type}, which such tables do not have; cast it "
            "to a number or a text before"
        )
    return found


def new_columns(records: pa.Schema, table: pa.Schema, change: TypeChange, sink: str, *, evolve: bool) -> list[pa.Field]:
    """Return the columns that the table does not have yet, in types of the table.

    Raises:
        UsageError: the records do not fit the table, or columns are missing in it and ``evolve`` is not set.
    """
    wanted = table_schema(records, change, sink)
    missing = [field for field in wanted if field.name not in table.names]
    if missing and not evolve:
        names = ", ".join(f"'{field.name}'" for field in missing)
        raise UsageError(
            f"the table of {sink} has no column {names}; give evolve=True to add columns, or leave them out by select"
        )
    for field in table:
        if field.name in wanted.names:
            found = wanted.field(field.name).type
            if not fits(found, field.type):
                raise UsageError(
                    f"column '{field.name}' of {sink} has type {field.type} in the table, and records have "
                    f"{records.field(field.name).type}, which does not always fit: cast it before"
                )
        elif not field.nullable:
            raise UsageError(f"column '{field.name}' of the table of {sink} is never null, and the records have none")
    return missing


def fits(found: pa.DataType, target: pa.DataType) -> bool:
    """Whether every value of ``found`` is one of ``target``."""
    if found.equals(target):
        return True
    if found in _INTEGERS and target in _INTEGERS:
        return _INTEGERS.index(found) <= _INTEGERS.index(target)
    if found == pa.float32() and target == pa.float64():
        return True
    if pa.types.is_decimal(found) and pa.types.is_decimal(target):
        whole = found.precision - found.scale
        return bool(found.scale <= target.scale and whole <= target.precision - target.scale)
    if pa.types.is_timestamp(found) and pa.types.is_timestamp(target):
        return (found.tz is None) == (target.tz is None) and target.unit in ("us", "ns")
    if _is_text(found) and _is_text(target):
        return True
    if _is_binary(found) and _is_binary(target):
        return True
    if _is_list(found) and _is_list(target):
        return fits(found.value_type, target.value_type)
    if _is_list(found) and pa.types.is_map(target):  # a map is a list of its entries in Headgate
        entries = found.value_type
        pair = [field.name for field in entries] if pa.types.is_struct(entries) else []
        return pair == ["key", "value"] and all(
            fits(entries.field(at).type, inner) for at, inner in enumerate((target.key_type, target.item_type))
        )
    if pa.types.is_struct(found) and pa.types.is_struct(target):
        same = [field.name for field in found] == [field.name for field in target]
        return same and all(fits(a.type, b.type) for a, b in zip(found, target, strict=True))
    return False


def _is_text(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_string(dtype) or pa.types.is_large_string(dtype) or pa.types.is_string_view(dtype))


def _is_binary(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_binary(dtype) or pa.types.is_large_binary(dtype) or pa.types.is_binary_view(dtype))


def _is_list(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_list(dtype) or pa.types.is_large_list(dtype))


def as_table(batches: Iterable[pa.RecordBatch], records: pa.Schema, table: pa.Schema) -> pa.Table:
    """Return records in the types of the table: columns that they do not have are null.

    Raises:
        UsageError: a value does not fit.
    """
    found = pa.Table.from_batches(list(batches), schema=records)
    columns = []
    for field in table:
        if field.name not in records.names:
            columns.append(pa.nulls(found.num_rows, field.type))
            continue
        try:
            column = _as_type(found.column(field.name).combine_chunks(), field.type)
        except pa.ArrowInvalid as error:
            raise UsageError(f"a value of column '{field.name}' does not fit the table: {error}") from error
        if column.null_count and not field.nullable:
            raise UsageError(f"column '{field.name}' of the table is never null, and a record has null there")
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=table)


def _as_type(column: pa.Array | pa.ChunkedArray, target: pa.DataType) -> pa.Array | pa.ChunkedArray:
    if not pa.types.is_map(target) or pa.types.is_map(column.type):
        return pc.cast(column, target)
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    return pa.chunked_array([_as_map(chunk, target) for chunk in chunks], target)


def _as_map(column: pa.Array, target: pa.DataType) -> pa.Array:
    entries = column.flatten()
    sizes = pc.fill_null(pc.list_value_length(column), 0)
    ends = pc.cumulative_sum(sizes.cast(pa.int32()))
    offsets = pa.concat_arrays([pa.array([0], pa.int32()), ends])
    keys, items = entries.field("key").cast(target.key_type), entries.field("value").cast(target.item_type)
    mask = column.is_null() if column.null_count else None
    return pa.MapArray.from_arrays(offsets, keys, items, target, mask=mask)
