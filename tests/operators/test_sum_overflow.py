"""Sums of integers that no integer holds: they fail, in every window and without one, and never wrap."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
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

TIMES = pa.array([dt.datetime(2020, 1, 1)] * 3, pa.timestamp("us"))

WAYS: dict[str, Callable[[Any], Any]] = {
    "window": lambda keyed: keyed.window(hg.Tumbling("1m")),
    "session": lambda keyed: keyed.window(hg.Session("1m")),
    "running": lambda keyed: keyed,
}


def summed(way: str, values: pa.Array, directory: Path) -> list[dict[str, Any]]:
    rows = pa.table({"k": [1, 1, 1], "x": values, "ts": TIMES})
    pipeline, sink = hg.Pipeline("sums"), Collect(directory)
    stream = pipeline.source(hg.FromRows(rows)).with_timestamps("ts")
    WAYS[way](stream.key_by("k")).agg(s=pl.col("x").sum()).sink(sink)
    run(pipeline, timeout_s=300)
    return sink.rows()


@pytest.mark.parametrize("way", WAYS)
def test_a_sum_that_is_too_large_fails(way: str, tmp_path: Path) -> None:
    with pytest.raises(PipelineFailed, match="a sum of integers is larger than int64 holds"):
        summed(way, pa.array([2**62] * 3), tmp_path)


def test_a_sum_in_a_narrow_type_fails(tmp_path: Path) -> None:
    with pytest.raises(PipelineFailed, match="a sum of integers is larger than int32 holds"):
        summed("window", pa.array([2**31 - 1] * 3, pa.int32()), tmp_path)


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
