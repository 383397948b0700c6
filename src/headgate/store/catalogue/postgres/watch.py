"""Hears from PostgreSQL that somebody has changed the store.

Counterpart: ``database``, whose transactions notify when they are committed. Source: DB9 of docs/spec/shared-store.md.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import weakref
from collections.abc import Callable, Iterator

import psycopg

from headgate.store.listening import Listening

_here: dict[str, weakref.WeakSet[Watch]] = {}


def changed_here(url: str) -> None:
    """This process has changed the store: its readers see that at once, before the server tells."""
    for watch in list(_here.get(url, ())):
        watch.changed()


class Watch(Listening):
    """Listens to a channel of the database."""

    def __init__(self, connect: Callable[[], psycopg.Connection], url: str, channel: str, first: int = 0) -> None:
        """``connect`` gives a connection without transactions; no number is as low as ``first``."""
        super().__init__("headgate-store-watch", first)
        _here.setdefault(url, weakref.WeakSet()).add(self)
        self._connect = connect
        self._channel = channel
        self._wake: int | None = None

    def _listen(self) -> bool:
        is_connected = False
        with contextlib.suppress(psycopg.Error, OSError), self._connect() as connection:
            connection.execute(f"LISTEN {self._channel}".encode())
            self._hears_from_now_on(True)
            is_connected = True
            self._hear(connection)
        return is_connected

    def _hear(self, connection: psycopg.Connection) -> None:
        with self._woken_by() as wake, selectors.DefaultSelector() as selector:
            selector.register(connection.fileno(), selectors.EVENT_READ)
            selector.register(wake, selectors.EVENT_READ)
            while not self._closing.is_set():
                selector.select()
                connection.pgconn.consume_input()
                while connection.pgconn.notifies() is not None:
                    self.changed()

    @contextlib.contextmanager
    def _woken_by(self) -> Iterator[int]:
        """Give what can be read when it is interrupted. ``_closing`` is looked at behind that, so none is missed."""
        read, write = os.pipe()
        with self._lock:
            self._wake = write
        try:
            yield read
        finally:
            with self._lock:
                self._wake = None
            os.close(read)
            os.close(write)

    def _interrupt(self) -> None:
        with self._lock:
            if self._wake is not None:
                os.write(self._wake, b"x")
