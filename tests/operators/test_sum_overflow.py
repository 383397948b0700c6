"""Sums that their type does not hold: they fail, in every window and without one, and never wrap."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

import headgate as hg
from headgate.errors import PipelineFailed, UsageError
from headgate.state.window_aggregates import Accumulator, AggTable, Kind, Values, add_values
from headgate.testing import Collect, run

TOTAL = pl.col("x").sum()
TIMES = pa.array([dt.datetime(2020, 1, 1)] * 3, pa.timestamp("us"))

WAYS: dict[str, Callable[[Any], Any]] = {
    "window": lambda keyed: keyed.window(hg.Tumbling("1m")),
    "session": lambda keyed: keyed.window(hg.Session("1m")),
    "running": lambda keyed: keyed,
}


KEPT: dict[str, Callable[[Any], Any]] = {
    "window": WAYS["window"],
    "session": WAYS["session"],
    "count": lambda keyed: keyed.window(hg.Count(3)),
}
"""Windows that keep their records where there is a median."""


def summed(
    way: str, values: pa.Array, directory: Path, total: pl.Expr = TOTAL, **others: pl.Expr
) -> list[dict[str, Any]]:
    rows = pa.table({"k": [1, 1, 1], "x": values, "ts": TIMES})
    pipeline, sink = hg.Pipeline("sums"), Collect(directory)
    stream = pipeline.source(hg.FromRows(rows)).with_timestamps("ts")
    (KEPT if others else WAYS)[way](stream.key_by("k")).agg(s=total, **others).sink(sink)
    run(pipeline, timeout_s=300)
    return sink.rows()


@pytest.mark.parametrize("way", WAYS)
def test_a_sum_that_is_too_large_fails(way: str, tmp_path: Path) -> None:
    with pytest.raises(PipelineFailed, match="a sum of integers is larger than int64 holds"):
        summed(way, pa.array([2**62] * 3), tmp_path)


def test_a_sum_in_a_narrow_type_fails(tmp_path: Path) -> None:
    with pytest.raises(PipelineFailed, match="a sum of integers is larger than int32 holds"):
        summed("window", pa.array([2**31 - 1] * 3, pa.int32()), tmp_path)


@pytest.mark.parametrize("way", KEPT)
def test_a_sum_of_kept_records_that_is_too_large_fails(way: str, tmp_path: Path) -> None:
    with pytest.raises(PipelineFailed, match=r"sum of integers is larger than int64 holds; sum .*cast\(pl.Float64\)"):
        summed(way, pa.array([2**62] * 3), tmp_path, m=pl.len() + 0)


@pytest.mark.parametrize(
    ("values", "total", "holds"),
    [
        (pa.array([2**31 - 1] * 3, pa.int32()), TOTAL, "integers is larger than int32"),
        (pa.array([2**63] * 3, pa.uint64()), TOTAL, "integers is larger than uint64"),
        (pa.array([-(2**62)] * 3), TOTAL / pl.len(), "integers is larger than int64"),
        (pa.array([2**62] * 3), pl.all().exclude("k", "ts").sum(), "integers is larger than int64"),
        (pa.array([Decimal(9) * 10**37] * 3, pa.decimal128(38, 0)), TOTAL, "decimals is larger than decimal(38, 0)"),
        (pa.array([Decimal(4) * 10**35] * 3, pa.decimal128(38, 2)), TOTAL, "decimals is larger than decimal(38, 2)"),
        (pa.array([2**62] * 3, pa.duration("us")), TOTAL, "durations is larger than duration"),
    ],
    ids=["int32", "uint64", "in-a-quotient", "by-pattern", "decimal", "digits", "duration"],
)
def test_no_sum_of_kept_records_wraps(values: pa.Array, total: pl.Expr, holds: str, tmp_path: Path) -> None:
    with pytest.raises(PipelineFailed, match=f"a sum of {re.escape(holds)}"):
        summed("window", values, tmp_path, total, m=pl.len() + 0)


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (pa.array([2**62, 2**62, -(2**62) - 1]), 2**62 - 1),
        (pa.array([2**62, 2**62 - 1, None]), 2**63 - 1),
        (pa.array([2**63, 2**62, 1], pa.uint64()), 3 * 2**62 + 1),
        (pa.array([Decimal("0.01"), None, Decimal("9" * 35)], pa.decimal128(38, 2)), Decimal("9" * 35 + ".01")),
    ],
)
def test_sums_of_kept_records_that_fit_are_exact(values: pa.Array, found: Any, tmp_path: Path) -> None:
    assert [row["s"] for row in summed("window", values, tmp_path, m=pl.len() + 0)] == [found]


def test_a_sum_of_what_the_key_is_has_another_name(tmp_path: Path) -> None:
    total = (pl.col("k") + pl.col("x")).sum()
    assert [row["s"] for row in summed("window", pa.array([1, 2, 3]), tmp_path, total, m=pl.len() + 0)] == [9]


@pytest.mark.parametrize("way", KEPT)
def test_a_pattern_means_no_key(way: str, tmp_path: Path) -> None:
    rows = pa.table({"k": ["a", "a", "b"], "x": [1, 2, 3], "y": [0.5, 1.0, 2.0]})
    pipeline, sink = hg.Pipeline("patterns"), Collect(tmp_path)
    stream = pipeline.source(hg.FromRows(rows.append_column("ts", TIMES))).with_timestamps("ts")
    windows = {**KEPT, "count": lambda keyed: keyed.window(hg.Count(1))}[way](stream.key_by("k"))
    windows.agg(pl.all().exclude("ts").sum()).sink(sink)
    run(pipeline, timeout_s=300)
    found = sorted((row["k"], row["x"], row["y"]) for row in sink.rows())
    assert found == (
        [("a", 1, 0.5), ("a", 2, 1.0), ("b", 3, 2.0)] if way == "count" else [("a", 3, 1.5), ("b", 3, 2.0)]
    )


def test_large_unsigned_sums_are_exact(tmp_path: Path) -> None:
    assert [row["s"] for row in summed("window", pa.array([2**63, 2**62, 1], pa.uint64()), tmp_path)] == [3 * 2**62 + 1]


def test_what_cancels_out_in_a_batch_is_no_overflow() -> None:
    target = np.array([0, 5], np.int64)
    add_values(target, np.array([0, 0, 0, 1]), np.array([2**62, 2**62, -(2**63), 1]))
    assert target.tolist() == [0, 6]
    unsigned = np.array([2**63], np.uint64)
    add_values(unsigned, np.array([0, 0]), np.array([2**63 - 1, 2**63], np.uint64), np.array([1, -1]))
    assert unsigned.tolist() == [2**63 - 1]


@pytest.mark.parametrize(
    ("dtype", "first", "second"), [("int64", 2**63 - 1, 1), ("int64", -(2**63), -1), ("uint64", 2**64 - 1, 1)]
)
def test_a_table_refuses_what_it_cannot_hold(dtype: str, first: int, second: int) -> None:
    table = AggTable([Accumulator(Kind.ADD, dtype)])
    table.update(1, np.array([0]), 1, [Values(np.array([first], dtype))])
    with pytest.raises(UsageError, match=f"larger than {dtype} holds"):
        table.update(1, np.array([0]), 1, [Values(np.array([second], dtype))])
