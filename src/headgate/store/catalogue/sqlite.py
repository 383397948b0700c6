"""Databases of a catalogue: what all promise, and those in SQLite, in a file or in memory.

Counterparts: ``sql`` runs its verbs in one; ``postgresql`` is the other kind. Source: docs/spec/stream-store.md. Never
keeps a transaction open across a call of its own.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.pool import StaticPool

from headgate.errors import CorruptionError, StorageError
from headgate.store.catalogue.integrity import CATALOGUE, readable_part, report_damage
from headgate.store.catalogue.tables import STORE_OPTION


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
