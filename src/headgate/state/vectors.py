"""Growable arrays and vectors of one Arrow type, read and written at many slots at once, with copy-on-write freeze.

Numbers, booleans and times are numpy arrays; structs a vector for each field; everything else a reference into an
append-only heap of Arrow arrays. A frozen array belongs to its snapshot: the next writer copies it first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.state.key_index import Slots

Array: TypeAlias = npt.NDArray[Any]
Mask: TypeAlias = npt.NDArray[np.bool_]

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

_MERGED = 8
"""So many neighbours among the chunks of a heap become one: values are copied once for each time that it grows so
many times as large."""

CHUNK_BYTES = 1 << 26
"""Chunks from this size on are left as they are: it is their number that must not grow, and copying them takes long."""


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
    return FixedVector(dtype) if is_fixed(dtype) else HeapVector(dtype)


def is_fixed(dtype: pa.DataType) -> bool:
    """Whether values are kept in a numpy array: numbers, booleans and times."""
    return bool(pa.types.is_primitive(dtype))


def to_numpy(values: pa.Array) -> Array:
    """Return a fixed-width column without nulls; times as integers."""
    dtype = values.type
    if pa.types.is_date32(dtype):
        values = values.view(pa.int32())
    elif pa.types.is_temporal(dtype):
        values = values.view(pa.int64())
    found: Array = values.to_numpy(zero_copy_only=False)
    return found


@lru_cache
def storage_type(dtype: pa.DataType) -> np.dtype[Any]:
    """Return the numpy type of ``to_numpy``."""
    return to_numpy(pa.array([], dtype)).dtype


def to_arrow(values: Array, dtype: pa.DataType, valid: Mask | None = None) -> pa.Array:
    """Return the column of ``dtype`` of which ``values`` are the numbers; null where not ``valid``."""
    mask = None if valid is None or valid.all() else ~valid
    column = pa.array(values, mask=mask)
    return column.view(dtype) if pa.types.is_temporal(dtype) else column


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
        columns = [
            field.take(positions, is_valid.take(positions))
            for field, is_valid in zip(self._fields, self._valid, strict=True)
        ]
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
    """Strings, binaries and lists: references into Arrow arrays, which are only ever appended."""

    def __init__(self, dtype: pa.DataType) -> None:
        self._dtype = dtype
        self._refs = SlotArray(np.int64)
        self._chunks: list[pa.Array] = []
        self._levels: list[int] = []
        """How often each chunk was merged; large ones have one that no other has."""
        self._size = 0

    def put(self, positions: Slots, values: pa.Array, size: int, *, is_fresh: bool = False) -> None:
        refs = self._refs.fresh(size) if is_fresh else self._refs.written(size)
        refs[positions] = self._size + np.arange(len(positions))
        self._append(values)

    def move(self, old: Slots, new: Slots, size: int) -> None:
        """See ``Vector``. Moves the references only."""
        self._refs.move(old, new, size)

    def _append(self, values: pa.Array) -> None:
        if len(values) == 0:
            return
        self._chunks.append(values)
        self._levels.append(0)
        self._size += len(values)
        while len(self._levels) >= _MERGED and len(set(self._levels[-_MERGED:])) == 1:
            merged, level = pa.concat_arrays(self._chunks[-_MERGED:]), self._levels[-1] + 1
            self._chunks[-_MERGED:] = [merged]
            self._levels[-_MERGED:] = [level if merged.nbytes < CHUNK_BYTES else -len(self._chunks)]

    def take(self, positions: Slots, valid: Mask | None = None) -> pa.Array:
        refs = self._refs.take(positions)
        mask = None if valid is None or valid.all() else ~valid
        if not self._chunks:
            return pa.nulls(len(refs), self._dtype)
        if len(self._chunks) == 1:
            return self._chunks[0].take(pa.array(refs, mask=mask))
        # Arrow's take of a chunked array would copy all chunks into one first
        ends = np.cumsum([len(chunk) for chunk in self._chunks])
        numbers = np.searchsorted(ends, refs, side="right")
        if mask is not None:
            numbers[mask] = len(self._chunks)
        order = np.argsort(numbers, kind="stable")
        bounds = np.searchsorted(numbers[order], np.arange(len(self._chunks) + 1))
        places = np.empty(len(refs), np.int64)
        places[order] = np.arange(len(refs))
        found = [
            chunk.take(pa.array(refs[order[begin:end]] - (last - len(chunk))))
            for chunk, last, begin, end in zip(self._chunks, ends, bounds[:-1], bounds[1:], strict=True)
            if begin < end
        ]
        return pa.concat_arrays(found or [self._chunks[0][:0]]).take(pa.array(places, mask=mask))

    def freeze(self, size: int) -> HeapVector:
        frozen = HeapVector.__new__(HeapVector)
        frozen._dtype, frozen._refs = self._dtype, self._refs.frozen(size)
        frozen._chunks, frozen._levels, frozen._size = list(self._chunks), list(self._levels), self._size
        return frozen

    def renumber(self, old: Slots) -> None:
        self._refs.renumber(old)

    def tidy(self, living: Slots) -> None:
        values = self.take(living)
        refs = self._refs.written(int(living.max(initial=0)) + 1)
        refs[living] = np.arange(len(living))
        self._chunks, self._size = ([values] if len(values) else []), len(values)
        self._levels = [-1] * len(self._chunks)

    def has_garbage(self, living: int) -> bool:
        return self._size > 2 * living + _HEAP_FREE
