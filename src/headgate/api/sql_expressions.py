"""Expressions of SQL as expressions of Polars, with the nulls of SQL. sqlglot is imported when it is needed.

Where systems differ: ``/`` of integers gives a fraction, division by zero and a missing match give null, ``%`` has the
sign of its first argument, ``CAST`` to an integer cuts off, ``CONCAT`` leaves nulls out.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from decimal import Decimal
from functools import cache
from typing import TYPE_CHECKING, Any

import polars as pl

from headgate.errors import UsageError

if TYPE_CHECKING:
    from sqlglot.expressions import Expression

Value = Callable[["Expression"], pl.Expr | None]


@cache
def exp() -> Any:
    """Return sqlglot's module of expressions.

    Raises:
        UsageError: sqlglot is not installed.
    """
    try:
        return importlib.import_module("sqlglot.expressions")
    except ModuleNotFoundError:
        raise UsageError("sql needs sqlglot; install it with: pip install 'headgate-streams[sql]'") from None


@cache
def _dialect() -> Any:
    """Return DuckDB's dialect, in which names may stand in backticks, too."""
    exp()
    duckdb = importlib.import_module("sqlglot.dialects.duckdb").DuckDB
    tokenizer = type("Tokenizer", (duckdb.Tokenizer,), {"IDENTIFIERS": ['"', "`"]})
    return type("_HeadgateSql", (duckdb,), {"Tokenizer": tokenizer})()


def parsed(query: str) -> Expression:
    """Return the syntax tree of one query.

    Raises:
        UsageError: it is no SQL, or not one query.
    """
    exp()
    errors = importlib.import_module("sqlglot.errors")
    try:
        trees = [
            tree for tree in _dialect().parser().parse(_plain(_dialect().tokenize(query)), query) if tree is not None
        ]
    except errors.SqlglotError as error:
        first = re.sub(r"\x1b\[\d*m", "", str(error)).strip().split("\n", 1)[0]
        raise UsageError(f"sql: {first.rstrip('.')}") from None
    if len(trees) != 1:
        raise UsageError(f"sql takes one query, not {len(trees)}")
    found: Expression = trees[0]
    return found


def _plain(tokens: list[Any]) -> list[Any]:
    """Return the tokens without what is Flink's alone and says nothing: in the arguments of window functions.

    That is the word TABLE before a name, and PARTITION BY after it, because GROUP BY says it again. SESSION is a name.
    """
    module = importlib.import_module("sqlglot.tokens")
    kinds, kept, i = module.TokenType, [], 0
    while i < len(tokens):
        token, following = tokens[i], tokens[i + 1] if i + 1 < len(tokens) else None
        opens = following is not None and following.token_type == kinds.L_PAREN
        if token.token_type == kinds.TABLE and following is not None and not opens:
            kept.append(following)
            i += 2
            if i < len(tokens) and tokens[i].token_type == kinds.PARTITION_BY:
                while i < len(tokens) and tokens[i].token_type != kinds.COMMA:
                    i += 1
            continue
        if opens and token.text.upper() == "SESSION":
            token = module.Token(kinds.VAR, token.text, token.line, token.col, token.start, token.end)
        kept.append(token)
        i += 1
    return kept


def unsupported(what: str, instead: str) -> UsageError:
    """Return the error about a clause or function that is not there."""
    return UsageError(f"sql: {what} is not there yet; {instead}")


_UNITS = {
    "MILLISECOND": 1,
    "SECOND": 1_000,
    "MINUTE": 60_000,
    "HOUR": 3_600_000,
    "DAY": 86_400_000,
    "WEEK": 604_800_000,
}


def interval_ms(node: Expression) -> int:
    """Return the milliseconds of ``INTERVAL '10' SECOND``.

    Raises:
        UsageError: it is something else, or has no fixed length.
    """
    if not isinstance(node, exp().Interval) or not isinstance(node.this, exp().Literal):
        raise UsageError(f"sql: write a length as INTERVAL '10' SECOND, not {node.sql()}")
    unit = str(node.args.get("unit") or "").upper().removesuffix("S")
    if unit not in _UNITS:
        raise unsupported(f"INTERVAL in {unit or 'no unit'}", f"use one of {', '.join(_UNITS)}")
    try:
        found = Decimal(node.this.name) * _UNITS[unit]
    except ArithmeticError:
        raise UsageError(f"sql: INTERVAL '{node.this.name}' has no number") from None
    if found != int(found):
        raise UsageError("sql: lengths are whole milliseconds")
    return int(found)


