"""The server of a store: its directory lock, known connections, and how it listens and ends.

Counterparts: ``connections`` and ``handlers``; ``cli.store`` starts it; the simulator has its ``ServerState``, too.
Source: docs/spec/served-store.md. What it knows of clients may be lost at any
moment.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
import secrets
import socket
import socketserver
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import field
from pathlib import Path
from typing import Any

from headgate.codec.handshake import SECRET_BYTES_MIN
from headgate.dataclass import dataclass
from headgate.environment import SYSTEM_ENVIRONMENT, Environment
from headgate.errors import UsageError
from headgate.model.config import SecurityConfig
from headgate.storage.base import TEMP_PREFIX, AlreadyExists, NotFound, Storage
from headgate.storage.local import LocalStorage
from headgate.storage.local_files import access_in, open_lock, write_created
from headgate.store.addresses import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, ServerAddress, server_address
from headgate.store.catalogue.base import Catalogue
from headgate.store.client.connection import ServerFacts
from headgate.store.server.connections import HANDSHAKE_TIMEOUT_S, Connection, Range
from headgate.store.server.handlers import RequestHandlers, ServerCounts, ServerMetrics
from headgate.tls import Tls, TlsServer, is_loopback

LOCK_FILE, STORE_ID_FILE, TOKEN_FILE = "serving.lock", "store-number", "token"


@contextlib.contextmanager
def lock_directory(root: Path) -> Iterator[str]:
    """Keep other servers from the store in ``root`` for the time of the block, which gets its number.

    Raises:
        UsageError: another process serves it.
    """
    with os.fdopen(open_lock(root / LOCK_FILE), "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another process serves the store at {root}: stop it first, or serve another store with --store"
            ) from None
        yield _store_id(LocalStorage(root))


def own_token_file(root: Path) -> Path:
    """Return the file with the token of the store in ``root``, made if there is none: who may open the store reads it.

    Raises:
        UsageError: it cannot be made.
    """
    file = root / TOKEN_FILE
    made = root / f"{TEMP_PREFIX}{secrets.token_hex(8)}"
    try:
        if not file.exists():
            # aside first: no process may read half of it
            write_created(made, f"{secrets.token_urlsafe(32)}\n".encode(), access_in(root))
            try:
                with contextlib.suppress(FileExistsError):  # another one was quicker
                    os.link(made, file)
            finally:
                made.unlink()
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"the token of the store at {root} cannot be written: {reason}; give --token-file") from error
    return file


def _store_id(storage: Storage) -> str:
    try:
        return storage.get(STORE_ID_FILE).decode()
    except NotFound:
        with contextlib.suppress(AlreadyExists):
            storage.put_if_absent(STORE_ID_FILE, [secrets.token_hex(16).encode()])
        return storage.get(STORE_ID_FILE).decode()


STRANGERS_MAX = 256
"""Connections without an authenticated client; one more closes the oldest of them."""

GRACE_S = 10.0
"""So long questions that are under way may take when the server ends."""

TOKENS_LOOK_S = 1.0
"""So often the tokens are looked at, which may be others now."""

_log = logging.getLogger("headgate")


class ServerState:
    """One process's: see ``connections.Desk``."""

    def __init__(
        self,
        tokens: Callable[[], list[bytes]],
        answers: RequestHandlers,
        facts: ServerFacts,
        counting: ServerMetrics,
        tls: TlsServer | None = None,
        around: Environment = SYSTEM_ENVIRONMENT,
        *,
        allows_plain_loopback: bool = False,
    ) -> None:
        """``tokens`` reads those that are right; none: every process on this machine may ask."""
        self.facts = facts
        self.tls = tls
        self.allows_plain_loopback = allows_plain_loopback
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
    def counts(self) -> ServerCounts:
        """What it has done so far."""
        return self._counting.counts

    def tokens(self) -> list[bytes]:
        """See ``Desk``. One that cannot be read now is as it was."""
        with self._lock:
            if self._around.monotonic_ms() - self._tokens_ms >= TOKENS_LOOK_S * 1_000:
                self._tokens_ms = self._around.monotonic_ms()
                try:
                    # a file that is empty for a moment, while it is written, would open the store to every process
                    self._tokens = self._read_tokens() or self._tokens
                except UsageError as error:
                    _log.warning("the tokens stay as they are: %s", error)
            return self._tokens

    def token(self, size_bytes: int) -> bytes:
        return self._around.token(size_bytes)

    def came(self, connection: Connection) -> None:
        with self._lock:
            self._strangers[connection] = self._around.monotonic_ms() + HANDSHAKE_TIMEOUT_S * 1_000
            too_many = list(self._strangers)[:-STRANGERS_MAX]
        self._counting.add(connections=1)
        for oldest in too_many:
            oldest.interrupt()

    def greeted(self, connection: Connection) -> None:
        with self._lock:
            self._strangers.pop(connection, None)
            self._known[connection] = None

    def went(self, connection: Connection) -> None:
        with self._lock:
            self._strangers.pop(connection, None)
            self._known.pop(connection, None)
        self._counting.add(connections=-1)

    def refused(self) -> None:
        self._counting.add(refused=1)

    def answer(self, path: str, name: str | None, data: bytes) -> tuple[int, bytes]:
        return self._answers.answer(path, name, data)

    def take_chunk(self, path: str, name: str | None, parts: Iterable[bytes], *, if_absent: bool) -> tuple[int, bytes]:
        return self._answers.take_chunk(path, name, parts, if_absent=if_absent)

    def give_chunk(self, path: str, offset: int, size_bytes: int | None) -> Range | tuple[int, bytes]:
        return self._answers.give_chunk(path, offset, size_bytes)

    def close_unauthenticated(self, *, oldest: bool) -> None:
        """End those that took too long; ``oldest``: and the one that came first."""
        now_ms = self._around.monotonic_ms()
        with self._lock:
            late = [one for one, deadline_ms in self._strangers.items() if deadline_ms < now_ms]
            late += list(self._strangers)[:1] if oldest else []
        for connection in late:
            connection.interrupt()

    def end(self, grace_s: float = GRACE_S) -> None:
        """Take no more requests, finish those under way, and close all connections.

        Connections that go on after ``grace_s`` seconds are cut. A verb that has begun is waited for however long it
        takes: another process of the server takes it for done (SS9).
        """
        self.is_closing = True
        self._stop_listening()
        # those that wait for news would wait for longer than the grace
        self._answers.close()
        deadline_ms = self._around.monotonic_ms() + grace_s * 1_000
        while self._interrupted(idle_only=self._around.monotonic_ms() < deadline_ms):
            self._around.sleep(0.01)

    def _stop_listening(self) -> None:
        """Stop listening for connections."""

    def _interrupted(self, *, idle_only: bool) -> bool:
        """Interrupt connections, or those that wait for a question; return whether any is left."""
        with self._lock:
            left = [*self._strangers, *self._known]
        for connection in left:
            if not (idle_only and connection.is_busy):
                connection.interrupt()
        return bool(left)


