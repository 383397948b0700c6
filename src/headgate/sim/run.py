"""One run (X2): from a seed to a verdict. Safety phase with faults, then heal, then liveness (reference: faults.md §6).

A run is repeated exactly by its seed: ``python -m headgate.sim --seed N --trace``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from headgate.model.graph import Partitioner
from headgate.model.ids import Generation
from headgate.model.life import Life
from headgate.model.manifest import LogEntry
from headgate.model.plan import Plan, make_plan
from headgate.protocol.supervision.supervisor import Finish
from headgate.sim import history
from headgate.sim.checkers import Checkers
from headgate.sim.disk import Contents, Disk, checkpoint_of
from headgate.sim.driver import Driver
from headgate.sim.env import Env, Options
from headgate.sim.faults import Fault, Faults
from headgate.sim.kinds import spec_of
from headgate.sim.listing import Listing, listed
from headgate.sim.loopgraphs import draw_loops
from headgate.sim.marks import Mark, Marks
from headgate.sim.storemodel import StoreModel
from headgate.sim.workload import Workload, draw_workload
from headgate.sim.world import Violation, World

MAX_PARALLELISM = 8

LIVENESS_MS = 900_000
"""Virtual time in which a healed pipeline must finish: a few of the supervisor's longest time-outs."""

EVENTS_MAX = 150_000
"""Events of one run, both phases; reaching it is a hang (I5). Usual runs need less than a tenth."""

LOOPS_RATE = 0.06
"""How often faults that end a generation strike where graphs have loops: there is more to do until a checkpoint."""

DRIVERS_AFTER_HEAL_MAX = 6
"""Drivers that may end without success after the faults are over: leftovers of the safety phase."""

DRIVERS_MAX = 40

PARALLELISM_MAX = 4

RESCALE_RATE = 0.7
"""How often a driver that follows another one has another parallelism."""


Drawing: TypeAlias = Callable[[random.Random, int], Workload]
"""Makes a workload for a parallelism."""


@dataclass(frozen=True, slots=True)
class Result:
    """Verdict of one run."""

    seed: int
    violation: Violation | None
    digest: str
    events_count: int
    virtual_ms: int
    marks: dict[Mark, int] = field(default_factory=dict)
    story: tuple[str, ...] = ()
    loops: bool = False


def has_loops(seed: int) -> bool:
    """Whether the graph of ``seed`` has loops, unless somebody says otherwise: every second one has."""
    return seed % 2 == 1


def run_seed(
    seed: int,
    *,
    loops: bool | None = None,
    draw: Drawing | None = None,
    is_traced: bool = False,
    events_max: int = EVENTS_MAX,
) -> Result:
    """Run one simulation; ``loops`` forces a graph with or without loops, ``draw`` a certain one with loops."""
    simulation = Simulation(seed, loops=loops, draw=draw, is_traced=is_traced, events_max=events_max)
    violation = simulation.run()
    world = simulation.env.world
    story = tuple(world.story) if violation or is_traced else ()
    marks = simulation.env.marks.reached
    return Result(seed, violation, world.digest, world.events_count, world.now_ms, marks, story, simulation.has_loops)


