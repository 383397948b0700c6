"""Random expressions and queries, of which Headgate and DuckDB have one meaning (``docs/guide/sql.md``)."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass

LEAVES: Mapping[str, list[str]] = {
    "whole": ["i", "j", "0", "1", "-2", "3", "100"],
    "double": ["x", "y", "0.5e0", "CAST(2 AS DOUBLE)", "CAST(i AS DOUBLE)"],
    "money": ["m", "1.5", "-2.25", "0.1"],
    "text": ["s", "t", "'a'", "''", "'bc'", "'É'"],
    "truth": ["b", "c", "TRUE", "FALSE"],
    "time": ["ts", "TIMESTAMP '2020-02-29 12:34:56'"],
    "date": ["d", "DATE '2020-03-31'"],
    "order": ["=", "<>", "<", ">", "<=", ">="],
    "kind": ["whole", "double", "money", "text", "truth", "time", "date"],
}
"""Expressions of each kind that hold no others, on ``test_random_queries.SCALARS``."""

OF_ALL = [
    "CASE WHEN {truth} THEN {same} ELSE {same} END", "CASE WHEN {truth} THEN {same} END", "COALESCE({same}, {same})",
    "NULLIF({same}, {same})", "IF({truth}, {same}, {same})",
]  # fmt: skip
NUMBERS = ["({same} + {same})", "({same} - {same})", "ABS({same})", "-({same})"]
ORDERED = ["GREATEST({same}, {same})", "LEAST({same}, {same})"]
GROWN: Mapping[str, list[str]] = {
    "whole": [
        *OF_ALL, *NUMBERS, *ORDERED, "({whole} % {whole})", "(i * {whole})", "SIGN({whole})", "LENGTH({text})",
        "STRPOS({text}, {text})", "CASE {whole} WHEN {whole} THEN {whole} WHEN 3 THEN {whole} END",
        "EXTRACT(YEAR FROM {time})", "EXTRACT(WEEK FROM {date})", "EXTRACT(DOY FROM {date})",
        "EXTRACT(MINUTE FROM {time})",
        "TRY_CAST(t AS BIGINT)", "TRY_CAST(CAST({whole} AS VARCHAR) AS BIGINT)", "CAST({truth} AS BIGINT)",
    ],
    "double": [
        *OF_ALL, *NUMBERS, "({double} * {double})", "({whole} / {whole})", "({double} / {double})", "FLOOR({double})",
        "CEIL({double})", "SQRT(ABS({double}))", "SIN({double})", "ATAN2({double}, {double})", "({double} - {whole})",
        "CAST({whole} AS DOUBLE)", "CAST({money} AS DOUBLE)", "TRY_CAST({text} AS DOUBLE)", "RADIANS({double})",
    ],
    "money": [
        *OF_ALL, *NUMBERS, *ORDERED, "(m * 0.25)", "(m * i)", "CAST({money} AS DECIMAL(14, 1))",
        "CAST(i AS DECIMAL(14, 2))",
    ],
    "text": [
        *OF_ALL, "({text} || {text})", "LOWER({text})", "TRIM({text})", "LTRIM({text})", "SUBSTRING({text}, 2, 2)",
        "SUBSTRING({text}, -2, 5)", "REPLACE({text}, 'b', {text})", "SPLIT_PART({text}, '/', 2)", "LEFT({text}, 2)",
        "RIGHT({text}, -1)", "REVERSE({text})", "LPAD({text}, 7, 'xy')", "RPAD({text}, 3, 'z')", "REPEAT({text}, 2)",
        "CAST({whole} AS VARCHAR)", "CAST({truth} AS VARCHAR)", "CAST({date} AS VARCHAR)", "CAST({time} AS VARCHAR)",
        "CAST({money} AS VARCHAR)", "CONCAT_WS({text}, {text}, {text})",
    ],
    "truth": [
        *OF_ALL, "({truth} AND {truth})", "({truth} OR {truth})", "(NOT {truth})", "({whole} {order} {whole})",
        "({text} {order} {text})", "({double} {order} {double})", "({money} {order} {money})",
        "({money} {order} {whole})",
        "({time} {order} {time})", "({date} {order} {date})", "({truth} = {truth})", "({whole} IS NULL)",
        "({text} IS NOT NULL)", "({whole} BETWEEN {whole} AND {whole})", "({whole} IN ({whole}, {whole}, 7))",
        "({text} NOT IN ({text}, {text}))", "({text} LIKE '%b_')", "({text} NOT ILIKE 'A%')",
        "STARTSWITH({text}, {text})",
        "CONTAINS({text}, {text})", "({whole} IS DISTINCT FROM {whole})", "({truth} IS TRUE)", "({truth} IS NOT FALSE)",
    ],
    "time": [
        *OF_ALL, *ORDERED, "({time} + INTERVAL '90' SECOND)", "({time} - INTERVAL '1' MONTH)",
        "({time} + INTERVAL '-5' HOUR)", "({time} + INTERVAL '1' YEAR)", "DATE_TRUNC('week', {time})",
        "DATE_TRUNC('quarter', {time})",
        "DATE_TRUNC('minute', {time})", "CAST({date} AS TIMESTAMP)",
    ],
    "date": [*OF_ALL, *ORDERED, "CAST({time} AS DATE)"],
}  # fmt: skip
"""Expressions of each kind that hold others: ``{same}`` is one of the same kind."""


def expression(rng: random.Random, depth: int, kind: str | None = None) -> str:
    """Return an expression of a kind, or of any."""
    kind = kind or rng.choice(LEAVES["kind"])
    text = rng.choice(GROWN[kind] if depth and kind in GROWN else LEAVES[kind])
    return re.sub(r"\{(\w+)\}", lambda part: expression(rng, depth - 1, kind if part[1] == "same" else part[1]), text)


@dataclass(frozen=True)
class Query:
    """A query, and its columns with what they hold: ``key`` (small integers, no null), ``whole`` and so on."""

    text: str
    columns: Mapping[str, str]

    def around(self, text: str, columns: Mapping[str, str], *others: Query) -> Query:
        """Return a query of this one, which is ``{0}`` in ``text``, and of others."""
        return Query(text.format(*(f"({one.text})" for one in (self, *others))), columns)


class Queries:
    """Draws queries of the table ``bids`` of ``test_query``."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._count = 0

    def query(self, depth: int) -> Query:
        """Return a query of so many steps, one around the other, and their joins with others."""
        if depth == 0:
            return self._table()
        made = self.query(depth - 1)
        steps = [
            self._filtered, self._grouped, self._grouped, self._joined, self._joined, self._distinct, self._combined,
            self._top, self._those_in,
        ]  # fmt: skip
        found: Query | None = None
        while found is None:
            found = self._rng.choice(steps)(made, depth)
        return found

    def _names(self, count: int) -> list[str]:
        self._count += count
        return [f"n{number}" for number in range(self._count - count, self._count)]

    def _table(self) -> Query:
        names = self._names(6)
        of = ["id", "auction", "price", "flag", "text", "CAST(price AS DECIMAL(12, 2)) * 0.25"]
        listed = ", ".join(f"{one} AS {name}" for one, name in zip(of, names, strict=True))
        kinds = ["key", "key", "whole", "truth", "text", "money"]
        return Query(f"SELECT {listed} FROM bids", dict(zip(names, kinds, strict=True)))

    def _of(self, query: Query, *kinds: str) -> str | None:
        found = [name for name, kind in query.columns.items() if kind in kinds]
        return self._rng.choice(found) if found else None

    def _condition(self, query: Query, table: str = "") -> str:
        name, kind = self._rng.choice(list(query.columns.items()))
        texts = {
            "truth": ["{0}", "NOT {0}", "{0} IS NULL"],
            "text": ["{0} LIKE '%b%'", "{0} <> 'abc'", "LENGTH({0}) > 2"],
            "key": ["{0} % 3 <> 1", "{0} > 2", "({0} < 4 OR {0} > 100)"],
        }
        return self._rng.choice(texts.get(kind, ["{0} > 50", "{0} IS NOT NULL"])).format(table + name)

    def _filtered(self, of: Query, depth: int) -> Query:
        return of.around(f"SELECT * FROM {{0}} AS t WHERE {self._condition(of)}", of.columns)

    def _group_key(self, of: Query) -> str:
        name = self._of(of, "key", "whole", "truth", "text")
        texts = {
            "key": "{0} % 5",
            "whole": "COALESCE({0}, 0) % 4",
            "truth": "IF({0}, 1, 0)",
            "text": "COALESCE(LENGTH({0}), -1)",
        }
        return "1" if name is None else texts[of.columns[name]].format(name)

    def _aggregate(self, of: Query) -> tuple[str, str]:
        name, kind = self._rng.choice(list(of.columns.items()))
        texts = [
            ("COUNT(*)", "key"),
            (f"COUNT({name})", "key"),
            (f"COUNT(*) FILTER (WHERE {self._condition(of)})", "key"),
        ]
        if kind in ("key", "whole", "text"):
            texts.append((f"COUNT(DISTINCT {name})", "key"))
        if kind in ("key", "whole", "money"):
            result = "whole" if kind == "key" else kind
            texts += [(f"{verb}({name})", result) for verb in ("SUM", "SUM")]
            texts += [(f"AVG({name})", "double"), (f"SUM({name}) FILTER (WHERE {self._condition(of)})", result)]
        if kind in ("key", "whole"):
            texts += [(f"MIN({name})", "whole"), (f"MAX({name}) - MIN({name})", "whole")]
        return self._rng.choice(texts)

    def _grouped(self, of: Query, depth: int) -> Query | None:
        keys = sorted({self._group_key(of) for _ in range(self._rng.choice([1, 1, 2]))} - {"1"})
        if not keys:
            return None
        aggregates = [self._aggregate(of) for _ in range(self._rng.choice([1, 2, 3]))]
        columns = [*((key, "key") for key in keys), *aggregates]
        names = self._names(len(columns))
        listed = ", ".join(f"{text} AS {name}" for (text, _), name in zip(columns, names, strict=True))
        where = self._rng.choice(["", f" WHERE {self._condition(of)}"])
        having = self._rng.choice(["", "", " HAVING COUNT(*) > 2"])
        return of.around(
            f"SELECT {listed} FROM {{0}} AS t{where} GROUP BY {', '.join(keys)}{having}",
            dict(zip(names, (kind for _, kind in columns), strict=True)),
        )

    def _joined(self, of: Query, depth: int) -> Query | None:
        other = self.query(self._rng.choice([0, depth - 1]))
        left, right = self._of(of, "key", "whole"), self._of(other, "key", "whole")
        if left is None or right is None:
            return None
        how = self._rng.choice(["JOIN", "JOIN", "LEFT JOIN", "RIGHT JOIN", "FULL JOIN"])
        more = f" AND {self._condition(other, 'r.')}" if how == "JOIN" and self._rng.random() < 0.3 else ""
        chosen = [
            (f"{table}.{name}", kind if how == "JOIN" or kind != "key" else "whole")
            for table, query in (("l", of), ("r", other))
            for name, kind in self._rng.sample(list(query.columns.items()), min(3, len(query.columns)))
        ]
        names = self._names(len(chosen))
        listed = ", ".join(f"{one} AS {name}" for (one, _), name in zip(chosen, names, strict=True))
        return of.around(
            f"SELECT {listed} FROM {{0}} AS l {how} {{1}} AS r ON l.{left} = r.{right}{more}",
            dict(zip(names, (kind for _, kind in chosen), strict=True)),
            other,
        )

    def _distinct(self, of: Query, depth: int) -> Query | None:
        names = [name for name, kind in of.columns.items() if kind != "double"][:2]
        if not names:
            return None
        return of.around(
            f"SELECT DISTINCT {', '.join(names)} FROM {{0}} AS t", {name: of.columns[name] for name in names}
        )

    def _combined(self, of: Query, depth: int) -> Query | None:
        other = self.query(depth - 1)
        pairs = [(self._of(of, *kinds), self._of(other, *kinds)) for kinds in (("key", "whole"), ("text",), ("truth",))]
        both = [(one, two) for one, two in pairs if one is not None and two is not None]
        if not both:
            return None
        verb = self._rng.choice(["UNION", "UNION ALL", "INTERSECT", "EXCEPT"])
        names = self._names(len(both))
        first = ", ".join(f"{one} AS {name}" for (one, _), name in zip(both, names, strict=True))
        kinds = [of.columns[one] if of.columns[one] == other.columns[two] else "whole" for one, two in both]
        return of.around(
            f"SELECT {first} FROM {{0}} AS t {verb} SELECT {', '.join(two for _, two in both)} FROM {{1}} AS u",
            dict(zip(names, kinds, strict=True)),
            other,
        )

    def _top(self, of: Query, depth: int) -> Query | None:
        key = self._of(of, "key")
        others = [name for name in of.columns if name != key]
        if key is None or not others:
            return None
        order = ", ".join(f"{name} {self._rng.choice(['ASC', 'DESC'])} NULLS LAST" for name in others)
        (number,) = self._names(1)
        bound = self._rng.choice([f"{number} <= 2", f"{number} = 1", f"{number} > 1 AND {number} <= 3"])
        return of.around(
            f"SELECT {', '.join(of.columns)} FROM (SELECT *, ROW_NUMBER() OVER (PARTITION BY {key} ORDER BY {order}) "
            f"AS {number} FROM {{0}} AS t) WHERE {bound}",
            of.columns,
        )

    def _those_in(self, of: Query, depth: int) -> Query | None:
        other = self.query(self._rng.choice([0, depth - 1]))
        left, right = self._of(of, "key"), self._of(other, "key")
        if left is None or right is None:
            return None
        texts = [
            f"SELECT * FROM {{0}} AS t WHERE {left} IN (SELECT {right} FROM {{1}} AS u)",
            f"SELECT * FROM {{0}} AS t WHERE NOT EXISTS (SELECT 1 FROM {{1}} AS u WHERE u.{right} = t.{left})",
        ]
        return of.around(self._rng.choice(texts), of.columns, other)
