"""The server of a store: it listens, knows its connections, and ends when it is told to.

Counterparts: ``connections`` and ``answers``; ``cli.store`` starts it. Source: SS2, SS4, SS7, SS11 and SS14 of
docs/spec/served-store.md. What it knows of clients may be lost at any moment: it is in memory, and nobody relies on it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headgate.codec.handshake import SECRET_BYTES_MIN
from headgate.errors import UsageError
from headgate.model.security import SecurityConfig
from headgate.storage.local import LocalStorage
from headgate.store.catalogue.base import Catalogue
from headgate.store.served.address import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, Address, address_of
from headgate.store.served.greeting import Facts
from headgate.store.serving.answers import Answers
from headgate.store.serving.chunks import Range
from headgate.store.serving.connections import GREETING_S, Connection
from headgate.store.serving.counting import Counting, Counts
from headgate.store.serving.place import served_alone
from headgate.tls import Tls, TlsServer, is_loopback

CONNECTIONS_MAX = 1_024
"""Each has a thread. A client process has two or three, and one more for each of its threads that asks at once."""

STRANGERS_MAX = 256
"""Connections whose client is not known; one more closes the oldest of them (CN5)."""

GRACE_S = 10.0
"""So long questions that are under way may take when the server ends."""

TOKENS_LOOK_S = 1.0
"""So often the tokens are looked at, which may be others now."""

_SWEEP_S = 0.1
_log = logging.getLogger("headgate")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where a server listens, and for whom.

    Attributes:
        host: an address of this machine.
        port: 0 takes a free one.
        tokens: reads those that are right; none: everybody on this machine may ask.
        security: TLS as for all connections of ours: for other machines, unless somebody decides otherwise.
    """

    host: str
    port: int
    tokens: Callable[[], list[bytes]] = field(default=list)
    security: SecurityConfig = field(default_factory=SecurityConfig)


