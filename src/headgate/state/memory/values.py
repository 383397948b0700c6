"""One value per key, for many keys at once: a vector by slot and which slots have one.

Counterpart: ``operators.process.batch_states.BatchValueState`` (ST11). Arguments have no nulls; rows are in the batch's
order.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import polars as pl
import pyarrow as pa

from headgate.state.columns import FixedVector, FrozenChanges, FrozenRows, KeyedColumns, make_vector, to_numpy
from headgate.state.key_index import Slots
from headgate.state.memory.changes import ChangedSlots
from headgate.state.slot_array import Array, LastRows, Mask, SlotArray


class MemoryValues:
    """Values by slot: see ``backend.ValueColumns``. ``keys_count`` tells how many slots the key index has given."""

    def __init__(self, dtype: pa.DataType, keys_count: Callable[[], int], changed: ChangedSlots | None = None) -> None:
        """``changed``: notes what changes; None: nobody asks."""
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

    def clear(self, slots: Slots) -> None:
        """Forget the values of ``slots``."""
        present = self._present.written(self._size)
        self._touched(slots[present[slots]])
        present[slots] = False

    def replace(self, slots: Slots, values: pa.Array) -> Mask:
        """Set values as ``put`` does; return the last row of each slot whose value changed."""
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
            One row, with the new value, of each slot whose value changed.
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
        data[slots[~had]] = worst
        before = data.take(slots)
        combine.at(data, slots, rows)
        is_new = (data.take(slots) == rows) & ((rows != before) | ~had)
        changed = is_new.copy()
        changed[is_new] = self._last.mask(slots[is_new], self._size)
        self._mark(slots, slots[is_new])
        return changed if counts is None else _spread(changed, counts, len(values))

    def add(self, slots: Slots, values: pa.Array) -> Mask:
        """Add to the slots' values; an absent one counts as 0.

        Returns:
            The last row of each slot whose value changed.
        """
        assert isinstance(self._vector, FixedVector)
        data, had = self._vector.numbers(self._size), self._has(slots)
        data[slots[~had]] = 0
        before = data.take(slots)
        np.add.at(data, slots, to_numpy(values))
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
