"""Windows of a key that a count, a condition or a clock ends, not their place in event time: one is open per key.

They are count windows, tumbling windows of processing time, and the global window, which is all records of a key and
fires by a trigger. Without partial results the records since the window began are kept in a list. Counterpart:
``window_trigger``, for triggers of the user.

State: a value per key with the state of its trigger and the partial results, and timers. A key with a ``due`` time has
a timer for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.model.state_schema import StateIdentity
from headgate.operators.aggregation.aggregates import RecordAggregates, stable
from headgate.operators.base import WATERMARK_MAX_MS, Operator, OperatorContext, Output
from headgate.operators.expressions import elementwise_problem
from headgate.operators.keys import check_keys
from headgate.operators.process.timers import TimedOperator
from headgate.operators.row_order import group_ranks
from headgate.operators.schemas import batch_of, describe, empty_frame, frame_of
from headgate.operators.timestamps import EventTime, event_time
from headgate.operators.user_functions import batch_error
from headgate.operators.windows.aligned_windows import WindowOperators, kept_columns
from headgate.operators.windows.partial_results import (
    KeyCombineSpec,
    measure_columns,
    measure_fields,
    merged,
    whole_values,
)
from headgate.operators.windows.window_assigner import tumbling
from headgate.operators.windows.window_plan import (
    Emission,
    InputReader,
    WindowedAggregate,
    WindowPlan,
    WindowShape,
    aggregated_schema,
    content_texts,
    decompose,
    results,
)
from headgate.state.backend import ColumnBackend, ColumnTimers, TimeKind
from headgate.state.descriptors import KeyColumns, StateDescriptor, StateKind
from headgate.state.key_index import Slots
from headgate.state.values import Mask
from headgate.state.window_aggregates import AggTable, FrozenTable, Values, partial_values, take_values

_OUTPUT_ROWS = 65_536
_TIMERS_MAX = 65_536

_DUE, _SINCE = "__due_ms", "__since"
"""Fields of a key's state: for when its timer is (0: it has none), and how many records came since it last fired."""

_GROUP = "__group"


@dataclass(frozen=True)
class Firing:
    """When the open window of a key fires; at most one of the first three is given.

    Attributes:
        records: after so many records.
        interval_ms: at multiples of it, if records have come.
        when: after each record for which it is true.
        is_event_time: which time ``interval_ms`` is of.
        discards: begins again when it has fired; otherwise the next result includes what the last one did.
        has_bounds: results say from when to when the interval was.
        fires_at_end: what came since it last fired is emitted when the input ends.
    """

    records: int = 0
    interval_ms: int = 0
    when: pl.Expr | None = None
    is_event_time: bool = False
    discards: bool = True
    has_bounds: bool = False
    fires_at_end: bool = True

    @property
    def kind(self) -> TimeKind:
        """The time of its timers."""
        return TimeKind.EVENT_TIME if self.is_event_time else TimeKind.PROCESSING_TIME

    def text(self) -> str:
        """Return the part of the identity of state."""
        return f"{'discarding' if self.discards else 'accumulating'}, bounds {self.has_bounds}"


@dataclass(frozen=True)
class TriggeredWindowSpec:
    """Keep the open window of each key and emit its result when ``firing`` says so.

    Attributes:
        plan: None: records are kept, of which these columns are ``kept``.
        is_combined: the input is partial results of ``plan``.
        time: of records, if the trigger needs it.
    """

    shape: WindowShape
    firing: Firing
    plan: WindowPlan | None
    is_combined: bool
    aggregates: tuple[pl.Expr, ...]
    kept: pa.Schema
    time: EventTime | None

    def build(self) -> Operator:
        return TriggeredWindowOperator(self)

    def output_schema(self, schema: pa.Schema, node: str) -> pa.Schema:
        """Return keys, window bounds (of some kinds) and aggregates."""
        return self.shape.output

    def state_text(self) -> str:
        """See ``specs.state_text``. The trigger's numbers may change: what is kept does not depend on them."""
        keys = [(name, str(dtype)) for name, dtype in zip(self.shape.keys, self.shape.key_types, strict=True)]
        parts = content_texts(self.plan, self.kept)
        return StateIdentity.of_open_windows(f"triggered, {self._kind_text()}", keys, parts).text

    def _kind_text(self) -> str:
        return self.firing.text()


