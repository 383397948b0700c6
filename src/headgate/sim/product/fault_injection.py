"""Faults of a run: processes, connections and clocks, damage to what is stored, and seeds about one kind of fault."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

from headgate.codec.json_files import decode_hint, decode_log_entry
from headgate.connectors.files.publish_log import SinkIdentity
from headgate.dataclass import dataclass
from headgate.errors import BringOutputBack, CorruptionError, PutCheckpointsBack, Remedy, RestoreFiles
from headgate.model.config import Duration
from headgate.model.manifest import Manifest
from headgate.runtime.driver.driver import Driver
from headgate.sim.machine.storage import Disk, Stored
from headgate.sim.machine.surroundings import Network
from headgate.sim.machine.tasks import SimProcess, Tasks
from headgate.sim.machine.world import Fault, Faults, World
from headgate.sim.product.history import History
from headgate.sim.product.settings import NAME, Settings
from headgate.sim.product.spark import SimSpark
from headgate.sim.product.workloads import Splits

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


class Running(Protocol):
    """A run, as faults and verdicts see it."""

    world: World
    tasks: Tasks
    faults: Faults
    network: Network
    disks: dict[str, Disk]
    started: list[Started]
    is_finished: bool
    clock_shift_ms: int
    settings: Settings
    history: History
    listed_at: dict[int, list[Splits]]
    rng: random.Random

    def start(self) -> None:
        """Start the pipeline, whatever else runs it."""

    def processes(self) -> list[SimProcess]:
        """Return those that die when the power is cut."""


class FaultInjector:
    """Every few milliseconds something may happen to a process."""

    def __init__(self, run: Running) -> None:
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
        for fault, strike in _INJECT.items():
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
            run.world.at(rng.randint(0, 15), _INJECT[fault], self, fault)

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


_INJECT: dict[Fault, Callable[[FaultInjector, Fault], None]] = {
    Fault.WORKER_CRASH: FaultInjector._crash,
    Fault.DRIVER_CRASH: FaultInjector._crash,
    Fault.WORKER_PAUSE: FaultInjector._pause,
    Fault.DRIVER_PAUSE: FaultInjector._pause,
    Fault.LINK_LOSS: FaultInjector._break_link,
    Fault.POWER_CUT: FaultInjector._cut_power,
    Fault.CLOCK_STEP: FaultInjector._step_clock,
    Fault.STOP: FaultInjector._ask,
    Fault.DRAIN: FaultInjector._ask,
    Fault.CANCEL: FaultInjector._ask,
    Fault.SECOND_DRIVER: FaultInjector._start_second,
}


class StorageDamage:
    """Damages stored checkpoints and output, and repairs them."""

    def __init__(self, faults: Faults, rng: random.Random, disk: Callable[[str], Disk]) -> None:
        self._faults = faults
        self._rng = rng
        self._disk = disk
        self._backup: dict[tuple[str, str], Stored] = {}
        """What was damaged, by disk and path."""
        self._away: dict[str, Stored] | None = None

    def strike(self, history: History) -> None:
        """Perhaps damage the checkpoints; some are completed, and no process runs the pipeline."""
        if self._backup or self._away is not None:
            return
        if self._faults.strikes(Fault.AWAY):
            disk = self._disk("checkpoints")
            disk.tasks.world.tell("world", "the checkpoints are taken away")
            self._away, disk.objects = disk.objects, {}
        elif self._faults.strikes(Fault.DAMAGE):
            self._damage(history)

    def on_manifest(self, manifest: Manifest, files: Mapping[str, frozenset[str]]) -> None:
        """A checkpoint completes: perhaps something that it promises is gone."""
        prepared = [(sink, name) for sink, names in sorted(files.items()) for name in sorted(names)]
        if prepared and not self._backup and self._faults.strikes(Fault.DENIED):
            sink, name = self._rng.choice(prepared)
            self._take(sink, SinkIdentity(NAME, sink).staged(name))

    def apply_remedy(self, remedy: Remedy | None) -> None:
        """Put back what is missing or damaged, if an error says so."""
        if isinstance(remedy, PutCheckpointsBack) and self._away is not None:
            self._disk("checkpoints").objects, self._away = self._away, None
        if isinstance(remedy, BringOutputBack | RestoreFiles):
            self.mend()

    def mend(self) -> None:
        """Put back what is missing or damaged, also what no process has needed since: a later checkpoint was there."""
        for (disk, path), stored in self._backup.items():
            self._disk(disk).objects[path] = stored
        self._backup.clear()

    def _damage(self, history: History) -> None:
        """Damage the newest completed checkpoint: its entry of the log, or a snapshot."""
        objects = self._disk("checkpoints").objects
        newest = history.standing[-1]
        entries = {path: _manifest(path, stored.data) for path, stored in objects.items() if "/log/" in path}
        found = [path for path, manifest in entries.items() if manifest is not None and manifest.checkpoint == newest]
        snapshots = [path for path in objects if f"/chk-{newest:010d}/" in path]
        path = self._rng.choice(sorted(found + snapshots))
        how = self._rng.choice(("flipped", "torn", "gone"))
        is_followed = any(path < other and manifest is not None for other, manifest in entries.items())
        if path in found and how == "gone" and (is_followed or not self._is_hinted(path)):
            how = "torn"  # no reader can know that the entry existed or was not pruned
        history.damaged.add(newest)
        self._disk("checkpoints").tasks.world.tell("world", f"{path} is {how}")
        data = objects[path].data
        self._take("checkpoints", path)
        if how == "flipped":
            at = self._rng.randrange(len(data))
            objects[path] = Stored(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        elif how == "torn":
            objects[path] = Stored(data[: self._rng.randrange(len(data))])

    def _is_hinted(self, path: str) -> bool:
        """Whether the note beside the log tells of this entry."""
        stored = self._disk("checkpoints").objects.get(f"{NAME}/log-hint")
        return stored is not None and decode_hint(stored.data, "log-hint") >= int(path.rsplit("/", 1)[1])

    def _take(self, disk: str, path: str) -> None:
        found = self._disk(disk).objects.pop(path, None)
        if found is not None:
            self._backup[disk, path] = found


def _manifest(path: str, data: bytes) -> Manifest | None:
    try:
        entry = decode_log_entry(data, path)
    except CorruptionError:
        return None
    return entry if isinstance(entry, Manifest) else None


FOCUS_RATE = 0.3
"""Of the seeds, so many have a subject."""

LASTS_MS = 6_000
"""Virtual time until nothing fails any more."""


@dataclass(frozen=True, slots=True)
class Focus:
    """One subject.

    Attributes:
        rates: of faults that are switched on, how often each strikes, other than usual.
        is_alone: no other faults are on, so that the run gets far enough.
        interval, timeout, min_pause, max_concurrent: of checkpoints.
        budget: of disruptions.
    """

    title: str
    rates: Mapping[Fault, float]
    interval: Duration = "20ms"
    timeout: Duration = "1s"
    min_pause: Duration = 0
    max_concurrent: int = 1
    budget: int = 25
    is_alone: bool = False


SUBJECTS = (
    Focus(
        "damage",
        {Fault.DAMAGE: 0.7, Fault.STOP: 0.7, Fault.DRIVER_CRASH: 0.7, Fault.AWAY: 0.05},
        min_pause="5ms",
        is_alone=True,
    ),
    Focus(
        "checkpoints that end otherwise than well",
        {Fault.PART_FAILS: 0.75, Fault.SLOW: 0.1, Fault.WORKER_CRASH: 0.5},
        interval="10ms",
        timeout="20s",  # longer than a worker tries to write its part
        max_concurrent=3,
    ),
    Focus(
        "checkpoints that overlap and expire",
        {Fault.SLOW: 0.3, Fault.LINK_LOSS: 0.3, Fault.WORKER_PAUSE: 1.0},
        interval="10ms",
        timeout="60ms",
        max_concurrent=3,
    ),
    Focus("reads that fail", {Fault.GET_FAILS: 0.15, Fault.BAD_READ: 0.1, Fault.WORKER_CRASH: 2.0}),
    Focus("output that vanishes", {Fault.DENIED: 0.3, Fault.WORKER_CRASH: 1.0, Fault.DRIVER_CRASH: 1.0}),
)


def draw_focus(seed: int) -> Focus | None:
    """Return the subject of a seed, if it has one."""
    rng = random.Random(f"focus of seed {seed}")
    return rng.choice(SUBJECTS) if rng.random() < FOCUS_RATE else None


def put_in_focus(focus: Focus, settings: Settings, faults: Faults) -> None:
    """Have a run be about its subject."""
    faults.on = set(focus.rates) | (set() if focus.is_alone else faults.on)
    faults.rates.update(focus.rates)
    faults.budget = focus.budget
    settings.inline_bytes_max = 0
    settings.on_damaged = "previous"
    settings.checkpointing = replace(
        settings.checkpointing,
        interval=focus.interval,
        timeout=focus.timeout,
        min_pause=focus.min_pause,
        max_concurrent=focus.max_concurrent if not focus.min_pause else 1,
        tolerable_failures=20,  # a link that was cut is only noticed by checkpoints that expire
        retained=3,
    )


SLOW = frozenset({Fault.WORKER_PAUSE, Fault.DRIVER_PAUSE, Fault.STORAGE_GONE, Fault.SLOW})
"""What keeps a pipeline from getting anywhere."""


class Kills:
    """Kills processes of a run in moments that matter, so that what checkpoints hold is restored; not too often."""

    def __init__(
        self,
        run: Running,
        count: int,
        rate: float,
        within_ms: int = 10,
        *,
        drivers_rate: float | None = None,
    ) -> None:
        """``drivers_rate``: how often it is a driver, if one lives; None: any process."""
        self._run = run
        self.left = count
        self.drivers_rate = drivers_rate
        self._rate, self._within_ms = rate, within_ms
        self._rng = run.rng

    def perhaps(self) -> None:
        """This is such a moment: perhaps a process dies soon."""
        if self.left and not self._run.faults.is_healed and self._rng.random() < self._rate:
            self._strike_soon()

    def _strike_soon(self) -> None:
        self.left -= 1
        self._run.world.at(self._rng.randint(0, self._within_ms), self._strike)

    def _strike(self) -> None:
        started, rate = self._run.started, self.drivers_rate
        drivers = [one.process for one in started if one.process.is_alive]
        if rate is None:
            living = [p for one in started for p in (one.process, *one.spark.workers) if p.is_alive]
        elif drivers and (rate == 1 or self._rng.random() < rate):
            living = drivers
        else:
            living = [p for one in started for p in one.spark.workers if p.is_alive]
        if living and not self._run.faults.is_healed:
            self._rng.choice(living).kill()


class Ends(Kills):
    """Kills all drivers of a run after checkpoints, or has their user stop them."""

    def __init__(self, run: Running, count: int, least: int = 1, *, stops: bool = False) -> None:
        """``least``: so many checkpoints must have been completed before. ``stops``: some are stopped instead."""
        super().__init__(run, count, 0.5, 15)
        self._least, self._stops = least, stops
        run.faults.on -= SLOW

    def perhaps(self) -> None:
        """A checkpoint is complete: perhaps the driver ends, if enough were before."""
        if len(self._run.history.standing) >= self._least and self.left and self._rng.random() < self._rate:
            self._strike_soon()

    def _strike(self) -> None:
        stops = self._stops and self._rng.random() < 0.5
        for one in self._run.started:
            if not one.process.is_alive or self._run.faults.is_healed:
                continue
            if not stops or one.driver is None:
                one.process.kill()
            else:
                self._run.tasks.spawn(one.process, one.driver.stop, "signal")
