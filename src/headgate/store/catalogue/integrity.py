"""What a catalogue in SQLite holds and never should: damaged pages, and values that are not of their column's kind.

SQLite keeps anything in any column, so a damaged file may be sound to it and make no sense to us. Counterparts:
``sqlite`` asks here when a verb tripped over something; the check of a store asks always, and goes on
with what is left. Source: docs/spec/stream-store.md. Never changes the file.
"""

from __future__ import annotations

import contextlib
import functools
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine import Connection
from sqlalchemy.pool import StaticPool

from headgate.dataclass import dataclass
from headgate.errors import CorruptionError
from headgate.protocol.store.transactions import Status
from headgate.store.catalogue import tables as t
from headgate.store.fsck import NONSENSE_ERRORS

CATALOGUE = "a stream store's catalogue"
"""What a damaged file should have been, for messages."""

PROBLEMS_MAX = 100
"""So many damaged pages, and damaged rows of one table, are reported one by one."""

_NUMBER_MAX = 1 << 62
"""No number of ours is as large, so that adding to one never leaves SQLite's 64 bits."""

_SHOWN_BYTES = 40
_IS_TEXT = "headgate_is_text"


@dataclass(frozen=True, slots=True)
class _ColumnRule:
    """What a column holds. ``condition`` in SQL, for the column ``{0}``; it is 0 or 1, never NULL."""

    condition: str
    expected: str


_NUMBER = _ColumnRule(f"(typeof({{0}}) = 'integer' AND {{0}} BETWEEN -{_NUMBER_MAX} AND {_NUMBER_MAX})", "a number")
_TRUTH = _ColumnRule("(typeof({0}) = 'integer' AND {0} IN (0, 1))", "0 or 1")
_TEXT = _ColumnRule(f"(typeof({{0}}) = 'text' AND {_IS_TEXT}(CAST({{0}} AS BLOB)))", "text")
_BYTES = _ColumnRule("(typeof({0}) = 'blob')", "bytes")
_STATUSES = ", ".join(repr(status.value) for status in Status)
_STATUS = _ColumnRule(f"(typeof({{0}}) = 'text' AND {{0}} IN ({_STATUSES}))", f"one of {_STATUSES}")


def problems(connection: Connection) -> list[str]:
    """Return what is wrong with the database of ``connection``, each in a clause."""
    raw = _raw(connection)
    raw.create_function(_IS_TEXT, 1, _is_text, deterministic=True)
    found = _problems_of_pages(raw)
    for table in t.metadata.sorted_tables:
        try:
            found += _problems_of_rows(raw, table)
        except sqlite3.DatabaseError as error:
            found.append(f"table '{table.name}' cannot be read to its end: {error}")
    return found


@contextlib.contextmanager
def report_damage(path: str, connect: Callable[[], AbstractContextManager[Connection]]) -> Iterator[None]:
    """Say that the database at ``path`` is damaged where its content made no sense, if it is; else it is our mistake.

    Raises:
        CorruptionError
    """
    try:
        yield
    except (*NONSENSE_ERRORS, sa.exc.NoResultFound) as error:
        with connect() as connection:
            found = problems(connection)
        if found:
            raise CorruptionError(path, 0, CATALOGUE, found[0]) from error
        raise


@contextlib.contextmanager
def readable_part(connection: Connection) -> Iterator[tuple[Connection, list[str]]]:
    """Give what is sound in the database of ``connection``, and what is wrong with the rest: ``problems``.

    Where something is, it is a copy without the rows that hold it.
    """
    found = problems(connection)
    if not found:
        yield connection, []
        return
    with contextlib.closing(sqlite3.connect("", isolation_level=None, check_same_thread=False)) as copy:
        options = {t.STORE_OPTION: t.store_of(connection)}
        engine = sa.create_engine("sqlite://", poolclass=StaticPool, creator=lambda: copy, execution_options=options)
        _fill(_raw(connection), copy)
        with engine.connect() as left:
            yield left, found


def _raw(connection: Connection) -> sqlite3.Connection:
    raw = connection.connection.driver_connection
    assert isinstance(raw, sqlite3.Connection)
    return raw


