"""``WindowBuffer``: a window that keeps its records and lets Polars aggregate them when it fires.

For aggregates that do not decompose (medians, distinct counts, arithmetic between aggregates …). State: the records
of each open window, as immutable batches, so that freezing copies a list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import polars as pl
import pyarrow as pa

from headgate.codec.snapshot import Buffer, decode_sections, encode_sections
from headgate.operators.base import WATERMARK_MIN_MS, Operator, RestoredState
from headgate.operators.schemas import batch_of
from headgate.operators.user_function import batch_error
from headgate.operators.windows.fired_groups import FiredGroups
from headgate.operators.windows.merge import bounds
from headgate.operators.windows.plan import WindowShape, window_state_text
from headgate.operators.windows.values import split_by_window
from headgate.state.frozen import FrozenState
from headgate.state.ipc import decode_batches, encode_batches
from headgate.state.ownership import owned_rows

_BATCH_ROWS_MAX = 65_536


@dataclass(frozen=True)
class WindowBufferSpec:
    """Keep the records (``kept``: the columns needed of them) of each window and aggregate them at its end."""

    shape: WindowShape
    aggregates: tuple[pl.Expr, ...]
    kept: pa.Schema

    def build(self) -> Operator:
        """See ``OperatorSpec``."""
        return WindowBufferOperator(self)

    def output_schema(self, schema: pa.Schema, node: str) -> pa.Schema:
        """Return keys, window bounds and aggregates."""
        return self.shape.output

    def state_text(self) -> str:
        """See ``catalog.state_text``."""
        return window_state_text(self.shape, "window-buffer", [f"{f.name}: {f.type}" for f in self.kept])


class _Frozen(FrozenState):
    def __init__(self, schema: pa.Schema, meta: bytes, batches: tuple[pa.RecordBatch, ...]) -> None:
        super().__init__()
        self._schema = schema
        self._meta = meta
        self._batches = batches

    def _rows(self) -> Mapping[str, int]:
        return {"records": sum(batch.num_rows for batch in self._batches)}

    def _encode(self) -> Sequence[Buffer]:
        return encode_sections({"meta": [self._meta], "records": encode_batches(self._schema, self._batches)})

    def _forget(self) -> None:
        self._batches = ()


class WindowBufferOperator(Operator):
    """A list of batches per open window."""

    def __init__(self, spec: WindowBufferSpec) -> None:
        self._spec = spec
        self._shape = spec.shape
        self._windows: dict[int, list[pa.RecordBatch]] = {}
        self._watermark_ms = WATERMARK_MIN_MS
        self._fired = FiredGroups()

    def restore(self, states: Sequence[RestoredState]) -> None:
        """Take over the records of the keys that this subtask owns."""
        context = self.context
        metas: list[tuple[RestoredState, bytes]] = []
        for state in states:
            path = f"state of '{context.node}', subtask {state.subtask_index}"
            sections = decode_sections(state.payload, path)
            metas.append((state, bytes(sections["meta"])))
            for batch in decode_batches(sections["records"], self._spec.kept, path):
                owned = owned_rows(
                    batch,
                    self._shape.keys,
                    context.max_parallelism,
                    context.parallelism,
                    context.subtask_index,
                )
                if owned.num_rows:
                    self._add(owned, is_late_dropped=False)
        self._watermark_ms = self._fired.restore(context, metas)  # WN4

    def process(self, batch: pa.RecordBatch) -> None:
        """See ``Operator``."""
        batch = self._unfired(batch.select(self._spec.kept.names))
        if batch.num_rows:
            self._add(batch, is_late_dropped=True)

    def _unfired(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Drop records of windows that fired for their key before a restore."""
        if not self._fired.is_any_ahead:
            return batch
        windows = self._shape.time.windows(self._shape.time.values(batch), self._shape.size_ms)
        late = self._fired.late(batch, self._shape.keys, (windows + 1) * self._shape.size_ms)
        self.context.metrics.add("late", int(late.sum()))  # WN3
        return batch.filter(pa.array(~late))

    def _add(self, batch: pa.RecordBatch, is_late_dropped: bool) -> None:
        windows = self._shape.time.windows(self._shape.time.values(batch), self._shape.size_ms)
        for window, rows in split_by_window(windows):
            if is_late_dropped and self._shape.end_ms(window) - 1 <= self._watermark_ms:
                self.context.metrics.add("late", len(rows))  # WN3
                continue
            part = batch if len(rows) == batch.num_rows else batch.take(pa.array(rows))
            self._windows.setdefault(window, []).append(part)

    def on_watermark(self, watermark_ms: int) -> None:
        """Fire the windows that ended, oldest first, then pass the watermark on."""
        self._watermark_ms = max(self._watermark_ms, watermark_ms)
        self._fired.advance(self._watermark_ms)
        for window in sorted(self._windows):
            if self._shape.end_ms(window) - 1 > self._watermark_ms:  # WN2
                break
            self._fire(window, self._windows.pop(window))
        self.output.emit_watermark(watermark_ms)

    def _fire(self, window: int, batches: Sequence[pa.RecordBatch]) -> None:
        keys = list(self._shape.keys)
        frame = pl.from_arrow(pa.Table.from_batches(batches))
        assert isinstance(frame, pl.DataFrame)
        try:
            result = frame.group_by(keys).agg(self._spec.aggregates).sort(keys)
        except pl.exceptions.PolarsError as error:
            raise batch_error(self.context.node, frame.height, error) from None
        output = self._shape.output
        values = [f for f in output if f.name not in ("window_start", "window_end")]
        grouped = batch_of(result, pa.schema(values))
        columns = grouped.columns
        times = bounds(self._shape, window, grouped.num_rows)
        arrays = [*columns[: len(keys)], *times, *columns[len(keys) :]]
        batch = pa.RecordBatch.from_arrays(arrays, schema=output)
        for start in range(0, batch.num_rows, _BATCH_ROWS_MAX):
            self.output.emit(batch.slice(start, _BATCH_ROWS_MAX))

    def on_resumed(self) -> None:
        """Go on with the event time before the end: what the end alone has fired is not late (WN13)."""
        self._watermark_ms = self._fired.resume()

    def freeze(self) -> FrozenState:
        """See ``Operator``."""
        batches = tuple(batch for _, held in sorted(self._windows.items()) for batch in held)
        return _Frozen(self._spec.kept, self._fired.encode(self._watermark_ms), batches)
