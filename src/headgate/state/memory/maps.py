"""A map per key, for many keys at once: entries numbered by (key slot, map key slot), and a list of them per key.

Counterpart: ``operators.process.batch_states.BatchMapState``. A removed entry keeps its number until there are more
removed than living ones (ST13); then all are numbered anew, which is O(1) per change.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from headgate.state.columns import FrozenChanges, FrozenRows, KeyedColumns, make_vector
from headgate.state.key_index import Slots, WordIndex, make_key_index
from headgate.state.memory.changes import ChangedSlots
from headgate.state.memory.lists import MemoryLists
from headgate.state.slot_array import LastRows, Mask, SlotArray

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
        """``changed``: notes which entries change; None: nobody asks."""
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
        """Return which entries there are; somebody is told of them."""
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
        self._live += len(entries) - int(self._present.read(count)[entries].sum())
        self._mark(entries)
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
        self._listed.written(len(self._pairs))[entries] = False
        self._entries.clear(slots)
        self._tidy()

    def _forget(self, entries: Slots) -> None:
        present = self._present.written(len(self._pairs))
        entries = np.unique(entries)
        entries = entries[present[entries]]
        self._live -= len(entries)
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
            self._values.tidy(np.flatnonzero(self._present.read(count)[:count]))  # also what nobody sees any more

    def _rebuild(self, old: Slots) -> None:
        """Number the living entries anew, for the slots ``old``, which become 0, 1, 2 …"""
        rows, entries = self._exploded(old)
        living = self._has(entries)
        rebuilt = self._empty()
        rebuilt.restore(rows[living], self._columns(entries[living]))
        self.__dict__.update(rebuilt.__dict__)

    def _empty(self) -> MemoryMaps:
        changed = None if self._changed is None else self._changed.begin_anew()
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
        pairs, map_keys = self._pairs.prefix(), self._map_keys.freeze()

        def of(entries: Slots) -> KeyedColumns:
            entries = entries[present[entries]]
            slots, columns = identities(entries)
            return slots, [*columns, values.take(entries)]

        def identities(entries: Slots) -> KeyedColumns:
            words = pairs[entries]
            return words >> 32, [map_keys()[0].take(pa.array(words & LOW))]

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
