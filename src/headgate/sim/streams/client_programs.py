"""Programs of users that run in a store, again and again, until they have done their work (SM90, SM92).

A run has two phases as those of pipelines have: faults, then none. Programs die, are stopped, and are started again,
perhaps beside the one that was stopped; all of them die with the power. Counterparts: ``groups`` and ``following`` say
which programs there are and what must hold.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from headgate.errors import HeadgateError
from headgate.sim.machine.disk import Disk
from headgate.sim.machine.faults import Fault, Faults
from headgate.sim.machine.store import SimStores
from headgate.sim.machine.tasks import SimProcess
from headgate.sim.product.run import Simulation
from headgate.sim.streams.group_readers import Place
from headgate.sim.world import Violation
from headgate.store import store as stores
from headgate.store.catalogue.base import Catalogue

EVENTS_MAX = 200_000
"""Of both phases; reaching it is a hang."""

STOPPED_MS_MAX = 2_000


class ProgramsRun(Simulation):
    """The programs of one store, and what goes wrong."""

    SUBJECT = ""
    """In the name of the generator of this kind of runs."""
    LIVENESS_MS = 120_000

    def __init__(self, seed: int, *, is_traced: bool = False, events_max: int = EVENTS_MAX) -> None:
        super().__init__(seed, is_traced=is_traced, events_max=events_max)
        self._rng = random.Random(f"{self.SUBJECT} of seed {seed}")
        self.faults = Faults(self._rng)
        self._disk = Disk(self.tasks, self.faults, "store")
        self._stores = self._made_stores(seed)
        self._stopped: list[SimProcess] = []
        self.bounds.append((stores, "OPENERS", {**stores.OPENERS, "sim": self._stores.open}))
        self._draw()

    def _run(self) -> None:
        try:
            self._begin()
            self.world.run(lambda: self._finding() is not None, self._safety_ms, self._events_max)
            self._heal()
            self._until(lambda: all(place.is_over for place in self._places()), "not everything is read")
            self._end()
            self.tasks.spawn(SimProcess(self.tasks, "verifier"), self._verify, "main")
            self._until(lambda: self._is_verified, "the store cannot be verified")
        except AssertionError as error:
            raise Violation("assertion", str(error)) from error
        finally:
            self.tasks.take_down()

    def _draw(self) -> None:
        """Draw what there is in this kind of runs."""
        raise NotImplementedError

    # -- what kinds of runs say ---------------------------------------------------------------------------------------

    def fail(self, rule: str, problem: str) -> None:
        """See ``Around``."""
        raise NotImplementedError

    def on_work_done(self, process: SimProcess) -> None:
        """See ``Around``."""

    def _places(self) -> Sequence[Place]:
        raise NotImplementedError

    def _begin(self) -> None:
        """Have everything that happens in the first phase begin."""
        raise NotImplementedError

    def _verify(self) -> None:
        """Look at the store when all is over, and set ``_is_verified``."""
        raise NotImplementedError

    def _end(self) -> None:
        """Wait for what else has to happen when all programs have done their work."""

    def _made_stores(self, seed: int) -> SimStores:
        return SimStores(lambda name: self._disk, self._watched)

    def _watched(self, behind: Catalogue) -> Catalogue:
        return behind

    # -- the world --------------------------------------------------------------------------------------------------

    def _strike(self) -> None:
        """Perhaps a process dies, or stops, or everybody dies with the power."""
        rng, faults = self._rng, self.faults
        if faults.is_healed:
            return
        place = rng.choice(self._places())
        process = place.process
        if faults.has(Fault.POWER_CUT) and rng.random() < 0.02 and faults.spend():
            self._cut_power()
        elif process is not None and process.is_alive and rng.random() < 0.3:
            if faults.has(Fault.WORKER_CRASH) and rng.random() < 0.5 and faults.spend():
                process.kill()
            elif faults.has(Fault.WORKER_PAUSE) and faults.spend():
                process.pause()
                self._stopped.append(process)
                self.world.at(rng.randint(50, STOPPED_MS_MAX), process.resume)
                if rng.random() < 0.5:
                    self.world.at(rng.randint(1, STOPPED_MS_MAX), self._start_beside, place)
        self.world.at(rng.randint(20, 200), self._strike)

    def _start_beside(self, place: Place) -> None:
        """A user takes the one that is stopped for dead, and starts another one."""
        if not self.faults.is_healed and not place.is_done:
            place.start()

    def _cut_power(self) -> None:
        self.world.tell("world", "the power is cut")
        for place in self._places():
            if place.process is not None and place.process.is_alive:
                place.process.kill()
        self._disk.cut_power()

    def _heal(self) -> None:
        self.world.tell("world", "heals")
        self.faults.heal()
        for process in self._stopped:
            process.resume()

    # -- other users ------------------------------------------------------------------------------------------------

    def _again_and_again(self, what: Callable[[], None], least_ms: int, most_ms: int) -> None:
        """Have processes of their own do ``what``, as long as something may fail."""
        self._repeat("user", lambda: self._try(what), lambda: self._rng.randint(least_ms, most_ms))

    def _try(self, what: Callable[[], object]) -> None:
        try:
            what()
        except HeadgateError as problem:
            self.world.tell("user", str(problem))
