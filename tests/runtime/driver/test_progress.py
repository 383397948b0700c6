"""Progress: reports of workers added up by operator and edge, of the running generation only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from tests.runtime.runs.test_storages import WAIT_S, Watching
from tests.support.clocks import HandClock
from tests.web.shop import definition

import headgate as hg
from headgate import testing
from headgate.codec.messages import AlignmentMetrics, MetricsReport, encode_message
from headgate.connectors.base import AnyReader, HoldContext, Source, SourceContext
from headgate.display.progress import late_text
from headgate.errors import FencedError, PipelineFailed, StorageError
from headgate.model.ids import CheckpointId, Generation, NodeName, SubtaskId, VertexId
from headgate.model.manifest import Manifest, SnapshotPart, SubtaskEntry, Totals
from headgate.model.plan import Plan
from headgate.model.progress import (
    BUSY,
    BYTES_IN,
    BYTES_OUT,
    CLOCK_S,
    EDGE,
    NODE,
    QUEUED_BATCHES,
    RECORDS,
    RECORDS_IN,
    RECORDS_OUT,
    SPLITS_SHOWN_MAX,
    WATERMARK_MS,
    EdgeProgress,
    Lateness,
    LoopProgress,
    NodeProgress,
    PendingCheckpoint,
    PipelineState,
    Sample,
    Samples,
    SourceProgress,
    SplitProgress,
    SubtaskAlignment,
    late_within,
)
from headgate.operators.expressions import runs_with
from headgate.runtime.driver.coordinator_host import sum_totals
from headgate.runtime.driver.progress import (
    ALIGNED_CHECKPOINTS_MAX,
    END_MS,
    AlignmentHistory,
    EdgeTotals,
    OperatorTotals,
    RunProgress,
    SourceTotals,
)
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


def test_alignments_are_kept_by_checkpoint_and_subtask_and_bounded() -> None:
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


# -- operators as their workers measured them -----


def nodes_at(clock_s: float, **nodes: dict[str, Any]) -> Samples:
    samples = [Sample(CLOCK_S, (), clock_s)]
    for node, measured in nodes.items():
        samples += [Sample(name, ((NODE, node),), value) for name, value in measured.items()]
    return Samples(samples)


def manifest(totals: Totals, *parts: SnapshotPart) -> Manifest:
    entry = SubtaskEntry(SubtaskId(VertexId("v"), 0), parts)
    return Manifest(CheckpointId(1), Generation(1), 1, 128, (entry,), totals=totals)


def only(book: OperatorTotals) -> NodeProgress:
    (node,) = book.nodes()
    return node


def test_a_generation_counts_on_from_what_its_checkpoint_had_counted() -> None:  # OM1
    book = OperatorTotals(HandClock().wall_ms)
    book.begin({"map": {"records_in": 100, "late": 7}})
    assert (only(book).records_in, only(book).late_records) == (100, 7)
    book.add(0, nodes_at(1.0, map={"records_in": 10, "records_out": 5, "late": 1}))
    book.add(1, nodes_at(1.0, map={"records_in": 20, "records_out": 5, "bad_records": 2}))
    found = only(book)
    assert (found.records_in, found.records_out, found.bad_records) == (130, 10, 2)
    assert (found.late_records, found.counters) == (8, (("late", 8),))


def test_a_restart_takes_totals_back_and_not_the_work() -> None:  # OM1
    book = OperatorTotals(HandClock().wall_ms)
    book.begin({})
    book.add(0, nodes_at(1.0, map={"records_in": 90, "busy_ms": 400, "queued_bytes": 8, "watermark_ms": 5}))
    book.begin({"map": {"records_in": 60}})
    found = only(book)
    assert found.records_in == 60
    (subtask,) = found.subtasks
    assert (subtask.records_in, subtask.busy_ms) == (90, 400)
    assert (subtask.queued_bytes, subtask.watermark_ms) == (0, None), "nothing waits and nothing is known yet"
    book.add(0, nodes_at(1.0, map={"records_in": 40, "busy_ms": 100}))
    found = only(book)
    assert (found.records_in, found.subtasks[0].records_in, found.busy_ms) == (100, 130, 500)


def test_totals_are_no_less_than_those_of_the_newest_checkpoint() -> None:  # OM1
    book = OperatorTotals(HandClock().wall_ms)
    book.begin({})
    book.add(0, nodes_at(1.0, map={"records_in": 10}))
    book.completed(manifest({"map": {"records_in": 25}}))
    assert only(book).records_in == 25, "its workers left without a last report_nodes"
    book.add(0, nodes_at(2.0, map={"records_in": 30}))
    assert only(book).records_in == 30


def test_shares_are_those_of_the_busiest_subtask_between_its_last_two_reports() -> None:
    book = OperatorTotals(HandClock().wall_ms)
    book.begin({})
    for worker, busy_ms, held_back_ms in ((0, 900, 50), (1, 100, 800)):
        start = {"busy_ms": 10_000, "held_back_ms": 10_000, "idle_ms": 10_000}
        book.add(worker, nodes_at(100.0 + worker, map=start))
        end = {"busy_ms": 10_000 + busy_ms, "held_back_ms": 10_000 + held_back_ms, "idle_ms": 10_050}
        book.add(worker, nodes_at(101.0 + worker, map=end))
    found = only(book)
    assert (found.busy, found.held_back, round(found.idle, 9)) == (0.9, 0.05, 0.05)
    assert [(s.busy, s.held_back) for s in found.subtasks] == [(0.9, 0.05), (0.1, 0.8)]
    assert (found.busy_ms, found.held_back_ms, found.idle_ms) == (21_000, 20_850, 20_100)


def test_queues_watermark_and_lag_of_an_operator() -> None:
    book = OperatorTotals(HandClock(date_ms=10_000).wall_ms)
    book.begin({})
    book.add(0, nodes_at(1.0, map={"watermark_ms": 9_000, "queued_batches": 2, "queued_bytes": 100}))
    book.add(1, nodes_at(1.0, map={"watermark_ms": 8_500, "queued_batches": 1, "queued_bytes": 10}))
    found = only(book)
    assert (found.watermark_ms, found.lag_ms, found.queued_batches, found.queued_bytes) == (8_500, 1_500, 3, 110)
    book.begin({})
    book.add(0, nodes_at(1.0, map={"watermark_ms": END_MS}))
    assert (only(book).lag_ms, only(book).watermark_ms) == (None, None), "all input has ended"
    book.add(1, nodes_at(1.0, map={"watermark_ms": 8_500}))
    assert only(book).watermark_ms == 8_500
    book.add(1, nodes_at(1.5, map={"watermark_ms": -(1 << 63)}))
    assert only(book).watermark_ms is None, "none has come yet"


def test_rates_are_those_between_reports_however_they_meet_the_snapshots() -> None:
    """Four workers of 250 records a second each, which report_nodes when they can: it is 1,000 at every moment."""
    book = OperatorTotals(HandClock().wall_ms)
    book.begin({})
    seen = []
    for tick in range(40):
        for worker in range(4):
            if (tick + worker) % 3 == 0:
                clock_s = 0.25 * tick + 0.03 * worker
                book.add(worker, nodes_at(clock_s, map={"records_in": 250 * clock_s, "records_out": 500 * clock_s}))
        seen.append(
            (round(only(book).records_in_per_second), round(only(book).records_out_per_second)) if tick else (0, 0)
        )
    assert set(seen[7:]) == {(1_000, 2_000)}


def test_rates_follow_a_change_within_their_window() -> None:
    book = OperatorTotals(HandClock().wall_ms)
    book.begin({})
    for half in range(20):
        book.add(0, nodes_at(half / 2, map={"records_in": min(half, 10) * 50}))
    assert only(book).records_in_per_second == 0
    book.begin({})
    assert [node.records_in_per_second for node in book.nodes()] == []


def test_the_size_of_the_state_is_that_of_the_last_checkpoint() -> None:
    book = OperatorTotals(HandClock().wall_ms)
    book.begin({"map": {"records_in": 1}})
    parts = (
        SnapshotPart(100, 1, section="state/map", rows={"map": {"total": 4, "last": 3}}),
        SnapshotPart(20, 1, section="files/map"),
        SnapshotPart(5_000, 1, section="state/other", rows={"other": {"x": 1}}),
        SnapshotPart(9_000, 1),
    )
    book.completed(manifest({}, *parts))
    found = next(node for node in book.nodes() if node.node == NodeName("map"))
    assert (found.state_rows, found.state_bytes) == (7, 120)


def test_sums_leave_out_what_was_never_counted() -> None:
    assert sum_totals({"b": {"x": 1}}, {"b": {"x": 2, "y": 0}, "a": {"z": 0}, "c": {"x": 5}}) == {
        "b": {"x": 3},
        "c": {"x": 5},
    }


def test_operators_of_one_pass_name_the_one_that_has_their_time() -> None:
    pipeline = hg.Pipeline("p")
    kept = pipeline.source(hg.FromRows([{"n": 1}])).filter(pl.col("n") > 0, name="kept").select("n", name="chosen")
    kept.with_columns(name="more", m=pl.col("n") + 1).map(lambda row: row, name="other").sink(hg.Discard(), name="end")
    book = OperatorTotals(HandClock().wall_ms, runs_with(pipeline.definition(1).plan))
    book.begin({})
    book.add(
        0,
        nodes_at(
            1.0, kept={"records_in": 2}, chosen={"records_in": 1}, more={"records_in": 1}, other={"records_in": 1}
        ),
    )
    told = {str(node.node): node.runs_with for node in book.nodes()}
    assert told == {"kept": "more", "chosen": "more", "more": None, "other": None}


# -- edges as workers measured their two ends -----


PLAN = definition(Path("/nowhere")).plan
AT = next(edge.index for edge in PLAN.edges if edge.from_node == NodeName("key-by"))


def edges_at(clock_s: float, **measured: float) -> Samples:
    samples = [Sample(name, ((EDGE, str(AT)),), value) for name, value in measured.items()]
    return Samples([Sample(CLOCK_S, (), clock_s), Sample("records", ((NODE, "key-by"),), 1_000_000), *samples])


def found(book: EdgeTotals) -> EdgeProgress:
    return book.edges()[AT]


def test_edges_are_added_up_over_their_subtasks() -> None:
    book = EdgeTotals(PLAN)
    book.begin()
    assert book.edges() == (), "nobody has reported"
    for worker, busy_ms, held_ms, fill in ((0, 900, 50, 0.25), (1, 100, 800, 0.75)):
        start = {"records": 100, "busy_ms": 10_000, "held_back_ms": 10_000, "fill": 1.0, "queued_bytes": 7_000}
        book.add(worker, edges_at(100.0 + worker, **start))
        end = {"records": 300, "busy_ms": 10_000 + 2 * busy_ms, "held_back_ms": 10_000 + 2 * held_ms, "fill": fill}
        book.add(worker, edges_at(102.0 + worker, **end, queued_batches=1, queued_bytes=100))
    wanted = EdgeProgress(AT, NodeName("key-by"), NodeName("latest"), 200.0, 0.9, 0.8, 2, 200, 0.75)
    assert replace(found(book), busy=round(found(book).busy, 9)) == wanted
    assert [edge.edge for edge in book.edges()] == [edge.index for edge in PLAN.edges]


def test_a_restart_begins_with_nothing() -> None:
    book = EdgeTotals(PLAN)
    book.begin()
    book.add(0, edges_at(1.0, records=100, queued_bytes=5))
    book.begin()
    assert book.edges() == ()
    book.add(0, edges_at(9.0, records=100))
    assert (found(book).records_per_second, found(book).queued_bytes) == (0.0, 0), "one report_edges tells no rate"


def test_a_plan_without_edges_has_none() -> None:
    book = EdgeTotals(Plan((), (), 1, 1))
    book.begin()
    book.add(0, edges_at(1.0, records=1))
    assert book.edges() == ()


def test_lateness_is_summed_over_workers_and_runs_and_is_no_counter_of_its_own() -> None:
    book = RunProgress("bad-records", HandClock().monotonic_ns)
    book.begin(Generation(1), {"window": {"late": 1, late_within(5_000): 1}})
    book.add(0, MetricsReport(1, [Sample(name, ((NODE, "window"),), 99) for name in ("late", late_within(20))]))
    (node,) = book.snapshot(PipelineState.RUNNING, Generation(1), 0, None).nodes
    assert (node.late_records, node.lateness) == (100, Lateness(20, 20, 5_000))
    assert (node.counters, node.subtasks[0].counters) == ((("late", 100),), (("late", 99),))
    assert late_text(node, False, None) == (
        "'window' dropped 100 late records (lateness: p50 20 ms, p99 20 ms, max 5.0 s); "
        "out_of_orderness of with_timestamps, 5.0 s longer, would have kept them all"
    )
    assert late_text(node, False, "late") == (
        "'window' sent 100 late records to its output 'late' (lateness: p50 20 ms, p99 20 ms, max 5.0 s); "
        "out_of_orderness of with_timestamps, 5.0 s longer, would have had them all in their windows"
    )
    assert late_text(node, True, None) == (
        "'window' dropped 100 late records (lateness: p50 20 ms, p99 20 ms, max 5.0 s); they are results of other "
        "windows, which come when event time has passed their window_start long ago; allowed_lateness of 'window', "
        "5.0 s longer, would have kept them all, and so would windows that begin and end with the others"
    )


def split(name: str, lag: int | None, records: int = 0, **more: Any) -> SplitProgress:
    return SplitProgress(name, lag=lag, records=records, **more)


def of_source(*splits: SplitProgress, unit: str = "records") -> SourceProgress:
    return SourceProgress.of(NodeName("orders"), unit, splits)


def test_the_splits_of_all_subtasks_are_added_up_and_the_most_lagging_come_first() -> None:
    book = SourceTotals()
    book.add(0, 1.0, [of_source(split("a", 5), split("b", None, is_idle=True))])
    book.add(
        1,
        1.0,
        [of_source(split("c", 7), split("e", 0, watermark_ms=20), split("d", 0, watermark_ms=10, is_waiting=True))],
    )
    book.add(2, 1.0, [of_source(split("f", 0, undecided=3), split("g", 0, undecided=4))])
    (found,) = book.sources()
    assert (found.splits, found.idle_splits, found.lag, found.unknown_lags) == (7, 1, 12, 1)
    assert (found.waiting_splits, found.undecided) == (1, 7)
    assert [one.split for one in found.most_lagging] == ["c", "a", "g", "f", "d", "e", "b"]


def test_a_report_of_thousands_of_splits_names_a_few_and_counts_all() -> None:
    book = SourceTotals()
    for worker in range(3):
        book.add(worker, 1.0, [of_source(*(split(f"{worker}/{n:04}", n) for n in range(2_000)))])
    (found,) = book.sources()
    assert (found.splits, found.lag) == (6_000, 3 * sum(range(2_000)))
    assert len(found.most_lagging) == SPLITS_SHOWN_MAX
    assert {one.lag for one in found.most_lagging} == set(range(1_993, 2_000))
    assert len(encode_message(MetricsReport(1, [], [], [], [found]))) < 5_000


def test_the_rate_of_a_split_is_that_between_reports_that_name_it() -> None:
    book = SourceTotals()

    def rates() -> dict[str, float]:
        return {one.split: one.records_per_second for one in book.sources()[0].most_lagging}

    book.add(0, 1.0, [of_source(split("a", 5, 100))])
    assert rates() == {"a": 0.0}, "one report gives no rate"
    book.add(0, 1.5, [of_source(split("a", 5, 150), split("b", 5, 1_000_000))])
    assert rates() == {"a": 100.0, "b": 0.0}, "what was read before it was named is no rate"
    book.add(0, 2.0, [of_source(split("b", 5, 1_000_200))])
    assert rates() == {"b": 400.0}
    book.begin()
    assert book.sources() == (), "a new generation knows nothing yet"
    book.add(0, 0.5, [of_source(split("a", 5, 10))])
    assert rates() == {"a": 0.0}


def test_a_source_without_splits_or_known_ends_has_no_lag() -> None:
    book = SourceTotals()
    book.add(0, 1.0, [of_source()])
    assert book.sources()[0] == SourceProgress(NodeName("orders"))
    book.add(1, 1.0, [of_source(split("a.log", None), unit="bytes")])
    (found,) = book.sources()
    assert (found.unit, found.splits, found.lag, found.unknown_lags) == ("bytes", 1, None, 1)
    book.add(1, 1.5, [of_source(split("a.log", 0), unit="bytes")])
    assert book.sources()[0].lag == 0


def test_the_sources_of_the_running_generation_are_in_the_progress() -> None:
    book = RunProgress("bad-records", HandClock().monotonic_ns)
    book.begin(Generation(1))
    reported = MetricsReport(1, [Sample(CLOCK_S, (), 1.0)], [], [], [of_source(split("a", 3))])
    book.add(0, reported)
    found = book.snapshot(PipelineState.RUNNING, Generation(1), 0, None).sources
    assert [(one.source, one.lag) for one in found] == [("orders", 3)]
    book.begin(Generation(2))
    book.add(0, reported)
    assert book.snapshot(PipelineState.RUNNING, Generation(2), 0, None).sources == ()


def test_the_report_of_a_subtask_that_finished_changes_what_is_its_own_alone() -> None:
    book = RunProgress("bad-records", HandClock().monotonic_ns)
    book.begin(Generation(1))
    of_map, of_window = ((NODE, "map"),), ((NODE, "window"),)
    edge = ((EDGE, "0"),)
    former = [Sample(CLOCK_S, (), 1.0), Sample(RECORDS_IN, of_map, 1), Sample(RECORDS_IN, of_window, 2)]
    book.add(0, MetricsReport(1, [*former, Sample(RECORDS, edge, 3), Sample(QUEUED_BATCHES, edge, 4)]))
    held = book.reports()[0]
    part = [Sample(RECORDS_IN, of_map, 10), Sample(QUEUED_BATCHES, edge, 0)]
    book.add(0, MetricsReport(1, part, is_part=True))
    now = book.reports()[0]
    assert [now.value(CLOCK_S), now.value(RECORDS_IN, node="map"), now.value(RECORDS_IN, node="window")] == [1.0, 10, 2]
    assert held.value(RECORDS_IN, node="map") == 1, "another thread may read it"
    shown = {n.node: n.records_in for n in book.snapshot(PipelineState.RUNNING, Generation(1), 0, None).nodes}
    assert (shown["map"], shown["window"]) == (10, 2)
    book.add(0, MetricsReport(2, part, is_part=True))
    book.add(1, MetricsReport(1, part, is_part=True))
    shown = {n.node: n.records_in for n in book.snapshot(PipelineState.RUNNING, Generation(1), 0, None).nodes}
    assert (shown["map"], shown["window"]) == (20, 2), "of this generation, also before the first one of a worker"


Call = tuple[int, int | None, bool]
"""Generation, checkpoint, and whether it begins there."""


class Published(Source):
    """Input without an end, which remembers what it was asked to publish."""

    publishes = True

    def __init__(self, fail: Callable[[Call], None] = lambda call: None) -> None:
        self.source = hg.Generator({"n": hg.RowNumber()}, rows_per_second=1_000, time="deterministic")
        self.calls: list[Call] = []
        self.positions: list[Mapping[str, bytes]] = []
        self.fail = fail

    def schema(self) -> pa.Schema:
        return self.source.schema()

    def identity(self) -> str:
        return self.source.identity()

    def open(self, context: SourceContext) -> AnyReader:
        return self.source.open(context)

    def publish(
        self, context: HoldContext, checkpoint: CheckpointId | None, positions: Mapping[str, bytes], *, begins: bool
    ) -> None:
        call = (int(context.generation), None if checkpoint is None else int(checkpoint), begins)
        self.fail(call)
        self.calls.append(call)
        self.positions.append(positions)


def pipeline_of(source: Published, place: Path) -> hg.Pipeline:
    pipeline = hg.Pipeline("p", checkpointing=hg.Checkpointing(interval="20ms", dir=place / "checkpoints"))
    pipeline.source(source, name="in").sink(testing.Collect(place / "out"), name="out")
    return pipeline


def stopped(source: Published, place: Path) -> int:
    """Run a pipeline for some checkpoints and stop it; return the last one."""
    watching = Watching()
    with testing.running(pipeline_of(source, place), observer=watching) as run:
        watching.wait_checkpoints(3)
        run.stop()
        run.wait(WAIT_S)
    return watching.completed[-1]


def test_each_generation_begins_with_what_it_restores_and_ends_with_its_last_checkpoint(tmp_path: Path) -> None:
    source = Published()
    last = stopped(source, tmp_path)
    assert source.calls[0] == (1, None, True)
    assert source.positions[0] == {}
    assert source.calls[-1] == (1, last, False)
    assert all(source.positions[1:])
    assert [call[1] for call in source.calls[1:]] == sorted({call[1] for call in source.calls[1:]})  # type: ignore[type-var]
    again = Published()
    stopped(again, tmp_path)
    assert again.calls[0] == (2, last, True)
    assert again.positions[0] == source.positions[-1]


def test_a_failure_is_noted_once_and_the_next_checkpoint_is_published(tmp_path: Path) -> None:
    failed: list[Call] = []

    def fail(call: Call) -> None:
        if not call[2] and len(failed) < 2:
            failed.append(call)
            raise StorageError("reach", "the group", "it is away")

    source, watching = Published(fail), Watching()
    with testing.running(pipeline_of(source, tmp_path), observer=watching) as run:
        watching.wait(lambda: len(source.calls) > 1)
        run.stop()
        run.wait(WAIT_S)
    noted = [note for note in watching.notes if "was not published: cannot reach the group" in note]
    assert len(failed) == 2
    assert len(noted) == 1


def test_what_others_use_too_ends_the_pipeline_with_its_sentence(tmp_path: Path) -> None:
    def fail(call: Call) -> None:
        if not call[2]:
            raise hg.UsageError("the group is shared")

    with pytest.raises(PipelineFailed, match="the group is shared"):
        testing.run(pipeline_of(Published(fail), tmp_path), timeout_s=WAIT_S)


def test_a_generation_that_was_replaced_stops(tmp_path: Path) -> None:
    def fail(call: Call) -> None:
        if not call[2]:
            raise FencedError("the group", 1, 9)

    with pytest.raises(FencedError):
        testing.run(pipeline_of(Published(fail), tmp_path), timeout_s=WAIT_S)
