"""A function by row that has a broadcast side (docs/spec/broadcast.md).

Counterparts: ``by_row``, which calls it for the other side; ``broadcasting``, which users derive from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import pyarrow as pa

from headgate.model.graph import InputName, OutputTag
from headgate.operators.base import Operator
from headgate.operators.keyed import key_columns
from headgate.operators.process.broadcast_side import BroadcastSide
from headgate.operators.process.broadcasting import (
    BroadcastProcessFunction,
    check_function,
    refuse_keyed_state,
    two_inputs,
)
from headgate.operators.process.by_row import ProcessOperator, ProcessSpec, each_row
from headgate.operators.process.cursor import Cursor
from headgate.operators.process.functions import StateHandle
from headgate.operators.process.row_states import RowStates
from headgate.operators.process.spec import opened
from headgate.operators.process.two_sided import TwoSided
from headgate.operators.rows import Row, paused_gc, rows_of
from headgate.operators.user_function import copied, user_error
from headgate.state.backend import RowCells
from headgate.state.descriptors import StateDescriptor
from headgate.state.memory.factory import MemoryStates
from headgate.state.ttl import StateTime


@dataclass(frozen=True)
class BroadcastProcessSpec(ProcessSpec):
    """Call a function for the records of two sides. Made by ``row_broadcast_spec``."""

    def build(self) -> Operator:
        """See ``OperatorSpec``."""
        return BroadcastOperator(self)

    def output_schemas(self, inputs: Mapping[InputName, pa.Schema], node: str) -> Mapping[OutputTag, pa.Schema]:
        """See ``catalog.NamedSchemasSpec``."""
        return two_inputs(self, inputs, node)


def row_broadcast_spec(
    node: str, keys: tuple[str, ...], function: BroadcastProcessFunction, schema: pa.Schema
) -> BroadcastProcessSpec:
    """Return the spec of ``function`` on a stream of ``schema`` with these ``keys``, which may be none.

    Raises:
        UsageError: a wrong declaration.
        UserFunctionError: its ``open`` raised.
    """
    columns = key_columns(schema, keys)

    def cells(descriptor: StateDescriptor) -> RowCells:
        return MemoryStates().by_row(columns, [descriptor]).cells(descriptor) if keys else _none(node, descriptor)

    learning = StateHandle(node, RowStates(node, Cursor(), cells, StateTime()), BroadcastSide(node))
    descriptors = opened(node, copied(node, function), learning)
    spec = BroadcastProcessSpec(keys, function, schema, descriptors, learning.forgotten, learning.broadcasts)
    check_function(node, function, keys, has_timers=spec.has_timers)
    return spec


def _none(node: str, descriptor: StateDescriptor) -> NoReturn:
    refuse_keyed_state(node, descriptor)


class BroadcastOperator(TwoSided, ProcessOperator):
    """Calls ``process`` for records of the main side, ``process_broadcast`` for those of the broadcast side."""

    _function: BroadcastProcessFunction

    def _handle(self, maker: RowStates) -> StateHandle:
        return StateHandle(self.context.node, maker, self._side)

    def _process_broadcast(self, batch: pa.RecordBatch) -> None:
        self._begin_call()
        function, context, row = self._function.process_broadcast, self._broadcast_context, Row()
        results: list[Any] = []
        with paused_gc():
            try:
                with self._side.writing():
                    for row in rows_of(batch):
                        found = function(row, context)
                        if found is not None:
                            results.extend(each_row(found))
            except Exception as error:
                raise user_error(self.context.node, row, error) from None
            self._emit(results)
