"""Tumbling and sliding event-time windows: hold rows until event time passes the end of their window, then fire it.

Rows are held by pane (``window_assigner``): a window that fires reads its panes, and a pane is dropped when the last
window that it lies in has fired.

``WindowCombine`` aggregates before the shuffle, chained to what feeds it. It holds partial results for a short time
only and never over a barrier or the end of a pane, so it has no state of its own and changes no result. It
never drops a late record: ``WindowMerge`` does, by its own watermark.

``WindowMerge`` merges partial results after the shuffle. ``WindowBuffer`` keeps records and lets Polars aggregate
them, for aggregates that do not decompose (medians, distinct counts ...). State: the rows of each pane, and
the watermark, so that a window never fires twice.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from headgate.dataclass import dataclass
from headgate.model.graph import MAIN_INPUT, InputName, OutputTag
from headgate.model.state_schema import Form
from headgate.operators.aggregation.aggregates import RecordAggregates, stable
from headgate.operators.base import (
    WATERMARK_MAX_MS,
    WATERMARK_MIN_MS,
    KeyedOperator,
    Operator,
    OperatorContext,
    OperatorSpec,
    Output,
    RestoredState,
)
from headgate.operators.lateness import FiredGroups, count_late
from headgate.operators.schemas import batch_of, columns_of
from headgate.operators.windows.partial_results import PASS_FACTOR, SAVING_MIN, TRIAL_ROWS_MIN
from headgate.operators.windows.window_assigner import AlignedWindows
from headgate.operators.windows.window_plan import (
    InputReader,
    WindowedAggregate,
    WindowPlan,
    WindowShape,
    decompose,
    measure_text,
    results,
    uncombined_batch,
    window_shape,
    window_state_text,
)
from headgate.state.backend import META, PartedWindows, StateFactory, WindowBackend, WindowRows
from headgate.state.descriptors import KeyColumns, Section, column_identity
from headgate.state.key_hash import Words, column_words, is_text
from headgate.state.key_index import KeyIndex, frozen_keys, make_key_index
from headgate.state.snapshot import FrozenState
from headgate.state.values import Mask
from headgate.state.window_aggregates import (
    AggTable,
    MergedRows,
    partial_batch,
    partial_rows,
    split_by_window,
    take_values,
)

BUSY_FLUSH_MS = 30
"""How long partial results are held while the worker is busy: long enough to combine many records per key,
short against a latency of 50 ms."""

UPDATE_MS = 200
"""How long results that late records changed are held at most: many of them change the same window."""

_BATCH_ROWS_MAX = 65_536
_WINDOWS_MAX = 64
_CELLS_MAX = 1 << 22
_INDEX_KEYS_MIN = 1 << 16
"""Bounds of what is held: open panes, slots of all of them, and keys remembered over flushes."""


@dataclass(frozen=True)
class WindowCombineSpec:
    """Combine records of the same key and pane into one partial result."""

    plan: WindowPlan

    def build(self) -> Operator:
        return WindowCombineOperator(self.plan)

    def columns_read(self, wanted: frozenset[str] | None) -> frozenset[str] | None:
        roots = columns_of(self.plan.inners)
        return None if roots is None else roots | {*self.plan.shape.keys, self.plan.shape.time.column}

    def output_schema(self, schema: pa.Schema, node: str) -> pa.Schema:
        """Return the schema of partial results (internal: only ``WindowMerge`` reads it)."""
        return self.plan.partial_schema()


class WindowCombineOperator(Operator):
    """Accumulates per pane and key; flushes partial results."""

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
        slots = self._index.slots([batch.column(key) for key in shape.keys])
        inputs = self._reader.read(batch)
        size = len(self._index)
        times = shape.time.values(batch)
        low, high = (int(pane) for pane in shape.windows.panes(shape.time, np.array([times.min(), times.max()])))
        if low == high:
            self._table(low).update(size, slots, 1, inputs)
        else:
            for pane, rows in split_by_window(shape.windows.panes(shape.time, times)):
                self._table(pane).update(size, slots[rows], 1, take_values(inputs, rows))

    def _table(self, pane: int) -> AggTable:
        table = self._tables.get(pane)
        if table is None:
            table = self._spare.pop() if self._spare else AggTable([m.accumulator for m in self._plan.measures])
            self._tables[pane] = table
        return table

    def flush(self) -> None:
        """Emit everything that is held."""
        used_max, used_rows = 0, 0
        for pane in sorted(self._tables):
            table = self._tables[pane]
            slots = table.used()
            used_max, used_rows = max(used_max, len(slots)), used_rows + len(slots)
            batch = partial_batch(self._schema, self._index.columns(slots), pane, table.take(slots))
            for start in range(0, batch.num_rows, _BATCH_ROWS_MAX):
                self.output.emit(batch.slice(start, _BATCH_ROWS_MAX))
            if len(self._spare) < 2:
                table.clear()
                self._spare.append(table)
        self._tables.clear()
        self._since_ms = None
        # a trial in which hardly any key came twice: combining is only work
        if self._held_rows >= TRIAL_ROWS_MIN and used_rows > (1 - SAVING_MIN) * self._held_rows:
            self._pass_rows = PASS_FACTOR * self._held_rows
        self._held_rows = 0
        # most of these keys do not come any more: number them from 0 again
        if len(self._index) > max(_INDEX_KEYS_MIN, 4 * used_max):
            self._index = make_key_index(self._shape.key_types)
            self._spare.clear()

    def on_watermark(self, watermark_ms: int) -> None:
        """Send what the watermark would make late, then the watermark."""
        if any(self._shape.windows.pane_end_ms(pane) - 1 <= watermark_ms for pane in self._tables):
            self.flush()
        self.output.emit_watermark(watermark_ms)

    def on_idle(self, is_idle: bool) -> None:
        # an idle input holds no watermark back: what is kept here would be late after the shuffle
        if self._tables:
            self.flush()
        self.output.emit_idle(is_idle)

    def next_tick_ms(self) -> int | None:
        if self._since_ms is None:
            return None
        return self._since_ms + (BUSY_FLUSH_MS if self.context.is_busy else self.context.flush_ms)

    def on_tick(self, now_ms: int) -> None:
        due_ms = self.next_tick_ms()
        if due_ms is not None and now_ms >= due_ms:
            self.flush()

    def before_barrier(self) -> None:
        # so there is nothing to freeze
        self.flush()

    def finish(self) -> None:
        self.flush()


Held = TypeVar("Held")


class WindowOperator(KeyedOperator, Generic[Held]):
    """Adds rows to their windows, drops late ones, and fires the windows that have ended."""

    _backend: WindowBackend[Held]

    def __init__(self, shape: WindowShape, rows: WindowRows) -> None:
        self._shape = shape
        self._windows, self._emission = shape.windows, shape.emission
        self._rows = rows
        self._watermark_ms = WATERMARK_MIN_MS
        self._fired = FiredGroups()
        emission = shape.emission
        emits_again = emission.lateness_ms > 0 or emission.early_ms > 0
        self._is_taken = not shape.windows.is_sliding and not (emits_again and emission.accumulates)
        """A window is forgotten when it emits, not later."""
        self._changed: dict[int, KeyIndex] = {}
        """By pane, the keys that changed since they were emitted, where more results are due than at the end."""
        self._are_all_changed = False
        self._due_ms: int | None = None

    @abstractmethod
    def _panes(self, batch: pa.RecordBatch) -> Words:
        """Return the number of the pane that each row of the input lies in."""

    @abstractmethod
    def _records_in(self, batch: pa.RecordBatch) -> npt.NDArray[np.int64] | None:
        """Return how many records each row of the input stands for; None: one."""

    @abstractmethod
    def _kept(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return rows of the input as the backend keeps them."""

    @abstractmethod
    def _new_backend(self, states: StateFactory, keys: KeyColumns) -> WindowBackend[Held]:
        """Return empty state for ``self._rows``."""

    @abstractmethod
    def _results(self, window: int, held: Held) -> pa.RecordBatch:
        """Return the results of a window with what it held, sorted by key."""

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        self._backend = self._new_backend(context.states, KeyColumns(self._shape.keys, self._shape.key_types))

    def restore(self, states: Sequence[RestoredState]) -> None:
        """See ``Operator``. Goes on with the lowest of the former watermarks."""
        former = [(state, bytes(sections[META])) for state, sections in self._restore_backend(states)]
        self._watermark_ms = self._fired.restore(self.context, former)
        # which keys had changed is not in the snapshot, so all of them have
        if self._emission.early_ms:
            self._are_all_changed = True
            self._due_ms = self.context.clock_ms() + self._emission.early_ms

    def process(self, batch: pa.RecordBatch) -> None:
        panes = self._panes(batch)
        assert len(panes) == batch.num_rows, "each row lies in one pane"
        last = self._windows.last_windows(panes)
        late = self._late(batch, last)
        if late is not None:
            dropped = batch.filter(pa.array(late))
            # a watermark lower by so much would have let them in
            late_ms = np.maximum(self._watermark_ms + 2 - self._drops_ms(last[late]), 1)
            count_late(self.context.metrics, late_ms, self._records_in(dropped))
            if self._emission.late is not None:
                self.output.emit_to(self._emission.late, dropped)
            batch, panes = batch.filter(pa.array(~late)), panes[~late]
        if batch.num_rows:
            self._backend.add(panes, self._kept(batch))
            if self._emission.lateness_ms or self._emission.early_ms:
                self._note_changes(batch, panes)

    def _late(self, batch: pa.RecordBatch, last: Words) -> Mask | None:
        """Return the rows of which the last window was dropped, also before a restore; None when there are none.

        Args:
            batch: the rows.
            last: the last window that each of them lies in.
        """
        dropped = self._dropped
        if self._fired.is_any_ahead:
            return self._fired.late(batch, self._shape.keys, self._drops_ms(last)) | (last <= dropped)
        return last <= dropped if last.min() <= dropped else None

    @property
    def _ended(self) -> int:
        """The last window that has ended."""
        return self._windows.ended(self._watermark_ms)

    @property
    def _dropped(self) -> int:
        """The last window that takes no records any more."""
        return self._dropped_at(self._watermark_ms)

    def _dropped_at(self, watermark_ms: int) -> int:
        """Return the last window that takes no records any more at this watermark."""
        lateness_ms = 0 if watermark_ms == WATERMARK_MAX_MS else self._emission.lateness_ms
        return self._windows.ended(watermark_ms - lateness_ms)

    def _drops_ms(self, windows: Words) -> Words:
        """Return when each window takes no records any more: that is not before its end, excluded, and its lateness."""
        numbers, places = np.unique(windows, return_inverse=True)
        ends: Words = np.array([self._windows.end_ms(int(number)) for number in numbers])[places]
        return ends + self._emission.lateness_ms

    def on_watermark(self, watermark_ms: int) -> None:
        """Fire the windows that ended, oldest first, then pass the watermark on."""
        watermark_ms = self.context.held_back(watermark_ms)
        # results that changed and are still to be emitted, before their windows are dropped
        if self._emission.lateness_ms and self._changed:
            dropped = self._dropped_at(watermark_ms)
            if any(self._windows.windows_of(pane).start <= dropped for pane in self._changed):
                self._emit_changed(is_early=False)
        before = self._ended
        self._watermark_ms = max(self._watermark_ms, watermark_ms)
        assert self._ended >= before, "event time never goes back"
        # before the watermark goes on, so that no result is late for the operators after this one
        for window in self._unfired(before):
            self._emit(window, self._all_results(window))
        # a pane is done with if all of its windows have fired, and just now: their results had every change
        self._changed = {
            pane: index
            for pane, index in self._changed.items()
            if (windows := self._windows.windows_of(pane)).stop - 1 > self._ended or windows.start <= before
        }
        self._fired.advance(self._watermark_ms)
        self.output.emit_watermark(watermark_ms)

    def _unfired(self, before: int) -> Iterator[int]:
        """Yield the windows after ``before`` that have ended and have rows; drop each pane when it takes no more."""
        ended, dropped = self._ended, self._dropped
        for pane in self._backend.windows():
            windows = self._windows.windows_of(pane)
            if windows.start > ended:
                break
            for window in range(max(windows.start, before + 1), min(windows.stop - 1, ended) + 1):
                yield window
                # the next panes are in this window, too, and it fires once
                before = window
            # after its last window was emitted: until then it is read
            if not self._is_taken and windows.stop - 1 <= dropped:
                self._backend.drop(pane)

    def _emit(self, window: int, results: pa.RecordBatch) -> None:
        # some keys are of key groups that had fired further before the restore
        if self._fired.is_any_ahead and not self._emission.lateness_ms:
            results = self._without_fired(results, window)
        for start in range(0, results.num_rows, _BATCH_ROWS_MAX):
            self.output.emit(results.slice(start, _BATCH_ROWS_MAX))

    # -- results before and after the end ---------------------------------------------------------------------------

    def _note_changes(self, batch: pa.RecordBatch, panes: Words) -> None:
        """Rows were added: note the keys of which a window is to emit more than at its end."""
        ended, early_ms = self._ended, self._emission.early_ms
        if not early_ms and self._windows.windows_of(int(panes.min())).start > ended:
            return
        for pane, rows in split_by_window(panes):
            if not early_ms and self._windows.windows_of(pane).start > ended:
                continue
            index = self._changed.get(pane)
            if index is None:
                index = self._changed[pane] = make_key_index(self._shape.key_types)
            if self._emission.accumulates:
                taken = pa.array(rows)
                index.slots([batch.column(key).take(taken) for key in self._shape.keys])
            if self._due_ms is None:
                self._due_ms = self.context.clock_ms() + (early_ms or UPDATE_MS)

    def _emit_changed(self, *, is_early: bool) -> None:
        """Emit the results that changed, of windows that fired already and (``is_early``) of those that have not."""
        ended, dropped = self._ended, self._dropped
        changed: dict[int, list[KeyIndex] | None] = {}
        for pane, index in sorted(self._changed.items()):
            for window in self._windows.windows_of(pane):
                if dropped < window <= ended or (is_early and window > ended):
                    changed.setdefault(window, []).append(index)  # type: ignore[union-attr]
        if is_early and self._are_all_changed:
            panes = self._backend.windows()
            changed |= {w: None for pane in panes for w in self._windows.windows_of(pane) if w > ended}
            self._are_all_changed = False
        for window, indexes in sorted(changed.items()):
            results = self._all_results(window)
            if indexes is not None and self._emission.accumulates:
                results = results.filter(self._are_among(results, indexes))
            self._emit(window, results)
        left = {} if is_early or not self._emission.early_ms else self._changed
        self._changed = {pane: index for pane, index in left.items() if self._windows.windows_of(pane).stop - 1 > ended}
        if not self._changed and not self._are_all_changed:
            self._due_ms = None

    def _are_among(self, results: pa.RecordBatch, indexes: Sequence[KeyIndex]) -> pa.Array:
        """Return which results are of keys in one of ``indexes``."""
        index = make_key_index(self._shape.key_types)
        for one in indexes:
            index.slots(frozen_keys(one).columns())
        # keys that are not among them get numbers from here on
        count = len(index)
        return pa.array(index.slots([results.column(key) for key in self._shape.keys]) < count)

    def next_tick_ms(self) -> int | None:
        return self._due_ms

    def on_tick(self, now_ms: int) -> None:
        if self._due_ms is not None and now_ms >= self._due_ms:
            self._emit_changed(is_early=self._emission.early_ms > 0)
            self._due_ms = None

    def before_barrier(self) -> None:
        """Emit what is not part of the state: results of windows that fired, of which keys changed since."""
        if self._emission.lateness_ms and self._changed:
            self._emit_changed(is_early=False)

    def _without_fired(self, results: pa.RecordBatch, window: int) -> pa.RecordBatch:
        """Return the results of the keys for which ``window`` had not fired before a restore."""
        ends_ms = np.full(results.num_rows, self._windows.end_ms(window))
        return results.filter(pa.array(~self._fired.late(results, self._shape.keys, ends_ms)))

    def _all_results(self, window: int) -> pa.RecordBatch:
        """Return the results of a window, sorted by key; forget what is not needed again."""
        held: Iterable[Held]
        if not self._is_taken:
            held = self._backend.read(self._windows.panes_of(window))
        elif isinstance(self._backend, PartedWindows):
            held = self._backend.parts(window)
        else:
            held = [self._backend.take(window)]
        parts = [self._results(window, part) for part in held]
        if len(parts) == 1:
            return parts[0]
        # parts are sorted each by itself
        whole = pa.concat_batches(parts)
        return whole.take(key_order(whole, self._shape.keys))

    def on_resumed(self) -> None:
        """Go on with the event time before the end: what the end alone has fired is not late."""
        self._watermark_ms = self._fired.resume()

    def freeze(self) -> FrozenState | None:
        self._backend.meta = self._fired.encode(self._watermark_ms)
        return super().freeze()


