"""Partial sessions: records of a key that follow each other in less than the gap, put together before the shuffle.

``SessionCombine`` holds nothing: it combines within a batch. Counterpart: ``session_windows`` merges its results.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.operators.base import Operator
from headgate.operators.timestamps import EventTime
from headgate.operators.windows.window_plan import ROWS_COLUMN, InputReader, WindowPlan
from headgate.state.key_hash import Words
from headgate.state.key_index import Slots, make_key_index
from headgate.state.values import Mask
from headgate.state.window_aggregates import Accumulator, AggTable, FrozenTable, Values, accumulated_column

START, END = "__start", "__end"
"""Columns of partial sessions: the first record's time and the end, in microseconds since 1970."""

_INDEX_KEYS_MAX = 1 << 18
"""The combiner numbers so many keys before it begins again."""

_TRIAL_ROWS_MIN, _SAVING_MIN, _PASS_FACTOR = 8_192, 0.3, 32
"""Combining pays if it saves this part of the rows; after a trial that did not, this many times as many rows pass."""

_INT_MIN, _INT_MAX = -(1 << 63), (1 << 63) - 1


def microseconds(time: EventTime, batch: pa.RecordBatch) -> Words:
    """Return the event times of records in microseconds since 1970."""
    values = time.values(batch)
    if time.units_per_ms == 1_000:
        return values
    if time.units_per_ms > 1_000:
        return values // (time.units_per_ms // 1_000)
    return values * (time.ms_per_unit * (1_000 // time.units_per_ms))


def horizon_us(watermark_ms: int) -> int:
    """Return up to which time nothing can follow after a watermark, excluded."""
    return max(_INT_MIN, min((watermark_ms + 1) * 1_000, _INT_MAX))


def partial_schema(plan: WindowPlan) -> pa.Schema:
    """Return the schema of partial sessions: keys, start, end, count of records, measures."""
    shape = plan.shape
    names = [*shape.keys, START, END, ROWS_COLUMN, *(f"__partial_{i}" for i in range(len(plan.measures)))]
    types = [*shape.key_types, pa.int64(), pa.int64(), pa.int64()]
    types += [measure.accumulator.type for measure in plan.measures]
    return pa.schema(list(zip(names, types, strict=True)))


def in_order(slots: Slots, starts: Words) -> Slots:
    """Return the order by slot, then start."""
    low, high = int(starts.min()), int(starts.max())
    span = high - low + 1
    if (int(slots.max()) + 1) * span < _INT_MAX:
        return np.argsort(slots * span + (starts - low))
    return np.lexsort((starts, slots))


@dataclass(frozen=True, slots=True)
class Cut:
    """Intervals put together into sessions.

    Attributes:
        of: the number of each interval's session.
        slots, starts, ends: of each session; ordered by slot, then start.
    """

    of: Slots
    slots: Slots
    starts: Words
    ends: Words


def cut(slots: Slots, starts: Words, ends: Words) -> Cut:
    """Put intervals of the same slot together that begin before another one ends."""
    order = in_order(slots, starts)
    by_slot, first, last = slots[order], starts[order], ends[order]
    is_other = np.ones(len(order), np.bool_)
    is_other[1:] = by_slot[1:] != by_slot[:-1]
    latest = _running_ends(is_other, last)
    is_new = is_other.copy()
    is_new[1:] |= first[1:] >= latest[:-1]
    at = np.flatnonzero(is_new)
    of = np.empty(len(order), np.int64)
    of[order] = np.cumsum(is_new) - 1
    return Cut(of, by_slot[at], first[at], latest[np.append(at[1:], len(order)) - 1])


def _running_ends(is_other: Mask, ends: Words) -> Words:
    """Return the latest end so far within each slot."""
    if (ends[1:] >= ends[:-1])[~is_other[1:]].all():
        return ends
    low, group = int(ends.min()), np.cumsum(is_other)
    span = int(ends.max()) - low + 1
    if (int(group[-1]) + 1) * span < _INT_MAX:
        latest: Words = np.maximum.accumulate(group * span + (ends - low)) - group * span + low
        return latest
    by_end = np.lexsort((ends, group))
    rank = np.empty(len(ends), np.int64)
    rank[by_end] = np.arange(len(ends))
    found: Words = ends[by_end[np.maximum.accumulate(rank)]]
    return found


@dataclass(frozen=True)
class SessionCombineSpec:
    """Combine records of a batch into partial sessions of ``gap_ms``."""

    plan: WindowPlan
    gap_ms: int

    def build(self) -> Operator:
        return SessionCombineOperator(self)

    def output_schema(self, schema: pa.Schema, node: str) -> pa.Schema:
        """Return the schema of partial sessions (internal: only ``SessionMerge`` reads it)."""
        return partial_schema(self.plan)


class SessionCombineOperator(Operator):
    """Holds nothing. Records that may be late pass one by one, and all of them before the first watermark of a run."""

    def __init__(self, spec: SessionCombineSpec) -> None:
        self._plan, self._gap_us = spec.plan, spec.gap_ms * 1_000
        self._schema = partial_schema(spec.plan)
        self._accumulators = tuple(measure.accumulator for measure in spec.plan.measures)
        self._reader = InputReader(spec.plan)
        self._index = make_key_index(spec.plan.shape.key_types)
        self._horizon_us: int | None = None
        self._pass_rows = self._rows_in = self._rows_out = 0

    def process(self, batch: pa.RecordBatch) -> None:
        shape = self._plan.shape
        starts = microseconds(shape.time, batch)
        ends = starts + self._gap_us
        keys = [batch.column(key) for key in shape.keys]
        inputs = [whole_values(given, batch.num_rows) for given in self._reader.read(batch)]
        ones = np.ones(batch.num_rows, np.int64)
        horizon = self._horizon_us
        if horizon is None or self._pass_rows > 0 or (ends <= horizon).any():
            self._pass_rows = max(self._pass_rows - batch.num_rows, 0)
            table = FrozenTable(ones, tuple(np.asarray(v.values) for v in inputs), tuple(v.valid for v in inputs))
            self._emit(keys, starts, ends, table)
            return
        if len(self._index) > _INDEX_KEYS_MAX:
            self._index = make_key_index(shape.key_types)
        found = cut(self._index.slots(keys), starts, ends)
        table = merged(self._accumulators, len(found.slots), found.of, ones, inputs)
        self._emit(self._index.columns(found.slots), found.starts, found.ends, table)
        self._judge(batch.num_rows, len(found.slots))

    def _judge(self, rows_in: int, rows_out: int) -> None:
        self._rows_in, self._rows_out = self._rows_in + rows_in, self._rows_out + rows_out
        if self._rows_in < _TRIAL_ROWS_MIN:
            return
        if self._rows_out > (1 - _SAVING_MIN) * self._rows_in:
            self._pass_rows = _PASS_FACTOR * self._rows_in
        self._rows_in = self._rows_out = 0

    def _emit(self, keys: Sequence[pa.Array], starts: Words, ends: Words, table: FrozenTable) -> None:
        arrays = [*keys, pa.array(starts), pa.array(ends), *measure_columns(table)]
        self.output.emit(pa.RecordBatch.from_arrays(arrays, schema=self._schema))

    def on_watermark(self, watermark_ms: int) -> None:
        self._horizon_us = horizon_us(watermark_ms)
        self.output.emit_watermark(watermark_ms)

    def on_resumed(self) -> None:
        self._horizon_us = None


def whole_values(given: Values, count: int) -> Values:
    """Return input of an accumulator as an array, with 0 where a count has none."""
    if isinstance(given.values, int):
        ones = np.full(count, given.values, np.int64) if given.valid is None else given.valid.astype(np.int64)
        return Values(ones)
    return given


def merged(
    accumulators: Sequence[Accumulator],
    count: int,
    of: Slots,
    rows: npt.NDArray[np.int64],
    values: Sequence[Values],
) -> FrozenTable:
    """Return the accumulators of ``count`` groups, of which row ``i`` is in group ``of[i]``."""
    table = AggTable(accumulators)
    table.update(count, of, rows, values)
    return table.freeze(count)


def measure_columns(table: FrozenTable) -> list[pa.Array]:
    """Return count and measures as columns, null where none was seen."""
    return [pa.array(table.rows), *map(accumulated_column, table.values, table.seen)]
