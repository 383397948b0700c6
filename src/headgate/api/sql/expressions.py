"""Expressions of SQL about one record as expressions of Polars, with the nulls of SQL.

Where systems differ: a missing match gives null, ``CONCAT`` leaves nulls out. What depends on types, such as arithmetic
and ``CAST``, is in ``api.sql.values``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import polars as pl
import pyarrow as pa

from headgate.api.sql import functions
from headgate.api.sql.functions import regular_expression
from headgate.api.sql.syntax import exp, interval_months, interval_ms, is_proctime, refuse_others
from headgate.api.sql.values import Values, literal, unsupported
from headgate.errors import UsageError

if TYPE_CHECKING:
    from sqlglot.expressions import Expression


Value = Callable[["Expression"], pl.Expr | None]


class Scalars:
    """Makes expressions about one record of syntax trees, in which columns have the names of the stream."""

    def __init__(self, schema: pa.Schema, value: Value = lambda node: None) -> None:
        """Make it.

        Args:
            schema: of the records.
            value: what a part is known as, such as the column of an aggregate; None: it is translated.
        """
        self.values = Values(schema)
        self._value = value

    def __call__(self, node: Expression) -> pl.Expr:
        """Return the expression.

        Raises:
            UsageError: something in it is not there.
        """
        known = self._value(node)
        if known is not None:
            return known
        if is_proctime(node):
            raise unsupported("PROCTIME() in an expression", "use it for TUMBLE or FOR SYSTEM_TIME AS OF")
        if isinstance(node, exp().Explode | exp().Unnest):
            raise unsupported("UNNEST in an expression", "write FROM t CROSS JOIN UNNEST(t.items) AS x (item)")
        translate = _scalars().get(type(node))
        if translate is not None:
            refuse_others(node)
            found: pl.Expr = translate(node, self)
            return found
        if isinstance(node, exp().AggFunc):
            raise UsageError(f"sql: {node.sql()} is an aggregate, which stands in SELECT or HAVING")
        if isinstance(node, exp().Anonymous):
            own = functions.translated(node.name.upper(), node.expressions, self)
            if own is not None:
                return own
            function = _FUNCTIONS.get(node.name.upper())
            if function is None:
                raise unsupported(f"the function {node.name.upper()}", "use with_columns with a Polars expression")
            count, translate = function
            if len(node.expressions) != count:
                raise UsageError(f"sql: {node.sql()} has a wrong number of arguments")
            return translate(node.expressions, self)
        if isinstance(node, exp().Window):
            raise unsupported(f"{node.this.sql()} OVER here", "select it in a subquery, and use its name outside")
        name = node.key.upper()
        raise unsupported(
            f"the function {name}" if isinstance(node, exp().Func) else name,
            "use with_columns with a Polars expression",
        )

    def argument(self, node: Expression, kind: str, of: Expression) -> pl.Expr:
        """Return an argument of the function ``of``, which is to be of a kind (``values.kind_of``).

        Raises:
            UsageError: it is of another one, or something in it is not there.
        """
        return self.values.of_kind(kind, self(node), of.sql("duckdb"))

    def condition(self, node: Expression) -> pl.Expr:
        """Return the expression, which is to be true or false.

        Raises:
            UsageError: it is of another type, or something in it is not there.
        """
        return self.values.condition(self(node), node.sql())


Inner = Scalars


def _literal(node: Expression, inner: Inner) -> pl.Expr:
    return pl.lit(node.name) if node.is_string else literal(node.name)


def _negative(node: Expression, inner: Inner) -> pl.Expr:
    of = node.this
    if isinstance(of, exp().Literal) and not of.is_string:
        return literal(f"-{of.name}")
    return inner.values.negative(inner(of), node.sql())


def _case(node: Expression, inner: Inner) -> pl.Expr:
    subject, default = node.args.get("this"), node.args.get("default")
    conditions, results = [], [pl.lit(None) if default is None else inner(default)]
    for branch in node.args["ifs"]:
        condition = branch.this if subject is None else exp().EQ(this=subject, expression=branch.this)
        conditions.append(inner.condition(condition))
        results.append(inner(branch.args["true"]))
    otherwise, *results = inner.values.alike(results, "CASE")
    for condition, result in zip(reversed(conditions), reversed(results), strict=True):
        otherwise = pl.when(condition).then(result).otherwise(otherwise)
    return otherwise


def _if(node: Expression, inner: Inner) -> pl.Expr:
    default = node.args.get("false")
    results = [inner(node.args["true"]), pl.lit(None) if default is None else inner(default)]
    yes, no = inner.values.alike(results, "IF")
    return pl.when(inner.condition(node.this)).then(yes).otherwise(no)


def _in(node: Expression, inner: Inner) -> pl.Expr:
    if node.args.get("query") is not None:
        raise unsupported("IN with a subquery", "join with it")
    if not node.expressions:
        raise UsageError(f"sql: {node.sql()} has no values; write IN (1, 2)")
    found = [_compared(node.this, one, inner, lambda a, b: a == b, "IN") for one in node.expressions]
    result = found[0]
    for other in found[1:]:
        result = result | other
    return result


def _between(node: Expression, inner: Inner) -> pl.Expr:
    low = _compared(node.this, node.args["low"], inner, lambda a, b: a >= b, "BETWEEN")
    return low & _compared(node.this, node.args["high"], inner, lambda a, b: a <= b, "BETWEEN")


def _compared(
    left: Expression, right: Expression, inner: Inner, combine: Callable[[pl.Expr, pl.Expr], pl.Expr], text: str
) -> pl.Expr:
    return inner.values.compared(inner(left), inner(right), combine, text)


def _nullif(node: Expression, inner: Inner) -> pl.Expr:
    if isinstance(node.expression, exp().Null):
        return inner(node.this)
    equal = _compared(node.this, node.expression, inner, lambda a, b: a == b, "NULLIF")
    return pl.when(equal.fill_null(False)).then(None).otherwise(inner(node.this))


def literal_text(node: Expression | None, of: str) -> str:
    """Return the text of a literal.

    Raises:
        UsageError: it is something else.
    """
    if not isinstance(node, exp().Literal) or not node.is_string:
        raise unsupported(f"{of} with a pattern that is no literal", "write the pattern in quotes")
    return str(node.name)


def _pattern(node: Expression | None, of: str) -> str:
    """Return a regular expression that is written in quotes."""
    return regular_expression(literal_text(node, of), of)


def _whole(node: Expression, of: str) -> int:
    if not isinstance(node, exp().Literal) or node.is_string or not node.name.isdecimal():
        raise unsupported(f"{of} with {node.sql()}", "write a whole number from 0 on")
    return int(node.name)


def _like(node: Expression, inner: Inner, flags: str = "s") -> pl.Expr:
    pattern = literal_text(node.expression, "LIKE")
    if node.args.get("negate"):
        positive = node.copy()
        positive.set("negate", None)
        return ~_like(positive, inner, flags)
    parts = (".*" if c == "%" else "." if c == "_" else re.escape(c) for c in pattern)
    return inner.argument(node.this, "texts", node).str.contains(f"^(?{flags}:{''.join(parts)})$")


_TYPES: dict[str, pl.DataType] = {
    "TINYINT": pl.Int8(),
    "SMALLINT": pl.Int16(),
    "INT": pl.Int32(),
    "BIGINT": pl.Int64(),
    "FLOAT": pl.Float32(),
    "DOUBLE": pl.Float64(),
    "TEXT": pl.String(),
    "VARCHAR": pl.String(),
    "BOOLEAN": pl.Boolean(),
    "DATE": pl.Date(),
    "TIMESTAMP": pl.Datetime("us"),
    "TIMESTAMPNTZ": pl.Datetime("us"),
    "DATETIME": pl.Datetime("us"),
}


def _cast(node: Expression, inner: Inner, *, strict: bool = True) -> pl.Expr:
    kind = node.args["to"]
    name = kind.this.name
    sizes = [int(size.this.name) for size in kind.expressions]
    if name in ("DECIMAL", "NUMERIC"):
        dtype: pl.DataType = pl.Decimal(*(sizes if len(sizes) == 2 else (sizes[0], 0) if sizes else (18, 3)))
    elif name in _TYPES and not sizes:
        dtype = _TYPES[name]
    else:
        raise unsupported(f"CAST to {kind.sql()}", f"use one of {', '.join(_TYPES)}, DECIMAL(precision, scale)")
    if isinstance(dtype, pl.Date | pl.Datetime) and isinstance(node.this, exp().Literal):
        try:
            moment = datetime.fromisoformat(node.this.name)
        except ValueError:
            raise UsageError(f"sql: '{node.this.name}' is no {name}, such as '2020-12-31 23:59:59'") from None
        if moment.tzinfo is not None:
            raise UsageError(
                f"sql: '{node.this.name}' has an offset, which DATE and TIMESTAMP have not; write it without"
            )
        return pl.lit(moment).cast(dtype)
    return inner.values.cast(inner(node.this), dtype, node.sql("duckdb"), strict=strict)


_PARTS = {unit: unit.lower() for unit in ("YEAR", "QUARTER", "MONTH", "WEEK", "DAY", "HOUR", "MINUTE", "SECOND")} | {
    "DOY": "ordinal_day"
}
"""What Polars calls each part of a time."""


def _part(unit: str, of: pl.Expr) -> pl.Expr:
    if unit not in _PARTS:
        raise unsupported(f"EXTRACT of {unit}", f"use one of {', '.join(sorted(_PARTS))}")
    found: pl.Expr = getattr(of.dt, _PARTS[unit])()
    return found.cast(pl.Int64)


_STRFTIME = {letter: f"%{letter}" for letter in "YmdHMSyjaAbBpI%"} | {"f": "%6f", "g": "%3f"}
"""The letters of DuckDB's patterns whose meaning Polars knows; it has other names for some."""


