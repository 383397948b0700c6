"""When a writer flushes by itself: a while after the first append that waits.

Counterpart: ``writer.StreamWriter``. Source: S38 and S41 of docs/spec/stream-store.md.
Never keeps a thread while nothing waits: it ends after a second of silence, and with ``close``.
"""

from __future__ import annotations

from collections.abc import Callable

from headgate.clock import Clock
from headgate.threads import Thread, Threads

LINGER = "5ms"
"""Default: far below the time that a sync of a disk takes, long enough for the threads of one writer to share it."""

RETRY_FIRST_MS, RETRY_LATEST_MS = 20, 1_000
"""Pauses between tries while the storage is failing; each is twice the one before."""

IDLE_S = 1.0


class Linger:
    """Calls ``flush`` in a thread of its own, ``linger_ms`` after ``arm``; again and again while it returns False."""

    def __init__(self, linger_ms: int, flush: Callable[[], bool], threads: Threads, clock: Clock) -> None:
        self._linger_ms = linger_ms
        self._flush = flush
        self._threads = threads
        self._clock = clock
        self._changed = threads.condition()
        self._due_ms: int | None = None
        self._thread: Thread | None = None
        self._is_waiting_for_work = False
        self._is_closed = False

    def arm(self) -> None:
        """Something waits to be flushed, from now on unless something did before."""
        with self._changed:
            if self._is_closed or self._due_ms is not None:
                return
            self._due_ms = self._clock.monotonic_ms() + self._linger_ms
            if self._thread is None:
                self._thread = self._threads.thread(self._run, "headgate-linger")
                self._thread.start()
            elif self._is_waiting_for_work:
                self._changed.notify_all()

    def disarm(self) -> None:
        """Nothing waits any more."""
        with self._changed:
            self._due_ms = None

    def close(self, *, wait: bool = True) -> None:
        """End the thread; with ``wait`` it is gone afterwards. Not under a lock that ``flush`` takes."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            thread = self._thread
        if wait and thread is not None and not thread.is_current:
            thread.join()

    def _run(self) -> None:
        pause_ms = RETRY_FIRST_MS
        while self._is_due():
            if self._flush():
                pause_ms = RETRY_FIRST_MS
                continue
            with self._changed:
                self._due_ms = self._clock.monotonic_ms() + pause_ms
            pause_ms = min(2 * pause_ms, RETRY_LATEST_MS)

    def _is_due(self) -> bool:
        """Wait until it is time; False when this thread is not needed any more."""
        with self._changed:
            while not self._is_closed:
                due_ms = self._due_ms
                if due_ms is None:
                    self._is_waiting_for_work = True
                    is_wanted = self._waits_for_change(None, IDLE_S)
                    self._is_waiting_for_work = False
                    if not is_wanted:
                        break
                    continue
                left_ms = due_ms - self._clock.monotonic_ms()
                if left_ms <= 0:
                    self._due_ms = None
                    return True
                self._waits_for_change(due_ms, left_ms / 1_000)
            self._thread = None
            return False

    def _waits_for_change(self, due_ms: int | None, timeout_s: float) -> bool:
        """Wait until it is due at another time than ``due_ms``, or over; False: neither came in time."""
        return self._changed.wait_for(lambda: self._is_closed or self._due_ms != due_ms, timeout_s)
