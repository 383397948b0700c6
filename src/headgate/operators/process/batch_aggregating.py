"""Aggregating state by batch: an accumulator per key, merged column by column (ST20).

To a backend and a checkpoint it is a value per key, as by row (ST19). Counterparts: ``combining``, the same by row;
``batch_reducing``, whose handle declares it; ``batch_states``, which holds the values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import polars as pl
import pyarrow as pa

from headgate.errors import UsageError
from headgate.operators.expressions import not_elementwise
from headgate.operators.process.batch_states import BatchValueState, Keys
from headgate.operators.schemas import empty_frame

Accumulator: TypeAlias = Any
"""Expressions by field where the state's type is a struct; one expression otherwise."""

_SLOT, _ROW, _VALUE, _HAS = "slot", "row", "value", "has"
_SO_FAR, _MORE = "a", "b"
"""Columns of accumulators: followed by the number of the field."""


class BatchAggregateFunction:
    """Base class of functions that combine values into one result through an accumulator, for many keys at once.

    The methods take and return Polars expressions; Headgate calls them when the state is declared. If the type of the
    state is a struct, an accumulator is a dict of expressions by field, else a single expression. The function itself
    has no state.
    """

    def partial(self, value: pl.Expr) -> Accumulator:
        """Return the accumulator of some values of one key, none of them null: aggregates such as ``value.sum()``.

        The values of a key may be divided differently in each run, so the result after ``merge`` must not depend on it.
        """
        raise NotImplementedError

    def merge(self, so_far: Accumulator, more: Accumulator) -> Accumulator:
        """Return the accumulator of the values of both arguments; the values of ``more`` came later."""
        raise NotImplementedError

    def result(self, accumulator: Accumulator) -> pl.Expr:
        """Return the result so far."""
        raise NotImplementedError


class BatchAggregatingState:
    """An accumulator per key. Reading it returns the result of its ``BatchAggregateFunction``."""

    def __init__(
        self, where: str, value: BatchValueState, dtype: pa.DataType, function: BatchAggregateFunction
    ) -> None:
        """For Headgate only; declare states with ``BatchStateHandle``. ``where``: names it in messages.

        Raises:
            UsageError: what the function returns is no accumulator, or not one row's alone.
        """
        self._value = value
        self._where = where
        self._shape = _Shape(where, dtype)
        shape = self._shape
        self._partial = shape.named("partial", function.partial(pl.col(_VALUE)), _MORE)
        merged = function.merge(shape.accumulator(_SO_FAR), shape.accumulator(_MORE))
        self._merge = [
            pl.when(pl.col(_HAS)).then(both).otherwise(pl.col(f"{_MORE}{at}")).cast(shape.dtypes[at]).alias(str(at))
            for at, both in enumerate(shape.expressions("merge", merged))
        ]
        found = function.result(shape.accumulator(_SO_FAR))
        if not isinstance(found, pl.Expr):
            raise UsageError(f"{where}: result must return an expression, not {type(found).__name__}")
        self._result = found
        shape.refuse_other_rows("merge", self._merge)
        shape.refuse_other_rows("result", [found])

    def add(self, values: Any, where: pl.Series | None = None, *, keys: Keys | None = None) -> pl.Series:
        """Add each row's value to the accumulator of its key. Rows with a null are skipped.

        Args:
            values: a Series with one value per row (a struct for a value with several parts), or one value for all
                rows.
            where: add only these rows.
            keys: the keys of other rows than those of the batch.

        Returns:
            A Boolean Series: True at the last row of each key whose accumulator has changed.
        """
        count, rows, slots, chosen = self._value.chosen(values, where, keys)
        changed = np.zeros(count, np.bool_)
        if len(rows):
            frame = pl.DataFrame({_SLOT: slots, _ROW: rows, _VALUE: chosen})
            more = frame.group_by(_SLOT, maintain_order=True).agg(pl.col(_ROW).last(), *self._partial)
            of_keys = more[_SLOT].to_numpy()
            so_far = self._value.at(of_keys)
            both = more.with_columns(so_far.is_not_null().alias(_HAS), *self._shape.columns(so_far, _SO_FAR))
            merged = self._shape.whole(both.select(self._merge))
            changed[more[_ROW].to_numpy()[self._value.replace_at(of_keys, merged)]] = True
        return pl.Series(changed)

    def get(self, *, keys: Keys | None = None) -> pl.Series:
        """Return the result for the key of each row; null if nothing was added to it."""
        so_far = self._value.get(keys=keys)
        there = pl.DataFrame([so_far.is_not_null().alias(_HAS), *self._shape.columns(so_far, _SO_FAR)])
        return there.select(pl.when(pl.col(_HAS)).then(self._result).alias(_VALUE)).to_series()

    def exists(self, *, keys: Keys | None = None) -> pl.Series:
        """Return, for each row, whether anything was added to its key since the key was cleared."""
        return self._value.exists(keys=keys)

    def clear(self, where: pl.Series | None = None, *, keys: Keys | None = None) -> None:
        """Remove the accumulators of the rows' keys. Snapshots no longer contain them."""
        self._value.clear(where, keys=keys)