def _date_format(of: pl.Expr, pattern: str) -> pl.Expr:
    """Format a time; the pattern is Java's, as Flink and Spark have it, or that of strftime."""
    if "%" not in pattern:
        return of.dt.strftime(functions.java_pattern(pattern, "DATE_FORMAT"))
    for letter in re.findall("%(.?)", pattern.replace("%%", "")):
        if letter not in _STRFTIME:
            raise unsupported(f"STRFTIME with '%{letter}'", f"use %{', %'.join(_STRFTIME)}")
    return of.dt.strftime(re.sub("%(.)", lambda match: _STRFTIME[match[1]], pattern))


def _split_index(of: pl.Expr, separator: str, place: int) -> pl.Expr:
    return of.str.split(separator).list.get(place, null_on_oob=True)


_FUNCTIONS: dict[str, tuple[int, Callable[[list[Any], Inner], pl.Expr]]] = {
    "SPLIT_INDEX": (
        3,
        lambda of, inner: _split_index(
            inner.values.of_kind("texts", inner(of[0]), "SPLIT_INDEX"),
            literal_text(of[1], "SPLIT_INDEX"),
            _whole(of[2], "SPLIT_INDEX"),
        ),
    ),
    "DATE_FORMAT": (
        2,
        lambda of, inner: _date_format(
            inner.values.moment(inner(of[0]), "DATE_FORMAT"), literal_text(of[1], "DATE_FORMAT")
        ),
    ),
}
"""Functions that sqlglot has no class for: how many arguments they have, and what they are."""


