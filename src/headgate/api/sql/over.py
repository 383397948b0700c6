"""OVER in a SELECT: aggregates over the rows before each row, as ``KeyedStream.over``. Nothing runs here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import polars as pl

from headgate.api.sql.aggregation import Aggregates
from headgate.api.sql.expressions import Scalars
from headgate.api.sql.relations import Relation
from headgate.api.sql.syntax import exp, interval_ms
from headgate.api.sql.values import unsupported
from headgate.api.streams.stream import Stream
from headgate.errors import UsageError

if TYPE_CHECKING:
    from sqlglot.expressions import Expression

_FRAMES = (
    "write RANGE BETWEEN INTERVAL '1' HOUR PRECEDING AND CURRENT ROW, or ROWS BETWEEN 10 PRECEDING AND CURRENT ROW"
)


def is_over(node: Expression) -> bool:
    """Whether ``node`` is a function with OVER that does not number rows."""
    return isinstance(node, exp().Window) and not isinstance(node.this, exp().RowNumber)


def is_of_over(node: Expression) -> bool:
    """Whether an aggregate is one of OVER, and not of a group: ``SUM(x) FILTER (WHERE ...) OVER (...)``."""
    parent = node.parent
    while isinstance(parent, exp().Filter | exp().IgnoreNulls | exp().RespectNulls) and parent.this is node:
        node, parent = parent, parent.parent
    return isinstance(parent, exp().Window) and parent.this is node


def with_named_windows(tree: Expression) -> Expression:
    """Return a SELECT in which OVER w has what WINDOW w AS (...) says.

    Raises:
        UsageError: there is no such window.
    """
    windows = {one.name.lower(): one for one in tree.args.get("windows") or ()}
    if not windows and not any(node.args.get("alias") for node in tree.find_all(exp().Window)):
        return tree
    tree = tree.copy()
    for node in list(tree.find_all(exp().Window)):
        alias = node.args.get("alias")
        if alias is None or node.find_ancestor(exp().Select) is not tree:
            continue
        named = windows.get(alias.name.lower())
        if named is None:
            known = ", ".join(windows) or "none"
            raise UsageError(
                f"sql: there is no window '{alias.name}' (there are: {known}); write WINDOW {alias.name} AS (...)"
            )
        node.set("alias", None)
        for part in ("partition_by", "order", "spec"):
            said = named.args.get(part)
            if said and not node.args.get(part):
                node.set(part, [one.copy() for one in said] if isinstance(said, list) else said.copy())
    tree.set("windows", None)
    return tree


@dataclass(frozen=True, slots=True)
class _Over:
    """What the functions of one operator have in common: the columns that rows are divided by, and the frame."""

    keys: tuple[Expression, ...]
    options: tuple[tuple[str, Any], ...]


def with_overs(
    relation: Relation, outputs: Sequence[tuple[str, Expression]]
) -> tuple[Stream, Mapping[Expression, pl.Expr]]:
    """Return the stream with what all functions with OVER in ``outputs`` need, and the result of each.

    Raises:
        UsageError: something in them is not there.
    """
    groups: dict[_Over, list[Expression]] = {}
    ranks: dict[tuple[Expression, ...], list[Expression]] = {}
    for _, output in outputs:
        for node in output.find_all(exp().Window):
            if is_over(node):
                over = _over(relation, node)
                known = ranks.setdefault(over.keys, []) if _is_rank(node) else groups.setdefault(over, [])
                if node not in known:
                    known.append(node)
    stream = relation.stream
    results: dict[Expression, pl.Expr] = {}
    for i, (over, nodes) in enumerate(groups.items()):
        functions = _Functions(f"__over{i}_{{}}", stream)
        for node in nodes:
            results[node] = functions.result(node)
        stream, keys = _with_keys(stream, over.keys, f"__over{i}_key")
        named = [expression.alias(name) for name, expression in functions.aggregates.expressions.items()]
        stream = stream.key_by(*keys).over(*named, **dict(over.options))
    for i, (parts, nodes) in enumerate(ranks.items()):
        stream, keys = _with_keys(stream, parts, f"__rank{i}_key")
        is_dense = any(isinstance(node.this, exp().DenseRank) for node in nodes)
        stream = _ranked(stream, keys, f"__rank{i}", is_dense=is_dense)
        for node in nodes:
            results[node] = pl.col(f"__rank{i}_dense" if isinstance(node.this, exp().DenseRank) else f"__rank{i}")
    return stream, results


def _with_keys(stream: Stream, parts: Sequence[Expression], name: str) -> tuple[Stream, list[str]]:
    """Return the stream with the columns that rows are divided by, and what they are called."""
    scalars, names, computed = Scalars(stream.schema), [], []
    for n, node in enumerate(parts):
        is_column = isinstance(node, exp().Column)
        names.append(node.name if is_column else f"{name}{n}")
        computed += [] if is_column else [scalars(node).alias(names[-1])]
    return stream.with_columns(*computed) if computed else stream, names


def _is_rank(node: Expression) -> bool:
    return isinstance(node.this, exp().Rank | exp().DenseRank)


def _ranked(stream: Stream, keys: Sequence[str], name: str, *, is_dense: bool) -> Stream:
    """Return the stream with the rank of each row by event time, which rows of one time have in common.

    It is the number of the first of them. Without gaps it is how many rows were the first of their time.
    """
    number = f"{name}_number"
    stream = stream.key_by(*keys).over(pl.len().alias(number), rows="unbounded")
    stream = stream.key_by(*keys).over(pl.col(number).min().alias(name), range="0s")
    if is_dense:
        first = (pl.col(number) == pl.col(name)).cast(pl.Int64).alias(f"{name}_first")
        keyed = stream.with_columns(first).key_by(*keys)
        stream = keyed.over(pl.col(f"{name}_first").sum().alias(f"{name}_dense"), range="unbounded")
    return stream.with_columns(pl.col(name).cast(pl.Int64))


class _Functions:
    """The functions of one operator: what is aggregated, and the results that are made of it."""

    def __init__(self, name: str, stream: Stream) -> None:
        self.aggregates = Aggregates(name, stream.schema)
        self._scalars = Scalars(stream.schema)

    def result(self, node: Expression) -> pl.Expr:
        """Return the result of a function with OVER.

        Raises:
            UsageError: it is not there.
        """
        e, function = exp(), node.this
        if isinstance(function, e.Lag):
            return self._lag(function)
        if isinstance(function, e.FirstValue | e.First):
            return self.aggregates.column(self._values(function).first())
        if isinstance(function, e.LastValue | e.Last):
            return self.aggregates.column(self._values(function).last())
        self.aggregates.add_all(function)
        found = self.aggregates.result(function)
        assert found is not None
        return found

    def _values(self, function: Expression) -> pl.Expr:
        found = self._scalars(function.this)
        if not found.meta.root_names():
            raise unsupported(f"{function.sql()} of a constant", "name a column")
        return found

    def _lag(self, function: Expression) -> pl.Expr:
        """Return the value of the first row of the frame, where it reaches back to the row that is asked for."""
        value = self._values(function)
        count = lag_rows(function)
        default = function.args.get("default")
        there = self.aggregates.column(pl.len()) > count
        if default is None or isinstance(default, exp().Null):
            return pl.when(there).then(self.aggregates.column(value.first()))
        value, other = self._scalars.values.alike([value, self._scalars(default)], "LAG")
        return pl.when(there).then(self.aggregates.column(value.first())).otherwise(other)


def lag_rows(function: Expression) -> int:
    """Return how many rows LAG looks back.

    Raises:
        UsageError: it is no number from 1 on.
    """
    offset = function.args.get("offset")
    if offset is None:
        return 1
    if not isinstance(offset, exp().Literal) or offset.is_string or not offset.name.isdecimal() or int(offset.name) < 1:
        raise UsageError(f"sql: {function.sql()} looks back a whole number of rows, from 1 on")
    return int(offset.name)


def _over(relation: Relation, node: Expression) -> _Over:
    """Return how rows are divided and which frame they have.

    Raises:
        UsageError: it is not there.
    """
    function, e = node.this, exp()
    name = f"{function.sql()} OVER"
    if isinstance(function, e.IgnoreNulls | e.RespectNulls):
        raise unsupported(name, "leave it out: rows with a null count")
    if isinstance(function, e.Lead):
        raise unsupported(name, "the rows after a row are not known; use LAG")
    if isinstance(function, e.Ntile | e.PercentRank | e.CumeDist):
        raise unsupported(name, "how many rows there will be is not known; use ROW_NUMBER(), RANK() or DENSE_RANK()")
    if not isinstance(function, e.AggFunc | e.Filter):
        raise unsupported(name, "use ROW_NUMBER(), RANK(), DENSE_RANK(), an aggregate, FIRST_VALUE, LAST_VALUE or LAG")
    order = node.args.get("order")
    if order is None:
        raise UsageError(
            f"sql: {name} needs ORDER BY and the event time of the table, as in (PARTITION BY a ORDER BY ts)"
        )
    time = relation.stream._time_column
    by = [one.this for one in order.expressions]
    if time is None:
        raise UsageError(f"sql: {name} needs event times; call .with_timestamps('{by[0].name}') on the stream before")
    times = relation.times({column.actual: column.actual for column in relation.columns})  # of windows start and end
    if len(by) != 1 or not isinstance(by[0], e.Column) or by[0].name not in times:
        raise unsupported(f"{name} (... {order.sql()})", f"order by the event time of the table alone, '{time}'")
    if order.expressions[0].args.get("desc"):
        raise unsupported(f"{name} (... {order.sql()})", "leave DESC out: rows come in the order of their times")
    keys = tuple(node.args.get("partition_by") or [e.Literal.number(0)])
    if _is_rank(node):
        if node.args.get("spec") is not None:
            raise unsupported(f"{name} with ROWS or RANGE", "leave the frame out")
        return _Over(keys, ())
    if isinstance(function, e.Lag):
        if node.args.get("spec") is not None:
            raise unsupported("LAG with ROWS or RANGE", "leave the frame out")
        return _Over(keys, (("rows", lag_rows(function)),))
    return _Over(keys, (_frame(node.args.get("spec")),))


def _frame(spec: Any) -> tuple[str, Any]:
    """Return the argument of ``over`` that a frame is."""
    if spec is None:
        return "range", "unbounded"
    kind, start, side = str(spec.args.get("kind") or "").upper(), spec.args.get("start"), spec.args.get("start_side")
    end = spec.args.get("end")
    if (kind, start, end or start) == ("RANGE", "CURRENT ROW", "CURRENT ROW") and not spec.args.get("exclude"):
        return "range", "0s"
    if kind not in ("RANGE", "ROWS") or spec.args.get("exclude") or side != "PRECEDING":
        raise unsupported(f"a frame {spec.sql()}", _FRAMES)
    if end is not None and end != "CURRENT ROW":
        raise unsupported(f"a frame {spec.sql()}", "let it end at CURRENT ROW")
    if start == "UNBOUNDED":
        return kind.lower(), "unbounded"
    if kind == "RANGE":
        return "range", f"{interval_ms(cast('Expression', start))}ms"
    if not isinstance(start, exp().Literal) or start.is_string or not start.name.isdecimal() or int(start.name) < 1:
        raise unsupported(f"a frame {spec.sql()}", "begin it a whole number of rows before, from 1 on")
    return "rows", int(start.name)
