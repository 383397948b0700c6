"""The byte stream under a connection: plain TCP. Counterpart: ``tls_streams``, for TLS over it.

Full duplex: one thread may receive while another sends.
"""

from __future__ import annotations

import contextlib
import io
import socket
from collections.abc import Sequence
from typing import Any

from headgate.runtime.process import PROCESS
from headgate.runtime.surroundings import Surroundings

_PARTS_MAX = 512
"""Parts per ``sendmsg``: half of Linux's IOV_MAX."""


class PlainStream(io.RawIOBase):
    """A TCP socket. Owns it."""

    def __init__(self, stream: socket.socket, around: Surroundings = PROCESS) -> None:
        super().__init__()
        self._socket = stream
        self._around = around
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def readable(self) -> bool:
        """For ``io.BufferedReader``."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Receive what is there, at least one byte; 0 when the other side closed."""
        return self._socket.recv_into(buffer)

    def send_parts(self, parts: Sequence[memoryview]) -> None:
        """Send all parts in order, without joining them."""
        views = list(parts)
        start = 0
        while start < len(views):
            sent = self._socket.sendmsg(views[start : start + _PARTS_MAX])
            while start < len(views) and sent >= len(views[start]):
                sent -= len(views[start])
                start += 1
            if sent:
                views[start] = views[start][sent:]

    def set_deadline(self, deadline: float | None) -> None:
        """Let receiving and sending fail after ``deadline`` (monotonic seconds; None: never).

        Raises:
            TimeoutError: it has passed.
        """
        remaining = None if deadline is None else deadline - self._around.monotonic_ns() / 1e9
        if remaining is not None and remaining <= 0:
            raise TimeoutError("the handshake took too long")
        self._socket.settimeout(remaining)

    def interrupt(self) -> None:
        """End every waiting call, from any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        super().close()