def _split_part(node: Expression, inner: Inner) -> pl.Expr:
    place = node.args.get("part_index") or node.args.get("partIndex")
    if not isinstance(place, exp().Literal) or int(place.name) < 1:
        raise unsupported("SPLIT_PART with a place that is no positive number", "use SPLIT_INDEX, which counts from 0")
    of = inner.argument(node.this, "texts", node)
    found = _split_index(of, literal_text(node.args["delimiter"], "SPLIT_PART"), int(place.name) - 1)
    return pl.when(of.is_not_null()).then(found.fill_null(""))


def _regexp_extract(node: Expression, inner: Inner) -> pl.Expr:
    group = node.args.get("group")
    return inner.argument(node.this, "texts", node).str.extract(
        _pattern(node.expression, "REGEXP_EXTRACT"), 0 if group is None else _whole(group, "REGEXP_EXTRACT")
    )


def _replace(node: Expression, inner: Inner) -> pl.Expr:
    pattern, replacement = literal_text(node.expression, "REPLACE"), node.args["replacement"]
    of = inner.argument(node.this, "texts", node)
    if isinstance(replacement, exp().Null):
        return pl.lit(None, pl.String)
    by = inner.argument(replacement, "texts", node)
    if not pattern:
        return functions.spread(of, by)
    if isinstance(replacement, exp().Literal):
        return of.str.replace_all(pattern, replacement.name, literal=True)
    return functions.spread(of.str.split(pattern), by).list.join(by)  # replace_all refuses some nulls


