"""A chain of pipelines over a backlog: nothing is late, without a guess."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from tests.support.killing import run_killing

import headgate as hg
from headgate import testing
from headgate.connectors.files.file_committer import read_committed
from headgate.model.progress import Progress, SilentObserver
from headgate.store.reader import READ_ROWS
from headgate.testing import EOF, Collect, FailOnce, ScriptedSource, run

SCHEMA = pa.schema([("ts", pa.timestamp("ms")), ("key", pa.int64())])
ROWS, STEP, KEYS, SPAN_MS = 300_000, 10_000, 20, 300_000
"""Each segment is read in several batches."""


@pytest.fixture
def store(tmp_path: Path) -> hg.Store:
    """A stream of three segments with a backlog, in the order of its event times."""
    opened = hg.Store.open(tmp_path / "store")
    opened.create_stream("in", SCHEMA, segments=3, routing_key="key")
    with opened.writer("in") as writer:
        for first in range(0, ROWS, STEP):
            number = np.arange(first, first + STEP)
            times = pa.array((number * SPAN_MS // ROWS).astype("datetime64[ms]"))
            writer.append(pa.RecordBatch.from_arrays([times, pa.array(number % KEYS)], schema=SCHEMA))
    return opened


def pipeline(tmp_path: Path, name: str, parallelism: int = 2) -> hg.Pipeline:
    return hg.Pipeline(name, parallelism=parallelism, checkpointing=hg.Checkpointing(dir=tmp_path / "checkpoints"))


def disorder(tmp_path: Path) -> None:
    """Write the backlog into another stream: all records of one subtask, then all of the other one."""
    made = pipeline(tmp_path, "one")
    rows = made.source(hg.StreamSource("in", tmp_path / "store", follow=False))
    rows.with_timestamps("ts").rebalance().sink(hg.StreamSink("out", tmp_path / "store", "key", segments=3))
    assert testing.run(made).records_out == ROWS


def windows(tmp_path: Path, stream: str, column: str, parallelism: int = 2, **times: Any) -> tuple[hg.RunResult, int]:
    """Count records in windows of two seconds; return the result, and the sum of the counts."""
    made = pipeline(tmp_path, "two", parallelism)
    rows = made.source(hg.StreamSource(stream, tmp_path / "store", follow=False)).with_timestamps(column, **times)
    counts = rows.key_by("key").window(hg.Tumbling("2s")).agg(count=pl.len())
    counts.sink(hg.FileSink(tmp_path / "counts", "parquet"))
    result = testing.run(made)
    return result, int(read_committed(str(tmp_path / "counts"))["count"].sum())


def test_nothing_of_a_backlog_is_late_in_the_second_pipeline(store: hg.Store, tmp_path: Path) -> None:  # S90, S91, S92
    disorder(tmp_path)
    result, counted = windows(tmp_path, "out", "ts")
    assert (result.late_records, counted) == (0, ROWS)


def test_a_guess_never_makes_late_what_the_writers_say_is_to_come(store: hg.Store, tmp_path: Path) -> None:  # W26
    disorder(tmp_path)
    result, counted = windows(tmp_path, "out", "ts", out_of_orderness="1s")
    assert (result.late_records, counted) == (0, ROWS)


def test_a_stream_without_event_time_is_read_with_a_guess_and_late_records_are_loud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = hg.Store.open(tmp_path / "store")
    store.create_stream("out", SCHEMA, segments=1)
    early, later = (pa.array(np.full(n, at, "datetime64[ms]")) for n, at in ((100, 0), (READ_ROWS, 20_000)))
    with store.writer("out") as writer:
        for times in (later, early):
            writer.append(pa.RecordBatch.from_arrays([times, pa.array(np.zeros(len(times), int))], schema=SCHEMA))
    with caplog.at_level(logging.WARNING, "headgate"):
        result, counted = windows(tmp_path, "out", "ts", parallelism=1, out_of_orderness="1s")
    assert (result.late_records, counted) == (100, READ_ROWS)
    assert (
        "pipeline 'two': 'window' dropped 100 late records (lateness: p50 20.0 s, p99 20.0 s, max 20.0 s); "
        "out_of_orderness of with_timestamps, 20.0 s longer, would have kept them all"
    ) in caplog.text


@pytest.mark.parametrize("column", ["window_start", "window_end"])
def test_results_of_windows_are_in_time_for_windows_over_them(
    store: hg.Store, tmp_path: Path, column: str
) -> None:  # S91
    made = pipeline(tmp_path, "one")
    rows = made.source(hg.StreamSource("in", tmp_path / "store", follow=False)).with_timestamps("ts")
    counts = rows.key_by("key").window(hg.Tumbling("10s")).agg(n=pl.len())
    counts.sink(hg.StreamSink("out", tmp_path / "store", "key", segments=3))
    assert testing.run(made).late_records == 0
    result, counted = windows(tmp_path, "out", column)
    assert (result.late_records, counted) == (0, KEYS * SPAN_MS // 10_000)


def test_a_table_without_event_time_hides_none_from_the_next_pipeline(store: hg.Store, tmp_path: Path) -> None:  # S91
    made = pipeline(tmp_path, "one")
    rows = made.source(hg.StreamSource("in", tmp_path / "store", follow=False)).with_timestamps("ts")
    names = made.source(hg.FromRows([{"key": key, "name": f"{key}"} for key in range(KEYS)]), name="names")
    named = rows.rebalance().join(names.broadcast(), on="key", how="left", wait=True)
    named.sink(hg.StreamSink("out", tmp_path / "store", "key", segments=3))
    assert testing.run(made).records_out == ROWS
    result, counted = windows(tmp_path, "out", "ts")
    assert (result.late_records, counted) == (0, ROWS)


@pytest.mark.parametrize("notes", [True, False])
def test_a_writer_that_notes_times_may_append_out_of_order(tmp_path: Path, notes: bool) -> None:  # S93
    store = hg.Store.open(tmp_path / "store")
    store.create_stream("out", SCHEMA, segments=1)
    with store.writer("out") as writer:
        if notes:
            writer.note_time(datetime.fromtimestamp(0, UTC))
        for minute in range(3):
            for second in (40, 0):
                at = np.full(READ_ROWS, (minute * 60 + second) * 1_000, "datetime64[ms]")
                writer.append(
                    pa.RecordBatch.from_arrays([pa.array(at), pa.array(np.arange(len(at)) % KEYS)], schema=SCHEMA)
                )
                writer.flush()
            if notes:
                writer.note_time(datetime.fromtimestamp(60 * (minute + 1), UTC))
    result, counted = windows(tmp_path, "out", "ts", parallelism=1)
    assert (result.late_records == 0) is notes
    assert counted == 6 * READ_ROWS - result.late_records


OPEN_SCHEMA = {"user": pa.string(), "ts": pa.timestamp("us"), "n": pa.int64()}
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
    return pipeline.source(ScriptedSource([*items, EOF], schema=OPEN_SCHEMA, pause_ms=30))


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


RECORDS = {"k": pa.int64(), "n": pa.int64()}


class Counts:
    """Counts records, and the even ones among them."""

    even: hg.Counter

    def __init__(self) -> None:
        self.seen = hg.Counter("seen")

    def count(self, numbers: Any) -> None:
        for number in numbers:
            self.seen.add()
            if number % 2 == 0:
                self.even.add()


class Row(Counts):
    def open(self) -> None:
        self.even = hg.Counter("even")

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        self.count([row["n"]])
        return row


class Batch(Counts):
    """Without ``open``: it is called once while the pipeline is built, which does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.even = hg.Counter("even")

    def __call__(self, batch: pl.DataFrame) -> pl.DataFrame:
        self.seen.add(batch.height)
        self.even.add(batch.filter(pl.col("n") % 2 == 0).height)
        return batch


