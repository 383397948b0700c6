"""Opening a catalogue on a server: made by one of those who come first, raised by the first of a newer release.

Counterparts: ``versions`` knows the tables, ``database`` the transactions; ``store.shared_chunks`` looks after the
place of the chunks, which is recorded here. Source: DB2 and DB3 of docs/spec/shared-store.md.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from headgate.errors import StorageError, UsageError
from headgate.store.catalogue import tables as t
from headgate.store.catalogue.postgres import database as databases
from headgate.store.catalogue.postgres.address import Address
from headgate.store.catalogue.postgres.database import PostgresDatabase
from headgate.store.catalogue.postgres.tables import compare_texts_as_bytes, tables
from headgate.store.catalogue.postgres.verbs import PostgresCatalogue
from headgate.store.catalogue.tables import CATALOGUE_VERSION
from headgate.store.catalogue.values import Place
from headgate.store.catalogue.versions import check_not_newer, make_tables

CHUNKS, STORE_ID = "chunks", "store_id"
"""Keys in ``meta``: where the chunks are, and what tells this store from another one."""


def exists(address: Address) -> bool:
    """Return whether there is a store; makes none.

    Raises:
        UsageError, StorageError: the server does not let us look.
    """
    with _opened(address) as database:
        return _meta_in(database) is not None


def open_catalogue(address: Address, chunks: str | None) -> tuple[PostgresCatalogue, Place]:
    """Open the catalogue at ``address``; make it where there is none, for a store whose chunks are at ``chunks``.

    Raises:
        UsageError: there is none and ``chunks`` is not given, it has them elsewhere, a newer release raised it, or the
            server does not let us in.
        StorageError: the server cannot be reached.
    """
    with _opened(address) as database:
        meta = _meta_in(database)
        if meta is None and chunks is None:
            raise UsageError(
                f"there is no stream store at {address.url}; make it once, and say where its chunks are to be: "
                "Store.open(url, chunks='s3://bucket/prefix'), or headgate streams create NAME --store URL --chunks URL"
            )
        if meta is not None:
            check_not_newer(int(meta["version"]), address.url)
        if meta is None or int(meta["version"]) < CATALOGUE_VERSION:
            meta = _make(database, address, chunks)
        if chunks is not None and chunks != meta[CHUNKS]:
            raise UsageError(
                f"the store at {address.url} has its chunks at {meta[CHUNKS]}, not at {chunks}; open it without chunks"
            )
    database = PostgresDatabase(address)
    database.patience_s = databases.PATIENCE_S
    return PostgresCatalogue(database, address.url), Place(meta[CHUNKS], meta[STORE_ID])


@contextlib.contextmanager
def _opened(address: Address) -> Iterator[PostgresDatabase]:
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


def _make(database: PostgresDatabase, address: Address, chunks: str | None) -> dict[str, str]:
    with database.making() as connection:
        if not connection.scalar(sa.text("SELECT 1 FROM pg_namespace WHERE nspname = :name"), {"name": address.schema}):
            connection.exec_driver_sql(f'CREATE SCHEMA "{address.schema}"')
        is_there = _meta(connection) is not None
        make_tables(connection, address.url, tables())
        if is_there:
            compare_texts_as_bytes(connection)
        else:
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
