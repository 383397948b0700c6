"""Keyed state by row in memory: a dict from key to object for each state, and an overlay while a snapshot is held.

Counterparts: ``operators.process.row_process`` and ``operators.reduction``. Freezing only puts the dict aside; a later
change of a key goes to the overlay. A list or dict of a key is copied when it is first changed after a barrier.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.state.backend import (
    TIMERS,
    Ownership,
    RowTimers,
    TimersByKind,
    TimersMeta,
    restored_states,
    restored_timers,
    timers_by_kind,
    timers_of_each_kind,
)
from headgate.state.descriptors import KeyColumns, StateDescriptor, StateKind, section_of
from headgate.state.memory.change_tracking import FrozenCells, MemoryCells
from headgate.state.memory.incremental_restore import continue_from
from headgate.state.memory.incremental_snapshot import Change, ChunkedState, ChunkLog, Replaced, replaced_timers
from headgate.state.memory.timers import FrozenRowTimers, MemoryRowTimers, key_arrays, timer_batches, timer_pair_batches
from headgate.state.memory.ttl import ExpiringCells
from headgate.state.snapshot import StoredFiles
from headgate.state.ttl import EXPIRES_COLUMN, TTL_SECTION, StateTime, TtlMeta, live_objects
from headgate.state.values import column_of, python_values, stored_of

_ENCODE_KEYS = 16_384


@dataclass(frozen=True)
class _Barrier:
    """What there is at a barrier.

    Attributes:
        states: the objects of each.
        time_ms: what time it was: what had expired is not among the rows.
        timers: of each kind.
        meta: of timers.
    """

    states: Sequence[tuple[StateDescriptor, FrozenCells]]
    time_ms: int
    timers: Sequence[tuple[Replaced, FrozenRowTimers]]
    meta: TimersMeta | None


class _FrozenRowState(ChunkedState):
    """The objects of all states at a barrier, and the timers."""

    def __init__(self, log: ChunkLog, number: int, keys: KeyColumns, barrier: _Barrier) -> None:
        super().__init__(log, number)
        self._keys = keys
        self._at = barrier

    def _rows(self) -> Mapping[str, int]:
        rows = {d.name: _count_rows(d, cells.objects, self._at.time_ms) for d, cells in self._at.states}
        return rows | {state.section.name: found.count for state, found in self._at.timers}

    def _meta(self) -> Mapping[str, bytes]:
        found = self._meta_of_rows()
        if self._now_ms() is not None:
            found[TTL_SECTION] = TtlMeta(self._at.time_ms).encode()
        return found

    def _meta_of_rows(self) -> dict[str, bytes]:
        return {} if self._at.meta is None else {TIMERS: self._at.meta.encode()}

    def _now_ms(self) -> int | None:
        return self._at.time_ms if any(descriptor.ttl is not None for descriptor, _ in self._at.states) else None

    def _changes(self, after: int | None) -> list[Change]:
        states = [self._change(descriptor, cells, after) for descriptor, cells in self._at.states]
        return [*states, *(self._change_of_timers(state, found, after) for state, found in self._at.timers)]

    def _change(self, descriptor: StateDescriptor, cells: FrozenCells, after: int | None) -> Change:
        state, objects = _replaced(self._keys, descriptor), cells.objects
        schema = state.section.schema
        changed = None if after is None else cells.changes.after(after)
        if changed is None:
            living = _living(descriptor, objects, self._at.time_ms)
            return Change(state, list(_batches(schema, descriptor, living)), is_whole=True)
        rows = _batches(schema, descriptor, [(key, objects[key]) for key in changed if key in objects])
        gone = [key for key in changed if key not in objects]
        columns = [pa.RecordBatch.from_arrays(key_arrays(self._keys, gone), schema=state.gone)] if gone else []
        return Change(state, list(rows), columns)

    def _change_of_timers(self, state: Replaced, found: FrozenRowTimers, after: int | None) -> Change:
        changed = None if after is None else found.changes.after(after)
        if changed is None:
            every = timer_batches(state.section, self._keys, found.cells, _ENCODE_KEYS)
            return Change(state, list(every), is_whole=True)
        there = [pair for pair in changed if found.has(*pair)]
        gone = [pair for pair in changed if not found.has(*pair)]
        rows, columns = (timer_pair_batches(state.gone, self._keys, pairs, _ENCODE_KEYS) for pairs in (there, gone))
        return Change(state, list(rows), list(columns))

    def _changed_counts(self, after: int) -> Mapping[str, int | None]:
        noted = {descriptor.name: cells.changes for descriptor, cells in self._at.states}
        noted |= {state.section.name: found.changes for state, found in self._at.timers}
        return {name: None if (keys := found.after(after)) is None else len(keys) for name, found in noted.items()}

    def _forget(self) -> None:
        for cells in (*(cells for _, cells in self._at.states), *(found.cells for _, found in self._at.timers)):
            cells.release()
        self._at = _Barrier((), self._at.time_ms, (), None)


def _replaced(keys: KeyColumns, descriptor: StateDescriptor) -> Replaced:
    """Return what the rows of a key replace: all that it had, whether a value, a list or a map."""
    section = section_of(keys, descriptor)
    return Replaced(section, section.key_names)


class MemoryRowBackend:
    """See ``backend.RowBackend``."""

    timers: TimersByKind[RowTimers] | None

    def __init__(self, keys: KeyColumns, descriptors: Sequence[StateDescriptor], *, has_timers: bool = False) -> None:
        self._keys = keys
        self._log = ChunkLog()
        self.time = StateTime()
        self._cells = {descriptor: self._made(descriptor) for descriptor in descriptors}
        self._expiring = [cells for cells in self._cells.values() if isinstance(cells, ExpiringCells)]
        self._timers = timers_of_each_kind(lambda _: MemoryRowTimers(keys, self._log.interval)) if has_timers else {}
        self.timers = timers_by_kind(self._timers)

    def _made(self, descriptor: StateDescriptor) -> MemoryCells:
        interval = self._log.interval
        if descriptor.ttl is None:
            return MemoryCells(interval)
        return ExpiringCells(descriptor.ttl, self.time, interval)

    def cells(self, descriptor: StateDescriptor) -> MemoryCells:
        return self._cells[descriptor]

    def all_keys(self) -> list[Any]:
        found: dict[Any, None] = {}
        for cells in self._cells.values():
            found.update(dict.fromkeys(cells.keys()))
        return list(found)

    def absorb(self) -> None:
        """See ``RowBackend``: gives up the overlays of snapshots that are released."""
        for cells in self._cells.values():
            cells.absorb()
        for timers in self._timers.values():
            timers.absorb()
        for expiring in self._expiring:
            expiring.sweep()

    def expect(self, columns: Sequence[pa.Array]) -> None:
        """See ``RowBackend``: everything is here."""

    def freeze(self) -> _FrozenRowState:
        states = [(descriptor, cells.freeze()) for descriptor, cells in self._cells.items()]
        timers = [(replaced_timers(self._keys, kind), found.freeze()) for kind, found in self._timers.items()]
        meta = None if self.timers is None else self.timers.meta
        # the interval ends when everything is frozen: what changes from now on belongs to the next snapshot
        barrier = _Barrier(states, self.time.now_ms, timers, meta)
        return _FrozenRowState(self._log, self._log.end_interval(), self._keys, barrier)

    def continue_from(self, stored: StoredFiles, owner: Ownership) -> bool:
        states = [_replaced(self._keys, descriptor) for descriptor in self._cells]
        timers = [replaced_timers(self._keys, kind) for kind in self._timers]
        if not continue_from(self, self._log, [*states, *timers], stored, owner):
            return False
        for cells in self._cells.values():
            cells.track_changes()
        for found in self._timers.values():
            found.track_changes()
        return True

    def restore(self, sections: Mapping[str, memoryview], path: str, owner: Ownership) -> None:
        for descriptor, cells in self._cells.items():
            for batch in restored_states(sections, section_of(self._keys, descriptor), path, owner):
                _add_rows(cells, descriptor, batch, len(self._keys.names))
        for timers, batch in restored_timers(sections, self._keys, self._timers, path, owner):
            times_ms = batch.columns[-1].to_pylist()
            for key, time_ms in zip(_keys_of(batch, len(self._keys.names)), times_ms, strict=True):
                timers.register(key, time_ms)

    def end_restore(self) -> None:
        for cells in self._expiring:
            cells.end_restore()


def _living(descriptor: StateDescriptor, objects: dict[Any, Any], now_ms: int) -> Iterable[tuple[Any, Any]]:
    """Return keys and objects without what has expired."""
    items = objects.items()
    return items if descriptor.ttl is None else live_objects(items, now_ms)


def _keys_of(batch: pa.RecordBatch, width: int) -> list[Any]:
    columns = [python_values(column) for column in batch.columns[:width]]
    return columns[0] if width == 1 else list(zip(*columns, strict=True))


def _add_rows(cells: MemoryCells, descriptor: StateDescriptor, batch: pa.RecordBatch, width: int) -> None:
    keys = _keys_of(batch, width)
    values = stored_of(batch.column("value"))
    if descriptor.ttl is not None:
        values = list(zip(values, batch.column(EXPIRES_COLUMN).to_pylist(), strict=True))
    match descriptor.kind:
        case StateKind.VALUE:
            for key, value in zip(keys, values, strict=True):
                cells.put(key, value)
        case StateKind.LIST:
            for key, value in zip(keys, values, strict=True):
                _writable_or_new(cells, key, list).append(value)
        case StateKind.MAP:
            for key, map_key, value in zip(keys, python_values(batch.columns[width]), values, strict=True):
                _writable_or_new(cells, key, dict)[map_key] = value


def _writable_or_new(cells: MemoryCells, key: Any, make: type) -> Any:
    found = cells.writable(key)
    if found is None:
        found = make()
        cells.put(key, found)
    return found


def _count_rows(descriptor: StateDescriptor, objects: dict[Any, Any], now_ms: int) -> int:
    is_value = descriptor.kind is StateKind.VALUE
    if is_value and descriptor.ttl is None:
        return len(objects)
    living = _living(descriptor, objects, now_ms)
    return sum(1 if is_value else len(found) for _, found in living)  # a generator: other threads run in between


def _batches(
    schema: pa.Schema, descriptor: StateDescriptor, objects: Iterable[tuple[Any, Any]]
) -> Iterator[pa.RecordBatch]:
    """Return the rows of a section: one per value, element or entry."""
    items = iter(objects)
    while part := list(islice(items, _ENCODE_KEYS)):  # in parts, because each holds up the processing thread
        keys: list[Any] = []
        inner: list[list[Any]] = []
        expiries: list[list[int]] = []
        match descriptor.kind:
            case StateKind.VALUE:
                keys, values = [key for key, _ in part], [found for _, found in part]
            case StateKind.LIST:
                keys = [key for key, found in part for _ in found]
                values = [element for _, found in part for element in found]
            case StateKind.MAP:
                keys = [key for key, found in part for _ in found]
                inner = [[map_key for _, found in part for map_key in found]]
                values = [value for _, found in part for value in found.values()]
        if descriptor.ttl is not None:
            values, expiries = [pair[0] for pair in values], [[pair[1] for pair in values]]
        width = len(schema) - len(inner) - 1 - len(expiries)
        outer = [keys] if width == 1 else [list(column) for column in zip(*keys, strict=True)]
        columns = [pa.array(c, f.type) for c, f in zip([*outer, *inner], schema, strict=False)]
        arrays = [*columns, column_of(values, descriptor.type), *(pa.array(one, pa.int64()) for one in expiries)]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)