def _trim(node: Expression, inner: Inner) -> pl.Expr:
    of = inner.argument(node.this, "texts", node).str
    characters = " " if node.args.get("expression") is None else literal_text(node.expression, "TRIM")
    sides = {"LEADING": of.strip_chars_start, "TRAILING": of.strip_chars_end}
    found: pl.Expr = sides.get(str(node.args.get("position") or "").upper(), of.strip_chars)(characters)
    return found


def _substring(node: Expression, inner: Inner) -> pl.Expr:
    """Return a part of a text: its characters are numbered from 1 on, and from -1 on from the end."""
    of, start, length = inner.argument(node.this, "texts", node), node.args.get("start"), node.args.get("length")
    if isinstance(length, exp().Neg):
        raise unsupported("SUBSTRING with a negative length", "write a length from 0 on")
    place = (pl.lit(1) if start is None else inner(start)).cast(pl.Int64)
    begin = pl.when(place < 0).then(of.str.len_chars().cast(pl.Int64) + place).otherwise(place - 1)
    first = pl.max_horizontal(begin, 0)
    if length is None:
        return pl.when(place.is_not_null()).then(of.str.slice(first))
    size = inner(length).cast(pl.Int64)
    found = of.str.slice(first, pl.max_horizontal(begin + size - first, 0))
    return pl.when(place.is_not_null() & size.is_not_null()).then(found)


def _trunc(node: Expression, inner: Inner) -> pl.Expr:
    units = {"SECOND": "1s", "MINUTE": "1m", "HOUR": "1h", "DAY": "1d", "WEEK": "1w", "MONTH": "1mo"}
    units |= {"QUARTER": "1q", "YEAR": "1y"}
    unit = str(node.args["unit"].name).upper()
    if unit not in units:
        raise unsupported(f"DATE_TRUNC to {unit}", f"use one of {', '.join(units)}")
    return inner.argument(node.this, "times", node).dt.truncate(units[unit])


def _interval(node: Expression, inner: Inner) -> pl.Expr:
    return pl.duration(milliseconds=interval_ms(node))


def _sum(node: Expression, inner: Inner) -> pl.Expr:
    for moment, interval in ((node.this, node.expression), (node.expression, node.this)):
        months = interval_months(interval)
        if months is not None:
            return inner.values.moment(inner(moment), node.sql()).dt.offset_by(f"{months}mo")
    return inner.values.arithmetic(inner(node.this), inner(node.expression), lambda a, b: a + b, node.sql())


def _difference(node: Expression, inner: Inner) -> pl.Expr:
    months = interval_months(node.expression)
    if months is not None:
        return inner.values.moment(inner(node.this), node.sql()).dt.offset_by(f"{-months}mo")
    return inner.values.arithmetic(inner(node.this), inner(node.expression), lambda a, b: a - b, node.sql())


def _array(node: Expression, inner: Inner) -> pl.Expr:
    """Return an array of values."""
    if not node.expressions:
        raise unsupported("an ARRAY without elements", "name one, such as ARRAY[NULL]")
    elements = inner.values.alike([inner(one) for one in node.expressions], "ARRAY")
    if any(isinstance(inner.values.type_of(one), pl.List) for one in elements):
        raise unsupported("an ARRAY of arrays", "use ARRAY_CONCAT for one of all their elements")
    return pl.concat_list(elements)


