"""State in memory with a TTL.

The states without one, and beside them the expiry of what they hold (docs/spec/ttl.md).

Each state leaves out what has expired in all that it returns, sets expiries when it is written, and renews them when
it is read, if its TTL says so. ``sweep`` drops a bounded amount of what has expired.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from headgate.state.heap import HeapRows
from headgate.state.key_index import Slots
from headgate.state.memory.change_tracking import ChangedSlots, Interval, MemoryCells
from headgate.state.memory.column_states import MemoryLists, MemoryMaps, MemoryValues
from headgate.state.ttl import TTL, StateTime, drop_expired, last_expiry, no_longer_than
from headgate.state.values import Array, Mask, to_numpy
from headgate.state.vectors import FrozenRows, KeyedColumns, SlotArray

SWEEP_ROWS = 4_096
"""So many slots are looked at in a turn, and two more for each that came since: a round ends before they doubled."""

_LONG_AGO_MS = -(1 << 63)


class Expiries:
    """An expiry per slot: from this processing time on there is no value."""

    def __init__(self, ttl: TTL, time: StateTime) -> None:
        self._ttl_ms = ttl.duration_ms
        self._is_renewed_by_reads = ttl.is_renewed_by_reads
        self._time = time
        self._at = SlotArray(np.int64, _LONG_AGO_MS)

    @property
    def now_ms(self) -> int:
        """What time it is."""
        return self._time.now_ms

    @property
    def next_ms(self) -> int:
        """The expiry of what is written now."""
        return self._time.now_ms + self._ttl_ms

    def read(self, size: int) -> Array:
        """Return the expiries of all slots."""
        return self._at.read(size)[:size]

    def are_live(self, slots: Slots, size: int) -> Mask:
        """Return which of ``slots`` have not expired, if they have a value."""
        found: Mask = self._at.read(size).take(slots) > self.now_ms
        return found

    def renew(self, slots: Slots, size: int) -> None:
        """What is in ``slots`` was written now."""
        self._at.written(size)[slots] = self.next_ms

    def on_read(self, slots: Slots, size: int) -> bool:
        """What is in ``slots`` was read, and none of it has expired; return whether that renews it."""
        # once for each processing time, however often it is read
        if self._is_renewed_by_reads and (self._at.read(size).take(slots) != self.next_ms).any():
            self.renew(slots, size)
            return True
        return False

    def restore(self, slots: Slots, column: pa.Array, size: int) -> None:
        """Set the expiries of ``slots``, as a snapshot has them."""
        self._at.written(size)[slots] = column.to_numpy()

    def end_restore(self, size: int) -> Slots:
        """Nothing lives longer than a TTL from now on; return the slots that would have."""
        longer = np.flatnonzero(self._at.read(size)[:size] > self.next_ms)
        if len(longer):
            self._at.written(size)[longer] = self.next_ms
        return longer

    def freeze(self, size: int) -> Array:
        """Return the expiries as they are now."""
        return self._at.freeze(size)

    def renumber(self, old: Slots) -> None:
        """Keep only the slots ``old``; they become 0, 1, 2 …"""
        self._at.renumber(old)


class Sweep:
    """Goes round through slots, a bounded number at a turn."""

    def __init__(self) -> None:
        self._at = 0
        self._size = 0

    def turn(self, size: int, added: int = 0) -> tuple[int, int]:
        """Return which slots are looked at now, of ``size``: from the first up to and without the second.

        ``added``: to slots that were there before, since the last turn.
        """
        count = SWEEP_ROWS + 2 * (max(size - self._size, 0) + added)
        start = min(self._at, size)
        end = min(start + count, size)
        self._at, self._size = end if end < size else 0, size  # without the second half a sweep could never catch up
        return start, end


def live_rows(frozen: FrozenRows, expiries: Callable[[Slots | None], Array], now_ms: int) -> FrozenRows:
    """Return the rows of ``frozen`` that had not expired, with one more column that says when they do.

    Those that changed are there although they have expired: a restore of chunks leaves them out.

    Args:
        frozen: without expiries.
        expiries: of its rows, in their order, or of those of some places; asked for each time, because nothing is kept
            between two encodings.
        now_ms: what time it was.
    """

    def rows() -> KeyedColumns:
        slots, columns = frozen.rows()
        at = expiries(None)
        living = at > now_ms
        if living.all():
            return slots, [*columns, pa.array(at)]
        return slots[living], [column.filter(pa.array(living)) for column in (*columns, pa.array(at))]

    def of(places: Slots) -> KeyedColumns:
        slots, columns = frozen.of(places)
        return slots, [*columns, pa.array(expiries(places))]

    return FrozenRows(lambda: int(np.count_nonzero(expiries(None) > now_ms)), rows, of, frozen.changes)


def _present_places(present: Mask, places: Slots | None) -> Slots:
    """Return which of ``places`` have something; None: of all there are."""
    return np.flatnonzero(present) if places is None else places[present[places]]


class ExpiringValues(MemoryValues):
    """Values by slot: see ``backend.ValueColumns``."""

    def __init__(
        self,
        dtype: pa.DataType,
        keys_count: Callable[[], int],
        ttl: TTL,
        time: StateTime,
        changed: ChangedSlots | None = None,
    ) -> None:
        super().__init__(dtype, keys_count, changed)
        self._expiries = Expiries(ttl, time)
        self._sweep = Sweep()

    def contains(self, slots: Slots) -> Mask:
        found = self._has(slots)
        if self._expiries.on_read(slots[found], self._size):
            self._renewed(slots[found])
        return found

    def _renewed(self, slots: Slots) -> None:
        """The values of ``slots`` live longer because they were read."""
        self._touched(slots)

    def _has(self, slots: Slots) -> Mask:
        return super()._has(slots) & self._expiries.are_live(slots, self._size)

    def _mark(self, slots: Slots, changed: Slots | None = None) -> None:
        super()._mark(slots)  # all of them: they live longer
        self._expiries.renew(slots, self._size)

    def replace(self, slots: Slots, values: pa.Array) -> Mask:
        """See ``MemoryValues``. A value that stays the same is written all the same."""
        changed = super().replace(slots, values)
        self._mark(slots)
        return changed

    def living(self) -> Mask:
        return super().living() & (self._expiries.read(self._size) > self._expiries.now_ms)

    def freeze(self) -> FrozenRows:
        """See ``MemoryValues``; the last column is the expiry."""
        present, at = self._present.freeze(self._size), self._expiries.freeze(self._size)
        return live_rows(super().freeze(), lambda slots: at[_present_places(present, slots)], self._expiries.now_ms)

    def restore(self, slots: Slots, columns: list[pa.Array]) -> None:
        super().restore(slots, columns[:1])
        self._expiries.restore(slots, columns[1], self._size)

    def end_restore(self) -> None:
        self._touched(self._expiries.end_restore(self._size))
        self._drop(0, self._size)
        self._sweep.turn(self._size)  # nothing of this has come since

    def renumber(self, old: Slots) -> None:
        super().renumber(old)
        self._expiries.renumber(old)

    def sweep(self) -> None:
        """Forget some of what has expired; at the end of a round, what it refers to, if that is much."""
        start, end = self._sweep.turn(self._size)
        self._drop(start, end)
        if end == self._size:
            living = np.flatnonzero(self.living())
            if self._vector.has_garbage(len(living)):
                self._vector.tidy(living)

    def _drop(self, start: int, end: int) -> None:
        present, at = self._present.read(self._size)[start:end], self._expiries.read(self._size)[start:end]
        expired = np.flatnonzero(present & (at <= self._expiries.now_ms))
        if len(expired):
            self.clear(start + expired)


class ExpiringMaps(MemoryMaps):
    """Maps by slot: see ``backend.MapColumns``. Each entry has an expiry of its own."""

    def __init__(
        self,
        key_type: pa.DataType,
        dtype: pa.DataType,
        keys_count: Callable[[], int],
        ttl: TTL,
        time: StateTime,
        changed: ChangedSlots | None = None,
    ) -> None:
        super().__init__(key_type, dtype, keys_count, changed)
        self._ttl = ttl
        self._time = time
        self._expiries = Expiries(ttl, time)
        self._sweep = Sweep()

    def _read(self, entries: Slots) -> Mask:
        found = self._has(entries)
        if self._expiries.on_read(entries[found], len(self._pairs)):
            self._renewed(entries[found])
        return found

    def _renewed(self, entries: Slots) -> None:
        """``entries`` live longer because they were read."""
        self._touched(entries)

    def _has(self, entries: Slots) -> Mask:
        return super()._has(entries) & self._expiries.are_live(entries, len(self._pairs))

    def _mark(self, entries: Slots) -> None:
        super()._mark(entries)
        self._expiries.renew(entries, len(self._pairs))

    def _columns(self, entries: Slots) -> list[pa.Array]:
        return [*super()._columns(entries), pa.array(self._expiries.read(len(self._pairs))[entries])]

    def _empty(self) -> ExpiringMaps:
        changed = None if self._changed is None else self._changed.start_over()
        return ExpiringMaps(self._key_type, self._dtype, self._keys_count, self._ttl, self._time, changed)

    def _living_entries(self) -> Mask:
        return super()._living_entries() & (self._expiries.read(len(self._pairs)) > self._expiries.now_ms)

    def freeze(self) -> FrozenRows:
        """See ``MemoryMaps``; the last column is the expiry."""
        count = len(self._pairs)
        present, at = self._present.freeze(count), self._expiries.freeze(count)
        return live_rows(super().freeze(), lambda entries: at[_present_places(present, entries)], self._expiries.now_ms)

    def restore(self, slots: Slots, columns: list[pa.Array]) -> None:
        super().restore(slots, columns[:2])
        self._expiries.restore(self._numbered(slots, columns[0]), columns[2], len(self._pairs))

    def end_restore(self) -> None:
        self._touched(self._expiries.end_restore(len(self._pairs)))
        self._drop(0, len(self._pairs))
        self._sweep.turn(len(self._pairs))

    def sweep(self) -> None:
        """Forget some of what has expired."""
        self._drop(*self._sweep.turn(len(self._pairs)))

    def _drop(self, start: int, end: int) -> None:
        expired = self._expired(start, end)
        if len(expired):
            self._forget(expired)
            self._tidy()

    def _expired(self, start: int, end: int) -> Slots:
        """Return which entries are still here although they have expired."""
        count = len(self._pairs)
        present, at = self._present.read(count)[start:end], self._expiries.read(count)[start:end]
        return start + np.flatnonzero(present & (at <= self._expiries.now_ms))


class ExpiringLists:
    """Lists by slot: see ``backend.ListColumns``. Beside the elements stand their expiries, which only rise.

    What a list had when it was read lives until one time, which is one number for each list, whatever its length.
    """

    def __init__(
        self,
        dtype: pa.DataType,
        keys_count: Callable[[], int],
        ttl: TTL,
        time: StateTime,
        changed: ChangedSlots | None = None,
    ) -> None:
        self._keys_count = keys_count
        self._values = MemoryLists(dtype, keys_count, is_queue=True, changed=changed)
        self._at = MemoryLists(pa.int64(), keys_count, is_queue=True)
        self._read_until = Expiries(ttl, time)
        self._sweep = Sweep()
        self._added = 0

    def counts(self, slots: Slots) -> Slots:
        self._look_at(slots)
        return self._values.counts(slots)

    def append(self, slots: Slots, values: pa.Array) -> None:
        self._values.append(slots, values)
        self._at.append(slots, pa.array(np.full(len(slots), self._read_until.next_ms)))
        self._added += len(slots)

    def explode(self, slots: Slots) -> tuple[Slots, pa.Array]:
        self._look_at(slots)
        return self._values.explode(slots)

    def rows(self, slots: Slots) -> tuple[Slots, HeapRows]:
        self._look_at(slots)
        return self._values.rows(slots)

    def clear(self, slots: Slots) -> None:
        self._values.clear(slots)
        self._at.clear(slots)

    def _look_at(self, slots: Slots) -> None:
        self._drop_expired(slots)
        # only what is left: it alone can be renewed
        if self._read_until.on_read(slots, self._keys_count()):
            self._renewed(slots)

    def _renewed(self, slots: Slots) -> None:
        """The lists of ``slots``, if they have any element, live longer because they were read."""
        self._values.touched(slots[self._values.counts(slots) > 0])

    def _drop_expired(self, slots: Slots) -> None:
        """Forget the elements of these lists that have expired: the first ones."""
        now_ms = self._read_until.now_ms
        slots = slots[(self._values.counts(slots) > 0) & ~self._read_until.are_live(slots, self._keys_count())]
        is_first_gone = to_numpy(self._at.at(slots, np.zeros(len(slots), np.int64))) <= now_ms
        if is_first_gone.any():
            slots = np.unique(slots[is_first_gone])
            expired = self._expired_counts(slots, now_ms)
            is_whole = expired == self._at.counts(slots)
            self.clear(slots[is_whole])
            self._drop_first(slots[~is_whole], expired[~is_whole])

    def _drop_first(self, slots: Slots, counts: Slots) -> None:
        for lists in (self._values, self._at):
            lists.drop_first(slots, counts)

    def _expired_counts(self, slots: Slots, now_ms: int) -> Slots:
        """Return how many elements of each list have expired, at least one: all lists are bisected at once."""
        low, high = np.ones(len(slots), np.int64), self._at.counts(slots)
        while len(rows := np.flatnonzero(low < high)):
            middle = (low[rows] + high[rows]) // 2
            is_gone = to_numpy(self._at.at(slots[rows], middle)) <= now_ms
            low[rows[is_gone]] = middle[is_gone] + 1
            high[rows[~is_gone]] = middle[~is_gone]
        return low

    def living(self) -> Mask:
        """Return which slots have an element."""
        found = self._values.living().copy()
        slots = np.flatnonzero(found)
        last = to_numpy(self._at.at(slots, self._at.counts(slots) - 1))
        found[slots] = (last > self._read_until.now_ms) | self._read_until.are_live(slots, self._keys_count())
        return found

    def freeze(self) -> FrozenRows:
        """Return what ``MemoryLists`` does; the last column is the expiry."""
        at, read_until = self._at.freeze(), self._read_until.freeze(self._keys_count())

        def expiries(slots: Slots | None) -> Array:
            slots, columns = at.rows() if slots is None else at.of(slots)
            return np.maximum(to_numpy(columns[0]), read_until[slots])

        return live_rows(self._values.freeze(), expiries, self._read_until.now_ms)

    def restore(self, slots: Slots, columns: list[pa.Array]) -> None:
        """Add rows of ``freeze``."""
        self._values.append(slots, columns[0])
        self._at.append(slots, columns[1])

    def end_restore(self) -> None:
        slots = np.flatnonzero(self._at.living())
        rows, found = self._at.explode(slots)
        at, next_ms = to_numpy(found), self._read_until.next_ms
        self._values.touched(np.unique(slots[rows[at > next_ms]]))
        # all of them, because an element is never changed in place
        self._at = MemoryLists(pa.int64(), self._keys_count, is_queue=True)
        self._at.append(slots[rows], pa.array(np.minimum(at, next_ms)))
        self._drop_expired(slots)
        self._sweep.turn(self._keys_count())

    def renumber(self, old: Slots) -> None:
        """Keep only the slots ``old``, which include all that live; they become 0, 1, 2 …"""
        self._drop_expired(np.arange(self._keys_count()))
        for part in (self._values, self._at, self._read_until):
            part.renumber(old)

    def sweep(self) -> None:
        """Forget some of what has expired."""
        start, end = self._sweep.turn(self._keys_count(), self._added)
        self._added = 0
        self._drop_expired(np.arange(start, end))


SWEEP_KEYS = 64
"""So many keys are looked at in a turn, two more for each that came since, and one for each that was changed.

