"""Which Polars aggregates can be computed record by record: what they are of, found in the expressions of users.

Expressions are recognised by writing the same one and comparing. ``filter`` and ``drop_nulls`` before an aggregate
become a value that is null where no record counts.
"""

from __future__ import annotations

import io
import json
from enum import Enum
from typing import Any

import polars as pl

from headgate.dataclass import dataclass
from headgate.operators.expressions import elementwise_problem


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
