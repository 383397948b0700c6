from __future__ import annotations

import math
import random
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from tests.conftest import IS_DEEP, few
from tests.operators.harness import Harness, Subtasks, applied
from tests.state.backends import IN_FILES, Chosen, choose

import headgate as hg
from headgate.operators.aggregation.running_aggregate import (
    RunningAggregate,
    RunningAggregateSpec,
    running_aggregate_spec,
)
from headgate.operators.changes import OP_FIELD

SCHEMA = pa.schema(
    [("k", pa.int64()), ("g", pa.large_string()), ("n", pa.int64()), ("x", pa.float64()), ("t", pa.large_string())]
)
AGGREGATES = (
    pl.len().alias("rows"),
    pl.col("n").sum().alias("total"),
    pl.col("n").count().alias("given"),
    pl.col("n").min().alias("least"),
    pl.col("n").max().alias("most"),
    pl.col("x").mean().alias("mean"),
    pl.col("x").max().alias("most_x"),
    (pl.col("n") < 3).sum().alias("small"),
    pl.col("n").filter(pl.col("x") > 0).min().alias("least_positive"),
    pl.col("n").filter(pl.col("x") > 0).len().alias("positive"),
    pl.col("t").n_unique().alias("texts"),
    pl.col("t").drop_nulls().n_unique().alias("given_texts"),
    pl.col("n").filter(pl.col("x") > 0).drop_nulls().n_unique().alias("positive_ns"),
    (pl.col("n").cast(pl.Decimal(30, 3)) - 3).sum().alias("money"),
    (pl.col("n").cast(pl.Decimal(12, 2)) - 3).mean().alias("mean_money"),
    pl.col("n").cast(pl.Decimal(12, 2)).min().alias("least_money"),
    pl.col("n").cast(pl.Decimal(12, 2)).max().alias("most_money"),
)
KEYS = ("k", "g")
SEEDS = {"memory": range(9 if IS_DEEP else 2), IN_FILES: range(3 if IS_DEEP else 1)}
Rows = list[dict[str, Any]]


def spec_of(schema: pa.Schema = SCHEMA, **options: Any) -> RunningAggregateSpec:
    return running_aggregate_spec(RunningAggregate(KEYS, AGGREGATES, **options), schema, "node")


def drawn(rng: random.Random, count: int) -> Rows:
    return [
        {
            "k": rng.randrange(4),
            "g": rng.choice("ab"),
            "n": rng.choice([None, *range(6)]),
            "x": rng.choice([None, -0.5, 0.25, 1.0, 2.5]),
            "t": rng.choice([None, "", "u", "v"]),
        }
        for _ in range(count)
    ]


def recounted(rows: Rows) -> Rows:
    frame = pl.from_arrow(pa.Table.from_pylist(rows, SCHEMA))
    assert isinstance(frame, pl.DataFrame)
    return frame.group_by(*KEYS).agg(*AGGREGATES).sort(*KEYS).to_dicts()


@pytest.mark.parametrize(("backend", "retractions"), [("memory", False), ("memory", True), (IN_FILES, True)])
def test_the_changes_make_the_table_of_a_recount(backend: str, retractions: bool) -> None:
    spec = spec_of(retractions=retractions)
    for seed in SEEDS[backend]:
        rng, rows, found = random.Random(seed), [], []
        with choose(backend):
            subtasks = Subtasks(spec, KEYS, 2)
            for parallelism in rng.sample([1, 2, 3, 5], 4):
                for _ in range(rng.randrange(1, 4)):
                    more = drawn(rng, rng.choice([1, 2, 30]))
                    rows += more
                    subtasks.send(pa.RecordBatch.from_pylist(more, SCHEMA))
                found += subtasks.rows()
                assert applied(found, KEYS, retractions=retractions, strict=True) == recounted(rows)
                subtasks = Subtasks(spec, KEYS, parallelism, subtasks.snapshot())


def changed(rng: random.Random, table: dict[int, Rows], count: int) -> Rows:
    """Return changes of a table whose rows are in ``table`` by a number."""
    found: Rows = []
    for row in drawn(rng, count):
        number = rng.randrange(12)
        there = table.get(number)
        if there is None:
            table[number] = [row]
            found.append({**row, "op": "insert"})
        elif rng.random() < 0.5:
            found += [{**there[0], "op": "update_before"}, {**row, "op": "update_after"}]
            table[number] = [row]
        else:
            found.append({**there[0], "op": "delete"})
            del table[number]
    return found


