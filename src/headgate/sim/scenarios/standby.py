"""Pipelines that are kept running: drivers that beat, supervisors that start them again, and standbys.

A site is a computer with a supervisor, which runs a driver, or a standby that waits for its turn. Supervisor, standby,
heartbeats and takeover are the product's; here is what ``cli.supervisor`` and ``cli.run`` do for them with processes,
pipes and signals. Computers are lost with all that runs on them, and drivers die, stop for longer than a standby waits,
and are asked to stop. Drawn from a generator of its own.
"""

from __future__ import annotations

import queue
from dataclasses import field, replace

from headgate.codec.json_files import end_path
from headgate.dataclass import dataclass
from headgate.errors import FencedError, HeadgateError, StorageError
from headgate.model.config import ExponentialDelay, FailureRate, FixedDelay, RestartStrategy
from headgate.model.failure import ExitCode, exit_code_of
from headgate.model.ids import Generation
from headgate.model.progress import RunResult
from headgate.protocol.supervision import driver_supervisor, standby
from headgate.protocol.supervision.driver_supervisor import Command, DriverSupervisor
from headgate.protocol.supervision.standby import Standby
from headgate.protocol.supervision.supervisor_events import Begin
from headgate.runtime.driver.takeover import HeartbeatReader, Takeover, taking_over
from headgate.sim.machine.tasks import SimProcess, SimQueue
from headgate.sim.machine.world import Fault, Violation
from headgate.sim.product.fault_injection import Started
from headgate.sim.product.run import Run
from headgate.sim.product.settings import CHECKPOINTS, NAME, ROOT
from headgate.storage.urls import open_storage

WITHOUT = (Fault.DAMAGE, Fault.AWAY, Fault.DENIED, Fault.CANCEL)
"""No user has to read what an error says before the pipeline can go on."""

SITES_MAX = 12
LASTS_MS = 25_000
"""Faults last for several takeovers."""

SOUND_MS = 15_000
"""So long after the last fault a driver that is alive has certainly shown it."""

PERSON_MS = 90_000
"""When no process has run the pipeline for so long, a person starts it: after a stop, standbys wait for that."""


@dataclass(eq=False)
class Site:
    """A machine with a supervisor."""

    name: str
    process: SimProcess
    strategy: RestartStrategy
    is_standby: bool
    events: SimQueue[driver_supervisor.Event]
    child: Started | None = None
    is_waiting: bool = False
    """Its child stands by."""
    claimed: list[Generation] = field(default_factory=list)

    @property
    def claimant(self) -> str:
        """Under which name its drivers claim (KR10)."""
        return f"supervisor of {self.name}"


