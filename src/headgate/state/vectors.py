"""Growable arrays and vectors of one Arrow type, read and written at many slots at once, with copy-on-write freeze.

Numbers, booleans and times are numpy arrays; structs a vector for each field; everything else a reference into a
heap. A frozen array belongs to its snapshot: the next writer copies it first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.state.heap import Growing, Heap, HeapRows
from headgate.state.key_index import Slots
from headgate.state.values import Array, Mask, is_fixed, storage_type, to_arrow, to_numpy

_SLOTS_MIN = 256


class SlotArray:
    """One number per slot; slots that were never written hold ``fill``."""

    def __init__(self, dtype: npt.DTypeLike, fill: int = 0) -> None:
        self._fill = fill
        self._data: Array = np.full(_SLOTS_MIN, fill, dtype)
        self._is_frozen = False

    def read(self, size: int) -> Array:
        """Return the array, which has at least ``size`` slots, for reading."""
        if size > len(self._data):
            self._grow(size)
        return self._data

    def take(self, slots: Slots) -> Array:
        """Return the numbers of ``slots``."""
        return self.read(int(slots.max(initial=0)) + 1).take(slots)

    def written(self, size: int) -> Array:
        """Return the array, which has at least ``size`` slots, for changing it; copies it if it is frozen."""
        if size > len(self._data):
            self._grow(size)
        elif self._is_frozen:
            self._data = self._data.copy()
            self._is_frozen = False
        return self._data

    def fresh(self, size: int) -> Array:
        """Return the array for writing slots that were never written: no frozen reader looks at those."""
        return self.read(size)

    def move(self, old: Slots, new: Slots, size: int) -> None:
        """Copy numbers from slots ``old`` to ``new``, which were never written and are below ``size``."""
        data = self.fresh(size)
        data[new] = data[old]

    def freeze(self, size: int) -> Array:
        """Return the first ``size`` slots as they are now."""
        self.read(size)
        self._is_frozen = True
        return self._data[:size]

    def frozen(self, size: int) -> SlotArray:
        """Return ``freeze(size)`` as a slot array, to be read only."""
        found = SlotArray.__new__(SlotArray)
        found._fill, found._data, found._is_frozen = self._fill, self.freeze(size), True
        return found

    def renumber(self, old: Slots) -> None:
        """Keep only the slots ``old``; they become 0, 1, 2 …"""
        kept = np.full(max(_SLOTS_MIN, len(old)), self._fill, self._data.dtype)
        kept[: len(old)] = self.take(old)
        self._data, self._is_frozen = kept, False

    def _grow(self, size: int) -> None:
        grown = np.zeros(max(size + size // 4, 2 * len(self._data)), self._data.dtype)  # which touches no memory yet
        grown[: len(self._data)] = self._data
        if self._fill:
            grown[len(self._data) :] = self._fill
        self._data, self._is_frozen = grown, False


class LastRows:
    """Finds the last row of each slot in a batch, in any number of slots."""

    def __init__(self) -> None:
        self._scratch = SlotArray(np.int32, -1)

    def mask(self, slots: Slots, size: int) -> Mask:
        """Return True for the last row of each slot; ``size`` exceeds every slot."""
        scratch = self._scratch.written(size)
        rows = np.arange(len(slots), dtype=np.int32)
        np.maximum.at(scratch, slots, rows)
        is_last: Mask = scratch[slots] == rows
        scratch[slots] = -1
        return is_last


def ranges(starts: Slots, counts: Slots) -> tuple[Slots, Slots]:
    """Return, for ``counts[i]`` positions from ``starts[i]`` on, each one's i and the position itself."""
    rows = np.repeat(np.arange(len(counts)), counts)
    before = np.cumsum(counts) - counts
    return rows, np.repeat(starts - before, counts) + np.arange(len(rows))


_HEAP_FREE = 4_096
"""So many dead values a heap may always have."""


class Vector(Protocol):
    """Values of one type by position."""

    def put(self, positions: Slots, values: pa.Array, size: int, *, is_fresh: bool = False) -> None:
        """Write ``values`` (no nulls) to ``positions``, all different and below ``size``.

        ``is_fresh``: they were never written, so that what is frozen need not be copied.
        """

    def move(self, old: Slots, new: Slots, size: int) -> None:
        """Copy values from positions ``old`` to ``new``, which were never written and are below ``size``."""

    def take(self, positions: Slots, valid: Mask | None = None) -> pa.Array:
        """Return the values at ``positions``; null where not ``valid``."""

    def freeze(self, size: int) -> Vector:
        """Return a vector of the first ``size`` positions as they are now, to be read in any thread."""

    def renumber(self, old: Slots) -> None:
        """Keep only the positions ``old``; they become 0, 1, 2 …"""

    def tidy(self, living: Slots) -> None:
        """Forget what no position in ``living`` refers to."""

    def has_garbage(self, living: int) -> bool:
        """Whether ``tidy`` is worth its time when so many positions are in use."""


