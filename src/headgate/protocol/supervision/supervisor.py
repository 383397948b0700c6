"""What the supervisor waits for, and what may follow (drawn in docs/spec/supervision.md)."""

from __future__ import annotations

from enum import Enum
from typing import assert_never

from headgate.model.config import RestartStrategy
from headgate.model.failure import Failure, FailureKind
from headgate.model.ids import Generation, WorkerIndex
from headgate.protocol.machine import Ignored, Machine
from headgate.protocol.supervision.restart_policy import Restarts, StayDown
from headgate.protocol.supervision.supervisor_events import (
    AlreadyFinished,
    ArmTimer,
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
    TimerFired,
    WorkerFailed,
    WorkerLost,
    WorkerReady,
    WorkerRegistered,
)
from headgate.protocol.supervision.workers import SparkJob, WorkerRegistry


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


class RootCause:
    """What was heard of one generation since a worker blamed a peer, or since its job ended."""

    def __init__(self, workers_count: int) -> None:
        self._workers_count = workers_count
        self._reports: dict[WorkerIndex, WorkerFailed] = {}
        self._losses: dict[WorkerIndex, Failure] = {}
        self._job_end: Failure | None = None

    @property
    def is_open(self) -> bool:
        """Whether the word of a worker is awaited."""
        return bool(self._reports) or self._job_end is not None

    @property
    def first(self) -> Failure:
        """What was said first by a worker; without one, the end of the job."""
        report = next(iter(self._reports.values()), None)
        found = self._job_end if report is None else report.failure
        assert found is not None, "something was said"
        return found

    def job_ended(self, failure: Failure) -> None:
        """Record that Spark says that the job has ended: a worker may have said why, and was not heard yet."""
        self._job_end = failure

    def report(self, event: WorkerFailed) -> Failure | None:
        """Record that ``event.peer`` is blamed. Return the cause if no other report is awaited any more."""
        assert event.peer is not None, "a report that blames names its peer"
        self._reports.setdefault(event.worker, event)
        return self._cause()

    def lost(self, event: WorkerLost) -> Failure | None:
        """Record that a worker is gone and reports no more. Return the cause if no other report is awaited any more."""
        self._losses.setdefault(event.worker, loss_of(event))
        return self._cause()

    def clear(self) -> None:
        """The generation is over."""
        self._reports.clear()
        self._losses.clear()
        self._job_end = None

    def _cause(self) -> Failure | None:
        """A peer that left without a word is the cause; if all have spoken, the connections between them are."""
        if not self._reports:
            return self._job_end if len(self._losses) >= self._workers_count else None
        blamed = [report.peer for report in self._reports.values() if report.peer not in self._reports]
        if not all(peer in self._losses for peer in blamed):
            return None
        return next((self._losses[peer] for peer in blamed if peer is not None), self.first)


def loss_of(event: WorkerLost) -> Failure:
    """Return the failure that the loss of a worker is."""
    return Failure(FailureKind.LOST, f"worker {event.worker} was lost: {event.reason}")


class Removal:
    """Whether the checkpoints are removed at the end: by configuration, cancellation and the last failure."""

    def __init__(self, *, retain_on_cancel: bool, retain_on_failure: bool) -> None:
        self._retain_on_cancel = retain_on_cancel
        self._retain_on_failure = retain_on_failure
        self._is_due = False

    @property
    def is_due(self) -> bool:
        """Whether they are to be removed, and the removal has not begun."""
        return self._is_due

    def cancelled(self, *, retain: bool) -> None:
        """Record that the run is cancelled; ``retain``: and its checkpoints stay."""
        self._is_due = not (self._retain_on_cancel or retain)

    def cancelled_again(self, *, retain: bool) -> None:
        """The run is ending already: nothing is removed yet, so they may still be kept (C70)."""
        self._is_due &= not retain

    def failed(self, failure: Failure, *, has_run: bool) -> None:
        """The run ends with ``failure``; ``has_run``: any generation ran."""
        self._is_due |= self._is_after(failure, has_run=has_run)

    def _is_after(self, failure: Failure, *, has_run: bool) -> bool:
        """Whether no later start continues from the checkpoints of a run that ended so (C70).

        A supervisor, a standby or the same command starts again after a failure that a restart may mend; a failure
        before anything ran may be a new mistake in the program. A claim and a commit are what a removal begins with:
        if they succeed then, starting again would have helped.
        """
        is_for_good = failure.kind in (FailureKind.USER_CODE, FailureKind.DETERMINISTIC)
        return not self._retain_on_failure and has_run and is_for_good

    def begin(self) -> bool:
        """Return whether to remove them now; once."""
        is_due, self._is_due = self._is_due, False
        return is_due


