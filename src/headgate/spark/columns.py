"""Columns on their way between Headgate's canonical types and Spark's.

Counterparts: ``spark.state_source``, ``spark.stream_reading``, ``spark.stream_writing``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql.pandas.types import to_arrow_schema

from headgate.errors import UsageError
from headgate.operators.types import canonical_schema

BATCH_ROWS_MAX = 65_536
"""Of a batch that goes to the JVM."""

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
    """Yield the columns of ``schema`` in its types, in batches that the JVM can take."""
    for start in range(0, batch.num_rows, BATCH_ROWS_MAX):
        yield batch.slice(start, BATCH_ROWS_MAX).select(schema.names).cast(schema)


def schema_of_spark(schema: Any) -> pa.Schema:
    """Return Spark's ``schema`` in canonical types: ``TIMESTAMP`` is a moment, ``TIMESTAMP_NTZ`` a local time.

    Raises:
        UsageError: a column has a type that Headgate does not carry.
    """
    try:
        return canonical_schema(to_arrow_schema(schema, timezone="UTC"))
    except PySparkException as error:
        raise UsageError(f"the DataFrame has a column that Headgate does not carry: {error}") from error


def is_plain(dtype: pa.DataType) -> bool:
    """Whether values of Spark's filters are those of ``dtype``: times depend on a time zone, floats are never equal."""
    return bool(pa.types.is_integer(dtype) or pa.types.is_large_string(dtype) or pa.types.is_boolean(dtype))
