"""Functions over updated sessions, and tops of records in windows, in pipelines that fail: exactly once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import headgate as hg
from headgate import testing
from headgate.testing import EOF, PAUSE, Collect, FailOnce, ScriptedSource

Row = dict[str, Any]
SCHEMA = {"k": int, "ms": int, "x": int}
GAP_MS = 6
ROWS: list[Row] = [{"k": n % 5, "ms": n + 30 * (-n % 4), "x": n % 7} for n in range(600)]
"""Out of order by less than 100 ms."""

OTHERS: list[Row] = [{"k": n % 5, "ms": 2 * n, "x": n % 11} for n in range(0, 300, 7)]

each_backend = pytest.mark.parametrize("state", [hg.Memory(), hg.RocksDB()], ids=["memory", "rocksdb"])


def records(path: Path, state: Any, out_of_orderness: str) -> hg.Stream:
    """Records of two splits, of which one fails on the way."""
    script = [item for at in range(0, 600, 60) for item in (ROWS[at : at + 60], PAUSE)]
    pipeline = hg.Pipeline("p", parallelism=2, state=state, checkpointing=hg.Checkpointing(interval="20ms"))
    failing = FailOnce(path / "failed")
    source = ScriptedSource(
        [*script, EOF], [*OTHERS[:20], PAUSE, failing, *OTHERS[20:], EOF], schema=SCHEMA, pause_ms=20
    )
    return pipeline.source(source).with_timestamps("ms", out_of_orderness=out_of_orderness)


def results(stream: hg.Stream, path: Path) -> Counter[tuple[Any, ...]]:
    """What is there when all changes were applied."""
    sink = Collect(path / "out")
    stream.sink(sink)
    testing.run(stream._pipeline, timeout_s=300, kill_worker_after_checkpoint=2)
    found: Counter[tuple[Any, ...]] = Counter()
    for row in sink.rows():
        found[tuple(value for name, value in row.items() if name != "op")] += (
            1 if row.get("op", "insert") in ("insert", "update_after") else -1
        )
    assert min(found.values()) >= 0, "what was not there went"
    return +found


def sessions() -> list[list[Row]]:
    found: list[list[Row]] = []
    for key in range(5):
        last: list[Row] = []
        for row in sorted((row for row in ROWS + OTHERS if row["k"] == key), key=lambda row: int(row["ms"])):
            if not last or row["ms"] >= last[-1]["ms"] + GAP_MS:
                last = []
                found.append(last)
            last.append(row)
    return found


def add(total: Row, row: Row) -> Row:
    return {"k": total["k"], "ms": max(total["ms"], row["ms"]), "x": total["x"] + row["x"]}


def by_value(key: int, rows: pl.DataFrame) -> list[Row]:
    return [{"value": value, "count": count} for value, count in sorted(Counter(rows["x"]).items())]


@each_backend
def test_lost_workers_change_no_totals_of_sessions(tmp_path: Path, state: Any) -> None:
    windows = (
        records(tmp_path, state, "5ms")
        .key_by("k")
        .window(hg.Session(f"{GAP_MS}ms"), allowed_lateness="1h", retractions=True)
    )
    found = results(windows.reduce(add).select("k", "ms", "x", "op"), tmp_path)
    assert found == Counter(
        (one[0]["k"], max(row["ms"] for row in one), sum(row["x"] for row in one)) for one in sessions()
    )


@each_backend
def test_lost_workers_change_no_rows_of_sessions(tmp_path: Path, state: Any) -> None:
    windows = (
        records(tmp_path, state, "5ms")
        .key_by("k")
        .window(hg.Session(f"{GAP_MS}ms"), allowed_lateness="1h", early="10ms", retractions=True)
    )
    found = results(windows.apply(by_value, {"value": int, "count": int}).select("k", "value", "count", "op"), tmp_path)
    expected: Counter[tuple[Any, ...]] = Counter()
    for one in sessions():
        counts = Counter(row["x"] for row in one)
        expected.update((one[0]["k"], value, count) for value, count in counts.items())
    assert found == expected


@each_backend
def test_lost_workers_change_no_tops(tmp_path: Path, state: Any) -> None:
    keyed = records(tmp_path, state, "1s").key_by("k")
    top = keyed.top_per_window(2, by="x", ties=True, rank="rank", window=hg.Sliding("40ms", "20ms"))
    found = results(top.select("k", "ms", "x", "rank", at=pl.col("window_start").dt.epoch("ms")), tmp_path)
    expected: Counter[tuple[Any, ...]] = Counter()
    for start in range(-20, 720, 20):
        for key in range(5):
            inside = [row for row in ROWS + OTHERS if row["k"] == key and start <= row["ms"] < start + 40]
            for row in inside:
                rank = 1 + sum(other["x"] > row["x"] for other in inside)
                if rank <= 2:
                    expected[(*row.values(), rank, start)] += 1
    assert found == expected
