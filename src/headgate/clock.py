"""The two clocks: one that only goes forward, for intervals, and one that gives dates, which anybody may set.

Whatever waits, paces, measures or finds somebody idle goes by ``monotonic_ms``. ``wall_ms`` is a date for people to
read, or the event time of a record that was made now: it is never compared and never subtracted, because daylight
saving, a time server or an administrator may set it forward or back (W18). Everybody else is kept from reading the
date by the linter. Neither reading is ever stored as a point in time of the runtime: a monotonic clock begins anew
with each machine. Users' timers of processing time are dates (TM8).
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """What tells the time to a part of the runtime. Tests bring their own."""

    def monotonic_ms(self) -> int:
        """Return the milliseconds since some moment that means nothing; never less than before."""

    def monotonic_ns(self) -> int:
        """Return the same in nanoseconds, to measure with."""

    def wall_ms(self) -> int:
        """Return the date: milliseconds since 1970."""


class SystemClock:
    """The clocks of this machine."""

    def monotonic_ms(self) -> int:
        """See ``Clock``."""
        return time.monotonic_ns() // 1_000_000

    def monotonic_ns(self) -> int:
        """See ``Clock``."""
        return time.monotonic_ns()

    def wall_ms(self) -> int:
        """See ``Clock``."""
        return time.time_ns() // 1_000_000


SYSTEM_CLOCK = SystemClock()
