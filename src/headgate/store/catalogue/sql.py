"""A catalogue in SQL: each verb is one database transaction around one function of the tables; how a file is opened.

Counterparts: ``base.Catalogue`` declares the verbs; the functions that implement them are in the modules of the
tables, each under ``tables.implements``. A catalogue file is created under a lock when there is none. Source:
docs/spec/stream-store.md §3. Never decides: that is ``protocol.store``, asked inside the transaction that applies its
answer.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any, TypeVar

from sqlalchemy.engine import Connection

from headgate.errors import CorruptionError, StorageError, UsageError
from headgate.storage.local import storage_error
from headgate.storage.local_files import access_in, has_access, open_created, open_lock
from headgate.store.catalogue import (
    audit,
    chunk_index,
    group_rows,
    integrity,
    pipeline_rows,
    scaling,
    shared_transaction_rows,
    stream_rows,
    transaction_rows,
    truncation,
)
from headgate.store.catalogue.audit import SqlAudit
from headgate.store.catalogue.base import VERBS, Catalogue, Verb
from headgate.store.catalogue.integrity import CATALOGUE
from headgate.store.catalogue.sqlite import (
    BUSY_TIMEOUT_S,
    Database,
    FileDatabase,
    MemoryDatabase,
    translate_errors,
)
from headgate.store.catalogue.tables import IMPLEMENTATIONS, check_version, make_tables

LOCK_TIMEOUT_S = 60.0
"""Creating a store takes some milliseconds."""

_PAUSE_S = 0.02


def wait_for_create_lock(lock: IO[bytes], catalogue: Path) -> None:
    """Take ``lock``, which guards the making of ``catalogue``; it is free again when the file is closed.

    Raises:
        StorageError: another process holds it for too long; the message names it.
    """
    deadline_s = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() >= deadline_s:
                path = catalogue.with_suffix(".lock")
                raise StorageError(
                    "open",
                    str(catalogue),
                    f"{lock_holder(lock)} has held the lock {path} for more than {LOCK_TIMEOUT_S:g} s; end that "
                    "process and try again",
                ) from error
        time.sleep(_PAUSE_S)


def lock_holder(lock: IO[bytes]) -> str:
    """Return who holds a lock on the file, for people, as far as the system tells."""
    file = os.fstat(lock.fileno())
    device = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    try:
        lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        pid = next(int(words[4]) for words in lines if words[1] == "FLOCK" and words[5] == device)
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (OSError, StopIteration, ValueError, IndexError):
        return "another process"
    return f"process {pid} ({command[:200]})"


READ_TRIES_MAX = 10
"""A process that comes and goes while we read is rare; one that stays is noticed."""

_BESIDE = {"-shm": 0, "-wal": 1, "-journal": 1}
"""Files that SQLite keeps beside one that is open, or that a killed process left, and the size that counts."""

_PAGES_WITHOUT_TABLES = 1
"""Who was killed while he made the first tables leaves so many."""

_VERSION_DIGITS_MAX = 9

_T = TypeVar("_T")


class CatalogueFile:
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
        """Return the version of the tables; None: there are none yet.

        Raises:
            CorruptionError: tables that were there are gone, or their version is. They must not be made again.
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
        for _ in range(READ_TRIES_MAX):
            changes = self.changes()
            if self._watching is not None:
                return read(self._watching)
            # immutable: SQLite takes no lock and makes no file; what it read counts only if nothing has changed since
            with contextlib.closing(self._connect("immutable=1")) as file:
                try:
                    found = read(file)
                except (sqlite3.DatabaseError, CorruptionError, UnicodeDecodeError):  # or a writer is at work
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
    return has_access(path, os.R_OK | os.W_OK) and has_access(path.parent, os.W_OK | os.X_OK)


def _copy(file: sqlite3.Connection) -> sqlite3.Connection:
    """Return a copy that only this process can see, and that goes with its connection."""
    copy = sqlite3.connect("", isolation_level=None, check_same_thread=False)
    file.backup(copy)
    return copy


