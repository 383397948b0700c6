"""A catalogue on a PostgreSQL server, so that processes of many machines share a store.

Its tables, verbs and opening.

Counterparts: ``sql`` has the verbs, ``postgresql_database`` the transactions; ``location`` looks after the place of
the chunks, which is recorded here. Source: DB2, DB3 and DB8 of docs/spec/shared-store.md. Never repeats a verb that
may have taken effect: that is its caller's, who knows how (CT7).
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from headgate.environment import is_cancelled
from headgate.errors import StorageError, UsageError
from headgate.store.addresses import PostgresAddress
from headgate.store.catalogue import postgresql_database
from headgate.store.catalogue import tables as t
from headgate.store.catalogue.base import Verb
from headgate.store.catalogue.postgresql_database import InterruptedVerbError, PostgresDatabase
from headgate.store.catalogue.records import Place
from headgate.store.catalogue.sql import SqlCatalogue
from headgate.store.catalogue.tables import check_version, make_tables

_TEXT = sa.Text(collation="C")
"""Compared as bytes, as everywhere (CT10): the order of the database may be that of some language."""


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
        """See ``Catalogue``. A verb that was interrupted before it changed anything is carried out again (DB8)."""
        deadline_s = time.monotonic() + postgresql_database.PATIENCE_S
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
    """Open the catalogue at ``address``; make it where there is none, for a store whose chunks are at ``chunks``.

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
    database.patience_s = postgresql_database.PATIENCE_S
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
        is_there = _meta(connection) is not None
        make_tables(connection, postgres_tables())
        if not is_there:
            for key, value in ((CHUNKS, chunks), (STORE_ID, secrets.token_hex(16))):
                connection.execute(t.meta.insert().values(key=key, value=value))
        meta = _meta(connection)
        assert meta is not None
        return meta


def _meta_in(database: PostgresDatabase) -> dict[str, str] | None:
    with database.looking() as connection:
        return _meta(connection)


def _meta(connection: Connection) -> dict[str, str] | None:
    """Return what the tables say about themselves; None: there are none."""
    if connection.scalar(sa.select(sa.func.to_regclass(t.meta.name))) is None:
        return None
    return {row.key: row.value for row in connection.execute(sa.select(t.meta))}