def _element(node: Expression, inner: Inner) -> pl.Expr:
    """Return an element of an array by its place, or the value of a key of a map, which is a literal."""
    if len(node.expressions) != 1 or isinstance(node.expressions[0], exp().Slice):
        raise unsupported(f"{node.sql('duckdb')}", "name one element, as in a[1]")
    (at,) = node.expressions
    of = inner(node.this)
    dtype = inner.values.type_of(of)
    if not isinstance(dtype, pl.List):
        raise UsageError(f"sql: {node.this.sql('duckdb')} is no array and no map, so it has no element")
    if functions.is_map(dtype):
        if not isinstance(at.this if isinstance(at, exp().Neg) else at, exp().Literal):
            raise unsupported(f"{node.sql('duckdb')} with a key that is no literal", "write the key as it is")
        key = inner(at)
        inner.values.alike([functions.map_keys(of).list.first(), key], f"a key of {node.this.sql('duckdb')}")
        return functions.value_of_key(of, key)
    place = inner(at)
    if not inner.values.type_of(place).is_integer():
        raise UsageError(f"sql: the element of {node.this.sql('duckdb')} is named by an integer")
    return functions.element(of, place.cast(pl.Int64))


def _field(node: Expression, inner: Inner) -> pl.Expr:
    """Return a field of a row."""
    of, name = inner(node.this), node.expression.name
    dtype = inner.values.type_of(of)
    names = [one.name for one in dtype.fields] if isinstance(dtype, pl.Struct) else []
    found = [one for one in names if one == name] or [one for one in names if one.lower() == name.lower()]
    if len(found) != 1:
        known = ", ".join(names) or "it is no row"
        raise UsageError(f"sql: {node.this.sql('duckdb')} has no field '{name}' ({known})")
    return of.struct.field(found[0])


def _at_time_zone(node: Any, inner: Inner) -> pl.Expr:
    """Return the local time of a moment in a zone, or the moment of a local time."""
    zone = functions.time_zone(literal_text(node.args["zone"], "AT TIME ZONE"))
    of = inner(node.this)
    if inner.values.kind(of) == "timestamps with a time zone":
        return of.dt.convert_time_zone(zone).dt.replace_time_zone(None)
    moment = functions.in_zone(inner.values.moment(of, "AT TIME ZONE"), zone)
    return moment.dt.convert_time_zone("UTC")


def _is(node: Expression, inner: Inner) -> pl.Expr:
    if isinstance(node.expression, exp().Null):
        return inner(node.this).is_null()
    return inner.condition(node.this).eq_missing(inner.condition(node.expression))


def _extreme(node: Any, inner: Inner, extreme: Callable[..., pl.Expr]) -> pl.Expr:
    return extreme(*inner.values.alike([inner(one) for one in [node.this, *node.expressions]], node.key.upper()))


def _coalesce(node: Any, inner: Inner) -> pl.Expr:
    return pl.coalesce(*inner.values.alike([inner(one) for one in [node.this, *node.expressions]], "COALESCE"))


