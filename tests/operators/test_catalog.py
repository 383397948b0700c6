from __future__ import annotations

import pickle  # noqa: TID251 (specs of our own making; Spark ships them so)

import polars as pl
import pyarrow as pa
import pytest
from tests.operators.harness import Recorder

from headgate.operators import catalog
from headgate.operators.base import OperatorContext, OperatorSpec
from headgate.operators.catalog import (
    ExpressionsSpec,
    KeyCheckSpec,
    MapBatchesSpec,
    ReduceSpec,
    RowFunctionSpec,
    RowVerb,
    WindowedAggregate,
    WithTimestampsSpec,
    filter_spec,
    output_schema,
    process_spec,
    state_text,
    window_operators,
)
from headgate.operators.process.batch_aggregation import BatchStateHandle
from headgate.operators.process.batch_process import BatchProcessFunction
from headgate.operators.process.row_process import ProcessFunction, StateHandle
from headgate.operators.windows.window_assigner import tumbling

SCHEMA = pa.schema([("key", pa.int64()), ("ts", pa.timestamp("us"))])


def same(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def first(left: dict[str, object], right: dict[str, object]) -> dict[str, object]:
    return left


class Counting(ProcessFunction):
    def open(self, state: StateHandle) -> None:
        self.count = state.value("count", pa.int64())


class CountingBatches(BatchProcessFunction):
    def open(self, state: BatchStateHandle) -> None:
        self.count = state.value("count", pa.int64())


class Stateless(ProcessFunction):
    pass


def window(*aggregates: pl.Expr) -> OperatorSpec:
    return window_operators(WindowedAggregate(("key",), "ts", tumbling(1_000), aggregates), SCHEMA, "w").window


SPECS: list[tuple[OperatorSpec, bool]] = [
    (filter_spec(pl.col("key") > 0), False),
    (KeyCheckSpec(("key",)), False),
    (MapBatchesSpec(same), False),
    (RowFunctionSpec(RowVerb.FILTER, bool), False),
    (ReduceSpec(("key",), first, SCHEMA), True),
    (process_spec("node", ("key",), Counting(), SCHEMA), True),
    (process_spec("node", ("key",), Stateless(), SCHEMA), False),
    (process_spec("node", ("key",), CountingBatches(), SCHEMA), True),
    (WithTimestampsSpec("ts", 5), True),
    (window(pl.len(), (pl.col("key") * 2).max().alias("m")), True),
    (window(pl.col("key").median().alias("m")), True),
]


@pytest.mark.parametrize(("spec", "is_stateful"), SPECS)
def test_every_spec_survives_the_trip_to_a_worker_and_says_whether_it_has_state(
    spec: OperatorSpec, is_stateful: bool
) -> None:
    there = pickle.loads(pickle.dumps(spec))
    assert output_schema(there, SCHEMA, "node") == output_schema(spec, SCHEMA, "node")
    assert state_text(there) == state_text(spec)
    assert bool(state_text(spec)) == is_stateful
    operator = there.build()
    operator.open(OperatorContext("p", "node", 0, 1, 128, lambda: 0), Recorder())
    assert (operator.freeze() is not None) == is_stateful


def test_the_catalogue_names_everything_it_exports() -> None:
    assert sorted(catalog.__all__, key=str.lower) == sorted(set(catalog.__all__), key=str.lower)
    assert all(hasattr(catalog, name) for name in catalog.__all__)
    assert catalog.fuse([filter_spec(pl.col("key") > 0)]) != ExpressionsSpec(())
