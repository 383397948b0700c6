"""Parts of expressions that need one encoded column each: they are computed once for each value, not for each row.

The structure of an expression is what Polars writes down. A part is taken out only where everything in it is known to
give a row's result from that row alone, and only from places in which any column may stand.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field
from typing import Any

import polars as pl

from headgate.dataclass import dataclass

_PARTS: Mapping[str, tuple[str, ...]] = {
    "BinaryExpr": ("left", "right"),
    "Ternary": ("predicate", "truthy", "falsy"),
    "Cast": ("expr",),
}
"""What is made of other expressions, but for functions and aliases, and where these are."""


@dataclass(slots=True)
class ByValue:
    """Expressions of records, divided.

    Attributes:
        of_values: for each encoded column, the expressions that are computed for each of its values.
        whole: results that are one of these as a whole: the column and the name of the expression in ``of_values``.
        rest: the expressions of all other results, with the names of those in ``of_values`` as columns.
    """

    of_values: dict[str, list[pl.Expr]] = field(default_factory=dict)
    whole: dict[str, tuple[str, str]] = field(default_factory=dict)
    rest: list[pl.Expr] = field(default_factory=list)


def divide(expressions: Mapping[str, pl.Expr], encoded: Collection[str], taken: Collection[str]) -> ByValue | None:
    """Return the expressions of results by their names, divided; None: nothing can be computed for each value.

    Args:
        expressions: elementwise ones.
        encoded: the columns whose parts are taken out.
        taken: names that parts must not get.
    """
    found = ByValue()
    prefix = "value"
    while any(name.startswith(prefix) for name in (*taken, *expressions)):
        prefix += "_"
    names: dict[str, str] = {}

    def take_out(column: str, tree: Any) -> Any:
        key = json.dumps(tree)
        if key not in names:
            names[key] = f"{prefix}{len(names)}"
            found.of_values.setdefault(column, []).append(_expression(tree).alias(names[key]))
        return {"Column": names[key]}

    for name, expression in expressions.items():
        tree = _tree(expression)
        if tree is None:
            found.rest.append(expression.alias(name))
            continue
        while "Alias" in tree:
            tree = tree["Alias"][0]
        column = _only_column(tree, encoded)
        if column is not None:
            found.whole[name] = column, take_out(column, tree)["Column"]
        else:
            divided = _divided(tree, encoded, take_out)
            found.rest.append((expression if divided == tree else _expression(divided)).alias(name))
    return found if found.of_values else None


def _divided(tree: Any, encoded: Collection[str], take_out: Callable[[str, Any], Any]) -> Any:
    """Return an expression with columns in the place of its largest parts that need one encoded column."""
    column = _only_column(tree, encoded)
    if column is not None:
        return take_out(column, tree)
    (name, inner), *others = tree.items()
    if others:
        return tree
    if name == "Alias":
        return {name: [_divided(inner[0], encoded, take_out), *inner[1:]]}
    if name == "Function":
        return {name: inner | {"input": [_named(one, _divided(one, encoded, take_out)) for one in inner["input"]]}}
    if name in _PARTS:
        return {name: inner | {part: _divided(inner[part], encoded, take_out) for part in _PARTS[name]}}
    return tree


def _named(tree: Any, divided: Any) -> Any:
    """Return a divided expression with the name that it had: ``struct`` calls its fields by the names of its inputs."""
    if divided == tree:
        return tree
    name = _expression(tree).meta.output_name()
    return divided if _expression(divided).meta.output_name() == name else {"Alias": [divided, name]}


def _only_column(tree: Any, encoded: Collection[str]) -> str | None:
    """Return the column that an expression needs, if that is one encoded column, and it is not that column itself."""
    columns = _columns(tree)
    if columns is None or len(columns) != 1 or "Column" in tree:
        return None
    (column,) = columns
    return column if column in encoded else None


def _columns(tree: Any) -> frozenset[str] | None:
    """Return the columns that an expression needs; None: something in it is not known."""
    if not isinstance(tree, Mapping) or len(tree) != 1:
        return None
    name, inner = next(iter(tree.items()))
    match name:
        case "Column":
            return frozenset([inner])
        case "Literal":
            return frozenset()
        case "Alias":
            parts: Sequence[Any] = inner[:1]
        case "Function":
            parts = inner["input"]
        case _ if name in _PARTS:
            parts = [inner[part] for part in _PARTS[name]]
        case _:
            return None
    found = [_columns(part) for part in parts]
    known = [columns for columns in found if columns is not None]
    return frozenset().union(*known) if len(known) == len(found) else None


def _tree(expression: pl.Expr) -> Any:
    """Return the structure of an expression; None: the expression is not what its structure says, as with NaN in it."""
    try:
        with io.StringIO() as file:
            expression.meta.serialize(file, format="json")
            tree = json.loads(file.getvalue())
        is_same = _expression(tree).meta.serialize() == expression.meta.serialize()
    except pl.exceptions.ComputeError:
        return None
    return tree if is_same else None


def _expression(tree: Any) -> pl.Expr:
    return pl.Expr.deserialize(io.StringIO(json.dumps(tree)), format="json")
