"""What happens to processes, connections and clocks of a run, and when. Counterpart: ``harm`` is about disks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from headgate.runtime.driver.driver import Driver
from headgate.sim.machine.disk import Disk
from headgate.sim.machine.faults import Fault, Faults
from headgate.sim.machine.sockets import Network
from headgate.sim.machine.tasks import SimProcess, Tasks
from headgate.sim.product.spark import SimSpark
from headgate.sim.product.workloads import Splits
from headgate.sim.world import World

DEADLY = (Fault.WORKER_CRASH, Fault.DRIVER_CRASH, Fault.POWER_CUT)


@dataclass(slots=True)
class Started:
    """One start of the pipeline.

    Attributes:
        listed: what its sources list.
        restored_from: the parallelism at which the checkpoint was taken that it restored last; 0: none.
    """

    process: SimProcess
    spark: SimSpark
    listed: list[Splits]
    driver: Driver | None = None
    restored_from: int = 0


class Struck(Protocol):
    """The run that is struck."""

    world: World
    tasks: Tasks
    faults: Faults
    network: Network
    disks: dict[str, Disk]
    started: list[Started]
    is_finished: bool
    clock_shift_ms: int

    def start(self) -> None:
        """Start the pipeline, whatever else runs it."""

    def processes(self) -> list[SimProcess]:
        """Return those that die when the power is cut."""


class Strikes:
    """Every few milliseconds something may happen to a process."""

    def __init__(self, run: Struck) -> None:
        self._run = run
        rng = run.world.random
        self._rate = rng.choice((0.005, 0.02, 0.05))
        """How often a fault that is switched on strikes a process, as long as it may."""
        self._after_checkpoint_rate = rng.choice((0.1, 0.3, 0.6))
        """How often something dies right after a completed checkpoint, which is then restored."""

    def strike(self) -> None:
        """Perhaps strike, and come back later."""
        run, rng = self._run, self._run.world.random
        if run.faults.is_healed or run.is_finished:
            return
        for fault, strike in _STRIKES.items():
            is_due = run.faults.has(fault) and rng.random() < self._rate * run.faults.rates[fault]
            if is_due and run.faults.spend():
                strike(self, fault)
        run.world.at(rng.randint(1, 20), self.strike)

    def after_checkpoint(self) -> None:
        """A checkpoint has completed: perhaps strike soon."""
        run, rng = self._run, self._run.world.random
        deadly = [fault for fault in DEADLY if run.faults.has(fault)]
        if deadly and rng.random() < self._after_checkpoint_rate and run.faults.spend():
            fault = rng.choice(deadly)
            run.world.at(rng.randint(0, 15), _STRIKES[fault], self, fault)

    def _targets(self, fault: Fault) -> list[SimProcess]:
        started = self._run.started
        if fault in (Fault.DRIVER_CRASH, Fault.DRIVER_PAUSE):
            return [one.process for one in started if one.process.is_alive]
        return [worker for one in started for worker in one.spark.workers if worker.is_alive]

    def _crash(self, fault: Fault) -> None:
        targets = self._targets(fault)
        if targets:
            self._run.world.random.choice(targets).kill()

    def _pause(self, fault: Fault) -> None:
        targets, world = self._targets(fault), self._run.world
        if targets:
            target = world.random.choice(targets)
            target.pause()
            world.at(world.random.choice((50, 500, 7_000)), target.resume)
            if fault is Fault.DRIVER_PAUSE and world.random.random() < 0.5:
                world.at(world.random.randint(1, 300), self._run.start)  # somebody takes it for dead

    def _break_link(self, fault: Fault) -> None:
        network, rng = self._run.network, self._run.world.random
        if network.open:
            socket = rng.choice(network.open)
            rng.choice((socket.reset, socket.cut))()

    def _cut_power(self, fault: Fault) -> None:
        """The whole machine: every process dies, and what was not synced is gone."""
        run = self._run
        run.world.tell("world", "power cut")
        for process in run.processes():
            process.kill()
        for disk in run.disks.values():
            disk.cut_power()

    def _step_clock(self, fault: Fault) -> None:
        self._run.clock_shift_ms += self._run.world.random.choice((-3_600_000, -500, 500, 3_600_000))

    def _start_second(self, fault: Fault) -> None:
        if not self._run.is_finished:
            self._run.start()

    def _ask(self, fault: Fault) -> None:
        """Ask the running driver to stop, to drain or to cancel, as Ctrl-C does."""
        run, newest = self._run, self._run.started[-1]
        if newest.driver is None or not newest.process.is_alive:
            return
        asks = {Fault.STOP: newest.driver.stop, Fault.DRAIN: newest.driver.drain, Fault.CANCEL: newest.driver.cancel}
        run.world.tell("user", f"asks {newest.process.name} to {fault.title}")
        run.tasks.spawn(newest.process, asks[fault], "signal")


_STRIKES: dict[Fault, Callable[[Strikes, Fault], None]] = {
    Fault.WORKER_CRASH: Strikes._crash,
    Fault.DRIVER_CRASH: Strikes._crash,
    Fault.WORKER_PAUSE: Strikes._pause,
    Fault.DRIVER_PAUSE: Strikes._pause,
    Fault.LINK_LOSS: Strikes._break_link,
    Fault.POWER_CUT: Strikes._cut_power,
    Fault.CLOCK_STEP: Strikes._step_clock,
    Fault.STOP: Strikes._ask,
    Fault.DRAIN: Strikes._ask,
    Fault.CANCEL: Strikes._ask,
    Fault.SECOND_DRIVER: Strikes._start_second,
}
