"""Triggers of the user, against the built-in windows that they imitate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import few
from tests.operators.harness import Harness, Shuffled
from tests.state.backends import IN_FILES, MEMORY, Chosen, choose

from headgate.errors import UsageError
from headgate.model.graph import OutputTag
from headgate.operators.base import WATERMARK_MAX_MS
from headgate.operators.keys import partition
from headgate.operators.process.row_process import StateHandle
from headgate.operators.timestamps import EventTime
from headgate.operators.user_functions import UserFunctionError
from headgate.operators.windows.aligned_windows import window_operators
from headgate.operators.windows.triggered_windows import Firing, triggered_operators
from headgate.operators.windows.window_assigner import (
    BOUNDS,
    AlignedWindows,
    AssignWindowsSpec,
    CalendarWindows,
    FixedWindows,
    tumbling,
)
from headgate.operators.windows.window_plan import Emission, WindowedAggregate
from headgate.operators.windows.window_trigger import (
    Trigger,
    TriggerContext,
    TriggerResult,
    commanded_window,
    trigger_spec,
)

SCHEMA = pa.schema([("key", pa.int64()), ("name", pa.large_string()), ("v", pa.int64()), ("ts", pa.int64())])
DECOMPOSED = (pl.len().alias("n"), pl.col("v").sum().alias("total"), pl.col("v").is_null().sum().alias("missing"))
KEPT = (pl.col("v").alias("in_order"), pl.col("v").n_unique().alias("distinct"), *DECOMPOSED)
INTERVAL_MS, LATENESS_MS = 1_000, 700
COUNT = 3
LATE = OutputTag("late")
R = TriggerResult


class Counts(Trigger):
    """Fires after each three records."""

    def __init__(self, *, purges: bool, by_batch: bool = False, fires_at_end: bool = True) -> None:
        self.result, self.by_batch = R.FIRE_AND_PURGE if purges else R.FIRE, by_batch
        self.fires_at_end = fires_at_end  # type: ignore[misc]

    def open(self, state: StateHandle) -> None:
        self.count = state.value("count", pa.int64())

    def on_element(self, row: dict[str, Any], context: TriggerContext) -> TriggerResult:
        count = self.count.get(0) + 1
        self.count.put(count % COUNT or None)
        return R.CONTINUE if count % COUNT else self.result

    def on_batch(self, rows: pl.DataFrame, context: TriggerContext) -> Any:
        if not self.by_batch:
            return super().on_batch(rows, context)
        before = self.count.get(0)
        self.count.put((before + rows.height) % COUNT or None)
        return [R.CONTINUE if (before + i) % COUNT else self.result for i in range(1, rows.height + 1)]


class Odd(Trigger):
    """Fires after odd numbers."""

    def __init__(self, result: TriggerResult) -> None:
        self.result = result

    def on_element(self, row: dict[str, Any], context: TriggerContext) -> TriggerResult:
        return self.result if (row["v"] or 0) % 2 else R.CONTINUE


class ByClock(Trigger):
    """Fires at multiples of an interval, if records have come."""

    def __init__(self, *, purges: bool) -> None:
        self.result = R.FIRE_AND_PURGE if purges else R.FIRE

    def open(self, state: StateHandle) -> None:
        self.waits = state.value("waits", pa.bool_())

    def on_batch(self, rows: pl.DataFrame, context: TriggerContext) -> TriggerResult:
        if not self.waits.exists:
            self.waits.put(True)
            now_ms = context.timers.processing_time_ms
            context.timers.register_processing_time((now_ms // INTERVAL_MS + 1) * INTERVAL_MS)
        return R.CONTINUE

    def on_processing_time(self, time_ms: int, context: TriggerContext) -> TriggerResult:
        self.waits.clear()
        return self.result


class AtEnd(Trigger):
    """Fires at the end of the window, and again for late records."""

    def on_batch(self, rows: pl.DataFrame, context: TriggerContext) -> TriggerResult:
        assert context.window_end_ms is not None
        now_ms = context.timers.event_time_ms
        if now_ms is not None and now_ms >= context.window_end_ms - 1:
            return R.FIRE
        context.timers.register_event_time(context.window_end_ms - 1)
        return R.CONTINUE

    def on_event_time(self, time_ms: int, context: TriggerContext) -> TriggerResult:
        assert context.window_end_ms is not None
        assert time_ms == context.window_end_ms - 1, "only what it registered fires"
        return R.FIRE


class Chain:
    """The operators of windows with a trigger of the user, in ``parallelism`` subtasks."""

    def __init__(
        self,
        trigger: Trigger,
        windows: AlignedWindows | None,
        aggregates: tuple[pl.Expr, ...],
        parallelism: int,
        states: Sequence[Sequence[Any]] = ((), ()),
        *,
        lateness_ms: int = 0,
        begun_ms: int = 1_000,
    ) -> None:
        self.parallelism = parallelism
        keys: tuple[str, ...] = ("key", "name")
        schema = SCHEMA
        content = commanded_window(
            "node",
            keys,
            aggregates,
            SCHEMA,
            windows=windows,
            lateness_ms=lateness_ms,
            fires_at_end=trigger.fires_at_end,
        )
        self._assign: Harness | None = None
        if windows is not None:
            spec = AssignWindowsSpec(windows, EventTime("ts", 1, 1))
            self._assign, keys, schema = Harness(spec), (*keys, *BOUNDS), spec.output_schema(SCHEMA, "assign")
        asked = trigger_spec(
            "asked",
            keys,
            trigger,
            schema,
            SCHEMA,
            lateness_ms=lateness_ms,
            late=LATE,
            windows_text="" if windows is None else windows.text,
        )
        self._keys = keys
        places = [(i, parallelism) for i in range(parallelism)]
        given_states = zip((asked, content), states, strict=True)
        self.triggers, self.windows = (
            [Harness(spec, found, subtask=at, worker=Chosen.worker, begun_ms=begun_ms) for at in places]
            for spec, found in given_states
        )
        for trigger_at, window in zip(self.triggers, self.windows, strict=True):
            trigger_at.out.target = window.operator

    def send(self, batch: pa.RecordBatch) -> None:
        batches = [batch]
        if self._assign is not None:
            self._assign.send(batch)
            batches, self._assign.out.batches = self._assign.out.batches, []
        for one in batches:
            for at, part in zip(self.triggers, partition(one, self._keys, 128, self.parallelism), strict=True):
                if part is not None:
                    at.send(part)

    def watermark(self, watermark_ms: int) -> None:
        for one in self.triggers:
            one.operator.on_watermark(watermark_ms)

    def advance(self, more_ms: int, *, ticks: bool) -> None:
        for one in [*self.triggers, *self.windows]:
            if ticks:
                one.advance(more_ms)
            else:
                one.now_ms += more_ms

    def snapshot(self) -> list[list[Any]]:
        return [[one.snapshot() for one in part] for part in (self.triggers, self.windows)]

    def take(self) -> list[dict[str, Any]]:
        rows = [row for one in self.windows for row in one.out.rows()]
        for one in self.windows:
            one.out.batches.clear()
        return rows

    def late_records(self) -> list[dict[str, Any]]:
        return [r for one in self.triggers for batch in one.out.tagged.get(LATE, []) for r in batch.to_pylist()]


@pytest.fixture(autouse=True, params=MEMORY)
def _on_each_backend(request: pytest.FixtureRequest) -> Iterator[None]:
    with choose(request.param):
        yield


def batch_of(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, SCHEMA)


def by_key(rows: list[dict[str, Any]]) -> dict[Any, list[dict[str, Any]]]:
    found: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["key"], row["name"]), []).append(row)
    return found


ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "key": st.integers(0, 2) | st.sampled_from([-(2**63), 2**63 - 1]),
            "name": st.sampled_from(["", "ü"]),
            "v": st.none() | st.integers(0, 5),
            "ts": st.integers(-2_000, 5_000),
        }
    ),
    min_size=1,
    max_size=40,
)
IMITATED = [
    (Counts(purges=True, fires_at_end=False), Firing(records=COUNT, fires_at_end=False)),
    (Counts(purges=True, by_batch=True), Firing(records=COUNT)),
    (Counts(purges=False), Firing(records=COUNT, discards=False)),
    (Odd(R.FIRE_AND_PURGE), Firing(when=pl.col("v") % 2 == 1)),
    (Odd(R.FIRE), Firing(when=pl.col("v") % 2 == 1, discards=False)),
    (ByClock(purges=True), Firing(interval_ms=INTERVAL_MS)),
    (ByClock(purges=False), Firing(interval_ms=INTERVAL_MS, discards=False)),
]
histories = given(
    rows=ROWS, pair=st.sampled_from(IMITATED), aggregates=st.sampled_from([DECOMPOSED, KEPT]), data=st.data()
)


@pytest.mark.long
@pytest.mark.parametrize("_on_each_backend", ["memory"], indirect=True)
@settings(max_examples=150)
@histories
def test_a_trigger_gives_what_the_built_in_one_gives(**drawn: Any) -> None:
    check_global(**drawn)


@pytest.mark.long
@pytest.mark.parametrize("_on_each_backend", few([IN_FILES, "rocksdb"], 1), indirect=True)
@settings(max_examples=15)
@histories
def test_a_trigger_on_rocksdb_gives_what_the_built_in_one_gives(**drawn: Any) -> None:
    check_global(**drawn)


def check_global(
    rows: list[dict[str, Any]], pair: tuple[Trigger, Firing], aggregates: tuple[pl.Expr, ...], data: st.DataObject
) -> None:
    trigger, firing = pair
    operators = triggered_operators(("key", "name"), firing, aggregates, SCHEMA, "node")
    built_in, own = Shuffled(operators, 1), Chain(trigger, None, aggregates, data.draw(st.sampled_from([1, 2, 3, 5])))
    wanted: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    place, watermark_ms, now_ms = 0, -1, 1_000
    while place < len(rows):
        part = rows[place : place + data.draw(st.integers(1, 15))]
        place += len(part)
        built_in.send(0, batch_of(part))
        built_in.flush()
        own.send(batch_of(part))
        match data.draw(st.sampled_from(["nothing", "watermark", "clock", "clock without a tick", "restore"])):
            case "watermark":
                watermark_ms += data.draw(st.integers(1, 2_000))
                built_in.watermark(watermark_ms)
                own.watermark(watermark_ms)
            case "clock" | "clock without a tick" as how:
                more_ms = data.draw(st.integers(1, 2_500))
                now_ms += more_ms
                own.advance(more_ms, ticks=how == "clock")
                for one in built_in.windows:
                    if how == "clock":
                        one.advance(more_ms)
                    else:
                        one.now_ms = now_ms
            case "restore":
                states = own.snapshot()
                found += own.take()
                own = Chain(
                    trigger, None, aggregates, data.draw(st.sampled_from([1, 2, 3, 5])), states, begun_ms=now_ms
                )
    own.watermark(WATERMARK_MAX_MS)
    built_in.watermark(WATERMARK_MAX_MS)
    wanted += built_in.take()
    assert by_key(found + own.take()) == by_key(wanted)


WINDOWS = [tumbling(INTERVAL_MS), FixedWindows(1_000, 400, 100), CalendarWindows("d", 1, "Europe/Berlin")]
aligned = given(
    rows=ROWS,
    windows=st.sampled_from(WINDOWS),
    aggregates=st.sampled_from([DECOMPOSED, (*DECOMPOSED, pl.col("v").sort().alias("sorted"))]),
    lateness_ms=st.sampled_from([0, LATENESS_MS]),
    data=st.data(),
)


@pytest.mark.long
@pytest.mark.parametrize("_on_each_backend", ["memory"], indirect=True)
@settings(max_examples=150)
@aligned
def test_a_trigger_at_the_end_gives_what_windows_of_event_time_give(**drawn: Any) -> None:
    check_aligned(**drawn)


@pytest.mark.long
@pytest.mark.parametrize("_on_each_backend", few([IN_FILES, "rocksdb"], 1), indirect=True)
@settings(max_examples=15)
@aligned
def test_a_trigger_at_the_end_on_rocksdb_gives_what_windows_of_event_time_give(**drawn: Any) -> None:
    check_aligned(**drawn)


def check_aligned(
    rows: list[dict[str, Any]],
    windows: AlignedWindows,
    aggregates: tuple[pl.Expr, ...],
    lateness_ms: int,
    data: st.DataObject,
) -> None:
    aggregate = WindowedAggregate(("key", "name"), "ts", windows, aggregates, Emission(lateness_ms, LATE))
    operators = window_operators(aggregate, SCHEMA, "node")
    made = {"lateness_ms": lateness_ms}
    built_in = Shuffled(operators, 1)
    own = Chain(AtEnd(), windows, aggregates, data.draw(st.sampled_from([1, 2, 3, 5])), **made)
    found: list[dict[str, Any]] = []
    late: list[dict[str, Any]] = []
    place, watermark_ms = 0, -3_000
    while place < len(rows):
        part = rows[place : place + data.draw(st.integers(1, 15))]
        place += len(part)
        built_in.send(0, batch_of(part))
        own.send(batch_of(part))
        match data.draw(st.sampled_from(["nothing", "watermark", "restore"])):
            case "watermark":
                watermark_ms += data.draw(st.integers(1, 2_000))
                built_in.watermark(watermark_ms)
                own.watermark(watermark_ms)
            case "restore":
                states = own.snapshot()
                found, late = found + own.take(), late + own.late_records()
                own = Chain(AtEnd(), windows, aggregates, data.draw(st.sampled_from([1, 2, 3, 5])), states, **made)
    own.watermark(WATERMARK_MAX_MS)
    built_in.watermark(WATERMARK_MAX_MS)
    last = {(r["key"], r["name"], r["window_start"]): r for r in found + own.take()}
    assert last == {(r["key"], r["name"], r["window_start"]): r for r in built_in.take()}
    wanted = [r for one in built_in.windows for batch in one.out.tagged.get(LATE, []) for r in batch.to_pylist()]
    order = [name for name in SCHEMA.names if name != "v"]
    assert sorted(late + own.late_records(), key=lambda row: [(str(row[n])) for n in [*order, "v"]]) == sorted(
        wanted, key=lambda row: [(str(row[n])) for n in [*order, "v"]]
    )


def row(v: int | None, *, ts: int = 0, key: int = 1) -> dict[str, Any]:
    return {"key": key, "name": "", "v": v, "ts": ts}


LIST = (pl.col("v").alias("vs"),)


def test_a_window_that_was_forgotten_stays_so_after_a_restore_at_another_parallelism() -> None:
    """Subtasks are at different watermarks at a barrier; what one of them has forgotten is late everywhere."""
    own = Chain(AtEnd(), tumbling(INTERVAL_MS), LIST, 2)
    own.send(batch_of([row(key, key=key) for key in range(20)]))
    for one in own.triggers[:1]:
        one.operator.on_watermark(5_000)
    ended = {found["key"] for found in own.take()}
    assert 0 < len(ended) < 20
    for parallelism in (1, 3, 2):
        own = Chain(AtEnd(), tumbling(INTERVAL_MS), LIST, parallelism, own.snapshot())
    own.send(batch_of([row(100 + key, key=key) for key in range(20)]))
    own.watermark(WATERMARK_MAX_MS)
    assert {found["key"]: found["vs"] for found in own.take()} == {
        key: [key, 100 + key] for key in range(20) if key not in ended
    }
    assert {late["key"] for late in own.late_records()} == ended


def test_a_record_of_several_windows_is_late_once() -> None:
    own = Chain(AtEnd(), FixedWindows(1_000, 250), LIST, 3)
    own.watermark(10_000)
    own.send(batch_of([row(1, ts=100)]))
    assert own.late_records() == [row(1, ts=100)]
    assert sum(one.context.metrics.counters.get("late", 0) for one in own.triggers) == 1


def test_what_only_the_end_ended_takes_more_input() -> None:
    own = Chain(AtEnd(), tumbling(INTERVAL_MS), LIST, 1)
    own.send(batch_of([row(1)]))
    own.watermark(WATERMARK_MAX_MS)
    assert [found["vs"] for found in own.take()] == [[1]]
    again = Chain(AtEnd(), tumbling(INTERVAL_MS), LIST, 2, own.snapshot())
    for one in [*again.triggers, *again.windows]:
        one.operator.on_resumed()
    again.send(batch_of([row(2)]))
    again.watermark(WATERMARK_MAX_MS)
    assert [found["vs"] for found in again.take()] == [[2]]
    assert again.late_records() == []


@pytest.mark.parametrize("fires_at_end", [True, False])
def test_the_end_emits_what_has_not_fired_if_the_trigger_says_so(fires_at_end: bool) -> None:
    own = Chain(Counts(purges=False, fires_at_end=fires_at_end), tumbling(INTERVAL_MS), LIST, 1)
    own.send(batch_of([row(v) for v in range(4)]))
    own.watermark(WATERMARK_MAX_MS)
    assert [found["vs"] for found in own.take()] == [[0, 1, 2], *([[0, 1, 2, 3]] if fires_at_end else [])]


class Purges(Trigger):
    """Does what the records say."""

    def on_element(self, row: dict[str, Any], context: TriggerContext) -> TriggerResult:
        return TriggerResult(row["v"] % 4)


@pytest.mark.parametrize("aggregates", [LIST, (pl.len().alias("n"), pl.col("v").sum().alias("total"))])
def test_fires_and_purges_within_a_batch_are_in_order(aggregates: tuple[pl.Expr, ...]) -> None:
    values = [0, 4, 1, 2, 0, 3, 1, 8, 2, 1, 1, 3, 3, 2, 1]
    wanted: list[list[int]] = []
    held: list[int] = []
    for v in values:
        held.append(v)
        if v % 4 & 1:
            wanted.append(list(held))
        if v % 4 & 2:
            held = []
    for size in (1, 2, 4, len(values)):
        own = Chain(Purges(), None, aggregates, 1)
        for at in range(0, len(values), size):
            own.send(batch_of([row(v) for v in values[at : at + size]]))
        if aggregates is LIST:
            assert [found["vs"] for found in own.take()] == wanted
        else:
            assert [(found["n"], found["total"]) for found in own.take()] == [(len(vs), sum(vs)) for vs in wanted]


class Wrong(Trigger):
    def __init__(self, result: Any) -> None:
        self.result = result

    def on_batch(self, rows: pl.DataFrame, context: TriggerContext) -> Any:
        return self.result


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "not iterable"),
        ([R.FIRE], "returned 1 results for 2 records"),
        (["fire", "fire"], "must return a TriggerResult, but returned"),
        ([True, False], "must return a TriggerResult"),
    ],
)
def test_a_wrong_result_names_the_operator_and_the_key(result: Any, message: str) -> None:
    own = Chain(Wrong(result), None, LIST, 1)
    with pytest.raises(UserFunctionError, match=message) as caught:
        own.send(batch_of([row(1), row(2)]))
    assert str(caught.value).startswith("operator 'node': ")
    assert "its function failed on 2 records of key" in str(caught.value).splitlines()[0]


class Forgets(Trigger):
    """Registers timers of both times that come after its window, and keeps state."""

    def open(self, state: StateHandle) -> None:
        self.seen = state.list("seen", pa.int64())

    def on_batch(self, rows: pl.DataFrame, context: TriggerContext) -> TriggerResult:
        self.seen.extend(rows["v"].to_list())
        context.timers.register_event_time(50_000)
        context.timers.register_processing_time(context.timers.processing_time_ms + 60_000)
        return R.CONTINUE

    def on_event_time(self, time_ms: int, context: TriggerContext) -> TriggerResult:
        raise AssertionError("its window is gone")

    def on_processing_time(self, time_ms: int, context: TriggerContext) -> TriggerResult:
        raise AssertionError("its window is gone")


def test_nothing_of_a_window_is_left_when_it_is_over() -> None:
    own = Chain(Forgets(), tumbling(INTERVAL_MS), LIST, 1)
    own.send(batch_of([row(1), row(2)]))
    own.watermark(1_500)
    assert own.take() == []
    states = own.snapshot()
    own = Chain(Forgets(), tumbling(INTERVAL_MS), LIST, 1, states, begun_ms=90_000)
    own.advance(10_000, ticks=True)
    own.watermark(60_000)
    assert all(rows == 0 for one in [*own.triggers, *own.windows] for rows in one.operator.freeze().rows().values())  # type: ignore[union-attr]


def test_another_size_of_windows_is_another_state() -> None:
    made = {"aggregates": LIST, "schema": SCHEMA, "lateness_ms": 0, "fires_at_end": True}
    texts = {
        commanded_window("node", ("key",), windows=windows, **made).state_text()  # type: ignore[arg-type]
        for windows in (None, tumbling(1_000), tumbling(2_000), FixedWindows(1_000, 500))
    }
    assert len(texts) == 4


def test_a_name_of_headgate_is_refused() -> None:
    class Clashes(Trigger):
        def open(self, state: StateHandle) -> None:
            state.value("headgate closes", pa.bool_())

    with pytest.raises(UsageError, match="two states are named"):
        trigger_spec("asked", ("key",), Clashes(), SCHEMA, SCHEMA)
