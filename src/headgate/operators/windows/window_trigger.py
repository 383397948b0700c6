"""Triggers of the user: a function that says when the window of a key emits its result, and when it is emptied.

``TriggerOperator`` has the trigger's state and timers, which are of a key and a window, and calls it: with each batch
of records of one window of one key, and when a timer fires. It passes the records on, each with what becomes of its
window after it, to an operator that has the window's content. What a timer says travels as a record without content.
Modelled on Flink's ``Trigger``.

The content is kept as that of other windows that end by themselves (``triggered_windows``). A window that has a place
in event time has its bounds in the key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from enum import Enum
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.model.graph import MAIN, MAIN_INPUT, InputName, OutputTag
from headgate.operators.aggregation.aggregates import stable
from headgate.operators.base import WATERMARK_MAX_MS, Operator, OperatorContext, Output, key_columns
from headgate.operators.functions import Row, paused_gc, rows_of
from headgate.operators.keys import check_keys
from headgate.operators.lateness import InTimeOperator, count_late
from headgate.operators.process.declarations import StatefulFunctionSpec, declare_states
from headgate.operators.process.row_process import ProcessOperator, StateHandle, timer_text
from headgate.operators.process.row_state import CurrentKey, NoKey, RowHandleFactory, ValueState
from headgate.operators.process.timers import Timer, Timers, milliseconds
from headgate.operators.schemas import frame_of
from headgate.operators.timestamps import EventTime
from headgate.operators.user_functions import UserFunctionError, copied, divert_unreadable, shortened, user_traceback
from headgate.operators.windows.aligned_windows import kept_columns
from headgate.operators.windows.partial_results import merged
from headgate.operators.windows.triggered_windows import (
    Firing,
    Parts,
    TriggeredWindowOperator,
    TriggeredWindowSpec,
    joined,
    moments,
    parts_of,
    table_at,
    values_of,
)
from headgate.operators.windows.window_assigner import BOUNDS, END_MS, IS_LAST, AlignedWindows, tumbling
from headgate.operators.windows.window_plan import (
    Emission,
    WindowedAggregate,
    WindowShape,
    aggregated_schema,
    decompose,
)
from headgate.state.backend import TimeKind
from headgate.state.key_index import Slots
from headgate.state.ttl import StateTime
from headgate.state.values import Mask
from headgate.state.window_aggregates import AggTable, FrozenTable
from headgate.state.worker_backends import MemoryStates

COMMAND = "__command"
"""The column that says what becomes of a record's window after the record: these bits."""

FIRE, PURGE, IS_NO_RECORD, FIRE_IF_NEW = 1, 2, 4, 8

_CLOSING = "headgate closes"
"""The state that says that the trigger has a timer for when its window is forgotten."""


class TriggerResult(Enum):
    """What becomes of a window.

    Attributes:
        CONTINUE: nothing.
        FIRE: its result is emitted, and its records stay.
        PURGE: its records are forgotten.
        FIRE_AND_PURGE: its result is emitted, then its records are forgotten.
    """

    CONTINUE = 0
    FIRE = FIRE
    PURGE = PURGE
    FIRE_AND_PURGE = FIRE | PURGE


class TriggerContext:
    """The context of a call of a trigger: the key and the window, and their timers.

    Attributes:
        key: the key; a tuple if ``key_by`` named several columns.
        window_start_ms: the start of the window in milliseconds since 1970; None: a global window.
        window_end_ms: its end, excluded; None: a global window.
    """

    def __init__(self, timers: Timers) -> None:
        """For Headgate only."""
        self._timers = timers
        self.key: Any = None
        self.window_start_ms: int | None = None
        self.window_end_ms: int | None = None

    @property
    def timers(self) -> Timers:
        """The timers of this key and window, and the current times."""
        return self._timers


