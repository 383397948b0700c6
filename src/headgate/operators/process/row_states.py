"""Makes the handles through which a function by row reaches its state, with or without a TTL.

Counterparts: ``declaring.Declarations``, which asks; ``functions`` and ``expiring``, which have the handles.
"""

from __future__ import annotations

from collections.abc import Callable

from headgate.operators.process.cursor import Cursor
from headgate.operators.process.expiring import ExpiringListState, ExpiringMapState, ExpiringValueState, expiring
from headgate.operators.process.keyed_states import ListState, MapState, ValueState
from headgate.state.backend import RowCells
from headgate.state.descriptors import StateDescriptor
from headgate.state.ttl import StateTime


class RowStates:
    """Makes the states of one operator (``declaring.StateMaker``)."""

    def __init__(
        self, node: str, cursor: Cursor, cells: Callable[[StateDescriptor], RowCells], time: StateTime
    ) -> None:
        """``cells`` returns those of the descriptor's state, and ``time`` says what of them has expired."""
        self._node = node
        self._cursor = cursor
        self._cells = cells
        self._time = time

    def value(self, descriptor: StateDescriptor) -> ValueState:
        """See ``StateMaker``."""
        cells = self._cells(descriptor)
        if descriptor.ttl is None:
            return ValueState(self._node, descriptor, self._cursor, cells)
        return expiring(ExpiringValueState, self._node, descriptor, self._cursor, cells, self._time)

    def list(self, descriptor: StateDescriptor) -> ListState:
        """See ``StateMaker``."""
        cells = self._cells(descriptor)
        if descriptor.ttl is None:
            return ListState(self._node, descriptor, self._cursor, cells)
        return expiring(ExpiringListState, self._node, descriptor, self._cursor, cells, self._time)

    def map(self, descriptor: StateDescriptor) -> MapState:
        """See ``StateMaker``."""
        cells = self._cells(descriptor)
        if descriptor.ttl is None:
            return MapState(self._node, descriptor, self._cursor, cells)
        return expiring(ExpiringMapState, self._node, descriptor, self._cursor, cells, self._time)
