"""Columns of a decomposed window aggregation: inputs of the accumulators, partial rows, and results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headgate.operators.schemas import batch_of, frame_of, schema_of_frame
from headgate.operators.windows.plan import Aggregate, Measure, Result, WindowPlan
from headgate.state.aggregate_table import FrozenTable, Values
from headgate.state.key_hash import column_words
from headgate.state.key_index import Slots, words_to_array

_MASKS_MAX = 8
"""Up to so many windows in a batch, one pass for each is cheaper than a sort."""


class InputReader:
    """Evaluates a plan's expressions on batches of records."""

    def __init__(self, plan: WindowPlan) -> None:
        self._measures = plan.measures
        self._names = [e.meta.output_name() if e.meta.is_column() else None for e in plan.inners]
        self._computed = [e.alias(str(i)) for i, e in enumerate(plan.inners) if not e.meta.is_column()]

    def read(self, batch: pa.RecordBatch) -> list[Values]:
        """Return the input of each measure's accumulator."""
        computed: dict[str, pa.Array] = {}
        if self._computed:
            frame = frame_of(batch).select(self._computed)
            result = batch_of(frame, schema_of_frame(frame))
            computed = dict(zip(result.schema.names, result.columns, strict=True))
        columns = [computed[str(i)] if name is None else batch.column(name) for i, name in enumerate(self._names)]
        return [_values(measure, columns[measure.inner]) for measure in self._measures]


def _values(measure: Measure, column: pa.Array) -> Values:
    valid: npt.NDArray[np.bool_] | None = None
    if column.null_count:
        valid = column.is_valid().to_numpy(zero_copy_only=False)
    if measure.is_count:
        return Values(1, valid)
    return Values(_wide(column, measure.accumulator.dtype), valid)


def _wide(column: pa.Array, dtype: str) -> npt.NDArray[Any]:
    if dtype == "float64":
        return column.to_numpy(zero_copy_only=False).astype(np.float64, copy=False)  # type: ignore[no-any-return]
    return column_words(column).view(dtype)


def read_partials(plan: WindowPlan, batch: pa.RecordBatch) -> list[Values]:
    """Return the input of each accumulator from a batch of partial results."""
    first = len(plan.shape.keys) + 2
    inputs: list[Values] = []
    for i, measure in enumerate(plan.measures):
        column = batch.column(first + i)
        valid = column.is_valid().to_numpy(zero_copy_only=False) if column.null_count else None
        inputs.append(Values(_wide(column, measure.accumulator.dtype), valid))
    return inputs


def partial_batch(schema: pa.Schema, keys: Sequence[pa.Array], window: int, table: FrozenTable) -> pa.RecordBatch:
    """Return partial results of one window as a batch of ``plan.partial_schema()``."""
    arrays = [*keys, pa.array(np.full(len(table.rows), window)), pa.array(table.rows)]
    for values, seen in zip(table.values, table.seen, strict=True):
        arrays.append(pa.array(values, mask=None if seen is None or seen.all() else ~seen))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def uncombined_batch(
    plan: WindowPlan, schema: pa.Schema, batch: pa.RecordBatch, inputs: Sequence[Values]
) -> pa.RecordBatch:
    """Return each record as a partial result of its own, of ``plan.partial_schema()``."""
    shape, ones = plan.shape, np.ones(batch.num_rows, np.int64)
    windows = shape.time.windows(shape.time.values(batch), shape.size_ms)
    arrays = [*(batch.column(key) for key in shape.keys), pa.array(windows), pa.array(ones)]
    for given in inputs:
        if isinstance(given.values, int):
            arrays.append(pa.array(ones if given.valid is None else given.valid.astype(np.int64)))
        else:
            arrays.append(pa.array(given.values, mask=None if given.valid is None else ~given.valid))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def results(plan: WindowPlan, table: FrozenTable) -> list[pa.Array]:
    """Return the output columns after keys and window bounds, with Polars' nulls and types (WN6, WN7)."""
    return [_result(result, table) for result in plan.results]


def _result(result: Result, table: FrozenTable) -> pa.Array:
    if result.aggregate is Aggregate.LEN:
        return words_to_array(table.rows, result.dtype)
    first = result.measures[0]
    values, seen = table.values[first], table.seen[first]
    if result.aggregate is Aggregate.MEAN:
        counts = table.values[result.measures[1]]
        seen = counts > 0
        values = values / np.maximum(counts, 1)
    if values.dtype == np.float64:
        column = pa.array(values.astype(result.dtype.to_pandas_dtype(), copy=False))
    else:
        column = words_to_array(values.view(np.int64), result.dtype)
    if seen is None or seen.all():
        return column
    return pc.if_else(pa.array(seen), column, pa.scalar(None, result.dtype))


def split_by_window(windows: npt.NDArray[np.int64]) -> Iterator[tuple[int, Slots]]:
    """Yield each window number with the rows that have it, numbers ascending, rows in order."""
    low, high = int(windows.min()), int(windows.max())
    if high - low < _MASKS_MAX:
        for window in range(low, high + 1):
            rows = np.flatnonzero(windows == window)
            if len(rows):
                yield window, rows
        return
    order = np.argsort(windows, kind="stable")
    ordered = windows[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=ordered[0] - 1))
    for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(ordered)], strict=True):
        yield int(ordered[start]), order[start:end]


def pick(inputs: Sequence[Values], rows: Slots) -> list[Values]:
    """Return ``inputs`` of these rows only."""
    return [
        Values(
            v.values if isinstance(v.values, int) else v.values[rows],
            None if v.valid is None else v.valid[rows],
        )
        for v in inputs
    ]
