"""A function that is called once for each key of a batch, with all its rows (rules SX of docs/spec/processors.md).

This is how Structured Streaming calls a stateful processor. Counterpart: ``spark.stateful_processor``, which makes a
``KeyFunction`` of one; nothing here knows PySpark. State is that of functions by row. Timers can be listed by key,
and what fires at the end of input is what was there then.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import field
from typing import Any

import numpy as np
import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.operators.base import WATERMARK_MAX_MS, Operator, OperatorContext, Output, RestoredState, owner_of
from headgate.operators.functions import Refused, divert_refused, paused_gc, rows_of
from headgate.operators.lateness import count_late
from headgate.operators.process.declarations import RowSideOutputs, StatefulFunctionSpec
from headgate.operators.process.row_process import ProcessOperator, StateHandle, timer_text
from headgate.operators.process.row_state import CurrentKey, NoKey
from headgate.operators.process.timers import CallContext, OperatorTime, Timer, milliseconds
from headgate.operators.timestamps import EventTime
from headgate.operators.user_functions import UserFunctionError, divert_unreadable, shortened, user_traceback
from headgate.state.backend import RowTimers, TimeKind
from headgate.state.key_hash import owned_rows
from headgate.state.ttl import StateTime


class KeyTimers:
    """The timers of the current key. A key has at most one for one time, in milliseconds since 1970."""

    def __init__(self, node: str, cursor: CurrentKey, held: RowTimers | None) -> None:
        """``held``: what the backend holds; None: the function has no notion of time."""
        self._node = node
        self._current = cursor
        self._held = held
        self._by_key: dict[Any, set[int]] | None = None
        self._firing_ms: int | None = None
        self._until_ms = 0
        self._waiting: dict[tuple[Any, int], None] = {}

    def register(self, time: Any) -> None:
        """Add a timer. What is due already, and what is new while the last ones fire, counts from the next turn on.

        The timer that fires is gone when its call is over, so registering it again does nothing.
        """
        key, time_ms = self._key(), milliseconds(self._node, time)
        if self._firing_ms is None or time_ms > self._until_ms:
            self._add(key, time_ms)
        elif time_ms != self._firing_ms:
            self._waiting[key, time_ms] = None

    def delete(self, time: Any) -> None:
        """Remove a timer; nothing happens if there is none."""
        key, time_ms = self._key(), milliseconds(self._node, time)
        self._waiting.pop((key, time_ms), None)
        self._checked().delete(key, time_ms)
        if self._by_key is not None:
            self._forget(key, time_ms)

    def times(self) -> list[int]:
        """Return the times of the key's timers, the earliest first, that of the one that fires among them."""
        key = self._key()
        found = self._index().get(key, set()) | {time_ms for other, time_ms in self._waiting if other == key}
        return sorted(found if self._firing_ms is None else found | {self._firing_ms})

    def begin(self, firing_ms: int, until_ms: int) -> None:
        """A timer fires for the current key; what is registered for times up to ``until_ms`` waits for ``end``."""
        assert firing_ms <= until_ms, "what fires is due"
        self._firing_ms, self._until_ms = firing_ms, until_ms
        if self._by_key is not None:
            self._forget(self._current.key, firing_ms)

    def end(self) -> None:
        """Nothing more fires for now."""
        self._firing_ms = None
        waiting, self._waiting = self._waiting, {}
        for key, time_ms in waiting:
            self._add(key, time_ms)

    def restored(self) -> None:
        """The backend holds other timers than before."""
        self._by_key = None

    def _add(self, key: Any, time_ms: int) -> None:
        self._checked().register(key, time_ms)
        if self._by_key is not None:
            self._by_key.setdefault(key, set()).add(time_ms)

    def _forget(self, key: Any, time_ms: int) -> None:
        assert self._by_key is not None
        times = self._by_key.get(key)
        if times is not None:
            times.discard(time_ms)
            if not times:
                del self._by_key[key]

    def _index(self) -> dict[Any, set[int]]:
        """The times of every key: made when they are listed first, since few functions ever do."""
        if self._by_key is None:
            self._by_key = {}
            for time_ms, key in self._all():
                self._by_key.setdefault(key, set()).add(time_ms)
        return self._by_key

    def _all(self) -> Iterator[tuple[int, Any]]:
        return self._checked().all()

    def _key(self) -> Any:
        key = self._current.key
        if isinstance(key, NoKey):
            hash(key)  # says what is wrong
        return key

    def _checked(self) -> RowTimers:
        assert self._held is not None, "there are no timers without a notion of time"
        return self._held


