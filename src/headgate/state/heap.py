"""Values that are appended and never change, by number. Structs are kept column by column.

Numbers and times are numpy arrays. Texts and binaries are bytes in large blocks, and an Arrow *view* of each, which is
16 bytes: so that values are found and put in order without their bytes, which are copied when a column is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.state.key_index import Slots
from headgate.state.values import Array, Mask, is_fixed, storage_type, to_arrow, to_numpy

_ROWS_MIN = 64
_BLOCK_MIN, _BLOCK_MAX = 1 << 12, 1 << 25
_BYTES_MAX = 1 << 30
"""More bytes at once are appended in parts: places in a block are numbers of 32 bits."""

_PLACE_MAX = (1 << 31) - 1

_INLINE = 12
"""Texts up to this length are in their views."""

_MERGED = 8
"""So many neighbours among the chunks of a nested column become one: values are copied once for each time that it
grows so many times as large."""

CHUNK_BYTES = 1 << 26
"""Chunks from this size on are left as they are: it is their number that must not grow, and copying them takes long."""


class Growing:
    """A numpy array to which others are appended. What is there never changes, so any thread may read it."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self._data: Array = np.empty(_ROWS_MIN, dtype)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def append(self, values: Array) -> None:
        """Add ``values``."""
        self.added(len(values))[:] = values

    def added(self, count: int) -> Array:
        """Add so many values; return the place to write them to, at once."""
        end = self._size + count
        if end > len(self._data):
            grown = np.empty(max(end + end // 4, 2 * len(self._data)), self._data.dtype)
            grown[: self._size] = self._data[: self._size]
            self._data = grown
        place = self._data[self._size : end]
        self._size = end
        return place

    def take(self, refs: Slots) -> Array:
        """Return the values with these numbers."""
        return self._data.take(refs, axis=0)

    def frozen(self) -> Growing:
        """Return what there is now, to be read in any thread."""
        found = Growing.__new__(Growing)
        found._data, found._size = self._data, self._size
        return found


class _Validity:
    """Which values are not null; nothing is kept while all are not."""

    def __init__(self) -> None:
        self._known: Growing | None = None
        self._size = 0

    def append(self, values: pa.Array) -> None:
        if self._known is None and values.null_count:
            self._known = Growing(np.bool_)
            self._known.append(np.ones(self._size, np.bool_))
        if self._known is not None:
            self._known.append(values.is_valid().to_numpy(zero_copy_only=False))
        self._size += len(values)

    def take(self, refs: Slots, valid: Mask | None) -> Mask | None:
        """Return which of ``refs`` are not null; None: all. ``valid``: which may be looked at."""
        if self._known is None:
            return None if valid is None or valid.all() else valid
        found: Mask = self._known.take(refs)
        found = found if valid is None else found & valid
        return None if found.all() else found

    def frozen(self) -> _Validity:
        found = _Validity()
        found._known, found._size = None if self._known is None else self._known.frozen(), self._size
        return found


class _Column(Protocol):
    """One column of a heap."""

    def append(self, values: pa.Array) -> None:
        """Add values."""

    def take(self, refs: Slots, valid: Mask | None) -> pa.Array:
        """Return the values with these numbers; null where not ``valid``."""

    def frozen(self) -> _Column:
        """Return what there is now, to be read in any thread."""


class _FixedColumn:
    def __init__(self, dtype: pa.DataType) -> None:
        self._dtype = dtype
        self._data = Growing(storage_type(dtype))
        self._validity = _Validity()
        self._zero = to_arrow(np.zeros(1, storage_type(dtype)), dtype)[0]

    def append(self, values: pa.Array) -> None:
        self._validity.append(values)
        if values.null_count:
            values = values.fill_null(self._zero)
        self._data.append(to_numpy(values))

    def take(self, refs: Slots, valid: Mask | None) -> pa.Array:
        return to_arrow(self._data.take(refs), self._dtype, self._validity.take(refs, valid))

    def frozen(self) -> _FixedColumn:
        found = _FixedColumn.__new__(_FixedColumn)
        found._dtype, found._data, found._validity = self._dtype, self._data.frozen(), self._validity.frozen()
        return found


class _TextColumn:
    """Texts or binaries."""

    def __init__(self, dtype: pa.DataType) -> None:
        self._dtype = dtype
        self._view_type = pa.string_view() if pa.types.is_large_string(dtype) else pa.binary_view()
        self._views = Growing(np.complex128)  # of 16 bytes, as a view is
        self._validity = _Validity()
        self._blocks: list[pa.Buffer] = []
        self._block: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._used = 0

    def append(self, values: pa.Array) -> None:
        if len(values) > 1 and values.nbytes > _BYTES_MAX:
            half = len(values) // 2
            self.append(values[:half])
            self.append(values[half:])
            return
        self._validity.append(values)
        data = values.buffers()[2]
        if data is not None and data.size > _PLACE_MAX:  # a part of a large column, which Arrow does not cast
            values = values.take(pa.array(np.arange(len(values))))
        found = values.cast(self._view_type)
        _, views, *buffers = found.buffers()
        words = self._views.added(len(found)).view(np.int32).reshape(-1, 4)
        words[:] = np.frombuffer(views, np.int32).reshape(-1, 4)[found.offset : found.offset + len(found)]
        is_long = words[:, 0] > _INLINE
        if found.null_count:
            is_valid = found.is_valid().to_numpy(zero_copy_only=False)
            words[~is_valid] = 0
            is_long &= is_valid
        blocks: list[tuple[Mask, int]] = []
        for i, buffer in enumerate(buffers):
            chosen = is_long & (words[:, 2] == i) if len(buffers) > 1 else is_long
            if chosen.any():
                starts, ends = words[:, 3], words[:, 0] + words[:, 3].astype(np.int64)
                low = int(starts.min(where=chosen, initial=_PLACE_MAX))
                at = self._added(np.frombuffer(buffer, np.uint8)[low : int(ends.max(where=chosen, initial=0))])
                np.add(starts, np.int32(at - low), out=starts, where=chosen)
                blocks.append((chosen, len(self._blocks) - 1))
        for chosen, block in blocks:  # numbers of buffers are looked at until here
            np.copyto(words[:, 2], block, where=chosen)

    def _added(self, data: npt.NDArray[np.uint8]) -> int:
        """Copy bytes into the last block; return where they begin there."""
        if self._used + len(data) > len(self._block):
            size = max(len(data), min(max(_BLOCK_MIN, 2 * len(self._block)), _BLOCK_MAX))
            self._block, self._used = np.empty(size, np.uint8), 0
            self._blocks.append(pa.py_buffer(self._block))
        at = self._used
        self._used += len(data)
        self._block[at : self._used] = data
        return at

    def take(self, refs: Slots, valid: Mask | None) -> pa.Array:
        valid = self._validity.take(refs, valid)
        bitmap = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
        buffers = [bitmap, pa.py_buffer(self._views.take(refs)), *self._blocks]
        return pa.Array.from_buffers(self._view_type, len(refs), buffers).cast(self._dtype)

    def frozen(self) -> _TextColumn:
        found = _TextColumn.__new__(_TextColumn)
        found._dtype, found._view_type, found._validity = self._dtype, self._view_type, self._validity.frozen()
        found._views, found._blocks = self._views.frozen(), list(self._blocks)
        return found


class _NestedColumn:
    """Lists, maps, structs in structs, decimals: Arrow arrays as they came, small neighbours merged."""

    def __init__(self, dtype: pa.DataType) -> None:
        self._dtype = dtype
        self._chunks: list[pa.Array] = []
        self._levels: list[int] = []
        """How often each chunk was merged; large ones have one that no other has."""

    def append(self, values: pa.Array) -> None:
        if len(values) == 0:
            return
        self._chunks.append(values)
        self._levels.append(0)
        while len(self._levels) >= _MERGED and len(set(self._levels[-_MERGED:])) == 1:
            merged, level = pa.concat_arrays(self._chunks[-_MERGED:]), self._levels[-1] + 1
            self._chunks[-_MERGED:] = [merged]
            self._levels[-_MERGED:] = [level if merged.nbytes < CHUNK_BYTES else -len(self._chunks)]

    def take(self, refs: Slots, valid: Mask | None) -> pa.Array:
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

    def frozen(self) -> _NestedColumn:
        found = _NestedColumn(self._dtype)
        found._chunks, found._levels = list(self._chunks), list(self._levels)
        return found


def _column(dtype: pa.DataType) -> _Column:
    if is_fixed(dtype):
        return _FixedColumn(dtype)
    is_text = pa.types.is_large_string(dtype) or pa.types.is_large_binary(dtype)
    return _TextColumn(dtype) if is_text else _NestedColumn(dtype)


class Heap:
    """Values of one canonical type, numbered as they are appended."""

    def __init__(self, dtype: pa.DataType) -> None:
        self.dtype = dtype
        self._fields = {field.name: i for i, field in enumerate(dtype)} if _is_table(dtype) else {}
        self._columns = [_column(field.type) for field in dtype] if self._fields else [_column(dtype)]
        self._validity = _Validity()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def append(self, values: pa.Array) -> Slots:
        """Add values; return their numbers."""
        start = self._size
        self._size += len(values)
        if len(values) == 0:
            return np.empty(0, np.int64)
        if self._fields:
            self._validity.append(values)
            for column, part in zip(self._columns, values.flatten(), strict=True):
                column.append(part)
        else:
            self._columns[0].append(values)
        return np.arange(start, self._size)

    def take(self, refs: Slots, valid: Mask | None = None) -> pa.Array:
        """Return the values with these numbers; null where not ``valid``."""
        if self._size == 0:
            return pa.nulls(len(refs), self.dtype)
        if valid is not None:
            refs = np.where(valid, refs, 0)
        if not self._fields:
            return self._columns[0].take(refs, valid)
        valid = self._validity.take(refs, valid)
        mask = None if valid is None else pa.array(~valid)
        columns = [column.take(refs, valid) for column in self._columns]
        return pa.StructArray.from_arrays(columns, fields=list(self.dtype), mask=mask)

    def field(self, name: str, refs: Slots) -> pa.Array:
        """Return one field of the structs with these numbers."""
        return self._columns[self._fields[name]].take(refs, self._validity.take(refs, None))

    def frozen(self) -> Heap:
        """Return what there is now, to be read in any thread."""
        found = Heap.__new__(Heap)
        found.dtype, found._fields, found._size = self.dtype, self._fields, self._size
        found._columns, found._validity = [column.frozen() for column in self._columns], self._validity.frozen()
        return found


def _is_table(dtype: pa.DataType) -> bool:
    """Whether values are structs that are kept column by column: their fields have different names."""
    return bool(pa.types.is_struct(dtype)) and 0 < dtype.num_fields == len({field.name for field in dtype})


@dataclass(frozen=True, slots=True)
class HeapRows:
    """Structs in a heap, of which nothing is copied before it is asked for."""

    heap: Heap
    refs: Slots

    def __len__(self) -> int:
        return len(self.refs)

    def __getitem__(self, rows: Slots | Mask) -> HeapRows:
        return HeapRows(self.heap, self.refs[rows])

    def __add__(self, other: HeapRows) -> HeapRows:
        """Return these rows and then others of the same heap."""
        assert self.heap is other.heap, "rows of two heaps"
        return HeapRows(self.heap, np.concatenate([self.refs, other.refs]))

    def column(self, name: str) -> pa.Array:
        """Return one column."""
        return self.heap.field(name, self.refs)

    def columns(self, names: Sequence[str]) -> dict[str, pa.Array]:
        """Return some columns."""
        return {name: self.column(name) for name in names}

    def structs(self) -> pa.Array:
        """Return all of them."""
        return self.heap.take(self.refs)
