"""Checkpoints on request: who is answered when, and with what."""

from __future__ import annotations

import pytest
from tests.protocol.checkpoints.coordinating import (
    INTERVAL,
    PAUSE,
    STARTED,
    A,
    B,
    acked,
    begin,
    coordinator,
    decline,
    expiry,
    finish,
    reserved,
    written,
)
from tests.protocol.making import cp

from headgate.protocol.checkpoints.coordinator import Coordinator
from headgate.protocol.checkpoints.coordinator_events import (
    AbortReason,
    AnswerRequest,
    CheckpointRequested,
    Event,
    ReserveFailed,
    ReserveId,
    StopRequested,
)


def answers(machine: Coordinator, *events: Event) -> list[AnswerRequest]:
    return [e for event in events for e in machine.handle(event) if isinstance(e, AnswerRequest)]


# C60
def test_a_request_is_answered_when_its_checkpoint_is_completed() -> None:
    machine = coordinator(STARTED, min_pause_ms=700)
    assert machine.handle(CheckpointRequested(1)) == [ReserveId(cp(10))]
    assert answers(machine, reserved(10), *acked(10)) == []
    assert answers(machine, written(10)) == [AnswerRequest(1, cp(10))]
    assert answers(machine, PAUSE, *begin(11), *acked(11), written(11)) == [], "once"


# C60
def test_a_checkpoint_that_had_begun_before_serves_no_request() -> None:
    machine = coordinator(STARTED, *begin(10))
    assert answers(machine, CheckpointRequested(1), CheckpointRequested(2), *acked(10), written(10)) == []
    assert answers(machine, reserved(11), *acked(11), written(11)) == [
        AnswerRequest(1, cp(11)),
        AnswerRequest(2, cp(11)),
    ], "the next one serves both"


# C61
def test_a_newer_completion_answers_too() -> None:
    machine = coordinator(STARTED, max_concurrent=2)
    machine.handle(CheckpointRequested(1))
    assert answers(machine, reserved(10), *begin(11), *acked(11), written(11)) == [AnswerRequest(1, cp(11))]


# C61
@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (expiry(10), AbortReason.EXPIRED),
        (decline(10, AbortReason.SNAPSHOT_FAILED), AbortReason.SNAPSHOT_FAILED),
        (decline(10), AbortReason.OVERTAKEN),
    ],
)
def test_a_request_is_answered_with_the_reason_of_a_failure(event: Event, reason: AbortReason) -> None:  # C61
    machine = coordinator(STARTED, CheckpointRequested(1), reserved(10), tolerable_failures=2)
    assert answers(machine, event) == [AnswerRequest(1, None, reason.text)]
    assert answers(machine, *begin(11), *acked(11), written(11)) == []


# C61
def test_a_request_whose_id_cannot_be_recorded_is_answered() -> None:
    machine = coordinator(STARTED, CheckpointRequested(1), tolerable_failures=2)
    assert answers(machine, ReserveFailed(cp(10))) == [AnswerRequest(1, None, AbortReason.RESERVE_FAILED.text)]


# C62
def test_requests_are_refused_outside_the_run() -> None:
    assert answers(coordinator(), CheckpointRequested(1)) == [AnswerRequest(1, None, "not every subtask runs yet")]
    (stopping,) = answers(coordinator(STARTED, StopRequested()), CheckpointRequested(1))
    assert stopping.reason == "the pipeline stops, and takes its last checkpoint"
    (ending,) = answers(coordinator(STARTED, finish(A), finish(B)), CheckpointRequested(1))
    assert ending.reason == "all input is processed, and the final checkpoint is being taken"


# C60
def test_a_request_that_waits_when_the_pipeline_is_stopped_gets_the_last_checkpoint() -> None:
    machine = coordinator(STARTED, *begin(10), CheckpointRequested(1))
    assert answers(machine, INTERVAL, StopRequested(), reserved(11), *acked(11)) == []
    assert answers(machine, written(11)) == [AnswerRequest(1, cp(11))]


# C60, C62
def test_a_request_made_while_an_id_is_recorded_is_served_by_that_checkpoint() -> None:
    machine = coordinator(STARTED, INTERVAL, CheckpointRequested(1), finish(A), finish(B))
    assert answers(machine, reserved(10), *acked(10)) == []
    assert answers(machine, written(10)) == [AnswerRequest(1, cp(10))], "though it turned out to be the final one"
