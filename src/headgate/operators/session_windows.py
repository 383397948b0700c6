"""Session windows: records of a key belong together while each follows another in less than the gap.

``SessionCombine`` makes partial sessions of each batch before the shuffle; ``SessionMerge`` merges them with the open
ones after it. Where aggregates do not decompose, ``SessionMerge`` gets the records and keeps them in a list per key:
sessions of a key never overlap, so times say which records belong to which.

A session ends at its last record plus the gap, excluded. It is over when the watermark says that no record before
its end can follow, and results do not depend on batches or on the order of records in time. A record that is so late
that its own session would be over is taken only by a session that is still open when it arrives; otherwise it is
dropped. So records of that kind are never combined with others before they are compared with what is open.

State: the open sessions of each key by their start, event-time timers, and the watermark as in tumbling windows. A
key with open sessions has a timer no later than when the first of them is over; a timer that comes too early, because
the session grew, is set again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from headgate.model.state_schema import StateIdentity
from headgate.operators.aligned_windows import FiredGroups, WindowOperators, kept_columns
from headgate.operators.base import (
    WATERMARK_MIN_MS,
    KeyedOperator,
    Operator,
    OperatorContext,
    Output,
    RestoredState,
)
from headgate.operators.lateness import count_late
from headgate.operators.schemas import batch_of
from headgate.operators.timestamps import EventTime
from headgate.operators.user_functions import batch_error
from headgate.operators.window_plan import (
    END_COLUMN,
    ROWS_COLUMN,
    START_COLUMN,
    InputReader,
    WindowedAggregate,
    WindowPlan,
    WindowShape,
    decompose,
    results,
    window_shape,
)
from headgate.state.backend import META, ColumnBackend, ColumnTimers
from headgate.state.descriptors import KeyColumns, StateDescriptor, StateKind
from headgate.state.key_hash import Words
from headgate.state.key_index import Slots, make_key_index
from headgate.state.snapshot import FrozenState
from headgate.state.vectors import Mask
from headgate.state.window_aggregates import Accumulator, AggTable, FrozenTable, Kind, Values, partial_values

_START, _END = "__start", "__end"
"""Columns of partial sessions: the first record's time and the end, in microseconds since 1970."""

_OUTPUT_ROWS = 65_536
_TIMERS_MAX = 65_536
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


