"""Windows that are the same for every key, from the public API."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

import headgate as hg
from headgate import testing
from headgate.testing import EOF, PAUSE, Collect, FailOnce, ScriptedSource

SCHEMA = {"page": pa.string(), "ts": pa.timestamp("us"), "n": pa.int64()}
START = datetime(2026, 3, 28)


def click(page: str, second: float, n: int = 1) -> dict[str, Any]:
    return {"page": page, "ts": START + timedelta(seconds=second), "n": n}


def clicks(*items: Any, parallelism: int = 2) -> hg.Stream:
    """Records in this order; a single subtask has what comes before a pause in event time before what follows."""
    pipeline = hg.Pipeline(
        "p",
        parallelism=parallelism,
        restart=hg.FixedDelay(delay="10ms"),
        checkpointing=hg.Checkpointing(interval="20ms"),
    )
    return pipeline.source(ScriptedSource([*items, EOF], schema=SCHEMA, pause_ms=30))


def found(sink: Collect, *columns: str) -> list[tuple[Any, ...]]:
    """Return rows in order, times as seconds after the start."""
    rows = [[row[name] for name in columns] for row in sink.rows()]
    seconds = [[(v - START).total_seconds() if isinstance(v, datetime) else v for v in row] for row in rows]
    return sorted(tuple(row) for row in seconds)


def test_late_records_are_in_their_output_once_over_a_failure(tmp_path: Path) -> None:
    counts, late = Collect(tmp_path / "counts"), Collect(tmp_path / "late")
    first = [click("a", 1), click("b", 2), click("a", 11)]
    second = [click("a", 25)], PAUSE, [click("b", 3, 7)], FailOnce(tmp_path / "failed"), [click("a", 4, 8)]
    stream = clicks(first, *second, parallelism=1)
    windows = stream.with_timestamps("ts").key_by("page").window(hg.Tumbling("10s"), late_output="late")
    results = windows.agg(n=pl.len())
    results.sink(counts)
    results.side_output("late").sink(late)
    assert testing.run(stream._pipeline).is_finished
    assert found(counts, "page", "window_start", "n") == [("a", 0, 1), ("a", 10, 1), ("a", 20, 1), ("b", 0, 1)]
    assert found(late, "page", "ts", "n") == [("a", 4, 8), ("b", 3, 7)]


@pytest.mark.parametrize("is_read", [True, False])
def test_the_warning_says_whether_late_records_were_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_read: bool
) -> None:
    stream = clicks([click("a", 25)], PAUSE, [click("a", 1), click("a", 2)], parallelism=1)
    windows = stream.with_timestamps("ts").key_by("page").window(hg.Tumbling("10s"), late_output="late")
    results = windows.agg(n=pl.len())
    results.sink(Collect(tmp_path / "counts"))
    if is_read:
        results.side_output("late").sink(Collect(tmp_path / "late"))
    with caplog.at_level(logging.WARNING, "headgate"):
        assert testing.run(stream._pipeline).late_records == 2
    what = "sent 2 late records to its output 'late'" if is_read else "dropped 2 late records"
    assert f"'window' {what} (lateness: p50 20.0 s" in caplog.text


def test_sliding_windows_are_counted_once_over_a_failure(tmp_path: Path) -> None:
    sink = Collect(tmp_path / "out")
    first = [click("a", 1), click("b", 3), click("a", 4.5)]
    stream = clicks(first, FailOnce(tmp_path / "failed"), [click("a", 6), click("b", 5)]).with_timestamps("ts")
    windows = stream.key_by("page").window(hg.Sliding("5s", "2s"))
    windows.agg(n=pl.len()).sink(sink)
    assert testing.run(stream._pipeline).is_finished
    assert found(sink, "page", "window_start", "window_end", "n") == [
        *[("a", -2, 3, 1), ("a", 0, 5, 2), ("a", 2, 7, 2), ("a", 4, 9, 2), ("a", 6, 11, 1)],
        *[("b", 0, 5, 1), ("b", 2, 7, 2), ("b", 4, 9, 1)],
    ]


def test_python_functions_over_sliding_windows_get_the_records_of_each(tmp_path: Path) -> None:
    sink = Collect(tmp_path / "out")
    stream = clicks([click("a", 1, 1), click("a", 3, 2), click("a", 4, 3)]).with_timestamps("ts")
    windows = stream.key_by("page").window(hg.Sliding("4s", "2s"))
    windows.apply(lambda key, rows: {"all": rows["n"].to_list()}, {"all": pa.list_(pa.int64())}).sink(sink)
    assert testing.run(stream._pipeline).is_finished
    assert found(sink, "window_start", "all") == [(-2, [1]), (0, [1, 2]), (2, [2, 3]), (4, [3])]


def test_a_day_on_which_clocks_are_moved_has_23_hours(tmp_path: Path) -> None:
    sink = Collect(tmp_path / "out")
    hours = [click("a", hour * 3_600) for hour in range(72)]
    stream = clicks(hours).with_timestamps("ts")
    stream.key_by("page").window(hg.Tumbling("1d", zone="Europe/Berlin")).agg(n=pl.len()).sink(sink)
    assert testing.run(stream._pipeline).is_finished
    assert found(sink, "window_start", "window_end", "n") == [
        (-3_600, 23 * 3_600, 23),
        (23 * 3_600, 46 * 3_600, 23),  # 29 March
        (46 * 3_600, 70 * 3_600, 24),
        (70 * 3_600, 94 * 3_600, 2),
    ]


def test_results_are_updated_by_late_records_over_a_failure(tmp_path: Path) -> None:
    sink = Collect(tmp_path / "out")
    first = [click("a", 1), click("b", 2), click("a", 11)]
    stream = clicks(first, [click("a", 3)], FailOnce(tmp_path / "failed"), [click("b", 4), click("c", 21)])
    windows = stream.with_timestamps("ts").key_by("page").window(hg.Tumbling("10s"), allowed_lateness="1h")
    windows.agg(n=pl.len()).sink(sink)
    assert testing.run(stream._pipeline).is_finished
    last = {(page, start): n for page, start, n in found(sink, "page", "window_start", "n")}  # counts only grow
    assert last == {("a", 0): 2, ("b", 0): 2, ("a", 10): 1, ("c", 20): 1}


def test_early_results_come_before_the_end_of_the_window(tmp_path: Path) -> None:
    sink = Collect(tmp_path / "out")
    stream = clicks([click("a", 1)], [click("a", 2)], [click("a", 3)]).with_timestamps("ts")
    windows = stream.key_by("page").window(hg.Tumbling("1d"), early="1ms", accumulate=False)
    windows.agg(n=pl.len()).sink(sink)
    assert testing.run(stream._pipeline).is_finished
    assert sum(n for (n,) in found(sink, "n")) == 3


@pytest.mark.parametrize(
    ("window", "options", "message"),
    [
        (hg.Tumbling("1m"), {"early": 0}, "early must be longer than zero"),
        (hg.Tumbling("1m"), {"accumulate": False}, "accumulate=False needs early= or allowed_lateness="),
        (hg.Sliding("2m", "1m"), {"accumulate": False, "early": "1s"}, "needs tumbling windows"),
        (hg.Tumbling("1m"), {"allowed_lateness": 5}, "without a unit"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(window: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(hg.UsageError, match=message):
        clicks().with_timestamps("ts").key_by("page").window(window, **options)


def test_wrong_names_of_the_late_output_are_refused() -> None:
    keyed = clicks().with_timestamps("ts").key_by("page")
    with pytest.raises(hg.UsageError, match="reserved"):
        keyed.window(hg.Tumbling("1m"), late_output="bad-records")
    with pytest.raises(hg.UsageError, match="late_output must be named with"):
        keyed.window(hg.Tumbling("1m"), late_output="late records")
    with pytest.raises(hg.UsageError, match=r"window\(..., late_output='late'\)"):
        keyed.window(hg.Tumbling("1m")).agg(n=pl.len()).side_output("late")
