from __future__ import annotations

from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.operators.harness import Harness

from headgate.errors import UsageError
from headgate.operators.expressions import (
    ExplodeSpec,
    ExpressionsSpec,
    expression_text,
    filter_spec,
    fuse,
    select_spec,
    with_columns_spec,
)
from headgate.operators.user_functions import UserFunctionError

SCHEMA = pa.schema([("level", pa.large_string()), ("size", pa.int64())])
BATCH = pa.record_batch([["ERROR", "INFO", None], [1, 2, 3]], schema=SCHEMA)


def test_filter_keeps_records_for_which_the_predicate_is_true_and_drops_null() -> None:
    run = Harness(filter_spec(pl.col("level") == "ERROR"))
    run.send(BATCH)
    assert run.out.rows() == [{"level": "ERROR", "size": 1}]


def test_fused_steps_give_what_the_steps_give_one_after_another() -> None:
    fused = fuse(
        [
            with_columns_spec((pl.col("size") * 2).alias("double")),
            filter_spec(pl.col("double") > 2),
            select_spec(pl.col("double"), pl.col("level").str.to_lowercase()),
        ]
    )
    run = Harness(fused)
    run.send(BATCH)
    assert run.out.rows() == [{"double": 4, "level": "info"}, {"double": 6, "level": None}]
    assert run.out.batches[0].schema == fused.output_schema(SCHEMA, "node")


def test_each_step_sees_what_the_one_before_it_left() -> None:
    """A filter guards what follows it, another filter too: neither looks at the records that the first dropped."""
    number = pl.col("level").cast(pl.Int64)
    run = Harness(
        fuse(
            [
                filter_spec(pl.col("size") > 1, pl.lit(True)),
                filter_spec(pl.col("level").is_not_null(), pl.col("size") < 4),
                filter_spec(number > 5),
                with_columns_spec(number.alias("number")),
                select_spec(pl.col("number") + 1, pl.col("size")),
                filter_spec(pl.lit(True)),
            ]
        )
    )
    run.send(pa.record_batch([["x", "7", None, "3", "x"], [1, 2, 3, 2, 4]], schema=SCHEMA))
    assert run.out.rows() == [{"number": 8, "size": 2}]
    run.send(pa.record_batch([["x"], [1]], schema=SCHEMA))
    assert len(run.out.batches) == 1


@pytest.mark.parametrize("answer", [True, False, None])
def test_a_filter_by_a_literal_keeps_all_or_none(answer: bool | None) -> None:
    alone, fused = filter_spec(pl.lit(answer, pl.Boolean)), filter_spec(pl.lit(answer, pl.Boolean))
    for spec in (alone, fuse([fused, with_columns_spec(pl.col("size").alias("same"))])):
        run = Harness(spec)
        run.send(BATCH)
        assert [row["size"] for row in run.out.rows()] == ([1, 2, 3] if answer else [])


@pytest.mark.parametrize("predicate", [pl.col("size"), pl.lit(1), pl.lit("x"), pl.col("level")])
def test_a_predicate_that_is_no_boolean_is_refused(predicate: pl.Expr) -> None:
    with pytest.raises(UsageError, match="operator 'node'"):
        filter_spec(predicate).output_schema(SCHEMA, "node")


def test_an_unknown_column_is_refused_with_operator_and_columns() -> None:
    with pytest.raises(UsageError, match=r"operator 'errors': .*levle.*level: large_string, size: int64"):
        filter_spec(pl.col("levle") == "ERROR").output_schema(SCHEMA, "errors")


@pytest.mark.parametrize(
    "expression",
    [pl.col("size").sum(), pl.len(), pl.col("size").shift(1), pl.col("size").cum_sum(), pl.col("size").any()],
)
def test_an_expression_that_looks_at_other_records_is_refused(expression: pl.Expr) -> None:
    with pytest.raises(UsageError, match="depends on other records"):
        select_spec(expression).output_schema(SCHEMA, "node")


def test_horizontal_and_list_functions_are_not_mistaken_for_aggregates() -> None:
    expressions = [
        pl.any_horizontal(pl.col("size") > 1).alias("a"),
        pl.max_horizontal("size", 2).alias("b"),
        pl.col("level").str.split("R").list.len().alias("c"),
        pl.lit("Agg").alias("Len"),
    ]
    assert with_columns_spec(*expressions).output_schema(SCHEMA, "node").names[2:] == ["a", "b", "c", "Len"]


def test_an_expression_that_fails_on_data_names_the_operator() -> None:
    run = Harness(select_spec(pl.col("level").cast(pl.Int64)))
    with pytest.raises(UserFunctionError, match="its function failed on a batch of 3 records\n") as raised:
        run.send(BATCH)
    assert str(raised.value).startswith("operator 'node': polars.exceptions.InvalidOperationError: conversion from ")
    assert "conversion from `str` to `i64` failed" in raised.value.traceback_text
    assert "Traceback" not in raised.value.traceback_text  # the user's code is not in it


def test_expressions_that_run_as_one_count_their_records_one_by_one() -> None:
    again = with_columns_spec((pl.col("size") + 1).alias("more"))
    steps = [filter_spec(pl.col("size") > 1), again, select_spec(pl.col("more")), filter_spec(pl.col("more") > 3)]
    run = Harness(fuse([*steps, again_of("more")]))
    run.send(BATCH)
    run.send(BATCH.slice(0, 1))
    tallies = run.operator.tallies  # type: ignore[attr-defined]
    assert [(t.records_in, t.records_out) for t in tallies] == [(4, 2), (2, 2), (2, 2), (2, 1), (1, 1)]


def again_of(column: str) -> ExpressionsSpec:
    return with_columns_spec((pl.col(column) + 1).alias("again"))


