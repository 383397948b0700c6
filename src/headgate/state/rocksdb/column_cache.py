"""Cache of states by slot in front of a database: those of memory, and what of each differs from the database.

Counterparts: ``column_backend``, which decides which slots are in the cache, and ``state.memory``, which does the
work. A slot is used only when everything that its key has was loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import numpy as np
import pyarrow as pa

from headgate.state.heap import HeapRows
from headgate.state.key_index import Slots
from headgate.state.memory.column_states import LOW, MemoryLists, MemoryMaps, MemoryValues
from headgate.state.rocksdb.database import Changes, Rows
from headgate.state.rocksdb.row_encoding import EncodedKeys, decode_columns, encode_columns, places_of
from headgate.state.rocksdb.tables import (
    PackedTable,
    Table,
    entry_rows,
    load_entries,
    load_values,
    put_or_delete,
    store_heads,
    store_values,
)
from headgate.state.values import Mask, is_fixed
from headgate.state.vectors import SlotArray, ranges


class ListChanges:
    """What of lists by slot differs from the database: their ends, if elements were appended, or all of them."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._differs = SlotArray(np.bool_)
        self._same = SlotArray(np.int64)
        """How many elements, from the first one on, are those of the database."""
        self._there = SlotArray(np.int64)
        """How many elements the database has."""

    @property
    def count(self) -> int:
        """How many lists differ."""
        return int(np.count_nonzero(self._differs.read(0)))

    def appended(self, slots: Slots, size: int) -> None:
        """Elements were appended to the lists of ``slots``."""
        self._differs.written(size)[slots] = True

    def rewritten(self, slots: Slots, size: int) -> None:
        """Nothing of ``slots`` is as it was."""
        self._differs.written(size)[slots] = True
        self._same.written(size)[slots] = 0

    def loaded(self, slots: Slots, counts: Slots, size: int) -> None:
        """The database has ``counts`` elements of each of ``slots``, which are these."""
        self._same.written(size)[slots] = counts
        self._there.written(size)[slots] = counts

    def differing(self, size: int) -> Slots:
        """Return the slots with lists that differ."""
        return np.flatnonzero(self._differs.read(size)[:size])

    def write(
        self, changes: Changes, slots: Slots, keys: EncodedKeys, exploded: tuple[Slots, pa.Array], size: int
    ) -> None:
        """Add what of ``slots`` differs. ``exploded``: all their elements, and of which of them each is."""
        numbers, elements = exploded
        assert len(numbers) == len(elements), "each element is of one list"
        counts = np.bincount(numbers, minlength=len(slots))
        same, there = self._same.read(size)[slots], self._there.read(size)[slots]
        places = np.arange(len(numbers)) - np.repeat(np.cumsum(counts) - counts, counts)
        # of a list that was rewritten none is the same
        is_new = places >= same[numbers]
        rows = entry_rows(self._table, keys, numbers[is_new].tolist(), places_of(places[is_new]))
        changes.put(rows, self._table.codec.encode(elements.filter(pa.array(is_new))))
        # a list that became shorter: its last rows go
        gone, gone_places = ranges(counts, np.maximum(there - counts, 0))
        changes.delete(entry_rows(self._table, keys, gone.tolist(), places_of(gone_places)))
        store_heads(self._table, changes, keys, counts)
        self.loaded(slots, counts, size)
        self._differs.written(size)[slots] = False

    def renumber(self, old: Slots) -> None:
        """Keep only the slots ``old``; they become 0, 1, 2 …"""
        for part in (self._differs, self._same, self._there):
            part.renumber(old)


KeysOf: TypeAlias = Callable[[Slots], tuple[Slots, EncodedKeys]]
"""Returns slots in about the order of their rows, and their keys: neighbours are written and found more quickly."""

ENTRY_BYTES = 128
"""An element or entry in the cache is taken to be so large, beside its value."""

_VALUE_BYTES = 12
"""The same of a value: what is noted for each slot, in arrays that double as they grow."""

_REFERENCE_BYTES = 40
"""What is more for each part of a value that is no number: where it begins, and by what it is found."""


def _value_bytes(dtype: pa.DataType) -> int:
    """Return what a value of a canonical type takes in the cache, beside itself."""
    if pa.types.is_struct(dtype):
        return _VALUE_BYTES + sum(_value_bytes(field.type) for field in dtype)
    return _VALUE_BYTES if is_fixed(dtype) else _VALUE_BYTES + _REFERENCE_BYTES


