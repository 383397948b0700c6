"""Operators as their workers measured them: totals that a restart takes back, and work that it does not."""

from __future__ import annotations

from typing import Any

import polars as pl
from tests.clocks import HandClock

import headgate as hg
from headgate.model.ids import CheckpointId, Generation, NodeName, SubtaskId, VertexId
from headgate.model.manifest import Manifest, SnapshotPart, SubtaskEntry, Totals
from headgate.model.metrics import CLOCK_S, NODE, Sample, Samples
from headgate.model.progress import NodeProgress
from headgate.operators.expressions import runs_with
from headgate.runtime.driver.coordinator_host import sum_totals
from headgate.runtime.driver.progress import END_MS, OperatorTotals


def report(clock_s: float, **nodes: dict[str, Any]) -> Samples:
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
    book.add(0, report(1.0, map={"records_in": 10, "records_out": 5, "late": 1}))
    book.add(1, report(1.0, map={"records_in": 20, "records_out": 5, "bad_records": 2}))
    found = only(book)
    assert (found.records_in, found.records_out, found.bad_records) == (130, 10, 2)
    assert (found.late_records, found.counters) == (8, (("late", 8),))


def test_a_restart_takes_totals_back_and_not_the_work() -> None:  # OM1, OM3
    book = OperatorTotals(HandClock().wall_ms)
    book.begin({})
    book.add(0, report(1.0, map={"records_in": 90, "busy_ms": 400, "queued_bytes": 8, "watermark_ms": 5}))
    book.begin({"map": {"records_in": 60}})
    found = only(book)
    assert found.records_in == 60
    (subtask,) = found.subtasks
    assert (subtask.records_in, subtask.busy_ms) == (90, 400)
    assert (subtask.queued_bytes, subtask.watermark_ms) == (0, None), "nothing waits and nothing is known yet"
    book.add(0, report(1.0, map={"records_in": 40, "busy_ms": 100}))
    found = only(book)
    assert (found.records_in, found.subtasks[0].records_in, found.busy_ms) == (100, 130, 500)


def test_totals_are_no_less_than_those_of_the_newest_checkpoint() -> None:  # OM1
    book = OperatorTotals(HandClock().wall_ms)
    book.begin({})
    book.add(0, report(1.0, map={"records_in": 10}))
    book.completed(manifest({"map": {"records_in": 25}}))
    assert only(book).records_in == 25, "its workers left without a last report"
    book.add(0, report(2.0, map={"records_in": 30}))
    assert only(book).records_in == 30


def test_shares_are_those_of_the_busiest_subtask_between_its_last_two_reports() -> None:  # OM2
    book = OperatorTotals(HandClock().wall_ms)
    book.begin({})
    for worker, busy_ms, held_back_ms in ((0, 900, 50), (1, 100, 800)):
        start = {"busy_ms": 10_000, "held_back_ms": 10_000, "idle_ms": 10_000}
        book.add(worker, report(100.0 + worker, map=start))
        end = {"busy_ms": 10_000 + busy_ms, "held_back_ms": 10_000 + held_back_ms, "idle_ms": 10_050}
        book.add(worker, report(101.0 + worker, map=end))
    found = only(book)
    assert (found.busy, found.held_back, round(found.idle, 9)) == (0.9, 0.05, 0.05)
    assert [(s.busy, s.held_back) for s in found.subtasks] == [(0.9, 0.05), (0.1, 0.8)]
    assert (found.busy_ms, found.held_back_ms, found.idle_ms) == (21_000, 20_850, 20_100)


def test_queues_watermark_and_lag_of_an_operator() -> None:
    book = OperatorTotals(HandClock(date_ms=10_000).wall_ms)
    book.begin({})
    book.add(0, report(1.0, map={"watermark_ms": 9_000, "queued_batches": 2, "queued_bytes": 100}))
    book.add(1, report(1.0, map={"watermark_ms": 8_500, "queued_batches": 1, "queued_bytes": 10}))
    found = only(book)
    assert (found.watermark_ms, found.lag_ms, found.queued_batches, found.queued_bytes) == (8_500, 1_500, 3, 110)
    book.begin({})
    book.add(0, report(1.0, map={"watermark_ms": END_MS}))
    assert (only(book).lag_ms, only(book).watermark_ms) == (None, None), "all input has ended"
    book.add(1, report(1.0, map={"watermark_ms": 8_500}))
    assert only(book).watermark_ms == 8_500
    book.add(1, report(1.5, map={"watermark_ms": -(1 << 63)}))
    assert only(book).watermark_ms is None, "none has come yet"


def test_rates_are_those_between_reports_however_they_meet_the_snapshots() -> None:
    """Four workers of 250 records a second each, which report when they can: it is 1,000 at every moment."""
    book = OperatorTotals(HandClock().wall_ms)
    book.begin({})
    seen = []
    for tick in range(40):
        for worker in range(4):
            if (tick + worker) % 3 == 0:
                clock_s = 0.25 * tick + 0.03 * worker
                book.add(worker, report(clock_s, map={"records_in": 250 * clock_s, "records_out": 500 * clock_s}))
        seen.append(
            (round(only(book).records_in_per_second), round(only(book).records_out_per_second)) if tick else (0, 0)
        )
    assert set(seen[7:]) == {(1_000, 2_000)}


def test_rates_follow_a_change_within_their_window() -> None:
    book = OperatorTotals(HandClock().wall_ms)
    book.begin({})
    for half in range(20):
        book.add(0, report(half / 2, map={"records_in": min(half, 10) * 50}))
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


def test_operators_of_one_pass_name_the_one_that_has_their_time() -> None:  # OM15
    pipeline = hg.Pipeline("p")
    kept = pipeline.source(hg.FromRows([{"n": 1}])).filter(pl.col("n") > 0, name="kept").select("n", name="chosen")
    kept.with_columns(name="more", m=pl.col("n") + 1).map(lambda row: row, name="other").sink(hg.Discard(), name="end")
    book = OperatorTotals(HandClock().wall_ms, runs_with(pipeline.definition(1).plan))
    book.begin({})
    book.add(
        0,
        report(1.0, kept={"records_in": 2}, chosen={"records_in": 1}, more={"records_in": 1}, other={"records_in": 1}),
    )
    told = {str(node.node): node.runs_with for node in book.nodes()}
    assert told == {"kept": "more", "chosen": "more", "more": None, "other": None}
