"""Tells waiting tasks that their store has changed: one thread looks for all of them, while there are any.

Counterpart: ``reading`` waits for it. Source: AC6 of docs/spec/stream-clients.md. Never wakes the loop for nothing.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress

from headgate.errors import HeadgateError

LOOK_PAUSE_S = 0.01
"""So often it looks at one number, which costs microseconds (RG21)."""

IDLE_S = 1.0
"""So long the thread stays when nobody waits any more."""


class Bell:
    """Wakes tasks of one event loop."""

    def __init__(self, changes: Callable[[], int], loop: asyncio.AbstractEventLoop) -> None:
        """``changes`` gives another number when the store has changed."""
        self._changes = changes
        self._loop = loop
        self._changed = threading.Condition()  # never held across a look
        self._waiters: dict[asyncio.Future[None], int] = {}
        self._thread: threading.Thread | None = None
        self._is_closed = False

    async def wait(self, seen: int, timeout_s: float | None) -> None:
        """Return when the store is not any more as it was at ``seen``, or after ``timeout_s``, or for no reason."""
        waiter = self._loop.create_future()
        with self._changed:
            if self._is_closed:
                return
            self._waiters[waiter] = seen
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="headgate-bell", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await waiter
        finally:
            with self._changed:
                self._waiters.pop(waiter, None)

    def close(self) -> None:
        """Wake everybody, and look no more."""
        with self._changed:
            self._is_closed = True
            self._ring(self._waiters)
            self._changed.notify_all()

    def join(self) -> None:
        """Wait until the thread looks no more; not in the loop."""
        with self._changed:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while self._somebody_waits():
            try:
                number: int | None = self._changes()
            except HeadgateError:
                number = None  # whoever waits looks for himself, and is told
            with self._changed:
                self._ring(waiter for waiter, seen in self._waiters.items() if seen != number)
                self._changed.wait_for(lambda: self._is_closed, LOOK_PAUSE_S)

    def _somebody_waits(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._waiters or self._is_closed, IDLE_S)
            if self._waiters and not self._is_closed:
                return True
            self._thread = None
            return False

    def _ring(self, waiters: Iterable[asyncio.Future[None]]) -> None:
        """Wake these tasks. Under the lock."""
        rung = list(waiters)
        for waiter in rung:
            del self._waiters[waiter]
        if rung:
            with suppress(RuntimeError):  # the loop is closed, so nobody waits
                self._loop.call_soon_threadsafe(_wake, rung)


def _wake(waiters: Iterable[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
