"""The timer of a writer: when it flushes, when it tries again, and when its thread ends; on a clock of the test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headgate.store.writer import IDLE_S, RETRY_FIRST_MS, RETRY_LATEST_MS, FlushTimer

LINGER_MS = 5


class Surroundings:
    """Threads that the test runs, with a condition at which waiting is what lets time pass."""

    def __init__(self) -> None:
        self.now_ms = 0
        self.started: list[Callable[[], None]] = []
        self.meanwhile: list[Callable[[], None]] = []
        """What others do while the thread waits for work, one after the other."""
        self.wakes = 0
        self.has_no_threads = False

    def monotonic_ms(self) -> int:
        return self.now_ms

    def condition(self) -> Surroundings:
        return self

    def thread(self, run: Callable[[], None], name: str) -> Thread:
        return Thread(self, run)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def notify_all(self) -> None:
        self.wakes += 1

    def wait_for(self, is_so: Callable[[], bool], timeout_s: float) -> bool:
        assert timeout_s > 0, "it does not ask again and again"
        if timeout_s == IDLE_S and self.meanwhile:
            self.meanwhile.pop(0)()
            return is_so()
        self.now_ms += round(timeout_s * 1_000)
        return is_so()


class Thread:
    def __init__(self, surroundings: Surroundings, run: Callable[[], None]) -> None:
        self._surroundings, self._run = surroundings, run
        self.is_current = False

    def start(self) -> None:
        if self._surroundings.has_no_threads:
            raise RuntimeError("can't start new thread")
        self._surroundings.started.append(self._run)


class Flushes:
    """Fails as often as is said, and notes when it was called."""

    def __init__(self, surroundings: Surroundings, failures: int = 0) -> None:
        self._surroundings, self._failures = surroundings, failures
        self.at_ms: list[int] = []

    def __call__(self) -> bool:
        self.at_ms.append(self._surroundings.now_ms)
        return len(self.at_ms) > self._failures


@pytest.fixture
def surroundings() -> Surroundings:
    return Surroundings()


def timer_of(surroundings: Any, flush: Callable[[], bool]) -> FlushTimer:
    return FlushTimer(LINGER_MS, flush, surroundings, surroundings)


def test_what_waits_is_flushed_once_after_the_linger(surroundings: Surroundings) -> None:
    flushes = Flushes(surroundings)
    timer = timer_of(surroundings, flushes)
    timer.arm()
    surroundings.now_ms = 3
    timer.arm()  # it waits since the first one
    (run,) = surroundings.started
    run()
    assert flushes.at_ms == [LINGER_MS]


def test_a_flush_that_fails_is_repeated_after_longer_and_longer_pauses(surroundings: Surroundings) -> None:
    flushes = Flushes(surroundings, failures=9)
    timer_of(surroundings, flushes).arm()
    surroundings.started[0]()
    pauses = [after - before for before, after in zip(flushes.at_ms, flushes.at_ms[1:], strict=False)]
    assert pauses == [min(RETRY_FIRST_MS << number, RETRY_LATEST_MS) for number in range(9)]


def test_the_pauses_begin_anew_after_a_flush_that_did_not_fail(surroundings: Surroundings) -> None:
    at_ms: list[int] = []

    def flush() -> bool:
        at_ms.append(surroundings.now_ms)
        return len(at_ms) == 4

    timer = timer_of(surroundings, flush)
    timer.arm()
    surroundings.meanwhile = [timer.arm]
    with pytest.raises(StopIteration):
        end_after(surroundings, at_ms, 6)
    assert at_ms[5] - at_ms[4] == RETRY_FIRST_MS


def end_after(surroundings: Surroundings, calls: list[int], count: int) -> None:
    """Run the thread until so many calls were made."""
    real = surroundings.wait_for

    def wait_for(is_so: Callable[[], bool], timeout_s: float) -> bool:
        if len(calls) >= count:
            raise StopIteration
        return real(is_so, timeout_s)

    surroundings.wait_for = wait_for  # type: ignore[method-assign]
    surroundings.started[0]()


def test_a_thread_that_waits_for_work_is_woken_and_one_that_lingers_is_not(surroundings: Surroundings) -> None:
    flushes = Flushes(surroundings)
    timer = timer_of(surroundings, flushes)
    timer.arm()
    timer.disarm()
    timer.arm()
    assert surroundings.wakes == 0, "its thread has not come to wait yet"
    surroundings.meanwhile = [timer.arm]
    surroundings.started[0]()
    assert surroundings.wakes == 1
    assert flushes.at_ms == [LINGER_MS, 2 * LINGER_MS]
    assert len(surroundings.started) == 1


def test_what_is_flushed_otherwise_is_not_flushed_again(surroundings: Surroundings) -> None:
    flushes = Flushes(surroundings)
    timer = timer_of(surroundings, flushes)
    timer.arm()
    timer.disarm()
    surroundings.started[0]()
    assert flushes.at_ms == []


def test_a_thread_without_work_ends_and_another_one_begins_with_the_next(surroundings: Surroundings) -> None:
    flushes = Flushes(surroundings)
    timer = timer_of(surroundings, flushes)
    for _ in range(2):
        timer.arm()
        surroundings.started.pop()()
    assert len(flushes.at_ms) == 2
    assert surroundings.started == []


def test_without_a_thread_the_caller_is_to_flush_and_the_next_to_wait_begins_one(surroundings: Surroundings) -> None:
    flushes = Flushes(surroundings)
    timer = timer_of(surroundings, flushes)
    surroundings.has_no_threads = True
    assert not timer.arm()
    timer.close()
    timer = timer_of(surroundings, flushes)
    assert not timer.arm()
    surroundings.has_no_threads = False
    assert timer.arm()
    surroundings.started[0]()
    assert flushes.at_ms == [LINGER_MS]


def test_a_closed_timer_flushes_nothing_and_takes_nothing(surroundings: Surroundings) -> None:
    flushes = Flushes(surroundings)
    timer = timer_of(surroundings, flushes)
    timer.arm()
    (run,) = surroundings.started
    timer.close(wait=False)
    run()
    timer.arm()
    assert (flushes.at_ms, len(surroundings.started)) == ([], 1)
