"""What clients and servers of ours are given from outside beside clocks and threads: connections, pauses and secrets.

There are two: the operating system's, below, and those of the simulator's machine room (decision 0011). Counterparts:
``store.served`` and ``store.serving`` ask for this, ``runtime.surroundings`` for more. Nothing here decides.
"""

from __future__ import annotations

import secrets
import socket
import time
from typing import Any, Protocol

from headgate.clock import Clock, SystemClock
from headgate.threads import SystemThreads, Threads


class Around(Clock, Threads, Protocol):
    """What a process has around it."""

    def sleep(self, seconds: float) -> None:
        """Let this thread pause."""

    def token(self, size_bytes: int) -> bytes:
        """Return bytes that nobody can guess."""

    def connect(self, host: str, port: int, timeout_seconds: float) -> Any:
        """Return a connected TCP socket (``socket.socket``).

        Raises:
            OSError
        """


class SystemAround(SystemClock, SystemThreads):
    """The operating system (see ``Around``)."""

    def sleep(self, seconds: float) -> None:
        """Pause this thread."""
        time.sleep(seconds)

    def token(self, size_bytes: int) -> bytes:
        """From the system's source of secrets."""
        return secrets.token_bytes(size_bytes)

    def connect(self, host: str, port: int, timeout_seconds: float) -> socket.socket:
        """See ``Around``."""
        return socket.create_connection((host, port), timeout=timeout_seconds)


SYSTEM_AROUND = SystemAround()
