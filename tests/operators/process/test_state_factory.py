"""Where operators get their state: from the factory of their context."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from tests.operators.harness import Recorder

import headgate as hg
import headgate.operators
from headgate.operators.base import OperatorContext, OperatorSpec
from headgate.operators.process.connected_process import process_spec
from headgate.operators.reduction import ReduceSpec
from headgate.operators.windows.aligned_windows import window_operators
from headgate.operators.windows.window_assigner import tumbling
from headgate.operators.windows.window_plan import ROWS_COLUMN, WINDOW_COLUMN, WindowedAggregate
from headgate.state.backend import ColumnBackend, RowBackend, WindowBackend, WindowRows
from headgate.state.descriptors import KeyColumns, StateDescriptor
from headgate.state.window_aggregates import Accumulator, MergedRows
from headgate.state.worker_backends import MemoryStates

SCHEMA = pa.schema([("key", pa.int64())])
OPERATORS = Path(headgate.operators.__file__).parent


class Asked:
    """Memory, and who asked for it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[str, ...], list[str]]] = []
        self.made: list[Any] = []
        self._memory = MemoryStates()

    def by_row(
        self, keys: KeyColumns, descriptors: Sequence[StateDescriptor], *, has_timers: bool = False
    ) -> RowBackend:
        self.calls.append(("by row", tuple(keys.names), [d.name for d in descriptors]))
        self.made.append(self._memory.by_row(keys, descriptors, has_timers=has_timers))
        return self.made[-1]

    def by_column(
        self, keys: KeyColumns, descriptors: Sequence[StateDescriptor], *, has_timers: bool = False
    ) -> ColumnBackend:
        self.calls.append(("by column", tuple(keys.names), [d.name for d in descriptors]))
        self.made.append(self._memory.by_column(keys, descriptors, has_timers=has_timers))
        return self.made[-1]

    def by_window(self, keys: KeyColumns, rows: WindowRows) -> WindowBackend[list[pa.RecordBatch]]:
        self.calls.append(("by window", rows.section.key_names, [rows.section.name]))
        self.made.append(self._memory.by_window(keys, rows))
        return self.made[-1]

    def merged_by_window(
        self, keys: KeyColumns, rows: WindowRows, accumulators: Sequence[Accumulator]
    ) -> WindowBackend[MergedRows]:
        self.calls.append(("merged by window", rows.section.key_names, [rows.section.name]))
        self.made.append(self._memory.merged_by_window(keys, rows, accumulators))
        return self.made[-1]


class ByRow(hg.ProcessFunction):
    def open(self, state: hg.StateHandle) -> None:
        self.count = state.value("count", pa.int64())

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> Iterator[dict[str, Any]]:
        self.count.put((self.count.get() or 0) + 1)
        yield row


class ByBatch(hg.BatchProcessFunction):
    def open(self, state: hg.BatchStateHandle) -> None:
        self.count = state.value("count", pa.int64())

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame | None:
        self.count.put(batch["key"])
        return batch


def window(aggregate: pl.Expr) -> OperatorSpec:
    windowed = WindowedAggregate(("key",), "key", tumbling(1_000), (aggregate.alias("n"),))
    return window_operators(windowed, SCHEMA, "node").window


@pytest.mark.parametrize(
    ("spec", "kind", "name"),
    [
        (process_spec("node", ("key",), ByRow(), SCHEMA), "by row", "count"),
        (process_spec("node", ("key",), ByBatch(), SCHEMA), "by column", "count"),
        (ReduceSpec(("key",), lambda total, row: total, SCHEMA), "by row", "accumulators"),
        (window(pl.col("key").n_unique()), "by window", "records"),
        (window(pl.len()), "merged by window", "windows"),
    ],
)
def test_an_operator_gets_its_state_from_the_factory_of_its_context(spec: OperatorSpec, kind: str, name: str) -> None:
    states = Asked()
    operators = [spec.build() for _ in range(2)]
    assert states.calls == [], "nothing is made before there is a context"
    for operator in operators:
        operator.open(OperatorContext("p", "node", 0, 1, 128, lambda: 0, states=states), Recorder())
    assert states.calls == [(kind, ("key",), [name])] * 2
    columns = [[3, 4]] if name != "windows" else [[3, 4], [0, 0], [1, 1]]
    schema = SCHEMA if name != "windows" else pa.schema([(n, pa.int64()) for n in ("key", WINDOW_COLUMN, ROWS_COLUMN)])
    operators[0].process(pa.record_batch(columns, schema))
    frozen = [made.freeze().rows() for made in states.made]
    assert frozen == [{name: 2}, {name: 0}], "the state is where the factory made it, and nobody shares it"
    assert [operator.freeze().rows() for operator in operators] == frozen  # type: ignore[union-attr]


def test_no_operator_names_a_backend() -> None:
    """They know the factory alone, in ``headgate.state.worker_backends``."""
    backends = ("headgate.state.memory", "headgate.state.rocksdb")
    named = {
        node.module
        for path in OPERATORS.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(backends)
    }
    assert not named
