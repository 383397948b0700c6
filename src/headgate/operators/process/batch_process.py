"""``process`` with a function by batch: thousands of keys and timers in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar, TypeAlias

import numpy as np
import polars as pl
import pyarrow as pa

from headgate.errors import UsageError
from headgate.model.graph import MAIN
from headgate.operators.base import Operator, OperatorContext, Output, key_columns, owner_of
from headgate.operators.functions import divert_misfits
from headgate.operators.keys import check_keys
from headgate.operators.process.batch_aggregation import BatchStateHandle
from headgate.operators.process.batch_state import BatchHandleFactory, CurrentKeys, Keys
from headgate.operators.process.declarations import (
    BatchSideOutputs,
    SideOutputs,
    SideOutputsLike,
    StatefulFunction,
    StatefulFunctionSpec,
    emit_in_parts,
    learned_states,
    open_as_planned,
    side_schemas,
)
from headgate.operators.process.timers import (
    CallContext,
    OperatorTime,
    TimedOperator,
    Times,
    checked,
    milliseconds,
    no_date,
    not_a_time,
)
from headgate.operators.schemas import SchemaLike, batch_of, columns_of_frame, frame_of, schema_text
from headgate.operators.user_functions import (
    FunctionOperator,
    UserFunctionError,
    batch_error,
    bind_counters,
    copied,
    user_traceback,
)
from headgate.state.backend import DATES_MS, ColumnBackend, ColumnTimers, TimeKind, TimersByKind
from headgate.state.descriptors import KeyColumns
from headgate.state.key_hash import Words, owned_rows
from headgate.state.key_index import Slots
from headgate.state.snapshot import FrozenState
from headgate.state.worker_backends import MemoryStates

GivenTimes: TypeAlias = pl.Series | int | datetime
_TICKS = {"ms": 1, "us": 1_000, "ns": 1_000_000}
"""Of a Polars time unit, per millisecond."""


@dataclass(frozen=True, slots=True)
class FiredTimers:
    """Timers that fire, in the order of their times. ``context.keys`` are their keys, row by row; each occurs once.

    Attributes:
        times_ms: the time for which each timer was registered, in milliseconds since 1970.
    """

    kind: TimeKind
    times_ms: pl.Series

    def __len__(self) -> int:
        return len(self.times_ms)

    @property
    def is_event_time(self) -> bool:
        """Whether these are event-time timers; otherwise they are processing-time timers."""
        return self.kind is TimeKind.EVENT_TIME

    @property
    def times(self) -> pl.Series:
        """The time for which each timer was registered, as a time like those in records.

        Raises:
            UsageError: a time is not a date of the years 1 to 9999.
        """
        beyond = self.times_ms.filter(~self.times_ms.is_between(DATES_MS[0], DATES_MS[-1]))
        if len(beyond):
            raise no_date(beyond[0], "times_ms")
        return self.times_ms.cast(pl.Datetime("ms")).cast(pl.Datetime("us"))


class BatchTimers(Times):
    """The timers of the keys of the batch's rows. A key has at most one timer of each kind for one time.

    Pass a Series with one time per row, or one time for all rows. A time is milliseconds since 1970, or a datetime (in
    UTC if it has no zone), which is rounded up to a millisecond. Rows with a null are skipped. ``where=`` chooses rows,
    and ``keys=context.lookup(frame)`` uses the keys of other rows.
    """

    def __init__(
        self, node: str, cursor: CurrentKeys, time: OperatorTime, held: TimersByKind[ColumnTimers] | None
    ) -> None:
        """For Headgate only: ``context.timers``."""
        super().__init__(time)
        self._node = node
        self._current = cursor
        self._held = held
        self._firing: tuple[TimeKind, Slots, Words] | None = None
        self._waiting: list[tuple[Callable[[Slots, Words], None], Slots, Words]] = []

    def register_event_time(
        self, times: GivenTimes, where: pl.Series | None = None, *, keys: Keys | None = None
    ) -> None:
        """Register timers: ``on_timer`` is called when the watermark has reached the time of each row.

        If the watermark has already reached it, the timer fires with the next watermark. Registering an existing timer
        again has no effect.
        """
        self._change(TimeKind.EVENT_TIME, times, where, keys, is_deletion=False)

    def register_processing_time(
        self, times: GivenTimes, where: pl.Series | None = None, *, keys: Keys | None = None
    ) -> None:
        """Register timers: ``on_timer`` is called when processing time has reached the time of each row."""
        self._change(TimeKind.PROCESSING_TIME, times, where, keys, is_deletion=False)

    def delete_event_time(self, times: GivenTimes, where: pl.Series | None = None, *, keys: Keys | None = None) -> None:
        """Remove the timer for the time of each row. A timer that does not exist is ignored."""
        self._change(TimeKind.EVENT_TIME, times, where, keys, is_deletion=True)

    def delete_processing_time(
        self, times: GivenTimes, where: pl.Series | None = None, *, keys: Keys | None = None
    ) -> None:
        """Remove the timer for the time of each row. A timer that does not exist is ignored."""
        self._change(TimeKind.PROCESSING_TIME, times, where, keys, is_deletion=True)

    @property
    def holds_slots(self) -> bool:
        """Whether anything waits for ``end``: its slots must keep their numbers. For Headgate only."""
        return bool(self._waiting)

    def begin(self, kind: TimeKind, slots: Slots, times_ms: Words) -> None:
        """These timers fire; for Headgate only."""
        self._firing = kind, slots, times_ms

    def end(self) -> None:
        """Nothing more fires for now: what was registered for times that had passed is due next."""
        self._firing = None
        waiting, self._waiting = self._waiting, []
        for change, slots, times_ms in waiting:
            change(slots, times_ms)

    def _change(
        self, kind: TimeKind, times: GivenTimes, where: pl.Series | None, keys: Keys | None, *, is_deletion: bool
    ) -> None:
        held: ColumnTimers = checked(self._node, self._held).of(kind)
        change = held.delete if is_deletion else held.register
        if keys is not None and not isinstance(keys, Keys):
            raise self._wrong(f"keys= must be context.lookup(frame), not a {type(keys).__name__}")
        slots = self._current.of(keys).slots
        column = self._milliseconds(times, len(slots))
        chosen = column.is_not_null() if where is None else column.is_not_null() & self._checked(where, len(slots))
        if not chosen.all():
            slots, column = slots[chosen.fill_null(False).to_numpy()], column.filter(chosen)
        # a copy: the backend keeps the array, and this one may be a view of the user's Series
        times_ms = column.to_numpy().copy()
        if self._firing is not None and kind is self._firing[0]:
            # not later than what fires now: due with the next watermark or tick, not in this one
            passed = times_ms <= self._passed_ms(slots)
            if passed.any():
                self._waiting.append((change, slots[passed], times_ms[passed]))
                slots, times_ms = slots[~passed], times_ms[~passed]
        change(slots, times_ms)

    def _passed_ms(self, slots: Slots) -> Words:
        """Return up to which time the timers of each key have fired: its own that fires now, or the last that does."""
        assert self._firing is not None
        _, fired, times_ms = self._firing
        order = np.argsort(fired)
        places = order[np.minimum(np.searchsorted(fired, slots, sorter=order), len(fired) - 1)]
        return np.where(fired[places] == slots, times_ms[places], times_ms[-1])

    def _milliseconds(self, times: GivenTimes, rows: int) -> pl.Series:
        if not isinstance(times, pl.Series):
            return pl.Series([milliseconds(self._node, times)], dtype=pl.Int64).new_from_index(0, rows)
        if len(times) != rows:
            raise self._wrong(f"{len(times)} times were given for {rows} keys; there must be one for each")
        if isinstance(times.dtype, pl.Datetime):
            ticks = _TICKS[times.dtype.time_unit]
            found = times.to_physical()
            return found // ticks + (found % ticks > 0)  # the later one; adding before it might go over the end
        if not times.dtype.is_integer() and times.dtype != pl.Null:
            raise not_a_time(self._node, f"a Series of {times.dtype}")
        try:
            return times.cast(pl.Int64)
        except pl.exceptions.PolarsError:
            raise not_a_time(self._node, "a number that is too large") from None

    def _checked(self, where: pl.Series, rows: int) -> pl.Series:
        if not isinstance(where, pl.Series) or where.dtype != pl.Boolean or len(where) != rows:
            raise self._wrong(f"where= must be a Boolean Series of {rows} rows, as many as there are keys")
        return where.fill_null(False)

    def _wrong(self, problem: str) -> UsageError:
        return UsageError(f"timers of operator '{self._node}': {problem}")


TIMERS_PER_CALL = 16_384
"""``on_timer`` is called with so many keys at most; a tick calls it once."""


class BatchContext(CallContext):
    """The context of a call of a batch process function: the keys, and their timers."""

    def __init__(
        self,
        operator: OperatorContext,
        time: OperatorTime,
        side_outputs: SideOutputs,
        cursor: CurrentKeys,
        timers: BatchTimers,
        backend: ColumnBackend,
        keys: KeyColumns,
    ) -> None:
        """For Headgate only."""
        super().__init__(operator, time, side_outputs)
        self._current = cursor
        self._timers = timers
        self._backend = backend
        self._key_schema = pa.schema(list(zip(keys.names, keys.types, strict=True)))
        self._owner = owner_of(operator)

    @property
    def keys(self) -> Keys:
        """The keys of the batch's rows, or of the firing timers. In ``on_round``: all keys that have any state."""
        return self._current.keys

    @property
    def timers(self) -> BatchTimers:
        """The timers of these keys, and the current times."""
        return self._timers

    def lookup(self, frame: pl.DataFrame) -> Keys:
        """Return the keys of the rows of ``frame``, which has the key columns. Pass them as ``keys=`` to a state.

        The keys must belong to this subtask, like those of the batch after grouping or filtering.

        Raises:
            UsageError: a key column is missing or contains a null, or a key belongs to another subtask.
        """
        names: list[str] = self._key_schema.names
        missing = [name for name in names if name not in frame.columns]
        if missing:
            raise UsageError(f"operator '{self._node}': lookup needs the key column '{missing[0]}' in its frame")
        batch = batch_of(frame, self._key_schema)
        if any(column.null_count for column in batch.columns):
            raise UsageError(f"operator '{self._node}': lookup was given a null key; filter such rows out before")
        owner = self._owner
        owned = owned_rows(batch, names, owner.max_parallelism, owner.parallelism, owner.subtask_index)
        if owned.num_rows != batch.num_rows:
            raise UsageError(
                f"operator '{self._node}': lookup was given {batch.num_rows - owned.num_rows} keys of other subtasks, "
                "where their state is; send records to them with key_by"
            )
        return self._keys_of(batch.columns)

    def _keys_of(self, columns: Sequence[pa.Array]) -> Keys:
        return Keys(self._backend.slots(columns), self._backend.key_columns, tuple(self._key_schema.names))


