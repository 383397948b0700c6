"""Keyed state by column in memory: one index from keys to slots, and arrays by slot for each state.

Counterpart: ``operators.process.batch_process``. Keys that have lost all their state keep their slots until they are
the majority; then the living ones are renumbered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.state.backend import (
    META,
    TIMERS,
    ColumnTimers,
    ListColumns,
    MapColumns,
    Ownership,
    TimeKind,
    TimersByKind,
    TimersMeta,
    ValueColumns,
    restored_states,
    restored_timers,
    timers_by_kind,
    timers_of_each_kind,
)
from headgate.state.descriptors import KeyColumns, StateDescriptor, StateKind, section_of
from headgate.state.key_hash import Hashes, hash_columns
from headgate.state.key_index import FrozenKeys, Slots, frozen_keys, make_key_index, renumbered
from headgate.state.memory.change_tracking import ChangedSlots
from headgate.state.memory.column_states import MemoryLists, MemoryMaps, MemoryValues
from headgate.state.memory.incremental_restore import continue_from
from headgate.state.memory.incremental_snapshot import Change, ChunkedState, ChunkLog, Replaced, replaced_timers
from headgate.state.memory.timers import MemoryColumnTimers
from headgate.state.memory.ttl import ExpiringLists, ExpiringMaps, ExpiringValues, Sweep
from headgate.state.snapshot import StoredFiles
from headgate.state.ttl import TTL_SECTION, StateTime, TtlMeta
from headgate.state.vectors import FrozenChanges, FrozenRows, KeyedColumns

Expiring: TypeAlias = ExpiringValues | ExpiringLists | ExpiringMaps
State: TypeAlias = MemoryValues | MemoryLists | MemoryMaps | Expiring

_RENUMBER_MIN = 65_536
_ENCODE_ROWS = 65_536


@dataclass(frozen=True)
class _Barrier:
    """What there is at a barrier.

    Attributes:
        keys: of all slots.
        states: with which of their slots, or entries, changed; and the timers of each kind.
        timers: what belongs to no key of them, if there may be any.
        meta: what the operator has that belongs to no key.
        now_ms: what time it was, if anything expires.
    """

    keys: FrozenKeys
    states: Sequence[tuple[Replaced, FrozenRows]] = ()
    timers: TimersMeta | None = None
    meta: bytes = b""
    now_ms: int | None = None


class _FrozenColumnState(ChunkedState):
    """The slots of all states at a barrier."""

    def __init__(self, log: ChunkLog, number: int, barrier: _Barrier) -> None:
        super().__init__(log, number)
        self._at = barrier

    def _rows(self) -> Mapping[str, int]:
        return {state.section.name: frozen.count() for state, frozen in self._at.states}

    def _meta(self) -> Mapping[str, bytes]:
        of_ttl = {} if self._at.now_ms is None else {TTL_SECTION: TtlMeta(self._at.now_ms).encode()}
        return {**self._meta_of_rows(), **of_ttl}

    def _meta_of_rows(self) -> Mapping[str, bytes]:
        of_timers = {} if self._at.timers is None else {TIMERS: self._at.timers.encode()}
        return {**of_timers, **({META: self._at.meta} if self._at.meta else {})}

    def _now_ms(self) -> int | None:
        return self._at.now_ms

    def _changes(self, after: int | None) -> list[Change]:
        return [_change(state, frozen, self._at.keys, after) for state, frozen in self._at.states]

    def _changed_counts(self, after: int) -> Mapping[str, int | None]:
        places = {state.section.name: _changed(frozen).after(after) for state, frozen in self._at.states}
        return {name: None if found is None else len(found) for name, found in places.items()}

    def _forget(self) -> None:
        self._at = _Barrier(frozen_keys(make_key_index([pa.int64()])), now_ms=self._at.now_ms)


def _changed(frozen: FrozenRows) -> FrozenChanges:
    assert frozen.changes is not None
    return frozen.changes


def _change(state: Replaced, frozen: FrozenRows, keys: FrozenKeys, after: int | None) -> Change:
    """Return what changed of a state after a snapshot, or all of it."""
    schema = state.section.schema
    places = None if after is None else _changed(frozen).after(after)
    if places is None:
        return Change(state, _batches(schema, keys, frozen.rows()), is_whole=True)
    rows, gone = frozen.of(places), _changed(frozen).gone(places)
    return Change(state, _batches(schema, keys, rows), _batches(state.gone, keys, gone))


def _batches(schema: pa.Schema, keys: FrozenKeys, rows: KeyedColumns) -> list[pa.RecordBatch]:
    slots, columns = rows
    table = pa.Table.from_arrays([*keys.columns(slots), *columns], schema=schema)
    found: list[pa.RecordBatch] = table.to_batches(_ENCODE_ROWS)
    return found


class MemoryColumnBackend:
    """See ``backend.ColumnBackend``."""

    timers: TimersByKind[ColumnTimers] | None

    def __init__(self, keys: KeyColumns, descriptors: Sequence[StateDescriptor], *, has_timers: bool = False) -> None:
        self._keys = keys
        self._index = make_key_index(keys.types)
        self._log = ChunkLog()
        self.meta = b""
        self.time = StateTime()
        self._states: dict[StateDescriptor, State] = {d: self._made(d) for d in descriptors}
        self._timers = timers_of_each_kind(self._timers_of) if has_timers else {}
        self.timers = timers_by_kind(self._timers)
        self._expiring = [state for state in self._states.values() if isinstance(state, Expiring)]
        self._sweep = Sweep()
        self._renumber_at = _RENUMBER_MIN

    def _made(self, descriptor: StateDescriptor) -> State:
        dtype, ttl, count, time = descriptor.type, descriptor.ttl, self._keys_count, self.time
        changed = ChangedSlots(self._log.interval)
        if ttl is None:
            match descriptor.kind:
                case StateKind.VALUE:
                    return MemoryValues(dtype, count, changed)
                case StateKind.LIST:
                    return MemoryLists(dtype, count, changed=changed)
                case StateKind.MAP:
                    return MemoryMaps(descriptor.key_type, dtype, count, changed)
        match descriptor.kind:
            case StateKind.VALUE:
                return ExpiringValues(dtype, count, ttl, time, changed)
            case StateKind.LIST:
                return ExpiringLists(dtype, count, ttl, time, changed)
            case StateKind.MAP:
                return ExpiringMaps(descriptor.key_type, dtype, count, ttl, time, changed)

    def _timers_of(self, kind: TimeKind) -> MemoryColumnTimers:
        return MemoryColumnTimers(self._hashes, self._log.interval)

    def _keys_count(self) -> int:
        return len(self._index)

    def _hashes(self, slots: Slots) -> Hashes:
        names = self._keys.section_names
        return hash_columns(pa.RecordBatch.from_arrays(self._index.columns(slots), names=names), names)

    def values(self, descriptor: StateDescriptor) -> ValueColumns:
        state = self._states[descriptor]
        assert isinstance(state, MemoryValues)
        return state

    def lists(self, descriptor: StateDescriptor) -> ListColumns:
        state = self._states[descriptor]
        assert isinstance(state, MemoryLists | ExpiringLists)
        return state

    def maps(self, descriptor: StateDescriptor) -> MapColumns:
        state = self._states[descriptor]
        assert isinstance(state, MemoryMaps)
        return state

    def slots(self, columns: Sequence[pa.Array]) -> Slots:
        return self._index.slots(columns)

    def key_columns(self, slots: Slots) -> list[pa.Array]:
        return self._index.columns(slots)

    def all_slots(self) -> Slots:
        living = np.zeros(len(self._index), np.bool_)
        for state in self._states.values():
            living |= state.living()
        return np.flatnonzero(living)

    def prepare(self) -> None:
        self._drop_some_that_expired()
        if len(self._index) < self._renumber_at:
            return
        living = self._held_slots()
        if 2 * len(living) < len(self._index):
            # states and timers follow at once: all of them are by these numbers
            self._index, order = renumbered(self._index, self._keys.types, living)
            for state in self._states.values():
                state.renumber(order)
            for timers in self._timers.values():
                timers.renumber(order)
        self._renumber_at = max(_RENUMBER_MIN, 2 * len(self._index))

    def _drop_some_that_expired(self) -> None:
        """Go on through the states with a TTL; when all keys were seen, see whether most have lost all state."""
        if not self._expiring:
            return
        for state in self._expiring:
            state.sweep()
        _, end = self._sweep.turn(len(self._index))
        if end == len(self._index) >= _RENUMBER_MIN:
            self._renumber_at = end

    def _held_slots(self) -> Slots:
        """Return the slots of all keys that have any state or timer."""
        living = np.zeros(len(self._index), np.bool_)
        living[self.all_slots()] = True
        for timers in self._timers.values():
            # exact only after this: else a timer that was deleted would keep its key
            timers.tidy()
            living |= timers.living(len(self._index))
        return np.flatnonzero(living)

    def freeze(self) -> _FrozenColumnState:
        states = [(self._replaced(descriptor), state.freeze()) for descriptor, state in self._states.items()]
        timers = [(replaced_timers(self._keys, kind), found.freeze()) for kind, found in self._timers.items()]
        meta = None if self.timers is None else self.timers.meta
        now_ms = self.time.now_ms if self._expiring else None
        # the interval ends when everything is frozen: what changes from now on belongs to the next snapshot
        barrier = _Barrier(frozen_keys(self._index), [*states, *timers], meta, self.meta, now_ms)
        return _FrozenColumnState(self._log, self._log.end_interval(), barrier)

    def _replaced(self, descriptor: StateDescriptor) -> Replaced:
        """Return what a row of a state replaces: a value, a list, an entry of a map."""
        section = section_of(self._keys, descriptor)
        width = len(self._keys.names) + (descriptor.kind is StateKind.MAP)
        return Replaced(section, tuple(section.schema.names[:width]))

    def continue_from(self, stored: StoredFiles, owner: Ownership) -> bool:
        states = [self._replaced(descriptor) for descriptor in self._states]
        timers = [replaced_timers(self._keys, kind) for kind in self._timers]
        if not continue_from(self, self._log, [*states, *timers], stored, owner):
            return False
        for found in self._timers.values():
            found.track_changes()
        return True

    def restore(self, sections: Mapping[str, memoryview], path: str, owner: Ownership) -> None:
        width = len(self._keys.names)
        for descriptor, state in self._states.items():
            for batch in restored_states(sections, section_of(self._keys, descriptor), path, owner):
                slots = self._index.slots(batch.columns[:width])
                state.restore(slots, batch.columns[width:])
        for timers, batch in restored_timers(sections, self._keys, self._timers, path, owner):
            times_ms = batch.columns[width].to_numpy().copy()  # what was read is given up
            timers.register(self._index.slots(batch.columns[:width]), times_ms)

    def end_restore(self) -> None:
        for state in self._expiring:
            state.end_restore()
