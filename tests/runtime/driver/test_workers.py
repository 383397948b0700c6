"""Registered workers: their stage attempts, and the notes about lost ones."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import headgate as hg
from headgate.codec import messages
from headgate.model.failure import Failure, FailureKind
from headgate.model.ids import WorkerIndex
from headgate.protocol.supervision import supervisor_events
from headgate.protocol.supervision.supervisor_events import AttemptId
from headgate.runtime.driver import workers as module
from headgate.runtime.driver.workers import StageAttempts, Workers
from headgate.runtime.wire.control import Loss


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


# -- what users are told of a worker that is lost -----


KILLED = messages.Obituary(70, "was ended by SIGKILL", "first\n\nlast")


class Connection:
    """The driver's end of a control channel, without a network."""

    def send(self, message: messages.ToWorker) -> None:
        """Nobody hears it."""


class Told:
    """The workers of a driver of two, and what it says of them."""

    def __init__(self) -> None:
        p = hg.Pipeline("p", parallelism=2)
        p.source(hg.FromRows([{"n": 1}])).sink(hg.Discard())
        self.events: list[supervisor_events.Event] = []
        self.notes: list[str] = []
        timers: Any = SimpleNamespace(post=lambda call: call())
        self.workers = Workers(p.definition(), "f", timers, self.events.append, lambda *_: None, self.notes.append)

    def registered(self, worker: int, pid: int, attempt: int = 0) -> Any:
        """Return the connection of a process that has become ``worker``."""
        connection = Connection()
        address = messages.Address("here", 1)
        self.say(connection, messages.Register(worker, 2, 1, 10 * attempt + worker, address, pid, "f"))
        return connection

    def say(self, connection: Any, message: messages.FromWorker) -> None:
        self.workers._on_message(connection, message)

    def lose(self, connection: Any) -> None:
        self.workers._on_lost(connection, Loss("its connection was closed"))

    def reasons(self) -> list[str]:
        return [event.reason for event in self.events if isinstance(event, supervisor_events.WorkerLost)]


@pytest.fixture
def told() -> Iterator[Told]:
    made = Told()
    yield made
    made.workers.close()


def test_a_lost_worker_is_named_by_process_and_host_and_later_how_it_ended(told: Told) -> None:
    first, second = told.registered(0, 70), told.registered(1, 71)
    told.lose(first)
    assert told.reasons() == ["process 70 on here: its connection was closed"]
    told.workers.stop(told.workers.records[0].attempt, is_success=False)
    told.lose(second)
    heir, other = told.registered(0, 80, 1), told.registered(1, 81, 1)
    for connection in (heir, other):  # both know
        told.say(connection, KILLED)
        told.say(connection, messages.Obituary(71, "was ended by SIGKILL"))  # by Spark: it had to leave
    assert told.notes == [
        "worker 0, process 70 on here, was ended by SIGKILL; the last that it wrote:\n    first\n    \n    last"
    ]


def test_a_worker_that_wrote_nothing_is_told_of_in_a_line(told: Told) -> None:
    told.lose(told.registered(0, 70))
    told.say(told.registered(0, 80, 1), messages.Obituary(70, "ended with exit code 3"))
    assert told.notes == ["worker 0, process 70 on here, ended with exit code 3"]


def test_nobody_wonders_about_a_worker_that_has_said_why(told: Told) -> None:
    connection = told.registered(0, 70)
    told.say(connection, messages.Failed(1, Failure(FailureKind.USER_CODE, "operator 'map' failed")))
    told.lose(connection)
    refused = told.registered(1, 71)
    told.workers.refuse(told.workers.records[0].attempt, WorkerIndex(1))
    told.lose(refused)
    heir = told.registered(0, 80, 1)
    told.say(heir, KILLED)
    told.say(heir, messages.Obituary(71, "was ended by SIGKILL"))
    assert told.notes == []


def test_deaths_that_nobody_tells_of_are_forgotten(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UNEXPLAINED_MAX", 2)
    monkeypatch.setattr(module, "LINES_SHOWN", 1)
    for pid in (70, 71, 72):
        told.lose(told.registered(0, pid, pid))
    heir = told.registered(0, 80, 100)
    for pid in (70, 71, 72):
        told.say(heir, messages.Obituary(pid, "was ended by SIGKILL", "first\nlast"))
    assert [note.splitlines()[1:] for note in told.notes] == [["    last"], ["    last"]]
