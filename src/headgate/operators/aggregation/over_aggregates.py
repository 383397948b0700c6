"""OVER aggregates: each record with aggregates of the records of its key before it (docs/spec/over.md).

A record waits until event time has passed it. Then it is emitted, after those of its key that are earlier. What later
frames need of it is kept: of a frame that reaches back to the first record the accumulators of the key, of any other
the columns that are aggregated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from headgate.errors import UsageError
from headgate.model.graph import MAIN, InputName, OutputTag
from headgate.model.state_schema import name_text
from headgate.operators.aggregation.aggregates import RecordAggregates
from headgate.operators.aggregation.frame import Frame, frame_totals, joined, single_rows, taken
from headgate.operators.aggregation.running_aggregate import measure_name
from headgate.operators.base import WATERMARK_MAX_MS, WATERMARK_MIN_MS, Operator, OperatorContext, Output, key_columns
from headgate.operators.changes import keep_elements
from headgate.operators.joins.stream_joins import pair_slices
from headgate.operators.lateness import InTimeOperator
from headgate.operators.schemas import batch_of, columns_of, describe, frame_of
from headgate.operators.timestamps import EventTime
from headgate.operators.windows.window_plan import Decomposed, InputReader, aggregated_schema, decomposed, results
from headgate.state.backend import ColumnBackend, TimeKind
from headgate.state.descriptors import StateDescriptor, StateKind, state_identity
from headgate.state.key_index import Slots
from headgate.state.ttl import TTL
from headgate.state.values import Mask
from headgate.state.vectors import ranges
from headgate.state.window_aggregates import FrozenTable, Kind, Values, accumulated_column, wide_values

_FRAME = "__headgate_frame"
_ROWS = "rows"
_EMIT_ROWS = 65_536
"""Larger results are sent on in parts of so many rows."""

_KEYS_MAX = 16_384
"""Of so many keys rows are emitted at a time."""

_REST_MS_MAX = 1_000
"""So long at most a watermark waits, where emitting took long: each time all that is kept of the keys is read."""

_SLACK_MS = 1_000
"""Rows that only have to be forgotten may stay so much longer, or a quarter of the frame: fewer timers."""

_GONE_SHARE = 4
"""The kept rows of a key are written again when this part of them, one in so many, has left all frames."""


@dataclass(frozen=True)
class OverSpec:
    """Add aggregates over frames to records. Made by ``over_spec``.

    Attributes:
        schema: of the input.
        time: where its event time is.
        folded: the aggregates that are accumulators.
        others: those that are computed of the rows of each frame.
        made: the columns that are added.
        late: the side output of late records; None: they are dropped.
        ttl: how long a key is remembered after its last record.
    """

    keys: tuple[str, ...]
    schema: pa.Schema
    time: EventTime
    frame: Frame
    folded: Decomposed
    others: tuple[pl.Expr, ...]
    made: pa.Schema
    late: OutputTag | None
    ttl: TTL | None

    holds_back = True
    """Results of windows come when the watermark has passed their ``window_start``: it is held back by that."""

    def build(self) -> Operator:
        return OverOperator(self)

    def output_schemas(self, inputs: Mapping[InputName, pa.Schema], node: str) -> Mapping[OutputTag, pa.Schema]:
        """Return the schemas of the records with their aggregates and of late records."""
        found = {MAIN: self.output}
        return found if self.late is None else found | {self.late: self.schema}

    @cached_property
    def output(self) -> pa.Schema:
        """The columns of the records, then the aggregates."""
        return pa.schema([*self.schema, *self.made])

    @cached_property
    def kept(self) -> pa.Schema:
        """The columns that frames need of earlier records."""
        read = columns_of([*self.folded.inners, *self.others])
        needed = set(self.schema.names) if read is None else set(read)
        if self.frame.is_range or not needed:
            needed.add(self.time.column)
        return pa.schema([field for field in self.schema if field.name in needed])

    @property
    def waiting(self) -> StateDescriptor:
        """The state of records that event time has not passed."""
        return StateDescriptor(
            f"waiting by {name_text(self.time.column)}", StateKind.LIST, pa.struct(list(self.schema))
        )

    @property
    def before(self) -> StateDescriptor | None:
        """The state of records that were emitted and are in later frames; None: the totals say all of them."""
        if self.frame.preceding is None:
            return None
        return StateDescriptor(f"before, {self.frame.text}", StateKind.LIST, pa.struct(list(self.kept)), ttl=self.ttl)

    @property
    def totals(self) -> StateDescriptor | None:
        """The state of accumulators of all records that were emitted; None: frames do not reach back to the first."""
        if self.frame.preceding is not None:
            return None
        fields = [pa.field(_ROWS, pa.int64())]
        for i, measure in enumerate(self.folded.measures):
            fields.append(pa.field(measure_name(self.folded, i), measure.accumulator.type))
        return StateDescriptor(f"totals, {self.frame.text}", StateKind.VALUE, pa.struct(fields), ttl=self.ttl)

    @property
    def next_timer(self) -> StateDescriptor:
        """The state of the next timer of each key."""
        return StateDescriptor("next timer", StateKind.VALUE, pa.int64())

    @property
    def descriptors(self) -> list[StateDescriptor]:
        """All states."""
        found = [self.waiting, self.before, self.totals, self.next_timer]
        return [one for one in found if one is not None]

    def state_text(self) -> str:
        return state_identity(key_columns(self.schema, self.keys), self.descriptors, has_timers=True)


def over_spec(
    node: str,
    keys: tuple[str, ...],
    schema: pa.Schema,
    time: EventTime,
    frame: Frame,
    aggregates: Sequence[pl.Expr],
    *,
    late: OutputTag | None = None,
    ttl: TTL | None = None,
) -> OverSpec:
    """Return the operator that adds ``aggregates`` over frames to records of ``schema``.

    Raises:
        UsageError: an unknown column, colliding names, an aggregate that such a frame cannot have, or a TTL where rows
            go by event time.
    """
    results_of = aggregated_schema(node, schema, keys, tuple(aggregates), has_bounds=False)
    made = pa.schema(list(results_of)[len(keys) :])
    taken_names = [name for name in made.names if name in schema.names]
    if taken_names:
        raise UsageError(
            f"operator '{node}': there is a column '{taken_names[0]}' already; give the aggregate another name, such "
            f"as total=pl.col(...).sum(); the columns are {describe(schema)}"
        )
    if ttl is not None and frame.is_range and frame.preceding is not None:
        raise UsageError(
            f"operator '{node}': ttl= does not go with range=: rows are forgotten when event time has passed the range"
        )
    folded: list[pl.Expr] = []
    others: list[pl.Expr] = []
    for one in aggregates:
        (others if isinstance(decomposed([one], results_of, schema), pl.Expr) else folded).append(one)
    if others and frame.preceding is None:
        needs_all = others[0].meta.undo_aliases()
        raise UsageError(
            f"operator '{node}': {needs_all} over all records so far would have to keep all of them; len, count, sum, "
            "min, max, mean, std, var, first, last, max_by and min_by of an expression over one record need only their "
            "result, where it is no decimal (but for sum, mean, and min and max of at most 18 digits) and, for min and "
            "max, no text. Give range= or rows= a bound, or use key_by(...).agg(...)"
        )
    plan = decomposed(folded, results_of, schema)
    assert isinstance(plan, Decomposed)
    return OverSpec(keys, schema, time, frame, plan, tuple(others), made, late, ttl)


class OverOperator(InTimeOperator):
    """Keeps records until event time has passed them, and what later frames need of them."""

    _backend: ColumnBackend

    def __init__(self, spec: OverSpec) -> None:
        self._spec = spec
        self._reader = InputReader(spec.folded)
        self._accumulators = [measure.accumulator for measure in spec.folded.measures]
        self._others: RecordAggregates | None = None
        if spec.others:
            self._others = RecordAggregates(spec.others, spec.kept.append(pa.field(_FRAME, pa.int64())), [_FRAME])
        known = {result.name for result in spec.folded.results}
        self._held_ms: int | None = None
        self._rests_until_ms = 0
        self._of_others = pa.schema([field for field in spec.made if field.name not in known])

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        spec = self._spec
        keys = key_columns(spec.schema, spec.keys)
        self._backend = context.states.by_column(keys, spec.descriptors, has_timers=True)
        self._waiting = self._backend.lists(spec.waiting)
        self._before = None if spec.before is None else self._backend.lists(spec.before)
        self._totals = None if spec.totals is None else self._backend.values(spec.totals)
        self._next = self._backend.values(spec.next_timer)

    def process(self, batch: pa.RecordBatch) -> None:
        self._begin_call()
        self._backend.prepare()
        times_ms = self._spec.time.all_to_ms(self._spec.time.values(batch))
        is_late = self._late(batch, self._spec.keys, times_ms)
        if is_late is not None:
            if self._spec.late is not None:
                self.output.emit_to(self._spec.late, batch.filter(pa.array(is_late)))
            batch, times_ms = batch.filter(pa.array(~is_late)), times_ms[~is_late]
        if batch.num_rows:
            slots = self._backend.slots([batch.column(key) for key in self._spec.keys])
            dtype = self._spec.waiting.type
            self._waiting.append(slots, pa.StructArray.from_arrays(batch.columns, fields=list(dtype)))
            self._set_timers(slots, times_ms)

    def on_watermark(self, watermark_ms: int) -> None:
        """See ``Operator``. What is emitted at the end alone makes nothing late that comes after it."""
        is_end, watermark_ms = watermark_ms == WATERMARK_MAX_MS, self.context.held_back(watermark_ms)
        if not is_end:
            self._advance(watermark_ms)
        self._held_ms = watermark_ms
        # while it rests, the watermark waits: ``on_tick`` lets it go
        if is_end or self.context.clock_ms() >= self._rests_until_ms:
            self._let_go()

    def _let_go(self) -> None:
        """Emit what the latest watermark releases, and pass that on; then rest as long, and only take records in."""
        if self._held_ms is None:
            return
        watermark_ms, self._held_ms = self._held_ms, None
        begun_ms = self.context.clock_ms()
        self._begin_call()
        self._fire_until(watermark_ms)
        self.output.emit_watermark(watermark_ms)
        ended_ms = self.context.clock_ms()
        self._rests_until_ms = ended_ms + min(ended_ms - begun_ms, _REST_MS_MAX)

    def next_tick_ms(self) -> int | None:
        return None if self._held_ms is None else self._rests_until_ms

    def on_tick(self, now_ms: int) -> None:
        self._let_go()

    def on_idle(self, is_idle: bool) -> None:
        self._let_go()
        super().on_idle(is_idle)

    def before_barrier(self) -> None:
        # so that no watermark waits in a snapshot
        self._let_go()

    def on_resumed(self) -> None:
        """See ``Operator``. The end has fired all timers, those too that forget rows."""
        super().on_resumed()
        self._backend.prepare()
        slots = self._backend.all_slots()
        self._set_timers(slots, np.full(len(slots), max(self._watermark_ms, 0) + 1))

    def _set_timers(self, slots: Slots, times_ms: Slots) -> None:
        """Have a timer of each key for the earliest of its times; one for a later time may be left over."""
        assert self._backend.timers is not None
        if len(slots):
            assert len(slots) == len(times_ms), "each key has its time"
            changed = self._next.extreme(slots, pa.array(times_ms), is_min=True)
            self._backend.timers.event_time.register(slots[changed], times_ms[changed])

    def _fire_some(self, kind: TimeKind, until_ms: int) -> int:
        assert self._backend.timers is not None
        self._backend.prepare()
        fired, _ = self._backend.timers.of(kind).take(until_ms, _KEYS_MAX)
        if len(fired) == 0:
            return 0
        next_ms = self._next.get(fired)  # a timer that is left over finds a later one, or none
        slots = fired[pc.less_equal(next_ms, until_ms).fill_null(False).to_numpy(zero_copy_only=False)]
        if len(slots):
            # first: ``_fired`` sets the next one, for what stays
            self._next.clear(slots)
            self._fired(slots, until_ms)
        return len(fired)

    def _end_firing(self) -> None:
        """See ``TimedOperator``."""

    def _fired(self, slots: Slots, until_ms: int) -> None:
        """Emit the rows of these keys that event time has passed, and forget those that no frame needs."""
        owners, waiting = self._waiting.explode(slots)
        times = self._times(waiting)
        times_ms = times // self._spec.time.units_per_ms
        stay = times_ms > until_ms
        keep_elements(self._waiting, stay, slots[owners], waiting)
        self._set_timers(slots[owners[stay]], times_ms[stay])
        due = np.flatnonzero(~stay)
        # by time, and stable: rows of one time keep the order in which they came
        due = due[np.lexsort((times[due], owners[due]))]
        rows, owners, times = waiting.take(pa.array(due)), owners[due], times[due]
        if self._before is not None:
            found = self._over_rows(slots, owners, times, rows, until_ms)
        else:
            found = self._over_all(slots, owners, times, rows)
        if len(rows):
            columns = [*rows.flatten(), *(found[name] for name in self._spec.made.names)]
            batch = pa.RecordBatch.from_arrays(columns, schema=self._spec.output)
            for start in range(0, batch.num_rows, _EMIT_ROWS):
                self.output.emit(batch.slice(start, _EMIT_ROWS))

    def _times(self, rows: pa.StructArray) -> Slots:
        """Return the times of rows in the unit of their column, of dates in milliseconds."""
        time = self._spec.time
        place = rows.type.get_field_index(time.column)
        return time.words(rows.flatten()[place]) * time.ms_per_unit

    def _kept_columns(self, rows: pa.StructArray) -> pa.StructArray:
        columns = dict(zip(self._spec.schema.names, rows.flatten(), strict=True))
        fields = list(self._spec.kept)
        return pa.StructArray.from_arrays([columns[field.name] for field in fields], fields=fields)

    # -- frames that reach back to the first record --

    def _over_all(self, slots: Slots, owners: Slots, times: Slots, rows: pa.StructArray) -> dict[str, pa.Array]:
        """Return the aggregates of rows, and add these to the totals of their keys."""
        totals = self._totals
        assert totals is not None
        _, _, starts, ends = self._spec.frame.rows(owners, times, self._spec.time.units_per_ms)
        lasts = np.flatnonzero(np.diff(owners, append=-1) != 0)
        slots = slots[owners[lasts]]
        if len(slots) == 0:
            return {}
        had = totals.contains(slots)
        stored = totals.get(slots[had]).flatten()
        inputs = [
            _values(column, accumulator.dtype)
            for column, accumulator in zip(stored[1:], self._accumulators, strict=True)
        ]
        old = single_rows(self._accumulators, inputs, stored[0].to_numpy(zero_copy_only=False))
        new = self._single_rows(pa.RecordBatch.from_struct_array(self._kept_columns(rows)))
        keys = np.repeat(np.arange(len(slots)), np.diff(lasts, prepend=-1))
        order = np.argsort(np.concatenate([np.flatnonzero(had), keys]), kind="stable")
        stored_to = np.cumsum(had)[keys]  # so many totals stand before the rows of a key, its own among them
        table = taken(joined([old, new]), order)
        found = frame_totals(self._accumulators, table, starts + stored_to - had[keys], ends + stored_to)
        last = taken(found, lasts)
        columns = [pa.array(last.rows)]
        columns += [accumulated_column(values, seen) for values, seen in zip(last.values, last.seen, strict=True)]
        assert self._spec.totals is not None
        totals.put(slots, pa.StructArray.from_arrays(columns, fields=list(self._spec.totals.type)))
        return self._results(found)

    def _single_rows(self, batch: pa.RecordBatch) -> FrozenTable:
        table = single_rows(self._accumulators, self._reader.read(batch), np.ones(batch.num_rows, np.int64))
        values = list(table.values)
        for i, accumulator in enumerate(self._accumulators):
            if accumulator.kind is Kind.SQUARES:
                mean = values[accumulator.of]
                with np.errstate(invalid="ignore"):  # an infinite value has a variance of NaN
                    values[i] = mean - mean
        return FrozenTable(table.rows, values, table.seen)

    def _results(self, table: FrozenTable) -> dict[str, pa.Array]:
        plan = self._spec.folded
        return dict(zip([result.name for result in plan.results], results(plan, table), strict=True))

    # -- frames of some rows, which are kept --

    def _over_rows(
        self, slots: Slots, owners: Slots, times: Slots, rows: pa.StructArray, until_ms: int
    ) -> dict[str, pa.Array]:
        """Return the aggregates of rows, and keep what later frames need of them."""
        assert self._before is not None
        kept_of, kept = self._before.explode(slots)
        all_rows = pa.concat_arrays([kept.cast(pa.struct(list(self._spec.kept))), self._kept_columns(rows)])
        all_owners = np.concatenate([kept_of, owners])
        all_times = self._times(all_rows) if self._spec.frame.is_range else np.zeros(len(all_owners), np.int64)
        units = self._spec.time.units_per_ms
        order, _, starts, ends = self._spec.frame.rows(all_owners, all_times, units, len(kept))
        found: dict[str, pa.Array] = {}
        if len(rows):
            found = self._aggregated(pa.RecordBatch.from_struct_array(all_rows.take(pa.array(order))), starts, ends)
        stay = np.zeros(len(order), np.bool_)
        stay[order] = self._stay(all_owners[order], all_times[order], until_ms)
        self._keep(slots, all_owners, all_rows, len(kept), stay)
        if self._spec.frame.is_range:
            self._wait_for_end(slots, all_owners[stay], all_times[stay], until_ms)
        return found

    def _aggregated(self, batch: pa.RecordBatch, starts: Slots, ends: Slots) -> dict[str, pa.Array]:
        found = self._results(frame_totals(self._accumulators, self._single_rows(batch), starts, ends))
        if self._others is None:
            return found
        frame, parts = frame_of(batch), []
        for part in pair_slices(ends - starts):
            frames, places = ranges(starts[part], (ends - starts)[part])
            rows = frame[places].with_columns(pl.Series(_FRAME, frames))
            parts.append(self._others.of(rows, [_FRAME], self.context.node))
        computed = batch_of(pl.concat(parts), self._of_others)
        return found | dict(zip(computed.schema.names, computed.columns, strict=True))

    def _stay(self, owners: Slots, times: Slots, until_ms: int) -> Mask:
        """Return which rows, in order, may be in the frame of a row that is to come."""
        frame, units = self._spec.frame, self._spec.time.units_per_ms
        assert frame.preceding is not None
        if frame.is_range:  # the end alone makes nothing forgotten: more rows may come after a restore
            first = (min(until_ms, self._watermark_ms) + 1 - frame.preceding) * units
            still: Mask = times >= max(first, -(1 << 63))
            return still
        last = np.flatnonzero(np.diff(owners, append=-1) != 0)
        ends = np.repeat(last, np.diff(last, prepend=-1))
        among: Mask = np.arange(len(owners)) > ends - frame.preceding
        return among

    def _keep(self, slots: Slots, owners: Slots, rows: pa.StructArray, old_count: int, stay: Mask) -> None:
        """Add the new rows that stay, after ``old_count`` old ones, and drop old ones where there are many that go."""
        assert self._before is not None
        is_old = np.arange(len(owners)) < old_count
        counts = np.bincount(owners[is_old], minlength=len(slots))
        gone = np.bincount(owners[is_old & ~stay], minlength=len(slots))
        is_due = (gone > 0) & (gone * _GONE_SHARE >= counts)
        if self._spec.ttl is not None:  # all of a key live on
            is_due[:] = True
        written = stay & (is_due[owners] | ~is_old)
        self._before.clear(slots[is_due & (counts > 0)])
        if written.any():
            self._before.append(slots[owners[written]], rows.filter(pa.array(written)))

    def _wait_for_end(self, slots: Slots, owners: Slots, times: Slots, until_ms: int) -> None:
        """Have a timer for each key that has rows, of these times, when the last of them has left all frames."""
        assert self._spec.frame.preceding is not None
        latest = np.full(len(slots), WATERMARK_MIN_MS)
        np.maximum.at(latest, owners, times)
        has_rows = latest > WATERMARK_MIN_MS
        slack_ms = max(self._spec.frame.preceding // 4, _SLACK_MS)
        ends_ms = latest[has_rows] // self._spec.time.units_per_ms + self._spec.frame.preceding
        ends_ms = -(-ends_ms // slack_ms) * slack_ms
        is_to_come = ends_ms > until_ms
        self._set_timers(slots[has_rows][is_to_come], ends_ms[is_to_come])


def _values(column: pa.Array, dtype: str) -> Values:
    """Return stored values of an accumulator."""
    valid = column.is_valid().to_numpy(zero_copy_only=False) if column.null_count else None
    return Values(wide_values(column, dtype), valid)