class StandbyRun(Run):
    """The users of one pipeline, who keep it running."""

    IS_PLAIN = True
    SUBJECT = "standing by"

    def _draw(self) -> None:
        self.sites: list[Site] = []
        self.takeovers_count = self.restarts_count = 0
        self._stopped: set[int] = set()
        """Generations whose end, at their user's wish, is on record: only a person starts the pipeline again (SB6)."""
        self._leaders: dict[int, Started] = {}
        """Who has claimed each generation."""
        self._healed_ms: int | None = None
        self._losses = self.rng.choice((0, 1, 2, 4))
        self._wishes = self.rng.choice((0, 1, 3))
        self._standbys_count = self.rng.choice((0, 1, 1, 1, 2))
        self._safety_ms = LASTS_MS
        settings = self.settings
        settings.pace = replace(settings.pace, pause_ms=self.rng.choice((20, 100, 200)))
        settings.checkpointing = replace(settings.checkpointing, interval=self.rng.choice(("80ms", "300ms", "1s")))
        self.faults.on -= set(WITHOUT)
        self.faults.on |= {self.rng.choice((Fault.DRIVER_CRASH, Fault.DRIVER_PAUSE, Fault.STOP, Fault.POWER_CUT))}
        self.faults.budget += 3

    # -- people -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """See ``Run``: a person starts the pipeline, and standbys with it for the first time."""
        is_first = not self.sites
        self._stopped.clear()
        self._open_site(is_standby=False)
        if is_first:
            for _ in range(self._standbys_count):
                self.world.at(self.rng.randint(0, 3_000), self._open_standby)
            self.world.at(self.rng.randint(100, 3_000), self._lose_a_site)
            self.world.at(self.rng.randint(100, 2_000), self._ask_a_supervisor)
            self.world.at(PERSON_MS, self._look_after_it)

    def _open_standby(self) -> None:
        if not self.is_finished and len(self.sites) < SITES_MAX:
            self._open_site(is_standby=True)

    def _lose_a_site(self) -> None:
        """A machine is lost, with its supervisor and its driver; perhaps another one comes."""
        living = [site for site in self.sites if site.process.is_alive]
        if self.faults.is_healed or self.is_finished or not self._losses:
            return
        if living:
            self._losses -= 1
            leading = [site for site in living if not site.is_waiting]
            lost = self.rng.choice(leading or living)
            self.world.tell("world", f"{lost.name} is lost")
            lost.process.kill()
            if lost.child is not None:
                lost.child.process.kill()
            self.world.at(self.rng.randint(100, 9_000), self._open_standby)
        self.world.at(self.rng.randint(500, 9_000), self._lose_a_site)

    def _ask_a_supervisor(self) -> None:
        """A user sends a signal to a supervisor."""
        living = [site for site in self.sites if site.process.is_alive]
        if self.faults.is_healed or self.is_finished or not self._wishes:
            return
        if living:
            self._wishes -= 1
            asked = self.rng.choice(living)
            commands = [Command.CHECKPOINT, Command.CHECKPOINT, Command.STOP, Command.INTERRUPT]
            drain = [Command.DRAIN] if self.faults.has(Fault.DRAIN) else []
            command = self.rng.choice([*commands, *drain])
            self.world.tell("user", f"asks {asked.name} to {command.value}")
            asked.events.put(driver_supervisor.CommandReceived(command))
        self.world.at(self.rng.randint(100, 4_000), self._ask_a_supervisor)

    def _heal(self) -> None:
        self._healed_ms = self.world.now_ms
        super()._heal()

    def _look_after_it(self) -> None:
        living = any(site.process.is_alive for site in self.sites)
        self._start_if_none(is_awaited=living)  # a zombie may have said last that it failed for good
        if living or not self.is_finished:
            self.world.at(PERSON_MS, self._look_after_it)

    def _start_if_none(self, *, is_awaited: bool = False) -> None:
        """See ``Run``: no process runs it, and no supervisor will. ``is_awaited``: even if it has finished."""
        if self.is_finished and not is_awaited:
            return
        if any(site.process.is_alive and not site.is_waiting for site in self.sites):
            return
        self._update_files()
        self.start()

    # -- supervisors ---------------------------------------------------------------------------------------------------

    def _open_site(self, *, is_standby: bool) -> None:
        name = f"k{len(self.sites)}"
        process = SimProcess(self.tasks, name, self._on_supervisor_gone)
        strategy = self.rng.choice(
            (
                FixedDelay(self.rng.choice((None, 3)), 300),
                ExponentialDelay(100, 2_000, reset_after_ms=3_000),
                FailureRate(4, 3_000, 200),
            )
        )
        site = Site(name, process, strategy, is_standby, SimQueue(self.tasks))
        self.sites.append(site)
        self.tasks.spawn(process, lambda: self._keep(site), "main")

    def _on_supervisor_gone(self, code: int) -> None:
        """Who asked it to stop starts it again some time; standbys do so without anybody when a machine was lost."""
        if code >= 0:
            self.world.at(self.rng.randint(50, 9_000), self._start_if_none)

    def _keep(self, site: Site) -> None:
        """As ``cli.supervisor`` does."""
        machine = DriverSupervisor(site.strategy, is_standby=site.is_standby)
        due_ms: int | None = None
        event: driver_supervisor.Event = Begin()
        while True:
            for effect in machine.handle(event):
                match effect:
                    case driver_supervisor.StartChild():
                        self._start_child(site, effect.after)
                    case driver_supervisor.Tell():
                        self._tell(site, effect.command)
                    case driver_supervisor.ArmDelay():
                        due_ms = self.world.now_ms + effect.after_ms
                    case driver_supervisor.ReportRestart():
                        self.restarts_count += 1
                    case driver_supervisor.ExitWith():
                        site.process.end(effect.code)
            try:
                event = site.events.get(timeout=None if due_ms is None else max(due_ms - self.world.now_ms, 0) / 1_000)
            except queue.Empty:
                due_ms, event = None, driver_supervisor.DelayOver()

    def _tell(self, site: Site, command: Command) -> None:
        """As a signal: a standby ends by it; a driver that does not take it yet dies of it (KR6)."""
        child = site.child
        if child is None or not child.process.is_alive:
            return
        if child.driver is not None:
            calls = {Command.DRAIN: child.driver.drain, Command.CHECKPOINT: child.driver.take_checkpoint}
            call = calls.get(command, child.driver.stop)

            def signal() -> None:
                call()

            self.tasks.spawn(child.process, signal, "signal")
        elif command in (Command.STOP, Command.INTERRUPT):
            child.process.end(0 if site.is_waiting else -15)

    def _start_child(self, site: Site, after: Generation | None) -> None:
        def gone(code: int) -> None:
            site.is_waiting = False
            if site.process.is_alive:
                site.events.put(driver_supervisor.ChildEnded(code, self.world.now_ms, self.rng.random()))

        started = site.child = self._add_start(gone)
        site.is_waiting = site.is_standby
        self.tasks.spawn(started.process, lambda: self._live(site, started, after), "main")

    # -- what a supervisor runs ----------------------------------------------------------------------------------------

    def _live(self, site: Site, started: Started, after: Generation | None) -> None:
        error = self._stand_by(site, started) if site.is_standby else self._lead(site, started, after, drains=False)
        started.process.end(exit_code(error))

    def _lead(
        self,
        site: Site,
        started: Started,
        after: Generation | None,
        *,
        drains: bool,
        claimed: list[Generation] | None = None,
    ) -> BaseException | None:
        """Run the pipeline, as one of this supervisor's drivers does."""

        mine = [] if claimed is None else claimed

        def on_claim(generation: Generation) -> None:
            self.takeovers_count += site.is_standby and not mine
            mine.append(generation)
            self._leaders[int(generation)] = started
            if site.process.is_alive:
                site.events.put(driver_supervisor.ChildClaimed(generation))

        site.is_waiting = False
        site.events.put(driver_supervisor.ChildListens())
        with taking_over(Takeover(site.claimant, after, on_claim)):
            error = self._run_driver(started, beats=True, drains=drains)
        if error is None and not self.is_finished and mine and self._has_end_on_record(mine[-1]):
            self._stopped.add(int(mine[-1]))
        return error

    def _has_end_on_record(self, generation: Generation) -> bool:
        return end_path(NAME, generation) in self.disks[CHECKPOINTS].objects

    def _stand_by(self, site: Site, started: Started) -> BaseException | None:
        """As ``cli.run`` does."""
        lookout = HeartbeatReader(open_storage(ROOT), NAME, site.claimant)
        machine = Standby()
        event: standby.Event | None = Begin()
        while event is not None:
            effects, event = machine.handle(event), None
            for effect in effects:
                match effect:
                    case standby.LookAtAll():
                        event = self._look_at(lookout, None)
                    case standby.LookAtBeat():
                        event = self._look_at(lookout, effect.generation)
                    case standby.Pause():
                        self.tasks.park(effect.after_ms)
                        event = standby.PauseOver()
                    case standby.Say():
                        self.world.tell(started.process.name, f"{effect.notice.name}: {effect.detail}")
                    case standby.TakeOver():
                        claimed: list[Generation] = []
                        error = self._take_over(site, started, effect, claimed)
                        if claimed or not isinstance(error, FencedError):
                            return error
                        site.is_waiting = True
                        event = standby.TakeoverLost()
        return None

    def _look_at(self, lookout: HeartbeatReader, generation: Generation | None) -> standby.Event:
        began_ms = self.world.now_ms
        try:
            observed = lookout.all() if generation is None else lookout.beat(generation)
        except StorageError as error:
            return standby.LookFailed(str(error))
        return standby.Looked(began_ms, self.world.now_ms, observed, generation is None)

    def _take_over(
        self, site: Site, started: Started, effect: standby.TakeOver, claimed: list[Generation]
    ) -> BaseException | None:
        if int(effect.after) in self._stopped:
            raise Violation("SB6", f"a standby starts the pipeline, whose user stopped generation {effect.after}")
        leader = self._leaders.get(int(effect.after))
        is_sound = self._healed_ms is not None and self.world.now_ms - self._healed_ms > SOUND_MS
        if is_sound and leader is not None and leader is not started and leader.process.is_alive:
            raise Violation("SB7", f"a standby replaces {leader.process.name}, which is alive and well")
        return self._lead(site, started, effect.after, drains=effect.drain, claimed=claimed)

    def _is_over(self, result: RunResult) -> bool:
        return result.is_finished or result.is_drained


def exit_code(error: BaseException | None) -> ExitCode:
    """Return what the command that ``error`` ended, if any did, ends with; a bug ends the seed."""
    if error is None:
        return ExitCode.DONE
    if not isinstance(error, HeadgateError):
        raise error
    return exit_code_of(error)
