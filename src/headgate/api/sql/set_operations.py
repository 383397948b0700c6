"""Rows without duplicates: ``SELECT DISTINCT``, ``UNION``, ``INTERSECT`` and ``EXCEPT``. Nothing runs here.

In these, null is equal to null and NaN to NaN. A key of streams has neither, so each column has two columns of the key:
the value, or another one in place of null and NaN, and which of these it is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import polars as pl

from headgate.api.sql.expressions import PROCTIME
from headgate.api.sql.relations import Relation, relation_of, selected
from headgate.api.sql.values import Type, Values, unsupported
from headgate.api.streams.changes import Changes
from headgate.api.streams.stream import Stream
from headgate.errors import UsageError
from headgate.operators.changes import INSERT, OP

_VALUE, _KIND, _COUNT = "__value_{}", "__kind_{}", "__count"
_IS_VALUE, _IS_NULL, _IS_NAN = range(3)


def distinct(relation: Relation) -> Relation:
    """Return each row once.

    Raises:
        UsageError: rows of such a type cannot be compared.
    """
    _refuse_clocks(relation, "DISTINCT")
    stream, names = relation.stream, [column.actual for column in relation.columns]
    keys = _keys(stream, names, "DISTINCT")
    if stream._change_keys is None:
        rows = {name: pl.col(name) for name in names}
        found = selected(stream, rows | keys).key_by(*keys).deduplicate("first", within=None)
        return replace(relation, stream=selected(found, rows))
    counted = selected(stream, keys).key_by(*keys).agg(pl.len().alias(_COUNT), retractions=True)
    types = {name: Values(stream.schema).type_of(pl.col(name)) for name in names}
    return replace(
        relation, stream=selected(counted, {name: _value(i, dtype) for i, (name, dtype) in enumerate(types.items())})
    )


def union_all(left: Relation, right: Relation) -> Relation:
    """Return the rows of both.

    Raises:
        UsageError: they have different columns.
    """
    one, other = (found.stream for found in _alike(left, right, "UNION"))
    if one._change_keys is not None or other._change_keys is not None:
        one, other = _as_changes(one), _as_changes(other)
    return relation_of(one.union(other), "")


def in_both(left: Relation, right: Relation, *, is_negated: bool) -> Relation:
    """Return each row of ``left`` once that ``right`` has, or has not.

    Raises:
        UsageError: they have different columns.
    """
    what = "EXCEPT" if is_negated else "INTERSECT"
    left, right = _alike(left, right, what)
    rows = {column.actual: pl.col(column.actual) for column in left.columns}
    one, other = distinct(left).stream, right.stream
    keys = _keys(one, list(rows), what)
    joined = selected(one, rows | keys).join(
        selected(other, keys), on=list(keys), how="anti" if is_negated else "semi", ttl=None
    )
    return relation_of(selected(joined, rows), "")


def _alike(left: Relation, right: Relation, what: str) -> tuple[Relation, Relation]:
    """Return both with the names of ``left`` and equal types."""
    if len(left.columns) != len(right.columns):
        raise UsageError(f"sql: {what} of {len(left.columns)} and {len(right.columns)} columns")
    for relation in (left, right):
        _refuse_clocks(relation, what)
    has_changes = any(one.stream._change_keys is not None for one in (left, right))
    if has_changes and any(column.actual == OP for column in left.columns):
        raise UsageError("sql: column 'op' of a result that changes says what changes; give yours another name with AS")
    found: list[dict[str, pl.Expr]] = [{}, {}]
    sides = [(one, Values(one.stream.schema)) for one in (left, right)]
    for pair in zip(left.columns, right.columns, strict=True):
        types = [values.type_of(pl.col(column.actual)) for (_, values), column in zip(sides, pair, strict=True)]
        are_whole = all(dtype.is_integer() for dtype in types)
        if types[0] != types[1] and not are_whole:
            names = " and ".join(f"'{one.name}' of type {dtype}" for one, dtype in zip(pair, types, strict=True))
            raise UsageError(f"sql: {what} of {names}; CAST one of them")
        for columns, column in zip(found, pair, strict=True):
            is_same = types[0] == types[1]
            columns[pair[0].actual] = pl.col(column.actual) if is_same else pl.col(column.actual).cast(pl.Int64)
    one, other = (selected(side.stream, columns) for (side, _), columns in zip(sides, found, strict=True))
    return relation_of(one, ""), relation_of(other, "")


def _refuse_clocks(relation: Relation, what: str) -> None:
    for column in relation.columns:
        if column.actual == PROCTIME:
            raise unsupported(f"{what} of PROCTIME() in column '{column.name}'", "add PROCTIME() in a SELECT around it")


def _as_changes(stream: Stream) -> Stream:
    """Return a stream with changes; records are rows that come."""
    if stream._change_keys is not None:
        return stream
    found = stream.select(*stream.columns, pl.lit(INSERT).alias(OP))
    found._changes = Changes((), retractions=True)
    return found


def _keys(stream: Stream, names: list[str], what: str) -> dict[str, pl.Expr]:
    values, found = Values(stream.schema), dict[str, pl.Expr]()
    for i, name in enumerate(names):
        column, dtype = pl.col(name), values.type_of(pl.col(name))
        kind: Any = pl.when(column.is_null()).then(_IS_NULL)
        value = column.cast(pl.String) if dtype.is_decimal() else column
        if dtype.is_float():
            kind = kind.when(column.is_nan()).then(_IS_NAN)
            value = column.fill_nan(None) + 0.0  # -0.0 is 0.0
        found[_VALUE.format(i)] = value.fill_null(_in_place(dtype, what))
        found[_KIND.format(i)] = kind.otherwise(_IS_VALUE).cast(pl.Int8)
    return found


def _in_place(dtype: Type, what: str) -> pl.Expr:
    """Return a value in place of none."""
    if dtype.is_nested():
        raise unsupported(f"{what} of a column of type {dtype}", "make columns of its parts")
    if dtype.is_decimal() or isinstance(dtype, pl.String | pl.Enum):
        return pl.lit("")
    if isinstance(dtype, pl.Binary):
        return pl.lit(b"")
    return pl.lit(0).cast(dtype)


def _value(place: int, dtype: Type) -> pl.Expr:
    """Return a column of a row of its columns in the key."""
    value, kind = pl.col(_VALUE.format(place)), pl.col(_KIND.format(place))
    found: pl.Expr = pl.when(kind != _IS_NULL).then(value)
    if dtype.is_float():
        found = pl.when(kind == _IS_NAN).then(float("nan")).otherwise(found)
    return found.cast(dtype)