class BatchProcessFunction:
    """Base class of vectorised functions with state per key. Pass an instance to ``KeyedStream.process``.

    Every subtask works on a copy of the instance. Keep everything that must survive a failure in state. Batches may
    begin and end at other records in each run, so the result must not depend on the division into batches.

    Attributes:
        schema: the schema of the frames that it returns. None: the schema of its input.
        side_outputs: names and schemas of its side outputs (None: the schema of its input), which it emits to with
            ``context.emit_to``. ``stream.side_output(name)`` of the result returns one as a stream.
    """

    schema: SchemaLike | None = None
    side_outputs: SideOutputsLike = {}

    def open(self, state: BatchStateHandle) -> None:
        """Declare state: ``self.label = state.value("label", pa.int64())``.

        Called once per subtask, and once when the pipeline is built. State has no keys yet and cannot be used here.
        """

    def close(self) -> None:
        """Release what ``open`` has made, such as a connection. Called after each ``open`` that did not raise.

        That is when the subtask ends, also after a failure, but not when its process is killed. What it raises is
        written to the worker's log. Default: does nothing.
        """

    def process(self, batch: pl.DataFrame, context: BatchContext) -> pl.DataFrame | None:
        """Process one batch. Return the results, or None."""
        raise NotImplementedError(f"{type(self).__name__} has no method process; define it")

    def on_timer(self, timers: FiredTimers, context: BatchContext) -> pl.DataFrame | None:
        """Called when timers of ``context.keys`` fire; these timers no longer exist. Return the results, or None.

        It may use state, and register and delete timers. ``context.keys.frame()`` returns the key columns.
        """
        return None

    def on_round(self, round: int, context: BatchContext) -> pl.DataFrame | None:
        """Called when a round of the surrounding loop is finished everywhere. ``context.keys``: all keys with state."""
        return None


