"""Which Polars aggregates can be computed record by record: what they are of, found in the expressions of users.

Expressions are recognised by writing the same one and comparing. ``filter`` and ``drop_nulls`` before an aggregate
become a value that is null where no record counts.

Other aggregates are of records that are kept (``RecordAggregates``): Polars computes them when a window fires. It wraps
a sum that its type does not hold. So of each sum of integers, decimals and durations the sum of floating numbers is
computed beside it: a sum that wrapped is far from that, by at least half of what its type can tell apart.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import polars.selectors as cs
import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.operators.expressions import elementwise_problem, expression_text
from headgate.operators.schemas import empty_frame, schema_of_frame
from headgate.operators.user_functions import batch_error
from headgate.state.key_hash import is_key_type
from headgate.state.key_index import Slots
from headgate.state.values import Mask
from headgate.state.window_aggregates import too_large


class Aggregate(Enum):
    """What is computed; the value is the name of Polars' method."""

    LEN = "len"
    COUNT = "count"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    MEAN = "mean"
    VAR = "var"
    STD = "std"
    PICK = "first"
    """The value of one record."""

    QUANTILE = "quantile"


_OF_VALUES = ("count", "sum", "min", "max", "mean")
"""Aggregates without arguments that skip nulls."""

_ONE = pl.lit(0, pl.Int64)


@dataclass(frozen=True)
class Order:
    """Which record a pick is of: the one with the highest, or lowest, value of ``by``.

    Attributes:
        by: None: the first record, or the last.
        is_least: the lowest value wins.
        is_last: of records with equal values the last one wins, not the first.
        nulls_win: null is picked before any value, not after.
    """

    by: pl.Expr | None
    is_least: bool = False
    is_last: bool = False
    nulls_win: bool = False


@dataclass(frozen=True)
class Recognised:
    """An aggregate of an expression over one record; ``LEN`` has none.

    Attributes:
        aggregate: what is computed.
        inner: of what.
        order: of a pick.
        ddof: of a variance and a standard deviation.
        quantile: from 0 to 1.
        interpolation: of a quantile, as in Polars.
    """

    aggregate: Aggregate
    inner: pl.Expr | None = None
    order: Order | None = None
    ddof: int = 1
    quantile: float = 0.5
    interpolation: str = "linear"


def recognise(expression: pl.Expr, frame: pl.DataFrame) -> Recognised | None:
    """Return what an aggregate over records like those of ``frame`` is; None: it needs all records at once."""
    bare = expression.meta.undo_aliases()
    if bare.meta.eq(pl.len()):
        return Recognised(Aggregate.LEN)
    found = _of_values(bare, frame) or _pick(bare, frame)
    if found is None or found.inner is None:
        return found
    order = found.order
    parts = [found.inner] if order is None or order.by is None else [found.inner, order.by]
    return found if all(is_of_one_record(part, frame) for part in parts) else None


def is_of_one_record(inner: pl.Expr, frame: pl.DataFrame) -> bool:
    """Whether ``inner`` gives one value per record, from that record alone."""
    text = inner.meta.serialize(format="json")
    has_columns = bool(inner.meta.root_names()) and not inner.meta.has_multiple_outputs()
    if not has_columns or '"Selector"' in json.dumps(json.loads(text)):
        return False
    return not elementwise_problem(inner, frame.lazy().with_columns(inner.alias("x")))


def _of_values(bare: pl.Expr, frame: pl.DataFrame) -> Recognised | None:
    inner = argument(bare, "len")
    if inner is not None:
        found = filtered(inner)
        if found is not None:
            return Recognised(Aggregate.SUM, found[1].fill_null(False))
        bare_inner = argument(inner, "drop_nulls")
        return Recognised(Aggregate.LEN) if bare_inner is None else Recognised(Aggregate.COUNT, bare_inner)
    for method in _OF_VALUES:
        inner = argument(bare, method)
        if inner is not None:
            return Recognised(Aggregate(method), _values(inner))
    tree = _tree(bare)
    for method in ("var", "std"):
        ddof = _ddof(tree, method.capitalize())
        inner = None if ddof is None else argument(bare, method, ddof=ddof)
        if inner is not None and ddof is not None:
            return Recognised(Aggregate(method), _values(inner), ddof=ddof)
    inner = argument(bare, "median")
    if inner is not None:
        return Recognised(Aggregate.QUANTILE, _values(inner))
    return _quantile(bare, tree)