@pytest.mark.parametrize("backend", ["memory", IN_FILES])
def test_changes_of_the_input_are_taken_back(backend: str) -> None:
    schema = SCHEMA.append(OP_FIELD)
    spec = spec_of(schema, has_changes=True, retractions=True)
    for seed in SEEDS[backend]:
        rng, found = random.Random(seed), []
        table: dict[int, Rows] = {}
        with choose(backend):
            subtasks = Subtasks(spec, KEYS, 2)
            for parallelism in rng.sample([1, 2, 3, 5], 4):
                for _ in range(rng.randrange(1, 4)):
                    subtasks.send(pa.RecordBatch.from_pylist(changed(rng, table, rng.choice([1, 2, 20])), schema))
                found += subtasks.rows()
                expected = recounted([row for rows in table.values() for row in rows])
                assert applied(found, KEYS, retractions=True, strict=True) == expected
                subtasks = Subtasks(spec, KEYS, parallelism, subtasks.snapshot())


def test_a_row_that_did_not_come_is_not_taken_back() -> None:
    harness = Harness(spec_of(SCHEMA.append(OP_FIELD), has_changes=True))
    row = {"k": 1, "g": "a", "n": 1, "x": 1.0, "t": "u", "op": "delete"}
    with pytest.raises(hg.UsageError, match="takes back a row that did not come"):
        harness.send(pa.RecordBatch.from_pylist([row], SCHEMA.append(OP_FIELD)))


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("backend", few(SEEDS, 1))
def test_numbers_that_are_not_finite_are_taken_back(backend: str, odd: float) -> None:
    schema = SCHEMA.append(OP_FIELD)
    x = pl.col("x")
    aggregates = (x.sum().alias("sum"), x.mean().alias("mean"), x.min().alias("min"), x.max().alias("max"))
    spec = running_aggregate_spec(RunningAggregate(("k",), aggregates, has_changes=True), schema, "node")
    rows = [
        {"k": 1, "g": "", "n": 0, "x": x, "t": "", "op": op}
        for x, op in [(1.0, "insert"), (odd, "insert"), (-odd, "insert"), (-odd, "delete"), (odd, "delete")]
    ]
    with choose(backend):
        subtasks, found = Subtasks(spec, ("k",), 2), []
        for row in rows:
            subtasks.send(pa.RecordBatch.from_pylist([row], schema))
            found += subtasks.rows()
            subtasks = Subtasks(spec, ("k",), 1, subtasks.snapshot())
    expected = [1.0, odd, math.nan, odd, 1.0]
    assert [repr(row["sum"]) for row in found] == [repr(value) for value in expected]
    assert [repr(row["mean"] * n) for row, n in zip(found, (1, 2, 3, 2, 1), strict=True)] == list(map(repr, expected))


@pytest.mark.parametrize("backend", few(SEEDS, 1))
def test_the_extremes_of_nothing_but_nan_are_nan(backend: str) -> None:
    schema = SCHEMA.append(OP_FIELD)
    aggregates = (pl.col("x").min().alias("min"), pl.col("x").max().alias("max"), pl.len().alias("n"))
    spec = running_aggregate_spec(RunningAggregate(("k",), aggregates, has_changes=True), schema, "node")
    steps = [
        (math.nan, "insert"),
        (None, "insert"),
        (-0.0, "insert"),
        (math.nan, "insert"),
        (0.0, "insert"),
        (0.0, "delete"),
        (-0.0, "delete"),
        (math.nan, "delete"),
        (math.nan, "delete"),
        (2.0, "insert"),
    ]
    with choose(backend):
        subtasks, found = Subtasks(spec, ("k",), 2), []
        for x, op in steps:
            row = {"k": 1, "g": "", "n": 0, "x": x, "t": "", "op": op}
            subtasks.send(pa.RecordBatch.from_pylist([row], schema))
            found += subtasks.rows()
            subtasks = Subtasks(spec, ("k",), 1, subtasks.snapshot())
    for name in ("min", "max"):
        values = [None if row[name] is None else row[name] + 0.0 for row in found]
        assert str(values) == "[nan, nan, 0.0, 0.0, 0.0, 0.0, nan, nan, None, 2.0]"


