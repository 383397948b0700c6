"""Requests are answered once, and workers get their deployment when a generation begins."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from tests.runtime.driver.test_coordinator_host import definition

from headgate.codec import messages
from headgate.model.ids import CheckpointId, Generation, WorkerIndex
from headgate.model.manifest import Manifest
from headgate.model.progress import CheckpointOutcome, RunResult
from headgate.runtime.driver.restart import NewGeneration
from headgate.runtime.driver.supervisor_host import ENDED, LiveGeneration, PendingRequests

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


# -- what the workers of a generation are sent when it begins -----


def deployed(restored: Manifest | None) -> messages.Deploy:
    """Return what the only worker of a generation that continues from ``restored`` is sent."""
    sent: list[Any] = []
    nothing: Any = SimpleNamespace()
    begun = NewGeneration(Generation(2), CheckpointId(8), restored, (), nothing)
    live = LiveGeneration(definition(), begun, nothing, nothing, lambda note: None, nothing, nothing)
    worker: Any = SimpleNamespace(
        worker=WorkerIndex(0), address=messages.Address("127.0.0.1", 1), connection=SimpleNamespace(send=sent.append)
    )
    live.deploy([worker])
    (deploy,) = sent
    assert isinstance(deploy, messages.Deploy)
    return deploy


@pytest.mark.parametrize("is_draining", [True, False])
def test_sources_of_a_drained_checkpoint_are_told_so_before_they_can_read(is_draining: bool) -> None:  # E9
    """An order to drain would come behind the first records."""
    restored = Manifest(CheckpointId(7), Generation(1), 1, 128, (), is_draining=is_draining)
    assert deployed(restored).is_draining is is_draining


def test_a_first_start_does_not_drain() -> None:
    assert deployed(None).is_draining is False
