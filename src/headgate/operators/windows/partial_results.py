"""Partial results: records of a key in a batch that belong together, combined before the shuffle.

Sessions take those that follow each other in less than the gap, and ``session_windows`` merges what comes; windows that
end by themselves take all of a key, for ``triggered_windows``. The operators hold nothing between batches.
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

TRIAL_ROWS_MIN, SAVING_MIN, PASS_FACTOR = 8_192, 0.3, 32
"""Combining pays if it saves this part of the rows. After a trial of enough rows that did not, this many times as many
rows pass uncombined before it is tried again: with nearly distinct keys it would be wasted work."""

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


def measure_fields(accumulators: Sequence[Accumulator]) -> list[pa.Field]:
    """Return the fields of a partial result beside its key: the count of records, and the measures."""
    measures = [pa.field(f"__partial_{i}", accumulator.type) for i, accumulator in enumerate(accumulators)]
    return [pa.field(ROWS_COLUMN, pa.int64()), *measures]


def partial_schema(plan: WindowPlan, between: Sequence[str] = ()) -> pa.Schema:
    """Return the schema of partial results: keys, the columns ``between`` of sessions, count of records, measures."""
    keys = list(zip(plan.shape.keys, plan.shape.key_types, strict=True))
    fields = measure_fields([measure.accumulator for measure in plan.measures])
    return pa.schema([*keys, *((name, pa.int64()) for name in between), *fields])


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
    assert len(slots) == len(starts) == len(ends), "an interval is a slot, a start and an end"
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
        return partial_schema(self.plan, (START, END))


class PartialOperator(Operator):
    """Combines what a batch has, as long as that saves rows."""

    def __init__(self, plan: WindowPlan, schema: pa.Schema) -> None:
        self._plan, self._schema = plan, schema
        self._accumulators = tuple(measure.accumulator for measure in plan.measures)
        self._reader = InputReader(plan)
        self._index = make_key_index(plan.shape.key_types)
        self._pass_rows = self._rows_in = self._rows_out = 0

    def _inputs(self, batch: pa.RecordBatch) -> list[Values]:
        return [whole_values(given, batch.num_rows) for given in self._reader.read(batch)]

    def _keys(self, batch: pa.RecordBatch) -> list[pa.Array]:
        return [batch.column(key) for key in self._plan.shape.keys]

    def _passes(self, rows: int, *, must: bool = False) -> bool:
        """Whether records pass one by one: they must, or combining did not pay."""
        if not must and self._pass_rows == 0:
            return False
        self._pass_rows = max(self._pass_rows - rows, 0)
        return True

    def _slots(self, keys: Sequence[pa.Array]) -> Slots:
        if len(self._index) > _INDEX_KEYS_MAX:
            self._index = make_key_index(self._plan.shape.key_types)
        return self._index.slots(keys)

    def _judge(self, rows_in: int, rows_out: int) -> None:
        self._rows_in, self._rows_out = self._rows_in + rows_in, self._rows_out + rows_out
        if self._rows_in < TRIAL_ROWS_MIN:
            return
        if self._rows_out > (1 - SAVING_MIN) * self._rows_in:
            self._pass_rows = PASS_FACTOR * self._rows_in
        self._rows_in = self._rows_out = 0

    def _emit(self, columns: Sequence[pa.Array], table: FrozenTable) -> None:
        arrays = [*columns, *measure_columns(table)]
        self.output.emit(pa.RecordBatch.from_arrays(arrays, schema=self._schema))


class SessionCombineOperator(PartialOperator):
    """Holds nothing. Records that may be late pass one by one, and all of them before the first watermark of a run."""

    def __init__(self, spec: SessionCombineSpec) -> None:
        super().__init__(spec.plan, partial_schema(spec.plan, (START, END)))
        self._gap_us = spec.gap_ms * 1_000
        self._horizon_us: int | None = None

    def process(self, batch: pa.RecordBatch) -> None:
        starts = microseconds(self._plan.shape.time, batch)
        ends = starts + self._gap_us
        keys, inputs = self._keys(batch), self._inputs(batch)
        horizon = self._horizon_us
        # before the first watermark of a run, key groups after the shuffle may be further, over a restore
        if self._passes(batch.num_rows, must=horizon is None or bool((ends <= horizon).any())):
            self._emit([*keys, pa.array(starts), pa.array(ends)], single_rows(inputs, batch.num_rows))
            return
        found = cut(self._slots(keys), starts, ends)
        ones = np.ones(batch.num_rows, np.int64)
        table = merged(self._accumulators, len(found.slots), found.of, ones, inputs)
        self._emit([*self._index.columns(found.slots), pa.array(found.starts), pa.array(found.ends)], table)
        self._judge(batch.num_rows, len(found.slots))

    def on_watermark(self, watermark_ms: int) -> None:
        self._horizon_us = horizon_us(watermark_ms)
        self.output.emit_watermark(watermark_ms)

    def on_resumed(self) -> None:
        self._horizon_us = None


def single_rows(inputs: Sequence[Values], rows: int) -> FrozenTable:
    """Return each record as a partial result of its own."""
    values, valid = tuple(np.asarray(v.values) for v in inputs), tuple(v.valid for v in inputs)
    return FrozenTable(np.ones(rows, np.int64), values, valid)


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


@dataclass(frozen=True)
class KeyCombineSpec:
    """Combine the records of each key in a batch into one partial result."""

    plan: WindowPlan

    def build(self) -> Operator:
        return KeyCombineOperator(self.plan, partial_schema(self.plan))

    def output_schema(self, schema: pa.Schema, node: str) -> pa.Schema:
        """Return the schema of partial results (internal: only ``TriggeredWindow`` reads it)."""
        return partial_schema(self.plan)


class KeyCombineOperator(PartialOperator):
    """Holds nothing: so it needs no flush, and changes no result."""

    def process(self, batch: pa.RecordBatch) -> None:
        keys, inputs = self._keys(batch), self._inputs(batch)
        if self._passes(batch.num_rows):
            self._emit(keys, single_rows(inputs, batch.num_rows))
            return
        slots, of = np.unique(self._slots(keys), return_inverse=True)
        ones = np.ones(batch.num_rows, np.int64)
        self._emit(self._index.columns(slots), merged(self._accumulators, len(slots), of, ones, inputs))
        self._judge(batch.num_rows, len(slots))
