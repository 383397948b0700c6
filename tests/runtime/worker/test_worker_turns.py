"""What ends a turn of a subtask, and when barriers that came are told (UA4)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.clocks import HandClock, HandTimed

import headgate as hg
from headgate.codec.messages import Failed, HeartbeatReply, Stop
from headgate.model.failure import Failure, FailureKind
from headgate.model.ids import WorkerIndex
from headgate.runtime.wire.connection import ConnectionLost
from headgate.runtime.worker.worker import PEER_GRACE_MS, PeerLost, Worker, WorkerTask


def worker_of(clock: HandClock) -> Worker:
    pipeline = hg.Pipeline("p", parallelism=1, checkpointing=hg.Checkpointing(alignment_timeout="10ms"))
    pipeline.source(hg.FromRows([{"x": 1}])).sink(hg.Discard())
    task = WorkerTask(pipeline.definition(), WorkerIndex(0), 1, 1, "127.0.0.1", 0, b"", "127.0.0.1", "")
    return Worker(task, HandTimed(clock))


def test_a_turn_ends_for_an_arrival_a_message_and_a_timeout() -> None:
    clock = HandClock(passed_ms=5)
    worker = worker_of(clock)
    runner = SimpleNamespace(deadline_ms=None)
    worker._runners = [cast(Any, SimpleNamespace(deadline_ms=None)), cast(Any, runner)]
    assert not worker._is_interrupted()
    runner.deadline_ms = 7
    assert not worker._is_interrupted()
    clock.advance(2, date_step_ms=0)
    assert worker._is_interrupted(), "one has aligned for long enough"
    runner.deadline_ms = None
    worker._post(HeartbeatReply())
    assert worker._is_interrupted()
    worker._mail.clear()
    worker._on_arrival()
    assert worker._is_interrupted()


@pytest.mark.parametrize("is_told", [True, False])
def test_a_worker_that_had_no_turn_reads_why_its_peer_left_before_it_gives_up(is_told: bool) -> None:  # CN16
    clock = HandClock(passed_ms=5)
    worker = worker_of(clock)
    worker._report_metrics = lambda: None  # type: ignore[method-assign]

    def sleep(now_ms: int) -> None:
        clock.advance(10 * PEER_GRACE_MS)
        if is_told:
            worker._post(Stop("done", is_success=True))

    worker._sleep = sleep  # type: ignore[method-assign]
    worker._post(PeerLost(WorkerIndex(1), "closed by the other side"))
    if is_told:
        worker._loop()
        assert worker._stopping == Stop("done", is_success=True)
    else:
        with pytest.raises(PeerLost):
            worker._loop()


def test_a_worker_says_which_peer_it_cannot_go_on_without() -> None:  # G15
    worker = worker_of(HandClock(passed_ms=5))
    said = worker._last_words(PeerLost(WorkerIndex(1), "it was closed by the other side"))
    reason = "the data connection with worker 1 was lost: it was closed by the other side"
    assert said == Failed(0, Failure(FailureKind.LOST, reason), 1)
    assert worker._last_words(ValueError("mine")).peer is None
    never = worker._last_words(ConnectionLost("worker 1", "it did not connect within 30 s"))
    assert never.failure.kind is FailureKind.LOST, "no function of the user failed"


def test_arrivals_are_told_before_anybody_has_a_turn() -> None:
    worker = worker_of(HandClock(passed_ms=5))
    done: list[str] = []

    class Noting:
        """Stands for a subtask; the barrier that it sends on arrives at another one."""

        deadline_ms = None

        def note_arrivals(self) -> None:
            done.append("told")
            if len(done) < 3:
                worker._on_arrival()

        def step(self) -> bool:
            done.append("turn")
            return True

        def tick(self, now_ms: int) -> None:
            if len(done) > 4:
                worker._stopping = Stop("enough")

    worker._runners = [cast(Any, Noting())]
    worker._report_metrics = lambda: None  # type: ignore[method-assign]
    worker._on_arrival()
    worker._loop()
    assert done == ["told", "turn", "told", "turn", "turn"]
