"""Process functions of connected streams, by row and by batch: of two keyed streams, and of one with a broadcast side.

Of ``left.key_by("a").connect(right.key_by("b")).process(f)`` both inputs are partitioned by their keys, which have
equal types, so a subtask receives all records of a key from both. The key, its state and its timers have the names of
the left key columns. Modelled on Flink's ``KeyedCoProcessFunction``.

All records of a broadcast side (docs/spec/broadcast.md) go through the first subtask of ``BroadcastOrderSpec``, which
sends them on to every subtask in one order. Modelled on Flink's ``KeyedBroadcastProcessFunction``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NoReturn

import polars as pl
import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.model.graph import BROADCAST_INPUT, MAIN, MAIN_INPUT, InputName, OutputTag
from headgate.operators.base import (
    WATERMARK_MAX_MS,
    Operator,
    OperatorContext,
    OperatorSpec,
    Output,
    RestoredState,
    key_columns,
)
from headgate.operators.checkpoint_listeners import CheckpointedFunction
from headgate.operators.functions import Row, paused_gc, rows_of
from headgate.operators.keys import check_keys
from headgate.operators.process.batch_aggregation import BatchStateHandle
from headgate.operators.process.batch_process import (
    BatchContext,
    BatchProcessFunction,
    BatchProcessOperator,
    BatchProcessSpec,
    batch_process_spec,
)
from headgate.operators.process.batch_state import BatchHandleFactory, CurrentKeys
from headgate.operators.process.broadcast_state import BroadcastSide
from headgate.operators.process.declarations import SideOutputs, StatefulFunctionSpec, learned_states, side_schemas
from headgate.operators.process.row_process import (
    ProcessContext,
    ProcessFunction,
    ProcessOperator,
    ProcessSpec,
    StateHandle,
    each_row,
    row_process_spec,
)
from headgate.operators.process.row_state import CurrentKey, RowHandleFactory
from headgate.operators.process.timers import CallContext, OperatorTime, Times
from headgate.operators.schemas import frame_of
from headgate.operators.user_functions import batch_error, divert_unreadable, shortened, user_error
from headgate.protocol.watermarks import Origin
from headgate.state.backend import ColumnBackend, RowCells
from headgate.state.descriptors import StateDescriptor
from headgate.state.snapshot import FrozenState
from headgate.state.ttl import StateTime
from headgate.state.worker_backends import MemoryStates

RIGHT_INPUT = InputName("right")
"""The input of the stream that is given to ``connect``."""


class CoProcessFunction(ProcessFunction):
    """Base class of functions of two keyed streams that process one record at a time.

    Pass an instance to ``left.key_by("a").connect(right.key_by("b")).process``. Records of equal keys share state and
    timers, whichever stream they are of. Without ``schema``, results have the columns of the left stream.
    """

    def process_left(self, row: Row, context: ProcessContext) -> Iterable[Row] | None:
        """Process one record of the left stream, of which ``connect`` is called. Return or yield results, or None."""
        raise NotImplementedError(f"{type(self).__name__} has no method process_left; define it")

    def process_right(self, row: Row, context: ProcessContext) -> Iterable[Row] | None:
        """Process one record of the right stream, which is given to ``connect``. Return or yield results, or None."""
        raise NotImplementedError(f"{type(self).__name__} has no method process_right; define it")


class BatchCoProcessFunction(BatchProcessFunction):
    """Base class of functions of two keyed streams that process batches. See ``CoProcessFunction``.

    ``context.keys`` are those of the batch, of either stream, by the names of the left key columns.
    """

    def process_left(self, batch: pl.DataFrame, context: BatchContext) -> pl.DataFrame | None:
        """Process one batch of the left stream. Return the results, or None."""
        raise NotImplementedError(f"{type(self).__name__} has no method process_left; define it")

    def process_right(self, batch: pl.DataFrame, context: BatchContext) -> pl.DataFrame | None:
        """Process one batch of the right stream. Return the results, or None."""
        raise NotImplementedError(f"{type(self).__name__} has no method process_right; define it")


@dataclass(frozen=True)
class CoProcessSpec(ProcessSpec):
    """Call a function for the records of two streams. Made by ``co_process_spec``."""

    right_keys: tuple[str, ...] = ()

    def build(self) -> Operator:
        return CoProcessOperator(self)

    def output_schemas(self, inputs: Mapping[InputName, pa.Schema], node: str) -> Mapping[OutputTag, pa.Schema]:
        return _output_schemas(self, self.right_keys, inputs, node)


@dataclass(frozen=True)
class BatchCoProcessSpec(BatchProcessSpec):
    """Call a function for the batches of two streams. Made by ``co_process_spec``."""

    right_keys: tuple[str, ...] = ()

    def build(self) -> Operator:
        return BatchCoProcessOperator(self)

    def output_schemas(self, inputs: Mapping[InputName, pa.Schema], node: str) -> Mapping[OutputTag, pa.Schema]:
        return _output_schemas(self, self.right_keys, inputs, node)


def _output_schemas(
    spec: StatefulFunctionSpec[Any],
    right_keys: tuple[str, ...],
    inputs: Mapping[InputName, pa.Schema],
    node: str,
) -> Mapping[OutputTag, pa.Schema]:
    if set(inputs) != {MAIN_INPUT, RIGHT_INPUT}:
        raise UsageError(f"operator '{node}' needs two keyed streams: left.key_by(...).connect(right.key_by(...))")
    left, right = inputs[MAIN_INPUT], inputs[RIGHT_INPUT]
    found = {MAIN: spec.output_schema(left, node), **side_schemas(node, spec.function, left)}
    check_keys(node, right, right_keys)
    if len(spec.keys) != len(right_keys):
        raise UsageError(
            f"operator '{node}': both streams need equally many key columns, but their keys are "
            f"({', '.join(spec.keys)}) and ({', '.join(right_keys)})"
        )
    kinds = key_columns(left, spec.keys).types, key_columns(right, right_keys).types
    for name, other, kind, other_kind in zip(spec.keys, right_keys, *kinds, strict=True):
        if not kind.equals(other_kind):
            raise UsageError(
                f"operator '{node}': keys of two streams must have equal types, but '{name}' is {kind} and '{other}' "
                f"is {other_kind}; cast one of them with with_columns(...) before key_by"
            )
    return found


def co_process_spec(
    node: str, keys: tuple[str, ...], right_keys: tuple[str, ...], function: object, schema: pa.Schema
) -> CoProcessSpec | BatchCoProcessSpec:
    """Return the spec of a function of two keyed streams; ``schema``: of the left one.

    Raises:
        UsageError: it is no such function, or a wrong declaration of state.
        UserFunctionError: its ``open`` raised.
    """
    kind = type(function)
    if not isinstance(function, CoProcessFunction | BatchCoProcessFunction):
        raise UsageError(
            f"operator '{node}': an instance of a CoProcessFunction or BatchCoProcessFunction is needed for two keyed "
            f"streams, such as Match(), not {kind.__name__}"
        )
    if type(function).process not in (ProcessFunction.process, BatchProcessFunction.process):
        raise UsageError(
            f"operator '{node}': {kind.__name__}.process would never be called; a function of two streams has "
            "process_left and process_right"
        )
    if isinstance(function, CoProcessFunction):
        of_row = row_process_spec(node, keys, function, schema)
        return CoProcessSpec(keys, function, schema, of_row.descriptors, of_row.forgotten, right_keys=right_keys)
    by_batch = batch_process_spec(node, keys, function, schema)
    return BatchCoProcessSpec(keys, function, schema, by_batch.descriptors, by_batch.forgotten, right_keys=right_keys)


class CoProcessOperator(ProcessOperator):
    """Calls the method of the stream for each record, with the states of its key."""

    _function: CoProcessFunction

    def __init__(self, spec: CoProcessSpec) -> None:
        super().__init__(spec)
        self._right_keys = spec.right_keys
        self._key_of_right = itemgetter(*spec.right_keys)

    def process_input(self, name: InputName, batch: pa.RecordBatch) -> None:
        if name == RIGHT_INPUT:
            self._process(batch, self._function.process_right, self._right_keys, self._key_of_right)
        else:
            self._process(batch, self._function.process_left, self._spec.keys, self._key_of_row)


class BatchCoProcessOperator(BatchProcessOperator):
    """Calls the method of the stream for each batch, with the states of its keys."""

    _function: BatchCoProcessFunction

    def __init__(self, spec: BatchCoProcessSpec) -> None:
        super().__init__(spec)
        self._right_keys = spec.right_keys

    def process_input(self, name: InputName, batch: pa.RecordBatch) -> None:
        if name == RIGHT_INPUT:
            self._process(batch, self._function.process_right, self._right_keys)
        else:
            self._process(batch, self._function.process_left, self._spec.keys)


class BroadcastContext(CallContext, Times):
    """The context of a call of ``process_broadcast``: the times, and the subtask that is calling.

    Attributes:
        subtask_index: the number of this subtask, among ``parallelism`` subtasks that all receive the same records.
    """


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
        raise NotImplementedError(f"{type(self).__name__} has no method process_broadcast; define it")


class BatchBroadcastProcessFunction(BatchProcessFunction):
    """Base class of functions with a broadcast side that process batches. See ``BroadcastProcessFunction``."""

    def process_broadcast(self, batch: pl.DataFrame, context: BroadcastContext) -> pl.DataFrame | None:
        """Process one batch of the broadcast side. Return the results, or None.

        Headgate calls it in every subtask, and it must do the same in each.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method process_broadcast; define it")