def test_literals_alone_are_a_record_for_each_record() -> None:
    run = Harness(fuse([select_spec(pl.lit(7).alias("x"), pl.lit("a").alias("y"))]))
    run.send(BATCH)
    assert run.out.rows() == [{"x": 7, "y": "a"}] * 3
    run = Harness(fuse([select_spec(pl.lit(7).alias("x")), with_columns_spec((pl.col("x") + 1).alias("y"))]))
    run.send(BATCH)
    assert run.out.rows() == [{"x": 7, "y": 8}] * 3


X = pl.col("x")
ALIKE = [
    (X.round(1), X.round(2)),
    (X.str.contains("a.b", literal=True), X.str.contains("a.b")),
    (X.dt.convert_time_zone("Asia/Tokyo").dt.hour(), X.dt.convert_time_zone("UTC").dt.hour()),
    (X.dt.to_string("%Y"), X.dt.to_string("%m")),
    (X.str.to_datetime("%Y"), X.str.to_datetime("%m")),
    (X.fill_null(strategy="zero"), X.fill_null(strategy="one")),
    (X.is_in(list(range(100))), X.is_in([*range(50), 0, *range(51, 100)])),
    (X.is_in([1.0, 2.00000001]), X.is_in([1.0, 2.00000002])),
    (X.is_in([1, 2], nulls_equal=True), X.is_in([1, 2])),
    (X + pl.lit(1, pl.Int8), X + pl.lit(1, pl.Int64)),
    (X + pl.lit(None, pl.Int8), X + pl.lit(None, pl.Int64)),
    (X.hash(1), X.hash(2)),
    (X.str.replace('a"]) + b(["c', ""), X.str.replace("a", "")),
]
"""Expressions of which Polars' texts say the same, or hardly more; the last has such a text in a name."""


@pytest.mark.parametrize(("one", "other"), ALIKE, ids=str)
def test_expressions_that_differ_have_texts_that_differ(one: pl.Expr, other: pl.Expr) -> None:
    assert expression_text(one) != expression_text(other)
    assert expression_text(one).startswith(str(one))


@pytest.mark.parametrize(
    "plain",
    [
        *(X, X + 1, X * 2.5 - pl.col("a.b c"), X.abs(), X.dt.hour(), X.is_null(), X.str.len_chars(), X.fill_null(0)),
        *(X.cast(pl.Int32), X.alias("y"), X.filter(X > "a"), pl.when(X > 1).then(X).otherwise(None)),
    ],
    ids=str,
)
def test_a_text_that_says_everything_is_that_of_polars(plain: pl.Expr) -> None:
    assert expression_text(plain) == str(plain)


ITEM = pa.struct([("sku", pa.large_string()), ("tags", pa.large_list(pa.int64()))])
LISTS_SCHEMA = pa.schema([("id", pa.int64()), ("items", pa.large_list(ITEM))])
LISTS = st.none() | st.lists(
    st.none() | st.fixed_dictionaries({"sku": st.none() | st.text(max_size=2), "tags": st.none() | st.just([1, None])}),
    max_size=4,
)


def exploded(rows: list[dict[str, Any]], spec: ExplodeSpec, start: int = 0) -> list[dict[str, Any]]:
    run = Harness(spec)
    run.send(pa.RecordBatch.from_pylist(rows, LISTS_SCHEMA).slice(start))
    assert all(batch.schema == spec.output_schema(LISTS_SCHEMA, "node") for batch in run.out.batches)
    return run.out.rows()


@given(lists=st.lists(LISTS, max_size=8), keep_empty=st.booleans(), start=st.integers(0, 3))
def test_each_element_is_a_row_as_in_polars(lists: list[Any], keep_empty: bool, start: int) -> None:
    rows = [{"id": i, "items": found} for i, found in enumerate(lists)]
    frame = pl.DataFrame(pa.Table.from_pylist(rows, LISTS_SCHEMA)).slice(start)
    wanted = frame.explode("items", empty_as_null=keep_empty, keep_nulls=keep_empty)
    assert exploded(rows, ExplodeSpec("items", keep_empty), start) == wanted.to_dicts()


def test_positions_count_from_zero_and_are_null_where_nothing_is() -> None:
    rows = [{"id": 1, "items": [None, {"sku": "a", "tags": []}]}, {"id": 2, "items": []}, {"id": 3, "items": None}]
    found = exploded(rows, ExplodeSpec("items", keep_empty=True, position="at"))
    assert [(row["id"], row["at"]) for row in found] == [(1, 0), (1, 1), (2, None), (3, None)]
    assert [row["items"] for row in found] == [None, {"sku": "a", "tags": []}, None, None]
    assert [row["at"] for row in exploded(rows, ExplodeSpec("items", position="at"))] == [0, 1]
    assert exploded(rows[1:], ExplodeSpec("items")) == []


def test_long_lists_are_sent_in_parts() -> None:
    schema = pa.schema([("n", pa.large_list(pa.int64()))])
    run = Harness(ExplodeSpec("n"))
    run.send(pa.record_batch([[list(range(30_000))] * 5 + [[]] + [list(range(150_000))]], schema))
    assert [batch.num_rows for batch in run.out.batches] == [60_000, 60_000, 30_000, 150_000]
    assert pa.Table.from_batches(run.out.batches)["n"].to_pylist() == [*[*range(30_000)] * 5, *range(150_000)]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (ExplodeSpec("id"), "needs a column of lists or maps, and 'id' is none"),
        (ExplodeSpec("item"), "no column 'item'"),
        (ExplodeSpec("items", position="id"), "there is a column 'id' already"),
    ],
)
def test_what_cannot_be_exploded_is_refused(spec: ExplodeSpec, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        spec.output_schema(LISTS_SCHEMA, "node")
