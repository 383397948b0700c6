"""When a writer flushes by itself: a while after the first append that waits.

Counterpart: ``writer.StreamWriter``. Source: S38 and S41 of docs/spec/stream-store.md.
Never keeps a thread while nothing waits: it ends after a second of silence, and with ``close``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

LINGER = "5ms"
"""Default: far below the time that a sync of a disk takes, long enough for the threads of one writer to share it."""

RETRY_FIRST_S, RETRY_LATEST_S = 0.02, 1.0
"""Pauses between tries while the storage is failing; each is twice the one before."""

IDLE_S = 1.0


class Linger:
    """Calls ``flush`` in a thread of its own, ``linger_ms`` after ``arm``; again and again while it returns False."""

    def __init__(self, linger_ms: int, flush: Callable[[], bool]) -> None:
        self._linger_s = linger_ms / 1_000
        self._flush = flush
        self._changed = threading.Condition()
        self._due_s: float | None = None
        self._thread: threading.Thread | None = None
        self._is_waiting_for_work = False
        self._is_closed = False

    def arm(self) -> None:
        """Something waits to be flushed, from now on unless something did before."""
        with self._changed:
            if self._is_closed or self._due_s is not None:
                return
            self._due_s = time.monotonic() + self._linger_s
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="headgate-linger", daemon=True)
                self._thread.start()
            elif self._is_waiting_for_work:
                self._changed.notify()

    def disarm(self) -> None:
        """Nothing waits any more."""
        with self._changed:
            self._due_s = None

    def close(self, *, wait: bool = True) -> None:
        """End the thread; with ``wait`` it is gone afterwards. Not under a lock that ``flush`` takes."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
            thread = self._thread
        if wait and thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        pause_s = RETRY_FIRST_S
        while self._is_due():
            if self._flush():
                pause_s = RETRY_FIRST_S
                continue
            with self._changed:
                self._due_s = time.monotonic() + pause_s
            pause_s = min(2 * pause_s, RETRY_LATEST_S)

    def _is_due(self) -> bool:
        """Wait until it is time; False when this thread is not needed any more."""
        with self._changed:
            while not self._is_closed:
                if self._due_s is None:
                    self._is_waiting_for_work = True
                    was_called = self._changed.wait(IDLE_S)
                    self._is_waiting_for_work = False
                    if not was_called and self._due_s is None:
                        break
                    continue
                left_s = self._due_s - time.monotonic()
                if left_s <= 0:
                    self._due_s = None
                    return True
                self._changed.wait(left_s)
            self._thread = None
            return False
