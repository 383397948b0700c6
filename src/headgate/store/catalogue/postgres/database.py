"""A database on a PostgreSQL server: connections, transactions, and what a lost connection means.

Counterpart: ``access.Database`` says what it promises. Source: DB4 to DB9 and DB11 of docs/spec/shared-store.md.
Never keeps a transaction open across a call of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import psycopg.conninfo
import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from headgate.errors import UsageError
from headgate.store.catalogue.postgres.address import Address
from headgate.store.catalogue.postgres.failures import (
    DATABASE_ERRORS,
    InterruptedVerbError,
    failure,
    is_lost,
    refusal,
)
from headgate.store.catalogue.postgres.watch import Watch, changed_here
from headgate.store.catalogue.tables import CATALOGUE_VERSION
from headgate.threads import is_called_off

BUSY_TIMEOUT_S = 60.0
"""How long a verb waits for those of others before it reports a transient error."""

STALLED_S = 20.0
"""Whoever holds the store's lock and does nothing for so long, stopped or cut off, loses its transaction (DB7)."""

PATIENCE_S = 30.0
"""How long a verb of which nothing has happened yet waits for a server that went (DB8)."""

OPENING_PATIENCE_S = 10.0
"""How long opening waits for it: the address may be wrong."""

_PAUSES_S = (0.05, 1.0)
_CHANGES_OF_A_WATCH = 1 << 32
_CONNECT = {
    "connect_timeout": "10",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "25000",
}
"""A server whose machine has disappeared is noticed within half a minute, unless the URL says something else."""


class PostgresDatabase:
    """One process's access to the tables of a store on a server; usable again after a fork."""

    is_untouched = False

    def __init__(self, address: Address) -> None:
        self._address = address
        self._channel = f"headgate_{hashlib.md5(address.schema.encode(), usedforsecurity=False).hexdigest()[:16]}"
        self.patience_s = OPENING_PATIENCE_S
        self._pid = os.getpid()
        self._last_number = 0
        self._begin_in_this_process()

    def _begin_in_this_process(self) -> None:
        self._has_unknown = False
        self._write_lock = threading.Lock()  # threads queue here, not with a connection each
        self._engine = self._make_engine()
        self._watch = Watch(self._connect, self._address.url, self._channel, self._last_number)

    @property
    def path(self) -> str:
        """See ``Database``."""
        return self._address.url

    @contextlib.contextmanager
    def read(self) -> Iterator[Connection]:
        """See ``Database``."""
        self._notice_fork()
        if self._has_unknown:
            self._settle()
        with self._transaction("read", _READ, ends_with_commit=False) as connection:
            yield connection

    @contextlib.contextmanager
    def write(self) -> Iterator[Connection]:
        """See ``Database``."""
        self._notice_fork()
        with self._write_lock, self._transaction("write", _write(self._channel)) as connection:
            yield connection
        changed_here(self._address.url)

    @contextlib.contextmanager
    def looking(self) -> Iterator[Connection]:
        """Give a consistent view where there may be no tables, or those of another version."""
        with self._transaction("read", _LOOK, checks_version=False, ends_with_commit=False) as connection:
            yield connection

    @contextlib.contextmanager
    def making(self) -> Iterator[Connection]:
        """Give a transaction that makes or raises the tables; one process at a time is in it (DB3)."""
        with self._transaction("make", _making(self._address.schema), checks_version=False) as connection:
            yield connection

    @contextlib.contextmanager
    def sound_part(self, connection: Connection) -> Iterator[tuple[Connection, list[str]]]:
        """See ``Database``. A server looks after its files, and after kinds, by itself (data checksums, amcheck)."""
        yield connection, []

    def changes(self) -> int:
        """See ``Database``."""
        self._notice_fork()
        return self._watch.changes()

    def close(self) -> None:
        """See ``Database``."""
        self._notice_fork()
        self._watch.close()
        self._engine.dispose()

    @contextlib.contextmanager
    def _transaction(
        self, operation: str, begin: str, *, checks_version: bool = True, ends_with_commit: bool = True
    ) -> Iterator[Connection]:
        connection = self._begun(operation, begin)
        try:
            if checks_version:
                self._check_version(connection)
            try:
                yield connection
            except DATABASE_ERRORS as error:
                raise failure(error, operation, self.path) or error from error
            if ends_with_commit:
                self._commit(connection, operation)
        finally:
            self._put_back(connection)

    def _begun(self, operation: str, begin: str) -> Connection:
        """Return a connection in a transaction that has changed nothing yet, if the server is there in time (DB8)."""
        deadline_s, pause_s = time.monotonic() + self.patience_s, _PAUSES_S[0]
        while True:
            try:
                return self._begin(operation, begin)
            except InterruptedVerbError:
                self._engine.dispose()  # what is in the pool went with the same server
                if is_called_off() or time.monotonic() + pause_s >= deadline_s:
                    raise
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSES_S[1])

    def _begin(self, operation: str, begin: str) -> Connection:
        try:
            connection = self._engine.connect()
        except DATABASE_ERRORS as error:
            raise refusal(error, self.path) from error
        try:
            connection.begin()  # ends with what is begun here
            cursor = _of(connection).execute(begin.encode())
            while cursor.nextset():
                pass
            row = cursor.fetchone() if cursor.description else None
            connection.info["version"] = None if row is None else row[0]
        except DATABASE_ERRORS as error:
            self._put_back(connection)
            raise failure(error, operation, self.path) or error from error
        except BaseException:
            self._put_back(connection)
            raise
        return connection

    def _check_version(self, connection: Connection) -> None:
        found = connection.info["version"]
        if found != str(CATALOGUE_VERSION):
            raise UsageError(
                f"stream store at {self.path} has version {found} by now, this Headgate works with "
                f"{CATALOGUE_VERSION}; upgrade Headgate and start again"
            )

    def _commit(self, connection: Connection, operation: str) -> None:
        """Commit; when that raises, the outcome is unknown (CT7), unless the server has refused it."""
        if _of(connection).info.transaction_status == psycopg.pq.TransactionStatus.INERROR:
            raise AssertionError("a transaction goes on behind a statement that failed")
        try:
            connection.commit()
        except DATABASE_ERRORS as error:
            self._has_unknown = True
            raise failure(error, operation, self.path, is_decided=False) or error from error

    def _settle(self) -> None:
        """Wait until the server is done with a commit that was not answered: it has the store's lock until then.

        Whoever asks what became of it would else be told that there is nothing, and see it come afterwards.
        """
        with self._write_lock, self._transaction("read", _write(self._channel)):
            pass
        self._has_unknown = False

    def _put_back(self, connection: Connection) -> None:
        """Give a connection back to the pool, which undoes what was not committed; or let it go if it is of no use."""
        try:
            if not connection.invalidated and _of(connection).closed:
                connection.invalidate()
            connection.close()
        except DATABASE_ERRORS as error:
            if not is_lost(getattr(error, "orig", error)):
                raise

    def _make_engine(self) -> Engine:
        return sa.create_engine(
            "postgresql+psycopg://",
            creator=self._connect,
            pool_size=4,
            max_overflow=12,
            pool_timeout=BUSY_TIMEOUT_S,
            use_native_hstore=False,
        )

    def _connect(self) -> psycopg.Connection:
        given = psycopg.conninfo.conninfo_to_dict(self._address.conninfo)
        settings: dict[str, Any] = {**_CONNECT, "application_name": "headgate", **given, "client_encoding": "utf8"}
        connection = psycopg.connect(autocommit=True, **settings)
        try:
            connection.execute(_session(self._address.schema).encode())
        except BaseException:
            connection.close()
            raise
        return connection

    def _notice_fork(self) -> None:
        """Make connections and locks anew in a child (CT4): before any lock, the parent may hold one."""
        if os.getpid() != self._pid:
            self._pid = os.getpid()
            self._engine.dispose(close=False)
            self._last_number = self._watch.number + _CHANGES_OF_A_WATCH
            self._begin_in_this_process()


