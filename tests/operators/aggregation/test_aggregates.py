"""Every aggregate that is computed record by record, in each kind of window and without one, against Polars."""

from __future__ import annotations

import datetime as dt
import random
import re
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from polars.testing import assert_frame_equal
from tests.conftest import IS_DEEP, few
from tests.operators.harness import Shuffled, Subtasks, applied
from tests.state.backends import IN_FILES, choose

import headgate as hg
from headgate.errors import PipelineFailed, UsageError
from headgate.operators.aggregation.aggregates import Aggregate, recognise, stable
from headgate.operators.aggregation.running_aggregate import RunningAggregate, running_aggregate_spec
from headgate.operators.base import WATERMARK_MAX_MS
from headgate.operators.changes import OP_FIELD
from headgate.operators.windows.aligned_windows import WindowOperators, window_operators
from headgate.operators.windows.session_windows import session_operators
from headgate.operators.windows.triggered_windows import Firing, triggered_operators
from headgate.operators.windows.window_assigner import FixedWindows, tumbling
from headgate.operators.windows.window_plan import WindowedAggregate
from headgate.state.window_aggregates import Accumulator, AggTable, Kind, Values, add_values
from headgate.testing import Collect, run

SCHEMA = pa.schema(
    [
        ("key", pa.large_string()),
        ("ts", pa.int64()),
        ("n", pa.int64()),
        ("small", pa.int16()),
        ("big", pa.uint64()),
        ("x", pa.float64()),
        ("y", pa.float32()),
        ("flag", pa.bool_()),
        ("text", pa.large_string()),
        ("day", pa.date32()),
        ("at", pa.timestamp("us", "UTC")),
        ("took", pa.duration("us")),
        ("rank", pa.int64()),
        ("real", pa.float64()),
        ("price", pa.decimal128(12, 2)),
        ("tags", pa.large_list(pa.int64())),
    ]
)
VALUES = ("n", "small", "big", "x", "y", "flag", "text", "day", "at", "took")
FIRST_AND_LAST = (
    *(pl.col(name).first().alias(f"first_{name}") for name in VALUES),
    *(pl.col(name).last().alias(f"last_{name}") for name in VALUES),
    pl.col("text").last(ignore_nulls=True).alias("last_given"),
    pl.col("n").drop_nulls().first().alias("first_given"),
    pl.col("text").filter(pl.col("n") > 2).last().alias("last_of_some"),
    pl.col("x").filter(pl.col("flag")).drop_nulls().first().alias("first_given_of_some"),
)
SPREAD = (
    *(pl.col(name).var().alias(f"var_{name}") for name in ("n", "small", "x", "y", "flag")),
    pl.col("n").std(ddof=0).alias("std"),
    pl.col("x").std(ddof=2).alias("std_2"),
    pl.col("n").filter(pl.col("flag")).var().alias("var_of_some"),
    pl.col("n").mean().alias("mean"),
    pl.col("n").count().alias("count"),
    *(getattr(pl.col("price"), name)().alias(f"{name}_price") for name in ("sum", "mean", "min", "max", "count")),
    pl.col("price").filter(pl.col("flag")).sum().alias("price_of_some"),
    *(getattr(pl.col("price").cast(pl.Decimal(37, 12)), name)().alias(f"{name}_fine") for name in ("sum", "mean")),
)
PICKS = (
    pl.col("text").sort_by("rank").last().alias("latest"),
    pl.col("n").sort_by("rank").first().alias("earliest"),
    pl.col("x").sort_by("rank", descending=True).first().alias("descending"),
    pl.col("day").sort_by("rank", descending=True).last().alias("descending_last"),
    pl.col("took").sort_by("rank", nulls_last=True).last().alias("nulls_last"),
    pl.col("at").sort_by("rank", descending=True, nulls_last=True).first().alias("nulls_last_first"),
    pl.col("rank").sort_by("real").last().alias("by_real"),
    pl.col("rank").sort_by("real", descending=True).last().alias("by_real_last"),
    pl.col("big").max_by("rank").alias("max_by"),
    pl.col("text").min_by("rank").alias("min_by"),
    pl.col("flag").get(pl.col("rank").arg_max()).alias("at_the_highest"),
    pl.col("n").sort_by("ts", maintain_order=True).last().alias("of_equal_ones_the_last"),
    pl.col("n").sort_by("ts", descending=True, maintain_order=True).first().alias("of_equal_ones_the_first"),
    pl.col("n").sort_by("big", maintain_order=True).last().alias("by_big"),
    pl.col("n").sort_by("big", descending=True, maintain_order=True, nulls_last=True).last().alias("by_least_big"),
)
QUANTILES = (
    *(pl.col(name).median().alias(f"median_{name}") for name in ("n", "small", "big", "x", "y", "flag")),
    *(
        pl.col(name).quantile(0.3, interpolation=how).alias(f"{how}_{name}")
        for name in ("n", "x")
        for how in ("nearest", "lower", "higher", "midpoint", "linear", "equiprobable")
    ),
    pl.col("n").quantile(1.0).alias("highest"),
    pl.col("x").quantile(0).alias("lowest"),
    pl.col("x").filter(pl.col("n") > 1).median().alias("median_of_some"),
)
DECOMPOSED = (*FIRST_AND_LAST, *SPREAD, *PICKS)
EXPECTED = tuple(map(stable, DECOMPOSED))
"""Of records with equal ranks, here those without one, Polars may pick any unless it is to keep the order."""

