"""Streams with changes: the column ``op``, the operator that takes foreign changes in, and the base of those that emit.

Operators that keep rows of each key, such as ``deduplication``, ``top_rows`` and joins, are ``ChangeOperator``.
Counterpart: ``api.streams.changes`` says which verbs keep a stream one with changes (docs/spec/changes.md).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.operators.base import Operator
from headgate.operators.keys import KeyCheckOperator, check_keys
from headgate.operators.process.timers import TimedOperator
from headgate.operators.schemas import describe, require_columns
from headgate.operators.user_functions import bad_records, described_rows, shortened
from headgate.state.backend import ListColumns, TimeKind
from headgate.state.key_index import Slots
from headgate.state.values import Mask
from headgate.state.vectors import SlotArray

OP = "op"
"""The column that says what a record does to the table that a stream with changes describes."""

INSERT, UPDATE_BEFORE, UPDATE_AFTER, DELETE = "insert", "update_before", "update_after", "delete"

OPS = (INSERT, UPDATE_BEFORE, UPDATE_AFTER, DELETE)

OP_FIELD = pa.field(OP, pa.large_string())

Codes = npt.NDArray[np.int8]
"""Of each record the place of its ``op`` in ``OPS``."""


@functools.cache
def _names() -> pa.Array:
    """Return ``OPS`` as a column. Arrow imports pandas to make an array of a list, so not before it is needed."""
    return pa.array(OPS, pa.large_string())


def op_column(codes: Codes) -> pa.Array:
    """Return the column ``op``."""
    return _names().take(pa.array(codes))


def op_codes(column: pa.Array) -> Codes:
    """Return the codes of a column ``op``; -1 where it is none of ``OPS``."""
    found: Codes = pc.index_in(column, _names()).fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int8)
    return found


Signs = npt.NDArray[np.int64]
"""1 for each row that comes, -1 for each that goes."""


def signs(column: pa.Array) -> Signs:
    """Return 1 for each row that comes, -1 for each that goes."""
    codes = op_codes(column)
    assert codes.min(initial=0) >= 0, f"op is none of {', '.join(OPS)}"
    return np.array([1, -1, 1, -1], np.int64)[codes]


@dataclass(frozen=True)
class ChangeCheckSpec:
    """Divert records without a valid ``op`` or whole keys, and drop ``update_before`` unless ``retractions``."""

    keys: tuple[str, ...]
    retractions: bool

    def build(self) -> Operator:
        return ChangeCheckOperator(self)

    def output_schema(self, schema: pa.Schema, node: str) -> pa.Schema:
        """Return ``schema``.

        Raises:
            UsageError: no column ``op`` of texts, or a wrong key.
        """
        require_columns(node, schema, [OP])
        if schema.field(OP).type != OP_FIELD.type:
            raise UsageError(
                f"operator '{node}': column 'op' must be text, one of {', '.join(OPS)}; the columns are "
                f"{describe(schema)}"
            )
        if self.keys:
            check_keys(node, schema, self.keys)
        if OP in self.keys:
            raise UsageError(f"operator '{node}': column 'op' says what changes, and cannot be a key")
        return schema


class ChangeCheckOperator(KeyCheckOperator):
    """Passes on changes with a valid ``op`` and whole keys."""

    takes_lazy_rows = False

    def __init__(self, spec: ChangeCheckSpec) -> None:
        super().__init__(spec.keys)
        self._retractions = spec.retractions

    def process(self, batch: pa.RecordBatch) -> None:
        codes = op_codes(batch.column(OP))
        if (codes < 0).any():
            bad = batch.filter(pa.array(codes < 0))
            rows = described_rows(bad)
            problems = [f"its op is {row[OP]!r}, none of {', '.join(OPS)}" for row in rows]
            positions = [str(self.context.origin)] * len(rows)
            self.output.divert(bad_records(self.context.node, problems, positions, [shortened(row) for row in rows]))
        kept = codes >= 0
        if not self._retractions:
            kept &= codes != OPS.index(UPDATE_BEFORE)
        if not kept.all():
            batch = batch.filter(pa.array(kept))
        if batch.num_rows:
            super().process(batch)


_EMIT_ROWS = 65_536
"""Larger results are sent on in parts of so many rows."""


class DistinctSlots:
    """Finds the distinct slots of batches."""

    def __init__(self) -> None:
        self._scratch = SlotArray(np.int64)

    def of(self, slots: Slots) -> tuple[Slots, Slots]:
        """Return the distinct ones in the order of their last rows, and the place of each row's slot among these."""
        distinct = slots[self.last_rows(slots)]
        scratch = self._scratch.written(0)
        scratch[distinct] = np.arange(len(distinct))
        return distinct, scratch[slots]

    def last_rows(self, slots: Slots) -> Slots:
        """Return the last row of each slot, ascending."""
        scratch = self._scratch.written(int(slots.max()) + 1 if len(slots) else 0)
        rows = np.arange(len(slots))
        scratch[slots] = rows
        return np.flatnonzero(scratch[slots] == rows)


