"""Timers at the edges: times that no unit or date can hold, wrong use by batch, one new key among many (rules TM)."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from tests.operators.harness import BORN_MS, Harness
from tests.operators.process.test_timers import SCHEMA, ByBatch, ByRow, fired, harness, register

import headgate as hg
from headgate.errors import UsageError
from headgate.operators.base import WATERMARK_MAX_MS, WATERMARK_MIN_MS
from headgate.operators.catalog import process_spec
from headgate.operators.user_functions import UserFunctionError

NEVER = pl.Series([datetime(2262, 4, 11, 23, 47, 16, 854_775)]).cast(pl.Datetime("ns"))
"""The last moment in nanoseconds, but for some: what people write for never."""


class Never(ByBatch):
    """Registers times at the edges of what can be told."""

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> None:
        context.timers.register_event_time(NEVER)
        context.timers.register_event_time(pl.Series([WATERMARK_MAX_MS]).cast(pl.Datetime("us")))
        context.timers.register_event_time(pl.Series([WATERMARK_MIN_MS]).cast(pl.Datetime("us")))
        context.timers.register_event_time(WATERMARK_MAX_MS)


def test_a_moment_at_the_edge_of_its_unit_does_not_fire_before_its_time() -> None:
    run = Harness(process_spec("node", ("key",), Never(), SCHEMA))
    register(run, (1, 0))
    first = WATERMARK_MIN_MS // 1_000 + 1  # between two milliseconds the later one
    run.operator.on_watermark(BORN_MS)
    assert fired(run) == [(1, first)]
    run.operator.on_watermark(WATERMARK_MAX_MS)
    assert fired(run) == [(1, 9_223_372_036_855), (1, WATERMARK_MAX_MS // 1_000 + 1), (1, WATERMARK_MAX_MS)]


class NoMoment(ByRow):
    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> None:
        context.timers.register_event_time(pd.NaT)  # type: ignore[arg-type]


def test_what_is_a_datetime_but_no_moment_is_told() -> None:
    run = Harness(process_spec("node", ("key",), NoMoment(), SCHEMA))
    with pytest.raises(UserFunctionError, match=r"(?s)operator 'node'.*whole milliseconds since 1970.*NaT"):
        register(run, (1, 0))


class Dated(ByRow):
    def on_timer(self, timer: hg.Timer, context: hg.ProcessContext) -> Any:
        return [{"key": context.key, "kind": str(timer.time), "at": timer.time_ms}]


class DatedByBatch(ByBatch):
    def on_timer(self, timers: hg.FiredTimers, context: hg.BatchContext) -> pl.DataFrame:
        return context.keys.frame().with_columns(kind=timers.times.cast(pl.String), at=timers.times_ms)


@pytest.mark.parametrize("function", [Dated(), DatedByBatch()])
@pytest.mark.parametrize("time_ms", [WATERMARK_MAX_MS, WATERMARK_MIN_MS, 253_402_300_800_000, -62_135_596_800_001])
def test_a_time_that_is_no_date_is_told_by_whoever_asks_for_one(function: Any, time_ms: int) -> None:
    run = Harness(process_spec("node", ("key",), function, SCHEMA))
    register(run, (1, time_ms))
    with pytest.raises(UserFunctionError, match=rf"(?s)a timer for {time_ms} ms is beyond.*use .*_ms"):
        run.operator.on_watermark(WATERMARK_MAX_MS)


@pytest.mark.parametrize("function", [Dated(), DatedByBatch()])
@pytest.mark.parametrize("time_ms", [253_402_300_799_999, -62_135_596_800_000])
def test_the_first_and_the_last_date_are_dates(function: Any, time_ms: int) -> None:
    run = Harness(process_spec("node", ("key",), function, SCHEMA))
    register(run, (1, time_ms))
    run.operator.on_watermark(WATERMARK_MAX_MS)
    assert run.out.rows()[0]["kind"][:10] == ("9999-12-31" if time_ms > 0 else "0001-01-01")


def test_a_watermark_does_not_look_at_all_keys_because_one_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = pa.schema([("key", pa.large_string()), *((f.name, f.type) for f in SCHEMA if f.name != "key")])

    class OfText(ByBatch):
        schema = {"key": pa.large_string(), "kind": pa.large_string(), "at": pa.int64()}

    copied = 0
    concat = pa.concat_arrays

    def counted(arrays: Any) -> Any:
        nonlocal copied
        copied += sum(map(len, arrays))
        return concat(arrays)

    run = Harness(process_spec("node", ("key",), OfText(), schema))
    rows = [{"key": f"key {i}", "do": "register_event_time", "at": 1_000} for i in range(10_000)]
    run.send(pa.RecordBatch.from_pylist(rows, schema))
    monkeypatch.setattr(pa, "concat_arrays", counted)
    for at in range(100):
        run.send(pa.RecordBatch.from_pylist([{"key": f"new {at}", "do": "register_event_time", "at": at}], schema))
        run.operator.on_watermark(at)
        assert [row["key"] for row in run.out.rows()] == [f"new {at}"]
        run.out.batches.clear()
    assert copied < 30_000, "each step copied all keys"
    run.operator.on_watermark(1_000)
    assert {row["key"] for row in run.out.rows()} == {f"key {i}" for i in range(10_000)}


class Told(ByBatch):
    """Does with its timers what a test says."""

    def __init__(self, given: Any) -> None:
        super().__init__()
        self.given = given

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> None:
        self.given(batch, context)


def test_a_batch_without_any_time_registers_nothing() -> None:
    none = lambda batch, context: context.timers.register_event_time(pl.Series([None] * batch.height))  # noqa: E731
    run = Harness(process_spec("node", ("key",), Told(none), SCHEMA))
    register(run, (1, 10), (2, 10))
    run.operator.on_watermark(WATERMARK_MAX_MS)
    assert fired(run) == []


def test_keys_that_are_none_are_told() -> None:
    given = lambda batch, context: context.timers.register_event_time(batch["at"], keys=batch)  # noqa: E731
    run = Harness(process_spec("node", ("key",), Told(given), SCHEMA))
    with pytest.raises(
        UserFunctionError, match=r"operator 'node': keys= must be context\.lookup\(frame\), not a DataF"
    ):
        register(run, (1, 10))


def test_timers_outside_of_a_call_are_told_where_they_can_be_used() -> None:
    run = harness("batch")
    with pytest.raises(UsageError, match=r"in process\(\), on_timer\(\) and on_round\(\)"):
        run.operator._user_context.timers.register_event_time(3)  # type: ignore[attr-defined]
