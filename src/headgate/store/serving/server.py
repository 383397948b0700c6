"""The server of a store: it listens, knows its connections, and ends when it is told to.

Counterparts: ``desk``, ``connections`` and ``answers``; ``cli.store`` starts it. Source: SS2, SS4, SS7, SS11 and SS14
of docs/spec/served-store.md.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import socketserver
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headgate.around import SYSTEM_AROUND
from headgate.codec.handshake import SECRET_BYTES_MIN
from headgate.errors import UsageError
from headgate.model.security import SecurityConfig
from headgate.storage.local import LocalStorage
from headgate.store.catalogue.base import Catalogue
from headgate.store.served.address import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, Address, address_of
from headgate.store.served.greeting import Facts
from headgate.store.serving.answers import Answers
from headgate.store.serving.connections import Connection
from headgate.store.serving.counting import Counting
from headgate.store.serving.desk import ServerDesk
from headgate.store.serving.place import served_alone
from headgate.tls import Tls, is_loopback

CONNECTIONS_MAX = 1_024
"""Each has a thread. A client process has two or three, and one more for each of its threads that asks at once."""

EVERY_ADDRESS = ("0.0.0.0", "::", "")

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
        machine: the name by which others find this machine; used where ``host`` stands for all of its addresses.
    """

    host: str
    port: int
    tokens: Callable[[], list[bytes]] = field(default=list)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    machine: str = ""


class StoreServer(ServerDesk, socketserver.ThreadingTCPServer):
    """A server of one store; use ``serving_store``."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, options: ServerOptions, answers: Answers, facts: Facts, counting: Counting, family: int) -> None:
        self.address_family = family
        self._options = options
        tls = Tls(options.security).server(options.host)
        is_plain_here = options.security.tls is None
        ServerDesk.__init__(self, options.tokens, answers, facts, counting, tls, is_plain_here=is_plain_here)
        socketserver.ThreadingTCPServer.__init__(self, (options.host, options.port), Connection)

    @property
    def address(self) -> Address:
        """Where clients find it. All addresses of a machine are called by the machine's name."""
        host = self._options.host
        if host in EVERY_ADDRESS:
            host = self._options.machine or host
        return address_of(host, int(self.server_address[1]), is_tls=self.tls is not None)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Return whether there is room for one more."""
        return self.counts.connections < CONNECTIONS_MAX

    def get_request(self) -> tuple[Any, Any]:
        """Accept; where there are no descriptors left, the oldest stranger makes room."""
        try:
            return super().get_request()
        except OSError:
            self.end_strangers(oldest=True)
            self._around.sleep(0.05)
            raise

    def service_actions(self) -> None:
        """End strangers that took too long, now and then."""
        self.end_strangers(oldest=False)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection ended in the middle, which its client knows; anything else is a mistake of ours."""
        if not isinstance(sys.exc_info()[1], OSError):
            self._counting.add(failures=1)
            _log.exception("a connection of the server of a store has failed")

    def _stop_listening(self) -> None:
        self.shutdown()
        self.server_close()


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
        facts = Facts(SYSTEM_AROUND.token(16).hex(), number, str(root))
        answers = Answers(catalogue, storage, facts.instance, counting)
        try:
            server = _listening(options, functools.partial(StoreServer, options, answers, facts, counting))
        except BaseException:
            answers.close()
            raise
        thread = SYSTEM_AROUND.thread(server.serve_forever, "headgate-store-server", _SWEEP_S)
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
