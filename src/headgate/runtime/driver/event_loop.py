"""The driver's event thread: calls that other threads post, and timers, one after another.

Everything that decides about a pipeline runs here, so none of it needs a lock. Never does anything by itself.
"""

from __future__ import annotations

import heapq
import queue
from collections.abc import Callable
from typing import Protocol

from headgate.environment import Queue
from headgate.runtime.surroundings import PROCESS, Surroundings

STALE_MAX = 64
"""Timers that are not armed any more and wait for their time; beyond that they go at once."""

LOOK_S = 1.0
"""How often the thread looks whether it is over when nothing happens."""


class Timers(Protocol):
    """The event thread as its users see it."""

    def post(self, call: Callable[[], None]) -> None:
        """Have ``call`` run in the event thread. From any thread."""

    def arm(self, timer: object, after_ms: int, fire: Callable[[], None]) -> None:
        """Call ``fire`` in the event thread after ``after_ms``; the same timer again replaces it."""

    def cancel_timer(self, timer: object) -> None:
        """Forget a timer."""


class EventLoop:
    """One thread with a queue and timers. See ``Timers``."""

    def __init__(
        self,
        is_over: Callable[[], bool],
        on_error: Callable[[BaseException], None],
        at_end: Callable[[], None],
        around: Surroundings = PROCESS,
    ) -> None:
        """Make the loop; it ends when ``is_over`` after some call, or with ``on_error`` when one raised.

        ``at_end`` is the last call in either case.
        """
        self._is_over = is_over
        self._on_error = on_error
        self._at_end = at_end
        self._around = around
        self._calls: Queue[Callable[[], None]] = around.queue()
        self._timers: list[tuple[int, int, object]] = []
        """A heap of due time, number and timer, those among them that are not armed any more."""
        self._armed: dict[object, tuple[int, Callable[[], None]]] = {}
        self._timer_count = 0
        self._thread = around.thread(self._loop, "headgate-driver")

    def start(self) -> None:
        """Begin. Once."""
        self._thread.start()

    def join(self) -> None:
        """Wait for the end; at once when called in the event thread itself."""
        if not self._thread.is_current:
            self._thread.join()

    def post(self, call: Callable[[], None]) -> None:
        self._calls.put(call)

    def arm(self, timer: object, after_ms: int, fire: Callable[[], None]) -> None:
        def push() -> None:
            self._timer_count += 1
            self._armed[timer] = (self._timer_count, fire)
            # numbered: equal times keep their order, and timers need not be comparable
            heapq.heappush(self._timers, (self._around.monotonic_ms() + after_ms, self._timer_count, timer))
            if len(self._timers) > 2 * len(self._armed) + STALE_MAX:
                self._forget_stale()

        if self._thread.is_current:
            push()
        else:
            self.post(push)

    def cancel_timer(self, timer: object) -> None:
        self._armed.pop(timer, None)

    def every(self, period_ms: int, timer: object, call: Callable[[], None]) -> None:
        """Make ``call`` again and again."""

        def fire() -> None:
            # armed again after the call: a slow one does not pile up
            call()
            self.arm(timer, period_ms, fire)

        self.arm(timer, period_ms, fire)

    def _loop(self) -> None:
        try:
            while not self._is_over():
                self._fire_due_timers()
                wait_s = max(self._timers[0][0] - self._around.monotonic_ms(), 0) / 1000 if self._timers else LOOK_S
                try:
                    call = self._calls.get(timeout=min(wait_s, LOOK_S))
                except queue.Empty:
                    continue
                call()
        # not swallowed: a machine that has seen half of an event cannot decide any more
        except BaseException as error:
            self._on_error(error)
        finally:
            self._at_end()

    def _fire_due_timers(self) -> None:
        while self._timers and self._timers[0][0] <= self._around.monotonic_ms():
            _, number, timer = heapq.heappop(self._timers)
            # else it was cancelled, or armed again for another time
            if self._is_armed(timer, number):
                _, fire = self._armed.pop(timer)
                fire()

    def _is_armed(self, timer: object, number: int) -> bool:
        armed = self._armed.get(timer)
        return armed is not None and armed[0] == number

    def _forget_stale(self) -> None:
        """A checkpoint may take minutes, and each arms a timer for that: most are cancelled, and soon."""
        self._timers = [entry for entry in self._timers if self._is_armed(entry[2], entry[1])]
        heapq.heapify(self._timers)
