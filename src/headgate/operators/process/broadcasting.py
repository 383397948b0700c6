"""Functions with a broadcast side: what users derive from, and what both forms have in common (docs/spec/broadcast.md).

Counterparts: ``broadcast_by_row`` and ``broadcast_by_batch``, which call them; ``broadcast_side`` holds their state.
Modelled on Flink's ``KeyedBroadcastProcessFunction``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import polars as pl
import pyarrow as pa

from headgate.errors import UsageError
from headgate.model.graph import BROADCAST_INPUT, MAIN, MAIN_INPUT, InputName, OutputTag
from headgate.operators.checkpointed.functions import CheckpointedFunction
from headgate.operators.process.by_batch import BatchProcessFunction
from headgate.operators.process.functions import ProcessFunction
from headgate.operators.process.spec import StatefulFunctionSpec
from headgate.operators.process.timers import OperatorTime, Times
from headgate.operators.rows import Row
from headgate.state.descriptors import StateDescriptor


class BroadcastContext(Times):
    """The context of a call of ``process_broadcast``: the times, and the subtask that is calling.

    Attributes:
        subtask_index: the number of this subtask, among ``parallelism`` subtasks that all receive the same records.
    """

    def __init__(self, time: OperatorTime, subtask_index: int, parallelism: int) -> None:
        """For Headgate only."""
        super().__init__(time)
        self.subtask_index = subtask_index
        self.parallelism = parallelism


class BroadcastProcessFunction(ProcessFunction):
    """Base class of functions with a broadcast side that process one record at a time.

    Pass an instance to ``stream.connect(rules.broadcast()).process``. Every subtask receives all records of the
    broadcast side, in the same order, and keeps the same data of them in states that it declares with
    ``state.broadcast(name, key_type, type)``. All other states belong to keys and need ``key_by`` before ``connect``.
    """

    def process_broadcast(self, row: Row, context: BroadcastContext) -> Iterable[Row] | None:
        """Process one record of the broadcast side. Return or yield results, or return None.

        Headgate calls it in every subtask, and it must do the same in each: what it writes may depend only on the
        record and on broadcast states. Every subtask emits its results. To emit each result only once, check
        ``context.subtask_index == 0``.
        """
        raise NotImplementedError


class BatchBroadcastProcessFunction(BatchProcessFunction):
    """Base class of functions with a broadcast side that process batches. See ``BroadcastProcessFunction``."""

    def process_broadcast(self, batch: pl.DataFrame, context: BroadcastContext) -> pl.DataFrame | None:
        """Process one batch of the broadcast side. Return the results, or None.

        Headgate calls it in every subtask, and it must do the same in each.
        """
        raise NotImplementedError


def two_inputs(
    spec: StatefulFunctionSpec[Any], inputs: Mapping[InputName, pa.Schema], node: str
) -> Mapping[OutputTag, pa.Schema]:
    """Return the schemas of the outputs of a function that has a broadcast side.

    Raises:
        UsageError: an input is missing.
    """
    if set(inputs) != {MAIN_INPUT, BROADCAST_INPUT}:
        raise UsageError(f"operator '{node}' needs a stream and a broadcast one beside it")
    return {MAIN: spec.output_schema(inputs[MAIN_INPUT], node)}


def refuse_keyed_state(node: str, descriptor: StateDescriptor) -> NoReturn:
    """Refuse a state that belongs to a key where there is none (BC9).

    Raises:
        UsageError: always.
    """
    raise UsageError(
        f"operator '{node}': state '{descriptor.name}' belongs to a key, and the stream has none; call key_by(...) "
        "before connect, or declare it with state.broadcast if all subtasks shall have the same"
    )


def check_function(node: str, function: Any, keys: tuple[str, ...], *, has_timers: bool) -> None:
    """Refuse what a function with a broadcast side cannot be.

    Raises:
        UsageError: it has timers and no key, or keeps operator state.
    """
    if has_timers and not keys:
        raise UsageError(
            f"operator '{node}': {type(function).__name__}.on_timer would never be called, because timers belong to "
            "keys, and the stream has none; call key_by(...) before connect"
        )
    if isinstance(function, CheckpointedFunction):
        raise UsageError(
            f"operator '{node}': {type(function).__name__} is a headgate.CheckpointedFunction and has a broadcast "
            "side; keep the lists in a function of its own, before it or after it"
        )
