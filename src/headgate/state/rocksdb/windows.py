"""Rows by window in RocksDB: see ``backend.WindowBackend``. Counterpart: ``operators.windows.window`` (RB12).

In front are the windows of the backend in memory. When they have no room any more, all that they hold goes to the
database; what comes later is held in memory again, and goes there, too, when it is much, or to a checkpoint. A window
that fires is in memory whole if it has room there, else some key groups of it at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np
import pyarrow as pa

from headgate.state.aggregate_table import Accumulator
from headgate.state.backend import META, Ownership, WindowRows, restored_batches
from headgate.state.descriptors import KeyColumns
from headgate.state.files import StoredFiles
from headgate.state.frozen import FrozenState
from headgate.state.key_hash import Words, hash_columns, key_groups
from headgate.state.memory.windows import MemoryMergedRows, MemoryWindowRows
from headgate.state.rocksdb.frozen import Beside, FrozenDatabase
from headgate.state.rocksdb.layout import encode_columns, places_of
from headgate.state.rocksdb.reopening import go_on_with
from headgate.state.rocksdb.room import LocalDatabase
from headgate.state.rocksdb.stored_windows import StoredWindows
from headgate.state.window_rows import MergedRows, partial_batch

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
        self._tidy(rows)

    def windows(self) -> list[int]:
        """See ``WindowBackend``."""
        return sorted({*self._front.windows(), *self._stored.windows})

    @property
    def _part_rows(self) -> int:
        """So many rows of a window that fires are in memory together, about."""
        return max(1, self._place.cache_bytes // self._place.row_bytes(MERGED_ROW_BYTES, _COPIES))

    def freeze(self) -> FrozenState:
        """See ``StateBackend``. As soon as anything is in the database, everything is (RB12)."""
        if self._stored.count:
            self._write_back()
        if not self._stored.count:
            return self._front.freeze()
        counts = {self._rows.section.name: self._stored.count}
        beside = Beside(meta={META: self.meta})
        return FrozenDatabase(self._place, self._place.checkpoint(), [self._stored.table], counts, beside)

    def go_on_with(self, stored: StoredFiles, owner: Ownership) -> bool:
        """See ``ContinuingBackend``. Chunks are what was in memory (MC7), and come there again."""
        if self.windows():
            return False
        if stored.are_chunks:
            is_continued = self._front.go_on_with(stored, owner, self)
            if self._stored.count:  # there was no room for all of it
                self._front.begin_anew()
            return is_continued
        if go_on_with(self._place, stored, [self._stored.table], owner) is None:
            return False
        self._went_on(self._stored.go_on_with())
        return True

    def _went_on(self, last: bytes) -> None:
        """The database has rows of windows now; ``last``: the last of their suffixes."""

    def restore(self, sections: Mapping[str, memoryview], path: str, owner: Ownership) -> None:
        """See ``StateBackend``."""
        for batch in restored_batches(sections, self._rows.section, path, owner):
            self.add(self._rows.window_of(batch), batch)

    def _groups(self, rows: pa.RecordBatch) -> Words:
        return key_groups(hash_columns(rows, self._rows.section.key_names), self._max_parallelism)

    def _tidy(self, rows: pa.RecordBatch) -> None:
        """Rows were added: have what is in memory in the database, if it has no room, or a checkpoint would wait."""
        held_rows, held_bytes = self._held(rows)
        if held_bytes > self._place.cache_bytes or (self._stored.count and held_rows > CHANGES_MAX):
            self._write_back()

    @abstractmethod
    def _held(self, added: pa.RecordBatch) -> tuple[int, int]:
        """Return how many rows are in memory, and what they take, now that ``added`` are there."""

    @abstractmethod
    def _write_back(self) -> None:
        """Have everything in the database."""


class RocksWindowRows(_RocksWindows[MemoryWindowRows]):
    """Keeps every row. Rows of the database are told apart by how many came before."""

    def __init__(self, place: LocalDatabase, rows: WindowRows, max_parallelism: int) -> None:
        super().__init__(place, rows, max_parallelism, MemoryWindowRows(rows))
        self._held_rows = self._held_bytes = 0
        self._rows_before = 0

    def take(self, window: int) -> list[pa.RecordBatch]:
        """See ``WindowBackend``. In the order in which they came."""
        before = [self._stored.take(window, is_by_suffix=True)] if self._stored.has(window) else []
        found = self._front.take(window) if self._front.has(window) else []
        self._held_rows -= sum(batch.num_rows for batch in found)
        self._held_bytes -= sum(batch.nbytes for batch in found)
        return [*before, *found]

    def parts(self, window: int) -> Iterator[list[pa.RecordBatch]]:
        """See ``PartedWindows``."""
        if self._stored.count_of(window) <= self._part_rows:
            yield self.take(window)
            return
        self._write_back()
        for batch in self._stored.parts(window, self._part_rows, is_by_suffix=True):
            yield [batch]

    def _held(self, added: pa.RecordBatch) -> tuple[int, int]:
        self._held_rows += added.num_rows
        self._held_bytes += added.nbytes
        return self._held_rows, self._held_bytes * BATCH_COPIES

    def _write_back(self) -> None:
        for window in self._front.windows():
            for batch in self._front.take(window):
                self._store(window, batch)
        self._held_rows = self._held_bytes = 0

    def _went_on(self, last: bytes) -> None:
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

    def parts(self, window: int) -> Iterator[MergedRows]:
        """See ``PartedWindows``."""
        if self._stored.count_of(window) <= self._part_rows:
            yield self.take(window)
            return
        self._write_back()
        for batch in self._stored.parts(window, self._part_rows):
            self._front.add(np.full(batch.num_rows, window), batch)
            yield self._front.take(window)

    def _held(self, added: pa.RecordBatch) -> tuple[int, int]:
        held_rows = sum(self._front.counts().values())
        return held_rows, held_rows * MERGED_ROW_BYTES

    def _write_back(self) -> None:
        for window in self._front.windows():
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
