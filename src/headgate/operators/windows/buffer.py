"""``WindowBuffer``: a window that keeps its records and lets Polars aggregate them when it fires.

For aggregates that do not decompose (medians, distinct counts, arithmetic between aggregates …).
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl
import pyarrow as pa

from headgate.model.state_identity import Form
from headgate.operators.base import Operator
from headgate.operators.schemas import batch_of
from headgate.operators.user_function import batch_error
from headgate.operators.windows.plan import WindowShape, window_state_text
from headgate.operators.windows.window import WindowOperator, bounds
from headgate.state.backend import StateFactory, WindowBackend, WindowRows
from headgate.state.descriptors import KeyColumns, Section
from headgate.state.key_hash import Words


@dataclass(frozen=True)
class WindowBufferSpec:
    """Keep the records (``kept``: the columns needed of them) of each window and aggregate them at its end."""

    shape: WindowShape
    aggregates: tuple[pl.Expr, ...]
    kept: pa.Schema

    def build(self) -> Operator:
        """See ``OperatorSpec``."""
        return WindowBufferOperator(self)

    def output_schema(self, schema: pa.Schema, node: str) -> pa.Schema:
        """Return keys, window bounds and aggregates."""
        return self.shape.output

    def state_text(self) -> str:
        """See ``catalog.state_text``."""
        return window_state_text(self.shape, Form.WINDOW_RECORDS, [f"{f.name}: {f.type}" for f in self.kept])


class WindowBufferOperator(WindowOperator[list[pa.RecordBatch]]):
    """Rows are records, of which only the needed columns are kept."""

    def __init__(self, spec: WindowBufferSpec) -> None:
        self._spec = spec
        super().__init__(spec.shape, WindowRows(Section("records", spec.kept, spec.shape.keys), self._window_of))

    def _new_backend(self, states: StateFactory, keys: KeyColumns) -> WindowBackend[list[pa.RecordBatch]]:
        return states.by_window(keys, self._rows)

    def _window_of(self, batch: pa.RecordBatch) -> Words:
        time = self._spec.shape.time
        return time.windows(time.values(batch), self._spec.shape.size_ms)

    def process(self, batch: pa.RecordBatch) -> None:
        """See ``Operator``."""
        super().process(batch.select(self._spec.kept.names))

    def _records_in(self, rows: pa.RecordBatch) -> int:
        return rows.num_rows  # type: ignore[no-any-return]

    def _results(self, window: int, held: list[pa.RecordBatch]) -> pa.RecordBatch:
        keys = list(self._shape.keys)
        frame = pl.DataFrame(pa.Table.from_batches(held))
        try:
            result = frame.group_by(keys).agg(self._spec.aggregates).sort(keys)
        except pl.exceptions.PolarsError as error:
            raise batch_error(self.context.node, frame.height, error) from None
        output = self._shape.output
        values = [f for f in output if f.name not in ("window_start", "window_end")]
        grouped = batch_of(result, pa.schema(values))
        columns = grouped.columns
        times = bounds(self._shape, window, grouped.num_rows)
        return pa.RecordBatch.from_arrays([*columns[: len(keys)], *times, *columns[len(keys) :]], schema=output)
