"""What a process learns from the server of its store: the date, and that something has changed.

Counterparts: ``catalogue.postgresql_database`` and ``client.remote_store`` say how each server is asked. Source: DB9
and DB12 of docs/spec/shared-store.md, SS12 of docs/spec/served-store.md. Never says that nothing has changed while it
cannot hear.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from headgate.environment import SYSTEM_CLOCK, SYSTEM_ENVIRONMENT, Clock, Environment, Thread
from headgate.errors import HeadgateError

ASK_EVERY_MS = 60_000
"""Two quartz clocks differ by a few milliseconds after so long."""


class ServerClock:
    """A ``Clock`` whose date is the server's. Threads may share it: at worst two of them ask."""

    def __init__(self, ask: Callable[[], int], clock: Clock = SYSTEM_CLOCK) -> None:
        """``ask`` returns the server's date in milliseconds since 1970, or raises ``HeadgateError``."""
        self._ask = ask
        self._clock = clock
        self._asked_ms: int | None = None
        self._known: tuple[int, int] | None = None

    def monotonic_ms(self) -> int:
        """See ``Clock``."""
        return self._clock.monotonic_ms()

    def monotonic_ns(self) -> int:
        """See ``Clock``."""
        return self._clock.monotonic_ns()

    def wall_ms(self) -> int:
        """Return the date.

        Raises:
            StorageError: the server has never been reached, and is not now.
        """
        now_ms = self._clock.monotonic_ms()
        if self._asked_ms is None or now_ms - self._asked_ms >= ASK_EVERY_MS:
            self._learn(now_ms)
            now_ms = self._clock.monotonic_ms()
        assert self._known is not None
        date_ms, then_ms = self._known
        return date_ms + now_ms - then_ms

    def _learn(self, began_ms: int) -> None:
        try:
            date_ms = self._ask()
        except HeadgateError:
            if self._known is None:
                raise
        else:
            self._known = date_ms, (began_ms + self._clock.monotonic_ms()) // 2
        self._asked_ms = began_ms


POLL_MS = 50
"""While nothing can be heard, readers look for themselves, so often."""

PAUSES_S = (0.05, 2.0)
"""Between tries to hear again: the first one, and the longest."""

START_S = 5.0
"""How long the first who asks waits until it hears."""


class ChangeListener(ABC):
    """A thread that listens on a connection of its own, from the first question on."""

    def __init__(self, thread_name: str, first: int = 0, around: Environment = SYSTEM_ENVIRONMENT) -> None:
        """No number is as low as ``first``."""
        self._thread_name = thread_name
        self._around = around
        self._lock = around.lock()
        self._number = first + 1
        self._hears = False
        self._looked_ms = -POLL_MS
        self._tried = around.event()
        self._closing = around.event()
        self._thread: Thread | None = None

    @property
    def number(self) -> int:
        """What ``changes`` would say, as far as known now."""
        return self._number

    def changes(self) -> int:
        """Return a number that rises with every change that was heard of, and now and then while nothing is heard."""
        if self._thread is None:
            self._start()
            self._tried.wait(START_S)
        if not self._hears:
            with self._lock:
                now_ms = self._around.monotonic_ms()
                if now_ms - self._looked_ms >= POLL_MS:
                    self._looked_ms = now_ms
                    self._number += 1
        return self._number

    def changed(self) -> None:
        """Something has changed, or may have."""
        with self._lock:
            self._number += 1

    def close(self) -> None:
        """End the thread; the next question begins another one."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._closing.set()
            self._interrupt()
            thread.join()
            self._closing.clear()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._tried.clear()
                self._thread = self._around.thread(self._run, self._thread_name)
                self._thread.start()

    def _run(self) -> None:
        pause_s = PAUSES_S[0]
        while not self._closing.is_set():
            if self._listen():
                pause_s = PAUSES_S[0]
            self._set_hearing(False)
            self._closing.wait(pause_s)
            pause_s = min(2 * pause_s, PAUSES_S[1])

    def _set_hearing(self, hears: bool) -> None:
        """Readers look once more: what came in between was not heard."""
        self._hears = hears
        self.changed()
        self._tried.set()

    @abstractmethod
    def _listen(self) -> bool:
        """Connect and listen until the connection is lost, or it is interrupted; return whether it was connected.

        Says ``_set_hearing(True)`` when it hears. Raises nothing: the next verb says what is wrong.
        """

    @abstractmethod
    def _interrupt(self) -> None:
        """End ``_listen``, also one that only begins: ``_closing`` is set."""