class Cached(Protocol):
    """What ``column_backend`` does with a state of any kind.

    Attributes:
        changed_rows: about how many keys, or entries of a map, differ from the database; not fewer.
        held_rows: about how many rows are here.
        row_bytes: what each takes, beside its value.
    """

    table: Table

    @property
    def row_bytes(self) -> int:
        """See the class."""

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

    def rows_count(self) -> int:
        """Return how many rows there are here, all slots together. Each barrier asks."""

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

    @property
    def row_bytes(self) -> int:
        return _value_bytes(self.table.dtype)

    def _touch(self, slots: Slots) -> None:
        self._differs.written(self._size)[slots] = True

    @property
    def changed_rows(self) -> int:
        return int(np.count_nonzero(self._differs.read(0)))

    def put(self, slots: Slots, values: pa.Array) -> None:
        super().put(slots, values)
        self._touch(slots)

    def put_rows(self, slots: Slots, counts: Slots, rows: HeapRows) -> None:
        super().put_rows(slots, counts, rows)
        self._touch(slots)

    def clear(self, slots: Slots) -> None:
        super().clear(slots)
        self._touch(slots)

    def replace(self, slots: Slots, values: pa.Array) -> Mask:
        changed = super().replace(slots, values)
        self._touch(slots[changed])
        return changed

    def extreme(self, slots: Slots, values: pa.Array, *, is_min: bool) -> Mask:
        changed = super().extreme(slots, values, is_min=is_min)
        self._touch(slots[changed])
        return changed

    def add(self, slots: Slots, values: pa.Array) -> Mask:
        changed = super().add(slots, values)
        self._touch(slots[changed])
        return changed

    def load(self, rows: Rows, slots: Slots, keys: EncodedKeys) -> int:
        has, stored = load_values(self.table, rows, keys)
        self.fill(slots[has], stored)
        return int(has.sum())

    def fill(self, slots: Slots, stored: pa.Array) -> None:
        """Have what the database has of ``slots``."""
        # of the base class: what is loaded does not differ from the database
        super().put(slots, stored)

    def _stored(self, slots: Slots) -> pa.Array:
        """Return what the database is to have of ``slots``."""
        return self._vector.take(slots)

    def write_back(self, changes: Changes, keys_of: KeysOf) -> None:
        slots = np.flatnonzero(self.differs())
        if len(slots):
            slots, keys = keys_of(slots)
            store_values(self.table, changes, keys, *self.held(slots))
            self.wrote(slots)

    def differs(self) -> Mask:
        """Return which slots differ from the database."""
        return self._differs.read(self._size)[: self._size]

    def held(self, slots: Slots) -> tuple[Mask, pa.Array]:
        """Return which of ``slots`` have a value, and what the database is to have of these."""
        has = self._has(slots)
        return has, self._stored(slots[has])

    def wrote(self, slots: Slots) -> None:
        """The database has what ``slots`` have."""
        self._differs.written(self._size)[slots] = False

    @property
    def held_rows(self) -> int:
        return self.rows_count()

    def rows_of(self) -> Slots:
        return self.living().astype(np.int64)

    def rows_count(self) -> int:
        return int(np.count_nonzero(self.living()))

    def drop(self, slots: Slots) -> None:
        super().clear(slots)

    def renumber(self, old: Slots) -> None:
        super().renumber(old)
        self._differs.renumber(old)


class CachedLists(MemoryLists):
    """See ``Cached`` and ``backend.ListColumns``. Elements that are appended are written, the others are not again."""

    row_bytes = ENTRY_BYTES

    def __init__(self, table: Table, keys_count: Callable[[], int]) -> None:
        super().__init__(table.dtype, keys_count)
        self.table = table
        self._changes = ListChanges(table)

    def append(self, slots: Slots, values: pa.Array) -> None:
        super().append(slots, values)
        self._changes.appended(slots, self._size)

    @property
    def changed_rows(self) -> int:
        return self._changes.count

    def clear(self, slots: Slots) -> None:
        super().clear(slots)
        self._changes.rewritten(slots, self._size)

    def load(self, rows: Rows, slots: Slots, keys: EncodedKeys) -> int:
        entries = load_entries(self.table, rows, keys)
        # of the base class: what is loaded does not differ from the database
        super().append(np.repeat(slots, entries.counts), entries.values)
        self._changes.loaded(slots, entries.counts, self._size)
        return len(entries.suffixes)

    def write_back(self, changes: Changes, keys_of: KeysOf) -> None:
        slots = self._changes.differing(self._size)
        if len(slots):
            slots, keys = keys_of(slots)
            self._changes.write(changes, slots, keys, self.explode(slots), self._size)

    @property
    def held_rows(self) -> int:
        return self._used

    def rows_of(self) -> Slots:
        return self._counts.read(self._size)[: self._size]

    def rows_count(self) -> int:
        return int(self.rows_of().sum())

    def drop(self, slots: Slots) -> None:
        super().clear(slots)

    def renumber(self, old: Slots) -> None:
        super().renumber(old)
        self._changes.renumber(old)


