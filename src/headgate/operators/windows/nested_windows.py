"""Windows over the results of windows: whether a result may come when a window that it lies in has ended.

A result has the start of its window as event time, and comes when event time has passed the end.
"""

from __future__ import annotations

import math

import numpy as np

from headgate.operators.timestamps import EventTime
from headgate.operators.windows.window_assigner import AlignedWindows, CalendarWindows, FixedWindows

_MS = EventTime("", 1, 1)
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
        panes = second.panes(_MS, starts)
        reached = np.array([second.end_ms(second.windows_of(int(pane)).start) for pane in panes])
        return max(int((ends - reached).max()), 0)
    assert isinstance(first, FixedWindows)
    bounds = np.array([second.end_ms(window) for window in range(second.ended(low_ms), second.ended(high_ms) + 1)])
    last_starts = (bounds - 1 - first.offset_ms) // first.slide_ms * first.slide_ms + first.offset_ms
    return max(int((last_starts + first.size_ms - bounds).max()), 0)
