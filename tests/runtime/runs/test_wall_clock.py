"""Real workers on a machine whose date is set again and again: what comes out depends on no date (W6)."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from pyspark import cloudpickle
from tests.runtime.running import definition_of, pipeline_at

import headgate as hg
from headgate.connectors.files.file_committer import read_committed
from headgate.testing.connectors import EOF, PAUSE, ScriptedSource

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import tests

Start = Any

HOUR_S = 3_600
TYPES = {"key": pa.int64(), "ts": pa.int64()}


def set_the_date(step_s: int) -> None:
    """Let the wall clock step by ``step_s`` whenever somebody looks at it."""
    begun, looks = time.time(), itertools.count()

    def date() -> float:
        return begun + step_s * next(looks)

    time.time, time.time_ns = date, lambda: int(date() * 1e9)


def forward() -> None:
    set_the_date(HOUR_S)


def back() -> None:
    set_the_date(-HOUR_S)


def counted(root: Path, source: ScriptedSource, idle_timeout: str) -> hg.Pipeline:
    pipeline = pipeline_at(root)
    stream = pipeline.source(source).with_timestamps("ts", idle_timeout=idle_timeout)
    counts = stream.key_by("key").window(hg.Tumbling("5s")).agg(n=pl.len())
    counts.sink(hg.FileSink(root / "out", "parquet", roll_interval=0), name="out")
    return pipeline


def windows(root: Path) -> int:
    """Return how many records the windows that were committed so far hold."""
    found = read_committed(str(root / "out"))
    return int(found["n"].sum()) if found.width else 0


@pytest.mark.parametrize("prepare", [forward, back])
def test_a_date_that_is_set_makes_no_record_late(start: Start, tmp_path: Path, prepare: Callable[[], None]) -> None:
    rows = [{"key": second % 2, "ts": second * 1_000} for second in range(20)]
    source = ScriptedSource([*rows, EOF], [PAUSE, PAUSE, *rows, EOF], schema=TYPES)
    run = start(definition_of(counted(tmp_path, source, "10m")), prepare=prepare)
    assert run.result().is_finished
    assert run.driver.progress.late_records == 0
    assert read_committed(str(tmp_path / "out"))["n"].sum() == 2 * len(rows)


def test_a_date_that_is_set_back_stops_neither_idle_timeouts_nor_metrics(start: Start, tmp_path: Path) -> None:
    rows = [{"key": second % 2, "ts": second * 1_000} for second in range(20)]
    source = ScriptedSource([*rows, PAUSE], [PAUSE], schema=TYPES)
    run = start(definition_of(counted(tmp_path, source, "100ms")), prepare=back)
    run.wait(lambda: windows(tmp_path) >= 15, "windows fire")  # the source gives one record at a time
    run.wait(lambda: any(node.records_out == len(rows) for node in run.driver.progress.nodes), "metrics")
    run.driver.stop()
    run.result()
    assert read_committed(str(tmp_path / "out"))["n"].sum() == 15, "the last window is open"
