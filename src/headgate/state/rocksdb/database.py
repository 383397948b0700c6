"""One RocksDB database, sorted rows of bytes on a local disk, and the memory that all of a worker share.

Nothing here survives its process on purpose: what counts is in checkpoints, so there is no write-ahead log. Every
error of RocksDB becomes one sentence with the directory. Half of the memory is RocksDB's, a quarter if all databases
are of numbers: blocks that were read, filters and indexes, rows that are not in a file yet. The rest belongs to the
caches in front, each of which has an equal share. Source: docs/spec/rocksdb.md.
"""

from __future__ import annotations

import resource
import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import TypeAlias

import rocksdict
from rocksdict import Rdict

from headgate.dataclass import dataclass
from headgate.errors import StorageError
from headgate.state.rocksdb.sst_checksums import FORMAT_VERSION
from headgate.state.snapshot import LocalDamage

_ENGINE_SHARE, _ENGINE_SHARE_OF_NUMBERS = 2, 4
"""One part in so many is RocksDB's. It reads numbers where they are, and keeps no blocks of them."""
_WRITE_SHARE = 8
"""Of the memory, one part in so many is for rows that are not in a file yet."""
_WRITE_BUFFER_MAX = 64 << 20
_WRITE_BUFFER_MIN = 64 << 10
_LOG_BYTES_MAX = 1 << 20
_MERGED_FILES = 16
"""So many new files wait to be merged with all others, where a row is found by its name: a filter tells at once
that a file has not got it. Each file that waits costs a search its time; each merge writes the whole database."""
_MERGED_FILES_OF_NUMBERS = 8
"""The same where reading a row costs little more than asking the filters of the files that wait."""
_SLOW, _STOP = 2, 3
"""So many times as many slow writing down, and stop it."""
_NEW_ROWS_FILTER = 0.03
"""Of the memory of rows that are not in a file yet, for a filter: most rows that are looked up are not there."""
METADATA_BYTES = 64 << 10
"""Of a part of a filter or index, about. Smaller ones are more to search, larger ones more to read."""
_OPEN_FILES_MAX = 128
"""Of one database, unless a worker has many of them."""
_OPEN_FILES_MIN = 16
_INSPECTION_FILES = 20
"""So many at least: fewer are opened to see whether the files of a database fit together, and all have their sizes."""
MANIFEST_BYTES_MAX = 12 << 10
"""Of a MANIFEST, to which RocksDB adds a note of each file that comes or goes; then it begins a new one. So what
describes a database of some GB has room in the manifest of a checkpoint, and is no file of its own."""
_FILES_LIMIT_MAX = 1 << 16


def open_files(databases_count: int, limit: int) -> int:
    """Return how many files a database may have open, which is made as the ``databases_count``-th of its process.

    ``limit``: of the process, 1,024 as a rule. Sixteen databases have about half of them; the others are for
    reading snapshots, for connections, and for the user.
    """
    share = limit * 3 // 16 // max(1, databases_count)
    return max(_OPEN_FILES_MIN, min(_OPEN_FILES_MAX, share))


def _files_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _FILES_LIMIT_MAX if soft == resource.RLIM_INFINITY else min(soft, _FILES_LIMIT_MAX)


_REMEMBERED_ROWS = 1 << 20


class Use(Enum):
    """What a database is for."""

    SEARCHED = "rows are searched for by what they begin with, or read in order"
    LOOKED_UP = "rows are looked up by their whole keys"
    NUMBERS = "the same, and keys and values are numbers"


class RowSizes:
    """How large the values of a database are, about: those that were read and written lately."""

    def __init__(self) -> None:
        self._rows = self._bytes = 0

    def seen(self, values: Sequence[bytes | None]) -> None:
        """Take note of ``values``; what is None is none."""
        found = [len(value) for value in values if value is not None]
        self._add(len(found), sum(found))

    def add(self, others: RowSizes) -> None:
        """Take note of what ``others`` have seen."""
        self._add(others._rows, others._bytes)

    def _add(self, rows: int, size_bytes: int) -> None:
        self._rows += rows
        self._bytes += size_bytes
        # sizes of long ago count less and less
        if self._rows > _REMEMBERED_ROWS:
            self._rows //= 2
            self._bytes //= 2

    @property
    def is_known(self) -> bool:
        """Whether any value has been seen."""
        return self._rows > 0

    @property
    def mean_bytes(self) -> int:
        """The mean size of a value."""
        return self._bytes // max(1, self._rows)


