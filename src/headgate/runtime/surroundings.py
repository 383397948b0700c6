"""Injected OS services of the runtime: clocks, threads, sockets, random numbers, and the end of the process.

``PROCESS`` is the operating system, for the driver, Spark's workers and tests with real processes; the simulator has
a machine room that obeys one seed (``sim.machine``). Storage is opened by URL (``storage.base.open_storage``), and
workers are started by a ``Launcher`` (``runtime.driver.supervisor_host``). Nothing here decides.
"""

from __future__ import annotations

import os
import random
import socket
import sys
from types import ModuleType
from typing import Any, Protocol

from headgate.environment import Environment, SystemEnvironment


class Surroundings(Environment, Protocol):
    """Everything that the runtime does not do by itself."""

    @property
    def host(self) -> str:
        """What this machine is called, for people and to tell machines apart."""

    @property
    def random(self) -> random.Random:
        """Chance: for jitter, never for secrets."""

    def listen(self, host: str, port: int) -> Any:
        """Return a listening TCP socket (``socket.socket``); ``port`` 0: any.

        Raises:
            OSError
        """

    def exit(self, code: int) -> None:
        """End this process at once: nothing is flushed, nothing is closed. Does not return."""


class Process(SystemEnvironment):
    """This process (see ``Surroundings``)."""

    def __init__(self) -> None:
        self.random = random.Random()

    @property
    def host(self) -> str:
        """Asked each time: it may be changed."""
        return socket.gethostname()

    def listen(self, host: str, port: int) -> socket.socket:
        return socket.create_server((host, port), backlog=128)

    def exit(self, code: int) -> None:
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
