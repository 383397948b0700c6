"""A function by batch that has a broadcast side (docs/spec/broadcast.md).

Counterparts: ``by_batch``, which calls it for the other side; ``broadcasting``, which users derive from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from headgate.model.graph import InputName, OutputTag
from headgate.operators.base import Operator
from headgate.operators.keyed import key_columns
from headgate.operators.process.batch_reducing import BatchStateHandle
from headgate.operators.process.batch_states import BatchCursor, BatchStates
from headgate.operators.process.broadcast_side import BroadcastSide
from headgate.operators.process.broadcasting import (
    BatchBroadcastProcessFunction,
    check_function,
    refuse_keyed_state,
    two_inputs,
)
from headgate.operators.process.by_batch import BatchProcessOperator, BatchProcessSpec
from headgate.operators.process.spec import opened
from headgate.operators.process.two_sided import TwoSided
from headgate.operators.schemas import frame_of
from headgate.operators.user_function import batch_error, copied
from headgate.state.backend import ColumnBackend
from headgate.state.descriptors import StateDescriptor
from headgate.state.memory.factory import MemoryStates


@dataclass(frozen=True)
class BatchBroadcastProcessSpec(BatchProcessSpec):
    """Call a function for the batches of two sides. Made by ``batch_broadcast_spec``."""

    def build(self) -> Operator:
        """See ``OperatorSpec``."""
        return BatchBroadcastOperator(self)

    def output_schemas(self, inputs: Mapping[InputName, pa.Schema], node: str) -> Mapping[OutputTag, pa.Schema]:
        """See ``catalog.NamedSchemasSpec``."""
        return two_inputs(self, inputs, node)


def batch_broadcast_spec(
    node: str, keys: tuple[str, ...], function: BatchBroadcastProcessFunction, schema: pa.Schema
) -> BatchBroadcastProcessSpec:
    """Return the spec of ``function`` on a stream of ``schema`` with these ``keys``, which may be none.

    Raises:
        UsageError: a wrong declaration.
        UserFunctionError: its ``open`` raised.
    """
    columns = key_columns(schema, keys)

    def backend(descriptor: StateDescriptor) -> ColumnBackend:
        if not keys:
            refuse_keyed_state(node, descriptor)
        return MemoryStates().by_column(columns, [descriptor])

    learning = BatchStateHandle(node, BatchStates(node, BatchCursor(), backend), BroadcastSide(node))
    descriptors = opened(node, copied(node, function), learning)
    spec = BatchBroadcastProcessSpec(keys, function, schema, descriptors, learning.forgotten, learning.broadcasts)
    check_function(node, function, keys, has_timers=spec.has_timers)
    return spec


class BatchBroadcastOperator(TwoSided, BatchProcessOperator):
    """Calls ``process`` for batches of the main side, ``process_broadcast`` for those of the broadcast side."""

    _function: BatchBroadcastProcessFunction

    def _handle(self, maker: BatchStates) -> BatchStateHandle:
        return BatchStateHandle(self.context.node, maker, self._side)

    def _process_broadcast(self, batch: pa.RecordBatch) -> None:
        self._begin_call()
        try:
            with self._side.writing():
                result = self._function.process_broadcast(frame_of(batch), self._broadcast_context)
        except Exception as error:
            raise batch_error(self.context.node, batch.num_rows, error) from None
        self._emit(result)
