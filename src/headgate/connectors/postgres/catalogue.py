"""Tables of a PostgreSQL server: what its catalogue says of them, and their columns as columns of Arrow.

A table that cannot be followed is refused here, in the driver, with the command that helps. The table of types is in
docs/how-to/postgresql.md. What has no type of its own in Arrow stays the text that the server writes. All values of a
column are parsed together. Counterparts: ``changes`` and ``query``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from headgate.connectors.postgres.connection import place_of
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


VERSION_MIN = 140_000

Name = tuple[str, str]
"""Of a table: its schema, and its name in it."""


@dataclass(frozen=True, slots=True)
class Table:
    """What the catalogue says of a table."""

    schema: str
    name: str
    columns: tuple[Column, ...]
    has_whole_rows: bool
    """Changes have the old row (REPLICA IDENTITY FULL)."""

    @property
    def sql(self) -> str:
        """The name in SQL."""
        return f"{identifier(self.schema)}.{identifier(self.name)}"

    @property
    def where(self) -> str:
        """The name in records and messages."""
        return f"{self.schema}.{self.name}"


def check_server(connection: Any, url: str) -> None:
    """Check that the server has changes to read.

    Raises:
        UsageError: it is too old, or keeps no logical log.
    """
    version = connection.info.server_version
    if version < VERSION_MIN:
        raise UsageError(f"changes need PostgreSQL 14 or newer, and {place_of(url)} has {version // 10_000}")
    level = connection.execute("SHOW wal_level").fetchone()[0]
    if level != "logical":
        raise UsageError(
            f"changes need wal_level = logical, and {place_of(url)} has {level}; ALTER SYSTEM SET wal_level = "
            "logical, and start the server again"
        )


def published_tables(connection: Any, url: str, publication: str) -> tuple[Name, ...]:
    """Return the tables of a publication, by name.

    Raises:
        UsageError: there is no such publication, or it has none.
    """
    found = connection.execute(
        "SELECT schemaname::text, tablename::text FROM pg_publication_tables WHERE pubname = %s ORDER BY 1, 2",
        (publication,),
    ).fetchall()
    if not found:
        _publication(connection, url, publication)
        raise UsageError(
            f"publication '{publication}' in {place_of(url)} has no tables; ALTER PUBLICATION ... ADD TABLE"
        )
    return tuple(found)


def look_up(connection: Any, url: str, name: Name, as_text: Sequence[str], publication: str) -> Table:
    """Return a table; ``as_text`` are columns that are read as text, if the table has them.

    Raises:
        UsageError: there is none, or its changes do not say enough.
    """
    where = ".".join(name)
    found = connection.execute(
        "SELECT c.oid, c.relreplident, c.relkind FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
        "WHERE n.nspname = %s AND c.relname = %s",
        name,
    ).fetchone()
    if found is None:
        raise UsageError(f"there is no table {where} in {place_of(url)}, or this user does not see it")
    oid, identity, kind = found
    if kind not in ("r", "p"):
        raise UsageError(f"{where} is no table, and has no changes; read the tables that it is made of")
    _check_logged(connection, where, oid)
    rows = connection.execute(
        "SELECT a.attname, t.typname, a.atttypid, a.atttypmod, a.attstorage IN ('x', 'e'), "
        "COALESCE(a.attnum = ANY(i.indkey), false) FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid "
        "LEFT JOIN pg_index i ON i.indrelid = a.attrelid AND i.indisprimary "
        "WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = '' ORDER BY a.attnum",
        (oid,),
    ).fetchall()
    columns = tuple(Column(name, kind, type_, modifier, bool(key)) for name, kind, type_, modifier, _, key in rows)
    is_whole = identity in ("f", b"f")
    remedy = f"ALTER TABLE {where} REPLICA IDENTITY FULL"
    if not is_whole:
        if identity not in ("d", b"d") or not any(column.is_key for column in columns):
            raise UsageError(f"changes of table {where} do not say which row changes; {remedy}")
        large = [name for (name, _, _, _, is_large, key) in rows if is_large and not key]
        if large:
            raise UsageError(
                f"updates of table {where} lack large values of column '{large[0]}' that they do not change; {remedy}"
            )
    if publication:
        _check_published(connection, url, name, publication, [column.name for column in columns])
    return Table(*name, with_texts(columns, as_text), is_whole)


def _check_logged(connection: Any, where: str, oid: int) -> None:
    """Check that the log of the server has all changes of a table: of each partition."""
    found = connection.execute(
        "SELECT n.nspname || '.' || c.relname, c.relkind = 'f' FROM pg_class c JOIN pg_namespace n "
        "ON n.oid = c.relnamespace WHERE (c.oid = %s OR c.oid IN (SELECT relid FROM pg_partition_tree(%s))) "
        "AND (c.relpersistence <> 'p' OR c.relkind = 'f') ORDER BY c.oid LIMIT 1",
        (oid, oid),
    ).fetchone()
    if found is not None:
        name, is_foreign = found
        kind, remedy = (
            ("foreign", "detach that partition") if is_foreign else ("unlogged", f"ALTER TABLE {name} SET LOGGED")
        )
        raise UsageError(
            f"table {where} has rows in {name}, which is {kind}, so that the log of the server lacks their changes; "
            f"{remedy}"
        )


def _publication(connection: Any, url: str, publication: str) -> bool:
    """Return whether a publication has all operations."""
    found = connection.execute(
        "SELECT pubinsert AND pubupdate AND pubdelete AND pubtruncate FROM pg_publication WHERE pubname = %s",
        (publication,),
    ).fetchone()
    if found is None:
        raise UsageError(f"there is no publication '{publication}' in {place_of(url)}")
    return bool(found[0])


def _check_published(connection: Any, url: str, name: Name, publication: str, columns: list[str]) -> None:
    """Check that a publication that the user made has all changes of the table."""
    where = ".".join(name)
    has_all_operations = _publication(connection, url, publication)
    listed = connection.execute(
        "SELECT to_jsonb(p) FROM pg_publication_tables p WHERE pubname = %s AND schemaname = %s AND tablename = %s",
        (publication, *name),
    ).fetchone()
    if listed is None:
        raise UsageError(
            f"publication '{publication}' does not have table {where}; ALTER PUBLICATION {publication} "
            f"ADD TABLE {where}"
        )
    attributes = listed[0].get("attnames")
    lacks_columns = attributes is not None and set(attributes) < set(columns)
    if not has_all_operations or listed[0].get("rowfilter") or lacks_columns:
        raise UsageError(
            f"publication '{publication}' leaves out some operations, rows or columns of table {where}; give one that "
            "has all of them"
        )
