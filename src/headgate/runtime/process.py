"""The surroundings of a real process: the operating system's threads, clocks and sockets."""

from __future__ import annotations

import os
import random
import socket

from headgate.around import SystemAround


class Process(SystemAround):
    """This process (see ``Surroundings``)."""

    def __init__(self) -> None:
        self.random = random.Random()

    @property
    def host(self) -> str:
        """Asked each time: it may be changed."""
        return socket.gethostname()

    def listen(self, host: str, port: int) -> socket.socket:
        """See ``Surroundings``."""
        return socket.create_server((host, port), backlog=128)

    def exit(self, code: int) -> None:
        """See ``Surroundings``."""
        os._exit(code)


PROCESS = Process()