class KeyContext(CallContext):
    """The context of a call of a function by key.

    Attributes:
        kind: the time of the function's timers; None: it has no notion of time.
    """

    def __init__(
        self,
        operator: OperatorContext,
        time: OperatorTime,
        cursor: CurrentKey,
        timers: KeyTimers,
        kind: TimeKind | None,
        state: StateTime,
    ) -> None:
        super().__init__(operator, time, RowSideOutputs(operator.node, {}))
        self.kind = kind
        self._current = cursor
        self._state = state
        self.timers = timers
        self.watermark_ms: int | None = None
        """The latest watermark of this generation but for that of the end, which is no time."""

    @property
    def key(self) -> Any:
        """The key of the current call."""
        return self._current.key

    @property
    def processing_time_ms(self) -> int:
        """Processing time, the same for all of one call of the operator."""
        return self._state.now_ms


class KeyFunction(ABC):
    """A function with state, called for each key of a batch."""

    schema: pa.Schema
    """Of its results."""

    @abstractmethod
    def open(self, state: StateHandle) -> None:
        """Declare state."""

    @abstractmethod
    def begin(self, context: KeyContext) -> None:
        """Called once in a subtask, after ``open``."""

    @abstractmethod
    def rows(self, batch: pa.RecordBatch) -> Callable[[Sequence[int]], Any]:
        """Return what returns some rows of ``batch`` as the function wants them."""

    @abstractmethod
    def process(self, rows: Any) -> Iterable[Any] | None:
        """Process the rows of the key in a batch."""

    @abstractmethod
    def begin_with(self, rows: Any) -> Iterable[Any] | None:
        """Take over the key's rows of the initial state; results are ignored."""

    @abstractmethod
    def on_timer(self, timer: Timer, context: Any) -> Iterable[Any] | None:
        """Called when a timer of the key fires."""

    @abstractmethod
    def taken(self, result: Any) -> Any:
        """Return a result as it is now: the function may change its own afterwards.

        Raises:
            TypeError, ValueError: it is no result, and is not diverted.
        """

    @abstractmethod
    def written(self, results: Sequence[Any]) -> tuple[pa.RecordBatch, list[Refused]]:
        """Return results that were ``taken`` as a batch of ``schema``, and those that do not fit."""

    @abstractmethod
    def close(self) -> None:
        """The subtask is over."""


@dataclass(frozen=True)
class KeyFunctionSpec(StatefulFunctionSpec[Any]):
    """Call a ``KeyFunction``.

    Attributes:
        kind: which time its timers are of; None: it has none.
        time: where the event time of a record is, with event time.
        initial: rows that each key begins with, in canonical types and without null keys; they have the columns of the
            key.
    """

    kind: TimeKind | None = None
    time: EventTime | None = None
    initial: pa.RecordBatch | None = field(default=None, compare=False, repr=False)

    def build(self) -> Operator:
        return KeyFunctionOperator(self)

    @property
    def has_timers(self) -> bool:
        """Any function with a notion of time has timers."""
        return self.kind is not None


