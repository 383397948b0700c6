"""States by slot with a database behind them: those of memory, and what of each differs from the database (RB4).

Counterparts: ``by_column``, which says which slots are in the cache, and ``state.memory``, which does the work. A slot
is used only when everything that its key has was loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import numpy as np
import pyarrow as pa

from headgate.state.descriptors import StateKind
from headgate.state.key_index import Slots
from headgate.state.memory.lists import MemoryLists
from headgate.state.memory.maps import MemoryMaps
from headgate.state.memory.values import MemoryValues
from headgate.state.rocksdb.database import Changes, Rows
from headgate.state.rocksdb.layout import EncodedKeys, decode_columns, encode_columns, places_of
from headgate.state.rocksdb.tables import (
    Table,
    entry_rows,
    load_entries,
    load_values,
    put_or_delete,
    store_heads,
    store_values,
)
from headgate.state.slot_array import Mask, SlotArray, ranges

KeysOf: TypeAlias = Callable[[Slots], EncodedKeys]


class Cached(Protocol):
    """What ``by_column`` does with a state of any kind.

    Attributes:
        changed_rows: about how many keys, or entries of a map, differ from the database; not fewer.
        held_rows: about how many rows are here.
    """

    table: Table

    @property
    def changed_rows(self) -> int:
        """See the class."""

    @property
    def held_rows(self) -> int:
        """See the class."""

    def load(self, rows: Rows, slots: Slots, keys: EncodedKeys) -> int:
        """Fill ``slots``, all different and empty, from the database; return how many rows they have."""

    def write_back(self, changes: Changes, keys_of: KeysOf) -> None:
        """Add what differs from the database."""

    def rows_of(self) -> Slots:
        """Return how many rows each slot has."""

    def living(self) -> Mask:
        """Return which slots have anything."""

    def drop(self, slots: Slots) -> None:
        """Forget ``slots`` here; the database keeps them. Called after ``write_back``."""

    def renumber(self, old: Slots) -> None:
        """Keep only the slots ``old``, which include all that live; they become 0, 1, 2 …"""


class CachedValues(MemoryValues):
    """See ``Cached`` and ``backend.ValueColumns``."""

    def __init__(self, table: Table, keys_count: Callable[[], int]) -> None:
        super().__init__(table.dtype, keys_count)
        self.table = table
        self._differs = SlotArray(np.bool_)

    def _touch(self, slots: Slots) -> None:
        self._differs.written(self._size)[slots] = True

    @property
    def changed_rows(self) -> int:
        """See ``Cached``."""
        return int(np.count_nonzero(self._differs.read(0)))

    def put(self, slots: Slots, values: pa.Array) -> None:
        """See ``ValueColumns``."""
        super().put(slots, values)
        self._touch(slots)

    def clear(self, slots: Slots) -> None:
        """See ``ValueColumns``."""
        super().clear(slots)
        self._touch(slots)

    def replace(self, slots: Slots, values: pa.Array) -> Mask:
        """See ``ValueColumns``."""
        changed = super().replace(slots, values)
        self._touch(slots[changed])
        return changed

    def extreme(self, slots: Slots, values: pa.Array, *, is_min: bool) -> Mask:
        """See ``ValueColumns``."""
        changed = super().extreme(slots, values, is_min=is_min)
        self._touch(slots[changed])
        return changed

    def add(self, slots: Slots, values: pa.Array) -> Mask:
        """See ``ValueColumns``."""
        changed = super().add(slots, values)
        self._touch(slots[changed])
        return changed

    def load(self, rows: Rows, slots: Slots, keys: EncodedKeys) -> int:
        """See ``Cached``."""
        has, values = load_values(self.table, rows, keys)
        super().put(slots[has], values)
        return int(has.sum())

    def write_back(self, changes: Changes, keys_of: KeysOf) -> None:
        """See ``Cached``."""
        slots = np.flatnonzero(self._differs.read(self._size)[: self._size])
        if len(slots):
            has = self.contains(slots)
            store_values(self.table, changes, keys_of(slots), has, self.get(slots[has]))
            self._differs.written(self._size)[slots] = False

    @property
    def held_rows(self) -> int:
        """See ``Cached``."""
        return int(np.count_nonzero(self.living()))

    def rows_of(self) -> Slots:
        """See ``Cached``."""
        return self.living().astype(np.int64)

    def drop(self, slots: Slots) -> None:
        """See ``Cached``."""
        super().clear(slots)

    def renumber(self, old: Slots) -> None:
        """See ``Cached``."""
        super().renumber(old)
        self._differs.renumber(old)


class CachedLists(MemoryLists):
    """See ``Cached`` and ``backend.ListColumns``. Elements that are appended are written, the others are not again."""

    def __init__(self, table: Table, keys_count: Callable[[], int]) -> None:
        super().__init__(table.dtype, keys_count)
        self.table = table
        self._differs = SlotArray(np.bool_)
        self._same = SlotArray(np.int64)
        """How many elements, from the first one on, are those of the database."""
        self._there = SlotArray(np.int64)
        """How many elements the database has."""

    def append(self, slots: Slots, values: pa.Array) -> None:
        """See ``ListColumns``."""
        super().append(slots, values)
        self._differs.written(self._size)[slots] = True

    @property
    def changed_rows(self) -> int:
        """See ``Cached``."""
        return int(np.count_nonzero(self._differs.read(0)))

    def clear(self, slots: Slots) -> None:
        """See ``ListColumns``."""
        super().clear(slots)
        self._differs.written(self._size)[slots] = True
        self._same.written(self._size)[slots] = 0

    def load(self, rows: Rows, slots: Slots, keys: EncodedKeys) -> int:
        """See ``Cached``."""
        entries = load_entries(self.table, rows, keys)
        super().append(np.repeat(slots, entries.counts), entries.values)
        self._same.written(self._size)[slots] = entries.counts
        self._there.written(self._size)[slots] = entries.counts
        return len(entries.suffixes)

    def write_back(self, changes: Changes, keys_of: KeysOf) -> None:
        """See ``Cached``."""
        slots = np.flatnonzero(self._differs.read(self._size)[: self._size])
        if len(slots):
            self._write(changes, slots, keys_of(slots))
            self._differs.written(self._size)[slots] = False

    def _write(self, changes: Changes, slots: Slots, keys: EncodedKeys) -> None:
        counts, same = self.counts(slots), self._same.read(self._size)[slots]
        there = self._there.read(self._size)[slots]
        numbers, elements = self.explode(slots)
        places = np.arange(len(numbers)) - np.repeat(np.cumsum(counts) - counts, counts)
        is_new = places >= same[numbers]
        rows = entry_rows(self.table, keys, numbers[is_new].tolist(), places_of(places[is_new]))
        changes.put(rows, self.table.codec.encode(elements.filter(pa.array(is_new))))
        gone, gone_places = ranges(counts, np.maximum(there - counts, 0))
        changes.delete(entry_rows(self.table, keys, gone.tolist(), places_of(gone_places)))
        store_heads(self.table, changes, keys, counts)
        self._same.written(self._size)[slots] = counts
        self._there.written(self._size)[slots] = counts

    @property
    def held_rows(self) -> int:
        """See ``Cached``."""
        return self._used

    def rows_of(self) -> Slots:
        """See ``Cached``."""
        return self._counts.read(self._size)[: self._size]

    def drop(self, slots: Slots) -> None:
        """See ``Cached``."""
        super().clear(slots)

    def renumber(self, old: Slots) -> None:
        """See ``Cached``."""
        super().renumber(old)
        for part in (self._differs, self._same, self._there):
            part.renumber(old)


class CachedMaps(MemoryMaps):
    """See ``Cached`` and ``backend.MapColumns``. What was written or removed is noted, and looked at later."""

    def __init__(self, table: Table, keys_count: Callable[[], int]) -> None:
        super().__init__(table.outer[-1], table.dtype, keys_count)
        self.table = table
        self.changed_rows = 0
        self._noted: list[tuple[Slots, pa.Array]] = []

    def _note(self, slots: Slots, map_keys: pa.Array) -> None:
        self._noted.append((slots, map_keys))
        self.changed_rows += len(slots)

    def put(self, slots: Slots, map_keys: pa.Array, values: pa.Array) -> None:
        """See ``MapColumns``."""
        super().put(slots, map_keys, values)
        self._note(slots, map_keys)

    def remove(self, slots: Slots, map_keys: pa.Array) -> None:
        """See ``MapColumns``."""
        super().remove(slots, map_keys)
        self._note(slots, map_keys)

    def clear(self, slots: Slots) -> None:
        """See ``MapColumns``."""
        rows, map_keys, _ = self.items(slots)
        super().clear(slots)
        self._note(slots[rows], map_keys)

    def load(self, rows: Rows, slots: Slots, keys: EncodedKeys) -> int:
        """See ``Cached``."""
        entries = load_entries(self.table, rows, keys)
        (map_keys,), _ = decode_columns(entries.suffixes, self.table.outer[-1:], 0)
        super().put(np.repeat(slots, entries.counts), map_keys, entries.values)
        return len(entries.suffixes)

    def write_back(self, changes: Changes, keys_of: KeysOf) -> None:
        """See ``Cached``."""
        noted, self._noted, self.changed_rows = self._noted, [], 0
        if not noted:
            return
        slots = np.concatenate([slots for slots, _ in noted])
        map_keys = pa.concat_arrays([keys for _, keys in noted])
        _, firsts = np.unique(self._numbered(slots, map_keys), return_index=True)
        slots, map_keys = slots[firsts], map_keys.take(pa.array(firsts))
        keyed, numbers = np.unique(slots, return_inverse=True)
        keys = keys_of(keyed)
        has = self.contains(slots, map_keys)
        suffixes = encode_columns([map_keys])
        rows = entry_rows(self.table, keys, numbers.tolist(), suffixes)
        values = self.get(slots[has], map_keys.filter(pa.array(has)))
        put_or_delete(changes, rows, has, self.table.codec.encode(values))
        store_heads(self.table, changes, keys, self.rows_of()[keyed])

    @property
    def held_rows(self) -> int:
        """See ``Cached``."""
        return self._live

    def rows_of(self) -> Slots:
        """See ``Cached``."""
        entries = np.flatnonzero(self._present.read(0)[: len(self._pairs)])
        return np.bincount(self._pairs.words(entries) >> 32, minlength=self._size)

    def drop(self, slots: Slots) -> None:
        """See ``Cached``."""
        super().clear(slots)


def cached(table: Table, keys_count: Callable[[], int]) -> CachedValues | CachedLists | CachedMaps:
    """Return the empty cache of ``table``."""
    match table.kind:
        case StateKind.VALUE:
            return CachedValues(table, keys_count)
        case StateKind.LIST:
            return CachedLists(table, keys_count)
        case StateKind.MAP:
            return CachedMaps(table, keys_count)
