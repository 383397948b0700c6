"""A catalogue on a PostgreSQL server, so that processes of many machines share a store.

Its database: connections, transactions, failures, and notices of changes. Counterpart: ``sql``, with the same verbs.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import secrets
import selectors
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import psycopg
import psycopg.conninfo
import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from headgate.environment import is_cancelled
from headgate.errors import CorruptionError, HeadgateError, StorageError, UsageError
from headgate.store.addresses import PostgresAddress
from headgate.store.catalogue import tables as t
from headgate.store.catalogue.base import Verb
from headgate.store.catalogue.records import Place
from headgate.store.catalogue.sql import SqlCatalogue
from headgate.store.catalogue.tables import CATALOGUE_VERSION, STORE_OPTION, check_version, make_tables
from headgate.store.core import ChangeListener

DATABASE_ERRORS = (sa.exc.DBAPIError, psycopg.Error)


class InterruptedVerbError(StorageError):
    """Certainly nothing was changed, and the same may succeed a moment later: the verb is to be repeated."""


_LOST = ("08", "57P01", "57P02", "57P03", "57P05", "25P03", "25006", "53300")
"""The connection went, the server stops, starts, has no room for one more, or is not the one that takes changes."""
_CLASHED = ("40001", "40P01")
_WAITING_HELPS = ("40003", "53", "55", "57", "58")
_DAMAGED = ("XX001", "XX002")
_GONE = ("42P01", "3F000")
_NO_TEXT = ("22021", "22P05")
_LASTING = (
    *("authentication failed", "no password supplied", "does not exist", "not permitted to log in"),
    *("permission denied", "no pg_hba.conf entry", "does not support SSL", "certificate", "no encryption"),
)
"""Refusals of a server that stay: trying again does not help."""


def translate_error(error: Exception, operation: str, url: str, *, is_decided: bool = True) -> HeadgateError | None:
    """Return what to raise instead of ``error``; None: it is a bug, let it through.

    ``is_decided``: it came before the transaction was to be committed, so certainly nothing was changed.
    """
    original = error.orig if isinstance(error, sa.exc.DBAPIError) else error
    state = getattr(original, "sqlstate", None) or ""
    said = first_lines(original)
    if is_lost(original) or state in _CLASHED:
        return (InterruptedVerbError if is_decided else StorageError)(operation, url, said)
    if state in _DAMAGED:
        return CorruptionError(url, 0, "a stream store's catalogue", said)
    if state in _NO_TEXT or isinstance(original, psycopg.DataError):
        return UsageError(f"PostgreSQL cannot keep a name or text that was to be written to {url}: {said}")
    if state in _GONE:
        return StorageError(operation, url, f"tables of the stream store are gone: {said}", is_transient=False)
    if state.startswith(_WAITING_HELPS):
        return StorageError(operation, url, said)
    if state == "42501":
        return StorageError(operation, url, f"{said}; ask the owner of the store for the right", is_transient=False)
    return None


def translate_connect_error(error: Exception, url: str) -> StorageError:
    """Return what to raise where no connection could be made.

    The client library gives words and no code. What is not known to stay as it is, in any language, is waited for.
    """
    original = error.orig if isinstance(error, sa.exc.DBAPIError) else error
    said = first_lines(original)
    if isinstance(original, psycopg.ProgrammingError) or any(words in said for words in _LASTING):
        return StorageError("connect to", url, said, is_transient=False)
    return InterruptedVerbError("connect to", url, said)


def is_lost(error: BaseException | None) -> bool:
    """Return whether the connection is of no more use, and another one may be."""
    state = getattr(error, "sqlstate", None)
    if state is None:
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    return str(state).startswith(_LOST)


def first_lines(error: BaseException | None) -> str:
    """Return what the client library or the server said, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "; ".join(lines[:2]) or type(error).__name__


_local_listeners: dict[str, weakref.WeakSet[PostgresChangeListener]] = {}