class StoreServer(socketserver.ThreadingTCPServer):
    """A server of one store; use ``serving_store``."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, options: ServerOptions, answers: Answers, facts: Facts, counting: Counting, family: int) -> None:
        self.address_family = family
        self.facts = facts
        self.tls: TlsServer | None = Tls(options.security).server(options.host)
        self.is_closing = False
        self._options = options
        self._answers = answers
        self._counting = counting
        self._lock = threading.Lock()
        self._strangers: dict[Connection, float] = {}  # oldest first
        self._known: set[Connection] = set()
        self._tokens = options.tokens()
        self._tokens_s = time.monotonic()
        super().__init__((options.host, options.port), Connection)

    @property
    def address(self) -> Address:
        """Where clients find it."""
        return address_of(self._options.host, int(self.server_address[1]), is_tls=self.tls is not None)

    @property
    def counts(self) -> Counts:
        """What it has done so far."""
        return self._counting.counts

    # -- for connections: see ``connections.Desk`` ---------------------------------------------------------------------

    def tokens(self) -> list[bytes]:
        """See ``Desk``. One that cannot be read now is as it was."""
        with self._lock:
            if time.monotonic() - self._tokens_s >= TOKENS_LOOK_S:
                self._tokens_s = time.monotonic()
                try:
                    self._tokens = self._options.tokens() or self._tokens
                except UsageError as error:
                    _log.warning("the tokens stay as they are: %s", error)
            return self._tokens

    def came(self, connection: Connection) -> None:
        """See ``Desk``."""
        with self._lock:
            self._strangers[connection] = time.monotonic() + GREETING_S
            too_many = list(self._strangers)[:-STRANGERS_MAX]
        self._counting.add(connections=1)
        for oldest in too_many:
            oldest.interrupt()

    def greeted(self, connection: Connection) -> None:
        """See ``Desk``."""
        with self._lock:
            self._strangers.pop(connection, None)
            self._known.add(connection)

    def went(self, connection: Connection) -> None:
        """See ``Desk``."""
        with self._lock:
            self._strangers.pop(connection, None)
            self._known.discard(connection)
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

    # -- for ``socketserver`` ------------------------------------------------------------------------------------------

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Return whether there is room for one more."""
        return self.counts.connections < CONNECTIONS_MAX

    def get_request(self) -> tuple[Any, Any]:
        """Accept; where there are no descriptors left, the oldest stranger makes room."""
        try:
            return super().get_request()
        except OSError:
            self._end_strangers(oldest=True)
            time.sleep(0.05)
            raise

    def service_actions(self) -> None:
        """End strangers that took too long, now and then."""
        self._end_strangers(oldest=False)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection ended in the middle, which its client knows; anything else is a mistake of ours."""
        if not isinstance(_current_error(), OSError):
            self._counting.add(failures=1)
            _log.exception("a connection of the server of a store has failed")

    def _end_strangers(self, *, oldest: bool) -> None:
        now_s = time.monotonic()
        with self._lock:
            late = [one for one, deadline_s in self._strangers.items() if deadline_s < now_s]
            late += list(self._strangers)[:1] if oldest else []
        for connection in late:
            connection.interrupt()

    def end(self, grace_s: float = GRACE_S) -> None:
        """Take nothing more, finish what is under way, and let everybody go.

        Connections that go on after ``grace_s`` seconds are cut. A verb that has begun is waited for however long it
        takes: another process of the server takes it for done (SS9).
        """
        self.is_closing = True
        self.shutdown()
        self.server_close()
        self._answers.close()
        deadline_s = time.monotonic() + grace_s
        while self._interrupted(idle_only=time.monotonic() < deadline_s):
            time.sleep(0.01)

    def _interrupted(self, *, idle_only: bool) -> bool:
        """Interrupt connections, or those that wait for a question; return whether any is left."""
        with self._lock:
            left = [*self._strangers, *self._known]
        for connection in left:
            if not (idle_only and connection.is_busy):
                connection.interrupt()
        return bool(left)


@contextlib.contextmanager
def serving_store(
    root: Path, catalogue: Catalogue, storage: LocalStorage, options: ServerOptions
) -> Iterator[StoreServer]:
    """Serve the store in ``root`` in threads of their own for the time of the block.

    Raises:
        UsageError: the port is taken, the address is not this machine's, it can be reached from others without a token,
            another process serves the store, or a certificate or token cannot be used.
    """
    _check_token(options)
    counting = Counting()
    with served_alone(root) as number:
        facts = Facts(secrets.token_hex(16), number, str(root))
        answers = Answers(catalogue, storage, facts.instance, counting)
        try:
            server = _listening(options, functools.partial(StoreServer, options, answers, facts, counting))
        except BaseException:
            answers.close()
            raise
        thread = threading.Thread(
            target=server.serve_forever, args=(_SWEEP_S,), name="headgate-store-server", daemon=True
        )
        thread.start()
        try:
            yield server
        finally:
            server.end()
            thread.join()


def _check_token(options: ServerOptions) -> None:
    """Others must be known, and are not to be heard by those in between (SE14)."""
    if not is_loopback(options.host) and not options.tokens():
        raise UsageError(
            f"a server on {options.host} can be reached from other machines: give it a token of {SECRET_BYTES_MIN} "
            f"characters or more, in a file with --token-file or ${TOKEN_FILE_VARIABLE}, or in ${TOKEN_VARIABLE}"
        )


def _listening(options: ServerOptions, make: Callable[[int], StoreServer]) -> StoreServer:
    try:
        family = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0][0]
        return make(family)
    except OSError as error:
        reason = str(error) if isinstance(error, socket.gaierror) or error.errno is None else os.strerror(error.errno)
        raise UsageError(
            f"the store cannot be served on {options.host}:{options.port}: {reason}; --host and --port take others"
        ) from error


def _current_error() -> BaseException | None:
    return sys.exc_info()[1]
