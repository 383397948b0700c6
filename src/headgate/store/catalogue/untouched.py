"""The file of a catalogue that stays as it is until somebody writes: what is read is read from a copy.

Counterpart: ``opening`` opens one of an older version, or one that may not be written, so; ``looking`` takes the copy.
Source: rules CT3, CT4 and CT8 of docs/spec/stream-store.md. Never raises a file for whoever only reads.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from sqlalchemy.engine import Connection

from headgate.store.catalogue import soundness
from headgate.store.catalogue.access import Database
from headgate.store.catalogue.database import FileDatabase, errors_of
from headgate.store.catalogue.looking import Look, may_write
from headgate.store.catalogue.private import PrivateDatabase
from headgate.store.catalogue.tables import CATALOGUE_VERSION
from headgate.store.catalogue.versions import make_tables


class UntouchedDatabase:
    """One process's access to a catalogue that it has not written to yet; once it is raised, to the file itself."""

    def __init__(self, path: Path, open_to_write: Callable[[Path], FileDatabase]) -> None:
        """``open_to_write`` raises the file to this version and opens it."""
        self._where = path
        self._open_to_write = open_to_write
        self._file: FileDatabase | None = None
        self._copy: PrivateDatabase | None = None
        self._copied_at = 0
        self._look = Look(path)
        self._pid = os.getpid()
        self._lock = threading.Lock()

    @property
    def path(self) -> str:
        """See ``Database``."""
        return str(self._where)

    @property
    def is_untouched(self) -> bool:
        """See ``Database``."""
        self._now()
        return self._file is None

    @contextlib.contextmanager
    def read(self) -> Iterator[Connection]:
        """See ``Database``."""
        with self._now().read() as connection:
            yield connection

    @contextlib.contextmanager
    def write(self) -> Iterator[Connection]:
        """See ``Database``. The first one raises the file.

        Raises:
            UsageError: it may not be written, or a newer release has raised it.
        """
        with self._raised().write() as connection:
            yield connection

    def sound_part(self, connection: Connection) -> AbstractContextManager[tuple[Connection, list[str]]]:
        """See ``Database``."""
        return soundness.sound_part(connection)

    def changes(self) -> int:
        """See ``Database``. Those of a ``FileDatabase`` are higher."""
        self._notice_fork()
        with self._lock, errors_of(self.path, "read"):
            return self._look.changes() if self._file is None else self._file.changes()

    def close(self) -> None:
        """See ``Database``."""
        self._notice_fork()
        with self._lock:
            self._let_go()
            if self._file is not None:
                self._file.close()

    def _now(self) -> Database:
        """Return what holds the tables as they are now."""
        self._notice_fork()
        with self._lock:
            if self._file is not None:
                return self._file
            with errors_of(self.path, "read"):
                changes = self._look.changes()
                if self._copy is not None and changes == self._copied_at:
                    return self._copy
                if self._look.version() == CATALOGUE_VERSION and may_write(self._where):
                    self._file = FileDatabase(self._where)  # another process has raised it
                    self._let_go()
                    return self._file
                self._copy, self._copied_at = self._take_copy(), changes
                return self._copy

    def _take_copy(self) -> PrivateDatabase:
        """Copy the file and raise the copy. Who reads from the former one goes on."""
        copy = PrivateDatabase(self.path, self._look.copy())
        with copy.write() as connection:
            make_tables(connection, str(self._where.parent))
        return copy

    def _raised(self) -> FileDatabase:
        self._notice_fork()
        with self._lock:
            if self._file is None:
                self._file = self._open_to_write(self._where)
                self._let_go()
            return self._file

    def _let_go(self) -> None:
        """Forget the copy; it goes when nobody reads from it any more."""
        self._copy = None
        self._look.close()

    def _notice_fork(self) -> None:
        """Look anew in a child (CT4): before any lock, the parent may hold one."""
        if os.getpid() != self._pid:
            self._pid = os.getpid()
            self._lock, self._copy, self._look = threading.Lock(), None, Look(self._where, self._look.last)