def notify_local_listeners(url: str) -> None:
    """Wake the listeners of this process, which changed the store, before the server does."""
    for watch in list(_local_listeners.get(url, ())):
        watch.changed()


class PostgresChangeListener(ChangeListener):
    """Listens to a channel of the database."""

    def __init__(self, connect: Callable[[], psycopg.Connection], url: str, channel: str, first: int = 0) -> None:
        """``connect`` gives a connection without transactions; no number is as low as ``first``."""
        super().__init__("headgate-store-watch", first)
        _local_listeners.setdefault(url, weakref.WeakSet()).add(self)
        self._connect = connect
        self._channel = channel
        self._wake: int | None = None

    def _listen(self) -> bool:
        is_connected = False
        with contextlib.suppress(psycopg.Error, OSError), self._connect() as connection:
            connection.execute(f"LISTEN {self._channel}".encode())
            self._set_hearing(True)
            is_connected = True
            self._hear(connection)
        return is_connected

    def _hear(self, connection: psycopg.Connection) -> None:
        with self._wake_pipe() as wake, selectors.DefaultSelector() as selector:
            selector.register(connection.fileno(), selectors.EVENT_READ)
            selector.register(wake, selectors.EVENT_READ)
            while not self._closing.is_set():
                selector.select()
                connection.pgconn.consume_input()
                while connection.pgconn.notifies() is not None:
                    self.changed()

    @contextlib.contextmanager
    def _wake_pipe(self) -> Iterator[int]:
        """Give what can be read when it is interrupted. ``_closing`` is checked after that, so none is missed."""
        read, write = os.pipe()
        with self._lock:
            self._wake = write
        try:
            yield read
        finally:
            with self._lock:
                self._wake = None
            os.close(read)
            os.close(write)

    def _interrupt(self) -> None:
        with self._lock:
            if self._wake is not None:
                os.write(self._wake, b"x")


BUSY_TIMEOUT_S = 60.0
"""How long a verb waits for those of others before it reports a transient error."""

STALLED_S = 20.0
"""A process that holds the store's lock and is idle for so long, stopped or cut off, loses its transaction."""

PATIENCE_S = 30.0
"""How long a verb of which nothing has happened yet waits for a server that went."""

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
"""The loss of the server's machine is noticed within half a minute, unless the URL says something else."""


