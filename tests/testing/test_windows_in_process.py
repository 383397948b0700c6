"""Windows that are the same for every key, from the public API."""

from __future__ import annotations

import logging
import random
import sqlite3
from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from tests.operators.harness import applied

import headgate as hg
from headgate import testing
from headgate.testing import EOF, PAUSE, Collect, FailOnce, ScriptedSource

SCHEMA = {"page": pa.string(), "ts": pa.timestamp("us"), "n": pa.int64()}
START = datetime(2026, 3, 28)


def click(page: str, second: float, n: int = 1) -> dict[str, Any]:
    return {"page": page, "ts": START + timedelta(seconds=second), "n": n}


def clicks(*items: Any, parallelism: int = 2) -> hg.Stream:
    """Records in this order; a single subtask has what comes before a pause in event time before what follows."""
    pipeline = hg.Pipeline(
        "p",
        parallelism=parallelism,
        restart=hg.FixedDelay(delay="10ms"),
        checkpointing=hg.Checkpointing(interval="20ms"),
    )
    return pipeline.source(ScriptedSource([*items, EOF], schema=SCHEMA, pause_ms=30))


def found(sink: Collect, *columns: str) -> list[tuple[Any, ...]]:
    """Return rows in order, times as seconds after the start."""
    rows = [[row[name] for name in columns] for row in sink.rows()]
    seconds = [[(v - START).total_seconds() if isinstance(v, datetime) else v for v in row] for row in rows]
    return sorted(tuple(row) for row in seconds)


def test_late_records_are_in_their_output_once_over_a_failure(tmp_path: Path) -> None:
    counts, late = Collect(tmp_path / "counts"), Collect(tmp_path / "late")
    first = [click("a", 1), click("b", 2), click("a", 11)]
    second = [click("a", 25)], PAUSE, [click("b", 3, 7)], FailOnce(tmp_path / "failed"), [click("a", 4, 8)]
    stream = clicks(first, *second, parallelism=1)
    windows = stream.with_timestamps("ts").key_by("page").window(hg.Tumbling("10s"), late_output="late")
    results = windows.agg(n=pl.len())
    results.sink(counts)
    results.side_output("late").sink(late)
    assert testing.run(stream._pipeline).is_finished
    assert found(counts, "page", "window_start", "n") == [("a", 0, 1), ("a", 10, 1), ("a", 20, 1), ("b", 0, 1)]
    assert found(late, "page", "ts", "n") == [("a", 4, 8), ("b", 3, 7)]


@pytest.mark.parametrize("is_read", [True, False])
def test_the_warning_says_whether_late_records_were_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_read: bool
) -> None:
    stream = clicks([click("a", 25)], PAUSE, [click("a", 1), click("a", 2)], parallelism=1)
    windows = stream.with_timestamps("ts").key_by("page").window(hg.Tumbling("10s"), late_output="late")
    results = windows.agg(n=pl.len())
    results.sink(Collect(tmp_path / "counts"))
    if is_read:
        results.side_output("late").sink(Collect(tmp_path / "late"))
    with caplog.at_level(logging.WARNING, "headgate"):
        assert testing.run(stream._pipeline).late_records == 2
    what = "sent 2 late records to its output 'late'" if is_read else "dropped 2 late records"
    assert f"'window' {what} (lateness: p50 20.0 s" in caplog.text


def test_sliding_windows_are_counted_once_over_a_failure(tmp_path: Path) -> None:
    sink = Collect(tmp_path / "out")
    first = [click("a", 1), click("b", 3), click("a", 4.5)]
    stream = clicks(first, FailOnce(tmp_path / "failed"), [click("a", 6), click("b", 5)]).with_timestamps("ts")
    windows = stream.key_by("page").window(hg.Sliding("5s", "2s"))
    windows.agg(n=pl.len()).sink(sink)
    assert testing.run(stream._pipeline).is_finished
    assert found(sink, "page", "window_start", "window_end", "n") == [
        *[("a", -2, 3, 1), ("a", 0, 5, 2), ("a", 2, 7, 2), ("a", 4, 9, 2), ("a", 6, 11, 1)],
        *[("b", 0, 5, 1), ("b", 2, 7, 2), ("b", 4, 9, 1)],
    ]


