"""The byte stream under a connection: plain TCP. Counterpart: ``tls_streams``, for TLS over it.

Full duplex: one thread may receive while another sends. Whose other end falls silent without a word, because a cable
was pulled or a machine lost its power, fails here (CN15, docs/spec/connections.md).
"""

from __future__ import annotations

import contextlib
import io
import socket
from collections.abc import Sequence
from typing import Any

from headgate.runtime.process import PROCESS
from headgate.runtime.surroundings import Surroundings

SILENCE_S_MAX = 30
"""Within about this time a connection fails whose other end's system answers nothing any more (CN15)."""

_PROBES_COUNT = 3
_PARTS_MAX = 512
"""Parts per ``sendmsg``: half of Linux's IOV_MAX."""


class PlainStream(io.RawIOBase):
    """A TCP socket. Owns it."""

    def __init__(self, stream: socket.socket, around: Surroundings = PROCESS) -> None:
        super().__init__()
        self._socket = stream
        self._around = around
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _notice_silence(stream)

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


def _notice_silence(stream: socket.socket) -> None:
    """Let Linux ask the other end's system whether it is there, and end the connection if it does not answer.

    An idle connection is probed; on a busy one what was sent must be acknowledged in time. Linux also gives up who
    takes nothing for so long although its system answers. Whoever receives here takes what comes at once, because
    credit bounds it, so that is a process that stands still, and the driver has noticed it long before (CN13).
    """
    probe_s = SILENCE_S_MAX // (_PROBES_COUNT + 1) or 1
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe_s)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_s)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES_COUNT)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S_MAX * 1000)
