"""Give records the windows that they lie in, as columns: what a trigger of the user decides on is a key and a window.

A record of sliding windows becomes one for each of its windows. This stands before the shuffle and has no state.
"""

from __future__ import annotations

import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.operators.base import Operator
from headgate.operators.timestamps import EventTime
from headgate.operators.windows.window_assigner import AlignedWindows, ends_ms, rows_in_windows, starts_ms

START_MS, END_MS, IS_LAST = "__window_start_ms", "__window_end_ms", "__is_last"
"""Of a window; and whether it is the last one that its record lies in, with which the record is late."""

BOUNDS = (START_MS, END_MS)
_FIELDS = (pa.field(START_MS, pa.int64()), pa.field(END_MS, pa.int64()), pa.field(IS_LAST, pa.bool_()))


@dataclass(frozen=True)
class AssignWindowsSpec:
    """Add the columns ``START_MS``, ``END_MS`` (excluded) and ``IS_LAST``."""

    windows: AlignedWindows
    time: EventTime

    def build(self) -> Operator:
        """See ``OperatorSpec``."""
        return AssignWindowsOperator(self)

    def output_schema(self, schema: pa.Schema, node: str) -> pa.Schema:
        """Return the schema with the columns of the window (internal: only ``TriggerSpec`` reads them)."""
        return pa.schema([*schema, *_FIELDS])


class AssignWindowsOperator(Operator):
    """Holds nothing."""

    def __init__(self, spec: AssignWindowsSpec) -> None:
        self._windows, self._time = spec.windows, spec.time

    def process(self, batch: pa.RecordBatch) -> None:
        panes = self._windows.panes(self._time, self._time.values(batch))
        rows, windows = rows_in_windows(self._windows, panes)
        records = batch if len(rows) == batch.num_rows else batch.take(pa.array(rows))
        bounds = starts_ms(self._windows, windows), ends_ms(self._windows, windows)
        columns = [*map(pa.array, bounds), pa.array(windows == self._windows.last_windows(panes)[rows])]
        schema = pa.schema([*batch.schema, *_FIELDS])
        self.output.emit(pa.RecordBatch.from_arrays([*records.columns, *columns], schema=schema))
