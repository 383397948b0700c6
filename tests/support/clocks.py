"""A clock that a test sets by hand."""

from __future__ import annotations

from headgate.runtime.surroundings import Process


class HandClock:
    """A ``headgate.environment.Clock``: ``passed_ms`` goes forward only, ``date_ms`` wherever the test likes."""

    def __init__(self, passed_ms: int = 0, date_ms: int = 1_700_000_000_000) -> None:
        self.passed_ms = passed_ms
        self.date_ms = date_ms

    def monotonic_ms(self) -> int:
        return self.passed_ms

    def monotonic_ns(self) -> int:
        return self.passed_ms * 1_000_000

    def wall_ms(self) -> int:
        return self.date_ms

    def advance(self, by_ms: int, *, date_step_ms: int = 0) -> None:
        """Let ``by_ms`` pass; somebody sets the date by ``date_step_ms`` meanwhile."""
        assert by_ms >= 0
        self.passed_ms += by_ms
        self.date_ms += by_ms + date_step_ms


class HandTimed(Process):
    """This process, but for its clocks."""

    def __init__(self, clock: HandClock) -> None:
        super().__init__()
        self._clock = clock

    def monotonic_ms(self) -> int:
        return self._clock.monotonic_ms()

    def monotonic_ns(self) -> int:
        return self._clock.monotonic_ns()

    def wall_ms(self) -> int:
        return self._clock.wall_ms()
