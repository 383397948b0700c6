"""Catalogues in which any column may hold anything: for tests of what becomes of damage."""

from __future__ import annotations

import gc
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import sqlalchemy as sa

from headgate.store.catalogue import tables
from headgate.store.catalogue.sql import SqlCatalogue
from headgate.store.catalogue.sqlite import MemoryDatabase
from headgate.store.catalogue.tables import make_tables

Column: TypeAlias = "sa.Column[Any]"

NOT_TEXT = object()
"""Text whose bytes are none."""


@dataclass(frozen=True, slots=True)
class Damage:
    """One value of one row. ``is_of_its_kind``: the column may hold such a value, but not this one there."""

    column: Column
    row: int
    value: Any
    is_of_its_kind: bool

    @property
    def name(self) -> str:
        """What is damaged, for messages."""
        return f"{self.column.table.name}.{self.column.name} row {self.row} = {self.value!r}"


class Damaged:
    """A catalogue that is filled once, and damaged again and again; each time all else is as it was."""

    def __init__(self, fill: Callable[[SqlCatalogue], object]) -> None:
        self._now = _memory()
        self.catalogue = SqlCatalogue(MemoryDatabase("store", self._now, "store"))
        with self.catalogue._database.write() as connection:
            make_tables(connection)
        fill(self.catalogue)
        self._whole = _memory()
        _copy_loosely(self._now, self._whole)

    def mend(self) -> None:
        """Have all as it was filled."""
        try:
            self._whole.backup(self._now)
        except sqlite3.OperationalError:  # a verb that ended in an error has not let go of its cursor
            gc.collect()
            self._whole.backup(self._now)

    def damage(self, damage: Damage) -> bool:
        """Have all as it was filled but for one value; False: SQLite does not take it there."""
        self.mend()
        table, column = damage.column.table, damage.column
        keys = [f'"{key.name}"' for key in table.primary_key.columns]
        order = ", ".join(keys)
        key = self._now.execute(f"SELECT {order} FROM {table.name} ORDER BY {order} LIMIT 1 OFFSET {damage.row}")
        where = " AND ".join(f"{name} = ?" for name in keys)
        new, values = ("CAST(x'61ff' AS TEXT)", ()) if damage.value is NOT_TEXT else ("?", (damage.value,))
        statement = f'UPDATE {table.name} SET "{column.name}" = {new} WHERE {where}'
        try:
            self._now.execute(statement, (*values, *key.fetchone()))
        except sqlite3.IntegrityError:
            return False
        return True

    def change(self, statement: str) -> None:
        """Change something else in what is there now."""
        self._now.execute(statement)

    def value(self, column: Column, row: int) -> Any:
        """Return what is in a column of a row, by key, when nothing is damaged."""
        keys = ", ".join(f'"{key.name}"' for key in column.table.primary_key.columns)
        query = f'SELECT "{column.name}" FROM {column.table.name} ORDER BY {keys} LIMIT 1 OFFSET {row}'
        return self._whole.execute(query).fetchone()[0]

    def rows_count(self, table: sa.Table) -> int:
        """Return how many rows there are when nothing is damaged."""
        return int(self._whole.execute(f"SELECT count(*) FROM {table.name}").fetchone()[0])


def columns() -> list[Column]:
    """All columns of all tables."""
    return [column for table in tables.metadata.sorted_tables for column in table.columns]


def damages(damaged: Damaged, column: Column) -> Iterator[Damage]:
    """Return what may become of the first and of the last row; there is one."""
    last = damaged.rows_count(column.table) - 1
    for row in sorted({0, last}):
        for value, is_of_its_kind in values_of(column, damaged.value(column, row)):
            yield Damage(column, row, value, is_of_its_kind)


def values_of(column: Column, value: Any) -> Iterator[tuple[Any, bool]]:
    """Return what a column may hold instead of ``value``, and whether that is of its kind."""
    match column.type:
        case sa.Boolean():
            of_other_kinds, others = ["abc", b"\x00\xff", 1.5, None, 7], [1 - value]
        case sa.Integer():
            of_other_kinds, others = ["abc", b"\x00\xff", 1.5, None, (1 << 63) - 1], [-1, 0, 7, 1 << 61]
        case sa.LargeBinary():
            of_other_kinds, others = ["abc", 7, 1.5, None], [b"", b"\x93\x01\x02\xa1a", b"[1]", b"{}"]
        case _:
            of_other_kinds, others = [b"\x00\xff", None, NOT_TEXT], ["", "[1]", "\0", "../x", "9" * 5_000, "{"]
    for other in of_other_kinds:
        yield other, other is None and bool(column.nullable)
    yield from ((other, column is not tables.transactions.c.status) for other in others)


def _memory() -> sqlite3.Connection:
    return sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)


def _copy_loosely(source: sqlite3.Connection, to: sqlite3.Connection) -> None:
    """Copy tables, indexes and rows, without the demand that a column has a value."""
    query = "SELECT name, type, sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY type DESC"
    for name, kind, statement in source.execute(query).fetchall():
        if name.startswith("sqlite_"):
            continue
        to.execute(statement.replace(" NOT NULL", ""))
        if kind == "table":
            rows = source.execute(f"SELECT * FROM {name}").fetchall()
            places = ", ".join("?" for _ in rows[0]) if rows else ""
            to.executemany(f"INSERT INTO {name} VALUES ({places})", rows) if rows else None