class Trigger:
    """Base class of triggers: ``key_by("user").window(Tumbling("1m"), trigger=EveryTen()).agg(...)``.

    Define ``on_element`` or, for many records in one call, ``on_batch``. Every subtask works on a copy of the
    instance. What must survive a failure belongs in state, which is kept for each key and window, and forgotten with
    the window.

    Attributes:
        fires_at_end: when bounded input ends, windows emit what has come since they fired last.
    """

    fires_at_end: ClassVar[bool] = True

    def open(self, state: StateHandle) -> None:
        """Declare state: ``self.count = state.value("count", pa.int64())``.

        Called once per subtask, and once when the pipeline is built. State has no key and window yet.
        """

    def on_element(self, row: Row, context: TriggerContext) -> TriggerResult:
        """Return what becomes of the window after a record, which is in it already."""
        raise NotImplementedError

    def on_batch(self, rows: pl.DataFrame, context: TriggerContext) -> TriggerResult | Sequence[TriggerResult]:
        """Return what becomes of the window after some records of it.

        By default ``on_element`` is called for each.

        Args:
            rows: records of one key and window, in the order in which they came. How records are divided into
                batches is arbitrary, and must not matter.
            context: of this key and window.

        Returns:
            One result, for after the last record, or as many as there are records.
        """
        return [self.on_element(row, context) for row in rows.to_dicts()]

    def on_event_time(self, time_ms: int, context: TriggerContext) -> TriggerResult:
        """Called when event time has reached a timer that the trigger registered."""
        return TriggerResult.CONTINUE

    def on_processing_time(self, time_ms: int, context: TriggerContext) -> TriggerResult:
        """Called when processing time has reached a timer that the trigger registered."""
        return TriggerResult.CONTINUE

    def on_timer(self, timer: Timer, context: TriggerContext) -> TriggerResult:
        """Call the method of the timer's time; for Headgate only."""
        called = self.on_event_time if timer.is_event_time else self.on_processing_time
        return called(timer.time_ms, context)


class _WindowTimers(Timers):
    """Timers that end with their window: one for the time when it is forgotten is noted in a state."""

    closing: ValueState
    closes_ms: int | None = None
    """When the current window is forgotten; None: never."""

    def _change(self, kind: TimeKind, time: Any, *, is_deletion: bool) -> None:
        if kind is TimeKind.EVENT_TIME and self.closes_ms is not None:
            time_ms = milliseconds(self._node, time)
            if time_ms == self.closes_ms:
                self.closing.put(None if is_deletion else True)
            if time_ms >= self.closes_ms:
                return
        super()._change(kind, time, is_deletion=is_deletion)


@dataclass(frozen=True)
class TriggerSpec(StatefulFunctionSpec[Any]):
    """Call a trigger. Made by ``trigger_spec``.

    Attributes:
        records: the schema of the records, without their windows.
        lateness_ms: for so much longer than its end a window takes records.
        late: the side output of records that come later; None: they are dropped.
        windows_text: what the windows are; "": global.
        holds_back: see ``Emission``.
    """

    records: pa.Schema = field(default_factory=lambda: pa.schema([]))
    lateness_ms: int = 0
    late: OutputTag | None = None
    windows_text: str = ""
    holds_back: bool = False

    def build(self) -> Operator:
        return TriggerOperator(self)

    @property
    def has_timers(self) -> bool:
        """There are those of the windows' ends."""
        return True

    @property
    def has_bounds(self) -> bool:
        """Whether windows end, which global ones do not."""
        return bool(self.windows_text)

    def output_schema(self, schema: pa.Schema, node: str) -> pa.Schema:
        """Return records, bounds and commands (internal: only ``TriggeredWindow`` reads it)."""
        check_keys(node, schema, self.keys)
        bounds = [schema.field(name) for name in BOUNDS if self.has_bounds]
        return pa.schema([*self.records, *bounds, pa.field(COMMAND, pa.int8())])

    def output_schemas(self, inputs: Mapping[InputName, pa.Schema], node: str) -> Mapping[OutputTag, pa.Schema]:
        main = {MAIN: self.output_schema(inputs[MAIN_INPUT], node)}
        return main if self.late is None else {**main, self.late: self.records}


