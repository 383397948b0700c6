"""One run of the product: a pipeline of the public API and its user, faults, then healed, and a verdict.

The user starts the pipeline, starts it again whenever it ends before all input is processed, perhaps at another
parallelism, and sometimes stops it, cancels it, or starts it a second time beside itself. A seed decides everything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import headgate as hg
from headgate.connectors.files.commit import read_committed
from headgate.errors import HeadgateError
from headgate.model.definition import PipelineDefinition
from headgate.model.ids import CheckpointId
from headgate.model.progress import Progress
from headgate.runtime.driver.driver import Driver
from headgate.sim.machine.disk import Disk, SimStorage
from headgate.sim.machine.faults import Fault, Faults
from headgate.sim.machine.sockets import Network
from headgate.sim.machine.surroundings import SimSurroundings
from headgate.sim.machine.tasks import SimProcess, Tasks
from headgate.sim.product.source import PacedRows
from headgate.sim.product.spark import FINGERPRINT, SimSpark
from headgate.sim.product.workloads import WORKLOADS, draw_rows
from headgate.sim.world import Violation, World
from headgate.storage import backends
from headgate.storage.base import Storage

EVENTS_MAX = 400_000
"""Of both phases; reaching it is a hang. Usual runs need a hundredth."""

LIVENESS_MS = 900_000
"""Virtual time in which a healed pipeline must finish."""

DRIVERS_MAX = 60
DRIVERS_AFTER_HEAL_MAX = 6
"""Drivers that may end without success when nothing fails any more: leftovers of what failed before."""


@dataclass(frozen=True, slots=True)
class Result:
    """Verdict of one run."""

    seed: int
    violation: Violation | None
    digest: str
    events_count: int
    virtual_ms: int
    story: tuple[str, ...]


class Watcher:
    """Hears what users hear, and puts it into the story."""

    def __init__(self, tell: Callable[[str], None], on_checkpoint: Callable[[], None]) -> None:
        self._tell = tell
        self._on_checkpoint = on_checkpoint

    def on_progress(self, progress: Progress) -> None:
        """Numbers are not part of the story."""

    def on_restart(self, reason: str, delay_ms: int) -> None:
        """See ``Observer``."""
        self._tell(f"restarts in {delay_ms} ms: {reason}")

    def on_note(self, text: str) -> None:
        """See ``Observer``."""
        self._tell(text)

    def on_checkpoint(self, checkpoint: CheckpointId, duration_ms: int, size_bytes: int) -> None:
        """See ``Observer``."""
        self._tell(f"checkpoint {checkpoint} completed in {duration_ms} ms")
        self._on_checkpoint()


@dataclass(slots=True)
class Started:
    """One start of the pipeline."""

    process: SimProcess
    spark: SimSpark
    driver: Driver | None = None


class Run:
    """The user of one pipeline, and the world's malice."""

    def __init__(self, seed: int, *, is_traced: bool = False) -> None:
        self.world = World(seed, is_traced=is_traced)
        rng = self.world.random
        self.tasks = Tasks(self.world)
        self.faults = Faults(rng)
        self.network = Network(self.tasks, rng.choice((0, 1, 3)))
        self.disks: dict[str, Disk] = {}
        self.started: list[Started] = []
        self.is_finished = False
        self._is_verified = False
        self._ended_after_heal = 0
        self._clock_shift_ms = 0
        self._parallelism = rng.choice((1, 2, 2, 3))
        self._attempts = rng.choice((1, 1, 2))
        self._splits = rng.choice((1, 2, 3))
        self._rows = draw_rows(rng)
        self._workloads = rng.sample(WORKLOADS, rng.choice((1, 1, 2, 3)))
        self._batch_rows = rng.choice((2, 4, 8))
        self._pause_ms = rng.choice((5, 10, 20))
        self._checkpointing = hg.Checkpointing(
            interval=f"{rng.choice((10, 20, 40, 80))}ms",
            dir="sim://checkpoints",
            timeout=f"{rng.choice((500, 1_000, 3_000))}ms",
            tolerable_failures=rng.choice((0, 2, 5)),
            retained=rng.choice((1, 2, 3)),
            max_concurrent=rng.choice((1, 1, 2)),
        )
        self._roll_interval = rng.choice((0, 0, "100ms", "1m"))
        self._inline_bytes_max = rng.choice((0, 0, 1_000, 20_000))
        self._safety_ms = rng.choice((1_000, 3_000))
        self._strike_rate = rng.choice((0.002, 0.01, 0.03))
        """How often, every few milliseconds, a fault that is switched on strikes somebody, as long as it may."""
        self._after_checkpoint_rate = rng.choice((0, 0.2, 0.5))
        """How often something dies right behind a completed checkpoint, which is then restored."""

    def run(self) -> Violation | None:
        """Run both phases; return what was violated, if anything."""
        world = self.world
        backends.OPENERS["sim"] = self._open
        try:
            self._start()
            world.at(10, self._strike)
            world.run(lambda: self.is_finished, self._safety_ms, EVENTS_MAX)
            self._heal()
            if not world.run(lambda: self.is_finished, world.now_ms + LIVENESS_MS, EVENTS_MAX):
                raise Violation("I5", f"not finished at {world.now_ms} ms after {world.events_count} events")
            self.tasks.spawn(SimProcess(self.tasks, "reader"), self._verify, "main")
            if not world.run(lambda: self._is_verified, world.now_ms + LIVENESS_MS, EVENTS_MAX):
                raise Violation("I5", "the output cannot be read")
        except Violation as violation:
            world.tell("checker", str(violation))
            return violation
        finally:
            self.tasks.take_down()
            del backends.OPENERS["sim"]
        return None

    def _open(self, name: str) -> Storage:
        root = name.split("/")[0]
        return SimStorage(self.disks.setdefault(root, Disk(self.tasks, self.faults, root)))

    def _surroundings(self, process: SimProcess) -> SimSurroundings:
        around = SimSurroundings(process, self.network)
        around.wall_shift_ms = self._clock_shift_ms
        return around

    # -- the pipeline ---------------------------------------------------------------------------------------------

    def _definition(self) -> PipelineDefinition:
        """Build the pipeline as a user's program does, but for a limit that the public API does not offer."""
        found = self._pipeline().definition(self._parallelism)
        checkpoints = replace(found.config.checkpoints, inline_bytes_max=self._inline_bytes_max)
        return replace(found, config=replace(found.config, checkpoints=checkpoints))

    def _pipeline(self) -> hg.Pipeline:
        p = hg.Pipeline(
            "p",
            parallelism=self._parallelism,
            max_parallelism=8,
            checkpointing=self._checkpointing,
            restart=hg.FixedDelay(delay="20ms"),
        )
        source = PacedRows(
            self._rows,
            splits=self._splits,
            batch_rows=self._batch_rows,
            pause_ms=self._pause_ms,
            now_ms=lambda: self.world.now_ms,
        )
        rows = p.source(source)
        for workload in self._workloads:
            sink = hg.FileSink(f"sim://{workload.name}", roll_interval=self._roll_interval)
            workload.build(rows).sink(sink, name=workload.name)
        return p

    # -- the user ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if len(self.started) >= DRIVERS_MAX:
            raise Violation("I5", f"{DRIVERS_MAX} drivers in a row did not finish the pipeline")
        process = SimProcess(self.tasks, f"d{len(self.started)}", self._on_driver_gone)
        spark = SimSpark(process, self.network, self.faults, self._attempts, self._surroundings)
        started = Started(process, spark)
        self.started.append(started)
        self.tasks.spawn(process, lambda: self._drive(started), "main")

    def _drive(self, started: Started) -> None:
        """What the user's program does in its process."""
        process = started.process

        def tell(text: str) -> None:
            self.world.tell(process.name, text)

        around = self._surroundings(process)
        try:
            definition = started.spark.definition = self._definition()
            watcher = Watcher(tell, self._after_checkpoint)
            driver = started.driver = Driver(definition, started.spark, watcher, FINGERPRINT, around=around)
        except HeadgateError as problem:
            tell(str(problem))
            process.end(1)
        driver.start()
        driver.join()
        error = driver.result.exception()
        if error is None:
            self.is_finished = self.is_finished or driver.result.result().is_finished
            process.end(0)
        tell(f"{type(error).__name__}: {error}")
        process.end(1)

    def _on_driver_gone(self, code: int) -> None:
        if self.faults.is_healed and not self.is_finished:
            self._ended_after_heal += 1
            if self._ended_after_heal > DRIVERS_AFTER_HEAL_MAX:
                raise Violation("I5", "without any fault, driver after driver ends")
        if self.world.random.random() < 0.3:
            self._parallelism = self.world.random.choice((1, 2, 3))
        self.world.at(self.world.random.randint(1, 200), self._start_if_none)

    def _start_if_none(self) -> None:
        if not self.is_finished and not any(one.process.is_alive for one in self.started):
            self._start()

    def _ask(self, fault: Fault) -> None:
        """Ask the running driver to stop or to cancel, as Ctrl-C does."""
        driver = self.started[-1].driver
        if driver is None or not self.started[-1].process.is_alive:
            return
        ask = driver.stop if fault is Fault.STOP else driver.cancel
        self.world.tell("user", f"asks d{len(self.started) - 1} to {fault.title}")
        self.tasks.spawn(self.started[-1].process, ask, "signal")

    # -- faults -----------------------------------------------------------------------------------------------------

    def _strike(self) -> None:
        """Every few milliseconds something may happen to somebody."""
        if self.faults.is_healed or self.is_finished:
            return
        rng = self.world.random
        for fault, strike in STRIKES.items():
            is_due = self.faults.has(fault) and rng.random() < self._strike_rate * fault.rate
            if is_due and self.faults.spend():
                strike(self, fault)
        self.world.at(rng.randint(1, 20), self._strike)

    def _after_checkpoint(self) -> None:
        rng = self.world.random
        deadly = [f for f in (Fault.WORKER_CRASH, Fault.DRIVER_CRASH, Fault.POWER_CUT) if self.faults.has(f)]
        if deadly and rng.random() < self._after_checkpoint_rate and self.faults.spend():
            fault = rng.choice(deadly)
            self.world.at(rng.randint(0, 15), STRIKES[fault], self, fault)

    def _targets(self, fault: Fault) -> list[SimProcess]:
        if fault in (Fault.DRIVER_CRASH, Fault.DRIVER_PAUSE):
            return [one.process for one in self.started if one.process.is_alive]
        return [worker for one in self.started for worker in one.spark.workers if worker.is_alive]

    def _crash(self, fault: Fault) -> None:
        targets = self._targets(fault)
        if targets:
            self.world.random.choice(targets).kill()

    def _pause(self, fault: Fault) -> None:
        targets = self._targets(fault)
        if targets:
            target = self.world.random.choice(targets)
            target.pause()
            self.world.at(self.world.random.choice((50, 500, 7_000)), target.resume)
            if fault is Fault.DRIVER_PAUSE and self.world.random.random() < 0.5:
                self.world.at(self.world.random.randint(1, 300), self._start)  # somebody takes it for dead

    def _break_link(self, fault: Fault) -> None:
        if self.network.open:
            socket = self.world.random.choice(self.network.open)
            self.world.random.choice((socket.reset, socket.cut))()

    def _cut_power(self, fault: Fault) -> None:
        """The whole machine: every process dies, and what was not synced is gone."""
        self.world.tell("world", "power cut")
        for one in self.started:
            for process in (*one.spark.workers, one.process):
                process.kill()
        for disk in self.disks.values():
            disk.cut_power()

    def _step_clock(self, fault: Fault) -> None:
        self._clock_shift_ms += self.world.random.choice((-3_600_000, -500, 500, 3_600_000))

    def _start_second(self, fault: Fault) -> None:
        if not self.is_finished:
            self._start()

    def _heal(self) -> None:
        self.world.tell("world", "heals")
        self.faults.heal()
        for one in self.started:
            for process in (one.process, *one.spark.workers):
                process.resume()
        self._start_if_none()

    # -- the verdict ------------------------------------------------------------------------------------------------

    def _verify(self) -> None:
        for workload in self._workloads:
            frame = read_committed(f"sim://{workload.name}")
            found = Counter(frame.select(workload.columns).rows() if frame.width else [])
            expected = workload.expected(self._rows)
            if found != expected:
                lost, more = sorted(expected - found), sorted(found - expected)
                raise Violation("I1", f"{workload.name} lost {len(lost)} {lost[:4]}, has {len(more)} more {more[:4]}")
        self._is_verified = True


STRIKES: dict[Fault, Callable[[Run, Fault], None]] = {
    Fault.WORKER_CRASH: Run._crash,
    Fault.DRIVER_CRASH: Run._crash,
    Fault.WORKER_PAUSE: Run._pause,
    Fault.DRIVER_PAUSE: Run._pause,
    Fault.LINK_LOSS: Run._break_link,
    Fault.POWER_CUT: Run._cut_power,
    Fault.CLOCK_STEP: Run._step_clock,
    Fault.STOP: Run._ask,
    Fault.CANCEL: Run._ask,
    Fault.SECOND_DRIVER: Run._start_second,
}


def run_seed(seed: int, *, is_traced: bool = False) -> Result:
    """Run one seed."""
    run = Run(seed, is_traced=is_traced)
    violation = run.run()
    world = run.world
    story = tuple(world.story) if violation or is_traced else ()
    return Result(seed, violation, world.digest, world.events_count, world.now_ms, story)
