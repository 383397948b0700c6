"""Reducing and aggregating state by batch, and the declaration of state by batch.

An accumulator per key is merged column by column. To a backend and a checkpoint it is a value per key, as by row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import polars as pl
import pyarrow as pa

from headgate.codec.exact_values import MisfitError
from headgate.errors import UsageError
from headgate.operators.expressions import elementwise_problem
from headgate.operators.process.batch_state import BatchListState, BatchMapState, BatchValueState, How, Keys
from headgate.operators.process.broadcast_state import BatchBroadcastState
from headgate.operators.process.declarations import Declarations
from headgate.operators.schemas import empty_frame, fitted
from headgate.state.descriptors import NO_EVOLUTION, Evolution
from headgate.state.ttl import TTL

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
            pl.when(pl.col(_HAS)).then(both.cast(shape.dtypes[at])).otherwise(pl.col(f"{_MORE}{at}")).alias(str(at))
            for at, both in enumerate(shape.expressions("merge", merged))
        ]
        found = function.result(shape.accumulator(_SO_FAR))
        if not isinstance(found, pl.Expr):
            raise UsageError(f"{where}: result must return an expression, not {type(found).__name__}")
        self._result = found
        shape.refuse_other_rows("merge", self._merge)
        shape.refuse_other_types("merge", merged)
        shape.refuse_other_rows("result", [found])

    def add(self, values: Any, where: pl.Series | None = None, *, keys: Keys | None = None) -> pl.Series:
        """Add each row's value to the accumulator of its key. Rows with a null are skipped.

        Args:
            values: a Series with one value per row (a struct for a value with several parts), or one value for all
                rows.
            where: add only these rows.
            keys: the keys of other rows than those of the batch.

        Returns:
            A Boolean Series: True at the last row of each key with a changed accumulator.
        """
        count, rows, slots, chosen = self._value.chosen(values, where, keys)
        changed = np.zeros(count, np.bool_)
        if len(rows):
            frame = pl.DataFrame({_SLOT: slots, _ROW: rows, _VALUE: chosen})
            more = frame.group_by(_SLOT, maintain_order=True).agg(pl.col(_ROW).last(), *self._partial)
            more = self._shape.in_types(more, "partial", _MORE)
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
        self._types = [dtype] if self._names is None else [field.type for field in dtype]
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
        """Return expressions as the columns of one side."""
        return [expression.alias(f"{side}{at}") for at, expression in enumerate(self.expressions(what, found))]

    def in_types(self, frame: pl.DataFrame, what: str, side: str) -> pl.DataFrame:
        """Return ``frame`` with the columns of one side in the types of the accumulator.

        Raises:
            UsageError: a value does not fit.
        """
        changed = []
        for at, dtype in enumerate(self._types):
            series = frame[f"{side}{at}"]
            if series.dtype == self.dtypes[at]:
                continue
            try:
                column = fitted(series.to_arrow(compat_level=pl.CompatLevel.oldest()), dtype, self._field(at))
            except (MisfitError, pa.ArrowException) as error:
                raise UsageError(f"{self._where}: the result of {what} does not fit: {error}") from None
            changed.append(pl.DataFrame({series.name: column})[series.name])
        return frame.with_columns(changed) if changed else frame

    def _field(self, at: int) -> str:
        return "" if self._names is None else self._names[at]

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

    def refuse_other_types(self, what: str, found: Accumulator) -> None:
        """Refuse expressions of a type that a cast to the accumulator's would have to cut.

        Raises:
            UsageError
        """
        sides = {f"{side}{at}": dtype for side in (_SO_FAR, _MORE) for at, dtype in enumerate(self.dtypes)}
        named = [one.alias(str(at)) for at, one in enumerate(self.expressions(what, found))]
        for at, series in enumerate(pl.DataFrame(schema=sides).select(named).get_columns()):
            given, wanted = series.dtype, self.dtypes[at]
            is_wider = (given.is_integer() and wanted.is_integer()) or (given == pl.Float32 and wanted == pl.Float64)
            if given != wanted and given != pl.Null and not is_wider:
                of = f" for '{self._field(at)}'" if self._names else ""
                raise UsageError(f"{self._where}: {what} returns {given}{of}, which is {wanted}; cast it to that")

    def refuse_other_rows(self, what: str, expressions: list[pl.Expr]) -> None:
        """Refuse what is wrong with accumulators, or looks at those of other keys.

        Raises:
            UsageError
        """
        sides = {f"{side}{at}": dtype for side in (_SO_FAR, _MORE) for at, dtype in enumerate(self.dtypes)}
        frame = pl.DataFrame(schema={_HAS: pl.Boolean, **sides})
        try:
            frame.select(expressions)
        except pl.exceptions.PolarsError as error:
            raise UsageError(f"{self._where}: {what} does not work on accumulators: {error}") from None
        for expression in expressions:
            problem = elementwise_problem(expression, frame.lazy().with_columns(expression))
            if problem:
                raise UsageError(
                    f"{self._where}: {what} must look at one accumulator of each side only; aggregates are for "
                    f"partial: it {problem.partition(';')[0]}"
                )


def refuse_no_function(where: str, function: object) -> None:
    """Refuse what is no function by batch.

    Raises:
        UsageError
    """
    if not isinstance(function, BatchAggregateFunction):
        raise UsageError(f"{where} needs a headgate.BatchAggregateFunction, not {function!r}")


class BatchReducingState:
    """One value per key: the first value that was added, combined with each later one."""

    def __init__(self, value: BatchValueState, how: How) -> None:
        """For Headgate only; declare states with ``BatchStateHandle``."""
        self._value = value
        self._how = how

    def add(self, values: Any, where: pl.Series | None = None, *, keys: Keys | None = None) -> pl.Series:
        """Combine each row's value with the value of its key, row after row. Rows with a null are skipped.

        Args:
            values: a Series with one value per row, or one value for all rows.
            where: use only these rows.
            keys: the keys of other rows than those of the batch.

        Returns:
            A Boolean Series: True at one row of each key with a changed combined value.
        """
        return self._value.update(values, self._how, where, keys=keys)

    def get(self, *, keys: Keys | None = None) -> pl.Series:
        """Return the combined value for the key of each row; null if nothing was added to it."""
        return self._value.get(keys=keys)

    def exists(self, *, keys: Keys | None = None) -> pl.Series:
        """Return, for each row, whether its key has a value."""
        return self._value.exists(keys=keys)

    def clear(self, where: pl.Series | None = None, *, keys: Keys | None = None) -> None:
        """Remove the values of the rows' keys. Snapshots no longer contain them."""
        self._value.clear(where, keys=keys)


