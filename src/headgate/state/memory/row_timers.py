"""Timers by row in memory: the keys of each time, and a heap of the times.

Counterpart: ``operators.process.by_row``. The keys of a time are a dict, or the key itself while there is only one,
which is the usual case. They are kept in ``MemoryCells``, so that freezing takes microseconds (ST5). Which timers came
and went is noted beside them, timer by timer: all timers of a time are too many where they are millions (MC9).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa

from headgate.state.descriptors import KeyColumns, Section
from headgate.state.key_hash import Hashes, hash_columns, value_hash
from headgate.state.memory.cells import FrozenCells, MemoryCells
from headgate.state.memory.changes import ChangedKeys, Interval, KeyChanges
from headgate.state.timers import stay_first

_STALE_FREE = 1_024
"""So many times without timers the heap may always have."""

_HASHED_ONE_BY_ONE = 32
"""Up to so many keys are hashed without making a column of them."""


@dataclass(frozen=True, slots=True)
class FrozenRowTimers:
    """The timers of one kind at a barrier.

    Attributes:
        cells: the keys of each time.
        changes: which timers came or went before it, as pairs of time and key.
        count: how many there were.
    """

    cells: FrozenCells
    changes: KeyChanges
    count: int

    def has(self, time_ms: int, key: Any) -> bool:
        """Whether there was such a timer."""
        found = self.cells.objects.get(time_ms)
        return key in found if type(found) is dict else bool(found == key)


class MemoryRowTimers:
    """See ``timers.RowTimers``."""

    def __init__(self, keys: KeyColumns, interval: Interval | None = None) -> None:
        """``interval``: which timers come and go is noted by it (MC9); None: nobody asks."""
        self._changes = None if interval is None else ChangedKeys(interval)
        self._changed: dict[Any, None] | None = None
        self._key_columns = keys
        self._hash = value_hash(keys.types[0]) if len(keys.types) == 1 else None
        self.cells = MemoryCells()
        self._heap: list[int] = []
        self._times_count = 0
        self._count = 0
        self._due_ms = 0
        self._due: list[Any] = []

    def __len__(self) -> int:
        return self._count

    def register(self, key: Any, time_ms: int) -> None:
        """See ``RowTimers``."""
        found = self.cells.get(time_ms)
        if found is None:
            self.cells.put(time_ms, key)
            heappush(self._heap, time_ms)
            self._times_count += 1
        elif type(found) is dict:
            if key in found:
                return
            self.cells.writable(time_ms)[key] = None
        elif found == key:
            return
        else:
            self.cells.put(time_ms, {found: None, key: None})
        self._count += 1
        if self._changed is not None:
            self._changed[time_ms, key] = None

    def delete(self, key: Any, time_ms: int) -> None:
        """See ``RowTimers``."""
        found = self.cells.get(time_ms)
        if type(found) is dict:
            if key not in found:
                return
        elif found is None or found != key:
            return
        if type(found) is dict and len(found) > 1:
            del self.cells.writable(time_ms)[key]
            self._count -= 1
        else:
            self._forget(time_ms, 1)
        if self._changed is not None:
            self._changed[time_ms, key] = None

    def next_ms(self) -> int | None:
        """See ``RowTimers``."""
        heap = self._heap
        while heap and self.cells.get(heap[0]) is None:
            heappop(heap)
        return heap[0] if heap else None

    def take(self, until_ms: int, keys_max: int) -> tuple[int, list[Any]] | None:
        """See ``RowTimers``. Keys of one time are sorted once, however many turns they take."""
        heap, held = self._heap, None
        while held is None:
            if not heap or heap[0] > until_ms:
                return None
            time_ms = heap[0]
            held = self.cells.get(time_ms)
            if type(held) is not dict:
                heappop(heap)
        if type(held) is not dict:
            self._forget(time_ms, 1)
            if self._changed is not None:
                self._changed[time_ms, held] = None
            return time_ms, [held]
        if self._due_ms != time_ms or not self._due:
            self._due_ms, self._due = time_ms, self._ordered(list(held))[::-1]
        taken = [self._due.pop() for _ in range(min(keys_max, len(self._due)))]
        taken = [key for key in taken if key in held]  # the others were deleted since they were sorted
        if len(taken) == len(held):
            self._forget(time_ms, len(taken))
        elif taken:
            keys = self.cells.writable(time_ms)
            for key in taken:
                del keys[key]
            self._count -= len(taken)
        if self._changed is not None:
            self._changed.update(((time_ms, key), None) for key in taken)
        return time_ms, taken

    def all(self) -> Iterator[tuple[int, Any]]:
        """See ``RowTimers``."""
        for time_ms in self.cells.keys():  # noqa: SIM118 - no dict
            found = self.cells.get(time_ms)
            for key in found if type(found) is dict else (found,):
                yield time_ms, key

    def absorb(self) -> None:
        """Do what has to be done now and then: see ``MemoryCells``."""
        self.cells.absorb()
        if self._changes is not None:
            self._changed = self._changes.bounded(self._count)

    def note_changes(self) -> None:
        """All timers were restored from a snapshot that the next one may refer to (MC7)."""
        assert self._changes is not None
        self._changes.start()
        self._changed = self._changes.now

    def freeze(self) -> FrozenRowTimers:
        """Put the timers aside, with what came and went before."""
        self.absorb()
        changes = KeyChanges() if self._changes is None else self._changes.freeze()
        self._changed = None if self._changes is None else self._changes.now
        return FrozenRowTimers(self.cells.freeze(), changes, self._count)

    def split(self, count: int) -> dict[int, list[Any]]:
        """Remove the last timers, so that about ``count`` stay (``stay_first``); return the keys by time."""
        assert self._changes is None, "what is removed so is not noted"
        found = list(self.all())
        times_ms, keys = np.array([time_ms for time_ms, _ in found], np.int64), [key for _, key in found]
        removed: dict[int, list[Any]] = {}
        for place in np.flatnonzero(~stay_first(times_ms, self._hashes(keys), count)).tolist():
            removed.setdefault(found[place][0], []).append(keys[place])
        for time_ms, gone in removed.items():
            self._remove(time_ms, gone)
        self._due = []
        return removed

    def _remove(self, time_ms: int, keys: list[Any]) -> None:
        if len(keys) == len(self._keys_of(time_ms)):
            self._forget(time_ms, len(keys))
            return
        held = self.cells.writable(time_ms)
        for key in keys:
            del held[key]
        self._count -= len(keys)

    def _keys_of(self, time_ms: int) -> list[Any]:
        found = self.cells.get(time_ms)
        return list(found) if type(found) is dict else [found]

    def _forget(self, time_ms: int, keys_count: int) -> None:
        """Remove a time with its last keys; its place in the heap goes when it is met, or when there are too many."""
        self.cells.remove(time_ms)
        self._count -= keys_count
        self._times_count -= 1
        if len(self._heap) > 2 * self._times_count + _STALE_FREE:
            self._heap = list(self.cells.keys())
            heapify(self._heap)

    def _ordered(self, keys: list[Any]) -> list[Any]:
        """Return keys in the order of their hashes (TM5)."""
        if self._hash is not None and len(keys) <= _HASHED_ONE_BY_ONE:
            return sorted(keys, key=self._hash)
        order = np.argsort(self._hashes(keys), kind="stable")
        return [keys[place] for place in order.tolist()]

    def _hashes(self, keys: Sequence[Any]) -> Hashes:
        names = self._key_columns.section_names
        batch = pa.RecordBatch.from_arrays(key_arrays(self._key_columns, keys), names=names)
        return hash_columns(batch, names)


def key_arrays(columns: KeyColumns, keys: Sequence[Any]) -> list[pa.Array]:
    """Return keys, as functions by row see them, as columns."""
    if len(columns.types) == 1:
        return [pa.array(keys, columns.types[0])]
    return [pa.array(list(c), dtype) for c, dtype in zip(zip(*keys, strict=True), columns.types, strict=True)]


def timers_count(frozen: FrozenCells) -> int:
    """Return how many timers there were at the barrier."""
    return sum(len(found) if type(found) is dict else 1 for found in frozen.objects.values())


def timer_batches(section: Section, keys: KeyColumns, frozen: FrozenCells, times_max: int) -> Iterator[pa.RecordBatch]:
    """Return the rows of a section of timers, those of ``times_max`` times at once."""
    items = iter(frozen.objects.items())
    while part := list(islice(items, times_max)):
        rows = [(time, key) for time, found in part for key in (found if type(found) is dict else (found,))]
        yield _batch(section.schema, keys, rows)


def some_timers(schema: pa.Schema, keys: KeyColumns, timers: Iterable[Any], rows_max: int) -> Iterator[pa.RecordBatch]:
    """Return pairs of time and key as rows, ``rows_max`` at once."""
    items = iter(timers)
    while rows := list(islice(items, rows_max)):
        yield _batch(schema, keys, rows)


def _batch(schema: pa.Schema, keys: KeyColumns, rows: Sequence[tuple[int, Any]]) -> pa.RecordBatch:
    columns = [*key_arrays(keys, [key for _, key in rows]), pa.array([time for time, _ in rows], pa.int64())]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
