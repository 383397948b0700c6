"""Looking at the file of a catalogue without changing it: its version, a copy of it, whether it has changed.

Counterpart: ``opening`` and ``untouched``. Source: rules CT8 and CT9 of docs/spec/stream-store.md. SQLite does the
reading: its locks are those of the process, and closing another descriptor of the file would free them. Where nobody
has the file open it reads it as one that does not change, which makes no files beside it; whether that was true is
seen afterwards. Where somebody has it open it takes part in the locks, and the files beside it are there anyway.
Never writes to the file, and never leaves a log or its index where none was.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from headgate.errors import CorruptionError, StorageError
from headgate.storage.access import may
from headgate.storage.local import storage_error
from headgate.store.catalogue.database import BUSY_TIMEOUT_S
from headgate.store.catalogue.soundness import CATALOGUE

TRIES_MAX = 10
"""Who has come and gone while we read is rare; whoever stays is noticed."""

_BESIDE = {"-shm": 0, "-wal": 1, "-journal": 1}
"""Files that SQLite keeps beside one that is open, or that a killed process left, and the size that counts."""

_PAGES_WITHOUT_TABLES = 1
"""Who was killed while he made the first tables leaves so many."""

_VERSION_DIGITS_MAX = 9

_T = TypeVar("_T")


class Look:
    """Looks at the file of a catalogue. One thread at a time."""

    def __init__(self, path: Path, changes: int = 0) -> None:
        """``changes``: no number that ``changes()`` returns is as low."""
        self._path = path
        self.last = changes
        """What ``changes`` returned last."""
        self._seen: object = None
        self._watching: sqlite3.Connection | None = None

    def version(self) -> int | None:
        """Return the version of the tables; None: there are none yet.

        Raises:
            StorageError, CorruptionError, sqlite3.Error
        """
        return self._read(self._version_in)

    def copy(self) -> sqlite3.Connection:
        """Return a temporary database with everything that was in the file at one moment.

        Raises:
            StorageError, sqlite3.Error
        """
        return self._read(_copy)

    def changes(self) -> int:
        """Return a number that rises when the file has changed. Take it before what is to be kept.

        Raises:
            StorageError, sqlite3.Error
        """
        state = self._state()
        if state != self._seen:
            self._seen, self.last = state, self.last + 1
        return self.last

    def close(self) -> None:
        """Let go of the file; it is looked at again when asked for."""
        if self._watching is not None:
            self._watching.close()
            self._watching = None

    def _version_in(self, file: sqlite3.Connection) -> int | None:
        """Return the version of the tables; None: nobody has made any yet.

        Raises:
            CorruptionError: tables that were there are gone, or their version is. They must not be made anew (CT14).
        """
        if not file.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'meta'").fetchone():
            if file.execute("PRAGMA page_count").fetchone()[0] <= _PAGES_WITHOUT_TABLES:
                return None
            raise CorruptionError(str(self._path), 0, CATALOGUE, "a database without its tables that is not empty")
        found = file.execute("SELECT value FROM meta WHERE key = 'version'").fetchone()
        if found is None or not is_version(found[0]):
            raise CorruptionError(str(self._path), 0, CATALOGUE, "no version of it")
        return int(found[0])

    def _read(self, read: Callable[[sqlite3.Connection], _T]) -> _T:
        for _ in range(TRIES_MAX):
            changes = self.changes()
            if self._watching is not None:
                return read(self._watching)
            with contextlib.closing(self._connect("immutable=1")) as file:
                try:
                    found = read(file)
                except (sqlite3.DatabaseError, CorruptionError, UnicodeDecodeError):  # or somebody writes just now
                    if self.changes() == changes:
                        raise
                    continue
            if self.changes() == changes:
                return found
        raise StorageError("read", str(self._path), "it changed whenever it was read", is_transient=True)

    def _state(self) -> object:
        if self._watching is None and any(self._is_beside(suffix, size) for suffix, size in _BESIDE.items()):
            self._watching = self._watch()
        if self._watching is None:
            try:
                file = os.stat(self._path)
            except OSError as error:
                raise storage_error("read", str(self._path), error) from error
            return file.st_ino, file.st_size, file.st_mtime_ns
        self._version_in(self._watching)  # it notices changes when it reads
        return self._watching.execute("PRAGMA data_version").fetchone()[0]

    def _is_beside(self, suffix: str, bytes_min: int) -> bool:
        with contextlib.suppress(OSError):
            return os.stat(f"{self._path}{suffix}").st_size >= bytes_min
        return False

    def _watch(self) -> sqlite3.Connection:
        watching = self._connect("mode=ro")
        try:
            self._version_in(watching)
        except sqlite3.OperationalError as error:
            watching.close()
            if may_write(self._path) or not self._is_beside("-wal", _BESIDE["-wal"]):  # who had it open has gone
                raise
            left = f"what a killed process left beside it cannot be read without the right to write there ({error})"
            raise StorageError("read", str(self._path), left, is_transient=False) from error
        return watching

    def _connect(self, how: str) -> sqlite3.Connection:
        return sqlite3.connect(
            f"{self._path.absolute().as_uri()}?{how}",
            uri=True,
            timeout=BUSY_TIMEOUT_S,
            isolation_level=None,
            check_same_thread=False,
        )


def is_version(value: object) -> bool:
    """Whether a value from the table ``meta`` can be a version."""
    return isinstance(value, str) and value.isdecimal() and len(value) <= _VERSION_DIGITS_MAX


def may_write(path: Path) -> bool:
    """Return whether this process may change the catalogue at ``path``; SQLite then makes files beside it."""
    return may(path, os.R_OK | os.W_OK) and may(path.parent, os.W_OK | os.X_OK)


def _copy(file: sqlite3.Connection) -> sqlite3.Connection:
    """Return a copy that only this process can see, and that goes with its connection."""
    copy = sqlite3.connect("", isolation_level=None, check_same_thread=False)
    file.backup(copy)
    return copy
