"""What all databases of one worker may use of its memory, together (RB5 of docs/spec/rocksdb.md).

A half is RocksDB's, a quarter if all databases are of numbers: blocks that were read, filters and indexes, rows that
are not in a file yet. The rest is that of the caches in front, each of which has an equal share.
"""

from __future__ import annotations

import resource
from collections.abc import Sequence
from enum import Enum

import rocksdict

from headgate.state.rocksdb.blocks import FORMAT_VERSION

_ENGINE_SHARE, _ENGINE_SHARE_OF_NUMBERS = 2, 4
"""One part in so many is RocksDB's. It reads numbers where they are (RB28), and keeps no blocks of them."""
_WRITE_SHARE = 8
"""Of the memory, one part in so many is for rows that are not in a file yet."""
_WRITE_BUFFER_MAX = 64 << 20
_WRITE_BUFFER_MIN = 64 << 10
_LOG_BYTES_MAX = 1 << 20
_MERGED_FILES = 16
"""So many new files wait to be merged with all others, where a row is found by its name (RB14): a filter tells at once
that a file has not got it. Each file that waits costs a search its time; each merge writes the whole database."""
_MERGED_FILES_OF_NUMBERS = 8
"""The same where reading a row costs little more than asking the filters of the files that wait (RB28)."""
_SLOW, _STOP = 2, 3
"""So many times as many slow writing down, and stop it."""
_NEW_ROWS_FILTER = 0.03
"""Of the memory of rows that are not in a file yet, for a filter: most rows that are looked up are not there."""
METADATA_BYTES = 64 << 10
"""Of a part of a filter or index, about. Smaller ones are more to search, larger ones more to read (RB25)."""
_OPEN_FILES_MAX = 128
"""Of one database, unless a worker has many of them."""
_OPEN_FILES_MIN = 16
_LOOKING_FILES = 20
"""So many at least: fewer are opened to see whether the files of a database fit together, and all have their sizes."""
NOTES_BYTES_MAX = 12 << 10
"""Of a MANIFEST, to which RocksDB adds a note of each file that comes or goes; then it begins a new one (RB26). So what
describes a database of some GB has room in the manifest of a checkpoint (C13), and is no file of its own."""
_FILES_LIMIT_MAX = 1 << 16


def open_files(databases_count: int, limit: int) -> int:
    """Return how many files a database may have open, which is made as the ``databases_count``-th of its process.

    ``limit``: of the process, 1,024 as a rule. Sixteen databases have about half of them; the others are for whoever
    reads snapshots, for connections, and for the user.
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
        blocks.set_cache_index_and_filter_blocks(True)
        blocks.set_pin_l0_filter_and_index_blocks_in_cache(True)
        blocks.set_bloom_filter(10, False)
        # in parts (RB25): in one it is some MB of a large file, read anew for every few rows when it has no room
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
        if use is Use.NUMBERS:  # little is saved by packing them, and what is not packed is read where it is (RB28)
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
        options.set_max_manifest_file_size(NOTES_BYTES_MAX)
        options.set_keep_log_file_num(1)
        options.set_max_log_file_size(_LOG_BYTES_MAX)
        options.set_stats_dump_period_sec(0)
        return options


def looking_options() -> rocksdict.Options:
    """Return the options with which it is seen whether the files of a database fit together, and nothing else.

    No thread is begun for every file, and nothing is read to find out what is to be merged.
    """
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(False)
    options.set_paranoid_checks(True)
    options.set_max_open_files(_LOOKING_FILES)
    options.set_max_file_opening_threads(1)
    options.set_skip_stats_update_on_db_open(True)
    return options
