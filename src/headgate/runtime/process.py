"""The surroundings of a real process: the operating system's threads, clocks and sockets."""

from __future__ import annotations

import os
import random
import socket
import sys
from types import ModuleType

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


def modules_being_imported() -> list[ModuleType]:
    """Return the modules of a user's that are not imported to their ends, as one that starts a pipeline at its top.

    What they define must travel by value: another thread that imports one waits for the end of that import, which may
    wait for the pipeline, and another process would start the pipeline once more.
    """
    found = []
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        if getattr(spec, "_initializing", False) and name.partition(".")[0] != "headgate":
            found.append(module)
    return found
