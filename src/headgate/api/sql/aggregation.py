"""GROUP BY and aggregates of a SELECT: keys, the window, and what is computed of each group. Nothing runs here."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import polars as pl
import pyarrow as pa

from headgate.api.sql.expressions import Scalars, literal_text
from headgate.api.sql.relations import (
    END,
    START,
    WINDOWS,
    Bounds,
    Relation,
    check_time,
    fixed_windows,
    selected,
    union_all,
    window_of,
)
from headgate.api.sql.syntax import exp
from headgate.api.sql.values import unsupported
from headgate.api.streams.stream import Stream
from headgate.api.streams.windowed_stream import Window
from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.operators.changes import OP

if TYPE_CHECKING:
    from sqlglot.expressions import Expression

_KEY, _RESULT, _TIME = "__key_{}", "__result_{}", "__time"


class SelectLike(Protocol):
    """What a grouping needs of its SELECT: see ``Select``."""

    tree: Expression
    relation_in: Relation

    @property
    def retractions(self) -> bool: ...

    def resolved(self, tree: Expression) -> Expression: ...

    def made(
        self,
        stream: Stream,
        outputs: list[tuple[str, Expression]],
        translate: Callable[[Expression], pl.Expr],
        bounds: Bounds | None,
    ) -> Relation: ...


@dataclass(frozen=True, slots=True)
class GroupingSet:
    """What is grouped by: keys, which may be several sets (ROLLUP, CUBE, GROUPING SETS). ``others`` are null."""

    keys: tuple[Expression, ...]
    others: tuple[Expression, ...] = ()

    def parts(self) -> list[GroupingSet]:
        """Return each set of keys."""
        found: list[tuple[Expression, ...]] = [()]
        for node in self.keys:
            found = [(*keys, *one) for keys in found for one in _sets_of(node)]
        every = dict.fromkeys(node for keys in found for node in keys)
        return [GroupingSet(keys, (*self.others, *(one for one in every if one not in keys))) for keys in found]


def _sets_of(node: Expression) -> list[tuple[Expression, ...]]:
    """Return the sets of keys that one item of GROUP BY stands for."""
    e = exp()
    items = [_keys_of(one) for one in node.expressions] if isinstance(node, e.Rollup | e.Cube) else []
    if isinstance(node, e.Rollup):
        return [tuple(key for one in items[:count] for key in one) for count in range(len(items), -1, -1)]
    if isinstance(node, e.Cube):
        chosen = itertools.product([True, False], repeat=len(items))
        return [tuple(key for one, is_in in zip(items, some, strict=True) if is_in for key in one) for some in chosen]
    if isinstance(node, e.GroupingSets):
        return [one for part in node.expressions for one in _sets_of(part)]
    return [_keys_of(node)]


def _keys_of(node: Expression) -> tuple[Expression, ...]:
    if isinstance(node, exp().Paren):
        return (node.this,)
    return tuple(node.expressions) if isinstance(node, exp().Tuple) else (node,)


class Grouping:
    """A SELECT with GROUP BY or aggregates: keys, the window, and what is computed of each group."""

    def __init__(
        self, select: SelectLike, outputs: list[tuple[str, Expression]], one_set: GroupingSet | None = None
    ) -> None:
        """``one_set``: of several in GROUP BY, the one that this is."""
        self._select, self._outputs, self._set = select, outputs, one_set
        self._absent: dict[Expression, pl.DataType] = {}
        """The keys of other sets, which are null in this one."""
        self._relation = select.relation_in
        self._window: Window | None = None
        self._again: Bounds | None = None
        self._names: dict[Expression, str] = {}
        self._keys: dict[str, Expression] = {}

    def relation(self) -> Relation:
        tree = self._select.tree
        group = tree.args.get("group")
        for clause in ("rollup", "cube", "grouping_sets", "all", "totals"):
            if group is not None and group.args.get(clause):
                raise unsupported(f"GROUP BY ... {clause.upper().replace('_', ' ')}", "name the keys in brackets")
        found = self._set or GroupingSet(tuple(group.expressions if group is not None else ()))
        sets = found.parts()
        if len(sets) > 1:
            return self._of_sets(sets)
        for node in sets[0].keys:
            self._add_key(self._at(node))
        scalar = Scalars(self._relation.stream.schema)
        for node in sets[0].others:
            key = self._at(node)
            if key not in self._names:
                self._absent[key] = scalar.values.type_of(scalar(key))
        having = tree.args.get("having")
        condition = None if having is None else self._select.resolved(having.this)
        aggregates = self._aggregates(condition)
        wanted = aggregates.expressions or {_RESULT.format(0): pl.len()}
        if not self._keys:
            self._keys[_KEY.format(0)] = exp().Literal.number(0)
        inputs = {name: scalar(node) for name, node in self._keys.items()}
        used = dict.fromkeys(name for found in wanted.values() for name in found.meta.root_names())
        inputs |= {name: pl.col(name) for name in used}
        named = [found.alias(name) for name, found in wanted.items()]
        if self._window is None:
            keyed = selected(self._relation.stream, inputs).key_by(*self._keys)
            return self._result(keyed.agg(*named, retractions=self._needs_retractions()), aggregates, condition)
        time = self._relation.stream._time_column
        if self._again is not None:
            inputs[_TIME] = self._again.last_moment()
        elif time is not None:
            inputs[time] = pl.col(time)
        stream = selected(self._relation.stream, inputs)
        stream._time_column = time if self._again is None else _TIME
        results = stream.key_by(*self._keys).window(self._window).agg(*named)
        fixed = fixed_windows(self._window) if self._again is None else self._again.windows
        if self._again is not None and fixed is not None and fixed.is_sliding:
            results = results.with_columns((pl.col(END) - pl.duration(milliseconds=fixed.size_ms)).alias(START))
        return self._result(results, aggregates, condition, Bounds(START, END, fixed))

    def _of_sets(self, sets: list[GroupingSet]) -> Relation:
        """Return the rows of all grouping sets."""
        first, *others = (Grouping(self._select, self._outputs, one).relation() for one in sets)
        whole = first
        for one in others:
            whole = union_all(whole, one)
        return replace(whole, bounds=first.bounds)

    def _needs_retractions(self) -> bool:
        """Whether the changes of a running aggregate must say what was before: for others, or without the keys."""
        if self._set is not None:
            return True
        kept = {self._names.get(node) for _, node in self._outputs}
        return self._select.retractions or not set(self._keys) <= kept

    def _aggregates(self, condition: Expression | None) -> Aggregates:
        found = Aggregates(_RESULT, self._relation.stream.schema)
        for node in [node for _, node in self._outputs] + ([] if condition is None else [condition]):
            found.add_all(node)
        return found

    def _result(
        self, results: Stream, aggregates: Aggregates, condition: Expression | None, bounds: Bounds | None = None
    ) -> Relation:
        translate = Scalars(results.schema, self._value(aggregates))
        if condition is not None:
            results = results.filter(translate.condition(condition))
        return self._select.made(results, self._outputs, translate, bounds)

    def _value(self, aggregates: Aggregates) -> Callable[[Expression], pl.Expr | None]:
        """Return what gives the column of a key, a bound or an aggregate, and refuses any other column."""

        def value(node: Expression) -> pl.Expr | None:
            name = self._names.get(node)
            if name is not None:
                return pl.col(name)
            kind, _, bound = (node.name.upper() if isinstance(node, exp().Anonymous) else "").partition("_")
            if kind in WINDOWS and bound in ("START", "END"):
                return pl.col(START if bound == "START" else END)
            if node in self._absent:
                return pl.lit(None, self._absent[node])
            if isinstance(node, exp().Grouping | exp().GroupingId):
                return self._grouping(node)
            found = aggregates.result(node)
            if found is None and isinstance(node, exp().Column):
                raise UsageError(f"sql: column '{node.name}' is neither in GROUP BY nor in an aggregate")
            return found

        return value

    def _grouping(self, node: Expression) -> pl.Expr:
        """Return which of its arguments are no keys of this set, as the digits of a binary number."""
        number = 0
        for one in node.expressions:
            key = self._at(one)
            if key not in self._absent and key not in self._names:
                raise UsageError(f"sql: {node.sql()} needs columns of GROUP BY")
            number = 2 * number + (key in self._absent)
        return pl.lit(number, pl.Int64)

    def _at(self, node: Expression) -> Expression:
        """Return a key; a number is the place of a result column, and a name may be that of one."""
        if isinstance(node, exp().Literal) and not node.is_string:
            place = int(node.name) if node.name.isdecimal() else 0
            if not 1 <= place <= len(self._outputs):
                raise UsageError(f"sql: GROUP BY {node.name}, but there are {len(self._outputs)} result columns")
            return self._outputs[place - 1][1]
        if isinstance(node, exp().Column) and not node.table:
            known = {column.name.lower() for column in self._relation.columns}
            named = {name.lower(): found for name, found in self._outputs} | dict(self._outputs)
            name = node.name if node.name in named else node.name.lower()
            if node.name.lower() not in known and name in named:
                return named[name]
        return self._select.resolved(node)

    def _add_key(self, node: Expression) -> None:
        kind = node.name.upper() if isinstance(node, exp().Anonymous) else ""
        bounds = self._relation.bounds
        if kind in WINDOWS:
            time, *lengths = node.expressions
            if not isinstance(time, exp().Column):
                raise UsageError(f"sql: write {kind}(ts, INTERVAL '10' SECOND)")
            check_time(self._relation, time.name, kind)
            self._set_window(window_of(kind, lengths))
        elif bounds is not None and isinstance(node, exp().Column) and node.name in (bounds.start, bounds.end):
            if self._relation.window is None:
                self._again = bounds
            self._set_window(bounds.again() if self._relation.window is None else self._relation.window)
            self._names[node] = START if node.name == bounds.start else END
        elif node not in self._names:
            own = node.name in (START, END, OP) or node.name.startswith("__")
            is_named = isinstance(node, exp().Column) and not own
            name = node.name if is_named else _KEY.format(len(self._keys))
            self._names[node] = name
            self._keys[name] = node

    def _set_window(self, window: Window) -> None:
        if self._window is not None and self._window != window:
            raise UsageError("sql: GROUP BY has two windows; group in two queries, one inside the other")
        self._window = window


class Aggregates:
    """The aggregates of one SELECT: what is computed of each group, and the result that is made of it."""

    def __init__(self, name: str, schema: pa.Schema) -> None:
        """``name``: a pattern for names of columns; ``schema``: of the records."""
        self.expressions: dict[str, pl.Expr] = {}
        self._name = name
        self._scalars = Scalars(schema)
        self._results: dict[Expression, pl.Expr] = {}

    def result(self, node: Expression) -> pl.Expr | None:
        """Return the result of an aggregate, or None if ``node`` is none."""
        return self._results.get(node)

    def add_all(self, tree: Expression) -> None:
        """Add the aggregates in ``tree``.

        Raises:
            UsageError: one is not there.
        """
        for node in _aggregates_in(tree):
            if node not in self._results:
                self._results[node] = self._added(node)

    def column(self, expression: pl.Expr) -> pl.Expr:
        """Return the column of an aggregate of records."""
        for name, known in self.expressions.items():
            if known.meta.eq(expression):
                return pl.col(name)
        name = self._name.format(len(self.expressions))
        self.expressions[name] = expression
        return pl.col(name)

    def _added(self, node: Expression) -> pl.Expr:
        e = exp()
        function, condition = node, None
        if isinstance(node, e.Filter):
            function, condition = node.this, self._scalars.condition(node.expression.this)
        of = function.this
        is_distinct = isinstance(of, e.Distinct)
        if is_distinct:
            if len(of.expressions) != 1:
                raise unsupported("DISTINCT of several columns", "make one column of them")
            of = of.expressions[0]
        is_count = isinstance(function, e.Count)
        if is_count and not is_distinct and (of is None or isinstance(of, e.Star | e.Literal)):
            if condition is None:
                return self.column(pl.len()).cast(pl.Int64)
            return self.column(_of_records(pl.when(condition).then(pl.lit(1)), node).count()).cast(pl.Int64)
        if of is None or _has_many(function):
            raise unsupported(f"{function.sql()}", "use an aggregate of one argument")
        values = self._scalars(of)
        kind, dtype = self._scalars.values.kind(values), self._scalars.values.type_of(values)
        if condition is not None:
            values = pl.when(condition).then(values)
        values = _of_records(values, node)
        make = _of_groups().get(type(function))
        if make is not None and not is_distinct:
            return make(self, function, values, kind)
        if is_count:
            counted = values.drop_nulls().n_unique() if is_distinct else values.count()
            return self.column(counted).cast(pl.Int64)
        if is_distinct and not isinstance(function, e.Min | e.Max):
            raise unsupported(f"{function.key.upper()}(DISTINCT ...)", "only COUNT has DISTINCT")
        methods = {
            e.Min: "min", e.Max: "max", e.Avg: "mean", e.Stddev: "std", e.StddevSamp: "std", e.Variance: "var",
            e.Median: "median",
        }  # fmt: skip
        method = "sum" if isinstance(function, e.Sum) else methods.get(type(function))
        if method is None:
            raise unsupported(
                f"the aggregate {function.key.upper()}", "use COUNT, SUM, AVG, MIN, MAX, MEDIAN, STDDEV or VARIANCE"
            )
        if method not in ("min", "max") and kind != "numbers":
            raise UsageError(f"sql: {function.sql()} is of {kind}; it needs numbers")
        if method == "sum":
            is_any = self.column(values.count()) > 0
            whole = values.cast(pl.Int64) if dtype.is_integer() and dtype != pl.Int64 else values
            return pl.when(is_any).then(self.column(whole.sum()))
        if method not in ("min", "max") and dtype.is_decimal():
            values = values.cast(pl.Float64)
        return self.column(getattr(values, method)())


def _list_agg(aggregates: Aggregates, function: Expression, values: pl.Expr, kind: str) -> pl.Expr:
    if kind != "texts":
        raise UsageError(f"sql: {function.sql('duckdb')} is of {kind}; it needs texts")
    separator: Any = function.args.get("separator")
    by = "," if separator is None else literal_text(separator, "LISTAGG")
    joined = aggregates.column(values.drop_nulls().str.join(by))
    return pl.when(aggregates.column(values.count()) > 0).then(joined)


@cache
def _of_groups() -> dict[type, Callable[[Aggregates, Any, pl.Expr, str], pl.Expr]]:
    """Return the aggregates that are no number of a group's numbers."""
    e = exp()

    def end(method: str) -> Callable[[Aggregates, Any, pl.Expr, str], pl.Expr]:
        def make(aggregates: Aggregates, function: Expression, values: pl.Expr, kind: str) -> pl.Expr:
            return aggregates.column(getattr(values.filter(values.is_not_null()), method)())

        return make

    return {
        **dict.fromkeys([e.FirstValue, e.First], end("first")),
        **dict.fromkeys([e.LastValue, e.Last], end("last")),
        e.ArrayAgg: lambda aggregates, function, values, kind: aggregates.column(values.implode()),
        e.GroupConcat: _list_agg,
        e.ApproxDistinct: lambda aggregates, function, values, kind: aggregates.column(
            values.drop_nulls().n_unique()
        ).cast(pl.Int64),
    }


def _of_records(values: pl.Expr, node: Expression) -> pl.Expr:
    if not values.meta.root_names():
        raise unsupported(f"{node.sql()}, an aggregate of a constant,", "use COUNT(*)")
    return values


def _has_many(function: Expression) -> bool:
    known = ("this", "big_int", "separator", "nulls_excluded")
    return any(part for name, part in function.args.items() if name not in known and part)


def _aggregates_in(tree: Expression) -> Iterator[Expression]:
    """Yield the outermost aggregates, each with its FILTER."""
    e = exp()
    if isinstance(tree, e.Window):
        raise unsupported(f"{tree.this.sql()} OVER beside GROUP BY", "group in a subquery")
    if isinstance(tree, e.Grouping | e.GroupingId):
        return
    if isinstance(tree, e.AggFunc | e.Filter):
        yield tree
        return
    for part in tree.iter_expressions():
        yield from _aggregates_in(part)