class Process(Counts, hg.ProcessFunction):
    def open(self, state: hg.StateHandle) -> None:
        self.even = hg.Counter("even")

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> Any:
        self.count([row["n"]])
        return [row]


class BatchProcess(Counts, hg.BatchProcessFunction):
    def open(self, state: hg.BatchStateHandle) -> None:
        self.even = hg.Counter("even")

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame:
        self.count(batch["n"])
        return batch


VERBS: dict[str, Callable[[hg.Stream], hg.Stream]] = {
    "map": lambda stream: stream.map(Row(), name="counts"),
    "map_batches": lambda stream: stream.map_batches(Batch(), name="counts"),
    "process": lambda stream: stream.key_by("k").process(Process(), name="counts"),
    "process batches": lambda stream: stream.key_by("k").process(BatchProcess(), name="counts"),
}


class Seen(SilentObserver):
    last: Progress

    def on_progress(self, progress: Progress) -> None:
        self.last = progress


@pytest.mark.parametrize("verb", VERBS)
def test_counts_are_exact_when_a_worker_is_killed(verb: str, tmp_path: Path) -> None:
    pipeline = hg.Pipeline("p", parallelism=2, checkpointing=hg.Checkpointing(interval="20ms"))
    source = hg.Generator({"k": hg.Uniform(0, 9), "n": hg.RowNumber()}, rows=4_000, rows_per_second=8_000)
    VERBS[verb](pipeline.source(source).select("k", "n")).sink(Collect(tmp_path))
    seen = Seen()
    assert run_killing(pipeline, 2, observer=seen).restarts == 1
    (node,) = (node for node in seen.last.nodes if node.node == "counts")
    assert dict(node.counters) == {"seen": 4_000, "even": 2_000}


@pytest.mark.parametrize("name", ["", "Rejected", "1st", "two words", "records_in", "late", "busy", 7])
def test_a_name_that_cannot_be_shown_or_is_taken_is_refused(name: Any) -> None:
    with pytest.raises(hg.UsageError, match="a counter"):
        hg.Counter(name)


@pytest.mark.parametrize("amount", [-1, 1.5, True, "1"])
def test_a_counter_only_counts_up(amount: Any) -> None:
    with pytest.raises(hg.UsageError, match="counter 'seen' adds a whole number from 0 on"):
        hg.Counter("seen").add(amount)


LONELY = hg.Counter("lonely")


def count_it(row: dict[str, Any]) -> dict[str, Any]:
    LONELY.add()
    return row


def test_a_counter_of_no_function_says_where_it_belongs(tmp_path: Path) -> None:
    pipeline = hg.Pipeline("p", restart=hg.NoRestart())
    stream = pipeline.source(hg.FromRows([{"n": 1}]))
    stream.map(count_it).sink(Collect(tmp_path))
    with pytest.raises(hg.PipelineFailed, match="counter 'lonely' belongs to no operator; make it an attribute"):
        run(pipeline)
