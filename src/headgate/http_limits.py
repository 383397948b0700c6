"""Limits of a process that listens for HTTP: connections, bytes and time.

Used by the server of a store and the port for metrics; the web page, which uses asyncio, has the same limits
(``web.app``). A checkpoint needs descriptors and memory, too, so connections from outside get a fixed share
(docs/spec/security.md).
"""

from __future__ import annotations

import socket
import threading
from io import BufferedIOBase

from headgate.tls import shut_down

HEAD_S = 10.0
"""So long the first lines of a request may take."""


class TooLongError(Exception):
    """More was sent than may be read. Expected: not a HeadgateError."""


class BoundedInput:
    """What comes in of a connection. ``left``: how much more may be read; None: whatever its reader asks for."""

    def __init__(self, file: BufferedIOBase, left: int | None) -> None:
        self._file = file
        self.left = left

    def readline(self, size_bytes: int = -1) -> bytes:
        """Return a line, or ``size_bytes`` of one.

        Raises:
            TooLongError: it is longer than what may be read.
        """
        if self.left is not None:
            size_bytes = self.left + 1 if size_bytes < 0 else min(size_bytes, self.left + 1)
        return self._counted(self._file.readline(size_bytes))

    def read1(self, size_bytes: int) -> bytes:
        """Return some bytes, at most ``size_bytes``.

        Raises:
            TooLongError: they are more than may be read.
        """
        return self._counted(self._file.read1(size_bytes))

    def close(self) -> None:
        """End."""
        self._file.close()

    def _counted(self, data: bytes) -> bytes:
        if self.left is not None:
            self.left -= len(data)
            if self.left < 0:
                raise TooLongError
        return data


class ConnectionLimit:
    """The open connections of a port: one more than ``at_most`` ends the oldest that has not asked for anything yet."""

    def __init__(self, at_most: int) -> None:
        self._at_most = at_most
        self._lock = threading.Lock()
        self._silent: dict[socket.socket, None] = {}  # oldest first
        self._others: set[socket.socket] = set()
        """Connections with a request, or about to end: their descriptors are taken until they have ``left``."""

    def admit(self, stream: socket.socket) -> bool:
        """Return whether there is room for ``stream``; never for more than twice ``at_most``."""
        with self._lock:
            count = len(self._silent) + len(self._others)
            if count >= 2 * self._at_most or (count >= self._at_most and not self._silent):
                return False
            oldest = next(iter(self._silent)) if count >= self._at_most else None
            if oldest is not None:
                del self._silent[oldest]
                self._others.add(oldest)
            self._silent[stream] = None
        if oldest is not None:
            shut_down(oldest)
        return True

    def asked(self, stream: socket.socket) -> None:
        """All of a request is there: it is answered, however many come."""
        with self._lock:
            if self._silent.pop(stream, self) is None:
                self._others.add(stream)

    def left(self, stream: socket.socket) -> None:
        """It is closed."""
        with self._lock:
            self._silent.pop(stream, None)
            self._others.discard(stream)


def host_of(header: str) -> str:
    """Return the host in a header ``Host``. A page of another site that leads here has another one."""
    host = header.rpartition(":")[0] if header.rpartition(":")[2].isdigit() else header
    return host.strip("[]")
