"""Windowed aggregation against one Polars query over the whole input."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal
from tests.operators.harness import Harness, Shuffled
from tests.state.backends import DATABASES, MEMORY, choose

from headgate.errors import UsageError
from headgate.model.graph import OutputTag
from headgate.model.progress import Lateness
from headgate.operators.base import WATERMARK_MAX_MS, RestoredState
from headgate.operators.specs import state_text
from headgate.operators.timestamps import WithTimestampsSpec
from headgate.operators.windows.aligned_windows import UPDATE_MS, WindowOperators, window_operators
from headgate.operators.windows.window_assigner import FixedWindows, tumbling
from headgate.operators.windows.window_plan import Emission, WindowedAggregate

SIZE_MS = 1_000
SECONDS = tumbling(SIZE_MS)
SCHEMA = pa.schema(
    [
        ("key", pa.int64()),
        ("name", pa.large_string()),
        ("flag", pa.bool_()),
        ("i64", pa.int64()),
        ("i32", pa.int32()),
        ("u64", pa.uint64()),
        ("f64", pa.float64()),
        ("at", pa.timestamp("us")),
        ("ts", pa.int64()),
        ("big", pa.uint64()),
        ("real", pa.float64()),
    ]
)
COLUMNS = ("flag", "i64", "i32", "u64", "f64", "at")
EVERY = (
    pl.len().alias("n"),
    *(pl.col(c).count().alias(f"count_{c}") for c in COLUMNS),
    *(getattr(pl.col(c), a)().alias(f"{a}_{c}") for c in COLUMNS for a in ("min", "max")),
    *(pl.col(c).sum().alias(f"sum_{c}") for c in COLUMNS[:-1]),
    *(pl.col(c).mean().alias(f"mean_{c}") for c in ("flag", "i32", "f64")),
    (pl.col("i64") * 2 + pl.col("i32")).sum().alias("computed"),
    (pl.col("name") == "b").sum().alias("named"),
    pl.col("name").len().alias("m"),
)
BUFFERED = (pl.col("i64").n_unique().alias("u"), (pl.col("i64").sum() / pl.len()).alias("r"), *EVERY[:1])

ROW = st.fixed_dictionaries(
    {
        "key": st.integers(-3, 3) | st.integers(-(2**63), 2**63 - 1),
        "name": st.sampled_from(["a", "b", "", "ü"]),
        "flag": st.none() | st.booleans(),
        "i64": st.none() | st.integers(-(2**55), 2**55),  # no sum of them is too large
        "i32": st.none() | st.integers(-(2**23), 2**23),
        "u64": st.none() | st.integers(0, 2**56),
        "f64": st.none() | st.integers(-(2**30), 2**30).map(float) | st.just(float("nan")),
        "at": st.none() | st.integers(0, 2**50),
        "ts": st.integers(0, 12_000),
        "big": st.sampled_from([0, 1, 2**63, 2**64 - 1]),
        "real": st.sampled_from([-0.0, 0.0, 1.5, -1.5, -2.5, 1e300]),
    }
)


def batch_of(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    columns = [pa.array([row[f.name] for row in rows], f.type) for f in SCHEMA]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def starts_ms(ts: int, windows: FixedWindows) -> list[int]:
    """Return the starts of the windows that ``ts`` lies in, found one by one."""
    last = (ts - windows.offset_ms) // windows.slide_ms * windows.slide_ms + windows.offset_ms
    return list(range(last, ts - windows.size_ms, -windows.slide_ms))


def expected(
    rows: list[dict[str, Any]],
    keys: list[str],
    aggregates: tuple[pl.Expr, ...],
    windows: FixedWindows = SECONDS,
) -> pl.DataFrame:
    starts = pl.Series([starts_ms(row["ts"], windows) for row in rows], dtype=pl.List(pl.Int64))
    frame = pl.DataFrame(pl.from_arrow(batch_of(rows))).with_columns(start=starts).explode("start")
    start = pl.from_epoch("start", "ms").cast(pl.Datetime("us"))
    frame = frame.with_columns(window_start=start, window_end=start + pl.duration(milliseconds=windows.size_ms))
    return frame.group_by(*keys, "window_start", "window_end").agg(*aggregates).sort("window_start", *keys)


def frame_of(batches: list[pa.RecordBatch], operators: WindowOperators) -> pl.DataFrame:
    return pl.DataFrame(pl.from_arrow(pa.Table.from_batches(batches, schema=operators.output)))


@pytest.fixture(autouse=True, params=MEMORY)
def _on_each_backend(request: pytest.FixtureRequest) -> Iterator[None]:
    with choose(request.param):
        yield


PARALLELISMS = st.sampled_from([1, 2, 3, 5])
WINDOWS = [
    tumbling(SIZE_MS),
    tumbling(SIZE_MS, 300),
    FixedWindows(3_000, 1_000),
    FixedWindows(2_500, 1_000, 100),
    FixedWindows(5_000, 500),
    FixedWindows(1_700, 700, 699),
]

histories = given(
    rows=st.lists(ROW, min_size=1, max_size=60),
    keys=st.sampled_from([("key",), ("name",), ("name", "key"), ("key", "name", "ts"), ("big",), ("real",)]),
    aggregates=st.sampled_from([EVERY, BUFFERED, (*BUFFERED[:1], *EVERY)]),
    windows=st.sampled_from(WINDOWS),
    data=st.data(),
)


@pytest.mark.long
@pytest.mark.parametrize("_on_each_backend", ["memory"], indirect=True)
@settings(max_examples=120)
@histories
def test_any_batching_flushing_and_restoring_gives_what_one_query_gives(**drawn: Any) -> None:
    check_history(**drawn)


@pytest.mark.parametrize("_on_each_backend", DATABASES, indirect=True)
@settings(max_examples=15)
@histories
def test_any_windows_on_rocksdb_give_what_one_query_gives(**drawn: Any) -> None:
    check_history(**drawn)


def check_history(
    rows: list[dict[str, Any]],
    keys: tuple[str, ...],
    aggregates: tuple[pl.Expr, ...],
    windows: FixedWindows,
    data: st.DataObject,
) -> None:
    aggregate = WindowedAggregate(keys, "ts", windows, aggregates)
    operators = window_operators(aggregate, SCHEMA, "node")
    assert (operators.combine is not None) == (aggregates is EVERY)
    # any order within the out-of-orderness: event times may run at most 2 s behind the latest one
    rows = sorted(rows, key=lambda row: row["ts"] + data.draw(st.integers(0, 2_000)))
    pipeline = Shuffled(operators, data.draw(PARALLELISMS))
    done: list[pa.RecordBatch] = []
    at, latest = 0, 0
    while at < len(rows):
        size = data.draw(st.integers(1, 25))
        batch = rows[at : at + size]
        at += size
        pipeline.send(data.draw(st.integers(0, pipeline.parallelism - 1)), batch_of(batch))
        latest = max(latest, *(row["ts"] for row in batch))
        match data.draw(st.sampled_from(["nothing", "flush", "watermark", "ahead", "restore", "pass"])):
            case "flush":
                pipeline.flush()
            case "watermark":
                pipeline.watermark(latest - 2_001)
            case "ahead":  # of what the others will restore
                pipeline.flush()
                pipeline.windows[0].operator.on_watermark(latest - 2_001)
            case "pass":
                for combine in pipeline.before:
                    pipeline.flush()
                    combine.operator._pass_rows = 30  # type: ignore[attr-defined]
            case "restore":
                states = pipeline.snapshot()
                done += pipeline.results()
                pipeline = Shuffled(operators, data.draw(PARALLELISMS), states)
    pipeline.watermark(WATERMARK_MAX_MS)
    assert pipeline.late() == 0
    for batch in done + pipeline.results():
        frame = frame_of([batch], operators)
        assert frame.equals(frame.sort("window_start", *keys))
    found = frame_of(done + pipeline.results(), operators).sort("window_start", *keys)
    assert_frame_equal(found, expected(rows, list(keys), aggregates, windows), rel_tol=1e-9)


def aggregated(*aggregates: pl.Expr, keys: tuple[str, ...] = ("key",)) -> WindowOperators:
    return window_operators(WindowedAggregate(keys, "ts", tumbling(SIZE_MS), aggregates), SCHEMA, "counts")


combined_and_not = pytest.mark.parametrize("aggregate", [pl.len().alias("n"), pl.col("i64").n_unique().alias("n")])
"""One that decomposes into partial results, and one for which the records are kept."""


def row(ts: int, key: int = 1, **values: object) -> dict[str, Any]:
    return {**dict.fromkeys(SCHEMA.names), "key": key, "ts": ts, **values}


@combined_and_not
def test_late_records_are_dropped_and_counted_one_by_one(aggregate: pl.Expr) -> None:
    pipeline = Shuffled(aggregated(aggregate), 2)
    pipeline.send(0, batch_of([row(10), row(20, 2), row(1_500, i64=1)]))
    pipeline.watermark(998)
    assert pipeline.results() == []
    pipeline.watermark(999)
    assert sum(b.num_rows for b in pipeline.results()) == 2
    pipeline.send(0, batch_of([row(999), row(999), row(0, 2), row(1_000, i64=2)]))
    pipeline.watermark(WATERMARK_MAX_MS)
    assert pipeline.late() == 3
    assert [r["n"] for b in pipeline.results() for r in b.to_pylist() if r["window_start"].second == 1] == [2]


@combined_and_not
@pytest.mark.parametrize("again", [False, True])
def test_keys_whose_windows_fired_further_do_not_fire_again_and_the_others_lose_nothing(
    aggregate: pl.Expr, again: bool
) -> None:
    """Former subtasks were at different watermarks: one had fired the first window of its keys, one had not."""
    operators = aggregated(aggregate)
    first = Shuffled(operators, 2)
    keys = range(20)
    first.send(0, batch_of([row(10, key, i64=1) for key in keys]))
    first.flush()
    ahead = first.windows[1]
    ahead.operator.on_watermark(999)
    fired = {r["key"] for r in ahead.out.rows()}
    assert 0 < len(fired) < len(keys)
    states = first.snapshot()
    if again:  # what is ahead is state, too
        states = Shuffled(operators, 3, states).snapshot()
    second = Shuffled(operators, 1, states)
    second.send(0, batch_of([row(20, key, i64=1 + key % 2) for key in keys] + [row(1_500, key) for key in keys]))
    second.watermark(500)
    second.flush()
    assert second.late() == len(fired)
    second.watermark(999)
    rows = [r for b in second.results() for r in b.to_pylist()]
    assert {r["key"] for r in rows} == set(keys) - fired
    assert second.late() == len(fired)
    second.send(0, batch_of([row(30, key) for key in keys]))
    second.flush()
    assert second.late() == len(fired) + len(keys)
    second.watermark(WATERMARK_MAX_MS)
    assert len(second.results()[-1].to_pylist()) == len(keys)


@combined_and_not
def test_a_watermark_between_those_of_former_subtasks_makes_late_what_it_has_passed(aggregate: pl.Expr) -> None:
    operators = aggregated(aggregate)
    first = Shuffled(operators, 2)
    first.windows[0].operator.on_watermark(999)
    first.windows[1].operator.on_watermark(4_999)
    second = Shuffled(operators, 1, first.snapshot())
    second.watermark(2_999)
    second.send(0, batch_of([row(1_500, key, i64=1) for key in range(20)]))
    second.flush()
    assert second.late() == 20
    second.watermark(WATERMARK_MAX_MS)
    assert second.results() == []


def test_results_are_emitted_before_the_watermark_and_sorted_by_window_and_key() -> None:
    pipeline = Shuffled(aggregated(pl.len().alias("n")), 1)
    pipeline.send(0, batch_of([row(1_500, 9), row(1_500, 3), row(20, 7), row(20, -7)]))
    pipeline.watermark(5_000)
    out = pipeline.windows[0].out
    assert [(r["window_start"].second, r["key"]) for r in out.rows()] == [(0, -7), (0, 7), (1, 3), (1, 9)]
    assert out.log == [("batch", 2), ("batch", 2), ("watermark", 5_000)]


def test_a_frozen_snapshot_does_not_see_later_records() -> None:
    for operators in (aggregated(pl.len().alias("n")), aggregated(pl.col("i64").n_unique().alias("n"))):
        pipeline = Shuffled(operators, 1)
        pipeline.send(0, batch_of([row(10, i64=1)]))
        pipeline.flush()
        frozen = pipeline.windows[0].operator.freeze()
        pipeline.send(0, batch_of([row(10, i64=2), row(20, 2, i64=2)]))
        pipeline.flush()
        assert frozen is not None
        payload = memoryview(b"".join(bytes(memoryview(b)) for b in frozen.encode()))
        restored = Shuffled(operators, 1, [RestoredState(0, 1, payload)])
        restored.watermark(WATERMARK_MAX_MS)
        assert [(r["key"], r["n"]) for b in restored.results() for r in b.to_pylist()] == [(1, 1)]


def test_combine_holds_records_until_a_tick_a_barrier_or_the_end_of_their_window() -> None:
    operators = aggregated(pl.len().alias("n"))
    assert operators.combine is not None
    combine = Harness(operators.combine)
    combine.send(batch_of([row(10)]))
    combine.operator.on_watermark(500)
    assert combine.out.log == [("watermark", 500)]
    combine.advance(4)
    assert combine.out.batches == []
    combine.advance(1)
    assert combine.out.log[1:] == [("batch", 1)]
    combine.send(batch_of([row(10), row(10)]))
    combine.operator.on_watermark(999)
    assert combine.out.log[2:] == [("batch", 1), ("watermark", 999)]
    combine.context.is_busy = True
    combine.send(batch_of([row(1_010)]))
    combine.now_ms += 29
    combine.send(batch_of([row(1_010)]))
    assert len(combine.out.log) == 4
    combine.now_ms += 1
    combine.send(batch_of([row(1_010)]))
    assert combine.out.rows()[-1]["__rows"] == 3


def test_records_with_nearly_distinct_keys_pass_uncombined_until_the_next_trial() -> None:
    operators = aggregated(pl.len().alias("n"), pl.col("i64").min())
    assert operators.combine is not None
    combine = Harness(operators.combine)
    distinct = pl.DataFrame(pl.from_arrow(batch_of([row(10)]))).select(
        pl.all().exclude("key").repeat_by(10_000).explode(), key=pl.int_range(10_000)
    )
    batch = pa.RecordBatch.from_arrays([pa.array(distinct[f.name].to_list(), f.type) for f in SCHEMA], schema=SCHEMA)
    combine.send(batch)
    combine.operator.before_barrier()
    assert len(combine.out.rows()) == 10_000
    for _ in range(32):
        combine.send(batch)
    assert len(combine.out.rows()) == 33 * 10_000
    combine.send(batch)
    combine.send(batch)
    combine.operator.before_barrier()
    assert len(combine.out.rows()) == 34 * 10_000


@pytest.mark.parametrize(
    "aggregate",
    [
        pl.col("i64").median(),
        pl.col("i64").skew(),
        pl.col("i64").sum() + 1,
        pl.col("name").max(),
        pl.col("i64").cum_sum().max(),
        pl.col("i64").unique().sum(),
        pl.lit(1).sum(),
        pl.col("at").mean(),
        pl.col("i64", "i32").sum(),
        pl.max("i64") - pl.min("i64"),
    ],
)
def test_aggregates_that_do_not_decompose_keep_the_records(aggregate: pl.Expr) -> None:
    operators = aggregated(aggregate)
    assert operators.combine is None
    rows = [row(10, i64=4, i32=1, flag=True, name="x"), row(20, i64=6, i32=2, flag=False, name="y")]
    pipeline = Shuffled(operators, 1)
    pipeline.send(0, batch_of(rows))
    pipeline.watermark(WATERMARK_MAX_MS)
    assert_frame_equal(frame_of(pipeline.results(), operators), expected(rows, ["key"], (aggregate,)))


@pytest.mark.parametrize(
    ("aggregate", "message"),
    [
        (WindowedAggregate(("kye",), "ts", tumbling(1), (pl.len(),)), "no column 'kye'; the columns are key: int64"),
        (WindowedAggregate(("key",), "name", tumbling(1), (pl.len(),)), "must be a timestamp, a date or integer"),
        (WindowedAggregate(("key",), "ts", tumbling(1), ()), "at least one aggregate"),
        (WindowedAggregate(("key",), "ts", tumbling(1), (pl.col("x").sum(),)), "operator 'counts': .*\"x\""),
        (WindowedAggregate(("key",), "ts", tumbling(1), (pl.len().alias("window_start"),)), "same name"),
        (WindowedAggregate((), "ts", tumbling(1), (pl.len(),)), "at least one column"),
        (WindowedAggregate(("key",), "ts", tumbling(1), (pl.struct("i64", "f64").max(),)), "`max` operation not supp"),
        (WindowedAggregate(("key",), "ts", tumbling(1), (pl.concat_list("i64").min(),)), "`min` operation not supp"),
    ],
)
def test_wrong_use_is_one_sentence_that_names_the_operator(aggregate: WindowedAggregate, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        window_operators(aggregate, SCHEMA, "counts")
    assert "operator 'counts'" in str(caught.value)


def test_time_columns_of_every_type_give_the_same_windows() -> None:
    days = [0, 1, 1]
    columns = {
        "date": pa.array(days, pa.int32()).view(pa.date32()),
        "at": pa.array([d * 86_400_000_000 + 5 for d in days]).view(pa.timestamp("us")),
        "ts": pa.array([d * 86_400_000 + 5 for d in days]),
    }
    batch = pa.record_batch({"key": pa.array([1, 1, 1]), **columns})
    for name in columns:
        aggregate = WindowedAggregate(("key",), name, tumbling(86_400_000), (pl.len().alias("n"),))
        pipeline = Shuffled(window_operators(aggregate, batch.schema, "node"), 1)
        pipeline.send(0, batch)
        pipeline.watermark(WATERMARK_MAX_MS)
        assert [(r["window_start"].day, r["n"]) for r in pipeline.windows[0].out.rows()] == [(1, 1), (2, 2)]


def test_state_text_tells_sizes_keys_and_aggregates_apart_and_stateless_operators_have_none() -> None:
    texts = {
        state_text(operators.window)
        for operators in (
            aggregated(pl.len()),
            aggregated(pl.col("i64").sum()),
            aggregated(pl.col("i64").max()),
            aggregated(pl.col("i64").sum(), keys=("name",)),
            aggregated(pl.col("i64").n_unique()),
        )
    }
    assert len(texts) == 5
    combine = aggregated(pl.len()).combine
    assert combine is not None
    assert state_text(combine) == ""
    assert state_text(WithTimestampsSpec("ts")) == "with_timestamps(ts)"


def test_what_combine_holds_goes_out_at_the_end_once() -> None:
    """The end may come again, after a restore at another parallelism."""
    operators = aggregated(pl.len().alias("n"))
    assert operators.combine is not None
    combine = Harness(operators.combine)
    combine.send(batch_of([row(10), row(10)]))
    for _ in range(2):
        combine.operator.finish()
        assert combine.out.log == [("batch", 1)]


def test_what_the_end_alone_has_fired_is_not_late_when_more_input_comes() -> None:
    for operators in (aggregated(pl.len().alias("n")), aggregated(pl.col("i64").n_unique().alias("n"))):
        ended = Shuffled(operators, 1)
        ended.send(0, batch_of([row(10, i64=1), row(1_500, i64=1)]))
        ended.flush()
        ended.watermark(1_200)
        ended.watermark(WATERMARK_MAX_MS)
        frozen = ended.windows[0].operator.freeze()
        assert frozen is not None
        payload = memoryview(b"".join(bytes(memoryview(b)) for b in frozen.encode()))
        again = Shuffled(operators, 1, [RestoredState(0, 1, payload)])
        again.windows[0].operator.on_resumed()
        again.send(0, batch_of([row(20, i64=2), row(1_600, i64=2)]))
        again.flush()
        again.watermark(WATERMARK_MAX_MS)
        assert [(r["window_start"].second, r["n"]) for b in again.results() for r in b.to_pylist()] == [(1, 1)]
        assert again.late() == 1, "the first window had fired before the end"


@combined_and_not
def test_how_late_each_late_record_was_is_counted(aggregate: pl.Expr) -> None:
    pipeline = Shuffled(aggregated(aggregate), 1)
    pipeline.send(0, batch_of([row(10)]))
    pipeline.watermark(3_998)
    pipeline.send(0, batch_of([*[row(2_999)] * 98, row(1_500), row(0)]))
    pipeline.watermark(3_999)
    late = Lateness.of(pipeline.windows[0].context.metrics.counters)
    assert pipeline.late() == 100
    assert late == Lateness(p50_ms=1_000, p99_ms=2_000, max_ms=5_000), "3,000 ms are rounded up"


@combined_and_not
def test_a_record_lies_in_the_windows_that_have_not_fired_yet_and_is_late_after_the_last_one(
    aggregate: pl.Expr,
) -> None:
    windows = WindowedAggregate(("key",), "ts", FixedWindows(3_000, 1_000), (aggregate,))
    pipeline = Shuffled(window_operators(windows, SCHEMA, "node"), 1)
    pipeline.send(0, batch_of([row(2_500, i64=1)]))
    pipeline.watermark(2_999)
    pipeline.send(0, batch_of([row(2_500, i64=2)]))
    pipeline.watermark(3_999)
    pipeline.watermark(4_999)
    found = [(r["window_start"].second, r["n"]) for b in pipeline.results() for r in b.to_pylist()]
    assert found == [(0, 1), (1, 2), (2, 2)]
    assert pipeline.late() == 0
    pipeline.send(0, batch_of([row(2_500, i64=3)]))
    pipeline.flush()
    assert pipeline.late() == 1
    frozen = pipeline.windows[0].operator.freeze()
    assert frozen is not None
    assert sum(frozen.rows().values()) == 0, "a pane is dropped when its last window has fired"


def test_keys_whose_sliding_windows_fired_further_do_not_fire_again() -> None:
    windows = WindowedAggregate(("key",), "ts", FixedWindows(3_000, 1_000), (pl.len().alias("n"),))
    operators, keys = window_operators(windows, SCHEMA, "node"), range(20)
    first = Shuffled(operators, 2)
    first.send(0, batch_of([row(2_500, key) for key in keys]))
    first.flush()
    first.windows[1].operator.on_watermark(3_999)
    fired = {r["key"] for r in first.windows[1].out.rows()}
    assert 0 < len(fired) < len(keys)
    second = Shuffled(operators, 1, first.snapshot())
    second.watermark(9_999)
    rows = [(r["key"], r["window_start"].second) for b in second.results() for r in b.to_pylist()]
    assert sorted(rows) == sorted((key, at) for key in keys for at in ((2,) if key in fired else (0, 1, 2)))


@combined_and_not
@pytest.mark.parametrize("windows", [SECONDS, FixedWindows(2_000, 1_000)])
def test_late_records_go_to_their_output_as_they_came(aggregate: pl.Expr, windows: FixedWindows) -> None:
    late = OutputTag("late")
    wanted = WindowedAggregate(("key",), "ts", windows, (aggregate,), Emission(late=late))
    operators = window_operators(wanted, SCHEMA, "node")
    assert operators.combine is None, "of a partial result the records are gone"
    pipeline = Shuffled(operators, 1)
    rows = [row(10, i64=7, name="a"), row(2_500, i64=8, name="b"), row(2_500, 2, i64=9)]
    pipeline.send(0, batch_of(rows))
    pipeline.watermark(1_999)
    again = Shuffled(operators, 1, pipeline.snapshot())
    lost = [row(999, 3, i64=1, name="x", f64=0.5), row(0, i64=None, name="y")]
    again.send(0, batch_of([lost[0], row(2_600, i64=8), lost[1]]))
    again.watermark(WATERMARK_MAX_MS)
    out = again.windows[0].out
    assert [r for batch in out.tagged[late] for r in batch.to_pylist()] == batch_of(lost).to_pylist()
    assert again.late() == 2
    found = frame_of(pipeline.results() + again.results(), operators).sort("window_start", "key")
    assert_frame_equal(found, expected([*rows, row(2_600, i64=8)], ["key"], (aggregate,), windows))


COUNTS = (pl.len().alias("n"), pl.col("i32").sum().alias("s"), pl.col("i64").max().alias("m"))
MEDIANS = (pl.len().alias("n"), pl.col("i32").sum().alias("s"), pl.col("i32").median().alias("m"))
EARLY_MS = 500

updates = given(st.integers(0, 2**32).map(Random))


def any_row(random: Random) -> dict[str, Any]:
    values = {"i64": random.choice([None, random.randrange(-9, 9)]), "i32": random.randrange(-9, 9)}
    return row(random.randrange(12_000), random.randrange(6), **values)


@pytest.mark.parametrize("_on_each_backend", ["memory"], indirect=True)
@settings(max_examples=60)
@updates
def test_the_last_result_of_a_window_is_of_all_records_that_were_in_time(random: Random) -> None:
    check_updates(random)


@pytest.mark.parametrize("_on_each_backend", ["rocksdb-without-cache"], indirect=True)
@settings(max_examples=15)
@updates
def test_the_last_result_of_a_window_on_rocksdb_is_of_all_records_that_were_in_time(random: Random) -> None:
    check_updates(random)


def check_updates(random: Random) -> None:
    """Rows come in any order, and are late as they happen to be."""
    rows = [any_row(random) for _ in range(random.randrange(20, 120))]
    windows, aggregates = random.choice(WINDOWS), random.choice([COUNTS, MEDIANS])
    late_output = random.choice([None, OutputTag("late")])
    emission = Emission(random.choice([0, 700, 2_000, 20_000]), late_output, random.choice([0, EARLY_MS]))
    accumulates = windows.is_sliding or random.random() < 0.5
    emission = replace(emission, accumulates=accumulates)
    operators = window_operators(WindowedAggregate(("key",), "ts", windows, aggregates, emission), SCHEMA, "node")
    pipeline = Shuffled(operators, random.choice([1, 2, 3, 5]))
    done: list[pa.RecordBatch] = []
    lost: list[dict[str, Any]] = []
    kept: list[tuple[int, dict[str, Any]]] = []
    at, watermark_ms, late = 0, -1, 0
    while at < len(rows):
        batch = rows[at : at + random.randrange(1, 10)]
        at += len(batch)
        pipeline.send(random.randrange(pipeline.parallelism), batch_of(batch))
        pipeline.flush()
        for one in batch:
            ends = [start + windows.size_ms for start in starts_ms(one["ts"], windows)]
            in_time = [end for end in ends if end - 1 + emission.lateness_ms > watermark_ms]
            kept += [(end - windows.size_ms, one) for end in in_time if end - 1 > watermark_ms or emission.lateness_ms]
            lost += [] if in_time else [one]
        match random.choice(["nothing", "watermark", "watermark", "tick", "barrier", "restore"]):
            case "watermark":
                watermark_ms = max(watermark_ms, 0) + random.randrange(1, 2_000)
                pipeline.watermark(watermark_ms)
            case "tick":
                for window in pipeline.windows:
                    window.advance(EARLY_MS)
            case "barrier":
                pipeline.snapshot()
            case "restore":
                states = pipeline.snapshot()
                done += pipeline.results()
                late += pipeline.late()
                pipeline = Shuffled(operators, random.choice([1, 2, 3, 5]), states)
    pipeline.watermark(WATERMARK_MAX_MS)
    assert late + pipeline.late() == len(lost)
    found = frame_of(done + pipeline.results(), operators)
    if not accumulates:
        found = found.group_by("key", "window_start", "window_end").agg(pl.col("n", "s").sum())
    elif emission.early_ms or emission.lateness_ms:
        found = found.unique(["key", "window_start"], keep="last", maintain_order=True)
    starts = pl.Series([start for start, _ in kept], dtype=pl.Int64)
    frame = pl.DataFrame(pl.from_arrow(batch_of([one for _, one in kept]))).with_columns(start=starts)
    start = pl.from_epoch("start", "ms").cast(pl.Datetime("us"))
    frame = frame.with_columns(window_start=start, window_end=start + pl.duration(milliseconds=windows.size_ms))
    wanted = frame.group_by("key", "window_start", "window_end").agg(*aggregates)
    wanted = wanted.select(found.columns).cast(dict(found.schema))
    assert_frame_equal(found.sort("window_start", "key"), wanted.sort("window_start", "key"), rel_tol=1e-9)


def counted(windows: FixedWindows, emission: Emission) -> WindowOperators:
    aggregate = WindowedAggregate(("key",), "ts", windows, (pl.len().alias("n"),), emission)
    return window_operators(aggregate, SCHEMA, "node")


def emitted(pipeline: Shuffled) -> list[tuple[int, int, int]]:
    """Return the results since the last call: second of the start, key, count."""
    out = pipeline.windows[0].out
    rows = [(r["window_start"].second, r["key"], r["n"]) for r in out.rows()]
    out.batches.clear()
    return rows


@pytest.mark.parametrize(("accumulates", "again"), [(True, 3), (False, 1)])
def test_a_late_record_has_the_result_of_its_key_emitted_again(accumulates: bool, again: int) -> None:
    pipeline = Shuffled(counted(SECONDS, Emission(lateness_ms=1_000, accumulates=accumulates)), 1)
    pipeline.send(0, batch_of([row(10, 1), row(20, 1), row(30, 2)]))
    pipeline.watermark(999)
    assert emitted(pipeline) == [(0, 1, 2), (0, 2, 1)]
    pipeline.send(0, batch_of([row(40, 1)]))
    pipeline.flush()
    pipeline.windows[0].advance(UPDATE_MS)
    assert emitted(pipeline) == [(0, 1, again)]
    pipeline.watermark(1_998)
    pipeline.send(0, batch_of([row(50, 3)]))
    pipeline.flush()
    assert emitted(pipeline) == []
    pipeline.watermark(1_999)
    assert emitted(pipeline) == [(0, 3, 1)], "before the window is dropped"
    pipeline.send(0, batch_of([row(60, 3)]))
    pipeline.watermark(WATERMARK_MAX_MS)
    assert emitted(pipeline) == []
    assert pipeline.late() == 1


@pytest.mark.parametrize(("accumulates", "second"), [(True, (0, 1, 3)), (False, (0, 1, 1))])
def test_early_results_are_of_keys_that_changed_since_the_last_ones(
    accumulates: bool, second: tuple[int, int, int]
) -> None:
    pipeline = Shuffled(counted(SECONDS, Emission(early_ms=EARLY_MS, accumulates=accumulates)), 1)
    window = pipeline.windows[0]
    pipeline.send(0, batch_of([row(10, 1), row(20, 1), row(30, 2)]))
    pipeline.flush()
    window.advance(EARLY_MS - 1)
    assert emitted(pipeline) == []
    window.advance(1)
    assert emitted(pipeline) == [(0, 1, 2), (0, 2, 1)]
    assert window.operator.next_tick_ms() is None, "nothing changed"
    pipeline.send(0, batch_of([row(40, 1)]))
    pipeline.flush()
    window.advance(EARLY_MS)
    assert emitted(pipeline) == [second]
    pipeline.watermark(999)
    assert emitted(pipeline) == ([(0, 1, 3), (0, 2, 1)] if accumulates else [])


def test_what_had_changed_before_a_restore_is_emitted_early_after_it() -> None:
    operators = counted(FixedWindows(2_000, 1_000), Emission(early_ms=EARLY_MS))
    first = Shuffled(operators, 1)
    first.send(0, batch_of([row(1_500, 1)]))
    second = Shuffled(operators, 1, first.snapshot())
    assert emitted(first) == []
    second.windows[0].advance(EARLY_MS)
    assert emitted(second) == [(0, 1, 1), (1, 1, 1)]


def test_windows_that_are_kept_longer_are_another_state() -> None:
    texts = {state_text(counted(SECONDS, emission).window) for emission in (Emission(), Emission(1_000))}
    assert len(texts) == 2