class ReadonlyDatabase:
    """One process's access to a catalogue that it may not write; once it may, to the file itself. See ``Database``."""

    def __init__(self, path: Path, open_to_write: Callable[[Path], FileDatabase]) -> None:
        """``open_to_write`` opens the file, or says why it cannot be written."""
        self._where = path
        self._open_to_write = open_to_write
        self._file: FileDatabase | None = None
        self._copy: MemoryDatabase | None = None
        self._copied_at = 0
        self._look = CatalogueFile(path)
        self._pid = os.getpid()
        self._lock = threading.Lock()

    @property
    def path(self) -> str:
        return str(self._where)

    @property
    def is_untouched(self) -> bool:
        self._now()
        return self._file is None

    @contextlib.contextmanager
    def read(self) -> Iterator[Connection]:
        with self._now().read() as connection:
            yield connection

    @contextlib.contextmanager
    def write(self) -> Iterator[Connection]:
        """See ``Database``.

        Raises:
            UsageError: it may not be written.
        """
        with self._opened_to_write().write() as connection:
            yield connection

    def readable_part(self, connection: Connection) -> AbstractContextManager[tuple[Connection, list[str]]]:
        return integrity.readable_part(connection)

    def changes(self) -> int:
        """See ``Database``. Those of a ``FileDatabase`` are higher."""
        self._notice_fork()
        with self._lock, translate_errors(self.path, "read"):
            return self._look.changes() if self._file is None else self._file.changes()

    def close(self) -> None:
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
            with translate_errors(self.path, "read"):
                # before the copy is made: a change in between is noticed by the next look
                changes = self._look.changes()
                if self._copy is not None and changes == self._copied_at:
                    return self._copy
                if may_write(self._where):
                    self._file = FileDatabase(self._where)  # it may be written since
                    self._let_go()
                    return self._file
                self._copy, self._copied_at = self._take_copy(), changes
                return self._copy

    def _take_copy(self) -> MemoryDatabase:
        """Copy the file. Readers of the former copy go on."""
        check_version(self._look.version() or 0, str(self._where.parent))
        return MemoryDatabase(self.path, self._look.copy(), str(self._where.parent))

    def _opened_to_write(self) -> FileDatabase:
        self._notice_fork()
        with self._lock:
            if self._file is None:
                self._file = self._open_to_write(self._where)
                self._let_go()
            return self._file

    def _let_go(self) -> None:
        """Forget the copy; it goes with its last reader."""
        self._copy = None
        self._look.close()

    def _notice_fork(self) -> None:
        """Look again in a child: before any lock, the parent may hold one."""
        if os.getpid() != self._pid:
            self._pid = os.getpid()
            self._lock, self._copy, self._look = threading.Lock(), None, CatalogueFile(self._where, self._look.last)


def open_database(path: Path) -> Database:
    """Open the catalogue at ``path``, creating it when there is none. One that is there is not changed.

    Raises:
        UsageError: another release wrote it, it may not be read, or it is to be created and its place is not writable.
        StorageError: it must be created, and another process holds its lock.
        CorruptionError: it is not a catalogue.
    """
    if not os.path.exists(path):
        return open_to_write(path)
    if not has_access(path, os.R_OK):
        raise UsageError(f"stream store at {path.parent} cannot be opened: Permission denied; ask its owner for access")
    with translate_errors(str(path), "read"), contextlib.closing(CatalogueFile(path)) as look:
        version = look.version()
    if version is None:
        return open_to_write(path)
    check_version(version, str(path.parent))
    return FileDatabase(path) if may_write(path) else ReadonlyDatabase(path, open_to_write)


def open_to_write(path: Path) -> FileDatabase:
    """Open the catalogue at ``path``, created when there is none.

    Raises:
        UsageError: another release wrote it, or it may not be written.
        StorageError: another process holds its lock.
    """
    try:
        with os.fdopen(open_lock(path.with_suffix(".lock")), "ab") as lock:
            wait_for_create_lock(lock, path)  # two first openers: switching to WAL does not wait by itself
            if not os.path.exists(path):  # closing another descriptor would free the locks of this process
                # SQLite gives its other files (-wal, -shm) the mode of this one.
                os.close(open_created(path, os.O_RDWR | os.O_CREAT, access_in(path.parent)))
            elif not has_access(path, os.W_OK):
                raise PermissionError(13, "Permission denied")
            database = FileDatabase(path)
            with database.write() as connection:
                make_tables(connection)
    except OSError as error:
        raise UsageError(
            f"stream store at {path.parent} cannot be written to: {error.strerror}; use another store, or ask for the "
            "right to write there"
        ) from error
    return database


_IMPLEMENTED_IN = (
    *(audit, chunk_index, group_rows, pipeline_rows, scaling, shared_transaction_rows, stream_rows),
    *(transaction_rows, truncation),
)

assert IMPLEMENTATIONS.keys() == VERBS.keys(), f"{_IMPLEMENTED_IN} implement {sorted(IMPLEMENTATIONS)}"


class SqlCatalogue(Catalogue):
    """A catalogue with its tables in ``database``."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @classmethod
    def open(cls, path: Path) -> SqlCatalogue:
        """Open the SQLite file at ``path``, creating it when there is none; see ``open_database``."""
        return cls(open_database(path))

    @property
    def path(self) -> str:
        return self._database.path

    @property
    def is_untouched(self) -> bool:
        return self._database.is_untouched

    def close(self) -> None:
        self._database.close()

    def changes(self) -> int:
        return self._database.changes()

    def carry_out(self, verb: Verb, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        database = self._database
        with database.read() if verb.is_reading else database.write() as connection:
            return IMPLEMENTATIONS[verb.name](connection, *arguments, **named)

    @contextlib.contextmanager
    def audit(self) -> Iterator[SqlAudit]:
        with self._database.read() as connection, self._database.readable_part(connection) as (sound, damage):
            yield SqlAudit(sound, [(self.path, problem) for problem in damage])


def memory_catalogue(name: str) -> SqlCatalogue:
    """Return a new, empty catalogue in memory, called ``name`` in messages. For the simulator and for tests."""
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    database = MemoryDatabase(name, connection, name)
    with database.write() as tables:
        make_tables(tables)
    return SqlCatalogue(database)
