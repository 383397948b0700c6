"""Timers as functions by row see them, and what both forms know of time (TM1 to TM10 of docs/spec/timers.md).

Counterparts: ``operators.process.timed``, which has them fire; ``state.timers``, which holds them. Modelled on Flink's
``TimerService`` and on the timers of PySpark's ``StatefulProcessor``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

from headgate.codec.exact_values import picoseconds
from headgate.errors import UsageError
from headgate.operators.base import WATERMARK_MAX_MS, WATERMARK_MIN_MS
from headgate.operators.process.cursor import Cursor, NoKey
from headgate.state.timers import DATES_MS, RowTimers, TimeKind, TimersByKind

_EPOCH = datetime(1970, 1, 1)
_EPOCH_UTC = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)


class OperatorTime:
    """Event time and processing time as one operator in one subtask sees them.

    Processing time is the date at the start, carried on by a clock that only goes forward (TM8).

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

    def __init__(self, node: str, cursor: Cursor, time: OperatorTime, held: TimersByKind[RowTimers] | None) -> None:
        """For Headgate only: ``context.timers``."""
        super().__init__(time)
        self._node = node
        self._cursor = cursor
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

    def end(self) -> None:  # TM4
        """Nothing more fires for now: what was registered for times that had passed is due next."""
        self._firing = None
        waiting, self._waiting = self._waiting, []
        for change, key, time_ms in waiting:
            change(key, time_ms)

    def _change(self, kind: TimeKind, time: int | datetime, *, is_deletion: bool) -> None:
        held = checked(self._node, self._held).of(kind)
        key, time_ms = self._cursor.key, milliseconds(self._node, time)
        if isinstance(key, NoKey):
            hash(key)  # says what is wrong
        change = held.delete if is_deletion else held.register
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