class SharedMemory:
    """The memory of one worker. ``cache_bytes``: what one cache in front of a database may hold now."""

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._engine_share = _ENGINE_SHARE_OF_NUMBERS
        self._cache = rocksdict.Cache(self._engine_bytes)
        write_bytes = memory_bytes // _WRITE_SHARE
        # without stalls: where there is no room, rows go to a file sooner, and no write waits
        self._buffers = rocksdict.WriteBufferManager.new_write_buffer_manager_with_cache(
            write_bytes, False, self._cache
        )
        self._buffer_bytes = min(_WRITE_BUFFER_MAX, max(_WRITE_BUFFER_MIN, write_bytes // 2))
        self._databases_count = 0

    @property
    def cache_bytes(self) -> int:
        """What one cache in front of a database may hold."""
        return (self._memory_bytes - self._engine_bytes) // max(1, self._databases_count)

    @property
    def _engine_bytes(self) -> int:
        return self._memory_bytes // self._engine_share

    def joined(self, use: Use) -> None:
        """One more database shares it."""
        self._databases_count += 1
        # for good: the caches in front ask for their share each time, so theirs shrinks at once
        if use is not Use.NUMBERS and self._engine_share != _ENGINE_SHARE:
            self._engine_share = _ENGINE_SHARE
            self._cache.set_capacity(self._engine_bytes)

    def options(self, *, is_new: bool = True, use: Use = Use.SEARCHED) -> rocksdict.Options:
        """Return the options of a database.

        Args:
            is_new: it is to be made.
            use: what it is for.
        """
        blocks = rocksdict.BlockBasedOptions()
        blocks.set_block_cache(self._cache)
        # else each open file would have its index and filter outside of ``memory=``
        blocks.set_cache_index_and_filter_blocks(True)
        blocks.set_pin_l0_filter_and_index_blocks_in_cache(True)
        blocks.set_bloom_filter(10, False)
        # in parts: in one it is some MB of a large file, read again for every few rows when it has no room
        blocks.set_index_type(rocksdict.BlockBasedIndexType.two_level_index_search())
        blocks.set_partition_filters(True)
        blocks.set_metadata_block_size(METADATA_BYTES)
        blocks.set_pin_top_level_index_and_filter(True)
        blocks.set_format_version(FORMAT_VERSION)
        blocks.set_checksum_type(rocksdict.ChecksumType.xxh3())
        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(is_new)
        options.set_block_based_table_factory(blocks)
        options.set_write_buffer_manager(self._buffers)
        options.set_write_buffer_size(self._buffer_bytes)
        if use is Use.NUMBERS:  # little is saved by packing them, and what is not packed is read where it is
            options.set_compression_type(rocksdict.DBCompressionType.none())
            options.set_allow_mmap_reads(True)
        else:
            options.set_compression_type(rocksdict.DBCompressionType.lz4())
        options.set_memtable_whole_key_filtering(True)
        options.set_memtable_prefix_bloom_ratio(_NEW_ROWS_FILTER)
        if use is not Use.SEARCHED:
            merged_files = _MERGED_FILES_OF_NUMBERS if use is Use.NUMBERS else _MERGED_FILES
            options.set_level_zero_file_num_compaction_trigger(merged_files)
            options.set_level_zero_slowdown_writes_trigger(_SLOW * merged_files)
            options.set_level_zero_stop_writes_trigger(_STOP * merged_files)
        options.set_max_background_jobs(2)
        options.set_paranoid_checks(True)
        options.set_max_open_files(open_files(self._databases_count, _files_limit()))
        options.set_max_manifest_file_size(MANIFEST_BYTES_MAX)
        options.set_keep_log_file_num(1)
        options.set_max_log_file_size(_LOG_BYTES_MAX)
        options.set_stats_dump_period_sec(0)
        return options


def inspection_options() -> rocksdict.Options:
    """Return the options with which it is seen whether the files of a database fit together, and nothing else.

    No thread is begun for every file, and nothing is read to find out what is to be merged.
    """
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(False)
    options.set_paranoid_checks(True)
    options.set_max_open_files(_INSPECTION_FILES)
    options.set_max_file_opening_threads(1)
    options.set_skip_stats_update_on_db_open(True)
    return options


_FULL = ("No space left", "no space left", "ENOSPC", "Disk quota exceeded")
_DAMAGED = ("Corruption", "No such file")

_READING = "(TMPDIR, where state is only looked at)"
_FULL_HINT = (
    "no space is left on this disk; free some, or give headgate.RocksDB(dir=) a directory on a larger one " + _READING
)
_DIRECTORY_HINT = "give headgate.RocksDB(dir=) a directory that the workers may write, on a local disk " + _READING


SCAN_ROWS = 8_192

GROUP_BYTES = 2
"""With so many bytes each row says in which key group its key is."""

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
        with rocksdb_errors("read", self._path):
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
        with rocksdb_errors("read", self._path):
            rows = self._db.items(from_key=start, read_opt=options)
            while found := list(islice(rows, SCAN_ROWS)):  # in parts, because each holds up the processing thread
                last = found[-1][0]
                yield [row for row, _ in found], [value for _, value in found]
            self._check_end(last, options)

    def scan_rows(self, start: bytes, end: bytes | None) -> Iterator[list[bytes]]:
        """Yield the rows as ``scan`` does, without their values, which are not even copied."""
        options = _options(end)
        last = start
        with rocksdb_errors("read", self._path):
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
        with rocksdb_errors("read", self._path):
            rows = list(islice(self._db.items(from_key=start, read_opt=options), count))
            if len(rows) < count:
                self._check_end(rows[-1][0] if rows else start, options)
        return [row for row, _ in rows], [value for _, value in rows]

    def _check_end(self, last: bytes, options: rocksdict.ReadOptions) -> None:
        """Make sure that there is nothing after ``last``, and that this could be seen."""
        rest = self._db.iter(options)
        rest.seek(last + b"\0")
        # raises what stopped the iterator; ``valid`` alone would say that there are no more rows
        rest.status()
        if rest.valid():
            raise LocalDamage(str(self._path), 0, "all rows of a range", "an end before the last one")

    def of_keys(self, prefixes: Iterable[bytes], counts: Iterable[int]) -> Iterator[tuple[bytes, bytes]]:
        """Yield the first rows that begin with each of ``prefixes``, as many as ``counts`` says.

        Raises:
            LocalDamage: there are fewer.
        """
        with rocksdb_errors("read", self._path):
            rest = self._db.iter()
            for prefix, count in zip(prefixes, counts, strict=True):
                rest.seek(prefix)
                for number in range(count):
                    row = rest.key() if rest.valid() else None
                    if row is None or not row.startswith(prefix):
                        # raises if damage ended the iterator; else rows are missing
                        rest.status()
                        raise LocalDamage(str(self._path), 0, f"{count} rows of a key", f"{number} rows")
                    yield row, rest.value()
                    rest.next()

    def files(self) -> dict[str, FileRange]:
        """Return the files in which the rows are, and where each of them is."""
        with rocksdb_errors("read", self._path):
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
            if not _is_rocksdb_error(error):
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
        """Set rows that have no value; they do not count as small values."""
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
        with rocksdb_errors("open", self._path):
            self._db = Rdict(str(self._path), self._memory.options(is_new=is_new, use=self._use))
        options = rocksdict.WriteOptions()
        options.disable_wal = True
        self._db.set_write_options(options)

    def write(self, changes: Changes) -> None:
        """Write ``changes``.

        Raises:
            StorageError
        """
        count = len(changes.batch)
        if count:
            with rocksdb_errors("write", self._path):
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
            with rocksdb_errors("write", path):
                rocksdict.Checkpoint(self._db).create_checkpoint(str(path))
        except BaseException:
            # half a checkpoint has no owner that would remove it: a frozen state takes over whole ones only
            shutil.rmtree(path, ignore_errors=True)
            raise

    def opened(self, path: Path) -> Rows:
        """Open a checkpoint for reading. In any thread.

        Raises:
            LocalDamage: it is damaged.
            StorageError
        """
        _require_directory(path)
        return open_read_only(path, self._memory)

    def check(self, path: Path) -> dict[str, FileRange]:
        """Make sure that the files of a checkpoint fit together: none is missing or too short. In any thread.

        Returns:
            The files in which the rows are.

        Raises:
            LocalDamage: they do not.
            StorageError
        """
        _require_directory(path)
        with closing(_open_with(path, inspection_options())) as rows:
            return rows.files()

    def continue_from(self, path: Path) -> None:
        """Have what is in the directory ``path``, instead of what it has. ``path`` becomes this one's.

        Raises:
            LocalDamage, StorageError
        """
        # closed first: its directory gives way to that of the checkpoint; an error in between ends the worker
        self.close()
        try:
            shutil.rmtree(self._path)
            path.rename(self._path)
        except OSError as error:  # the directory was removed
            raise disk_error("write", self._path, error) from error
        self._open(is_new=False)


def open_read_only(path: Path, memory: SharedMemory) -> Rows:
    """Open the database in the directory ``path`` for reading. In any thread.

    Raises:
        LocalDamage: it is damaged.
        StorageError
    """
    return _open_with(path, memory.options(is_new=False))


def _open_with(path: Path, options: rocksdict.Options) -> Rows:
    with rocksdb_errors("open", path):
        return Rows(path, Rdict(str(path), options, access_type=rocksdict.AccessType.read_only(False)))


def _require_directory(path: Path) -> None:
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
def rocksdb_errors(operation: str, path: Path) -> Iterator[None]:
    """Say what RocksDB says in the words of this project: one sentence, with the directory."""
    try:
        yield
    except rocksdict.DbClosedError as error:
        # in an upload thread, of a worker that has ended meanwhile
        raise StorageError(operation, str(path), "the database is closed already", False) from error
    except Exception as error:
        if not _is_rocksdb_error(error):
            raise
        raise _error(operation, path, str(error)) from error


def _is_rocksdb_error(error: Exception) -> bool:
    """Whether RocksDB says it: its errors have no type of their own."""
    return type(error) is Exception


def _error(operation: str, path: Path, text: str) -> LocalDamage | StorageError:
    if any(word in text for word in _FULL):
        return StorageError(operation, str(path), _FULL_HINT, False)
    if operation in ("open", "read") and any(word in text for word in _DAMAGED):
        return LocalDamage(str(path), 0, "a RocksDB database", " ".join(text.split()))
    return StorageError(operation, str(path), text, False)
