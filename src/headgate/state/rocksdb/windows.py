"""Rows by window in RocksDB: see ``backend.WindowBackend``. Counterpart: ``operators.windows.window`` (RB12).

In front are the windows of the backend in memory. When they have no room any more, all that they hold goes to the
database; what comes later for the same windows is held in memory again. A window that fires is in memory whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np
import pyarrow as pa

from headgate.state.aggregate_table import Accumulator
from headgate.state.backend import META, Ownership, WindowRows, restored_batches
from headgate.state.descriptors import KeyColumns
from headgate.state.frozen import FrozenState
from headgate.state.key_hash import Words, hash_columns, key_groups
from headgate.state.memory.windows import MemoryMergedRows, MemoryWindowRows
from headgate.state.rocksdb.frozen import Beside, FrozenDatabase
from headgate.state.rocksdb.layout import encode_columns, places_of
from headgate.state.rocksdb.room import LocalDatabase
from headgate.state.rocksdb.stored_windows import StoredWindows
from headgate.state.window_rows import MergedRows, partial_batch

MERGED_ROW_BYTES = 128
"""A partial result in memory, with its part of the index of keys, is taken to be so large."""

BATCH_COPIES = 2
"""A batch that is kept is taken to be so many times as large as its columns."""

CHANGES_MAX = 32_768
"""So many partial results may differ from those of the database: the pause of a checkpoint is bounded by it."""

FrontT = TypeVar("FrontT", MemoryWindowRows, MemoryMergedRows)


class _RocksWindows(ABC, Generic[FrontT]):
    """What both kinds share."""

    _front: FrontT

    def __init__(self, place: LocalDatabase, rows: WindowRows, max_parallelism: int, front: FrontT) -> None:
        self._place = place
        self._rows = rows
        self._max_parallelism = max_parallelism
        self._front = front
        self._stored = StoredWindows(place.database, rows.section, max_parallelism)

    @property
    def meta(self) -> bytes:
        """See ``WindowBackend``."""
        return self._front.meta

    @meta.setter
    def meta(self, meta: bytes) -> None:
        self._front.meta = meta

    def add(self, windows: Words, rows: pa.RecordBatch) -> None:
        """See ``WindowBackend``."""
        self._front.add(windows, rows)
        self._tidy(windows, rows)

    def windows(self) -> list[int]:
        """See ``WindowBackend``."""
        return sorted({*self._front.windows(), *self._stored.windows})

    def freeze(self) -> FrozenState:
        """See ``StateBackend``."""
        self._write_back()
        front = self._front.freeze()
        if not self._stored.count:
            return front
        section = self._rows.section.name
        beside = Beside(front.sections, front.rows, {META: self.meta}, forget=front.release)
        counts = {section: self._stored.count}
        path = self._place.checkpoint()
        return FrozenDatabase(self._place, path, [self._stored.table], counts, beside, as_rows=True)

    def restore(self, sections: Mapping[str, memoryview], path: str, owner: Ownership) -> None:
        """See ``StateBackend``."""
        for batch in restored_batches(sections, self._rows.section, path, owner):
            self.add(self._rows.window_of(batch), batch)

    def _groups(self, rows: pa.RecordBatch) -> Words:
        return key_groups(hash_columns(rows, self._rows.section.key_names), self._max_parallelism)

    @abstractmethod
    def _tidy(self, windows: Words, rows: pa.RecordBatch) -> None:
        """Rows were added: have those in memory in the database, if they have no room."""

    @abstractmethod
    def _write_back(self) -> None:
        """A snapshot is to be taken: no key of a window may have a row here and one in the database."""


class RocksWindowRows(_RocksWindows[MemoryWindowRows]):
    """Keeps every row. Rows of the database are told apart by how many came before."""

    def __init__(self, place: LocalDatabase, rows: WindowRows, max_parallelism: int) -> None:
        super().__init__(place, rows, max_parallelism, MemoryWindowRows(rows))
        self._held_bytes = 0
        self._rows_before = 0

    def take(self, window: int) -> list[pa.RecordBatch]:
        """See ``WindowBackend``. In the order in which they came."""
        before = [self._stored.take(window, is_by_suffix=True)] if self._stored.has(window) else []
        found = self._front.take(window) if self._front.has(window) else []
        self._held_bytes -= sum(batch.nbytes for batch in found)
        return [*before, *found]

    def _tidy(self, windows: Words, rows: pa.RecordBatch) -> None:
        self._held_bytes += rows.nbytes
        if self._held_bytes * BATCH_COPIES > self._place.cache_bytes:
            for window in self._front.windows():
                for batch in self._front.take(window):
                    self._store(window, batch)
            self._held_bytes = 0

    def _store(self, window: int, batch: pa.RecordBatch) -> None:
        groups = self._groups(batch)
        numbers = np.arange(self._rows_before, self._rows_before + batch.num_rows)
        self._rows_before += batch.num_rows
        self._stored.put(window, groups, self._stored.keys(window, groups, places_of(numbers)), batch, batch.num_rows)

    def _write_back(self) -> None:
        """Rows that are the same are two rows."""


class RocksMergedRows(_RocksWindows[MemoryMergedRows]):
    """Merges partial results: one row per window and key, in memory and in the database at the most."""

    def __init__(
        self,
        place: LocalDatabase,
        keys: KeyColumns,
        rows: WindowRows,
        max_parallelism: int,
        accumulators: Sequence[Accumulator],
    ) -> None:
        super().__init__(place, rows, max_parallelism, MemoryMergedRows(keys, rows, accumulators))
        self._width = len(keys.names)

    def take(self, window: int) -> MergedRows:
        """See ``WindowBackend``."""
        if self._stored.has(window):
            found = self._stored.take(window)
            self._front.add(np.full(found.num_rows, window), found)
        return self._front.take(window)

    def _tidy(self, windows: Words, rows: pa.RecordBatch) -> None:
        counts = self._front.counts()
        changed = sum(count for window, count in counts.items() if self._stored.has(window))
        if sum(counts.values()) * MERGED_ROW_BYTES > self._place.cache_bytes:
            for window in counts:
                self._store(window)
        elif changed > CHANGES_MAX:
            self._write_back()

    def _write_back(self) -> None:
        for window in self._front.windows():
            if self._stored.has(window):
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
            new -= found.num_rows
            if found.num_rows:
                batch = self._merged(window, batch, found)
        self._stored.put(window, groups, places, batch, new)

    def _merged(self, window: int, batch: pa.RecordBatch, found: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows of ``batch``, in their order, with those of the database merged into them."""
        for rows in (batch, found):
            self._front.add(np.full(rows.num_rows, window), rows)
        merged = self._front.take(window)
        return partial_batch(self._rows.section.schema, merged.keys, window, merged.table)