class TriggeredWindowOperator(TimedOperator):
    """Adds a batch to the open windows, and fires those that the batch or a timer ends."""

    _backend: ColumnBackend

    def __init__(self, spec: TriggeredWindowSpec) -> None:
        self._spec, self._shape, self._firing = spec, spec.shape, spec.firing
        self._reader = None if spec.plan is None else InputReader(spec.plan)
        kept = (spec.aggregates, spec.kept, spec.shape.keys)
        self._aggregates = RecordAggregates(*kept) if spec.plan is None else None
        self._accumulators = [] if spec.plan is None else [measure.accumulator for measure in spec.plan.measures]
        self._measures = pa.schema(measure_fields(self._accumulators))
        fields = [pa.field(_DUE, pa.int64()), pa.field(_SINCE, pa.int64()), *self._measures]
        self._open = StateDescriptor("open", StateKind.VALUE, pa.struct(fields))
        self._fields = [field for field in spec.kept if field.name not in spec.shape.keys]
        self._fields = self._fields or [pa.field(_SINCE, pa.bool_())]
        self._records = StateDescriptor("records", StateKind.LIST, pa.struct(self._fields))

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        keys = KeyColumns(self._shape.keys, self._shape.key_types)
        states = [self._open] if self._spec.plan is not None else [self._open, self._records]
        self._backend = context.states.by_column(keys, states, has_timers=True)
        self._values = self._backend.values(self._open)
        self._lists = None if self._spec.plan is not None else self._backend.lists(self._records)

    # -- input ------------------------------------------------------------------------------------------------------

    def process(self, batch: pa.RecordBatch) -> None:
        self._begin_call()
        self._backend.prepare()
        self._fire_what_is_due()
        slots = self._backend.slots([batch.column(key) for key in self._shape.keys])
        known, first, of = np.unique(slots, return_index=True, return_inverse=True)
        rows, values = self._read(batch)
        if self._firing.interval_ms:
            self._hold(batch, known, first, of, rows, values)
        else:
            self._fire_within(batch, known, of, values)

    def _fire_what_is_due(self) -> None:
        """Fire what the next tick would: no record of this batch belongs to it."""
        now_ms, due_ms = self._backend.time.now_ms, self._timers(TimeKind.PROCESSING_TIME).next_ms()
        if due_ms is not None and due_ms <= now_ms:
            while self._fire_some(TimeKind.PROCESSING_TIME, now_ms):
                pass

    def _read(self, batch: pa.RecordBatch) -> tuple[npt.NDArray[np.int64], list[Values]]:
        """Return how many records each row stands for, and the input of each accumulator."""
        if self._spec.is_combined:
            rows: npt.NDArray[np.int64] = batch.column(len(self._shape.keys)).to_numpy()
            return rows, partial_values(batch, self._accumulators)
        inputs = [] if self._reader is None else self._reader.read(batch)
        return np.ones(batch.num_rows, np.int64), [whole_values(given, batch.num_rows) for given in inputs]

    def _stored(self, slots: Slots) -> Stored:
        """Return the state of distinct keys."""
        held = self._values.get(slots)
        there = np.flatnonzero(held.is_valid().to_numpy(zero_copy_only=False))
        due, since, *measures = held.flatten()
        found = pa.RecordBatch.from_arrays([column.take(pa.array(there)) for column in measures], schema=self._measures)
        due, since = (column.fill_null(0).to_numpy(zero_copy_only=False).copy() for column in (due, since))
        return Stored(there, due, since, found.column(0).to_numpy(), partial_values(found, self._accumulators))

    def _put(self, slots: Slots, due: npt.NDArray[np.int64], since: npt.NDArray[np.int64], table: FrozenTable) -> None:
        columns = [pa.array(due), pa.array(since), *measure_columns(table)]
        self._values.put(slots, pa.StructArray.from_arrays(columns, fields=list(self._open.type)))

    def _elements(self, batch: pa.RecordBatch) -> pa.Array:
        """Return what is kept of records."""
        names = batch.schema.names
        nothing = pa.nulls(batch.num_rows, pa.bool_())
        columns = [batch.column(field.name) if field.name in names else nothing for field in self._fields]
        return pa.StructArray.from_arrays(columns, fields=self._fields)

    def _hold(
        self,
        batch: pa.RecordBatch,
        known: Slots,
        first: Slots,
        of: Slots,
        rows: npt.NDArray[np.int64],
        values: Sequence[Values],
    ) -> None:
        """Add a batch to the open windows, which timers fire."""
        stored = self._stored(known)
        table = AggTable(self._accumulators)
        table.update(len(known), stored.there, stored.rows, stored.values)
        table.update(len(known), of, rows, values)
        since = stored.since
        np.add.at(since, of, rows)
        is_new = np.flatnonzero(stored.due == 0)
        if len(is_new):
            interval_ms = self._firing.interval_ms
            now_ms: npt.NDArray[np.int64] | int = self._backend.time.now_ms
            if self._spec.time is not None:
                time = self._spec.time
                now_ms = time.values(batch)[first[is_new]] * time.ms_per_unit // time.units_per_ms
            stored.due[is_new] = (now_ms // interval_ms + 1) * interval_ms
            # a window of event time is over one millisecond before its end
            early = 1 if self._firing.is_event_time else 0
            self._timers(self._firing.kind).register(known[is_new], stored.due[is_new] - early)
        self._put(known, stored.due, since, table.freeze(len(known)))
        if self._lists is not None:
            self._lists.append(known[of], self._elements(batch))

    def _fire_within(self, batch: pa.RecordBatch, known: Slots, of: Slots, values: Sequence[Values]) -> None:
        """Add a batch to the open windows, of which its records fire some."""
        stored = self._stored(known)
        # stable: records of a key keep the order in which they came
        order = np.argsort(of, kind="stable")
        cut = self._cut(batch, of[order], order, stored.since)
        assert len(cut.of) == batch.num_rows, "each record is in one part"
        parts = merged(
            self._accumulators, len(cut.slots), cut.of, np.ones(len(order), np.int64), take_values(values, order)
        )
        fired = np.flatnonzero(cut.is_ended)
        fired = fired[np.argsort(order[cut.last[fired]])]  # in the order of the records that fire them
        before, counts = np.zeros(len(known), np.bool_), parts.rows.copy()
        before[stored.there] = True
        is_first = cut.rank == 0
        # what was kept belongs to the first part of its key
        counts[is_first] += stored.since[cut.slots[is_first]]
        if self._firing.discards:
            firsts = np.flatnonzero(is_first & before[cut.slots])
            table = AggTable(self._accumulators)
            table.update(len(cut.slots), firsts, stored.rows, stored.values)
            table.update(len(cut.slots), np.arange(len(cut.slots)), parts.rows, values_of(parts))
            left = np.flatnonzero(~cut.is_ended)
            is_left = np.zeros(len(known), np.bool_)
            is_left[cut.slots[left]] = True
            self._values.clear(known[before & ~is_left])
            self._put(known[cut.slots[left]], np.zeros(len(left), np.int64), counts[left], table.take(left))
            emitted = table.take(fired)
        else:
            emitted = self._accumulate(known, cut, parts, stored, counts, fired)
        if self._lists is None:
            self._emit(known[cut.slots[fired]], emitted, None)
        else:
            self._emit_within(batch, known, cut, order, fired)

    def _accumulate(
        self, known: Slots, cut: Parts, parts: FrozenTable, stored: Stored, counts: npt.NDArray[np.int64], fired: Slots
    ) -> FrozenTable:
        """Add the parts of a batch one after the other to what there is; return what it was when each fired."""
        table, place = AggTable(self._accumulators), np.empty(len(cut.slots), np.int64)
        table.update(len(known), stored.there, stored.rows, stored.values)
        taken: list[FrozenTable] = []
        done = 0
        # one part of each key at a time: a result has all parts up to its own
        for rank in range(int(cut.rank.max()) + 1):
            at = np.flatnonzero(cut.rank == rank)
            some = table_at(parts, at)
            table.update(len(known), cut.slots[at], some.rows, values_of(some))
            at = at[cut.is_ended[at]]
            taken.append(table.take(cut.slots[at]))
            place[at] = done + np.arange(len(at))
            done += len(at)
        last = np.append(np.flatnonzero(cut.rank == 0)[1:], len(cut.rank)) - 1
        since = np.where(cut.is_ended[last], 0, counts[last])
        self._put(known, np.zeros(len(known), np.int64), since, table.freeze(len(known)))
        return table_at(joined(taken), place[fired])

    def _cut(self, batch: pa.RecordBatch, of: Slots, order: Slots, since: npt.NDArray[np.int64]) -> Parts:
        """Cut a batch, which is ordered by key, after each record that fires."""
        if self._firing.when is None:
            count = self._firing.records
            # a key that has reached the count, which was higher in a former run, fires with its next record
            more = group_ranks(of) + 1 - np.maximum(count - since[of], 1)
            return parts_of(of, (more >= 0) & (more % count == 0))
        return parts_of(of, self._is_true(batch)[order])

    def _is_true(self, batch: pa.RecordBatch) -> Mask:
        try:
            found = frame_of(batch).select(self._firing.when.alias(_GROUP))  # type: ignore[union-attr]
        except pl.exceptions.PolarsError as error:
            raise batch_error(self.context.node, batch.num_rows, error) from None
        return found[_GROUP].fill_null(False).to_numpy()

    # -- results ----------------------------------------------------------------------------------------------------

    def _emit(self, slots: Slots, table: FrozenTable, ends_ms: npt.NDArray[np.int64] | None) -> None:
        assert self._spec.plan is not None
        self._send(slots, results(self._spec.plan, table), ends_ms)

    def _emit_within(self, batch: pa.RecordBatch, known: Slots, cut: Parts, order: Slots, fired: Slots) -> None:
        """Emit what fired of records that are kept, and keep the rest."""
        assert self._lists is not None
        elements = self._elements(batch.take(pa.array(order)))
        by_row = cut.slots[cut.of]
        if not self._firing.discards:
            self._lists.append(known[by_row], elements)
            for rank in range(int(cut.rank.max()) + 1):
                now = fired[cut.rank[fired] == rank]
                slots = cut.slots[now]
                rows, held = self._lists.explode(known[slots])
                # of the records of this batch, those of later parts are not in it yet: they are the last of each list
                later = np.zeros(len(known), np.int64)
                np.add.at(later, by_row[cut.rank[cut.of] > rank], 1)
                lengths = np.bincount(rows, minlength=len(now))
                place = np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
                is_in = place < (lengths - later[slots])[rows]
                self._emit_records(known[slots], rows[is_in], held.filter(pa.array(is_in)), None)
            return
        number = np.full(len(cut.slots), -1)
        number[fired] = np.arange(len(fired))
        hit = np.unique(cut.slots[fired])
        if len(hit):
            rows, held = self._lists.explode(known[hit])
            first = np.empty(len(known), np.int64)
            first[cut.slots[cut.rank == 0]] = number[np.flatnonzero(cut.rank == 0)]
            ends = number[cut.of] >= 0
            groups = np.concatenate([first[hit[rows]], number[cut.of][ends]])
            whole = pa.concat_arrays([held, elements.filter(pa.array(ends))])
            self._emit_records(known[cut.slots[fired]], groups, whole, None)
            self._lists.clear(known[hit])
        stays = number[cut.of] < 0
        self._lists.append(known[by_row[stays]], elements.filter(pa.array(stays)))

    def _emit_records(
        self, slots: Slots, groups: Slots, elements: pa.Array, ends_ms: npt.NDArray[np.int64] | None
    ) -> None:
        """Aggregate records; ``groups`` says to which of ``slots`` each belongs."""
        if len(slots) == 0:
            return
        keys = self._backend.key_columns(slots[groups])
        names = [*self._shape.keys, *(field.name for field in self._fields), _GROUP]
        frame = pl.DataFrame(pa.Table.from_arrays([*keys, *elements.flatten(), pa.array(groups)], names=names))
        assert self._aggregates is not None
        found = self._aggregates.of(frame, [_GROUP], self.context.node)
        values = pa.schema(list(self._shape.output)[len(self._shape.keys) + 2 * self._firing.has_bounds :])
        self._send(slots, batch_of(found.drop(_GROUP), values).columns, ends_ms)

    def _send(self, slots: Slots, values: Sequence[pa.Array], ends_ms: npt.NDArray[np.int64] | None) -> None:
        bounds: list[pa.Array] = []
        if self._firing.has_bounds:
            assert ends_ms is not None
            starts_ms = ends_ms - self._firing.interval_ms
            bounds = [moments(starts_ms), moments(ends_ms)]
        arrays = [*self._key_columns(slots), *bounds, *values]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._shape.output)
        for start in range(0, batch.num_rows, _OUTPUT_ROWS):
            self.output.emit(batch.slice(start, _OUTPUT_ROWS))

    def _key_columns(self, slots: Slots) -> list[pa.Array]:
        """Return the keys as they are in results."""
        return self._backend.key_columns(slots)

    def _timers(self, kind: TimeKind) -> ColumnTimers:
        assert self._backend.timers is not None
        return self._backend.timers.of(kind)

    def _fire_some(self, kind: TimeKind, until_ms: int) -> int:
        self._begin_call()
        self._backend.prepare()
        slots, times_ms = self._timers(kind).take(until_ms, _TIMERS_MAX)
        if len(slots):
            self._fire(slots, times_ms)
        return len(slots)

    def _fire(self, slots: Slots, ends_ms: npt.NDArray[np.int64]) -> None:
        """Emit the windows of these keys."""
        stored = self._stored(slots)
        slots, ends_ms = slots[stored.there], ends_ms[stored.there]
        seen = [_valid(v) if a.can_be_null else None for a, v in zip(self._accumulators, stored.values, strict=True)]
        table = FrozenTable(stored.rows, tuple(np.asarray(v.values) for v in stored.values), tuple(seen))
        if self._lists is None:
            self._emit(slots, table, ends_ms)
        else:
            self._emit_records(slots, *self._lists.explode(slots), ends_ms)
        if not self._firing.discards:
            nothing = np.zeros(len(slots), np.int64)
            self._put(slots, nothing, nothing, table)
            return
        self._values.clear(slots)
        if self._lists is not None:
            self._lists.clear(slots)

    def _end_firing(self) -> None:
        """See ``TimedOperator``: nothing waits."""

    def on_watermark(self, watermark_ms: int) -> None:
        """See ``TimedOperator``. The end fires what has not fired yet."""
        self._begin_call()
        if watermark_ms == WATERMARK_MAX_MS and self._firing.fires_at_end:
            while self._fire_some(self._firing.kind, WATERMARK_MAX_MS):
                pass
            # what no timer ends: windows that a count or a condition fires
            slots = self._backend.all_slots()
            stored = self._stored(slots)
            some = slots[stored.since > 0]
            self._fire(some, np.zeros(len(some), np.int64))
        super().on_watermark(watermark_ms)


