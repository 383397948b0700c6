"""``process`` with a row function: rules ST1 to ST9 of docs/spec/state.md.

Counterpart: ``operators.process.functions`` is what users see, a ``state.backend.RowBackend`` holds the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, ClassVar

import pyarrow as pa

from headgate.operators.base import Operator, OperatorContext, Output
from headgate.operators.key_check import check_keys
from headgate.operators.keyed import key_columns
from headgate.operators.process.cursor import Cursor, NoKey
from headgate.operators.process.functions import ProcessContext, ProcessFunction, StateHandle
from headgate.operators.process.row_states import RowStates
from headgate.operators.process.spec import StatefulFunction, StatefulFunctionSpec, opened
from headgate.operators.process.timed import TimedOperator
from headgate.operators.process.timers import Timer, Timers
from headgate.operators.row_functions import divert_refused
from headgate.operators.rows import Row, RowWriter, paused_gc, rows_of
from headgate.operators.unreadable import divert_unreadable
from headgate.operators.user_function import UserFunctionError, copied, shortened, user_error, user_traceback
from headgate.state.backend import RowBackend
from headgate.state.frozen import FrozenState
from headgate.state.memory.factory import MemoryStates
from headgate.state.timers import TimeKind
from headgate.state.ttl import StateTime

_ROUND_KEYS = 8_192
"""``on_round`` sends its results on after so many keys."""

TIMERS_PER_TURN = 8_192
"""Results of timers are sent on after so many; a tick fires no more of them at a time (TM7)."""


@dataclass(frozen=True)
class ProcessSpec(StatefulFunctionSpec[ProcessFunction]):
    """Call a function with state for each key. Made by ``row_process_spec``, which learns ``descriptors``."""

    form: ClassVar[type[StatefulFunction]] = ProcessFunction

    def build(self) -> Operator:
        """See ``OperatorSpec``."""
        return ProcessOperator(self)


def row_process_spec(node: str, keys: tuple[str, ...], function: ProcessFunction, schema: pa.Schema) -> ProcessSpec:
    """Return the spec of ``function`` on a stream of ``schema``, learning its states from a copy.

    Raises:
        UsageError: a wrong declaration.
        UserFunctionError: its ``open`` raised.
    """
    check_keys(node, schema, keys)
    columns, states = key_columns(schema, keys), MemoryStates()  # nobody ever puts anything into these
    handles = RowStates(node, Cursor(), lambda d: states.by_row(columns, [d]).cells(d), StateTime())
    learning = StateHandle(node, handles)
    descriptors = opened(node, copied(node, function), learning)
    return ProcessSpec(keys, function, schema, descriptors, learning.forgotten)


class ProcessOperator(TimedOperator):
    """Calls the function once per record, with its states at the record's key."""

    _backend: RowBackend

    def __init__(self, spec: ProcessSpec) -> None:
        self._spec = spec
        self._cursor = Cursor()
        self._key_of_row: Callable[[Row], Any] = itemgetter(*spec.keys) if spec.keys else lambda row: NoKey()

    def open(self, context: OperatorContext, output: Output) -> None:
        """See ``Operator``. Opens a copy of the user's function."""
        super().open(context, output)
        node, keys = context.node, key_columns(self._spec.schema, self._spec.keys)
        states = context.states if self._spec.keys else MemoryStates()  # no key: none of them has anything
        self._backend = states.by_row(keys, self._spec.descriptors, has_timers=self._spec.has_timers)
        self._timers = Timers(node, self._cursor, self._time, self._backend.timers)
        self._user_context = ProcessContext(self._cursor, self._timers)
        self._function: ProcessFunction = copied(node, self._spec.function)
        self.user_object = self._function
        maker = RowStates(node, self._cursor, self._backend.cells, self._backend.time)
        found = opened(node, self._function, self._handle(maker))
        assert found == self._spec.descriptors
        self._writer = RowWriter(self._spec.output_schema(self._spec.schema, node))

    def _handle(self, maker: RowStates) -> StateHandle:
        """Return what the function declares its states with."""
        return StateHandle(self.context.node, maker)

    def process(self, batch: pa.RecordBatch) -> None:
        """See ``Operator``."""
        self._begin_call()
        self._backend.absorb()
        batch = divert_unreadable(self, batch)
        self._backend.expect([batch.column(key) for key in self._spec.keys])
        results: list[Any] = []
        with paused_gc():
            self._call(rows_of(batch), results)
            self._emit(results)

    def _call(self, rows: list[Row], results: list[Any]) -> None:
        function, context, cursor = self._function.process, self._user_context, self._cursor
        key_of = self._key_of_row
        row: Row = {}
        try:
            for row in rows:
                cursor.key = key_of(row)
                found = function(row, context)
                if found is not None:
                    results.extend(each_row(found))
        except Exception as error:
            raise user_error(self.context.node, row, error) from None
        finally:
            cursor.key = NoKey()

    def on_round(self, round_: int) -> None:
        """See ``Operator``. Calls the function for every key that has state now (ST9)."""
        if type(self._function).on_round is ProcessFunction.on_round:
            return
        self._begin_call()
        self._backend.absorb()
        keys = self._backend.all_keys()
        for start in range(0, len(keys), _ROUND_KEYS):
            results: list[Any] = []
            with paused_gc():
                self._call_round(round_, keys[start : start + _ROUND_KEYS], results)
                self._emit(results)

    def _call_round(self, round_: int, keys: list[Any], results: list[Any]) -> None:
        function, context, cursor = self._function.on_round, self._user_context, self._cursor
        try:
            for cursor.key in keys:
                found = function(round_, context)
                if found is not None:
                    results.extend(each_row(found))
        except Exception as error:
            record = f"key {shortened(cursor.key)} at the end of round {round_}"
            raise UserFunctionError(self.context.node, record, user_traceback(error)) from None
        finally:
            cursor.key = NoKey()

    def _fire_some(self, kind: TimeKind, until_ms: int) -> int:
        """See ``TimedOperator``."""
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
        function, context, cursor = self._function.on_timer, self._user_context, self._cursor
        self._timers.begin(timer)
        try:
            for cursor.key in keys:
                found = function(timer, context)
                if found is not None:
                    results.extend(each_row(found))
        except Exception as error:
            record = f"the timer of key {shortened(cursor.key)} for {timer.kind.value} {timer.time_ms}"
            raise UserFunctionError(self.context.node, record, user_traceback(error)) from None
        finally:
            cursor.key = NoKey()

    def _end_firing(self) -> None:
        """See ``TimedOperator``."""
        self._timers.end()

    def _emit(self, results: list[Any]) -> None:
        batch, refused = self._writer.batch(results)
        if refused:
            divert_refused(self, refused)
        self.output.emit(batch)

    def freeze(self) -> FrozenState | None:
        """See ``Operator``. None for a function that declared no state and has no timers."""
        return super().freeze() if self._spec.descriptors or self._spec.has_timers else None


def each_row(found: Any) -> Iterable[Any]:
    """Return the rows of a function's result (ST8)."""
    if isinstance(found, dict):
        raise TypeError("a process function must return an iterable of dicts, but returned one dict; return [row]")
    return found  # type: ignore[no-any-return]