def change_rows(had: Mask, has: Mask, is_changed: Mask, *, retractions: bool) -> tuple[Slots, Codes]:
    """Return the rows of the changes of some keys, and what each is.

    Rows are those of ``before`` followed by those of ``after``, of which each key has one.

    Args:
        had: which keys had a row.
        has: which have one.
        is_changed: which of those that had one and have one have another.
        retractions: an update is two records.
    """
    count = len(had)
    gone, new = had & ~has, has & ~had
    updated = had & has & is_changed
    rows = np.concatenate([np.flatnonzero(gone), np.flatnonzero(new | updated) + count])
    codes = np.full(2 * count, OPS.index(UPDATE_AFTER), np.int8)
    codes[:count][gone] = OPS.index(DELETE)
    codes[count:][new] = OPS.index(INSERT)
    if retractions:
        rows = np.concatenate([rows, np.flatnonzero(updated)])
        codes[:count][updated] = OPS.index(UPDATE_BEFORE)
    rows = rows[np.lexsort((rows, rows % count))] if count else rows  # of each key the old row, then the new one
    return rows, codes[rows]


def counted(
    owners: Slots, identity: Sequence[pa.Array], steps: Signs, keep: Literal["first", "last", "one"] = "first"
) -> tuple[Mask, Mask]:
    """Return which steps take effect when rows of each owner are counted, and which of those that come stay.

    A step down from zero has no effect.

    Args:
        owners: the owner of each row.
        identity: the columns in which rows are equal.
        steps: 1 for a row that comes, -1 for one that goes.
        keep: of equal rows the first ones stay, or the last ones, or only the last one.
    """
    fields = [f"value {i}" for i in range(len(identity))]
    frame = pl.DataFrame({"owner": owners, "row": np.arange(len(owners))}).with_columns(
        *(pl.Series(name, column) for name, column in zip(fields, identity, strict=True))
    )
    rows = frame.group_by("owner", *fields).agg("row")["row"]
    order, lengths = rows.explode().to_numpy(), rows.list.len().to_numpy().astype(np.int64)
    is_effective, stays = np.ones((2, len(owners)), np.bool_)
    if len(owners) == 0:
        return is_effective, stays
    groups, starts = np.repeat(np.arange(len(lengths)), lengths), np.cumsum(lengths) - lengths
    step = steps[order]
    level = _sums(step, starts, lengths)
    apart = groups * (2 * len(owners) + 1)  # each group lies below the one before, so that one minimum does for all
    low = np.minimum(np.minimum.accumulate(level - apart) + apart, 0)
    before = np.roll(low, 1)
    before[starts] = 0
    effective = (step > 0) | (low == before)
    left = np.ones(len(lengths), np.int64)
    if keep != "one":
        left = np.add.reduceat(np.where(effective, step, 0), starts)
    comes = (step > 0).astype(np.int64)
    rank = _sums(comes, starts, lengths)
    if keep != "first":
        rank = np.repeat(rank[starts + lengths - 1], lengths) - rank + 1
    is_effective[order], stays[order] = effective, (step > 0) & (rank <= left[groups])
    return is_effective, stays


def _sums(numbers: Signs, starts: Slots, lengths: Slots) -> Slots:
    """Return the sums so far, which begin again at ``starts``."""
    found = np.cumsum(numbers)
    return found - np.repeat(found[starts] - numbers[starts], lengths)


def keep_elements(lists: ListColumns, stay: Mask, owners: Slots, elements: pa.Array) -> None:
    """Have the lists of ``owners``, of which these are all elements, without those that do not stay."""
    if stay.all():
        return
    changed = np.unique(owners[~stay])
    kept = stay & np.isin(owners, changed)
    lists.clear(changed)
    lists.append(owners[kept], elements.filter(pa.array(kept)))


class ChangeOperator(TimedOperator):
    """Keeps something for each key and emits changes. Its state may have a TTL; it has no timers."""

    def _fire_some(self, kind: TimeKind, until_ms: int) -> int:
        return 0

    def _end_firing(self) -> None:
        pass

    def _emit(self, schema: pa.Schema, columns: Sequence[pa.Array], codes: Codes) -> None:
        """Send changes, with ``op`` as last column of ``schema``."""
        batch = pa.RecordBatch.from_arrays([*columns, op_column(codes)], schema=schema)
        for start in range(0, batch.num_rows, _EMIT_ROWS):
            self.output.emit(batch.slice(start, _EMIT_ROWS))
