"""A page's port and thread: open as long as the run, or the command; browsers see how it ended (PG7)."""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from headgate.errors import UsageError
from headgate.http_limits import HEAD_S
from headgate.web.responses import Access

MakeApp: TypeAlias = Callable[[Access, Callable[[], bool]], Starlette]
"""Makes the application from the access rules and ``is_closing``, which says whether event streams have to end."""

LAST_LOOK_S = 5
"""How long connections may stay open when the run is over; those that follow end by themselves (``app.PERIOD_S``)."""

CONNECTIONS_MAX = 128
"""Connections of all browsers; one more ends the oldest (SE9). A browser has six at most."""

BACKLOG = 32
"""So many are accepted before others are ended."""


class BrowserProtocol(H11Protocol):
    """A connection of a browser. Their number is limited (SE9); a request's head has 16 KiB at most (h11)."""

    _numbers = itertools.count()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin; if there are too many, the oldest of those that ask for nothing ends, or else the oldest of all."""
        self._number = next(self._numbers)
        others = sorted(self.connections, key=BrowserProtocol._order)
        super().connection_made(transport)
        self._deadline = self.loop.call_later(HEAD_S, self._end_if_silent)
        for oldest in others[: len(self.connections) - CONNECTIONS_MAX] if len(others) >= CONNECTIONS_MAX else ():
            self.connections.discard(oldest)  # at once: a connection that is ending no longer counts
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._deadline.cancel()
        super().connection_lost(exc)

    def _end_if_silent(self) -> None:
        if self.cycle is None:
            self.transport.abort()

    @staticmethod
    def _order(connection: Any) -> tuple[bool, int]:
        is_busy = connection.cycle is not None and not connection.cycle.response_complete
        return is_busy, connection._number


@contextmanager
def serve_page(make_app: MakeApp, port: int, host: str, token: str | None, option: str = "--ui") -> Iterator[str]:
    """Serve the page in a thread of its own for the time of the block, which gets its address.

    Args:
        make_app: makes what answers.
        port: 0 takes a free one.
        host: an address of this machine. Not on loopback, ``token`` is needed for looking, too.
        token: None: there are no actions.
        option: what chooses another port, for messages.

    Raises:
        UsageError: the port is taken, the address is not this machine's, or there is no token where one is needed.
    """
    is_local = _is_loopback(host)
    if not is_local and token is None:
        raise UsageError(f"a page on {host} can be reached from other machines: give it a token (HEADGATE_UI_TOKEN)")
    access = Access(token, not is_local) if is_local else Access(token, True, ("*",))
    closing = threading.Event()
    with _listening(host, port, option) as listener:
        config = uvicorn.Config(
            make_app(access, closing.is_set),
            http=BrowserProtocol,
            ws="none",
            backlog=BACKLOG,
            log_config=None,
            log_level="critical",
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=LAST_LOOK_S,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],), name="headgate-page", daemon=True)
        thread.start()
        try:
            yield _address(host, listener.getsockname()[1])
        finally:
            closing.set()
            server.should_exit = True
            thread.join()


@contextmanager
def _listening(host: str, port: int, option: str) -> Iterator[socket.socket]:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        reason = str(error) if isinstance(error, socket.gaierror) or error.errno is None else os.strerror(error.errno)
        raise UsageError(f"the page cannot be served on {host}:{port}: {reason}; {option} takes another") from error
    with listener:
        yield listener


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _address(host: str, port: int) -> str:
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
