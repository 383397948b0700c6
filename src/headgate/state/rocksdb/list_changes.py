"""What of lists by slot differs from a database: their ends, if elements were appended, or all of them (RB4).

Counterparts: ``cached`` and ``cached_expiring``, which hold the lists.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from headgate.state.key_index import Slots
from headgate.state.rocksdb.database import Changes
from headgate.state.rocksdb.layout import EncodedKeys, places_of
from headgate.state.rocksdb.tables import Table, entry_rows, store_heads
from headgate.state.slot_array import SlotArray, ranges


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
        """Elements came behind those of ``slots``."""
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
        """Return the slots whose lists differ."""
        return np.flatnonzero(self._differs.read(size)[:size])

    def write(
        self, changes: Changes, slots: Slots, keys: EncodedKeys, exploded: tuple[Slots, pa.Array], size: int
    ) -> None:
        """Add what of ``slots`` differs. ``exploded``: all their elements, and of which of them each is."""
        numbers, elements = exploded
        counts = np.bincount(numbers, minlength=len(slots))
        same, there = self._same.read(size)[slots], self._there.read(size)[slots]
        places = np.arange(len(numbers)) - np.repeat(np.cumsum(counts) - counts, counts)
        is_new = places >= same[numbers]
        rows = entry_rows(self._table, keys, numbers[is_new].tolist(), places_of(places[is_new]))
        changes.put(rows, self._table.codec.encode(elements.filter(pa.array(is_new))))
        gone, gone_places = ranges(counts, np.maximum(there - counts, 0))
        changes.delete(entry_rows(self._table, keys, gone.tolist(), places_of(gone_places)))
        store_heads(self._table, changes, keys, counts)
        self.loaded(slots, counts, size)
        self._differs.written(size)[slots] = False

    def renumber(self, old: Slots) -> None:
        """Keep only the slots ``old``; they become 0, 1, 2 …"""
        for part in (self._differs, self._same, self._there):
            part.renumber(old)
