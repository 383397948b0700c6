"""Session windows: records of a key belong together while each follows another in less than the gap.

``SessionCombine`` (``partial_results``) makes partial sessions of each batch before the shuffle; ``SessionMerge``
merges them with the open ones after it. Where aggregates do not decompose, ``SessionMerge`` gets the records and keeps
them in a list per key: sessions of a key never overlap, so times say which records belong to which.

A session ends at its last record plus the gap, excluded. It is over when the watermark says that no record before
its end can follow, and results do not depend on batches or on the order of records in time. A record that is so late
that its own session would be over is taken only by a session that is still open when it arrives; otherwise it is
dropped. So records of that kind are never combined with others before they are compared with what is open.

With an allowed lateness or early results, a session may emit more than once, and may be joined with another one that
has emitted. So the results are changes: upserts by key and ``window_start``, and deletes of what was joined. A session
is kept for the lateness after it is over, and it is known of each what has been emitted. With retractions, the
emitted row is kept beside each session, so that it can be taken back as it was.

State: the open sessions of each key by their start, event-time timers, and the watermark as in tumbling windows. A
key with open sessions has a timer no later than when the first of them is over; a timer that comes too early, because
the session grew, is set again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.model.graph import MAIN, MAIN_INPUT, InputName, OutputTag
from headgate.model.state_schema import StateIdentity, name_text
from headgate.operators.aggregation.aggregates import RecordAggregates, stable
from headgate.operators.base import (
    WATERMARK_MAX_MS,
    WATERMARK_MIN_MS,
    KeyedOperator,
    Operator,
    OperatorContext,
    Output,
    RestoredState,
)
from headgate.operators.changes import DELETE, INSERT, OP_FIELD, OPS, UPDATE_AFTER, UPDATE_BEFORE, Codes, op_column
from headgate.operators.lateness import FiredGroups, count_late
from headgate.operators.schemas import batch_of
from headgate.operators.windows.aligned_windows import WindowOperators, kept_columns
from headgate.operators.windows.partial_results import (
    END,
    START,
    Cut,
    SessionCombineSpec,
    cut,
    horizon_us,
    in_order,
    measure_columns,
    merged,
    microseconds,
    whole_values,
)
from headgate.operators.windows.window_plan import (
    END_COLUMN,
    ROWS_COLUMN,
    InputReader,
    WindowedAggregate,
    WindowPlan,
    WindowShape,
    content_texts,
    decompose,
    results,
    window_shape,
)
from headgate.state.backend import META, ColumnBackend, ColumnTimers
from headgate.state.descriptors import KeyColumns, StateDescriptor, StateKind
from headgate.state.key_hash import Words
from headgate.state.key_index import KeyIndex, Slots, frozen_keys, make_key_index
from headgate.state.snapshot import FrozenState
from headgate.state.values import Mask
from headgate.state.window_aggregates import FrozenTable, accumulated_column, partial_values

_EMITTED = "__emitted"
_NOTHING, _FORMER, _CURRENT = 0, 1, 2
"""What has been emitted of a session, where results are changes: nothing, a former result, the one of now."""

_OUTPUT_ROWS = 65_536
_TIMERS_MAX = 65_536
_INT_MIN, _INT_MAX = -(1 << 63), (1 << 63) - 1


def _due_ms(ends_us: Words) -> Words:
    """Return the watermarks that end sessions."""
    return -(-ends_us // 1_000) - 1


@dataclass(frozen=True)
class SessionMergeSpec:
    """Keep open sessions and emit the results of each when it is over.

    Attributes:
        plan: with it, the input is partial sessions, or records if late ones have an output.
        kept: without it, the input is records, of which these columns are kept, and ``aggregates`` are computed of
            them.
    """

    shape: WindowShape
    gap_ms: int
    plan: WindowPlan | None
    aggregates: tuple[pl.Expr, ...]
    kept: pa.Schema

    @property
    def has_changes(self) -> bool:
        """Whether results are changes."""
        return self.shape.emission.lateness_ms > 0 or self.shape.emission.early_ms > 0

    @property
    def output(self) -> pa.Schema:
        """The schema of the results."""
        return self.shape.output.append(OP_FIELD) if self.has_changes else self.shape.output

    @property
    def values(self) -> list[pa.Field]:
        """The columns of the results that are neither keys nor bounds."""
        return list(self.shape.output)[len(self.shape.keys) + 2 :]

    def build(self) -> Operator:
        return SessionMergeOperator(self)

    @property
    def holds_back(self) -> bool:
        """Whether the watermark is held back."""
        return self.shape.emission.holds_back

    def output_schemas(self, inputs: Mapping[InputName, pa.Schema], node: str) -> Mapping[OutputTag, pa.Schema]:
        """Return keys, window bounds, aggregates and, of changes, ``op``; and of late records what comes in."""
        return {**self.shape.outputs(inputs[MAIN_INPUT]), MAIN: self.output}

    def state_text(self) -> str:
        keys = [(name, str(dtype)) for name, dtype in zip(self.shape.keys, self.shape.key_types, strict=True)]
        parts = content_texts(self.plan, self.kept)
        window = f"session of gap {self.gap_ms} ms on {name_text(self.shape.time.column)}"
        if self.has_changes:
            window += f", changes, kept {self.shape.emission.lateness_ms} ms"
            window += ", with the rows emitted" if self.shape.emission.retractions else ""
        return StateIdentity.of_open_windows(window, keys, parts).text


class SessionMergeOperator(KeyedOperator):
    """Merges what comes with the open sessions, a batch at a time."""

    _backend: ColumnBackend

    def __init__(self, spec: SessionMergeSpec) -> None:
        self._spec, self._shape = spec, spec.shape
        kept = (spec.aggregates, spec.kept, spec.shape.keys)
        self._aggregates = RecordAggregates(*kept) if spec.plan is None else None
        measures = () if spec.plan is None else spec.plan.measures
        self._accumulators = tuple(measure.accumulator for measure in measures)
        self._emission = spec.shape.emission
        self._lateness_us = self._emission.lateness_ms * 1_000
        fields = [
            (END, pa.int64()),
            *([(_EMITTED, pa.int64())] if spec.has_changes else []),
            (ROWS_COLUMN, pa.int64()),
        ]
        self._rows_at = len(fields) - 1
        fields += [(f"__partial_{i}", a.type) for i, a in enumerate(self._accumulators)]
        self._fields = [pa.field(name, dtype) for name, dtype in fields]
        self._sessions = StateDescriptor("sessions", StateKind.MAP, pa.struct(self._fields), pa.int64())
        self._values = [field for field in spec.kept if field.name not in spec.shape.keys]
        self._records = StateDescriptor("records", StateKind.LIST, pa.struct(self._values))
        self._former_fields = [pa.field(END, pa.int64()), *spec.values]
        self._emitted = StateDescriptor("emitted", StateKind.MAP, pa.struct(self._former_fields), pa.int64())
        self._retractions = spec.has_changes and self._emission.retractions
        self._watermark_ms = WATERMARK_MIN_MS
        self._fired = FiredGroups()
        is_read = spec.plan is not None and self._emission.late is not None
        self._reader = InputReader(spec.plan) if is_read and spec.plan is not None else None
        self._changed: KeyIndex | None = None
        """The keys of which results are to be emitted early; None: of all."""
        self._due_ms: int | None = None

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        keys = KeyColumns(self._shape.keys, self._shape.key_types)
        self._changed = make_key_index(keys.types)
        states = [self._sessions, *([] if self._spec.plan is not None else [self._records])]
        states += [self._emitted] if self._retractions else []
        self._backend = context.states.by_column(keys, states, has_timers=True)
        self._maps = self._backend.maps(self._sessions)
        self._lists = None if self._spec.plan is not None else self._backend.lists(self._records)
        self._former = self._backend.maps(self._emitted) if self._retractions else None

    def restore(self, states: Sequence[RestoredState]) -> None:
        """See ``Operator``. Goes on with the lowest of the former watermarks."""
        former = [(state, bytes(sections[META])) for state, sections in self._restore_backend(states)]
        self._watermark_ms = self._fired.restore(self.context, former)
        self._backend.end_restore()
        if self._emission.early_ms:
            self._changed = None
            self._due_ms = self.context.clock_ms() + self._emission.early_ms

    # -- input ------------------------------------------------------------------------------------------------------

    def process(self, batch: pa.RecordBatch) -> None:
        self._backend.prepare()
        keys = [batch.column(key) for key in self._shape.keys]
        if self._spec.plan is None or self._reader is not None:
            starts = microseconds(self._shape.time, batch)
            ends = starts + self._spec.gap_ms * 1_000
            columns = [pa.array(ends), pa.array(np.ones(batch.num_rows, np.int64))]
            for given in [] if self._reader is None else self._reader.read(batch):
                whole = whole_values(given, batch.num_rows)
                columns.append(accumulated_column(np.asarray(whole.values), whole.valid))
        else:
            at = len(keys)
            starts, ends = batch.column(at).to_numpy(), batch.column(at + 1).to_numpy()
            columns = batch.columns[at + 1 :]
        if self._spec.has_changes:
            columns.insert(1, pa.array(np.full(batch.num_rows, _NOTHING)))
        slots = self._backend.slots(keys)
        known = np.unique(slots)
        rows, open_starts, held = self._maps.items(known)
        stored_slots, stored = known[rows], open_starts.to_numpy()
        stored_ends = held.field(0).to_numpy()
        may_be_late = self._may_be_late(batch, ends)
        if may_be_late is not None:
            taken = _taken(slots, starts, ends, may_be_late, stored_slots, stored, stored_ends)
            if not taken.all():
                self._count_late(ends[~taken], columns[self._rows_at].to_numpy()[~taken])
                if self._emission.late is not None:
                    self.output.emit_to(self._emission.late, batch.filter(pa.array(~taken)))
                batch, slots, starts, ends = batch.filter(pa.array(taken)), slots[taken], starts[taken], ends[taken]
                columns = [column.filter(pa.array(taken)) for column in columns]
                if len(slots) == 0:
                    return
        if self._lists is not None:
            fields = [batch.column(field.name) for field in self._values]
            self._lists.append(slots, pa.StructArray.from_arrays(fields, fields=self._values))
        if len(stored):
            # the stored ones first: ``_store`` knows them by their places
            columns = [pa.concat_arrays(both) for both in zip(held.flatten(), columns, strict=True)]
        found = cut(
            np.concatenate([stored_slots, slots]), np.concatenate([stored, starts]), np.concatenate([stored_ends, ends])
        )
        self._store(found, stored_slots, stored, columns)
        if self._spec.has_changes:
            self._note_changes(
                found, [column.take(pa.array(_firsts(slots))) for column in map(batch.column, self._shape.keys)]
            )

    def _store(self, found: Cut, stored_slots: Slots, stored: Words, columns: Sequence[pa.Array]) -> None:
        """Write the sessions that changed; the first ``len(stored)`` intervals are sessions that were stored."""
        count, before = len(found.slots), len(stored)
        of_stored, is_touched, is_new = found.of[:before], np.zeros(count, np.bool_), np.ones(count, np.bool_)
        is_touched[found.of[before:]] = True
        is_new[of_stored] = False
        whole = pa.RecordBatch.from_arrays(columns, schema=pa.schema(self._fields))
        rows = columns[self._rows_at].to_numpy()
        assert len(found.of) == len(columns[0]), "each interval is in one session"
        table = merged(self._accumulators, count, found.of, rows, partial_values(whole, self._accumulators))
        # joined with one that begins earlier, under which it is stored from now on
        is_gone = found.starts[of_stored] != stored
        if is_gone.any():
            self._maps.remove(stored_slots[is_gone], pa.array(stored[is_gone]))
        facts = [pa.array(found.ends)]
        if self._spec.has_changes:
            is_known = columns[1].to_numpy()[:before] != _NOTHING
            if not self._emission.early_ms:  # a session that goes on has no result yet
                is_gone |= (is_touched & (found.ends > horizon_us(self._watermark_ms)))[of_stored]
            emitted = np.full(count, _NOTHING)
            emitted[of_stored[is_known & ~is_gone]] = _FORMER
            facts.append(pa.array(emitted))
            is_new[of_stored[is_known & is_touched[of_stored]]] = (
                True  # what has fired has a timer for when it is dropped only
            )
            is_deleted = is_known & is_gone
            self._delete(stored_slots[is_deleted], stored[is_deleted], columns[0].to_numpy()[:before][is_deleted])
        values = pa.StructArray.from_arrays([*facts, *measure_columns(table)], fields=self._fields)
        slots, starts = found.slots, found.starts
        if not is_touched.all():
            slots, starts, values = slots[is_touched], starts[is_touched], values.filter(pa.array(is_touched))
        self._maps.put(slots, pa.array(starts), values)
        # one that grew keeps its timer, which is set again when it comes too early
        if is_new.any():
            self._timers.register(found.slots[is_new], _due_ms(found.ends[is_new]))

    @property
    def _timers(self) -> ColumnTimers:
        assert self._backend.timers is not None
        return self._backend.timers.event_time

    def _may_be_late(self, batch: pa.RecordBatch, ends_us: Words) -> Mask | None:
        """Return which rows would be sessions that are not kept any more, also before a restore; None: none would."""
        over = ends_us <= self._dropped_us(self._watermark_ms)
        if self._fired.is_any_ahead:
            ends_ms = _due_ms(ends_us) + 1 + self._emission.lateness_ms
            over = over | self._fired.late(batch, self._shape.keys, ends_ms)
        return over if over.any() else None

    def _count_late(self, ends_us: Words, records: npt.NDArray[np.int64]) -> None:
        late_ms = np.maximum(self._watermark_ms + 1 - _due_ms(ends_us) - self._emission.lateness_ms, 1)
        count_late(self.context.metrics, late_ms, records)

    def _dropped_us(self, watermark_ms: int) -> int:
        """Return up to which end sessions are not kept any more at this watermark."""
        lateness_us = 0 if watermark_ms == WATERMARK_MAX_MS else self._lateness_us
        return max(_INT_MIN, horizon_us(watermark_ms) - lateness_us)

    # -- results ----------------------------------------------------------------------------------------------------

    def on_watermark(self, watermark_ms: int) -> None:
        """Emit the sessions that are over, then pass the watermark on."""
        watermark_ms = self.context.held_back(watermark_ms)
        self._watermark_ms = max(self._watermark_ms, watermark_ms)
        self._fired.advance(self._watermark_ms)
        horizon, dropped = horizon_us(self._watermark_ms), self._dropped_us(self._watermark_ms)
        self._backend.prepare()
        while len(slots := self._timers.take(self._watermark_ms, _TIMERS_MAX)[0]):
            self._end_sessions(slots, horizon, dropped)
            # between two turns no slot is in use
            self._backend.prepare()
        self.output.emit_watermark(watermark_ms)

    def _end_sessions(self, slots: Slots, horizon: int, dropped: int) -> None:
        """Emit the sessions of these keys that are over, and forget those that are dropped; set timers for the others.

        Args:
            slots: distinct keys.
            horizon: sessions that end up to it are over.
            dropped: sessions that end up to it take no records any more.
        """
        rows, open_starts, held = self._maps.items(slots)
        ends = held.field(0).to_numpy()
        is_over, is_dropped = ends <= horizon, ends <= dropped
        if not is_dropped.all():
            # one timer, for what comes first: that a session is over, or, of one that is, that it is dropped
            first = np.full(len(slots), _INT_MAX)
            due = np.where(is_over, ends + self._lateness_us, ends)
            np.minimum.at(first, rows[~is_dropped], due[~is_dropped])
            goes_on = np.flatnonzero(first < _INT_MAX)
            self._timers.register(slots[goes_on], _due_ms(first[goes_on]))
        self._emit_sessions(slots, rows, open_starts, held, is_over, is_dropped)

    def _emit_sessions(
        self, slots: Slots, rows: Slots, open_starts: pa.Array, held: pa.Array, is_over: Mask, is_dropped: Mask
    ) -> None:
        """Emit the sessions of these keys that are over, if it was not done, and forget those that are dropped."""
        is_new, codes = is_over, None
        if self._spec.has_changes:
            emitted = held.field(1).to_numpy()
            is_new = is_over & (emitted != _CURRENT)
            names = np.where(emitted[is_new] == _NOTHING, OPS.index(INSERT), OPS.index(UPDATE_AFTER))
            codes = names.astype(np.int8)
        if is_new.any():
            if self._lists is None:
                over = pa.array(is_new)
                self._emit(slots[rows[is_new]], open_starts.filter(over), held.filter(over), codes)
            else:
                self._emit_records(slots, rows, open_starts.to_numpy(), held.field(0).to_numpy(), is_new, codes)
        if is_dropped.any():
            if self._lists is not None:
                self._forget_records(slots, rows, open_starts.to_numpy(), is_dropped)
            self._maps.remove(slots[rows[is_dropped]], open_starts.filter(pa.array(is_dropped)))
            if self._former is not None:
                self._former.remove(slots[rows[is_dropped]], open_starts.filter(pa.array(is_dropped)))
        is_left = is_new & ~is_dropped
        # not emitted again before it changes
        if self._spec.has_changes and is_left.any():
            columns = held.filter(pa.array(is_left)).flatten()
            columns[1] = pa.array(np.full(len(columns[0]), _CURRENT))
            values = pa.StructArray.from_arrays(columns, fields=self._fields)
            self._maps.put(slots[rows[is_left]], open_starts.filter(pa.array(is_left)), values)

    def _emit(self, slots: Slots, starts: pa.Array, held: pa.Array, codes: Codes | None) -> None:
        plan = self._spec.plan
        assert plan is not None
        columns = held.flatten()
        given = partial_values(pa.RecordBatch.from_arrays(columns, schema=pa.schema(self._fields)), self._accumulators)
        seen = [
            _all_or(v.valid, len(held)) if a.can_be_null else None
            for a, v in zip(self._accumulators, given, strict=True)
        ]
        counts = columns[self._rows_at].to_numpy()
        table = FrozenTable(counts, tuple(np.asarray(v.values) for v in given), tuple(seen))
        self._send(slots, starts, columns[0], results(plan, table), codes)

    def _emit_records(
        self, slots: Slots, rows: Slots, starts: Words, ends: Words, is_new: Mask, codes: Codes | None
    ) -> None:
        """Emit sessions of records that were kept."""
        of, fields, session = self._sessions_of_records(slots, rows, starts)
        ends_now = is_new[session]
        keys = self._backend.key_columns(slots[of[ends_now]])
        arrays = [*keys, *fields.filter(pa.array(ends_now)).columns, pa.array(session[ends_now])]
        names = [*self._shape.keys, *fields.schema.names, START]
        frame = pl.DataFrame(pa.Table.from_arrays(arrays, names=names))
        assert self._aggregates is not None
        found = self._aggregates.of(frame, [START], self.context.node)
        numbers = found[START].to_numpy()
        columns = batch_of(found.drop(START), pa.schema(self._spec.values)).columns
        self._send(slots[rows[numbers]], pa.array(starts[numbers]), pa.array(ends[numbers]), columns, codes)

    def _forget_records(self, slots: Slots, rows: Slots, starts: Words, is_dropped: Mask) -> None:
        """Forget the records of sessions, and keep the others'."""
        assert self._lists is not None
        of, fields, session = self._sessions_of_records(slots, rows, starts)
        stays = ~is_dropped[session]
        self._lists.clear(slots)
        if stays.any():
            left = pa.StructArray.from_arrays(fields.filter(pa.array(stays)).columns, fields=self._values)
            self._lists.append(slots[of[stays]], left)

    def _sessions_of_records(self, slots: Slots, rows: Slots, starts: Words) -> tuple[Slots, pa.RecordBatch, Slots]:
        """Return the key of each record that is kept, the records, and the session that each belongs to."""
        assert self._lists is not None
        of, elements = self._lists.explode(slots)
        fields = pa.RecordBatch.from_arrays(elements.flatten(), schema=pa.schema(self._values))
        return of, fields, _session_of(rows, starts, of, microseconds(self._shape.time, fields))

    def _send(
        self, slots: Slots, starts: pa.Array, ends: pa.Array, values: Sequence[pa.Array], codes: Codes | None
    ) -> None:
        """Emit results, by end and then key; with retractions, each after the row that it replaces."""
        batch = self._result_rows(slots, starts, ends, values, codes)
        order = self._order(batch)
        batch = batch.take(pa.array(order))
        if self._former is not None and codes is not None:
            # read before the new rows take their places
            updated = np.flatnonzero(codes[order] == OPS.index(UPDATE_AFTER))
            if len(updated):
                at = order[updated]
                before = self._former_rows(slots[at], starts.take(pa.array(at)), UPDATE_BEFORE)
                # each directly before the row that replaces it
                places = np.argsort(np.concatenate([2 * np.arange(len(order)) + 1, 2 * updated]))
                batch = pa.concat_batches([batch, before]).take(pa.array(places))
            self._former.put(slots, starts, pa.StructArray.from_arrays([ends, *values], fields=self._former_fields))
        self._emit_parts(batch)

    def _emit_parts(self, batch: pa.RecordBatch) -> None:
        for start in range(0, batch.num_rows, _OUTPUT_ROWS):
            self.output.emit(batch.slice(start, _OUTPUT_ROWS))

    def _result_rows(
        self, slots: Slots, starts: pa.Array, ends: pa.Array, values: Sequence[pa.Array], codes: Codes | None
    ) -> pa.RecordBatch:
        times = [column.view(pa.timestamp("us")) for column in (starts, ends)]
        columns = [*self._backend.key_columns(slots), *times, *values, *([] if codes is None else [op_column(codes)])]
        return pa.RecordBatch.from_arrays(columns, schema=self._spec.output)

    def _order(self, batch: pa.RecordBatch) -> Slots:
        """Return the rows of results by end, then key."""
        order = [(END_COLUMN, "ascending"), *((key, "ascending") for key in self._shape.keys)]
        found: Slots = pc.sort_indices(batch, order).to_numpy().astype(np.int64)
        return found

    # -- changes ----------------------------------------------------------------------------------------------------

    def _former_rows(self, slots: Slots, starts: pa.Array, op: str) -> pa.RecordBatch:
        """Return the rows that were emitted of sessions."""
        assert self._former is not None
        ends, *values = self._former.get(slots, starts).flatten()
        return self._result_rows(slots, starts, ends, values, _codes(op, len(slots)))

    def _delete(self, slots: Slots, starts: Words, ends: Words) -> None:
        """Emit that sessions have no result any more: they were joined with others that begin earlier, or go on."""
        if len(slots) == 0:
            return
        at = pa.array(starts)
        if self._former is None:
            nothing = [pa.nulls(len(slots), field.type) for field in self._spec.values]
            batch = self._result_rows(slots, at, pa.array(ends), nothing, _codes(DELETE, len(slots)))
        else:
            batch = self._former_rows(slots, at, DELETE)
            self._former.remove(slots, at)
        self._emit_parts(batch.take(pa.array(self._order(batch))))

    def _note_changes(self, found: Cut, keys: list[pa.Array]) -> None:
        """Records were added: emit the sessions that are over already, and the others when early results are due."""
        horizon = horizon_us(self._watermark_ms)
        is_over = found.ends <= horizon
        if is_over.any():
            self._end_sessions(np.unique(found.slots[is_over]), horizon, self._dropped_us(self._watermark_ms))
        if not self._emission.early_ms:
            return
        if self._changed is not None:
            self._changed.slots(keys)
        if self._due_ms is None:
            self._due_ms = self.context.clock_ms() + self._emission.early_ms

    def next_tick_ms(self) -> int | None:
        return self._due_ms

    def on_tick(self, now_ms: int) -> None:
        """Emit early results of the sessions that changed."""
        if self._due_ms is None or now_ms < self._due_ms:
            return
        self._backend.prepare()
        changed = self._changed
        slots = self._backend.all_slots() if changed is None else self._backend.slots(frozen_keys(changed).columns())
        if len(slots):
            rows, open_starts, held = self._maps.items(slots)
            every = np.ones(len(rows), np.bool_)
            self._emit_sessions(slots, rows, open_starts, held, every, ~every)
        self._changed, self._due_ms = make_key_index(self._shape.key_types), None

    def on_resumed(self) -> None:
        """Go on with the event time before the end: what the end alone has fired is not late."""
        self._watermark_ms = self._fired.resume()

    def freeze(self) -> FrozenState | None:
        self._backend.meta = self._fired.encode(self._watermark_ms)
        return super().freeze()


