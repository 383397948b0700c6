"""``WindowCombine``: local pre-aggregation before the shuffle, chained to what feeds it.

Holds partial results for a short time only and never over a barrier or the end of a window, so it has no state of
its own and changes no result (WN9). It never drops a late record: ``WindowMerge`` does, by its own watermark.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from headgate.operators.base import Operator
from headgate.operators.window_plan import InputReader, WindowPlan, uncombined_batch
from headgate.state.key_index import make_key_index
from headgate.state.window_aggregates import AggTable, partial_batch, split_by_window, take_values

BUSY_FLUSH_MS = 30
"""How long partial results are held while the worker is busy: long enough to combine many records per key,
short against a latency of 50 ms."""

_BATCH_ROWS_MAX = 65_536
_WINDOWS_MAX = 64
_CELLS_MAX = 1 << 22
_INDEX_KEYS_MIN = 1 << 16
"""Bounds of what is held: open windows, slots of all of them, and keys remembered over flushes."""

_TRIAL_ROWS_MIN = 8_192
_SAVING_MIN = 0.3
_PASS_FACTOR = 32
"""Combining pays if it saves this part of the rows. After a flush of enough rows that did not, this many times as
many rows pass uncombined before it is tried again (WN12): with nearly distinct keys it would be wasted work."""


@dataclass(frozen=True)
class WindowCombineSpec:
    """Combine records of the same key and window into one partial result."""

    plan: WindowPlan

    def build(self) -> Operator:
        """See ``OperatorSpec``."""
        return WindowCombineOperator(self.plan)

    def output_schema(self, schema: pa.Schema, node: str) -> pa.Schema:
        """Return the schema of partial results (internal: only ``WindowMerge`` reads it)."""
        return self.plan.partial_schema()


class WindowCombineOperator(Operator):
    """Accumulates per window and key; flushes partial results."""

    def __init__(self, plan: WindowPlan) -> None:
        self._plan = plan
        self._shape = plan.shape
        self._schema = plan.partial_schema()
        self._reader = InputReader(plan)
        self._index = make_key_index(plan.shape.key_types)
        self._tables: dict[int, AggTable] = {}
        self._spare: list[AggTable] = []
        self._since_ms: int | None = None
        self._held_rows = 0
        self._pass_rows = 0

    def process(self, batch: pa.RecordBatch) -> None:
        """See ``Operator``."""
        if self._pass_rows > 0:
            self._pass_rows -= batch.num_rows
            self.output.emit(uncombined_batch(self._plan, self._schema, batch, self._reader.read(batch)))
            return
        self._held_rows += batch.num_rows
        self._combine(batch)
        now_ms = self.context.clock_ms()
        if self._since_ms is None:
            self._since_ms = now_ms
        is_due = self.context.is_busy and now_ms - self._since_ms >= BUSY_FLUSH_MS
        cells = len(self._tables) * len(self._index)
        if is_due or len(self._tables) > _WINDOWS_MAX or cells > _CELLS_MAX:
            self.flush()

    def _combine(self, batch: pa.RecordBatch) -> None:
        shape = self._shape
        times = shape.time.values(batch)
        low = shape.time.to_ms(int(times.min())) // shape.size_ms
        high = shape.time.to_ms(int(times.max())) // shape.size_ms
        slots = self._index.slots([batch.column(key) for key in shape.keys])
        inputs = self._reader.read(batch)
        size = len(self._index)
        if low == high:
            self._table(low).update(size, slots, 1, inputs)
        else:
            for window, rows in split_by_window(shape.time.windows(times, shape.size_ms)):
                self._table(window).update(size, slots[rows], 1, take_values(inputs, rows))

    def _table(self, window: int) -> AggTable:
        table = self._tables.get(window)
        if table is None:
            table = self._spare.pop() if self._spare else AggTable([m.accumulator for m in self._plan.measures])
            self._tables[window] = table
        return table

    def flush(self) -> None:
        """Emit everything that is held."""
        used_max, used_rows = 0, 0
        for window in sorted(self._tables):
            table = self._tables[window]
            slots = table.used()
            used_max, used_rows = max(used_max, len(slots)), used_rows + len(slots)
            batch = partial_batch(self._schema, self._index.columns(slots), window, table.take(slots))
            for start in range(0, batch.num_rows, _BATCH_ROWS_MAX):
                self.output.emit(batch.slice(start, _BATCH_ROWS_MAX))
            if len(self._spare) < 2:
                table.clear()
                self._spare.append(table)
        self._tables.clear()
        self._since_ms = None
        if self._held_rows >= _TRIAL_ROWS_MIN and used_rows > (1 - _SAVING_MIN) * self._held_rows:
            self._pass_rows = _PASS_FACTOR * self._held_rows
        self._held_rows = 0
        if len(self._index) > max(_INDEX_KEYS_MIN, 4 * used_max):
            self._index = make_key_index(self._shape.key_types)
            self._spare.clear()

    def on_watermark(self, watermark_ms: int) -> None:
        """Send what the watermark would make late, then the watermark."""
        if any(self._shape.end_ms(window) - 1 <= watermark_ms for window in self._tables):
            self.flush()
        self.output.emit_watermark(watermark_ms)

    def on_idle(self, is_idle: bool) -> None:
        """See ``Operator``."""
        if self._tables:
            self.flush()
        self.output.emit_idle(is_idle)

    def next_tick_ms(self) -> int | None:
        """See ``Operator``."""
        if self._since_ms is None:
            return None
        return self._since_ms + (BUSY_FLUSH_MS if self.context.is_busy else self.context.flush_ms)

    def on_tick(self, now_ms: int) -> None:
        """See ``Operator``."""
        due_ms = self.next_tick_ms()
        if due_ms is not None and now_ms >= due_ms:
            self.flush()

    def before_barrier(self) -> None:
        """See ``Operator``."""
        self.flush()

    def finish(self) -> None:
        """See ``Operator``."""
        self.flush()
