"""Operators with several inputs and outputs, each with a name and a schema of its own, in real workers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from pyspark import cloudpickle
from tests.conftest import few
from tests.runtime.running import definition_of, pipeline_at

import headgate as hg
from headgate.api.streams.stream import Stream
from headgate.connectors.files.file_committer import read_committed
from headgate.errors import UsageError
from headgate.model.graph import Edge, InputName, OutputTag, Partitioner, Role
from headgate.model.ids import NodeName
from headgate.operators import catalog
from headgate.operators.base import Operator

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import tests

ORDERS, PAYMENTS = InputName("orders"), InputName("payments")
PAID, UNPAID = OutputTag("main"), OutputTag("unpaid")
ORDER = pa.schema([("order", pa.int64()), ("amount", pa.int64())])
PAYMENT = pa.schema([("payer", pa.large_string()), ("order", pa.int64())])


@dataclass(frozen=True)
class MatchSpec:
    """Orders with their payments; what is never paid goes to a side output when the input ends."""

    def output_schemas(self, inputs: Mapping[InputName, pa.Schema], node: str) -> Mapping[OutputTag, pa.Schema]:
        if set(inputs) != {ORDERS, PAYMENTS}:
            raise UsageError(f"operator '{node}' needs orders and payments, not {sorted(inputs)}")
        return {PAID: pa.schema([*inputs[ORDERS], inputs[PAYMENTS].field("payer")]), UNPAID: inputs[ORDERS]}

    def build(self) -> Operator:
        return MatchOperator()


class MatchOperator(Operator):
    def __init__(self) -> None:
        self._orders: list[pa.RecordBatch] = []
        self._payments: list[pa.RecordBatch] = []

    def process_input(self, name: InputName, batch: pa.RecordBatch) -> None:
        assert batch.schema.equals(ORDER if name == ORDERS else PAYMENT)
        (self._orders if name == ORDERS else self._payments).append(batch)

    def finish(self) -> None:
        orders = pl.from_arrow(pa.Table.from_batches(self._orders, ORDER))
        payments = pl.from_arrow(pa.Table.from_batches(self._payments, PAYMENT))
        assert isinstance(orders, pl.DataFrame)
        assert isinstance(payments, pl.DataFrame)
        self._emit(PAID, orders.join(payments, on="order"), [*ORDER, PAYMENT.field("payer")])
        self._emit(UNPAID, orders.join(payments, on="order", how="anti"), list(ORDER))

    def _emit(self, tag: OutputTag, frame: pl.DataFrame, fields: list[pa.Field]) -> None:
        for batch in frame.to_arrow().cast(pa.schema(fields)).to_batches():
            if tag == PAID:
                self.output.emit(batch)
            else:
                self.output.emit_to(tag, batch)


def matched(pipeline: hg.Pipeline, orders: Stream, payments: Stream) -> tuple[Stream, Stream]:
    """Return what is paid and what is not, as an API of joins will."""
    edges = tuple(
        Edge(edge.upstream, Partitioner.HASH, ("order",), edge.tag, name)
        for stream, name in ((orders, ORDERS), (payments, PAYMENTS))
        for edge in stream._all_edges
    )
    spec, node = MatchSpec(), NodeName("match")
    schemas = dict(catalog.output_schemas(spec, {ORDERS: orders._schema, PAYMENTS: payments._schema}, str(node)))
    main = schemas.pop(PAID)
    pipeline._builder.add(node, Role.OPERATOR, edges, spec, main, side_outputs=schemas)
    return Stream(pipeline, (Edge(node),), main), Stream(pipeline, (Edge(node, tag=UNPAID),), schemas[UNPAID])


@pytest.mark.parametrize("parallelism", few([3, 1], 1))
def test_an_operator_knows_its_inputs_apart_and_has_outputs_of_their_own(
    start: Any, tmp_path: Path, parallelism: int
) -> None:
    pipeline = pipeline_at(tmp_path, parallelism=parallelism)
    numbers = range(3_000)
    orders = pipeline.source(hg.FromRows([{"order": n, "amount": n * 10} for n in numbers]))
    payments = pipeline.source(hg.FromRows([{"payer": f"p{n}", "order": n} for n in numbers if n % 3]))
    paid, unpaid = matched(pipeline, orders, payments)
    paid.sink(hg.FileSink(tmp_path / "paid", "parquet"), name="paid")
    unpaid.filter(pl.col("amount") > 0).sink(hg.FileSink(tmp_path / "unpaid", "parquet"), name="unpaid")  # chained
    assert start(definition_of(pipeline)).result().is_finished
    found = read_committed(str(tmp_path / "paid")).sort("order").to_dicts()
    assert found == [{"order": n, "amount": n * 10, "payer": f"p{n}"} for n in numbers if n % 3]
    left = read_committed(str(tmp_path / "unpaid")).sort("order").to_dicts()
    assert left == [{"order": n, "amount": n * 10} for n in numbers if n and n % 3 == 0]


def test_an_operator_says_which_inputs_it_needs() -> None:
    with pytest.raises(UsageError, match=r"operator 'match' needs orders and payments, not \['orders'\]"):
        catalog.output_schemas(MatchSpec(), {ORDERS: ORDER}, "match")
