"""Counts for a reader of a group, so that others hear that it lives: as it reads, and while its caller is busy.

Counterparts: ``group_reader.GroupReader`` counts with it, ``protocol.store.group_watch`` listens. Source: RG13 and RG22
of docs/spec/reader-groups.md. Never joins: who was taken for dead stays dead.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from weakref import WeakMethod

from headgate.clock import Clock
from headgate.errors import HeadgateError, StorageError
from headgate.protocol.store.group_watch import LOOKS_PER_LEASE
from headgate.threads import Thread, Threads


class GroupHeart:
    """Says when a beat is due. If its caller may be busy, a thread beats meanwhile, and ends when that lasts too long.

    ``caller_is_here`` and ``close`` are the reader's; beats may be counted in both threads.
    """

    def __init__(
        self, beat: Callable[[int], object], lease_ms: int, busy_ms: int | None, threads: Threads, clock: Clock
    ) -> None:
        """``beat`` says for the so-and-so-many-th time that the reader lives. ``busy_ms`` None: there is no thread.

        It is a method of the reader, which the heart does not keep: one that nobody has any more cannot be called.
        """
        self.pause_ms = max(1, lease_ms // LOOKS_PER_LEASE)
        self._readers_beat = WeakMethod(beat)
        self._busy_ms = busy_ms
        self._threads = threads
        self._clock = clock
        self._numbers = itertools.count(1)
        self._beaten_ms = self._here_ms = clock.monotonic_ms()
        self._changed = threads.condition()
        self._thread: Thread | None = None
        self._is_closed = False

    @property
    def is_due(self) -> bool:
        """Whether so much of the lease has passed since the last beat that another one is wanted."""
        return self.due_in_ms == 0

    @property
    def due_in_ms(self) -> int:
        """How long it is until a beat is due."""
        return max(0, self._beaten_ms + self.pause_ms - self._clock.monotonic_ms())

    def next_number(self) -> int:
        """Return the number of the next beat: no two are equal."""
        return next(self._numbers)

    def has_beaten(self) -> None:
        """Others can hear the last beat."""
        self._beaten_ms = self._clock.monotonic_ms()

    def caller_is_here(self) -> None:
        """The reader was called; from now on its caller may be busy for a while."""
        if self._busy_ms is None:
            return
        with self._changed:
            self._here_ms = self._clock.monotonic_ms()
            if self._thread is None and not self._is_closed:
                thread = self._threads.thread(self._run, "headgate-group-heart")
                thread.start()
                self._thread = thread

    def close(self) -> None:
        """End the thread, for good. Repeating is fine."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while self._waits_for_beat():
            try:
                self._beat(self.next_number())
            except StorageError:
                continue  # a quarter of the lease later there is another one
            except HeadgateError:  # the reader is out of the group, or there is no group: its next call says so
                with self._changed:
                    self._is_closed = True

    def _beat(self, number: int) -> None:
        """Have the reader beat; without a reader this was the last one."""
        beat = self._readers_beat()
        if beat is not None:
            beat(number)
            return
        with self._changed:
            self._is_closed = True

    def _waits_for_beat(self) -> bool:
        """Wait until a beat is due; False when this thread is not needed, or not allowed, any more."""
        with self._changed:
            while not self._is_closed:
                now_ms = self._clock.monotonic_ms()
                busy_left_ms = self._here_ms + (self._busy_ms or 0) - now_ms
                if busy_left_ms <= 0:
                    break  # RG22: whoever hangs is not alive; with the next call this begins anew
                due_in_ms = self._beaten_ms + self.pause_ms - now_ms
                if due_in_ms <= 0:
                    self._beaten_ms = now_ms
                    return True
                self._changed.wait_for(lambda: self._is_closed, min(due_in_ms, busy_left_ms) / 1_000)
            self._thread = None
            return False
