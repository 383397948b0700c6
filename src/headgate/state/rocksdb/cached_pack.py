"""Several states by slot whose values are in one row of a database behind them (RB27). Counterpart: ``cached``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headgate.state.key_index import Slots
from headgate.state.rocksdb.cached import CachedValues, KeysOf
from headgate.state.rocksdb.database import Changes, Rows
from headgate.state.rocksdb.layout import EncodedKeys
from headgate.state.rocksdb.packed import PackedTable
from headgate.state.rocksdb.tables import put_or_delete
from headgate.state.slot_array import Mask


class CachedPack:
    """What is read and written together of ``members``, in the order of the table's."""

    def __init__(self, table: PackedTable, members: Sequence[CachedValues]) -> None:
        self.table = table
        self._members = members

    @property
    def changed_rows(self) -> int:
        """See ``cached.Cached``."""
        return int(np.count_nonzero(self._differs()))

    def _differs(self) -> Mask:
        found: Mask = np.logical_or.reduce([member.differs() for member in self._members])
        return found

    def load(self, rows: Rows, slots: Slots, keys: EncodedKeys) -> list[int]:
        """Fill ``slots``, all different and empty, from the database; return how many have a value of each member."""
        found = rows.get(keys.in_table(self.table.number))
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
