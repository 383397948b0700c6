"""Value, list and map state by column in memory, for many keys at once.

A value state is a vector by slot. Lists are blocks in one pool, doubled when they are full: appending costs O(rows)
amortised, reading O(rows + elements), and a position of the pool is written once, so that a snapshot needs no copy of
the elements. Map entries are numbered by (key slot, map key slot), with a list of them per key; a removed entry
keeps its number until there are more removed than living ones. Counterpart: ``operators.process.batch_state``.
Arguments have no nulls; rows are in the batch's order.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import polars as pl
import pyarrow as pa

from headgate.state.heap import HeapRows
from headgate.state.key_index import Slots, WordIndex, make_key_index
from headgate.state.memory.change_tracking import ChangedSlots
from headgate.state.values import Array, Mask, to_numpy
from headgate.state.vectors import (
    FixedVector,
    FrozenChanges,
    FrozenRows,
    HeapVector,
    KeyedColumns,
    LastRows,
    ListVector,
    SlotArray,
    Vector,
    make_vector,
    ranges,
)
from headgate.state.window_aggregates import add_values


class MemoryValues:
    """Values by slot: see ``backend.ValueColumns``. ``keys_count`` tells how many slots the key index has given."""

    def __init__(self, dtype: pa.DataType, keys_count: Callable[[], int], changed: ChangedSlots | None = None) -> None:
        """``changed``: notes what changes; None: not tracked."""
        self._keys_count = keys_count
        self._changed = changed
        self._vector = make_vector(dtype)
        self._present = SlotArray(np.bool_)
        self._last = LastRows()

    @property
    def _size(self) -> int:
        """A number that exceeds every slot."""
        return self._keys_count()

    def get(self, slots: Slots) -> pa.Array:
        """Return the value of each slot, or null."""
        return self._vector.take(slots, self.contains(slots))

    def contains(self, slots: Slots) -> Mask:
        """Return which slots have a value."""
        return self._has(slots)

    def _has(self, slots: Slots) -> Mask:
        found: Mask = self._present.read(self._size).take(slots)
        return found

    def _mark(self, slots: Slots, changed: Slots | None = None) -> None:
        """``slots`` have a value that was written now. ``changed``: those where it is another one; None: all."""
        self._present.written(self._size)[slots] = True
        self._touched(slots if changed is None else changed)

    def _touched(self, slots: Slots) -> None:
        """``slots`` changed."""
        if self._changed is not None:
            self._changed.mark(slots, self._size)

    def put(self, slots: Slots, values: pa.Array) -> None:
        """Set values; the last row of a slot wins."""
        is_last = self._last.mask(slots, self._size)
        if not is_last.all():
            slots, values = slots[is_last], values.filter(pa.array(is_last))
        self._vector.put(slots, values, self._size)
        self._mark(slots)
        self._tidy()

    def rows(self, slots: Slots) -> tuple[Slots, HeapRows]:
        """Return the structs of the lists of ``slots``, which have some: the number of the slot of each, and it."""
        assert isinstance(self._vector, ListVector)
        return self._vector.rows(slots)

    def added(self, structs: pa.StructArray) -> HeapRows:
        """Take structs over, of which ``put_rows`` makes lists."""
        assert isinstance(self._vector, ListVector)
        return self._vector.added(structs)

    def put_rows(self, slots: Slots, counts: Slots, rows: HeapRows) -> None:
        """Set lists of ``counts`` structs; the slots are all different."""
        assert isinstance(self._vector, ListVector)
        self._vector.put_rows(slots, counts, rows, self._size)
        self._mark(slots)
        self._tidy()

    def clear(self, slots: Slots) -> None:
        """Forget the values of ``slots``."""
        present = self._present.written(self._size)
        self._touched(slots[present[slots]])
        present[slots] = False

    def replace(self, slots: Slots, values: pa.Array) -> Mask:
        """Set values as ``put`` does; return the last row of each slot with a changed value."""
        is_last = self._last.mask(slots, self._size)
        had = self._has(slots)
        before = self._vector.take(slots, had)
        changed: Mask = is_last & ~(had & _equal(before, values))
        if changed.any():
            self._vector.put(slots[changed], values.filter(pa.array(changed)), self._size)
            self._mark(slots[changed])
            self._tidy()
        return changed

    def extreme(self, slots: Slots, values: pa.Array, *, is_min: bool) -> Mask:
        """Keep the smaller (or larger) of each slot's value and the rows'; NaN never counts.

        Returns:
            One row, with the new value, of each slot with a changed value.
        """
        assert isinstance(self._vector, FixedVector)
        rows = to_numpy(values)
        data = self._vector.numbers(self._size)
        worst = _extremes(rows.dtype)[1 if is_min else 0]
        combine: np.ufunc = np.minimum if is_min else np.maximum
        counts = None
        if rows.dtype.kind == "f" and np.isnan(rows).any():
            counts = np.flatnonzero(~np.isnan(rows))
            slots, rows = slots[counts], rows[counts]
        had = self._has(slots)
        # any number beats what absent ones begin with
        data[slots[~had]] = worst
        before = data.take(slots)
        # ``at``, because a slot may have several rows
        combine.at(data, slots, rows)
        is_new = (data.take(slots) == rows) & ((rows != before) | ~had)
        changed = is_new.copy()
        changed[is_new] = self._last.mask(slots[is_new], self._size)
        self._mark(slots, slots[is_new])
        return changed if counts is None else _spread(changed, counts, len(values))

    def add(self, slots: Slots, values: pa.Array) -> Mask:
        """Add to the slots' values; an absent one counts as 0.

        Returns:
            The last row of each slot with a changed value.

        Raises:
            UsageError: a sum of integers is larger than its type holds.
        """
        assert isinstance(self._vector, FixedVector)
        data, had = self._vector.numbers(self._size), self._has(slots)
        data[slots[~had]] = 0
        before = data.take(slots)
        add_values(data, slots, to_numpy(values))
        changed: Mask = self._last.mask(slots, self._size) & (~had | (data.take(slots) != before))
        self._mark(slots, slots[changed])
        return changed

    def living(self) -> Mask:
        """Return which slots have a value."""
        return self._present.read(self._size)[: self._size]

    def freeze(self) -> FrozenRows:
        """Return the slots that have a value now, and the values."""
        vector, present = self._vector.freeze(self._size), self._present.freeze(self._size)

        def rows() -> KeyedColumns:
            slots = np.flatnonzero(present)
            return slots, [vector.take(slots)]

        def of(slots: Slots) -> KeyedColumns:
            slots = slots[present[slots]]
            return slots, [vector.take(slots)]

        changes = None
        if self._changed is not None:
            changes = FrozenChanges(self._changed.freeze(self._size).after, lambda slots: (slots[~present[slots]], []))
        return FrozenRows(lambda: int(np.count_nonzero(present)), rows, of, changes)

    def restore(self, slots: Slots, columns: list[pa.Array]) -> None:
        """Add rows of ``freeze``."""
        self.put(slots, columns[0])

    def renumber(self, old: Slots) -> None:
        """Keep only the slots ``old``; they become 0, 1, 2 …"""
        self._vector.renumber(old)
        self._present.renumber(old)
        if self._changed is not None:
            self._changed.renumber(old)

    def _tidy(self) -> None:
        if self._vector.has_garbage(self._size):
            self._vector.tidy(np.flatnonzero(self.living()))


def _equal(left: pa.Array, right: pa.Array) -> Mask:
    a, b = pl.from_arrow(left), pl.from_arrow(right)
    assert isinstance(a, pl.Series)
    assert isinstance(b, pl.Series)
    return a.eq_missing(b).to_numpy()


def _extremes(dtype: np.dtype[np.generic]) -> tuple[object, object]:
    """Return the least and the greatest value of a numpy type."""
    if dtype.kind == "b":
        return False, True
    if dtype.kind == "f":
        return -np.inf, np.inf
    limits = np.iinfo(dtype)  # type: ignore[type-var]
    return limits.min, limits.max


def _spread(mask: Mask, rows: Array, count: int) -> Mask:
    spread = np.zeros(count, np.bool_)
    spread[rows] = mask
    return spread


_BLOCK_MIN = 2
_POOL_FREE = 4_096
"""So many unused positions a pool may always have."""


class MemoryLists:
    """Lists by slot: see ``backend.ListColumns``. ``keys_count`` tells how many slots the key index has given."""

    def __init__(
        self,
        dtype: pa.DataType,
        keys_count: Callable[[], int],
        *,
        is_queue: bool = False,
        changed: ChangedSlots | None = None,
    ) -> None:
        """Make empty ones.

        Args:
            dtype: of elements.
            keys_count: how many slots there are.
            is_queue: elements go from the beginning (``drop_first``); blocks are larger, not to be full soon.
            changed: notes which lists change; None: not tracked.
        """
        self._keys_count = keys_count
        self._changed = changed
        self._is_queue = is_queue
        self._dtype = dtype
        # elements never change, so that a row needs one reference instead of one for each of its columns
        self._pool: Vector = HeapVector(dtype) if pa.types.is_struct(dtype) else make_vector(dtype)
        self._end = 0
        self._used = 0
        self._starts = SlotArray(np.int64)
        self._counts = SlotArray(np.int64)
        self._blocks = SlotArray(np.int64)

    @property
    def _size(self) -> int:
        """A number that exceeds every slot."""
        return self._keys_count()

    def counts(self, slots: Slots) -> Slots:
        """Return the length of each slot's list."""
        found: Slots = self._counts.read(self._size).take(slots)
        return found

    def append(self, slots: Slots, values: pa.Array) -> None:
        """Append one element per row, in the order of the rows."""
        if len(slots) == 0:
            return
        assert len(slots) == len(values), "each element has a list"
        # stable: the elements of a list keep the order of their rows
        order = np.argsort(slots, kind="stable")
        sorted_slots = slots[order]
        firsts = np.flatnonzero(np.diff(sorted_slots, prepend=-1))
        lists, more = sorted_slots[firsts], np.diff(firsts, append=len(slots))
        self._reserve(lists, more)
        counts = self._counts.written(self._size)
        at = self._starts.read(self._size)[lists] + counts[lists]
        positions = np.empty(len(slots), np.int64)
        _, positions[order] = ranges(at, more)
        self._pool.put(positions, values, self._end, is_fresh=True)
        counts[lists] += more
        self.touched(lists)

    def touched(self, slots: Slots) -> None:
        """The lists of ``slots`` changed."""
        if self._changed is not None:
            self._changed.mark(slots, self._size)

    def _reserve(self, lists: Slots, more: Slots) -> None:
        """Give every list (all different) a block for ``more`` elements beside those that it has."""
        counts, blocks = self._counts.read(self._size)[lists], self._blocks.read(self._size)[lists]
        needed = counts + more
        full = np.flatnonzero(needed > blocks)
        if len(full) == 0:
            return
        lists, counts, before = lists[full], counts[full], blocks[full]
        wanted = _block_sizes(needed[full] * (2 if self._is_queue else 1))
        starts = self._starts.written(self._size)
        moved_to = self._end + np.cumsum(wanted) - wanted
        self._end += int(wanted.sum())
        self._used += int(wanted.sum() - before.sum())
        _, old = ranges(starts[lists], counts)
        _, new = ranges(moved_to, counts)
        if len(old):
            self._pool.move(old, new, self._end)
        starts[lists] = moved_to
        self._blocks.written(self._size)[lists] = wanted

    def explode(self, slots: Slots) -> tuple[Slots, pa.Array]:
        """Return all elements of the rows' lists: the row of each, and the element."""
        rows, positions = ranges(self._starts.read(self._size).take(slots), self._counts.read(self._size).take(slots))
        return rows, self._pool.take(positions)

    def rows(self, slots: Slots) -> tuple[Slots, HeapRows]:
        """Return all structs of the rows' lists: the row of each, and the struct, of which nothing is copied."""
        assert isinstance(self._pool, HeapVector)
        rows, positions = ranges(self._starts.read(self._size).take(slots), self._counts.read(self._size).take(slots))
        return rows, self._pool.rows(positions)

    def at(self, slots: Slots, places: Slots) -> pa.Array:
        """Return the element at one place of each slot's list; it has so many."""
        return self._pool.take(self._starts.read(self._size).take(slots) + places)

    def drop_first(self, slots: Slots, counts: Slots) -> None:
        """Forget the first ``counts`` elements of the lists of ``slots``, all different; no other is moved."""
        for part, change in ((self._starts, counts), (self._counts, -counts), (self._blocks, -counts)):
            part.written(self._size)[slots] += change
        self._used -= int(counts.sum())
        self.touched(slots)
        self._rebuild_if_wasteful()

    def clear(self, slots: Slots) -> None:
        """Forget the lists of ``slots``. Their blocks are never written again."""
        slots = np.unique(slots)
        blocks = self._blocks.written(self._size)
        self._used -= int(blocks[slots].sum())
        blocks[slots] = 0
        counts = self._counts.written(self._size)
        self.touched(slots[counts[slots] > 0])
        counts[slots] = 0
        self._rebuild_if_wasteful()

    def _rebuild_if_wasteful(self) -> None:
        assert 0 <= self._used <= self._end, "blocks in use are among those that were given"
        if self._end <= 2 * self._used + _POOL_FREE and not self._pool.has_garbage(self._used):
            return
        slots = np.flatnonzero(self.living())
        rows, values = self.explode(slots)
        rebuilt = MemoryLists(self._dtype, self._keys_count, is_queue=self._is_queue)
        rebuilt.append(slots[rows], values)
        rebuilt._changed = self._changed  # no list has changed
        # in place: operators and handles hold this object
        self.__dict__.update(rebuilt.__dict__)

    def living(self) -> Mask:
        """Return which slots have an element."""
        found: Mask = self._counts.read(self._size)[: self._size] > 0
        return found

    def freeze(self) -> FrozenRows:
        """Return the slot of every element there is now, and the elements."""
        pool = self._pool.freeze(self._end)
        starts, counts = self._starts.freeze(self._size), self._counts.freeze(self._size)

        def rows() -> KeyedColumns:
            slots, positions = ranges(starts, counts)
            return slots, [pool.take(positions)]

        def of(slots: Slots) -> KeyedColumns:
            lists, positions = ranges(starts[slots], counts[slots])
            return slots[lists], [pool.take(positions)]

        changes = None
        if self._changed is not None:
            changes = FrozenChanges(
                self._changed.freeze(self._size).after, lambda slots: (slots[counts[slots] == 0], [])
            )
        return FrozenRows(lambda: int(counts.sum()), rows, of, changes)

    def restore(self, slots: Slots, columns: list[pa.Array]) -> None:
        """Add rows of ``freeze``."""
        self.append(slots, columns[0])

    def renumber(self, old: Slots) -> None:
        """Keep only the slots ``old``, which include all that live; they become 0, 1, 2 …"""
        for part in (self._starts, self._counts, self._blocks):
            part.renumber(old)
        if self._changed is not None:
            self._changed.renumber(old)


