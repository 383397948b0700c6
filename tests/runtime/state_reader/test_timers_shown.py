"""Timers in checkpoints, as they are shown to people: keys, times and kinds."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from tests.cli.test_state import shown
from tests.operators.harness import Harness
from tests.runtime.state_reader.written import Written, state

import headgate as hg
from headgate.errors import UsageError
from headgate.operators.base import WATERMARK_MAX_MS, WATERMARK_MIN_MS
from headgate.operators.catalog import process_spec


def with_timers(root: Path, form: str, *, has_state: bool = True) -> Written:
    """Return a checkpoint of a function that has registered some timers, also for times that are no dates."""
    rows = [(1, 1_700_000_000_123, 0), (2, WATERMARK_MAX_MS, 0), (2, 0, -1), (3, WATERMARK_MIN_MS, 5)]
    timers = pa.RecordBatch.from_pylist([dict(zip(TIMED, row, strict=True)) for row in rows], TIMED_SCHEMA)
    spec = process_spec("node", ("key",), {"row": TimedByRow, "batch": TimedByBatch}[form](has_state), TIMED_SCHEMA)
    run = Harness(spec)
    run.send(timers)
    frozen = run.operator.freeze()
    assert frozen is not None
    written = Written(root)
    written.complete(1, {"node": spec.state_text()}, [state(frozen)])  # type: ignore[attr-defined]
    return written


TIMED = ("key", "event", "processing")
TIMED_SCHEMA = pa.schema([(name, pa.int64()) for name in TIMED])


class TimedByRow(hg.ProcessFunction):
    def __init__(self, has_state: bool) -> None:
        self.has_state = has_state

    def open(self, state: hg.StateHandle) -> None:
        self.last = state.value("last", pa.int64()) if self.has_state else None

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> None:
        if self.last is not None:
            self.last.put(row["event"])
        context.timers.register_event_time(row["event"])
        context.timers.register_processing_time(row["processing"])

    def on_timer(self, timer: hg.Timer, context: hg.ProcessContext) -> None:
        raise AssertionError


class TimedByBatch(hg.BatchProcessFunction):
    def __init__(self, has_state: bool) -> None:
        self.has_state = has_state

    def open(self, state: hg.BatchStateHandle) -> None:
        self.last = state.value("last", pa.int64()) if self.has_state else None

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> None:
        if self.last is not None:
            self.last.put(batch["event"])
        context.timers.register_event_time(batch["event"])
        context.timers.register_processing_time(batch["processing"])

    def on_timer(self, timers: hg.FiredTimers, context: hg.BatchContext) -> None:
        raise AssertionError


@pytest.mark.parametrize("form", ["row", "batch"])
def test_timers_can_be_looked_at(form: str, tmp_path: Path) -> None:
    path = with_timers(tmp_path, form).path
    catalog = hg.state_catalog(path).filter(pl.col("state").str.starts_with("headgate.timers."))
    assert catalog.select("state", "kind", "rows").rows() == [
        ("headgate.timers.event_time", "event-time timers", 4),
        ("headgate.timers.processing_time", "processing-time timers", 4),
    ]
    assert catalog["keys"].to_list() == [["key"], ["key"]]
    found = hg.read_state(path, "node", "headgate.timers.event_time")
    assert found.columns == ["key", "time_ms", "time"]
    assert sorted(found.rows()) == [
        (1, 1_700_000_000_123, datetime(2023, 11, 14, 22, 13, 20, 123_000)),
        (2, 0, datetime(1970, 1, 1)),
        (2, WATERMARK_MAX_MS, None),
        (3, WATERMARK_MIN_MS, None),
    ]
    some = hg.read_state(path, "node", "headgate.timers.processing_time", keys=[3], columns=["time", "key"])
    assert some.rows() == [(datetime(1970, 1, 1, 0, 0, 0, 5_000), 3)]


def test_timers_do_not_hide_which_state_is_meant(tmp_path: Path) -> None:
    path = with_timers(tmp_path / "state", "row").path
    assert hg.read_state(path, "node").columns == ["key", "value"]
    path = with_timers(tmp_path / "timers", "row", has_state=False).path
    with pytest.raises(UsageError, match=r"several states: .*headgate\.timers\.event_time, .*; name one"):
        hg.read_state(path, "node")


def test_the_command_line_shows_timers(tmp_path: Path) -> None:
    path = with_timers(tmp_path / "state", "batch").path
    text = shown(path, "node", "headgate.timers.event_time", "--key", 1)
    assert "1700000000123" in text
    assert "2023-11-14 22:13:20.123" in text
    assert shown(path, "node").splitlines()[0].split()[:3] != ["operator", "state", "kind"], "the state is shown"
    both = shown(with_timers(tmp_path / "timers", "row", has_state=False).path, "node", "--json")
    kinds = [one["kind"] for one in json.loads(both)["states"]]
    assert kinds == ["event-time timers", "processing-time timers"]
