"""The surroundings of one simulated process. Counterpart: ``runtime.process``."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from headgate.sim.machine.primitives import SimCondition, SimEvent, SimLock, SimPool, SimQueue, SimThread
from headgate.sim.machine.sockets import Network, SimServer, SimSocket
from headgate.sim.machine.tasks import SimProcess

EPOCH_MS = 1_700_000_000_000
"""The date at which every run begins."""

HOST = "simulated"


class SimSurroundings:
    """What ``runtime.surroundings.Surroundings`` asks for, from the seed.

    ``wall_shift_ms`` may be changed at any time: somebody set the clock of this machine.
    """

    def __init__(self, process: SimProcess, network: Network) -> None:
        self._process = process
        self._network = network
        self._tasks = network.tasks
        self._world = network.tasks.world
        self.random = random.Random(self._world.random.random())
        self.wall_shift_ms = 0

    @property
    def process_id(self) -> int:
        """See ``Surroundings``."""
        return self._process.pid

    @property
    def host(self) -> str:
        """See ``Surroundings``; all simulated processes are of one machine."""
        return HOST

    def monotonic_ns(self) -> int:
        """Virtual time; it stands still while a task makes a step."""
        return self._world.now_ms * 1_000_000

    def monotonic_ms(self) -> int:
        """See ``Surroundings``."""
        return self._world.now_ms

    def wall_ms(self) -> int:
        """See ``Surroundings``."""
        return EPOCH_MS + self._world.now_ms + self.wall_shift_ms

    def sleep(self, seconds: float) -> None:
        """See ``Surroundings``."""
        self._tasks.park(seconds * 1000)

    def token(self, size_bytes: int) -> bytes:
        """See ``Surroundings``; here the seed can guess."""
        return self.random.randbytes(size_bytes)

    def lock(self) -> SimLock:
        """See ``Surroundings``."""
        return SimLock(self._tasks)

    def event(self) -> SimEvent:
        """See ``Surroundings``."""
        return SimEvent(self._tasks)

    def condition(self) -> SimCondition:
        """See ``Surroundings``."""
        return SimCondition(self._tasks)

    def queue(self) -> SimQueue[Any]:
        """See ``Surroundings``."""
        return SimQueue(self._tasks)

    def thread(self, target: Callable[..., None], name: str, *arguments: Any) -> SimThread:
        """See ``Surroundings``."""
        return SimThread(self._tasks, self._process, lambda: target(*arguments), name)

    def pool(self, size: int, name: str) -> SimPool:
        """See ``Surroundings``."""
        return SimPool(self._tasks, self._process, size, name)

    def listen(self, host: str, port: int) -> SimServer:
        """See ``Surroundings``."""
        return self._network.listen(self._process)

    def connect(self, host: str, port: int, timeout_seconds: float) -> SimSocket:
        """See ``Surroundings``."""
        return self._network.connect(self._process, port, timeout_seconds)

    def exit(self, code: int) -> None:
        """See ``Surroundings``."""
        self._process.end(code)
