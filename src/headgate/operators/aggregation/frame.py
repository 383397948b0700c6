"""Frames: which rows before each row an OVER aggregate is of, and accumulators of many overlapping frames at a time.

The parts of a frame are the rows, pairs of rows, the combinations of four rows, and so on, each from its first row on.
A frame is one part of each power of two in its length, from left to right. So nothing is taken away again: a result
depends on the rows of its frame alone, and a NaN or a large number is forgotten with its row.

What is combined, and how, is that of windows (``state.window_aggregates``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headgate.state.key_index import Slots
from headgate.state.values import Mask
from headgate.state.window_aggregates import Accumulator, Array, FrozenTable, Kind, Values, started, too_large


@dataclass(frozen=True, slots=True)
class Frame:
    """From some rows of the same key up to the current row.

    Attributes:
        is_range: rows are chosen by their times, and all rows of one time have one frame (``RANGE``). Otherwise they
            are counted (``ROWS``).
        preceding: how far the frame reaches back: milliseconds of ``RANGE``, rows of ``ROWS``; None: to the first row.
    """

    is_range: bool
    preceding: int | None

    @property
    def text(self) -> str:
        """Return the frame in words, for the identity of state."""
        if self.preceding is None:
            return f"{'range' if self.is_range else 'rows'} unbounded"
        return f"range {self.preceding} ms" if self.is_range else f"rows {self.preceding}"

    def rows(
        self, owners: Slots, times: Slots, units_per_ms: int, old_count: int = 0
    ) -> tuple[Slots, Slots, Slots, Slots]:
        """Return rows in order, the places of those that are asked about, and where in this order their frames are.

        The last two are the first row of each frame, and the one after its last row.

        Args:
            owners: the key of each row.
            times: of the rows. ``ROWS`` does not look at them: the rows of a key are in order.
            units_per_ms: in which unit they are.
            old_count: the first rows, so many, are not asked about.
        """
        if self.is_range:
            codes, wanted = _codes(owners, times, (self.preceding or 0) * units_per_ms)
        else:
            codes = wanted = owners
        order = np.argsort(codes, kind="stable")
        asked = np.flatnonzero(order >= old_count)
        rows = order[asked]
        ends = np.searchsorted(codes[order], codes[rows], side="right") if self.is_range else asked + 1
        if self.is_range and self.preceding is not None:
            return order, asked, np.searchsorted(codes[order], wanted[rows]), ends
        starts = np.searchsorted(owners[order], owners[rows])
        return order, asked, starts if self.preceding is None else np.maximum(asked - self.preceding, starts), ends


_INT_MAX = (1 << 63) - 1


def _codes(owners: Slots, times: Slots, reach: int) -> tuple[Slots, Slots]:
    """Return a number for each row that is ordered as its key and time, and that of its key ``reach`` earlier."""
    if len(times) == 0:
        return owners, owners
    low = int(times.min())
    span = int(times.max()) - low + reach + 1
    if (int(owners.max()) + 1) * span <= _INT_MAX:
        codes = owners * span + (times - low)
        return codes, codes - reach
    _, ranks = np.unique(np.concatenate([times, times - reach]), return_inverse=True)
    codes = np.concatenate([owners, owners]) * len(ranks) + ranks
    return codes[: len(times)], codes[len(times) :]


def single_rows(accumulators: Sequence[Accumulator], inputs: Sequence[Values], rows: Array) -> FrozenTable:
    """Return a table with a slot for each value; ``rows``: of how many records it is."""
    values: list[Array] = []
    seen: list[Array | None] = []
    for accumulator, given in zip(accumulators, inputs, strict=True):
        found = np.broadcast_to(np.asarray(given.values), rows.shape)
        start = accumulator.start if accumulator.kind in (Kind.MIN, Kind.MAX, Kind.PICK) else 0
        values.append(found if given.valid is None else np.where(given.valid, found, np.array(start, found.dtype)))
        if not accumulator.can_be_null:
            seen.append(None)
        else:
            seen.append(np.ones(len(rows), np.bool_) if given.valid is None else given.valid)
    return FrozenTable(rows, values, seen)


def taken(table: FrozenTable, slots: Slots | slice) -> FrozenTable:
    """Return some slots of a table."""
    seen = [None if one is None else one[slots] for one in table.seen]
    return FrozenTable(table.rows[slots], [values[slots] for values in table.values], seen)


def joined(tables: Sequence[FrozenTable]) -> FrozenTable:
    """Return the slots of several tables, one after the other."""
    places = range(len(tables[0].values))
    values = [np.concatenate([table.values[i] for table in tables]) for i in places]
    seen = [_concatenated([table.seen[i] for table in tables]) for i in places]
    return FrozenTable(np.concatenate([table.rows for table in tables]), values, seen)


def _concatenated(parts: Sequence[Array | None]) -> Array | None:
    there = [part for part in parts if part is not None]
    return np.concatenate(there) if there else None


def frame_totals(accumulators: Sequence[Accumulator], table: FrozenTable, starts: Slots, ends: Slots) -> FrozenTable:
    """Return the combination of the slots ``starts`` to ``ends``, excluded, for each of these ranges.

    Raises:
        UsageError: a sum of integers is larger than its type holds.
    """
    found = _combined_ranges(accumulators, table, starts, ends)
    for i, accumulator in enumerate(accumulators):
        if accumulator.kind is Kind.ADD and accumulator.dtype != "float64" and len(table.rows):
            _refuse_wrapped(accumulator, table.values[i], found.values[i], starts, ends)
    return found


def _combined_ranges(
    accumulators: Sequence[Accumulator], table: FrozenTable, starts: Slots, ends: Slots
) -> FrozenTable:
    count, lengths, at = len(starts), ends - starts, starts.copy()
    values = [started(accumulator, count) for accumulator in accumulators]
    seen = [np.zeros(count, np.bool_) if one.can_be_null else None for one in accumulators]
    found, step, longest = FrozenTable(np.zeros(count, np.int64), values, seen), 1, int(lengths.max(initial=0))
    while step <= longest:
        chosen = np.flatnonzero(lengths & step)
        if len(chosen):
            _put(found, chosen, combined(accumulators, taken(found, chosen), taken(table, at[chosen])))
            at[chosen] += step
        if 2 * step <= longest:
            size = len(table.rows) - step
            table = combined(accumulators, taken(table, slice(0, size)), taken(table, slice(step, size + step)))
        step *= 2
    return found


def _put(table: FrozenTable, slots: Slots, given: FrozenTable) -> None:
    table.rows[slots] = given.rows
    for target, values in zip((*table.values, *table.seen), (*given.values, *given.seen), strict=True):
        if target is not None:
            target[slots] = values


def _refuse_wrapped(accumulator: Accumulator, values: Array, sums: Array, starts: Slots, ends: Slots) -> None:
    """Raise UsageError where a sum of integers was wrapped: the sum of floating numbers is far from it."""
    largest = max(abs(int(values.max())), abs(int(values.min())))
    if largest * int((ends - starts).max(initial=0)) <= np.iinfo(values.dtype).max:
        return
    table = FrozenTable(np.ones(len(values), np.int64), [values.astype(np.float64)], [None])
    near = _combined_ranges([Accumulator(Kind.ADD, "float64")], table, starts, ends).values[0]
    if (np.abs(near - sums.astype(np.float64)) >= 2.0**63).any():
        raise too_large(accumulator.dtype)


def combined(accumulators: Sequence[Accumulator], left: FrozenTable, right: FrozenTable) -> FrozenTable:
    """Return each slot of ``left`` combined with that of ``right``, of which the records came later."""
    values: list[Array] = []
    seen: list[Array | None] = []
    wins: dict[int, Mask] = {}
    won: Mask | None
    for i, accumulator in enumerate(accumulators):
        if accumulator.kind is Kind.RANK or (accumulator.kind is Kind.PICK and accumulator.of < 0):
            wins[i] = _right_wins(accumulator, i, left, right)
    with np.errstate(invalid="ignore", over="ignore"):  # of infinite values the variance is NaN
        for i, accumulator in enumerate(accumulators):
            if i in wins or accumulator.kind is Kind.PICK:
                won = wins[i] if i in wins else wins[accumulator.of]
                values.append(np.where(won, right.values[i], left.values[i]))
            else:
                won = None
                values.append(_combined_values(accumulators, i, left, right))
            before, after = left.seen[i], right.seen[i]
            if before is None or after is None:
                seen.append(None)
            else:
                seen.append(before | after if won is None else np.where(won, after, before))
    return FrozenTable(left.rows + right.rows, values, seen)


def _combined_values(accumulators: Sequence[Accumulator], i: int, left: FrozenTable, right: FrozenTable) -> Array:
    before, after, accumulator = left.values[i], right.values[i], accumulators[i]
    found: Array
    match accumulator.kind:
        case Kind.MIN:
            found = np.fmin(before, after)
        case Kind.MAX:
            found = np.fmax(before, after)
        case Kind.MEAN | Kind.SQUARES:
            mean = i if accumulator.kind is Kind.MEAN else accumulator.of
            counts = accumulators[mean].of
            old, new = (table.values[counts].astype(np.float64) for table in (left, right))
            total = np.maximum(old + new, 1)
            apart = np.where((old > 0) & (new > 0), right.values[mean] - left.values[mean], 0.0)
            if accumulator.kind is Kind.SQUARES:
                found = before + after + apart**2 * (old * new / total)
            else:
                found = np.where(old > 0, before + apart * (new / total), after)
        case _:
            found = before + after
    return found


def _right_wins(decides: Accumulator, i: int, left: FrozenTable, right: FrozenTable) -> Mask:
    """Return where the record that is picked is one of ``right``."""
    is_new: Mask = left.rows == 0
    if decides.kind is Kind.PICK:
        return np.ones(len(is_new), np.bool_) if decides.is_last else is_new
    old, new, old_seen, new_seen = left.values[i], right.values[i], left.seen[i], right.seen[i]
    assert old_seen is not None
    assert new_seen is not None
    was_high, is_high = old_seen != decides.nulls_win, new_seen != decides.nulls_win
    beats = (new >= old) if decides.is_last else (new > old)
    found: Mask = is_new | (is_high & ~was_high) | ((is_high == was_high) & beats)
    return found