def _is_text(data: bytes | None) -> bool:
    """Whether the bytes of a text are one: SQLite does not look, and Python refuses to read it."""
    try:
        return data is not None and data.decode() is not None
    except UnicodeDecodeError:
        return False


def _problems_of_pages(raw: sqlite3.Connection) -> list[str]:
    """Return what SQLite finds, but for values of a wrong kind: it knows of some, and we tell of all."""
    try:
        rows = [str(row[0]) for row in raw.execute(f"PRAGMA integrity_check({PROBLEMS_MAX})")]
    except UnicodeDecodeError:  # its own words quote what is damaged
        return ["text that is none"]
    except sqlite3.DatabaseError as error:
        return [str(error)]
    return [row for row in rows if row != "ok" and " value in " not in row]


def _problems_of_rows(raw: sqlite3.Connection, table: sa.Table) -> list[str]:
    columns = [_quoted(column) for column in table.columns]
    shown = [
        f"typeof({x}), substr(CAST({x} AS BLOB), 1, {_SHOWN_BYTES}), {_condition_of(c)}"
        for x, c in zip(columns, table.columns, strict=True)
    ]
    query = f"SELECT {', '.join(shown)} FROM {table.name} WHERE NOT ({_sound(table)}) LIMIT {PROBLEMS_MAX + 1}"
    rows = raw.execute(query).fetchall()
    found: list[str] = []
    for row in rows[:PROBLEMS_MAX]:
        cells = [row[at : at + 3] for at in range(0, 3 * len(columns), 3)]
        named = list(zip(table.columns, cells, strict=True))
        where = ", ".join(f"{c.name} {_shown(*cell[:2])}" for c, cell in named if c.primary_key)
        found += [
            f"its table '{table.name}' has {_shown(*cell[:2])} as {c.name} where {_rule_of(c).expected} is "
            f"expected, in the row of {where}"
            for c, cell in named
            if not cell[2]
        ]
    if len(rows) > PROBLEMS_MAX:
        found.append(f"its table '{table.name}' has more such rows")
    return found


def _fill(raw: sqlite3.Connection, copy: sqlite3.Connection) -> None:
    """Copy the rows that are sound, of each table as far as it can be read."""
    copy.execute("BEGIN")
    for statement in _tables():
        copy.execute(statement)
    for table in t.metadata.sorted_tables:
        columns = ", ".join(_quoted(column) for column in table.columns)
        places = ", ".join("?" for _ in table.columns)
        into = f"INSERT OR IGNORE INTO {table.name} ({columns}) VALUES ({places})"
        with contextlib.suppress(sqlite3.DatabaseError):  # it was reported
            for row in raw.execute(f"SELECT {columns} FROM {table.name} WHERE {_sound(table)}"):
                copy.execute(into, row)
    copy.execute("COMMIT")


@functools.cache
def _tables() -> tuple[str, ...]:
    """Return what makes the tables, and their indexes."""
    made: list[sa.schema.ExecutableDDLElement] = [sa.schema.CreateTable(table) for table in t.metadata.sorted_tables]
    made += [sa.schema.CreateIndex(index) for table in t.metadata.sorted_tables for index in table.indexes]
    return tuple(str(statement.compile(dialect=sqlite.dialect())) for statement in made)


def _sound(table: sa.Table) -> str:
    return " AND ".join(_condition_of(column) for column in table.columns)


def _condition_of(column: sa.Column[object]) -> str:
    """Return the condition that a column is sound."""
    condition = _rule_of(column).condition.format(_quoted(column))
    return f"({_quoted(column)} IS NULL OR {condition})" if column.nullable else condition


def _rule_of(column: sa.Column[object]) -> _ColumnRule:
    if column is t.transactions.c.status:
        return _STATUS
    match column.type:
        case sa.Boolean():
            return _TRUTH
        case sa.Integer():
            return _NUMBER
        case sa.LargeBinary():
            return _BYTES
        case _:
            return _TEXT


def _quoted(column: sa.Column[object]) -> str:
    return f'"{column.name}"'


def _shown(kind: str, data: bytes | None) -> str:
    """Return a value in words; ``data``: the beginning of its bytes."""
    if data is None:
        return "nothing"
    if kind == "blob":
        return f"the bytes {data!r}"
    text = data.decode(errors="replace")
    return repr(text) if kind == "text" else text