def bounds(shape: WindowShape, window: int, count: int) -> list[pa.Array]:
    """Return the columns ``window_start`` and ``window_end`` of one window."""
    values = (shape.windows.start_ms(window), shape.windows.end_ms(window))
    return [pa.array(np.full(count, value * 1_000)).view(pa.timestamp("us")) for value in values]


def key_order(batch: pa.RecordBatch, keys: Sequence[str]) -> pa.Array:
    """Return the order that sorts rows with distinct keys. numpy is six times as fast for one number or time."""
    column = batch.column(keys[0])
    if len(keys) > 1 or is_text(column.type):
        return pc.sort_indices(batch, [(key, "ascending") for key in keys])
    if pa.types.is_floating(column.type):
        return pa.array(np.argsort(column.to_numpy(zero_copy_only=False)))
    words = column_words(column)
    return pa.array(np.argsort(words.view(np.uint64) if pa.types.is_uint64(column.type) else words))


@dataclass(frozen=True)
class WindowMergeSpec:
    """Merge partial results of ``plan`` and emit each window's results when event time passes its end."""

    plan: WindowPlan

    def build(self) -> Operator:
        return WindowMergeOperator(self.plan)

    @property
    def output_delay_ms(self) -> int:
        """By how much ``window_start`` may be earlier than the watermark."""
        return self.plan.shape.delay_ms

    @property
    def result_windows(self) -> AlignedWindows:
        """The windows of results, which have their start as event time."""
        return self.plan.shape.windows

    @property
    def holds_back(self) -> bool:
        """Whether the watermark is held back."""
        return self.plan.shape.emission.holds_back

    def output_schemas(self, inputs: Mapping[InputName, pa.Schema], node: str) -> Mapping[OutputTag, pa.Schema]:
        """Return keys, window bounds and aggregates; and of late records what comes in."""
        return self.plan.shape.outputs(inputs[MAIN_INPUT])

    def state_text(self) -> str:
        aggregates = [measure_text(self.plan, i) for i in range(len(self.plan.measures))]
        return window_state_text(self.plan.shape, Form.WINDOW_RESULTS, aggregates)


