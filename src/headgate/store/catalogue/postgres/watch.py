"""Hears that somebody has changed the store, so that nobody has to ask the server again and again.

Counterpart: ``database``, whose transactions notify when they are committed. Source: DB9 of docs/spec/shared-store.md.
Never says that nothing has changed while it cannot hear.
"""

from __future__ import annotations

import os
import selectors
import threading
import time
import weakref
from collections.abc import Callable

import psycopg

LOOK_S = 0.05
"""While nothing can be heard, readers look for themselves, so often."""

PAUSES_S = (0.05, 2.0)
"""Between tries to hear again: the first one, and the longest."""

START_S = 5.0
"""How long the first who asks waits until it hears."""


_here: dict[str, weakref.WeakSet[Watch]] = {}


def changed_here(url: str) -> None:
    """This process has changed the store: its readers see that at once, before the server tells."""
    for watch in list(_here.get(url, ())):
        watch.changed()


class Watch:
    """A thread that listens on a connection of its own, from the first question on."""

    def __init__(self, connect: Callable[[], psycopg.Connection], url: str, channel: str, first: int = 0) -> None:
        """``connect`` gives a connection without transactions; no number is as low as ``first``."""
        _here.setdefault(url, weakref.WeakSet()).add(self)
        self._connect = connect
        self._channel = channel
        self._lock = threading.Lock()
        self._number = first + 1
        self._hears = False
        self._looked_s = 0.0
        self._tried = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._wake_read = self._wake_write = -1

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
                now_s = time.monotonic()
                if now_s - self._looked_s >= LOOK_S:
                    self._looked_s = now_s
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
            os.write(self._wake_write, b"x")
            thread.join()
            os.close(self._wake_read)
            os.close(self._wake_write)
            self._closing.clear()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._tried.clear()
                self._wake_read, self._wake_write = os.pipe()
                self._thread = threading.Thread(target=self._run, name="headgate-store-watch", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        pause_s = PAUSES_S[0]
        while not self._closing.is_set():
            try:
                with self._connect() as connection:
                    connection.execute(f"LISTEN {self._channel}".encode())
                    self._hears_from_now_on(True)
                    pause_s = PAUSES_S[0]
                    self._hear(connection)
            except (psycopg.Error, OSError):
                pass  # the next verb says what is wrong
            self._hears_from_now_on(False)
            self._closing.wait(pause_s)
            pause_s = min(2 * pause_s, PAUSES_S[1])

    def _hears_from_now_on(self, hears: bool) -> None:
        self._hears = hears
        self.changed()  # what came in between was not heard
        self._tried.set()

    def _hear(self, connection: psycopg.Connection) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(connection.fileno(), selectors.EVENT_READ)
            selector.register(self._wake_read, selectors.EVENT_READ)
            while not self._closing.is_set():
                selector.select()
                connection.pgconn.consume_input()
                while connection.pgconn.notifies() is not None:
                    self.changed()
