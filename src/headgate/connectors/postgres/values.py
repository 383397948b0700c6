"""Columns of tables of PostgreSQL as columns of Arrow: which type becomes which, and values from the server's text.

The table of types is in docs/how-to/postgresql.md. What has no type of its own in Arrow stays the text that the server
writes. All values of a column are parsed together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from headgate.dataclass import dataclass
from headgate.errors import UsageError

TEXT = pa.large_string()
_PLAIN = {
    "bool": pa.bool_(),
    "int2": pa.int16(),
    "int4": pa.int32(),
    "int8": pa.int64(),
    "oid": pa.int64(),
    "float4": pa.float32(),
    "float8": pa.float64(),
    "bytea": pa.large_binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", tz="UTC"),
}
_AS_THEY_ARE = ("bool", "int2", "int4", "int8", "float4", "float8", "text", "varchar", "bytea")
"""Types that the Arrow client reads as we do."""
_DIGITS_MAX = 38


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        type_name: as ``pg_type`` has it.
        type_oid, modifier: as messages of changes have them.
        is_key: it is part of the primary key.
    """

    name: str
    type_name: str
    type_oid: int = 0
    modifier: int = -1
    is_key: bool = False

    @property
    def arrow(self) -> pa.DataType:
        """The type in Arrow."""
        if self.type_name == "numeric" and self.modifier >= 4:
            precision, scale = (self.modifier - 4) >> 16, ((self.modifier - 4) & 0x7FF ^ 0x400) - 0x400
            if precision <= _DIGITS_MAX and 0 <= scale <= precision:
                return pa.decimal128(precision, scale)
        return _PLAIN.get(self.type_name, TEXT)

    def expression(self, row: str = "") -> str:
        """Return what is selected: the value, or the text that changes have as well."""
        name = f"{row}{identifier(self.name)}"
        if self.type_name in _AS_THEY_ARE:
            return f"{name} AS {identifier(self.name)}"
        return f"CASE WHEN {name} IS NULL THEN NULL ELSE concat({name}) END AS {identifier(self.name)}"


def identifier(name: str) -> str:
    """Return a name in quotes."""
    return '"' + name.replace('"', '""') + '"'


def schema_of(columns: Sequence[Column]) -> pa.Schema:
    """Return the columns in Arrow."""
    return pa.schema([pa.field(column.name, column.arrow) for column in columns])


def with_texts(columns: Sequence[Column], as_text: Sequence[str]) -> tuple[Column, ...]:
    """Return columns, those of ``as_text`` as text."""
    return tuple(replace(one, type_name=f"{one.type_name} as text") if one.name in as_text else one for one in columns)


def union_of(tables: Sequence[tuple[str, Sequence[Column]]]) -> list[pa.Field]:
    """Return the columns of all tables in Arrow: those of one name are one.

    Raises:
        UsageError: they have different types.
    """
    found: dict[str, tuple[pa.Field, str]] = {}
    for where, columns in tables:
        for field in schema_of(columns):
            known, first = found.setdefault(field.name, (field, where))
            if known.type != field.type:
                raise UsageError(
                    f"column '{field.name}' has type {known.type} in table {first} and {field.type} in table {where}; "
                    f"give as_text=['{field.name}'] to read both as text, or read the tables with a source each"
                )
    return [field for field, _ in found.values()]


def parsed(values: pa.Array, column: Column) -> pa.Array:
    """Return a column of values from the server's text, or from what the Arrow client returned.

    Raises:
        UsageError: Arrow has no such value, as with the date 'infinity'.
    """
    target = column.arrow
    if values.type == target:
        return values
    try:
        if pa.types.is_large_binary(target) and not pa.types.is_binary(values.type):
            return _bytes(values)
        if pa.types.is_timestamp(target):
            return _times(values, target)
        if pa.types.is_boolean(target):
            return pc.equal(values, "t")
        return values.cast(target)
    except pa.ArrowInvalid as error:
        raise UsageError(
            f"column '{column.name}' of type {column.type_name} has a value that {target} cannot hold ({error}); name "
            f"the column in as_text=[...] to read it as text"
        ) from None


def _bytes(values: pa.Array) -> pa.Array:
    digits = pl.Series(values.cast(TEXT)).str.slice(2)  # after \x
    return digits.str.decode("hex").to_arrow().cast(pa.large_binary())


def _times(values: pa.Array, target: pa.DataType) -> pa.Array:
    if target.tz is None:
        return values.cast(target)
    zone = pc.utf8_slice_codeunits(values, -3)
    is_plain = pc.equal(zone, "+00").fill_null(True)
    if not pc.all(is_plain).as_py():
        raise pa.ArrowInvalid(f"{values.filter(pc.invert(is_plain))[0]}")
    return pc.utf8_slice_codeunits(values, 0, -3).cast(pa.timestamp("us")).cast(target)