class WindowMergeOperator(WindowOperator[MergedRows]):
    """Keeps partial results; the backend merges those of a key. Records come here if the late ones have an output."""

    def __init__(self, plan: WindowPlan) -> None:
        self._plan = plan
        self._accumulators = tuple(measure.accumulator for measure in plan.measures)
        self._reader = None if plan.shape.emission.late is None else InputReader(plan)
        section = Section("windows", plan.partial_schema(), plan.shape.keys)
        super().__init__(plan.shape, WindowRows(section, self._window_of))

    def _new_backend(self, states: StateFactory, keys: KeyColumns) -> WindowBackend[MergedRows]:
        return states.merged_by_window(keys, self._rows, self._accumulators)

    def _window_of(self, batch: pa.RecordBatch) -> Words:
        windows: Words = batch.column(len(self._plan.shape.keys)).to_numpy()
        return windows

    def _panes(self, batch: pa.RecordBatch) -> Words:
        return self._window_of(batch) if self._reader is None else self._shape.panes(batch)

    def _records_in(self, batch: pa.RecordBatch) -> npt.NDArray[np.int64] | None:
        return partial_rows(batch, self._accumulators) if self._reader is None else None

    def _kept(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if self._reader is None:
            return batch
        return uncombined_batch(self._plan, self._rows.section.schema, batch, self._reader.read(batch))

    def _results(self, window: int, held: MergedRows) -> pa.RecordBatch:
        times = bounds(self._shape, window, len(held.table.rows))
        arrays = [*held.keys, *times, *results(self._plan, held.table)]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._shape.output)
        return batch.take(key_order(batch, self._shape.keys))


