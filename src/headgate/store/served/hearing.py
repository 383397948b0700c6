"""Hears from the server that somebody has changed the store.

Counterpart: ``serving.news``, which answers when there is something to tell. Source: SS12 of docs/spec/served-store.md.
"""

from __future__ import annotations

import http.client

import msgspec

from headgate.errors import HeadgateError
from headgate.store.listening import Listening
from headgate.store.served.client import Client, question_of
from headgate.store.served.connection import ConnectionLostError, RefusedError, ServerConnection, UnreachableError
from headgate.store.served.values import decode

NEWS = "/news"
THREAD = "headgate-store-hearing"

_CHANGES_OF_A_PROCESS = 1 << 32


class Seen(msgspec.Struct, frozen=True):
    """Up to where somebody has heard: a number of one process of the server. Another one begins anew."""

    instance: str = ""
    number: int = -1


class Hearing(Listening):
    """Asks for news; usable after a fork."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._begin_in_this_process(0)

    def _begin_in_this_process(self, first: int) -> None:
        super().__init__(THREAD, first, self._client.around)
        self._pid = self._client.around.process_id
        self._connection: ServerConnection | None = None

    def changes(self) -> int:
        """See ``Listening``."""
        self._notice_fork()
        return super().changes()

    def changed_here(self) -> None:
        """This process has changed something, or may have: its readers see that before the server tells."""
        self._notice_fork()
        self.changed()

    def close(self) -> None:
        """See ``Listening``."""
        self._notice_fork()
        super().close()

    def _listen(self) -> bool:
        try:
            connection = self._client.connect()
        except (UnreachableError, RefusedError, HeadgateError):
            return False
        self._hear(connection)
        return True

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

    def _interrupt(self) -> None:
        with self._lock:
            connection = self._connection
        if connection is not None:
            connection.interrupt()

    def _notice_fork(self) -> None:
        """Listen anew in a child: before any lock, the parent may hold one (SS19)."""
        if self._client.around.process_id != self._pid:
            self._begin_in_this_process(self._number + _CHANGES_OF_A_PROCESS)
