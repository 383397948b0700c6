"""Aggregates of the records that a window keeps: Polars computes them when it fires.

Polars wraps a sum that its type does not hold. So of each sum of integers, decimals and durations the sum of floating
numbers is computed beside it: a sum that wrapped is far from that, by at least half of what its type can tell apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import polars as pl
import polars.selectors as cs
import pyarrow as pa

from headgate.operators.aggregates import argument
from headgate.operators.schemas import empty_frame
from headgate.operators.user_functions import batch_error
from headgate.state.window_aggregates import too_large

_SUM, _NEAR = "__headgate_sum_", "__headgate_near_"

_DIGITS = 38
"""Of a sum of decimals."""

_REACHES: Mapping[object, float] = {
    pl.Int32: 2.0**31,
    pl.UInt32: 2.0**31,
    pl.Int64: 2.0**63,
    pl.UInt64: 2.0**63,
    pl.Int128: 2.0**127,
}
"""Half of how many values each type of a sum has."""


class RecordAggregates:
    """Computes ``aggregates`` of records of ``schema`` with the key columns ``keys``."""

    def __init__(self, aggregates: Sequence[pl.Expr], schema: pa.Schema, keys: Sequence[str]) -> None:
        self._aggregates = aggregates
        self._keys = [key for key in keys if any(one.meta.has_multiple_outputs() for one in aggregates)]
        """Grouped by, because no pattern such as ``pl.all()`` means what is grouped by."""
        self._checks = _checks(aggregates, empty_frame(schema), keys)

    def of(self, frame: pl.DataFrame, group: Sequence[str], node: str) -> pl.DataFrame:
        """Return the columns ``group``, ascending, and the aggregates of each group of records of one key.

        ``node`` is for messages.

        Raises:
            UsageError: a sum is larger than its type holds.
            UserFunctionError: Polars cannot compute an aggregate.
        """
        try:
            by = list(dict.fromkeys([*group, *self._keys]))
            found = frame.group_by(by).agg(*self._aggregates, *self._checks).sort(group)
        except pl.exceptions.PolarsError as error:
            raise batch_error(node, frame.height, error) from None
        for name in [name for name in found.columns if name.startswith(_SUM)]:
            _refuse_wrapped(found[name], found[_NEAR + name.removeprefix(_SUM)])
        return found.drop(cs.starts_with(_SUM, _NEAR)) if self._checks else found


def _checks(aggregates: Sequence[pl.Expr], frame: pl.DataFrame, keys: Sequence[str]) -> list[pl.Expr]:
    """Return the sums that may wrap, and beside each the one of floating numbers."""
    sums: list[pl.Expr] = []
    for one in aggregates:
        sums += [found for found in _sums_in(one) if not any(found.meta.eq(known) for known in sums)]
    checks = []
    for i, found in enumerate(sums):
        dtypes = frame.group_by(keys).agg(found.name.prefix(_SUM)).dtypes[len(keys) :]
        if any(_reach(dtype) for dtype in dtypes):
            near = found.meta.pop()[0].cast(pl.Float64).sum()
            checks += [found.name.prefix(f"{_SUM}{i}_"), near.name.prefix(f"{_NEAR}{i}_")]
    return checks


def _sums_in(expression: pl.Expr) -> Iterator[pl.Expr]:
    """Yield the sums of columns in an expression."""
    inner = argument(expression, "sum")
    if inner is not None and (inner.meta.root_names() or inner.meta.has_multiple_outputs()):
        yield expression.meta.undo_aliases()
    for part in expression.meta.pop():
        yield from _sums_in(part)


def _reach(dtype: pl.DataType) -> float:
    """Return from where on a sum cannot be of a type, or can by no more than half its range; 0: it does not wrap."""
    if isinstance(dtype, pl.Decimal):
        return float(10 ** (_DIGITS - dtype.scale))
    return _REACHES.get(pl.Int64() if dtype == pl.Duration else dtype, 0.0)


def _refuse_wrapped(sums: pl.Series, near: pl.Series) -> None:
    """Raise UsageError where a sum is not what it is near to."""
    reach, dtype = _reach(sums.dtype), sums.dtype
    if not reach:
        return
    is_wrong = (near - sums.cast(pl.Float64)).abs() >= reach
    if isinstance(dtype, pl.Decimal):
        is_wrong |= near.abs() >= reach
    if is_wrong.any():
        raise too_large(f"decimal({_DIGITS}, {dtype.scale})" if isinstance(dtype, pl.Decimal) else str(dtype).lower())