class PostgresDatabase:
    """One process's access to the tables of a store on a server; usable again after a fork. See ``Database``."""

    is_untouched = False

    def __init__(self, address: PostgresAddress) -> None:
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
        self._watch = PostgresChangeListener(self._connect, self._address.url, self._channel, self._last_number)

    @property
    def path(self) -> str:
        return self._address.url

    @contextlib.contextmanager
    def read(self) -> Iterator[Connection]:
        self._notice_fork()
        if self._has_unknown:
            self._settle()
        with self._transaction("read", _READ, ends_with_commit=False) as connection:
            yield connection

    @contextlib.contextmanager
    def write(self) -> Iterator[Connection]:
        self._notice_fork()
        with self._write_lock, self._transaction("write", _write(self._channel)) as connection:
            yield connection
        # after the commit: a reader that is woken sees what was changed
        notify_local_listeners(self._address.url)

    @contextlib.contextmanager
    def looking(self) -> Iterator[Connection]:
        """Give a consistent view where there may be no tables, or those of another version."""
        with self._transaction("read", _LOOK, checks_version=False, ends_with_commit=False) as connection:
            yield connection

    @contextlib.contextmanager
    def making(self) -> Iterator[Connection]:
        """Give a transaction that makes the tables; one process at a time is in it."""
        with self._transaction("make", _making(self._address.schema), checks_version=False) as connection:
            yield connection

    @contextlib.contextmanager
    def readable_part(self, connection: Connection) -> Iterator[tuple[Connection, list[str]]]:
        """See ``Database``. A server looks after its files, and after kinds, by itself (data checksums, amcheck)."""
        yield connection, []

    def changes(self) -> int:
        self._notice_fork()
        return self._watch.changes()

    def close(self) -> None:
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
                raise translate_error(error, operation, self.path) or error from error
            if ends_with_commit:
                self._commit(connection, operation)
        finally:
            self._put_back(connection)

    def _begun(self, operation: str, begin: str) -> Connection:
        """Return a connection in a transaction that has changed nothing yet, if the server is there in time."""
        deadline_s, pause_s = time.monotonic() + self.patience_s, _PAUSES_S[0]
        while True:
            try:
                return self._begin(operation, begin)
            except InterruptedVerbError:
                self._engine.dispose()  # what is in the pool went with the same server
                if is_cancelled() or time.monotonic() + pause_s >= deadline_s:
                    raise
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSES_S[1])

    def _begin(self, operation: str, begin: str) -> Connection:
        try:
            connection = self._engine.connect()
        except DATABASE_ERRORS as error:
            raise translate_connect_error(error, self.path) from error
        try:
            connection.begin()  # ends with what is begun here
            cursor = _client_connection(connection).execute(begin.encode())
            # all of it in one round trip; the last result is the version
            while cursor.nextset():
                pass
            row = cursor.fetchone() if cursor.description else None
            connection.info["version"] = None if row is None else row[0]
        except DATABASE_ERRORS as error:
            self._put_back(connection)
            raise translate_error(error, operation, self.path) or error from error
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
        """Commit; when that raises, the outcome is unknown, unless the server has refused it."""
        if _client_connection(connection).info.transaction_status == psycopg.pq.TransactionStatus.INERROR:
            raise AssertionError("a transaction goes on after a statement that failed")
        try:
            connection.commit()
        except DATABASE_ERRORS as error:
            self._has_unknown = True
            raise translate_error(error, operation, self.path, is_decided=False) or error from error

    def _settle(self) -> None:
        """Wait until the server is done with a commit that was not answered: it has the store's lock until then.

        Else a caller that looks for its effect would find nothing, and see it come afterwards.
        """
        with self._write_lock, self._transaction("read", _write(self._channel)):
            pass
        self._has_unknown = False

    def _put_back(self, connection: Connection) -> None:
        """Give a connection back to the pool, which undoes what was not committed; or let it go if it is of no use."""
        try:
            if not connection.invalidated and _client_connection(connection).closed:
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
            execution_options={STORE_OPTION: self._address.url},
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
        """Make new connections and locks in a child: before any lock, the parent may hold one."""
        if os.getpid() != self._pid:
            self._pid = os.getpid()
            self._engine.dispose(close=False)
            self._last_number = self._watch.number + _CHANGES_OF_A_WATCH
            self._begin_in_this_process()


def _client_connection(connection: Connection) -> psycopg.Connection:
    """Return the client library's connection."""
    found = connection.connection.dbapi_connection
    assert isinstance(found, psycopg.Connection)
    return found


def _session(schema: str) -> str:
    """Return the settings of every connection. Commits wait for the disk, also on a server set not to."""
    return (
        f'SET search_path TO "{schema}"; '
        f"SET lock_timeout TO {int(BUSY_TIMEOUT_S * 1_000)}; "
        "SET tcp_keepalives_idle TO 10; SET tcp_keepalives_interval TO 5; SET tcp_keepalives_count TO 3; "
        "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
    )


_LOOK = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_READ = f"{_LOOK}; SELECT value FROM meta WHERE key = 'version'"
"""All that it sees is of one moment."""