CONNECTIONS_MAX = 1_024
"""Each has a thread. A client process has two or three, and one more for each of its threads that asks at once."""

EVERY_ADDRESS = ("0.0.0.0", "::", "")

_SWEEP_S = 0.1


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where a server listens, and for whom.

    Attributes:
        host: an address of this machine.
        port: 0 takes a free one.
        tokens: reads those that are right; none: every process on this machine may ask.
        security: TLS as for all connections of ours: for other machines, unless it is configured otherwise.
        machine: the name by which others find this machine; used where ``host`` stands for all of its addresses.
    """

    host: str
    port: int
    tokens: Callable[[], list[bytes]] = field(default=list)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    machine: str = ""


class StoreServer(ServerState, socketserver.ThreadingTCPServer):
    """A server of one store; use ``serving_store``."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, options: ServerOptions, answers: RequestHandlers, facts: ServerFacts, counting: ServerMetrics, family: int
    ) -> None:
        self.address_family = family
        self._options = options
        tls = Tls(options.security).server(options.host)
        allows_plain = options.security.tls is None
        ServerState.__init__(self, options.tokens, answers, facts, counting, tls, allows_plain_loopback=allows_plain)
        socketserver.ThreadingTCPServer.__init__(self, (options.host, options.port), Connection)

    @property
    def address(self) -> ServerAddress:
        """Where clients find it. All addresses of a machine are called by the machine's name."""
        host = self._options.host
        if host in EVERY_ADDRESS:
            host = self._options.machine or host
        return server_address(host, int(self.server_address[1]), is_tls=self.tls is not None)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Return whether there is room for one more."""
        return self.counts.connections < CONNECTIONS_MAX

    def get_request(self) -> tuple[Any, Any]:
        """Accept; where there are no descriptors left, the oldest stranger makes room."""
        try:
            return super().get_request()
        except OSError:
            self.close_unauthenticated(oldest=True)
            self._around.sleep(0.05)
            raise

    def service_actions(self) -> None:
        """End strangers that took too long, now and then."""
        self.close_unauthenticated(oldest=False)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection ended in the middle, which its client knows; anything else is a mistake of ours."""
        if not isinstance(sys.exc_info()[1], OSError):
            self._counting.add(failures=1)
            _log.exception("a connection of the server of a store has failed")

    def _stop_listening(self) -> None:
        self.shutdown()
        self.server_close()


@contextlib.contextmanager
def serve_store(
    root: Path, catalogue: Catalogue, storage: LocalStorage, options: ServerOptions
) -> Iterator[StoreServer]:
    """Serve the store in ``root`` in threads of their own for the time of the block.

    Raises:
        UsageError: the port is taken, the address is not this machine's, it can be reached from others without a token,
            another process serves the store, or a certificate or token cannot be used.
    """
    _check_token(options)
    counting = ServerMetrics()
    with lock_directory(root) as number:
        facts = ServerFacts(SYSTEM_ENVIRONMENT.token(16).hex(), number, str(root))
        answers = RequestHandlers(catalogue, storage, facts.instance, counting)
        try:
            server = _listening(options, functools.partial(StoreServer, options, answers, facts, counting))
        except BaseException:
            answers.close()
            raise
        thread = SYSTEM_ENVIRONMENT.thread(server.serve_forever, "headgate-store-server", _SWEEP_S)
        thread.start()
        try:
            yield server
        finally:
            server.end()
            thread.join()


def _check_token(options: ServerOptions) -> None:
    """Others must be known, and are not to be heard by those in between."""
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
