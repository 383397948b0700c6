"""Side outputs of process functions: what is declared, emitted and refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from tests.operators.harness import Harness

import headgate as hg
from headgate.errors import BadRecord, UsageError
from headgate.model.graph import MAIN_INPUT, OutputTag
from headgate.operators.process.connected_process import process_spec
from headgate.operators.specs import output_schemas
from headgate.operators.user_functions import UserFunctionError

SCHEMA = pa.schema([("key", pa.large_string()), ("n", pa.int64())])
Row = dict[str, Any]


class Split(hg.ProcessFunction):
    """Passes even numbers on; odd ones go to a side output, and the key of every timer to another."""

    side_outputs = {"odd": None, "timers": {"key": str, "time": int}}

    def process(self, row: Row, context: hg.ProcessContext) -> Iterator[Row]:
        context.timers.register_event_time(row["n"])
        if row["n"] % 2:
            context.emit_to("odd", row)
            row["n"] = -1  # its own from now on
        else:
            yield row

    def on_timer(self, timer: hg.Timer, context: hg.ProcessContext) -> None:
        context.emit_to("timers", {"key": context.key, "time": timer.time_ms})


class BatchSplit(hg.BatchProcessFunction):
    """The same by batch."""

    side_outputs = Split.side_outputs

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame:
        context.timers.register_event_time(batch["n"])
        context.emit_to("odd", batch.filter(pl.col("n") % 2 == 1))
        return batch.filter(pl.col("n") % 2 == 0)

    def on_timer(self, timers: hg.FiredTimers, context: hg.BatchContext) -> None:
        context.emit_to("timers", context.keys.frame().with_columns(time=timers.times_ms))


def spec(function: Any) -> Any:
    return process_spec("node", ("key",), function, SCHEMA)


def side(run: Harness, name: str) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for batch in run.out.tagged.get(OutputTag(name), []) for row in batch.to_pylist()]


@pytest.mark.parametrize("function", [Split(), BatchSplit()])
def test_records_go_to_the_output_that_is_named(function: Any) -> None:
    run = Harness(spec(function))
    run.send(pa.record_batch([["a", "b", "a"], [1, 2, 3]], schema=SCHEMA))
    run.send(pa.record_batch([["b"], [4]], schema=SCHEMA))
    assert [row["n"] for row in run.out.rows()] == [2, 4]
    assert side(run, "odd") == [("a", 1), ("a", 3)]
    run.operator.on_watermark(2)
    assert side(run, "timers") == [("a", 1), ("b", 2)]
    assert run.out.log[-1] == ("watermark", 2), "timers are sent on before the watermark that fired them"


@pytest.mark.parametrize("function", [Split(), BatchSplit()])
def test_every_output_has_its_schema(function: Any) -> None:
    found = output_schemas(spec(function), {MAIN_INPUT: SCHEMA}, "node")
    timers = pa.schema([("key", pa.large_string()), ("time", pa.int64())])
    assert found == {"main": SCHEMA, "odd": SCHEMA, "timers": timers}


class Wrong(hg.ProcessFunction):
    side_outputs = {"side": {"n": int}}

    def __init__(self, name: Any, records: Any) -> None:
        self.given = name, records

    def process(self, row: Row, context: hg.ProcessContext) -> None:
        context.emit_to(*self.given)


class BatchWrong(hg.BatchProcessFunction):
    side_outputs = Wrong.side_outputs

    def __init__(self, name: Any, records: Any) -> None:
        self.given = name, records

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> None:
        context.emit_to(*self.given)


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (Wrong("other", {"n": 1}), "has no side output 'other'; its class declares in side_outputs: 'side'"),
        (Wrong("main", {"n": 1}), "has no side output 'main'"),
        (Wrong(["side"], {"n": 1}), r"has no side output \['side'\]"),
        (Wrong("side", [{"n": 1}]), "emit_to takes one record, a dict, not list"),
        (BatchWrong("other", pl.DataFrame({"n": [1]})), "has no side output 'other'"),
        (BatchWrong("side", {"n": 1}), "emit_to takes a DataFrame here, not dict"),
        (BatchWrong("side", pl.DataFrame({"m": [1]})), "side output 'side' must have the columns n: int64"),
    ],
)
def test_a_wrong_call_is_an_error_at_the_users_line(function: Any, problem: str) -> None:
    run = Harness(spec(function), diverts=True)
    with pytest.raises(UserFunctionError, match=problem) as raised:
        run.send(pa.record_batch([["a"], [1]], schema=SCHEMA))
    assert "context.emit_to(*self.given)" in raised.value.traceback_text


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (Wrong("side", {"n": "one"}), "side output 'side': the function returned str 'one' for field 'n'"),
        (Wrong("side", {"n": 1, "m": 1}), "the unknown field 'm'; declare it with side_outputs"),
        (Wrong("side", {}), "side output 'side': the function returned no field 'n'"),
        (BatchWrong("side", pl.DataFrame({"n": [1.5]})), "side output 'side': column"),
    ],
)
def test_a_record_that_does_not_fit_is_a_bad_one(function: Any, problem: str) -> None:
    run = Harness(spec(function), diverts=True)
    run.send(pa.record_batch([["a"], [1]], schema=SCHEMA))
    assert [problem in bad["problem"] for bad in run.out.bad] == [True], run.out.bad
    assert side(run, "side") == []
    with pytest.raises(BadRecord, match="side output 'side'"):
        Harness(spec(function)).send(pa.record_batch([["a"], [1]], schema=SCHEMA))


@pytest.mark.parametrize(
    ("declared", "problem"),
    [
        (["late"], r"Split\.side_outputs must be a dict from names to schemas"),
        ("late", "must be a dict from names to schemas"),
        ({"main": None}, "can be named 'main', which is reserved"),
        ({"bad-records": None}, "can be named 'bad-records', which is reserved"),
        ({"late": 5}, r"not 5 \(side output 'late' of Split\)"),
        ({"late/": None}, "a side output of operator 'process' must be named with 1 to 100 letters"),
        ({"": None}, "must be named with 1 to 100 letters"),
        ({3: None}, "must be named with 1 to 100 letters"),
    ],
)
def test_a_wrong_declaration_is_refused_when_the_pipeline_is_built(
    monkeypatch: pytest.MonkeyPatch, declared: Any, problem: str
) -> None:
    monkeypatch.setattr(Split, "side_outputs", declared)
    keyed = hg.Pipeline("p").source(hg.FromRows([{"key": "a", "n": 1}])).key_by("key")
    with pytest.raises(UsageError, match=problem):
        keyed.process(Split())
