"""A join whose results change: of streams with changes, and of unmatched rows that may find a partner at any time.

Counterpart: ``stream_joins``. A row of which no partner is there is kept among those that wait, and its result, with
nulls on the other side, is taken back when a partner comes. See docs/spec/joins.md.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.operators.base import Operator
from headgate.operators.changes import OP, Signs, counted, keep_elements, signs
from headgate.operators.joins.join_plan import LEFT_INPUT, Changing, Columns, Input, JoinSpec, with_op
from headgate.operators.joins.stream_joins import PAIRS_MAX, JoinOperator, Side, pair_slices, taken
from headgate.state.backend import ListColumns
from headgate.state.key_index import Slots
from headgate.state.values import Mask
from headgate.state.vectors import ranges


@dataclass(frozen=True)
class ChangingJoinSpec(JoinSpec):
    """Join the rows of two inputs; the results are changes."""

    def build(self) -> Operator:
        return ChangingJoinOperator(self)


@dataclass(frozen=True, slots=True)
class _Settled:
    """What arrived rows did to their side.

    Attributes:
        is_effective: of each arrived row, whether it did something: a row can only go if it is there.
        stays: whether it came and is still there after the others.
        gone: rows that were kept and are not any more: those that waited, and the others.
    """

    is_effective: Mask
    stays: Mask
    gone: tuple[pa.Array, pa.Array]


class ChangingJoinOperator(JoinOperator):
    """Emits inserts and deletes of results, which each change of a row makes."""

    def _last_ms(self, side: Side, batch: pa.RecordBatch) -> Slots:
        raise AssertionError("no row is late: there are no timers")

    def _fired(self, slots: Slots, until_ms: int) -> None:
        raise AssertionError("there are no timers")

    def _arrived(self, side: Side, other: Side, batch: pa.RecordBatch, slots: Slots) -> None:
        has_op = self._plan.op(side.name) is not None
        sign = signs(batch.column(OP)) if has_op else np.ones(len(slots), np.int64)
        elements = side.elements(batch)
        if self._input(side) == "upserts":
            slots, sign, elements = self._with_old_rows(side, slots, sign, elements)
            if len(slots) == 0:
                return
        distinct, places = np.unique(slots, return_inverse=True)
        # before this side changes: rows of one key share their partners, and move with the first and the last of these
        had_rows = _counts(side, distinct) > 0
        has_partner = (_counts(other, distinct) > 0)[places]
        settled = self._settle(side, slots, sign, elements)
        columns = dict(zip(side.kept, elements.flatten(), strict=True))
        for waits in (False, True):
            chosen = np.flatnonzero(settled.stays & (has_partner != waits))
            lists = side.waiting if waits and side.waiting is not None else side.rows
            assert lists is not None
            lists.append(slots[chosen], elements.take(pa.array(chosen)))
        has_rows = _counts(side, distinct) > 0
        waiting, matched = settled.gone
        # what is taken back comes before what comes
        self._show(side, side.columns(waiting), len(waiting), is_matched=False, is_insert=False)
        self._show(side, side.columns(matched), len(matched), is_matched=True, is_insert=False)
        self._move(other, distinct[has_rows], is_matched=True)
        self._emit_pairs(side, columns, slots, np.where(settled.is_effective, sign, 0), other)
        for is_matched in (True, False):
            chosen = np.flatnonzero(settled.stays & (has_partner == is_matched))
            self._show(side, taken(columns, chosen), len(chosen), is_matched=is_matched, is_insert=True)
        self._move(other, distinct[had_rows & ~has_rows], is_matched=False)

    def _input(self, side: Side) -> Input:
        bound = self._plan.bound
        assert isinstance(bound, Changing)
        return bound.left if side is self._left else bound.right

    def _with_old_rows(
        self, side: Side, slots: Slots, sign: Signs, elements: pa.StructArray
    ) -> tuple[Slots, Signs, pa.StructArray]:
        """Return upserts as changes of rows: of each key the row that is there goes, and the last one comes."""
        distinct, places = np.unique(slots[::-1], return_index=True)
        last = len(slots) - 1 - places
        last = last[sign[last] > 0]
        found = [lists.explode(distinct) for lists in side.lists]
        old = np.concatenate([distinct[owners] for owners, _ in found])
        values = pa.concat_arrays([*(rows for _, rows in found), elements.take(pa.array(last))])
        steps = np.concatenate([np.full(len(old), -1, np.int64), np.ones(len(last), np.int64)])
        return np.concatenate([old, slots[last]]), steps, values

    def _settle(self, side: Side, slots: Slots, sign: Signs, elements: pa.StructArray) -> _Settled:
        """Take the rows that go out of the lists of ``side``."""
        empty = elements.slice(0, 0)
        everything = np.ones(len(slots), np.bool_)
        if (sign > 0).all():
            return _Settled(everything, everything, (empty, empty))
        affected = np.unique(slots[sign < 0])
        lists = [side.rows, *([] if side.waiting is None else [side.waiting])]
        stored = [(found, *found.explode(affected)) for found in lists if found is not None]
        arrived = np.flatnonzero(np.isin(slots, affected))
        owners = np.concatenate([*(affected[rows] for _, rows, _ in stored), slots[arrived]])
        values = pa.concat_arrays([*(found for _, _, found in stored), elements.take(pa.array(arrived))])
        steps = np.concatenate([np.ones(len(owners) - len(arrived), np.int64), sign[arrived]])
        is_effective, stays = counted(owners, values.flatten(), steps)
        gone, start = [], 0
        for found, rows, kept in stored:
            stay = stays[start : start + len(kept)]
            keep_elements(found, stay, affected[rows], kept)
            gone.append(kept.filter(pa.array(~stay)))
            start += len(kept)
        effective, staying = everything.copy(), everything.copy()
        effective[arrived], staying[arrived] = is_effective[start:], stays[start:]
        return _Settled(effective, staying, (gone[1] if len(gone) > 1 else empty, gone[0]))

    def _move(self, side: Side, slots: Slots, *, is_matched: bool) -> None:
        """Rows of these keys have got a first partner, or lost the last one."""
        if side.waiting is None or len(slots) == 0:
            return
        assert side.rows is not None
        source, target = (side.waiting, side.rows) if is_matched else (side.rows, side.waiting)
        slots = slots[source.counts(slots) > 0]
        if len(slots) == 0:
            return
        owners, elements = source.explode(slots)
        source.clear(slots)
        target.append(slots[owners], elements)
        columns = side.columns(elements)
        self._show(side, columns, len(elements), is_matched=not is_matched, is_insert=False)
        self._show(side, columns, len(elements), is_matched=is_matched, is_insert=True)

    def _show(self, side: Side, columns: Columns, count: int, *, is_matched: bool, is_insert: bool) -> None:
        """Emit what rows with partners, or without, are in the results by themselves."""
        is_semi = self._plan.how == "semi" and side.name == LEFT_INPUT
        if count and (is_semi if is_matched else side.emits_unmatched):
            left, right = (columns, None) if side.name == LEFT_INPUT else (None, columns)
            self._emit_changes(left, right, np.full(count, 1 if is_insert else -1, np.int64))

    def _emit_pairs(self, side: Side, columns: Columns, slots: Slots, sign: Signs, other: Side) -> None:
        """Emit the pairs of arrived rows with rows of the other side, as changes of the sign of the arrived row."""
        assert other.rows is not None
        if not self._plan.has_right_columns:
            return
        for rows, found, stored in _pairs(other.rows, slots, np.flatnonzero(sign)):
            wanted = {name: columns[name] for name in side.kept}
            pairs = taken(wanted, rows), taken(other.columns(stored), found)
            left, right = pairs if side is self._left else pairs[::-1]
            self._emit_changes(left, right, sign[rows])

    def _emit_changes(self, left: Columns | None, right: Columns | None, sign: Signs) -> None:
        changes = with_op(self._plan, self._plan.results(left, right, len(sign)), sign)
        for start in range(0, len(sign), PAIRS_MAX):
            self.output.emit(changes.slice(start, PAIRS_MAX))


def _counts(side: Side, slots: Slots) -> Slots:
    """Return how many rows each key has."""
    found = np.zeros(len(slots), np.int64)
    for lists in side.lists:
        found += lists.counts(slots)
    return found


def _pairs(lists: ListColumns, slots: Slots, wanted: Slots) -> Iterator[tuple[Slots, Slots, pa.StructArray]]:
    """Yield pairs: rows of ``slots``, and places in the elements of their lists."""
    asking = wanted[lists.counts(slots[wanted]) > 0]
    if len(asking) == 0:
        return
    distinct, inverse = np.unique(slots[asking], return_inverse=True)
    owners, elements = lists.explode(distinct)
    counts = np.bincount(owners, minlength=len(distinct))
    starts, counts = (np.cumsum(counts) - counts)[inverse], counts[inverse]
    for part in pair_slices(counts):
        rows, found = ranges(starts[part], counts[part])
        yield asking[part][rows], found, elements
