"""The mailbox and the operators of a worker go by the monotonic clock, and nobody else's (W18)."""

from __future__ import annotations

from typing import Any, cast

from tests.clocks import HandClock, HandTimed

import headgate as hg
from headgate.codec.messages import Deploy, Stop
from headgate.model.ids import SubtaskId, WorkerIndex
from headgate.runtime.worker.deployment import Deployment
from headgate.runtime.worker.worker import METRICS_PERIOD_MS, Worker, WorkerTask

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


def test_sources_are_given_a_clock_that_nobody_can_set() -> None:  # N70
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
