"""Expressions of SQL over odd values: results against DuckDB, numbers that are too large, and what is refused."""

from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

import headgate as hg
from headgate.errors import PipelineFailed, UsageError
from headgate.testing import Collect, run

ROWS = pa.table(
    {
        "id": pa.array(range(7)),
        "small": pa.array([1, -1, 127, -127, None, 50, 0], pa.int8()),
        "number": pa.array([1, -7, 2**31 - 1, -(2**31), None, 100, 0], pa.int32()),
        "large": pa.array([1, -7, 2**53 + 1, -(2**60), None, 7, 0], pa.int64()),
        "plain": pa.array([1, 0, 255, 200, None, 7, 100], pa.uint8()),
        "float": pa.array([1.5, -2.5, math.nan, math.inf, None, -0.0, 0.25]),
        "text": pa.array(["abc", "ÄÖÜß", "  x ", "", None, "a%b_c\\d", "Ab\ncd"]),
        "digits": pa.array(["5", "-3", "0.25", "-0.35", None, "1e3", "x"]),
        "flag": pa.array([True, False, None, True, False, None, True]),
        "money": pa.array([Decimal(x) if x else None for x in ("1.25", "-2.55", "0.01", "", "9.99", "3.00", "-0.05")]),
        "rate": pa.array([Decimal(x) if x else None for x in ("1.2555", "-2.555", "0.0001", "", "3.3", "3", "-5e-4")]),
        "ts": pa.array(
            [
                dt.datetime(2020, 2, 29, 23, 59, 59, 999_999),
                dt.datetime(1969, 12, 31, 23, 59, 59, 500_000),
                None,
                dt.datetime(2024, 12, 30),
                dt.datetime(1900, 1, 1),
                dt.datetime(2021, 1, 3, 12),
                dt.datetime(2038, 1, 19, 3, 14, 8),
            ],
            pa.timestamp("us"),
        ),
        "day": pa.array([dt.date(2020, 2, 29), dt.date(1969, 12, 31), None, *[dt.date(1900, 1, 1)] * 4]),
    }
)  # fmt: skip

