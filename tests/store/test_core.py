"""The date of a store that machines share."""

from __future__ import annotations

import pytest
from tests.clocks import HandClock

from headgate.errors import StorageError
from headgate.store.core import ASK_EVERY_MS, ServerClock


class Server:
    """Tells a date, as long as it can be reached, and counts."""

    def __init__(self, clock: HandClock) -> None:
        self.clock, self.ahead_ms, self.asked, self.is_there, self.takes_ms = clock, 5_000_000, 0, True, 0

    def date_ms(self) -> int:
        self.asked += 1
        if not self.is_there:
            raise StorageError("read", "postgresql://server/", "it is gone")
        self.clock.advance(self.takes_ms)
        date_ms = self.clock.passed_ms + self.ahead_ms
        self.clock.advance(self.takes_ms)
        return date_ms


def test_the_date_is_the_servers_and_is_seldom_asked_for() -> None:
    clock = HandClock(passed_ms=1_000)
    server = Server(clock)
    date = ServerClock(server.date_ms, clock)
    server.takes_ms = 40
    for step_ms in (0, 10, ASK_EVERY_MS - 11 - 80):
        clock.advance(step_ms, date_step_ms=-77_000)  # somebody sets this machine's date
        assert date.wall_ms() == clock.passed_ms + server.ahead_ms
        assert date.monotonic_ms() == clock.passed_ms
    assert server.asked == 1
    server.ahead_ms += 300
    clock.advance(ASK_EVERY_MS)
    assert date.wall_ms() == clock.passed_ms + server.ahead_ms
    assert server.asked == 2


def test_a_date_that_cannot_be_asked_for_goes_on() -> None:
    clock = HandClock()
    server = Server(clock)
    date = ServerClock(server.date_ms, clock)
    server.is_there = False
    for _ in range(2):
        with pytest.raises(StorageError, match="it is gone"):
            date.wall_ms()
    server.is_there = True
    began_ms = date.wall_ms()
    server.is_there = False
    clock.advance(3 * ASK_EVERY_MS)
    asked = server.asked
    assert [date.wall_ms() - began_ms for _ in range(3)] == [3 * ASK_EVERY_MS] * 3
    assert server.asked == asked + 1, "a server that is gone is not asked each time"
