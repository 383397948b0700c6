"""Timers as batch process functions see them: thousands of keys at once (TM1, TM10).

Counterpart: ``operators.process.by_batch``, which has them fire; ``state.timers``, which holds them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TypeAlias

import numpy as np
import polars as pl

from headgate.errors import UsageError
from headgate.operators.process.batch_states import BatchCursor, Keys
from headgate.operators.process.timers import OperatorTime, Times, checked, milliseconds, no_date, not_a_time
from headgate.state.key_hash import Words
from headgate.state.key_index import Slots
from headgate.state.timers import DATES_MS, ColumnTimers, TimeKind, TimersByKind

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
        self, node: str, cursor: BatchCursor, time: OperatorTime, held: TimersByKind[ColumnTimers] | None
    ) -> None:
        """For Headgate only: ``context.timers``."""
        super().__init__(time)
        self._node = node
        self._cursor = cursor
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
        """Whether anything waits for ``end``: its slots must not be numbered anew. For Headgate only."""
        return bool(self._waiting)

    def begin(self, kind: TimeKind, slots: Slots, times_ms: Words) -> None:
        """These timers fire; for Headgate only."""
        self._firing = kind, slots, times_ms

    def end(self) -> None:  # TM4
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
        slots = self._cursor.of(keys).slots
        column = self._milliseconds(times, len(slots))
        chosen = column.is_not_null() if where is None else column.is_not_null() & self._checked(where, len(slots))
        if not chosen.all():
            slots, column = slots[chosen.fill_null(False).to_numpy()], column.filter(chosen)
        times_ms = column.to_numpy().copy()
        if self._firing is not None and kind is self._firing[0]:
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