class Simulation:
    """The user of the pipeline: starts drivers, stops them, and damages files."""

    def __init__(
        self,
        seed: int,
        *,
        loops: bool | None = None,
        draw: Drawing | None = None,
        is_traced: bool = False,
        events_max: int = EVENTS_MAX,
    ) -> None:
        self._events_max = events_max
        self.has_loops = draw is not None or (has_loops(seed) if loops is None else loops)
        self._drain_dice = random.Random(f"drain at {seed}")
        world = World(seed, is_traced=is_traced)
        rng = world.random
        options = Options.draw(rng)
        faults = Faults.draw(rng, has_none=rng.random() < 0.03)
        faults.draw_drain(seed)
        faults.draw_denials(seed)
        faults.draw_looks(seed)
        faults.draw_lives(seed)
        if self.has_loops:
            options = options.with_loops(rng)
            faults.draw_loops(LOOPS_RATE)
            workload = (draw or draw_loops)(rng, options.parallelism)
        else:
            workload = draw_workload(rng, options.parallelism)
        plan = make_plan(workload.graph, options.parallelism, MAX_PARALLELISM)
        self.checkers = Checkers(workload, plan)
        note = self.checkers.observe
        disk, store = Disk(world, faults, note), StoreModel(note)
        disk.on_power_cut = self._cut_power
        self.env = Env(world, faults, Marks(), options, workload, plan, disk, store, note)
        self.drivers: list[Driver] = []
        self._sizes = random.Random(f"parallelism of {seed}")
        self._parallelism = options.parallelism
        self._listing = Listing(workload.graph, seed)
        self.plans: dict[Generation, Plan] = {}
        # The copies of a broadcast are as many as its receivers: no plain model knows when the number changed.
        # The same holds for records that each subtask emits at the end of a round.
        self._may_rescale = not any(
            spec_of(n).marks_rounds or any(e.partitioner is Partitioner.BROADCAST for e in (*n.inputs, *n.feedback))
            for n in workload.graph.nodes
        )
        self.is_finished = False
        self._is_healed = False
        self._ended_after_heal = 0
        self._was_stopped = False
        self._taken_away: Contents | None = None
        self._kept_for_repair: tuple[int, LogEntry] | tuple[str, bytes] | None = None

    def run(self) -> Violation | None:
        """Run both phases; return what was violated, if anything."""
        world, env = self.env.world, self.env
        try:
            self._plan_incidents(env.rng)
            self._start_driver()
            self._read_sinks()
            world.run(lambda: self.is_finished, env.options.safety_ms, self._events_max)
            self._heal()
            if not world.run(lambda: self.is_finished, world.now_ms + LIVENESS_MS, self._events_max):
                raise Violation("I5", f"not finished at {world.now_ms} ms after {world.events_count} events")
            if env.rng.random() < 0.2:
                self._start_driver()
            world.run(self._is_quiet, world.now_ms + LIVENESS_MS, self._events_max)
            self._check_end()
        except Violation as violation:
            world.tell("checker", str(violation))
            return violation
        return None

    # -- the user -----------------------------------------------------------------------------------------------

    def _plan_incidents(self, rng: random.Random) -> None:
        world, faults, safety = self.env.world, self.env.faults, self.env.options.safety_ms
        if faults.has(Fault.SECOND_DRIVER):
            world.at(rng.randint(1, safety // 2), self._start_second)
        if faults.has(Fault.STOP):
            world.at(rng.randint(1, safety // 2), self._stop)
        if faults.has(Fault.CANCEL):
            world.at(rng.randint(1, safety // 2), self._cancel)
        if faults.has(Fault.DRAIN):
            world.at(self._drain_dice.randint(1, safety // 2), self._drain)
        if faults.has(Fault.START_OVER):
            world.at(faults.owners.randint(50, safety // 2), self._start_over)
        if faults.has(Fault.DAMAGE):
            world.at(rng.randint(50, safety // 2), self._damage)

    def _start_over(self) -> None:
        """Remove the checkpoints, once there are any, while no driver runs; the same command follows (LV2)."""
        if self.is_finished or self._is_healed:
            return
        if not self.env.disk.manifests():
            self.env.world.at(100, self._start_over)
            return
        for driver in self.drivers:
            driver.kill("before the checkpoints are removed")
        self.env.world.tell("user", "removes the checkpoints")
        self._taken_away = self.env.disk.take_away()

    def _bring_back(self, stranger: Life, outcome: Finish) -> None:
        """The sinks remember the life whose checkpoints were removed: the user brings them back."""
        if self._taken_away is None:
            if stranger == self.env.disk.life:
                raise Violation("I4", f"refused by its own sinks: {outcome.failure}")
            return  # another driver began meanwhile, too
        self.env.world.tell("user", "brings the checkpoints back")
        self.env.disk.bring_back(self._taken_away)
        self._taken_away = None

    def _start_driver(self) -> None:
        if len(self.drivers) >= DRIVERS_MAX:
            raise Violation("I5", f"{DRIVERS_MAX} drivers in a row did not finish the pipeline")
        driver = Driver(self.env, self, len(self.drivers), self._plan())
        self.drivers.append(driver)
        driver.post(0, driver.begin)

    def _plan(self) -> Plan:
        """Return what the next driver runs: now and then at another parallelism, or with more splits, than before."""
        if self.drivers and self._may_rescale and self._sizes.random() < RESCALE_RATE:
            self._parallelism = self._sizes.randint(1, PARALLELISM_MAX)
        if self.drivers and self.drivers[-1].former_parallelism is not None:
            self._parallelism = self.drivers[-1].former_parallelism
        if self.drivers:
            self._listing.show_more()
        elif self._listing.grows:
            self.env.note(history.ListGrows())
        return make_plan(self._listing.graph(), self._parallelism, MAX_PARALLELISM)

    def _start_second(self) -> None:
        if not self.is_finished:
            if any(d.is_alive for d in self.drivers):
                self.env.marks.reach(Mark.TWO_DRIVERS)
            self._start_driver()

    def _stop(self) -> None:
        for driver in self.drivers:
            if driver.is_alive and not driver.is_paused:
                self._was_stopped = True
                driver.post(0, driver.request_stop)

    def _drain(self) -> None:
        for driver in self.drivers:
            if driver.is_alive and not driver.is_paused:
                self.env.note(history.DrainAsked())
                driver.post(0, driver.request_drain)

    def _cancel(self) -> None:
        for driver in self.drivers:
            if driver.is_alive and not driver.is_paused:
                driver.post(0, driver.request_cancel)

    def on_paused(self) -> None:
        """A driver does not answer: somebody may start the same command again."""
        if self.env.rng.random() < 0.5:
            self.env.world.at(self.env.rng.randint(1, 300), self._start_second)

    def on_died(self) -> None:
        """A driver crashed: somebody starts the same command again."""
        self._start_later()

    def on_finished(self, driver: Driver, outcome: Finish) -> None:
        """A driver ended by itself."""
        if outcome.failure is None and outcome.is_final:
            self.is_finished = True
            return
        if self._is_healed:
            self._ended_after_heal += 1
            if self._ended_after_heal > DRIVERS_AFTER_HEAL_MAX:
                raise Violation("I5", f"without any fault, driver after driver ends: {outcome.failure}")
        if driver.was_refused:
            self._repair(outcome)
        if driver.stranger is not None:
            self._bring_back(driver.stranger, outcome)
        if outcome.failure is not None and "restart" in outcome.failure.reason:
            self.env.marks.reach(Mark.GAVE_UP)
        self._start_later()

    def _start_later(self) -> None:
        self.env.world.at(self.env.rng.randint(1, 100), self._start_if_none)

    def _start_if_none(self) -> None:
        if not self.is_finished and not any(d.is_alive for d in self.drivers):
            if self._was_stopped:
                self.env.marks.reach(Mark.STOPPED_AND_CONTINUED)
            self._start_driver()

    def _read_sinks(self) -> None:
        for sink in self.env.workload.expected:
            self.env.note(self.env.store.read(sink))
        if not self._is_over():
            self.env.world.at(100 if not self._is_healed else 1_000, self._read_sinks)

    # -- damage -------------------------------------------------------------------------------------------------

    def _damage(self) -> None:
        """Damage the newest completed checkpoint while no driver runs (F10)."""
        disk, rng = self.env.disk, self.env.rng
        manifests = disk.manifests()
        if not manifests or self.is_finished:
            return
        for driver in self.drivers:
            driver.kill("before the damage")
        newest = manifests[-1]
        sequence = next(s for s, e in disk.log.items() if e is newest)
        files = [e.handle.path for e in newest.entries if e.handle.path]
        if files and rng.random() < 0.6:
            path = rng.choice(files)
            data = disk.files[path]
            self._kept_for_repair = (path, data)
            what = rng.choice(("flipped", "truncated", "missing"))
            if what == "missing":
                del disk.files[path]
            else:
                disk.files[path] = data[:-1] if what == "truncated" else bytes([data[0] ^ 1]) + data[1:]
        elif disk.hint >= sequence and rng.random() < 0.5:
            what, path = "missing", f"log/{sequence}"
            self._kept_for_repair = (sequence, disk.log.pop(sequence))
        else:
            what, path = "torn", f"log/{sequence}"
            self._kept_for_repair = (sequence, newest)
            disk.damaged_entries[sequence] = what
        self.env.world.tell("user", f"damage: {path} {what}")
        self.env.note(history.Damage(newest.checkpoint, f"{path} {what}"))

    def _repair(self, outcome: Finish) -> None:
        """Nothing starts any more: the user restores the damaged file from a copy."""
        disk, kept = self.env.disk, self._kept_for_repair
        if kept is None:
            raise Violation("I4", f"refused although nothing was damaged: {outcome.failure}")
        where, content = kept
        if isinstance(where, int):
            assert not isinstance(content, bytes)
            disk.damaged_entries.pop(where, None)
            disk.log[where] = content
        else:
            assert isinstance(content, bytes)
            disk.files[where] = content
        self.env.world.tell("user", f"repairs {where}")
        self.env.note(history.Damage(disk.manifests()[-1].checkpoint, "repaired"))

    # -- phases -------------------------------------------------------------------------------------------------

    def _cut_power(self) -> None:
        """Everything that runs dies with the machine, and so does what was not synced."""
        for driver in self.drivers:
            driver.kill("power cut")
        if self.env.disk.cut_power():
            self.env.marks.reach(Mark.POWER_CUT)

    def _heal(self) -> None:
        """End all faults: stopped processes go on, what is dead is started again."""
        self.env.world.tell("world", "heals")
        self._is_healed = True
        self.env.faults.heal()
        for driver in self.drivers:
            driver.resume()
            for worker in driver.spark.workers:
                worker.resume()
        self._start_if_none()

    def _is_over(self) -> bool:
        return self.is_finished and self._is_quiet()

    def _is_quiet(self) -> bool:
        return not any(d.is_alive or d.spark.workers for d in self.drivers)

    def _check_end(self) -> None:
        env = self.env
        for sink in env.workload.expected:
            env.note(env.store.read(sink))
        retained = {m.checkpoint for m in env.disk.manifests()}
        newest = max((m.generation for m in env.disk.manifests()), default=0)
        orphans = tuple(
            path
            for path in sorted(env.disk.files)
            if checkpoint_of(path) not in {*retained, *env.disk.aside} and path.endswith(f".g{newest}")
        )
        alive = tuple(p.name for d in self.drivers for p in (d, *d.spark.workers) if p.is_alive)
        env.note(history.Inventory(env.store.undecided(), orphans, alive))
        gone = sorted(env.disk.aside_files - env.disk.files.keys())
        if gone:
            raise Violation("I4", f"{gone[0]} of a checkpoint that was skipped is gone")
        self._note_end()
        self.checkers.at_end()

    def _note_end(self) -> None:
        """Tell how far the sources had read, by the final checkpoint."""
        env, final = self.env, self.env.disk.manifests()[-1]
        assert final.is_final
        read: dict[str, int] = {}
        for entry in final.entries:
            data = env.disk.read(entry.handle)
            if not isinstance(data, bytes):
                raise Violation("I4", f"the final checkpoint {final.checkpoint} cannot be read: {data}")
            read.update(msgspec.msgpack.decode(data)["state"]["positions"])
        sizes = listed(node for vertex in self.plans[final.generation].vertices for node in vertex.nodes)
        env.note(history.Ended(tuple(sorted(read.items())), tuple(sorted(sizes.items()))))
        if any(read[name] < size for name, size in sizes.items()):
            env.marks.reach(Mark.DRAINED_PARTLY)
