"""The date of a store that machines share: that of its server, whatever their clocks say.

Counterparts: the catalogues of servers, which ask for it. Source: DB12 of docs/spec/shared-store.md. Asks seldom: in
between it goes on by a clock of this machine that only goes forward.
"""

from __future__ import annotations

from collections.abc import Callable

from headgate.clock import SYSTEM_CLOCK, Clock
from headgate.errors import HeadgateError

ASK_EVERY_MS = 60_000
"""Two quartz clocks differ by a few milliseconds after so long."""


class ServerDate:
    """A ``Clock`` whose date is the server's. Threads may share it: at worst two of them ask."""

    def __init__(self, ask: Callable[[], int], clock: Clock = SYSTEM_CLOCK) -> None:
        """``ask`` returns the server's date in milliseconds since 1970, or raises ``HeadgateError``."""
        self._ask = ask
        self._clock = clock
        self._asked_ms: int | None = None
        self._known: tuple[int, int] | None = None

    def monotonic_ms(self) -> int:
        """See ``Clock``."""
        return self._clock.monotonic_ms()

    def monotonic_ns(self) -> int:
        """See ``Clock``."""
        return self._clock.monotonic_ns()

    def wall_ms(self) -> int:
        """Return the date.

        Raises:
            StorageError: the server has never been reached, and is not now.
        """
        now_ms = self._clock.monotonic_ms()
        if self._asked_ms is None or now_ms - self._asked_ms >= ASK_EVERY_MS:
            self._learn(now_ms)
            now_ms = self._clock.monotonic_ms()
        assert self._known is not None
        date_ms, then_ms = self._known
        return date_ms + now_ms - then_ms

    def _learn(self, began_ms: int) -> None:
        try:
            date_ms = self._ask()
        except HeadgateError:
            if self._known is None:
                raise
        else:
            self._known = date_ms, (began_ms + self._clock.monotonic_ms()) // 2
        self._asked_ms = began_ms
