"""Windows over the results of windows, from the public API, in any combination of sizes."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

import headgate as hg
from headgate import testing
from headgate.testing import EOF, Collect, ScriptedSource

EPOCH, MS = datetime(1970, 1, 1), timedelta(milliseconds=1)
SCHEMA = {"key": pa.int64(), "ts": pa.int64(), "v": pa.int64()}
ROWS = [{"key": i % 3, "ts": 250 * i, "v": i} for i in range(80)]


class AtEnd(hg.Trigger):
    def on_batch(self, rows: pl.DataFrame, context: hg.TriggerContext) -> hg.TriggerResult:
        assert context.window_end_ms is not None
        context.timers.register_event_time(context.window_end_ms - 1)
        return hg.TriggerResult.CONTINUE

    def on_event_time(self, time_ms: int, context: hg.TriggerContext) -> hg.TriggerResult:
        return hg.TriggerResult.FIRE


class PassOn(hg.BroadcastProcessFunction):
    def process(self, row: dict[str, Any], context: Any) -> Any:
        yield row

    def process_broadcast(self, row: dict[str, Any], context: Any) -> None:
        pass


def sums_of(first: tuple[int, int]) -> dict[tuple[int, int], int]:
    """Return the sums of windows of a size and a slide, by key and start."""
    size, slide = first
    found: Counter[tuple[int, int]] = Counter()
    for row in ROWS:
        last = row["ts"] - row["ts"] % slide
        for start in range(last, row["ts"] - size, -slide):
            found[row["key"], start] += row["v"]
    return found


def window_of(size: int, slide: int) -> Any:
    return hg.Tumbling(f"{size}ms") if size == slide else hg.Sliding(f"{size}ms", f"{slide}ms")


@pytest.mark.parametrize(
    ("first", "second", "trigger"),
    [
        ((2_000, 2_000), (1_000, 1_000), None),
        ((4_000, 1_000), (7_000, 3_000), None),
        ((2_000, 2_000), (1_000, 1_000), AtEnd()),
        ((4_000, 1_000), (6_000, 6_000), AtEnd()),
    ],
)
def test_no_window_misses_results_of_windows(tmp_path: Path, first: Any, second: Any, trigger: Any) -> None:
    sink = Collect(tmp_path / "out")
    pipeline = hg.Pipeline("p", parallelism=2, checkpointing=hg.Checkpointing(interval="20ms"))
    batches = [ROWS[at : at + 8] for at in range(0, len(ROWS), 8)]
    rows = pipeline.source(ScriptedSource([*batches, EOF], schema=SCHEMA, pause_ms=1)).with_timestamps("ts")
    sums = rows.key_by("key").window(window_of(*first)).agg(total=pl.col("v").sum())
    again = sums.select("key", "total", "window_start").key_by("key").window(window_of(*second), trigger=trigger)
    again.agg(n=pl.len(), total=pl.col("total").sum(), at=pl.col("window_start").min()).sink(sink)
    result = testing.run(pipeline, timeout_s=240)
    assert result.late_records == 0
    size, slide = second
    wanted: dict[tuple[int, int], list[int]] = {}
    for (key, start), total in sums_of(first).items():
        for window in range(start - start % slide, start - size, -slide):
            wanted.setdefault((key, window), []).append(total)
    found = {(row["key"], (row["window_start"] - EPOCH) // MS): (row["n"], row["total"]) for row in sink.rows()}
    assert found == {at: (len(totals), sum(totals)) for at, totals in wanted.items()}
    assert len(sink.rows()) == len(wanted)


def test_sessions_of_windows_that_are_longer_than_the_gap_miss_none(tmp_path: Path) -> None:
    sink = Collect(tmp_path / "out")
    pipeline = hg.Pipeline("p", parallelism=2, checkpointing=hg.Checkpointing(interval="20ms"))
    batches = [ROWS[at : at + 8] for at in range(0, len(ROWS), 8)]
    rows = pipeline.source(ScriptedSource([*batches, EOF], schema=SCHEMA, pause_ms=1)).with_timestamps("ts")
    sums = rows.key_by("key").window(hg.Tumbling("10s")).agg(total=pl.col("v").sum())
    sums.select("key", "total", "window_start").key_by("key").window(hg.Session("2s")).agg(n=pl.len()).sink(sink)
    result = testing.run(pipeline, timeout_s=240)
    assert result.late_records == 0
    assert [row["n"] for row in sink.rows()] == [1] * 6


@pytest.mark.parametrize("is_left", [True, False])
@pytest.mark.parametrize(
    ("first", "second"),
    [((2_000, 2_000), (1_000, 1_000)), ((4_000, 1_000), (6_000, 6_000)), ((5_000, 5_000), (4_000, 2_000))],
)
def test_no_window_join_misses_results_of_windows(tmp_path: Path, first: Any, second: Any, is_left: bool) -> None:
    sink = Collect(tmp_path / "out")
    pipeline = hg.Pipeline("p", parallelism=2, checkpointing=hg.Checkpointing(interval="20ms"))
    batches = [ROWS[at : at + 8] for at in range(0, len(ROWS), 8)]
    rows = pipeline.source(ScriptedSource([*batches, EOF], schema=SCHEMA, pause_ms=1)).with_timestamps("ts")
    sums = rows.key_by("key").window(window_of(*first)).agg(total=pl.col("v").sum())
    sums = sums.select("key", "total", at="window_start")
    left, right = (sums, rows) if is_left else (rows, sums)
    joined = left.join(right, on="key", window=window_of(*second))
    size, slide = second
    again = joined.key_by("key").window(hg.Tumbling(f"{slide}ms"))
    again.agg(of=(pl.col("total") * pl.col("v")).sum()).sink(sink)
    result = testing.run(pipeline, timeout_s=240)
    assert result.late_records == 0
    wanted: Counter[tuple[int, int]] = Counter()
    for (key, start), total in sums_of(first).items():
        for window in range(start - start % slide, start - size, -slide):
            values = [row["v"] for row in ROWS if row["key"] == key and window <= row["ts"] < window + size]
            wanted[key, window] += total * sum(values)
    found = {(row["key"], (row["window_start"] - EPOCH) // MS): row["of"] for row in sink.rows()}
    assert found == {at: value for at, value in wanted.items() if value}


@pytest.mark.parametrize("is_function", [False, True])
def test_an_input_without_event_time_makes_no_result_of_a_window_late(tmp_path: Path, is_function: bool) -> None:
    sink = Collect(tmp_path / "out")
    pipeline = hg.Pipeline("p", parallelism=2, checkpointing=hg.Checkpointing(interval="20ms"))
    batches = [ROWS[at : at + 8] for at in range(0, len(ROWS), 8)]
    rows = pipeline.source(ScriptedSource([*batches, EOF], schema=SCHEMA, pause_ms=1)).with_timestamps("ts")
    sums = rows.key_by("key").window(hg.Tumbling("2s")).agg(total=pl.col("v").sum())
    table = pipeline.source(hg.FromRows([{"key": key, "name": f"{key}"} for key in range(3)]), name="table")
    if is_function:
        named = sums.connect(table.broadcast()).process(PassOn())
    else:
        named = sums.join(table.broadcast(), on="key", how="left")
    named.key_by("key").window(hg.Tumbling("1s")).agg(n=pl.len()).sink(sink)
    result = testing.run(pipeline, timeout_s=240)
    assert result.late_records == 0
    assert [row["n"] for row in sink.rows()] == [1] * 30
