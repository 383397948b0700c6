"""Side outputs of process functions in pipelines: streams of their own, exactly once (docs/guide/side-outputs.md)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from tests.conftest import few
from tests.operators.process.test_connected_process import Balance, BatchBalance, model
from tests.runtime.running import in_flight, taken
from tests.support.killing import run_killing

import headgate as hg
from headgate import testing
from headgate.errors import UsageError
from headgate.model.graph import MAIN_INPUT
from headgate.operators.process.connected_process import RIGHT_INPUT
from headgate.testing import EOF, PAUSE, Collect, FailOnce, ScriptedSource

Row = dict[str, Any]
EVENT = {"key": int, "n": int}
END_MS = 1 << 52


class Split(hg.ProcessFunction):
    """Numbers the events of each key; every third goes to a side output, and at the end each key to another one."""

    schema = {"key": int, "n": int, "number": int}
    side_outputs = {"third": schema, "keys": {"key": int, "events": int}}

    def open(self, state: hg.StateHandle) -> None:
        self.count = state.value("count", int)

    def process(self, row: Row, context: hg.ProcessContext) -> Iterator[Row]:
        number = self.count.get(0) + 1
        self.count.put(number)
        context.timers.register_event_time(END_MS)
        if number % 3 == 0:
            context.emit_to("third", {**row, "number": number})
        else:
            yield {**row, "number": number}

    def on_timer(self, timer: hg.Timer, context: hg.ProcessContext) -> None:
        context.emit_to("keys", {"key": context.key, "events": self.count.get()})


class BatchSplit(hg.BatchProcessFunction):
    """The same by batch."""

    schema = Split.schema
    side_outputs = Split.side_outputs

    def open(self, state: hg.BatchStateHandle) -> None:
        self.count = state.value("count", int)

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame:
        numbers = self.count.get().fill_null(0) + batch.select(pl.int_range(1, pl.len() + 1).over("key")).to_series()
        self.count.put(numbers)
        context.timers.register_event_time(END_MS)
        found = batch.with_columns(number=numbers)
        context.emit_to("third", found.filter(pl.col("number") % 3 == 0))
        return found.filter(pl.col("number") % 3 != 0)

    def on_timer(self, timers: hg.FiredTimers, context: hg.BatchContext) -> None:
        context.emit_to("keys", context.keys.frame().with_columns(events=self.count.get()))


class Slow:
    """A function that takes its time while a file is there."""

    def __init__(self, flag: Path) -> None:
        self._flag = flag

    def __call__(self, row: Row) -> bool:
        if self._flag.exists():
            time.sleep(0.002)  # slow work: not a wait for anything
        return True


EVENTS = [{"key": n % 7, "n": n} for n in range(420)]


def split(script: list[Any], directory: Path, function: Any, **options: Any) -> hg.Pipeline:
    """Return a pipeline whose side output is shuffled by key and rebalanced, and chained."""
    options.setdefault("checkpointing", hg.Checkpointing(interval="20ms"))
    pipeline = hg.Pipeline("p", **{"parallelism": 2, "restart": hg.FixedDelay(delay="10ms"), **options})
    events = pipeline.source(ScriptedSource(script, schema=EVENT, pause_ms=20), name="events")
    main = events.key_by("key").process(function, name="split")
    main.sink(Collect(directory / "main"), name="main")
    third = main.side_output("third")
    third.select("key", "number").filter(pl.col("number") > 0).sink(Collect(directory / "chained"), name="chained")
    third.rebalance().filter(Slow(directory / "slow"), name="slow").sink(Collect(directory / "third"), name="third")
    main.side_output("keys").sink(Collect(directory / "keys"), name="keys")
    return pipeline


def check(directory: Path, events: list[Row] = EVENTS) -> None:
    numbered = pl.DataFrame(events).with_columns(number=pl.int_range(1, pl.len() + 1).over("key"))
    is_third = pl.col("number") % 3 == 0
    thirds = numbered.filter(is_third)
    for name, expected in {
        "main": numbered.filter(~is_third),
        "third": thirds,
        "chained": thirds.select("key", "number"),
        "keys": numbered.group_by("key").agg(events=pl.len().cast(pl.Int64)),
    }.items():
        rows = Collect(directory / name).rows()
        assert pl.DataFrame(rows).sort(expected.columns).equals(expected.sort(expected.columns)), name


@pytest.mark.parametrize("function", [Split(), BatchSplit()])
def test_a_lost_worker_changes_no_side_output(tmp_path: Path, function: Any) -> None:
    script = [item for at in range(0, 420, 70) for item in (EVENTS[at : at + 70], PAUSE)]
    result = run_killing(split([*script, EOF], tmp_path, function), 1)
    assert result.is_finished
    check(tmp_path)


@pytest.mark.parametrize(("before", "after"), few([(3, 2), (2, 5), (3, 1), (2, 3)], 1))
def test_records_in_flight_on_a_side_output_are_restored(tmp_path: Path, before: int, after: int) -> None:
    directory = tmp_path / "checkpoints"
    options: Any = {"checkpointing": hg.Checkpointing(interval=None, dir=directory, alignment_timeout=0)}
    (tmp_path / "slow").touch()
    first = [[row] for row in EVENTS[:210]]
    with testing.running(split([*first, PAUSE], tmp_path, Split(), parallelism=before, **options)) as handle:
        taken(handle, lambda: in_flight(directory, "split/third"))
    (tmp_path / "slow").unlink()
    going_on = split([*first, PAUSE, EVENTS[210:], EOF], tmp_path, BatchSplit(), parallelism=after, **options)
    assert testing.run(going_on, timeout_s=300).is_finished
    check(tmp_path)


def collected(stream: hg.Stream, directory: Path) -> pl.DataFrame:
    """Run the pipeline of a stream and return its records."""
    sink = Collect(directory / "collected")
    stream.sink(sink)
    testing.run(stream._pipeline, timeout_s=300)  # type: ignore[arg-type]
    return pl.DataFrame(sink.rows())


def source() -> tuple[hg.Pipeline, hg.Stream]:
    pipeline = hg.Pipeline("p")
    return pipeline, pipeline.source(hg.FromRows(EVENTS), name="events")


def test_a_side_output_that_is_read_is_counted_and_shown(tmp_path: Path) -> None:
    pipeline, events = source()
    main = events.key_by("key").process(Split(), name="split")
    main.side_output("third").sink(Collect(tmp_path / "third"), name="third")
    assert "from split (third)" in pipeline.describe()
    with testing.running(pipeline) as handle:
        handle.wait(300)
        totals = {str(node.node): node for node in handle.progress.nodes}
    assert len(Collect(tmp_path / "third").rows()) == 140
    assert totals["split"].records_out == 280 + 140, "what goes to 'keys', which is not read, does not count"
    assert totals["third"].records_in == 140


def test_the_main_output_may_be_left_unread_but_not_all(tmp_path: Path) -> None:
    pipeline, events = source()
    main = events.key_by("key").process(Split(), name="split")
    with pytest.raises(UsageError, match="the pipeline has no sink"):
        pipeline.describe()
    assert collected(main.side_output("keys"), tmp_path)["events"].to_list() == [60] * 7


def test_a_side_output_has_the_event_time_of_the_input(tmp_path: Path) -> None:
    _, events = source()

    class Late(Split):
        schema = {"key": int}

        def process(self, row: Row, context: hg.ProcessContext) -> Iterator[Row]:
            yield from ({"key": found["key"]} for found in super().process(row, context))

    main = events.with_timestamps("n").key_by("key").process(Late())
    counts = main.side_output("third").key_by("key").window(hg.Tumbling("100ms")).agg(pl.len())
    assert collected(counts, tmp_path)["len"].sum() == 140
    for other in (main, main.side_output("keys")):
        with pytest.raises(UsageError, match="needs event times"):
            other.key_by("key").window(hg.Tumbling("100ms"))


def test_a_side_output_is_of_the_stream_that_process_returns() -> None:
    _, events = source()
    main = events.key_by("key").process(Split(), name="split")
    third = main.side_output("third")
    with pytest.raises(UsageError, match="operator 'split' has no side output 'other'; it has 'third', 'keys'"):
        main.side_output("other")
    for stream in (events, third, main.filter(pl.col("n") > 1), main.rebalance()):
        with pytest.raises(UsageError, match="has no side outputs; declare them in the function"):
            stream.side_output("third")
    with pytest.raises(UsageError, match="given one stream twice"):
        third.union(main.side_output("third"))
    assert main.union(third).columns == ["key", "n", "number"]
    with pytest.raises(AttributeError, match="a keyed stream has no 'side_output'"):
        main.key_by("key").side_output("third")  # type: ignore[attr-defined]


class Halve(hg.ProcessFunction):
    """Halves a number until it is odd; odd ones leave."""

    side_outputs = {"odd": None}

    def process(self, row: Row, context: hg.ProcessContext) -> Iterator[Row]:
        if row["n"] % 2:
            context.emit_to("odd", row)
        else:
            yield {**row, "n": row["n"] // 2}


@pytest.mark.parametrize("is_output", [True, False])
def test_a_side_output_leaves_a_loop_or_goes_round(tmp_path: Path, is_output: bool) -> None:
    _, events = source()

    class Turned(hg.ProcessFunction):
        side_outputs = {"even": None}

        def process(self, row: Row, context: hg.ProcessContext) -> Iterator[Row]:
            if row["n"] % 2:
                yield row
            else:
                context.emit_to("even", {**row, "n": row["n"] // 2})

    def body(loop: hg.KeyedStream) -> Any:
        if is_output:
            even = loop.process(Halve())
            return even, even.side_output("odd")
        odd = loop.process(Turned())
        return odd.side_output("even"), odd

    found = collected(events.filter(pl.col("n") > 0).key_by("key").iterate(body), tmp_path)
    assert found.height == 419
    odd = sorted(n // (n & -n) for n in range(1, 420))
    assert found["n"].sort().to_list() == odd


class Tap(hg.BroadcastProcessFunction):
    """Passes events on, and tells every rule once on the side."""

    side_outputs = {"rules": {"rule": int, "subtask": int}}

    def open(self, state: hg.StateHandle) -> None:
        self.rules = state.broadcast("rules", int, int)

    def process(self, row: Row, context: hg.ProcessContext) -> list[Row]:
        return [row]

    def process_broadcast(self, row: Row, context: hg.BroadcastContext) -> None:
        context.emit_to("rules", {"rule": row["rule"], "subtask": context.subtask_index})


class BatchTap(hg.BatchBroadcastProcessFunction):
    """The same by batch."""

    side_outputs = Tap.side_outputs
    open = Tap.open  # type: ignore[assignment]

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame:
        return batch

    def process_broadcast(self, batch: pl.DataFrame, context: hg.BroadcastContext) -> None:
        context.emit_to("rules", batch.select("rule", subtask=pl.lit(context.subtask_index)))


@pytest.mark.parametrize("function", [Tap(), BatchTap()])
def test_functions_with_a_broadcast_side_have_side_outputs(tmp_path: Path, function: Any) -> None:
    pipeline, events = source()
    rules = pipeline.source(hg.FromRows([{"rule": n} for n in range(5)]))
    main = events.connect(rules.broadcast()).process(function)
    main.side_output("rules").sink(Collect(tmp_path / "rules"))
    main.sink(Collect(tmp_path / "main"))
    testing.run(pipeline, parallelism=2)
    rows = sorted((row["rule"], row["subtask"]) for row in Collect(tmp_path / "rules").rows())
    assert rows == [(rule, subtask) for rule in range(5) for subtask in range(2)]
    assert len(Collect(tmp_path / "main").rows()) == 420


LEFT = {"customer": str, "amount": int}
RIGHT = {"n": int, "payer": str}
ORDERS = [{"customer": f"k{n % 5}", "amount": n} for n in range(60)]
PAYMENTS = [{"n": n, "payer": f"k{n % 6}"} for n in range(60)]


@pytest.mark.parametrize(
    ("function", "state"), [(Balance(), hg.Memory()), (BatchBalance(), hg.RocksDB()), (BatchBalance(), hg.Memory())]
)
def test_lost_workers_change_nothing(tmp_path: Path, function: Any, state: Any) -> None:
    sink, options = Collect(tmp_path / "out"), {"pause_ms": 20}
    failing = FailOnce(tmp_path / "failed")
    pipeline = hg.Pipeline("p", parallelism=2, state=state, checkpointing=hg.Checkpointing(interval="20ms"))
    orders = pipeline.source(
        ScriptedSource([ORDERS[:30], PAUSE, PAUSE, ORDERS[30:], EOF], schema=LEFT, **options), name="orders"
    )
    payments = pipeline.source(
        ScriptedSource([PAYMENTS[:30], PAUSE, PAUSE, failing, PAYMENTS[30:], EOF], schema=RIGHT, **options), name="paid"
    )
    both = orders.key_by("customer").connect(payments.key_by("payer"))
    both.process(function, name="balance").sink(sink)
    run_killing(pipeline, 1)
    rows = [tuple(row.values()) for row in sink.rows()]
    expected = model(
        [(MAIN_INPUT, row["customer"], row["amount"]) for row in ORDERS]
        + [(RIGHT_INPUT, row["payer"], row["n"]) for row in PAYMENTS]
    )
    assert len(rows) == sum(map(len, expected.values()))
    ends = sorted(row for row in rows if row[1] == "end")
    assert ends == sorted(of_key[-1] for of_key in expected.values())


class Firing(hg.CoProcessFunction):
    """Tells when event time has reached 50."""

    schema = {"key": int, "ms": int}

    def process_left(self, row: Row, context: hg.ProcessContext) -> None:
        context.timers.register_event_time(50)

    def process_right(self, row: Row, context: hg.ProcessContext) -> None:
        self.process_left(row, context)

    def on_timer(self, timer: hg.Timer, context: hg.ProcessContext) -> Iterator[Row]:
        yield {"key": context.key, "ms": timer.time_ms}


@pytest.mark.parametrize(("latest", "has_both"), [(40, True), (60, True), (60, False)])
def test_timers_fire_by_the_lower_watermark(tmp_path: Path, latest: int, has_both: bool) -> None:
    sink, pipeline = Collect(tmp_path / "out"), hg.Pipeline("p", checkpointing=hg.Checkpointing(interval="10ms"))
    script = [[{"key": n, "ms": n}] for n in (0, 100)]
    left = pipeline.source(ScriptedSource([*script, PAUSE], schema={"key": int, "ms": int}, pause_ms=20))
    times = [[{"key": 7, "at": n}] for n in (0, latest)]
    other = pipeline.source(ScriptedSource([*times, PAUSE], schema={"key": int, "at": int}, pause_ms=20))
    other = other.with_timestamps("at") if has_both else other
    both = left.with_timestamps("ms").key_by("key").connect(other.key_by("key")).process(Firing())
    both.sink(sink)
    with testing.running(pipeline) as handle:
        if latest == 60 and has_both:
            deadline = time.monotonic() + 300
            while len(sink.rows()) < 3:
                taken(handle)
                assert time.monotonic() < deadline, "event time was held back"
            return
        for _ in range(5):
            taken(handle)
        assert not sink.rows()


def test_event_time_goes_on_if_both_streams_have_it() -> None:
    class Same(hg.CoProcessFunction):
        side_outputs = {"at": {"key": int, "at": int}}

    pipeline = hg.Pipeline("p")
    rows = pipeline.source(hg.FromRows([{"key": 1, "ms": 1}]))
    others = pipeline.source(hg.FromRows([{"key": 1, "at": 1}]))
    left, right = rows.with_timestamps("ms").key_by("key"), others.with_timestamps("at").key_by("key")
    both = left.connect(right).process(Same())
    both.key_by("key").window(hg.Tumbling("1s"))
    both.side_output("at").key_by("key").window(hg.Tumbling("1s"))
    for one in (left.connect(others.key_by("key")), rows.key_by("key").connect(right)):
        with pytest.raises(UsageError, match="needs event times"):
            one.process(Same()).key_by("key").window(hg.Tumbling("1s"))


def test_a_stream_may_be_connected_with_itself(tmp_path: Path) -> None:
    class Both(hg.CoProcessFunction):
        schema = {"key": int, "n": int, "side": str}

        def process_left(self, row: Row, context: hg.ProcessContext) -> list[Row]:
            return [{**row, "side": "left"}]

        def process_right(self, row: Row, context: hg.ProcessContext) -> list[Row]:
            return [{**row, "side": "right"}]

    pipeline, sink = hg.Pipeline("p"), Collect(tmp_path / "out")
    rows = pipeline.source(hg.FromRows([{"key": n % 3, "n": n} for n in range(9)])).key_by("key")
    rows.connect(rows).process(Both()).sink(sink)
    testing.run(pipeline, parallelism=2, timeout_s=300)
    assert sorted((row["n"], row["side"]) for row in sink.rows()) == [
        (n, side) for n in range(9) for side in ("left", "right")
    ]


def test_a_null_key_is_a_bad_record_on_both_sides(tmp_path: Path) -> None:
    bad = Collect(tmp_path / "bad")
    pipeline = hg.Pipeline("p", bad_records=hg.DeadLetter(bad))
    orders = pipeline.source(ScriptedSource([[*ORDERS[:3], {"customer": None, "amount": 1}], EOF], schema=LEFT))
    payments = pipeline.source(ScriptedSource([[*PAYMENTS[:3], {"n": 1, "payer": None}], EOF], schema=RIGHT))
    both = orders.key_by("customer").connect(payments.key_by("payer")).process(Balance(), name="balance")
    both.sink(Collect(tmp_path / "out"))
    testing.run(pipeline, timeout_s=300)
    assert len(bad.rows()) == 2
    assert len(Collect(tmp_path / "out").rows()) == 9


def test_functions_and_streams_that_do_not_fit_are_refused() -> None:
    pipeline = hg.Pipeline("p")
    rows = pipeline.source(hg.FromRows([{"key": 1, "name": "a"}]))
    one, two = rows.key_by("key"), rows.key_by("key", "name")
    with pytest.raises(UsageError, match=r"equally many key columns, but their keys are \(key\) and \(key, name\)"):
        one.connect(two).process(hg.CoProcessFunction())
    with pytest.raises(UsageError, match="'key' is int64 and 'name' is"):
        one.connect(rows.key_by("name")).process(hg.CoProcessFunction())
    with pytest.raises(UsageError, match="is a function of two keyed streams; connect them"):
        one.process(Balance())

    class Foreign(hg.CoProcessFunction):
        def process_element1(self, row: Row, context: Any) -> None: ...

    with pytest.raises(UsageError, match="the method is called process_left"):
        one.connect(one).process(Foreign())
    with pytest.raises(UsageError, match="CoProcessFunction is needed for two keyed streams"):
        one.connect(one).process(hg.BroadcastProcessFunction())


SCHEMA = {"k": int, "ms": int, "x": int}
OVER_ROWS: list[Row] = [{"k": n % 5, "ms": n // 2 + 3 * (-n % 3), "x": n % 7} for n in range(600)]
"""Out of order by less than 10 ms."""

OTHER: list[Row] = [{"k": n % 5, "ms": n // 2, "x": n + 1_000} for n in range(0, 600, 7)]


def expected(reach: int | None) -> list[tuple[Any, ...]]:
    """A recount of what each record and those at most ``reach`` before it sum up to."""
    found = []
    rows = OVER_ROWS + OTHER
    for row in rows:
        first = -1 if reach is None else row["ms"] - reach
        sums = [one["x"] for one in rows if one["k"] == row["k"] and first <= one["ms"] <= row["ms"]]
        found.append((*row.values(), sum(sums), len(sums)))
    return sorted(found)


@pytest.mark.parametrize(
    ("reach", "state"), [(20, hg.Memory()), (20, hg.RocksDB()), (None, hg.Memory()), (None, hg.RocksDB())]
)
def test_lost_workers_change_nothing_over_frames(tmp_path: Path, reach: int | None, state: Any) -> None:
    sink = Collect(tmp_path / "out")
    failing = FailOnce(tmp_path / "failed")
    script = [item for at in range(0, 600, 60) for item in (OVER_ROWS[at : at + 60], PAUSE)]
    pipeline = hg.Pipeline("p", parallelism=2, state=state, checkpointing=hg.Checkpointing(interval="20ms"))
    source = ScriptedSource([*script, EOF], [*OTHER[:50], PAUSE, failing, *OTHER[50:], EOF], schema=SCHEMA, pause_ms=20)
    records = pipeline.source(source).with_timestamps("ms", out_of_orderness="10ms")
    frame = "unbounded" if reach is None else f"{reach}ms"
    records.key_by("k").over(range=frame, total=pl.col("x").sum(), n=pl.len()).sink(sink)
    run_killing(pipeline, 2)
    assert sorted(tuple(row.values()) for row in sink.rows()) == expected(reach)
