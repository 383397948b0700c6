"""Who asks a driver for something is answered once, and forgotten."""

from __future__ import annotations

from concurrent.futures import Future

from headgate.model.ids import CheckpointId
from headgate.model.progress import CheckpointOutcome, RunResult
from headgate.runtime.driver.supervisor_host import ENDED, PendingRequests

OUTCOME = CheckpointOutcome(CheckpointId(3))


def test_the_first_answer_counts() -> None:
    asked, answer = PendingRequests(Future()).new()
    answer(OUTCOME)
    answer(ENDED)
    assert asked.result(0) == OUTCOME


def test_the_end_of_the_run_answers_whoever_waits() -> None:
    end: Future[RunResult] = Future()
    answers = PendingRequests(end)
    first, answer = answers.new()
    second, _ = answers.new()
    answer(OUTCOME)
    end.set_exception(RuntimeError("over"))
    assert first.result(0) == OUTCOME
    assert second.result(0) == ENDED
    assert answers.new()[0].result(0) == ENDED, "and whoever asks behind it"


def test_nothing_is_kept_of_whoever_is_answered() -> None:
    end: Future[RunResult] = Future()
    answers = PendingRequests(end)
    callbacks = len(end._done_callbacks)  # type: ignore[attr-defined]
    for _ in range(100):
        _, answer = answers.new()
        assert len(answers) == 1
        answer(OUTCOME)
    assert len(answers) == 0
    assert len(end._done_callbacks) == callbacks, "the end of a run of months knows nobody"  # type: ignore[attr-defined]