Rows = list[dict[str, Any]]


def drawn(rng: random.Random, count: int, begun: int = 0) -> Rows:
    """Return records of which ``rank`` and ``real`` are distinct, but for null."""

    def or_null(value: Any) -> Any:
        return None if rng.random() < 0.2 else value

    ranks = [rng.randrange(-(2**52), 2**52) * 2**10 + i for i in range(count)]
    rng.shuffle(ranks)
    return [
        {
            "key": rng.choice(["a", "b", ""]),
            "ts": rng.randrange(begun, begun + 3_000),
            "n": or_null(rng.randrange(6)),
            "small": or_null(rng.choice([-(2**15), 2**15 - 1, 0])),
            "big": or_null(rng.choice([0, 2**63, 2**64 - 1])),
            "x": or_null(rng.choice([-1.5, 0.0, -0.0, 2.25, 1e9])),
            "y": or_null(rng.choice([0.5, -0.25])),
            "flag": or_null(rng.random() < 0.5),
            "text": or_null(rng.choice(["", "ü", "long" * 9])),
            "day": or_null(date(1969, 1, rng.randrange(1, 28))),
            "at": or_null(datetime(2026, 1, 1, tzinfo=UTC) + timedelta(microseconds=rng.randrange(9))),
            "took": or_null(timedelta(microseconds=rng.randrange(-5, 5))),
            "rank": or_null(ranks[i]),
            "real": or_null(ranks[i] / 2**70),
            "price": or_null(Decimal(rng.randrange(-(10**12) + 1, 10**12)) / 100),
            "tags": or_null([1, None][: rng.randrange(3)]),
        }
        for i in range(count)
    ]


def batch_of(rows: Rows) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, SCHEMA)


def frame_of(rows: Rows, schema: pa.Schema) -> pl.DataFrame:
    return pl.DataFrame(pl.from_arrow(pa.Table.from_pylist(rows, schema)))


def assert_same(found: Rows, expected: pl.DataFrame, schema: pa.Schema, by: list[str]) -> None:
    assert_frame_equal(frame_of(found, schema).sort(by), expected.sort(by), rel_tol=1e-9, check_column_order=False)


BY_RECORD = ((pl.len() + 0).alias("computed"),)
"""With it the records of a window are kept."""
SEEDS = range(20 if IS_DEEP else 1)
BACKENDS = ("memory", IN_FILES)
backends = pytest.mark.parametrize("backend", BACKENDS)


