"""Windows that are told apart by key, from the public API."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

import headgate as hg
from headgate import testing
from headgate.testing import EOF, Collect, FailOnce, ScriptedSource

SCHEMA = {"user": pa.string(), "ts": pa.timestamp("us"), "n": pa.int64()}
START = datetime(2026, 1, 1)


def click(user: str, second: int, n: int = 1) -> dict[str, Any]:
    return {"user": user, "ts": START + timedelta(seconds=second), "n": n}


def clicks(*items: Any) -> hg.Stream:
    pipeline = hg.Pipeline(
        "p",
        parallelism=2,
        restart=hg.FixedDelay(delay="10ms"),
        checkpointing=hg.Checkpointing(interval="20ms"),
    )
    return pipeline.source(ScriptedSource([*items, EOF], schema=SCHEMA, pause_ms=30))


def sorted_rows(sink: Collect, *columns: str) -> list[tuple[Any, ...]]:
    return sorted(tuple(row[name] for name in columns) for row in sink.rows())


def test_sessions_are_counted_once_over_a_failure(tmp_path: Path) -> None:
    sink = Collect(tmp_path / "out")
    first = [click("a", 0), click("b", 3), click("a", 9)]
    second = [click("a", 14), click("b", 13), click("a", 40)]
    stream = clicks(first, FailOnce(tmp_path / "failed"), second).with_timestamps("ts", out_of_orderness="5s")
    stream.key_by("user").window(hg.Session("10s")).agg(n=pl.len(), users=pl.col("n").sum()).sink(sink)
    assert testing.run(stream._pipeline).is_finished
    found = [
        (u, (s - START).seconds, (e - START).seconds, n)
        for u, s, e, n in sorted_rows(sink, "user", "window_start", "window_end", "n")
    ]
    assert found == [("a", 0, 24, 3), ("a", 40, 50, 1), ("b", 3, 13, 1), ("b", 13, 23, 1)]


def test_ends_of_sessions_are_event_times() -> None:
    keyed = clicks().with_timestamps("ts").key_by("user")
    sessions = keyed.window(hg.Session("10s")).agg(n=pl.len())
    assert sessions._time_column == "window_end"
    sessions.key_by("n").window(hg.Tumbling("1m")).agg(m=pl.len())


@pytest.mark.parametrize("gap", [0, "0s"])
def test_a_session_has_a_gap(gap: Any) -> None:
    with pytest.raises(hg.UsageError, match="longer than zero"):
        hg.Session(gap)


def in_order(key: str, rows: pl.DataFrame) -> pl.DataFrame:
    return rows.select(first=pl.col("n").first(), text=pl.lit(key) + "!", n=pl.col("n").sum())


def as_rows(key: Any, rows: pl.DataFrame) -> Any:
    user, n = key
    return None if user == "b" else [{"twice": 2 * n, "rows": rows.height}] * n


@pytest.mark.parametrize("window", [hg.Tumbling("20s"), hg.Session("10s")])
def test_a_function_is_called_with_the_records_of_each_window(tmp_path: Path, window: Any) -> None:
    sink = Collect(tmp_path / "out")
    stream = clicks([click("a", 1, 7), click("b", 3, 2), click("a", 9, 5), click("a", 30, 1)])
    keyed = stream.with_timestamps("ts").key_by("user")
    result = keyed.window(window).apply(in_order, {"first": pa.int64(), "text": pa.string(), "n": pa.int64()})
    assert result.schema.names == ["user", "window_start", "window_end", "first", "text", "n"]
    result.sink(sink)
    assert testing.run(stream._pipeline).is_finished
    assert sorted_rows(sink, "user", "first", "text", "n") == [("a", 1, "a!", 1), ("a", 7, "a!", 12), ("b", 2, "b!", 2)]


def test_a_function_returns_no_row_or_some_and_gets_a_tuple_of_several_key_columns(tmp_path: Path) -> None:
    sink = Collect(tmp_path / "out")
    stream = clicks([click("a", 1, 2), click("b", 3, 2), click("a", 9, 2), click("a", 30, 1)])
    keyed = stream.with_timestamps("ts").key_by("user", "n")
    keyed.window(hg.Session("10s")).apply(as_rows, {"twice": pa.int64(), "rows": pa.int64()}).sink(sink)
    assert testing.run(stream._pipeline).is_finished
    assert sorted_rows(sink, "user", "n", "twice", "rows") == [("a", 1, 2, 1), ("a", 2, 4, 2), ("a", 2, 4, 2)]


def test_reduce_combines_the_records_of_a_window_in_order(tmp_path: Path) -> None:
    sink = Collect(tmp_path / "out")
    stream = clicks([click("a", 1, 7), click("b", 3, 2), click("a", 9, 5), click("a", 30, 1)])
    keyed = stream.with_timestamps("ts").key_by("user")
    reduced = keyed.window(hg.Session("10s")).reduce(lambda total, row: {**row, "n": 10 * total["n"] + row["n"]})
    assert reduced.schema.names == ["user", "window_start", "window_end", "ts", "n"]
    reduced.sink(sink)
    assert testing.run(stream._pipeline).is_finished
    assert sorted_rows(sink, "user", "n") == [("a", 1), ("a", 75), ("b", 2)]


def fails(key: str, rows: pl.DataFrame) -> None:
    raise ValueError("no")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (fails, "1 records of key 'a'.*no"),
        (lambda key, rows: rows.select("ts"), "does not fit its schema"),
        (lambda key, rows: [{"m": "x"}], "'x' for field 'm'"),
        (lambda key, rows: 3, "not iterable"),
    ],
)
def test_what_a_function_must_not_do_names_the_key(tmp_path: Path, function: Any, message: str) -> None:
    stream = clicks([click("a", 1)])
    keyed = stream.with_timestamps("ts").key_by("user")
    keyed.window(hg.Session("10s")).apply(function, {"m": pa.int64()}, name="visits").sink(Collect(tmp_path / "out"))
    with pytest.raises(hg.HeadgateError, match=f"(?s)visits-apply.*{message}"):
        testing.run(stream._pipeline)


def test_columns_of_results_must_differ_from_key_and_window() -> None:
    keyed = clicks().with_timestamps("ts").key_by("user")
    with pytest.raises(hg.UsageError, match="two columns 'user'"):
        keyed.window(hg.Session("10s")).apply(fails, {"user": pa.int64()})
    with pytest.raises(hg.UsageError, match="apply needs a function"):
        keyed.window(hg.Session("10s")).apply(3, {"user": pa.int64()})  # type: ignore[arg-type]


def users(*names: str) -> list[dict[str, Any]]:
    return [click(name, place, place) for place, name in enumerate(names)]


def test_windows_of_processing_time_count_every_record_once_over_a_failure(tmp_path: Path) -> None:
    sink = Collect(tmp_path / "out")
    stream = clicks(users(*"aabab"), FailOnce(tmp_path / "failed"), users(*"abb"))
    result = stream.key_by("user").window(hg.Tumbling("1s", time="processing")).agg(n=pl.len())
    assert result.schema.names == ["user", "window_start", "window_end", "n"]
    assert result._time_column is None
    result.sink(sink)
    assert testing.run(stream._pipeline).is_finished
    totals = {"a": 0, "b": 0}
    for row in sink.rows():
        totals[row["user"]] += row["n"]
        assert row["window_end"] - row["window_start"] == timedelta(seconds=1)
    assert totals == {"a": 4, "b": 4}


@pytest.mark.parametrize(
    ("window", "found"),
    [
        (hg.Count(2), [("a", 2), ("b", 2)]),
        (hg.Global(every=2, discard=True), [("a", 1), ("a", 2), ("b", 2)]),
        (hg.Global(every=2), [("a", 2), ("a", 3), ("b", 2)]),
        (hg.Global(when=pl.col("n") == 1, discard=True), [("a", 1), ("a", 2), ("b", 2)]),
        (hg.Global(every="1h"), [("a", 3), ("b", 2)]),
    ],
)
def test_windows_without_event_time(tmp_path: Path, window: Any, found: list[tuple[str, int]]) -> None:
    sink = Collect(tmp_path / "out")
    stream = clicks(users(*"aabab"))
    stream.key_by("user").window(window).agg(n=pl.len()).sink(sink)
    assert testing.run(stream._pipeline).is_finished
    assert sorted_rows(sink, "user", "n") == found


def test_a_function_over_a_count_window(tmp_path: Path) -> None:
    sink = Collect(tmp_path / "out")
    stream = clicks(users(*"aabab"))
    stream.key_by("user").window(hg.Count(2)).apply(as_text, {"text": pa.string()}).sink(sink)
    assert testing.run(stream._pipeline).is_finished
    assert sorted_rows(sink, "user", "text") == [("a", "0,1"), ("b", "2,4")]


def as_text(key: str, rows: pl.DataFrame) -> dict[str, Any]:
    return {"text": ",".join(map(str, rows["n"]))}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hg.Count(0), "at least one record"),
        (lambda: hg.Count("10s"), "at least one record"),  # type: ignore[arg-type]
        (lambda: clicks().key_by("user").window(hg.Global()), "needs every= or when="),
        (lambda: hg.Global(every=3, when=pl.col("n") > 1), "not both"),
        (lambda: hg.Global(every="0s"), "longer than zero"),
        (lambda: hg.Global(every=True), "at least one record"),
        (lambda: hg.Global(when="n > 1"), "Polars expression"),  # type: ignore[arg-type]
        (lambda: hg.Global(every="1s", time="wall"), "'processing' or 'event'"),  # type: ignore[arg-type]
        (lambda: hg.Tumbling("1s", time="wall"), "'event' or 'processing'"),  # type: ignore[arg-type]
        (lambda: hg.Tumbling("1m", offset="1s", time="processing"), "no offset"),
        (lambda: clicks().key_by("user").window(hg.Global(every="1s", time="event")), "needs event times"),
        (lambda: clicks().key_by("user").window(hg.Session("1s")), "needs event times"),
        (lambda: clicks().key_by("user").window(hg.Count(2)).agg(user=pl.len()), "more than one occurrence"),
    ],
)
def test_what_is_no_window_says_why(make: Any, message: str) -> None:
    with pytest.raises(hg.UsageError, match=message):
        make()
