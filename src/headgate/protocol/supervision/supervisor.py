"""The life of a pipeline in one driver: generations, workers, failures, restarts (rules G1–G12 of
docs/spec/supervision.md).

One ``Supervisor`` per driver run. For every generation it needs two things before it deploys: the generation is
claimed in the log and the sinks are recovered (so older lives are fenced), and all workers of *one* attempt of the
Spark job have registered. A failure of any worker ends the generation: a barrier stage fails as a whole.
Counterparts: ``runtime.driver.supervision`` (interprets), the ``Coordinator`` of each generation, the workers.
"""

from __future__ import annotations

from enum import Enum
from typing import assert_never

from headgate.model.config import RestartStrategy
from headgate.model.failure import Failure, FailureKind
from headgate.model.ids import Generation, WorkerIndex
from headgate.protocol.machine import Ignored, Machine
from headgate.protocol.supervision.blame import Blames, loss_of
from headgate.protocol.supervision.events import (
    AlreadyFinished,
    ArmTimer,
    AttemptId,
    Begin,
    CancelJob,
    CancelRequested,
    CheckpointsRemoved,
    ClaimFailed,
    ClaimGeneration,
    Deploy,
    Effect,
    EndGeneration,
    Event,
    Finish,
    GenerationDone,
    GenerationFailed,
    GenerationReady,
    JobEnded,
    JobEndTimer,
    PeerTimer,
    RefuseWorker,
    RegisterTimer,
    RemoveCheckpoints,
    ReportRestart,
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
from headgate.protocol.supervision.restart import RestartPolicy, StayDown


class Phase(Enum):
    """What the supervisor waits for."""

    CREATED = "Begin"
    PREPARING = "the claim of the generation, and all workers of one attempt"
    DEPLOYING = "every worker to be ready"
    RUNNING = "the coordinator, or a failure"
    BACKOFF = "the restart delay"
    ENDING = "the Spark job to end"
    REMOVING = "the checkpoints to be removed"
    ENDED = "nothing"


LEGAL_PHASES: dict[Phase, frozenset[Phase]] = {
    Phase.CREATED: frozenset({Phase.PREPARING, Phase.ENDING}),
    Phase.PREPARING: frozenset({Phase.DEPLOYING, Phase.BACKOFF, Phase.ENDING}),
    Phase.DEPLOYING: frozenset({Phase.RUNNING, Phase.BACKOFF, Phase.ENDING}),
    Phase.RUNNING: frozenset({Phase.BACKOFF, Phase.ENDING}),
    Phase.BACKOFF: frozenset({Phase.PREPARING, Phase.BACKOFF, Phase.ENDING}),
    Phase.ENDING: frozenset({Phase.REMOVING, Phase.ENDED}),
    Phase.REMOVING: frozenset({Phase.ENDED}),
    Phase.ENDED: frozenset(),
}


class Supervisor(Machine):
    """Decides about generations and restarts."""

    REGISTER_TIMEOUT_MS = 120_000
    """A cluster may have to start executors first; an endless wait would be a silent hang (G12, I5)."""

    CANCELS_MAX = 3
    """Times that Spark is asked in vain to end the job before the run ends without it."""

    JOB_END_TIMEOUT_MS = 10_000
    """Spark kills a lingering Python worker after 2 s; five times that is a hang."""

    PEER_WORD_MS = 5_000
    """Who is blamed has sent its words before its peer could notice: only a driver without a turn hears them later."""

    def __init__(
        self,
        workers_count: int,
        strategy: RestartStrategy,
        *,
        retain_on_cancel: bool = True,
        retain_on_failure: bool = True,
    ) -> None:
        super().__init__()
        assert workers_count >= 1
        self._workers_count = workers_count
        self._policy = RestartPolicy(strategy)
        self._retain_on_cancel = retain_on_cancel
        self._retain_on_failure = retain_on_failure
        self._is_removal_due = False
        self._phase = Phase.CREATED
        self._generation: Generation | None = None
        self._is_claiming = False
        self._has_run = False
        """Whether any generation ran: only then a failing storage is a failure to wait out, not a wrong setting."""
        self._submission = 0
        self._is_job_running = False
        self._attempt = AttemptId(0, 0)
        self._deployed = AttemptId(0, -1)
        """The attempt that serves the generation. Spark's retry may register before its loss is seen (G4)."""
        self._fenced = AttemptId(0, -1)
        """Newest attempt whose workers were used up by a generation: they never serve another one (G4)."""
        self._registered: set[WorkerIndex] = set()
        self._ready: set[WorkerIndex] = set()
        self._last_user_failure: Failure | None = None
        self._blames = Blames()
        self._outcome: Finish | None = None
        self._restarts_count = 0
        self._cancels_count = 0

    @property
    def phase(self) -> Phase:
        """What the supervisor waits for."""
        return self._phase

    @property
    def generation(self) -> Generation | None:
        """The generation claimed and not yet ended, if any."""
        return self._generation

    @property
    def restarts_count(self) -> int:
        """How often a generation failed and another was begun."""
        return self._restarts_count

    def handle(self, event: Event) -> list[Effect]:
        """Advance by one event; return the effects to run, in order."""
        self._begin(event)
        effects = self._dispatch(event)
        self._check()
        return effects

    def _dispatch(self, event: Event) -> list[Effect]:
        match event:
            case Begin():
                return self._on_begin()
            case GenerationReady():
                return self._on_generation_ready(event)
            case ClaimFailed():
                return self._on_claim_failed(event)
            case AlreadyFinished():
                return self._end(Finish(None, is_final=True))
            case WorkerRegistered():
                return self._on_registered(event)
            case WorkerReady():
                return self._on_ready(event)
            case WorkerLost():
                return self._on_lost(event)
            case WorkerFailed():
                return self._on_worker_failed(event)
            case JobEnded():
                return self._on_job_ended(event)
            case GenerationFailed():
                return self._on_generation_failed(event)
            case GenerationDone():
                return self._on_generation_done(event)
            case CancelRequested():
                return self._on_cancel(event)
            case CheckpointsRemoved():
                return self._on_removed()
            case TimerFired():
                return self._on_timer(event)
            case _:
                assert_never(event)

    # -- a generation begins ------------------------------------------------------------------------------------

    def _on_begin(self) -> list[Effect]:  # G1
        if self._phase is not Phase.CREATED:
            raise self._violation("begun twice")
        return self._prepare()

    def _prepare(self) -> list[Effect]:
        """Claim and get workers side by side: both take time, and recovery is measured (G2)."""
        self._enter(Phase.PREPARING)
        claim: list[Effect] = []
        if self._generation is None and not self._is_claiming:
            self._is_claiming = True
            claim = [ClaimGeneration()]
        return claim + self._submit_if_needed()

    def _submit_if_needed(self) -> list[Effect]:
        """Submit unless Spark itself is still retrying the stage of the last submission (G5)."""
        if self._is_job_running:  # the register timer starts anew: the one of the first attempt may be about to fire
            return [
                ArmTimer(JobEndTimer(self._submission), self.JOB_END_TIMEOUT_MS),
                ArmTimer(RegisterTimer(self._submission), self.REGISTER_TIMEOUT_MS),
            ]
        self._submission += 1
        self._is_job_running = True
        return [SubmitJob(self._submission), ArmTimer(RegisterTimer(self._submission), self.REGISTER_TIMEOUT_MS)]

    def _on_generation_ready(self, event: GenerationReady) -> list[Effect]:
        self._is_claiming = False
        if self._phase not in (Phase.PREPARING, Phase.BACKOFF):
            return [Ignored("no generation is being prepared")]
        self._generation = event.generation
        return self._deploy_if_complete()

    def _on_claim_failed(self, event: ClaimFailed) -> list[Effect]:
        self._is_claiming = False
        if self._phase not in (Phase.PREPARING, Phase.BACKOFF):
            return [Ignored("no generation is being prepared")]
        if event.failure.kind is not FailureKind.LOST or not self._has_run:
            return self._end(Finish(event.failure), is_of_claim=True)
        decision = self._policy.on_failure(event.at_ms, event.jitter)  # storage may come back (F11)
        if isinstance(decision, StayDown):
            return self._end(Finish(event.failure))
        self._enter(Phase.BACKOFF)
        return [ReportRestart(event.failure, decision.delay_ms), ArmTimer(RestartTimer(), decision.delay_ms)]

    def _on_registered(self, event: WorkerRegistered) -> list[Effect]:
        if self._is_over() or event.attempt <= self._fenced:
            return [RefuseWorker(event.attempt, event.worker)]
        if event.attempt < self._attempt:
            return [RefuseWorker(event.attempt, event.worker)]
        if event.attempt > self._attempt:  # Spark retried the stage, or a new submission came up
            self._attempt = event.attempt
            self._registered = set()
        self._registered.add(event.worker)
        return self._deploy_if_complete()

    def _deploy_if_complete(self) -> list[Effect]:  # G3
        if self._phase is not Phase.PREPARING or self._generation is None:
            return [Ignored("the generation is not claimed yet")]
        if len(self._registered) < self._workers_count:
            return [Ignored("other workers have not registered yet")]
        self._enter(Phase.DEPLOYING)
        self._ready = set()
        self._deployed = self._attempt
        return [Deploy(self._generation, self._attempt)]

    def _on_ready(self, event: WorkerReady) -> list[Effect]:
        if self._phase is not Phase.DEPLOYING or event.generation != self._generation:
            return [Ignored("not of the generation being deployed")]
        self._ready.add(event.worker)
        if len(self._ready) < self._workers_count:
            return [Ignored("other workers are not ready yet")]
        self._enter(Phase.RUNNING)
        self._has_run = True
        return [StartCoordinator(event.generation)]  # G10

    # -- failures -----------------------------------------------------------------------------------------------

    def _on_lost(self, event: WorkerLost) -> list[Effect]:
        if not self._is_current(event.attempt):
            return [Ignored("a worker of an attempt that is over")]
        is_newest = event.attempt == self._attempt
        if is_newest:
            self._registered.discard(event.worker)
        # A stopped process never ends its task: only Spark can make room for its replacement (G7).
        cancel: list[Effect] = [CancelJob(event.attempt.submission)] if event.is_silent and is_newest else []
        if self._is_serving() and event.attempt != self._deployed:
            return cancel or [Ignored("a worker of the stage's retry, which serves no generation yet")]
        failure = self._blames.lost(event) if self._blames.is_open else loss_of(event)  # G15
        if failure is None:
            return cancel or [Ignored("another worker has not said yet why it left")]
        return cancel + self._fail(failure, event.at_ms, event.jitter)

    def _on_worker_failed(self, event: WorkerFailed) -> list[Effect]:
        if not self._is_current(event.attempt):
            return [Ignored("a worker of an attempt that is over")]
        if self._is_serving() and event.attempt != self._deployed:
            return [Ignored("a worker of the stage's retry, which serves no generation yet")]
        if self._is_serving() and self._is_peer(event.peer, event.worker):
            return self._on_blame(event)
        return self._fail(event.failure, event.at_ms, event.jitter)

    def _is_peer(self, peer: WorkerIndex | None, worker: WorkerIndex) -> bool:
        return peer is not None and peer != worker and peer < self._workers_count

    def _on_blame(self, event: WorkerFailed) -> list[Effect]:  # G15
        was_open = self._blames.is_open
        failure = self._blames.report(event)
        if failure is not None:
            return self._fail(failure, event.at_ms, event.jitter)
        assert self._generation is not None
        if was_open:
            return [Ignored("another worker has not said yet why it left")]
        return [ArmTimer(PeerTimer(self._generation), self.PEER_WORD_MS)]

    def _is_current(self, attempt: AttemptId) -> bool:
        """Whether ``attempt`` serves the generation, or is the newest and not used up (G4)."""
        return attempt > self._fenced and attempt in (self._attempt, self._deployed)

    def _is_serving(self) -> bool:
        return self._phase in (Phase.DEPLOYING, Phase.RUNNING)

    def _on_generation_failed(self, event: GenerationFailed) -> list[Effect]:
        if event.generation != self._generation:
            return [Ignored("a generation that is over")]
        if self._phase in (Phase.PREPARING, Phase.BACKOFF) and event.failure.is_hopeless:
            return self._end(Finish(event.failure))  # G13: its coordinator has stopped for good, nobody would trigger
        return self._fail(event.failure, event.at_ms, event.jitter)

    def _fail(self, failure: Failure, at_ms: int, jitter: float) -> list[Effect]:
        """End the generation, if one runs, and decide about the next (G6)."""
        if self._is_over():
            return [Ignored("the run is ending")]
        if self._phase in (Phase.PREPARING, Phase.BACKOFF):
            return [Ignored("the next generation waits for other workers anyway")]
        ended = self._end_generation(is_done=False)
        if self._is_hopeless(failure):
            return ended + self._end(Finish(failure))
        decision = self._policy.on_failure(at_ms, jitter)
        if isinstance(decision, StayDown):
            final = Failure(failure.kind, f"{failure.reason}; {decision.reason}", failure.detail)
            return ended + self._end(Finish(final))
        self._restarts_count += 1
        self._enter(Phase.BACKOFF)
        restart = ArmTimer(RestartTimer(), decision.delay_ms)
        return [*ended, ReportRestart(failure, decision.delay_ms), restart]

    def _is_hopeless(self, failure: Failure) -> bool:
        """The same failure of user code twice in a row is deterministic (G8, F16)."""
        if failure.kind is not FailureKind.USER_CODE:
            return failure.is_hopeless
        before, self._last_user_failure = self._last_user_failure, failure
        return before == failure

    def _end_generation(self, *, is_done: bool) -> list[Effect]:
        self._blames.clear()
        self._fenced = max(self._fenced, self._deployed)
        if self._attempt <= self._fenced:  # else they belong to the stage's retry, which may serve the next one
            self._registered = set()
        generation, self._generation = self._generation, None
        return [] if generation is None else [EndGeneration(generation, is_done)]

    def _on_job_ended(self, event: JobEnded) -> list[Effect]:
        if event.submission != self._submission:
            return [Ignored("an earlier submission")]
        self._is_job_running = False
        if self._phase is Phase.ENDING:
            return self._finish_run()
        if self._blames.is_open:
            return [Ignored("a worker has not said yet why it left")]
        was_used_up = self._attempt <= self._fenced and self._attempt.submission == self._submission
        self._fenced = max(self._fenced, self._attempt)
        self._registered = set()
        if self._phase is Phase.PREPARING:
            if was_used_up:  # the job of the failed generation: its failure has been counted
                return self._submit_if_needed()
            if self._restarts_count == 0 and self._attempt.submission < self._submission:
                reason = event.error or "its tasks returned before they registered"
                return self._end(Finish(Failure(FailureKind.DETERMINISTIC, f"the Spark job did not start: {reason}")))
            return self._resubmit(event)
        if self._phase in (Phase.DEPLOYING, Phase.RUNNING):
            reason = event.error or "its tasks returned early"
            return self._fail(Failure(FailureKind.LOST, f"the Spark job ended: {reason}"), event.at_ms, event.jitter)
        return [Ignored("the job of the failed generation ended")]

    def _resubmit(self, event: JobEnded) -> list[Effect]:
        """The attempt died before all its workers had registered: that is a failure, too (G9)."""
        failure = Failure(FailureKind.LOST, f"the Spark job ended: {event.error or 'its tasks returned early'}")
        decision = self._policy.on_failure(event.at_ms, event.jitter)
        if isinstance(decision, StayDown):
            return self._end(Finish(Failure(failure.kind, f"{failure.reason}; {decision.reason}")))
        self._restarts_count += 1
        self._enter(Phase.BACKOFF)
        return [ReportRestart(failure, decision.delay_ms), ArmTimer(RestartTimer(), decision.delay_ms)]

    def _on_timer(self, event: TimerFired) -> list[Effect]:
        timer = event.timer
        match timer:
            case RestartTimer():
                return self._prepare() if self._phase is Phase.BACKOFF else [Ignored("no restart is waiting")]
            case RegisterTimer():
                if self._phase is not Phase.PREPARING or timer.submission != self._submission:
                    return [Ignored("the workers have registered")]
                if len(self._registered) == self._workers_count:
                    return [Ignored("the workers have registered")]
                return self._no_workers()
            case JobEndTimer():
                is_waiting = self._phase in (Phase.PREPARING, Phase.ENDING) and self._is_job_running
                if timer.submission != self._submission or not is_waiting or self._registered:
                    return [Ignored("the job has ended or its retry has come up")]
                self._cancels_count += 1
                if self._phase is Phase.ENDING and self._cancels_count > self.CANCELS_MAX:
                    return self._finish_run()  # the run's own work is done: do not hang on Spark (I5)
                again = ArmTimer(JobEndTimer(self._submission), self.JOB_END_TIMEOUT_MS)
                return [CancelJob(self._submission), again]
            case PeerTimer():
                if timer.generation != self._generation or not self._blames.is_open:
                    return [Ignored("everybody has said why it left")]
                return self._fail(self._blames.first, event.at_ms, event.jitter)
            case _:
                assert_never(timer)

    def _no_workers(self) -> list[Effect]:
        seconds = self.REGISTER_TIMEOUT_MS // 1000
        reason = (
            f"{len(self._registered)} of {self._workers_count} workers registered within {seconds} s: the cluster "
            "must have as many free slots as the parallelism, and its executors must reach the driver's address"
        )
        return self._end(Finish(Failure(FailureKind.LOST, reason)))

    # -- the end ------------------------------------------------------------------------------------------------

    def _on_generation_done(self, event: GenerationDone) -> list[Effect]:
        if event.generation != self._generation:
            return [Ignored("a generation that is over")]
        return self._end(Finish(None, event.is_final), is_done=True)

    def _on_cancel(self, event: CancelRequested) -> list[Effect]:
        if self._is_over():
            self._is_removal_due &= not event.retain  # C70: nothing is removed yet
            return [Ignored("the run is ending")]
        self._is_removal_due = not (self._retain_on_cancel or event.retain)
        return self._end(Finish(None, is_final=False))

    def _is_over(self) -> bool:
        return self._phase in (Phase.ENDING, Phase.REMOVING, Phase.ENDED)

    def _end(self, outcome: Finish, *, is_done: bool = False, is_of_claim: bool = False) -> list[Effect]:
        """Let the workers go, wait for Spark to be done with them, then finish (G11)."""
        if self._is_over():
            return [Ignored("the run is ending")]
        ended = self._end_generation(is_done=is_done)
        self._fenced, waiting = max(self._fenced, self._attempt), sorted(self._registered)
        self._registered = set()
        if is_done:  # nothing else ends a retry of the stage that came up meanwhile
            ended += [RefuseWorker(self._attempt, worker) for worker in waiting]
        self._outcome = outcome
        if outcome.failure is not None and not is_of_claim:
            self._is_removal_due |= self._is_removed_after(outcome.failure)
        self._enter(Phase.ENDING)
        self._cancels_count = 0
        if not self._is_job_running:
            return ended + self._finish_run()
        cancel: list[Effect] = [] if is_done else [CancelJob(self._submission)]
        return [*ended, *cancel, ArmTimer(JobEndTimer(self._submission), self.JOB_END_TIMEOUT_MS)]

    def _is_removed_after(self, failure: Failure) -> bool:
        """Whether nobody goes on from the checkpoints of a run that ended so (C70).

        What starting again may help, a keeper, a standby or the same command starts again; what failed before anything
        ran may be a mistake in the program that is new. A claim and a commit are what a removal begins with: if they
        succeed then, starting again would have helped.
        """
        is_for_good = failure.kind in (FailureKind.USER_CODE, FailureKind.DETERMINISTIC)
        return not self._retain_on_failure and self._has_run and is_for_good

    def _finish_run(self) -> list[Effect]:
        """The workers are gone: nobody writes any more."""
        if self._is_removal_due:
            self._is_removal_due = False
            self._enter(Phase.REMOVING)
            return [RemoveCheckpoints()]
        return self._finish()

    def _on_removed(self) -> list[Effect]:
        if self._phase is not Phase.REMOVING:
            raise self._violation("checkpoints were removed that nobody wanted removed")
        return self._finish()

    def _finish(self) -> list[Effect]:
        assert self._outcome is not None
        self._enter(Phase.ENDED)
        return [self._outcome]

    def _enter(self, phase: Phase) -> None:
        assert phase in LEGAL_PHASES[self._phase], f"{self._phase} → {phase}"
        self._phase = phase

    def _check(self) -> None:
        assert len(self._registered) <= self._workers_count
        if self._phase in (Phase.DEPLOYING, Phase.RUNNING):
            assert self._generation is not None
            assert self._deployed > self._fenced, "workers of a used-up attempt never run again (G4)"
        assert self._is_serving() or not self._blames.is_open, "only a generation at work waits for words (G15)"


__all__ = [
    "AlreadyFinished",
    "ArmTimer",
    "AttemptId",
    "Begin",
    "CancelJob",
    "CancelRequested",
    "CheckpointsRemoved",
    "ClaimFailed",
    "ClaimGeneration",
    "Deploy",
    "Effect",
    "EndGeneration",
    "Event",
    "Failure",
    "FailureKind",
    "Finish",
    "GenerationDone",
    "GenerationFailed",
    "GenerationReady",
    "Ignored",
    "JobEndTimer",
    "JobEnded",
    "PeerTimer",
    "Phase",
    "RefuseWorker",
    "RegisterTimer",
    "RemoveCheckpoints",
    "ReportRestart",
    "RestartTimer",
    "StartCoordinator",
    "SubmitJob",
    "Supervisor",
    "Timer",
    "TimerFired",
    "WorkerFailed",
    "WorkerLost",
    "WorkerReady",
    "WorkerRegistered",
]
