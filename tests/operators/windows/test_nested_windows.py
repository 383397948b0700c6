"""Whether windows miss results of other windows, against all windows of a stretch of time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.operators.timestamps import EventTime
from headgate.operators.windows.nested_windows import lacking_ms
from headgate.operators.windows.window_assigner import CalendarWindows, FixedWindows, tumbling

HOUR_MS = 3_600_000


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
