"""Rows that lie in windows: those of each window, and partial results between accumulators and batches.

A row of partial results has the key, the number of its window, how many records it stands for, and the value of each
accumulator, null where no record counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headgate.state.aggregate_table import Accumulator, FrozenTable, Values
from headgate.state.key_hash import Words, column_words
from headgate.state.key_index import Slots

_MASKS_MAX = 8
"""Up to so many windows in a batch, one pass for each is cheaper than a sort."""


@dataclass(frozen=True, slots=True)
class MergedRows:
    """What the partial results of one window came to: a row per key, its columns and its accumulators."""

    keys: Sequence[pa.Array]
    table: FrozenTable


def only_window(windows: Words) -> int | None:
    """Return the number that all rows have, or None: most batches lie in one window and need not be taken apart."""
    first = int(windows[0])
    return first if first == windows[-1] and (windows == first).all() else None


def split_by_window(windows: Words) -> Iterator[tuple[int, Slots]]:
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


def partial_batch(schema: pa.Schema, keys: Sequence[pa.Array], window: int, table: FrozenTable) -> pa.RecordBatch:
    """Return partial results of one window as a batch of ``schema``, a row per slot of ``table``."""
    arrays = [*keys, pa.array(np.full(len(table.rows), window)), pa.array(table.rows)]
    for values, seen in zip(table.values, table.seen, strict=True):
        arrays.append(pa.array(values, mask=None if seen is None or seen.all() else ~seen))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def partial_rows(batch: pa.RecordBatch, accumulators: Sequence[Accumulator]) -> Slots:
    """Return how many records each row of partial results stands for."""
    rows: Slots = batch.column(batch.num_columns - len(accumulators) - 1).to_numpy()
    return rows


def partial_values(batch: pa.RecordBatch, accumulators: Sequence[Accumulator]) -> list[Values]:
    """Return the input of each accumulator from a batch of partial results."""
    values: list[Values] = []
    for i, accumulator in enumerate(accumulators, start=batch.num_columns - len(accumulators)):
        column = batch.column(i)
        valid = column.is_valid().to_numpy(zero_copy_only=False) if column.null_count else None
        values.append(Values(wide_values(column, accumulator.dtype), valid))
    return values


def pick(values: Sequence[Values], rows: Slots) -> list[Values]:
    """Return ``values`` of these rows only."""
    return [
        Values(
            v.values if isinstance(v.values, int) else v.values[rows],
            None if v.valid is None else v.valid[rows],
        )
        for v in values
    ]


def wide_values(column: pa.Array, dtype: str) -> npt.NDArray[Any]:
    """Return a column in the type that an accumulator computes in (nulls: any number)."""
    if dtype == "float64":
        return column.to_numpy(zero_copy_only=False).astype(np.float64, copy=False)  # type: ignore[no-any-return]
    return column_words(column).view(dtype)
