"""Numbers of workers added up, of the running generation only."""

from __future__ import annotations

from tests.clocks import HandClock

from headgate.codec.messages import AlignmentMetrics, MetricsReport
from headgate.model.ids import CheckpointId, Generation, NodeName, SubtaskId, VertexId
from headgate.model.metrics import (
    BUSY,
    BYTES_IN,
    BYTES_OUT,
    NODE,
    RECORDS_IN,
    RECORDS_OUT,
    WATERMARK_MS,
    Sample,
    Samples,
)
from headgate.model.progress import LoopProgress, PendingCheckpoint, PipelineState, SubtaskAlignment
from headgate.runtime.driver.progress import ALIGNED_CHECKPOINTS_MAX, AlignmentHistory, RunProgress
from headgate.runtime.wire.exchange import ExchangeMetrics
from headgate.runtime.worker.metrics import ALIGNMENTS_MAX, WorkerMetrics


def report(generation: int, rows: int, busy: float = 0.5, watermark: int | None = None, late: int = 0) -> MetricsReport:
    window, bad = ((NODE, "window"),), ((NODE, "bad-records"),)
    samples = [
        Sample(BUSY, (), busy),
        Sample(RECORDS_IN, window, rows),
        Sample(RECORDS_OUT, window, rows // 2),
        Sample("late", window, late),
        Sample(RECORDS_IN, bad, 1),
        Sample(RECORDS_OUT, bad, 0),
    ]
    if watermark is not None:
        samples.append(Sample(WATERMARK_MS, window, watermark))
    return MetricsReport(generation, samples, [AlignmentMetrics("v", 1, 5, 6)])


def test_totals_are_summed_over_workers_and_the_watermark_is_the_least() -> None:
    book = RunProgress("bad-records", HandClock().monotonic_ns)
    book.begin(Generation(1))
    book.add(0, report(1, 10, 0.2, watermark=50, late=1))
    book.add(1, report(1, 30, 0.9, watermark=40, late=2))
    book.add(1, report(1, 34, 0.8, watermark=45, late=2))
    found = book.snapshot(
        PipelineState.RUNNING, Generation(1), 2, PendingCheckpoint(CheckpointId(3), 7, ("window[0]",))
    )
    node = next(n for n in found.nodes if n.node == "window")
    assert (node.records_in, node.records_out, dict(node.counters)) == (44, 22, {"late": 3})
    assert (found.watermark_ms, found.busy, found.late_records, found.bad_records) == (45, 0.8, 3, 2)
    assert found.pending_checkpoint is not None
    assert found.pending_checkpoint.missing == ("window[0]",)


def test_reports_of_another_generation_do_not_count_and_a_new_one_begins_at_zero() -> None:
    book = RunProgress("bad-records", HandClock().monotonic_ns)
    book.begin(Generation(2))
    book.add(0, report(1, 10))
    assert book.reports() == {}
    book.add(0, report(2, 10))
    book.begin(Generation(3))
    assert book.snapshot(PipelineState.RUNNING, Generation(3), 0, None).nodes == ()


def test_loops_are_summed_over_their_heads_but_for_times_and_rounds() -> None:
    book = RunProgress("bad-records", HandClock().monotonic_ns)
    book.begin(Generation(1))
    loop, other = NodeName("ranks"), NodeName("other")
    book.add(0, MetricsReport(1, loops=[LoopProgress(loop, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1), LoopProgress(other, 1)]))
    book.add(1, MetricsReport(1, loops=[LoopProgress(loop, 10, 20, 30, 40, 50, 60, 70, 80, 7, 2)]))
    found = book.snapshot(PipelineState.RUNNING, Generation(1), 0, None).loops
    assert found == (LoopProgress(loop, 11, 22, 33, 44, 55, 66, 77, 88, 9, 2), LoopProgress(other, 1))


def test_alignments_are_reported_once_and_bounded() -> None:
    metrics = WorkerMetrics(HandClock().monotonic_ns)
    for number in range(ALIGNMENTS_MAX + 5):
        metrics.snapshot_taken(SubtaskId(VertexId("v"), 0), CheckpointId(number + 1), 1, 2)
    exchange = ExchangeMetrics(1, 2, 3, 4, 5)
    first = metrics.message(Generation(1), 0.5, [], exchange)
    assert len(first.alignments) == ALIGNMENTS_MAX
    samples = Samples(first.samples)
    assert (samples.value(BYTES_IN), samples.value(BYTES_OUT), samples.value(BUSY)) == (1, 2, 0.5)
    assert metrics.message(Generation(1), 0.5, [], exchange).alignments == []


def test_alignments_are_kept_by_checkpoint_and_subtask_and_bounded() -> None:  # PG15
    book = AlignmentHistory()
    for number in range(1, ALIGNED_CHECKPOINTS_MAX + 3):
        for worker in (10, 2):
            book.add(worker, [AlignmentMetrics("w", number, 5, 6)])
    found = book.latest()
    assert list(found) == list(range(3, ALIGNED_CHECKPOINTS_MAX + 3))
    assert found[CheckpointId(3)] == (SubtaskAlignment("w[2]", 5, 6), SubtaskAlignment("w[10]", 5, 6))
    book.add(2, [AlignmentMetrics("w", 1, 9, 9)])
    assert book.latest() == found, "one that comes late drives nothing newer out"


def test_the_busy_fraction_is_what_was_not_slept_by_the_clock_of_the_surroundings() -> None:
    clock = HandClock(passed_ms=5_000)
    metrics = WorkerMetrics(clock.monotonic_ns)
    clock.advance(1_000)
    metrics.start()
    assert metrics.busy_fraction() == 1.0
    clock.advance(400)
    metrics.slept(100_000_000)
    assert metrics.busy_fraction() == 0.75
    clock.advance(400)
    metrics.slept(400_000_000)
    assert metrics.busy_fraction() == 0.0


def test_times_go_by_the_clock_of_the_surroundings() -> None:
    clock = HandClock(passed_ms=5_000)
    book = RunProgress("bad-records", clock.monotonic_ns)
    book.begin(Generation(1))
    book.add(0, report(1, 10))
    clock.advance(2_000)
    assert book.snapshot(PipelineState.RUNNING, Generation(1), 0, None).uptime_ms == 2_000


def test_a_watermark_that_is_no_time_is_none() -> None:
    book = RunProgress("bad-records", HandClock().monotonic_ns)
    book.begin(Generation(1))
    book.add(0, MetricsReport(Generation(1), [Sample(WATERMARK_MS, (("node", "map"),), (1 << 63) - 1)], [], []))
    assert book.snapshot(PipelineState.RUNNING, Generation(1), 0, None).watermark_ms is None


def test_a_report_is_due_once_per_period() -> None:
    metrics = WorkerMetrics(HandClock().monotonic_ns)
    assert metrics.is_due(1_000, 500)
    assert not metrics.is_due(1_499, 500)
    assert metrics.is_due(1_500, 500)