def two_inputs(
    spec: StatefulFunctionSpec[Any], inputs: Mapping[InputName, pa.Schema], node: str
) -> Mapping[OutputTag, pa.Schema]:
    """Return the schemas of the outputs of a function that has a broadcast side.

    Raises:
        UsageError: an input is missing.
    """
    if set(inputs) != {MAIN_INPUT, BROADCAST_INPUT}:
        raise UsageError(f"operator '{node}' needs a stream and a broadcast one beside it")
    main = inputs[MAIN_INPUT]
    return {MAIN: spec.output_schema(main, node), **side_schemas(node, spec.function, main)}


def refuse_keyed_state(node: str, descriptor: StateDescriptor) -> NoReturn:
    """Refuse a state that belongs to a key where there is none.

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


class BroadcastOperatorBase(Operator):
    """What operators of both forms do with their two sides. To stand in front of the one by row or by batch."""

    _side: BroadcastSide
    _time: OperatorTime
    _side_outputs: SideOutputs

    def open(self, context: OperatorContext, output: Output) -> None:
        # first: ``open`` of the function declares its states
        self._side = BroadcastSide(context.node)
        super().open(context, output)
        # not before: while the function opens, nothing is restored yet
        self._side.begin()
        self._broadcast_context = BroadcastContext(context, self._time, self._side_outputs)

    @abstractmethod
    def _process_broadcast(self, batch: pa.RecordBatch) -> None:
        """Take records of the broadcast side."""

    def process_input(self, name: InputName, batch: pa.RecordBatch) -> None:
        if name == BROADCAST_INPUT:
            self._process_broadcast(batch)
        else:
            self.process(batch)

    def freeze_broadcast(self, *, is_own: bool) -> FrozenState | None:
        return self._side.freeze(self.context, is_own=is_own)

    def restore_broadcast(self, states: Sequence[RestoredState]) -> None:
        self._side.restore(states, self.context)


@dataclass(frozen=True)
class BroadcastProcessSpec(ProcessSpec):
    """Call a function for the records of two sides. Made by ``row_broadcast_spec``."""

    def build(self) -> Operator:
        return BroadcastOperator(self)

    def output_schemas(self, inputs: Mapping[InputName, pa.Schema], node: str) -> Mapping[OutputTag, pa.Schema]:
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

    learning = StateHandle(node, RowHandleFactory(node, CurrentKey(), cells, StateTime()), BroadcastSide(node))
    descriptors = learned_states(node, function, learning)
    spec = BroadcastProcessSpec(keys, function, schema, descriptors, learning.forgotten, learning.broadcasts)
    check_function(node, function, keys, has_timers=spec.has_timers)
    return spec


def _none(node: str, descriptor: StateDescriptor) -> NoReturn:
    refuse_keyed_state(node, descriptor)


class BroadcastOperator(BroadcastOperatorBase, ProcessOperator):
    """Calls ``process`` for records of the main side, ``process_broadcast`` for those of the broadcast side."""

    _function: BroadcastProcessFunction

    def _handle(self, maker: RowHandleFactory) -> StateHandle:
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
                            results.extend(map(self._writer.taken, each_row(found)))
            except Exception as error:
                raise user_error(self.context.node, row, error) from None
            self._emit(results)


@dataclass(frozen=True)
class BatchBroadcastProcessSpec(BatchProcessSpec):
    """Call a function for the batches of two sides. Made by ``batch_broadcast_spec``."""

    def build(self) -> Operator:
        return BatchBroadcastOperator(self)

    def output_schemas(self, inputs: Mapping[InputName, pa.Schema], node: str) -> Mapping[OutputTag, pa.Schema]:
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

    learning = BatchStateHandle(node, BatchHandleFactory(node, CurrentKeys(), backend), BroadcastSide(node))
    descriptors = learned_states(node, function, learning)
    spec = BatchBroadcastProcessSpec(keys, function, schema, descriptors, learning.forgotten, learning.broadcasts)
    check_function(node, function, keys, has_timers=spec.has_timers)
    return spec


class BatchBroadcastOperator(BroadcastOperatorBase, BatchProcessOperator):
    """Calls ``process`` for batches of the main side, ``process_broadcast`` for those of the broadcast side."""

    _function: BatchBroadcastProcessFunction

    def _handle(self, maker: BatchHandleFactory) -> BatchStateHandle:
        return BatchStateHandle(self.context.node, maker, self._side)

    def _process_broadcast(self, batch: pa.RecordBatch) -> None:
        self._begin_call()
        try:
            with self._side.writing():
                result = self._function.process_broadcast(frame_of(batch), self._broadcast_context)
        except Exception as error:
            raise batch_error(self.context.node, batch.num_rows, error) from None
        self._emit(result)


@dataclass(frozen=True)
class BroadcastOrderSpec:
    """Pass records on.

    Attributes:
        is_timed: they have event times; else they never hold those of the other side back.
        by_row: they are for a Python function, which cannot be given every time.
    """

    is_timed: bool
    by_row: bool

    def build(self) -> Operator:
        return BroadcastOrderOperator(self)

    def output_schema(self, schema: pa.Schema, node: str) -> pa.Schema:
        """Return ``schema``."""
        return schema


class BroadcastOrderOperator(Operator):
    """Passes records on; event time only if they have some."""

    def __init__(self, spec: BroadcastOrderSpec) -> None:
        self._spec = spec

    def on_splits(self, origins: Sequence[Origin]) -> None:
        """See ``Operator``. A side without event times is idle from the start."""
        if not self._spec.is_timed:
            self.output.emit_idle(True)

    def process(self, batch: pa.RecordBatch) -> None:
        """See ``Operator``. A record that no function could be given is a bad one here, once, and not everywhere."""
        self.output.emit(divert_unreadable(self, batch) if self._spec.by_row else batch)

    def on_watermark(self, watermark_ms: int) -> None:
        if self._spec.is_timed or watermark_ms == WATERMARK_MAX_MS:
            self.output.emit_watermark(watermark_ms)

    def on_idle(self, is_idle: bool) -> None:
        if self._spec.is_timed:
            self.output.emit_idle(is_idle)


def process_spec(node: str, keys: tuple[str, ...], function: object, schema: pa.Schema) -> OperatorSpec:
    """Return the spec of a process function by row or by batch; its states are learned from a copy.

    Raises:
        UsageError: it is neither, or a wrong declaration of state.
        UserFunctionError: its ``open`` raised.
    """
    if isinstance(function, BroadcastProcessFunction | BatchBroadcastProcessFunction):
        raise UsageError(
            f"operator '{node}': {type(function).__name__} has a broadcast side; connect the stream with one: "
            "stream.connect(rules.broadcast()).process(...)"
        )
    if isinstance(function, CoProcessFunction | BatchCoProcessFunction):
        raise UsageError(
            f"operator '{node}': {type(function).__name__} is a function of two keyed streams; connect them: "
            "left.key_by(...).connect(right.key_by(...)).process(...)"
        )
    if isinstance(function, ProcessFunction):
        return row_process_spec(node, keys, function, schema)
    if isinstance(function, BatchProcessFunction):
        return batch_process_spec(node, keys, function, schema)
    raise UsageError(
        f"operator '{node}': an instance of a ProcessFunction or BatchProcessFunction is needed, such as Step(), "
        f"not {shortened(function)}"
    )


def broadcast_spec(node: str, keys: tuple[str, ...], function: object, schema: pa.Schema) -> OperatorSpec:
    """Return the spec of a function with a broadcast side, by row or by batch; ``keys``: of the other side, if any.

    Raises:
        UsageError: it is neither, or a wrong declaration of state.
        UserFunctionError: its ``open`` raised.
    """
    if isinstance(function, BroadcastProcessFunction):
        return row_broadcast_spec(node, keys, function, schema)
    if isinstance(function, BatchBroadcastProcessFunction):
        return batch_broadcast_spec(node, keys, function, schema)
    raise UsageError(
        f"operator '{node}': an instance of a BroadcastProcessFunction or BatchBroadcastProcessFunction is needed, "
        f"such as Apply(), not {shortened(function)}"
    )