def scalar(node: Expression, value: Value = lambda node: None) -> pl.Expr:
    """Return an expression about one record.

    Args:
        node: the syntax tree, in which columns have the names of the stream.
        value: what a part is known as, such as the column of an aggregate; None: it is translated.

    Raises:
        UsageError: something in it is not there.
    """
    known = value(node)
    if known is not None:
        return known
    translate = _scalars().get(type(node))
    if translate is not None:
        found: pl.Expr = translate(node, lambda inner: scalar(inner, value))
        return found
    if isinstance(node, exp().AggFunc):
        raise UsageError(f"sql: {node.sql()} is an aggregate, which stands in SELECT or HAVING")
    if isinstance(node, exp().Anonymous):
        function = _FUNCTIONS.get(node.name.upper())
        if function is not None:
            try:
                return function(*(_argument(inner, value) for inner in node.expressions))
            except TypeError:
                raise UsageError(f"sql: {node.sql()} has a wrong number of arguments") from None
        raise unsupported(f"the function {node.name.upper()}", "use with_columns with a Polars expression")
    if isinstance(node, exp().Window):
        raise unsupported(f"{node.this.sql()} OVER", "use GROUP BY with a window")
    name = node.key.upper()
    raise unsupported(
        f"the function {name}" if isinstance(node, exp().Func) else name, "use with_columns with a Polars expression"
    )


def _argument(node: Expression, value: Value) -> Any:
    """Return an argument of a function: a literal as it is, anything else as an expression."""
    if isinstance(node, exp().Literal):
        return node.name if node.is_string else int(node.name)
    return scalar(node, value)


Inner = Callable[["Expression"], pl.Expr]


def _literal(node: Expression, inner: Inner) -> pl.Expr:
    if node.is_string:
        return pl.lit(node.name)
    if re.fullmatch(r"\d+", node.name):
        return pl.lit(int(node.name))
    return pl.lit(float(node.name)) if "e" in node.name.lower() else pl.lit(Decimal(node.name))


def _case(node: Expression, inner: Inner) -> pl.Expr:
    subject, default = node.args.get("this"), node.args.get("default")
    otherwise = pl.lit(None) if default is None else inner(default)
    for branch in reversed(node.args["ifs"]):
        condition = inner(branch.this) if subject is None else inner(subject) == inner(branch.this)
        otherwise = pl.when(condition).then(inner(branch.args["true"])).otherwise(otherwise)
    return otherwise


def _in(node: Expression, inner: Inner) -> pl.Expr:
    if node.args.get("query") is not None:
        raise unsupported("IN with a subquery", "join with it")
    found = [_compared(node.this, one, inner, lambda a, b: a == b) for one in node.expressions]
    result = found[0]
    for other in found[1:]:
        result = result | other
    return result


def _compared(
    left: Expression, right: Expression, inner: Inner, combine: Callable[[pl.Expr, pl.Expr], pl.Expr]
) -> pl.Expr:
    """Compare two values; with the word NULL, the result is null."""
    if isinstance(left, exp().Null) or isinstance(right, exp().Null):
        return pl.lit(None, pl.Boolean)
    return combine(inner(left), inner(right))


def _literal_text(node: Expression, of: str) -> str:
    if not isinstance(node, exp().Literal) or not node.is_string:
        raise unsupported(f"{of} with a pattern that is no literal", "write the pattern in quotes")
    return str(node.name)


def _like(node: Expression, inner: Inner, flags: str = "s") -> pl.Expr:
    pattern = _literal_text(node.expression, "LIKE")
    if node.args.get("negate"):
        positive = node.copy()
        positive.set("negate", None)
        return ~_like(positive, inner, flags)
    parts = (".*" if c == "%" else "." if c == "_" else re.escape(c) for c in pattern)
    return inner(node.this).str.contains(f"^(?{flags}:{''.join(parts)})$")


def _modulo(node: Expression, inner: Inner) -> pl.Expr:
    a, b = inner(node.this), inner(node.expression)
    rest = a % b
    return pl.when((rest != 0) & ((rest < 0) != (a < 0))).then(rest - b).otherwise(rest)


def _divide(node: Expression, inner: Inner) -> pl.Expr:
    divisor = inner(node.expression)
    return inner(node.this) / pl.when(divisor != 0).then(divisor)