ALL = pl.col("n").n_unique().alias("all")
GIVEN = pl.col("n").filter(pl.col("x") > 0).drop_nulls().n_unique().alias("given")
WITH_NULL = pl.when(pl.col("x") > 0).then(pl.col("n")).n_unique().alias("with_null")


@pytest.mark.parametrize("backend", few(SEEDS, 1))
@pytest.mark.parametrize(
    "aggregates",
    [[(ALL, GIVEN, WITH_NULL)], [(WITH_NULL, GIVEN, ALL)], [(GIVEN,), (WITH_NULL,)], [(WITH_NULL,), (GIVEN,)]],
)
def test_distinct_values_that_are_said_in_two_ways_are_counted_once(
    backend: str, aggregates: list[tuple[pl.Expr, ...]]
) -> None:
    """In one aggregation, and where a restart goes on with the other one: both have the same state."""
    rng, rows, states = random.Random(7), [], list[Any]()
    texts = set()
    with choose(backend):
        for given in aggregates:
            spec = running_aggregate_spec(RunningAggregate(KEYS, given), SCHEMA, "node")
            texts.add(spec.state_text())
            subtasks = Subtasks(spec, KEYS, 2, states)
            rows += drawn(rng, 40)
            subtasks.send(pa.RecordBatch.from_pylist(rows[-40:], SCHEMA))
            of_each = [{"k": k, "g": g, "n": 10 + len(states), "x": 1.0, "t": None} for k in range(4) for g in "ab"]
            rows += of_each
            subtasks.send(pa.RecordBatch.from_pylist(of_each, SCHEMA))
            found = {(row["k"], row["g"]): [row[one.meta.output_name()] for one in given] for row in subtasks.rows()}
            frame = pl.DataFrame(pa.Table.from_pylist(rows, SCHEMA))
            for k, g, *expected in frame.group_by(*KEYS).agg(*given).rows():
                assert found.get((k, g), expected) == expected
            assert len(found) == 8
            states = subtasks.snapshot()
    assert len(texts) == 1


def test_an_unchanged_result_is_not_sent_again() -> None:
    spec = running_aggregate_spec(RunningAggregate(("k",), (pl.col("n").max(),)), SCHEMA, "node")
    harness = Harness(spec)
    for n in (3, 2, 3, 4):
        harness.send(pa.RecordBatch.from_pylist([{"k": 1, "g": "", "n": n, "x": 0.0, "t": ""}], SCHEMA))
    assert harness.out.rows() == [{"k": 1, "n": 3, "op": "insert"}, {"k": 1, "n": 4, "op": "update_after"}]


@pytest.mark.parametrize("backend", ["memory", "rocksdb-without-cache"])
def test_a_key_without_records_for_its_ttl_begins_again(backend: str) -> None:
    aggregate = RunningAggregate(("k",), (pl.len().alias("rows"),), ttl=hg.TTL("1m"))
    spec = running_aggregate_spec(aggregate, SCHEMA, "node")
    batch = pa.RecordBatch.from_pylist([{"k": 1, "g": "", "n": 1, "x": 0.0, "t": ""}], SCHEMA)
    with choose(backend):
        harness = Harness(spec, worker=Chosen.worker)
        for wait_ms in (0, 59_000, 59_000, 60_000):
            harness.advance(wait_ms)
            harness.send(batch)
        assert [(row["op"], row["rows"]) for row in harness.out.rows()] == [
            ("insert", 1),
            ("update_after", 2),
            ("update_after", 3),
            ("insert", 1),
        ]


