"""A bounded queue of messages in front of a connection, emptied by a thread of its own.

Used by both ends of the control channel, so that a peer that does not read (SIGSTOP, cut cable) can block
nobody: it fills its own queue, and a full queue is a lost peer (CN11). Never drops a message silently while the
connection lives.
"""

from __future__ import annotations

from collections.abc import Callable

from headgate.runtime.process import PROCESS
from headgate.runtime.surroundings import Surroundings
from headgate.runtime.wire.connection import Connection, ConnectionLost
from headgate.threads import Queue

MESSAGES_MAX = 4_096
"""Messages that may wait for one peer: minutes of orders for one that merely is slow."""


class Outbox:
    """Sends messages in order. Any thread may ``put``.

    Args:
        connection: where they go; not owned.
        on_lost: called, maybe more than once, with the reason when messages cannot go out.
        name: of the thread.
    """

    def __init__(
        self, connection: Connection, on_lost: Callable[[str], None], *, name: str, around: Surroundings = PROCESS
    ) -> None:
        self._connection = connection
        self._on_lost = on_lost
        self._queue: Queue[bytes | None] = around.queue()
        self._lock = around.lock()
        self._is_closed = False
        self._thread = around.thread(self._loop, name)
        self._thread.start()

    def put(self, message: bytes) -> None:
        """Queue ``message``. Never blocks; after a loss or ``close`` it is dropped."""
        with self._lock:
            if self._is_closed:
                return
            is_full = self._queue.qsize() >= MESSAGES_MAX
            if not is_full:
                self._queue.put(message)
        if is_full:
            self._on_lost(f"{MESSAGES_MAX} messages wait for it and it reads none")

    def close(self, flush_seconds: float) -> None:
        """Take no more; wait at most ``flush_seconds`` for what is queued, then cut the connection. Idempotent."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._queue.put(None)  # ends the loop behind what is queued
        if self._thread.is_current:
            return
        self._thread.join(flush_seconds)
        if self._thread.is_alive():
            self._connection.interrupt()
            self._thread.join()

    def _loop(self) -> None:
        try:
            while (message := self._queue.get()) is not None:
                self._connection.send_message(message)
        except ConnectionLost as lost:
            with self._lock:
                self._is_closed = True
            self._on_lost(lost.reason)
