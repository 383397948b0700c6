"""Accumulators of windows: a columnar table by slot, partial results as batches, and rows split by window.

Partial results combine with the same operation as single values (``ADD`` of sums, ``MAX`` of maxima), so that the
same table serves before and after the shuffle, and restores from its own snapshot. A row of partial results has the
key, the number of its window, how many records it stands for, and the value of each accumulator, null where no record
counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headgate.state.key_hash import Words, column_words
from headgate.state.key_index import Slots, make_key_index

Array: TypeAlias = npt.NDArray[Any]

_SLOTS_MIN = 256


class Kind(Enum):
    """How values combine."""

    ADD = "add"
    MIN = "min"
    MAX = "max"


@dataclass(frozen=True, slots=True)
class Accumulator:
    """One accumulator: its kind and the type it computes in (``int64``, ``uint64`` or ``float64``)."""

    kind: Kind
    dtype: str

    @property
    def start(self) -> int | float:
        """The value of a slot that saw nothing. A floating minimum starts at NaN, which fmin ignores."""
        if self.kind is Kind.ADD:
            return 0
        if self.dtype == "float64":
            return float("nan")
        limits = np.iinfo(self.dtype)
        return int(limits.max if self.kind is Kind.MIN else limits.min)


@dataclass(frozen=True, slots=True)
class Values:
    """Input of one accumulator: an array (or one number for every row), and which rows count (None: all)."""

    values: Array | int
    valid: npt.NDArray[np.bool_] | None = None


@dataclass(frozen=True, slots=True)
class FrozenTable:
    """A table as it was: ``rows`` and, per accumulator, values and (minimum, maximum) which slots saw one."""

    rows: Array
    values: tuple[Array, ...]
    seen: tuple[Array | None, ...]


class AggTable:
    """Accumulators of ``rows`` (a count of records) and of each of ``accumulators``, by slot."""

    def __init__(self, accumulators: Sequence[Accumulator]) -> None:
        self._accumulators = tuple(accumulators)
        self._rows: Array = np.zeros(_SLOTS_MIN, np.int64)
        self._values: list[Array] = [np.full(_SLOTS_MIN, a.start, a.dtype) for a in self._accumulators]
        self._seen: list[Array | None] = [
            None if a.kind is Kind.ADD else np.zeros(_SLOTS_MIN, np.bool_) for a in self._accumulators
        ]
        self._is_frozen = False

    def update(self, size: int, slots: Slots, rows: Array | int, inputs: Sequence[Values]) -> None:
        """Combine one value per row into its slot. ``size`` exceeds every slot; ``rows`` counts records."""
        self._prepare(size)
        np.add.at(self._rows, slots, rows)
        for i, (accumulator, given) in enumerate(zip(self._accumulators, inputs, strict=True)):
            where, values = slots, given.values
            if given.valid is not None:
                where = slots[given.valid]
                values = values if isinstance(values, int) else values[given.valid]
            self._combine(i, accumulator, where, values)

    def _combine(self, i: int, accumulator: Accumulator, slots: Slots, values: Array | int) -> None:
        target = self._values[i]
        if accumulator.kind is Kind.ADD:
            np.add.at(target, slots, values)
            return
        seen = self._seen[i]
        assert seen is not None
        seen[slots] = True
        if accumulator.dtype == "float64":
            (np.fmin if accumulator.kind is Kind.MIN else np.fmax).at(target, slots, values)
        else:
            (np.minimum if accumulator.kind is Kind.MIN else np.maximum).at(target, slots, values)

    def used(self) -> Slots:
        """Return the slots that saw a record, ascending."""
        return np.flatnonzero(self._rows)

    def freeze(self, size: int) -> FrozenTable:
        """Return the first ``size`` slots as they are now: references, copied when the table next changes."""
        self._is_frozen = True
        self._grow(size)
        return self._first(size)

    def _first(self, size: int) -> FrozenTable:
        return FrozenTable(
            self._rows[:size],
            tuple(v[:size] for v in self._values),
            tuple(None if s is None else s[:size] for s in self._seen),
        )

    def view(self, size: int) -> FrozenTable:
        """Return the first ``size`` slots, to be read before the table changes."""
        self._grow(size)
        return self._first(size)

    def take(self, slots: Slots) -> FrozenTable:
        """Return a copy of ``slots``."""
        return FrozenTable(
            self._rows.take(slots),
            tuple(v.take(slots) for v in self._values),
            tuple(None if s is None else s.take(slots) for s in self._seen),
        )

    def clear(self) -> None:
        """Forget everything, keeping the memory."""
        self._prepare(0)
        self._rows[:] = 0
        for accumulator, values, seen in zip(self._accumulators, self._values, self._seen, strict=True):
            values[:] = accumulator.start
            if seen is not None:
                seen[:] = False

    def _prepare(self, size: int) -> None:
        if self._is_frozen:  # the frozen arrays belong to the snapshot now
            self._rows = self._rows.copy()
            self._values = [v.copy() for v in self._values]
            self._seen = [None if s is None else s.copy() for s in self._seen]
            self._is_frozen = False
        self._grow(size)

    def _grow(self, size: int) -> None:
        if size <= len(self._rows):
            return
        capacity = max(size + size // 4, 2 * len(self._rows))
        self._rows = _grown(self._rows, capacity, 0)
        self._values = [_grown(v, capacity, a.start) for v, a in zip(self._values, self._accumulators, strict=True)]
        self._seen = [None if s is None else _grown(s, capacity, 0) for s in self._seen]


def _grown(array: Array, capacity: int, fill: int | float) -> Array:
    grown = np.full(capacity, fill, array.dtype)
    grown[: len(array)] = array
    return grown


_MASKS_MAX = 8
"""Up to so many windows in a batch, one pass for each is cheaper than a sort."""


@dataclass(frozen=True, slots=True)
class MergedRows:
    """What the partial results of one window came to: a row per key, its columns and its accumulators."""

    keys: Sequence[pa.Array]
    table: FrozenTable


def merge_rows(
    key_types: Sequence[pa.DataType], accumulators: Sequence[Accumulator], parts: Sequence[MergedRows]
) -> MergedRows:
    """Return a row per key, merged from ``parts``, of which each has a key once."""
    if len(parts) == 1:
        return parts[0]
    index, table = make_key_index(key_types), AggTable(accumulators)
    if parts:
        slots = index.slots([pa.concat_arrays(columns) for columns in zip(*(part.keys for part in parts), strict=True)])
        tables = [part.table for part in parts]
        values = [
            Values(
                np.concatenate([one.values[i] for one in tables]),
                None if accumulator.kind is Kind.ADD else np.concatenate([one.seen[i] for one in tables]),
            )
            for i, accumulator in enumerate(accumulators)
        ]
        table.update(len(index), slots, np.concatenate([one.rows for one in tables]), values)
    return MergedRows(index.freeze()(), table.view(len(index)))


def merged_rows(rows: pa.RecordBatch, accumulators: Sequence[Accumulator]) -> MergedRows:
    """Return a batch of partial results of one window, which has a key once, as merged rows."""
    values = partial_values(rows, accumulators)
    columns = rows.columns[: rows.num_columns - len(accumulators) - 2]
    seen = tuple(
        None if a.kind is Kind.ADD else np.ones(rows.num_rows, np.bool_) if v.valid is None else v.valid
        for a, v in zip(accumulators, values, strict=True)
    )
    arrays = tuple(v.values for v in values if not isinstance(v.values, int))
    return MergedRows(columns, FrozenTable(partial_rows(rows, accumulators), arrays, seen))


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


def take_values(values: Sequence[Values], rows: Slots) -> list[Values]:
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