_TYPES: dict[str, Any] = {
    "TINYINT": pl.Int8,
    "SMALLINT": pl.Int16,
    "INT": pl.Int32,
    "BIGINT": pl.Int64,
    "FLOAT": pl.Float32,
    "DOUBLE": pl.Float64,
    "TEXT": pl.String,
    "VARCHAR": pl.String,
    "CHAR": pl.String,
    "BOOLEAN": pl.Boolean,
    "DATE": pl.Date,
    "TIMESTAMP": pl.Datetime("us"),
    "TIMESTAMPNTZ": pl.Datetime("us"),
    "DATETIME": pl.Datetime("us"),
    "BINARY": pl.Binary,
}


def _cast(node: Expression, inner: Inner, *, strict: bool = True) -> pl.Expr:
    kind = node.args["to"]
    name = kind.this.name
    if name in ("DECIMAL", "NUMERIC"):
        sizes = [int(size.this.name) for size in kind.expressions]
        dtype: Any = pl.Decimal(*(sizes if len(sizes) == 2 else (sizes[0], 0) if sizes else (18, 3)))
    elif name in _TYPES:
        dtype = _TYPES[name]
    else:
        raise unsupported(f"CAST to {name}", f"use one of {', '.join(_TYPES)}, DECIMAL")
    if name in ("DATE", "TIMESTAMP", "TIMESTAMPNTZ", "DATETIME") and isinstance(node.this, exp().Literal):
        try:
            return pl.lit(datetime.fromisoformat(node.this.name)).cast(dtype)
        except ValueError:
            raise UsageError(f"sql: '{node.this.name}' is no {name}, such as '2020-12-31 23:59:59'") from None
    return inner(node.this).cast(dtype, strict=strict)


_PARTS = {"YEAR", "MONTH", "DAY", "HOUR", "MINUTE", "SECOND", "WEEK", "QUARTER"}


def _part(unit: str, of: pl.Expr) -> pl.Expr:
    if unit not in _PARTS:
        raise unsupported(f"EXTRACT of {unit}", f"use one of {', '.join(sorted(_PARTS))}")
    found: pl.Expr = getattr(of.dt, unit.lower())()
    return found.cast(pl.Int64)


_JAVA = {"yyyy": "%Y", "MM": "%m", "dd": "%d", "HH": "%H", "mm": "%M", "ss": "%S", "SSS": "%3f"}


def _date_format(of: pl.Expr, pattern: str) -> pl.Expr:
    """Format a time; the pattern is Java's, as Flink and Spark have it, or that of strftime."""
    if "%" not in pattern:
        pattern = re.sub(r"yyyy|MM|dd|HH|mm|SSS|ss", lambda match: _JAVA[match[0]], pattern)
        rest = re.sub(r"%3f|%[A-Za-z]", "", pattern)
        if re.search("[A-Za-z]", rest):
            raise unsupported(f"DATE_FORMAT with '{pattern}'", f"use {', '.join(_JAVA)}")
    return of.dt.strftime(pattern)


def _split_index(of: pl.Expr, separator: str, place: int) -> pl.Expr:
    return of.str.split(separator).list.get(place, null_on_oob=True)


_FUNCTIONS: dict[str, Callable[..., pl.Expr]] = {
    "SPLIT_INDEX": _split_index,
    "DATE_FORMAT": _date_format,
    "CHAR_LENGTH": lambda of: of.str.len_chars().cast(pl.Int64),
}


def _split_part(node: Expression, inner: Inner) -> pl.Expr:
    place = node.args.get("part_index") or node.args.get("partIndex")
    if not isinstance(place, exp().Literal) or int(place.name) < 1:
        raise unsupported("SPLIT_PART with a place that is no positive number", "use SPLIT_INDEX, which counts from 0")
    of = inner(node.this)
    found = _split_index(of, _literal_text(node.args["delimiter"], "SPLIT_PART"), int(place.name) - 1)
    return pl.when(of.is_not_null()).then(found.fill_null(""))


def _regexp_extract(node: Expression, inner: Inner) -> pl.Expr:
    group = node.args.get("group")
    return inner(node.this).str.extract(
        _literal_text(node.expression, "REGEXP_EXTRACT"), 0 if group is None else int(group.name)
    )


def _substring(node: Expression, inner: Inner) -> pl.Expr:
    start, length = node.args.get("start"), node.args.get("length")
    begin = pl.lit(1) if start is None else inner(start)
    return inner(node.this).str.slice(begin - 1, None if length is None else inner(length))