@dataclass(frozen=True)
class BatchProcessSpec(StatefulFunctionSpec[BatchProcessFunction]):
    """Call a vectorised function with state. Made by ``batch_process_spec``, which learns ``descriptors``."""

    form: ClassVar[type[StatefulFunction]] = BatchProcessFunction

    def build(self) -> Operator:
        return BatchProcessOperator(self)


def batch_process_spec(
    node: str, keys: tuple[str, ...], function: BatchProcessFunction, schema: pa.Schema
) -> BatchProcessSpec:
    """Return the spec of ``function`` on a stream of ``schema``, learning its states from a copy.

    Raises:
        UsageError: a wrong declaration.
        UserFunctionError: its ``open`` raised.
    """
    check_keys(node, schema, keys)
    columns = key_columns(schema, keys)
    learning = BatchStateHandle(
        node, BatchHandleFactory(node, CurrentKeys(), lambda d: MemoryStates().by_column(columns, [d]))
    )
    descriptors = learned_states(node, function, learning)
    return BatchProcessSpec(keys, function, schema, descriptors, learning.forgotten)


class BatchProcessOperator(FunctionOperator, TimedOperator):
    """Calls the function once per batch, with its states at the keys of the batch's rows."""

    _backend: ColumnBackend

    def __init__(self, spec: BatchProcessSpec) -> None:
        self._spec = spec
        self._current = CurrentKeys()

    def open(self, context: OperatorContext, output: Output) -> None:
        """See ``Operator``. Opens a copy of the user's function."""
        super().open(context, output)
        node, spec = context.node, self._spec
        keys = key_columns(spec.schema, spec.keys)
        states = context.states if spec.keys else MemoryStates()  # no key: none of them has anything
        self._backend = states.by_column(keys, spec.descriptors, has_timers=spec.has_timers)
        self._timers = BatchTimers(node, self._current, self._time, self._backend.timers)
        self._function: BatchProcessFunction = copied(node, spec.function)
        self.user_object = self._function
        maker = BatchHandleFactory(node, self._current, lambda _: self._backend)
        bind_counters(self._function, context.metrics)
        open_as_planned(node, self._function, self._handle(maker), spec.descriptors)
        self._function_is_open()
        self._side_outputs: SideOutputs = BatchSideOutputs(node, side_schemas(node, spec.function, spec.schema))
        self._user_context = BatchContext(
            context, self._time, self._side_outputs, self._current, self._timers, self._backend, keys
        )
        self._schema = spec.output_schema(spec.schema, node)

    def _handle(self, maker: BatchHandleFactory) -> BatchStateHandle:
        """Return what the function declares its states with."""
        return BatchStateHandle(self.context.node, maker)

    def process(self, batch: pa.RecordBatch) -> None:
        self._process(batch, self._function.process, self._spec.keys)

    def _process(
        self,
        batch: pa.RecordBatch,
        function: Callable[[pl.DataFrame, BatchContext], pl.DataFrame | None],
        keys: tuple[str, ...],
    ) -> None:
        """Call ``function``; ``keys`` are the columns of the batch's key."""
        self._begin_call()
        self._backend.prepare()
        if keys:
            self._current.move(self._user_context._keys_of([batch.column(key) for key in keys]))
        try:
            result = function(frame_of(batch), self._user_context)
        except Exception as error:
            raise batch_error(self.context.node, batch.num_rows, error) from None
        finally:
            self._current.move(None)
        self._emit(result)

    def on_round(self, round_: int) -> None:
        """See ``Operator``. Calls the function once for all keys that have state."""
        # all keys would be read for nothing
        if type(self._function).on_round is BatchProcessFunction.on_round:
            return
        self._begin_call()
        self._backend.prepare()
        slots = self._backend.all_slots()
        if len(slots) == 0:
            return
        self._current.move(Keys(slots, self._backend.key_columns, self._spec.keys))
        try:
            result = self._function.on_round(round_, self._user_context)
        except Exception as error:
            record = f"{len(slots)} keys at the end of round {round_}"
            raise UserFunctionError(self.context.node, record, user_traceback(error)) from None
        finally:
            self._current.move(None)
        self._emit(result)

    def _fire_some(self, kind: TimeKind, until_ms: int) -> int:
        """See ``TimedOperator``. Calls the function once."""
        assert self._backend.timers is not None
        self._begin_call()
        # slots of what waits for ``end`` must keep their numbers
        if not self._timers.holds_slots:
            self._backend.prepare()
        slots, times_ms = self._backend.timers.of(kind).take(until_ms, TIMERS_PER_CALL)
        if len(slots) == 0:
            return 0
        assert len(slots) == len(times_ms), "each timer is a key and a time"
        self._current.move(Keys(slots, self._backend.key_columns, self._spec.keys))
        self._timers.begin(kind, slots, times_ms)
        try:
            result = self._function.on_timer(FiredTimers(kind, pl.Series(times_ms)), self._user_context)
        except Exception as error:
            record = f"{len(slots)} timers of {kind.value}, the first one for {times_ms[0]}"
            raise UserFunctionError(self.context.node, record, user_traceback(error)) from None
        finally:
            self._current.move(None)
        self._emit(result)
        return len(slots)

    def _end_firing(self) -> None:
        self._timers.end()

    def _emit(self, result: Any) -> None:
        if result is not None:
            self._emit_main(result)
        self._side_outputs.send(self)

    def _emit_main(self, result: Any) -> None:
        node, schema = self.context.node, self._schema
        if not isinstance(result, pl.DataFrame):
            raise UserFunctionError(node, f"a result of type {type(result).__name__}", "return a DataFrame or None")
        try:
            whole = divert_misfits(self, columns_of_frame(result, schema), schema)
        except (pa.ArrowException, pl.exceptions.PolarsError, KeyError, ValueError) as error:
            raise UserFunctionError(
                node,
                f"a batch of {result.height} results",
                f"they must have the columns {schema_text(schema)}: {error}",
            ) from None
        emit_in_parts(self, MAIN, whole)

    def freeze(self) -> FrozenState | None:
        """See ``Operator``. None for a function that declared no state and has no timers."""
        assert not self._timers.holds_slots, "nothing waits when all has fired"
        return super().freeze() if self._spec.descriptors or self._spec.has_timers else None
