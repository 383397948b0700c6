"""Opening a catalogue: made when there is none, and kept as it is until somebody writes when it must be raised first.

Counterparts: ``versions`` knows the tables, ``looking`` what is there, ``untouched`` waits for the first write. Source:
rules CT3, CT5, CT8 and CT9 of docs/spec/stream-store.md. Never opens a catalogue that is there but through SQLite.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from headgate.errors import UsageError
from headgate.storage.access import access_in, may, open_created, open_lock
from headgate.store.catalogue.access import Database
from headgate.store.catalogue.database import FileDatabase, errors_of
from headgate.store.catalogue.looking import Look, may_write
from headgate.store.catalogue.making_lock import wait_for_lock
from headgate.store.catalogue.tables import CATALOGUE_VERSION
from headgate.store.catalogue.untouched import UntouchedDatabase
from headgate.store.catalogue.versions import make_tables


def open_database(path: Path) -> Database:
    """Open the catalogue at ``path``, creating it when there is none. One that is there is not changed (CT8).

    Raises:
        UsageError: a newer release wrote it, it may not be read, or it is to be created and its place is not writable.
        StorageError: it must be created, and somebody holds its lock.
        CorruptionError: it is not a catalogue, or one of an older version that cannot be raised.
    """
    if not os.path.exists(path):
        return open_to_write(path)
    if not may(path, os.R_OK):
        raise UsageError(f"stream store at {path.parent} cannot be opened: Permission denied; ask its owner for access")
    with errors_of(str(path), "read"), contextlib.closing(Look(path)) as look:
        version = look.version()
    if version is None:
        return open_to_write(path)
    if version == CATALOGUE_VERSION and may_write(path):
        return FileDatabase(path)  # without the lock, which others may hold
    database = UntouchedDatabase(path, open_to_write)
    with database.read():  # what cannot be raised is said now
        return database


def open_to_write(path: Path) -> FileDatabase:
    """Open the catalogue at ``path``, created when there is none, and raised to this version.

    Raises:
        UsageError: a newer release wrote it, or it may not be written.
        StorageError: somebody holds its lock.
        CorruptionError: it cannot be raised.
    """
    try:
        with os.fdopen(open_lock(path.with_suffix(".lock")), "ab") as lock:
            wait_for_lock(lock, path)  # two first openers: switching to WAL does not wait by itself
            if not os.path.exists(path):  # CT9: whoever has it open holds locks that closing another descriptor frees
                # SQLite gives its other files (-wal, -shm) the mode of this one.
                os.close(open_created(path, os.O_RDWR | os.O_CREAT, access_in(path.parent)))
            elif not may(path, os.W_OK):
                raise PermissionError(13, "Permission denied")
            database = FileDatabase(path)
            with database.write() as connection:
                make_tables(connection, str(path.parent))
    except OSError as error:
        raise UsageError(
            f"stream store at {path.parent} cannot be written to: {error.strerror}; use another store, or ask for the "
            "right to write there"
        ) from error
    return database