def _trunc(node: Expression, inner: Inner) -> pl.Expr:
    units = {"SECOND": "1s", "MINUTE": "1m", "HOUR": "1h", "DAY": "1d", "WEEK": "1w", "MONTH": "1mo", "YEAR": "1y"}
    unit = str(node.args["unit"].name).upper()
    if unit not in units:
        raise unsupported(f"DATE_TRUNC to {unit}", f"use one of {', '.join(units)}")
    return inner(node.this).dt.truncate(units[unit])


def _interval(node: Expression, inner: Inner) -> pl.Expr:
    return pl.duration(milliseconds=interval_ms(node))


def _is(node: Expression, inner: Inner) -> pl.Expr:
    if isinstance(node.expression, exp().Null):
        return inner(node.this).is_null()
    return inner(node.this).eq_missing(inner(node.expression))


@cache
def _scalars() -> dict[type, Callable[[Any, Inner], pl.Expr]]:
    e = exp()

    def two(combine: Callable[[pl.Expr, pl.Expr], pl.Expr]) -> Callable[[Any, Inner], pl.Expr]:
        return lambda node, inner: combine(inner(node.this), inner(node.expression))

    def compared(combine: Callable[[pl.Expr, pl.Expr], pl.Expr]) -> Callable[[Any, Inner], pl.Expr]:
        return lambda node, inner: _compared(node.this, node.expression, inner, combine)

    def one(function: Callable[[pl.Expr], pl.Expr]) -> Callable[[Any, Inner], pl.Expr]:
        return lambda node, inner: function(inner(node.this))

    def several(function: Callable[..., pl.Expr]) -> Callable[[Any, Inner], pl.Expr]:
        return lambda node, inner: function(*(inner(one) for one in [node.this, *node.expressions] if one is not None))

    found: dict[type, Callable[[Any, Inner], pl.Expr]] = {
        e.Column: lambda node, inner: pl.col(node.name),
        e.Literal: _literal,
        e.Null: lambda node, inner: pl.lit(None),
        e.Boolean: lambda node, inner: pl.lit(bool(node.this)),
        e.Paren: lambda node, inner: inner(node.this),
        e.Neg: one(lambda a: -a),
        e.Not: one(lambda a: ~a),
        e.And: two(lambda a, b: a & b),
        e.Or: two(lambda a, b: a | b),
        e.EQ: compared(lambda a, b: a == b),
        e.NEQ: compared(lambda a, b: a != b),
        e.LT: compared(lambda a, b: a < b),
        e.LTE: compared(lambda a, b: a <= b),
        e.GT: compared(lambda a, b: a > b),
        e.GTE: compared(lambda a, b: a >= b),
        e.NullSafeEQ: two(lambda a, b: a.eq_missing(b)),
        e.NullSafeNEQ: two(lambda a, b: a.ne_missing(b)),
        e.Add: two(lambda a, b: a + b),
        e.Sub: two(lambda a, b: a - b),
        e.Mul: two(lambda a, b: a * b),
        e.Div: _divide,
        e.Mod: _modulo,
        e.Is: _is,
        e.In: _in,
        e.Between: lambda node, inner: (
            (inner(node.this) >= inner(node.args["low"])) & (inner(node.this) <= inner(node.args["high"]))
        ),
        e.Like: _like,
        e.ILike: lambda node, inner: _like(node, inner, "si"),
        e.RegexpLike: lambda node, inner: inner(node.this).str.contains(_literal_text(node.expression, "REGEXP_LIKE")),
        e.RegexpExtract: _regexp_extract,
        e.Case: _case,
        e.If: lambda node, inner: (
            pl.when(inner(node.this))
            .then(inner(node.args["true"]))
            .otherwise(inner(node.args["false"]) if node.args.get("false") is not None else pl.lit(None))
        ),
        e.Coalesce: several(lambda *all: pl.coalesce(*all)),
        e.Nullif: two(lambda a, b: pl.when((a == b).fill_null(False)).then(None).otherwise(a)),
        e.Greatest: several(lambda *all: pl.max_horizontal(*all)),
        e.Least: several(lambda *all: pl.min_horizontal(*all)),
        e.Cast: _cast,
        e.TryCast: lambda node, inner: _cast(node, inner, strict=False),
        e.Concat: lambda node, inner: pl.concat_str(
            [inner(a).cast(pl.String) for a in node.expressions], ignore_nulls=True
        ),
        e.DPipe: two(lambda a, b: a.cast(pl.String) + b.cast(pl.String)),
        e.Lower: one(lambda a: a.str.to_lowercase()),
        e.Upper: one(lambda a: a.str.to_uppercase()),
        e.Length: one(lambda a: a.str.len_chars().cast(pl.Int64)),
        e.Trim: one(lambda a: a.str.strip_chars(" ")),
        e.Substring: _substring,
        e.Replace: lambda node, inner: inner(node.this).str.replace_all(
            _literal_text(node.expression, "REPLACE"), inner(node.args["replacement"]), literal=True
        ),
        e.SplitPart: _split_part,
        e.Abs: one(lambda a: a.abs()),
        e.Floor: one(lambda a: a.floor()),
        e.Ceil: one(lambda a: a.ceil()),
        e.Sqrt: one(lambda a: a.sqrt()),
        e.Ln: one(lambda a: a.log()),
        e.Exp: one(lambda a: a.exp()),
        e.Pow: two(lambda a, b: a.cast(pl.Float64).pow(b)),
        e.Round: lambda node, inner: inner(node.this).round(
            int(node.args["decimals"].name) if node.args.get("decimals") is not None else 0, mode="half_away_from_zero"
        ),
        e.Extract: lambda node, inner: _part(node.name.upper(), inner(node.expression)),
        e.TimeToStr: lambda node, inner: _date_format(inner(node.this), _literal_text(node.args["format"], "STRFTIME")),
        e.TimestampTrunc: _trunc,
        e.DateTrunc: _trunc,
        e.Interval: _interval,
        e.StartsWith: two(lambda a, b: a.str.starts_with(b)),
    }
    for unit in ("Year", "Month", "Day", "Hour", "Minute", "Second", "Week", "Quarter"):
        found[getattr(e, unit)] = lambda node, inner, unit=unit: _part(unit.upper(), inner(node.this))  # type: ignore[misc]
    return found