def _write(channel: str) -> str:
    """Begin a transaction that changes something: with the store's lock, which is the row of its version.

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


_TEXT = sa.Text(collation="C")
"""Compared as bytes, as everywhere: the order of the database may be that of some language."""


@functools.cache
def postgres_tables() -> sa.MetaData:
    """Return the tables, to be made in the schema that comes first."""
    made = sa.MetaData()
    for table in t.metadata.sorted_tables:
        for column in table.to_metadata(made).columns:
            if isinstance(column.type, sa.String):
                column.type = _TEXT
    return made


PAUSE_S = 0.05


class PostgresCatalogue(SqlCatalogue):
    """A catalogue on a server. Every verb waits for a server that went, for a while."""

    def date_ms(self) -> int:
        """Return the server's date, in milliseconds since 1970.

        Raises:
            StorageError: it cannot be reached.
        """
        with self._database.read() as connection:
            asked = sa.text("SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint")
            return int(connection.execute(asked).scalar_one())

    def carry_out(self, verb: Verb, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """See ``Catalogue``. A verb that was interrupted before it changed anything is carried out again."""
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                return super().carry_out(verb, arguments, named)
            except InterruptedVerbError:
                if is_cancelled() or time.monotonic() >= deadline_s:
                    raise
            time.sleep(PAUSE_S)


CHUNKS, STORE_ID = "chunks", "store_id"
"""Keys in ``meta``: where the chunks are, and what tells this store from another one."""


def exists(address: PostgresAddress) -> bool:
    """Return whether there is a store; makes none.

    Raises:
        UsageError, StorageError: the server does not let us look.
    """
    with _opened(address) as database:
        return _meta_in(database) is not None


def open_catalogue(address: PostgresAddress, chunks: str | None) -> tuple[PostgresCatalogue, Place]:
    """Open the catalogue at ``address``; create it if there is none, for a store with its chunks at ``chunks``.

    Raises:
        UsageError: there is none and ``chunks`` is not given, it has them elsewhere, another release made it, or
            the server does not let us in.
        StorageError: the server cannot be reached.
    """
    with _opened(address) as database:
        meta = _meta_in(database)
        if meta is None and chunks is None:
            raise UsageError(
                f"there is no stream store at {address.url}; make it once, and say where its chunks are to be: "
                "Store.open(url, chunks='s3://bucket/prefix'), or headgate streams create NAME --store URL --chunks URL"
            )
        if meta is None:
            meta = _make(database, address, chunks)
        check_version(int(meta["version"]), address.url)
        if chunks is not None and chunks != meta[CHUNKS]:
            raise UsageError(
                f"the store at {address.url} has its chunks at {meta[CHUNKS]}, not at {chunks}; open it without chunks"
            )
    database = PostgresDatabase(address)
    database.patience_s = PATIENCE_S
    return PostgresCatalogue(database), Place(meta[CHUNKS], meta[STORE_ID])


@contextlib.contextmanager
def _opened(address: PostgresAddress) -> Iterator[PostgresDatabase]:
    """Give the database to look at; what will not go away by itself is the user's to mend."""
    database = PostgresDatabase(address)
    try:
        yield database
    except StorageError as error:
        if error.is_transient:
            raise
        raise UsageError(f"stream store at {address.url} cannot be opened: {error.cause}") from error
    finally:
        database.close()


def _make(database: PostgresDatabase, address: PostgresAddress, chunks: str | None) -> dict[str, str]:
    with database.making() as connection:
        if not connection.scalar(sa.text("SELECT 1 FROM pg_namespace WHERE nspname = :name"), {"name": address.schema}):
            connection.exec_driver_sql(f'CREATE SCHEMA "{address.schema}"')
        # `making` may have waited for another process that made it, and said where the chunks are
        is_there = _meta(connection) is not None
        make_tables(connection, postgres_tables())
        if not is_there:
            for key, value in ((CHUNKS, chunks), (STORE_ID, secrets.token_hex(16))):
                connection.execute(t.meta.insert().values(key=key, value=value))
        meta = _meta(connection)
        assert meta is not None, "the tables were made above, in this transaction"
        return meta


def _meta_in(database: PostgresDatabase) -> dict[str, str] | None:
    with database.looking() as connection:
        return _meta(connection)


def _meta(connection: Connection) -> dict[str, str] | None:
    """Return what the tables say about themselves; None: there are none."""
    if connection.scalar(sa.select(sa.func.to_regclass(t.meta.name))) is None:
        return None
    return {row.key: row.value for row in connection.execute(sa.select(t.meta))}
