"""Which registrations belong together, guessed from rising task-attempt ids."""

from __future__ import annotations

from headgate.model.ids import WorkerIndex
from headgate.protocol.supervision.supervisor_events import AttemptId
from headgate.runtime.driver.workers import StageAttempts


def register(attempts: StageAttempts, submission: int, worker: int, task: int) -> list[tuple[AttemptId, int]]:
    return [(a, int(w)) for a, w in attempts.register(submission, WorkerIndex(worker), task)]


def test_workers_of_one_stage_attempt_belong_together() -> None:
    attempts = StageAttempts(2)
    assert register(attempts, 1, 0, 10) == [(AttemptId(1, 0), 0)]
    assert register(attempts, 1, 1, 11) == [(AttemptId(1, 0), 1)]


def test_after_a_loss_the_stage_retry_is_a_new_attempt() -> None:
    attempts = StageAttempts(2)
    register(attempts, 1, 0, 10)
    register(attempts, 1, 1, 11)
    attempts.lost(AttemptId(1, 0))
    assert register(attempts, 1, 1, 13) == [(AttemptId(1, 1), 1)]
    assert register(attempts, 1, 0, 12) == [(AttemptId(1, 1), 0)]


def test_a_retry_that_registers_before_the_loss_is_seen_ends_up_in_one_attempt_of_its_own() -> None:
    attempts = StageAttempts(2)
    register(attempts, 1, 0, 10)
    register(attempts, 1, 1, 11)
    assert register(attempts, 1, 0, 12)[-1] == (AttemptId(1, 1), 0)  # with a neighbour that may be a wrong guess
    assert register(attempts, 1, 1, 13) == [(AttemptId(1, 2), 0), (AttemptId(1, 2), 1)]


def test_a_late_task_of_an_earlier_attempt_does_not_join_a_newer_one() -> None:
    attempts = StageAttempts(2)
    register(attempts, 1, 0, 12)
    [(attempt, _)] = register(attempts, 1, 0, 10)
    assert attempt < AttemptId(1, 0)


def test_a_member_that_came_before_the_stale_one_was_replaced_is_carried_over() -> None:
    attempts = StageAttempts(2)
    register(attempts, 1, 0, 10)  # its stage attempt died before worker 1 registered
    register(attempts, 1, 1, 13)
    assert register(attempts, 1, 0, 12) == [(AttemptId(1, 1), 1), (AttemptId(1, 1), 0)]


def test_an_earlier_submission_never_joins() -> None:
    attempts = StageAttempts(1)
    register(attempts, 2, 0, 20)
    assert register(attempts, 1, 0, 10) == [(AttemptId(1, 0), 0)]
    assert register(attempts, 3, 0, 30) == [(AttemptId(3, 0), 0)]