class Aggregates:
    """The aggregates of one SELECT: what is computed of each group, and the result that is made of it."""

    def __init__(self, name: str) -> None:
        """``name``: a pattern for names of columns."""
        self.expressions: dict[str, pl.Expr] = {}
        self._name = name
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

    def _column(self, expression: pl.Expr) -> pl.Expr:
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
            function, condition = node.this, scalar(node.expression.this)
        of = function.this
        is_distinct = isinstance(of, e.Distinct)
        if is_distinct:
            if len(of.expressions) != 1:
                raise unsupported("DISTINCT of several columns", "make one column of them")
            of = of.expressions[0]
        if isinstance(function, e.Count) and (of is None or isinstance(of, e.Star)):
            if condition is None:
                return self._column(pl.len()).cast(pl.Int64)
            return self._column(pl.when(condition).then(pl.lit(1)).count()).cast(pl.Int64)
        if of is None or _has_many(function):
            raise unsupported(f"{function.sql()}", "use an aggregate of one argument")
        values = scalar(of)
        if condition is not None:
            values = pl.when(condition).then(values)
        if isinstance(function, e.Count):
            counted = values.drop_nulls().n_unique() if is_distinct else values.count()
            return self._column(counted).cast(pl.Int64)
        if is_distinct and not isinstance(function, e.Min | e.Max):
            raise unsupported(f"{function.key.upper()}(DISTINCT ...)", "only COUNT has DISTINCT")
        if isinstance(function, e.Sum):
            is_any = self._column(values.count()) > 0
            return pl.when(is_any).then(self._column(values.sum()))
        methods = {e.Min: "min", e.Max: "max", e.Avg: "mean", e.Stddev: "std", e.StddevSamp: "std", e.Variance: "var"}
        method = methods.get(type(function))
        if method is None:
            raise unsupported(
                f"the aggregate {function.key.upper()}", "use COUNT, SUM, AVG, MIN, MAX, STDDEV or VARIANCE"
            )
        return self._column(getattr(values, method)())


def _has_many(function: Expression) -> bool:
    return any(part for name, part in function.args.items() if name not in ("this", "big_int") and part)


def _aggregates_in(tree: Expression) -> Iterator[Expression]:
    """Yield the outermost aggregates, each with its FILTER."""
    e = exp()
    if isinstance(tree, e.Window):
        raise unsupported(f"{tree.this.sql()} OVER", "use GROUP BY with a window")
    if isinstance(tree, e.AggFunc | e.Filter):
        yield tree
        return
    for part in tree.iter_expressions():
        yield from _aggregates_in(part)
