"""Opening a catalogue: its tables are made, or raised from an older version, under a lock.

Counterpart: ``database`` and ``open_lock``. Source: rules CT3, CT5 and CT6 of docs/spec/stream-store.md.
Never changes a catalogue that a newer release wrote.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from headgate.errors import CorruptionError, UsageError
from headgate.storage.access import access_in, open_created, open_lock
from headgate.store.catalogue import tables as t
from headgate.store.catalogue.database import FileDatabase
from headgate.store.catalogue.open_lock import wait_for_lock
from headgate.store.catalogue.streams import insert_segments
from headgate.store.catalogue.tables import CATALOGUE_VERSION
from headgate.store.streams import first_layout

_WAL_AT, _IS_WAL = 18, 2
"""Byte of SQLite's file header that says which journal it has, and its value for a WAL."""


def open_database(path: Path) -> FileDatabase:
    """Open the catalogue at ``path``, creating it when there is none.

    Raises:
        UsageError: it was written by a newer release, or its place is not writable.
        StorageError: it must be created or raised to this version, and somebody holds its lock.
        CorruptionError: it is not a catalogue.
    """
    database = FileDatabase(path)
    if _is_up_to_date(database):
        return database  # without the lock, which others may hold
    try:
        with os.fdopen(open_lock(path.with_suffix(".lock")), "ab") as lock:
            wait_for_lock(lock, path)  # two first openers: switching to WAL does not wait by itself
            # SQLite gives its other files (-wal, -shm) the mode of this one.
            os.close(open_created(path, os.O_RDWR | os.O_CREAT, access_in(path.parent)))
            with database.write() as connection:
                make_tables(connection, str(path.parent))
    except OSError as error:
        raise UsageError(f"stream store at {path.parent} cannot be opened: {error.strerror}") from error
    return database


def make_tables(connection: Connection, where: str) -> None:
    """Make the tables, or raise those of an older version, one version after the other.

    Raises:
        UsageError: a newer release made them.
    """
    if not sa.inspect(connection).has_table(t.meta.name):
        t.metadata.create_all(connection)
        connection.execute(t.meta.insert().values(key="version", value=str(CATALOGUE_VERSION)))
        return
    found = int(connection.execute(sa.select(t.meta.c.value).where(t.meta.c.key == "version")).scalar_one())
    if found > CATALOGUE_VERSION:
        raise UsageError(
            f"stream store at {where} has version {found}, this Headgate reads up to {CATALOGUE_VERSION}; "
            "upgrade Headgate"
        )
    for version in range(found, CATALOGUE_VERSION):
        _RAISES[version](connection)
    connection.execute(t.meta.update().where(t.meta.c.key == "version").values(value=str(CATALOGUE_VERSION)))


def _is_up_to_date(database: FileDatabase) -> bool:
    """Whether there is nothing to create, to switch to WAL or to raise to this version."""
    try:
        with open(database.file, "rb") as file:
            header = file.read(_WAL_AT + 1)
    except OSError:
        return False
    if len(header) <= _WAL_AT or header[_WAL_AT] != _IS_WAL:
        return False
    with database.read() as connection:
        if not sa.inspect(connection).has_table(t.meta.name):
            return False
        version = connection.execute(sa.select(t.meta.c.value).where(t.meta.c.key == "version")).scalar_one_or_none()
    return version == str(CATALOGUE_VERSION)


def _from_1(connection: Connection) -> None:
    t.owners.create(connection, checkfirst=True)


def _from_2(connection: Connection) -> None:
    """Give every segment its keys; a process of an older release that has the store open fails from now on (CT6)."""
    connection.exec_driver_sql("ALTER TABLE streams ADD COLUMN layout_epoch INTEGER DEFAULT '0' NOT NULL")
    for table in ("parts", "prepared_parts"):
        connection.exec_driver_sql(f"ALTER TABLE {table} RENAME COLUMN segment TO segment_id")
    connection.exec_driver_sql("ALTER TABLE segments RENAME TO segments_2")
    t.segments.create(connection)
    ends = connection.exec_driver_sql("SELECT stream_id, segment, end_position FROM segments_2").all()
    by_stream: dict[int, dict[int, int]] = {}
    for stream_id, segment, end in ends:
        by_stream.setdefault(stream_id, {})[segment] = end
    for stream_id, count in connection.execute(sa.select(t.streams.c.id, t.streams.c.segments_count)).all():
        found = by_stream.get(stream_id, {})
        if sorted(found) != list(range(count)):
            raise CorruptionError(
                "the stream store's catalogue",
                0,
                f"segments 0 to {count - 1} of stream {stream_id}",
                f"{sorted(found)}",
            )
        insert_segments(connection, stream_id, first_layout(count).segments, found)
    connection.exec_driver_sql("DROP TABLE segments_2")


_RAISES: dict[int, Callable[[Connection], None]] = {1: _from_1, 2: _from_2}
"""By version: raises the tables to the next one."""