class BatchStateHandle(Declarations[BatchValueState, BatchListState, BatchMapState]):
    """Declares state in ``BatchProcessFunction.open``."""

    def broadcast(
        self, name: str, key_type: Any, type: Any, *, evolution: Evolution = NO_EVOLUTION
    ) -> BatchBroadcastState:
        """Declare a map from ``key_type`` to ``type`` that is the same in every subtask.

        Raises:
            UsageError: the function has no broadcast side.
        """
        return BatchBroadcastState(self._node, *self._declared_broadcast(name, key_type, type, evolution))

    def reducing(
        self, name: str, type: Any, how: How, *, ttl: TTL | None = None, evolution: Evolution = NO_EVOLUTION
    ) -> BatchReducingState:
        """Declare one value per key that is combined with every value that is added.

        ``how`` is ``"add"``, ``"min"``, ``"max"`` or ``"last"``. A checkpoint stores the state like a value state, so a
        new version of the program may declare it as a value, or with another ``how``.

        Raises:
            UsageError: values of this type cannot be combined in this way.
        """
        value = self.value(name, type, ttl=ttl, evolution=evolution)
        value.check_how(how)
        return BatchReducingState(value, how)

    def aggregating(
        self,
        name: str,
        type: Any,
        function: BatchAggregateFunction,
        *,
        ttl: TTL | None = None,
        evolution: Evolution = NO_EVOLUTION,
    ) -> BatchAggregatingState:
        """Declare one accumulator of ``type`` per key. ``function`` adds values to it and computes the result from it.

        A checkpoint stores the state like a value state, so a function that works by row can take it over, and the
        other way round.

        Raises:
            UsageError: the function does not return an accumulator of this type.
        """
        where = f"operator '{self._node}': aggregating state '{name}'"
        value = self.value(name, type, ttl=ttl, evolution=evolution)
        refuse_no_function(where, function)
        return BatchAggregatingState(where, value, self._descriptors[-1].type, function)