@pytest.mark.long
@pytest.mark.parametrize(
    ("backend", "windows", "more"),
    [
        ("memory", tumbling(1_000), ()),
        ("memory", FixedWindows(3_000, 1_000), BY_RECORD),
        (IN_FILES, FixedWindows(1_700, 700), ()),
        *few([(IN_FILES, tumbling(1_000), BY_RECORD)], 0),
    ],
)
def test_windows_by_event_time(backend: str, windows: FixedWindows, more: tuple[pl.Expr, ...]) -> None:
    aggregate = WindowedAggregate(("key",), "ts", windows, (*DECOMPOSED, *more))
    operators = window_operators(aggregate, SCHEMA, "node")
    assert (operators.combine is None) == bool(more)
    for seed in SEEDS:
        with choose(backend):
            rows, found = streamed(operators, random.Random(seed))
        starts = pl.Series(
            [
                list(range(ts // windows.slide_ms * windows.slide_ms, ts - windows.size_ms, -windows.slide_ms))
                for ts in (row["ts"] for row in rows)
            ],
            dtype=pl.List(pl.Int64),
        )
        # the records of a sliding window are taken stretch by stretch
        pane = pl.col("ts") // windows.pane_ms
        frame = frame_of(rows, SCHEMA).with_columns(start=starts).sort(pane, maintain_order=True).explode("start")
        start = pl.from_epoch("start", "ms").cast(pl.Datetime("us"))
        expected = frame.group_by("key", window_start=start, maintain_order=True).agg(*EXPECTED, *more)
        expected = expected.with_columns(window_end=pl.col("window_start") + pl.duration(milliseconds=windows.size_ms))
        assert_same(found, expected, operators.output, ["key", "window_start"])


def streamed(operators: WindowOperators, rng: random.Random) -> tuple[Rows, Rows]:
    """Send records at changing parallelisms, from one sender, so that their order is known; return them and results."""
    pipeline, rows, found = Shuffled(operators, 2), [], []
    for n, parallelism in enumerate(rng.sample([1, 2, 3, 5], 4)):
        for _ in range(rng.randrange(1, 4)):
            more = drawn(rng, rng.choice([1, 2, 30]), begun=1_000 * n)
            rows += more
            pipeline.send(0, batch_of(more))
        pipeline.flush()
        pipeline.watermark(1_000 * n)
        states = pipeline.snapshot()
        found += pipeline.take()
        assert pipeline.late() == 0
        pipeline = Shuffled(operators, parallelism, states)
    pipeline.watermark(WATERMARK_MAX_MS)
    return rows, found + pipeline.take()


@backends
def test_sessions(backend: str) -> None:
    """What depends on the order of records keeps them: partial sessions that are joined do not say whose came first."""
    for aggregates, is_combined in ((SPREAD, True), (DECOMPOSED, False)):
        aggregate = WindowedAggregate(("key",), "ts", tumbling(5_000), aggregates)
        operators = session_operators(aggregate, SCHEMA, "node")
        assert (operators.combine is not None) == is_combined
        for seed in SEEDS:
            with choose(backend):
                rows, found = streamed(operators, random.Random(seed))
            expected = frame_of(rows, SCHEMA).group_by("key", maintain_order=True).agg(*map(stable, aggregates))
            assert_same(
                [{k: v for k, v in row.items() if not k.startswith("window_")} for row in found],
                expected,
                pa.schema([f for f in operators.output if not f.name.startswith("window_")]),
                ["key"],
            )


TRIGGERS = (
    Firing(records=4, fires_at_end=False),
    Firing(records=3, discards=False, fires_at_end=False),
    Firing(interval_ms=10_000_000, is_event_time=True),
    Firing(interval_ms=10_000_000, is_event_time=True, discards=False),
)


@pytest.mark.parametrize(
    ("backend", "trigger", "more"),
    [("memory", trigger, BY_RECORD if trigger.records == 3 else ()) for trigger in TRIGGERS]
    + [(IN_FILES, TRIGGERS[1], ())],
)
def test_windows_that_a_trigger_ends(backend: str, trigger: Firing, more: tuple[pl.Expr, ...]) -> None:
    operators = triggered_operators(("key",), trigger, (*DECOMPOSED, *more), SCHEMA, "node", time_column="ts")
    for seed in SEEDS:
        with choose(backend):
            rows, found = streamed(operators, random.Random(seed))
        expected = []
        for key in ("a", "b", ""):
            of_key = [row for row in rows if row["key"] == key]
            step = trigger.records or max(len(of_key), 1)
            for end in range(step, len(of_key) + 1, step):
                part = of_key[end - step if trigger.discards else 0 : end]
                expected.append(frame_of(part, SCHEMA).group_by("key").agg(*EXPECTED, *more))
        columns = [field.name for field in operators.output if not pa.types.is_floating(field.type)]
        assert_same(found, pl.concat(expected), operators.output, columns)


@pytest.mark.long
@pytest.mark.parametrize(("backend", "retractions"), few(product(BACKENDS, (False, True)), 2))
def test_running_aggregates(backend: str, retractions: bool) -> None:
    aggregates = (*DECOMPOSED, *QUANTILES)
    spec = running_aggregate_spec(RunningAggregate(("key",), aggregates, retractions=retractions), SCHEMA, "node")
    for seed in SEEDS:
        rng, rows, found = random.Random(seed), [], []
        with choose(backend):
            subtasks = Subtasks(spec, ("key",), 2)
            for parallelism in rng.sample([1, 2, 3, 5], 4):
                for _ in range(rng.randrange(1, 4)):
                    more = drawn(rng, rng.choice([1, 2, 30]))
                    rows += more
                    subtasks.send(batch_of(more))
                found += subtasks.rows()
                table = applied(found, ("key",), retractions=retractions, strict=True)
                expected = frame_of(rows, SCHEMA).group_by("key", maintain_order=True).agg(*map(stable, aggregates))
                assert_same(table, expected, pa.schema(list(spec.output)[:-1]), ["key"])
                subtasks = Subtasks(spec, ("key",), parallelism, subtasks.snapshot())


@pytest.mark.parametrize("backend", few(BACKENDS, 1))
def test_spread_and_quantiles_of_changes(backend: str) -> None:
    aggregates = (*SPREAD, *QUANTILES)
    changes = SCHEMA.append(OP_FIELD)
    aggregate = RunningAggregate(("key",), aggregates, has_changes=True, retractions=True)
    spec = running_aggregate_spec(aggregate, changes, "node")
    for seed in SEEDS:
        rng, found = random.Random(seed), []
        there: Rows = []
        with choose(backend):
            subtasks = Subtasks(spec, ("key",), 2)
            for parallelism in rng.sample([1, 2, 3, 5], 4):
                sent: Rows = []
                for row in drawn(rng, 25):
                    if there and rng.random() < 0.4:
                        sent.append({**there.pop(rng.randrange(len(there))), "op": "delete"})
                    there.append(row)
                    sent.append({**row, "op": "insert"})
                subtasks.send(pa.RecordBatch.from_pylist(sent, changes))
                found += subtasks.rows()
                table = applied(found, ("key",), retractions=True)
                expected = frame_of(there, SCHEMA).group_by("key").agg(*aggregates)
                assert_same(table, expected, pa.schema(list(spec.output)[:-1]), ["key"])
                subtasks = Subtasks(spec, ("key",), parallelism, subtasks.snapshot())


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "values", [[NAN, 1.0, 2.0], [1.0, NAN], [NAN], [NAN, NAN, None], [INF, 1.0], [-INF, INF, 0.0], [None, 3.0], [None]]
)
def test_numbers_that_are_none(values: list[float | None]) -> None:
    """A NaN is above all numbers in an order, as in Polars, and is skipped by ``max_by``."""
    rows = [{**drawn(random.Random(0), 1)[0], "key": "a", "x": x, "n": i} for i, x in enumerate(values)]
    aggregates = (
        pl.col("x").var().alias("var"),
        pl.col("x").std(ddof=0).alias("std"),
        pl.col("x").first().alias("first"),
        pl.col("n").sort_by("x", maintain_order=True).last().alias("highest"),
        pl.col("n").sort_by("x", maintain_order=True).first().alias("lowest"),
        pl.col("n").sort_by("x", maintain_order=True, descending=True).first().alias("down"),
        *(
            ()
            if all(x is None or x != x for x in values)
            else (pl.col("n").max_by("x").alias("max_by"), pl.col("n").min_by("x").alias("min_by"))
        ),
        pl.col("x").median().alias("median"),
        pl.col("x").quantile(0.7, interpolation="higher").alias("high"),
    )
    spec = running_aggregate_spec(RunningAggregate(("key",), aggregates), SCHEMA, "node")
    for size in (1, len(rows)):
        subtasks = Subtasks(spec, ("key",), 1)
        for start in range(0, len(rows), size):
            subtasks.send(batch_of(rows[start : start + size]))
        table = applied(subtasks.rows(), ("key",), retractions=False)
        expected = frame_of(rows, SCHEMA).group_by("key").agg(*aggregates)
        assert_same(table, expected, pa.schema(list(spec.output)[:-1]), ["key"])


def test_the_spread_of_large_numbers_that_are_close_is_not_lost() -> None:
    """Sums of squares would lose all of it: they are 4e15 times as large."""
    rows = [{**drawn(random.Random(0), 1)[0], "key": "a", "x": 1e9 + i % 2} for i in range(100)]
    spec = running_aggregate_spec(RunningAggregate(("key",), (pl.col("x").var(ddof=0),)), SCHEMA, "node")
    subtasks = Subtasks(spec, ("key",), 1)
    for row in rows:
        subtasks.send(batch_of([row]))
    assert subtasks.rows()[-1]["x"] == pytest.approx(0.25, rel=1e-6)


def test_an_unchanged_pick_is_not_sent_again() -> None:
    aggregate = RunningAggregate(("key",), (pl.col("n").sort_by("ts").last(),))
    subtasks = Subtasks(running_aggregate_spec(aggregate, SCHEMA, "node"), ("key",), 1)
    one = {**drawn(random.Random(0), 1)[0], "n": 7}
    for ts, n in ((1, 7), (2, 7), (1, 9), (3, 8)):
        subtasks.send(batch_of([{**one, "ts": ts, "n": n}]))
    assert [row["n"] for row in subtasks.rows()] == [7, 8]


@pytest.mark.parametrize(
    "expression", [pl.col("price").last(), pl.col("tags").first(), pl.col("n").sort_by("text").last()]
)
def test_what_cannot_be_picked_record_by_record_is_picked_of_kept_records(expression: pl.Expr) -> None:
    aggregate = WindowedAggregate(("key",), "ts", tumbling(1_000_000), (expression.alias("found"),))
    operators = window_operators(aggregate, SCHEMA, "node")
    assert operators.combine is None
    rows, found = streamed(operators, random.Random(1))
    expected = frame_of(rows, SCHEMA).group_by("key", maintain_order=True).agg(stable(expression.alias("found")))
    assert {row["key"]: row["found"] for row in found} == dict(expected.rows())
    with pytest.raises(hg.UsageError, match=r"min_by also of texts; .*use window"):
        running_aggregate_spec(RunningAggregate(("key",), (expression,)), SCHEMA, "node")


def test_picks_of_changes_are_refused() -> None:
    aggregate = RunningAggregate(("key",), (pl.col("n").last(),), has_changes=True)
    with pytest.raises(hg.UsageError, match=r"do not go with changes.*top\(1, by=\.\.\.\)"):
        running_aggregate_spec(aggregate, SCHEMA.append(OP_FIELD), "node")


@pytest.mark.parametrize(
    "expression",
    [
        pl.col("n").sum() + 1,
        pl.col("n").sort_by("ts", "rank").last(),
        pl.col("n").sort().last(),
        pl.col("n").reverse().first(),
        pl.col("n").shift().last(),
        pl.col("n").sort_by(pl.col("ts").max()).last(),
        pl.col("n").get(0),
        pl.col("n", "small").first(),
        pl.all().last(),
        pl.col("n").quantile(pl.col("x").max()),
        pl.col("n").first() - pl.col("n").last(),
    ],
)
def test_what_looks_alike_is_not_taken_for_it(expression: pl.Expr) -> None:
    assert recognise(expression, pl.DataFrame(pl.from_arrow(pa.Table.from_batches([], SCHEMA)))) is None


def test_conditions_are_part_of_what_is_picked() -> None:
    frame = pl.DataFrame(pl.from_arrow(pa.Table.from_batches([], SCHEMA)))
    found = recognise(pl.col("n").filter(pl.col("flag")).len(), frame)
    assert found is not None
    assert found.aggregate is Aggregate.SUM


TOTAL = pl.col("x").sum()
TIMES = pa.array([dt.datetime(2020, 1, 1)] * 3, pa.timestamp("us"))

WAYS: dict[str, Callable[[Any], Any]] = {
    "window": lambda keyed: keyed.window(hg.Tumbling("1m")),
    "session": lambda keyed: keyed.window(hg.Session("1m")),
    "running": lambda keyed: keyed,
}


KEPT: dict[str, Callable[[Any], Any]] = {
    "window": WAYS["window"],
    "session": WAYS["session"],
    "count": lambda keyed: keyed.window(hg.Count(3)),
}
"""Windows that keep their records where there is a median."""


def summed(
    way: str, values: pa.Array, directory: Path, total: pl.Expr = TOTAL, **others: pl.Expr
) -> list[dict[str, Any]]:
    rows = pa.table({"k": [1, 1, 1], "x": values, "ts": TIMES})
    pipeline, sink = hg.Pipeline("sums"), Collect(directory)
    stream = pipeline.source(hg.FromRows(rows)).with_timestamps("ts")
    (KEPT if others else WAYS)[way](stream.key_by("k")).agg(s=total, **others).sink(sink)
    run(pipeline, timeout_s=300)
    return sink.rows()


@pytest.mark.parametrize("way", WAYS)
def test_a_sum_that_is_too_large_fails(way: str, tmp_path: Path) -> None:
    with pytest.raises(PipelineFailed, match="a sum of integers is larger than int64 holds"):
        summed(way, pa.array([2**62] * 3), tmp_path)


@pytest.mark.parametrize(
    ("values", "holds"),
    [
        (pa.array([2**31 - 1] * 3, pa.int32()), "integers is larger than int32 holds"),
        (pa.array([Decimal(9) * 10**37] * 3, pa.decimal128(38, 0)), r"decimals is larger than decimal\(38, 0\) holds"),
        (pa.array([Decimal(-4) * 10**35] * 3, pa.decimal128(38, 2)), r"decimals is larger than decimal\(38, 2\) holds"),
    ],
)
def test_a_sum_in_a_narrow_type_fails(values: pa.Array, holds: str, tmp_path: Path) -> None:
    with pytest.raises(PipelineFailed, match=f"a sum of {holds}"):
        summed("window", values, tmp_path)


@pytest.mark.parametrize("way", KEPT)
def test_a_sum_of_kept_records_that_is_too_large_fails(way: str, tmp_path: Path) -> None:
    with pytest.raises(PipelineFailed, match=r"sum of integers is larger than int64 holds; sum .*cast\(pl.Float64\)"):
        summed(way, pa.array([2**62] * 3), tmp_path, m=pl.len() + 0)


@pytest.mark.parametrize(
    ("values", "total", "holds"),
    [
        (pa.array([2**31 - 1] * 3, pa.int32()), TOTAL, "integers is larger than int32"),
        (pa.array([2**63] * 3, pa.uint64()), TOTAL, "integers is larger than uint64"),
        (pa.array([-(2**62)] * 3), TOTAL / pl.len(), "integers is larger than int64"),
        (pa.array([2**62] * 3), pl.all().exclude("k", "ts").sum(), "integers is larger than int64"),
        (pa.array([Decimal(9) * 10**37] * 3, pa.decimal128(38, 0)), TOTAL, "decimals is larger than decimal(38, 0)"),
        (pa.array([Decimal(4) * 10**35] * 3, pa.decimal128(38, 2)), TOTAL, "decimals is larger than decimal(38, 2)"),
        (pa.array([2**62] * 3, pa.duration("us")), TOTAL, "durations is larger than duration"),
    ],
    ids=["int32", "uint64", "in-a-quotient", "by-pattern", "decimal", "digits", "duration"],
)
def test_no_sum_of_kept_records_wraps(values: pa.Array, total: pl.Expr, holds: str, tmp_path: Path) -> None:
    with pytest.raises(PipelineFailed, match=f"a sum of {re.escape(holds)}"):
        summed("window", values, tmp_path, total, m=pl.len() + 0)


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (pa.array([2**62, 2**62, -(2**62) - 1]), 2**62 - 1),
        (pa.array([2**62, 2**62 - 1, None]), 2**63 - 1),
        (pa.array([2**63, 2**62, 1], pa.uint64()), 3 * 2**62 + 1),
        (pa.array([Decimal("0.01"), None, Decimal("9" * 35)], pa.decimal128(38, 2)), Decimal("9" * 35 + ".01")),
    ],
)
def test_sums_of_kept_records_that_fit_are_exact(values: pa.Array, found: Any, tmp_path: Path) -> None:
    assert [row["s"] for row in summed("window", values, tmp_path, m=pl.len() + 0)] == [found]


