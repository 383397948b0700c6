"""Generations, workers, failures and restarts in one driver (docs/spec/supervision.md)."""

from __future__ import annotations

import pytest
from tests.protocol.making import cp, gen

from headgate.errors import ProtocolViolation
from headgate.model.config import FixedDelay, NoRestart, RestartStrategy
from headgate.model.failure import Failure, FailureKind
from headgate.model.ids import WorkerIndex
from headgate.protocol.machine import Ignored
from headgate.protocol.supervision.supervisor import Phase, Supervisor
from headgate.protocol.supervision.supervisor_events import (
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
from headgate.protocol.supervision.workers import SparkJob

REGISTER_MS, JOB_END_MS = SparkJob.REGISTER_TIMEOUT_MS, SparkJob.END_TIMEOUT_MS
LOST, USER, DETERMINISTIC = FailureKind.LOST, FailureKind.USER_CODE, FailureKind.DETERMINISTIC


def supervisor(*events: Event, strategy: RestartStrategy = FixedDelay(delay_ms=50)) -> Supervisor:  # noqa: B008
    made = Supervisor(2, strategy)
    for event in events:
        made.handle(event)
    return made


def registered(worker: int, submission: int = 1, attempt: int = 0) -> WorkerRegistered:
    return WorkerRegistered(AttemptId(submission, attempt), WorkerIndex(worker))


def ready(worker: int, generation: int = 1) -> WorkerReady:
    return WorkerReady(gen(generation), WorkerIndex(worker))


def lost(worker: int, submission: int = 1, attempt: int = 0, *, is_silent: bool = False) -> WorkerLost:
    return WorkerLost(AttemptId(submission, attempt), WorkerIndex(worker), "connection reset", 0, 0.5, is_silent)


def user_failed(reason: str = "ZeroDivisionError in 'step'", attempt: int = 0, submission: int = 1) -> WorkerFailed:
    return WorkerFailed(AttemptId(submission, attempt), WorkerIndex(0), Failure(USER, reason, "trace"), 0, 0.5)


def job_ended(reason: str | None = "killed", submission: int = 1, kind: FailureKind = LOST) -> JobEnded:
    return JobEnded(submission, None if reason is None else Failure(kind, reason), 0, 0.5)


def fired(timer: Timer) -> TimerFired:
    return TimerFired(timer, 0, 0.5)


RESTART = fired(RestartTimer())


def ready_generation(generation: int) -> GenerationReady:
    return GenerationReady(gen(generation))


def workers(submission: int = 1, attempt: int = 0) -> tuple[Event, ...]:
    return registered(0, submission, attempt), registered(1, submission, attempt)


def running(generation: int = 1, submission: int = 1, attempt: int = 0) -> tuple[Event, ...]:
    """Events from a claim to running workers."""
    attempt_workers = workers(submission, attempt)
    return (ready_generation(generation), *attempt_workers, ready(0, generation), ready(1, generation))


RUN = (Begin(), *running())
WAIT_FOR_RETRY = [ArmTimer(JobEndTimer(1), JOB_END_MS), ArmTimer(RegisterTimer(1), REGISTER_MS)]
WORKER_LOST = Failure(LOST, "worker 0 was lost: connection reset")


def restarting(failure: Failure, generation: int = 1) -> list[Effect]:
    return [EndGeneration(gen(generation), False), ReportRestart(failure, 50), ArmTimer(RestartTimer(), 50)]


# -- a generation begins --------------------------------------------------------------------------------------------


def test_a_run_claims_and_submits_side_by_side() -> None:  # G1, G2
    machine = supervisor()
    assert machine.handle(Begin()) == [ClaimGeneration(), SubmitJob(1), ArmTimer(RegisterTimer(1), REGISTER_MS)]
    with pytest.raises(ProtocolViolation, match="begun twice"):
        machine.handle(Begin())


def test_the_claim_may_come_before_the_workers() -> None:  # G3
    machine = supervisor(Begin())
    assert machine.handle(ready_generation(1)) == [Ignored("other workers have not registered yet")]
    assert machine.handle(registered(1)) == [Ignored("other workers have not registered yet")]
    assert machine.handle(registered(0)) == [Deploy(gen(1), AttemptId(1, 0))]


def test_the_workers_may_come_before_the_claim() -> None:  # G3
    machine = supervisor(Begin(), registered(0))
    assert machine.handle(registered(1)) == [Ignored("the generation is not claimed yet")]
    assert machine.handle(ready_generation(1)) == [Deploy(gen(1), AttemptId(1, 0))]


def test_workers_of_two_attempts_are_never_mixed() -> None:  # G3
    machine = supervisor(Begin(), ready_generation(1), registered(0))
    assert machine.handle(registered(1, attempt=1)) == [Ignored("other workers have not registered yet")]
    assert machine.handle(registered(1)) == [RefuseWorker(AttemptId(1, 0), WorkerIndex(1))]
    assert machine.handle(registered(0, attempt=1)) == [Deploy(gen(1), AttemptId(1, 1))]


def test_the_coordinator_starts_when_every_worker_is_ready() -> None:  # G10
    machine = supervisor(Begin(), ready_generation(1), *workers())
    assert machine.handle(ready(0)) == [Ignored("other workers are not ready yet")]
    assert machine.handle(ready(1, generation=9)) == [Ignored("not of the generation being deployed")]
    assert machine.handle(ready(1)) == [StartCoordinator(gen(1))]
    assert (machine.phase, machine.generation, machine.restarts_count) == (Phase.RUNNING, 1, 0)


def test_a_claim_that_failed_ends_the_run() -> None:  # G1
    failure = Failure(DETERMINISTIC, "the checkpoint does not fit")
    machine = supervisor(Begin())
    assert machine.handle(ClaimFailed(failure)) == [CancelJob(1), ArmTimer(JobEndTimer(1), JOB_END_MS)]
    assert machine.handle(job_ended()) == [Finish(failure)]


def test_a_pipeline_that_has_finished_is_not_started_again() -> None:  # R13
    machine = supervisor(Begin())
    assert machine.handle(AlreadyFinished(cp(9))) == [CancelJob(1), ArmTimer(JobEndTimer(1), JOB_END_MS)]
    assert machine.handle(ready_generation(1)) == [Ignored("no generation is being prepared")]
    assert machine.handle(ClaimFailed(WORKER_LOST)) == [Ignored("no generation is being prepared")]
    assert machine.handle(job_ended(None)) == [Finish(None, is_final=True)]


# -- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("events", [RUN, RUN[:-2]], ids=["running", "deploying"])
def test_the_loss_of_one_worker_ends_the_whole_generation(events: tuple[Event, ...]) -> None:  # G6
    machine = supervisor(*events)
    assert machine.handle(lost(0)) == restarting(WORKER_LOST)
    assert (machine.phase, machine.generation, machine.restarts_count) == (Phase.BACKOFF, None, 1)
    assert machine.handle(lost(1)) == [Ignored("a worker of an attempt that is over")]
    assert machine.handle(user_failed()) == [Ignored("a worker of an attempt that is over")]


def test_after_the_delay_the_retry_of_spark_itself_is_awaited() -> None:  # G5
    machine = supervisor(*RUN, lost(0))
    assert machine.handle(RESTART) == [ClaimGeneration(), *WAIT_FOR_RETRY]
    for event in (registered(0, attempt=1), registered(1, attempt=1)):
        machine.handle(event)
    assert machine.handle(ready_generation(2)) == [Deploy(gen(2), AttemptId(1, 1))]


def test_workers_that_spark_started_again_during_the_delay_are_kept() -> None:  # G5
    machine = supervisor(*RUN, lost(0), *workers(attempt=1), RESTART)
    assert machine.handle(ready_generation(2)) == [Deploy(gen(2), AttemptId(1, 1))]


def test_a_job_that_ended_is_submitted_again() -> None:  # G5
    machine = supervisor(*RUN, lost(0))
    assert machine.handle(job_ended()) == [Ignored("the job of the failed generation ended")]
    assert machine.handle(RESTART) == [ClaimGeneration(), SubmitJob(2), ArmTimer(RegisterTimer(2), REGISTER_MS)]
    assert machine.handle(job_ended()) == [Ignored("an earlier submission")]


def test_a_job_that_ends_after_the_delay_is_submitted_again_without_counting_twice() -> None:  # G5, G9
    machine = supervisor(*RUN, lost(0), RESTART)
    assert machine.handle(job_ended()) == [SubmitJob(2), ArmTimer(RegisterTimer(2), REGISTER_MS)]
    assert machine.restarts_count == 1


def test_workers_of_a_used_up_attempt_are_refused() -> None:  # G4
    machine = supervisor(*RUN, lost(0))
    refused = [RefuseWorker(AttemptId(1, 0), WorkerIndex(1))]
    assert machine.handle(registered(1)) == refused
    machine.handle(RESTART)
    assert machine.handle(registered(1)) == refused


def test_a_retry_that_registers_does_not_hide_the_loss_of_a_deployed_worker() -> None:  # G4
    machine = supervisor(*RUN, registered(0, attempt=1))
    waiting = "a worker of the stage's retry, which serves no generation yet"
    assert machine.handle(lost(0, attempt=1)) == [Ignored(waiting)]
    assert machine.handle(lost(0)) == restarting(WORKER_LOST)


def test_a_retry_that_registered_early_serves_the_next_generation() -> None:  # G4, G5
    machine = supervisor(*RUN, *workers(attempt=1), lost(0))
    assert ClaimGeneration() in machine.handle(RESTART)
    assert machine.handle(ready_generation(2)) == [Deploy(gen(2), AttemptId(1, 1))]


def test_a_retry_that_waits_when_all_is_done_is_sent_away() -> None:  # G11
    effects = supervisor(*RUN, registered(0, attempt=1)).handle(GenerationDone(gen(1), is_final=True))
    assert RefuseWorker(AttemptId(1, 1), WorkerIndex(0)) in effects


def test_workers_that_died_during_the_delay_are_not_deployed() -> None:  # G4
    machine = supervisor(*RUN, lost(0), *workers(attempt=1), job_ended(), RESTART)
    assert machine.handle(ready_generation(2)) == [Ignored("other workers have not registered yet")]
    machine.handle(registered(0, submission=2))
    assert machine.handle(registered(1, submission=2)) == [Deploy(gen(2), AttemptId(2, 0))]


def test_a_silent_worker_has_its_job_cancelled() -> None:  # G7
    assert supervisor(*RUN).handle(lost(0, is_silent=True)) == [CancelJob(1), *restarting(WORKER_LOST)]


def test_a_worker_lost_before_the_deployment_must_register_again() -> None:  # G3
    machine = supervisor(Begin(), *workers())
    assert machine.handle(lost(0)) == [Ignored("the next generation waits for other workers anyway")]
    assert machine.handle(ready_generation(1)) == [Ignored("other workers have not registered yet")]


def test_the_same_failure_of_user_code_twice_in_a_row_is_final() -> None:  # G8
    machine = supervisor(*RUN)
    failure = Failure(USER, "ZeroDivisionError in 'step'", "trace")
    assert machine.handle(user_failed()) == restarting(failure)
    for event in (RESTART, *running(2, attempt=1)):
        machine.handle(event)
    assert machine.handle(user_failed(attempt=1)) == [
        EndGeneration(gen(2), False),
        CancelJob(1),
        ArmTimer(JobEndTimer(1), JOB_END_MS),
    ]
    assert machine.handle(job_ended()) == [Finish(failure)]


def test_another_failure_of_user_code_is_tried_again() -> None:  # G8
    machine = supervisor(*RUN, user_failed("first"), RESTART, *running(2, attempt=1))
    assert machine.handle(user_failed("second", attempt=1)) == restarting(Failure(USER, "second", "trace"), 2)


def test_a_failure_that_cannot_go_away_is_final_at_once() -> None:  # G8
    failure = Failure(DETERMINISTIC, "another driver took over")
    machine = supervisor(*RUN)
    assert machine.handle(GenerationFailed(gen(1), failure, 0, 0.5)) == [
        EndGeneration(gen(1), False),
        CancelJob(1),
        ArmTimer(JobEndTimer(1), JOB_END_MS),
    ]
    assert machine.handle(job_ended()) == [Finish(failure)]


def test_the_strategy_that_gives_up_ends_the_run_with_both_reasons() -> None:  # G6, C40
    machine = supervisor(*RUN, strategy=NoRestart())
    assert machine.handle(lost(0)) == [
        EndGeneration(gen(1), False),
        CancelJob(1),
        ArmTimer(JobEndTimer(1), JOB_END_MS),
    ]
    reason = "worker 0 was lost: connection reset; the restart strategy is 'none'"
    assert machine.handle(job_ended()) == [Finish(Failure(LOST, reason))]


def test_a_coordinator_of_an_earlier_generation_changes_nothing() -> None:  # C9
    machine = supervisor(*RUN, lost(0), RESTART, *running(2, attempt=1))
    assert machine.handle(GenerationFailed(gen(1), WORKER_LOST, 0, 0.5)) == [Ignored("a generation that is over")]
    assert machine.handle(GenerationDone(gen(1), True)) == [Ignored("a generation that is over")]


def test_a_failed_generation_is_restarted() -> None:  # G6
    failure = Failure(LOST, "checkpoint 4 failed")
    assert supervisor(*RUN).handle(GenerationFailed(gen(1), failure, 0, 0.5)) == restarting(failure)


# -- the Spark job --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [(), (ready_generation(1),), (registered(0),)])
def test_a_job_that_cannot_start_is_final(before: tuple[Event, ...]) -> None:  # G9
    final = Failure(DETERMINISTIC, "the Spark job did not start: no polars there")
    assert supervisor(Begin(), *before).handle(job_ended("no polars there", kind=DETERMINISTIC))[-1] == Finish(final)
    once = supervisor(Begin(), *before, job_ended(), RESTART)
    assert once.handle(job_ended("no polars there", 2, DETERMINISTIC))[-1] == Finish(final)


@pytest.mark.parametrize("events", [(Begin(),), RUN[:2], (Begin(), registered(0)), RUN[:3], RUN[:4], RUN[:5], RUN])
def test_an_executor_that_dies_at_any_moment_of_the_first_start_is_a_failure(events: tuple[Event, ...]) -> None:  # G9
    machine = supervisor(*events, job_ended("executor 0 was lost"), lost(0), lost(1))
    assert machine.phase is Phase.BACKOFF
    for submission in range(2, 9):
        machine.handle(RESTART)
        machine.handle(job_ended("executor 0 was lost", submission))
        assert machine.phase is Phase.BACKOFF, "the strategy decides, each time"


@pytest.mark.parametrize("reason", ["a riddle", None])
def test_what_spark_does_not_explain_is_final_the_second_time(reason: str | None) -> None:  # G9
    def unexplained(submission: int) -> JobEnded:
        return job_ended(reason, submission, FailureKind.UNEXPLAINED)

    machine = supervisor(Begin(), unexplained(1), RESTART, job_ended("killed", 2), RESTART, unexplained(3))
    assert machine.phase is Phase.BACKOFF, "not twice in a row"
    machine.handle(RESTART)
    told = reason or "its tasks returned before they registered"
    assert machine.handle(unexplained(4)) == [Finish(Failure(DETERMINISTIC, f"the Spark job did not start: {told}"))]


def test_a_pipeline_that_had_its_workers_starts_again_whatever_spark_says() -> None:  # G9
    """A machine that is new to the cluster may be wrong, and another one is not."""
    for kind in (DETERMINISTIC, FailureKind.UNEXPLAINED):
        machine = supervisor(*RUN, lost(0), job_ended(), RESTART)
        for submission in (2, 3, 4):
            machine.handle(job_ended("no polars there", submission, kind))
            assert machine.phase is Phase.BACKOFF
            machine.handle(RESTART)


def test_an_attempt_that_dies_before_all_have_registered_counts_as_a_failure() -> None:  # G9
    machine = supervisor(Begin(), ready_generation(1), registered(0))
    failure = Failure(LOST, "the Spark job ended: killed")
    assert machine.handle(job_ended()) == [ReportRestart(failure, 50), ArmTimer(RestartTimer(), 50)]
    assert machine.handle(RESTART) == [SubmitJob(2), ArmTimer(RegisterTimer(2), REGISTER_MS)], "its claim still holds"
    assert machine.handle(registered(1)) == [RefuseWorker(AttemptId(1, 0), WorkerIndex(1))]


def test_such_failures_are_limited_by_the_strategy() -> None:  # G9
    machine = supervisor(Begin(), registered(0), strategy=NoRestart())
    reason = "the Spark job ended: killed; the restart strategy is 'none'"
    assert machine.handle(job_ended()) == [Finish(Failure(LOST, reason))]


EARLY = Failure(LOST, "the Spark job ended: its tasks returned early")
"""What a generation ends by if its job ends and no worker says why."""


def test_a_job_that_ends_while_running_ends_the_generation_when_all_connections_have_ended() -> None:  # G6, G15
    machine = supervisor(*RUN)
    assert machine.handle(job_ended(None)) == [ArmTimer(PeerTimer(gen(1)), Supervisor.PEER_WORD_MS)]
    assert machine.handle(lost(0)) == HELD
    assert machine.handle(lost(1)) == restarting(EARLY)
    assert machine.handle(RESTART) == [ClaimGeneration(), SubmitJob(2), ArmTimer(RegisterTimer(2), REGISTER_MS)]


def test_a_connection_that_does_not_end_is_not_waited_for_when_the_job_has_ended() -> None:  # G15
    machine = supervisor(*RUN, registered(0, attempt=1), job_ended(None), lost(0))
    assert machine.handle(fired(PeerTimer(gen(1)))) == restarting(EARLY)
    machine.handle(RESTART)
    machine.handle(ready_generation(2))
    again = machine.handle(registered(1, attempt=1))
    assert again == [RefuseWorker(AttemptId(1, 1), WorkerIndex(1))], "workers of an ended job serve no generation (G4)"


def test_what_a_worker_said_is_the_cause_although_the_end_of_its_job_is_heard_first() -> None:  # G15
    assert supervisor(*RUN, job_ended(), lost(1)).handle(user_failed()) == restarting(user_failed().failure)
    both = supervisor(*RUN, job_ended(), blames(1, 0))
    assert both.handle(user_failed()) == restarting(user_failed().failure)


def test_a_generation_that_is_done_is_done_although_the_end_of_its_job_is_heard_first() -> None:  # G15
    assert supervisor(*RUN, job_ended()).handle(GenerationDone(gen(1), True))[-1] == Finish(None, True)


def test_too_few_workers_within_the_time_limit_end_the_run() -> None:  # G12
    machine = supervisor(Begin(), registered(0))
    assert machine.handle(fired(RegisterTimer(1))) == [CancelJob(1), ArmTimer(JobEndTimer(1), JOB_END_MS)]
    (finish,) = machine.handle(job_ended())
    assert isinstance(finish, Finish)
    assert finish.failure is not None
    assert finish.failure.reason.startswith("1 of 2 workers registered within 120 s: the cluster must have as many")


def test_workers_that_do_not_come_back_are_a_failure_that_the_restart_strategy_decides_about() -> None:  # G12
    machine = supervisor(*RUN, lost(0), job_ended(), RESTART, ready_generation(2), registered(1, submission=2))
    cancel, report, timer = machine.handle(fired(RegisterTimer(2)))
    assert cancel == CancelJob(2)
    assert isinstance(report, ReportRestart)
    assert report.failure.reason.startswith("1 of 2 workers registered within 120 s")
    assert isinstance(timer, ArmTimer)
    assert timer.timer == RestartTimer()
    assert machine.handle(job_ended(submission=2)) == [Ignored("the job of the failed generation ended")]
    assert machine.handle(RESTART) == [SubmitJob(3), ArmTimer(RegisterTimer(3), REGISTER_MS)], "its claim still holds"


def test_workers_that_do_not_come_back_are_waited_for_only_as_often_as_the_restart_strategy_says() -> None:  # G12
    once = FixedDelay(delay_ms=50, attempts=1)
    machine = supervisor(*RUN, lost(0), job_ended(), RESTART, ready_generation(2), strategy=once)
    cancel, *ending = machine.handle(fired(RegisterTimer(2)))
    assert cancel == CancelJob(2)
    assert ending == [EndGeneration(gen(2), False), CancelJob(2), ArmTimer(JobEndTimer(2), JOB_END_MS)]
    (finish,) = machine.handle(job_ended(submission=2))
    assert isinstance(finish, Finish)


def test_an_heir_waits_for_workers_as_often_as_the_restart_strategy_says() -> None:  # G12
    heir = supervisor(Begin(), GenerationReady(gen(7), workers_before=2), strategy=FixedDelay(delay_ms=50, attempts=1))
    cancel, report, timer = heir.handle(fired(RegisterTimer(1)))
    assert cancel == CancelJob(1)
    assert isinstance(report, ReportRestart)
    assert timer == ArmTimer(RestartTimer(), 50)
    heir.handle(job_ended())
    assert heir.handle(RESTART) == [SubmitJob(2), ArmTimer(RegisterTimer(2), REGISTER_MS)]
    assert heir.handle(fired(RegisterTimer(2)))[-1] == ArmTimer(JobEndTimer(2), JOB_END_MS), "it gives up"
    other = supervisor(Begin(), GenerationReady(gen(7), workers_before=1))
    assert other.handle(fired(RegisterTimer(1)))[-1] == ArmTimer(JobEndTimer(1), JOB_END_MS), "it may want too many"


@pytest.mark.parametrize("events", [RUN, (Begin(), *workers()), (*RUN, lost(0))])
def test_the_register_timer_is_harmless_once_all_have_registered(events: tuple[Event, ...]) -> None:  # G12
    assert supervisor(*events).handle(fired(RegisterTimer(1))) == [Ignored("the workers have registered")]


def test_a_retry_of_spark_gets_the_full_time_to_register() -> None:  # G12
    machine = supervisor(*RUN, lost(0))
    assert ArmTimer(RegisterTimer(1), REGISTER_MS) in machine.handle(RESTART), "re-arming replaces the old timer"


def test_a_job_that_neither_ends_nor_comes_back_is_cancelled_again_and_again() -> None:  # G12
    machine = supervisor(*RUN, lost(0), RESTART)
    for _ in range(2):
        assert machine.handle(fired(JobEndTimer(1))) == [CancelJob(1), ArmTimer(JobEndTimer(1), JOB_END_MS)]
    machine.handle(registered(0, attempt=1))
    assert machine.handle(fired(JobEndTimer(1))) == [Ignored("the job has ended or its retry has come up")]


@pytest.mark.parametrize(
    ("events", "timer", "why"),
    [
        (RUN, JobEndTimer(1), "the job has ended or its retry has come up"),
        ((*RUN, lost(0), job_ended(), RESTART), JobEndTimer(1), "the job has ended or its retry has come up"),
        ((*RUN, lost(0), job_ended(), RESTART), RegisterTimer(1), "the workers have registered"),
        (RUN, RestartTimer(), "no restart is waiting"),
    ],
)
def test_a_timer_that_is_not_waited_for_is_ignored(events: tuple[Event, ...], timer: Timer, why: str) -> None:  # G12
    assert supervisor(*events).handle(fired(timer)) == [Ignored(why)]


# -- the end --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_final", [True, False])
def test_a_generation_that_is_done_lets_its_workers_return(is_final: bool) -> None:  # G11
    machine = supervisor(*RUN)
    assert machine.handle(GenerationDone(gen(1), is_final)) == [
        EndGeneration(gen(1), True),
        ArmTimer(JobEndTimer(1), JOB_END_MS),
    ]
    assert machine.handle(lost(0)) == [Ignored("a worker of an attempt that is over")]
    assert machine.handle(registered(0, attempt=1)) == [RefuseWorker(AttemptId(1, 1), WorkerIndex(0))]
    assert machine.handle(job_ended(None)) == [Finish(None, is_final)]
    assert machine.phase is Phase.ENDED


def test_workers_that_do_not_return_are_killed() -> None:  # G11, G12
    machine = supervisor(*RUN, GenerationDone(gen(1), True))
    assert machine.handle(fired(JobEndTimer(1))) == [CancelJob(1), ArmTimer(JobEndTimer(1), JOB_END_MS)]


def test_a_cancelled_run_kills_its_job_and_waits_for_it() -> None:  # G11
    machine = supervisor(*RUN)
    assert machine.handle(CancelRequested()) == [
        EndGeneration(gen(1), False),
        CancelJob(1),
        ArmTimer(JobEndTimer(1), JOB_END_MS),
    ]
    assert machine.handle(CancelRequested()) == [Ignored("the run is ending")]
    assert machine.handle(job_ended()) == [Finish(None)]


@pytest.mark.parametrize("events", [(), (*RUN, lost(0), job_ended())], ids=["created", "backoff"])
def test_a_run_without_a_job_is_cancelled_at_once(events: tuple[Event, ...]) -> None:  # G11
    assert supervisor(*events).handle(CancelRequested()) == [Finish(None)]


def test_a_run_does_not_hang_on_a_job_that_never_ends() -> None:  # G11
    machine = supervisor(*RUN, CancelRequested())
    again = [CancelJob(1), ArmTimer(JobEndTimer(1), JOB_END_MS)]
    for _ in range(SparkJob.CANCELS_MAX):
        assert machine.handle(fired(JobEndTimer(1))) == again
    assert machine.handle(fired(JobEndTimer(1))) == [Finish(None)]


def test_a_generation_that_is_replaced_before_it_is_deployed_ends_the_run() -> None:  # G13
    made = supervisor(Begin(), GenerationReady(gen(1)), registered(0))
    replaced = Failure(FailureKind.REPLACED, "generation 2 was claimed by another driver")
    assert made.handle(GenerationFailed(gen(1), replaced, 0, 0.5)) == [
        EndGeneration(gen(1), is_done=False),
        CancelJob(1),
        ArmTimer(JobEndTimer(1), JOB_END_MS),
    ]
    assert made.handle(job_ended("cancelled")) == [Finish(replaced)]


def test_a_generation_that_is_replaced_while_a_restart_waits_ends_the_run() -> None:  # G13
    made = supervisor(*RUN, lost(0), GenerationReady(gen(2)))
    replaced = Failure(FailureKind.REPLACED, "generation 3 was claimed by another driver")
    assert made.handle(GenerationFailed(gen(2), replaced, 0, 0.5))[0] == EndGeneration(gen(2), is_done=False)
    assert made.handle(job_ended("cancelled")) == [Finish(replaced)]


@pytest.mark.parametrize("kind", list(FailureKind))
def test_what_is_done_about_a_failure_goes_by_its_kind_and_not_by_its_words(kind: FailureKind) -> None:
    words = "it was silent for 5 s; peer-lost; user-function"
    effects = supervisor(*RUN).handle(WorkerFailed(AttemptId(1, 0), WorkerIndex(0), Failure(kind, words), 0, 0.5))
    is_over = kind in (FailureKind.DETERMINISTIC, FailureKind.DENIED, FailureKind.REPLACED)
    delay_ms = 0 if kind is FailureKind.DAMAGED else 50
    assert (ReportRestart(Failure(kind, words), delay_ms) in effects) is not is_over
    assert (CancelJob(1) in effects) is is_over, "a lost worker's words do not cancel the job"


def blames(worker: int, peer: int, attempt: int = 0) -> WorkerFailed:
    """Worker ``worker`` says that ``peer`` left."""
    reason = f"the data connection with worker {peer} was lost: it was closed by the other side"
    return WorkerFailed(AttemptId(1, attempt), WorkerIndex(worker), Failure(LOST, reason), 0, 0.5, WorkerIndex(peer))


HELD = [Ignored("another worker has not said yet why it left")]


def test_who_is_blamed_is_heard_before_its_peer_is_believed() -> None:  # G15
    machine = supervisor(*RUN)
    assert machine.handle(blames(1, 0)) == [ArmTimer(PeerTimer(gen(1)), Supervisor.PEER_WORD_MS)]
    assert machine.handle(lost(1)) == HELD, "it has said why it leaves"
    assert machine.handle(job_ended()) == [Ignored("a worker has not said yet why it left")]
    assert machine.handle(user_failed()) == restarting(user_failed().failure)
    assert machine.handle(fired(PeerTimer(gen(1)))) == [Ignored("all have said why they left")]
    assert machine.handle(RESTART) == [ClaimGeneration(), SubmitJob(2), ArmTimer(RegisterTimer(2), REGISTER_MS)]


def test_who_is_blamed_and_gone_without_a_word_is_the_cause() -> None:  # G15
    assert supervisor(*RUN, blames(1, 0)).handle(lost(0)) == restarting(WORKER_LOST)
    silent = supervisor(*RUN, blames(1, 0)).handle(lost(0, is_silent=True))
    assert silent == [CancelJob(1), *restarting(WORKER_LOST)], "a stopped process still has its job cancelled (G7)"


def test_workers_that_blame_each_other_have_lost_their_connection() -> None:  # G15
    machine = supervisor(*RUN, blames(1, 0))
    assert machine.handle(blames(0, 1)) == restarting(blames(1, 0).failure)


def test_a_blame_is_followed_to_the_one_who_left_first() -> None:  # G15
    three = Supervisor(3, FixedDelay(delay_ms=50))
    for event in (Begin(), GenerationReady(gen(1)), *map(registered, range(3)), *map(ready, range(3))):
        three.handle(event)
    three.handle(blames(2, 1))
    assert three.handle(lost(0)) == HELD, "nobody has blamed it yet"
    assert three.handle(blames(1, 0)) == restarting(WORKER_LOST)


def test_nobody_waits_for_ever_for_who_is_blamed() -> None:  # G15
    machine = supervisor(*RUN, blames(1, 0))
    assert machine.handle(fired(PeerTimer(gen(7)))) == [Ignored("all have said why they left")]
    assert machine.handle(fired(PeerTimer(gen(1)))) == restarting(blames(1, 0).failure)
    assert machine.handle(user_failed()) == [Ignored("a worker of an attempt that is over")]


@pytest.mark.parametrize("peer", [1, 2, 9])
def test_who_blames_itself_or_nobody_is_believed_at_once(peer: int) -> None:  # G15
    assert supervisor(*RUN).handle(blames(1, peer)) == restarting(blames(1, peer).failure)


def test_a_blame_of_one_generation_is_nothing_to_the_next() -> None:  # G15
    machine = supervisor(*RUN, blames(1, 0), CancelRequested())
    assert machine.handle(lost(0)) == [Ignored("a worker of an attempt that is over")]
    machine = supervisor(*RUN, blames(1, 0))
    failed = GenerationFailed(gen(1), Failure(DETERMINISTIC, "no"), 0, 0.5)
    assert machine.handle(failed)[0] == EndGeneration(gen(1), is_done=False), "what is known is not waited for"


def removing(
    *events: Event,
    on_cancel: bool = False,
    on_failure: bool = False,
    strategy: RestartStrategy = NoRestart(),  # noqa: B008
) -> Supervisor:
    made = Supervisor(2, strategy, retain_on_cancel=not on_cancel, retain_on_failure=not on_failure)
    for event in events:
        made.handle(event)
    return made


def test_checkpoints_of_a_cancelled_run_are_removed_when_nobody_writes_any_more() -> None:  # C70, C71
    machine = removing(*RUN, on_cancel=True)
    ended = machine.handle(CancelRequested())
    assert not any(isinstance(effect, RemoveCheckpoints) for effect in ended)
    assert machine.handle(job_ended()) == [RemoveCheckpoints()]
    assert machine.handle(CancelRequested()) == [Ignored("the run is ending")]
    assert machine.handle(registered(0, attempt=1)) == [RefuseWorker(AttemptId(1, 1), WorkerIndex(0))]
    assert machine.handle(CheckpointsRemoved()) == [Finish(None)]


def test_a_cancel_between_two_generations_removes_too() -> None:  # C70
    machine = removing(*RUN, lost(0), job_ended(), on_cancel=True, strategy=FixedDelay(delay_ms=50))
    assert machine.handle(CancelRequested()) == [RemoveCheckpoints()]


def test_who_cancels_may_retain_all_the_same() -> None:  # C70
    machine = removing(*RUN, CancelRequested(retain=True), on_cancel=True)
    assert machine.handle(job_ended()) == [Finish(None)]


def test_whoever_says_retain_before_anything_is_removed_is_heard() -> None:  # C70
    """The second signal behind a cancel, or a second thought."""
    machine = removing(*RUN, CancelRequested(), CancelRequested(retain=True), CancelRequested(), on_cancel=True)
    assert machine.handle(job_ended()) == [Finish(None)]
    failed = GenerationFailed(gen(1), Failure(DETERMINISTIC, "it cannot work"), 0, 0.5)
    machine = removing(*RUN, failed, CancelRequested(retain=True), on_failure=True)
    assert machine.handle(job_ended()) == [Finish(failed.failure)]
    machine = removing(*RUN, CancelRequested(), job_ended(), on_cancel=True)
    assert machine.handle(CancelRequested(retain=True)) == [Ignored("the run is ending")], "too late"


@pytest.mark.parametrize(
    ("failure", "is_removed"),
    [
        (Failure(USER, "the function raises"), True),
        (Failure(DETERMINISTIC, "it cannot work"), True),
        (Failure(LOST, "the cluster is away"), False),
        (Failure(FailureKind.REPLACED, "generation 2 was claimed"), False),
    ],
    ids=lambda value: value.kind.value if isinstance(value, Failure) else "",
)
def test_only_what_starting_again_does_not_help_is_removed(failure: Failure, is_removed: bool) -> None:  # C70
    machine = removing(*RUN, GenerationFailed(gen(1), failure, 0, 0.5), on_failure=True)
    effects = machine.handle(job_ended())
    assert (effects == [RemoveCheckpoints()]) == is_removed
    assert removing(*RUN, GenerationFailed(gen(1), failure, 0, 0.5)).handle(job_ended()) != [RemoveCheckpoints()]


def test_a_program_that_never_ran_removes_nothing() -> None:  # C70
    """A mistake in a changed program must not cost the checkpoints of the former one."""
    machine = removing(Begin(), on_failure=True)
    machine.handle(ClaimFailed(Failure(DETERMINISTIC, "the state does not fit"), 0, 0.5))
    assert machine.handle(job_ended()) == [Finish(Failure(DETERMINISTIC, "the state does not fit"))]
    machine = removing(Begin(), ready_generation(1), *workers(), on_failure=True)
    missing = Failure(DETERMINISTIC, "a module is missing")
    machine.handle(WorkerFailed(AttemptId(1, 0), WorkerIndex(0), missing, 0, 0.5))
    assert machine.handle(job_ended()) == [Finish(missing)]


def test_a_claim_that_failed_removes_nothing() -> None:  # C70
    """A removal begins with the same claim. If that succeeds now, starting again would have helped."""
    again = (*RUN, lost(0), job_ended(), RESTART)
    machine = removing(*again, on_failure=True, strategy=FixedDelay(delay_ms=50))
    denied = Failure(DETERMINISTIC, "ConnectionError: the target of the sink does not answer")
    machine.handle(ClaimFailed(denied, 0, 0.5))
    assert machine.handle(JobEnded(2, "cancelled", 0, 0.5)) == [Finish(denied)]


def test_a_commit_that_was_denied_removes_nothing() -> None:  # C70, K5
    denied = Failure(FailureKind.DENIED, "cannot commit checkpoint 3: ConnectionError")
    machine = removing(*RUN, GenerationFailed(gen(1), denied, 0, 0.5), on_failure=True)
    assert machine.handle(job_ended()) == [Finish(denied)]
    assert denied.is_permanent


def test_a_run_that_ends_well_removes_nothing() -> None:  # C70
    machine = removing(*RUN, GenerationDone(gen(1), False), on_cancel=True, on_failure=True)
    assert machine.handle(job_ended(None)) == [Finish(None)]


def test_nothing_is_removed_that_nobody_wanted_removed() -> None:  # C70
    with pytest.raises(ProtocolViolation, match="without an order"):
        removing(*RUN).handle(CheckpointsRemoved())
