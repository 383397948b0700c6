"""Programs whose store is afar: its events are on an object store, or all of it is behind a server (SM93, SM94).

Everything else is as ``groups`` and ``following`` have it, and so is what must hold. Readers fetch ahead where requests
travel, with little room here, so that bounds are met by short streams. Counterparts: ``machine.serving``,
``store.read_ahead``. What is drawn here is drawn apart from everything else.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from headgate.sim.machine.replacing import replaced
from headgate.sim.machine.serving import ServedStores
from headgate.sim.machine.store import SimStores
from headgate.sim.machine.tasks import SimProcess
from headgate.sim.product.run import Result
from headgate.sim.streams.following import FollowRun
from headgate.sim.streams.groups import GroupRun
from headgate.sim.streams.places import EVENTS_MAX, PlacesRun
from headgate.sim.world import Violation
from headgate.storage.base import Storage
from headgate.store import fetching, read_ahead
from headgate.store import store as stores
from headgate.store.fetching import Fetch, Fetching
from headgate.threads import Threads

SMALL: tuple[tuple[object, str, int], ...] = (
    (read_ahead, "RUN_BYTES", 2_000),
    (read_ahead, "AHEAD_BYTES", 4_000),
    (read_ahead, "RUNS_MAX", 3),
    (fetching, "THREADS", 2),
)
"""Bounds of reading ahead that these seeds have instead of the usual ones."""

UNDER_WAY_MS = 5_000
"""A request takes less virtual time."""


class AfarRun(PlacesRun):
    """A run whose events are on an object store."""

    fetched_count = 0
    """Requests that were made ahead."""

    def run(self) -> Violation | None:
        """See ``PlacesRun``."""
        self._disk.is_afar = True
        self._fetching: dict[SimProcess, list[Fetching]] = {}
        with ExitStack() as stack:
            for owner, name, value in SMALL:
                stack.enter_context(replaced(owner, name, value))
            stack.enter_context(replaced(stores, "Fetching", self._watched_fetching))
            stack.enter_context(_collecting_when_told())
            return super().run()

    def on_work_done(self, process: SimProcess) -> None:
        """Its readers are gone, and so is what they had fetched (S83)."""
        gc.collect()
        self.tasks.park(UNDER_WAY_MS)
        left = sum(fetching.taken_bytes for fetching in self._fetching.get(process, ()))
        if left:
            self.fail("S83", f"{process.name} has done its work and still keeps {left} bytes that were fetched ahead")

    def _watched_fetching(self, threads: Threads) -> Fetching:
        made = WatchedFetching(threads, self)
        self._fetching.setdefault(self.tasks.current.process, []).append(made)
        return made


@contextmanager
def _collecting_when_told() -> Iterator[None]:
    """Collect no garbage by chance: readers that are dropped give up what they have asked for."""
    usual = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if usual:
            gc.enable()


class WatchedFetching(Fetching):
    """Counts what is fetched."""

    def __init__(self, threads: Threads, run: AfarRun) -> None:
        super().__init__(threads)
        self._run = run

    def begin(self, storage: Storage, path: str, offset: int, size_bytes: int) -> Fetch | None:
        """See ``Fetching``."""
        found = super().begin(storage, path, offset, size_bytes)
        self._run.fetched_count += found is not None
        return found


class ServedRun(AfarRun):
    """A run whose store is behind a server."""

    def run(self) -> Violation | None:
        """See ``PlacesRun``."""
        with self.served.quicker():
            return super().run()

    def _made_stores(self, seed: int) -> SimStores:
        self.served = ServedStores(seed, lambda name: self._disk, self._watched)
        return self.served

    def _finding(self) -> Violation | None:
        mistake = self.served.mistake()
        return Violation("SS18", mistake) if mistake else super()._finding()

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
    """Readers of a group behind a server."""


class ServedFollowers(ServedRun, FollowRun):
    """Programs that follow a stream behind a server."""


KINDS: tuple[Callable[..., PlacesRun], ...] = (ServedGroups, AfarGroups, ServedFollowers, AfarFollowers)
"""What a seed runs, by turns."""


def drawn(seed: int, *, is_traced: bool = False, events_max: int = 3 * EVENTS_MAX) -> PlacesRun:
    """Return the run of a seed."""
    return KINDS[seed % len(KINDS)](seed, is_traced=is_traced, events_max=events_max)


def run_seed(seed: int, *, is_traced: bool = False, events_max: int = 3 * EVENTS_MAX) -> Result:
    """Run one seed."""
    run = drawn(seed, is_traced=is_traced, events_max=events_max)
    violation = run.run()
    story = tuple(run.world.story) if violation or is_traced else ()
    return Result(seed, violation, run.world.digest, run.world.events_count, run.world.now_ms, story)
