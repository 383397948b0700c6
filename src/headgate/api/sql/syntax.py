"""Syntax trees of SQL: sqlglot parses them, and is imported when it is needed."""

from __future__ import annotations

import importlib
import re
from decimal import Decimal
from functools import cache
from typing import TYPE_CHECKING, Any

from headgate.api.sql import functions
from headgate.api.sql.values import unsupported
from headgate.errors import UsageError

if TYPE_CHECKING:
    from sqlglot.expressions import Expression


PROCTIME = "\0proctime"
"""What stands for a column that is the clock: ``PROCTIME() AS p_time``. No column of a stream is called so."""


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
    """Return DuckDB's dialect, in which names may stand in backticks, too; ``api.sql.functions`` has own functions."""
    exp()
    duckdb = importlib.import_module("sqlglot.dialects.duckdb").DuckDB
    tokenizer = type("Tokenizer", (duckdb.Tokenizer,), {"IDENTIFIERS": ['"', "`"]})
    own = {**functions.FUNCTIONS, **functions.REFUSED}
    tables = {
        name: {word: found for word, found in getattr(duckdb.Parser, name).items() if word not in own}
        for name in ("FUNCTIONS", "FUNCTION_PARSERS")
    }
    parser = type("Parser", (duckdb.Parser,), tables)
    places = {"INDEX_OFFSET": 0}  # of elements are left as they are written
    return type("_HeadgateSql", (duckdb,), {"Tokenizer": tokenizer, "Parser": parser, **places})()


_WHOLE_WORDS = {"MATCH_RECOGNIZE": "use key_by(...).process(...) with state"}
"""What no dialect here can parse."""


def parsed(query: str) -> Expression:
    """Return the syntax tree of one query.

    Raises:
        UsageError: it is no SQL, or not one query.
    """
    exp()
    errors = importlib.import_module("sqlglot.errors")
    for word, instead in _WHOLE_WORDS.items():
        if re.search(rf"\b{word}\b\s*\(", re.sub(r"'[^']*'", "", query), re.IGNORECASE):
            raise unsupported(word, instead)
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
    for node in found.find_all(exp().Anonymous):
        if (
            node.name.upper() in functions.OF_UNITS
            and node.expressions
            and isinstance(node.expressions[0], exp().Column)
        ):
            node.expressions[0].replace(exp().var(node.expressions[0].name))  # a unit is no column
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


_MONTHS = {"MONTH": 1, "QUARTER": 3, "YEAR": 12}


def interval_months(node: Expression) -> int | None:
    """Return the months of ``INTERVAL '2' MONTH``; None: it is none of months, quarters or years.

    Raises:
        UsageError: it has no whole number.
    """
    unit = str(node.args.get("unit") or "").upper().removesuffix("S") if isinstance(node, exp().Interval) else ""
    if unit not in _MONTHS:
        return None
    if not isinstance(node.this, exp().Literal) or not re.fullmatch(r"[+-]?\d+", node.this.name):
        raise UsageError(f"sql: write a number of months as INTERVAL '2' MONTH, not {node.sql()}")
    return int(node.this.name) * _MONTHS[unit]


def is_proctime(node: Expression) -> bool:
    """Whether an expression is the clock."""
    if isinstance(node, exp().Anonymous):
        return node.name.upper() == "PROCTIME" and not node.expressions
    return isinstance(node, exp().Column) and node.name == PROCTIME


_KNOWN = {
    "Case": "ifs default",
    "If": "true false",
    "Cast": "to",
    "TryCast": "to",
    "Between": "low high",
    "Trim": "position",
    "RegexpExtract": "group",
    "Substring": "start length",
    "Replace": "replacement",
    "SplitPart": "delimiter part_index",
    "Round": "decimals",
    "TimestampTrunc": "unit",
    "DateTrunc": "unit",
    "TimeToStr": "format",
    "Interval": "unit",
    "In": "query",
    "Like": "negate",
    "ILike": "negate",
    "Select": "with_ from_ joins where group having distinct",
    "Subquery": "alias with_",
    "Table": "alias version",
    "Union": "with_ distinct",
    "Intersect": "with_ distinct",
    "Except": "with_ distinct",
    "Join": "on side kind using",
    "StrPosition": "substr",
    "AtTimeZone": "zone",
    "Array": "bracket_notation",
    "GroupConcat": "separator",
}
"""The parts of syntax that a translation looks at, besides the operands."""


_SILENT = {
    "this", "expression", "expressions", "is_string", "safe", "typed", "coalesce", "ignore_nulls",
    "null_if_pos_overflow", "is_nvl", "is_null", "big_int", "unabbreviate", "input_type_preserved",
}  # fmt: skip
"""Parts that say what holds in any case here."""


def refuse_others(node: Expression) -> None:
    """Refuse a part that no translation looks at, such as the flags of a regular expression.

    Raises:
        UsageError
    """
    known = _KNOWN.get(type(node).__name__, "").split()
    for name, part in node.args.items():
        if part and name not in _SILENT and name not in known:
            shown = part.sql() if isinstance(part, exp().Expression) else name.upper().replace("_", " ")
            raise unsupported(f"{node.key.upper()} with {shown}", "leave it out, or use the methods of streams")
