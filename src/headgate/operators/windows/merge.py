"""``WindowMerge``: merges partial results after the shuffle. Counterpart: ``WindowCombine``, which makes them."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from headgate.model.state_identity import Form
from headgate.operators.base import Operator
from headgate.operators.windows.plan import WindowPlan, window_state_text
from headgate.operators.windows.values import results
from headgate.operators.windows.window import WindowOperator, bounds, key_order
from headgate.state.backend import StateFactory, WindowBackend, WindowRows
from headgate.state.descriptors import KeyColumns, Section
from headgate.state.key_hash import Words
from headgate.state.window_rows import MergedRows, partial_rows


@dataclass(frozen=True)
class WindowMergeSpec:
    """Merge partial results of ``plan`` and emit each window's results when event time passes its end."""

    plan: WindowPlan

    def build(self) -> Operator:
        """See ``OperatorSpec``."""
        return WindowMergeOperator(self.plan)

    def output_schema(self, schema: pa.Schema, node: str) -> pa.Schema:
        """Return keys, window bounds and aggregates."""
        return self.plan.shape.output

    def state_text(self) -> str:
        """See ``catalog.state_text``."""
        aggregates = [
            f"{m.accumulator.kind.value} {m.accumulator.dtype} {'validity of ' if m.is_count else ''}"
            f"{self.plan.inners[m.inner]}"
            for m in self.plan.measures
        ]
        return window_state_text(self.plan.shape, Form.WINDOW_RESULTS, aggregates)


class WindowMergeOperator(WindowOperator[MergedRows]):
    """Rows are partial results; the backend merges those of a key."""

    def __init__(self, plan: WindowPlan) -> None:
        self._plan = plan
        self._accumulators = tuple(measure.accumulator for measure in plan.measures)
        section = Section("windows", plan.partial_schema(), plan.shape.keys)
        super().__init__(plan.shape, WindowRows(section, self._window_of))

    def _new_backend(self, states: StateFactory, keys: KeyColumns) -> WindowBackend[MergedRows]:
        return states.merged_by_window(keys, self._rows, self._accumulators)

    def _window_of(self, batch: pa.RecordBatch) -> Words:
        windows: Words = batch.column(len(self._plan.shape.keys)).to_numpy()
        return windows

    def _records_in(self, rows: pa.RecordBatch) -> int:
        return int(partial_rows(rows, self._accumulators).sum())

    def _results(self, window: int, held: MergedRows) -> pa.RecordBatch:
        times = bounds(self._shape, window, len(held.table.rows))
        arrays = [*held.keys, *times, *results(self._plan, held.table)]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._shape.output)
        return batch.take(key_order(batch, self._shape.keys))
