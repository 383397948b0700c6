"""Functions of SQL by name: how many arguments each has, and the expression of Polars that it is.

sqlglot leaves these calls as they are written (``api.sql.expressions``), so that a function is one line here. Where
Flink and DuckDB differ, ``docs/guide/sql.md`` says what holds. Nothing runs here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import polars as pl

from headgate.api.sql.values import Values, unsupported
from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.operators.schemas import MAP_FIELDS

if TYPE_CHECKING:
    from sqlglot.expressions import Expression


class Translation(Protocol):
    """What makes expressions of arguments: see ``expressions.Scalars``."""

    values: Values

    def __call__(self, node: Expression) -> pl.Expr: ...


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function, and its arguments as expressions of a kind.

    Each method raises UsageError for an argument of another kind.
    """

    name: str
    arguments: tuple[Any, ...]
    inner: Translation

    def __len__(self) -> int:
        return len(self.arguments)

    def any(self, at: int) -> pl.Expr:
        """Return an argument of any kind."""
        return self.inner(self.arguments[at])

    def all(self) -> list[pl.Expr]:
        """Return all arguments, which are of one kind."""
        return self.inner.values.alike([self.any(at) for at in range(len(self))], self.name)

    def text(self, at: int) -> pl.Expr:
        return self.inner.values.of_kind("texts", self.any(at), self.name)

    def as_text(self, at: int) -> pl.Expr:
        """Return an argument that becomes a text, as in ``||``."""
        return self.inner.values.text(self.any(at), self.name)

    def number(self, at: int) -> pl.Expr:
        """Return a number as DOUBLE."""
        return self.inner.values.number(self.any(at), self.name)

    def whole(self, at: int) -> pl.Expr:
        """Return an integer as BIGINT."""
        found = self.any(at)
        dtype = self.inner.values.type_of(found)
        if not dtype.is_integer() and dtype != pl.Null:
            raise UsageError(f"sql: {self.name} needs an integer; CAST its argument to BIGINT")
        return found.cast(pl.Int64)

    def moment(self, at: int) -> pl.Expr:
        return self.inner.values.moment(self.any(at), self.name)

    def list(self, at: int) -> pl.Expr:
        found = self.any(at)
        if not isinstance(self.inner.values.type_of(found), pl.List):
            raise UsageError(f"sql: {self.name} needs an array or a map")
        return found

    def map(self, at: int) -> pl.Expr:
        found = self.any(at)
        if not is_map(self.inner.values.type_of(found)):
            raise UsageError(f"sql: {self.name} needs a map")
        return found

    def literal(self, at: int, what: str = "text") -> str:
        """Return an argument that is written in quotes."""
        node = self.arguments[at]
        if node.key != "literal" or not node.is_string:
            raise unsupported(f"{self.name} with a {what} that is no literal", f"write the {what} in quotes")
        return str(node.name)

    def pattern(self, at: int) -> str:
        """Return a regular expression, which is written in quotes."""
        return regular_expression(self.literal(at, "pattern"), self.name)

    def word(self, at: int) -> str:
        """Return a word, such as ``DAY``."""
        return str(self.arguments[at].name).upper()


def is_map(dtype: pl.DataType) -> bool:
    """Whether values of a type are maps, which are lists of entries."""
    inner = dtype.inner if isinstance(dtype, pl.List) else None
    return isinstance(inner, pl.Struct) and tuple(one.name for one in inner.fields) == MAP_FIELDS


def regular_expression(text: str, of: str) -> str:
    """Return ``text``.

    Raises:
        UsageError: it is none; ``of``: the function, for the message.
    """
    try:
        pl.Series([""]).str.contains(text)
    except pl.exceptions.ComputeError as error:
        lines = str(error).split("\n\n", 1)[0].splitlines()
        raise UsageError(
            f"sql: '{text}' in {of} is no regular expression: {lines[-1].removeprefix('error: ')}"
        ) from None
    return text


# -- texts ------------------------------------------------------------------------------------------------------------


def spread(of: pl.Expr, over: pl.Expr) -> pl.Expr:
    """Return ``of`` with a value for each of ``over``, null where that is null.

    Some functions of Polars 2.1 take only the first value of a column if they are applied to a literal and the column.
    """
    return pl.when(over.is_not_null()).then(of)


def _concat_ws(call: Call) -> pl.Expr:
    separator, parts = call.text(0), pl.concat_list([call.as_text(at) for at in range(1, len(call))])
    return spread(parts.list.drop_nulls(), separator).list.join(separator)