@cache
def _scalars() -> dict[type, Callable[[Any, Inner], pl.Expr]]:
    e = exp()

    def compared(combine: Callable[[pl.Expr, pl.Expr], pl.Expr]) -> Callable[[Any, Inner], pl.Expr]:
        return lambda node, inner: _compared(node.this, node.expression, inner, combine, node.sql())

    def same(combine: Callable[[pl.Expr, pl.Expr], pl.Expr]) -> Callable[[Any, Inner], pl.Expr]:
        return lambda node, inner: combine(*inner.values.alike([inner(node.this), inner(node.expression)], node.sql()))

    def of(kind: str, function: Callable[[pl.Expr], pl.Expr]) -> Callable[[Any, Inner], pl.Expr]:
        return lambda node, inner: function(inner.argument(node.this, kind, node))

    def of_number(function: Callable[[pl.Expr], pl.Expr]) -> Callable[[Any, Inner], pl.Expr]:
        return lambda node, inner: function(inner.values.number(inner(node.this), node.sql()))

    found: dict[type, Callable[[Any, Inner], pl.Expr]] = {
        e.Column: lambda node, inner: pl.col(node.name),
        e.Literal: _literal,
        e.Null: lambda node, inner: pl.lit(None),
        e.Boolean: lambda node, inner: pl.lit(bool(node.this)),
        e.Paren: lambda node, inner: inner(node.this),
        e.Neg: _negative,
        e.Not: lambda node, inner: ~inner.condition(node.this),
        e.And: lambda node, inner: inner.condition(node.this) & inner.condition(node.expression),
        e.Or: lambda node, inner: inner.condition(node.this) | inner.condition(node.expression),
        e.EQ: compared(lambda a, b: a == b),
        e.NEQ: compared(lambda a, b: a != b),
        e.LT: compared(lambda a, b: a < b),
        e.LTE: compared(lambda a, b: a <= b),
        e.GT: compared(lambda a, b: a > b),
        e.GTE: compared(lambda a, b: a >= b),
        e.NullSafeEQ: same(lambda a, b: a.eq_missing(b)),
        e.NullSafeNEQ: same(lambda a, b: a.ne_missing(b)),
        e.Add: _sum,
        e.Sub: _difference,
        e.Mul: lambda node, inner: inner.values.product(inner(node.this), inner(node.expression), node.sql()),
        e.Div: lambda node, inner: inner.values.quotient(inner(node.this), inner(node.expression), node.sql()),
        e.Mod: lambda node, inner: inner.values.rest(inner(node.this), inner(node.expression), node.sql()),
        e.Is: _is,
        e.In: _in,
        e.Between: _between,
        e.Like: _like,
        e.ILike: lambda node, inner: _like(node, inner, "si"),
        e.RegexpLike: lambda node, inner: inner.argument(node.this, "texts", node).str.contains(
            _pattern(node.expression, "REGEXP_LIKE")
        ),
        e.RegexpExtract: _regexp_extract,
        e.Case: _case,
        e.If: _if,
        e.Coalesce: _coalesce,
        e.Nullif: _nullif,
        e.Greatest: lambda node, inner: _extreme(node, inner, pl.max_horizontal),
        e.Least: lambda node, inner: _extreme(node, inner, pl.min_horizontal),
        e.Cast: _cast,
        e.TryCast: partial(_cast, strict=False),
        e.Concat: lambda node, inner: pl.concat_str(
            [inner.values.text(inner(one), node.sql()) for one in node.expressions], ignore_nulls=True
        ),
        e.DPipe: lambda node, inner: (
            inner.values.text(inner(node.this), node.sql()) + inner.values.text(inner(node.expression), node.sql())
        ),
        e.Lower: of("texts", lambda a: a.str.to_lowercase()),
        e.Upper: of("texts", lambda a: a.str.to_uppercase()),
        e.Length: of("texts", lambda a: a.str.len_chars().cast(pl.Int64)),
        e.Trim: _trim,
        e.Substring: _substring,
        e.Replace: _replace,
        e.SplitPart: _split_part,
        e.Abs: lambda node, inner: inner.values.size(inner(node.this), node.sql()),
        e.Floor: of("numbers", lambda a: a.floor()),
        e.Ceil: of("numbers", lambda a: a.ceil()),
        e.Sqrt: of_number(lambda a: a.sqrt()),
        e.Ln: of_number(lambda a: a.log()),
        e.Exp: of_number(lambda a: a.exp()),
        e.Pow: lambda node, inner: inner.values.number(inner(node.this), node.sql()).pow(
            inner.values.number(inner(node.expression), node.sql())
        ),
        e.Round: lambda node, inner: inner.argument(node.this, "numbers", node).round(
            0 if node.args.get("decimals") is None else _whole(node.args["decimals"], "ROUND"),
            mode="half_away_from_zero",
        ),
        e.Extract: lambda node, inner: _part(
            node.name.upper(), inner.values.moment(inner(node.expression), node.sql("duckdb"))
        ),
        e.TimeToStr: lambda node, inner: _date_format(
            inner.values.moment(inner(node.this), node.sql("duckdb")), literal_text(node.args["format"], "STRFTIME")
        ),
        e.TimestampTrunc: _trunc,
        e.DateTrunc: _trunc,
        e.Interval: _interval,
        e.StrPosition: lambda node, inner: functions.position(
            inner.argument(node.this, "texts", node), inner.argument(node.args["substr"], "texts", node)
        ),
        e.Bracket: _element,
        e.Dot: _field,
        e.Array: _array,
        e.AtTimeZone: _at_time_zone,
        e.StartsWith: lambda node, inner: inner.argument(node.this, "texts", node).str.starts_with(
            inner.argument(node.expression, "texts", node)
        ),
    }
    for unit in ("Year", "Month", "Day", "Hour", "Minute", "Second", "Week", "Quarter"):
        found[getattr(e, unit)] = lambda node, inner, unit=unit: _part(  # type: ignore[misc]
            unit.upper(), inner.values.moment(inner(node.this), node.sql())
        )
    return found