EXPRESSIONS = [
    "CAST(small AS BIGINT) + 1", "number * 2.0", "CAST(number AS BIGINT) * 10", "plain - small", "plain - 300",
    "ABS(small)", "ABS(CAST(number AS BIGINT))", "small % 3", "small % -3", "plain % 7", "large % 1000", "number % 0",
    "small + large * 2 - number", "-9223372036854775808 + large * 0", "large + 9223372036854775807 * 0", "- - small",
    "-2 * -3", "number % (small - 1)", "money / 3", "money / 4", "rate / money", "1.5 / 2", "1.0 / 3", "small / 4",
    "float / 3", "7 / 2", "money * money", "money * rate", "money * 0.015", "0.01 * 0.01", "rate * rate * rate",
    "money * 3", "money * float", "money + rate", "money - 0.001", "money % 0.7", "-money", "ABS(money)",
    "ROUND(money, 1)", "money > 1.2", "CAST(money AS DECIMAL(10, 1))", "CAST(rate AS DECIMAL(10, 2))",
    "CAST(2.675 AS DECIMAL(10, 2))", "CAST(small AS DECIMAL(10, 1))", "TRY_CAST(digits AS DECIMAL(10, 1))",
    "TRY_CAST(digits AS DOUBLE)", "TRY_CAST(money AS DECIMAL(3, 2))", "TRY_CAST(large AS INTEGER)",
    "TRY_CAST(large AS TINYINT)", "CAST(ts AS VARCHAR)", "CAST(day AS VARCHAR)", "text || ts",
    "CONCAT(text, money, flag, number)", "CAST(flag AS INTEGER)", "CAST(ts AS DATE)", "CAST(day AS TIMESTAMP)",
    "CAST(number AS BOOLEAN)", "CAST(flag AS VARCHAR)", "day + INTERVAL '1' HOUR", "day - INTERVAL '36' HOUR",
    "ts - INTERVAL '1' DAY", "ts - ts", "day < ts", "ts - TIMESTAMP '2020-01-01' > INTERVAL '1' DAY",
    "STRFTIME(ts, '%f')", "STRFTIME(ts, '%Y%m%d-%H:%M:%S.%g %j %a %p %%')", "LTRIM(text)", "RTRIM(text)",
    "TRIM(text, 'ax')", "TRIM(BOTH 'a' FROM text)", "TRIM(LEADING FROM text)", "LTRIM(text, 'a')",
    "TRIM(TRAILING 'd' FROM text)", "SUBSTRING(text, 0)", "SUBSTRING(text, 0, 2)", "SUBSTRING(text, -2)",
    "SUBSTRING(text, -2, 1)", "SUBSTRING(text, -9, 7)", "SUBSTRING(text, 2, 0)", "SUBSTRING(text, 2, NULL)",
    "SUBSTRING(text, small, 2)", "SUBSTRING(text FROM 2 FOR 1)", "REPLACE(text, '', 'x')", "REPLACE(text, 'b', '$0')",
    "SPLIT_PART(text, 'b', 2)", "SPLIT_PART(text, '', 1)", "text LIKE '%\\d'", "text LIKE 'Ab_cd'", "text LIKE ''",
    "text ILIKE 'äöü_'", "text LIKE 'a.c'", "NOT flag", "flag AND NULL", "flag OR NULL", "NULL AND flag",
    "flag IS NOT TRUE", "flag IS FALSE", "small BETWEEN 5 AND NULL", "small NOT BETWEEN 5 AND NULL",
    "small IN (1, NULL)", "small NOT IN (1, NULL)", "small <> NULL",
    "CASE small WHEN NULL THEN 1 WHEN 1 THEN 2 ELSE 3 END", "CASE WHEN flag THEN 1 END",
    "CASE WHEN flag THEN 1 ELSE 2.5 END", "CASE WHEN NULL THEN 1 ELSE 2 END", "NULLIF(small, NULL)",
    "NULLIF(small, 1)", "COALESCE(NULL, small)", "COALESCE(small, 1.5)", "LEAST(small, NULL)", "float = float",
    "float IN (0)", "float < 0", "large = 9007199254740993", "SQRT(ABS(small))", "POWER(money, 2)",
    "EXTRACT(WEEK FROM day)", "WEEK(ts)", "QUARTER(ts)", "DATE_TRUNC('week', ts)", "DATE_TRUNC('year', ts)",
    "money % rate", "money % 0", "number % 0.0", "CAST(flag AS DECIMAL(3, 1))", "EXTRACT(HOUR FROM day)", "MINUTE(day)",
    "STRFTIME(day, '%d.%m.%Y %H:%M')", "REPLACE(text, 'b', NULL)", "UPPER(NULL)", "LENGTH(NULL)", "ABS(NULL)",
    "5 % CAST('Infinity' AS DOUBLE)", "-12345 % 1e300", "ABS(float) % 2", "large % 1e300",
]  # fmt: skip


def plain(value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, float | int | Decimal):
        return "NaN" if math.isnan(value) else str(value) if math.isinf(value) else f"{float(value):.12g}"
    return value


def source(pipeline: hg.Pipeline, rows: pa.Table = ROWS) -> hg.Stream:
    return pipeline.source(hg.FromRows(rows, batch_rows=3), name="rows")