def _repeated(text: pl.Expr, count: pl.Expr) -> pl.Expr:
    found = text.repeat_by(pl.max_horizontal(count, 0)).list.join("")
    return pl.when(text.is_not_null() & count.is_not_null()).then(found)


def _pad(call: Call, *, is_left: bool) -> pl.Expr:
    """Return a text of as many characters: cut off at its end, or filled up with another one."""
    text, size = call.text(0), call.whole(1)
    fill = call.text(2) if len(call) == 3 else pl.lit(" ")
    wanted = pl.max_horizontal(size, 0)
    missing = pl.max_horizontal(wanted - text.str.len_chars().cast(pl.Int64), 0)
    padding = _repeated(fill, missing).str.head(missing)
    kept = text.str.head(wanted)
    padded = padding + kept if is_left else kept + padding
    return pl.when(size.is_not_null() & ((missing == 0) | (fill != ""))).then(padded)


def position(text: pl.Expr, part: pl.Expr) -> pl.Expr:
    """Return the place of the first character of a part, from 1 on; 0: it is not in the text."""
    before = spread(text, part).str.splitn(part, 2).struct.field("field_0").str.len_chars().cast(pl.Int64)
    found = pl.when(part == "").then(1).when(text.str.contains(part, literal=True)).then(before + 1).otherwise(0)
    return pl.when(text.is_not_null() & part.is_not_null()).then(found.cast(pl.Int64))


def _locate(call: Call) -> pl.Expr:
    """Return the place of the first argument in the second, from a place on."""
    part, text = call.text(0), call.text(1)
    if len(call) == 2:
        return position(text, part)
    start = call.whole(2)
    found = position(text.str.slice(pl.max_horizontal(start - 1, 0)), part)
    is_there = (start >= 1) & (found > 0) & (start <= text.str.len_chars().cast(pl.Int64) + 1)
    place = pl.when(is_there).then(found + start - 1).otherwise(0)
    return pl.when(found.is_not_null() & start.is_not_null()).then(place)


def _regexp_replace(call: Call) -> pl.Expr:
    """Replace all matches, as Flink does; groups are ``$1`` or ``\\1``."""
    if len(call) == 4 and call.literal(3, "flag") != "g":
        raise unsupported(
            f"REGEXP_REPLACE with the flags '{call.literal(3)}'", "begin the pattern with (?i) or the like"
        )
    pattern, replacement = call.pattern(1), call.literal(2, "replacement")
    by = re.sub(r"\$(\d+)|\\(\d)|\\(.)|[$]", _group, replacement)
    groups = pl.Series([""]).str.extract_groups(pattern).struct.fields
    missing = [number for number in re.findall(r"(?<!\$)\$\{(\d+)\}", by) if int(number) > len(groups)]
    if missing:
        raise UsageError(f"sql: '{replacement}' in {call.name} names group {missing[0]}, and '{pattern}' has none")
    return call.text(0).str.replace_all(pattern, by)


def _group(match: re.Match[str]) -> str:
    """Return a group as Polars names it; a dollar that begins none is one."""
    number = match[1] or match[2]
    return f"${{{number}}}" if number else (match[3] or "$").replace("$", "$$")


def _encoded(call: Call, encoding: Any) -> pl.Expr:
    found = call.text(0).cast(pl.Binary).bin.encode(encoding)
    return found.str.to_uppercase() if encoding == "hex" else found


def _decoded(call: Call, encoding: Any) -> pl.Expr:
    found = call.text(0).str.decode(encoding, strict=False)
    return pl.when(found.bin.encode("hex").str.contains(_UTF_8)).then(found).cast(pl.String)  # the cast raises


_NEXT = "[89ab]."
_UTF_8 = (
    f"^([0-7].|(c[2-9a-f]|d.){_NEXT}|e0[ab].{_NEXT}|ed[89].{_NEXT}|(e[1-9a-cef])({_NEXT}){{2}}"
    f"|f0[9ab].({_NEXT}){{2}}|f[1-3]({_NEXT}){{3}}|f48.({_NEXT}){{2}})*$"
)
"""Bytes in base 16 that are UTF-8. Source: RFC 3629."""


# -- numbers ----------------------------------------------------------------------------------------------------------