class CachedMaps(MemoryMaps):
    """See ``Cached`` and ``backend.MapColumns``. What was written or removed is noted, and looked at later."""

    row_bytes = ENTRY_BYTES

    def __init__(self, table: Table, keys_count: Callable[[], int]) -> None:
        super().__init__(table.outer[-1], table.dtype, keys_count)
        self.table = table
        self.changed_rows = 0
        self._noted: list[tuple[Slots, pa.Array]] = []

    def _note(self, slots: Slots, map_keys: pa.Array) -> None:
        self._noted.append((slots, map_keys))
        self.changed_rows += len(slots)

    def put(self, slots: Slots, map_keys: pa.Array, values: pa.Array) -> None:
        super().put(slots, map_keys, values)
        self._note(slots, map_keys)

    def remove(self, slots: Slots, map_keys: pa.Array) -> None:
        super().remove(slots, map_keys)
        self._note(slots, map_keys)

    def clear(self, slots: Slots) -> None:
        # noted first: afterwards nothing says which entries there were
        _, entries = self._exploded(slots)
        self._note_entries(entries[self._present.read(len(self._pairs)).take(entries)])
        super().clear(slots)

    def _note_entries(self, entries: Slots) -> None:
        if len(entries) == 0:
            return
        words = self._pairs.words(entries)
        self._note(words >> 32, self._map_keys.columns(words & LOW)[0])

    def load(self, rows: Rows, slots: Slots, keys: EncodedKeys) -> int:
        entries = load_entries(self.table, rows, keys)
        (map_keys,), _ = decode_columns(entries.suffixes, self.table.outer[-1:], 0)
        self._fill(np.repeat(slots, entries.counts), map_keys, entries.values)
        return len(entries.suffixes)

    def _fill(self, slots: Slots, map_keys: pa.Array, stored: pa.Array) -> None:
        """Have these entries of the database."""
        super().put(slots, map_keys, stored)

    def _stored(self, entries: Slots) -> pa.Array:
        """Return what the database is to have of ``entries``."""
        return self._values.take(entries)

    def write_back(self, changes: Changes, keys_of: KeysOf) -> None:
        noted, self._noted, self.changed_rows = self._noted, [], 0
        if not noted:
            return
        slots = np.concatenate([slots for slots, _ in noted])
        map_keys = pa.concat_arrays([keys for _, keys in noted])
        # an entry may have been noted often: what it is now is written, once
        entries, firsts = np.unique(self._numbered(slots, map_keys), return_index=True)
        slots, map_keys = slots[firsts], map_keys.take(pa.array(firsts))
        keyed, numbers = np.unique(slots, return_inverse=True)
        keyed, keys = keys_of(keyed)
        # ``keys_of`` has brought the keys in the order of their rows: the numbers follow them
        numbers = np.argsort(keyed)[numbers]
        has = self._has(entries)
        suffixes = encode_columns([map_keys])
        rows = entry_rows(self.table, keys, numbers.tolist(), suffixes)
        put_or_delete(changes, rows, has, self.table.codec.encode(self._stored(entries[has])))
        store_heads(self.table, changes, keys, self.rows_of()[keyed])

    @property
    def held_rows(self) -> int:
        return self._live

    def rows_of(self) -> Slots:
        entries = np.flatnonzero(self._present.read(0)[: len(self._pairs)])
        return np.bincount(self._pairs.words(entries) >> 32, minlength=self._size)

    def rows_count(self) -> int:
        return int(self.rows_of().sum())

    def drop(self, slots: Slots) -> None:
        super().clear(slots)


class CachedPack:
    """What is read and written together of ``members``, in the order of the table's."""

    def __init__(self, table: PackedTable, members: Sequence[CachedValues]) -> None:
        self.table = table
        self._members = members

    @property
    def changed_rows(self) -> int:
        return int(np.count_nonzero(self._differs()))

    def _differs(self) -> Mask:
        found: Mask = np.logical_or.reduce([member.differs() for member in self._members])
        return found

    def load(self, rows: Rows, slots: Slots, keys: EncodedKeys) -> list[int]:
        """Fill ``slots``, all different and empty, from the database; return how many have a value of each member."""
        found = rows.get(keys.in_table(self.table.number))
        assert len(found) == len(slots), "one row is looked up for each slot"
        there = slots[np.array([value is not None for value in found], np.bool_)]
        counts = []
        members = self.table.decode([value for value in found if value is not None])
        for member, (has, values) in zip(self._members, members, strict=True):
            member.fill(there[has], values)
            counts.append(int(has.sum()))
        return counts

    def write_back(self, changes: Changes, keys_of: KeysOf) -> None:
        """Add the rows of all keys of which any member differs from the database."""
        slots = np.flatnonzero(self._differs())
        if len(slots):
            slots, keys = keys_of(slots)
            held = [member.held(slots) for member in self._members]
            put_or_delete(changes, keys.in_table(self.table.number), *self.table.encode(held))
            for member in self._members:
                member.wrote(slots)
