"""What all connections of a server share: who is known, which tokens are right, and who answers.

Counterparts: ``connections``, each of which has one of these; ``server``, which accepts them; the simulator's machine
room has them, too. Source: SS2, SS4 and SS14 of docs/spec/served-store.md. What it knows of clients may be lost at any
moment: it is in memory, and nobody relies on it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from headgate.around import SYSTEM_AROUND, Around
from headgate.errors import UsageError
from headgate.store.served.greeting import Facts
from headgate.store.serving.answers import Answers
from headgate.store.serving.chunks import Range
from headgate.store.serving.connections import GREETING_S, Connection
from headgate.store.serving.counting import Counting, Counts
from headgate.tls import TlsServer

STRANGERS_MAX = 256
"""Connections whose client is not known; one more closes the oldest of them (CN5)."""

GRACE_S = 10.0
"""So long questions that are under way may take when the server ends."""

TOKENS_LOOK_S = 1.0
"""So often the tokens are looked at, which may be others now."""

_log = logging.getLogger("headgate")


class ServerDesk:
    """One process's: see ``connections.Desk``."""

    def __init__(
        self,
        tokens: Callable[[], list[bytes]],
        answers: Answers,
        facts: Facts,
        counting: Counting,
        tls: TlsServer | None = None,
        around: Around = SYSTEM_AROUND,
        *,
        is_plain_here: bool = False,
    ) -> None:
        """``tokens`` reads those that are right; none: everybody on this machine may ask."""
        self.facts = facts
        self.tls = tls
        self.is_plain_here = is_plain_here
        self.is_closing = False
        self._read_tokens = tokens
        self._answers = answers
        self._counting = counting
        self._around = around
        self._lock = around.lock()
        self._strangers: dict[Connection, float] = {}  # oldest first
        self._known: dict[Connection, None] = {}
        self._tokens = tokens()
        self._tokens_ms = around.monotonic_ms()

    @property
    def counts(self) -> Counts:
        """What it has done so far."""
        return self._counting.counts

    def tokens(self) -> list[bytes]:
        """See ``Desk``. One that cannot be read now is as it was."""
        with self._lock:
            if self._around.monotonic_ms() - self._tokens_ms >= TOKENS_LOOK_S * 1_000:
                self._tokens_ms = self._around.monotonic_ms()
                try:
                    self._tokens = self._read_tokens() or self._tokens
                except UsageError as error:
                    _log.warning("the tokens stay as they are: %s", error)
            return self._tokens

    def token(self, size_bytes: int) -> bytes:
        """See ``Desk``."""
        return self._around.token(size_bytes)

    def came(self, connection: Connection) -> None:
        """See ``Desk``."""
        with self._lock:
            self._strangers[connection] = self._around.monotonic_ms() + GREETING_S * 1_000
            too_many = list(self._strangers)[:-STRANGERS_MAX]
        self._counting.add(connections=1)
        for oldest in too_many:
            oldest.interrupt()

    def greeted(self, connection: Connection) -> None:
        """See ``Desk``."""
        with self._lock:
            self._strangers.pop(connection, None)
            self._known[connection] = None

    def went(self, connection: Connection) -> None:
        """See ``Desk``."""
        with self._lock:
            self._strangers.pop(connection, None)
            self._known.pop(connection, None)
        self._counting.add(connections=-1)

    def refused(self) -> None:
        """See ``Desk``."""
        self._counting.add(refused=1)

    def answer(self, path: str, name: str | None, data: bytes) -> tuple[int, bytes]:
        """See ``Desk``."""
        return self._answers.answer(path, name, data)

    def take_chunk(self, path: str, name: str | None, parts: Iterable[bytes], *, if_absent: bool) -> tuple[int, bytes]:
        """See ``Desk``."""
        return self._answers.take_chunk(path, name, parts, if_absent=if_absent)

    def give_chunk(self, path: str, offset: int, size_bytes: int | None) -> Range | tuple[int, bytes]:
        """See ``Desk``."""
        return self._answers.give_chunk(path, offset, size_bytes)

    def end_strangers(self, *, oldest: bool) -> None:
        """End those that took too long; ``oldest``: and the one that came first."""
        now_ms = self._around.monotonic_ms()
        with self._lock:
            late = [one for one, deadline_ms in self._strangers.items() if deadline_ms < now_ms]
            late += list(self._strangers)[:1] if oldest else []
        for connection in late:
            connection.interrupt()

    def end(self, grace_s: float = GRACE_S) -> None:
        """Take nothing more, finish what is under way, and let everybody go.

        Connections that go on after ``grace_s`` seconds are cut. A verb that has begun is waited for however long it
        takes: another process of the server takes it for done (SS9).
        """
        self.is_closing = True
        self._stop_listening()
        self._answers.close()
        deadline_ms = self._around.monotonic_ms() + grace_s * 1_000
        while self._interrupted(idle_only=self._around.monotonic_ms() < deadline_ms):
            self._around.sleep(0.01)

    def _stop_listening(self) -> None:
        """Let nobody come any more."""

    def _interrupted(self, *, idle_only: bool) -> bool:
        """Interrupt connections, or those that wait for a question; return whether any is left."""
        with self._lock:
            left = [*self._strangers, *self._known]
        for connection in left:
            if not (idle_only and connection.is_busy):
                connection.interrupt()
        return bool(left)