def _sign(call: Call) -> pl.Expr:
    number = call.inner.values.of_kind("numbers", call.any(0), call.name)
    found = pl.when(number > 0).then(1).when(number < 0).then(-1).otherwise(0)
    is_nan = call.inner.values.type_of(number).is_float()
    return pl.when(number.is_not_null()).then(pl.when(number.is_nan()).then(0).otherwise(found) if is_nan else found)


def _log(call: Call) -> pl.Expr:
    if len(call) == 1:
        raise unsupported("LOG with one argument, which is LN in Flink and LOG10 in DuckDB,", "write LN or LOG10")
    return call.number(1).log() / call.number(0).log()


def _truncate(call: Call) -> pl.Expr:
    number = call.inner.values.of_kind("numbers", call.any(0), call.name)
    digits = _digits(call)
    dtype = call.inner.values.type_of(number)
    return number if dtype.is_integer() and digits == 0 else number.truncate(digits)


def _digits(call: Call) -> int:
    if len(call) == 1:
        return 0
    node = call.arguments[1]
    if node.key != "literal" or node.is_string or not node.name.isdecimal():
        raise unsupported(f"{call.name} with {node.sql()} digits", "write a whole number from 0 on")
    return int(node.name)


# -- times ------------------------------------------------------------------------------------------------------------

_JAVA = {"yyyy": "%Y", "MM": "%m", "dd": "%d", "HH": "%H", "mm": "%M", "ss": "%S", "SSS": "%3f"}


def java_pattern(pattern: str, of: str) -> str:
    """Return a pattern of Java, such as ``yyyy-MM-dd``, as one of Polars.

    Raises:
        UsageError: it has a letter that is not there; ``of``: the function, for the message.
    """
    found = re.sub(r"yyyy|MM|dd|HH|mm|SSS|ss", lambda match: _JAVA[match[0]], pattern.replace("%", "%%"))
    found = re.sub(r"\.%3f", "%.3f", found)
    if re.search("[A-Za-z]", re.sub(r"%\.?3f|%[A-Za-z]|'T'", "", found)):
        raise unsupported(f"{of} with '{pattern}'", f"use {', '.join(_JAVA)}")
    return found.replace("'T'", "T")


_MOMENTS = "%Y-%m-%d %H:%M:%S%.f"


def _read(call: Call, at: int, dtype: Any, default: str) -> pl.Expr:
    """Return a text as a time, null where it is none; the argument after it may be its pattern."""
    pattern = java_pattern(call.literal(at + 1, "pattern"), call.name) if len(call) > at + 1 else default
    try:
        pl.Series([""]).str.strptime(dtype, pattern, strict=False)
    except pl.exceptions.PolarsError as error:
        reason = str(error).splitlines()[0].removeprefix("Invalid format string: ")
        raise UsageError(
            f"sql: '{call.literal(at + 1)}' in {call.name} is no pattern of such a time: {reason}"
        ) from None
    return call.text(at).str.strptime(dtype, pattern, strict=False)


def _unix_timestamp(call: Call) -> pl.Expr:
    is_text = len(call) == 2 or call.inner.values.kind(call.any(0)) == "texts"
    moment = _read(call, 0, pl.Datetime("us"), _MOMENTS) if is_text else call.moment(0)
    return moment.dt.epoch("s")


def _multiple(count: pl.Expr, by: int) -> pl.Expr:
    """Return an integer so many times; one that is too large fails."""
    return (count.cast(pl.Int128) * by).cast(pl.Int64)


def _from_unixtime(call: Call) -> pl.Expr:
    pattern = java_pattern(call.literal(1, "pattern"), call.name) if len(call) == 2 else "%Y-%m-%d %H:%M:%S"
    return _multiple(call.whole(0), 1_000_000).cast(pl.Datetime("us")).dt.strftime(pattern)


def _to_timestamp_ltz(call: Call) -> pl.Expr:
    factor = {0: 1_000_000, 3: 1_000}.get(_digits(call))
    if factor is None:
        raise unsupported(f"{call.name} with another precision than 0 or 3", "write 0 for seconds, 3 for milliseconds")
    return _multiple(call.whole(0), factor).cast(pl.Datetime("us")).dt.replace_time_zone("UTC")


_LENGTHS_US = {
    "MICROSECOND": 1,
    "MILLISECOND": 1_000,
    "SECOND": 1_000_000,
    "MINUTE": 60_000_000,
    "HOUR": 3_600_000_000,
    "DAY": 86_400_000_000,
    "WEEK": 604_800_000_000,
}
_MONTHS = {"MONTH": 1, "QUARTER": 3, "YEAR": 12}