def _of(connection: Connection) -> psycopg.Connection:
    """Return the client library's connection."""
    found = connection.connection.dbapi_connection
    assert isinstance(found, psycopg.Connection)
    return found


def _session(schema: str) -> str:
    """What holds on every connection. One that says not to wait for the disk is told to (DB5)."""
    return (
        f'SET search_path TO "{schema}"; '
        f"SET lock_timeout TO {int(BUSY_TIMEOUT_S * 1_000)}; "
        "SET tcp_keepalives_idle TO 10; SET tcp_keepalives_interval TO 5; SET tcp_keepalives_count TO 3; "
        "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
    )


_LOOK = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_READ = f"{_LOOK}; SELECT value FROM meta WHERE key = 'version'"
"""All that it sees is of one moment (DB6)."""


def _write(channel: str) -> str:
    """Begin a transaction that changes something: with the store's lock, which is the row of its version (DB4).

    READ COMMITTED, because what a transaction of a higher level sees is as old as its first statement, and that waits
    for the lock.
    """
    return f"{_begin_change()}; NOTIFY {channel}; SELECT value FROM meta WHERE key = 'version' FOR UPDATE"


def _making(schema: str) -> str:
    """Begin a transaction in which there is no table to lock yet."""
    return f"{_begin_change()}; SELECT pg_advisory_xact_lock(hashtextextended('headgate store {schema}', 0))"


def _begin_change() -> str:
    """Begin a transaction that the server ends when its client does nothing for too long, so that others go on."""
    return (
        "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; "
        f"SET LOCAL idle_in_transaction_session_timeout TO {int(STALLED_S * 1_000)}"
    )
