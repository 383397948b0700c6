"""The surroundings of a real process: the operating system's threads, clocks and sockets."""

from __future__ import annotations

import os
import random
import secrets
import socket
import time

from headgate.clock import SystemClock
from headgate.threads import SystemThreads


class Process(SystemClock, SystemThreads):
    """This process (see ``Surroundings``)."""

    def __init__(self) -> None:
        self.random = random.Random()

    @property
    def host(self) -> str:
        """Asked each time: it may be changed."""
        return socket.gethostname()

    def sleep(self, seconds: float) -> None:
        """Pause this thread."""
        time.sleep(seconds)

    def token(self, size_bytes: int) -> bytes:
        """From the system's source of secrets."""
        return secrets.token_bytes(size_bytes)

    def listen(self, host: str, port: int) -> socket.socket:
        """See ``Surroundings``."""
        return socket.create_server((host, port), backlog=128)

    def connect(self, host: str, port: int, timeout_seconds: float) -> socket.socket:
        """See ``Surroundings``."""
        return socket.create_connection((host, port), timeout=timeout_seconds)

    def exit(self, code: int) -> None:
        """See ``Surroundings``."""
        os._exit(code)


PROCESS = Process()
