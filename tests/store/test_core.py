"""The date of a store that machines share, and how its changes are heard of."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from tests.support.clocks import HandClock

from headgate.environment import SYSTEM_THREADS
from headgate.errors import StorageError
from headgate.storage.memory import MemoryStorage
from headgate.store.core import ASK_EVERY_MS, PAUSES_S, POLL_MS, ChangeListener, Prefetcher, ServerClock


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


class Still(HandClock):
    """Surroundings in which nothing happens beside the test: what waits goes on at once."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[Callable[[], None]] = []
        self.pauses_s: list[float] = []
        self.on_pause: Callable[[], None] = lambda: None
        self.has_no_threads = False

    def lock(self) -> threading.Lock:
        return threading.Lock()

    def event(self) -> Still:
        return self

    def clear(self) -> None:
        self.is_closing = False

    def set(self) -> None:
        pass

    def is_set(self) -> bool:
        return self.is_closing

    def wait(self, timeout_s: float) -> None:
        self.pauses_s.append(timeout_s)
        self.on_pause()

    def thread(self, run: Callable[[], None], name: str) -> Still:
        self.threads.append(run)
        return self

    def start(self) -> None:
        if self.has_no_threads:
            raise RuntimeError("can't start new thread")


class Deaf(ChangeListener):
    """Hears nothing but what the test says; ``connects``: whether it is connected for a while, try by try."""

    def __init__(self, around: Still, *connects: bool) -> None:
        super().__init__("deaf", 7, around)  # type: ignore[arg-type]
        self.connects = list(connects)

    def hear(self, hears: bool) -> None:
        self._set_hearing(hears)

    def _listen(self) -> bool:
        return self.connects.pop(0)

    def _interrupt(self) -> None:
        raise AssertionError("nothing is interrupted")


def test_while_nothing_is_heard_readers_look_now_and_then() -> None:
    around = Still()
    listener = Deaf(around)
    first = listener.changes()
    assert first > 7
    around.advance(POLL_MS - 1)
    assert listener.changes() == first
    around.advance(1)
    second = listener.changes()
    assert second > first
    listener.hear(True)
    third = listener.changes()
    assert third > second, "what came before it heard"
    around.advance(10 * POLL_MS)
    assert listener.changes() == third
    listener.hear(False)
    assert listener.changes() > third
    assert len(around.threads) == 1


def test_who_cannot_listen_tries_again_less_and_less_often() -> None:
    around, count = Still(), 9
    listener = Deaf(around, *[False] * (count - 2), True, False)
    listener.changes()
    around.pauses_s.clear()

    def pause() -> None:
        around.is_closing = len(around.pauses_s) == count

    around.on_pause = pause
    around.threads[0]()
    first, longest = PAUSES_S
    slower = [min(first * 2**number, longest) for number in range(count - 2)]
    assert around.pauses_s == [*slower, first, 2 * first]
    before = listener.changes()
    around.advance(POLL_MS)
    assert listener.changes() > before, "and looks meanwhile"


def test_without_a_thread_readers_look_now_and_then_and_the_next_question_begins_one() -> None:
    around = Still()
    around.has_no_threads = True
    listener = Deaf(around)
    first = listener.changes()
    around.advance(POLL_MS)
    assert listener.changes() > first
    assert around.pauses_s == [], "and does not wait for what has not begun"
    listener.close()
    around.has_no_threads = False
    listener.changes()
    assert len(around.pauses_s) == 1


def test_nothing_is_fetched_for_a_store_that_was_closed() -> None:
    storage, prefetcher = MemoryStorage(), Prefetcher(SYSTEM_THREADS)
    storage.put("a", [b"abc"])
    fetch = prefetcher.begin(storage, "a", 1, 2)
    assert fetch is not None
    assert fetch.wait() == b"bc"
    assert prefetcher.taken_bytes == 2
    for _ in range(2):
        prefetcher.close()
        assert prefetcher.begin(storage, "a", 1, 2) is None
    assert prefetcher.taken_bytes == 0