def _values(inner: pl.Expr) -> pl.Expr:
    """Return ``inner``, with null where a filter drops the record."""
    found = filtered(inner)
    if found is not None:
        return pl.when(found[1]).then(_values(found[0]))
    bare = argument(inner, "drop_nulls")
    return inner if bare is None else _values(bare)


def _quantile(bare: pl.Expr, tree: Any) -> Recognised | None:
    method = _at(tree, "Function", "function", "Quantile", "method")
    if not isinstance(method, str):
        return None
    inputs = bare.meta.pop()
    for inner, number in (inputs, inputs[::-1]):
        if number.meta.root_names():
            continue
        quantile = pl.select(number).item()
        name = method.lower()
        if inner.quantile(quantile, interpolation=name).meta.eq(bare):  # type: ignore[arg-type]
            return Recognised(Aggregate.QUANTILE, _values(inner), quantile=float(quantile), interpolation=name)
    return None


def _pick(bare: pl.Expr, frame: pl.DataFrame) -> Recognised | None:
    for method, is_last in (("first", False), ("last", True)):
        inner = argument(bare, method, ignore_nulls=True)
        if inner is not None:
            return _first(inner.drop_nulls(), is_last)
        inner = argument(bare, method)
        if inner is not None:
            return _sorted(inner, is_last) or _first(inner, is_last)
    return _extreme(bare, frame)


def _first(inner: pl.Expr, is_last: bool) -> Recognised:
    """Return the pick of the first or last record, of those that ``filter`` or ``drop_nulls`` leave."""
    bare = argument(inner, "drop_nulls")
    found = filtered(inner if bare is None else bare)
    value = found[0] if found is not None else inner if bare is None else bare
    conditions = [] if found is None else [found[1]]
    conditions += [] if bare is None else [value.is_not_null()]
    if not conditions:
        return Recognised(Aggregate.PICK, value, Order(None, is_last=is_last))
    counts = pl.all_horizontal(conditions) if len(conditions) > 1 else conditions[0]
    order = Order(pl.when(counts).then(_ONE), is_last=is_last)
    return Recognised(Aggregate.PICK, pl.when(counts).then(value), order)


def _sorted(inner: pl.Expr, is_last: bool) -> Recognised | None:
    """Return the pick that ``values.sort_by(one column).first()`` or ``last()`` is."""
    found = sort_of(inner)
    if found is None:
        return None
    values, by, options = found
    descending, nulls_last = options["descending"][0], options["nulls_last"][0]
    order = Order(by, is_least=descending == is_last, is_last=is_last, nulls_win=nulls_last == is_last)
    return Recognised(Aggregate.PICK, values, order)


def sort_of(expression: pl.Expr) -> tuple[pl.Expr, pl.Expr, Any] | None:
    """Return values, order and options of ``values.sort_by(by)`` with one column; None: it is no such thing."""
    options = _at(_tree(expression), "SortBy", "sort_options")
    inputs = expression.meta.pop()
    if options is None or len(inputs) != 2:
        return None
    for values, by in (inputs[::-1], inputs):
        if stable_sort(values, by, options, maintain_order=options["maintain_order"]).meta.eq(expression):
            return values, by, options
    return None


def stable_sort(values: pl.Expr, by: pl.Expr, options: Any, *, maintain_order: bool = True) -> pl.Expr:
    """Return ``values.sort_by(by)`` with these options, in the order of arrival where ``by`` is equal."""
    return values.sort_by(
        by,
        descending=options["descending"],
        nulls_last=options["nulls_last"],
        multithreaded=options["multithreaded"],
        maintain_order=maintain_order,
    )


def stable(expression: pl.Expr) -> pl.Expr:
    """Return an aggregate that picks of equal records what is picked record by record, where Polars is free to."""
    name = expression.meta.output_name(raise_if_undetermined=False)
    bare = expression.meta.undo_aliases()
    for method in ("first", "last"):
        inner = argument(bare, method)
        found = None if inner is None else sort_of(inner)
        if found is not None and name is not None:
            chosen: pl.Expr = getattr(stable_sort(*found), method)().alias(name)
            return chosen
    return expression


def _extreme(bare: pl.Expr, frame: pl.DataFrame) -> Recognised | None:
    """Return the pick that ``max_by``, ``min_by`` or ``get`` at an ``arg_max`` is, which skip null and NaN."""
    inputs = bare.meta.pop()
    if len(inputs) != 2:
        return None
    for values, by in (inputs, inputs[::-1]):
        for is_least in (False, True):
            index = argument(by, "arg_min" if is_least else "arg_max")
            if index is not None and values.get(index.arg_min() if is_least else index.arg_max()).meta.eq(bare):
                return _of_extreme(values, index, is_least, frame)
            method = getattr(values, "min_by" if is_least else "max_by", None)
            if method is not None and method(by).meta.eq(bare):
                return _of_extreme(values, by, is_least, frame)
    return None


