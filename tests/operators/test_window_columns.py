"""Windows that are open when a program is changed: wider columns go on, whether partial results or records are kept."""

from __future__ import annotations

import polars as pl
import pyarrow as pa
import pytest
from tests.operators.harness import Harness

from headgate.model.schema_evolution import NO_OPERATOR_RULES
from headgate.model.state_schema import StateIdentity
from headgate.operators import catalog
from headgate.operators.windows.aligned_windows import WindowOperators, window_operators
from headgate.operators.windows.window_assigner import tumbling
from headgate.operators.windows.window_plan import WindowedAggregate
from headgate.protocol.checkpoints.compatibility import Judged, judged

SUMS = (pl.col("n").sum().alias("sum"), pl.col("n").min().alias("min"), pl.col("n").mean().alias("mean"))
MEDIAN = (pl.col("n").median().alias("median"),)


def windowed(dtype: pa.DataType, aggregates: tuple[pl.Expr, ...]) -> WindowOperators:
    schema = pa.schema([("key", pa.int64()), ("ts", pa.timestamp("us")), ("n", dtype), ("m", pa.int64())])
    return window_operators(WindowedAggregate(("key",), "ts", tumbling(1_000), aggregates), schema, "counts")


def identity(dtype: pa.DataType, aggregates: tuple[pl.Expr, ...]) -> str:
    return catalog.state_text(windowed(dtype, aggregates).window)


def found(old: str, new: str) -> Judged:
    return judged("counts", "checkpoint 7", old, new, NO_OPERATOR_RULES)


@pytest.mark.parametrize(("narrow", "wide"), [(pa.int32(), pa.int64()), (pa.float32(), pa.float64())])
def test_wider_columns_leave_the_partial_results_of_a_window_as_they_are(
    narrow: pa.DataType, wide: pa.DataType
) -> None:  # EV9
    assert identity(narrow, SUMS) == identity(wide, SUMS)
    refusal = found(identity(pa.int32(), SUMS), identity(pa.float64(), SUMS)).refusal
    assert refusal is not None
    assert "is [window-merge(" in refusal, "a sum of whole numbers is no sum of others"


def test_records_of_open_windows_become_wider_ones() -> None:  # EV9
    old, new = windowed(pa.int32(), (*MEDIAN, pl.col("m").median())), windowed(pa.float64(), MEDIAN)
    assert StateIdentity(identity(pa.int32(), MEDIAN)).text.startswith("window-buffer(")
    assert found(catalog.state_text(old.window), catalog.state_text(new.window)) == Judged(
        changes=(
            "operator 'counts': in state 'records', int32 becomes double in 'n'",
            "operator 'counts': in state 'records', 'm' is removed",
        )
    )
    run = Harness(old.window)
    rows = [{"key": 1, "ts": at * 1_000, "n": at, "m": 0} for at in (10, 20, 60)]
    schema = pa.schema([("key", pa.int64()), ("ts", pa.timestamp("us")), ("n", pa.int32()), ("m", pa.int64())])
    run.send(pa.RecordBatch.from_pylist(rows, schema=schema))
    later = Harness(new.window, [run.snapshot()])
    wider = schema.set(2, pa.field("n", pa.float64()))
    later.send(pa.RecordBatch.from_pylist([{"key": 1, "ts": 70_000, "n": 80.5, "m": 0}], schema=wider))
    later.operator.on_watermark(5_000)
    assert [row["median"] for row in later.out.rows()] == [40.0]
