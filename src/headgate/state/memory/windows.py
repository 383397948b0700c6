"""Rows by window and key in memory: see ``backend.WindowBackend``. Counterpart: ``operators.windows.window``.

Two kinds: rows that are kept as they came, and partial results that are merged per key. What is frozen never changes:
batches are immutable, and a table of accumulators is copied when it next changes (ST5).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import pyarrow as pa

from headgate.state.aggregate_table import Accumulator, AggTable, FrozenTable, Values
from headgate.state.backend import META, Ownership, WindowRows, restored_batches
from headgate.state.descriptors import KeyColumns, Section
from headgate.state.key_hash import Words
from headgate.state.key_index import FrozenKeys, KeyIndex, Slots, make_key_index
from headgate.state.keyed import KeyedState, Rows
from headgate.state.memory.changes import ChangedKeys, ChangedSlots, KeyChanges, keys_after, slots_after
from headgate.state.memory.chunk_log import ChunkLog, Moment
from headgate.state.memory.chunked import ChunkedState
from headgate.state.memory.chunks import Change, Replaced
from headgate.state.window_rows import (
    MergedRows,
    only_window,
    partial_batch,
    partial_rows,
    partial_values,
    pick,
    split_by_window,
)

Held = TypeVar("Held")


class _Windows(ABC, Generic[Held]):
    """What both kinds share: what each window holds, and the restore."""

    def __init__(self, rows: WindowRows) -> None:
        self._rows = rows
        self._held: dict[int, Held] = {}
        self.meta = b""

    @abstractmethod
    def add(self, windows: Words, rows: pa.RecordBatch) -> None:
        """See ``WindowBackend``."""

    def windows(self) -> list[int]:
        """See ``WindowBackend``."""
        return sorted(self._held)

    def has(self, window: int) -> bool:
        """Return whether ``window`` has rows."""
        return window in self._held

    def restore(self, sections: Mapping[str, memoryview], path: str, owner: Ownership) -> None:
        """See ``StateBackend``."""
        for batch in restored_batches(sections, self._rows.section, path, owner):
            self.add(self._rows.window_of(batch), batch)


class _FrozenRows(KeyedState):
    """The batches of all windows at a barrier."""

    def __init__(self, section: Section, meta: bytes, batches: tuple[pa.RecordBatch, ...]) -> None:
        super().__init__()
        self._section = section
        self._bytes = meta
        self._batches = batches

    def _rows(self) -> Mapping[str, int]:
        return {self._section.name: sum(batch.num_rows for batch in self._batches)}

    def _sections(self) -> Rows:
        return [(self._section, self._batches)]

    def _meta(self) -> Mapping[str, bytes]:
        return {META: self._bytes}

    def _forget(self) -> None:
        self._batches = ()


class MemoryWindowRows(_Windows[list[pa.RecordBatch]]):
    """Keeps every row."""

    def add(self, windows: Words, rows: pa.RecordBatch) -> None:
        """See ``WindowBackend``."""
        window = only_window(windows)
        if window is not None:
            self._held.setdefault(window, []).append(rows)
            return
        for window, chosen in split_by_window(windows):
            self._held.setdefault(window, []).append(rows.take(pa.array(chosen)))

    def take(self, window: int) -> list[pa.RecordBatch]:
        """See ``WindowBackend``."""
        return self._held.pop(window)

    def freeze(self) -> KeyedState:
        """See ``StateBackend`` (WN11)."""
        batches = tuple(batch for window in self.windows() for batch in self._held[window])
        return _FrozenRows(self._rows.section, self.meta, batches)


@dataclass(frozen=True, slots=True)
class _FrozenPartials:
    """The keys of a window and their accumulators."""

    window: int
    keys: FrozenKeys
    table: FrozenTable
    intervals: Slots

    def batch(self, schema: pa.Schema) -> pa.RecordBatch:
        """Return a row per key."""
        return partial_batch(schema, self.keys(), self.window, self.table)

    def changed(self, schema: pa.Schema, after: int) -> pa.RecordBatch:
        """Return a row per key that changed after a snapshot."""
        slots = slots_after(self.intervals, after)
        rows, taken = self.table, pa.array(slots)
        values = tuple(one[slots] for one in rows.values)
        table = FrozenTable(rows.rows[slots], values, tuple(None if one is None else one[slots] for one in rows.seen))
        return partial_batch(schema, [key.take(taken) for key in self.keys()], self.window, table)


class _FrozenMerged(ChunkedState):
    """The accumulators of all windows at a barrier."""

    def __init__(
        self,
        log: ChunkLog,
        moment: Moment,
        state: Replaced,
        meta: bytes,
        windows: tuple[_FrozenPartials, ...],
        taken: KeyChanges,
    ) -> None:
        """``taken``: the windows that were taken before."""
        super().__init__(log, moment)
        self._state = state
        self._bytes = meta
        self._windows = windows
        self._taken = taken

    def _rows(self) -> Mapping[str, int]:
        return {self._state.section.name: sum(len(window.table.rows) for window in self._windows)}

    def _changes(self, after: int | None) -> list[Change]:
        schema = self._state.section.schema
        if after is None:
            return [Change(self._state, [window.batch(schema) for window in self._windows])]
        rows = [window.changed(schema, after) for window in self._windows]
        gone = pa.RecordBatch.from_arrays(
            [pa.array(keys_after(self._taken, after), pa.int64())], schema=self._state.gone
        )
        return [Change(self._state, rows, [gone])]

    def _changed_count(self, after: int) -> int:
        return sum(int(np.count_nonzero(window.intervals > after)) for window in self._windows)

    def _meta(self) -> Mapping[str, bytes]:
        return {META: self._bytes}

    def _meta_of_rows(self) -> Mapping[str, bytes]:
        return self._meta()

    def _forget(self) -> None:
        self._windows, self._taken = (), ()


@dataclass(slots=True)
class _Partials:
    """An index of the keys of one window, a table by its slots, and when these changed."""

    index: KeyIndex
    table: AggTable
    changed: ChangedSlots


class MemoryMergedRows(_Windows[_Partials]):
    """Merges partial results: one row per window and key."""

    def __init__(self, keys: KeyColumns, rows: WindowRows, accumulators: Sequence[Accumulator]) -> None:
        super().__init__(rows)
        self._accumulators = tuple(accumulators)
        self._key_types = keys.types
        self._log = ChunkLog()
        self._taken = ChangedKeys(self._log.interval)
        width = len(keys.types)
        names = tuple(rows.section.schema.names[: width + 1])
        self._state = Replaced(rows.section, names, names[width:])

    def add(self, windows: Words, rows: pa.RecordBatch) -> None:
        """See ``WindowBackend``."""
        keys = [rows.column(i) for i in range(len(self._key_types))]
        counts, values = partial_rows(rows, self._accumulators), partial_values(rows, self._accumulators)
        window = only_window(windows)
        if window is not None:
            self._merge(window, keys, counts, values)
            return
        for window, chosen in split_by_window(windows):
            taken = pa.array(chosen)
            self._merge(window, [key.take(taken) for key in keys], counts[chosen], pick(values, chosen))

    def _merge(self, window: int, keys: Sequence[pa.Array], counts: Slots, values: Sequence[Values]) -> None:
        held = self._held.get(window)
        if held is None:
            changed = ChangedSlots(self._log.interval)
            held = _Partials(make_key_index(self._key_types), AggTable(self._accumulators), changed)
            self._held[window] = held
        slots = held.index.slots(keys)
        held.table.update(len(held.index), slots, counts, values)
        held.changed.mark(slots, len(held.index))

    def take(self, window: int) -> MergedRows:
        """See ``WindowBackend``. Nothing is copied: only snapshots have these arrays afterwards, and read them."""
        taken = _frozen(window, self._held.pop(window))
        if self._taken.now is not None:
            self._taken.now[window] = None
            self._taken.bounded(0)
        return MergedRows(taken.keys(), taken.table)

    def counts(self) -> dict[int, int]:
        """Return how many keys each window has."""
        return {window: len(held.index) for window, held in self._held.items()}

    def freeze(self) -> KeyedState:
        """See ``StateBackend``."""
        windows = tuple(_frozen(window, self._held[window]) for window in self.windows())
        taken = self._taken.freeze()
        return _FrozenMerged(self._log, self._log.end_interval(), self._state, self.meta, windows, taken)


def _frozen(window: int, held: _Partials) -> _FrozenPartials:
    size = len(held.index)
    return _FrozenPartials(window, held.index.freeze(), held.table.freeze(size), held.changed.freeze(size))