def _block_sizes(needed: Slots) -> Slots:
    """Return the next power of two: doubling makes moving cost O(1) per element."""
    sizes: Slots = np.left_shift(1, np.ceil(np.log2(np.maximum(needed, _BLOCK_MIN))).astype(np.int64))
    return np.maximum(sizes, needed)


_DEAD_FREE = 4_096
"""So many removed entries a map may always have."""

LOW = 0xFFFF_FFFF
"""What of the word of an entry is the number of its map key; the rest is the slot."""


class MemoryMaps:
    """Maps by slot: see ``backend.MapColumns``. ``keys_count`` tells how many slots the key index has given."""

    def __init__(
        self,
        key_type: pa.DataType,
        dtype: pa.DataType,
        keys_count: Callable[[], int],
        changed: ChangedSlots | None = None,
    ) -> None:
        """``changed``: notes which entries change; None: not tracked."""
        self._keys_count = keys_count
        self._changed = changed
        self._key_type = key_type
        self._dtype = dtype
        self._map_keys = make_key_index([key_type])
        self._pairs = WordIndex()
        self._values = make_vector(dtype)
        self._present = SlotArray(np.bool_)
        self._listed = SlotArray(np.bool_)
        self._entries = MemoryLists(pa.int64(), keys_count)
        self._last = LastRows()
        self._live = 0

    @property
    def _size(self) -> int:
        """A number that exceeds every slot."""
        return self._keys_count()

    def get(self, slots: Slots, map_keys: pa.Array) -> pa.Array:
        """Return the value of each row's key and map key, or null."""
        entries = self._numbered(slots, map_keys)
        return self._values.take(entries, self._read(entries))

    def contains(self, slots: Slots, map_keys: pa.Array) -> Mask:
        """Return which rows' map keys have a value."""
        return self._read(self._numbered(slots, map_keys))

    def _read(self, entries: Slots) -> Mask:
        """Return which entries there are; this counts as a read of them."""
        return self._has(entries)

    def _has(self, entries: Slots) -> Mask:
        found: Mask = self._present.read(len(self._pairs)).take(entries)
        return found

    def _mark(self, entries: Slots) -> None:
        """``entries`` have a value that was written now."""
        self._present.written(len(self._pairs))[entries] = True
        self._touched(entries)

    def _touched(self, entries: Slots) -> None:
        """``entries`` changed."""
        if self._changed is not None:
            self._changed.mark(entries, len(self._pairs))

    def put(self, slots: Slots, map_keys: pa.Array, values: pa.Array) -> None:
        """Set values; the last row of an entry wins."""
        entries = self._numbered(slots, map_keys)
        count = len(self._pairs)
        is_last = self._last.mask(entries, count)
        if not is_last.all():
            slots, entries, values = slots[is_last], entries[is_last], values.filter(pa.array(is_last))
        self._values.put(entries, values, count)
        listed = self._listed.written(count)
        # before they are marked: those that are there already are not counted again
        self._live += len(entries) - int(self._present.read(count)[entries].sum())
        self._mark(entries)
        # an entry that was removed may still be in the list of its key: it must not be there twice
        is_new = ~listed[entries]
        self._entries.append(slots[is_new], pa.array(entries[is_new]))
        listed[entries] = True
        self._tidy()

    def remove(self, slots: Slots, map_keys: pa.Array) -> None:
        """Remove the rows' map keys."""
        self._forget(self._numbered(slots, map_keys))
        self._tidy()

    def clear(self, slots: Slots) -> None:
        """Forget the maps of ``slots``."""
        _, entries = self._exploded(slots)
        self._forget(entries)
        # they are in no list any more: one that comes back is added again
        self._listed.written(len(self._pairs))[entries] = False
        self._entries.clear(slots)
        self._tidy()

    def _forget(self, entries: Slots) -> None:
        present = self._present.written(len(self._pairs))
        entries = np.unique(entries)
        entries = entries[present[entries]]
        self._live -= len(entries)
        assert self._live >= 0, "an entry is counted when it comes and when it goes"
        self._touched(entries)
        present[entries] = False

    def items(self, slots: Slots) -> tuple[Slots, pa.Array, pa.Array]:
        """Return all entries of the rows' maps: the row of each, the map key and the value."""
        rows, entries = self._exploded(slots)
        living = self._read(entries)
        if not living.all():
            rows, entries = rows[living], entries[living]
        map_keys, values, *_ = self._columns(entries)
        return rows, map_keys, values

    def _columns(self, entries: Slots) -> list[pa.Array]:
        """Return what ``restore`` needs of entries."""
        return [self._map_keys.columns(self._pairs.words(entries) & LOW)[0], self._values.take(entries)]

    def _exploded(self, slots: Slots) -> tuple[Slots, Slots]:
        rows, entries = self._entries.explode(slots)
        return rows, entries.to_numpy()

    def _numbered(self, slots: Slots, map_keys: pa.Array) -> Slots:
        return self._pairs.slots((slots << 32) | self._map_keys.slots([map_keys]))

    def _tidy(self) -> None:
        count = len(self._pairs)
        if count > 2 * self._live + _DEAD_FREE:
            self._rebuild(np.arange(self._size))
        elif self._values.has_garbage(self._live):
            self._values.tidy(np.flatnonzero(self._present.read(count)[:count]))  # also what has expired

    def _rebuild(self, old: Slots) -> None:
        """Renumber the living entries, for the slots ``old``, which become 0, 1, 2 …"""
        rows, entries = self._exploded(old)
        living = self._has(entries)
        rebuilt = self._empty()
        rebuilt.restore(rows[living], self._columns(entries[living]))
        # in place: operators and handles hold this object
        self.__dict__.update(rebuilt.__dict__)

    def _empty(self) -> MemoryMaps:
        changed = None if self._changed is None else self._changed.start_over()
        return MemoryMaps(self._key_type, self._dtype, self._keys_count, changed)

    def living(self) -> Mask:
        """Return which slots have an entry."""
        entries = np.flatnonzero(self._living_entries())
        found = np.zeros(self._size, np.bool_)
        found[self._pairs.words(entries) >> 32] = True
        return found

    def _living_entries(self) -> Mask:
        found: Mask = self._present.read(len(self._pairs))[: len(self._pairs)]
        return found

    def freeze(self) -> FrozenRows:
        """Return the slot of every entry there is now, the map keys and the values."""
        count = len(self._pairs)
        present, values = self._present.freeze(count), self._values.freeze(count)
        # neither is copied: both only grow, and what a number says never changes
        pairs, map_keys = self._pairs.prefix(), self._map_keys

        def of(entries: Slots) -> KeyedColumns:
            entries = entries[present[entries]]
            slots, columns = identities(entries)
            return slots, [*columns, values.take(entries)]

        def identities(entries: Slots) -> KeyedColumns:
            words = pairs[entries]
            return words >> 32, map_keys.columns(words & LOW)

        changes = None
        if self._changed is not None:
            of_entries = self._changed.freeze(count)
            changes = FrozenChanges(of_entries.after, lambda entries: identities(entries[~present[entries]]))
        return FrozenRows(lambda: int(np.count_nonzero(present)), lambda: of(np.flatnonzero(present)), of, changes)

    def restore(self, slots: Slots, columns: list[pa.Array]) -> None:
        """Add rows of ``freeze``."""
        self.put(slots, columns[0], columns[1])

    def renumber(self, old: Slots) -> None:
        """Keep only the slots ``old``, which include all that live; they become 0, 1, 2 …"""
        self._rebuild(old)
