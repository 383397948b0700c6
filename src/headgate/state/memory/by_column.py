"""Keyed state by column in memory: one index from keys to slots, and arrays by slot for each state.

Counterpart: ``operators.process.by_batch``. Keys that have lost all their state keep their slots until they are the
majority; then the living ones are numbered anew (ST7).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from headgate.state.backend import Ownership, restored_batches
from headgate.state.columns import FrozenRows
from headgate.state.descriptors import KeyColumns, Section, StateDescriptor, StateKind, section_of
from headgate.state.key_index import FrozenKeys, Slots, make_key_index
from headgate.state.keyed import KeyedState, Rows
from headgate.state.memory.lists import MemoryLists
from headgate.state.memory.maps import MemoryMaps
from headgate.state.memory.values import MemoryValues

State: TypeAlias = MemoryValues | MemoryLists | MemoryMaps

_RENUMBER_MIN = 65_536
_ENCODE_ROWS = 65_536


class _Frozen(KeyedState):
    """The slots of all states at a barrier."""

    def __init__(
        self, keys: KeyColumns, frozen_keys: FrozenKeys, states: Sequence[tuple[StateDescriptor, FrozenRows]]
    ) -> None:
        super().__init__()
        self._keys = keys
        self._frozen_keys = frozen_keys
        self._states = states

    def _rows(self) -> Mapping[str, int]:
        return {descriptor.name: frozen.count() for descriptor, frozen in self._states}

    def _sections(self) -> Rows:
        key_columns = self._frozen_keys()
        found: list[tuple[Section, Sequence[pa.RecordBatch]]] = []
        for descriptor, frozen in self._states:
            section = section_of(self._keys, descriptor)
            slots, columns = frozen.rows()
            taken = [column.take(pa.array(slots)) for column in key_columns]
            table = pa.Table.from_arrays([*taken, *columns], schema=section.schema)
            found.append((section, table.to_batches(_ENCODE_ROWS)))
        return found

    def _forget(self) -> None:
        self._frozen_keys, self._states = list, ()


class MemoryColumnBackend:
    """See ``backend.ColumnBackend``."""

    def __init__(self, keys: KeyColumns, descriptors: Sequence[StateDescriptor]) -> None:
        self._keys = keys
        self._index = make_key_index(keys.types)
        self._states: dict[StateDescriptor, State] = {d: self._made(d) for d in descriptors}
        self._renumber_at = _RENUMBER_MIN

    def _made(self, descriptor: StateDescriptor) -> State:
        match descriptor.kind:
            case StateKind.VALUE:
                return MemoryValues(descriptor.type, self._keys_count)
            case StateKind.LIST:
                return MemoryLists(descriptor.type, self._keys_count)
            case StateKind.MAP:
                return MemoryMaps(descriptor.key_type, descriptor.type, self._keys_count)

    def _keys_count(self) -> int:
        return len(self._index)

    def values(self, descriptor: StateDescriptor) -> MemoryValues:
        """See ``ColumnBackend``."""
        state = self._states[descriptor]
        assert isinstance(state, MemoryValues)
        return state

    def lists(self, descriptor: StateDescriptor) -> MemoryLists:
        """See ``ColumnBackend``."""
        state = self._states[descriptor]
        assert isinstance(state, MemoryLists)
        return state

    def maps(self, descriptor: StateDescriptor) -> MemoryMaps:
        """See ``ColumnBackend``."""
        state = self._states[descriptor]
        assert isinstance(state, MemoryMaps)
        return state

    def slots(self, columns: Sequence[pa.Array]) -> Slots:
        """See ``ColumnBackend``."""
        return self._index.slots(columns)

    def key_columns(self, slots: Slots) -> list[pa.Array]:
        """See ``ColumnBackend``."""
        return self._index.columns(slots)

    def all_slots(self) -> Slots:
        """See ``ColumnBackend``."""
        living = np.zeros(len(self._index), np.bool_)
        for state in self._states.values():
            living |= state.living()
        return np.flatnonzero(living)

    def prepare(self) -> None:
        """See ``ColumnBackend``."""
        if len(self._index) < self._renumber_at:
            return
        living = self.all_slots()
        if 2 * len(living) < len(self._index):
            index = make_key_index(self._keys.types)
            index.slots(self._index.columns(living))
            for state in self._states.values():
                state.renumber(living)
            self._index = index
        self._renumber_at = max(_RENUMBER_MIN, 2 * len(self._index))

    def freeze(self) -> _Frozen:
        """See ``StateBackend``."""
        states = [(descriptor, state.freeze()) for descriptor, state in self._states.items()]
        return _Frozen(self._keys, self._index.freeze(), states)

    def restore(self, sections: Mapping[str, memoryview], path: str, owner: Ownership) -> None:
        """See ``StateBackend``."""
        width = len(self._keys.names)
        for descriptor, state in self._states.items():
            for batch in restored_batches(sections, section_of(self._keys, descriptor), path, owner):
                slots = self._index.slots(batch.columns[:width])
                state.restore(slots, batch.columns[width:])
