"""Databases of a catalogue: what all promise, those in SQLite, in a file or in memory, and what damage does to them.

SQLite keeps anything in any column, so a damaged file may be sound to it and make no sense to us: where a verb tripped
over something it is looked for, and the check of a store looks always, and goes on with what is left. Counterparts:
``sql`` runs its verbs in a database; ``postgresql`` is the other kind. Source: docs/spec/stream-store.md. Never keeps
a transaction open across a call of its own. Never changes a damaged file.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.pool import StaticPool

from headgate.dataclass import dataclass
from headgate.errors import CorruptionError, StorageError
from headgate.protocol.store.transactions import Status
from headgate.store.catalogue import tables as t
from headgate.store.catalogue.tables import STORE_OPTION
from headgate.store.fsck import NONSENSE_ERRORS


class Database(Protocol):
    """Where the tables are; safe from several threads."""

    @property
    def path(self) -> str:
        """Where it is, for messages."""

    @property
    def is_untouched(self) -> bool:
        """Whether it is read from a copy, because its file may not be written."""

    def read(self) -> AbstractContextManager[Connection]:
        """Give a consistent view of one moment."""

    def write(self) -> AbstractContextManager[Connection]:
        """Give a transaction that is durable when the block ends, and undone when it raises.

        Raises:
            StorageError: nothing was changed (or, after an I/O error, perhaps everything: look it up).
        """

    def readable_part(self, connection: Connection) -> AbstractContextManager[tuple[Connection, list[str]]]:
        """Give what can be made sense of, within a transaction of ``read``, and what is wrong with the rest."""

    def changes(self) -> int:
        """See ``base.Catalogue.changes``."""

    def close(self) -> None:
        """Close all connections."""


BUSY_TIMEOUT_S = 60.0
"""How long a writer waits for other processes' short transactions before it reports a transient error."""

SYNCHRONOUS = "FULL"
"""The WAL is synced before a commit returns: it survives a power cut. With NORMAL it is synced now and then."""

CASE_SENSITIVE_LIKE = "PRAGMA case_sensitive_like=ON"
"""LIKE finds names by their prefix; by default it takes "App/" for "app/"."""

_CHANGES_OF_A_TAIL = 1 << 32
"""More than one connection counts: numbers of two connections are never equal, so a new one always means to look."""

_NOT_TEXT = "Could not decode to UTF-8"
"""How Python begins to say that a text of the database is none."""

_TRANSIENT = ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_FULL", "SQLITE_IOERR", "SQLITE_CANTOPEN", "SQLITE_PROTOCOL")
_DAMAGED = ("SQLITE_CORRUPT", "SQLITE_NOTADB")