def _of_extreme(values: pl.Expr, by: pl.Expr, is_least: bool, frame: pl.DataFrame) -> Recognised | None:
    if not is_of_one_record(by, frame):
        return None
    if frame.select(by.alias("x"))["x"].dtype.is_float():
        by = by.fill_nan(None)
    return Recognised(Aggregate.PICK, pl.when(by.is_not_null()).then(values), Order(by, is_least=is_least))


def argument(expression: pl.Expr, method: str, **options: Any) -> pl.Expr | None:
    """Return what ``method`` is called on, if ``expression`` is such a call with these options."""
    for inner in expression.meta.pop()[:1]:
        try:
            if getattr(inner, method)(**options).meta.eq(expression):
                return inner
        except (TypeError, AttributeError):  # an older Polars has no such option
            continue
    return None


def filtered(expression: pl.Expr) -> tuple[pl.Expr, pl.Expr] | None:
    """Return the values and the condition of ``values.filter(condition)``; None: it is none."""
    inputs = expression.meta.pop()
    if len(inputs) != 2:
        return None
    for values, condition in (inputs, inputs[::-1]):
        try:
            if values.filter(condition).meta.eq(expression):
                return values, condition
        except (TypeError, pl.exceptions.PolarsError):
            continue
    return None


def _tree(expression: pl.Expr) -> Any:
    with io.StringIO() as file:
        try:
            expression.meta.serialize(file, format="json")
        except pl.exceptions.ComputeError:
            return None
        return json.loads(file.getvalue())


def _at(tree: Any, *names: str) -> Any:
    """Return what is in a structure at these names, one in the other."""
    for name in names:
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def _ddof(tree: Any, name: str) -> int | None:
    found = _at(tree, "Agg", name)
    return found[1] if isinstance(found, list) and len(found) == 2 and isinstance(found[1], int) else None


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


_INT_MIN, _INT_MAX = -(1 << 63), (1 << 63) - 1


@dataclass(frozen=True)
class Distinct:
    """An output column that counts the distinct values of ``inner``; null is one, as in Polars, if ``has_nulls``.

    Attributes:
        values, condition: ``inner`` is ``values``, or what ``values`` are where ``condition`` is true.
    """

    name: str
    inner: pl.Expr
    values: pl.Expr
    condition: pl.Expr | None
    dtype: pa.DataType
    value_type: pa.DataType
    has_nulls: bool

    @cached_property
    def state_name(self) -> str:
        """The name of ``inner`` in state."""
        return text_name(f"{expression_text(self.inner)} {encoding_text(self.value_type)}")


@dataclass(frozen=True)
class Ranked:
    """An output column that is computed of how often each value of a number is there: what ``found`` says."""

    name: str
    found: Recognised
    dtype: pa.DataType
    value_type: pa.DataType

    @property
    def inner(self) -> pl.Expr:
        """The number."""
        assert self.found.inner is not None
        return self.found.inner

    @cached_property
    def state_name(self) -> str:
        """The name of ``inner`` in state."""
        return text_name(f"{expression_text(self.inner)} {encoding_text(self.value_type)}")

    @cached_property
    def result_name(self) -> str:
        """The name of the result in state."""
        found = self.found
        text = f"{found.aggregate.value} {found.ddof} {found.quantile} {found.interpolation} {self.state_name}"
        return f"{found.aggregate.value}_{text_name(text)}"


def encoding_text(dtype: pa.DataType) -> str:
    """Return what integers in state stand for that were values of ``dtype``; empty: for integers or truth values."""
    if pa.types.is_timestamp(dtype) or pa.types.is_duration(dtype):
        return f"{'timestamp' if pa.types.is_timestamp(dtype) else 'duration'} in {dtype.unit}"
    if pa.types.is_floating(dtype):
        return "float"
    return str(dtype) if pa.types.is_date(dtype) or pa.types.is_uint64(dtype) else ""


