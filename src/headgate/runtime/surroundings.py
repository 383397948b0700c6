"""What the runtime is given from outside: clocks, threads and what they wait with, sockets, chance, and its own end.

There are two: ``runtime.process`` is the operating system, for Spark's workers, the driver and tests with real
processes; the simulator has a machine room that obeys one seed (``sim.machine``). Storage is opened by URL
(``storage.base.open_storage``), and workers are started by a ``runtime.driver.supervision.Launcher``. Nothing here
decides.
"""

from __future__ import annotations

import random
from typing import Any, Protocol

from headgate.around import Around


class Surroundings(Around, Protocol):
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
