"""Where operators get their state: from the factory of their context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from tests.operators.harness import Recorder

import headgate as hg
from headgate.operators.base import OperatorContext
from headgate.operators.catalog import process_spec
from headgate.state.backend import ColumnBackend, RowBackend
from headgate.state.descriptors import KeyColumns, StateDescriptor
from headgate.state.memory.factory import MemoryStates

SCHEMA = pa.schema([("key", pa.int64())])


class Asked:
    """Memory, and who asked for it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[str, ...], list[str]]] = []
        self.made: list[Any] = []
        self._memory = MemoryStates()

    def by_row(self, keys: KeyColumns, descriptors: Sequence[StateDescriptor]) -> RowBackend:
        self.calls.append(("by row", tuple(keys.names), [d.name for d in descriptors]))
        self.made.append(self._memory.by_row(keys, descriptors))
        return self.made[-1]

    def by_column(self, keys: KeyColumns, descriptors: Sequence[StateDescriptor]) -> ColumnBackend:
        self.calls.append(("by column", tuple(keys.names), [d.name for d in descriptors]))
        self.made.append(self._memory.by_column(keys, descriptors))
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


# ST16
@pytest.mark.parametrize(("function", "kind"), [(ByRow(), "by row"), (ByBatch(), "by column")])
def test_an_operator_gets_its_state_from_the_factory_of_its_context(function: Any, kind: str) -> None:
    states = Asked()
    operators = [process_spec("node", ("key",), function, SCHEMA).build() for _ in range(2)]
    assert states.calls == [], "nothing is made before there is a context"
    for operator in operators:
        operator.open(OperatorContext("p", "node", 0, 1, 128, lambda: 0, states=states), Recorder())
    assert states.calls == [(kind, ("key",), ["count"])] * 2
    operators[0].process(pa.RecordBatch.from_pydict({"key": [3, 4]}, SCHEMA))
    frozen = [made.freeze().rows() for made in states.made]
    assert frozen == [{"count": 2}, {"count": 0}], "the state is where the factory made it, and nobody shares it"