class KeyFunctionOperator(ProcessOperator):
    """Calls the function once for each key of a batch, in the order of their first rows."""

    _function: KeyFunction  # type: ignore[assignment]

    def __init__(self, spec: KeyFunctionSpec) -> None:
        super().__init__(spec)  # type: ignore[arg-type]
        self._kind, self._event_time, self._initial = spec.kind, spec.time, spec.initial

    def open(self, context: OperatorContext, output: Output) -> None:
        """See ``Operator``. Opens a copy of the user's function."""
        super().open(context, output)
        held = None if self._kind is None or self._backend.timers is None else self._backend.timers.of(self._kind)
        self._key_timers = KeyTimers(context.node, self._current, held)
        state_time = self._backend.time
        self._key_context = KeyContext(context, self._time, self._current, self._key_timers, self._kind, state_time)
        self._function.begin(self._key_context)

    def restore(self, states: Sequence[RestoredState]) -> None:
        """See ``Operator``. What keys began with is in the state already."""
        super().restore(states)
        self._initial = None
        self._key_timers.restored()

    def process(self, batch: pa.RecordBatch) -> None:
        self._begin()
        batch = self._in_time(divert_unreadable(self, batch))
        results: list[Any] = []
        with paused_gc():
            self._call_keys(batch, self._function.process, results)
            self._emit(results)
        self._fire_what_has_passed()

    def _fire_what_has_passed(self) -> None:
        """Fire timers for times before the watermark after the batch, as in Spark."""
        watermark_ms, timers = self._key_context.watermark_ms, self._backend.timers
        if self._kind is not TimeKind.EVENT_TIME or watermark_ms is None or timers is None:
            return
        due_ms = timers.event_time.next_ms()
        if due_ms is not None and due_ms <= watermark_ms:
            self._fire_event_time(watermark_ms, len(timers.event_time))

    def _begin(self) -> None:
        """A call begins; the very first one takes over the initial state."""
        self._begin_call()
        self._backend.absorb()
        batch, self._initial = self._initial, None
        if batch is None:
            return
        owner = owner_of(self.context)
        # every subtask is given all of it, and begins with its own keys
        own = owned_rows(batch, self._spec.keys, owner.max_parallelism, owner.parallelism, owner.subtask_index)
        self._call_keys(own, self._function.begin_with, [])

    def _in_time(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the records that event time has not passed yet."""
        watermark_ms = self._key_context.watermark_ms
        if self._event_time is None or watermark_ms is None:
            return batch
        times = self._event_time.values(batch) * self._event_time.ms_per_unit // self._event_time.units_per_ms
        is_late = (times <= watermark_ms) & ~np.asarray(batch.column(self._event_time.column).is_null())
        if not is_late.any():
            return batch
        count_late(self.context.metrics, watermark_ms + 1 - times[is_late])
        return batch.filter(pa.array(~is_late))

    def _call_keys(
        self, batch: pa.RecordBatch, function: Callable[[Any], Iterable[Any] | None], results: list[Any]
    ) -> None:
        if batch.num_rows == 0:
            return
        columns = [batch.column(key) for key in self._spec.keys]
        self._backend.expect(columns)
        by_key: dict[Any, list[int]] = {}
        key_of = self._key_of_row
        for place, row in enumerate(rows_of(batch.select(list(self._spec.keys)))):
            by_key.setdefault(key_of(row), []).append(place)
        rows_at = self._function.rows(batch)
        try:
            for self._current.key, places in by_key.items():
                results.extend(map(self._taken, function(rows_at(places)) or ()))
        except UserFunctionError:
            raise
        except Exception as error:
            record = f"{len(places)} records of key {shortened(self._current.key)}"
            raise UserFunctionError(self.context.node, record, user_traceback(error)) from None
        finally:
            self._current.key = NoKey()

    def _call_timer(self, timer: Timer, keys: list[Any], results: list[Any]) -> None:
        """See ``ProcessOperator``. At the end of input, what is new waits until all has fired."""
        is_end = timer.is_event_time and self._time.event_time_ms == WATERMARK_MAX_MS
        until_ms = WATERMARK_MAX_MS if is_end else timer.time_ms
        try:
            for self._current.key in keys:
                self._key_timers.begin(timer.time_ms, until_ms)
                results.extend(map(self._taken, self._function.on_timer(timer, self._key_context) or ()))
        except UserFunctionError:
            raise
        except Exception as error:
            record = timer_text(timer).format(shortened(self._current.key))
            raise UserFunctionError(self.context.node, record, user_traceback(error)) from None
        finally:
            self._current.key = NoKey()

    def _end_firing(self) -> None:
        self._key_timers.end()

    def on_watermark(self, watermark_ms: int) -> None:
        """See ``TimedOperator``. The last one fires what there is, once."""
        self._begin()
        if watermark_ms == WATERMARK_MAX_MS:
            super().on_watermark(watermark_ms)
            # afterwards, or nothing would fire; what these calls registered stays for more input
            self._time.has_ended = True
            return
        self._time.has_ended = False
        self._key_context.watermark_ms = watermark_ms
        super().on_watermark(watermark_ms)

    def on_tick(self, now_ms: int) -> None:
        self._begin()
        super().on_tick(now_ms)

    def before_barrier(self) -> None:
        """Have the initial state in the snapshot."""
        self._begin()

    def finish(self) -> None:
        self._begin()
        super().finish()

    def on_round(self, round_: int) -> None:
        """Stateful processors know of no rounds."""

    def _taken(self, result: Any) -> Any:
        try:
            return self._function.taken(result)
        except (TypeError, ValueError, KeyError, OverflowError, pa.ArrowException) as error:
            record = f"a result for key {shortened(self._current.key)}"
            raise UserFunctionError(self.context.node, record, str(error)) from None

    def _emit(self, results: list[Any]) -> None:
        batch, refused = self._function.written(results)
        if refused:
            divert_refused(self, refused)
        self.output.emit(batch)

    def close(self) -> None:
        # ``open`` may have failed before there was one
        function = getattr(self, "_function", None)
        if function is not None:
            function.close()
