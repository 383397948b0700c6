"""Timers of functions by row, times, and the operator that fires timers (docs/spec/timers.md).

``state.backend`` holds the timers. Modelled on Flink's ``TimerService`` and on the timers of PySpark's
``StatefulProcessor``. Reads the date once, when the operator is opened.
"""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import polars as pl

from headgate.codec.exact_values import picoseconds
from headgate.codec.snapshot_rows import stored_rows
from headgate.errors import UsageError
from headgate.operators.base import (
    WATERMARK_MAX_MS,
    WATERMARK_MIN_MS,
    KeyedOperator,
    OperatorContext,
    Output,
    RestoredState,
)
from headgate.operators.process.declarations import SideOutputs
from headgate.operators.process.row_state import CurrentKey, NoKey
from headgate.state.backend import (
    DATES_MS,
    TIMERS,
    ColumnBackend,
    RowBackend,
    RowTimers,
    TimeKind,
    TimersByKind,
    TimersMeta,
)
from headgate.state.snapshot import FrozenState
from headgate.state.ttl import TtlMeta

_EPOCH = datetime(1970, 1, 1)
_EPOCH_UTC = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)


class OperatorTime:
    """Event time and processing time as one operator in one subtask sees them.

    Processing time is the date at the start, carried on by a clock that only goes forward.

    Attributes:
        event_time_ms: the latest watermark of this generation; None before the first.
        has_ended: all input has ended.
    """

    def __init__(self, clock_ms: Callable[[], int], wall_ms: Callable[[], int]) -> None:
        self._clock_ms = clock_ms
        self._offset_ms = wall_ms() - clock_ms()  # looked at once
        self.event_time_ms: int | None = None
        self.has_ended = False

    @property
    def processing_time_ms(self) -> int:
        """Return the milliseconds since 1970."""
        return self.at_tick(self._clock_ms())

    def at_tick(self, clock_ms: int) -> int:
        """Return the processing time at a reading of the operator's clock."""
        return clock_ms + self._offset_ms

    def tick_of(self, time_ms: int) -> int:
        """Return what the operator's clock says at a processing time."""
        return time_ms - self._offset_ms

    def go_on_from(self, time_ms: int) -> None:
        """Have processing time be ``time_ms`` at least: it was, before a restore."""
        self._offset_ms += max(time_ms - self.processing_time_ms, 0)


class CallContext:
    """The context of a call of a process function; the base of those by row, by batch, by key and for a broadcast side.

    Attributes:
        subtask_index: the number of this subtask, among ``parallelism`` subtasks of the operator.
    """

    def __init__(self, operator: OperatorContext, time: OperatorTime, side_outputs: SideOutputs) -> None:
        """For Headgate only."""
        self._node = operator.node
        self._time = time
        self._side_outputs = side_outputs
        self.subtask_index = operator.subtask_index
        self.parallelism = operator.parallelism

    def emit_to(self, name: str, records: dict[str, Any] | pl.DataFrame) -> None:
        """Send ``records`` to the side output ``name``, which ``side_outputs`` of the class declares.

        ``records`` is one record (a dict), or a DataFrame for a function by batch. One that does not fit the schema of
        the side output is a bad record.

        Raises:
            UsageError: there is no such side output, or these are no records.
        """
        self._side_outputs.add(name, records)


class Times:
    """The current times, in milliseconds since 1970."""

    def __init__(self, time: OperatorTime) -> None:
        """For Headgate only: ``context.timers``."""
        self._time = time

    @property
    def event_time_ms(self) -> int | None:
        """The latest watermark, or None if there was none since the pipeline started or restarted."""
        return self._time.event_time_ms

    @property
    def processing_time_ms(self) -> int:
        """Processing time: the current date and time, but it never goes back."""
        return self._time.processing_time_ms

    @property
    def is_end(self) -> bool:
        """Whether all input has ended. Timers then fire for the last time, so do not register the next one."""
        return self._time.event_time_ms == WATERMARK_MAX_MS


@dataclass(frozen=True, slots=True)
class Timer:
    """A timer that fires. ``time_ms`` is the time for which it was registered, in milliseconds since 1970."""

    kind: TimeKind
    time_ms: int

    @property
    def is_event_time(self) -> bool:
        """Whether this is an event-time timer; otherwise it is a processing-time timer."""
        return self.kind is TimeKind.EVENT_TIME

    @property
    def time(self) -> datetime:
        """The time for which it was registered, in UTC and without a zone, like times in records.

        Raises:
            UsageError: the time is not a date of the years 1 to 9999.
        """
        if self.time_ms not in DATES_MS:
            raise no_date(self.time_ms, "time_ms")
        return _EPOCH + self.time_ms * _MS


