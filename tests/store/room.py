"""A store in the machine room: processes and threads are tasks, and time passes only when all of them wait."""

from __future__ import annotations

from collections.abc import Callable

from headgate.sim.machine.surroundings import SimThreads
from headgate.sim.machine.tasks import SimProcess, Tasks
from headgate.sim.machine.world import World
from headgate.storage.memory import MemoryStorage
from headgate.store.catalogue.sql import memory_catalogue
from headgate.store.store import Store

STEPS_MAX = 100_000


class Room:
    """Processes that share a store."""

    def __init__(self) -> None:
        self.world = World(7)
        self.tasks = Tasks(self.world)
        self.catalogue = memory_catalogue("store")
        self._storage = MemoryStorage()
        self._names = 0

    @property
    def now_ms(self) -> int:
        """Virtual time."""
        return self.world.now_ms

    def process(self, work: Callable[[Store], object], name: str = "process", after_ms: int = 0) -> SimProcess:
        """Start a process that does ``work`` with its own way to the store."""
        process = SimProcess(self.tasks, name)
        here = SimThreads(process, self.tasks)
        store = Store("store", self.catalogue, self._storage, new_name=self._new_name, threads=here, clock=here)
        self.world.at(after_ms, lambda: self.tasks.spawn(process, lambda: work(store) and None, "main"))
        return process

    def elapse(self, pause_ms: int) -> None:
        """Let time pass in the process that calls this."""
        self.tasks.park(pause_ms)

    def run(self, until_ms: int = 3_600_000) -> None:
        """Let everybody go on until nothing happens any more, or it is so late."""
        self.world.run(lambda: False, until_ms, STEPS_MAX)
        assert self.world.events_count < STEPS_MAX, "somebody never rests"

    def threads_of(self, process: SimProcess) -> list[str]:
        """The threads of a process that have not ended."""
        return self.tasks.of(process)

    def _new_name(self) -> str:
        self._names += 1
        return f"{self._names:032x}"
