"""Joins of two streams on equal keys: of rows near in time, of rows in the same window, as of a time, and of all rows.

The operator keeps rows as lists by key: those that may still match, and, of a side of which unmatched rows are emitted,
those that have not matched yet. See docs/spec/joins.md.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headgate.dataclass import dataclass
from headgate.model.graph import InputName
from headgate.operators.base import (
    WATERMARK_MAX_MS,
    ChosenRows,
    LazyRows,
    Operator,
    OperatorContext,
    Output,
    RestoredState,
    RowSource,
)
from headgate.operators.changes import DELETE, OP, DistinctSlots, keep_elements
from headgate.operators.joins.join_plan import (
    LEFT_INPUT,
    RIGHT_INPUT,
    WINDOW_COLUMN,
    AsOf,
    Columns,
    JoinSpec,
    SameWindow,
    Within,
    columns_by_name,
    with_window,
)
from headgate.operators.lateness import InTimeOperator
from headgate.operators.windows.window_assigner import ends_ms
from headgate.state.backend import ColumnBackend, ListColumns, TimeKind, TimersMeta
from headgate.state.heap import HeapRows
from headgate.state.key_index import Slots
from headgate.state.values import Mask
from headgate.state.vectors import ranges

PAIRS_MAX = 65_536
"""So many pairs are made at a time, and so many rows are in a batch of results at most."""

_TIMERS_MAX = 16_384

_SLACK_MS = 1_000
"""Rows that are only forgotten when no partner can come may stay so much longer: fewer timers."""


@dataclass(frozen=True)
class StreamJoinSpec(JoinSpec):
    """Join the rows of two inputs; results are emitted once."""

    def build(self) -> Operator:
        match self.plan.bound:
            case SameWindow():
                return WindowJoinOperator(self)
            case AsOf():
                return AsOfJoinOperator(self)
            case _:
                return PairJoinOperator(self)


class Side:
    """One side in a running operator: what is known of it, and its states."""

    def __init__(self, spec: JoinSpec, name: InputName, backend: ColumnBackend) -> None:
        plan = spec.plan
        self.name = name
        self.keys = spec.edge_keys[name == RIGHT_INPUT]
        self.kept = plan.kept(name)
        self.time = plan.side(name).time
        self.emits_unmatched = plan.emits_unmatched(name)
        rows, waiting = spec.rows(name), spec.waiting(name)
        self.dtype = next(one for one in (rows, waiting) if one is not None).type
        self.rows = None if rows is None else backend.lists(rows)
        self.waiting = None if waiting is None else backend.lists(waiting)

    @property
    def lists(self) -> list[ListColumns]:
        """Its states."""
        return [found for found in (self.rows, self.waiting) if found is not None]

    def elements(self, batch: pa.RecordBatch) -> pa.StructArray:
        """Return the rows of ``batch`` as they are kept."""
        return pa.StructArray.from_arrays([batch.column(name) for name in self.kept], fields=list(self.dtype))

    def columns(self, elements: pa.StructArray) -> Columns:
        """Return the columns of rows that were kept."""
        return dict(zip(self.kept, elements.flatten(), strict=True))


def taken(columns: Columns, rows: Slots) -> Columns:
    """Return some rows of ``columns``."""
    places = pa.array(rows)
    return {name: column.take(places) for name, column in columns.items()}


class JoinOperator(InTimeOperator):
    """What all joins do: keep two sides, count late rows, emit results."""

    _backend: ColumnBackend

    def __init__(self, spec: JoinSpec) -> None:
        self._spec = spec
        self._plan = spec.plan

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        spec = self._spec
        self._backend = context.states.by_column(spec.keys, spec.descriptors, has_timers=spec.has_timers)
        self._left, self._right = (Side(spec, name, self._backend) for name in (LEFT_INPUT, RIGHT_INPUT))
        self._next = None if spec.next_timer is None else self._backend.values(spec.next_timer)
        self._units = max(1 if side.time is None else side.time.units_per_ms for side in (self._left, self._right))

    def restore(self, states: Sequence[RestoredState]) -> None:
        """See ``Operator``. Timers that were set by a wider bound come too late, or not at all."""
        self._former_rules: set[str] = set()
        super().restore(states)
        # only now: all rows are there, and each gets the timers of this bound
        if self._former_rules - {self._rule_text}:
            slots = self._backend.all_slots()
            for start in range(0, len(slots), _TIMERS_MAX):
                self._reset_timers(slots[start : start + _TIMERS_MAX])

    def _restore_backend(
        self, states: Sequence[RestoredState]
    ) -> Iterator[tuple[RestoredState, Mapping[str, memoryview]]]:
        for state, sections in super()._restore_backend(states):
            meta = TimersMeta.found_in(sections, f"state of '{self.context.node}'")
            if meta is not None and meta.rule:
                self._former_rules.add(meta.rule)
            yield state, sections

    def _timers_meta(self) -> TimersMeta:
        return replace(super()._timers_meta(), rule=self._rule_text)

    @property
    def _rule_text(self) -> str:
        return "" if self._spec.rule is None else str(self._spec.rule)

    def _reset_timers(self, slots: Slots) -> None:
        """Have the timers of the rows of these keys that this bound asks for."""

    def _times(self, side: Side, columns: Columns) -> Slots:
        """Return the times of rows in the finer unit of both sides."""
        time = side.time
        assert time is not None
        return time.words(columns[time.column]) * time.ms_per_unit * (self._units // time.units_per_ms)

    def _set_timers(self, slots: Slots, times_ms: Slots) -> None:
        """Have a timer of each key for the earliest of its times; one for a later time may be left over."""
        assert self._next is not None
        assert self._backend.timers is not None
        assert len(slots) == len(times_ms), "each key has its time"
        if len(slots):
            changed = self._next.extreme(slots, pa.array(times_ms), is_min=True)
            self._backend.timers.event_time.register(slots[changed], times_ms[changed])

    def process_input(self, name: InputName, batch: pa.RecordBatch) -> None:
        self._begin_call()
        self._backend.prepare()
        side, other = (self._left, self._right) if name == LEFT_INPUT else (self._right, self._left)
        batch = self._in_time(side, batch)
        if batch.num_rows:
            slots = self._backend.slots([batch.column(key) for key in side.keys])
            self._arrived(side, other, batch, slots)

    def _in_time(self, side: Side, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows that are not late."""
        if not self._spec.has_timers:
            return batch
        is_late = self._late(batch, side.keys, self._last_ms(side, batch))
        return batch if is_late is None else batch.filter(pa.array(~is_late))

    @abstractmethod
    def _last_ms(self, side: Side, batch: pa.RecordBatch) -> Slots:
        """Return, for each row, up to which watermark it must have come."""

    @abstractmethod
    def _arrived(self, side: Side, other: Side, batch: pa.RecordBatch, slots: Slots) -> None:
        """Take over rows of ``side`` that are not late."""

    def on_watermark(self, watermark_ms: int) -> None:
        """See ``Operator``. What is emitted at the end alone makes nothing late that comes after it."""
        self._begin_call()
        is_end, watermark_ms = watermark_ms == WATERMARK_MAX_MS, self.context.held_back(watermark_ms)
        if not is_end:
            self._advance(watermark_ms)
        self._fire_until(watermark_ms)
        self.output.emit_watermark(watermark_ms if is_end else watermark_ms - self._plan.hold_back_ms)

    def _fire_some(self, kind: TimeKind, until_ms: int) -> int:
        assert self._backend.timers is not None
        self._backend.prepare()
        slots, _ = self._backend.timers.of(kind).take(until_ms, _TIMERS_MAX)
        if len(slots):
            self._fired(slots, until_ms)
        return len(slots)

    @abstractmethod
    def _fired(self, slots: Slots, until_ms: int) -> None:
        """Timers of these keys have fired."""

    def _end_firing(self) -> None:
        """See ``TimedOperator``."""

    def _emit(self, left: Columns | None, right: Columns | None, count: int) -> None:
        results = self._plan.results(left, right, count)
        for start in range(0, count, PAIRS_MAX):
            self.output.emit(results.slice(start, PAIRS_MAX))

    def _emit_lazy(self, pairs: LazyRows) -> None:
        for start in range(0, pairs.num_rows, PAIRS_MAX):
            is_all = pairs.num_rows <= PAIRS_MAX
            self.output.emit(pairs if is_all else pairs.slice(start, PAIRS_MAX))

    def _emit_unmatched(self, side: Side, columns: Columns, count: int) -> None:
        if count:
            left, right = (columns, None) if side.name == LEFT_INPUT else (None, columns)
            self._emit(left, right, count)


