"""Columns on their way between Headgate's canonical types and Spark's.

Counterparts: ``spark.state_source``, ``spark.stream_reading``, ``spark.stream_writing``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql.pandas.types import to_arrow_schema, to_arrow_type
from pyspark.sql.types import ArrayType, DayTimeIntervalType, MapType, StructField, StructType

from headgate.errors import UsageError
from headgate.operators.types import canonical_schema, carried

BATCH_ROWS_MAX = 65_536
"""Of a batch that goes to the JVM."""

_EXAMPLES: dict[type, Any] = {int: 42, str: "tea", bool: True}

_WIDER = {pa.uint8(): pa.int16(), pa.uint16(): pa.int32(), pa.uint32(): pa.int64(), pa.uint64(): pa.decimal128(20, 0)}


def for_spark(dtype: pa.DataType) -> pa.DataType:
    """Return the type in which Spark takes ``dtype``: unsigned integers become wider signed ones."""
    if pa.types.is_struct(dtype):
        return pa.struct([pa.field(field.name, for_spark(field.type)) for field in dtype])
    if pa.types.is_large_list(dtype) or pa.types.is_list(dtype):
        return pa.list_(for_spark(dtype.value_type))
    if pa.types.is_large_string(dtype):
        return pa.string()
    if pa.types.is_large_binary(dtype):
        return pa.binary()
    return cast(pa.DataType, _WIDER.get(dtype, dtype))


def schema_for_spark(schema: pa.Schema) -> pa.Schema:
    """Return ``schema`` in the types in which Spark takes its columns."""
    return pa.schema([pa.field(field.name, for_spark(field.type)) for field in schema])


def batches_for_spark(batch: pa.RecordBatch, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the columns of ``schema`` in its types, in batches that the JVM can take.

    Raises:
        UsageError: Spark has no such value.
    """
    for start in range(0, batch.num_rows, BATCH_ROWS_MAX):
        yield carried(batch.slice(start, BATCH_ROWS_MAX), schema, "for Spark")


def schema_of_spark(schema: Any) -> pa.Schema:
    """Return Spark's ``schema`` in canonical types: ``TIMESTAMP`` is a moment, ``TIMESTAMP_NTZ`` a local time.

    Raises:
        UsageError: a column has a type that Headgate does not carry.
    """
    for field in schema:
        _refuse(field.name, field.dataType)
    return canonical_schema(to_arrow_schema(schema, timezone="UTC"))


def _refuse(name: str, kind: Any) -> None:
    """Refuse a type that Arrow does not have, or has as a struct that cannot be told from others: a VARIANT (SP12)."""
    if isinstance(kind, StructType):
        for field in kind:
            _refuse(name, field.dataType)
    elif isinstance(kind, ArrayType | MapType):
        for inner in (kind.elementType,) if isinstance(kind, ArrayType) else (kind.keyType, kind.valueType):
            _refuse(name, inner)
    elif not _has_arrow_type(kind):
        told = kind.simpleString()
        raise UsageError(f"column '{name}' of the DataFrame has type {told}, which Headgate does not carry; cast it")


def _has_arrow_type(kind: Any) -> bool:
    try:
        dtype = to_arrow_type(kind, timezone="UTC")
    except PySparkException:
        return False
    return not (pa.types.is_struct(dtype) or pa.types.is_null(dtype))


def with_intervals(found: StructType, schema: pa.Schema) -> StructType:
    """Return Spark's types of columns with intervals where ``schema`` has durations."""
    return cast(StructType, _with_intervals(found, pa.struct(list(schema))))


def _with_intervals(found: Any, dtype: pa.DataType) -> Any:
    if pa.types.is_duration(dtype):
        return DayTimeIntervalType()
    if isinstance(found, StructType):
        fields = [
            StructField(field.name, _with_intervals(field.dataType, dtype.field(field.name).type), field.nullable)
            for field in found
        ]
        return StructType(fields)
    if isinstance(found, ArrayType):
        return ArrayType(_with_intervals(found.elementType, dtype.value_type), found.containsNull)
    return found


def keys_in(text: str, columns: Sequence[pa.Field], owner: str) -> list[Any]:
    """Return the keys that the option ``keys`` lists as JSON: values, or tuples if a key has several columns.

    Args:
        text: the option.
        columns: those of the key.
        owner: whose keys they are, for the errors.

    Raises:
        UsageError: these are no keys of these columns, or ``columns`` have types whose values JSON does not tell.
    """
    types = [_type_in_json(column.type) for column in columns]
    described = ", ".join(f"{column.name}: {column.type}" for column in columns)
    if None in types:
        raise UsageError(
            f"the option keys takes integers, text and booleans, but a key of {owner} is ({described}): filter the "
            "DataFrame instead"
        )
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    rows: list[Any] = [key if len(columns) > 1 else [key] for key in given] if isinstance(given, list) else [None]
    if not all(isinstance(row, list) and [type(value) for value in row] == types for row in rows):
        example: Any = [_EXAMPLES[kind] for kind in types if kind is not None]
        shown = json.dumps([example] if len(columns) > 1 else example)
        raise UsageError(f"a key of {owner} is ({described}): keys must be a list in JSON, such as {shown}, not {text}")
    for index, column in enumerate(columns):
        try:
            pa.array([row[index] for row in rows], column.type)
        except (pa.ArrowException, OverflowError, UnicodeError) as error:
            raise UsageError(f"a key of {owner} is ({described}), not one of {text}: {error}") from None
    return [tuple(row) if len(columns) > 1 else row[0] for row in rows]


def _type_in_json(dtype: pa.DataType) -> type | None:
    if pa.types.is_integer(dtype):
        return int
    if pa.types.is_string(dtype) or pa.types.is_large_string(dtype):
        return str
    return bool if pa.types.is_boolean(dtype) else None
