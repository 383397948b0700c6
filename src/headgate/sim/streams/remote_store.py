"""Programs with a store that is afar: its events are on an object store, or all of it is on a server.

Everything else is as ``groups`` and ``client_programs`` have it, and so is what must hold. Readers fetch ahead where
requests travel, with little room here, so that bounds are met by short streams. Counterparts: ``machine.server``,
``store.reader``. What is drawn here is drawn apart from everything else.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from functools import partial

from headgate.environment import Threads
from headgate.errors import StorageError, UsageError
from headgate.sim.machine.server import ServedStores
from headgate.sim.machine.storage import SimStores
from headgate.sim.machine.tasks import SimProcess
from headgate.sim.machine.world import Bound, Violation
from headgate.sim.streams.client_programs import SCHEMA, STORE, FollowRun, Program, ProgramsRun
from headgate.sim.streams.groups import GroupRun
from headgate.storage.base import Storage
from headgate.store import core, reader
from headgate.store.core import Fetch, Prefetcher
from headgate.store.store import Store

SMALL: tuple[Bound, ...] = (
    (reader, "RUN_BYTES", 2_000),
    (reader, "AHEAD_BYTES", 4_000),
    (reader, "RUNS_MAX", 3),
    (core, "FETCH_THREADS", 2),
)
"""Bounds of reading ahead that these seeds have instead of the usual ones."""

UNDER_WAY_MS = 5_000
"""A request takes less virtual time."""


class AfarRun(ProgramsRun):
    """A run with events that are on an object store."""

    fetched_count = 0
    """Requests that were made ahead."""

    def _draw(self) -> None:
        super()._draw()
        self._disk.is_afar = True
        self._fetching: dict[SimProcess, list[Prefetcher]] = {}
        self.bounds += [*SMALL, (core, "Prefetcher", self._watched_fetching)]

    def run(self) -> Violation | None:
        """See ``Simulation``. Collect no garbage by chance: readers that are dropped give up what they asked for."""
        usual = gc.isenabled()
        gc.disable()
        try:
            return super().run()
        finally:
            if usual:
                gc.enable()

    def on_work_done(self, process: SimProcess) -> None:
        """Its readers are gone, and so is what they had fetched (S83)."""
        gc.collect()
        self.tasks.park(UNDER_WAY_MS)
        left = sum(fetching.taken_bytes for fetching in self._fetching.get(process, ()))
        if left:
            self.fail("S83", f"{process.name} has done its work and still keeps {left} bytes that were fetched ahead")

    def _watched_fetching(self, threads: Threads) -> Prefetcher:
        made = WatchedFetching(threads, self)
        self._fetching.setdefault(self.tasks.current.process, []).append(made)
        return made


class WatchedFetching(Prefetcher):
    """Counts what is fetched."""

    def __init__(self, threads: Threads, run: AfarRun) -> None:
        super().__init__(threads)
        self._run = run

    def begin(self, storage: Storage, path: str, offset: int, size_bytes: int) -> Fetch | None:
        found = super().begin(storage, path, offset, size_bytes)
        self._run.fetched_count += found is not None
        return found


class Maker(Program):
    """Makes streams and deletes them.

    The process that is informed that nothing was done must not find it done (SS9).
    """

    def __init__(self, run: ProgramsRun, rng: random.Random) -> None:
        super().__init__(run, "maker", rng)
        self._left = [f"made/{number}" for number in range(rng.choice((5, 15, 40)))]

    def _work(self, process: SimProcess) -> bool:
        store = Store.shared(STORE)
        may_be_done = len(self._processes) > 1  # by a former life
        while self._left:
            name = self._left[0]
            self._once(partial(store.create_stream, name, SCHEMA, segments=1), may_be_done=may_be_done)
            self._once(partial(store.delete, name, force=True), may_be_done=may_be_done)
            self._left = [other for other in self._left if other != name]
            self._run.tasks.park(self._rng.randint(0, 60))
            may_be_done = sum(one.is_alive for one in self._processes) > 1
        return True

    def _once(self, call: Callable[[], object], *, may_be_done: bool) -> None:
        """Do it until a user says that it is done."""
        while True:
            try:
                call()
                return
            except StorageError:
                may_be_done = True  # nobody knows
                self._run.tasks.park(self._rng.randint(1, 40))
            except UsageError as error:
                if not may_be_done and sum(one.is_alive for one in self._processes) == 1:
                    self._run.fail("SS9", f"it is done, and nobody was told that it may be: {error}")
                return


class ServedRun(AfarRun):
    """A run with a store that is on a server."""

    def _made_stores(self, seed: int) -> SimStores:
        self.served = ServedStores(seed, lambda name: self._disk, self._watched)
        self.bounds += self.served.bounds
        self._maker = Maker(self, random.Random(f"who makes streams in seed {seed}"))
        return self.served

    def _finding(self) -> Violation | None:
        mistake = self.served.mistake()
        return Violation("SS18", mistake) if mistake else super()._finding()

    def _places(self) -> list[Program]:
        return [*super()._places(), self._maker]

    def _begin(self) -> None:
        self.served.begin()
        super()._begin()

    def _cut_power(self) -> None:
        self.served.cut_power()
        super()._cut_power()

    def _heal(self) -> None:
        self.served.heal()
        super()._heal()


class AfarGroups(AfarRun, GroupRun):
    """Readers of a group."""


class AfarFollowers(AfarRun, FollowRun):
    """Programs that follow a stream."""


class ServedGroups(ServedRun, GroupRun):
    """Readers of a group on a server."""


class ServedFollowers(ServedRun, FollowRun):
    """Programs that follow a stream on a server."""


REMOTE_KINDS = (ServedGroups, AfarGroups, ServedFollowers, AfarFollowers)
"""What a seed runs, by turns."""