def text_name(text: str) -> str:
    """Return a name of an expression, as text, for state, without anything that could not be in one."""
    words = "_".join(re.findall(r"[A-Za-z0-9]+", text))[:40]
    return f"{words}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def ranked_aggregate(expression: pl.Expr, schema: pa.Schema, output: pa.Schema, *, has_changes: bool) -> Ranked | None:
    """Return a quantile, or over changes a variance or a standard deviation; None: it is none, or not of a number."""
    frame = empty_frame(schema)
    name, found = expression.meta.output_name(raise_if_undetermined=False), recognise(expression, frame)
    if found is None or found.inner is None or name is None:
        return None
    if found.aggregate is not Aggregate.QUANTILE and not (
        has_changes and found.aggregate in (Aggregate.VAR, Aggregate.STD)
    ):
        return None
    dtype = schema_of_frame(frame.select(found.inner.alias("x"))).field(0).type
    is_number = pa.types.is_floating(dtype) or pa.types.is_integer(dtype) or pa.types.is_boolean(dtype)
    made = output.field(name).type  # no quantile of booleans is one
    return Ranked(name, found, made, dtype) if is_number and not pa.types.is_boolean(made) else None


def distinct_aggregate(expression: pl.Expr, schema: pa.Schema, output: pa.Schema) -> Distinct | None:
    """Return ``x.n_unique()`` and ``x.drop_nulls().n_unique()`` as what counts distinct values; None: it is neither."""
    name = expression.meta.output_name(raise_if_undetermined=False)
    inner = argument(expression.meta.undo_aliases(), "n_unique")
    if inner is None or name is None:
        return None
    condition: pl.Expr | None = None
    has_nulls = True
    bare = argument(inner, "drop_nulls")
    if bare is not None:
        inner, has_nulls = bare, False
    of_some = filtered(inner)
    if of_some is not None:
        values, condition = of_some
        if has_nulls:
            bare = argument(values, "drop_nulls")
            if bare is None:
                return None
            values, has_nulls = bare, False
        inner = pl.when(condition).then(values)
    else:
        values = inner
    if not is_of_one_record(inner, empty_frame(schema)):
        return None
    value_type = schema_of_frame(empty_frame(schema).select(inner.alias("x"))).field(0).type
    if not is_key_type(value_type) or pa.types.is_floating(value_type):
        return None
    return Distinct(name, inner, values, condition, output.field(name).type, value_type, has_nulls)


def numbers_of_ranks(found: npt.NDArray[np.int64], dtype: pa.DataType) -> npt.NDArray[np.float64]:
    """Return the numbers of type ``dtype`` that have these ranks (``window_plan.ranks``)."""
    if pa.types.is_floating(dtype):
        return np.where(found < 0, found ^ _INT_MAX, found).view(np.float64)
    return (found ^ _INT_MIN).view(np.uint64).astype(np.float64) if pa.types.is_uint64(dtype) else found.astype(float)


def ranked_results(
    found: Recognised, size: int, of: Slots, values: npt.NDArray[np.float64], counts: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.float64], Mask]:
    """Return a quantile or a variance of each key, and which keys have one.

    Args:
        found: which.
        size: how many keys there are.
        of: the key of each value.
        values: distinct ones of each key.
        counts: how often each is there.
    """
    total = np.bincount(of, counts, size).astype(np.int64)
    if found.aggregate is not Aggregate.QUANTILE:
        with np.errstate(invalid="ignore", over="ignore"):
            mean = np.bincount(of, values * counts, size) / np.maximum(total, 1)
            squares = np.bincount(of, counts * (values - mean[of]) ** 2, size)
            variance = squares / np.maximum(total - found.ddof, 1)
        return (np.sqrt(variance) if found.aggregate is Aggregate.STD else variance), total > found.ddof
    order = np.lexsort((values, of))  # NaN is the last
    values, ends = values[order], np.cumsum(counts[order])
    starts = np.cumsum(total) - total
    is_there = total > 0

    def at(places: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        chosen = np.searchsorted(ends, starts + np.clip(places, 0, total - 1).astype(np.int64), side="right")
        return values[np.minimum(chosen, max(len(values) - 1, 0))] if len(values) else np.zeros(size)

    place = found.quantile * (total - 1)
    low, high = at(np.floor(place)), at(np.ceil(place))
    match found.interpolation:
        case "nearest":
            return at(np.floor(place + 0.5)), is_there
        case "lower":
            return low, is_there
        case "higher":
            return high, is_there
        case "equiprobable":
            return at(np.ceil(found.quantile * total) - 1), is_there
    share = 0.5 if found.interpolation == "midpoint" else place - np.floor(place)
    with np.errstate(invalid="ignore"):
        return np.where(np.ceil(place) == np.floor(place), low, low + share * (high - low)), is_there
