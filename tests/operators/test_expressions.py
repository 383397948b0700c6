from __future__ import annotations

import polars as pl
import pyarrow as pa
import pytest
from tests.operators.harness import Harness

from headgate.errors import UsageError
from headgate.operators.expressions import filter_spec, fuse, select_spec, with_columns_spec
from headgate.operators.user_function import UserFunctionError

SCHEMA = pa.schema([("level", pa.large_string()), ("size", pa.int64())])
BATCH = pa.record_batch([["ERROR", "INFO", None], [1, 2, 3]], schema=SCHEMA)


def test_filter_keeps_records_for_which_the_predicate_is_true_and_drops_null() -> None:  # OP1
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


def test_an_unknown_column_is_refused_with_operator_and_columns() -> None:
    with pytest.raises(UsageError, match=r"operator 'errors': .*levle.*level: large_string, size: int64"):
        filter_spec(pl.col("levle") == "ERROR").output_schema(SCHEMA, "errors")


@pytest.mark.parametrize(
    "expression",
    [pl.col("size").sum(), pl.len(), pl.col("size").shift(1), pl.col("size").cum_sum(), pl.col("size").any()],
)
def test_an_expression_that_looks_at_other_records_is_refused(expression: pl.Expr) -> None:  # OP1
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
    with pytest.raises(UserFunctionError, match="operator 'node' failed on a batch of 3 records"):
        run.send(BATCH)
