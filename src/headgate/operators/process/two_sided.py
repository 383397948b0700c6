"""What operators with a broadcast side have in common, by row and by batch (docs/spec/broadcast.md).

Counterparts: ``broadcast_by_row`` and ``broadcast_by_batch``; ``broadcast_side`` holds the state of the side.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import pyarrow as pa

from headgate.model.graph import BROADCAST_INPUT, InputName
from headgate.operators.base import Operator, OperatorContext, Output, RestoredState
from headgate.operators.process.broadcast_side import BroadcastSide
from headgate.operators.process.broadcasting import BroadcastContext
from headgate.operators.process.timers import OperatorTime
from headgate.state.frozen import FrozenState


class TwoSided(Operator):
    """What operators of both forms do with their two sides. To stand in front of the one by row or by batch."""

    _side: BroadcastSide
    _time: OperatorTime

    def open(self, context: OperatorContext, output: Output) -> None:
        """See ``Operator``."""
        self._side = BroadcastSide(context.node)
        super().open(context, output)
        self._side.begin()
        self._broadcast_context = BroadcastContext(self._time, context.subtask_index, context.parallelism)

    @abstractmethod
    def _process_broadcast(self, batch: pa.RecordBatch) -> None:
        """Take records of the broadcast side."""

    def process_input(self, name: InputName, batch: pa.RecordBatch) -> None:
        """See ``Operator``."""
        if name == BROADCAST_INPUT:
            self._process_broadcast(batch)
        else:
            self.process(batch)

    def freeze_broadcast(self, *, is_own: bool) -> FrozenState | None:
        """See ``Operator``."""
        return self._side.freeze(self.context, is_own=is_own)

    def restore_broadcast(self, states: Sequence[RestoredState]) -> None:
        """See ``Operator``."""
        self._side.restore(states, self.context)