@pytest.mark.parametrize(
    ("aggregates", "options", "message"),
    [
        ((pl.col("n").skew(),), {}, r"cannot be kept up to date record by record; len, count"),
        (
            (pl.col("n").cast(pl.Decimal(19, 2)).max(),),
            {},
            "over one record can, where it is an integer",
        ),
        (
            (pl.col("n").cast(pl.String).max(),),
            {},
            r"min and max of these \(of decimals of at most 18 digits\) and of times, and n_unique",
        ),
        ((pl.col("x").n_unique(),), {}, r"cannot be kept up to date"),
        (((pl.col("n") > 1).quantile(0.5),), {}, r"cannot be kept up to date"),
        ((pl.col("nothing").sum(),), {}, "nothing"),
        ((pl.col("n").sum().alias("k"),), {}, "more than one occurrence"),
        ((pl.col("n").sum().alias("op"),), {}, "two result columns have the same name"),
        ((pl.len(),), {"ttl": hg.TTL("1s"), "retractions": True}, "ttl= does not go with retractions=True"),
        ((pl.col("t").n_unique(),), {"ttl": hg.TTL("1s")}, "ttl= does not go with n_unique"),
        ((pl.len(),), {"has_changes": True}, "there is no column 'op'"),
    ],
)
def test_what_cannot_be_aggregated_is_refused(
    aggregates: tuple[pl.Expr, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(hg.UsageError, match=message):
        running_aggregate_spec(RunningAggregate(("k",), aggregates, **options), SCHEMA, "node")


def test_the_state_of_other_aggregates_is_another() -> None:
    def text(*aggregates: pl.Expr) -> str:
        return running_aggregate_spec(RunningAggregate(("k",), aggregates), SCHEMA, "node").state_text()

    assert text(pl.col("n").sum()) == text(pl.col("n").sum().alias("other"))
    assert text(pl.col("n").sum()) != text((pl.col("n") + 1).sum())
    assert text(pl.col("n").sum()) != text(pl.col("n").max())


A = pl.col("a")


@pytest.mark.parametrize(
    ("aggregate", "one", "other", "is_same"),
    [
        *((aggregate, pa.decimal128(12, 2), pa.decimal128(12, 3), False) for aggregate in (A.sum(), A.mean(), A.max())),
        *((aggregate, pa.decimal128(12, 2), pa.decimal128(15, 2), True) for aggregate in (A.sum(), A.mean(), A.max())),
        *((aggregate, pa.date32(), pa.timestamp("us"), False) for aggregate in (A.max(), A.first(), A.last())),
        (A.min(), pa.duration("us"), pa.int64(), False),
        *((aggregate, pa.int64(), pa.float64(), False) for aggregate in (A.median(), pl.col("k").max_by("a"))),
        *((aggregate, pa.int64(), pa.uint64(), False) for aggregate in (A.median(), pl.col("k").max_by("a"))),
        *((aggregate, pa.int32(), pa.int64(), True) for aggregate in (A.median(), A.max(), pl.col("k").max_by("a"))),
    ],
)
def test_what_integers_in_state_stand_for_is_part_of_its_identity(
    aggregate: pl.Expr, one: pa.DataType, other: pa.DataType, *, is_same: bool
) -> None:
    """Else the days of a date went on as microseconds when its column becomes a timestamp."""

    def text(dtype: pa.DataType) -> str:
        schema = pa.schema([("k", pa.int64()), ("a", dtype)])
        named = (aggregate.alias("result"),)
        return running_aggregate_spec(RunningAggregate(("k",), named), schema, "node").state_text()

    assert (text(one) == text(other)) == is_same


def test_aggregates_that_differ_by_an_option_alone_have_state_of_their_own() -> None:
    """Polars leaves out the digits of ``round`` and formats when it writes an expression."""
    rounded = [pl.col("x").round(digits) for digits in (0, 1, 2)]
    cut = [pl.col("t").str.contains(what, literal=literal) for what, literal in (("u.", True), ("u.", False))]
    aggregates = [
        *(one.sum().alias(f"sum {i}") for i, one in enumerate(rounded)),
        *(one.min().alias(f"min {i}") for i, one in enumerate(rounded)),
        *(one.median().alias(f"median {i}") for i, one in enumerate(rounded)),
        *(one.n_unique().alias(f"kinds {i}") for i, one in enumerate(cut)),
        *(one.sum().alias(f"found {i}") for i, one in enumerate(cut)),
    ]
    rows = [{"k": 1, "g": "a", "x": x, "t": t} for x, t in ((1.256, "u."), (2.344, "uv"), (2.366, "w"))]
    spec = running_aggregate_spec(RunningAggregate(KEYS, tuple(aggregates)), SCHEMA, "node")
    run = Harness(spec)
    run.send(pa.RecordBatch.from_pylist(rows, SCHEMA))
    found = run.out.rows()[-1]
    expected = pl.DataFrame(rows).select(aggregates).to_dicts()[0]
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    texts = [
        running_aggregate_spec(RunningAggregate(KEYS, (one.alias("a"),)), SCHEMA, "node").state_text()
        for one in (*(r.sum() for r in rounded), *(r.median() for r in rounded), *(c.n_unique() for c in cut))
    ]
    assert len(set(texts)) == len(texts)
