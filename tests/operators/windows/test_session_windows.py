"""Session windows against a model that takes records one by one."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operators.harness import Shuffled
from tests.state.backends import DATABASES, MEMORY, choose

from headgate.errors import UsageError
from headgate.operators.base import WATERMARK_MAX_MS
from headgate.operators.windows.aligned_windows import WindowOperators
from headgate.operators.windows.session_windows import session_operators
from headgate.operators.windows.window_assigner import tumbling
from headgate.operators.windows.window_plan import WindowedAggregate

GAP_MS = 100
SCHEMA = pa.schema(
    [
        ("key", pa.int64()),
        ("name", pa.large_string()),
        ("at", pa.timestamp("us")),
        ("v", pa.int64()),
        ("f", pa.float64()),
    ]
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
KEPT = (pl.col("v").n_unique().alias("distinct"), pl.col("v").alias("in_order"), *DECOMPOSED)


def at(us: int) -> datetime:
    return EPOCH + timedelta(microseconds=us)


def batch_of(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, SCHEMA)


def operators_of(aggregates: tuple[pl.Expr, ...], keys: tuple[str, ...] = ("key",)) -> WindowOperators:
    return session_operators(WindowedAggregate(keys, "at", tumbling(GAP_MS), aggregates), SCHEMA, "node")


class Model:
    """Sessions as lists of rows, one record at a time."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._keys = keys
        self._open: dict[Any, list[tuple[datetime, datetime, list[dict[str, Any]]]]] = {}
        self._horizon = datetime.min
        self.late = 0
        self.ended: list[tuple[Any, datetime, datetime, list[dict[str, Any]]]] = []

    def add(self, row: dict[str, Any]) -> None:
        key = tuple(row[name] for name in self._keys)
        start, end, rows = row["at"], row["at"] + timedelta(milliseconds=GAP_MS), [row]
        others = []
        for session in self._open.get(key, []):
            if session[0] < end and start < session[1]:
                start, end, rows = min(start, session[0]), max(end, session[1]), session[2] + rows
            else:
                others.append(session)
        if end <= self._horizon:
            self.late += 1
            return
        self._open[key] = [*others, (start, end, rows)]

    def watermark(self, watermark_ms: int) -> None:
        self._horizon = datetime.max if watermark_ms == WATERMARK_MAX_MS else at((watermark_ms + 1) * 1_000)
        for key, sessions in self._open.items():
            self.ended += [(key, *session) for session in sessions if session[1] <= self._horizon]
            self._open[key] = [session for session in sessions if session[1] > self._horizon]

    def results(self, aggregates: tuple[pl.Expr, ...]) -> list[dict[str, Any]]:
        found = []
        for key, start, end, rows in self.ended:
            values = (
                pl.DataFrame(batch_of(rows)).group_by(pl.lit(0)).agg(*aggregates).drop("literal").row(0, named=True)
            )
            found.append(
                {**dict(zip(self._keys, key, strict=True)), "window_start": start, "window_end": end, **values}
            )
        return found


def ordered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    sets = [{**row, "in_order": sorted(map(str, row["in_order"]))} if "in_order" in row else row for row in rows]
    return sorted(sets, key=lambda row: (row.get("key", 0), row.get("name", ""), row["window_start"]))


ROW = st.fixed_dictionaries(
    {
        "key": st.integers(0, 3) | st.sampled_from([-(2**63), 2**63 - 1]),
        "name": st.sampled_from(["a", "", "ü"]),
        "at": st.integers(0, 2_000).map(lambda tick: at(tick * 1_250)),
        "v": st.none() | st.integers(-5, 5),
        "f": st.none() | st.integers(-(2**20), 2**20).map(float),
    }
)


@pytest.fixture(autouse=True, params=MEMORY)
def _on_each_backend(request: pytest.FixtureRequest) -> Iterator[None]:
    with choose(request.param):
        yield


histories = given(
    rows=st.lists(ROW, min_size=1, max_size=50),
    keys=st.sampled_from([("key",), ("name",), ("name", "key")]),
    aggregates=st.sampled_from([DECOMPOSED, KEPT]),
    data=st.data(),
)


@pytest.mark.long
@pytest.mark.parametrize("_on_each_backend", ["memory"], indirect=True)
@settings(max_examples=150)
@histories
def test_any_division_into_batches_gives_what_single_records_give(**drawn: Any) -> None:
    check_history(**drawn)


@pytest.mark.parametrize("_on_each_backend", DATABASES, indirect=True)
@settings(max_examples=15)
@histories
def test_sessions_on_rocksdb_are_what_single_records_give(**drawn: Any) -> None:
    check_history(**drawn)


