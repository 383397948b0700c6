"""Which window a time lies in, against what the calendar of the time zone says of each one."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.operators.base import WATERMARK_MAX_MS, WATERMARK_MIN_MS
from headgate.operators.timestamps import TIME_MAX_MS, EventTime
from headgate.operators.windows.window_assigner import (
    AlignedWindows,
    CalendarWindows,
    FixedWindows,
    lacking_ms,
    tumbling,
)

ZONES = ["UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata", "America/Sao_Paulo", "Pacific/Apia"]
HOUR_MS = 3_600_000
TIMES = [EventTime("t", 1, 1), EventTime("t", 1_000, 1), EventTime("t", 1_000_000, 1)]


def ms(text: str, zone: str = "UTC") -> int:
    return round(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp() * 1_000)


def shown(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1_000, UTC).isoformat(timespec="minutes").removesuffix("+00:00")


fixed = st.builds(
    lambda slide, size, offset: FixedWindows(slide + size, slide, offset % slide),
    st.integers(1, 10_000),
    st.integers(0, 30_000),
    st.integers(0, 10_000),
)
calendars = st.builds(
    CalendarWindows,
    st.sampled_from(["d", "w", "mo"]),
    st.integers(1, 5),
    st.sampled_from(ZONES),
    st.sampled_from([0, HOUR_MS // 2, 6 * HOUR_MS]),
)


@given(fixed | calendars, st.lists(st.integers(0, TIME_MAX_MS), min_size=1, max_size=5), st.sampled_from(TIMES))
def test_a_time_lies_in_the_windows_of_its_pane_and_in_no_other(
    windows: AlignedWindows, times_ms: list[int], time: EventTime
) -> None:
    panes = windows.panes(time, np.array(times_ms[:2], np.int64) * time.units_per_ms)
    for time_ms, pane in zip(times_ms[:2], panes.tolist(), strict=True):
        found = windows.windows_of(pane)
        for window in found:
            assert windows.start_ms(window) <= time_ms < windows.end_ms(window)
            assert pane in windows.panes_of(window)
        assert windows.end_ms(found.start - 1) <= time_ms
        assert windows.start_ms(found.stop) > time_ms
        assert time_ms < windows.pane_end_ms(pane) <= windows.end_ms(found.start)
        assert windows.last_windows(np.array([pane])).tolist() == [found.stop - 1]
        assert windows.end_ms(found.start) - windows.start_ms(found.start) <= windows.span_ms


@given(fixed | calendars, st.integers(0, TIME_MAX_MS))
def test_a_window_has_ended_when_the_watermark_is_one_before_its_end(windows: AlignedWindows, time_ms: int) -> None:
    ended = windows.ended(time_ms)
    assert windows.end_ms(ended) - 1 <= time_ms < windows.end_ms(ended + 1) - 1


@given(fixed | calendars)
def test_every_window_has_ended_at_the_last_watermark_and_none_at_the_first(windows: AlignedWindows) -> None:
    last = windows.panes(TIMES[0], np.array([TIME_MAX_MS]))
    assert windows.ended(WATERMARK_MAX_MS) > windows.last_windows(last)[0]
    first = windows.panes(TIMES[0], np.array([0]))
    assert windows.ended(WATERMARK_MIN_MS) < windows.windows_of(int(first[0])).start


@given(
    st.sampled_from(["1d", "1w", "1mo", "1q", "1y"]),
    st.sampled_from(["UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata"]),
    st.lists(st.integers(0, 4_000_000_000_000), min_size=1),
)
def test_windows_of_the_calendar_start_where_polars_truncates_times_to(
    size: str, zone: str, times_ms: list[int]
) -> None:
    unit, count = {"d": ("d", 1), "w": ("w", 1), "mo": ("mo", 1), "q": ("mo", 3), "y": ("mo", 12)}[size[1:]]
    windows = CalendarWindows(unit, count, zone)
    column = pl.Series(times_ms, dtype=pl.Datetime("ms")).dt.replace_time_zone("UTC").dt.convert_time_zone(zone)
    starts = column.dt.truncate(size).dt.epoch("ms").to_list()
    panes = windows.panes(TIMES[0], np.array(times_ms))
    assert [windows.start_ms(pane) for pane in panes.tolist()] == starts


@pytest.mark.parametrize(
    ("zone", "day", "start", "hours"),
    [
        ("Europe/Berlin", "2024-03-31T12:00", "2024-03-30T23:00", 23),
        ("Europe/Berlin", "2024-10-27T12:00", "2024-10-26T22:00", 25),
        ("Europe/Berlin", "2024-06-01T00:00", "2024-05-31T22:00", 24),
        ("America/Sao_Paulo", "2017-10-15T12:00", "2017-10-15T03:00", 23),  # there was no midnight
        ("America/Havana", "2023-11-05T12:00", "2023-11-05T04:00", 25),  # midnight came twice
        ("America/Sao_Paulo", "2018-02-17T12:00", "2018-02-17T02:00", 25),  # 23:00 came twice
        ("Pacific/Apia", "2011-12-31T12:00", "2011-12-30T10:00", 24),  # after a day that was left out
        ("Pacific/Apia", "2011-12-29T12:00", "2011-12-29T10:00", 24),
        ("Asia/Kolkata", "2024-01-01T00:00", "2023-12-31T18:30", 24),
    ],
)
def test_days_are_as_long_as_clocks_make_them(zone: str, day: str, start: str, hours: int) -> None:
    windows = CalendarWindows("d", 1, zone)
    first_ms = ms(day, zone)
    window = int(windows.panes(TIMES[0], np.array([first_ms]))[0])
    assert shown(windows.start_ms(window)) == start
    length_ms = windows.end_ms(window) - windows.start_ms(window)
    assert length_ms == hours * HOUR_MS
    start_ms = windows.start_ms(window)
    each_hour = np.arange(start_ms - HOUR_MS, start_ms + length_ms + HOUR_MS, HOUR_MS)
    assert (windows.panes(TIMES[0], each_hour) == window).tolist() == [False, *[True] * hours, False]


@st.composite
def windows(draw: st.DrawFn) -> FixedWindows:
    slide = draw(st.integers(1, 12))
    size = draw(st.sampled_from([slide, slide, slide + draw(st.integers(0, 20))]))
    return FixedWindows(size, slide, draw(st.integers(0, slide - 1)))


@given(windows(), windows())
def test_what_windows_lack_is_what_counting_finds(first: FixedWindows, second: FixedWindows) -> None:
    found = 0
    for window in range(-200, 200):
        start, end = first.start_ms(window), first.end_ms(window)
        pane = int(second.panes(EventTime("", 1, 1), np.array([start]))[0])
        found = max(found, *(end - second.end_ms(over) for over in second.windows_of(pane)))
    assert lacking_ms(first, second) == found


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (tumbling(HOUR_MS), CalendarWindows("d", 1, "Europe/Berlin"), 0),
        (tumbling(HOUR_MS), CalendarWindows("mo", 1, "Asia/Kolkata"), HOUR_MS // 2),
        (tumbling(24 * HOUR_MS), CalendarWindows("d", 1, "UTC"), 0),
        (tumbling(24 * HOUR_MS), CalendarWindows("d", 1, "Europe/Berlin"), 2 * HOUR_MS),
        (CalendarWindows("d", 1, "Europe/Berlin"), CalendarWindows("w", 1, "Europe/Berlin"), 0),
        (CalendarWindows("d", 1, "Europe/Berlin"), CalendarWindows("mo", 1, "Europe/Berlin"), 0),
        (CalendarWindows("w", 1, "UTC"), CalendarWindows("mo", 1, "UTC"), 6 * 24 * HOUR_MS),
        (CalendarWindows("d", 1, "Europe/Berlin"), tumbling(24 * HOUR_MS), 23 * HOUR_MS),
    ],
)
def test_windows_of_the_calendar(first: object, second: object, expected: int) -> None:
    assert lacking_ms(first, second) == expected  # type: ignore[arg-type]
