"""Give records the windows that they lie in, as columns: what a trigger of the user decides on is a key and a window.

A record of sliding windows becomes one for each of its windows. This stands before the shuffle and has no state.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.operators.base import Operator
from headgate.operators.timestamps import EventTime
from headgate.operators.windows.window_assigner import AlignedWindows

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
        panes, of = np.unique(self._windows.panes(self._time, self._time.values(batch)), return_inverse=True)
        windows = [self._windows.windows_of(int(pane)) for pane in panes]
        counts = np.array([len(one) for one in windows])
        firsts = np.cumsum(counts) - counts
        starts = np.array([self._windows.start_ms(window) for one in windows for window in one], np.int64)
        ends = np.array([self._windows.end_ms(window) for one in windows for window in one], np.int64)
        times = counts[of]
        rows = np.repeat(np.arange(batch.num_rows), times)
        place = np.arange(len(rows)) - np.repeat(np.cumsum(times) - times, times)
        at = firsts[of][rows] + place
        records = batch if len(rows) == batch.num_rows else batch.take(pa.array(rows))
        columns = [pa.array(starts[at]), pa.array(ends[at]), pa.array(place == times[rows] - 1)]
        schema = pa.schema([*batch.schema, *_FIELDS])
        self.output.emit(pa.RecordBatch.from_arrays([*records.columns, *columns], schema=schema))