So a round ends before there are twice as many keys, or more elements and entries than keys could be changed.
"""


class ExpiringCells(MemoryCells):
    """One state with a TTL: see ``backend.RowCells``."""

    def __init__(self, ttl: TTL, time: StateTime, interval: Interval | None = None) -> None:
        super().__init__(interval)
        self._ttl_ms = ttl.duration_ms
        self._time = time
        self._to_see: dict[Any, None] = {}
        self._seen: dict[Any, None] = {}
        self._due = 0

    def put(self, key: Any, value: Any) -> None:
        super().put(key, value)
        if key not in self._seen and key not in self._to_see:
            self._seen[key] = None
            self._due += 2

    def writable(self, key: Any) -> Any:
        self._due += 1
        return super().writable(key)

    def keys(self) -> Iterator[Any]:
        """See ``RowCells``: those of which anything lives."""
        now_ms, held = self._time.now_ms, super().keys()
        return (key for key in held if last_expiry(self.get(key)) > now_ms)

    def sweep(self) -> None:
        """Forget what has expired of some keys."""
        if not self._to_see:
            self._to_see, self._seen = self._seen, {}
        now_ms = self._time.now_ms
        for _ in range(min(SWEEP_KEYS + self._due, len(self._to_see))):
            key, _ = self._to_see.popitem()
            if drop_expired(self, key, now_ms):
                self._seen[key] = None
        self._due = 0

    def end_restore(self) -> None:
        now_ms = self._time.now_ms
        limit_ms = now_ms + self._ttl_ms
        # those that have expired, too, which ``keys`` of this class leaves out
        for key in list(super().keys()):
            found = self.get(key)
            kept = no_longer_than(found, limit_ms)
            (self._set if kept == found else self.put)(key, kept)  # in another order, perhaps, which changes nothing
            drop_expired(self, key, now_ms)
        self._due = 0