def _unit(call: Call) -> str:
    unit = call.word(0).removesuffix("S").removeprefix("SQL_TSI_")
    if unit not in _LENGTHS_US and unit not in _MONTHS:
        raise unsupported(f"{call.name} with {unit}", f"use one of {', '.join([*_LENGTHS_US, *_MONTHS])}")
    return unit


def _timestamp_add(call: Call) -> pl.Expr:
    unit, count, moment = _unit(call), call.whole(1), call.moment(2)
    if unit in _MONTHS:
        return moment.dt.offset_by(_multiple(count, _MONTHS[unit]).cast(pl.String) + "mo")
    return moment + _multiple(count, _LENGTHS_US[unit]).cast(pl.Duration("us"))


def _timestamp_diff(call: Call) -> pl.Expr:
    """Return how many whole units lie between two times; negative if the second one is earlier."""
    unit, start, end = _unit(call), call.moment(1), call.moment(2)
    if unit in _LENGTHS_US:
        return _cut((end - start).dt.total_microseconds(), _LENGTHS_US[unit])
    early, late = pl.min_horizontal(start, end), pl.max_horizontal(start, end)
    months = (late.dt.year().cast(pl.Int64) - early.dt.year()) * 12 + late.dt.month() - early.dt.month()
    months -= (early.dt.offset_by(months.cast(pl.String) + "mo") > late).cast(pl.Int64)
    found = pl.when(end < start).then(-months).otherwise(months)
    return pl.when(start.is_not_null() & end.is_not_null()).then(_cut(found, _MONTHS[unit]))


