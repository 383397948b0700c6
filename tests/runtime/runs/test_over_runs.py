"""OVER aggregates in pipelines that fail: exactly once (docs/spec/over.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from tests.killing import run_killing

import headgate as hg
from headgate.testing import EOF, PAUSE, Collect, FailOnce, ScriptedSource

Row = dict[str, Any]
SCHEMA = {"k": int, "ms": int, "x": int}
ROWS: list[Row] = [{"k": n % 5, "ms": n // 2 + 3 * (-n % 3), "x": n % 7} for n in range(600)]
"""Out of order by less than 10 ms."""

OTHER: list[Row] = [{"k": n % 5, "ms": n // 2, "x": n + 1_000} for n in range(0, 600, 7)]


def expected(reach: int | None) -> list[tuple[Any, ...]]:
    """A recount of what each record and those at most ``reach`` before it sum up to."""
    found = []
    rows = ROWS + OTHER
    for row in rows:
        first = -1 if reach is None else row["ms"] - reach
        sums = [one["x"] for one in rows if one["k"] == row["k"] and first <= one["ms"] <= row["ms"]]
        found.append((*row.values(), sum(sums), len(sums)))
    return sorted(found)


@pytest.mark.parametrize(
    ("reach", "state"), [(20, hg.Memory()), (20, hg.RocksDB()), (None, hg.Memory()), (None, hg.RocksDB())]
)
def test_lost_workers_change_nothing(tmp_path: Path, reach: int | None, state: Any) -> None:
    sink = Collect(tmp_path / "out")
    failing = FailOnce(tmp_path / "failed")
    script = [item for at in range(0, 600, 60) for item in (ROWS[at : at + 60], PAUSE)]
    pipeline = hg.Pipeline("p", parallelism=2, state=state, checkpointing=hg.Checkpointing(interval="20ms"))
    source = ScriptedSource([*script, EOF], [*OTHER[:50], PAUSE, failing, *OTHER[50:], EOF], schema=SCHEMA, pause_ms=20)
    records = pipeline.source(source).with_timestamps("ms", out_of_orderness="10ms")
    frame = "unbounded" if reach is None else f"{reach}ms"
    records.key_by("k").over(range=frame, total=pl.col("x").sum(), n=pl.len()).sink(sink)
    run_killing(pipeline, 2)
    assert sorted(tuple(row.values()) for row in sink.rows()) == expected(reach)
