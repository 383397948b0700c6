"""Keyed state by column in RocksDB: see ``backend.ColumnBackend``. Counterpart: ``operators.process.batch_process``.

The cache in front is state by column in memory, of the keys that were used lately: what they have is loaded when their
slots are first asked for, thousands at once, and goes back when it is much, or to a checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import pyarrow as pa

from headgate.state.backend import (
    META,
    TIMERS,
    ColumnTimers,
    ListColumns,
    Ownership,
    TimeKind,
    TimersByKind,
    restored_states,
    restored_timers,
    timers_by_kind,
    timers_of_each_kind,
)
from headgate.state.descriptors import KeyColumns, Section, StateDescriptor
from headgate.state.key_hash import Hashes, hash_columns
from headgate.state.key_index import FrozenKeys, Slots, frozen_keys, key_bytes, make_key_index, renumbered
from headgate.state.rocksdb.column_cache import Cached, CachedMaps, CachedPack, CachedValues, KeysOf
from headgate.state.rocksdb.database import Changes
from headgate.state.rocksdb.database_restore import continue_from
from headgate.state.rocksdb.database_snapshot import AnyTable, ExtraSections, FrozenDatabase
from headgate.state.rocksdb.local_databases import LocalDatabase
from headgate.state.rocksdb.row_encoding import EncodedKeys, disk_order, encoded_keys
from headgate.state.rocksdb.tables import (
    PackedTable,
    Table,
    distinct_keys,
    packed_states,
    restore_packed,
    restore_rows,
    tables_of,
)
from headgate.state.rocksdb.timers import RocksColumnTimers, StoredTimers
from headgate.state.rocksdb.ttl import CachedExpiring, CachedState, ExpiringTables, make_cache
from headgate.state.snapshot import FrozenState, StoredFiles
from headgate.state.ttl import TTL_SECTION, StateTime, TtlMeta
from headgate.state.values import is_fixed, storage_type
from headgate.state.vectors import FrozenRows, SlotArray

CHANGES_MAX = 65_536
"""So many keys, or entries of maps, may differ from the database: the pause of a checkpoint is bounded by it."""

SLOT_BYTES = 8
"""What is noted of a key in the cache takes so much, beside its part of the index of keys."""

_COPIES = 3
"""A heap of values may hold as much again that is no longer referred to, and is copied when it is tidied."""


_ARRAY_COPIES = 2
"""An array of numbers doubles as it grows."""

_KEPT_PARTS, _PARTS = 3, 4
"""What part of its room a cache keeps when it has no more: giving up takes a look at every key."""

TURNS_MAX = (1 << 16) - 1
"""Then turns are halved: that is enough to tell what was used lately."""


class RocksColumnBackend:
    """See ``backend.ColumnBackend``."""

    timers: TimersByKind[ColumnTimers] | None

    def __init__(
        self,
        local: LocalDatabase,
        keys: KeyColumns,
        descriptors: Sequence[StateDescriptor],
        max_parallelism: int,
        *,
        has_timers: bool = False,
    ) -> None:
        self.time = StateTime()
        self.meta = b""
        self._local = local
        self._keys = keys
        self._max_parallelism = max_parallelism
        self._index = make_key_index(keys.types)
        tables = tables_of(keys, descriptors)
        self._states: dict[StateDescriptor, CachedState] = {
            descriptor: make_cache(table, self._keys_count, self.time) for descriptor, table in tables.items()
        }
        self._packed = packed_states(tables)
        self._pack = self._made_pack() if self._packed else None
        self._unpacked = {one: state for one, state in self._states.items() if one not in self._packed}
        """The states that have rows of their own."""
        self._expiring = [state for state in self._states.values() if isinstance(state, CachedExpiring)]
        self._tables = ExpiringTables(local.database, keys, list(tables.values()), self.time)
        self._uncached_counts = dict.fromkeys(self._states, 0)
        """How many rows of each state are not in the cache: so a row that is lost on its way is found missing."""
        self._is_loaded = SlotArray(np.bool_)
        self._used = SlotArray(np.uint16)
        """The turn in which each slot was last asked for."""
        self._turn = 0
        self._evict_at = 0
        self._timers = timers_of_each_kind(self._made_timers) if has_timers else {}
        self.timers = timers_by_kind(self._timers)

    def _made_timers(self, kind: TimeKind) -> RocksColumnTimers:
        stored = StoredTimers(self._local.database, kind, self._keys, self._max_parallelism)
        return RocksColumnTimers(self._keys, self, stored, self._local)

    def _made_pack(self) -> CachedPack:
        members = [self.values(one) for one in self._packed]
        return CachedPack(PackedTable(tuple(member.table for member in members)), members)

    def _keys_count(self) -> int:
        return len(self._index)

    def hashes(self, slots: Slots) -> Hashes:
        """Return the hashes of the keys of ``slots``."""
        names = self._keys.section_names
        return hash_columns(pa.RecordBatch.from_arrays(self._index.columns(slots), names=names), names)

    def _in_order(self, slots: Slots) -> tuple[Slots, EncodedKeys]:
        slots = slots[disk_order(self._index.columns(slots), self._keys, self._max_parallelism)]
        return slots, encoded_keys(self._index.columns(slots), self._keys, self._max_parallelism)

    @property
    def _cached(self) -> Collection[Cached]:
        return self._states.values()

    # -- what functions see -----------------------------------------------------------------------------------------

    def values(self, descriptor: StateDescriptor) -> CachedValues:
        state = self._states[descriptor]
        assert isinstance(state, CachedValues)
        return state

    def lists(self, descriptor: StateDescriptor) -> ListColumns:
        state = self._states[descriptor]
        assert not isinstance(state, CachedValues | CachedMaps)
        return state

    def maps(self, descriptor: StateDescriptor) -> CachedMaps:
        state = self._states[descriptor]
        assert isinstance(state, CachedMaps)
        return state

    def slots(self, columns: Sequence[pa.Array]) -> Slots:
        slots = self._index.slots(columns)
        self.load(slots)
        return slots

    def numbered(self, columns: Sequence[pa.Array]) -> Slots:
        """Return the slot of each row's key; nothing is loaded."""
        return self._index.slots(columns)

    def key_columns(self, slots: Slots) -> list[pa.Array]:
        return self._index.columns(slots)

    def all_slots(self) -> Slots:
        """See ``ColumnBackend``. Has all keys in the cache meanwhile."""
        self.write_back()
        self.slots(distinct_keys(self._local.database, self._tables_of_states, self._keys, self.time.now_ms))
        living = np.zeros(len(self._index), np.bool_)
        for state in self._cached:
            living |= state.living()
        return np.flatnonzero(living)

    def end_restore(self) -> None:
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
        missing, keys = self._in_order(missing)
        database = self._local.database
        if self._pack is not None:
            # from here on these rows are counted where they are: in the cache
            for descriptor, count in zip(self._packed, self._pack.load(database, missing, keys), strict=True):
                self._uncached_counts[descriptor] -= count
        for descriptor, state in self._unpacked.items():
            self._uncached_counts[descriptor] -= state.load(database, missing, keys)
        # only now: a key is in the cache whole, or not at all
        is_loaded[missing] = True

    def write_back(self) -> None:
        """Have everything in the database."""
        changes = Changes()
        keys_of = _Remembered(self._in_order)
        for state in self._stores:
            state.write_back(changes, keys_of)
        for timers in self._timers.values():
            timers.write_back()
        self._local.database.write(changes)

    def prepare(self) -> None:
        """See ``ColumnBackend``: writes back what is much, and gives up what does not fit."""
        self._next_turn()
        self._drop_some_that_expired()
        for timers in self._timers.values():
            timers.tidy()
        changed_rows = sum(state.changed_rows for state in self._stores)
        changed_bytes = sum(state.changed_rows * (self._key_bytes + self._row_bytes(state)) for state in self._cached)
        if self._local.needs_write_back(changed_rows, changed_bytes, CHANGES_MAX):
            self.write_back()
        if self._cached_bytes() > max(self._local.cache_bytes, self._evict_at):
            # first: changes of keys that go would be lost, and slots of timers that wait get other numbers
            self.write_back()
            self._evict()
            left = self._cached_bytes()
            self._evict_at = 2 * left if left > self._kept_bytes else 0  # keys with timers in memory stay

    def _next_turn(self) -> None:
        if self._turn >= TURNS_MAX:
            self._turn >>= 1
            self._used.written(len(self._index))[:] >>= 1
        self._turn += 1

    def _drop_some_that_expired(self) -> None:
        """Go on through the database; what has expired of keys that are in the cache goes with the next write."""
        found = list(self._tables.sweep())
        for _, columns in found:
            self.slots(columns)
        if found:
            for state in self._expiring:
                state.drop_expired()

    def _cached_bytes(self) -> int:
        rows_bytes = sum(state.held_rows * self._row_bytes(state) for state in self._cached)
        return len(self._index) * self._key_bytes + rows_bytes

    @property
    def _key_bytes(self) -> int:
        return SLOT_BYTES + key_bytes(self._keys.types)

    @property
    def _kept_bytes(self) -> int:
        return self._local.cache_bytes // _PARTS * _KEPT_PARTS

    def _row_bytes(self, state: Cached) -> int:
        if is_fixed(state.table.dtype) and state.table.ttl is None:  # a row that is shared says nothing of one state
            return state.row_bytes + _ARRAY_COPIES * storage_type(state.table.dtype).itemsize
        return self._local.row_bytes(state.row_bytes, _ARRAY_COPIES if is_fixed(state.table.dtype) else _COPIES)

    def _evict(self) -> None:
        """Keep the keys that were used last, three quarters of what may be there, and those that have timers."""
        size = len(self._index)
        taken = np.full(size, self._key_bytes)
        for state in self._cached:
            taken += state.rows_of() * self._row_bytes(state)
        by_use = np.argsort(self._turn - self._used.read(size)[:size], kind="stable")  # of 16 bits: in one go
        is_kept = np.zeros(size, np.bool_)
        # the least recently used keys are those that no longer fit
        is_kept[by_use] = np.cumsum(taken[by_use]) <= self._kept_bytes
        gone = np.flatnonzero(~is_kept)
        for descriptor, state in self._states.items():
            # counted before they are dropped: from now on they are rows of the database alone
            self._uncached_counts[descriptor] += int(state.rows_of()[gone].sum())
            state.drop(gone)
        self._is_loaded.written(size)[gone] = False
        # a key with a timer in front keeps its slot, but not its state: that is loaded when the timer fires
        for timers in self._timers.values():
            timers.front.tidy()
            is_kept |= timers.front.living(size)
        self._renumber(np.flatnonzero(is_kept))

    def _renumber(self, kept: Slots) -> None:
        index, order = renumbered(self._index, self._keys.types, kept)
        fronts = [timers.front for timers in self._timers.values()]
        for part in (*self._states.values(), *fronts, self._is_loaded, self._used):
            part.renumber(order)
        self._index = index

    # -- snapshots --------------------------------------------------------------------------------------------------

    def freeze(self) -> FrozenState:
        # the checkpoint has what the database has: nothing of the state may be in the cache alone
        self.write_back()
        counts = {
            descriptor.name: self._uncached_counts[descriptor] + state.rows_count()
            for descriptor, state in self._states.items()
        }
        assert all(count >= 0 for count in counts.values()), f"a row was loaded that was not counted: {counts}"
        for timers in self._timers.values():
            counts[timers.stored.table.section.name] = timers.stored.count
        return FrozenDatabase(self._local, self._local.checkpoint(), self._all_tables, counts, self._extra())

    def _extra(self) -> ExtraSections:
        meta = {TTL_SECTION: TtlMeta(self.time.now_ms).encode()} if self._expiring else {}
        if self.meta:
            meta[META] = self.meta
        if self.timers is None:
            return ExtraSections(meta=meta, now_ms=self.time.now_ms)
        # timers in front are in no file: they go into the snapshot as rows beside it
        keys = frozen_keys(self._index)
        frozen = [(found.stored.table.section, found.front.freeze()) for found in self._timers.values()]
        return ExtraSections(
            lambda: [_section_rows(keys, section, rows) for section, rows in frozen],
            lambda: {section.name: rows.count() for section, rows in frozen},
            {TIMERS: self.timers.meta.encode(), **meta},
            self.time.now_ms,
        )

    def restore(self, sections: Mapping[str, memoryview], path: str, owner: Ownership) -> None:
        """See ``StateBackend``. What is restored goes to the database; nothing is in the cache yet."""
        width = len(self._keys.names)
        self._restore_pack(sections, path, owner)
        for descriptor, state in self._unpacked.items():
            for found in restored_states(sections, state.table.section, path, owner):
                batch = self._tables.restored(state.table, found)
                restore_rows(state.table, self._local.database, self._keys, self._max_parallelism, batch)
                self._uncached_counts[descriptor] += batch.num_rows
        for timers, batch in restored_timers(sections, self._keys, self._timers, path, owner):
            timers.restore(batch.columns[:width], batch.columns[width].to_numpy())

    def _restore_pack(self, sections: Mapping[str, memoryview], path: str, owner: Ownership) -> None:
        """Have what ``sections`` hold of the states that share rows, together: so their rows are written once."""
        if self._pack is None:
            return
        table = self._pack.table
        found = [list(restored_states(sections, member.section, path, owner)) for member in table.members]
        restore_packed(table, self._local.database, self._keys, self._max_parallelism, found)
        for descriptor, batches in zip(self._packed, found, strict=True):
            self._uncached_counts[descriptor] += sum(batch.num_rows for batch in batches)

    def continue_from(self, stored: StoredFiles, owner: Ownership) -> bool:
        if any(self._uncached_counts.values()) or any(map(len, self._timers.values())):
            # not empty: a database takes the place of this one whole
            return False
        continued = continue_from(self._local, stored, self._all_tables, owner)
        if continued is None:
            return False
        self._uncached_counts = {descriptor: continued.rows[descriptor.name] for descriptor in self._states}
        for timers in self._timers.values():
            timers.continue_from(continued.rows[timers.stored.table.section.name], continued.groups)
        self._tables.continue_from(continued.latest_ms)
        return True

    @property
    def _all_tables(self) -> list[AnyTable]:
        return [*self._tables_of_states, *(timers.stored.table for timers in self._timers.values())]

    @property
    def _tables_of_states(self) -> list[Table | PackedTable]:
        return [state.table for state in self._stores]

    @property
    def _stores(self) -> list[CachedState | CachedPack]:
        """What is read and written by itself: the states that share rows once."""
        return [*([] if self._pack is None else [self._pack]), *self._unpacked.values()]


class _Remembered:
    """A ``KeysOf`` that does the same slots once: states that changed together have the same ones."""

    def __init__(self, keys_of: KeysOf) -> None:
        self._keys_of = keys_of
        self._asked: Slots = np.empty(0, np.int64)
        self._found: tuple[Slots, EncodedKeys] | None = None

    def __call__(self, slots: Slots) -> tuple[Slots, EncodedKeys]:
        """Return slots in order, and their keys."""
        if self._found is None or not np.array_equal(slots, self._asked):
            self._asked, self._found = slots, self._keys_of(slots)
        return self._found


def _section_rows(keys: FrozenKeys, section: Section, frozen: FrozenRows) -> tuple[Section, Sequence[pa.RecordBatch]]:
    slots, columns = frozen.rows()
    return section, pa.Table.from_arrays([*keys.columns(slots), *columns], schema=section.schema).to_batches()