class FileDatabase:
    """One process's access to the SQLite file of a store; usable again after a fork. See ``Database``."""

    is_untouched = False

    def __init__(self, path: Path) -> None:
        self.file = path
        self._pid = os.getpid()
        self._write_lock = threading.Lock()  # threads queue here instead of polling SQLite's lock
        self._tail_lock = threading.Lock()
        self._tail: Any = None
        self._tails_count = 0
        self._engine = _engine(path)

    @property
    def path(self) -> str:
        return str(self.file)

    @contextlib.contextmanager
    def read(self) -> Iterator[Connection]:
        self._notice_fork()
        with self._translating_errors("read"), self._engine.connect() as connection:
            connection.begin()  # rolled back: to commit what was read fails where the file is damaged
            yield connection

    @contextlib.contextmanager
    def write(self) -> Iterator[Connection]:
        self._notice_fork()
        # BEGIN IMMEDIATE waits for other processes within SQLite, for other threads here
        with self._translating_errors("write"), self._write_lock, self._engine.connect() as plain:
            connection = plain.execution_options(headgate_write=True)
            with connection.begin():
                yield connection

    @contextlib.contextmanager
    def _translating_errors(self, operation: str) -> Iterator[None]:
        """Translate errors; where the content makes no sense, check the file: a damaged one may hold anything."""
        with translate_errors(self.path, operation), report_damage(self.path, self._engine.connect):
            yield

    def readable_part(self, connection: Connection) -> AbstractContextManager[tuple[Connection, list[str]]]:
        return readable_part(connection)

    def changes(self) -> int:
        self._notice_fork()
        with translate_errors(self.path, "read"), self._tail_lock:
            if self._tail is None:
                self._tail = self._connect_tail()
                self._tails_count += 1
            # SQLite counts commits of other connections only: this one never writes, so it hears of ours, too
            return self._tails_count * _CHANGES_OF_A_TAIL + int(self._tail.execute("PRAGMA data_version").fetchone()[0])

    def close(self) -> None:
        self._engine.dispose()
        with self._tail_lock:
            if self._tail is not None:
                self._tail.close()
                self._tail = None

    def _connect_tail(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.file, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        connection.execute("SELECT count(*) FROM meta").fetchone()
        return connection

    def _notice_fork(self) -> None:
        """Make new connections and locks in a child: before any lock, the parent may hold one."""
        if os.getpid() != self._pid:
            self._pid = os.getpid()
            self._engine.dispose(close=False)
            self._engine = _engine(self.file)
            self._write_lock, self._tail_lock, self._tail = threading.Lock(), threading.Lock(), None


@contextlib.contextmanager
def translate_errors(path: str, operation: str) -> Iterator[None]:
    """Translate errors of the database at ``path`` into ours."""
    try:
        yield
    except (sa.exc.DBAPIError, sqlite3.Error) as error:
        original = error.orig if isinstance(error, sa.exc.DBAPIError) else error
        name = getattr(original, "sqlite_errorname", "") or ""
        is_unread = str(original).startswith(_NOT_TEXT)
        # Every verb keeps what the tables demand: what is there already contradicts it.
        if name.startswith(_DAMAGED) or is_unread or isinstance(original, sqlite3.IntegrityError):
            raise CorruptionError(path, 0, CATALOGUE, str(original)) from error
        if isinstance(original, sqlite3.OperationalError):
            is_transient = name.startswith(_TRANSIENT)
            raise StorageError(operation, path, str(original), is_transient) from error
        raise
    except UnicodeDecodeError as error:  # SQLite's own words quote what is damaged
        raise CorruptionError(path, 0, CATALOGUE, "text that is none") from error


def _engine(path: Path) -> Engine:
    engine = sa.create_engine(
        sa.URL.create("sqlite", database=str(path)),
        connect_args={"timeout": BUSY_TIMEOUT_S, "check_same_thread": False},
        pool_size=4,
        max_overflow=-1,
        execution_options={STORE_OPTION: str(path.parent)},
    )

    def on_connect(connection: Any, _: object) -> None:
        connection.isolation_level = None  # we say BEGIN ourselves
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA synchronous={SYNCHRONOUS}")
        connection.execute(CASE_SENSITIVE_LIKE)

    def on_begin(connection: Connection) -> None:
        is_write = connection.get_execution_options().get("headgate_write", False)
        # immediate: a transaction that reads first could not become a writer once another one has written
        connection.exec_driver_sql("BEGIN IMMEDIATE" if is_write else "BEGIN")

    event.listen(engine, "connect", on_connect)
    event.listen(engine, "begin", on_begin)
    return engine


class MemoryDatabase:
    """Tables in memory, with one connection that all threads share. See ``Database``."""

    def __init__(self, path: str, connection: sqlite3.Connection, store: str) -> None:
        """Use the database of ``connection``, which leaves BEGIN to us.

        ``path`` is where it is, or where it comes from, and ``store`` where its store is, for messages.
        """
        self._path = path
        self._lock = threading.RLock()
        self._writes_count = 0
        connection.execute(CASE_SENSITIVE_LIKE)
        options = {STORE_OPTION: store}
        self._engine = sa.create_engine(
            "sqlite://", poolclass=StaticPool, creator=lambda: connection, execution_options=options
        )
        event.listen(self._engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))

    @property
    def path(self) -> str:
        return self._path

    @property
    def is_untouched(self) -> bool:
        return False

    @contextlib.contextmanager
    def read(self) -> Iterator[Connection]:
        with self._translating_errors("read"), self._lock, self._engine.connect() as connection, connection.begin():
            yield connection

    @contextlib.contextmanager
    def write(self) -> Iterator[Connection]:
        with self._translating_errors("write"), self._lock, self._engine.connect() as connection:
            with connection.begin():
                yield connection
            # after the commit, under the lock: a reader that sees the number sees the change
            self._writes_count += 1

    @contextlib.contextmanager
    def _translating_errors(self, operation: str) -> Iterator[None]:
        with translate_errors(self._path, operation), report_damage(self._path, self._alone):
            yield

    @contextlib.contextmanager
    def _alone(self) -> Iterator[Connection]:
        with self._lock, self._engine.connect() as connection:
            yield connection

    def readable_part(self, connection: Connection) -> AbstractContextManager[tuple[Connection, list[str]]]:
        return readable_part(connection)

    def changes(self) -> int:
        return self._writes_count

    def close(self) -> None:
        """See ``Database``. What is in the tables stays, for others that share them."""


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
