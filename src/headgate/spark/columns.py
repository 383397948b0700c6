"""Columns on their way between Headgate's canonical types and Spark's.

Counterparts: ``spark.state_source``, ``spark.stream_reader``, ``spark.stream_writer``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema, to_arrow_type
from pyspark.sql.types import ArrayType, DataType, MapType, StringType, StructField, StructType, TimeType

from headgate.errors import UsageError
from headgate.operators.schemas import canonical_schema, carried

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


def spark_schema(schema: pa.Schema) -> StructType:
    """Return ``schema`` as Spark has it in files, with all nanoseconds of a time of day."""
    found = from_arrow_schema(schema_for_spark(schema))
    return cast(StructType, with_leaves(found, lambda leaf: TimeType(9) if isinstance(leaf, TimeType) else leaf))


def with_leaves(kind: DataType, change: Callable[[DataType], DataType]) -> DataType:
    """Return ``kind`` with other types in the place of those that are not made of others; all may be null."""
    if isinstance(kind, StructType):
        return StructType([StructField(field.name, with_leaves(field.dataType, change)) for field in kind])
    if isinstance(kind, ArrayType):
        return ArrayType(with_leaves(kind.elementType, change))
    if isinstance(kind, MapType):
        return MapType(with_leaves(kind.keyType, change), with_leaves(kind.valueType, change))
    return change(kind)


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
    """Refuse a type that Arrow does not have, or has as a struct that looks like others: a VARIANT."""
    if isinstance(kind, StructType | ArrayType | MapType):
        for inner in _inner_types(kind):
            _refuse(name, inner)
    elif not _has_arrow_type(kind):
        spark_name = kind.simpleString()
        raise UsageError(
            f"column '{name}' of the DataFrame has type {spark_name}, which Headgate does not carry; cast it"
        )


def _has_arrow_type(kind: Any) -> bool:
    try:
        dtype = to_arrow_type(kind, timezone="UTC")
    except PySparkException:
        return False
    return not (pa.types.is_struct(dtype) or pa.types.is_null(dtype))


def check_for_files(session: Any, schema: StructType) -> None:
    """Refuse columns that ``session`` does not write to Parquet files, or does not read from them.

    Raises:
        UsageError: naming a column and its type.
    """
    if not schema.names:
        raise UsageError("a DataFrame without columns cannot be written to files; select at least one")
    is_exact = _is_set(session, "spark.sql.caseSensitive")
    twins = _twins(schema, is_exact)
    if twins is not None:
        raise UsageError(f"columns {twins} are one column to Spark: rename or drop one of them")
    for field in schema:
        for kind in _all_types(field.dataType):
            why = _problem(kind, is_exact) if not isinstance(kind, TimeType) else _problem_of_times(session)
            if why is not None:
                raise UsageError(f"column '{field.name}' has type {field.dataType.simpleString()}: {why}")


def _is_set(session: Any, setting: str) -> bool:
    return str(session.conf.get(setting)).lower() == "true"


def _problem(kind: DataType, is_exact: bool) -> str | None:
    if isinstance(kind, StructType):
        if not kind.names:
            return "Spark does not write structs without fields to files; drop it"
        twins = _twins(kind, is_exact)
        return None if twins is None else f"its fields {twins} are one field to Spark; rename or drop one of them"
    if isinstance(kind, MapType) and any(_is_collated(each) for each in _all_types(kind.keyType)):
        return "Spark does not write maps whose keys have a collation to files; cast them to STRING"
    return None


def _problem_of_times(session: Any) -> str | None:
    if _is_set(session, "spark.sql.timeType.enabled"):
        return None
    return "Spark has it in files only with spark.sql.timeType.enabled=true; set that, or cast the column to text"


def _is_collated(kind: DataType) -> bool:
    return isinstance(kind, StringType) and not kind.isUTF8BinaryCollation()


def _twins(struct: StructType, is_exact: bool) -> str | None:
    seen: dict[str, str] = {}
    for name in struct.names:
        folded = name if is_exact else name.lower()
        if folded in seen:
            return f"'{seen[folded]}' and '{name}'"
        seen[folded] = name
    return None


def _all_types(kind: DataType) -> Iterator[DataType]:
    yield kind
    for inner in _inner_types(kind):
        yield from _all_types(inner)


def _inner_types(kind: DataType) -> list[DataType]:
    """Return the types that ``kind`` is made of, without itself."""
    if isinstance(kind, StructType):
        return [field.dataType for field in kind]
    if isinstance(kind, MapType):
        return [kind.keyType, kind.valueType]
    return [kind.elementType] if isinstance(kind, ArrayType) else []


def keys_in(text: str, columns: Sequence[pa.Field], owner: str) -> list[Any]:
    """Return the keys that the option ``keys`` lists as JSON: values, or tuples if a key has several columns.

    Args:
        text: the option.
        columns: those of the key.
        owner: of the keys, for the errors.

    Raises:
        UsageError: these are no keys of these columns, or ``columns`` have types with values that JSON does not have.
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