class Timers(Times):
    """The timers of the current key. A key has at most one timer of each kind for one time.

    A time is milliseconds since 1970, or a ``datetime`` (in UTC if it has no zone), which is rounded up to a
    millisecond.
    """

    def __init__(self, node: str, cursor: CurrentKey, time: OperatorTime, held: TimersByKind[RowTimers] | None) -> None:
        """For Headgate only: ``context.timers``."""
        super().__init__(time)
        self._node = node
        self._current = cursor
        self._held = held
        self._firing: Timer | None = None
        self._waiting: list[tuple[Callable[[Any, int], None], Any, int]] = []

    def register_event_time(self, time: int | datetime) -> None:
        """Register a timer: ``on_timer`` is called when the watermark has reached ``time``.

        If the watermark has already reached it, the timer fires with the next watermark. Registering an existing timer
        again has no effect.
        """
        self._change(TimeKind.EVENT_TIME, time, is_deletion=False)

    def register_processing_time(self, time: int | datetime) -> None:
        """Register a timer: ``on_timer`` is called when processing time has reached ``time``.

        For example, pass ``processing_time_ms + 60_000``.
        """
        self._change(TimeKind.PROCESSING_TIME, time, is_deletion=False)

    def delete_event_time(self, time: int | datetime) -> None:
        """Remove the timer for ``time``. A timer that does not exist is ignored."""
        self._change(TimeKind.EVENT_TIME, time, is_deletion=True)

    def delete_processing_time(self, time: int | datetime) -> None:
        """Remove the timer for ``time``. A timer that does not exist is ignored."""
        self._change(TimeKind.PROCESSING_TIME, time, is_deletion=True)

    def begin(self, timer: Timer) -> None:
        """``timer`` fires; for Headgate only."""
        self._firing = timer

    def end(self) -> None:
        """Nothing more fires for now: what was registered for times that had passed is due next."""
        self._firing = None
        waiting, self._waiting = self._waiting, []
        for change, key, time_ms in waiting:
            change(key, time_ms)

    def _change(self, kind: TimeKind, time: int | datetime, *, is_deletion: bool) -> None:
        held = checked(self._node, self._held).of(kind)
        key, time_ms = self._current.key, milliseconds(self._node, time)
        if isinstance(key, NoKey):
            hash(key)  # says what is wrong
        change = held.delete if is_deletion else held.register
        # not later than what fires now: due with the next watermark or tick, not in this one
        if self._firing is not None and kind is self._firing.kind and time_ms <= self._firing.time_ms:
            self._waiting.append((change, key, time_ms))
        else:
            change(key, time_ms)


def checked(node: str, held: TimersByKind[Any] | None) -> TimersByKind[Any]:
    """Return the timers of an operator.

    Raises:
        UsageError: its function has no ``on_timer``.
    """
    if held is None:
        raise UsageError(
            f"operator '{node}': its function has no on_timer, so its timers would have no effect; add one"
        )
    return held


