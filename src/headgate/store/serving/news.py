"""Tells those who wait that somebody has changed the store.

Counterpart: ``served.hearing``. Source: SS12 of docs/spec/served-store.md. What this server changed it tells at once;
for what others do to the same directory it looks, while anybody waits.
"""

from __future__ import annotations

from collections.abc import Callable

from headgate.errors import HeadgateError
from headgate.threads import SYSTEM_THREADS, Threads

LOOK_S = 0.01
"""Between two looks while somebody waits. One costs microseconds."""


class News:
    """The number of the store's changes, and those who wait for another one."""

    def __init__(self, look: Callable[[], int], threads: Threads = SYSTEM_THREADS) -> None:
        """``look`` returns a number that is another one after every change."""
        self._look = look
        self._changed = threads.condition()
        self._seen: int | None = None
        self._number = 0
        self._waiting_count = 0
        self._is_closed = False
        self._thread = threads.thread(self._watch, "headgate-store-news")
        self._thread.start()

    def wait(self, number: int, wait_s: float) -> int:
        """Return a number that is not ``number`` when there is news, at the latest after ``wait_s`` seconds."""
        with self._changed:
            self._waiting_count += 1
            self._changed.notify_all()
            try:
                self._look_again()  # nobody may have looked while nobody waited
                self._changed.wait_for(lambda: self._is_closed or self._number != number, wait_s)
                return self._number
            finally:
                self._waiting_count -= 1

    def changed(self) -> None:
        """Something was changed, or may have been."""
        with self._changed:
            self._number += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Let everybody go who waits."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def _watch(self) -> None:
        with self._changed:
            while not self._is_closed:
                self._changed.wait_for(lambda: self._is_closed or self._waiting_count)
                self._look_again()
                self._changed.wait_for(lambda: self._is_closed, LOOK_S)

    def _look_again(self) -> None:
        try:
            seen = self._look()
        except HeadgateError:
            return  # the next verb says what is wrong
        if seen != self._seen:
            self._seen = seen
            self._number += 1
            self._changed.notify_all()
