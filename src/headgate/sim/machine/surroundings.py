"""The surroundings of one simulated process. Counterparts: ``runtime.process``, ``threads``."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from headgate.sim.machine.sockets import Network, SimServer, SimSocket
from headgate.sim.machine.tasks import (
    SimCondition,
    SimEvent,
    SimEventLoop,
    SimLock,
    SimPool,
    SimProcess,
    SimQueue,
    SimReentrantLock,
    SimThread,
    Tasks,
)

EPOCH_MS = 1_700_000_000_000
"""The date at which every run begins."""

HOST = "simulated"


class SimThreads:
    """The threads of one simulated process, and its clocks: ``threads.Threads`` and ``clock.Clock``.

    ``wall_shift_ms`` may be changed at any time: a user set the clock of this machine.
    """

    def __init__(self, process: SimProcess, tasks: Tasks) -> None:
        self._process = process
        self._tasks = tasks
        self.wall_shift_ms = 0

    @property
    def process_id(self) -> int:
        return self._process.pid

    def monotonic_ns(self) -> int:
        """Virtual time; it stands still while a task makes a step."""
        return self._tasks.world.now_ms * 1_000_000

    def monotonic_ms(self) -> int:
        return self._tasks.world.now_ms

    def wall_ms(self) -> int:
        return EPOCH_MS + self._tasks.world.now_ms + self.wall_shift_ms

    def lock(self) -> SimLock:
        return SimLock(self._tasks)

    def reentrant_lock(self) -> SimReentrantLock:
        return SimReentrantLock(self._tasks)

    def event(self) -> SimEvent:
        return SimEvent(self._tasks)

    def condition(self) -> SimCondition:
        return SimCondition(self._tasks)

    def queue(self) -> SimQueue[Any]:
        return SimQueue(self._tasks)

    def thread(self, target: Callable[..., None], name: str, *arguments: Any) -> SimThread:
        return SimThread(self._tasks, self._process, lambda: target(*arguments), name)

    def pool(self, size: int, name: str, *, is_daemon: bool = False) -> SimPool:
        return SimPool(self._tasks, self._process, size, name)

    def event_loop(self, name: str) -> SimEventLoop:
        return SimEventLoop(self._tasks, self._process, name)


class SimSurroundings(SimThreads):
    """What ``runtime.surroundings.Surroundings`` asks for, from the seed."""

    def __init__(self, process: SimProcess, network: Network) -> None:
        super().__init__(process, network.tasks)
        self._network = network
        self.random = random.Random(network.tasks.world.random.random())

    @property
    def host(self) -> str:
        """See ``Surroundings``; all simulated processes are of one machine."""
        return HOST

    def sleep(self, seconds: float) -> None:
        self._tasks.park(seconds * 1000)

    def token(self, size_bytes: int) -> bytes:
        """See ``Surroundings``; here the seed can guess."""
        return self.random.randbytes(size_bytes)

    def listen(self, host: str, port: int) -> SimServer:
        return self._network.listen(self._process)

    def connect(self, host: str, port: int, timeout_seconds: float) -> SimSocket:
        return self._network.connect(self._process, port, timeout_seconds)

    def exit(self, code: int) -> None:
        self._process.end(code)
