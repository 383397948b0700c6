"""Rows by window in RocksDB: ``key group | table | window | suffix``, the whole row as the value.

In front are the windows of the backend in memory. When they have no room any more, all that they hold goes to the
database; what comes later is held in memory again, and goes there, too, when it is much, or to a checkpoint. A window
that fires is in memory whole if it has room there, else some key groups of it at a time. Counterparts:
``backend.WindowBackend`` and ``operators.windows.aligned_windows``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np
import pyarrow as pa

from headgate.state.backend import META, Ownership, WindowRows, restored_batches
from headgate.state.descriptors import KeyColumns, Section
from headgate.state.key_hash import Words, hash_columns, key_groups
from headgate.state.key_index import make_key_index
from headgate.state.memory.window_backend import MemoryMergedRows, MemoryWindowRows
from headgate.state.rocksdb.database import Changes, Database
from headgate.state.rocksdb.database_restore import continue_from
from headgate.state.rocksdb.database_snapshot import ExtraSections, FrozenDatabase
from headgate.state.rocksdb.local_databases import LocalDatabase
from headgate.state.rocksdb.row_encoding import (
    PREFIX_BYTES,
    TIME_BYTES,
    decode_groups,
    decode_times,
    encode_columns,
    encode_times,
    places_of,
)
from headgate.state.rocksdb.tables import record_table
from headgate.state.snapshot import FrozenState, LocalDamage, StoredFiles
from headgate.state.values import Mask
from headgate.state.window_aggregates import (
    Accumulator,
    AggTable,
    MergedRows,
    merge_rows,
    merged_rows,
    partial_batch,
    partial_rows,
    partial_values,
    split_by_window,
)

SUFFIX_AT = PREFIX_BYTES + TIME_BYTES
"""Where the suffix of a row begins."""


class StoredWindows:
    """The rows that are in the database, by window."""

    def __init__(self, database: Database, section: Section, max_parallelism: int) -> None:
        self.table = record_table(section)
        self._database = database
        self._max_parallelism = max_parallelism
        self._counts: dict[int, int] = {}
        self._groups: dict[int, Mask] = {}
        """The key groups that have rows of a window, perhaps."""

    @property
    def windows(self) -> Sequence[int]:
        """The numbers of the windows that have rows here."""
        return list(self._counts)

    def has(self, window: int) -> bool:
        """Return whether ``window`` has rows here."""
        return window in self._counts

    @property
    def count(self) -> int:
        """How many rows there are in all, as they were counted on their way."""
        return sum(self._counts.values())

    def continue_from(self) -> bytes:
        """The database has rows now: find out of which windows. Returns the last suffix in the order of bytes.

        Raises:
            LocalDamage, StorageError
        """
        last = b""
        for rows, _ in self._database.scan(b"", None):
            groups = decode_groups(rows)
            for window, places in split_by_window(decode_times(rows, PREFIX_BYTES)):
                self._note(window, groups[places], len(places))
            last = max(last, *(row[SUFFIX_AT:] for row in rows))
        return last

    def keys(self, window: int, groups: Words, suffixes: Sequence[bytes]) -> list[bytes]:
        """Return where rows of ``window`` are: their key groups, and what tells rows of a key group apart."""
        number = self.table.number.to_bytes(2, "big") + encode_times(np.array([window]))[0]
        return [int(group).to_bytes(2, "big") + number + suffix for group, suffix in zip(groups, suffixes, strict=True)]

    def get(self, keys: Sequence[bytes]) -> pa.RecordBatch:
        """Return those of these rows that there are."""
        return self._batch([value for value in self._database.get(keys) if value is not None])

    def put(self, window: int, groups: Words, keys: Sequence[bytes], rows: pa.RecordBatch, new: int) -> None:
        """Set rows of a window. ``new``: so many of them are not there yet."""
        changes = Changes()
        changes.put(keys, self.table.codec.encode(self.table.stored(rows)))
        self._database.write(changes)
        self._note(window, groups, new)

    def _note(self, window: int, groups: Words, new: int) -> None:
        self._counts[window] = self._counts.get(window, 0) + new
        self._groups.setdefault(window, np.zeros(self._max_parallelism, np.bool_))[groups] = True

    def count_of(self, window: int) -> int:
        """Return how many rows of ``window`` there are."""
        return self._counts.get(window, 0)

    def take(self, window: int, *, is_by_suffix: bool = False) -> pa.RecordBatch:
        """Remove the rows of a window; return them, by key group, or by suffix over all key groups.

        Raises:
            LocalDamage: some are missing.
        """
        (found,) = self.parts(window, self.count_of(window), is_by_suffix=is_by_suffix)
        return found

    def parts(self, window: int, rows_max: int, *, is_by_suffix: bool = False) -> Iterator[pa.RecordBatch]:
        """Remove the rows of a window; yield them, those of some key groups at a time, about ``rows_max``.

        Raises:
            LocalDamage: some are missing.
        """
        for ((rows, values),) in self._scan([window], rows_max):
            # removed before all are read: a window is taken whole, or the generation ends and with it this database
            yield self._removed(rows, values, is_by_suffix)
        self._forget(window)

    def read(
        self, windows: Sequence[int], rows_max: int, *, is_by_suffix: bool = False
    ) -> Iterator[list[pa.RecordBatch]]:
        """Yield the rows of windows, those of some key groups at a time, about ``rows_max``: a batch for each window.

        Raises:
            LocalDamage: some are missing.
        """
        for found in self._scan([window for window in windows if self.has(window)], rows_max):
            yield [self._rows(rows, values, is_by_suffix) for rows, values in found]

    def drop(self, window: int) -> None:
        """Remove the rows of a window.

        Raises:
            LocalDamage: some are missing.
        """
        changes = Changes()
        for ((rows, _),) in self._scan([window], self.count_of(window)):
            changes.delete(rows)
        self._database.write(changes)
        self._forget(window)

    def _forget(self, window: int) -> None:
        del self._counts[window], self._groups[window]

    def _scan(self, windows: Sequence[int], rows_max: int) -> Iterator[list[tuple[list[bytes], list[bytes]]]]:
        """Yield keys and values of each window, those of some key groups at a time, about ``rows_max`` in all."""
        count = sum(map(self.count_of, windows))
        left = {window: self.count_of(window) for window in windows}
        found: list[tuple[list[bytes], list[bytes]]] = [([], []) for _ in windows]
        for group in np.flatnonzero(np.logical_or.reduce([self._groups[window] for window in windows])):
            for window, (rows, values) in zip(windows, found, strict=True):
                if not self._groups[window][group]:
                    continue
                start, end = (self.keys(one, np.array([group]), [b""])[0] for one in (window, window + 1))
                # one more than are left, so that a row that was never counted is noticed
                more, bytes_of = self._database.some(start, max(left[window], 0) + 1, end)
                left[window] -= len(more)
                rows += more
                values += bytes_of
            # the last rows wait for the check of the counts below
            if max(left.values()) > 0 and sum(len(rows) for rows, _ in found) >= rows_max:
                yield found
                found = [([], []) for _ in windows]
        if any(left.values()):
            there = count - sum(left.values())
            raise LocalDamage(str(self._database.path), 0, f"{count} rows of a window", f"{there} rows")
        yield found

    def _removed(self, rows: list[bytes], values: list[bytes], is_by_suffix: bool) -> pa.RecordBatch:
        changes = Changes()
        changes.delete(rows)
        self._database.write(changes)
        return self._rows(rows, values, is_by_suffix)

    def _rows(self, rows: list[bytes], values: list[bytes], is_by_suffix: bool) -> pa.RecordBatch:
        if is_by_suffix:
            values = [values[at] for at in sorted(range(len(rows)), key=lambda at: rows[at][SUFFIX_AT:])]
        return self._batch(values)

    def _batch(self, values: Sequence[bytes]) -> pa.RecordBatch:
        return self.table.batch([], values, 0)


MERGED_ROW_BYTES = 128
"""A partial result in memory, with its part of the index of keys, is taken to be so large."""

BATCH_COPIES = 2
"""A batch that is kept is taken to be so many times as large as its columns."""

_COPIES = 3
"""What is read of a row is in memory as bytes, as Arrow's, and as what is made of it."""

