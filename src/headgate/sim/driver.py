"""A simulated driver: interprets the ``Supervisor``, as ``runtime.driver.supervision`` does.

One process with one Spark application. When it dies, everything volatile is gone; the log, the files and the sinks'
store survive, and its workers live on until they notice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from headgate.model.failure import Failure
from headgate.model.ids import Generation, WorkerIndex
from headgate.model.life import Life
from headgate.model.plan import Plan
from headgate.protocol.checkpoints import coordinator
from headgate.protocol.machine import Ignored
from headgate.protocol.supervision import supervisor as machine
from headgate.protocol.supervision.supervisor import AttemptId
from headgate.sim import history, network
from headgate.sim.claiming import Claimed, Claiming
from headgate.sim.faults import Fault
from headgate.sim.generation import GenerationHost, short
from headgate.sim.marks import Mark
from headgate.sim.network import Link, ToDriver
from headgate.sim.sparkmodel import SparkApp
from headgate.sim.world import Process

if TYPE_CHECKING:
    from headgate.sim.env import Env
    from headgate.sim.run import Simulation


class Driver(Process):
    """One run of the user's program."""

    def __init__(self, env: Env, simulation: Simulation, number: int, plan: Plan) -> None:
        super().__init__(env.world, f"driver{number}")
        self.env = env
        self.plan = plan
        self.spark = SparkApp(env, self)
        self.was_refused = False
        self.was_denied = False
        self.stranger: Life | None = None
        self.former_parallelism: int | None = None
        self.last_generation: Generation | None = None
        self._simulation = simulation
        self._supervisor = machine.Supervisor(plan.parallelism, env.options.restart)
        self._links: list[Link] = []
        self._claimed: Claimed | None = None
        self._host: GenerationHost | None = None
        self._is_drain_wanted = False
        self._timers: dict[machine.Timer, int] = {}
        self._timer_token = 0

    # -- events -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start."""
        self.feed(machine.Begin())

    def feed(self, event: machine.Event) -> None:
        """Give ``event`` to the supervisor and run its effects, in order; the driver may die between any two."""
        effects = self._supervisor.handle(event)
        self.tell(f"supervisor {short(event)} → {', '.join(short(e) for e in effects)}")
        for effect in effects:
            self.env.faults.crash_point(self, Fault.DRIVER_CRASH)
            self._execute(effect)

    def interruptible(self, call: Callable[..., None], *args: object) -> None:
        """Run ``call``; now and then this process is stopped for a while just before it."""
        if self.env.faults.strikes(Fault.DRIVER_PAUSE):
            self.env.marks.reach(Mark.PAUSED_DRIVER)
            self.pause()
            self.post(0, call, *args)
            self.world.at(self.env.rng.choice((50, 400, 2_000, 5_000)), self.resume)
            self._simulation.on_paused()
        else:
            call(*args)

    def look_later(self, is_tail: bool, call: Callable[..., None], *args: object) -> None:
        """Run ``call``, which looks at the log behind a put; this process may be stopped or die before it (X8).

        It dies more often where it has just put what means nothing.
        """
        faults = self.env.faults
        if faults.strikes(Fault.LOOK_CRASH if is_tail else Fault.LOOK_CRASH_STALE):
            self.post(0, self.kill, "before it looked behind a put")
        elif faults.strikes(Fault.LOOK_PAUSE):
            self.env.marks.reach(Mark.PAUSED_DRIVER)
            self.pause()
            self.post(0, call, *args)
            self.world.at(faults.looks.choice((400, 2_000, 5_000)), self.resume)
            self._simulation.on_paused()
        else:
            self.post(faults.looks.randint(0, 2), call, *args)

    def on_claimed(self, claimed: Claimed) -> None:
        """The generation is claimed and its sinks are recovered."""
        self._claimed = claimed
        self.feed(machine.GenerationReady(claimed.generation))

    def on_generation_failed(self, generation: Generation, failure: Failure) -> None:
        """The coordinator gave up."""
        self.feed(machine.GenerationFailed(generation, failure, self.world.now_ms, self.env.rng.random()))

    def on_generation_done(self, generation: Generation, is_final: bool) -> None:
        """The coordinator has completed and committed the last checkpoint."""
        self.feed(machine.GenerationDone(generation, is_final))

    def on_job_ended(self, submission: int, error: str | None) -> None:
        """Spark is done with a job."""
        self.feed(machine.JobEnded(submission, error, self.world.now_ms, self.env.rng.random()))

    def request_stop(self) -> None:
        """The user asks to stop after one last checkpoint (or at once, if nothing runs)."""
        if self._host is not None and self._host.is_started:
            self._host.handle(coordinator.StopRequested())
        else:
            self.request_cancel()

    def request_drain(self) -> None:
        """The user asks to end the sources: of this generation, and of all that follow in this driver (E9)."""
        self._is_drain_wanted = True
        if self._host is not None:
            self._host.handle(coordinator.DrainRequested())

    def request_cancel(self) -> None:
        """The user asks to stop at once."""
        self.feed(machine.CancelRequested())

    # -- workers ------------------------------------------------------------------------------------------------

    def links_of(self, attempt: AttemptId) -> list[Link]:
        """Return the connections of the workers of ``attempt``."""
        return [link for link in self._links if link.attempt == attempt]

    def on_connected(self, link: Link) -> None:
        """A worker connected (if this driver still listens)."""
        if self.is_alive:
            self._links.append(link)
        else:
            link.cut("nobody listens")

    def on_message(self, link: Link, message: ToDriver) -> None:
        """Handle a message of a worker."""
        worker = WorkerIndex(link.worker.index)
        if isinstance(message, network.OfGeneration):
            if self._host is not None:
                self._host.on_message(message)
            return
        if link.is_closed_at_driver:
            return
        match message:
            case network.Registered():
                self.feed(machine.WorkerRegistered(link.attempt, worker))
            case network.Ready():
                self.feed(machine.WorkerReady(message.generation, worker))
            case network.Failed():
                now, jitter = self.world.now_ms, self.env.rng.random()
                self.feed(machine.WorkerFailed(link.attempt, worker, message.failure, now, jitter))

    def on_link_closed(self, link: Link, why: str, *, is_silent: bool = False) -> None:
        """A worker's connection is gone."""
        if link.is_closed_at_driver:
            return
        link.is_closed_at_driver = True
        self._links.remove(link)
        worker, jitter = WorkerIndex(link.worker.index), self.env.rng.random()
        self.feed(machine.WorkerLost(link.attempt, worker, why, self.world.now_ms, jitter, is_silent))

    def check_silence(self, link: Link) -> None:
        """The heartbeat timeout has passed: is the worker still silent?"""
        if link.worker.is_alive and link.worker.is_paused and not link.is_cut:
            self.env.marks.reach(Mark.SILENT_WORKER)
            self.on_link_closed(link, "no sign of life", is_silent=True)
            link.cut("closed by the driver")

    # -- effects ------------------------------------------------------------------------------------------------

    def _execute(self, effect: machine.Effect) -> None:
        match effect:
            case machine.ClaimGeneration():
                Claiming(self)
            case machine.SubmitJob():
                self.spark.submit(effect.submission)
            case machine.CancelJob():
                self.spark.cancel(effect.submission)
            case machine.Deploy():
                self._deploy(effect)
            case machine.StartCoordinator():
                self._start(effect.generation)
            case machine.EndGeneration():
                self._end_generation(effect)
            case machine.RefuseWorker():
                for link in self.links_of(effect.attempt):
                    if link.worker.index == effect.worker:
                        link.to_worker(network.Refused())
            case machine.ArmTimer():
                self._arm(effect.timer, effect.after_ms)
            case machine.Finish():
                self._finish(effect)
            case machine.ReportRestart():
                self.tell(f"restarts in {effect.delay_ms} ms: {effect.failure.reason}")
            case Ignored():
                pass

    def _deploy(self, order: machine.Deploy) -> None:
        env, claimed = self.env, self._claimed
        assert claimed is not None
        assert claimed.generation == order.generation
        if order.attempt.attempt > 0:
            env.marks.reach(Mark.STAGE_RETRY_DEPLOYED)
        if any(w.generation for d in self._simulation.drivers for w in d.spark.workers):
            env.marks.reach(Mark.ZOMBIE_WORKER)
        self._simulation.plans[order.generation] = self.plan
        where = (order.attempt.submission, order.attempt.attempt)
        env.note(history.Deployed(self.name, order.generation, where, self.plan.parallelism))
        if claimed.restored is not None and claimed.restored.parallelism != self.plan.parallelism:
            env.marks.reach(Mark.RESCALED)
        self._host = GenerationHost(self, claimed, order.attempt)
        self._drain_on(claimed)
        deployment = network.Deployment(order.generation, claimed.restored, network.Fabric())
        for link in self.links_of(order.attempt):
            link.to_worker(deployment)

    def _drain_on(self, claimed: Claimed) -> None:
        """A drain outlives generations of this driver, and drivers when a checkpoint tells of it (E9)."""
        is_restored = claimed.restored is not None and claimed.restored.is_draining
        if is_restored:
            self.env.marks.reach(Mark.DRAINED_ON)
        if self._is_drain_wanted or is_restored:
            assert self._host is not None
            self._host.handle(coordinator.DrainRequested())

    def _start(self, generation: Generation) -> None:
        host = self._host
        assert host is not None
        assert host.generation == generation
        interval = self.env.options.checkpoints.interval_ms
        host.is_started = True
        host.handle(coordinator.Started(self.env.rng.randint(0, max(interval, 1))))

    def _end_generation(self, order: machine.EndGeneration) -> None:
        host, self._host = self._host, None
        if host is None:
            return
        assert host.generation == order.generation
        host.is_over = True
        if host.loops.has_ended_one and not order.is_done:
            self.env.marks.reach(Mark.DIED_AFTER_LOOP)
        for link in self.links_of(host.attempt):
            link.to_worker(network.Stop(order.is_done))

    def _arm(self, timer: machine.Timer, after_ms: int) -> None:
        self._timer_token += 1
        self._timers[timer] = self._timer_token
        self.post(after_ms, self._fire, timer, self._timer_token)

    def _fire(self, timer: machine.Timer, token: int) -> None:
        if self._timers.get(timer) == token:
            del self._timers[timer]
            self.feed(machine.TimerFired(timer, self.world.now_ms, self.env.rng.random()))

    def _finish(self, outcome: machine.Finish) -> None:
        self.is_alive = False
        reason = outcome.failure.reason if outcome.failure else f"success, final={outcome.is_final}"
        self.tell(f"finished: {reason}")
        self._gone()
        self._simulation.on_finished(self, outcome)

    def on_death(self) -> None:
        """Workers see their connections close, sooner or later; Spark's application ends."""
        self._gone()
        self._simulation.on_died()

    def _gone(self) -> None:
        for link in self._links:
            is_slow = self.env.faults.strikes(Fault.LINGER)
            link.cut("the driver is gone", 2_000 if is_slow else 20)
        self._links = []
        self.spark.stop()