def milliseconds(node: str, time: Any) -> int:
    """Return a time that a user gave; between two milliseconds the later one, so that nothing fires early.

    Raises:
        UsageError: it is no time.
    """
    if type(time) is int and WATERMARK_MIN_MS <= time <= WATERMARK_MAX_MS:
        return time
    if isinstance(time, datetime) and time == time:  # pandas has one that is none
        since = time - (_EPOCH if time.tzinfo is None else _EPOCH_UTC)
        return -(-since // _MS)
    try:
        found = _whole_milliseconds(time) if isinstance(time, np.datetime64) else operator.index(time)
    except (TypeError, ValueError):
        raise not_a_time(node, f"{type(time).__name__} {time!r}") from None
    if isinstance(time, bool | np.timedelta64) or not WATERMARK_MIN_MS <= found <= WATERMARK_MAX_MS:
        raise not_a_time(node, f"{type(time).__name__} {time!r}")
    return found


def _whole_milliseconds(time: np.datetime64) -> int:
    since = picoseconds(time)
    if since is None:
        raise ValueError
    return -(-since // 10**9)


def no_date(time_ms: int, instead: str) -> UsageError:
    """Return the error about a time that is asked for as a date and is none."""
    return UsageError(f"a timer for {time_ms} ms is beyond the years 1 to 9999, so it is no date; use {instead}")


def not_a_time(node: str, given: str) -> UsageError:
    """Return the error about what is no time."""
    return UsageError(
        f"operator '{node}': a timer's time is a datetime or whole milliseconds since 1970, but was given {given}"
    )


FIRES_AT_END_MAX = 1_000_000
"""Timers that may fire at the end of the input for each that there was: more register each other for ever."""


class TimedOperator(KeyedOperator):
    """Fires timers of event time before a watermark goes on, and those of processing time at ticks."""

    _backend: RowBackend | ColumnBackend
    _watermark_ms = WATERMARK_MIN_MS
    """The last watermark before the end, for operators that drop late records."""

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        self._time = OperatorTime(context.clock_ms, context.wall_ms)

    @abstractmethod
    def _fire_some(self, kind: TimeKind, until_ms: int) -> int:
        """Fire some of the timers that are due, the first ones; return how many: none only if none is due."""

    @abstractmethod
    def _end_firing(self) -> None:
        """All that fires now has fired."""

    def _begin_call(self) -> None:
        """A call of the user's function begins: one processing time holds for all state that it sees."""
        self._backend.time.now_ms = self._time.processing_time_ms

    def restore(self, states: Sequence[RestoredState]) -> None:
        """See ``Operator``. Processing time goes on from the latest of the former subtasks."""
        self._begin_call()
        node, found = self.context.node, []
        for _, sections in self._restore_backend(states):
            of_ttl = TtlMeta.found_in(sections, f"state of '{node}'")
            if of_ttl is not None:
                self._time.go_on_from(of_ttl.processing_time_ms)
            meta = TimersMeta.found_in(sections, f"state of '{node}'")
            if meta is None:
                continue
            rows = stored_rows({name: data for name, data in sections.items() if name.startswith(f"{TIMERS}.")}, node)
            if self._backend.timers is None and any(rows.values()):
                raise UsageError(
                    f"operator '{node}': the checkpoint holds timers of it, but its function has no on_timer that they "
                    "could call; give it one, or begin again without this checkpoint"
                )
            found.append(meta)
        if found:
            self._time.go_on_from(max(meta.processing_time_ms for meta in found))
            # if some had not, timers of theirs are still to fire
            self._time.has_ended = all(meta.has_ended for meta in found)
            # the lowest, so that nothing is late that was not
            self._watermark_ms = min(meta.watermark_ms for meta in found)
        # once more: processing time may have become that of the checkpoint
        self._begin_call()
        self._backend.end_restore()

    def on_watermark(self, watermark_ms: int) -> None:
        """Fire the timers that event time has reached, then pass the watermark on."""
        self._fire_until(watermark_ms)
        self.output.emit_watermark(watermark_ms)

    def _fire_until(self, watermark_ms: int) -> None:
        self._time.event_time_ms = watermark_ms
        if self._backend.timers is not None and not self._time.has_ended:
            self._fire_event_time(watermark_ms, len(self._backend.timers.event_time))

    def _fire_event_time(self, watermark_ms: int, timers_count: int) -> None:
        fired = 0
        while count := self._fire_some(TimeKind.EVENT_TIME, watermark_ms):
            fired += count
            if watermark_ms == WATERMARK_MAX_MS and fired > FIRES_AT_END_MAX * (timers_count + 1):
                raise UsageError(
                    f"operator '{self.context.node}': all input has ended, but on_timer registers a timer whenever one "
                    "fires, so it would never be over; register none when context.timers.is_end"
                )
        self._end_firing()

    def next_tick_ms(self) -> int | None:
        timers = self._backend.timers
        # after the last barrier before a stop no timer fires (GM3)
        if timers is None or self._time.has_ended or self.context.is_stopping:
            return None
        due_ms = timers.processing_time.next_ms()
        return None if due_ms is None else self._time.tick_of(due_ms)

    def on_tick(self, now_ms: int) -> None:
        """Fire some timers of processing time; if more are due, the next tick is at once."""
        self._fire_some(TimeKind.PROCESSING_TIME, self._time.at_tick(now_ms))
        self._end_firing()

    def finish(self) -> None:
        """No timer fires any more, unless more input comes."""
        self._time.has_ended = True

    def on_resumed(self) -> None:
        self._time.has_ended = False

    def freeze(self) -> FrozenState | None:
        self._begin_call()
        if self._backend.timers is not None:
            self._backend.timers.meta = self._timers_meta()
        return super().freeze()

    def _timers_meta(self) -> TimersMeta:
        return TimersMeta(self._time.processing_time_ms, self._time.has_ended, self._watermark_ms)
