"""The driver against workers that a test plays by hand over real control connections."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tests.runtime.launching import FINGERPRINT
from tests.runtime.running import definition_of, pipeline_at

import headgate as hg
from headgate.codec import messages
from headgate.errors import FencedError, PipelineFailed
from headgate.model.failure import Failure, FailureKind
from headgate.model.ids import CheckpointId, Generation, SubtaskId, VertexId, WorkerIndex
from headgate.model.manifest import SnapshotPart, SubtaskEntry
from headgate.model.progress import Observer, Progress, SilentObserver
from headgate.protocol.checkpoints.coordinator_events import Acknowledged, FinishReported
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.driver import takeover
from headgate.runtime.driver.driver import Driver
from headgate.runtime.wire.control import ControlClient, Loss

WAIT_S = 300
_M = TypeVar("_M")
Ended = Callable[[Failure | None], None]


class Played:
    """Launcher and workers in one: the test says what each worker sends."""

    def __init__(self, root: Path, observer: Observer | None = None, **options: Any) -> None:
        pipeline = pipeline_at(root, interval=None, **options)
        pipeline.source(hg.FromRows([{"id": 1}, {"id": 2}], splits=2)).sink(hg.Discard(), name="out")
        self.definition = definition_of(pipeline)
        self.submitted: queue.Queue[tuple[int, tuple[str, int], bytes, Ended]] = queue.Queue()
        self.cancelled: list[int] = []
        self.driver = Driver(self.definition, self, observer or SilentObserver(), FINGERPRINT)
        self.workers: list[PlayedWorker] = []
        self.driver.start()

    def submit(self, submission: int, address: Any, secret: bytes, ended: Ended) -> None:
        self.submitted.put((submission, address, secret, ended))

    def cancel(self, submission: int) -> None:
        self.cancelled.append(submission)

    def deployed(self) -> tuple[list[PlayedWorker], Ended]:
        """Register both workers of the next submission; return them once both are deployed."""
        submission, address, secret, ended = self.submitted.get(timeout=WAIT_S)
        workers = [PlayedWorker(address, secret, submission, index) for index in range(2)]
        self.workers += workers
        for worker in workers:
            worker.generation = worker.expect(messages.Deploy).generation
        return workers, ended

    def wait_report(self, worker: PlayedWorker) -> None:
        """Wait until the driver has handled everything that ``worker`` has sent so far."""
        worker.control.send(messages.MetricsReport(worker.generation))
        deadline = time.monotonic() + WAIT_S
        while worker.index not in self.driver.run_progress.reports():
            assert time.monotonic() < deadline
            handled = threading.Event()
            self.driver.post(handled.set)
            assert handled.wait(WAIT_S)

    @property
    def vertices(self) -> list[str]:
        return [str(vertex.id) for vertex in self.definition.plan.vertices]

    def close(self) -> None:
        for worker in self.workers:
            worker.control.close()
        self.driver.cancel()
        while not self.driver.result.done():
            try:
                self.submitted.get_nowait()[3](None)
            except queue.Empty:
                break
        self.driver.supervision.job_ended(self.driver.supervision.machine.job.submission, None)
        self.driver.join()


class PlayedWorker:
    def __init__(self, address: tuple[str, int], secret: bytes, submission: int, index: int) -> None:
        self.inbox: queue.Queue[Any] = queue.Queue()
        self.index = index
        self.generation = 0
        self.control = ControlClient(*address, secret, self.inbox.put, self.inbox.put)
        self.control.start()
        attempt = submission * 2 + index
        self.control.send(
            messages.Register(index, 2, submission, attempt, messages.Address("127.0.0.1", 1), 1, FINGERPRINT)
        )

    def expect(self, kind: type[_M]) -> _M:
        while True:
            message = self.inbox.get(timeout=WAIT_S)
            if isinstance(message, kind):
                return message

    def ready(self) -> None:
        self.control.send(messages.Ready(self.generation))

    def finished(self, vertex: str, generation: int | None = None) -> None:
        event = FinishReported(Generation(generation or self.generation), SubtaskId(VertexId(vertex), self.index))
        self.control.send(messages.Finished(event))

    def acknowledge(self, vertex: str, checkpoint: int, generation: int | None = None) -> None:
        entry = SubtaskEntry(SubtaskId(VertexId(vertex), self.index), (SnapshotPart(0, 0, "", b""),))
        found = Generation(self.generation if generation is None else generation)
        self.control.send(messages.Acknowledge(Acknowledged(found, CheckpointId(checkpoint), entry)))


@pytest.fixture
def played(tmp_path: Path) -> Iterator[Played]:
    made = Played(tmp_path)
    yield made
    made.close()


def test_reports_of_a_quick_worker_count_although_another_is_not_ready_yet(played: Played) -> None:
    (quick, slow), ended = played.deployed()
    quick.ready()
    for vertex in played.vertices:
        quick.finished(vertex)
    played.wait_report(quick)  # the driver has heard all of it
    slow.ready()
    for vertex in played.vertices:
        slow.finished(vertex)
    checkpoint = quick.expect(messages.TriggerCheckpoint).checkpoint
    for worker in (quick, slow):
        for vertex in played.vertices:
            worker.acknowledge(vertex, checkpoint)
    assert quick.expect(messages.Stop).is_success
    ended(None)
    assert played.driver.result.result(WAIT_S).is_finished


def test_acknowledgements_of_another_generation_complete_nothing(played: Played) -> None:
    workers, ended = played.deployed()
    for worker in workers:
        worker.ready()
        for vertex in played.vertices:
            worker.finished(vertex)
    checkpoint = workers[0].expect(messages.TriggerCheckpoint).checkpoint
    for worker in workers:
        for vertex in played.vertices:
            worker.acknowledge(vertex, checkpoint, generation=worker.generation + 1)
    workers[0].acknowledge(played.vertices[0], checkpoint)
    played.driver.stop()
    for worker in workers:
        played.wait_report(worker)
    live = played.driver.supervision.live
    assert live is not None
    assert len(live.coordination.machine.missing(CheckpointId(checkpoint))) == 2 * len(played.vertices) - 1
    for worker in workers:
        for vertex in played.vertices:
            worker.acknowledge(vertex, checkpoint)
    assert workers[0].expect(messages.Complete).checkpoint == checkpoint
    ended(None)


def test_a_lost_worker_ends_the_generation_and_a_new_one_is_deployed(played: Played) -> None:
    (one, other), ended = played.deployed()
    one.ready()
    other.ready()
    one.control.close()
    assert not other.expect(messages.Stop).is_success
    ended(Failure(FailureKind.LOST, "a task was lost"))
    workers, ended = played.deployed()
    assert workers[0].generation == other.generation + 1
    assert played.cancelled == []


@pytest.mark.parametrize("is_silent", [False, True])
def test_only_a_worker_that_is_silent_has_its_job_cancelled_whatever_is_said_of_it(
    played: Played, is_silent: bool
) -> None:
    (one, other), ended = played.deployed()
    one.ready()
    other.ready()
    played.wait_report(one)
    connection = next(r.connection for r in played.driver.workers.records if r.worker == one.index)
    connection.lose(Loss("it was silent for 7.0 s", is_silent))
    assert not other.expect(messages.Stop).is_success
    assert played.cancelled == ([1] if is_silent else [])
    ended(Failure(FailureKind.LOST, "told"))


def test_a_worker_of_another_program_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "FINGERPRINT", "another")
    made = Played(tmp_path)
    made.driver.workers._fingerprint = "this"
    submission, address, secret, _ended = made.submitted.get(timeout=WAIT_S)
    worker = PlayedWorker(address, secret, submission, 0)
    made.workers.append(worker)
    assert "another version" in worker.expect(messages.Refused).reason
    made.close()


def test_the_same_failure_of_user_code_twice_ends_the_run(played: Played) -> None:
    for _ in range(2):
        workers, ended = played.deployed()
        for worker in workers:
            worker.ready()
        reason = "the function of operator 'divide' failed on the record {'id': 1}"
        failure = Failure(FailureKind.USER_CODE, reason, "ZeroDivisionError")
        failed = messages.failed(Generation(workers[0].generation), failure)
        workers[0].control.send(failed)
        workers[1].expect(messages.Stop)
        ended(Failure(FailureKind.LOST, "told"))
    with pytest.raises(PipelineFailed, match=r"operator 'divide' failed on the record \{'id': 1\}"):
        played.driver.result.result(WAIT_S)


def test_who_left_first_says_why_before_its_peer_is_believed(tmp_path: Path) -> None:  # G15
    made = Played(tmp_path, restart=hg.NoRestart())
    (guilty, peer), ended = made.deployed()
    for worker in (guilty, peer):
        worker.ready()
    closed = Failure(FailureKind.LOST, "the data connection with worker 0 was lost: it was closed by the other side")
    peer.control.send(messages.failed(Generation(peer.generation), closed, WorkerIndex(0)))
    peer.control.close()
    deadline = time.monotonic() + WAIT_S
    while len(made.driver.workers.records) > 1:  # the driver has heard all of it
        assert time.monotonic() < deadline
        handled = threading.Event()
        made.driver.post(handled.set)
        assert handled.wait(WAIT_S)
    ended(Failure(FailureKind.LOST, "a task of the barrier stage failed"))
    failure = Failure(FailureKind.USER_CODE, "the function of operator 'divide' failed on the record {'id': 1}", "…")
    guilty.control.send(messages.failed(Generation(guilty.generation), failure))
    guilty.control.close()
    with pytest.raises(PipelineFailed, match="operator 'divide' failed"):
        made.driver.result.result(WAIT_S)
    made.driver.join()


class Broken(SilentObserver):
    def on_progress(self, progress: Progress) -> None:
        raise ValueError("a bug in the observer")


def test_a_driver_that_cannot_go_on_ends_its_job(tmp_path: Path) -> None:
    made = Played(tmp_path, Broken())
    with pytest.raises(ValueError, match="a bug in the observer"):
        made.driver.result.result(WAIT_S)
    made.driver.join()
    assert made.cancelled == [1]


def test_a_driver_that_was_replaced_waits_for_no_storage_that_hangs(  # C38
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other side of a connection is gone: the request hangs, and others are answered."""
    may_end, is_replaced, hangs = threading.Event(), threading.Event(), threading.Event()

    def newer(self: CheckpointLog) -> Generation | None:
        if not is_replaced.is_set() or hangs.is_set():
            return Generation(99) if is_replaced.is_set() else None
        hangs.set()
        may_end.wait(WAIT_S)
        return None

    monkeypatch.setattr(CheckpointLog, "newer_generation", newer)
    monkeypatch.setattr(takeover, "PERIOD_MS", 50)
    monkeypatch.setattr(takeover, "HANGS_MS", 50)
    played = Played(tmp_path)
    try:
        (worker, _), ended = played.deployed()
        is_replaced.set()
        assert hangs.wait(WAIT_S)
        worker.expect(messages.Stop)
        ended(None)
        with pytest.raises(FencedError):
            played.driver.result.result(WAIT_S)
        played.driver.join()
        assert not may_end.is_set(), "the first look hangs still"
    finally:
        may_end.set()