def _codes(op: str, count: int) -> Codes:
    return np.full(count, OPS.index(op), np.int8)


def _all_or(valid: Mask | None, count: int) -> Mask:
    return np.ones(count, np.bool_) if valid is None else valid


def _firsts(slots: Slots) -> Slots:
    """Return the first row of each slot."""
    return np.unique(slots, return_index=True)[1]


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


def session_operators(aggregate: WindowedAggregate, schema: pa.Schema, node: str) -> WindowOperators:
    """Return the operators that compute ``aggregate``, of which the size is the gap, over sessions of records.

    See ``aligned_windows.window_operators``.
    """
    shape, gap_ms = window_shape(aggregate, schema, node), aggregate.windows.span_ms
    plan = decompose(aggregate, shape, schema)
    if plan is not None and plan.is_ordered:
        plan = None  # partial sessions that a late record joins do not say whose records came first
    kept = kept_columns(aggregate, shape, schema)
    merge = SessionMergeSpec(shape, gap_ms, plan, tuple(map(stable, aggregate.aggregates)), kept)
    is_combined = plan is not None and aggregate.emission.late is None
    combine = SessionCombineSpec(plan, gap_ms) if is_combined and plan is not None else None
    if len(set(merge.output.names)) != len(merge.output.names):
        raise UsageError(f"operator '{node}': the result has a column 'op' of its changes; give yours another name")
    return WindowOperators(combine, merge, shape.keys, merge.output)
