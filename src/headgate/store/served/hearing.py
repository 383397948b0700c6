"""Hears from the server that somebody has changed the store, so that nobody has to ask again and again.

Counterpart: ``serving.news``, which answers when there is something to tell. Source: SS12 of docs/spec/served-store.md.
Never says that nothing has changed while it cannot hear.
"""

from __future__ import annotations

import http.client
import os
import threading
import time

import msgspec

from headgate.errors import HeadgateError
from headgate.store.served.client import Client, question_of
from headgate.store.served.connection import ConnectionLostError, RefusedError, ServerConnection, UnreachableError
from headgate.store.served.values import decode

NEWS = "/news"
LOOK_S = 0.05
"""While nothing can be heard, readers look for themselves, so often."""

PAUSES_S = (0.05, 2.0)
"""Between tries to hear again: the first one, and the longest."""

START_S = 5.0
"""How long the first who asks waits until it hears."""

_CHANGES_OF_A_PROCESS = 1 << 32


class Seen(msgspec.Struct, frozen=True):
    """Up to where somebody has heard: a number of one process of the server. Another one begins anew."""

    instance: str = ""
    number: int = -1


class Hearing:
    """A thread that asks for news on a connection of its own, from the first question on; usable after a fork."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._first = 0
        self._begin_in_this_process()

    def _begin_in_this_process(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._number = self._first + 1
        self._hears = False
        self._looked_s = 0.0
        self._tried = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._connection: ServerConnection | None = None

    def changes(self) -> int:
        """Return a number that rises with all that was heard of, and now and then while nothing is heard."""
        self._notice_fork()
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

    def changed_here(self) -> None:
        """This process has changed something, or may have: its readers see that before the server tells."""
        self._notice_fork()
        with self._lock:
            self._number += 1

    def close(self) -> None:
        """End the thread; the next question begins another one."""
        self._notice_fork()
        with self._lock:
            thread, self._thread = self._thread, None
            self._closing.set()
            connection = self._connection
        if connection is not None:
            connection.interrupt()
        if thread is not None:
            thread.join()
        self._closing.clear()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._tried.clear()
                self._thread = threading.Thread(target=self._run, name="headgate-store-hearing", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        pause_s = PAUSES_S[0]
        while not self._closing.is_set():
            try:
                connection = self._client.connect()
            except (UnreachableError, RefusedError, HeadgateError):
                pass  # the next verb says what is wrong
            else:
                pause_s = PAUSES_S[0]
                self._hear(connection)
            self._hears_from_now_on(False)
            self._closing.wait(pause_s)
            pause_s = min(2 * pause_s, PAUSES_S[1])

    def _hear(self, connection: ServerConnection) -> None:
        with self._lock:
            if self._closing.is_set():
                connection.close()
                return
            self._connection = connection
        seen = Seen()
        try:
            while not self._closing.is_set():
                answer = connection.ask(question_of(NEWS, seen))
                if answer.status != http.client.OK:
                    return
                found = decode(answer.data, Seen)
                if found != seen:
                    self._hears_from_now_on(True)
                seen = found
        except (ConnectionLostError, HeadgateError):
            return
        finally:
            with self._lock:
                self._connection = None
            connection.close()

    def _hears_from_now_on(self, hears: bool) -> None:
        """Readers look once more: what came in between was not heard."""
        with self._lock:
            self._hears = hears
            self._number += 1
        self._tried.set()

    def _notice_fork(self) -> None:
        if os.getpid() != self._pid:
            self._first = self._number + _CHANGES_OF_A_PROCESS
            self._begin_in_this_process()
