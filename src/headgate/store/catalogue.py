"""The database that says which events exist: connections, transactions, versions, errors.

Counterpart: everything in ``store`` that reads or changes ``tables``. Source: rules CT1 to CT4 of
docs/spec/stream-store.md. Never keeps a transaction open across a call of its own.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import Connection, Engine

from headgate.errors import CorruptionError, StorageError, UsageError
from headgate.storage.access import access_in, open_created, open_lock
from headgate.store.open_lock import wait_for_lock
from headgate.store.tables import CATALOGUE_VERSION, meta, metadata, owners

BUSY_TIMEOUT_S = 60.0
"""How long a writer waits for other processes' short transactions before it reports a transient error."""

SYNCHRONOUS = "FULL"
"""The WAL is synced before a commit returns: it survives a power cut (CT1). With NORMAL it is synced now and then."""

_WAL_AT, _IS_WAL = 18, 2
"""Byte of SQLite's file header that says which journal it has, and its value for a WAL."""

_VERSIONS_OF_A_TAIL = 1 << 32
"""More than one connection counts: numbers of two connections are never equal, so a new one always means to look."""

_TRANSIENT = ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_FULL", "SQLITE_IOERR", "SQLITE_CANTOPEN", "SQLITE_PROTOCOL")
_DAMAGED = ("SQLITE_CORRUPT", "SQLITE_NOTADB")


class Catalogue:
    """One process's access to the catalogue; safe from several threads, and again after a fork."""

    def __init__(self, path: Path) -> None:
        """Open the catalogue at ``path``, creating it when there is none.

        Raises:
            UsageError: it was written by a newer release, or its place is not writable.
            StorageError: it must be created or raised to this version, and somebody holds its lock.
            CorruptionError: it is not a catalogue.
        """
        self.path = path
        self._pid = os.getpid()
        self._write_lock = threading.Lock()  # threads queue here instead of polling SQLite's lock
        self._tail_lock = threading.Lock()
        self._tail: Any = None
        self._tails_count = 0
        self._engine = _engine(path)
        if self._is_up_to_date():
            return  # without the lock, which others may hold
        try:
            with os.fdopen(open_lock(path.with_suffix(".lock")), "ab") as lock:
                wait_for_lock(lock, path)  # two first openers: switching to WAL does not wait by itself
                # SQLite gives its other files (-wal, -shm) the mode of this one.
                os.close(open_created(path, os.O_RDWR | os.O_CREAT, access_in(path.parent)))
                with self.write() as connection:
                    self._prepare(connection)
        except OSError as error:
            raise UsageError(f"stream store at {path.parent} cannot be opened: {error.strerror}") from error

    @contextlib.contextmanager
    def read(self) -> Iterator[Connection]:
        """Give a consistent view of one moment."""
        self._notice_fork()
        with self._errors("read"), self._engine.connect() as connection, connection.begin():
            yield connection

    @contextlib.contextmanager
    def write(self) -> Iterator[Connection]:
        """Give a transaction that is durable when the block ends, and undone when it raises.

        Raises:
            StorageError: nothing was changed (or, after an I/O error, perhaps everything: look it up).
        """
        self._notice_fork()
        with self._errors("write"), self._write_lock, self._engine.connect() as plain:
            connection = plain.execution_options(headgate_write=True)
            with connection.begin():
                yield connection

    def version(self) -> int:
        """Return a number that changes when any other connection changed the catalogue (about 5 µs).

        Compare it with one taken *before* the query whose result is to be kept.
        """
        self._notice_fork()
        with self._errors("read"), self._tail_lock:
            if self._tail is None:
                self._tail = self._connect_tail()
                self._tails_count += 1
            return self._tails_count * _VERSIONS_OF_A_TAIL + int(
                self._tail.execute("PRAGMA data_version").fetchone()[0]
            )

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()
        with self._tail_lock:
            if self._tail is not None:
                self._tail.close()
                self._tail = None

    def _connect_tail(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        connection.execute("SELECT count(*) FROM meta").fetchone()
        return connection

    def _notice_fork(self) -> None:
        """Make connections and locks anew in a child (CT4): before any lock, the parent may hold one."""
        if os.getpid() != self._pid:
            self._pid = os.getpid()
            self._engine.dispose(close=False)
            self._engine = _engine(self.path)
            self._write_lock, self._tail_lock, self._tail = threading.Lock(), threading.Lock(), None

    def _is_up_to_date(self) -> bool:
        """Whether there is nothing to create, to switch to WAL or to raise to this version."""
        try:
            with open(self.path, "rb") as file:
                header = file.read(_WAL_AT + 1)
        except OSError:
            return False
        if len(header) <= _WAL_AT or header[_WAL_AT] != _IS_WAL:
            return False
        with self.read() as connection:
            if not sa.inspect(connection).has_table(meta.name):
                return False
            version = connection.execute(sa.select(meta.c.value).where(meta.c.key == "version")).scalar_one_or_none()
        return version == str(CATALOGUE_VERSION)

    def _prepare(self, connection: Connection) -> None:
        if not sa.inspect(connection).has_table(meta.name):
            metadata.create_all(connection)
            connection.execute(meta.insert().values(key="version", value=str(CATALOGUE_VERSION)))
            return
        found = int(connection.execute(sa.select(meta.c.value).where(meta.c.key == "version")).scalar_one())
        if found > CATALOGUE_VERSION:
            raise UsageError(
                f"stream store at {self.path.parent} has version {found}, this Headgate reads up to "
                f"{CATALOGUE_VERSION}; upgrade Headgate"
            )
        if found < CATALOGUE_VERSION:
            owners.create(connection, checkfirst=True)
            connection.execute(meta.update().where(meta.c.key == "version").values(value=str(CATALOGUE_VERSION)))

    @contextlib.contextmanager
    def _errors(self, operation: str) -> Iterator[None]:
        try:
            yield
        except (sa.exc.DBAPIError, sqlite3.Error) as error:
            original = error.orig if isinstance(error, sa.exc.DBAPIError) else error
            name = getattr(original, "sqlite_errorname", "") or ""
            if name.startswith(_DAMAGED):
                raise CorruptionError(str(self.path), 0, "a stream store's catalogue", str(original)) from error
            if isinstance(original, sqlite3.OperationalError):
                is_transient = name.startswith(_TRANSIENT)
                raise StorageError(operation, str(self.path), str(original), is_transient) from error
            raise


def _engine(path: Path) -> Engine:
    engine = sa.create_engine(
        sa.URL.create("sqlite", database=str(path)),
        connect_args={"timeout": BUSY_TIMEOUT_S, "check_same_thread": False},
        pool_size=4,
        max_overflow=-1,
    )

    def on_connect(connection: Any, _: object) -> None:
        connection.isolation_level = None  # we say BEGIN ourselves
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA synchronous={SYNCHRONOUS}")

    def on_begin(connection: Connection) -> None:
        is_write = connection.get_execution_options().get("headgate_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if is_write else "BEGIN")

    event.listen(engine, "connect", on_connect)
    event.listen(engine, "begin", on_begin)
    return engine