def _due_ms(ends_us: Words) -> Words:
    """Return the watermarks that end sessions."""
    return -(-ends_us // 1_000) - 1


def partial_schema(plan: WindowPlan) -> pa.Schema:
    """Return the schema of partial sessions: keys, start, end, count of records, measures."""
    shape = plan.shape
    names = [*shape.keys, _START, _END, ROWS_COLUMN, *(f"__partial_{i}" for i in range(len(plan.measures)))]
    types = [*shape.key_types, pa.int64(), pa.int64(), pa.int64()]
    types += [pa.type_for_alias(measure.accumulator.dtype) for measure in plan.measures]
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
        """See ``OperatorSpec``."""
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
        table = _merged(self._accumulators, found, ones, inputs)
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


def _merged(
    accumulators: Sequence[Accumulator], found: Cut, rows: npt.NDArray[np.int64], values: Sequence[Values]
) -> FrozenTable:
    """Return the accumulators of each session."""
    count = len(found.slots)
    table = AggTable(accumulators)
    table.update(count, found.of, rows, values)
    return table.freeze(count)


def measure_columns(table: FrozenTable) -> list[pa.Array]:
    """Return count and measures as columns, null where none was seen."""
    masks = [None if seen is None or seen.all() else ~seen for seen in table.seen]
    return [pa.array(table.rows), *(pa.array(v, mask=m) for v, m in zip(table.values, masks, strict=True))]


@dataclass(frozen=True)
class SessionMergeSpec:
    """Keep open sessions and emit the results of each when it is over.

    Attributes:
        plan: with it, the input is partial sessions.
        kept: without it, the input is records, of which these columns are kept, and ``aggregates`` are computed of
            them.
    """

    shape: WindowShape
    gap_ms: int
    plan: WindowPlan | None
    aggregates: tuple[pl.Expr, ...]
    kept: pa.Schema

    def build(self) -> Operator:
        """See ``OperatorSpec``."""
        return SessionMergeOperator(self)

    def output_schema(self, schema: pa.Schema, node: str) -> pa.Schema:
        """Return keys, window bounds and aggregates."""
        return self.shape.output

    def state_text(self) -> str:
        """See ``catalog.state_text``."""
        keys = [(name, str(dtype)) for name, dtype in zip(self.shape.keys, self.shape.key_types, strict=True)]
        if self.plan is None:
            parts = [f"{f.name}: {f.type}" for f in self.kept]
        else:
            parts = [measure_text(self.plan, i) for i in range(len(self.plan.measures))]
        window = f"session of gap {self.gap_ms} ms on {self.shape.time.column}"
        return StateIdentity.of_open_windows(window, keys, parts).text


def measure_text(plan: WindowPlan, i: int) -> str:
    """Return what a measure is of, for the identity of state."""
    measure = plan.measures[i]
    what = "validity of " if measure.is_count else ""
    return f"{measure.accumulator.kind.value} {measure.accumulator.dtype} {what}{plan.inners[measure.inner]}"


class SessionMergeOperator(KeyedOperator):
    """Merges what comes with the open sessions, a batch at a time."""

    _backend: ColumnBackend

    def __init__(self, spec: SessionMergeSpec) -> None:
        self._spec, self._shape = spec, spec.shape
        measures = () if spec.plan is None else spec.plan.measures
        self._accumulators = tuple(measure.accumulator for measure in measures)
        fields = [(_END, pa.int64()), (ROWS_COLUMN, pa.int64())]
        fields += [(f"__partial_{i}", pa.type_for_alias(a.dtype)) for i, a in enumerate(self._accumulators)]
        self._fields = [pa.field(name, dtype) for name, dtype in fields]
        self._sessions = StateDescriptor("sessions", StateKind.MAP, pa.struct(self._fields), pa.int64())
        self._values = [field for field in spec.kept if field.name not in spec.shape.keys]
        self._records = StateDescriptor("records", StateKind.LIST, pa.struct(self._values))
        self._watermark_ms = WATERMARK_MIN_MS
        self._fired = FiredGroups()

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        keys = KeyColumns(self._shape.keys, self._shape.key_types)
        states = [self._sessions] if self._spec.plan is not None else [self._sessions, self._records]
        self._backend = context.states.by_column(keys, states, has_timers=True)
        self._maps = self._backend.maps(self._sessions)
        self._lists = None if self._spec.plan is not None else self._backend.lists(self._records)

    def restore(self, states: Sequence[RestoredState]) -> None:
        """See ``Operator``. Goes on with the lowest of the former watermarks."""
        former = [(state, bytes(sections[META])) for state, sections in self._restore_backend(states)]
        self._watermark_ms = self._fired.restore(self.context, former)
        self._backend.end_restore()

    # -- input ------------------------------------------------------------------------------------------------------

    def process(self, batch: pa.RecordBatch) -> None:
        self._backend.prepare()
        keys = [batch.column(key) for key in self._shape.keys]
        if self._spec.plan is None:
            starts = microseconds(self._shape.time, batch)
            ends = starts + self._spec.gap_ms * 1_000
            columns = [pa.array(ends), pa.array(np.ones(batch.num_rows, np.int64))]
        else:
            at = len(keys)
            starts, ends = batch.column(at).to_numpy(), batch.column(at + 1).to_numpy()
            columns = batch.columns[at + 1 :]
        slots = self._backend.slots(keys)
        known = np.unique(slots)
        rows, open_starts, held = self._maps.items(known)
        stored_slots, stored = known[rows], open_starts.to_numpy()
        stored_ends = held.field(0).to_numpy()
        may_be_late = self._may_be_late(batch, ends)
        if may_be_late is not None:
            taken = _taken(slots, starts, ends, may_be_late, stored_slots, stored, stored_ends)
            if not taken.all():
                self._count_late(ends[~taken], columns[1].to_numpy()[~taken])
                batch, slots, starts, ends = batch.filter(pa.array(taken)), slots[taken], starts[taken], ends[taken]
                columns = [column.filter(pa.array(taken)) for column in columns]
                if len(slots) == 0:
                    return
        if self._lists is not None:
            fields = [batch.column(field.name) for field in self._values]
            self._lists.append(slots, pa.StructArray.from_arrays(fields, fields=self._values))
        if len(stored):
            columns = [pa.concat_arrays(both) for both in zip(held.flatten(), columns, strict=True)]
        found = cut(
            np.concatenate([stored_slots, slots]), np.concatenate([stored, starts]), np.concatenate([stored_ends, ends])
        )
        self._store(found, stored_slots, stored, columns)

    def _store(self, found: Cut, stored_slots: Slots, stored: Words, columns: Sequence[pa.Array]) -> None:
        """Write the sessions that changed; the first ``len(stored)`` intervals are sessions that were stored."""
        count, before = len(found.slots), len(stored)
        of_stored, is_touched, is_new = found.of[:before], np.zeros(count, np.bool_), np.ones(count, np.bool_)
        is_touched[found.of[before:]] = True
        is_new[of_stored] = False
        whole = pa.RecordBatch.from_arrays(columns, schema=pa.schema(self._fields))
        table = _merged(self._accumulators, found, columns[1].to_numpy(), partial_values(whole, self._accumulators))
        is_gone = found.starts[of_stored] != stored
        if is_gone.any():
            self._maps.remove(stored_slots[is_gone], pa.array(stored[is_gone]))
        values = pa.StructArray.from_arrays([pa.array(found.ends), *measure_columns(table)], fields=self._fields)
        slots, starts = found.slots, found.starts
        if not is_touched.all():
            slots, starts, values = slots[is_touched], starts[is_touched], values.filter(pa.array(is_touched))
        self._maps.put(slots, pa.array(starts), values)
        if is_new.any():
            self._timers.register(found.slots[is_new], _due_ms(found.ends[is_new]))

    @property
    def _timers(self) -> ColumnTimers:
        assert self._backend.timers is not None
        return self._backend.timers.event_time

    def _may_be_late(self, batch: pa.RecordBatch, ends_us: Words) -> Mask | None:
        """Return which rows would be sessions that are over, also before a restore; None when none would."""
        over = ends_us <= horizon_us(self._watermark_ms)
        if self._fired.is_any_ahead:
            over = over | self._fired.late(batch, self._shape.keys, _due_ms(ends_us) + 1)
        return over if over.any() else None

    def _count_late(self, ends_us: Words, records: npt.NDArray[np.int64]) -> None:
        late_ms = np.maximum(self._watermark_ms + 1 - _due_ms(ends_us), 1)
        count_late(self.context.metrics, late_ms, records)

    # -- results ----------------------------------------------------------------------------------------------------

    def on_watermark(self, watermark_ms: int) -> None:
        """Emit the sessions that are over, then pass the watermark on."""
        self._watermark_ms = max(self._watermark_ms, watermark_ms)
        self._fired.advance(self._watermark_ms)
        horizon = horizon_us(self._watermark_ms)
        self._backend.prepare()
        while len(slots := self._timers.take(self._watermark_ms, _TIMERS_MAX)[0]):
            self._end_sessions(slots, horizon)
            self._backend.prepare()
        self.output.emit_watermark(watermark_ms)

    def _end_sessions(self, slots: Slots, horizon: int) -> None:
        """Emit and forget the sessions of these keys that are over; set timers for the others."""
        rows, open_starts, held = self._maps.items(slots)
        ends = held.field(0).to_numpy()
        is_over = ends <= horizon
        if not is_over.all():
            first = np.full(len(slots), _INT_MAX)
            np.minimum.at(first, rows[~is_over], ends[~is_over])
            goes_on = np.flatnonzero(first < _INT_MAX)
            self._timers.register(slots[goes_on], _due_ms(first[goes_on]))
        if not is_over.any():
            return
        over = pa.array(is_over)
        of, starts = slots[rows[is_over]], open_starts.filter(over)
        if self._lists is None:
            self._emit(self._backend.key_columns(of), starts, held.filter(over))
        else:
            self._emit_records(slots, rows, open_starts.to_numpy(), ends, is_over)
        self._maps.remove(of, starts)

    def _emit(self, keys: list[pa.Array], starts: pa.Array, held: pa.Array) -> None:
        plan = self._spec.plan
        assert plan is not None
        columns = held.flatten()
        given = partial_values(pa.RecordBatch.from_arrays(columns, schema=pa.schema(self._fields)), self._accumulators)
        seen = [
            None if a.kind is Kind.ADD else _all_or(v.valid, len(held))
            for a, v in zip(self._accumulators, given, strict=True)
        ]
        table = FrozenTable(columns[1].to_numpy(), tuple(np.asarray(v.values) for v in given), tuple(seen))
        self._send(keys, starts, columns[0], results(plan, table))

    def _emit_records(self, slots: Slots, rows: Slots, starts: Words, ends: Words, is_over: Mask) -> None:
        """Emit the sessions that are over of records that were kept, and keep the others' records."""
        assert self._lists is not None
        of, elements = self._lists.explode(slots)
        fields = pa.RecordBatch.from_arrays(elements.flatten(), schema=pa.schema(self._values))
        times = microseconds(self._shape.time, fields)
        session = _session_of(rows, starts, of, times)
        ends_now = is_over[session]
        self._lists.clear(slots)
        if not ends_now.all():
            self._lists.append(slots[of[~ends_now]], elements.filter(pa.array(~ends_now)))
        keys = self._backend.key_columns(slots[of[ends_now]])
        arrays = [*keys, *fields.filter(pa.array(ends_now)).columns, pa.array(session[ends_now])]
        names = [*self._shape.keys, *fields.schema.names, _START]
        frame = pl.DataFrame(pa.Table.from_arrays(arrays, names=names))
        try:
            found = frame.group_by(_START).agg(self._spec.aggregates).sort(_START)
        except pl.exceptions.PolarsError as error:
            raise batch_error(self.context.node, frame.height, error) from None
        skipped = (*self._shape.keys, START_COLUMN, END_COLUMN)
        values = pa.schema([f for f in self._shape.output if f.name not in skipped])
        numbers = found[_START].to_numpy()
        columns = batch_of(found.drop(_START), values).columns
        self._send(
            self._backend.key_columns(slots[rows[numbers]]),
            pa.array(starts[numbers]),
            pa.array(ends[numbers]),
            columns,
        )

    def _send(self, keys: list[pa.Array], starts: pa.Array, ends: pa.Array, values: Sequence[pa.Array]) -> None:
        """Emit results, by end and then key."""
        times = [column.view(pa.timestamp("us")) for column in (starts, ends)]
        batch = pa.RecordBatch.from_arrays([*keys, *times, *values], schema=self._shape.output)
        order = [(END_COLUMN, "ascending"), *((key, "ascending") for key in self._shape.keys)]
        batch = batch.take(pc.sort_indices(batch, order))
        for start in range(0, batch.num_rows, _OUTPUT_ROWS):
            self.output.emit(batch.slice(start, _OUTPUT_ROWS))

    def on_resumed(self) -> None:
        """Go on with the event time before the end: what the end alone has fired is not late."""
        self._watermark_ms = self._fired.resume()

    def freeze(self) -> FrozenState | None:
        self._backend.meta = self._fired.encode(self._watermark_ms)
        return super().freeze()


def _all_or(valid: Mask | None, count: int) -> Mask:
    return np.ones(count, np.bool_) if valid is None else valid


def _session_of(rows: Slots, starts: Words, of: Slots, times: Words) -> Slots:
    """Return the place of the session that each record belongs to: the last one of its row that begins by its time."""
    order = np.lexsort(
        (np.arange(len(starts) + len(times)), np.concatenate([starts, times]), np.concatenate([rows, of]))
    )
    session = np.where(order < len(starts), np.arange(len(order)), -1)
    last = order[np.maximum.accumulate(session)]
    is_record = order >= len(starts)
    found = np.empty(len(times), np.int64)
    found[order[is_record] - len(starts)] = last[is_record]
    return found


def _taken(
    slots: Slots,
    starts: Words,
    ends: Words,
    may_be_late: Mask,
    stored_slots: Slots,
    stored: Words,
    stored_ends: Words,
) -> Mask:
    """Return which rows are not late: those that are not over, and those that reach what is open when they arrive."""
    taken = ~may_be_late
    found = cut(
        np.concatenate([stored_slots, slots]), np.concatenate([stored, starts]), np.concatenate([stored_ends, ends])
    )
    is_open = np.zeros(len(found.slots), np.bool_)
    of = found.of[len(stored) :]
    is_open[found.of[: len(stored)]] = True
    is_open[of[taken]] = True
    unsure = np.flatnonzero(may_be_late & is_open[of])
    if len(unsure) == 0:
        return taken
    _take_in_order(
        np.flatnonzero(np.isin(slots, slots[unsure])),
        slots,
        starts,
        ends,
        taken,
        _Open(stored_slots, stored, stored_ends),
    )
    return taken


class _Open:
    """Disjoint sessions by slot, in order: for the few keys with records that may be late."""

    def __init__(self, slots: Slots, starts: Words, ends: Words) -> None:
        self._of: dict[int, tuple[list[int], list[int]]] = {}
        for i in in_order(slots, starts).tolist() if len(slots) else ():
            firsts, lasts = self._of.setdefault(int(slots[i]), ([], []))
            firsts.append(int(starts[i]))
            lasts.append(int(ends[i]))

    def add(self, slot: int, start: int, end: int, must_reach: bool) -> bool:
        """Merge an interval with those that it reaches; with ``must_reach`` only if there is one."""
        firsts, lasts = self._of.setdefault(slot, ([], []))
        low = bisect_right(lasts, start)
        high = bisect_left(firsts, end)
        if must_reach and low >= high:
            return False
        if low < high:
            start, end = min(start, firsts[low]), max(end, lasts[high - 1])
        firsts[low:high], lasts[low:high] = [start], [end]
        return True


def _take_in_order(rows: Slots, slots: Slots, starts: Words, ends: Words, taken: Mask, found: _Open) -> None:
    """Decide, one by one in the order of arrival, about rows of keys of which some may be late."""
    of, first, last = slots[rows].tolist(), starts[rows].tolist(), ends[rows].tolist()
    for row, slot, start, end in zip(rows.tolist(), of, first, last, strict=True):
        taken[row] = found.add(slot, start, end, must_reach=not taken[row])


def session_operators(
    aggregate: WindowedAggregate, schema: pa.Schema, node: str, *, may_combine: bool = True
) -> WindowOperators:
    """Return the operators that compute ``aggregate``, of which the size is the gap, over sessions of records.

    See ``aligned_windows.window_operators``.
    """
    shape, gap_ms = window_shape(aggregate, schema, node), aggregate.windows.span_ms
    plan = decompose(aggregate, shape, schema) if may_combine else None
    kept = kept_columns(aggregate, shape, schema)
    merge = SessionMergeSpec(shape, gap_ms, plan, aggregate.aggregates, kept)
    combine = None if plan is None else SessionCombineSpec(plan, gap_ms)
    return WindowOperators(combine, merge, shape.keys, shape.output)