def trigger_spec(
    node: str,
    keys: tuple[str, ...],
    trigger: Trigger,
    schema: pa.Schema,
    records: pa.Schema,
    *,
    lateness_ms: int = 0,
    late: OutputTag | None = None,
    windows_text: str = "",
    holds_back: bool = False,
) -> TriggerSpec:
    """Return the spec of a trigger, learning its states from a copy.

    Args:
        node: the name of the operator.
        keys: the columns of the key, and of the window if it ends.
        trigger: the user's.
        schema: of the input.
        records: see ``TriggerSpec``.
        lateness_ms: see ``TriggerSpec``.
        late: see ``TriggerSpec``.
        windows_text: what the windows are; "": global.
        holds_back: see ``TriggerSpec``.

    Raises:
        UsageError: a wrong declaration of state.
        UserFunctionError: its ``open`` raised.
    """
    check_keys(node, schema, keys)
    columns, states = key_columns(schema, keys), MemoryStates()  # these stay empty
    handles = RowHandleFactory(node, CurrentKey(), lambda d: states.by_row(columns, [d]).cells(d), StateTime())
    learning = StateHandle(node, handles)
    learning.value(_CLOSING, pa.bool_())
    descriptors = declare_states(node, copied(node, trigger), learning)
    return TriggerSpec(
        keys,
        trigger,
        schema,
        descriptors,
        learning.forgotten,
        records=records,
        lateness_ms=lateness_ms,
        late=late,
        windows_text=windows_text,
        holds_back=holds_back,
    )