def _cut(number: pl.Expr, by: int) -> pl.Expr:
    """Return a quotient without its fraction."""
    return number.sign() * (number.abs() // by)


def _convert_tz(call: Call) -> pl.Expr:
    moment = _read(Call(call.name, call.arguments[:1], call.inner), 0, pl.Datetime("us"), _MOMENTS)
    zones = [time_zone(call.literal(at, "time zone")) for at in (1, 2)]
    return in_zone(moment, zones[0]).dt.convert_time_zone(zones[1]).dt.strftime("%Y-%m-%d %H:%M:%S")


def time_zone(name: str) -> str:
    """Return the name of a time zone.

    Raises:
        UsageError: there is none of this name.
    """
    try:
        pl.Series([], dtype=pl.Datetime("us", name)).to_list()
        pl.select(pl.lit("2020-01-01").str.to_datetime("%Y-%m-%d", time_zone=name))
    except pl.exceptions.PolarsError:
        raise UsageError(f"sql: there is no time zone '{name}', such as 'Europe/Berlin'") from None
    return name


def in_zone(moment: pl.Expr, zone: str) -> pl.Expr:
    """Return local times of a zone as moments: of two the first, and null where the clock left it out."""
    return moment.dt.replace_time_zone(zone, ambiguous="earliest", non_existent="null")


# -- arrays and maps --------------------------------------------------------------------------------------------------


def _contains(call: Call) -> pl.Expr:
    found, wanted = call.list(0), call.any(1)
    call.inner.values.alike([found.list.first(), wanted], call.name)
    return found.list.contains(wanted, nulls_equal=False)


def _join(call: Call) -> pl.Expr:
    texts, separator = call.list(0), call.text(1)
    call.inner.values.of_kind("texts", texts.list.first(), call.name)
    if len(call) == 3:
        texts = texts.list.eval(pl.element().fill_null(call.literal(2)))
    return spread(texts.list.drop_nulls(), separator).list.join(separator)


def _concatenated(call: Call) -> pl.Expr:
    for at in range(len(call)):
        call.list(at)
    return pl.concat_list(call.all())


def map_keys(of: pl.Expr) -> pl.Expr:
    """Return the keys of a map."""
    return of.list.eval(pl.element().struct.field(MAP_FIELDS[0]))


def _map_values(call: Call) -> pl.Expr:
    return call.map(0).list.eval(pl.element().struct.field(MAP_FIELDS[1]))


def element(of: pl.Expr, place: pl.Expr) -> pl.Expr:
    """Return an element of an array by its place, from 1 on and from the end from -1 on; null: there is none."""
    index = pl.when(place > 0).then(place - 1).when(place < 0).then(place)
    return of.list.get(index, null_on_oob=True)


def value_of_key(of: pl.Expr, key: pl.Expr) -> pl.Expr:
    """Return the value of a literal key of a map, or null."""
    return of.list.filter(pl.element().struct.field(MAP_FIELDS[0]) == key).list.first().struct.field(MAP_FIELDS[1])


# -- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Function:
    """How many arguments a function has, and what makes its expression."""

    least: int
    most: int
    make: Callable[[Call], pl.Expr]


def _of_text(make: Callable[[pl.Expr], pl.Expr]) -> Function:
    return Function(1, 1, lambda call: make(call.text(0)))


def _of_number(make: Callable[[pl.Expr], pl.Expr]) -> Function:
    return Function(1, 1, lambda call: make(call.number(0)))


def _of_moment(make: Callable[[pl.Expr], pl.Expr]) -> Function:
    return Function(1, 1, lambda call: make(call.moment(0)).cast(pl.Int64))


def _of_list(make: Callable[[pl.Expr], pl.Expr]) -> Function:
    return Function(1, 1, lambda call: make(call.list(0)))


_MANY = 1_000

_CHAR_LENGTH = _of_text(lambda a: a.str.len_chars().cast(pl.Int64))
_CARDINALITY = _of_list(lambda a: a.list.len().cast(pl.Int64))
_ARRAY_CONTAINS = Function(2, 2, _contains)
_INSTR = Function(2, 2, lambda call: position(call.text(0), call.text(1)))
_TRUNCATE = Function(1, 2, _truncate)
_DAY_OF_MONTH = _of_moment(lambda a: a.dt.day())

FUNCTIONS: dict[str, Function] = {
    # texts
    "CHAR_LENGTH": _CHAR_LENGTH,
    "CHARACTER_LENGTH": _CHAR_LENGTH,
    "OCTET_LENGTH": _of_text(lambda a: a.str.len_bytes().cast(pl.Int64)),
    "CONCAT_WS": Function(2, _MANY, _concat_ws),
    "LPAD": Function(2, 3, partial(_pad, is_left=True)),
    "RPAD": Function(2, 3, partial(_pad, is_left=False)),
    "REPEAT": Function(2, 2, lambda call: _repeated(call.text(0), call.whole(1))),
    "REVERSE": _of_text(lambda a: a.str.reverse()),
    "LEFT": Function(2, 2, lambda call: call.text(0).str.head(call.whole(1))),
    "RIGHT": Function(2, 2, lambda call: call.text(0).str.tail(call.whole(1))),
    "LOCATE": Function(2, 3, _locate),
    "INSTR": _INSTR,
    "STRPOS": _INSTR,
    "INITCAP": _of_text(lambda a: a.str.to_titlecase()),
    "ENDS_WITH": Function(2, 2, lambda call: call.text(0).str.ends_with(call.text(1))),
    "ENDSWITH": Function(2, 2, lambda call: call.text(0).str.ends_with(call.text(1))),
    "STARTSWITH": Function(2, 2, lambda call: call.text(0).str.starts_with(call.text(1))),
    "CONTAINS": Function(2, 2, lambda call: call.text(0).str.contains(call.text(1), literal=True)),
    "REGEXP": Function(2, 2, lambda call: call.text(0).str.contains(call.pattern(1))),
    "REGEXP_COUNT": Function(2, 2, lambda call: call.text(0).str.count_matches(call.pattern(1)).cast(pl.Int64)),
    "REGEXP_REPLACE": Function(3, 4, _regexp_replace),
    "SPLIT": Function(2, 2, lambda call: spread(call.text(0), call.text(1)).str.split(call.text(1))),
    "TO_BASE64": Function(1, 1, partial(_encoded, encoding="base64")),
    "FROM_BASE64": Function(1, 1, partial(_decoded, encoding="base64")),
    "HEX": Function(1, 1, partial(_encoded, encoding="hex")),
    # numbers
    "SIGN": Function(1, 1, _sign),
    "LOG": Function(1, 2, _log),
    "LOG2": _of_number(lambda a: a.log(2)),
    "LOG10": _of_number(lambda a: a.log10()),
    "CBRT": _of_number(lambda a: a.cbrt()),
    "SIN": _of_number(lambda a: a.sin()),
    "COS": _of_number(lambda a: a.cos()),
    "TAN": _of_number(lambda a: a.tan()),
    "COT": _of_number(lambda a: a.cot()),
    "ASIN": _of_number(lambda a: a.arcsin()),
    "ACOS": _of_number(lambda a: a.arccos()),
    "ATAN": _of_number(lambda a: a.arctan()),
    "SINH": _of_number(lambda a: a.sinh()),
    "COSH": _of_number(lambda a: a.cosh()),
    "TANH": _of_number(lambda a: a.tanh()),
    "ATAN2": Function(2, 2, lambda call: pl.arctan2(call.number(0), call.number(1))),
    "DEGREES": _of_number(lambda a: a.degrees()),
    "RADIANS": _of_number(lambda a: a.radians()),
    "TRUNCATE": _TRUNCATE,
    "TRUNC": _TRUNCATE,
    # times
    "TO_TIMESTAMP": Function(1, 2, lambda call: _read(call, 0, pl.Datetime("us"), _MOMENTS)),
    "TO_DATE": Function(1, 2, lambda call: _read(call, 0, pl.Date(), "%Y-%m-%d")),
    "TO_TIMESTAMP_LTZ": Function(2, 2, _to_timestamp_ltz),
    "UNIX_TIMESTAMP": Function(1, 2, _unix_timestamp),
    "FROM_UNIXTIME": Function(1, 2, _from_unixtime),
    "TIMESTAMPADD": Function(3, 3, _timestamp_add),
    "TIMESTAMPDIFF": Function(3, 3, _timestamp_diff),
    "DAYOFWEEK": _of_moment(lambda a: a.dt.weekday() % 7 + 1),
    "DAYOFMONTH": _DAY_OF_MONTH,
    "DAYOFYEAR": _of_moment(lambda a: a.dt.ordinal_day()),
    "CONVERT_TZ": Function(3, 3, _convert_tz),
    # arrays and maps
    "CARDINALITY": _CARDINALITY,
    "ARRAY_LENGTH": _CARDINALITY,
    "ARRAY_CONTAINS": _ARRAY_CONTAINS,
    "LIST_CONTAINS": _ARRAY_CONTAINS,
    "ARRAY_DISTINCT": _of_list(lambda a: a.list.unique(maintain_order=True)),
    "ARRAY_REVERSE": _of_list(lambda a: a.list.reverse()),
    "ARRAY_MAX": _of_list(lambda a: a.list.max()),
    "ARRAY_MIN": _of_list(lambda a: a.list.min()),
    "ARRAY_JOIN": Function(2, 3, _join),
    "ARRAY_CONCAT": Function(2, _MANY, _concatenated),
    "MAP_KEYS": Function(1, 1, lambda call: map_keys(call.map(0))),
    "MAP_VALUES": Function(1, 1, _map_values),
}
"""The functions, by their names."""

OF_UNITS = ("TIMESTAMPADD", "TIMESTAMPDIFF")
"""Functions with the name of a unit, such as DAY, as first argument."""

_HASHES = "use map with Python's hashlib"
_JSON = "use map with Python's json"
_CLOCK = "use PROCTIME(), or the event time: what the clock says is another result in each run"

REFUSED = {
    **dict.fromkeys(["MD5", "SHA1", "SHA224", "SHA256", "SHA384", "SHA512", "SHA2"], _HASHES),
    **dict.fromkeys(
        ["NOW", "CURRENT_TIMESTAMP", "CURRENT_DATE", "CURRENT_TIME", "LOCALTIMESTAMP", "CURRENT_ROW_TIMESTAMP"], _CLOCK
    ),
    **dict.fromkeys(["JSON_VALUE", "JSON_QUERY", "JSON_EXISTS", "JSON_EXTRACT", "JSON_EXTRACT_STRING"], _JSON),
    **dict.fromkeys(["RAND", "RANDOM", "RAND_INTEGER", "UUID"], "use map: each run has another result"),
}
"""Functions that are not there, and what to do instead."""


def translated(name: str, arguments: list[Any], inner: Translation) -> pl.Expr | None:
    """Return the expression of a call; None: there is no such function here.

    Raises:
        UsageError: it has a wrong number of arguments, or one of a wrong kind.
    """
    found = FUNCTIONS.get(name)
    if found is None:
        if name in REFUSED:
            raise unsupported(f"the function {name}", REFUSED[name])
        return None
    if not found.least <= len(arguments) <= found.most:
        many = f"{found.least}" if found.least == found.most else f"{found.least} to {found.most}"
        many = f"{found.least} or more" if found.most == _MANY else many
        raise UsageError(f"sql: {name} takes {many} arguments, not {len(arguments)}")
    return found.make(Call(name, tuple(arguments), inner))
