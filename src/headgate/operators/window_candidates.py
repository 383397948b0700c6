"""Give records their windows, and pass on only those of a batch that may be among the first of one.

This stands before the shuffle and has no state. Counterpart: ``top_rows.WindowTopSpec``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.operators.base import WATERMARK_MIN_MS, Operator
from headgate.operators.keys import check_keys
from headgate.operators.row_order import Order, first_rows
from headgate.operators.schemas import describe
from headgate.operators.timestamps import EventTime
from headgate.operators.windows.window_assigner import (
    AlignedWindows,
    distinct_numbers,
    ends_ms,
    rows_in_windows,
    starts_ms,
)
from headgate.operators.windows.window_plan import END_COLUMN, START_COLUMN
from headgate.state.key_index import Slots

LEFT_OUT = "__headgate_left_out"
"""How many records of the batch, of the same key and window, a record also stands for: they were left out."""


@dataclass(frozen=True)
class WindowCandidatesSpec:
    """Add ``window_start`` and ``window_end``, and leave out what others of a batch keep from being among the first.

    Where a window turns out to be over after the shuffle, ``LEFT_OUT`` says how many records were late.

    Attributes:
        keys: of the records, without the window.
        time: of the records, which says their windows.
        count: so many are wanted of each key and window; with ``ties`` also those that are equal to the last one.
    """

    keys: tuple[str, ...]
    windows: AlignedWindows
    time: EventTime
    count: int
    order: Order
    ties: bool

    def build(self) -> Operator:
        return WindowCandidatesOperator(self)

    def output_schema(self, schema: pa.Schema, node: str) -> pa.Schema:
        """Return the schema with the columns of the window, and ``LEFT_OUT``.

        Raises:
            UsageError: a column is in the way, or a wrong key.
        """
        if self.keys:
            check_keys(node, schema, self.keys)
        for name in (START_COLUMN, END_COLUMN):
            if name in schema.names:
                raise UsageError(
                    f"operator '{node}': there is a column '{name}' already, which is to be that of the window; rename "
                    f"it, or leave window= out if the records are results of windows; the columns are "
                    f"{describe(schema)}"
                )
        bounds = [pa.field(name, pa.timestamp("us")) for name in (START_COLUMN, END_COLUMN)]
        return pa.schema([*schema, *bounds, pa.field(LEFT_OUT, pa.int64())])


class WindowCandidatesOperator(Operator):
    """Holds nothing. Records that are late by its own watermark are all passed on."""

    def __init__(self, spec: WindowCandidatesSpec) -> None:
        self._spec = spec
        self._watermark_ms = WATERMARK_MIN_MS

    def on_watermark(self, watermark_ms: int) -> None:
        self._watermark_ms = watermark_ms
        super().on_watermark(watermark_ms)

    def process(self, batch: pa.RecordBatch) -> None:
        spec = self._spec
        rows, windows = rows_in_windows(spec.windows, spec.windows.panes(spec.time, spec.time.values(batch)))
        _, groups = distinct_numbers(windows)
        if spec.keys:
            groups = _groups([batch.column(key).take(pa.array(rows)) for key in spec.keys], groups)
        columns = [batch.column(name) for name in spec.order.columns]
        if len(rows) != batch.num_rows:
            columns = [column.take(pa.array(rows)) for column in columns]
        found, _ = first_rows(spec.order, groups, columns, spec.count, ties=spec.ties)
        ends = ends_ms(spec.windows, windows)
        found = np.union1d(found, np.flatnonzero(ends - 1 <= self._watermark_ms))
        starts = starts_ms(spec.windows, windows[found])
        bounds = [pa.array(times_ms * 1_000).view(pa.timestamp("us")) for times_ms in (starts, ends[found])]
        schema = spec.output_schema(batch.schema, self.context.node)
        kept = batch.take(pa.array(rows[found]))
        left_out = pa.array(_left_out(groups, found))
        self.output.emit(pa.RecordBatch.from_arrays([*kept.columns, *bounds, left_out], schema=schema))


def _left_out(groups: Slots, found: Slots) -> Slots:
    """Return, for the first of the rows ``found`` of each group, how many others it has; for all others 0."""
    kept, firsts = np.unique(groups[found], return_index=True)
    left_out = np.zeros(len(found), np.int64)
    left_out[firsts] = (np.bincount(groups) - np.bincount(groups[found]))[kept] if len(found) < len(groups) else 0
    return left_out


def _groups(keys: Sequence[pa.Array], windows: Slots) -> Slots:
    """Return a number for each row, the same for equal keys in the same window."""
    frame = pl.DataFrame({"window": windows}).with_columns(*(pl.Series(f"key{i}", key) for i, key in enumerate(keys)))
    rows = frame.with_row_index("row").group_by(frame.columns).agg("row")["row"]
    lengths = rows.list.len().to_numpy().astype(np.int64)
    groups = np.empty(len(windows), np.int64)
    groups[rows.explode().to_numpy()] = np.repeat(np.arange(len(lengths)), lengths)
    return groups
