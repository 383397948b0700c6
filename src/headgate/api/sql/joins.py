"""Joins of a query: two relations side by side, and the conditions that say how.

``b.ts BETWEEN a.ts - INTERVAL '5' SECOND AND a.ts`` is a range with two ends, which says how long each row waits for
partners. ``x IN (SELECT ...)`` and ``EXISTS (SELECT ...)``, also with NOT, become semi and anti joins. Nothing runs
here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import polars as pl

from headgate.api.sql.expressions import Scalars
from headgate.api.sql.relations import Bounds, Column, Relation, kept_rows, selected
from headgate.api.sql.syntax import PROCTIME, exp, interval_ms, refuse_others
from headgate.api.sql.values import type_of_keys, unsupported
from headgate.dataclass import dataclass
from headgate.errors import UsageError

if TYPE_CHECKING:
    from sqlglot.expressions import Expression

LINK = "compare one of each: WHERE EXISTS (SELECT 1 FROM b WHERE b.id = a.id)"


@dataclass(frozen=True, slots=True)
class TimeRange:
    """``lower_ms`` <= right time - left time <= ``upper_ms``; ``conditions`` say so."""

    lower_ms: int
    upper_ms: int
    conditions: tuple[Expression, ...]


Times: TypeAlias = Mapping[str, int]
"""The columns of a side that tell its event time: name → how many milliseconds later they are."""


def time_range(conditions: Sequence[Expression], left: Times, right: Times) -> TimeRange | None:
    """Return the range that conditions set.

    Conditions about anything else are left out. None: one end is missing, or the ends cross.
    """
    lower: list[int] = []
    upper: list[int] = []
    used = []
    for condition in conditions:
        found = [ends for part in _comparisons(condition) for ends in [_ends(part, left, right)] if ends is not None]
        if len(found) == len(_comparisons(condition)):
            used.append(condition)
            lower += [end for end, _ in found if end is not None]
            upper += [end for _, end in found if end is not None]
    if not lower or not upper or max(lower) > min(upper):
        return None
    return TimeRange(max(lower), min(upper), tuple(used))


def _comparisons(condition: Expression) -> list[Expression]:
    """Return a condition without BETWEEN."""
    if isinstance(condition, exp().Between):
        value, low, high = condition.this, condition.args["low"], condition.args["high"]
        return [exp().GTE(this=value, expression=low), exp().LTE(this=value, expression=high)]
    return [condition]


def _ends(condition: Expression, left: Times, right: Times) -> tuple[int | None, int | None] | None:
    """Return the least and the greatest value of right time - left time that a comparison allows."""
    kind, other = type(condition), condition.args.get("expression")
    terms = [_terms(node, left, right) for node in (condition.this, other)]
    if kind not in (exp().EQ, exp().LTE, exp().LT, exp().GTE, exp().GT) or terms[0] is None or terms[1] is None:
        return None
    lefts, rights, shift_ms = (one - another for one, another in zip(terms[0], terms[1], strict=True))
    if (lefts, rights) not in ((-1, 1), (1, -1)):
        return None
    end = -shift_ms * rights
    if kind is exp().EQ:
        return end, end
    # whole milliseconds: the next one is the first that differs
    strict = 1 if kind in (exp().LT, exp().GT) else 0
    is_upper = (kind in (exp().LTE, exp().LT)) == (rights == 1)
    return (None, end - strict) if is_upper else (end + strict, None)


def _terms(node: Expression | None, left: Times, right: Times) -> tuple[int, int, int] | None:
    """Return how often the left and the right time are in a sum, and the milliseconds that are added to them."""
    if isinstance(node, exp().Column) and (node.name in left or node.name in right):
        return int(node.name in left), int(node.name in right), {**left, **right}[node.name]
    if isinstance(node, exp().Interval):
        return 0, 0, interval_ms(node)
    if not isinstance(node, exp().Add | exp().Sub):
        return None
    one, other = _terms(node.this, left, right), _terms(node.expression, left, right)
    if one is None or other is None:
        return None
    sign = 1 if isinstance(node, exp().Add) else -1
    return one[0] + sign * other[0], one[1] + sign * other[1], one[2] + sign * other[2]


@dataclass(frozen=True, slots=True)
class SubqueryCondition:
    """Rows are kept for which a query has a row with these values (``how`` is semi), or has none (anti)."""

    how: Literal["semi", "anti"]
    name: str
    values: tuple[Expression, ...]
    """What is to be in the first columns of the query; nothing for EXISTS."""
    query: Expression


def subquery_condition(condition: Expression) -> SubqueryCondition | None:
    """Return what a condition says about the rows of a query; None: it is another one."""
    e = exp()
    inner, is_negated = condition.unnest(), False
    while isinstance(inner, e.Not):
        inner, is_negated = inner.this.unnest(), not is_negated
    word = "NOT " if is_negated else ""
    how: Literal["semi", "anti"] = "anti" if is_negated else "semi"
    if isinstance(inner, e.Exists):
        return SubqueryCondition(how, f"{word}EXISTS", (), inner.this)
    if isinstance(inner, e.In) and inner.args.get("query") is not None:
        of = inner.this.unnest()
        values = tuple(of.expressions) if isinstance(of, e.Tuple) else (of,)
        return SubqueryCondition(how, f"{word}IN", values, inner.args["query"])
    return None


def check_no_nulls(condition: SubqueryCondition, around: Any) -> None:
    """Refuse NOT IN where a value may be null, which then would be in the result of no row or of all.

    Args:
        condition: what says NOT IN.
        around: the SELECT that it is in.

    Raises:
        UsageError
    """
    query: Any = condition.query.unnest()
    is_select = isinstance(query, exp().Select)
    columns = [node.unalias() for node in query.expressions] if is_select else [query] * len(condition.values)
    for value, column in zip(condition.values, columns, strict=False):
        for node, tree, where in ((value, around, "beside it"), (column, query, "in the subquery")):
            if not _is_never_null(node, tree):
                raise unsupported(
                    "NOT IN with values that may be null",
                    f"write WHERE {node.sql()} IS NOT NULL {where}, or use NOT EXISTS"
                    if isinstance(node, exp().Column)
                    else "use NOT EXISTS",
                )


def _is_never_null(node: Expression, tree: Expression) -> bool:
    """Whether a SELECT has no row in which ``node`` is null: a condition says so, or what it is."""
    e = exp()
    if isinstance(node, e.Count | e.Literal):
        return True
    certain = list(group.expressions) if (group := tree.args.get("group")) is not None else []
    where = tree.args.get("where")
    for part in all_of(None if where is None else where.this):
        if isinstance(part, e.Not) and isinstance(part.this, e.Is) and isinstance(part.this.expression, e.Null):
            certain.append(part.this.this)
        elif isinstance(part, e.EQ | e.NEQ | e.LT | e.LTE | e.GT | e.GTE):
            certain += [part.this, part.expression]
    return node in certain


def all_of(condition: Expression | None) -> list[Expression]:
    """Return what ``AND`` brings together."""
    if condition is None:
        return []
    return list(condition.flatten()) if isinstance(condition, exp().And) else [condition]


def joined(
    left: Relation,
    right: Relation,
    join: Expression,
    place: int,
    *,
    resolved: Callable[[Expression, Relation], Expression],
    where: Expression | None,
    what: str = "",
) -> Relation:
    """Return two relations side by side: by equal columns, in equal windows if both have some.

    Args:
        left, right: what is joined.
        join: how.
        place: the number of the join in its query.
        resolved: gives an expression in which columns have the names of the stream.
        where: of the query: it may say what an inner join does not.
        what: what asks for the join, if it is no JOIN.

    Raises:
        UsageError: such a join is not there.
    """
    sides = {"": "inner", "LEFT": "left", "RIGHT": "right", "FULL": "full"}
    how: Any = {"SEMI": "semi", "ANTI": "anti"}.get(join.args.get("kind") or "", sides.get(join.args.get("side") or ""))
    if how is None or join.args.get("method"):
        raise unsupported(join.sql().split(" ON ")[0], "use JOIN ... ON with equal columns")
    refuse_others(join)
    left, right = (side.without_top().without_open_windows() for side in (left, right))
    # names of its own keep equal names of both sides apart; numbered, since a query may have several joins
    both = Relation(
        left.stream,
        tuple(_moved(column, f"__l{place}_{i}") for i, column in enumerate(left.columns))
        + tuple(_moved(column, f"__r{place}_{i}") for i, column in enumerate(right.columns)),
    )
    names = dict(zip([column.actual for column in both.columns], [*left.columns, *right.columns], strict=True))
    using: list[Any] = join.args.get("using") or []
    pairs: list[tuple[Expression, Expression]] = [
        (_column_of(left, one.name), _column_of(right, one.name)) for one in using
    ]
    rest: list[Expression] = []
    on = join.args.get("on")
    # WHERE of an outer join is about its results: it must not decide which rows match
    wheres = _conditions_about(both, where, resolved) if how == "inner" else []
    conditions = [resolved(part, both) for part in all_of(on)]
    for condition in conditions or wheres:
        pair = _sides(condition, names)
        if pair is not None and all(isinstance(side, exp().Column) for side in pair):
            pairs.append(pair)
        elif conditions:
            rest.append(condition)
    if not pairs or how != "inner":  # equal expressions of columns
        equal = [(one, pair) for one in rest or wheres for pair in [_sides(one, names)] if pair is not None]
        pairs += [pair for _, pair in equal]
        rest = [one for one in rest if all(one is not other for other, _ in equal)]
    if not pairs:
        raise unsupported(f"{what or 'JOIN'} without equal columns", LINK if what else "add ON a.column = b.column")
    times = [
        side.times({name: one.actual for name, one in names.items() if name[2] == mark})
        for mark, side in (("l", left), ("r", right))
    ]
    version = _version(join.this, left)
    in_window = not version and _are_of_one_window(pairs, left.bounds, right.bounds)
    near = None if version or in_window else time_range([*rest, *wheres], times[0], times[1])
    if near is not None and how != "inner":
        rest = [condition for condition in rest if condition not in near.conditions]
    if rest and how != "inner":
        name = what or f"{how.upper()} JOIN"
        raise unsupported(f"{name} with a condition that is no equality", "filter a table before")
    values = [Scalars(side.stream.schema) for side in (left, right)]
    dtypes = [
        type_of_keys([one.values.type_of(one(side)) for one, side in zip(values, pair, strict=True)], _shown(pair))
        for pair in pairs
    ]
    streams = []
    for i, (relation, mark) in enumerate(((left, "l"), (right, "r"))):
        chosen = {
            f"__{mark}{place}_{n}": pl.col(column.actual)
            for n, column in enumerate(relation.columns)
            if column.actual != PROCTIME
        }
        translate = values[i]
        for n, (pair, dtype) in enumerate(zip(pairs, dtypes, strict=True)):
            key = translate(pair[i])
            chosen[f"__key{mark}_{n}"] = key if translate.values.type_of(key) == dtype else key.cast(dtype)
        if in_window and relation.bounds is not None:
            chosen[f"__time{mark}"] = relation.bounds.last_moment()
        elif near is not None:
            chosen[f"__time{mark}"] = pl.col(str(relation.stream._time_column))
        stream = selected(relation.stream, chosen)
        if in_window:
            stream._time_column = f"__time{mark}"
        elif near is not None:
            exact = next((name for name, shift_ms in times[i].items() if shift_ms == 0), "")
            stream._time_column = exact or f"__time{mark}"
        streams.append(stream)
    keys: dict[str, Any] = {
        f"{side}_on": [f"__key{side[0]}_{n}" for n in range(len(pairs))] for side in ("left", "right")
    }
    limit: dict[str, Any] = {"ttl": None}
    if in_window and left.bounds is not None:
        limit = {"window": left.bounds.again()}
    elif near is not None:
        finer = 1 if how == "inner" else 0  # the conditions are checked again, with what is finer than milliseconds
        ends = (near.lower_ms - finer, near.upper_ms + finer)
        limit = {"within": tuple(timedelta(milliseconds=end) for end in ends)}
    if version and how not in ("inner", "left"):
        raise unsupported(f"{how.upper()} JOIN FOR SYSTEM_TIME AS OF", "use JOIN or LEFT JOIN")
    if version == "of the clock":
        stream = streams[0].join(streams[1].broadcast(), how=how, **keys)
    elif version:
        by = {f"by_{side}": keys[f"{side}_on"] for side in ("left", "right")}
        stream = streams[0].join_asof(streams[1], how=how, **by)
    else:
        stream = streams[0].join(streams[1], how=how, **keys, **limit)
    for condition in rest:
        stream = kept_rows(stream, condition)
    columns = both.columns if how not in ("semi", "anti") else both.columns[: len(left.columns)]
    kept = None
    has_time = in_window or (near is not None and how not in ("right", "full"))  # that of the left side
    if has_time and left.bounds is not None:
        actual = {column.actual: f"__l{place}_{n}" for n, column in enumerate(left.columns)}
        start, end = (actual.get(name, "") for name in (left.bounds.start, left.bounds.end))
        kept = replace(left.bounds, start=start, end=end)
    return Relation(stream, columns, kept)


def _version(table: Expression, left: Relation) -> Literal["", "of the clock", "of event time"]:
    """Return which version of a table a row is joined with; "": all of it, as it changes.

    ``FOR SYSTEM_TIME AS OF a.now``, which is the clock, means what the table has when the row comes, and
    ``AS OF a.ts``, its event time, what the table had at that time.

    Raises:
        UsageError: the time is another one.
    """
    version: Any = table.args.get("version")
    if version is None:
        return ""
    time = version.expression
    if isinstance(time, exp().Column) and left.has(time.name, time.table):
        actual = left.column(time.name, time.table).actual
        if actual == PROCTIME:
            return "of the clock"
        if actual == left.stream._time_column:
            return "of event time"
    raise unsupported(
        f"FOR SYSTEM_TIME AS OF {time.sql()}",
        "name the event time of the table on the left, or a column that is PROCTIME()",
    )


def _conditions_about(
    relation: Relation, where: Expression | None, resolved: Callable[[Expression, Relation], Expression]
) -> list[Expression]:
    """Return the conditions of WHERE that are about ``relation`` alone."""
    found = []
    for part in all_of(where):
        with suppress(UsageError):
            found.append(resolved(part, relation))
    return found


def _column_of(relation: Relation, name: str) -> Expression:
    return cast("Expression", exp().column(relation.column(name, "").actual, quoted=True))


def _moved(column: Column, actual: str) -> Column:
    return column if column.actual == PROCTIME else replace(column, actual=actual)


def _sides(condition: Expression, names: Mapping[str, Column]) -> tuple[Expression, Expression] | None:
    """Return the sides of an equality of two tables in the columns of their streams, that of the left table first."""
    if not isinstance(condition, exp().EQ):
        return None
    sides: dict[str, Expression] = {}
    for side in (condition.this, condition.expression):
        marks = {column.name[:3] for column in side.find_all(exp().Column)}
        if len(marks) == 1:
            renamed = side.copy().transform(
                lambda node: (
                    exp().column(names[node.name].actual, quoted=True)
                    if isinstance(node, exp().Column) and node.name in names
                    else node
                )
            )
            sides[marks.pop()] = renamed
    return (sides["__l"], sides["__r"]) if sides.keys() == {"__l", "__r"} else None


def _are_of_one_window(pairs: list[tuple[Expression, Expression]], left: Bounds | None, right: Bounds | None) -> bool:
    """Whether rows that are equal in ``pairs`` belong to the same window."""
    if left is None or right is None or left.windows != right.windows:
        return False
    ends = {(left.start, right.start), (left.end, right.end)}
    return any(
        all(isinstance(side, exp().Column) for side in pair) and (pair[0].name, pair[1].name) in ends for pair in pairs
    )


def _shown(pair: tuple[Expression, Expression]) -> str:
    return " = ".join(side.sql() for side in pair)
