"""What SQL computes of values depends on their types: arithmetic, comparison, conditions and ``CAST``.

Arithmetic of integers gives BIGINT, or fails where Polars would wrap; a product of decimals has all its digits; ``/``
gives DOUBLE, and null for division by zero; ``%`` has the sign of its first argument; ``CAST`` rounds to a decimal and
cuts off to an integer. Values of different kinds, such as a number and a text, are never taken for one another.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import TypeAlias

import polars as pl
import pyarrow as pa

from headgate.errors import UsageError
from headgate.operators.schemas import empty_frame

Type: TypeAlias = pl.DataType

_DIGITS_MAX = 38
_NARROW = (pl.Int8, pl.Int16, pl.Int32, pl.UInt8, pl.UInt16)
"""Integers whose sums, differences and products are BIGINTs."""


def unsupported(what: str, instead: str) -> UsageError:
    """Return the error about a clause or function that is not there."""
    return UsageError(f"sql: {what} is not there yet; {instead}")


def kind_of(dtype: Type) -> str:
    """Return what values of a type are: types of one kind can be compared and mixed."""
    if dtype.is_numeric():
        return "numbers"
    if isinstance(dtype, pl.Datetime) and dtype.time_zone is not None:
        return "timestamps with a time zone"
    for types, kind in _KINDS:
        if isinstance(dtype, types):
            return kind
    return f"values of type {dtype}"


_KINDS: tuple[tuple[tuple[type[Type], ...], str], ...] = (
    ((pl.String, pl.Enum), "texts"),
    ((pl.Boolean,), "truth values"),
    ((pl.Date, pl.Datetime), "times"),
    ((pl.Duration,), "intervals"),
    ((pl.Null,), "nulls"),
)

_NULLS: dict[str, Type] = {"numbers": pl.Float64(), "texts": pl.String(), "times": pl.Datetime("us")}
"""The type of the word NULL where values of a kind are needed."""


def type_of_keys(types: list[Type], text: str) -> Type:
    """Return the type in which the two columns of a join are compared; ``text``: the condition in SQL.

    Raises:
        UsageError: they are of different kinds, or no keys.
    """
    kinds = [kind_of(one) for one in types]
    if kinds[0] != kinds[1]:
        raise UsageError(f"sql: JOIN ON {text} mixes {kinds[0]} and {kinds[1]}; CAST one of them")
    if any(one.is_decimal() for one in types):
        raise unsupported(f"JOIN ON {text}, by decimals,", "CAST both sides to BIGINT, DOUBLE or VARCHAR")
    if types[0] == types[1]:
        return types[0]
    for suits, dtype in _COMMON:
        if all(suits(one) for one in types):
            return dtype
    raise UsageError(f"sql: JOIN ON {text} compares {types[0]} with {types[1]}; CAST one of them")


_COMMON: tuple[tuple[Callable[[Type], bool], Type], ...] = (
    (lambda of: of.is_integer() and not isinstance(of, pl.UInt64 | pl.Int128), pl.Int64()),
    (lambda of: of.is_float(), pl.Float64()),
    (lambda of: isinstance(of, pl.Date | pl.Datetime), pl.Datetime("us")),
)
"""Types of keys that are compared in one that holds the values of both."""


class Values:
    """Computes with expressions over records of one schema."""

    def __init__(self, schema: pa.Schema) -> None:
        self._frame = empty_frame(schema).lazy()

    def type_of(self, expression: pl.Expr) -> Type:
        """Return the type of an expression.

        Raises:
            UsageError: it has none: Polars does not compute it.
        """
        try:
            return self._frame.select(expression.alias("x")).collect_schema()["x"]
        except pl.exceptions.PolarsError as error:
            first = str(error).strip().split("\n", 1)[0]
            raise UsageError(f"sql: {expression}: {first}") from error

    def kind(self, expression: pl.Expr) -> str:
        """Return what the values of an expression are."""
        return kind_of(self.type_of(expression))

    def condition(self, of: pl.Expr, text: str) -> pl.Expr:
        """Return an expression that is true, false or null; ``text``: it in SQL.

        Raises:
            UsageError: it is of another type.
        """
        kind = self.kind(of)
        if kind == "nulls":
            return of.cast(pl.Boolean)
        if kind != "truth values":
            raise UsageError(f"sql: {text} stands for {kind}, where there must be a condition; compare it")
        return of

    def of_kind(self, wanted: str, of: pl.Expr, text: str) -> pl.Expr:
        """Return an argument of ``text`` that is to be of the kind ``wanted``, as the word NULL is.

        Raises:
            UsageError: it is of another one.
        """
        kind = self.kind(of)
        if kind == "nulls":
            return of.cast(_NULLS[wanted])
        if kind != wanted and (kind, wanted) != ("timestamps with a time zone", "times"):
            raise UsageError(f"sql: {text} needs a {wanted.removesuffix('s')}; its argument stands for {kind}")
        return of

    def number(self, of: pl.Expr, text: str) -> pl.Expr:
        """Return a number as DOUBLE.

        Raises:
            UsageError: it is none.
        """
        return self.of_kind("numbers", of, text).cast(pl.Float64)

    def moment(self, of: pl.Expr, text: str) -> pl.Expr:
        """Return a time with a time of day, which a date has at midnight.

        Raises:
            UsageError: it is no time.
        """
        found = self.of_kind("times", of, text)
        return found.cast(pl.Datetime("us")) if isinstance(self.type_of(found), pl.Date) else found

    def alike(self, expressions: list[pl.Expr], text: str) -> list[pl.Expr]:
        """Return expressions that can stand for one another.

        Raises:
            UsageError: they are of different kinds.
        """
        kinds = dict.fromkeys(kind for one in expressions if (kind := self.kind(one)) != "nulls")
        if len(kinds) > 1:
            raise UsageError(f"sql: {text} mixes {' and '.join(kinds)}; CAST one of them")
        return expressions

    def compared(self, a: pl.Expr, b: pl.Expr, combine: Callable[[pl.Expr, pl.Expr], pl.Expr], text: str) -> pl.Expr:
        """Compare two values; with the word NULL, the result is null.

        Raises:
            UsageError: they are of different kinds.
        """
        self.alike([a, b], text)
        if "nulls" in (self.kind(a), self.kind(b)):
            return pl.lit(None, pl.Boolean)
        return combine(a, b)

    def arithmetic(self, a: pl.Expr, b: pl.Expr, combine: Callable[[pl.Expr, pl.Expr], pl.Expr], text: str) -> pl.Expr:
        """Return a sum, a difference or a rest.

        Raises:
            UsageError: there is none of values of these kinds.
        """
        types = self.type_of(a), self.type_of(b)
        kinds = {kind_of(one) for one in types} - {"nulls"}
        if all(one.is_integer() for one in types):
            return _checked(combine(*(_wide(one, types) for one in (a, b))))
        if "intervals" in kinds:
            a, b = (
                one.cast(pl.Datetime("us")) if isinstance(of, pl.Date) else one
                for one, of in zip((a, b), types, strict=True)
            )
        elif not (kinds <= {"numbers"} or kinds <= {"times"}):
            raise UsageError(
                f"sql: {text} is about {' and '.join(sorted(kinds))}; arithmetic is of numbers and of times"
            )
        return combine(a, b)

    def product(self, a: pl.Expr, b: pl.Expr, text: str) -> pl.Expr:
        """Return a product, of two decimals with the digits of both.

        Raises:
            UsageError: there is none of values of these kinds, or it has too many digits after the point.
        """
        types = self.type_of(a), self.type_of(b)
        if isinstance(types[0], pl.Decimal) and isinstance(types[1], pl.Decimal):
            scale = types[0].scale + types[1].scale
            if scale > _DIGITS_MAX:
                raise UsageError(
                    f"sql: {text} has {scale} digits after the point, of at most {_DIGITS_MAX}; CAST before"
                )
            return a.cast(pl.Decimal(_DIGITS_MAX, scale)) * b
        return self.arithmetic(a, b, lambda x, y: x * y, text)

    def quotient(self, a: pl.Expr, b: pl.Expr, text: str) -> pl.Expr:
        """Return a quotient as DOUBLE.

        Raises:
            UsageError: one is no number.
        """
        divisor = self.number(b, text)
        return self.number(a, text) / pl.when(divisor != 0).then(divisor)

    def rest(self, a: pl.Expr, b: pl.Expr, text: str) -> pl.Expr:
        """Return what a division leaves, with the sign of ``a``.

        Raises:
            UsageError: one is no number.
        """

        def signed(x: pl.Expr, y: pl.Expr) -> pl.Expr:
            types = self.type_of(x), self.type_of(y)
            if any(one.is_float() for one in types):
                return _float_rest(x.cast(pl.Float64), y.cast(pl.Float64))
            if any(one.is_decimal() for one in types):
                y = pl.when(y != 0).then(y)
            rest = x % y
            return pl.when((rest != 0) & ((rest < 0) != (x < 0))).then(rest - y).otherwise(rest)

        return self.arithmetic(a, b, signed, text)

    def negative(self, of: pl.Expr, text: str) -> pl.Expr:
        """Return ``-of``.

        Raises:
            UsageError: it is no number.
        """
        if self._is_whole(of):
            return self.arithmetic(pl.lit(0), of, lambda zero, x: zero - x, text)
        return -self._signed(of, text)

    def size(self, of: pl.Expr, text: str) -> pl.Expr:
        """Return a number or an interval without its sign.

        Raises:
            UsageError: it is neither.
        """
        of = self._signed(of, text)
        return _checked(_wide(of, (self.type_of(of),)).abs()) if self._is_whole(of) else of.abs()

    def _signed(self, of: pl.Expr, text: str) -> pl.Expr:
        return of if self.kind(of) == "intervals" else self.of_kind("numbers", of, text)

    def _is_whole(self, of: pl.Expr) -> bool:
        return self.type_of(of).is_integer()

    def text(self, of: pl.Expr, text: str) -> pl.Expr:
        """Return a value as text: a time with as many digits after the second as it needs.

        Raises:
            UsageError: it has no text in SQL.
        """
        kind = self.kind(of)
        if kind == "times" and isinstance(self.type_of(of), pl.Datetime):
            return of.dt.strftime("%Y-%m-%d %H:%M:%S%.6f").str.strip_chars_end("0").str.strip_chars_end(".")
        if kind not in ("numbers", "texts", "truth values", "times", "nulls"):
            raise unsupported(f"{text}, a text of {kind},", "use with_columns with a Polars expression")
        return of.cast(pl.String)

    def cast(self, of: pl.Expr, dtype: Type, text: str, *, strict: bool) -> pl.Expr:
        """Return ``CAST(of AS dtype)``; not strict: null for what does not fit.

        Raises:
            UsageError: such values have no meaning in that type.
        """
        given, wanted = self.type_of(of), kind_of(dtype)
        kind = kind_of(given)
        if wanted == "texts":
            return self.text(of, text)
        if kind != "nulls" and (kind, wanted) not in _CASTS:
            raise unsupported(f"{text}, from {kind} to {wanted},", "use with_columns with a Polars expression")
        if kind == "texts":
            of = of.cast(pl.String).str.strip_chars(" ")
        if isinstance(dtype, pl.Decimal) and not given.is_integer() and kind in ("numbers", "texts"):
            if kind == "texts":
                of = of.cast(pl.Decimal(_DIGITS_MAX, dtype.scale + _DIGITS_MAX - (dtype.precision or 0)), strict=strict)
            of = of.round(dtype.scale, mode="half_away_from_zero")
        if dtype.is_integer() and kind == "texts":
            of = of.str.replace(_FRACTION, "$1")
        if isinstance(dtype, pl.Decimal) and kind == "truth values":
            of = of.cast(pl.Int8)
        return of.cast(dtype, strict=strict)


_FRACTION = r"^([+-]?\d+)\.\d*$"

_CASTS = {
    ("numbers", "numbers"),
    ("numbers", "truth values"),
    ("truth values", "numbers"),
    ("truth values", "truth values"),
    ("texts", "numbers"),
    ("times", "times"),
}


def _float_rest(x: pl.Expr, y: pl.Expr) -> pl.Expr:
    """Return what a division of floats leaves; all of a number that is divided by an infinite one."""
    rest = x.abs() % y.abs()
    return pl.when(x.is_finite() & y.is_infinite()).then(x).when(x < 0).then(-rest).otherwise(rest)


def _wide(of: pl.Expr, types: tuple[Type, ...]) -> pl.Expr:
    """Return an integer in a type that holds every result of integers of ``types``."""
    return of.cast(pl.Int64 if all(isinstance(one, _NARROW) for one in types) else pl.Int128)


def _checked(of: pl.Expr) -> pl.Expr:
    """Return an integer as BIGINT; one that is too large fails."""
    return of.cast(pl.Int64)


def literal(text: str) -> pl.Expr:
    """Return a number as it is written: an integer, a decimal, or with an exponent a DOUBLE.

    Raises:
        UsageError: it is larger than the largest integer.
    """
    digits = text.removeprefix("-")
    if len(digits.replace(".", "").lstrip("0")) > _DIGITS_MAX and "e" not in text.lower():
        raise UsageError(f"sql: {text} has more than {_DIGITS_MAX} digits; write {text}e0 for a DOUBLE")
    if digits.isdecimal():
        if not -(2**63) <= int(text) < 2**63:
            raise UsageError(f"sql: {text} is larger than a BIGINT; write {text}.0 for a decimal")
        return pl.lit(int(text))
    return pl.lit(float(text)) if "e" in text.lower() else pl.lit(Decimal(text))
