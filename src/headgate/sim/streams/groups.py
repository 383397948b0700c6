"""Readers that share streams as a group, in the machine room (SM90, SM91).

Readers join, read, commit, pass markers, leave, die, and are stopped for longer than their leases; streams are written,
with transactions, scaled and truncated meanwhile; somebody asks for checkpoints, goes back to them, and begins anew.
The store is the product's own. What must hold is judged in ``group_judge``; nothing here is drawn by other kinds of
runs.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import cast

from headgate.errors import HeadgateError, TruncatedError
from headgate.sim.machine.disk import Disk
from headgate.sim.machine.faults import Fault, Faults
from headgate.sim.machine.store import SimStores
from headgate.sim.machine.tasks import SimProcess, Tasks
from headgate.sim.product.run import Result
from headgate.sim.streams.group_judge import GroupJudge, WatchedCatalogue
from headgate.sim.streams.group_readers import GROUP, SCHEMA, STORE, Member, Place, Writer
from headgate.sim.streams.scaled_streams import Scaler
from headgate.sim.world import Violation, World
from headgate.store import store as stores
from headgate.store.catalogue.base import Catalogue
from headgate.store.reader_groups import ReaderGroup
from headgate.store.retention import Retention
from headgate.store.store import Store
from headgate.store.streams import StreamDefinition

EVENTS_MAX = 200_000
"""Of both phases; reaching it is a hang."""

LIVENESS_MS = 120_000
"""Virtual time in which a healed group must have read everything."""

STOPPED_MS_MAX = 2_000
RESETS_MAX = 3
LAST = "the last one"
"""The checkpoint that is asked for when nothing fails any more."""


class GroupRun:
    """The users of one group, and the world's malice."""

    def __init__(self, seed: int, *, is_traced: bool = False, events_max: int = EVENTS_MAX) -> None:
        self._events_max = events_max
        self.world = World(seed, is_traced=is_traced)
        rng = self._rng = random.Random(f"reader groups of seed {seed}")
        self.tasks = Tasks(self.world)
        self.faults = Faults(rng)
        self._disk = Disk(self.tasks, self.faults, "store")
        self.judge = GroupJudge(lambda checkpoint: self._behind.group_cuts(GROUP, checkpoint))
        self._stores = SimStores(lambda name: self._disk, self._watched)
        self._behind = self._stores.behind("store")
        self.streams = ("a", "b")[: rng.choice((1, 1, 2))]
        self._begins = rng.choice(("earliest", "earliest", "latest"))
        self._kept = rng.choice((1, 2, 3))
        self._safety_ms = rng.choice((1_500, 5_000))
        self.writers = [Writer(self, name, random.Random(rng.random())) for name in self.streams]
        self.members = [Member(self, n, random.Random(rng.random())) for n in range(rng.choice((1, 2, 3, 4)))]
        self.scaler = Scaler(seed, STORE, self.streams)
        self.truncates = rng.random() < 0.5
        self.asked_count = self.truncated_count = 0
        self._resets_left, self._resetting = rng.choice((0, 1, RESETS_MAX)), 0
        self._stopped: list[SimProcess] = []
        self._is_verified = False

    def run(self) -> Violation | None:
        """Run both phases; return what was violated, if anything."""
        stores.OPENERS["sim"] = self._stores.open
        try:
            for name in self.streams:
                definition = StreamDefinition(name, SCHEMA, self._rng.choice((1, 2, 3)), "k")
                self._behind.create_stream(definition, 0, if_not_exists=False)
            for place in self._places():
                self.world.at(self._rng.randint(0, 200), place.start)
            self.world.at(20, self._strike)
            self._again_and_again(self._look_after, 10, 150)
            if self.scaler.is_drawn:
                self._again_and_again(self._scale, 20, 200)
            self.world.run(lambda: self.judge.finding is not None, self._safety_ms, self._events_max)
            self._heal()
            self._until(lambda: all(place.is_over for place in self._places()), "not everything is read")
            self._until(lambda: LAST in self.judge.completed, "a checkpoint is not complete")
            self.tasks.spawn(SimProcess(self.tasks, "verifier"), self._verify, "main")
            self._until(lambda: self._is_verified, "the store cannot be verified")
        except Violation as violation:
            return self._told(violation)
        except AssertionError as error:
            return self._told(Violation("assertion", str(error)))
        finally:
            self.tasks.take_down()
            del stores.OPENERS["sim"]
        return None

    def group(self, store: Store) -> ReaderGroup:
        """Return the group, which whoever comes first makes."""
        return store.reader_group(GROUP, self.streams, start=self._begins, checkpoints_kept=self._kept)

    def is_over(self) -> bool:
        """Whether nothing will ever be left to read."""
        if not self.faults.is_healed or not all(writer.is_done for writer in self.writers):
            return False
        if self._resetting or GROUP not in self._behind.groups():
            return False
        return not self._behind.find_group(GROUP).group.readable

    # -- the world --------------------------------------------------------------------------------------------------

    def _watched(self, behind: Catalogue) -> Catalogue:
        return cast(Catalogue, WatchedCatalogue(behind, self.judge, lambda: self.tasks.current.process.name))

    def _places(self) -> list[Place]:
        return [*self.writers, *self.members]

    def _told(self, violation: Violation) -> Violation:
        self.world.tell("checker", str(violation))
        return violation

    def _until(self, is_over: Callable[[], bool], problem: str) -> None:
        world, judge = self.world, self.judge
        is_done = world.run(
            lambda: judge.finding is not None or is_over(), world.now_ms + LIVENESS_MS, self._events_max
        )
        if judge.finding is not None:
            raise judge.finding
        if not is_done:
            raise Violation("I5", f"{problem} at {world.now_ms} ms after {world.events_count} events")

    def _strike(self) -> None:
        """Perhaps somebody dies, or stops, or everybody dies with the power."""
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
        """Somebody takes the one that is stopped for dead, and starts another one."""
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
        self.tasks.spawn(SimProcess(self.tasks, "user"), self._ask_for_last, "main")

    # -- other users ------------------------------------------------------------------------------------------------

    def _again_and_again(self, what: Callable[[], None], least_ms: int, most_ms: int) -> None:
        """Have a process of its own do ``what``, as long as something may fail."""
        if self.faults.is_healed:
            return
        self.tasks.spawn(SimProcess(self.tasks, "user"), lambda: self._try(what), "main")
        self.world.at(self._rng.randint(least_ms, most_ms), self._again_and_again, what, least_ms, most_ms)

    def _try(self, what: Callable[[], object]) -> None:
        try:
            what()
        except HeadgateError as problem:
            self.world.tell("user", str(problem))

    def _scale(self) -> None:
        problem = self.scaler.scale()
        if problem:
            self.world.tell("scaler", problem)

    def _look_after(self) -> None:
        """Ask for a checkpoint, ask how far one is, go back, give one up, truncate, or look at numbers."""
        rng, store = self._rng, Store.shared(STORE)
        group, chance = store.reader_group(GROUP), rng.random()
        if chance < 0.35:
            self.asked_count += 1
            group.checkpoint(f"c{self.asked_count}")
        elif chance < 0.5:
            for name, is_complete in group.checkpoints().items():
                if group.checkpoint(name) and not is_complete:
                    group.cut(name)
        elif chance < 0.6 and self._resets_left:
            self._resets_left -= 1
            self._resetting += 1
            try:
                self._reset(group)
            finally:
                self._resetting -= 1
        elif chance < 0.7:
            names = sorted(group.checkpoints())
            if names:
                group.forget_checkpoint(rng.choice(names))
        elif chance < 0.85 and self.truncates:
            self._truncate(store)
        else:
            self.world.tell("user", f"{group.unread_bytes()} bytes for {group.readers()}, at {group.cut()}")

    def _ask_for_last(self) -> None:
        group: list[ReaderGroup] = []  # one for all tries: who asks watches, too
        while LAST not in self.judge.completed:
            if not group:
                self._try(lambda: group.append(self.group(Store.shared(STORE))))
            else:
                self._try(lambda: group[0].checkpoint(LAST))
            self.tasks.park(50)

    def _reset(self, group: ReaderGroup) -> None:
        complete = [name for name, is_complete in group.checkpoints().items() if is_complete]
        chance = self._rng.random()
        if complete and chance < 0.6:
            try:
                group.reset(checkpoint=self._rng.choice(complete))
            except TruncatedError as error:
                self.judge.fail("RG17", f"a checkpoint is kept, and what it needs is not: {error}")
        elif chance < 0.8:
            group.reset(cuts=list(group.cut().values()))
        elif not self.truncates:
            group.reset(start=self._rng.choice(("earliest", "latest")))

    def _truncate(self, store: Store) -> None:
        """Truncate as its retention says, which keeps nothing that nobody holds (RG17)."""
        name = self._rng.choice(self.streams)
        store.set_retention(name, Retention(age="1ms"))
        self.truncated_count += sum(store.retain(name).positions.values()) > 0

    def _verify(self) -> None:
        store = Store.shared(STORE)
        group = store.reader_group(GROUP)
        if group.unread_bytes():
            self.judge.fail("RG20", f"{group.unread_bytes()} bytes are unread when everything is read")
        self.judge.check({name: store.describe(name).ends for name in self.streams})
        store.collect_orphans()  # nobody writes any more
        problems = [problem for problem in store.fsck() if not problem.is_harmless]
        mended = store.repair()
        store.delete_reader_group(GROUP)
        left = [name for name in self.streams if store.holds(name)]
        if problems or mended or left:
            self.judge.fail("RG24", f"the check finds {problems[:3]}, mends {mended}; the deleted group holds {left}")
        self._is_verified = True


def run_seed(seed: int, *, is_traced: bool = False, events_max: int = EVENTS_MAX) -> Result:
    """Run one seed."""
    run = GroupRun(seed, is_traced=is_traced, events_max=events_max)
    violation = run.run()
    story = tuple(run.world.story) if violation or is_traced else ()
    return Result(seed, violation, run.world.digest, run.world.events_count, run.world.now_ms, story)