def test_a_sum_of_what_the_key_is_has_another_name(tmp_path: Path) -> None:
    total = (pl.col("k") + pl.col("x")).sum()
    assert [row["s"] for row in summed("window", pa.array([1, 2, 3]), tmp_path, total, m=pl.len() + 0)] == [9]


@pytest.mark.parametrize("way", KEPT)
def test_a_pattern_means_no_key(way: str, tmp_path: Path) -> None:
    rows = pa.table({"k": ["a", "a", "b"], "x": [1, 2, 3], "y": [0.5, 1.0, 2.0]})
    pipeline, sink = hg.Pipeline("patterns"), Collect(tmp_path)
    stream = pipeline.source(hg.FromRows(rows.append_column("ts", TIMES))).with_timestamps("ts")
    windows = {**KEPT, "count": lambda keyed: keyed.window(hg.Count(1))}[way](stream.key_by("k"))
    windows.agg(pl.all().exclude("ts").sum()).sink(sink)
    run(pipeline, timeout_s=300)
    found = sorted((row["k"], row["x"], row["y"]) for row in sink.rows())
    assert found == (
        [("a", 1, 0.5), ("a", 2, 1.0), ("b", 3, 2.0)] if way == "count" else [("a", 3, 1.5), ("b", 3, 2.0)]
    )