def test_results_of_odd_values_are_those_of_duckdb(tmp_path: Path) -> None:
    query = f"SELECT id, {', '.join(f'{e} AS c{i}' for i, e in enumerate(EXPRESSIONS))} FROM odd"
    pipeline, sink = hg.Pipeline("odd"), Collect(tmp_path)
    hg.sql(query, odd=source(pipeline)).sink(sink)
    run(pipeline, timeout_s=300)
    connection = duckdb.connect(config={"error_on_division_by_zero": "false"})
    connection.register("odd", ROWS)
    expected = {row[0]: row[1:] for row in connection.sql(query).fetchall()}
    found = {row.pop("id"): list(row.values()) for row in sink.rows()}
    assert found.keys() == expected.keys()
    differences = [
        (text, row, plain(found[row][i]), plain(expected[row][i]))
        for i, text in enumerate(EXPRESSIONS)
        for row in sorted(found)
        if plain(found[row][i]) != plain(expected[row][i])
    ]
    assert differences == []


LARGEST = pa.table(
    {"large": pa.array([2**63 - 1]), "lowest": pa.array([-(2**63)]), "plain": pa.array([2**64 - 1], pa.uint64())}
)


@pytest.mark.parametrize(
    "expression",
    ["large + 1", "lowest - 1", "large * 2", "-lowest", "ABS(lowest)", "plain + 0", "CAST(large AS INTEGER)"],
)
def test_a_number_that_is_too_large_fails(expression: str, tmp_path: Path) -> None:
    pipeline = hg.Pipeline("large")
    hg.sql(f"SELECT {expression} AS x FROM odd", odd=source(pipeline, LARGEST)).sink(Collect(tmp_path))
    with pytest.raises(PipelineFailed, match="conversion from"):
        run(pipeline, timeout_s=300)


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("NOT small", "NOT|stands for numbers, where there must be a condition; compare it"),
        ("small AND number", "stands for numbers, where there must be a condition"),
        ("small IS TRUE", "stands for numbers, where there must be a condition"),
        ("flag + 1", "is about numbers and truth values; arithmetic is of numbers and of times"),
        ("text + text", "is about texts; arithmetic is of numbers and of times"),
        ("text / 2", "needs a number; its argument stands for texts"),
        ("CASE WHEN flag THEN 1 ELSE 'x' END", "CASE mixes texts and numbers; CAST one of them"),
        ("COALESCE(text, small)", "COALESCE mixes texts and numbers; CAST one of them"),
        ("small = '5'", "mixes numbers and texts; CAST one of them"),
        ("ts > '2020-01-01'", "mixes times and texts; CAST one of them"),
        ("ts - ts > 5", "mixes intervals and numbers; CAST one of them"),
        ("REGEXP_MATCHES(text, 'B', 'i')", "REGEXPLIKE with 'i' is not there yet"),
        ("REGEXP_EXTRACT(text, 'A', 0, 'i')", "REGEXPEXTRACT with 'i' is not there yet"),
        ("small BETWEEN SYMMETRIC 100 AND 1", "BETWEEN with SYMMETRIC is not there yet"),
        ("ROUND(float, -1)", "ROUND with -1 is not there yet; write a whole number from 0 on"),
        ("ROUND(float, small)", "ROUND with .* is not there yet"),
        ("CEIL(money, 1)", "CEIL with 1 is not there yet"),
        ("SPLIT_INDEX(text, 'b', -1)", "SPLIT_INDEX with -1 is not there yet"),
        ("SPLIT_INDEX(text, 'b', 1.5)", "SPLIT_INDEX with 1.5 is not there yet"),
        ("SPLIT_INDEX(text, 'b')", "has a wrong number of arguments"),
        ("STRFTIME(ts, '%U')", "STRFTIME with '%U' is not there yet"),
        ("CAST(ts AS BIGINT)", "from times to numbers, is not there yet"),
        ("CAST(large AS TIMESTAMP)", "from numbers to times, is not there yet"),
        ("CAST(text AS DATE)", "from texts to times, is not there yet"),
        ("CAST(text AS TIME)", "CAST to TIME is not there yet"),
        ("CAST('2020-01-01 00:00:00+02:00' AS TIMESTAMP)", "has an offset, which DATE and TIMESTAMP have not"),
        ("99999999999999999999", "is larger than a BIGINT"),
        (f"{'9' * 38}.5", "has more than 38 digits; write 9+.5e0 for a DOUBLE"),
        ("small IN ()", r"IN \(\) has no values"),
        ("LOWER(small)", r"LOWER\(.small.\) needs a text; its argument stands for numbers"),
        ("small LIKE '1%'", "LIKE '1%' needs a text; its argument stands for numbers"),
        ("YEAR(text)", r"YEAR\(.text.\) needs a time; its argument stands for texts"),
        ("EXTRACT(DAY FROM ts - ts)", "needs a time; its argument stands for intervals"),
        ("ABS(flag)", r"ABS\(.flag.\) needs a number; its argument stands for truth values"),
        ("-text", "-.text. needs a number; its argument stands for texts"),
        ("REGEXP_MATCHES(text, '(')", r"sql: '\(' in REGEXP_LIKE is no regular expression: unclosed group"),
        ("COALESCE(CAST(NULL AS BIGINT), wide)", "Int128"),
    ],
)  # fmt: skip
def test_what_has_no_meaning_is_refused(expression: str, said: str) -> None:
    rows = ROWS.append_column("wide", pa.array([1] * 7, pa.uint64()))
    with pytest.raises(UsageError, match=said) as raised:
        hg.sql(f"SELECT {expression} AS x FROM odd", odd=source(hg.Pipeline("refused"), rows))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("SELECT id FROM odd TABLESAMPLE 10%", "TABLE with TABLESAMPLE"),
        ("SELECT id FROM other.odd", "there is no table 'other.odd'"),
        ("SELECT * FROM odd PIVOT (SUM(small) FOR text IN ('a'))", "TABLE with PIVOTS is not there yet"),
        ("(SELECT id FROM odd) LIMIT 3", "LIMIT is not there yet"),
        ("SELECT id, small FROM odd UNION ALL BY NAME SELECT small, id FROM odd", "UNION with BY NAME is not there"),
        ("SELECT other.*, id FROM odd", "there is no table 'other' in FROM"),
        ("SELECT id FROM odd WHERE small", "stands for numbers, where there must be a condition"),
        ("SELECT id FROM odd AS a JOIN odd AS b ON a.id = b.id AND b.small", "stands for numbers"),
        ("SELECT id, n FROM (SELECT id, text, ROW_NUMBER() OVER (PARTITION BY text ORDER BY small NULLS FIRST) AS n "
         "FROM odd) WHERE n <= 2", "ORDER BY with NULLS FIRST is not there yet"),
        ("SELECT id, n FROM (SELECT id, text, ROW_NUMBER() OVER (PARTITION BY text ORDER BY small) AS n FROM odd) "
         "WHERE n < 2.5", "must be n <= a number from 1 on"),
        ("SELECT COUNT(*) AS n FROM odd GROUP BY 1.5", "GROUP BY 1.5, but there are 1 result columns"),
        ("SELECT text, SUM(1) AS n FROM odd GROUP BY text", "an aggregate of a constant, is not there yet"),
        ("SELECT text, SUM(flag) AS n FROM odd GROUP BY text", "is of truth values; it needs numbers"),
        ("SELECT text, COUNT(DISTINCT *) AS n FROM odd GROUP BY text", "STAR is not there yet"),
    ],
)  # fmt: skip
def test_a_clause_that_nothing_looks_at_is_refused(query: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as raised:
        hg.sql(query, odd=source(hg.Pipeline("refused")))
    assert "\n" not in str(raised.value)


def test_a_table_of_with_hides_a_stream_in_any_case(tmp_path: Path) -> None:
    pipeline, sink = hg.Pipeline("hidden"), Collect(tmp_path)
    query = "WITH Odd AS (SELECT id FROM odd WHERE id = 3) SELECT id FROM odd"
    hg.sql(query, odd=source(pipeline)).sink(sink)
    run(pipeline, timeout_s=300)
    assert sink.rows() == [{"id": 3}]
