"""Process functions by row: what users derive from, and the state that they see (ST6 to ST9).

Counterpart: ``operators.process.by_row`` calls them. Modelled on Flink's ``KeyedProcessFunction`` and PySpark's
``StatefulProcessor``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from headgate.errors import UsageError
from headgate.operators.process.broadcast_states import BroadcastState
from headgate.operators.process.combining import AggregateFunction, AggregatingState, ReducingState
from headgate.operators.process.cursor import Cursor
from headgate.operators.process.declaring import Declarations
from headgate.operators.process.keyed_states import ListState, MapState, ValueState
from headgate.operators.process.timers import Timer, Timers
from headgate.operators.rows import Row
from headgate.operators.schemas import SchemaLike
from headgate.state.evolution import NO_EVOLUTION, Evolution
from headgate.state.ttl import TTL


class StateHandle(Declarations[ValueState, ListState, MapState]):  # ST19
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


class ProcessContext:
    """The context of a call of a process function: the key, and its timers."""

    __slots__ = ("_cursor", "_timers")

    def __init__(self, cursor: Cursor, timers: Timers) -> None:
        """For Headgate only."""
        self._cursor = cursor
        self._timers = timers

    @property
    def key(self) -> Any:
        """The key of the record, or of the call of ``on_timer`` or ``on_round``.

        A tuple if ``key_by`` named several columns.
        """
        return self._cursor.key

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
    """

    schema: SchemaLike | None = None

    def open(self, state: StateHandle) -> None:
        """Declare state: ``self.label = state.value("label", pa.int64())``.

        Called once per subtask, and once when the pipeline is built. State has no key yet and cannot be used here.
        """

    def process(self, row: Row, context: ProcessContext) -> Iterable[Row] | None:
        """Process one record, which is a new dict. Return or yield the results, or return None."""
        raise NotImplementedError

    def on_timer(self, timer: Timer, context: ProcessContext) -> Iterable[Row] | None:
        """Called when a timer of ``context.key`` fires; that timer no longer exists.

        It may use state, and register and delete timers. Return or yield the results, or return None.
        """
        return None

    def on_round(self, round: int, context: ProcessContext) -> Iterable[Row] | None:
        """Called once per key that has any state, when a round of the surrounding loop is finished everywhere."""
        return None