def test_python_functions_over_sliding_windows_get_the_records_of_each(tmp_path: Path) -> None:
    sink = Collect(tmp_path / "out")
    stream = clicks([click("a", 1, 1), click("a", 3, 2), click("a", 4, 3)]).with_timestamps("ts")
    windows = stream.key_by("page").window(hg.Sliding("4s", "2s"))
    windows.apply(lambda key, rows: {"all": rows["n"].to_list()}, {"all": pa.list_(pa.int64())}).sink(sink)
    assert testing.run(stream._pipeline).is_finished
    assert found(sink, "window_start", "all") == [(-2, [1]), (0, [1, 2]), (2, [2, 3]), (4, [3])]


def test_a_day_on_which_clocks_are_moved_has_23_hours(tmp_path: Path) -> None:
    sink = Collect(tmp_path / "out")
    hours = [click("a", hour * 3_600) for hour in range(72)]
    stream = clicks(hours).with_timestamps("ts")
    stream.key_by("page").window(hg.Tumbling("1d", zone="Europe/Berlin")).agg(n=pl.len()).sink(sink)
    assert testing.run(stream._pipeline).is_finished
    assert found(sink, "window_start", "window_end", "n") == [
        (-3_600, 23 * 3_600, 23),
        (23 * 3_600, 46 * 3_600, 23),  # 29 March
        (46 * 3_600, 70 * 3_600, 24),
        (70 * 3_600, 94 * 3_600, 2),
    ]


def test_results_are_updated_by_late_records_over_a_failure(tmp_path: Path) -> None:
    sink = Collect(tmp_path / "out")
    first = [click("a", 1), click("b", 2), click("a", 11)]
    stream = clicks(first, [click("a", 3)], FailOnce(tmp_path / "failed"), [click("b", 4), click("c", 21)])
    windows = stream.with_timestamps("ts").key_by("page").window(hg.Tumbling("10s"), allowed_lateness="1h")
    windows.agg(n=pl.len()).sink(sink)
    assert testing.run(stream._pipeline).is_finished
    last = {(page, start): n for page, start, n in found(sink, "page", "window_start", "n")}  # counts only grow
    assert last == {("a", 0): 2, ("b", 0): 2, ("a", 10): 1, ("c", 20): 1}


def test_early_results_come_before_the_end_of_the_window(tmp_path: Path) -> None:
    sink = Collect(tmp_path / "out")
    stream = clicks([click("a", 1)], [click("a", 2)], [click("a", 3)]).with_timestamps("ts")
    windows = stream.key_by("page").window(hg.Tumbling("1d"), early="1ms", accumulate=False)
    windows.agg(n=pl.len()).sink(sink)
    assert testing.run(stream._pipeline).is_finished
    assert sum(n for (n,) in found(sink, "n")) == 3


