"""Aligned windows: which window a time lies in, and when each one starts and ends.

Windows have numbers, in the order of their ends. State is kept by *pane*: a stretch of time that lies in the same
windows everywhere. A pane of tumbling windows is a window. Sliding windows overlap, and share their panes, so that a
record is kept once however many windows it lies in.

``AssignWindowsOperator`` gives records their windows as columns, for triggers of the user. ``lacking_ms`` is about
windows over the results of windows: such a result has the start of its window as event time, and comes when event time
has passed the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Protocol, TypeAlias
from zoneinfo import ZoneInfo

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.operators.base import Operator
from headgate.operators.timestamps import EventTime
from headgate.state.vectors import ranges

Numbers: TypeAlias = npt.NDArray[np.int64]

_NUMBER_MIN, _NUMBER_MAX = -(1 << 62), 1 << 62
"""Before and after every window."""


class AlignedWindows(Protocol):
    """Windows that are the same for every key."""

    @property
    def text(self) -> str:
        """What these windows are: a part of the identity of a state."""

    @property
    def span_ms(self) -> int:
        """The length of the longest window."""

    @property
    def is_sliding(self) -> bool:
        """Whether windows share panes. If not, a pane has the number of its window."""

    def panes(self, time: EventTime, values: Numbers) -> Numbers:
        """Return the number of the pane that each time lies in; ``values`` are in the unit of the column."""

    def pane_end_ms(self, pane: int) -> int:
        """Return the end, excluded, of a pane."""

    def windows_of(self, pane: int) -> range:
        """Return the windows that a pane lies in."""

    def last_windows(self, panes: Numbers) -> Numbers:
        """Return the last window that each of ``panes`` lies in."""

    def panes_of(self, window: int) -> range:
        """Return the panes of a window."""

    def start_ms(self, window: int) -> int:
        """Return the start of a window."""

    def end_ms(self, window: int) -> int:
        """Return the end, excluded, of a window."""

    def ended(self, watermark_ms: int) -> int:
        """Return the last window of which the end has passed: its end - 1 is not after ``watermark_ms``."""


def rows_in_windows(windows: AlignedWindows, panes: Numbers) -> tuple[Numbers, Numbers]:
    """Return, for rows in these panes, each row and each window that it lies in."""
    if not windows.is_sliding:
        return np.arange(len(panes)), panes
    distinct, inverse = distinct_numbers(panes)
    of_pane = [windows.windows_of(int(pane)) for pane in distinct]
    starts = np.array([found.start for found in of_pane], np.int64)
    counts = np.array([len(found) for found in of_pane], np.int64)
    return ranges(starts[inverse], counts[inverse])


def starts_ms(windows: AlignedWindows, numbers: Numbers) -> Numbers:
    """Return the start of each window."""
    return _of_each(windows.start_ms, numbers)


def ends_ms(windows: AlignedWindows, numbers: Numbers) -> Numbers:
    """Return the end, excluded, of each window."""
    return _of_each(windows.end_ms, numbers)


def _of_each(function: Callable[[int], int], numbers: Numbers) -> Numbers:
    distinct, inverse = distinct_numbers(numbers)
    found: Numbers = np.array([function(int(number)) for number in distinct], np.int64)[inverse]
    return found


_NEAR = 1 << 16
"""Numbers that lie so near each other are counted instead of sorted."""


def distinct_numbers(numbers: Numbers) -> tuple[Numbers, Numbers]:
    """Return the distinct numbers, ascending, and the place of each number among them."""
    low, high = (int(numbers.min()), int(numbers.max())) if len(numbers) else (0, 0)
    if high - low >= _NEAR:
        distinct, inverse = np.unique(numbers, return_inverse=True)
        return distinct, inverse
    offsets = numbers - low
    is_there = np.bincount(offsets, minlength=1) > 0
    return np.flatnonzero(is_there) + low, (np.cumsum(is_there) - 1)[offsets]


@dataclass(frozen=True)
class FixedWindows:
    """Windows of ``size_ms``, one each ``slide_ms`` (at most the size).

    Window 0 starts at 1970-01-01 00:00 UTC + ``offset_ms``.
    """

    size_ms: int
    slide_ms: int
    offset_ms: int = 0

    def __post_init__(self) -> None:
        assert 0 < self.slide_ms <= self.size_ms, f"windows of {self.size_ms} ms each {self.slide_ms} ms"
        assert 0 <= self.offset_ms < self.slide_ms, f"windows each {self.slide_ms} ms at an offset of {self.offset_ms}"

    @property
    def pane_ms(self) -> int:
        """The length of a pane."""
        return math.gcd(self.size_ms, self.slide_ms)

    @property
    def text(self) -> str:
        offset = f" offset {self.offset_ms} ms" if self.offset_ms else ""
        if self.is_sliding:
            return f"sliding {self.size_ms} ms by {self.slide_ms} ms{offset}"
        return f"tumbling {self.size_ms} ms{offset}"

    @property
    def span_ms(self) -> int:
        return self.size_ms

    @property
    def is_sliding(self) -> bool:
        return self.slide_ms < self.size_ms

    def panes(self, time: EventTime, values: Numbers) -> Numbers:
        if time.ms_per_unit != 1:
            return (values * time.ms_per_unit - self.offset_ms) // self.pane_ms
        if self.offset_ms:
            values = values - self.offset_ms * time.units_per_ms
        return values // (self.pane_ms * time.units_per_ms)

    def pane_end_ms(self, pane: int) -> int:
        return self.offset_ms + (pane + 1) * self.pane_ms

    def windows_of(self, pane: int) -> range:
        last = pane // (self.slide_ms // self.pane_ms)
        first = (pane - self.size_ms // self.pane_ms) // (self.slide_ms // self.pane_ms) + 1
        return range(first, last + 1)

    def last_windows(self, panes: Numbers) -> Numbers:
        return panes // (self.slide_ms // self.pane_ms) if self.is_sliding else panes

    def panes_of(self, window: int) -> range:
        first = window * (self.slide_ms // self.pane_ms)
        return range(first, first + self.size_ms // self.pane_ms)

    def start_ms(self, window: int) -> int:
        return self.offset_ms + window * self.slide_ms

    def end_ms(self, window: int) -> int:
        return self.start_ms(window) + self.size_ms

    def ended(self, watermark_ms: int) -> int:
        return max((watermark_ms + 1 - self.offset_ms - self.size_ms) // self.slide_ms, _NUMBER_MIN)


def tumbling(size_ms: int, offset_ms: int = 0) -> FixedWindows:
    """Return consecutive windows of ``size_ms``."""
    return FixedWindows(size_ms, size_ms, offset_ms)


_DAYS = {"d": 1, "w": 7, "mo": 31}
CALENDAR_UNITS = tuple(_DAYS)
"""Days, weeks from Monday on, and months."""

_EPOCH = datetime(1970, 1, 1)
_MONDAY = datetime(1969, 12, 29)
_UTC_EPOCH = _EPOCH.replace(tzinfo=UTC)
_MS = timedelta(milliseconds=1)
_TIME_MIN_MS, _TIME_MAX_MS = -60_000_000_000_000, 250_000_000_000_000
"""Between them, from the year 68 to 9892, dates can be computed."""

_CLOCK_BACK_MS = 8 * 3_600_000
"""No zone has moved its clocks back by as much since 1970 (Vostok by 7 hours, in 1994)."""


@dataclass(frozen=True)
class CalendarWindows:
    """Consecutive windows of ``count`` days, weeks or months by the clocks of a time zone.

    Window 0 is the one with the first day of 1970 in it. Each starts ``offset_ms`` after the midnight of its first day,
    by those clocks. A time that clocks skip is the moment of the skip; of one that they show twice, the first counts.
    """

    unit: str
    count: int
    zone: str
    offset_ms: int = 0

    def __post_init__(self) -> None:
        assert self.unit in CALENDAR_UNITS, f"windows of {self.unit}"
        assert self.count > 0, f"windows of {self.count} {self.unit}"

    @property
    def text(self) -> str:
        offset = f" offset {self.offset_ms} ms" if self.offset_ms else ""
        return f"tumbling {self.count} {self.unit} in {self.zone}{offset}"

    @property
    def span_ms(self) -> int:
        return _DAYS[self.unit] * self.count * 86_400_000 + _CLOCK_BACK_MS

    @property
    def is_sliding(self) -> bool:
        return False

    def panes(self, time: EventTime, values: Numbers) -> Numbers:
        if time.ms_per_unit != 1:
            values = values * time.ms_per_unit
        low = self._window_at(int(values.min()) // time.units_per_ms)
        high = self._window_at(int(values.max()) // time.units_per_ms)
        starts = np.array([self.start_ms(window) for window in range(low + 1, high + 1)], np.int64)
        return low + np.searchsorted(starts * time.units_per_ms, values, side="right")

    def pane_end_ms(self, pane: int) -> int:
        return self.end_ms(pane)

    def windows_of(self, pane: int) -> range:
        return range(pane, pane + 1)

    def last_windows(self, panes: Numbers) -> Numbers:
        return panes

    def panes_of(self, window: int) -> range:
        return range(window, window + 1)

    def start_ms(self, window: int) -> int:
        return _start_ms(self.unit, self.count, self.zone, self.offset_ms, window)

    def end_ms(self, window: int) -> int:
        return self.start_ms(window + 1)

    def ended(self, watermark_ms: int) -> int:
        if watermark_ms >= _TIME_MAX_MS:
            return _NUMBER_MAX
        return _NUMBER_MIN if watermark_ms < _TIME_MIN_MS else self._window_at(watermark_ms + 1) - 1

    def _window_at(self, time_ms: int) -> int:
        """Return the window that a time lies in."""
        local = (_UTC_EPOCH + time_ms * _MS).astimezone(ZoneInfo(self.zone)).replace(tzinfo=None)
        day = local - self.offset_ms * _MS
        if self.unit == "mo":
            window = ((day.year - 1970) * 12 + day.month - 1) // self.count
        else:
            window = (day - (_EPOCH if self.unit == "d" else _MONDAY)).days // (_DAYS[self.unit] * self.count)
        while self.start_ms(window) > time_ms:  # clocks were moved
            window -= 1
        while self.end_ms(window) <= time_ms:
            window += 1
        return window


@lru_cache(maxsize=1 << 16)
def _start_ms(unit: str, count: int, zone: str, offset_ms: int, window: int) -> int:
    if unit == "mo":
        years, months = divmod(window * count, 12)
        first = datetime(1970 + years, 1 + months, 1)
    else:
        first = (_EPOCH if unit == "d" else _MONDAY) + timedelta(days=window * count * _DAYS[unit])
    # fold=0: the offset from before clocks are moved
    return ((first + offset_ms * _MS).replace(tzinfo=ZoneInfo(zone)) - _UTC_EPOCH) // _MS


START_MS, END_MS, IS_LAST = "__window_start_ms", "__window_end_ms", "__is_last"
"""Of a window; and whether it is the last one that its record lies in, with which the record is late."""

BOUNDS = (START_MS, END_MS)
_FIELDS = (pa.field(START_MS, pa.int64()), pa.field(END_MS, pa.int64()), pa.field(IS_LAST, pa.bool_()))


@dataclass(frozen=True)
class AssignWindowsSpec:
    """Add the columns ``START_MS``, ``END_MS`` (excluded) and ``IS_LAST``."""

    windows: AlignedWindows
    time: EventTime

    def build(self) -> Operator:
        return AssignWindowsOperator(self)

    def output_schema(self, schema: pa.Schema, node: str) -> pa.Schema:
        """Return the schema with the columns of the window (internal: only ``TriggerSpec`` reads them)."""
        return pa.schema([*schema, *_FIELDS])


class AssignWindowsOperator(Operator):
    """Holds nothing."""

    def __init__(self, spec: AssignWindowsSpec) -> None:
        self._windows, self._time = spec.windows, spec.time

    def process(self, batch: pa.RecordBatch) -> None:
        panes = self._windows.panes(self._time, self._time.values(batch))
        rows, windows = rows_in_windows(self._windows, panes)
        records = batch if len(rows) == batch.num_rows else batch.take(pa.array(rows))
        bounds = starts_ms(self._windows, windows), ends_ms(self._windows, windows)
        columns = [*map(pa.array, bounds), pa.array(windows == self._windows.last_windows(panes)[rows])]
        schema = pa.schema([*batch.schema, *_FIELDS])
        self.output.emit(pa.RecordBatch.from_arrays([*records.columns, *columns], schema=schema))


_IN_MS = EventTime("", 1, 1)
_SAMPLED_MS = (946_684_800_000, 2_208_988_800_000)
"""From 2000 to 2040: how windows of the calendar lie to others is looked up for these years."""


def lacking_ms(first: AlignedWindows, second: AlignedWindows) -> int:
    """Return by how much a window of ``second`` may end before the result of one of ``first`` comes that lies in it.

    It is 0 if all windows of ``second`` that the start of a window of ``first`` lies in end no sooner than that window.
    """
    if isinstance(first, FixedWindows) and isinstance(second, FixedWindows):
        step_ms = math.gcd(first.slide_ms, second.slide_ms)
        to_end_ms = (second.offset_ms + second.size_ms - first.offset_ms - 1) % step_ms + 1
        return max(first.size_ms - to_end_ms, 0)
    low_ms, high_ms = _SAMPLED_MS
    if isinstance(first, CalendarWindows):
        windows = range(first.ended(low_ms), first.ended(high_ms) + 1)
        starts = np.array([first.start_ms(window) for window in windows])
        ends = np.array([first.end_ms(window) for window in windows])
        panes = second.panes(_IN_MS, starts)
        reached = np.array([second.end_ms(second.windows_of(int(pane)).start) for pane in panes])
        return max(int((ends - reached).max()), 0)
    assert isinstance(first, FixedWindows)
    bounds = np.array([second.end_ms(window) for window in range(second.ended(low_ms), second.ended(high_ms) + 1)])
    last_starts = (bounds - 1 - first.offset_ms) // first.slide_ms * first.slide_ms + first.offset_ms
    return max(int((last_starts + first.size_ms - bounds).max()), 0)
