"""``process`` with a function by row: what users derive from, and the operator (docs/spec/state.md).

Modelled on Flink's ``KeyedProcessFunction`` and PySpark's ``StatefulProcessor``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any, ClassVar

import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.operators.base import Operator, OperatorContext, Output, key_columns
from headgate.operators.functions import Row, RowWriter, divert_refused, paused_gc, rows_of
from headgate.operators.keys import check_keys
from headgate.operators.process.broadcast_state import BroadcastState
from headgate.operators.process.declarations import (
    Declarations,
    RowSideOutputs,
    SideOutputs,
    SideOutputsLike,
    StatefulFunction,
    StatefulFunctionSpec,
    learned_states,
    open_as_planned,
    side_schemas,
)
from headgate.operators.process.row_state import (
    AggregateFunction,
    AggregatingState,
    CurrentKey,
    ListState,
    MapState,
    NoKey,
    ReducingState,
    RowHandleFactory,
    ValueState,
)
from headgate.operators.process.timers import CallContext, OperatorTime, TimedOperator, Timer, Timers
from headgate.operators.schemas import SchemaLike
from headgate.operators.user_functions import (
    FunctionOperator,
    UserFunctionError,
    bind_counters,
    copied,
    divert_unreadable,
    shortened,
    user_error,
    user_traceback,
)
from headgate.state.backend import RowBackend, TimeKind
from headgate.state.descriptors import NO_EVOLUTION, Evolution
from headgate.state.snapshot import FrozenState
from headgate.state.ttl import TTL, StateTime
from headgate.state.worker_backends import MemoryStates


class StateHandle(Declarations[ValueState, ListState, MapState]):
    """Declares state in ``ProcessFunction.open``.

    A checkpoint stores reducing and aggregating states like value states, so a new version of the program may
    change one into another.
    """

    def reducing(
        self,
        name: str,
        type: Any,
        combine: Callable[[Any, Any], Any],
        *,
        ttl: TTL | None = None,
        evolution: Evolution = NO_EVOLUTION,
    ) -> ReducingState:
        """Declare one value per key that is combined with every value that is added.

        ``combine(so_far, value)`` returns the new value. The first value that is added is stored as it is.
        """
        value = self.value(name, type, ttl=ttl, evolution=evolution)
        if not callable(combine):
            raise UsageError(
                f"operator '{self._node}': reducing state '{name}' needs a function of two values, not {combine!r}"
            )
        return ReducingState(self._node, name, value, combine)

    def broadcast(self, name: str, key_type: Any, type: Any, *, evolution: Evolution = NO_EVOLUTION) -> BroadcastState:
        """Declare a map from ``key_type`` to ``type`` that is the same in every subtask; see ``BroadcastState``.

        Raises:
            UsageError: the function has no broadcast side.
        """
        return BroadcastState(self._node, *self._declared_broadcast(name, key_type, type, evolution))

    def aggregating(
        self,
        name: str,
        type: Any,
        function: AggregateFunction[Any, Any, Any],
        *,
        ttl: TTL | None = None,
        evolution: Evolution = NO_EVOLUTION,
    ) -> AggregatingState:
        """Declare one accumulator of ``type`` per key.

        ``function`` adds values to it and computes the result from it.
        """
        value = self.value(name, type, ttl=ttl, evolution=evolution)
        if not isinstance(function, AggregateFunction):
            raise UsageError(
                f"operator '{self._node}': aggregating state '{name}' needs a headgate.AggregateFunction, "
                f"not {function!r}"
            )
        return AggregatingState(self._node, name, value, function)


class ProcessContext(CallContext):
    """The context of a call of a process function: the key, and its timers."""

    def __init__(
        self,
        operator: OperatorContext,
        time: OperatorTime,
        side_outputs: SideOutputs,
        cursor: CurrentKey,
        timers: Timers,
    ) -> None:
        """For Headgate only."""
        super().__init__(operator, time, side_outputs)
        self._current = cursor
        self._timers = timers

    @property
    def key(self) -> Any:
        """The key of the record, or of the call of ``on_timer`` or ``on_round``.

        A tuple if ``key_by`` named several columns.
        """
        return self._current.key

    @property
    def timers(self) -> Timers:
        """The timers of this key, and the current times."""
        return self._timers


class ProcessFunction:
    """Base class of functions with state per key. Pass an instance to ``KeyedStream.process``.

    Every subtask works on a copy of the instance. Keep everything that must survive a failure in state, not in
    attributes.

    Attributes:
        schema: the schema of the records that it returns. None: the schema of its input.
        side_outputs: names and schemas of its side outputs (None: the schema of its input), which it emits to with
            ``context.emit_to``. ``stream.side_output(name)`` of the result returns one as a stream.
    """

    schema: SchemaLike | None = None
    side_outputs: SideOutputsLike = {}

    def open(self, state: StateHandle) -> None:
        """Declare state: ``self.label = state.value("label", pa.int64())``.

        Called once per subtask, and once when the pipeline is built. State has no key yet and cannot be used here.
        """

    def close(self) -> None:
        """Release what ``open`` has made, such as a connection. Called after each ``open`` that did not raise.

        That is when the subtask ends, also after a failure, but not when its process is killed. What it raises is
        written to the worker's log. Default: does nothing.
        """

    def process(self, row: Row, context: ProcessContext) -> Iterable[Row] | None:
        """Process one record, which is a new dict. Return or yield the results, or return None."""
        raise NotImplementedError(f"{type(self).__name__} has no method process; define it")

    def on_timer(self, timer: Timer, context: ProcessContext) -> Iterable[Row] | None:
        """Called when a timer of ``context.key`` fires; that timer no longer exists.

        It may use state, and register and delete timers. Return or yield the results, or return None.
        """
        return None

    def on_round(self, round: int, context: ProcessContext) -> Iterable[Row] | None:
        """Called once per key that has any state, when a round of the surrounding loop is finished everywhere."""
        return None


_ROUND_KEYS = 8_192
"""``on_round`` sends its results on after so many keys."""

TIMERS_PER_TURN = 8_192
"""Results of timers are sent on after so many; a tick fires no more of them at a time."""


@dataclass(frozen=True)
class ProcessSpec(StatefulFunctionSpec[ProcessFunction]):
    """Call a function with state for each key. Made by ``row_process_spec``, which learns ``descriptors``."""

    form: ClassVar[type[StatefulFunction]] = ProcessFunction

    def build(self) -> Operator:
        return ProcessOperator(self)


def row_process_spec(node: str, keys: tuple[str, ...], function: ProcessFunction, schema: pa.Schema) -> ProcessSpec:
    """Return the spec of ``function`` on a stream of ``schema``, learning its states from a copy.

    Raises:
        UsageError: a wrong declaration.
        UserFunctionError: its ``open`` raised.
    """
    check_keys(node, schema, keys)
    columns, states = key_columns(schema, keys), MemoryStates()  # these stay empty
    handles = RowHandleFactory(node, CurrentKey(), lambda d: states.by_row(columns, [d]).cells(d), StateTime())
    learning = StateHandle(node, handles)
    descriptors = learned_states(node, function, learning)
    return ProcessSpec(keys, function, schema, descriptors, learning.forgotten)


class ProcessOperator(FunctionOperator, TimedOperator):
    """Calls the function once per record, with its states at the record's key."""

    _backend: RowBackend

    def __init__(self, spec: ProcessSpec) -> None:
        self._spec = spec
        self._current = CurrentKey()
        self._key_of_row: Callable[[Row], Any] = itemgetter(*spec.keys) if spec.keys else lambda row: NoKey()

    def open(self, context: OperatorContext, output: Output) -> None:
        """See ``Operator``. Opens a copy of the user's function."""
        super().open(context, output)
        node, keys = context.node, key_columns(self._spec.schema, self._spec.keys)
        states = context.states if self._spec.keys else MemoryStates()  # no key: none of them has anything
        self._backend = states.by_row(keys, self._spec.descriptors, has_timers=self._spec.has_timers)
        self._timers = Timers(node, self._current, self._time, self._backend.timers)
        self._side_outputs: SideOutputs = RowSideOutputs(
            node, side_schemas(node, self._spec.function, self._spec.schema)
        )
        self._user_context = ProcessContext(context, self._time, self._side_outputs, self._current, self._timers)
        self._function: ProcessFunction = copied(node, self._spec.function)
        self.user_object = self._function
        maker = RowHandleFactory(node, self._current, self._backend.cells, self._backend.time)
        bind_counters(self._function, context.metrics)
        open_as_planned(node, self._function, self._handle(maker), self._spec.descriptors)
        self._function_is_open()
        self._writer = RowWriter(self._spec.output_schema(self._spec.schema, node))

    def _handle(self, maker: RowHandleFactory) -> StateHandle:
        """Return what the function declares its states with."""
        return StateHandle(self.context.node, maker)

    def process(self, batch: pa.RecordBatch) -> None:
        self._process(batch, self._function.process, self._spec.keys, self._key_of_row)

    def _process(
        self,
        batch: pa.RecordBatch,
        function: Callable[[Row, ProcessContext], Iterable[Row] | None],
        keys: tuple[str, ...],
        key_of: Callable[[Row], Any],
    ) -> None:
        """Call ``function`` for each record; ``keys`` are the columns of its key, ``key_of`` returns their values."""
        self._begin_call()
        self._backend.absorb()
        batch = divert_unreadable(self, batch)
        self._backend.expect([batch.column(key) for key in keys])
        results: list[Any] = []
        with paused_gc():
            self._call(rows_of(batch), function, key_of, results)
            self._emit(results)

    def _call(
        self,
        rows: list[Row],
        function: Callable[[Row, ProcessContext], Iterable[Row] | None],
        key_of: Callable[[Row], Any],
        results: list[Any],
    ) -> None:
        context, cursor = self._user_context, self._current
        row: Row = {}
        try:
            for row in rows:
                cursor.key = key_of(row)
                found = function(row, context)
                if found is not None:
                    results.extend(map(self._writer.taken, each_row(found)))
        except Exception as error:
            raise user_error(self.context.node, row, error) from None
        finally:
            cursor.key = NoKey()

    def on_round(self, round_: int) -> None:
        """See ``Operator``. Calls the function for every key that has state now."""
        if type(self._function).on_round is ProcessFunction.on_round:
            # all keys would be read for nothing
            return
        self._begin_call()
        self._backend.absorb()
        keys = self._backend.all_keys()
        # those of now: keys that the calls add have no part in this round
        for start in range(0, len(keys), _ROUND_KEYS):
            results: list[Any] = []
            with paused_gc():
                some, record = keys[start : start + _ROUND_KEYS], f"key {{}} at the end of round {round_}"
                self._call_at_keys(some, self._function.on_round, round_, results, record)
                self._emit(results)

    def _fire_some(self, kind: TimeKind, until_ms: int) -> int:
        assert self._backend.timers is not None
        held, fired = self._backend.timers.of(kind), 0
        self._begin_call()
        self._backend.absorb()
        results: list[Any] = []
        with paused_gc():
            while fired < TIMERS_PER_TURN and (due := held.take(until_ms, TIMERS_PER_TURN - fired)) is not None:
                self._call_timer(Timer(kind, due[0]), due[1], results)
                fired += len(due[1])
            self._emit(results)
        return fired

    def _call_timer(self, timer: Timer, keys: list[Any], results: list[Any]) -> None:
        self._timers.begin(timer)
        self._call_at_keys(keys, self._function.on_timer, timer, results, timer_text(timer))

    def _call_at_keys(
        self, keys: list[Any], function: Callable[[Any, Any], Any], argument: Any, results: list[Any], record: str
    ) -> None:
        """Call ``function(argument, context)`` at each key; ``record``: a call in an error, {} is the key."""
        context, cursor = self._user_context, self._current
        try:
            for cursor.key in keys:
                found = function(argument, context)
                if found is not None:
                    results.extend(map(self._writer.taken, each_row(found)))
        except Exception as error:
            text = record.format(shortened(cursor.key))
            raise UserFunctionError(self.context.node, text, user_traceback(error)) from None
        finally:
            cursor.key = NoKey()

    def _end_firing(self) -> None:
        self._timers.end()

    def _emit(self, results: list[Any]) -> None:
        batch, refused = self._writer.batch(results)
        if refused:
            divert_refused(self, refused)
        self.output.emit(batch)
        self._side_outputs.send(self)

    def freeze(self) -> FrozenState | None:
        """See ``Operator``. None for a function that declared no state and has no timers."""
        return super().freeze() if self._spec.descriptors or self._spec.has_timers else None


def timer_text(timer: Timer) -> str:
    """Return what a call for ``timer`` is in an error, with {} for the key."""
    return f"the timer of key {{}} for {timer.kind.value} {timer.time_ms}"


def each_row(found: Any) -> Iterable[Any]:
    """Return the rows of a function's result."""
    if isinstance(found, dict):
        raise TypeError("a process function must return an iterable of dicts, but returned one dict; return [row]")
    return found  # type: ignore[no-any-return]
