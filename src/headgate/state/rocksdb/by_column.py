"""Keyed state by column in RocksDB: see ``backend.ColumnBackend``. Counterpart: ``operators.process.by_batch``.

The cache in front is state by column in memory, of the keys that were used lately: what they have is loaded when their
slots are first asked for, thousands at once, and goes back when it is much, or to a checkpoint (RB4).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import pyarrow as pa

from headgate.state.backend import ListColumns, Ownership, restored_states, restored_timers
from headgate.state.columns import FrozenRows
from headgate.state.descriptors import KeyColumns, Section, StateDescriptor
from headgate.state.files import StoredFiles
from headgate.state.frozen import FrozenState
from headgate.state.key_hash import Hashes, hash_columns
from headgate.state.key_index import FrozenKeys, Slots, make_key_index
from headgate.state.rocksdb.cached import Cached, CachedMaps, CachedValues
from headgate.state.rocksdb.cached_expiring import CachedExpiring, CachedState, cached
from headgate.state.rocksdb.database import Changes
from headgate.state.rocksdb.described import AnyTable
from headgate.state.rocksdb.expiring import ExpiringTables
from headgate.state.rocksdb.frozen import Beside, FrozenDatabase
from headgate.state.rocksdb.layout import EncodedKeys, encoded_keys
from headgate.state.rocksdb.reopening import go_on_with
from headgate.state.rocksdb.restoring import restore_rows
from headgate.state.rocksdb.room import LocalDatabase
from headgate.state.rocksdb.scanning import distinct_keys
from headgate.state.rocksdb.stored_timers import StoredTimers
from headgate.state.rocksdb.tables import tables_of
from headgate.state.rocksdb.timers import RocksColumnTimers
from headgate.state.slot_array import SlotArray
from headgate.state.timers import TIMERS, ColumnTimers, TimeKind, TimersByKind, shown_timers, timers_of_each_kind
from headgate.state.ttl import TTL_SECTION, StateTime, TtlMeta

CHANGES_MAX = 32_768
"""So many keys, or entries of maps, may differ from the database: the pause of a checkpoint is bounded by it (RB4)."""

CACHE_ROW_BYTES = 128
"""A row in the cache, and its part of the index of keys, is taken to be so large, beside its value."""

_COPIES = 3
"""A heap of values may hold as much again that nobody refers to any more, and is copied when it is tidied."""


class RocksColumnBackend:
    """See ``backend.ColumnBackend``."""

    timers: TimersByKind[ColumnTimers] | None

    def __init__(
        self,
        place: LocalDatabase,
        keys: KeyColumns,
        descriptors: Sequence[StateDescriptor],
        max_parallelism: int,
        *,
        has_timers: bool = False,
    ) -> None:
        self.time = StateTime()
        self._place = place
        self._keys = keys
        self._max_parallelism = max_parallelism
        self._index = make_key_index(keys.types)
        tables = tables_of(keys, descriptors)
        self._states: dict[StateDescriptor, CachedState] = {
            descriptor: cached(table, self._keys_count, self.time) for descriptor, table in tables.items()
        }
        self._expiring = [state for state in self._states.values() if isinstance(state, CachedExpiring)]
        self._tables = ExpiringTables(place.database, keys, list(tables.values()), self.time)
        self._outside = dict.fromkeys(self._states, 0)
        """How many rows of each state are not in the cache: so a row that is lost on its way is found missing (U7)."""
        self._is_loaded = SlotArray(np.bool_)
        self._used = SlotArray(np.int64)
        """The turn in which each slot was last asked for."""
        self._turn = 0
        self._give_up_at = 0
        self._timers = timers_of_each_kind(self._made_timers) if has_timers else {}
        self.timers = shown_timers(self._timers)

    def _made_timers(self, kind: TimeKind) -> RocksColumnTimers:
        stored = StoredTimers(self._place.database, kind, self._keys, self._max_parallelism)
        return RocksColumnTimers(self._keys, self, stored, self._place)

    def _keys_count(self) -> int:
        return len(self._index)

    def hashes(self, slots: Slots) -> Hashes:
        """Return the hashes of the keys of ``slots``."""
        names = self._keys.section_names
        return hash_columns(pa.RecordBatch.from_arrays(self._index.columns(slots), names=names), names)

    def _encoded(self, slots: Slots) -> EncodedKeys:
        return encoded_keys(self._index.columns(slots), self._keys, self._max_parallelism)

    @property
    def _cached(self) -> Collection[Cached]:
        return self._states.values()

    # -- what functions see -----------------------------------------------------------------------------------------

    def values(self, descriptor: StateDescriptor) -> CachedValues:
        """See ``ColumnBackend``."""
        state = self._states[descriptor]
        assert isinstance(state, CachedValues)
        return state

    def lists(self, descriptor: StateDescriptor) -> ListColumns:
        """See ``ColumnBackend``."""
        state = self._states[descriptor]
        assert not isinstance(state, CachedValues | CachedMaps)
        return state

    def maps(self, descriptor: StateDescriptor) -> CachedMaps:
        """See ``ColumnBackend``."""
        state = self._states[descriptor]
        assert isinstance(state, CachedMaps)
        return state

    def slots(self, columns: Sequence[pa.Array]) -> Slots:
        """See ``ColumnBackend``."""
        slots = self._index.slots(columns)
        self.load(slots)
        return slots

    def numbered(self, columns: Sequence[pa.Array]) -> Slots:
        """Return the slot of each row's key; nothing is loaded."""
        return self._index.slots(columns)

    def key_columns(self, slots: Slots) -> list[pa.Array]:
        """See ``ColumnBackend``."""
        return self._index.columns(slots)

    def all_slots(self) -> Slots:
        """See ``ColumnBackend``. Has all keys in the cache meanwhile."""
        self.write_back()
        tables = [state.table for state in self._cached]
        self.slots(distinct_keys(self._place.database, tables, self._keys, self.time.now_ms))
        living = np.zeros(len(self._index), np.bool_)
        for state in self._cached:
            living |= state.living()
        return np.flatnonzero(living)

    def end_restore(self) -> None:
        """See ``TimedBackend``."""
        self._tables.end_restore()

    # -- the cache --------------------------------------------------------------------------------------------------

    def load(self, slots: Slots) -> None:
        """Have what the keys of ``slots`` have in the cache."""
        size = len(self._index)
        self._used.written(size)[slots] = self._turn
        is_loaded = self._is_loaded.written(size)
        missing = np.unique(slots[~is_loaded[slots]])
        if len(missing) == 0:
            return
        keys = self._encoded(missing)
        for descriptor, state in self._states.items():
            self._outside[descriptor] -= state.load(self._place.database, missing, keys)
        is_loaded[missing] = True

    def write_back(self) -> None:
        """Have everything in the database."""
        changes = Changes()
        for state in self._cached:
            state.write_back(changes, self._encoded)
        for timers in self._timers.values():
            timers.write_back()
        self._place.database.write(changes)

    def prepare(self) -> None:
        """See ``ColumnBackend``: writes back what is much, and gives up what does not fit."""
        self._turn += 1
        self._drop_some_that_expired()
        for timers in self._timers.values():
            timers.tidy()
        changed, row_bytes = sum(state.changed_rows for state in self._cached), self._row_bytes()
        if self._place.is_much(changed, row_bytes, CHANGES_MAX):
            self.write_back()
        if self._cached_bytes() > max(self._place.cache_bytes, self._give_up_at):
            self.write_back()
            self._give_up()
            self._give_up_at = 2 * self._cached_bytes()  # keys whose timers are in memory stay (RB9)

    def _drop_some_that_expired(self) -> None:
        """Go on through the database; what has expired of keys that are in the cache goes with the next write (TL8)."""
        found = list(self._tables.sweep())
        for _, columns in found:
            self.slots(columns)
        if found:
            for state in self._expiring:
                state.drop_expired()

    def _cached_bytes(self) -> int:
        rows = len(self._index) + sum(state.held_rows for state in self._cached)
        return rows * self._row_bytes()

    def _row_bytes(self) -> int:
        return self._place.row_bytes(CACHE_ROW_BYTES, _COPIES)

    def _give_up(self) -> None:
        """Keep the keys that were used last, half of what may be there, and those that have timers."""
        size = len(self._index)
        rows = 1 + sum((state.rows_of() for state in self._cached), np.zeros(size, np.int64))
        by_use = np.argsort(-self._used.read(size)[:size], kind="stable")
        is_kept = np.zeros(size, np.bool_)
        is_kept[by_use] = np.cumsum(rows[by_use]) * self._row_bytes() <= self._place.cache_bytes // 2
        gone = np.flatnonzero(~is_kept)
        for descriptor, state in self._states.items():
            self._outside[descriptor] += int(state.rows_of()[gone].sum())
            state.drop(gone)
        self._is_loaded.written(size)[gone] = False
        for timers in self._timers.values():
            timers.front.tidy()
            is_kept |= timers.front.living(size)
        self._renumber(np.flatnonzero(is_kept))

    def _renumber(self, kept: Slots) -> None:
        index = make_key_index(self._keys.types)
        index.slots(self._index.columns(kept))
        fronts = [timers.front for timers in self._timers.values()]
        for part in (*self._states.values(), *fronts, self._is_loaded, self._used):
            part.renumber(kept)
        self._index = index

    # -- snapshots --------------------------------------------------------------------------------------------------

    def freeze(self) -> FrozenState:
        """See ``StateBackend``."""
        self.write_back()
        counts = {
            descriptor.name: self._outside[descriptor] + int(state.rows_of().sum())
            for descriptor, state in self._states.items()
        }
        for timers in self._timers.values():
            counts[timers.stored.table.section.name] = timers.stored.count
        return FrozenDatabase(self._place, self._place.checkpoint(), self._all_tables, counts, self._beside())

    def _beside(self) -> Beside:
        meta = {TTL_SECTION: TtlMeta(self.time.now_ms).encode()} if self._expiring else {}
        if self.timers is None:
            return Beside(meta=meta, now_ms=self.time.now_ms)
        keys = self._index.freeze()
        frozen = [(found.stored.table.section, found.front.freeze()) for found in self._timers.values()]
        return Beside(
            lambda: [_section_rows(keys, section, rows) for section, rows in frozen],
            lambda: {section.name: rows.count() for section, rows in frozen},
            {TIMERS: self.timers.meta.encode(), **meta},
            self.time.now_ms,
        )

    def restore(self, sections: Mapping[str, memoryview], path: str, owner: Ownership) -> None:
        """See ``StateBackend``. What is restored goes to the database; nothing is in the cache yet."""
        width = len(self._keys.names)
        for descriptor, state in self._states.items():
            for found in restored_states(sections, state.table.section, path, owner):
                batch = self._tables.restored(state.table, found)
                restore_rows(state.table, self._place.database, self._keys, self._max_parallelism, batch)
                self._outside[descriptor] += batch.num_rows
        for timers, batch in restored_timers(sections, self._keys, self._timers, path, owner):
            timers.restore(batch.columns[:width], batch.columns[width].to_numpy())

    def go_on_with(self, stored: StoredFiles, owner: Ownership) -> bool:
        """See ``ContinuingBackend``."""
        if any(self._outside.values()) or any(map(len, self._timers.values())):
            return False
        continued = go_on_with(self._place, stored, self._all_tables, owner)
        if continued is None:
            return False
        self._outside = {descriptor: continued.rows[descriptor.name] for descriptor in self._states}
        for timers in self._timers.values():
            timers.go_on_with(continued)
        self._tables.go_on_with(continued.latest_ms)
        return True

    @property
    def _all_tables(self) -> list[AnyTable]:
        return [state.table for state in self._cached] + [timers.stored.table for timers in self._timers.values()]


def _section_rows(keys: FrozenKeys, section: Section, frozen: FrozenRows) -> tuple[Section, Sequence[pa.RecordBatch]]:
    slots, columns = frozen.rows()
    taken = [column.take(pa.array(slots)) for column in keys()]
    return section, pa.Table.from_arrays([*taken, *columns], schema=section.schema).to_batches()