@dataclass(frozen=True, slots=True)
class Stored:
    """The state of some keys: of those in ``there`` rows and values; of all, 0 where there is none, the trigger's."""

    there: Slots
    due: npt.NDArray[np.int64]
    since: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    values: list[Values]


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a batch that is ordered by key: each ends with a row that ends it, or with its key.

    Attributes:
        of: the number of each row's part.
        slots: the key of each part.
        begins: its first row.
        last: its last row.
        is_ended: whether that ends it.
        rank: how many parts of its key come before it.
    """

    of: Slots
    slots: Slots
    begins: Slots
    last: Slots
    is_ended: Mask
    rank: Slots


def parts_of(of: Slots, ends: Mask) -> Parts:
    """Cut rows that are ordered by key, ``of``, after each one that ends a part."""
    assert len(of) == len(ends), "of each row it is known whether it ends a part"
    is_first = np.ones(len(of), np.bool_)
    is_first[1:] = (of[1:] != of[:-1]) | ends[:-1]
    begins = np.flatnonzero(is_first)
    last = np.append(begins[1:], len(of)) - 1
    return Parts(np.cumsum(is_first) - 1, of[begins], begins, last, ends[last], group_ranks(of[begins]))


def moments(times_ms: npt.NDArray[np.int64]) -> pa.Array:
    """Return milliseconds since 1970 as timestamps."""
    return pa.array(times_ms * 1_000).view(pa.timestamp("us"))


def _valid(given: Values) -> Mask:
    return np.ones(len(np.asarray(given.values)), np.bool_) if given.valid is None else given.valid


def values_of(table: FrozenTable) -> list[Values]:
    """Return a table as the input of accumulators."""
    return [Values(values, seen) for values, seen in zip(table.values, table.seen, strict=True)]


def table_at(table: FrozenTable, at: Slots) -> FrozenTable:
    """Return some rows of a table."""
    return FrozenTable(
        table.rows[at],
        tuple(values[at] for values in table.values),
        tuple(None if seen is None else seen[at] for seen in table.seen),
    )


def joined(tables: Sequence[FrozenTable]) -> FrozenTable:
    """Return the rows of all tables, one after the other."""
    first = tables[0]
    return FrozenTable(
        np.concatenate([table.rows for table in tables]),
        tuple(np.concatenate([table.values[i] for table in tables]) for i in range(len(first.values))),
        tuple(
            None if seen is None else np.concatenate([table.seen[i] for table in tables])
            for i, seen in enumerate(first.seen)
        ),
    )


def triggered_operators(
    keys: tuple[str, ...],
    firing: Firing,
    aggregates: tuple[pl.Expr, ...],
    schema: pa.Schema,
    node: str,
    *,
    time_column: str = "",
) -> WindowOperators:
    """Return the operators that compute ``aggregates`` over the open window of each key.

    Raises:
        UsageError: unknown column, wrong type, colliding names, or a condition that is none.
    """
    check_keys(node, schema, keys)
    shape = shape_of_keys(node, schema, keys, aggregates, firing.has_bounds)
    if firing.when is not None:
        _check_condition(node, schema, firing.when)
    aggregate = WindowedAggregate(keys, "", tumbling(1), aggregates)
    plan = decompose(aggregate, shape, schema)
    time = event_time(node, schema, time_column) if firing.is_event_time else None
    is_combined = plan is not None and bool(firing.interval_ms) and time is None
    kept = kept_columns(aggregate, shape, schema)
    window = TriggeredWindowSpec(shape, firing, plan, is_combined, tuple(map(stable, aggregates)), kept, time)
    combine = KeyCombineSpec(plan) if plan is not None and is_combined else None
    return WindowOperators(combine, window, keys, shape.output)


def shape_of_keys(
    node: str, schema: pa.Schema, keys: tuple[str, ...], aggregates: tuple[pl.Expr, ...], has_bounds: bool
) -> WindowShape:
    """Return what is known of windows without event time."""
    output = aggregated_schema(node, schema, keys, aggregates, has_bounds=has_bounds)
    types = tuple(schema.field(key).type for key in keys)
    return WindowShape(keys, types, EventTime("", 1, 1), tumbling(1), output, Emission())


def _check_condition(node: str, schema: pa.Schema, when: pl.Expr) -> None:
    """Refuse a condition that is not true or false of each record alone.

    Raises:
        UsageError
    """
    frame = empty_frame(schema)
    try:
        found = frame.select(when.alias(_GROUP))[_GROUP].dtype
    except pl.exceptions.PolarsError as error:
        first = str(error).strip().split("\n", 1)[0]
        raise UsageError(f"operator '{node}': {first}; the columns are {describe(schema)}") from error
    problem = "" if found == pl.Boolean else f"is {found}, not true or false"
    problem = problem or elementwise_problem(when, frame.lazy().with_columns(when.alias(_GROUP)))
    if problem:
        raise UsageError(f"operator '{node}': the condition {when} of the trigger {problem}")
