"""Rows by window and key in memory: see ``backend.WindowBackend``. Counterpart: ``operators.windows.aligned_windows``.

Two kinds: rows that are kept as they came, and partial results that are merged per key. What is frozen never changes:
batches are immutable, and a table of accumulators is copied when it next changes. Of both it is known what came
since a snapshot, and which windows have been taken.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np
import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.state.backend import META, Ownership, StateBackend, WindowRows, restored_batches
from headgate.state.descriptors import KeyColumns
from headgate.state.key_hash import Words
from headgate.state.key_index import FrozenKeys, KeyIndex, Slots, frozen_keys, make_key_index
from headgate.state.memory.change_tracking import ChangedKeys, ChangedSlots, KeyChanges, SlotChanges
from headgate.state.memory.incremental_restore import continue_from
from headgate.state.memory.incremental_snapshot import Change, ChunkedState, ChunkLog, Replaced
from headgate.state.snapshot import KeyedState, Rows, StoredFiles
from headgate.state.window_aggregates import (
    Accumulator,
    AggTable,
    FrozenTable,
    MergedRows,
    Values,
    merge_rows,
    only_window,
    partial_batch,
    partial_rows,
    partial_values,
    split_by_window,
    take_values,
)

Held = TypeVar("Held")


class _Windows(ABC, Generic[Held]):
    """What both kinds share: what each window holds, which were taken, and the restore."""

    def __init__(self, rows: WindowRows, state: Replaced) -> None:
        self._rows = rows
        self._state = state
        self._held: dict[int, Held] = {}
        self._log = ChunkLog()
        self._taken = ChangedKeys(self._log.interval)
        self.meta = b""

    @abstractmethod
    def add(self, windows: Words, rows: pa.RecordBatch) -> None:
        """See ``WindowBackend``."""

    @abstractmethod
    def freeze(self) -> KeyedState:
        """See ``StateBackend``."""

    def windows(self) -> list[int]:
        return sorted(self._held)

    def has(self, window: int) -> bool:
        """Return whether ``window`` has rows."""
        return window in self._held

    def drop(self, window: int) -> None:
        self._removed(window)

    def _removed(self, window: int) -> Held:
        """Forget what ``window`` holds; return it."""
        # ``now`` is None until there is a snapshot that a window could be missing from
        if self._taken.now is not None:
            self._taken.now[window] = None
            self._taken.bounded(0)
        return self._held.pop(window)

    def _barrier(self) -> _Barrier:
        """End the interval."""
        # first, as long as the interval has its number
        taken = self._taken.freeze()
        return _Barrier(self._log, self._log.end_interval(), self._state, self.meta, taken)

    def continue_from(self, stored: StoredFiles, owner: Ownership, through: StateBackend | None = None) -> bool:
        """See ``ContinuingBackend``.

        Args:
            stored: see there.
            owner: see there.
            through: what restores the rows, and has this one in front; default: this one.
        """
        if not continue_from(through or self, self._log, [self._state], stored, owner):
            return False
        self._taken.start()
        return True

    def start_over(self) -> None:
        """Not all that was restored is here: no snapshot of what is here refers to it."""
        self._log.forget()

    def restore(self, sections: Mapping[str, memoryview], path: str, owner: Ownership) -> None:
        for batch in restored_batches(sections, self._rows.section, path, owner):
            self.add(self._rows.window_of(batch), batch)


@dataclass(frozen=True, slots=True)
class _Barrier:
    """What both kinds have at a barrier.

    Attributes:
        log: of the chunks that were written.
        number: of the interval that ended.
        state: in chunks.
        meta: see ``WindowBackend``.
        taken: the windows that were taken before.
    """

    log: ChunkLog
    number: int
    state: Replaced
    meta: bytes
    taken: KeyChanges


class _FrozenWindows(ChunkedState):
    """What the windows of one kind held at a barrier."""

    def __init__(self, barrier: _Barrier) -> None:
        super().__init__(barrier.log, barrier.number)
        self._state = barrier.state
        self._bytes = barrier.meta
        self._taken = barrier.taken

    @abstractmethod
    def _count(self) -> int:
        """Return how many rows there are."""

    @abstractmethod
    def _rows_after(self, after: int | None) -> list[pa.RecordBatch]:
        """Return the rows of windows that changed after a snapshot; None: all."""

    @abstractmethod
    def _count_after(self, after: int) -> int:
        """Return how many those are."""

    def _rows(self) -> Mapping[str, int]:
        return {self._state.section.name: self._count()}

    def _changes(self, after: int | None) -> list[Change]:
        taken = None if after is None else self._taken.after(after)
        if taken is None:
            return [Change(self._state, self._rows_after(None), is_whole=True)]
        gone = pa.RecordBatch.from_arrays([pa.array(taken, pa.int64())], schema=self._state.gone)
        return [Change(self._state, self._rows_after(after), [gone])]

    def _changed_counts(self, after: int) -> Mapping[str, int | None]:
        count = None if self._taken.after(after) is None else self._count_after(after)
        return {self._state.section.name: count}

    def _meta(self) -> Mapping[str, bytes]:
        return {META: self._bytes}

    def _meta_of_rows(self) -> Mapping[str, bytes]:
        return self._meta()


@dataclass(frozen=True, slots=True)
class _WindowBatch:
    """Rows of one window, as they came."""

    interval: int
    window: int
    batch: pa.RecordBatch

    def rows(self, schema: pa.Schema) -> pa.RecordBatch:
        """Return them with the number of the window, in the columns of chunks."""
        window = pa.array(np.full(self.batch.num_rows, self.window))
        return pa.RecordBatch.from_arrays([*self.batch.columns, window], schema=schema)


class _FrozenRows(_FrozenWindows):
    """The batches of all windows at a barrier."""

    def __init__(self, barrier: _Barrier, kept: tuple[_WindowBatch, ...]) -> None:
        super().__init__(barrier)
        self._kept = kept

    def _count(self) -> int:
        return sum(one.batch.num_rows for one in self._kept)

    def _rows_after(self, after: int | None) -> list[pa.RecordBatch]:
        columns = self._state.columns
        return [one.rows(columns) for one in self._kept if after is None or one.interval > after]

    def _count_after(self, after: int) -> int:
        return sum(one.batch.num_rows for one in self._kept if one.interval > after)

    def _sections(self) -> Rows:
        return [(self._state.section, [one.batch for one in self._kept])]

    def _forget(self) -> None:
        self._kept = ()


class MemoryWindowRows(_Windows[list[_WindowBatch]]):
    """Keeps every row."""

    def __init__(self, rows: WindowRows) -> None:
        window = _unused_name("window", rows.section.schema)
        more = pa.schema([pa.field(window, pa.int64())])
        super().__init__(rows, Replaced(rows.section, identity=(), group=(window,), more=more))

    def add(self, windows: Words, rows: pa.RecordBatch) -> None:
        window = only_window(windows)
        if window is not None:
            self._keep(window, rows)
            return
        for window, chosen in split_by_window(windows):
            self._keep(window, rows.take(pa.array(chosen)))

    def _keep(self, window: int, rows: pa.RecordBatch) -> None:
        self._held.setdefault(window, []).append(_WindowBatch(self._log.interval.number, window, rows))

    def take(self, window: int) -> list[pa.RecordBatch]:
        return [one.batch for one in self._removed(window)]

    def read(self, windows: Sequence[int]) -> Iterator[list[pa.RecordBatch]]:
        yield [one.batch for window in windows for one in self._held.get(window, ())]

    def freeze(self) -> KeyedState:
        kept = tuple(one for window in self.windows() for one in self._held[window])
        return _FrozenRows(self._barrier(), kept)


def _unused_name(name: str, schema: pa.Schema) -> str:
    """Return a name for one more column of ``schema``."""
    while name in schema.names:
        name += "_"
    return name


@dataclass(frozen=True, slots=True)
class _FrozenPartials:
    """The keys of a window and their accumulators."""

    window: int
    keys: FrozenKeys
    table: FrozenTable
    changes: SlotChanges

    def batch(self, schema: pa.Schema) -> pa.RecordBatch:
        """Return a row per key."""
        return partial_batch(schema, self.keys.columns(), self.window, self.table)

    def changed(self, schema: pa.Schema, after: int) -> pa.RecordBatch:
        """Return a row per key that changed after a snapshot."""
        slots = self._slots(after)
        rows = self.table
        values = tuple(one[slots] for one in rows.values)
        table = FrozenTable(rows.rows[slots], values, tuple(None if one is None else one[slots] for one in rows.seen))
        return partial_batch(schema, self.keys.columns(slots), self.window, table)

    def count(self, after: int) -> int:
        """Return how many those are."""
        return len(self._slots(after))

    def _slots(self, after: int) -> Slots:
        slots = self.changes.after(after)
        assert slots is not None, "keys of a window are never renumbered"
        return slots


class _FrozenMerged(_FrozenWindows):
    """The accumulators of all windows at a barrier."""

    def __init__(self, barrier: _Barrier, windows: tuple[_FrozenPartials, ...]) -> None:
        super().__init__(barrier)
        self._windows = windows

    def _count(self) -> int:
        return sum(len(window.table.rows) for window in self._windows)

    def _rows_after(self, after: int | None) -> list[pa.RecordBatch]:
        schema = self._state.section.schema
        if after is None:
            return [window.batch(schema) for window in self._windows]
        return [window.changed(schema, after) for window in self._windows]

    def _count_after(self, after: int) -> int:
        return sum(window.count(after) for window in self._windows)

    def _forget(self) -> None:
        self._windows = ()


@dataclass(slots=True)
class _Partials:
    """An index of the keys of one window, a table by its slots, and when these changed."""

    index: KeyIndex
    table: AggTable
    changed: ChangedSlots


class MemoryMergedRows(_Windows[_Partials]):
    """Merges partial results: one row per window and key."""

    def __init__(self, keys: KeyColumns, rows: WindowRows, accumulators: Sequence[Accumulator]) -> None:
        width = len(keys.types)
        names = tuple(rows.section.schema.names[: width + 1])
        super().__init__(rows, Replaced(rows.section, names, names[width:]))
        self._accumulators = tuple(accumulators)
        self._key_types = keys.types

    def add(self, windows: Words, rows: pa.RecordBatch) -> None:
        keys = [rows.column(i) for i in range(len(self._key_types))]
        counts, values = partial_rows(rows, self._accumulators), partial_values(rows, self._accumulators)
        window = only_window(windows)
        if window is not None:
            self._merge(window, keys, counts, values)
            return
        for window, chosen in split_by_window(windows):
            taken = pa.array(chosen)
            self._merge(window, [key.take(taken) for key in keys], counts[chosen], take_values(values, chosen))

    def _merge(self, window: int, keys: Sequence[pa.Array], counts: Slots, values: Sequence[Values]) -> None:
        held = self._held.get(window)
        if held is None:
            changed = ChangedSlots(self._log.interval)
            held = _Partials(make_key_index(self._key_types), AggTable(self._accumulators), changed)
            self._held[window] = held
        slots = held.index.slots(keys)
        assert len(slots) == len(counts), "each partial result is of one key"
        held.table.update(len(held.index), slots, counts, values)
        held.changed.mark(slots, len(held.index))

    def take(self, window: int) -> MergedRows:
        """See ``WindowBackend``. Nothing is copied: only snapshots have these arrays afterwards, and read them."""
        taken = _frozen(window, self._removed(window))
        return MergedRows(taken.keys.columns(), taken.table)

    def read(self, windows: Sequence[int]) -> Iterator[MergedRows]:
        yield merge_rows(self._key_types, self._accumulators, self.held(windows))

    def held(self, windows: Sequence[int]) -> list[MergedRows]:
        """Return what each of these windows holds, to be read before rows are added."""
        found = [self._held[window] for window in windows if window in self._held]
        return [MergedRows(frozen_keys(one.index).columns(), one.table.view(len(one.index))) for one in found]

    def counts(self) -> dict[int, int]:
        """Return how many keys each window has."""
        return {window: len(held.index) for window, held in self._held.items()}

    def freeze(self) -> KeyedState:
        windows = tuple(_frozen(window, self._held[window]) for window in self.windows())
        return _FrozenMerged(self._barrier(), windows)


def _frozen(window: int, held: _Partials) -> _FrozenPartials:
    size = len(held.index)
    return _FrozenPartials(window, frozen_keys(held.index), held.table.freeze(size), held.changed.freeze(size))
