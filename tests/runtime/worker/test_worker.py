"""A worker: turns of its subtasks, its monotonic clock, and the local files that it leaves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
from tests.support.clocks import HandClock, HandTimed

import headgate as hg
from headgate.codec.messages import Deploy, Failed, HeartbeatReply, Stop
from headgate.errors import CorruptionError, StorageError
from headgate.model.failure import Failure, FailureKind
from headgate.model.ids import SubtaskId, WorkerIndex
from headgate.runtime.wire.connection import ConnectionLost
from headgate.runtime.worker.chain import NodeError
from headgate.runtime.worker.deployment import Deployment
from headgate.runtime.worker.worker import (
    METRICS_PERIOD_MS,
    PEER_GRACE_MS,
    PeerLost,
    Worker,
    WorkerTask,
    keeps_local_files,
)
from headgate.state.rocksdb.local_databases import LocalDatabases
from headgate.state.snapshot import LocalDamage
from headgate.testing import Collect, run


def worker_of(clock: HandClock) -> Worker:
    pipeline = hg.Pipeline("p", parallelism=1, checkpointing=hg.Checkpointing(alignment_timeout="10ms"))
    pipeline.source(hg.FromRows([{"x": 1}])).sink(hg.Discard())
    task = WorkerTask(pipeline.definition(), WorkerIndex(0), 1, 1, "127.0.0.1", 0, b"", "127.0.0.1", "")
    return Worker(task, HandTimed(clock))


def test_a_turn_ends_for_an_arrival_a_message_and_a_timeout() -> None:  # UA4
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
def test_a_worker_that_had_no_turn_reads_why_its_peer_left_before_it_gives_up(is_told: bool) -> None:
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


def test_arrivals_are_told_before_anybody_has_a_turn() -> None:  # UA4
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


# -- the mailbox and the operators of a worker go by the monotonic clock, and nobody else's (w18) -----


STEPS_MS = (3_600_000, -7_200_000, 0, 86_400_000, -86_400_000, -5, 0, 0, 3_600_000, -3_600_000)


class Ticking:
    """Stands for a subtask that always has something to do, while somebody sets the date."""

    def __init__(self, worker: Worker, clock: HandClock, turn_ms: int) -> None:
        self.ticks: list[int] = []
        self._worker, self._clock, self._turn_ms = worker, clock, turn_ms

    def step(self) -> bool:
        return True

    def tick(self, now_ms: int) -> None:
        self._clock.advance(self._turn_ms, date_step_ms=STEPS_MS[len(self.ticks)])
        self.ticks.append(now_ms)
        if len(self.ticks) == len(STEPS_MS):
            self._worker._stopping = Stop("enough")


def test_the_mailbox_goes_by_a_clock_that_nobody_can_set() -> None:
    clock = HandClock(passed_ms=5)
    pipeline = hg.Pipeline("p", parallelism=1)
    pipeline.source(hg.FromRows([{"x": 1}])).sink(hg.Discard())
    task = WorkerTask(pipeline.definition(), WorkerIndex(0), 1, 1, "127.0.0.1", 0, b"", "127.0.0.1", "")
    worker = Worker(task, HandTimed(clock))
    turn_ms = METRICS_PERIOD_MS // 2
    ticking, reports = Ticking(worker, clock, turn_ms), []
    worker._runners = [cast(Any, ticking)]
    worker._report_metrics = lambda: reports.append(ticking.ticks[-1])  # type: ignore[method-assign]
    worker._loop()
    assert ticking.ticks == [5 + turn_ms * turn for turn in range(len(STEPS_MS))]
    assert reports == ticking.ticks[::2], "metrics are reported twice a second, whatever the date"


def test_operators_are_given_a_clock_that_nobody_can_set() -> None:
    pipeline = hg.Pipeline("p", parallelism=1)
    pipeline.source(hg.FromRows([{"x": 1}])).sink(hg.Discard())
    definition, clock = pipeline.definition(), HandClock(passed_ms=5)
    deploy = Deploy(1, [], [], 1_000, 5, 1_000)
    none = cast(Any, None)
    deployment = Deployment(definition, WorkerIndex(0), deploy, none, none, none, none, none, clock)
    vertex = definition.plan.vertices[0]
    context = deployment._context(vertex.head, SubtaskId(vertex.id, 0))
    clock.advance(10, date_step_ms=-3_600_000)
    assert context.clock_ms() == 15


def test_sources_are_given_a_clock_that_nobody_can_set() -> None:
    pipeline = hg.Pipeline("p", parallelism=1)
    pipeline.source(hg.FromRows([{"x": 1}])).sink(hg.Discard())
    definition, clock = pipeline.definition(), HandClock(passed_ms=5)
    none = cast(Any, None)
    deploy = Deploy(1, [], [], 1_000, 5, 1_000)
    deployment = Deployment(definition, WorkerIndex(0), deploy, none, none, none, none, none, clock)
    vertex = definition.plan.vertices[0]
    context = deployment._source_context(vertex.head, SubtaskId(vertex.id, 0), None)
    clock.advance(10, date_step_ms=-3_600_000)
    assert context.clock_ms() == 15


# -- what a worker leaves of its state on the local disk when it ends by itself (rb21) -----


class FailsOnce(hg.ProcessFunction):
    """Counts, and raises once at the third record."""

    schema = {"n": pa.int64()}

    def __init__(self, done: Path) -> None:
        self.done = done

    def open(self, state: hg.StateHandle) -> None:
        self.n = state.value("n", pa.int64())

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> Iterator[dict[str, Any]]:
        self.n.put(self.n.get(0) + 1)
        if self.n.get() == 3 and not self.done.exists():
            self.done.touch()
            raise OSError("a service does not answer")
        yield {"n": self.n.get()}


def test_a_worker_that_fails_leaves_its_files_and_one_that_ends_well_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, close = [], LocalDatabases.close

    def noted(room: LocalDatabases, *, is_left: bool = False) -> None:
        closed.append(is_left)
        close(room, is_left=is_left)

    monkeypatch.setattr(LocalDatabases, "close", noted)
    p = hg.Pipeline("p", state=hg.RocksDB(memory="32MB", dir=str(tmp_path / "local")))
    sink = Collect(tmp_path / "out")
    p.source(hg.FromRows([{"key": 1}] * 4)).key_by("key").process(FailsOnce(tmp_path / "done")).sink(sink)
    run(p, parallelism=1)
    assert sorted(row["n"] for row in sink.rows()) == [1, 2, 3, 4]
    assert closed == [True, False]


@pytest.mark.parametrize(
    ("error", "spares"),
    [
        (ValueError("of the user"), True),
        (NodeError("sum", ValueError("of the user")), True),
        (StorageError("put", "s3://bucket/x", "it does not answer", True), True),
        (CorruptionError("chk-1/a", 0, "a", "b"), True),
        (StorageError("write", "/disk/db", "no space is left on this disk", False), False),
        (NodeError("sum", StorageError("write", "/disk/db", "no space is left on this disk", False)), False),
        (NodeError("sum", LocalDamage("/disk/db/000008.sst", 0, "a block", "another")), False),
    ],
)
def test_a_worker_leaves_nothing_on_a_disk_that_failed(error: Exception, spares: bool) -> None:
    assert keeps_local_files(error) == spares
