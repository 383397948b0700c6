"""What every window operator does: holds rows until event time passes their window's end, then fires it.

Counterparts: ``WindowMerge`` and ``WindowBuffer``, which say what a row is and what a window emits. State: the rows of
each open window, and the watermark (so that a window never fires twice, WN4).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headgate.operators.base import WATERMARK_MIN_MS, OperatorContext, Output, RestoredState
from headgate.operators.keyed import KeyedOperator
from headgate.operators.windows.fired_groups import FiredGroups
from headgate.operators.windows.plan import WindowShape
from headgate.state.backend import META, PartedWindows, StateFactory, WindowBackend, WindowRows
from headgate.state.descriptors import KeyColumns
from headgate.state.frozen import FrozenState
from headgate.state.key_hash import Words, column_words, is_text
from headgate.state.slot_array import Mask

Held = TypeVar("Held")

_BATCH_ROWS_MAX = 65_536


class WindowOperator(KeyedOperator, Generic[Held]):
    """Adds rows to their windows, drops late ones, and fires the windows that have ended."""

    _backend: WindowBackend[Held]

    def __init__(self, shape: WindowShape, rows: WindowRows) -> None:
        self._shape = shape
        self._rows = rows
        self._watermark_ms = WATERMARK_MIN_MS
        self._fired = FiredGroups()

    @abstractmethod
    def _records_in(self, rows: pa.RecordBatch) -> int:
        """Return how many records ``rows`` stand for."""

    @abstractmethod
    def _new_backend(self, states: StateFactory, keys: KeyColumns) -> WindowBackend[Held]:
        """Return empty state for ``self._rows``."""

    @abstractmethod
    def _results(self, window: int, held: Held) -> pa.RecordBatch:
        """Return the results of a window with what it held, sorted by key (WN10)."""

    def open(self, context: OperatorContext, output: Output) -> None:
        """See ``Operator``."""
        super().open(context, output)
        self._backend = self._new_backend(context.states, KeyColumns(self._shape.keys, self._shape.key_types))

    def restore(self, states: Sequence[RestoredState]) -> None:
        """See ``Operator``. Goes on with the lowest of the former watermarks (WN4)."""
        former = [(state, bytes(sections[META])) for state, sections in self._restore_backend(states)]
        self._watermark_ms = self._fired.restore(self.context, former)

    def process(self, batch: pa.RecordBatch) -> None:
        """See ``Operator``."""
        windows = self._rows.window_of(batch)
        late = self._late(batch, windows)
        if late is not None:
            self.context.metrics.add("late", self._records_in(batch.filter(pa.array(late))))  # WN3
            batch, windows = batch.filter(pa.array(~late)), windows[~late]
        if batch.num_rows:
            self._backend.add(windows, batch)

    def _late(self, batch: pa.RecordBatch, windows: Words) -> Mask | None:
        """Return which rows lie in windows that fired already, also before a restore; None when none do."""
        ended = (self._watermark_ms + 1) // self._shape.size_ms - 1
        if self._fired.is_any_ahead:
            late = self._fired.late(batch, self._shape.keys, (windows + 1) * self._shape.size_ms)
            return late | (windows <= ended)
        return windows <= ended if windows.min() <= ended else None

    def on_watermark(self, watermark_ms: int) -> None:
        """Fire the windows that ended, oldest first, then pass the watermark on."""
        self._watermark_ms = max(self._watermark_ms, watermark_ms)
        self._fired.advance(self._watermark_ms)
        for window in self._backend.windows():
            if self._shape.end_ms(window) - 1 > self._watermark_ms:  # WN2
                break
            results = self._all_results(window)
            for start in range(0, results.num_rows, _BATCH_ROWS_MAX):
                self.output.emit(results.slice(start, _BATCH_ROWS_MAX))
        self.output.emit_watermark(watermark_ms)

    def _all_results(self, window: int) -> pa.RecordBatch:
        """Return the results of a window that ends, sorted by key, however it is read."""
        if not isinstance(self._backend, PartedWindows):
            return self._results(window, self._backend.take(window))
        parts = [self._results(window, held) for held in self._backend.parts(window)]
        if len(parts) == 1:
            return parts[0]
        whole = pa.concat_batches(parts)
        return whole.take(key_order(whole, self._shape.keys))

    def on_resumed(self) -> None:
        """Go on with the event time before the end: what the end alone has fired is not late (WN13)."""
        self._watermark_ms = self._fired.resume()

    def freeze(self) -> FrozenState | None:
        """See ``Operator``."""
        self._backend.meta = self._fired.encode(self._watermark_ms)
        return super().freeze()


def bounds(shape: WindowShape, window: int, count: int) -> list[pa.Array]:
    """Return the columns ``window_start`` and ``window_end`` of one window."""
    start_us = window * shape.size_ms * 1_000
    values = (start_us, start_us + shape.size_ms * 1_000)
    return [pa.array(np.full(count, value)).view(pa.timestamp("us")) for value in values]


def key_order(batch: pa.RecordBatch, keys: Sequence[str]) -> pa.Array:
    """Return the order that sorts rows with distinct keys. numpy is six times as fast for one number or time."""
    column = batch.column(keys[0])
    if len(keys) > 1 or is_text(column.type):
        return pc.sort_indices(batch, [(key, "ascending") for key in keys])
    if pa.types.is_floating(column.type):
        return pa.array(np.argsort(column.to_numpy(zero_copy_only=False)))
    words = column_words(column)
    return pa.array(np.argsort(words.view(np.uint64) if pa.types.is_uint64(column.type) else words))