@dataclass(frozen=True)
class WindowBufferSpec:
    """Keep the records of each pane and aggregate those of a window at its end. ``kept``: the columns needed."""

    shape: WindowShape
    aggregates: tuple[pl.Expr, ...]
    kept: pa.Schema

    @property
    def output_delay_ms(self) -> int:
        """By how much ``window_start`` may be earlier than the watermark."""
        return self.shape.delay_ms

    @property
    def result_windows(self) -> AlignedWindows:
        """The windows of results, which have their start as event time."""
        return self.shape.windows

    @property
    def holds_back(self) -> bool:
        """Whether the watermark is held back."""
        return self.shape.emission.holds_back

    def build(self) -> Operator:
        return WindowBufferOperator(self)

    def output_schemas(self, inputs: Mapping[InputName, pa.Schema], node: str) -> Mapping[OutputTag, pa.Schema]:
        """Return keys, window bounds and aggregates; and of late records what comes in."""
        return self.shape.outputs(inputs[MAIN_INPUT])

    def state_text(self) -> str:
        return window_state_text(self.shape, Form.WINDOW_RECORDS, list(map(column_identity, self.kept)))


class WindowBufferOperator(WindowOperator[list[pa.RecordBatch]]):
    """Rows are records, of which only the needed columns are kept."""

    def __init__(self, spec: WindowBufferSpec) -> None:
        self._spec = spec
        self._aggregates = RecordAggregates(spec.aggregates, spec.kept, spec.shape.keys)
        super().__init__(spec.shape, WindowRows(Section("records", spec.kept, spec.shape.keys), self._panes))

    def _new_backend(self, states: StateFactory, keys: KeyColumns) -> WindowBackend[list[pa.RecordBatch]]:
        return states.by_window(keys, self._rows)

    def _panes(self, batch: pa.RecordBatch) -> Words:
        return self._shape.panes(batch)

    def _records_in(self, batch: pa.RecordBatch) -> None:
        return None

    def _kept(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.select(self._spec.kept.names)

    def _results(self, window: int, held: list[pa.RecordBatch]) -> pa.RecordBatch:
        keys = list(self._shape.keys)
        frame = pl.DataFrame(pa.Table.from_batches(held))
        result = self._aggregates.of(frame, keys, self.context.node)
        output = self._shape.output
        values = [f for f in output if f.name not in ("window_start", "window_end")]
        grouped = batch_of(result, pa.schema(values))
        columns = grouped.columns
        times = bounds(self._shape, window, grouped.num_rows)
        return pa.RecordBatch.from_arrays([*columns[: len(keys)], *times, *columns[len(keys) :]], schema=output)


@dataclass(frozen=True)
class WindowOperators:
    """The operators of one aggregation.

    ``combine`` stands before the hash edge, ``window`` after it; the edge's keys are ``keys``. ``combine`` is None when
    an aggregate does not decompose, or late records have an output. ``output`` is the schema of the results.
    """

    combine: OperatorSpec | None
    window: OperatorSpec
    keys: tuple[str, ...]
    output: pa.Schema


def window_operators(aggregate: WindowedAggregate, schema: pa.Schema, node: str) -> WindowOperators:
    """Return the operators that compute ``aggregate`` over records of ``schema``.

    Args:
        aggregate: what to compute.
        schema: canonical schema of the records.
        node: the operator's name, for messages.

    Raises:
        UsageError: unknown column, wrong type, colliding names.
    """
    shape = window_shape(aggregate, schema, node)
    plan = decompose(aggregate, shape, schema)
    if plan is None:
        kept = kept_columns(aggregate, shape, schema)
        aggregates = tuple(map(stable, aggregate.aggregates))
        return WindowOperators(None, WindowBufferSpec(shape, aggregates, kept), shape.keys, shape.output)
    combine = WindowCombineSpec(plan) if aggregate.emission.late is None else None
    return WindowOperators(combine, WindowMergeSpec(plan), shape.keys, shape.output)


def kept_columns(aggregate: WindowedAggregate, shape: WindowShape, schema: pa.Schema) -> pa.Schema:
    """Return the columns that have to be kept of each record: all, where an expression selects by pattern."""
    roots = columns_of(aggregate.aggregates)
    if roots is None:
        return schema
    return pa.schema([field for field in schema if field.name in roots | {*shape.keys, shape.time.column}])