class Supervisor(Machine):
    """Decides about generations and restarts. ``job`` is the Spark job, with its limits of time."""

    PEER_WORD_MS = 5_000
    """Who is blamed has sent its words before its peer could notice: only a driver without a turn hears them later."""

    UNEXPLAINED_MAX = 2
    """Jobs in a row that started no worker, of which Spark does not say why: one may be a loss, two are a reason."""

    def __init__(
        self,
        workers_count: int,
        strategy: RestartStrategy,
        *,
        retain_on_cancel: bool = True,
        retain_on_failure: bool = True,
    ) -> None:
        super().__init__()
        self.job = SparkJob()
        self._workers = WorkerRegistry(workers_count)
        self._restarts = Restarts(strategy)
        self._removal = Removal(retain_on_cancel=retain_on_cancel, retain_on_failure=retain_on_failure)
        self._phase = Phase.CREATED
        self._generation: Generation | None = None
        self._is_claiming = False
        self._has_run = False
        """Whether any generation ran: only then a failing storage is a failure to wait out, not a wrong setting."""
        self._had_workers = False
        """Whether the pipeline ever had as many workers, in another driver or in this one: its slots are not just
        asked for wrongly."""
        self._unexplained_count = 0
        self._blames = RootCause(workers_count)
        self._outcome: Finish | None = None

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
        return self._restarts.count

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
        # a claim that is under way, or one that no attempt could use, serves this attempt
        claim: list[Effect] = []
        if self._generation is None and not self._is_claiming:
            self._is_claiming = True
            claim = [ClaimGeneration()]
        return claim + self.job.want_workers()

    def _on_generation_ready(self, event: GenerationReady) -> list[Effect]:
        self._is_claiming = False
        if self._phase not in (Phase.PREPARING, Phase.BACKOFF):
            return [Ignored("no generation is being prepared")]
        # also during a delay: the attempt that it was for has failed, and the next one uses it
        assert self._generation is None, "one generation at a time (G2)"
        self._generation = event.generation
        self._had_workers |= event.workers_before == self._workers.workers_count
        return self._deploy_if_complete()

    def _on_claim_failed(self, event: ClaimFailed) -> list[Effect]:
        self._is_claiming = False
        if self._phase not in (Phase.PREPARING, Phase.BACKOFF):
            return [Ignored("no generation is being prepared")]
        if event.failure.kind is not FailureKind.LOST or not self._has_run:
            return self._end(Finish(event.failure), is_of_claim=True)
        decision = self._restarts.after_claim(event.at_ms, event.jitter)  # storage may come back (F11)
        if isinstance(decision, StayDown):
            return self._end(Finish(event.failure))
        return self._back_off(event.failure, decision.delay_ms)

    def _on_registered(self, event: WorkerRegistered) -> list[Effect]:
        if self._is_over() or not self._workers.admit(event.attempt, event.worker):
            return [RefuseWorker(event.attempt, event.worker)]
        return self._deploy_if_complete()

    def _deploy_if_complete(self) -> list[Effect]:  # G3
        if self._phase is not Phase.PREPARING or self._generation is None:
            return [Ignored("the generation is not claimed yet")]
        if not self._workers.is_complete:
            return [Ignored("other workers have not registered yet")]
        self._enter(Phase.DEPLOYING)
        self._had_workers = True
        return [Deploy(self._generation, self._workers.deploy())]

    def _on_ready(self, event: WorkerReady) -> list[Effect]:
        if self._phase is not Phase.DEPLOYING or event.generation != self._generation:
            return [Ignored("not of the generation being deployed")]
        if not self._workers.ready(event.worker):
            return [Ignored("other workers are not ready yet")]
        self._enter(Phase.RUNNING)
        self._has_run = True
        return [StartCoordinator(event.generation)]  # G10

    # -- failures -----------------------------------------------------------------------------------------------

    def _on_lost(self, event: WorkerLost) -> list[Effect]:
        if not self._workers.is_current(event.attempt):
            return [Ignored("a worker of an attempt that is over")]
        is_newest = self._workers.leave(event.attempt, event.worker)
        # A stopped process never ends its task: only Spark can make room for its replacement (G7).
        cancel: list[Effect] = [CancelJob(event.attempt.submission)] if event.is_silent and is_newest else []
        if self._is_serving() and not self._workers.is_deployed(event.attempt):
            return cancel or [Ignored("a worker of the stage's retry, which serves no generation yet")]
        failure = self._blames.lost(event) if self._blames.is_open else loss_of(event)  # G15
        if failure is None:
            return cancel or [Ignored("another worker has not said yet why it left")]
        return cancel + self._fail(failure, event.at_ms, event.jitter)

    def _on_worker_failed(self, event: WorkerFailed) -> list[Effect]:
        if not self._workers.is_current(event.attempt):
            return [Ignored("a worker of an attempt that is over")]
        if self._is_serving() and not self._workers.is_deployed(event.attempt):
            return [Ignored("a worker of the stage's retry, which serves no generation yet")]
        if self._is_serving() and self._blames_peer(event):
            return self._on_blame(event)
        return self._fail(event.failure, event.at_ms, event.jitter)

    def _blames_peer(self, event: WorkerFailed) -> bool:
        return event.peer is not None and event.peer != event.worker and self._workers.is_member(event.peer)

    def _on_blame(self, event: WorkerFailed) -> list[Effect]:  # G15
        was_open = self._blames.is_open
        failure = self._blames.report(event)
        if failure is not None:
            return self._fail(failure, event.at_ms, event.jitter)
        assert self._generation is not None, "only a generation at work fails by a peer"
        if was_open:  # the timer runs since the first report
            return [Ignored("another worker has not said yet why it left")]
        return [ArmTimer(PeerTimer(self._generation), self.PEER_WORD_MS)]

    def _is_serving(self) -> bool:
        return self._phase in (Phase.DEPLOYING, Phase.RUNNING)

    def _on_generation_failed(self, event: GenerationFailed) -> list[Effect]:
        if event.generation != self._generation:
            return [Ignored("a generation that is over")]
        if self._phase in (Phase.PREPARING, Phase.BACKOFF) and event.failure.is_permanent:
            return self._end(Finish(event.failure))  # G13: its coordinator has stopped for good, nothing would trigger
        return self._fail(event.failure, event.at_ms, event.jitter)

    def _fail(self, failure: Failure, at_ms: int, jitter: float) -> list[Effect]:
        """End the generation, if one runs, and decide about the next (G6)."""
        if self._is_over():
            return [Ignored("the run is ending")]
        if self._phase in (Phase.PREPARING, Phase.BACKOFF):
            return [Ignored("the next generation waits for other workers anyway")]
        # a restart begins: the workers of the generation leave, then the strategy says when the next one is claimed
        return self._end_generation(is_done=False) + self._restart(failure, at_ms, jitter)

    def _restart(self, failure: Failure, at_ms: int, jitter: float) -> list[Effect]:
        decision = self._restarts.after(failure, at_ms, jitter)
        if isinstance(decision, Failure):
            return self._end(Finish(decision))
        return self._back_off(failure, decision.delay_ms)

    def _back_off(self, failure: Failure, delay_ms: int) -> list[Effect]:
        self._enter(Phase.BACKOFF)
        return [ReportRestart(failure, delay_ms), ArmTimer(RestartTimer(), delay_ms)]

    def _end_generation(self, *, is_done: bool) -> list[Effect]:
        self._blames.clear()
        # while the job runs, Spark's retry may have registered already, for the next generation (G5)
        if self.job.is_running:
            self._workers.retire_deployed()
        else:
            self._workers.retire_all()
        generation, self._generation = self._generation, None
        return [] if generation is None else [EndGeneration(generation, is_done)]

    def _on_job_ended(self, event: JobEnded) -> list[Effect]:
        if not self.job.is_newest(event.submission):
            return [Ignored("an earlier submission")]
        self.job.ended()
        if self._phase is Phase.ENDING:
            return self._finish_run()
        if self._blames.is_open:
            return [Ignored("a worker has not said yet why it left")]
        if self._is_serving():
            return self._hold_end(event)
        # asked before all are retired, which would make it true of any job
        was_used_up = self._workers.is_used_up(event.submission)
        self._workers.retire_all()
        if self._phase is Phase.PREPARING:
            if was_used_up:  # the job of the failed generation: its failure has been counted
                return self.job.want_workers()
            if not self._had_workers and self._cannot_start(event):
                reason = "its tasks returned before they registered" if event.failure is None else event.failure.reason
                return self._end(Finish(Failure(FailureKind.DETERMINISTIC, f"the Spark job did not start: {reason}")))
            # The attempt died before all its workers had registered: that is a failure, too (G9).
            return self._restart(_end_of(event), event.at_ms, event.jitter)
        return [Ignored("the job of the failed generation ended")]

    def _hold_end(self, event: JobEnded) -> list[Effect]:  # G15
        """Wait for what the workers say last: the end of their job may be heard before it."""
        assert self._generation is not None, "workers serve a claimed generation (G3)"
        self._blames.job_ended(_end_of(event))
        return [ArmTimer(PeerTimer(self._generation), self.PEER_WORD_MS)]

    def _cannot_start(self, event: JobEnded) -> bool:
        """Whether a job would end in the same way again, as far as anybody can tell (G9)."""
        kind = FailureKind.UNEXPLAINED if event.failure is None else event.failure.kind
        if kind is not FailureKind.UNEXPLAINED or self._workers.has_come_up(event.submission):
            self._unexplained_count = 0
            return kind is FailureKind.DETERMINISTIC
        self._unexplained_count += 1
        return self._unexplained_count >= self.UNEXPLAINED_MAX

    def _on_timer(self, event: TimerFired) -> list[Effect]:
        timer = event.timer
        match timer:
            case RestartTimer():
                return self._prepare() if self._phase is Phase.BACKOFF else [Ignored("no restart is waiting")]
            case RegisterTimer():
                return self._on_register_timer(event, timer)
            case JobEndTimer():
                return self._on_job_end_timer(timer)
            case PeerTimer():
                if timer.generation != self._generation or not self._blames.is_open:
                    return [Ignored("all have said why they left")]
                return self._fail(self._blames.first, event.at_ms, event.jitter)
            case _:
                assert_never(timer)

    def _on_register_timer(self, event: TimerFired, timer: RegisterTimer) -> list[Effect]:
        is_waiting = self._phase is Phase.PREPARING and self.job.is_newest(timer.submission)
        if not is_waiting or self._workers.is_complete:
            return [Ignored("the workers have registered")]
        reason = (
            f"{self._workers.count} of {self._workers.workers_count} workers registered within "
            f"{self.job.REGISTER_TIMEOUT_MS // 1000} s: the cluster must have as many free slots as the parallelism, "
            "and its executors must reach the driver's address"
        )
        failure = Failure(FailureKind.LOST, reason)
        if not self._had_workers:
            return self._end(Finish(failure))
        # Spark may not know yet that a machine is gone, and starts them there; an heir comes at such a time (F7).
        cancel: list[Effect] = [CancelJob(timer.submission)]
        return cancel + self._restart(failure, event.at_ms, event.jitter)

    def _on_job_end_timer(self, timer: JobEndTimer) -> list[Effect]:
        is_waiting = self._phase in (Phase.PREPARING, Phase.ENDING) and self.job.is_running
        if not self.job.is_newest(timer.submission) or not is_waiting or self._workers.count:
            return [Ignored("the job has ended or its retry has come up")]
        again = self.job.cancel_again()
        if self._phase is Phase.ENDING and self.job.is_deaf:
            return self._finish_run()  # the run's own work is done: do not hang on Spark (I5)
        return again

    # -- the end ------------------------------------------------------------------------------------------------

    def _on_generation_done(self, event: GenerationDone) -> list[Effect]:
        if event.generation != self._generation:
            return [Ignored("a generation that is over")]
        return self._end(Finish(None, event.is_final), is_done=True)

    def _on_cancel(self, event: CancelRequested) -> list[Effect]:
        if self._is_over():
            self._removal.cancelled_again(retain=event.retain)
            return [Ignored("the run is ending")]
        self._removal.cancelled(retain=event.retain)
        return self._end(Finish(None, is_final=False))

    def _is_over(self) -> bool:
        return self._phase in (Phase.ENDING, Phase.REMOVING, Phase.ENDED)

    def _end(self, outcome: Finish, *, is_done: bool = False, is_of_claim: bool = False) -> list[Effect]:
        """Let the workers go, wait for Spark to be done with them, then finish (G11)."""
        if self._is_over():
            return [Ignored("the run is ending")]
        ended = self._end_generation(is_done=is_done)
        waiting = self._workers.retire_all()
        if is_done:  # nothing else ends a retry of the stage that came up meanwhile
            ended += [RefuseWorker(self._workers.newest, worker) for worker in waiting]
        self._outcome = outcome
        if outcome.failure is not None and not is_of_claim:
            self._removal.failed(outcome.failure, has_run=self._has_run)
        self._enter(Phase.ENDING)
        if not self.job.is_running:
            return ended + self._finish_run()
        return ended + self.job.let_go(is_killed=not is_done)

    def _finish_run(self) -> list[Effect]:
        """Finish the run: the workers are gone, so nothing is written any more."""
        if self._removal.begin():
            self._enter(Phase.REMOVING)
            return [RemoveCheckpoints()]
        return self._finish()

    def _on_removed(self) -> list[Effect]:
        if self._phase is not Phase.REMOVING:
            raise self._violation("checkpoints were removed without an order")
        return self._finish()

    def _finish(self) -> list[Effect]:
        assert self._outcome is not None, "a run ends with an outcome"
        assert self._generation is None, "no generation outlives the run (G11)"
        self._enter(Phase.ENDED)
        return [self._outcome]

    def _enter(self, phase: Phase) -> None:
        assert phase in LEGAL_PHASES[self._phase], f"{self._phase} → {phase}"
        self._phase = phase

    def _check(self) -> None:
        self._workers.check(is_serving=self._is_serving())
        assert not self._is_over() or self._outcome is not None, "a run that ends has an outcome (G11)"
        assert not self._is_claiming or self._generation is None, "one generation at a time (G2)"
        assert not self._is_over() or self._generation is None, "no generation outlives the run (G11)"
        assert not self._is_serving() or self._generation is not None, "workers serve a claimed generation (G3)"
        assert self._is_serving() or not self._blames.is_open, "only a generation at work waits for words (G15)"


def _end_of(event: JobEnded) -> Failure:
    reason = "its tasks returned early" if event.failure is None else event.failure.reason
    return Failure(FailureKind.LOST, f"the Spark job ended: {reason}")
