"""One database: rows of bytes, sorted, on a local disk (RB3 to RB6 of docs/spec/rocksdb.md).

Counterpart: ``tables``, which says what the rows mean. Nothing here survives its process on purpose: what counts is in
checkpoints, so there is no write-ahead log. Every error of RocksDB is told in one sentence, with the directory.
"""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeAlias

import rocksdict
from rocksdict import Rdict

from headgate.errors import StorageError
from headgate.state.files import LocalDamage
from headgate.state.rocksdb.memory import RowSizes, SharedMemory, Use, looking_options

_FULL = ("No space left", "no space left", "ENOSPC", "Disk quota exceeded")
_DAMAGED = ("Corruption", "No such file")

_READING = "(TMPDIR, where state is only looked at)"
_FULL_HINT = (
    "no space is left on this disk; free some, or give headgate.RocksDB(dir=) a directory on a larger one " + _READING
)
_DIRECTORY_HINT = "give headgate.RocksDB(dir=) a directory that the workers may write, on a local disk " + _READING


SCAN_ROWS = 8_192

GROUP_BYTES = 2
"""With so many bytes each row says in which key group its key is (RB1)."""

Scanned: TypeAlias = tuple[list[bytes], list[bytes]]
"""Rows and their values."""


@dataclass(frozen=True, slots=True)
class FileRange:
    """Where the rows of a file of a database are.

    Attributes:
        level: of the database; files of level 0 are the newest, and may overlap.
        first_group, last_group: its rows are of key groups from the first one to the last one.
    """

    level: int
    first_group: int
    last_group: int


class Rows:
    """The rows of a database, or of a checkpoint of one, for reading."""

    def __init__(self, path: Path, db: Rdict) -> None:
        self._path = path
        self._db = db
        self.sizes = RowSizes()

    @property
    def path(self) -> Path:
        """The directory."""
        return self._path

    def get(self, rows: Sequence[bytes]) -> list[bytes | None]:
        """Return the value of each row, or None where there is none. Reads them in their order on disk."""
        found = self._get(rows)
        self.sizes.seen(found)
        return found

    def contains(self, rows: Sequence[bytes]) -> list[bool]:
        """Return which rows there are, of those that have no value."""
        return [value is not None for value in self._get(rows)]

    def _get(self, rows: Sequence[bytes]) -> list[bytes | None]:
        if not rows:
            return []
        order = sorted(range(len(rows)), key=rows.__getitem__)
        with told("read", self._path):
            values = self._db.get([rows[at] for at in order])
        found: list[bytes | None] = [None] * len(rows)
        for at, value in zip(order, values, strict=True):
            found[at] = value
        return found

    def scan(self, start: bytes, end: bytes | None) -> Iterator[Scanned]:
        """Yield the rows from ``start`` on, up to and without ``end``, in their order, some thousands at a time.

        Raises:
            LocalDamage: what is there cannot be read. The library itself would end as if there were no more.
        """
        options = _options(end)
        last = start
        with told("read", self._path):
            rows = self._db.items(from_key=start, read_opt=options)
            while found := list(islice(rows, SCAN_ROWS)):  # in parts, because each holds up the processing thread
                last = found[-1][0]
                yield [row for row, _ in found], [value for _, value in found]
            self._check_end(last, options)

    def scan_rows(self, start: bytes, end: bytes | None) -> Iterator[list[bytes]]:
        """Yield the rows as ``scan`` does, without their values, which are not even copied."""
        options = _options(end)
        last = start
        with told("read", self._path):
            rows = self._db.keys(from_key=start, read_opt=options)
            while found := list(islice(rows, SCAN_ROWS)):
                last = found[-1]
                yield found
            self._check_end(last, options)

    def some(self, start: bytes, count: int, end: bytes | None = None) -> Scanned:
        """Return the first rows from ``start`` on, ``count`` at most, none from ``end`` on.

        Raises:
            LocalDamage: see ``scan``.
        """
        options = _options(end)
        with told("read", self._path):
            rows = list(islice(self._db.items(from_key=start, read_opt=options), count))
            if len(rows) < count:
                self._check_end(rows[-1][0] if rows else start, options)
        return [row for row, _ in rows], [value for _, value in rows]

    def _check_end(self, last: bytes, options: rocksdict.ReadOptions) -> None:
        """Make sure that there is nothing behind ``last``, and that this could be seen (RB6)."""
        rest = self._db.iter(options)
        rest.seek(last + b"\0")
        rest.status()
        if rest.valid():
            raise LocalDamage(str(self._path), 0, "all rows of a range", "an end before the last one")

    def of_keys(self, prefixes: Iterable[bytes], counts: Iterable[int]) -> Iterator[tuple[bytes, bytes]]:
        """Yield the first rows that begin with each of ``prefixes``, as many as ``counts`` says.

        Raises:
            LocalDamage: there are fewer.
        """
        with told("read", self._path):
            rest = self._db.iter()
            for prefix, count in zip(prefixes, counts, strict=True):
                rest.seek(prefix)
                for number in range(count):
                    row = rest.key() if rest.valid() else None
                    if row is None or not row.startswith(prefix):
                        rest.status()
                        raise LocalDamage(str(self._path), 0, f"{count} rows of a key", f"{number} rows")
                    yield row, rest.value()
                    rest.next()

    def files(self) -> dict[str, FileRange]:
        """Return the files in which the rows are, and where each of them is."""
        with told("read", self._path):
            found = self._db.live_files()
        return {
            file["name"].lstrip("/"): FileRange(file["level"], _group(file["start_key"]), _group(file["end_key"]))
            for file in found
        }

    def close(self) -> None:
        """Give its files up. Idempotent, and never fails: nothing that is not in a checkpoint is needed again."""
        try:
            self._db.close()
        except rocksdict.DbClosedError:
            return
        except Exception as error:
            if not _is_of_the_library(error):
                raise


