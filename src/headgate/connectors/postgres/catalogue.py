"""What the catalogue of a server says of tables whose changes are read: columns, keys, publications.

A table that cannot be followed is refused here, in the driver, with the command that helps. Counterpart: ``changes``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headgate.connectors.postgres.connection import place_of
from headgate.connectors.postgres.values import Column, identifier, with_texts
from headgate.dataclass import dataclass
from headgate.errors import UsageError

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