class _Shape:
    """The fields of an accumulator: those of a struct by name; a value of any other type is one without a name."""

    def __init__(self, where: str, dtype: pa.DataType) -> None:
        self._where = where
        self._names = [field.name for field in dtype] if pa.types.is_struct(dtype) else None
        whole = empty_frame(pa.schema([(_VALUE, dtype)]))[_VALUE]
        self.dtypes = [whole.dtype] if self._names is None else [whole.struct[name].dtype for name in self._names]

    def accumulator(self, side: str) -> Accumulator:
        """Return what a user's function is given."""
        found = [pl.col(f"{side}{at}") for at in range(len(self.dtypes))]
        return found[0] if self._names is None else dict(zip(self._names, found, strict=True))

    def expressions(self, what: str, found: Accumulator) -> list[pl.Expr]:
        """Return what a user's function returned, field by field.

        Raises:
            UsageError: it is no accumulator.
        """
        if self._names is None:
            found, names = {"": found}, [""]
        else:
            names = self._names
        if not isinstance(found, Mapping) or sorted(found) != sorted(names):
            there = sorted(map(str, found)) if isinstance(found, Mapping) else type(found).__name__
            raise UsageError(f"{self._where}: {what} must return a dict with the fields {names}, not {there}")
        for name in names:
            if not isinstance(found[name], pl.Expr):
                raise UsageError(f"{self._where}: {what} must return expressions, not {found[name]!r}")
        return [found[name] for name in names]

    def named(self, what: str, found: Accumulator, side: str) -> list[pl.Expr]:
        """Return expressions as the columns of one side, in their types."""
        return [
            expression.cast(self.dtypes[at]).alias(f"{side}{at}")
            for at, expression in enumerate(self.expressions(what, found))
        ]

    def columns(self, accumulators: pl.Series, side: str) -> list[pl.Series]:
        """Return accumulators as the columns of one side."""
        if self._names is None:
            return [accumulators.alias(f"{side}0")]
        return [accumulators.struct.field(name).alias(f"{side}{at}") for at, name in enumerate(self._names)]

    def whole(self, merged: pl.DataFrame) -> pl.Series:
        """Return columns as accumulators."""
        if self._names is None:
            return merged.to_series()
        return merged.rename(dict(zip(merged.columns, self._names, strict=True))).to_struct(_VALUE)

    def refuse_other_rows(self, what: str, expressions: list[pl.Expr]) -> None:
        """Refuse what is wrong with accumulators, or looks at those of other keys.

        Raises:
            UsageError
        """
        sides = {f"{side}{at}": dtype for side in (_SO_FAR, _MORE) for at, dtype in enumerate(self.dtypes)}
        try:
            pl.DataFrame(schema={_HAS: pl.Boolean, **sides}).select(expressions)
        except pl.exceptions.PolarsError as error:
            raise UsageError(f"{self._where}: {what} does not work on accumulators: {error}") from None
        for expression in expressions:
            if not_elementwise(expression):
                raise UsageError(
                    f"{self._where}: {what} must look at one accumulator of each side only; aggregates are for partial"
                )


def refuse_no_function(where: str, function: object) -> None:
    """Refuse what is no function by batch.

    Raises:
        UsageError
    """
    if not isinstance(function, BatchAggregateFunction):
        raise UsageError(f"{where} needs a headgate.BatchAggregateFunction, not {function!r}")
