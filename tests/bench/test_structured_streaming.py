"""The Structured Streaming peer: figures from progress, the choice of sizes, and that it counts what it should."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from bench.peers.structured_streaming import (
    figures_of,
    session,
    size_for_one_second,
    summary_of,
    windowed_count,
)


def batch(second: float, duration_ms: int, rows: int) -> dict[str, object]:
    timestamp = f"2026-01-01T00:00:{second:06.3f}Z"
    return {"timestamp": timestamp, "durationMs": {"triggerExecution": duration_ms}, "numInputRows": rows}


def size(rows: int, rate: float, batch_ms: float) -> dict[str, float]:
    return {"batch_rows": rows, "events_per_s": rate, "batch_ms_median": batch_ms}


def test_throughput_counts_pauses_between_batches() -> None:
    progress = [batch(1.0, 400, 1_000), batch(1.5, 300, 1_000), batch(2.5, 500, 1_000)]
    assert figures_of(progress, 1_000) == {
        "batch_rows": 1_000,
        "batches": 3,
        "events_per_s": 1_500,  # 3,000 rows in 2 s
        "batch_ms_median": 400,
        "batch_ms_max": 500,
    }


def test_best_at_a_second_ignores_slower_batches() -> None:
    summary = summary_of([size(1, 10, 200), size(2, 30, 1_000), size(3, 90, 1_001)])
    assert (summary["events_per_s_best"], summary["events_per_s_best_1s"]) == (90, 30)
    assert summary_of([size(3, 90, 1_001)])["events_per_s_best_1s"] is None


def test_the_extra_size_lies_where_a_batch_takes_just_under_a_second() -> None:
    assert size_for_one_second([size(4_000_000, 1, 1_430), size(2_000_000, 1, 430)]) == 3_000_000
    assert size_for_one_second([size(1_000_000, 1, 400), size(2_000_000, 1, 900)]) is None
    assert size_for_one_second([size(1_000_000, 1, 1_400)]) is None


@pytest.mark.spark
@pytest.mark.deep
def test_it_counts_every_event_once_in_the_right_window(tmp_path: Path) -> None:
    keys, rows, batches = 7, 1_000, 12  # windows of 5 batches
    spark = session(1)
    try:
        query = (
            windowed_count(spark, keys=keys, batch_rows=rows, cores=1, batch_ms=1_000)
            .writeStream.format("memory")
            .queryName("counted")
            .outputMode("append")
            .option("checkpointLocation", str(tmp_path))
            .start()
        )
        while (query.lastProgress or {"batchId": -1})["batchId"] < batches:
            query.awaitTermination(0.2)  # raises what ended the query
        query.stop()
        counted = spark.sql("SELECT unix_millis(window.start) AS start, key, events, total FROM counted").collect()
    finally:
        spark.stop()
    per_window = 5 * rows
    assert counted
    for number, start in enumerate(sorted({row.start for row in counted})):
        values = range(number * per_window, (number + 1) * per_window)
        expected, totals = Counter[int](), Counter[int]()
        for value in values:
            key = value * 2_654_435_761 % keys
            expected[key] += 1
            totals[key] += value % 1_000
        found = {row.key: (row.events, row.total) for row in counted if row.start == start}
        assert found == {key: (expected[key], totals[key]) for key in expected}
