"""Triggers of the user, from the public API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

import headgate as hg
from headgate import testing
from headgate.testing import EOF, PAUSE, Collect, FailOnce, ScriptedSource

SCHEMA = {"user": pa.string(), "ts": pa.int64(), "n": pa.int64()}


def click(user: str, ts: int, n: int = 1) -> dict[str, Any]:
    return {"user": user, "ts": ts, "n": n}


def clicks(*items: Any, state: Any = None, parallelism: int = 2) -> hg.Stream:
    """Records in this order; a single subtask has what comes before a pause in event time before what follows."""
    pipeline = hg.Pipeline(
        "p",
        parallelism=parallelism,
        restart=hg.FixedDelay(delay="10ms"),
        checkpointing=hg.Checkpointing(interval="20ms"),
        state=state or hg.Memory(),
    )
    return pipeline.source(ScriptedSource([*items, EOF], schema=SCHEMA, pause_ms=30))


class EveryTwo(hg.Trigger):
    """Fires after each two records, when the window ends, and for each late record."""

    def open(self, state: hg.StateHandle) -> None:
        self.count = state.value("count", pa.int64())

    def on_element(self, row: dict[str, Any], context: hg.TriggerContext) -> hg.TriggerResult:
        self.count.put(self.count.get(0) + 1)
        if context.window_end_ms is not None:
            end_ms, now_ms = context.window_end_ms - 1, context.timers.event_time_ms
            if now_ms is not None and now_ms >= end_ms:
                return hg.TriggerResult.FIRE
            context.timers.register_event_time(end_ms)
        return hg.TriggerResult.CONTINUE if self.count.get() % 2 else hg.TriggerResult.FIRE

    def on_event_time(self, time_ms: int, context: hg.TriggerContext) -> hg.TriggerResult:
        assert time_ms + 1 == context.window_end_ms
        assert isinstance(context.key, str)
        return hg.TriggerResult.FIRE


@pytest.mark.parametrize("state", [None, hg.RocksDB()])
def test_a_trigger_goes_on_after_a_failure(tmp_path: Path, state: Any) -> None:
    sink = Collect(tmp_path / "out")
    first = [click("a", 100, 1), click("b", 300, 2), click("a", 200, 4)]
    second = [click("a", 250, 8), click("a", 1_400, 16)]
    stream = clicks(first, FailOnce(tmp_path / "failed"), second, state=state)
    windows = stream.with_timestamps("ts").key_by("user").window(hg.Tumbling("1s"), trigger=EveryTwo())
    found = windows.agg(n=pl.len(), total=pl.col("n").sum())
    found.select("user", "n", "total", start=pl.col("window_start").dt.epoch("ms")).sink(sink)
    result = testing.run(stream._pipeline)
    assert result.is_finished
    assert result.restarts == 1
    found_rows = [tuple(row.values()) for row in sink.rows()]
    assert [row for row in found_rows if row[0] == "a"] == [("a", 2, 5, 0), ("a", 3, 13, 0), ("a", 1, 16, 1_000)]
    assert [row for row in found_rows if row[0] == "b"] == [("b", 1, 2, 0)]


def test_late_records_fire_again_and_later_ones_go_to_their_output(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink, late = Collect(tmp_path / "out"), Collect(tmp_path / "late")
    first = [click("a", 100, 1)], PAUSE, [click("a", 1_500, 2)], PAUSE, [click("a", 300, 4)], PAUSE
    stream = clicks(*first, [click("a", 9_000)], PAUSE, [click("a", 5, 8)], parallelism=1)
    windows = (
        stream.with_timestamps("ts")
        .key_by("user")
        .window(hg.Tumbling("1s"), trigger=EveryTwo(), allowed_lateness="2s", late_output="late")
    )
    found = windows.agg(total=pl.col("n").sum())
    found.sink(sink)
    found.side_output("late").sink(late)
    result = testing.run(stream._pipeline)
    assert [row["total"] for row in sink.rows()] == [1, 5, 2, 1]
    assert late.rows() == [click("a", 5, 8)]
    assert result.late_records == 1
    assert "'window-trigger' sent 1 late record to its output 'late'" in caplog.text


def test_functions_and_further_windows_take_what_a_trigger_emits(tmp_path: Path) -> None:
    sink, sums = Collect(tmp_path / "out"), Collect(tmp_path / "sums")
    stream = clicks([click(user, 100 * i, i) for i in range(40) for user in ("a", "b")])
    keyed = stream.with_timestamps("ts").key_by("user")
    windows = keyed.window(hg.Sliding("1s", "500ms"), trigger=EveryTwo())
    windows.apply(lambda key, rows: {"first": rows["n"][0], "rows": rows.height}, {"first": int, "rows": int}).sink(
        sink
    )
    counts = keyed.window(hg.Tumbling("1s"), trigger=EveryTwo()).agg(n=pl.len())
    counts.key_by("user").window(hg.Tumbling("2s")).agg(highest=pl.col("n").max()).sink(sums)
    result = testing.run(stream._pipeline)
    assert result.late_records == 0
    assert max(row["rows"] for row in sink.rows()) == 10
    assert sorted((row["user"], row["highest"]) for row in sums.rows()) == [("a", 10)] * 2 + [("b", 10)] * 2


def test_a_global_window_fires_by_its_trigger(tmp_path: Path) -> None:
    sink = Collect(tmp_path / "out")
    stream = clicks([click("a", 0, n) for n in range(5)])
    stream.key_by("user").window(hg.Global(), trigger=EveryTwo()).reduce(lambda a, b: {**b, "n": a["n"] + b["n"]}).sink(
        sink
    )
    testing.run(stream._pipeline)
    assert [row["n"] for row in sink.rows()] == [1, 6, 10]


class Empty(hg.Trigger):
    pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": hg.Tumbling("1s"), "trigger": EveryTwo}, "an instance of a class .* not EveryTwo"),
        ({"window": hg.Tumbling("1s"), "trigger": Empty()}, "Empty needs on_element or on_batch"),
        ({"window": hg.Session("1s"), "trigger": EveryTwo()}, "session windows take no trigger="),
        ({"window": hg.Count(3), "trigger": EveryTwo()}, "Count window like this says by itself"),
        ({"window": hg.Global(every=3), "trigger": EveryTwo()}, "Global window like this says by itself"),
        ({"window": hg.Tumbling("1s", time="processing"), "trigger": EveryTwo()}, "says by itself"),
        ({"window": hg.Tumbling("1s"), "trigger": EveryTwo(), "early": "1s"}, "early= and accumulate="),
        ({"window": hg.Global(), "trigger": EveryTwo(), "allowed_lateness": "1s"}, "have no late records"),
    ],
)
def test_what_does_not_go_with_a_trigger_says_why(options: Any, message: str) -> None:
    with pytest.raises(hg.UsageError, match=message):
        clicks().with_timestamps("ts").key_by("user").window(**options)


def test_a_window_of_event_time_with_a_trigger_needs_event_times() -> None:
    with pytest.raises(hg.UsageError, match="needs event times"):
        clicks().key_by("user").window(hg.Tumbling("1s"), trigger=EveryTwo())


def test_a_failed_trigger_leaves_no_operator_in_the_pipeline() -> None:
    class Wrong(EveryTwo):
        def open(self, state: hg.StateHandle) -> None:
            state.value("count", "no type")

    keyed = clicks().with_timestamps("ts").key_by("user")
    before = len(keyed._pipeline._builder.nodes)
    with pytest.raises(hg.UsageError, match="no type"):
        keyed.window(hg.Tumbling("1s"), trigger=Wrong()).agg(n=pl.len())
    assert len(keyed._pipeline._builder.nodes) == before