KeyedColumns: TypeAlias = tuple[Slots, list[pa.Array]]
"""The slot of each row, and its columns after the keys."""


@dataclass(frozen=True, slots=True)
class FrozenChanges:
    """Which places of a state had changed at a barrier: slots, entries of a map, what was done to timers.

    Attributes:
        after: returns those that changed after a snapshot (``memory.change_tracking``); None: unknown.
        gone: returns those of some places that have no row: the slots, and the other identity columns after the keys.
    """

    after: Callable[[int], Slots | None]
    gone: Callable[[Slots], KeyedColumns]


@dataclass(frozen=True, slots=True)
class FrozenRows:
    """The rows of one state at a barrier, to be read in any thread, more than once.

    Attributes:
        count: returns how many there are, without making them.
        rows: returns the slot of each, and its columns after the keys.
        of: returns those of some places.
        changes: when they changed; None: not tracked.
    """

    count: Callable[[], int]
    rows: Callable[[], KeyedColumns]
    of: Callable[[Slots], KeyedColumns]
    changes: FrozenChanges | None = None


def make_vector(dtype: pa.DataType) -> Vector:
    """Return an empty vector of a canonical type."""
    if pa.types.is_struct(dtype) and dtype.num_fields:
        return StructVector(dtype)
    if pa.types.is_large_list(dtype) and pa.types.is_struct(dtype.value_type):
        return ListVector(dtype)
    return FixedVector(dtype) if is_fixed(dtype) else HeapVector(dtype)


class FixedVector:
    """Numbers, booleans and times."""

    def __init__(self, dtype: pa.DataType) -> None:
        self.dtype = dtype
        self._data = SlotArray(storage_type(dtype))

    def numbers(self, size: int) -> Array:
        """Return the numpy array for changing it in place."""
        return self._data.written(size)

    def put(self, positions: Slots, values: pa.Array, size: int, *, is_fresh: bool = False) -> None:
        target = self._data.fresh(size) if is_fresh else self._data.written(size)
        target[positions] = to_numpy(values)

    def move(self, old: Slots, new: Slots, size: int) -> None:
        self._data.move(old, new, size)

    def take(self, positions: Slots, valid: Mask | None = None) -> pa.Array:
        return to_arrow(self._data.take(positions), self.dtype, valid)

    def freeze(self, size: int) -> FixedVector:
        frozen = FixedVector.__new__(FixedVector)
        frozen.dtype, frozen._data = self.dtype, self._data.frozen(size)
        return frozen

    def renumber(self, old: Slots) -> None:
        self._data.renumber(old)

    def tidy(self, living: Slots) -> None:
        """See ``Vector``."""

    def has_garbage(self, living: int) -> bool:
        return False


class StructVector:
    """Structs: a vector and a validity for each field."""

    def __init__(self, dtype: pa.DataType) -> None:
        self._dtype = dtype
        self._fields = [make_vector(field.type) for field in dtype]
        self._valid = [SlotArray(np.bool_) for _ in dtype]

    def put(self, positions: Slots, values: pa.Array, size: int, *, is_fresh: bool = False) -> None:
        for column, field, valid in zip(values.flatten(), self._fields, self._valid, strict=True):
            where = valid.fresh(size) if is_fresh else valid.written(size)
            if column.null_count == 0:
                where[positions] = True
                field.put(positions, column, size, is_fresh=is_fresh)
                continue
            is_valid = column.is_valid().to_numpy(zero_copy_only=False)
            where[positions] = is_valid
            field.put(positions[is_valid], column.drop_null(), size, is_fresh=is_fresh)

    def move(self, old: Slots, new: Slots, size: int) -> None:
        for field, valid in zip(self._fields, self._valid, strict=True):
            field.move(old, new, size)
            valid.move(old, new, size)

    def take(self, positions: Slots, valid: Mask | None = None) -> pa.Array:
        columns = []
        for field, is_valid in zip(self._fields, self._valid, strict=True):
            known = is_valid.take(positions)  # where a struct is null its fields are as they were before
            columns.append(field.take(positions, known if valid is None else known & valid))
        mask = None if valid is None or valid.all() else pa.array(~valid)
        return pa.StructArray.from_arrays(columns, fields=list(self._dtype), mask=mask)

    def freeze(self, size: int) -> StructVector:
        frozen = StructVector.__new__(StructVector)
        frozen._dtype = self._dtype
        frozen._fields = [field.freeze(size) for field in self._fields]
        frozen._valid = [valid.frozen(size) for valid in self._valid]
        return frozen

    def renumber(self, old: Slots) -> None:
        for field, valid in zip(self._fields, self._valid, strict=True):
            field.renumber(old)
            valid.renumber(old)

    def tidy(self, living: Slots) -> None:
        for field, valid in zip(self._fields, self._valid, strict=True):
            field.tidy(living[valid.take(living)])

    def has_garbage(self, living: int) -> bool:
        return any(field.has_garbage(living) for field in self._fields)