class TriggerOperator(InTimeOperator, ProcessOperator):
    """Calls the trigger once for each key and window of a batch."""

    _spec: TriggerSpec  # type: ignore[assignment]
    _function: Trigger  # type: ignore[assignment]
    _timers: _WindowTimers

    def __init__(self, spec: TriggerSpec) -> None:
        super().__init__(spec)  # type: ignore[arg-type]

    def open(self, context: OperatorContext, output: Output) -> None:
        """See ``Operator``. Opens a copy of the user's trigger."""
        super().open(context, output)
        self._timers = _WindowTimers(context.node, self._current, self._time, self._backend.timers)
        self._timers.closing = self._closing
        self._trigger_context = TriggerContext(self._timers)
        self._output_schema = self._spec.output_schema(self._spec.schema, context.node)

    def _handle(self, maker: RowHandleFactory) -> StateHandle:
        handle = super()._handle(maker)
        self._closing = handle.value(_CLOSING, pa.bool_())
        return handle

    # -- input ------------------------------------------------------------------------------------------------------

    def process(self, batch: pa.RecordBatch) -> None:
        self._begin_call()
        self._backend.absorb()
        self._fire_what_is_due()
        batch = self._in_time(divert_unreadable(self, batch))
        if batch.num_rows == 0:
            return
        keys = list(self._spec.keys)
        self._backend.expect([batch.column(key) for key in keys])
        frame = frame_of(batch.select(self._spec.records.names))
        groups = frame_of(batch.select(keys)).with_row_index(COMMAND).group_by(keys, maintain_order=True).agg(COMMAND)
        rows_by_key = groups[COMMAND].to_list()
        found = rows_of(batch.select(keys).take(pa.array([rows[0] for rows in rows_by_key])))
        commands = np.zeros(batch.num_rows, np.int8)
        with paused_gc():
            for key, rows in zip(map(self._key_of_row, found), rows_by_key, strict=True):
                commands[rows] = self._call_batch(key, frame[rows])
        columns = [batch.column(name) for name in self._output_schema.names[:-1]]
        self.output.emit(pa.RecordBatch.from_arrays([*columns, pa.array(commands)], schema=self._output_schema))

    def _fire_what_is_due(self) -> None:
        """Fire what the next tick would: no record of this batch came before it."""
        assert self._backend.timers is not None
        now_ms, due_ms = self._backend.time.now_ms, self._backend.timers.processing_time.next_ms()
        if due_ms is None or due_ms > now_ms:
            return
        while self._fire_some(TimeKind.PROCESSING_TIME, now_ms):
            pass
        self._end_firing()

    def _call_batch(self, key: Any, rows: pl.DataFrame) -> npt.NDArray[np.int8]:
        """Return what becomes of the window after each of its records."""
        try:
            self._enter(key)
            if self._timers.closes_ms is not None:
                # the same one each time: it forgets the window
                self._held.register(key, self._timers.closes_ms)
            results = self._function.on_batch(rows, self._trigger_context)
            if isinstance(results, TriggerResult):
                return np.array([0] * (rows.height - 1) + [results.value], np.int8)
            commands = [_checked(result) for result in results]
            if len(commands) != rows.height:
                raise TypeError(f"on_batch returned {len(commands)} results for {rows.height} records")
            return np.array(commands, np.int8)
        except Exception as error:
            record = f"{rows.height} records of key {shortened(self._trigger_context.key)}"
            raise UserFunctionError(self.context.node, record, user_traceback(error)) from None
        finally:
            self._current.key = NoKey()

    def _enter(self, key: Any) -> None:
        """The calls that follow are of this key and window."""
        self._current.key = key
        context = self._trigger_context
        context.key, context.window_start_ms, context.window_end_ms = key, None, None
        if self._spec.has_bounds:
            *of_user, context.window_start_ms, context.window_end_ms = key
            context.key = tuple(of_user) if len(of_user) > 1 else of_user[0]
            self._timers.closes_ms = context.window_end_ms - 1 + self._spec.lateness_ms

    @property
    def _held(self) -> Any:
        assert self._backend.timers is not None
        return self._backend.timers.event_time

    def _in_time(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the records of windows that are not forgotten."""
        if not self._spec.has_bounds:
            return batch
        ends = batch.column(END_MS).to_numpy() + self._spec.lateness_ms
        late = ends - 1 <= self._watermark_ms
        if self._passed.is_any_ahead:
            late = late | self._passed.late(batch, self._spec.keys, ends)
        if not late.any():
            return batch
        # a record of several windows is late once, when the last of them is forgotten
        is_counted = late & batch.column(IS_LAST).to_numpy(zero_copy_only=False)
        if is_counted.any():
            count_late(self.context.metrics, np.maximum(self._watermark_ms + 2 - ends[is_counted], 1))
            if self._spec.late is not None:
                dropped = batch.filter(pa.array(is_counted)).select(self._spec.records.names)
                self.output.emit_to(self._spec.late, dropped)
        return batch.filter(pa.array(~late))

    # -- time -------------------------------------------------------------------------------------------------------

    def on_watermark(self, watermark_ms: int) -> None:
        """See ``TimedOperator``. Windows are forgotten up to a watermark, but not for what only the end ended."""
        watermark_ms = self.context.held_back(watermark_ms)
        self._fire_until(watermark_ms)
        if watermark_ms < WATERMARK_MAX_MS:
            self._watermark_ms = max(self._watermark_ms, watermark_ms)
        self._passed.advance(watermark_ms)
        self.output.emit_watermark(watermark_ms)

    def _call_timer(self, timer: Timer, keys: list[Any], results: list[Any]) -> None:
        """See ``ProcessOperator``. Results are records without content."""
        self._timers.begin(timer)
        nothing = dict.fromkeys(self._output_schema.names)
        try:
            for key in keys:
                self._enter(key)
                command = self._at_timer(timer)
                if command:
                    parts = key if len(self._spec.keys) > 1 else (key,)
                    at = dict(zip(self._spec.keys, parts, strict=True))
                    results.append({**nothing, **at, COMMAND: command | IS_NO_RECORD})
        except Exception as error:
            text = timer_text(timer).format(shortened(self._trigger_context.key))
            raise UserFunctionError(self.context.node, text, user_traceback(error)) from None
        finally:
            self._current.key = NoKey()

    def _at_timer(self, timer: Timer) -> int:
        """Return what becomes of the current window at a timer; forget a window that takes no more records."""
        closes_ms = self._timers.closes_ms
        if closes_ms is None:
            return _checked(self._function.on_timer(timer, self._trigger_context))
        if timer.is_event_time and timer.time_ms == closes_ms:
            command = PURGE
            # before its state is removed, which it may read
            if self._closing.exists:
                command |= _checked(self._function.on_timer(timer, self._trigger_context))
            if self._time.event_time_ms == WATERMARK_MAX_MS and self._function.fires_at_end:
                command |= FIRE_IF_NEW
            for descriptor in self._spec.descriptors:
                self._backend.cells(descriptor).remove(self._current.key)
            return command
        # a timer of processing time that was left over when the window was forgotten
        if self._watermark_ms >= closes_ms:
            return 0
        return _checked(self._function.on_timer(timer, self._trigger_context))

    def on_round(self, round_: int) -> None:
        """Triggers know of no rounds."""


def _checked(result: object) -> int:
    if not isinstance(result, TriggerResult):
        raise TypeError(f"a trigger must return a TriggerResult, but returned {shortened(result)}")
    return result.value


@dataclass(frozen=True)
class CommandedWindowSpec(TriggeredWindowSpec):
    """Keep windows, and do with each what its records say.

    Attributes:
        windows: in which event time is divided, with the bounds at the end of the keys; None: global ones.
        lateness_ms: for so much longer than its end a window takes records.
    """

    windows: AlignedWindows | None = None
    lateness_ms: int = 0

    def build(self) -> Operator:
        return CommandedWindowOperator(self)

    @property
    def output_delay_ms(self) -> int:
        """By how much ``window_start`` may be earlier than the watermark."""
        return 0 if self.windows is None else self.windows.span_ms + self.lateness_ms

    @property
    def result_windows(self) -> AlignedWindows | None:
        """The windows of results, which have their start as event time."""
        return self.windows

    def _kind_text(self) -> str:
        return f"by commands, {'global' if self.windows is None else self.windows.text}"


class CommandedWindowOperator(TriggeredWindowOperator):
    """Has the windows' content."""

    _spec: CommandedWindowSpec

    def process(self, batch: pa.RecordBatch) -> None:
        """See ``Operator``. Adds a batch to the windows, and does with each what its records say.

        What is between two commands to a window is a *part*, what is between two purges of it a *stretch*.
        """
        self._begin_call()
        self._backend.prepare()
        slots = self._backend.slots([batch.column(key) for key in self._shape.keys])
        known, of = np.unique(slots, return_inverse=True)
        order = np.argsort(of, kind="stable")
        of, commands = of[order], batch.column(COMMAND).to_numpy()[order]
        parts = parts_of(of, (commands & (FIRE | PURGE | FIRE_IF_NEW)) != 0)
        stretches = parts_of(of, (commands & PURGE) != 0)
        records = np.flatnonzero((commands & IS_NO_RECORD) == 0)
        taken = batch.take(pa.array(order[records]))
        _, values = self._read(taken)
        ones = np.ones(len(records), np.int64)
        added = merged(self._accumulators, len(parts.slots), parts.of[records], ones, values)
        stored = self._stored(known)
        first_stretch = np.flatnonzero(stretches.rank == 0)
        table, since = AggTable(self._accumulators), stored.since
        table.update(len(stretches.slots), first_stretch[stored.there], stored.rows, stored.values)
        stretch, command = stretches.of[parts.last], commands[parts.last]
        tables: list[FrozenTable] = []
        fired: list[Slots] = []
        # one part of each window at a time: what fires has all parts up to its own
        for rank in range(int(parts.rank.max()) + 1):
            at = np.flatnonzero(parts.rank == rank)
            slots, some = parts.slots[at], table_at(added, at)
            table.update(len(stretches.slots), stretch[at], some.rows, values_of(some))
            since[slots] += some.rows
            is_new = ((command[at] & FIRE_IF_NEW) != 0) & (since[slots] > 0)
            held = table.take(stretch[at])
            fires = (((command[at] & FIRE) != 0) | is_new) & (held.rows > 0)
            tables.append(table_at(held, np.flatnonzero(fires)))
            fired.append(at[fires])
            since[slots[fires | ((command[at] & PURGE) != 0)]] = 0
        emitted, at = joined(tables), np.concatenate(fired)
        in_order = np.argsort(order[parts.last[at]])
        at = at[in_order]
        if self._lists is None:
            self._emit(known[parts.slots[at]], table_at(emitted, in_order), None)
        else:
            kept = _Kept(self._elements(taken), records, stretches, stretches.rank[stretch[at]] == 0)
            self._emit_kept(known, parts.slots[at], stretch[at], parts.last[at], kept)
        self._keep_stretches(known, stretches, commands, table, since, taken, records)

    def _emit_kept(self, known: Slots, slots: Slots, stretch: Slots, last: Slots, kept: _Kept) -> None:
        """Emit windows of which records are kept; ``last``: the row after which each fires."""
        if len(slots) == 0:
            return
        assert self._lists is not None
        begins = np.searchsorted(kept.records, kept.stretches.begins[stretch])
        counts = np.searchsorted(kept.records, last, side="right") - begins
        new = np.repeat(begins - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        groups = [np.repeat(np.arange(len(slots)), counts)]
        elements = [kept.elements.take(pa.array(new))]
        before = np.flatnonzero(kept.is_first)
        if len(before):
            hit, place = np.unique(slots[before], return_inverse=True)
            rows, held = self._lists.explode(known[hit])
            lengths = np.bincount(rows, minlength=len(hit))
            firsts, counts = (np.cumsum(lengths) - lengths)[place], lengths[place]
            old = np.repeat(firsts - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
            groups.insert(0, np.repeat(before, counts))
            elements.insert(0, held.take(pa.array(old)))
        self._emit_records(known[slots], np.concatenate(groups), pa.concat_arrays(elements), None)

    def _keep_stretches(
        self,
        known: Slots,
        stretches: Parts,
        commands: npt.NDArray[np.int8],
        table: AggTable,
        since: npt.NDArray[np.int64],
        taken: pa.RecordBatch,
        records: Slots,
    ) -> None:
        """Store the last stretch of each window, unless it ended with a purge."""
        last = np.append(np.flatnonzero(stretches.rank == 0)[1:], len(stretches.slots)) - 1
        is_purged = (commands[stretches.last[last]] & PURGE) != 0
        held = table.take(last)
        stays = np.flatnonzero(~is_purged & (held.rows > 0))
        self._values.clear(known[is_purged])
        self._put(known[stays], np.zeros(len(stays), np.int64), since[stays], table_at(held, stays))
        if self._lists is not None:
            self._lists.clear(known[is_purged | (stretches.rank[last] > 0)])
            is_kept = np.zeros(len(stretches.slots), np.bool_)
            is_kept[last[stays]] = True
            chosen = is_kept[stretches.of[records]]
            slots = known[stretches.slots[stretches.of[records]][chosen]]
            self._lists.append(slots, self._elements(taken).filter(pa.array(chosen)))

    def _key_columns(self, slots: Slots) -> list[pa.Array]:
        keys = super()._key_columns(slots)
        if self._spec.windows is not None:
            keys[-2:] = [moments(bound.to_numpy()) for bound in keys[-2:]]
        return keys


@dataclass(frozen=True, slots=True)
class _Kept:
    """The records of a batch that is ordered by key.

    Attributes:
        elements: what is kept of each.
        records: their rows, ascending; the other rows are none.
        stretches: see ``CommandedWindowOperator.process``.
        is_first: of the windows that fire, whether no purge has come before in this batch.
    """

    elements: pa.Array
    records: Slots
    stretches: Parts
    is_first: Mask


def commanded_window(
    node: str,
    keys: tuple[str, ...],
    aggregates: tuple[pl.Expr, ...],
    schema: pa.Schema,
    *,
    windows: AlignedWindows | None,
    lateness_ms: int,
    fires_at_end: bool,
) -> CommandedWindowSpec:
    """Return what computes ``aggregates`` over windows with a trigger of the user.

    Args:
        node: the name of the operator.
        keys: of the user's stream.
        aggregates: what is computed.
        schema: of the records, without their windows.
        windows: see ``CommandedWindowSpec``.
        lateness_ms: see ``CommandedWindowSpec``.
        fires_at_end: see ``Firing``.

    Raises:
        UsageError: unknown column, wrong type, or colliding names.
    """
    check_keys(node, schema, keys)
    output = aggregated_schema(node, schema, keys, aggregates, has_bounds=windows is not None)
    own = keys if windows is None else (*keys, *BOUNDS)
    records = schema if windows is None else pa.schema([*schema, *((name, pa.int64()) for name in BOUNDS)])
    types = tuple(records.field(key).type for key in own)
    shape = WindowShape(own, types, EventTime("", 1, 1), tumbling(1), output, Emission())
    aggregate = WindowedAggregate(own, "", tumbling(1), aggregates)
    plan, kept = decompose(aggregate, shape, schema), kept_columns(aggregate, shape, records)
    return CommandedWindowSpec(
        shape,
        Firing(discards=False, fires_at_end=fires_at_end),
        plan,
        is_combined=False,
        aggregates=tuple(map(stable, aggregates)),
        kept=kept,
        time=None,
        windows=windows,
        lateness_ms=lateness_ms,
    )
