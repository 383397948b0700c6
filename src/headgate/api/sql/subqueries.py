"""Conditions about the rows of another query: ``x IN (SELECT ...)`` and ``EXISTS (SELECT ...)``, also with NOT.

They become semi and anti joins (``api.sql.query``). Nothing runs here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from headgate.api.sql.expressions import exp
from headgate.api.sql.values import unsupported
from headgate.dataclass import dataclass

if TYPE_CHECKING:
    from sqlglot.expressions import Expression


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
