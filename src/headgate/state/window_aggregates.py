"""Accumulators of windows: a columnar table by slot, partial results as batches, and rows split by window.

Partial results combine with the same operation as single values (``ADD`` of sums, ``MAX`` of maxima), so that the
same table serves before and after the shuffle, and restores from its own snapshot. A row of partial results has the
key, the number of its window, how many records it stands for, and the value of each accumulator, null where no record
counted.

Some accumulators combine together. A mean and the squares around it (Chan, Golub and LeVeque 1979) go with a count,
and a picked value goes with the rank that decided: those rows must come in the order of arrival.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.state.key_hash import Words, column_words
from headgate.state.key_index import Slots, frozen_keys, make_key_index

Array: TypeAlias = npt.NDArray[Any]

_SLOTS_MIN = 256


class Kind(Enum):
    """How values combine."""

    ADD = "add"
    MIN = "min"
    MAX = "max"
    MEAN = "mean"
    SQUARES = "squares"
    """The sum of the squared distances from a mean."""

    RANK = "rank"
    PICK = "pick"
    """The value of the record with the highest rank."""


TEXT = "large_string"
"""The type of picked texts."""


@dataclass(frozen=True, slots=True)
class Accumulator:
    """One accumulator.

    Attributes:
        kind: how its values combine.
        dtype: the type it computes in: ``int64``, ``uint64``, ``float64``, or ``TEXT`` of a pick.
        of: the place of the accumulator that it goes with: the count of a mean, the mean of squares, the rank of a
            pick. A pick without one is of the first or the last record.
        is_last: of a rank, and of a pick without one: of equal records the last one is picked, not the first.
        nulls_win: of a rank: null is the highest, not the lowest.
    """

    kind: Kind
    dtype: str
    of: int = -1
    is_last: bool = False
    nulls_win: bool = False

    @property
    def can_be_null(self) -> bool:
        """Whether it has no value where no record counted; others have 0."""
        return self.kind not in (Kind.ADD, Kind.MEAN, Kind.SQUARES)

    @property
    def is_ordered(self) -> bool:
        """Whether its result may depend on the order of records."""
        return self.kind in (Kind.RANK, Kind.PICK)

    @property
    def type(self) -> pa.DataType:
        """The type of a column of its values."""
        return pa.large_string() if self.dtype == TEXT else pa.type_for_alias(self.dtype)

    @property
    def start(self) -> int | float | None:
        """The value of a slot that saw nothing. A floating minimum starts at NaN, which fmin ignores."""
        if self.dtype == TEXT:
            return None
        if self.kind not in (Kind.MIN, Kind.MAX):
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
    """A table as it was: ``rows`` and, per accumulator, values and (if it can be null) which slots saw one."""

    rows: Array
    values: Sequence[Array]
    seen: Sequence[Array | None]


def started(accumulator: Accumulator, count: int) -> Array:
    """Return the values of slots that saw nothing."""
    return np.full(count, accumulator.start, object if accumulator.dtype == TEXT else accumulator.dtype)


def accumulate(
    accumulators: Sequence[Accumulator], table: FrozenTable, slots: Slots, rows: Array | int, inputs: Sequence[Values]
) -> None:
    """Combine one value per row into its slot of ``table``, whose arrays change; ``rows`` counts records."""
    if len(slots) == 0:
        return
    for i, accumulator in enumerate(accumulators):
        if accumulator.kind is Kind.SQUARES:
            _add_moments(table, accumulator.of, accumulators[accumulator.of].of, i, slots, inputs)
        elif accumulator.kind is Kind.RANK or (accumulator.kind is Kind.PICK and accumulator.of < 0):
            picks = [j for j, one in enumerate(accumulators) if j == i or (one.of == i and one.kind is Kind.PICK)]
            _pick(accumulator, table, picks, slots, inputs)
    np.add.at(table.rows, slots, rows)
    for i, (accumulator, given) in enumerate(zip(accumulators, inputs, strict=True)):
        if accumulator.kind in (Kind.ADD, Kind.MIN, Kind.MAX):
            where, values = slots, given.values
            if given.valid is not None:
                where = slots[given.valid]
                values = values if isinstance(values, int) else values[given.valid]
            _combine(accumulator, table.values[i], table.seen[i], where, values)


def _combine(accumulator: Accumulator, target: Array, seen: Array | None, slots: Slots, values: Array | int) -> None:
    if accumulator.kind is Kind.ADD:
        add_values(target, slots, values)
        return
    assert seen is not None
    seen[slots] = True
    if accumulator.dtype == "float64":
        (np.fmin if accumulator.kind is Kind.MIN else np.fmax).at(target, slots, values)
    else:
        (np.minimum if accumulator.kind is Kind.MIN else np.maximum).at(target, slots, values)


def add_values(target: Array, slots: Slots, values: Array | int, signs: npt.NDArray[np.int64] | None = None) -> None:
    """Add each value to its slot of ``target``, or take it away where its sign is -1.

    Raises:
        UsageError: a sum of integers is larger than its type holds; numpy would wrap it.
    """
    if isinstance(values, int) or target.dtype.kind == "f" or len(values) == 0:
        np.add.at(target, slots, values if signs is None else values * signs)
        return
    limits, held = np.iinfo(target.dtype), target[slots]
    largest, most = (max(abs(int(one.max())), abs(int(one.min()))) for one in (values, held))
    if most + len(values) * largest <= limits.max and (signs is None or limits.min < 0):
        np.add.at(target, slots, values if signs is None else values * signs)
        return
    known, of = np.unique(slots, return_inverse=True)
    sums = target[known].astype(object)  # integers of Python have no largest one
    np.add.at(sums, of, values.astype(object) * (1 if signs is None else signs.astype(object)))
    if max(sums) > limits.max or min(sums) < limits.min:
        raise too_large(str(target.dtype))
    target[known] = sums.astype(target.dtype)


def too_large(dtype: str) -> UsageError:
    """Return the error about a sum that its type does not hold."""
    what = dtype.partition("(")[0]
    what = what if what in ("decimal", "duration") else "integer"
    wider = "Int64" if what == "integer" and not dtype.endswith("64") else "Float64"
    return UsageError(
        f"a sum of {what}s is larger than {dtype} holds; sum pl.col(...).cast(pl.{wider}) instead, and in a state of "
        "that type"
    )


def _add_moments(
    table: FrozenTable, mean: int, count: int, squares: int, slots: Slots, inputs: Sequence[Values]
) -> None:
    """Combine means and the squares around them, weighted by their counts, before the counts are added."""
    weights = np.broadcast_to(np.asarray(inputs[count].values, np.float64), slots.shape)
    is_there = weights > 0
    for given in (inputs[count], inputs[mean]):
        if given.valid is not None:
            is_there = is_there & given.valid
    known, of = np.unique(slots[is_there], return_inverse=True)
    if len(known) == 0:
        return
    weights = weights[is_there]
    means, spread = (np.asarray(inputs[i].values)[is_there] for i in (mean, squares))
    with np.errstate(invalid="ignore", over="ignore"):  # of infinite values the variance is NaN
        added = np.bincount(of, weights)
        added_mean = np.bincount(of, weights * means) / added
        around = np.bincount(of, spread + weights * (means - added_mean[of]) ** 2)
        before = table.values[count][known].astype(np.float64)
        total = before + added
        distance = np.where(before > 0, added_mean - table.values[mean][known], 0.0)
        table.values[mean][known] = np.where(
            before > 0, table.values[mean][known] + distance * (added / total), added_mean
        )
        table.values[squares][known] += around + distance**2 * (before * added / total)


def _pick(
    decides: Accumulator, table: FrozenTable, picks: Sequence[int], slots: Slots, inputs: Sequence[Values]
) -> None:
    """Put the values of the highest, or the first or last, record of each slot into it, if it beats what is there."""
    size, order = len(table.rows), inputs[picks[0]]
    has_rank = decides.kind is Kind.RANK
    won = _winners(decides, size, slots, order if has_rank else None)
    at = slots[won]
    is_new = table.rows[at] == 0
    if has_rank:
        old_seen = table.seen[picks[0]]
        assert old_seen is not None
        ranks = _ranks(order)[won]
        is_high = (order.valid[won] if order.valid is not None else np.ones(len(won), np.bool_)) != decides.nulls_win
        was_high = old_seen[at] != decides.nulls_win
        old = table.values[picks[0]][at]
        beats = (ranks >= old) if decides.is_last else (ranks > old)
        is_new |= (is_high & ~was_high) | ((is_high == was_high) & beats)
    elif decides.is_last:
        is_new[:] = True
    won, at = won[is_new], at[is_new]
    for i in picks:
        given, seen = inputs[i], table.seen[i]
        assert seen is not None
        values = _ranks(given) if has_rank and i == picks[0] else np.asarray(given.values)
        table.values[i][at] = values[won]
        seen[at] = True if given.valid is None else given.valid[won]


def _ranks(given: Values) -> Array:
    """Return ranks, 0 where there is none."""
    values = np.asarray(given.values)
    return values if given.valid is None else np.where(given.valid, values, 0)


def _winners(decides: Accumulator, size: int, slots: Slots, order: Values | None) -> Slots:
    """Return the row of each slot that has the highest rank, and of those that are equal the first or the last."""
    rows = np.arange(len(slots))
    if order is not None:
        if order.valid is not None:
            is_high = order.valid != decides.nulls_win
            has_high = np.empty(size, np.bool_)
            has_high[slots] = False
            has_high[slots[is_high]] = True
            rows = np.flatnonzero(is_high == has_high[slots])
        ranks, best = _ranks(order)[rows], np.empty(size, np.int64)
        best[slots[rows]] = np.iinfo(np.int64).min
        np.maximum.at(best, slots[rows], ranks)
        rows = rows[ranks == best[slots[rows]]]
    if not decides.is_last:
        rows = rows[::-1]
    last = np.empty(size, np.int64)
    last[slots[rows]] = rows
    won: Slots = rows[last[slots[rows]] == rows]
    return won


class AggTable:
    """Accumulators of ``rows`` (a count of records) and of each of ``accumulators``, by slot."""

    def __init__(self, accumulators: Sequence[Accumulator]) -> None:
        self._accumulators = tuple(accumulators)
        self._rows: Array = np.zeros(_SLOTS_MIN, np.int64)
        self._values: list[Array] = [started(a, _SLOTS_MIN) for a in self._accumulators]
        self._seen: list[Array | None] = [
            np.zeros(_SLOTS_MIN, np.bool_) if a.can_be_null else None for a in self._accumulators
        ]
        self._is_frozen = False

    def update(self, size: int, slots: Slots, rows: Array | int, inputs: Sequence[Values]) -> None:
        """Combine one value per row into its slot. ``size`` exceeds every slot; ``rows`` counts records."""
        self._prepare(size)
        accumulate(self._accumulators, FrozenTable(self._rows, self._values, self._seen), slots, rows, inputs)

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


def _grown(array: Array, capacity: int, fill: int | float | None) -> Array:
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
    """Return a row per key, merged from ``parts``, older ones first, of which each has a key once."""
    if len(parts) == 1:
        return parts[0]
    index, table = make_key_index(key_types), AggTable(accumulators)
    if parts:
        slots = index.slots([pa.concat_arrays(columns) for columns in zip(*(part.keys for part in parts), strict=True)])
        tables = [part.table for part in parts]
        values = [
            Values(
                np.concatenate([one.values[i] for one in tables]),
                np.concatenate([one.seen[i] for one in tables]) if accumulator.can_be_null else None,
            )
            for i, accumulator in enumerate(accumulators)
        ]
        table.update(len(index), slots, np.concatenate([one.rows for one in tables]), values)
    return MergedRows(frozen_keys(index).columns(), table.view(len(index)))


def merged_rows(rows: pa.RecordBatch, accumulators: Sequence[Accumulator]) -> MergedRows:
    """Return a batch of partial results of one window, which has a key once, as merged rows."""
    values = partial_values(rows, accumulators)
    columns = rows.columns[: rows.num_columns - len(accumulators) - 2]
    seen = tuple(
        (np.ones(rows.num_rows, np.bool_) if v.valid is None else v.valid) if a.can_be_null else None
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
        arrays.append(accumulated_column(values, seen))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def accumulated_column(values: Array, seen: Array | None) -> pa.Array:
    """Return values of an accumulator as a column, null where none was seen."""
    dtype = pa.large_string() if values.dtype == object else None
    return pa.array(values, dtype, mask=None if seen is None or seen.all() else ~seen)


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
    if dtype == TEXT:
        return column.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]
    if dtype == "float64":
        return column.to_numpy(zero_copy_only=False).astype(np.float64, copy=False)  # type: ignore[no-any-return]
    return column_words(column).view(dtype)