@pytest.mark.parametrize(
    ("window", "options", "message"),
    [
        (hg.Tumbling("1m"), {"early": 0}, "early must be longer than zero"),
        (hg.Tumbling("1m"), {"accumulate": False}, "accumulate=False needs early= or allowed_lateness="),
        (hg.Sliding("2m", "1m"), {"accumulate": False, "early": "1s"}, "needs tumbling windows"),
        (hg.Tumbling("1m"), {"allowed_lateness": 5}, "without a unit"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(window: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(hg.UsageError, match=message):
        clicks().with_timestamps("ts").key_by("page").window(window, **options)


def test_wrong_names_of_the_late_output_are_refused() -> None:
    keyed = clicks().with_timestamps("ts").key_by("page")
    with pytest.raises(hg.UsageError, match="reserved"):
        keyed.window(hg.Tumbling("1m"), late_output="bad-records")
    with pytest.raises(hg.UsageError, match="late_output must be named with"):
        keyed.window(hg.Tumbling("1m"), late_output="late records")
    with pytest.raises(hg.UsageError, match=r"window\(..., late_output='late'\)"):
        keyed.window(hg.Tumbling("1m")).agg(n=pl.len()).side_output("late")


SESSION_SCHEMA = {"user": pa.string(), "ts": pa.timestamp("us")}
SESSION_START, GAP = datetime(2026, 1, 1), timedelta(seconds=10)
COUNTRIES = {"a": "de", "b": "fr", "c": "de"}


def session_clicks() -> list[dict[str, Any]]:
    """Clicks at distinct times in no order, so that later ones join sessions."""
    rng = random.Random(7)
    seconds = rng.sample(range(600), 160)
    return [{"user": rng.choice("abc"), "ts": SESSION_START + timedelta(seconds=second)} for second in seconds]


def sessions_of(rows: list[dict[str, Any]]) -> list[tuple[str, datetime, datetime, int]]:
    found: list[tuple[str, datetime, datetime, int]] = []
    for row in sorted(rows, key=lambda row: (row["user"], row["ts"])):
        user, start, end, n = found[-1] if found else ("", SESSION_START, SESSION_START, 0)
        if user == row["user"] and row["ts"] < end:
            found[-1] = (user, start, row["ts"] + GAP, n + 1)
        else:
            found.append((row["user"], row["ts"], row["ts"] + GAP, 1))
    return found


def test_a_chain_over_updated_sessions_has_the_tables_of_all_records(tmp_path: Path) -> None:
    rows = session_clicks()
    parts = [rows[first : first + 40] for first in range(0, len(rows), 40)]
    script = [parts[0], PAUSE, parts[1], PAUSE, FailOnce(tmp_path / "failed"), parts[2], PAUSE, parts[3], EOF]
    pipeline = hg.Pipeline(
        "p",
        parallelism=2,
        restart=hg.FixedDelay(delay="10ms"),
        checkpointing=hg.Checkpointing(interval="20ms"),
    )
    stream = pipeline.source(ScriptedSource(script, schema=SESSION_SCHEMA, pause_ms=30)).with_timestamps("ts")
    visits = (
        stream.key_by("user")
        .window(hg.Session("10s"), allowed_lateness="1h", early="20ms", retractions=True)
        .agg(n=pl.len())
    )
    users = pipeline.source(hg.FromRows([{"user": u, "country": c} for u, c in COUNTRIES.items()]), name="users")
    by_country = visits.join(users, on="user", ttl=None).key_by("country")
    by_size = hg.sql("SELECT n, COUNT(*) AS sessions FROM visits GROUP BY n", visits=visits)
    changes, countries, sizes = (Collect(tmp_path / name) for name in ("visits", "countries", "sizes"))
    visits.sink(changes)
    visits.sink(hg.SqlSink(f"sqlite:///{tmp_path / 'db'}", "visits", upsert=("user", "window_start"), create=True))
    by_country.agg(clicks=pl.col("n").sum(), longest=pl.col("n").max()).sink(countries)
    by_size.sink(sizes)
    assert testing.run(pipeline, checkpoint_dir=tmp_path / "checkpoints", timeout_s=240).is_finished

    expected = sessions_of(rows)
    table = applied(changes.rows(), ["user", "window_start"], retractions=True, strict=True)
    assert [(r["user"], r["window_start"], r["window_end"], r["n"]) for r in table] == expected
    with sqlite3.connect(tmp_path / "db") as database:
        stored = database.execute("SELECT user, n FROM visits ORDER BY user, window_start").fetchall()
    assert stored == [(user, n) for user, _, _, n in expected]
    frame = pl.DataFrame(expected, schema=["user", "start", "end", "n"], orient="row").with_columns(
        country=pl.col("user").replace(COUNTRIES)
    )
    of_country = frame.group_by("country").agg(clicks=pl.col("n").sum(), longest=pl.col("n").max()).sort("country")
    assert applied(countries.rows(), ["country"], retractions=False) == of_country.to_dicts()
    of_size = frame.group_by("n").agg(sessions=pl.len()).sort("n")
    assert applied(sizes.rows(), ["n"], retractions=False) == of_size.to_dicts()


def total(so_far: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "ts": max(so_far["ts"], row["ts"])}


def busy(key: str, rows: pl.DataFrame) -> dict[str, Any] | None:
    """Only sessions of several clicks have a result."""
    return {"n": rows.height} if rows.height > 1 else None


def seconds_of(key: str, rows: pl.DataFrame) -> pl.DataFrame:
    """Every other click is a result."""
    return rows.sort("ts").select(second=pl.col("ts").dt.second().cast(pl.Int64)).gather_every(2)


def test_functions_of_updated_sessions_have_the_tables_of_all_records(tmp_path: Path) -> None:
    rows = session_clicks()
    parts = [rows[first : first + 40] for first in range(0, len(rows), 40)]
    script = [parts[0], PAUSE, parts[1], PAUSE, FailOnce(tmp_path / "failed"), parts[2], PAUSE, parts[3], EOF]
    pipeline = hg.Pipeline(
        "p", parallelism=2, restart=hg.FixedDelay(delay="10ms"), checkpointing=hg.Checkpointing(interval="20ms")
    )
    stream = pipeline.source(ScriptedSource(script, schema=SESSION_SCHEMA, pause_ms=30)).with_timestamps("ts")
    sinks = {}
    for retractions in (False, True):
        updated = stream.key_by("user").window(
            hg.Session("10s"), allowed_lateness="1h", early="20ms", retractions=retractions
        )
        made = {"reduced": updated.reduce(total), "busy": updated.apply(busy, {"n": pa.int64()})}
        if retractions:
            made["seconds"] = updated.apply(seconds_of, {"second": pa.int64()})
            made["counted"] = made["seconds"].key_by("second").agg(n=pl.len())
        for name, results in made.items():
            sinks[name, retractions] = Collect(tmp_path / f"{name}-{retractions}")
            results.sink(sinks[name, retractions])
    assert testing.run(pipeline, checkpoint_dir=tmp_path / "checkpoints", timeout_s=240).is_finished

    expected = sessions_of(rows)
    for retractions in (False, True):
        found = {
            name: applied(
                sinks[name, retractions].rows(),
                ["user", "window_start"],
                retractions=retractions,
                strict=retractions or name == "reduced",
            )
            for name in ("reduced", "busy")
        }
        assert [(r["user"], r["window_start"], r["window_end"], r["ts"]) for r in found["reduced"]] == [
            (user, start, end, end - GAP) for user, start, end, _ in expected
        ]
        assert [(r["user"], r["window_start"], r["n"]) for r in found["busy"]] == [
            (user, start, n) for user, start, _, n in expected if n > 1
        ]
    wanted: list[int] = []
    for user, start, end, _ in expected:
        clicked = sorted(row["ts"] for row in rows if row["user"] == user and start <= row["ts"] < end)
        wanted += [ts.second for ts in clicked[::2]]
    bag: Counter[tuple[Any, ...]] = Counter()
    for row in sinks["seconds", True].rows():
        assert row["op"] in ("insert", "delete")
        bag[row["user"], row["window_start"], row["second"]] += 1 if row["op"] == "insert" else -1
    assert sorted(second for (*_, second), n in bag.items() for _ in range(n)) == sorted(wanted)
    assert applied(sinks["counted", True].rows(), ["second"], retractions=False) == [
        {"second": second, "n": n} for second, n in sorted(Counter(wanted).items())
    ]


def test_several_rows_of_a_session_need_retractions(tmp_path: Path) -> None:
    pipeline = hg.Pipeline("p", restart=hg.NoRestart())
    clicked = [{"user": "a", "ts": SESSION_START}]
    stream = pipeline.source(ScriptedSource([clicked, EOF], schema=SESSION_SCHEMA)).with_timestamps("ts").key_by("user")
    updated = stream.window(hg.Session("10s"), allowed_lateness="1h")
    updated.apply(lambda key, rows: [{"n": 1}, {"n": 2}], {"n": pa.int64()}).sink(Collect(tmp_path / "out"))
    with pytest.raises(hg.PipelineFailed, match=r"returned 2 rows for a window of key 'a'.*retractions=True"):
        testing.run(pipeline, checkpoint_dir=tmp_path / "checkpoints", timeout_s=300)


TRIGGER_SCHEMA = {"user": pa.string(), "ts": pa.int64(), "n": pa.int64()}


def trigger_click(user: str, ts: int, n: int = 1) -> dict[str, Any]:
    return {"user": user, "ts": ts, "n": n}


def trigger_clicks(*items: Any, state: Any = None, parallelism: int = 2) -> hg.Stream:
    """Records in this order; a single subtask has what comes before a pause in event time before what follows."""
    pipeline = hg.Pipeline(
        "p",
        parallelism=parallelism,
        restart=hg.FixedDelay(delay="10ms"),
        checkpointing=hg.Checkpointing(interval="20ms"),
        state=state or hg.Memory(),
    )
    return pipeline.source(ScriptedSource([*items, EOF], schema=TRIGGER_SCHEMA, pause_ms=30))


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
    first = [trigger_click("a", 100, 1), trigger_click("b", 300, 2), trigger_click("a", 200, 4)]
    second = [trigger_click("a", 250, 8), trigger_click("a", 1_400, 16)]
    stream = trigger_clicks(first, FailOnce(tmp_path / "failed"), second, state=state)
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
    first = (
        [trigger_click("a", 100, 1)],
        PAUSE,
        [trigger_click("a", 1_500, 2)],
        PAUSE,
        [trigger_click("a", 300, 4)],
        PAUSE,
    )
    stream = trigger_clicks(*first, [trigger_click("a", 9_000)], PAUSE, [trigger_click("a", 5, 8)], parallelism=1)
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
    assert late.rows() == [trigger_click("a", 5, 8)]
    assert result.late_records == 1
    assert "'window-trigger' sent 1 late record to its output 'late'" in caplog.text


def test_functions_and_further_windows_take_what_a_trigger_emits(tmp_path: Path) -> None:
    sink, sums = Collect(tmp_path / "out"), Collect(tmp_path / "sums")
    stream = trigger_clicks([trigger_click(user, 100 * i, i) for i in range(40) for user in ("a", "b")])
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
    stream = trigger_clicks([trigger_click("a", 0, n) for n in range(5)])
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
        trigger_clicks().with_timestamps("ts").key_by("user").window(**options)


def test_a_window_of_event_time_with_a_trigger_needs_event_times() -> None:
    with pytest.raises(hg.UsageError, match="needs event times"):
        trigger_clicks().key_by("user").window(hg.Tumbling("1s"), trigger=EveryTwo())


def test_a_failed_trigger_leaves_no_operator_in_the_pipeline() -> None:
    class Wrong(EveryTwo):
        def open(self, state: hg.StateHandle) -> None:
            state.value("count", "no type")

    keyed = trigger_clicks().with_timestamps("ts").key_by("user")
    before = len(keyed._pipeline._builder.nodes)
    with pytest.raises(hg.UsageError, match="no type"):
        keyed.window(hg.Tumbling("1s"), trigger=Wrong()).agg(n=pl.len())
    assert len(keyed._pipeline._builder.nodes) == before


EPOCH, MS = datetime(1970, 1, 1), timedelta(milliseconds=1)
OUTER_SCHEMA = {"key": pa.int64(), "ts": pa.int64(), "v": pa.int64()}
ROWS = [{"key": i % 3, "ts": 250 * i, "v": i} for i in range(80)]


class AtEnd(hg.Trigger):
    def on_batch(self, rows: pl.DataFrame, context: hg.TriggerContext) -> hg.TriggerResult:
        assert context.window_end_ms is not None
        context.timers.register_event_time(context.window_end_ms - 1)
        return hg.TriggerResult.CONTINUE

    def on_event_time(self, time_ms: int, context: hg.TriggerContext) -> hg.TriggerResult:
        return hg.TriggerResult.FIRE


class PassOn(hg.BroadcastProcessFunction):
    def process(self, row: dict[str, Any], context: Any) -> Any:
        yield row

    def process_broadcast(self, row: dict[str, Any], context: Any) -> None:
        pass


def sums_of(first: tuple[int, int]) -> dict[tuple[int, int], int]:
    """Return the sums of windows of a size and a slide, by key and start."""
    size, slide = first
    found: Counter[tuple[int, int]] = Counter()
    for row in ROWS:
        last = row["ts"] - row["ts"] % slide
        for start in range(last, row["ts"] - size, -slide):
            found[row["key"], start] += row["v"]
    return found


def window_of(size: int, slide: int) -> Any:
    return hg.Tumbling(f"{size}ms") if size == slide else hg.Sliding(f"{size}ms", f"{slide}ms")


@pytest.mark.parametrize(
    ("first", "second", "trigger"),
    [
        ((2_000, 2_000), (1_000, 1_000), None),
        ((4_000, 1_000), (7_000, 3_000), None),
        ((2_000, 2_000), (1_000, 1_000), AtEnd()),
        ((4_000, 1_000), (6_000, 6_000), AtEnd()),
    ],
)
def test_no_window_misses_results_of_windows(tmp_path: Path, first: Any, second: Any, trigger: Any) -> None:
    sink = Collect(tmp_path / "out")
    pipeline = hg.Pipeline("p", parallelism=2, checkpointing=hg.Checkpointing(interval="20ms"))
    batches = [ROWS[at : at + 8] for at in range(0, len(ROWS), 8)]
    rows = pipeline.source(ScriptedSource([*batches, EOF], schema=OUTER_SCHEMA, pause_ms=1)).with_timestamps("ts")
    sums = rows.key_by("key").window(window_of(*first)).agg(total=pl.col("v").sum())
    again = sums.select("key", "total", "window_start").key_by("key").window(window_of(*second), trigger=trigger)
    again.agg(n=pl.len(), total=pl.col("total").sum(), at=pl.col("window_start").min()).sink(sink)
    result = testing.run(pipeline, timeout_s=240)
    assert result.late_records == 0
    size, slide = second
    wanted: dict[tuple[int, int], list[int]] = {}
    for (key, start), total in sums_of(first).items():
        for window in range(start - start % slide, start - size, -slide):
            wanted.setdefault((key, window), []).append(total)
    found = {(row["key"], (row["window_start"] - EPOCH) // MS): (row["n"], row["total"]) for row in sink.rows()}
    assert found == {at: (len(totals), sum(totals)) for at, totals in wanted.items()}
    assert len(sink.rows()) == len(wanted)


def test_sessions_of_windows_that_are_longer_than_the_gap_miss_none(tmp_path: Path) -> None:
    sink = Collect(tmp_path / "out")
    pipeline = hg.Pipeline("p", parallelism=2, checkpointing=hg.Checkpointing(interval="20ms"))
    batches = [ROWS[at : at + 8] for at in range(0, len(ROWS), 8)]
    rows = pipeline.source(ScriptedSource([*batches, EOF], schema=OUTER_SCHEMA, pause_ms=1)).with_timestamps("ts")
    sums = rows.key_by("key").window(hg.Tumbling("10s")).agg(total=pl.col("v").sum())
    sums.select("key", "total", "window_start").key_by("key").window(hg.Session("2s")).agg(n=pl.len()).sink(sink)
    result = testing.run(pipeline, timeout_s=240)
    assert result.late_records == 0
    assert [row["n"] for row in sink.rows()] == [1] * 6


@pytest.mark.parametrize("is_left", [True, False])
@pytest.mark.parametrize(
    ("first", "second"),
    [((2_000, 2_000), (1_000, 1_000)), ((4_000, 1_000), (6_000, 6_000)), ((5_000, 5_000), (4_000, 2_000))],
)
def test_no_window_join_misses_results_of_windows(tmp_path: Path, first: Any, second: Any, is_left: bool) -> None:
    sink = Collect(tmp_path / "out")
    pipeline = hg.Pipeline("p", parallelism=2, checkpointing=hg.Checkpointing(interval="20ms"))
    batches = [ROWS[at : at + 8] for at in range(0, len(ROWS), 8)]
    rows = pipeline.source(ScriptedSource([*batches, EOF], schema=OUTER_SCHEMA, pause_ms=1)).with_timestamps("ts")
    sums = rows.key_by("key").window(window_of(*first)).agg(total=pl.col("v").sum())
    sums = sums.select("key", "total", at="window_start")
    left, right = (sums, rows) if is_left else (rows, sums)
    joined = left.join(right, on="key", window=window_of(*second))
    size, slide = second
    again = joined.key_by("key").window(hg.Tumbling(f"{slide}ms"))
    again.agg(of=(pl.col("total") * pl.col("v")).sum()).sink(sink)
    result = testing.run(pipeline, timeout_s=240)
    assert result.late_records == 0
    wanted: Counter[tuple[int, int]] = Counter()
    for (key, start), total in sums_of(first).items():
        for window in range(start - start % slide, start - size, -slide):
            values = [row["v"] for row in ROWS if row["key"] == key and window <= row["ts"] < window + size]
            wanted[key, window] += total * sum(values)
    found = {(row["key"], (row["window_start"] - EPOCH) // MS): row["of"] for row in sink.rows()}
    assert found == {at: value for at, value in wanted.items() if value}


@pytest.mark.parametrize("is_function", [False, True])
def test_an_input_without_event_time_makes_no_result_of_a_window_late(tmp_path: Path, is_function: bool) -> None:
    sink = Collect(tmp_path / "out")
    pipeline = hg.Pipeline("p", parallelism=2, checkpointing=hg.Checkpointing(interval="20ms"))
    batches = [ROWS[at : at + 8] for at in range(0, len(ROWS), 8)]
    rows = pipeline.source(ScriptedSource([*batches, EOF], schema=OUTER_SCHEMA, pause_ms=1)).with_timestamps("ts")
    sums = rows.key_by("key").window(hg.Tumbling("2s")).agg(total=pl.col("v").sum())
    table = pipeline.source(hg.FromRows([{"key": key, "name": f"{key}"} for key in range(3)]), name="table")
    if is_function:
        named = sums.connect(table.broadcast()).process(PassOn())
    else:
        named = sums.join(table.broadcast(), on="key", how="left")
    named.key_by("key").window(hg.Tumbling("1s")).agg(n=pl.len()).sink(sink)
    result = testing.run(pipeline, timeout_s=240)
    assert result.late_records == 0
    assert [row["n"] for row in sink.rows()] == [1] * 30