CHANGES_MAX = 32_768
"""So many rows may be in memory when there are some in the database: the pause of a checkpoint is bounded by it."""

FrontT = TypeVar("FrontT", MemoryWindowRows, MemoryMergedRows)


class _RocksWindows(ABC, Generic[FrontT]):
    """What both kinds share."""

    _front: FrontT

    def __init__(self, local: LocalDatabase, rows: WindowRows, max_parallelism: int, front: FrontT) -> None:
        self._local = local
        self._rows = rows
        self._max_parallelism = max_parallelism
        self._front = front
        self._stored = StoredWindows(local.database, rows.section, max_parallelism)

    @property
    def meta(self) -> bytes:
        return self._front.meta

    @meta.setter
    def meta(self, meta: bytes) -> None:
        self._front.meta = meta

    def add(self, windows: Words, rows: pa.RecordBatch) -> None:
        self._front.add(windows, rows)
        self._tidy(rows)

    def windows(self) -> list[int]:
        return sorted({*self._front.windows(), *self._stored.windows})

    @property
    def _part_rows(self) -> int:
        """So many rows of a window that fires are in memory together, about."""
        return max(1, self._local.cache_bytes // self._local.row_bytes(MERGED_ROW_BYTES, _COPIES))

    def freeze(self) -> FrozenState:
        """See ``StateBackend``. As soon as anything is in the database, everything is."""
        if self._stored.count:
            self._write_back()
            assert not self._front.windows(), "what is frozen is in the database"
        if not self._stored.count:
            return self._front.freeze()
        counts = {self._rows.section.name: self._stored.count}
        beside = ExtraSections(meta={META: self.meta})
        return FrozenDatabase(self._local, self._local.checkpoint(), [self._stored.table], counts, beside)

    def continue_from(self, stored: StoredFiles, owner: Ownership) -> bool:
        """See ``ContinuingBackend``. Chunks are what was in memory, and come there again."""
        if self.windows():
            return False
        if stored.are_chunks:
            is_continued = self._front.continue_from(stored, owner, self)
            if self._stored.count:  # there was no room for all of it
                self._front.start_over()
            return is_continued
        if continue_from(self._local, stored, [self._stored.table], owner) is None:
            return False
        self._continued(self._stored.continue_from())
        return True

    def _continued(self, last: bytes) -> None:
        """The database has rows of windows now; ``last``: the last of their suffixes."""

    def restore(self, sections: Mapping[str, memoryview], path: str, owner: Ownership) -> None:
        for batch in restored_batches(sections, self._rows.section, path, owner):
            self.add(self._rows.window_of(batch), batch)

    def _groups(self, rows: pa.RecordBatch) -> Words:
        return key_groups(hash_columns(rows, self._rows.section.key_names), self._max_parallelism)

    def _tidy(self, rows: pa.RecordBatch) -> None:
        """Rows were added: have what is in memory in the database, if it has no room, or a checkpoint would wait."""
        held_rows, held_bytes = self._held(rows)
        if held_bytes > self._local.cache_bytes or (self._stored.count and held_rows > CHANGES_MAX):
            self._write_back()

    @abstractmethod
    def _held(self, added: pa.RecordBatch) -> tuple[int, int]:
        """Return how many rows are in memory, and what they take, now that ``added`` are there."""

    @abstractmethod
    def _write_back(self, windows: Sequence[int] | None = None) -> None:
        """Have these windows in the database; None: all."""


class RocksWindowRows(_RocksWindows[MemoryWindowRows]):
    """Keeps every row. The suffix of a row in the database is how many rows came before it."""

    def __init__(self, local: LocalDatabase, rows: WindowRows, max_parallelism: int) -> None:
        super().__init__(local, rows, max_parallelism, MemoryWindowRows(rows))
        self._held_rows = self._held_bytes = 0
        self._rows_before = 0

    def take(self, window: int) -> list[pa.RecordBatch]:
        """See ``WindowBackend``. In the order in which they came."""
        before = [self._stored.take(window, is_by_suffix=True)] if self._stored.has(window) else []
        return [*before, *(self._take_front(window) if self._front.has(window) else [])]

    def parts(self, window: int) -> Iterator[list[pa.RecordBatch]]:
        if self._stored.count_of(window) <= self._part_rows:
            yield self.take(window)
            return
        # what is in memory may be of any key group: it would belong to parts that are out already
        self._write_back()
        for batch in self._stored.parts(window, self._part_rows, is_by_suffix=True):
            yield [batch]

    def read(self, windows: Sequence[int]) -> Iterator[list[pa.RecordBatch]]:
        if not any(map(self._stored.has, windows)):
            yield from self._front.read(windows)
            return
        self._write_back(windows)
        yield from self._stored.read(windows, self._part_rows, is_by_suffix=True)

    def drop(self, window: int) -> None:
        if self._stored.has(window):
            self._stored.drop(window)
        if self._front.has(window):
            self._take_front(window)

    def _take_front(self, window: int) -> list[pa.RecordBatch]:
        found = self._front.take(window)
        self._held_rows -= sum(batch.num_rows for batch in found)
        self._held_bytes -= sum(batch.nbytes for batch in found)
        assert self._held_rows >= 0, "rows in memory were counted when they came"
        return found

    def _held(self, added: pa.RecordBatch) -> tuple[int, int]:
        self._held_rows += added.num_rows
        self._held_bytes += added.nbytes
        return self._held_rows, self._held_bytes * BATCH_COPIES

    def _write_back(self, windows: Sequence[int] | None = None) -> None:
        for window in self._front.windows() if windows is None else windows:
            if self._front.has(window):
                for batch in self._take_front(window):
                    self._store(window, batch)

    def _continued(self, last: bytes) -> None:
        # after all that are there: their suffixes are the order in which they came
        self._rows_before = int.from_bytes(last, "big") + 1

    def _store(self, window: int, batch: pa.RecordBatch) -> None:
        groups = self._groups(batch)
        numbers = np.arange(self._rows_before, self._rows_before + batch.num_rows)
        self._rows_before += batch.num_rows
        self._stored.put(window, groups, self._stored.keys(window, groups, places_of(numbers)), batch, batch.num_rows)


class RocksMergedRows(_RocksWindows[MemoryMergedRows]):
    """Merges partial results: one row per window and key, in memory and in the database at the most."""

    def __init__(
        self,
        local: LocalDatabase,
        keys: KeyColumns,
        rows: WindowRows,
        max_parallelism: int,
        accumulators: Sequence[Accumulator],
    ) -> None:
        super().__init__(local, rows, max_parallelism, MemoryMergedRows(keys, rows, accumulators))
        self._key_types, self._accumulators = keys.types, tuple(accumulators)

    def take(self, window: int) -> MergedRows:
        if not self._stored.has(window):
            return self._front.take(window)
        parts = [merged_rows(self._stored.take(window), self._accumulators)]
        if self._front.has(window):
            parts.append(self._front.take(window))
        return merge_rows(self._key_types, self._accumulators, parts)

    def parts(self, window: int) -> Iterator[MergedRows]:
        if self._stored.count_of(window) <= self._part_rows:
            yield self.take(window)
            return
        # what is in memory may be of any key group: it would belong to parts that are out already
        self._write_back()
        for batch in self._stored.parts(window, self._part_rows):
            self._front.add(np.full(batch.num_rows, window), batch)
            yield self._front.take(window)

    def read(self, windows: Sequence[int]) -> Iterator[MergedRows]:
        if not any(map(self._stored.has, windows)):
            yield from self._front.read(windows)
            return
        count = sum(map(self._stored.count_of, windows))
        if count > self._part_rows:
            self._write_back(windows)
        held = {window: self._front.held([window]) for window in windows if self._front.has(window)}
        # what is in memory is not in parts, so it must meet all of the database at once
        for batches in self._stored.read(windows, max(count, 1) if held else self._part_rows):
            parts: list[MergedRows] = []
            found = iter(batches)
            for window in windows:
                if self._stored.has(window):
                    parts.append(merged_rows(next(found), self._accumulators))
                parts += held.get(window, ())
            parts = [part for part in parts if len(part.table.rows)]
            yield merge_rows(self._key_types, self._accumulators, parts)

    def drop(self, window: int) -> None:
        if self._stored.has(window):
            self._stored.drop(window)
        if self._front.has(window):
            self._front.drop(window)

    def _held(self, added: pa.RecordBatch) -> tuple[int, int]:
        held_rows = sum(self._front.counts().values())
        return held_rows, held_rows * MERGED_ROW_BYTES

    def _write_back(self, windows: Sequence[int] | None = None) -> None:
        for window in self._front.windows() if windows is None else windows:
            if self._front.has(window):
                self._store(window)

    def _store(self, window: int) -> None:
        """Merge what is in memory of a window into the database."""
        merged = self._front.take(window)
        keys = merged.keys
        batch = partial_batch(self._rows.section.schema, keys, window, merged.table)
        groups = self._groups(batch)
        places = self._stored.keys(window, groups, encode_columns(keys))
        new = batch.num_rows
        if self._stored.has(window):
            found = self._stored.get(places)
            # those that are there already are replaced, and counted no second time
            new -= found.num_rows
            if found.num_rows:
                batch = self._merged(window, batch, found)
        self._stored.put(window, groups, places, batch, new)

    def _merged(self, window: int, batch: pa.RecordBatch, found: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows of ``batch``, in their order, merged into those of the database."""
        index, table = make_key_index(self._key_types), AggTable(self._accumulators)
        keys = batch.columns[: len(self._key_types)]
        own = index.slots(keys)  # in the order of the index's tables, which is not that of the rows
        for rows in (found, batch):
            slots = index.slots(rows.columns[: len(self._key_types)])
            counts, values = partial_rows(rows, self._accumulators), partial_values(rows, self._accumulators)
            table.update(batch.num_rows, slots, counts, values)
        return partial_batch(self._rows.section.schema, keys, window, table.take(own))
