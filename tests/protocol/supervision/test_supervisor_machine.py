"""Random lives of a supervisor against a naive Spark: stages that retry, die, hang or come up late."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.protocol.making import gen

from headgate.model.config import FixedDelay
from headgate.model.failure import Failure, FailureKind
from headgate.model.ids import WorkerIndex
from headgate.protocol.supervision.supervisor import Phase, Supervisor
from headgate.protocol.supervision.supervisor_events import (
    ArmTimer,
    AttemptId,
    Begin,
    CancelJob,
    ClaimGeneration,
    Deploy,
    EndGeneration,
    Event,
    Finish,
    GenerationDone,
    GenerationReady,
    JobEnded,
    PeerTimer,
    RefuseWorker,
    RestartTimer,
    StartCoordinator,
    SubmitJob,
    Timer,
    TimerFired,
    WorkerFailed,
    WorkerLost,
    WorkerReady,
    WorkerRegistered,
)

WORKERS = (WorkerIndex(0), WorkerIndex(1))


class World:
    """Spark and the checkpoint storage, as one supervisor sees them."""

    def __init__(self) -> None:
        self.supervisor = Supervisor(2, FixedDelay(delay_ms=50))
        self.is_claiming = self.is_restart_armed = self.is_cancelled = False
        self.generation = 0
        self.job: AttemptId | None = None
        self.alive: set[WorkerIndex] = set()
        self.registered: set[WorkerIndex] = set()
        self.deployed: AttemptId | None = None
        self.used: set[AttemptId] = set()
        self.running: int | None = None
        self.outcome: Finish | None = None
        self.awaited: Timer | None = None

    def feed(self, event: Event) -> None:
        for effect in self.supervisor.handle(event):
            match effect:
                case ClaimGeneration():
                    assert not self.is_claiming
                    self.is_claiming = True
                case SubmitJob():
                    assert self.job is None, "one job at a time"
                    self.is_cancelled = False
                    self.come_up(AttemptId(effect.submission, 0))
                case CancelJob():
                    self.is_cancelled = True
                case Deploy():
                    assert effect.attempt == self.job
                    assert self.registered == set(WORKERS)
                    assert effect.attempt not in self.used, "a used-up attempt never runs again"
                    assert effect.generation == self.generation
                    self.deployed, self.used = effect.attempt, self.used | {effect.attempt}
                case StartCoordinator():
                    assert self.running is None, "one coordinator at a time"
                    self.running = effect.generation
                case EndGeneration():
                    self.running = self.deployed = None
                case RefuseWorker():
                    self.registered.discard(effect.worker)
                case ArmTimer(timer=PeerTimer()):
                    self.awaited = effect.timer
                case ArmTimer():
                    self.is_restart_armed = self.is_restart_armed or effect.timer == RestartTimer()
                case Finish():
                    assert self.outcome is None
                    assert self.job is None, "the job has ended before the run does"
                    self.outcome = effect

    def come_up(self, attempt: AttemptId) -> None:
        self.job, self.alive, self.registered = attempt, set(WORKERS), set()

    # -- one step of the world; each may be impossible now ----------------------------------------------------------

    def claim_succeeds(self) -> None:
        if self.is_claiming:
            self.is_claiming, self.generation = False, self.generation + 1
            self.feed(GenerationReady(gen(self.generation)))

    def worker_registers(self, worker: WorkerIndex) -> None:
        if self.job and worker in self.alive and worker not in self.registered:
            self.registered.add(worker)
            self.feed(WorkerRegistered(self.job, worker))

    def worker_is_ready(self, worker: WorkerIndex) -> None:
        if self.deployed:
            self.feed(WorkerReady(gen(self.generation), worker))

    def worker_dies(self, worker: WorkerIndex) -> None:
        if self.job and worker in self.alive:
            self.alive.discard(worker)
            if worker in self.registered:
                self.feed(WorkerLost(self.job, worker, "died", 0, 0.5))

    def worker_blames(self, worker: WorkerIndex) -> None:
        """It cannot go on because the other one left, and is gone a little later (G15)."""
        if self.job and worker in self.alive and self.deployed == self.job:
            failure = Failure(FailureKind.LOST, "its peer left")
            other = WORKERS[1 - WORKERS.index(worker)]
            self.feed(WorkerFailed(self.job, worker, failure, 0, 0.5, other))

    def stage_is_retried(self, worker: WorkerIndex) -> None:
        if self.job and self.alive != set(WORKERS) and not self.is_cancelled:
            for other in list(self.alive):
                self.worker_dies(other)
            self.come_up(AttemptId(self.job.submission, self.job.attempt + 1))

    def job_ends(self, worker: WorkerIndex) -> None:
        if self.job and (self.is_cancelled or self.alive != set(WORKERS) or self.supervisor.phase is Phase.ENDING):
            submission, self.job = self.job.submission, None
            self.feed(JobEnded(submission, Failure(FailureKind.LOST, "killed"), 0, 0.5))

    def delay_ends(self) -> None:
        if self.is_restart_armed:
            self.is_restart_armed = False
            self.feed(TimerFired(RestartTimer(), 0, 0.5))

    def nobody_speaks(self) -> None:
        if self.awaited is not None:
            timer, self.awaited = self.awaited, None
            self.feed(TimerFired(timer, 0, 0.5))

    def heal(self) -> None:
        """From now on everything works: the pipeline must run, unless the run has ended."""
        for _ in range(20):
            if self.running is not None or self.outcome is not None:
                return
            self.delay_ends()
            self.nobody_speaks()
            self.claim_succeeds()
            if self.alive != set(WORKERS) or self.is_cancelled or self.job in self.used:
                if self.deployed is None:
                    self.alive.clear()
                self.job_ends(WORKERS[0])
            for worker in WORKERS:
                self.worker_registers(worker)
            for worker in WORKERS:
                self.worker_is_ready(worker)
        raise AssertionError(f"it does not run again: {self.supervisor.story}")


STEPS = ["worker_registers", "worker_is_ready", "worker_dies", "worker_blames", "stage_is_retried", "job_ends"]


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.sampled_from([*STEPS, "claim_succeeds", "delay_ends", "nobody_speaks"]), st.sampled_from(WORKERS)),
        max_size=50,
    )
)
def test_whatever_spark_does_the_pipeline_runs_again_and_ends_cleanly(steps: list[tuple[str, WorkerIndex]]) -> None:
    """G3, G4, G5, G9 and G15 hold on the way; afterwards the pipeline runs (G12) and ends with its job (G11)."""
    world = World()
    world.feed(Begin())
    for step, worker in steps:
        if step in STEPS:
            getattr(world, step)(worker)
        else:
            getattr(world, step)()
    world.heal()
    if world.outcome is not None:
        assert world.outcome.failure is not None
        assert "did not start" in world.outcome.failure.reason
        return
    assert world.running is not None
    world.feed(GenerationDone(gen(world.running), is_final=True))
    world.job_ends(WORKERS[0])
    assert world.outcome == Finish(None, is_final=True)
