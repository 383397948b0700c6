"""Rows as COPY sends them: the Arrow type for each type of a column of PostgreSQL, and whether it takes all values.

ADBC writes binary, so that a value of another width is an error and not a cast. Counterpart: ``postgres.sink``.
"""

from __future__ import annotations

from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from headgate.connectors.sql.dialects import sql_type
from headgate.errors import UsageError

_SENT: dict[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "smallint": pa.int16(),
    "integer": pa.int32(),
    "bigint": pa.int64(),
    "real": pa.float32(),
    "double precision": pa.float64(),
    "numeric": pa.decimal128(38, 0),
    "text": pa.large_string(),
    "character varying": pa.large_string(),
    "character": pa.large_string(),
    "name": pa.large_string(),
    "citext": pa.large_string(),
    "bytea": pa.large_binary(),
    "date": pa.date32(),
    "time without time zone": pa.time64("us"),
    "timestamp without time zone": pa.timestamp("us"),
    "timestamp with time zone": pa.timestamp("us", "UTC"),
    "interval": pa.duration("us"),
    "json": pa.large_string(),
    "jsonb": pa.large_binary(),
    "uuid": pa.large_binary(),
    "enum": pa.large_string(),
}
"""The type that is sent for each type of a column."""

_NO_ELEMENTS = ("json", "jsonb", "uuid", "name", "citext", "enum", "character varying", "character")
"""Types of which no arrays are written: what is sent would say that it has elements of another type."""

_UUID = r"[0-9a-fA-F]{8}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{12}"
_JSONB_VERSION = b"\x01"


def fits(dtype: pa.DataType, theirs: str) -> bool:
    """Whether a column of type ``theirs`` takes all values of rows of ``dtype``."""
    if pa.types.is_large_list(dtype):
        return theirs.endswith("[]") and theirs[:-2] not in _NO_ELEMENTS and fits(dtype.value_type, theirs[:-2])
    sent = _SENT.get(theirs)
    if sent is None:
        return False
    if theirs == "numeric":
        return bool(pa.types.is_decimal(dtype) or pa.types.is_integer(dtype))
    if theirs == "uuid":
        return bool(pa.types.is_large_string(dtype) or pa.types.is_large_binary(dtype))
    if theirs == "jsonb":
        return bool(pa.types.is_large_string(dtype))
    if pa.types.is_integer(sent):
        is_unsigned = pa.types.is_unsigned_integer(dtype)
        return bool(pa.types.is_integer(dtype)) and dtype.bit_width + is_unsigned <= sent.bit_width
    if pa.types.is_floating(sent):
        return bool(pa.types.is_floating(dtype)) and dtype.bit_width <= sent.bit_width
    if pa.types.is_time(sent) or pa.types.is_duration(sent):
        return bool(dtype.id == sent.id)
    return bool(dtype.equals(sent))


def sent(column: pa.Array, theirs: str, name: str) -> pa.Array:
    """Return values as they are sent to a column of type ``theirs``; ``fits`` said that it takes them.

    Raises:
        UsageError: a text is no UUID.
    """
    dtype = column.type
    if pa.types.is_large_list(dtype):
        values = sent(column.values, theirs[:-2], name)
        return pa.LargeListArray.from_arrays(
            column.offsets, values, mask=column.is_null() if column.null_count else None
        )
    if theirs == "numeric":
        if pa.types.is_decimal(dtype):
            return column
        return column.cast(pa.decimal128(20 if pa.types.is_uint64(dtype) else 19, 0))
    if theirs == "jsonb":
        prefix = pa.scalar(_JSONB_VERSION, pa.large_binary())
        return pc.binary_join_element_wise(prefix, column.cast(pa.large_binary()), pa.scalar(b"", pa.large_binary()))
    if theirs == "uuid":
        return _uuids(column, name)
    return column.cast(_SENT[theirs], safe=False)


def _uuids(column: pa.Array, name: str) -> pa.Array:
    if pa.types.is_large_binary(column.type):
        bad = pc.not_equal(pc.binary_length(column), 16)
        found = column
    else:
        texts = pl.Series("v", column)
        bad = pc.invert(pc.match_substring_regex(column, rf"\A{_UUID}\z"))
        found = None
    if pc.any(bad).as_py():
        one = column.filter(bad)[0].as_py()
        raise UsageError(f"column '{name}' of the table has type uuid, and {one!r} is none")
    if found is not None:
        return found
    made = texts.str.replace_all("-", "", literal=True).str.decode("hex")
    return made.to_arrow(compat_level=pl.CompatLevel.oldest()).cast(pa.large_binary())


def created_type(dtype: pa.DataType) -> sa.types.TypeEngine[Any]:
    """Return the type of a column of a table that is created for a canonical type."""
    if pa.types.is_large_list(dtype) and not pa.types.is_nested(dtype.value_type):
        return postgresql.ARRAY(created_type(dtype.value_type))
    if pa.types.is_nested(dtype):
        return postgresql.JSONB()
    return sql_type("postgresql", dtype) or postgresql.INTERVAL()