class HeapVector:
    """Strings, binaries and other values of any length: references into a heap."""

    def __init__(self, dtype: pa.DataType) -> None:
        self._refs = SlotArray(np.int64)
        self._heap = Heap(dtype)

    def put(self, positions: Slots, values: pa.Array, size: int, *, is_fresh: bool = False) -> None:
        refs = self._refs.fresh(size) if is_fresh else self._refs.written(size)
        refs[positions] = self._heap.append(values)

    def move(self, old: Slots, new: Slots, size: int) -> None:
        """See ``Vector``. Moves the references only."""
        self._refs.move(old, new, size)

    def rows(self, positions: Slots) -> HeapRows:
        """Return the structs at ``positions``, of which nothing is copied yet."""
        return HeapRows(self._heap, self._refs.take(positions))

    def take(self, positions: Slots, valid: Mask | None = None) -> pa.Array:
        return self._heap.take(self._refs.take(positions), valid)

    def freeze(self, size: int) -> HeapVector:
        frozen = HeapVector.__new__(HeapVector)
        frozen._refs, frozen._heap = self._refs.frozen(size), self._heap.frozen()
        return frozen

    def renumber(self, old: Slots) -> None:
        self._refs.renumber(old)

    def tidy(self, living: Slots) -> None:
        values, self._heap = self.take(living), Heap(self._heap.dtype)
        self._refs.written(int(living.max(initial=0)) + 1)[living] = self._heap.append(values)

    def has_garbage(self, living: int) -> bool:
        return len(self._heap) > 2 * living + _HEAP_FREE


class ListVector:
    """Lists of structs: the references of each list stand together, and a list may take over those of another."""

    def __init__(self, dtype: pa.DataType) -> None:
        self._dtype = dtype
        self._heap = Heap(dtype.value_type)
        self._refs = Growing(np.int64)
        self._starts, self._counts = SlotArray(np.int64), SlotArray(np.int64)

    def put(self, positions: Slots, values: pa.Array, size: int, *, is_fresh: bool = False) -> None:
        counts = values.value_lengths().to_numpy(zero_copy_only=False)
        self.put_rows(positions, counts, self.added(values.flatten()), size, is_fresh=is_fresh)

    def added(self, structs: pa.StructArray) -> HeapRows:
        """Add structs of which ``put_rows`` will make lists."""
        return HeapRows(self._heap, self._heap.append(structs))

    def put_rows(self, positions: Slots, counts: Slots, rows: HeapRows, size: int, *, is_fresh: bool = False) -> None:
        """Write lists of ``counts`` structs each, which are here already: they were in lists, or were added."""
        assert rows.heap is self._heap, "rows of another heap"
        starts = len(self._refs) + np.cumsum(counts) - counts
        self._refs.append(rows.refs)
        for part, numbers in ((self._starts, starts), (self._counts, counts)):
            (part.fresh(size) if is_fresh else part.written(size))[positions] = numbers

    def rows(self, positions: Slots) -> tuple[Slots, HeapRows]:
        """Return the structs of the lists at ``positions``: the number of the list of each, and the struct."""
        owners, places = ranges(self._starts.take(positions), self._counts.take(positions))
        return owners, HeapRows(self._heap, self._refs.take(places))

    def move(self, old: Slots, new: Slots, size: int) -> None:
        """See ``Vector``. Two lists may have the same references."""
        self._starts.move(old, new, size)
        self._counts.move(old, new, size)

    def take(self, positions: Slots, valid: Mask | None = None) -> pa.Array:
        counts = self._counts.take(positions)
        if valid is not None:
            counts = np.where(valid, counts, 0)
        _, places = ranges(self._starts.take(positions), counts)
        mask = None if valid is None or valid.all() else pa.array(~valid)
        ends = pa.array(np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))
        values = self._heap.take(self._refs.take(places))
        return pa.LargeListArray.from_arrays(ends, values, type=self._dtype, mask=mask)

    def freeze(self, size: int) -> ListVector:
        frozen = ListVector.__new__(ListVector)
        frozen._dtype, frozen._heap, frozen._refs = self._dtype, self._heap.frozen(), self._refs.frozen()
        frozen._starts, frozen._counts = self._starts.frozen(size), self._counts.frozen(size)
        return frozen

    def renumber(self, old: Slots) -> None:
        self._starts.renumber(old)
        self._counts.renumber(old)

    def tidy(self, living: Slots) -> None:
        counts = self._counts.take(living)
        _, rows = self.rows(living)
        values, self._heap, self._refs = rows.structs(), Heap(self._heap.dtype), Growing(np.int64)
        size = int(living.max(initial=0)) + 1
        # lists that do not live have no references into the new heap
        self._counts.written(size)[:] = 0
        self.put_rows(living, counts, self.added(values), size)

    def has_garbage(self, living: int) -> bool:
        if max(len(self._heap), len(self._refs)) <= 2 * living + _HEAP_FREE:
            return False
        used = int(self._counts.read(0).sum())
        return len(self._heap) > 2 * used + _HEAP_FREE or len(self._refs) > 4 * used + _HEAP_FREE
