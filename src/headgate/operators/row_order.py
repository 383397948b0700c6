"""The order of rows by columns, and the first rows of each group in it.

``WindowCandidatesOperator`` stands before the shuffle and has no state: it gives records their windows, and passes on
only those of a batch that may be among the first of one. Counterpart: ``top_rows.WindowTopSpec``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.model.state_schema import name_text
from headgate.operators.base import WATERMARK_MIN_MS, Operator
from headgate.operators.keys import check_keys
from headgate.operators.schemas import describe
from headgate.operators.timestamps import EventTime
from headgate.operators.windows.window_assigner import (
    AlignedWindows,
    distinct_numbers,
    ends_ms,
    rows_in_windows,
    starts_ms,
)
from headgate.operators.windows.window_plan import END_COLUMN, START_COLUMN, ranks
from headgate.state.key_index import Slots

_INT_MAX = (1 << 63) - 1


@dataclass(frozen=True)
class Order:
    """How rows are ordered: by columns, each descending or not; nulls come last, and earlier rows before later ones."""

    columns: tuple[str, ...]
    descending: tuple[bool, ...]

    @property
    def text(self) -> str:
        """Return the order in words."""
        pairs = zip(map(name_text, self.columns), self.descending, strict=True)
        return ", ".join(f"{name} descending" if descends else _ascending(name) for name, descends in pairs)

    def rows(self, groups: Slots, columns: Sequence[pa.Array]) -> Slots:
        """Return the rows group by group, in their order. ``columns`` are those of the order."""
        if len(groups) and all(are_whole_numbers(column) for column in columns):
            numbers = [ranks(column) for column in columns]
            return _rows_of_numbers(groups, [~n if d else n for n, d in zip(numbers, self.descending, strict=True)])
        frame = pl.DataFrame({"group": groups}).with_columns(
            *(pl.Series(f"by{i}", column) for i, column in enumerate(columns))
        )
        names = [f"by{i}" for i in range(len(columns))]
        sort = pl.arg_sort_by
        order = frame.select(
            sort("group", *names, descending=[False, *self.descending], nulls_last=True, maintain_order=True)
        )
        found: Slots = order.to_series().to_numpy().astype(np.int64)
        return found


def _ascending(name: str) -> str:
    """Return a name, in quotes where it reads as an order itself."""
    return f'"{name}"' if name.endswith(" descending") else name


def are_whole_numbers(column: pa.Array) -> bool:
    """Return whether values, times included, are whole numbers, and none is null."""
    dtype = column.type
    is_time = pa.types.is_timestamp(dtype) or pa.types.is_date32(dtype) or pa.types.is_duration(dtype)
    return column.null_count == 0 and bool(pa.types.is_integer(dtype) or is_time)


def _rows_of_numbers(groups: Slots, columns: Sequence[Slots]) -> Slots:
    """Return the rows by group, then by columns of whole numbers; one number says all of it where that is possible."""
    key = groups
    for column in columns:
        low = int(column.min())
        span = int(column.max()) - low + 1
        if (int(key.max()) + 1) * span > _INT_MAX:
            return np.lexsort((*reversed(columns), groups))
        key = key * span + (column - low)
    return np.argsort(key, kind="stable")


def order_of(node: str, by: object, descending: object) -> Order:
    """Return the order that a user gave as ``by`` and ``descending``, one or several of each.

    Raises:
        UsageError: it is none.
    """
    columns = (by,) if isinstance(by, str) else tuple(by) if isinstance(by, Sequence) else ()
    if not columns or any(not isinstance(column, str) for column in columns):
        raise UsageError(f"operator '{node}': by= is the column, or the list of columns, that orders rows, not {by!r}")
    if len(set(columns)) != len(columns):
        raise UsageError(f"operator '{node}': by= names a column twice: {list(columns)}")
    given = (descending,) * len(columns) if isinstance(descending, bool) else descending
    if not isinstance(given, Sequence) or len(given) != len(columns) or any(not isinstance(x, bool) for x in given):
        raise UsageError(
            f"operator '{node}': descending= is True, False, or a list of them, one for each of {list(columns)}, "
            f"not {descending!r}"
        )
    return Order(columns, tuple(given))


def group_ranks(groups: Slots) -> Slots:
    """Return the place of each row in its group; equal groups stand together."""
    starts = np.flatnonzero(np.diff(groups, prepend=-1))
    return np.arange(len(groups)) - np.repeat(starts, np.diff(starts, append=len(groups)))


def first_rows(
    order: Order, groups: Slots, columns: Sequence[pa.Array], count: int, *, ties: bool
) -> tuple[Slots, Slots]:
    """Return the first ``count`` rows of each group, group by group in their order, and their ranks from 0 on.

    ``ties``: rows that are equal to the last one, by ``columns``, are among them, and equal rows have one rank.
    """
    rows = np.arange(len(groups))
    if count == 1 and len(groups) and are_whole_numbers(columns[0]):  # most cannot be the first: they are not sorted
        values = ranks(columns[0])
        values = ~values if order.descending[0] else values
        best = np.full(int(groups.max()) + 1, _INT_MAX)
        np.minimum.at(best, groups, values)
        rows = np.flatnonzero(values == best[groups])
        groups, columns = groups[rows], [column.take(pa.array(rows)) for column in columns]
    ordered = order.rows(groups, columns)
    found = group_ranks(groups[ordered])
    if ties:
        found = _tied(found, groups[ordered], [column.take(pa.array(ordered)) for column in columns])
    kept = found < count
    return rows[ordered[kept]], found[kept]


def _tied(ranks: Slots, groups: Slots, columns: Sequence[pa.Array]) -> Slots:
    """Return the ranks with equal rows having that of the first of them."""
    is_first = ranks == 0
    for column in columns:
        values = pl.Series(column)
        is_first |= values.ne_missing(values.shift(1)).to_numpy()
    rows = np.arange(len(ranks))
    found: Slots = np.maximum.accumulate(np.where(is_first, rows, 0)) - (rows - ranks)
    return found


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
