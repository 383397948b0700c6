"""Windows that a count, a condition or a clock ends, against a model that takes records one by one."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operators.harness import BORN_MS, Shuffled
from tests.state.backends import DATABASES, MEMORY, choose

from headgate.errors import UsageError
from headgate.operators.base import WATERMARK_MAX_MS
from headgate.operators.windows.aligned_windows import WindowOperators
from headgate.operators.windows.triggered_windows import Firing, triggered_operators

SCHEMA = pa.schema(
    [("key", pa.int64()), ("name", pa.large_string()), ("v", pa.int64()), ("f", pa.float64()), ("ts", pa.int64())]
)
EPOCH = datetime(1970, 1, 1)
DECOMPOSED = (
    pl.len().alias("n"),
    pl.col("v").sum().alias("total"),
    pl.col("v").count().alias("known"),
    pl.col("v").min().alias("low"),
    pl.col("f").max().alias("high"),
    pl.col("f").mean().alias("mean"),
)
KEPT = (pl.col("v").alias("in_order"), pl.col("v").n_unique().alias("distinct"), *DECOMPOSED)
INTERVAL_MS = 1_000
IS_ODD = pl.col("v") % 2 == 1
TRIGGERS = [
    Firing(records=1),
    Firing(records=3, fires_at_end=False),
    Firing(records=3, discards=False),
    Firing(when=IS_ODD),
    Firing(when=IS_ODD, discards=False),
    Firing(interval_ms=INTERVAL_MS, has_bounds=True),
    Firing(interval_ms=INTERVAL_MS, discards=False),
    Firing(interval_ms=INTERVAL_MS, is_event_time=True),
    Firing(interval_ms=INTERVAL_MS, is_event_time=True, discards=False),
]


def batch_of(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, SCHEMA)


def operators_of(trigger: Firing, aggregates: tuple[pl.Expr, ...], keys: tuple[str, ...] = ("key",)) -> WindowOperators:
    return triggered_operators(keys, trigger, aggregates, SCHEMA, "node", time_column="ts")


class Model:
    """The open window of each key as a list of rows, one record at a time."""

    def __init__(self, trigger: Firing, keys: tuple[str, ...], aggregates: tuple[pl.Expr, ...]) -> None:
        self._trigger, self._keys, self._aggregates = trigger, keys, aggregates
        self._open: dict[Any, list[dict[str, Any]]] = {}
        self._since: dict[Any, int] = {}
        self._due: dict[Any, int] = {}
        self.results: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any], now_ms: int) -> None:
        key = tuple(row[name] for name in self._keys)
        self._open.setdefault(key, []).append(row)
        self._since[key] = self._since.get(key, 0) + 1
        if self._trigger.interval_ms:
            time_ms = row["ts"] if self._trigger.is_event_time else now_ms
            self._due.setdefault(key, (time_ms // INTERVAL_MS + 1) * INTERVAL_MS)
        elif self._since[key] == self._trigger.records or (self._trigger.when is not None and (row["v"] or 0) % 2):
            self._fire(key)

    def time(self, now_ms: int) -> None:
        for key in [key for key, due in self._due.items() if due <= now_ms]:
            self._fire(key)

    def end(self) -> None:
        if self._trigger.fires_at_end:
            for key in list(self._since):
                self._fire(key)

    def _fire(self, key: Any) -> None:
        frame = pl.DataFrame(batch_of(self._open[key]))
        values = frame.group_by(pl.lit(0)).agg(*self._aggregates).drop("literal").row(0, named=True)
        row = dict(zip(self._keys, key, strict=True))
        due_ms = self._due.pop(key, 0)
        if self._trigger.has_bounds:
            end = EPOCH + timedelta(milliseconds=due_ms)
            row |= {"window_start": end - timedelta(milliseconds=INTERVAL_MS), "window_end": end}
        self.results.append({**row, **values})
        del self._since[key]
        if self._trigger.discards:
            del self._open[key]


ROW = st.fixed_dictionaries(
    {
        "key": st.integers(0, 3) | st.sampled_from([-(2**63), 2**63 - 1]),
        "name": st.sampled_from(["a", "", "ü"]),
        "v": st.none() | st.integers(0, 5),
        "f": st.none() | st.integers(-(2**20), 2**20).map(float),
        "ts": st.integers(0, 5_000),
    }
)


@pytest.fixture(autouse=True, params=MEMORY)
def _on_each_backend(request: pytest.FixtureRequest) -> Iterator[None]:
    with choose(request.param):
        yield


histories = given(
    rows=st.lists(ROW, min_size=1, max_size=50),
    keys=st.sampled_from([("key",), ("name", "key")]),
    trigger=st.sampled_from(TRIGGERS),
    aggregates=st.sampled_from([DECOMPOSED, KEPT]),
    data=st.data(),
)


@pytest.mark.long
@pytest.mark.parametrize("_on_each_backend", ["memory"], indirect=True)
@settings(max_examples=200)
@histories
def test_any_division_into_batches_gives_what_single_records_give(**drawn: Any) -> None:
    check_history(**drawn)


@pytest.mark.parametrize("_on_each_backend", DATABASES, indirect=True)
@settings(max_examples=20)
@histories
def test_open_windows_on_rocksdb_are_what_single_records_give(**drawn: Any) -> None:
    check_history(**drawn)


def by_key(rows: list[dict[str, Any]], keys: tuple[str, ...]) -> dict[Any, list[dict[str, Any]]]:
    """Return the results of each key, in order."""
    found: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return found


def check_history(
    rows: list[dict[str, Any]],
    keys: tuple[str, ...],
    trigger: Firing,
    aggregates: tuple[pl.Expr, ...],
    data: st.DataObject,
) -> None:
    operators = operators_of(trigger, aggregates, keys)
    assert (operators.combine is not None) == (
        aggregates is DECOMPOSED and bool(trigger.interval_ms) and not trigger.is_event_time
    )
    model, pipeline = Model(trigger, keys, aggregates), Shuffled(operators, data.draw(st.sampled_from([1, 2, 3, 5])))
    found: list[dict[str, Any]] = []
    place, watermark_ms, now_ms = 0, -1, 1_000
    while place < len(rows):
        part = rows[place : place + data.draw(st.integers(1, 25))]
        place += len(part)
        pipeline.send(data.draw(st.integers(0, pipeline.parallelism - 1)), batch_of(part))
        for row in part:
            model.add(row, BORN_MS + now_ms)
        match data.draw(st.sampled_from(["nothing", "watermark", "clock", "clock without a tick", "restore"])):
            case "watermark":
                watermark_ms += data.draw(st.integers(1, 2_000))
                pipeline.watermark(watermark_ms)
                if trigger.is_event_time:
                    model.time(watermark_ms + 1)
            case "clock" | "clock without a tick" as how:
                more_ms = data.draw(st.integers(1, 2_500))
                now_ms += more_ms
                for one in pipeline.windows:
                    if how == "clock":
                        one.advance(more_ms)
                    else:
                        one.now_ms += more_ms
                if not trigger.is_event_time:
                    model.time(BORN_MS + now_ms)
            case "restore":
                states = pipeline.snapshot()
                found += pipeline.take()
                pipeline = Shuffled(operators, data.draw(st.sampled_from([1, 2, 3, 5])), states, begun_ms=now_ms)
    pipeline.watermark(WATERMARK_MAX_MS)
    model.end()
    assert by_key(found + pipeline.take(), keys) == by_key(model.results, keys)


def sent(*values: int, key: int = 1, ts: int = 0) -> pa.RecordBatch:
    return batch_of([{"key": key, "name": "", "v": v, "f": 0.0, "ts": ts} for v in values])


LIST = (pl.col("v").alias("vs"),)


def test_an_end_that_is_restored_does_not_fire_again() -> None:
    for trigger in TRIGGERS:
        operators = operators_of(trigger, LIST)
        pipeline = Shuffled(operators, 1)
        pipeline.send(0, sent(2, 4))
        pipeline.watermark(WATERMARK_MAX_MS)
        states = pipeline.snapshot()
        again = Shuffled(operators, 2, states)
        again.watermark(WATERMARK_MAX_MS)
        assert again.take() == []


def test_a_smaller_count_after_a_restore_fires_with_the_next_record() -> None:
    pipeline = Shuffled(operators_of(Firing(records=5), LIST), 1)
    pipeline.send(0, sent(1, 2, 3, 4))
    again = Shuffled(operators_of(Firing(records=2), LIST), 1, pipeline.snapshot())
    again.send(0, sent(5, 6, 7, 8))
    assert [row["vs"] for row in again.take()] == [[1, 2, 3, 4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("when", "message"),
    [
        (pl.col("v"), "not true or false"),
        (pl.col("nothing") > 1, "nothing"),
        (pl.col("v") > pl.col("v").mean(), "condition"),
    ],
)
def test_a_condition_is_of_one_record(when: pl.Expr, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        operators_of(Firing(when=when), LIST)


def test_only_the_key_may_be_aggregated() -> None:
    pipeline = Shuffled(operators_of(Firing(records=2), (pl.col("key").n_unique().alias("u"),)), 1)
    pipeline.send(0, sent(1, 2, 3))
    assert pipeline.take() == [{"key": 1, "u": 1}]


@pytest.mark.parametrize("discards", [True, False])
def test_records_are_counted_over_batches(discards: bool) -> None:
    pipeline = Shuffled(operators_of(Firing(records=3, discards=discards), LIST), 1)
    for value in range(7):
        pipeline.send(0, sent(value))
    assert [row["vs"][-3:] for row in pipeline.take()] == [[0, 1, 2], [3, 4, 5]]