def test_large_unsigned_sums_are_exact(tmp_path: Path) -> None:
    assert [row["s"] for row in summed("window", pa.array([2**63, 2**62, 1], pa.uint64()), tmp_path)] == [3 * 2**62 + 1]


def test_what_cancels_out_in_a_batch_is_no_overflow() -> None:
    target = np.array([0, 5], np.int64)
    add_values(target, np.array([0, 0, 0, 1]), np.array([2**62, 2**62, -(2**63), 1]))
    assert target.tolist() == [0, 6]
    unsigned = np.array([2**63], np.uint64)
    add_values(unsigned, np.array([0, 0]), np.array([2**63 - 1, 2**63], np.uint64), np.array([1, -1]))
    assert unsigned.tolist() == [2**63 - 1]


@pytest.mark.parametrize(
    ("dtype", "first", "second"), [("int64", 2**63 - 1, 1), ("int64", -(2**63), -1), ("uint64", 2**64 - 1, 1)]
)
def test_a_table_refuses_what_it_cannot_hold(dtype: str, first: int, second: int) -> None:
    table = AggTable([Accumulator(Kind.ADD, dtype)])
    table.update(1, np.array([0]), 1, [Values(np.array([first], dtype))])
    with pytest.raises(UsageError, match=f"larger than {dtype} holds"):
        table.update(1, np.array([0]), 1, [Values(np.array([second], dtype))])
