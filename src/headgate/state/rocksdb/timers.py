"""Timers in front of a database: those before a place, the *horizon*, are in memory, the others are stored (RB11).

Those in memory are held as state in memory holds them, so they fire in the same order. When none is left, the next ones
are read; when there are too many, the last ones are stored, and the horizon comes nearer. Counterparts:
``stored_timers``; ``rows`` and ``by_column``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from headgate.state.descriptors import KeyColumns
from headgate.state.key_hash import Hashes, Words, hash_columns
from headgate.state.key_index import Slots
from headgate.state.memory.timers import Changes, MemoryColumnTimers, MemoryRowTimers, key_arrays, latest_changes
from headgate.state.rocksdb.file_manifest import Continued
from headgate.state.rocksdb.local_databases import LocalDatabase
from headgate.state.rocksdb.stored_timers import BEGINNING_OF_TIME, END_OF_TIME, Place, StoredTimers, Timers
from headgate.state.row_values import keys_of

FRONT_MAX = 65_536
"""So many timers of one kind are in memory, or as many as an eighth of the cache has room for."""

TIMER_BYTES = 512
"""A timer in memory is taken to be so large."""

WAITING_MAX = 16_384
"""So many timers may wait to be written to the database together."""

_FRONT_SHARE = 8


class Front(Protocol):
    """The timers in memory."""

    def __len__(self) -> int:
        """Return how many there are, or somewhat more."""

    def next_ms(self) -> int | None:
        """See ``RowTimers`` and ``ColumnTimers``."""


FrontT = TypeVar("FrontT", bound=Front)


class RocksTimers(Generic[FrontT]):
    """What both forms share.

    Attributes:
        front: the timers before the horizon.
        stored: the others, but for those that wait to be written.
    """

    def __init__(self, keys: KeyColumns, front: FrontT, stored: StoredTimers, place: LocalDatabase) -> None:
        self._keys = keys
        self.front = front
        self.stored = stored
        self._place = place
        self._horizon = END_OF_TIME
        self._split_at = 0

    def __len__(self) -> int:
        self.write_back()
        return len(self.front) + self.stored.count

    @property
    def _front_max(self) -> int:
        return max(1, min(FRONT_MAX, self._place.cache_bytes // _FRONT_SHARE // TIMER_BYTES))

    def next_ms(self) -> int | None:
        """See ``RowTimers`` and ``ColumnTimers``."""
        found = self.front.next_ms()
        while found is None and self._bring():
            found = self.front.next_ms()
        return found

    def _bring(self) -> bool:
        """Have more timers in memory, of which all have fired or were deleted; return False if there are no more."""
        if self._horizon == END_OF_TIME:
            return False
        self.write_back()
        found, self._horizon = self.stored.take_first(self._front_max)
        self._take_in(found)
        return True

    def tidy(self) -> None:
        """Store the last timers, if there are many, and write what waits, if that is much. Between batches."""
        if self._waiting_count() >= WAITING_MAX:
            self.write_back()
        if len(self.front) <= self._front_max:
            self._split_at = 0
        elif len(self.front) > self._split_at:
            self.write_back()
            columns, times_ms = self._split(self._front_max // 2)
            if len(times_ms):
                self._horizon = self._first_place(columns, times_ms)
                self.stored.add(columns, times_ms)
            self._split_at = 2 * len(self.front)  # those of one place stay together

    def restore(self, columns: Sequence[pa.Array], times_ms: Words) -> None:
        """Add timers of a snapshot; each of them once, and before anything else."""
        self._horizon = BEGINNING_OF_TIME
        self.stored.add(columns, times_ms)

    def go_on_with(self, continued: Continued) -> None:
        """The database has timers now; nothing else was done yet."""
        self._horizon = BEGINNING_OF_TIME
        self.stored.go_on_with(continued.rows[self.stored.table.section.name], continued.groups)

    def _hashes(self, columns: Sequence[pa.Array]) -> Hashes:
        names = self._keys.section_names
        return hash_columns(pa.RecordBatch.from_arrays(list(columns), names=names), names)

    def _first_place(self, columns: Sequence[pa.Array], times_ms: Words) -> Place:
        hashes = self._hashes(columns)
        first = np.lexsort((hashes, times_ms))[0]
        return Place(int(times_ms[first]), int(hashes[first]))

    def write_back(self) -> None:
        """Have everything in the database that is not before the horizon."""
        raise NotImplementedError

    def _waiting_count(self) -> int:
        raise NotImplementedError

    def _take_in(self, found: Timers) -> None:
        raise NotImplementedError

    def _split(self, count: int) -> Timers:
        raise NotImplementedError


class RocksRowTimers(RocksTimers[MemoryRowTimers]):
    """See ``timers.RowTimers``."""

    def __init__(
        self, keys: KeyColumns, stored: StoredTimers, place: LocalDatabase, load: Callable[[list[Any]], None]
    ) -> None:
        """``load``: has what keys have in the cache."""
        super().__init__(keys, MemoryRowTimers(keys), stored, place)
        self._load = load
        self._waiting: dict[tuple[int, Any], bool] = {}
        """By time and key, whether the timer is to be there."""

    def register(self, key: Any, time_ms: int) -> None:
        """See ``RowTimers``."""
        if self._is_near(key, time_ms):
            self.front.register(key, time_ms)
        else:
            self._waiting[time_ms, key] = True

    def delete(self, key: Any, time_ms: int) -> None:
        """See ``RowTimers``."""
        if self._is_near(key, time_ms):
            self.front.delete(key, time_ms)
        else:
            self._waiting[time_ms, key] = False

    def _is_near(self, key: Any, time_ms: int) -> bool:
        """Whether a timer is before the horizon."""
        if time_ms != self._horizon.time_ms:
            return time_ms < self._horizon.time_ms
        return int(self._hashes(key_arrays(self._keys, [key]))[0]) < self._horizon.hash

    def take(self, until_ms: int, keys_max: int) -> tuple[int, list[Any]] | None:
        """See ``RowTimers``. What the keys have is loaded."""
        found = self.front.take(until_ms, keys_max)
        while found is None and self._horizon.time_ms <= until_ms and self._bring():
            found = self.front.take(until_ms, keys_max)
        if found is not None:
            self._load(found[1])
        return found

    def all(self) -> Iterator[tuple[int, Any]]:
        """See ``RowTimers``."""
        self.write_back()
        yield from self.front.all()
        for columns, times_ms in self.stored.all():
            yield from zip(times_ms.tolist(), keys_of(columns), strict=True)

    def tidy(self) -> None:
        """See ``RocksTimers``."""
        self.front.cells.absorb()
        super().tidy()

    def write_back(self) -> None:
        """See ``RocksTimers``."""
        if self._waiting:
            columns, times_ms = self._columns([key for _, key in self._waiting], [time for time, _ in self._waiting])
            self.stored.change(columns, times_ms, np.array(list(self._waiting.values()), np.bool_))
            self._waiting = {}

    def _waiting_count(self) -> int:
        return len(self._waiting)

    def _columns(self, keys: list[Any], times_ms: list[int]) -> Timers:
        return key_arrays(self._keys, keys), np.array(times_ms, np.int64)

    def _take_in(self, found: Timers) -> None:
        columns, times_ms = found
        for key, time_ms in zip(keys_of(columns), times_ms.tolist(), strict=True):
            self.front.register(key, time_ms)

    def _split(self, count: int) -> Timers:
        removed = [(key, time_ms) for time_ms, keys in self.front.split(count).items() for key in keys]
        if not removed:
            return [], np.empty(0, np.int64)
        return self._columns([key for key, _ in removed], [time_ms for _, time_ms in removed])


class RocksColumnTimers(RocksTimers[MemoryColumnTimers]):
    """See ``timers.ColumnTimers``. Keys have slots while a timer of theirs is in memory, or waits."""

    def __init__(self, keys: KeyColumns, slots: KeySlots, stored: StoredTimers, place: LocalDatabase) -> None:
        super().__init__(keys, MemoryColumnTimers(slots.hashes), stored, place)
        self._slots = slots
        self._waiting: list[Changes] = []

    def register(self, slots: Slots, times_ms: Words) -> None:
        """See ``ColumnTimers``."""
        self._change(slots, times_ms, self.front.register, 0)

    def delete(self, slots: Slots, times_ms: Words) -> None:
        """See ``ColumnTimers``."""
        self._change(slots, times_ms, self.front.delete, 1)

    def _change(self, slots: Slots, times_ms: Words, in_front: Callable[[Slots, Words], None], deleted: int) -> None:
        if self._horizon == END_OF_TIME:
            in_front(slots, times_ms)
            return
        is_near = times_ms < self._horizon.time_ms
        is_at = np.flatnonzero(times_ms == self._horizon.time_ms)
        if len(is_at):
            is_near[is_at] = self._slots.hashes(slots[is_at]) < np.uint64(self._horizon.hash)
        in_front(slots[is_near], times_ms[is_near])
        if not is_near.all():
            self._waiting.append((times_ms[~is_near], (slots[~is_near] << 1) | deleted))

    def take(self, until_ms: int, rows_max: int) -> tuple[Slots, Words]:
        """See ``ColumnTimers``. What the keys have is loaded."""
        slots, times_ms = self.front.take(until_ms, rows_max)
        while not len(slots) and self._horizon.time_ms <= until_ms and self._bring():
            slots, times_ms = self.front.take(until_ms, rows_max)
        self._slots.load(slots)
        return slots, times_ms

    def write_back(self) -> None:
        """See ``RocksTimers``."""
        if self._waiting:
            times_ms, changes = latest_changes(self._waiting)
            self.stored.change(self._slots.key_columns(changes >> 1), times_ms, changes & 1 == 0)
            self._waiting = []

    def _waiting_count(self) -> int:
        return sum(len(times_ms) for times_ms, _ in self._waiting)

    def _take_in(self, found: Timers) -> None:
        columns, times_ms = found
        if len(times_ms):
            self.front.register(self._slots.numbered(columns), times_ms)

    def _split(self, count: int) -> Timers:
        slots, times_ms = self.front.split(count)
        return self._slots.key_columns(slots), times_ms


class KeySlots(Protocol):
    """The keys of a backend by column."""

    def hashes(self, slots: Slots) -> Any:
        """Return the hashes of the keys of ``slots``."""

    def key_columns(self, slots: Slots) -> list[pa.Array]:
        """Return the key columns of ``slots``."""

    def numbered(self, columns: Sequence[pa.Array]) -> Slots:
        """Return the slots of keys; nothing is loaded."""

    def load(self, slots: Slots) -> None:
        """Have what the keys of ``slots`` have in the cache."""