def _group(row: bytes) -> int:
    return int.from_bytes(row[:GROUP_BYTES], "big")


def _options(end: bytes | None) -> rocksdict.ReadOptions:
    options = rocksdict.ReadOptions()
    if end is not None:
        options.set_iterate_upper_bound(end)
    return options


class Changes:
    """Rows to be written together, or not at all."""

    def __init__(self) -> None:
        self.batch = rocksdict.WriteBatch(raw_mode=True)
        self.sizes = RowSizes()

    def put(self, rows: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Set rows."""
        assert len(rows) == len(values), "each row has a value"
        self.sizes.seen(values)
        deque(map(self.batch.put, rows, values), maxlen=0)  # a loop without Python's part of it

    def mark(self, rows: Iterable[bytes]) -> None:
        """Set rows that have no value; nobody takes them for small values."""
        put = self.batch.put
        for row in rows:
            put(row, b"")

    def delete(self, rows: Iterable[bytes]) -> None:
        """Remove rows; nothing happens where there is none."""
        delete = self.batch.delete
        for row in rows:
            delete(row)


class Database(Rows):
    """A database that is written. ``rows_written``: how many rows were written or removed so far."""

    def __init__(self, path: Path, memory: SharedMemory, use: Use = Use.SEARCHED) -> None:
        """Make it in the directory ``path``, which does not exist.

        Raises:
            StorageError
        """
        self._path = path
        self._memory = memory
        self._use = use
        self.sizes = RowSizes()
        self.rows_written = 0
        self._open(is_new=True)

    def _open(self, *, is_new: bool) -> None:
        with told("open", self._path):
            self._db = Rdict(str(self._path), self._memory.options(is_new=is_new, use=self._use))
        options = rocksdict.WriteOptions()
        options.disable_wal = True  # RB4
        self._db.set_write_options(options)

    def write(self, changes: Changes) -> None:
        """Write ``changes``.

        Raises:
            StorageError
        """
        count = len(changes.batch)
        if count:
            with told("write", self._path):
                self._written(changes.batch)
            self.sizes.add(changes.sizes)
            self.rows_written += count

    def _written(self, batch: rocksdict.WriteBatch) -> None:
        self._db.write(batch)

    def checkpoint(self, path: Path) -> None:
        """Have all that was written also in the directory ``path``: its files are links, so it takes no room.

        Raises:
            StorageError
        """
        try:
            with told("write", path):
                rocksdict.Checkpoint(self._db).create_checkpoint(str(path))
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise

    def opened(self, path: Path) -> Rows:
        """Open a checkpoint for reading. In any thread.

        Raises:
            LocalDamage: it is damaged.
            StorageError
        """
        _require(path)
        return opened(path, self._memory)

    def check(self, path: Path) -> dict[str, FileRange]:
        """Make sure that the files of a checkpoint fit together: none is missing or too short. In any thread.

        Returns:
            The files in which the rows are.

        Raises:
            LocalDamage: they do not.
            StorageError
        """
        _require(path)
        with closing(_opened(path, looking_options())) as rows:
            return rows.files()

    def go_on_with(self, path: Path) -> None:
        """Have what is in the directory ``path``, instead of what it has. ``path`` becomes this one's.

        Raises:
            LocalDamage, StorageError
        """
        self.close()
        try:
            shutil.rmtree(self._path)
            path.rename(self._path)
        except OSError as error:  # somebody removed the directory
            raise disk_error("write", self._path, error) from error
        self._open(is_new=False)


def opened(path: Path, memory: SharedMemory) -> Rows:
    """Open the database in the directory ``path`` for reading. In any thread.

    Raises:
        LocalDamage: it is damaged.
        StorageError
    """
    return _opened(path, memory.options(is_new=False))


def _opened(path: Path, options: rocksdict.Options) -> Rows:
    with told("open", path):
        return Rows(path, Rdict(str(path), options, access_type=rocksdict.AccessType.read_only(False)))


def _require(path: Path) -> None:
    """Refuse a checkpoint that is not there any more: the library would make it."""
    if not path.is_dir():
        raise StorageError("open", str(path), "it was removed when its worker ended", False)


def disk_error(operation: str, path: Path, error: OSError) -> LocalDamage | StorageError:
    """Say what the system says of a file beside the library's own."""
    return _error(operation, path, error.strerror or str(error))


def directory_error(path: Path, error: OSError) -> StorageError:
    """Say why no files can be put into a directory, and how to choose another one."""
    text = error.strerror or str(error)
    hint = _FULL_HINT if any(word in text for word in _FULL) else f"{text}; {_DIRECTORY_HINT}"
    return StorageError("open", str(path), hint, False)


@contextmanager
def told(operation: str, path: Path) -> Iterator[None]:
    """Say what RocksDB says in the words of this project: one sentence, with the directory (RB8)."""
    try:
        yield
    except rocksdict.DbClosedError as error:
        raise StorageError(operation, str(path), "the database is closed already", False) from error
    except Exception as error:
        if not _is_of_the_library(error):
            raise
        raise _error(operation, path, str(error)) from error


def _is_of_the_library(error: Exception) -> bool:
    """Whether RocksDB says it: its errors have no type of their own."""
    return type(error) is Exception


def _error(operation: str, path: Path, text: str) -> LocalDamage | StorageError:
    if any(word in text for word in _FULL):
        return StorageError(operation, str(path), _FULL_HINT, False)
    if operation in ("open", "read") and any(word in text for word in _DAMAGED):
        return LocalDamage(str(path), 0, "a RocksDB database", " ".join(text.split()))
    return StorageError(operation, str(path), text, False)