def check_history(
    rows: list[dict[str, Any]],
    keys: tuple[str, ...],
    aggregates: tuple[pl.Expr, ...],
    data: st.DataObject,
) -> None:
    operators = operators_of(aggregates, keys)
    assert (operators.combine is not None) == (aggregates is DECOMPOSED)
    slack = data.draw(st.sampled_from([0, 100, 800]))
    rows = sorted(rows, key=lambda row: row["at"] + timedelta(milliseconds=data.draw(st.integers(0, slack))))
    model, pipeline = Model(keys), Shuffled(operators, data.draw(st.sampled_from([1, 2, 3, 5])))
    found: list[dict[str, Any]] = []
    late, place, latest_ms = 0, 0, 0
    while place < len(rows):
        part = rows[place : place + data.draw(st.integers(1, 25))]
        place += len(part)
        pipeline.send(data.draw(st.integers(0, pipeline.parallelism - 1)), batch_of(part))
        for row in part:
            model.add(row)
            latest_ms = max(latest_ms, (row["at"] - EPOCH) // timedelta(milliseconds=1))
        match data.draw(st.sampled_from(["nothing", "watermark", "watermark", "restore"])):
            case "watermark":
                latest_ms = max(latest_ms, data.draw(st.integers(0, 100)))
                pipeline.watermark(latest_ms - 50)
                model.watermark(latest_ms - 50)
            case "restore":
                states = pipeline.snapshot()
                found += pipeline.take()
                late += pipeline.late()
                pipeline = Shuffled(operators, data.draw(st.sampled_from([1, 2, 3, 5])), states)
    pipeline.watermark(WATERMARK_MAX_MS)
    model.watermark(WATERMARK_MAX_MS)
    assert late + pipeline.late() == model.late
    assert ordered(found + pipeline.take()) == ordered(model.results(aggregates))


def sent(*rows: tuple[int, int], key: int = 1) -> pa.RecordBatch:
    return batch_of([{"key": key, "name": "", "at": at(ms * 1_000), "v": v, "f": 0.0} for ms, v in rows])


COUNT = (pl.len().alias("n"),)


def spans(rows: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
    ms = timedelta(milliseconds=1)
    return [((r["window_start"] - EPOCH) // ms, (r["window_end"] - EPOCH) // ms, r["n"]) for r in rows]


def test_a_record_exactly_the_gap_later_begins_a_session() -> None:
    pipeline = Shuffled(operators_of(COUNT), 1)
    pipeline.send(0, sent((0, 1), (100, 1), (199, 1)))
    pipeline.watermark(98)
    assert pipeline.take() == []
    pipeline.watermark(99)
    assert spans(pipeline.take()) == [(0, 100, 1)]
    pipeline.watermark(WATERMARK_MAX_MS)
    assert spans(pipeline.take()) == [(100, 299, 2)]


def test_an_old_record_joins_a_session_that_is_open_and_is_late_without_one() -> None:
    pipeline = Shuffled(operators_of(COUNT), 1)
    pipeline.send(0, sent((0, 1), (90, 1), (180, 1)))
    pipeline.watermark(200)
    pipeline.send(0, sent((50, 1)))
    pipeline.send(0, sent((50, 1), key=2))
    pipeline.watermark(WATERMARK_MAX_MS)
    assert spans(pipeline.take()) == [(0, 280, 4)]
    assert pipeline.late() == 1


def test_an_old_record_that_comes_before_what_would_take_it_is_late() -> None:
    results = []
    for rows in ([(20, 1), (110, 1)], [(110, 1), (20, 1)]):
        for parts in ([rows], [rows[:1], rows[1:]]):
            pipeline = Shuffled(operators_of(COUNT), 1)
            pipeline.watermark(150)
            for part in parts:
                pipeline.send(0, sent(*part))
            pipeline.watermark(WATERMARK_MAX_MS)
            results.append((spans(pipeline.take()), pipeline.late()))
    first, second = ([(110, 210, 1)], 1), ([(20, 210, 2)], 0)
    assert results == [first, first, second, second]


def test_more_input_after_a_restored_end_is_not_late() -> None:
    pipeline = Shuffled(operators_of(COUNT), 1)
    pipeline.send(0, sent((0, 1)))
    pipeline.watermark(50)
    pipeline.watermark(WATERMARK_MAX_MS)
    assert spans(pipeline.take()) == [(0, 100, 1)]
    again = Shuffled(operators_of(COUNT), 2, pipeline.snapshot())
    for window in again.windows:
        window.operator.on_resumed()
    again.send(0, sent((60, 1)))
    again.watermark(WATERMARK_MAX_MS)
    assert spans(again.take()) == [(60, 160, 1)]
    assert again.late() == 0


@pytest.mark.parametrize("column", [pa.array([0, 40]), pa.array([0, 40_000], pa.timestamp("us"))])
def test_every_kind_of_time_gives_the_same_sessions(column: pa.Array) -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([1, 1]), column], names=["key", "at"])
    aggregate = WindowedAggregate(("key",), "at", tumbling(GAP_MS), COUNT)
    pipeline = Shuffled(session_operators(aggregate, batch.schema, "node"), 1)
    pipeline.send(0, batch)
    pipeline.watermark(WATERMARK_MAX_MS)
    assert spans(pipeline.take()) == [(0, 140, 2)]


def test_result_columns_must_differ() -> None:
    with pytest.raises(UsageError, match="same name"):
        operators_of((pl.len().alias("window_start"),))
