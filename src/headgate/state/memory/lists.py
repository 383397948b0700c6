"""A list of elements per key, for many keys at once: blocks in one pool, doubled when they are full.

Appending costs O(rows) amortised (ST12), because a block is moved only when its list has doubled; reading lists costs
O(rows + elements). A position of the pool is written once and then never again until the pool is rebuilt into new
memory, so a snapshot needs no copy of the elements (ST5). Counterpart:
``operators.process.batch_states.BatchListState``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from headgate.state.columns import FrozenChanges, FrozenRows, KeyedColumns, make_vector
from headgate.state.key_index import Slots
from headgate.state.memory.changes import ChangedSlots
from headgate.state.slot_array import Mask, SlotArray, ranges

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
            changed: notes which lists change; None: nobody asks.
        """
        self._keys_count = keys_count
        self._changed = changed
        self._is_queue = is_queue
        self._dtype = dtype
        self._pool = make_vector(dtype)
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
        order = np.argsort(slots, kind="stable")
        sorted_slots = slots[order]
        firsts = np.flatnonzero(np.diff(sorted_slots, prepend=-1))
        lists, more = sorted_slots[firsts], np.diff(firsts, append=len(slots))
        self._reserve(lists, more)
        counts = self._counts.written(self._size)
        at = self._starts.read(self._size)[lists] + counts[lists]
        _, positions = ranges(at, more)
        self._pool.put(positions, values.take(pa.array(order)), self._end, is_fresh=True)
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
        if self._end <= 2 * self._used + _POOL_FREE and not self._pool.has_garbage(self._used):
            return
        slots = np.flatnonzero(self.living())
        rows, values = self.explode(slots)
        rebuilt = MemoryLists(self._dtype, self._keys_count, is_queue=self._is_queue)
        rebuilt.append(slots[rows], values)
        rebuilt._changed = self._changed  # no list has changed
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
