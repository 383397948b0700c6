"""The driver's timers: each fires once, in order, and one that is cancelled leaves nothing behind."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from headgate.runtime.driver.event_loop import STALE_MAX, EventLoop
from headgate.runtime.surroundings import Process


class Here:
    """A thread that is always the one that asks."""

    is_current = True


class Stopped(Process):
    """A process whose clock stands where the test sets it."""

    now_ms = 0

    def monotonic_ms(self) -> int:
        return self.now_ms

    def thread(self, target: Callable[..., None], name: str, *arguments: Any) -> Any:
        return Here()


def loop_at(around: Stopped) -> EventLoop:
    return EventLoop(lambda: False, lambda error: None, lambda: None, around)


def test_timers_fire_once_and_in_order() -> None:
    around, fired = Stopped(), list[str]()
    loop = loop_at(around)
    for name, after_ms in (("late", 30), ("early", 10), ("again", 20), ("gone", 15)):
        loop.arm(name, after_ms, lambda name=name: fired.append(name))  # type: ignore[misc]
    loop.arm("again", 40, lambda: fired.append("again, later"))
    loop.cancel_timer("gone")
    around.now_ms = 35
    loop._fire_due_timers()
    assert fired == ["early", "late"]
    around.now_ms = 100
    loop._fire_due_timers()
    loop._fire_due_timers()
    assert fired == ["early", "late", "again, later"]


def test_a_cancelled_timer_does_not_wait_for_its_time() -> None:
    loop = loop_at(Stopped())
    loop.arm("stays", 600_000, lambda: None)
    for number in range(10 * STALE_MAX):
        loop.arm(("expiry", number), 600_000, lambda: None)
        loop.cancel_timer(("expiry", number))
    assert len(loop._timers) <= STALE_MAX + 3
    assert list(loop._armed) == ["stays"]


def test_what_a_cancelled_timer_would_have_called_is_let_go() -> None:
    class Generation:
        def fire(self) -> None: ...

    loop, generation = loop_at(Stopped()), Generation()
    kept = weakref.ref(generation)
    loop.arm("expiry", 600_000, generation.fire)
    loop.cancel_timer("expiry")
    del generation
    assert kept() is None, "a generation that is over, with all that its coordinator knows"