class PairJoinOperator(JoinOperator):
    """Emits a pair as soon as both rows are there."""

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        self._distinct = DistinctSlots()
        bound = self._plan.bound
        if isinstance(bound, Within):
            self._lower, self._upper = bound.lower_ms * self._units, bound.upper_ms * self._units
            self._slack_ms = max((bound.upper_ms - bound.lower_ms) // 4, _SLACK_MS)

    def _last_ms(self, side: Side, batch: pa.RecordBatch) -> Slots:
        return self._times(side, columns_by_name(batch)) // self._units

    def _expiries_ms(self, side: Side, times: Slots) -> Slots:
        """Return from which watermark on no partner can come."""
        return (times + (self._upper if side is self._left else -self._lower)) // self._units

    def _arrived(self, side: Side, other: Side, batch: pa.RecordBatch, slots: Slots) -> None:
        columns = columns_by_name(batch)
        times = None if self._next is None else self._times(side, columns)
        matched = np.zeros(len(slots), np.bool_)
        if other.rows is not None:
            self._probe(side, columns, slots, times, other, other.rows, matched)
        if other.waiting is not None:
            hit, owners, stored = self._probe(side, columns, slots, times, other, other.waiting, matched)
            if stored is not None and hit.any():
                self._match(other, hit, owners, stored.structs())
        if self._plan.how == "semi" and side is self._left and matched.any():
            found = taken(columns, np.flatnonzero(matched))
            self._emit(found, None, int(matched.sum()))
        self._keep(side, batch, slots, times, matched)

    def _probe(
        self,
        side: Side,
        columns: Columns,
        slots: Slots,
        times: Slots | None,
        other: Side,
        lists: ListColumns,
        matched: Mask,
    ) -> tuple[Mask, Slots, HeapRows | None]:
        """Emit the pairs of arrived rows with those in ``lists``; mark those that match in ``matched``.

        Returns:
            Of the rows of these keys in ``lists``: which of them match, their slots, and they themselves.
        """
        asking = np.flatnonzero(lists.counts(slots))
        if len(asking) == 0:
            return np.zeros(0, np.bool_), asking, None
        distinct, inverse = self._distinct.of(slots[asking])
        owners, stored = lists.rows(distinct)
        hit = np.zeros(len(stored), np.bool_)
        counts = np.bincount(owners, minlength=len(distinct))
        starts, counts = (np.cumsum(counts) - counts)[inverse], counts[inverse]
        stored_times = None
        if times is not None:
            assert other.time is not None
            stored_times = self._times(other, stored.columns([other.time.column]))
        # some pairs at a time: two keys with many rows each have very many
        for part in pair_slices(counts):
            rows, found = ranges(starts[part], counts[part])
            rows = asking[part][rows]
            if times is not None and stored_times is not None:
                apart = stored_times[found] - times[rows] if side is self._left else times[rows] - stored_times[found]
                near = (apart >= self._lower) & (apart <= self._upper)
                rows, found = rows[near], found[near]
            matched[rows] = True
            hit[found] = True
            if self._plan.has_right_columns and len(rows):
                pairs: tuple[RowSource, RowSource] = ChosenRows(columns, rows), stored[found]
                left, right = pairs if side is self._left else pairs[::-1]
                self._emit_lazy(self._plan.pairs(left, right))
        return hit, distinct[owners], stored

    def _match(self, side: Side, hit: Mask, owners: Slots, elements: pa.Array) -> None:
        """Rows of ``side`` that waited have matched."""
        assert side.waiting is not None
        keep_elements(side.waiting, ~hit, owners, elements)
        found = elements.filter(pa.array(hit))
        if side.rows is not None:
            side.rows.append(owners[hit], found)
        elif self._plan.how == "semi":
            self._emit(side.columns(found), None, len(found))

    def _keep(self, side: Side, batch: pa.RecordBatch, slots: Slots, times: Slots | None, matched: Mask) -> None:
        """Keep rows that have arrived, as long as a partner can come."""
        elements = side.elements(batch)
        expiries_ms = None if times is None else self._expiries_ms(side, times)
        for lists, chosen in self._places(side, matched):
            if expiries_ms is not None:
                over = chosen & (expiries_ms <= self._watermark_ms)
                if over.any():
                    # the watermark has passed their last partner already
                    chosen &= ~over
                    if lists is side.waiting and side.emits_unmatched:
                        found = elements.filter(pa.array(over))
                        self._emit_unmatched(side, side.columns(found), len(found))
            if chosen.all():
                lists.append(slots, elements)
                self._wait(side, lists, slots, expiries_ms)
            elif chosen.any():
                lists.append(slots[chosen], elements.filter(pa.array(chosen)))
                self._wait(side, lists, slots[chosen], None if expiries_ms is None else expiries_ms[chosen])

    @staticmethod
    def _places(side: Side, matched: Mask) -> list[tuple[ListColumns, Mask]]:
        """Return which rows go to which state."""
        if side.waiting is None:
            assert side.rows is not None
            return [(side.rows, np.ones(len(matched), np.bool_))]
        found = [(side.waiting, ~matched)]
        return found if side.rows is None else [(side.rows, matched.copy()), *found]

    def _wait(self, side: Side, lists: ListColumns, slots: Slots, expiries_ms: Slots | None) -> None:
        """Have a timer for rows that are in ``lists`` now."""
        if expiries_ms is None:
            return
        if not (lists is side.waiting and side.emits_unmatched):
            expiries_ms = -(-expiries_ms // self._slack_ms) * self._slack_ms
        self._set_timers(slots, expiries_ms)

    def _reset_timers(self, slots: Slots) -> None:
        for side in (self._left, self._right):
            for lists in side.lists:
                owners, elements = lists.explode(slots)
                if len(elements):
                    times = self._times(side, side.columns(elements))
                    self._wait(side, lists, slots[owners], self._expiries_ms(side, times))

    def _fired(self, slots: Slots, until_ms: int) -> None:
        """Emit and forget the rows of these keys for which no partner can come any more."""
        assert self._next is not None
        # first: ``_wait`` sets the next timers below, and of these the earliest counts
        self._next.clear(slots)
        for side in (self._left, self._right):
            for lists in side.lists:
                owners, elements = lists.explode(slots)
                if len(elements) == 0:
                    continue
                expiries_ms = self._expiries_ms(side, self._times(side, side.columns(elements)))
                stay = expiries_ms > until_ms
                if lists is side.waiting and side.emits_unmatched and not stay.all():
                    found = elements.filter(pa.array(~stay))
                    self._emit_unmatched(side, side.columns(found), len(found))
                keep_elements(lists, stay, slots[owners], elements)
                self._wait(side, lists, slots[owners][stay], expiries_ms[stay])

    def _fire_event_time(self, watermark_ms: int, timers_count: int) -> None:
        """See ``TimedOperator``. At the end of the input rows are kept: more input may come after a restore."""
        emits = self._left.emits_unmatched or self._right.emits_unmatched
        if watermark_ms < WATERMARK_MAX_MS or emits:
            super()._fire_event_time(watermark_ms, timers_count)


def pair_slices(counts: Slots) -> Iterator[slice]:
    """Yield slices of rows that have together not many more than ``PAIRS_MAX`` pairs."""
    ends = np.cumsum(counts)
    start = 0
    while start < len(counts):
        before = int(ends[start - 1]) if start else 0
        end = max(int(np.searchsorted(ends, before + PAIRS_MAX, side="right")), start + 1)
        yield slice(start, end)
        start = end


class WindowJoinOperator(JoinOperator):
    """Keeps the rows of each window and key, and joins them when the window has ended."""

    def _last_ms(self, side: Side, batch: pa.RecordBatch) -> Slots:
        return self._end_ms(batch.column(WINDOW_COLUMN).to_numpy()) - 1

    def _end_ms(self, windows: Slots) -> Slots:
        assert isinstance(self._plan.bound, SameWindow)
        return ends_ms(self._plan.bound.windows, windows)

    def _arrived(self, side: Side, other: Side, batch: pa.RecordBatch, slots: Slots) -> None:
        assert side.rows is not None
        assert other.rows is not None
        assert self._backend.timers is not None
        is_new = (side.rows.counts(slots) == 0) & (other.rows.counts(slots) == 0)
        # its first row: one timer for both sides
        if is_new.any():
            ends_ms = self._end_ms(batch.column(WINDOW_COLUMN).to_numpy()[is_new])
            self._backend.timers.event_time.register(slots[is_new], ends_ms - 1)
        side.rows.append(slots, side.elements(batch))

    def _fired(self, slots: Slots, until_ms: int) -> None:
        assert self._left.rows is not None
        assert self._right.rows is not None
        windows = self._backend.key_columns(slots)[-1].to_numpy()
        left_of, left = self._left.rows.explode(slots)
        right_of, right = self._right.rows.explode(slots)
        self._left.rows.clear(slots)
        self._right.rows.clear(slots)
        left_columns, right_columns = self._left.columns(left), self._right.columns(right)
        counts = np.bincount(right_of, minlength=len(slots))
        starts, partners = (np.cumsum(counts) - counts)[left_of], counts[left_of]
        how = self._plan.how
        if self._plan.has_right_columns:
            for part in pair_slices(partners):
                rows, found = ranges(starts[part], partners[part])
                rows += part.start
                self._send(taken(left_columns, rows), taken(right_columns, found), windows[left_of[rows]])
        if how == "semi":
            self._send_rows(left_columns, np.flatnonzero(partners > 0), windows[left_of])
        if self._left.emits_unmatched:
            self._send_rows(left_columns, np.flatnonzero(partners == 0), windows[left_of])
        if self._right.emits_unmatched:
            alone = np.flatnonzero(np.bincount(left_of, minlength=len(slots))[right_of] == 0)
            self._send(None, taken(right_columns, alone), windows[right_of[alone]])

    def _send_rows(self, left: Columns, rows: Slots, windows: Slots) -> None:
        self._send(taken(left, rows), None, windows[rows])

    def _send(self, left: Columns | None, right: Columns | None, windows: Slots) -> None:
        results = with_window(self._plan, self._plan.results(left, right, len(windows)), windows)
        for start in range(0, len(windows), PAIRS_MAX):
            self.output.emit(results.slice(start, PAIRS_MAX))


LATE_VERSIONS = "late_versions"
"""Counter of right rows of as-of joins that came when the watermark had passed them."""


class AsOfJoinOperator(JoinOperator):
    """Keeps left rows until the watermark has passed them, and right rows as long as they may be the latest."""

    def _last_ms(self, side: Side, batch: pa.RecordBatch) -> Slots:
        return self._times(side, columns_by_name(batch)) // self._units

    def _in_time(self, side: Side, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows that are not late; a late right row is there for left rows that come after it."""
        if side is self._left:
            return super()._in_time(side, batch)
        late = np.count_nonzero(self._last_ms(side, batch) <= self._watermark_ms)
        if late:
            self.context.metrics.add(LATE_VERSIONS, int(late))
        return batch

    @property
    def _tolerance(self) -> int | None:
        assert isinstance(self._plan.bound, AsOf)
        tolerance_ms = self._plan.bound.tolerance_ms
        return None if tolerance_ms is None else tolerance_ms * self._units

    def _arrived(self, side: Side, other: Side, batch: pa.RecordBatch, slots: Slots) -> None:
        assert side.rows is not None
        side.rows.append(slots, side.elements(batch))
        times = self._times(side, columns_by_name(batch))
        if side is self._left:
            self._set_timers(slots, times // self._units)
        else:
            to_come = (max(self._watermark_ms, 0) + 1) * self._units
            self._wait_for_versions(slots, np.maximum(times, to_come), self._watermark_ms)

    def _reset_timers(self, slots: Slots) -> None:
        assert self._right.rows is not None
        owners, right = self._right.rows.explode(slots)
        if len(right):
            times = self._times(self._right, self._right.columns(right))
            assert self._tolerance is not None, "only a narrower bound goes on"
            stay = (times + self._tolerance) // self._units > self._watermark_ms
            keep_elements(self._right.rows, stay, slots[owners], right)
            self._wait_for_versions(slots[owners][stay], times[stay], self._watermark_ms)

    def _wait_for_versions(self, slots: Slots, times: Slots, passed_ms: int) -> None:
        """Have timers, after ``passed_ms``, for right rows that will not be needed for ever."""
        assert self._right.rows is not None
        if self._tolerance is None:  # the latest one stays
            is_one_of_several = self._right.rows.counts(slots) > 1
            slots, times = slots[is_one_of_several], times[is_one_of_several]
        else:
            times = times + self._tolerance
        times_ms = -(-(times // self._units) // _SLACK_MS) * _SLACK_MS
        is_to_come = times_ms > passed_ms
        self._set_timers(slots[is_to_come], times_ms[is_to_come])

    def _fired(self, slots: Slots, until_ms: int) -> None:
        assert self._next is not None
        assert self._left.rows is not None
        assert self._right.rows is not None
        # first: the next timers are set below, and of these the earliest counts
        self._next.clear(slots)
        left_of, left = self._left.rows.explode(slots)
        right_of, right = self._right.rows.explode(slots)
        left_columns, right_columns = self._left.columns(left), self._right.columns(right)
        left_times, right_times = self._times(self._left, left_columns), self._times(self._right, right_columns)
        due = left_times // self._units <= until_ms
        latest = _latest(left_of[due], left_times[due], right_of, right_times)
        deleted = self._deleted(right_columns, len(right))
        if len(right):
            is_found = latest >= 0
            is_found &= ~deleted[latest]
            if self._tolerance is not None:
                is_found &= left_times[due] - right_times[latest] <= self._tolerance
            latest[~is_found] = -1
        self._emit_latest(taken(left_columns, np.flatnonzero(due)), right_columns, latest)
        keep_elements(self._left.rows, ~due, slots[left_of], left)
        self._set_timers(slots[left_of][~due], left_times[~due] // self._units)
        # the end alone makes no version forgotten: more left rows may come after a restore
        passed_ms = min(until_ms, self._watermark_ms)
        stay = right_times // self._units > passed_ms
        order = np.lexsort((right_times, right_of))
        order = order[~stay[order]]
        is_last = np.diff(right_of[order], append=-1) != 0
        stay[order[is_last]] = True
        stay &= ~(deleted & (right_times // self._units <= passed_ms))
        if self._tolerance is not None:
            stay &= (right_times + self._tolerance) // self._units > passed_ms
        keep_elements(self._right.rows, stay, slots[right_of], right)
        self._wait_for_versions(slots[right_of][stay], right_times[stay], until_ms)

    def _deleted(self, right: Columns, count: int) -> Mask:
        assert isinstance(self._plan.bound, AsOf)
        if not self._plan.bound.has_changes:
            return np.zeros(count, np.bool_)
        found: Mask = pc.equal(right[OP], DELETE).to_numpy(zero_copy_only=False)
        return found

    def _emit_latest(self, left: Columns, right: Columns, latest: Slots) -> None:
        """Emit left rows, each with the right row of this number; -1: it has none."""
        if self._plan.how == "inner":
            chosen = np.flatnonzero(latest >= 0)
            left, latest = taken(left, chosen), latest[chosen]
        places = pa.array(latest, mask=latest < 0)
        if len(latest):
            self._emit(left, {name: column.take(places) for name, column in right.items()}, len(latest))


def _latest(left_of: Slots, left_times: Slots, right_of: Slots, right_times: Slots) -> Slots:
    """Return, for each left row, the number of the last right row of its key that is not later; -1: none."""
    assert len(left_of) == len(left_times), "each left row has its time"
    assert len(right_of) == len(right_times), "each right row has its time"
    owners, times = np.concatenate([right_of, left_of]), np.concatenate([right_times, left_times])
    count = len(right_of)
    order = np.lexsort((np.arange(len(owners)) >= count, times, owners))
    is_right = order < count
    place = np.maximum.accumulate(np.where(is_right, np.arange(len(order)), -1))
    found = np.where(place >= 0, order[place], -1)
    found[(found >= 0) & (owners[found] != owners[order])] = -1
    latest = np.empty(len(left_of), np.int64)
    latest[order[~is_right] - count] = found[~is_right]
    return latest
