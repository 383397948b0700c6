"""Functions of SQL over odd values against DuckDB, and, where it has no such function, against plain Python."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from tests.api.sql.test_values import plain

import headgate as hg
from headgate.errors import HeadgateError, UsageError
from headgate.testing import Collect, run

MAP = pa.map_(pa.string(), pa.int64())
NUMBERED = pa.map_(pa.int64(), pa.string())
PLACE = pa.struct([("city", pa.string()), ("at", pa.struct([("Lat", pa.float64())]))])
TEXTS = ["abcab", "ÄÖÜß äö", " x ", "", None, "a%b_c\\d", "Ab\ncd", "日本語日本", "e\u0301a", "$1 (x) b"]
COUNT = len(TEXTS)
ROWS = pa.table(
    {
        "id": pa.array(range(COUNT)),
        "text": pa.array(TEXTS),
        "part": pa.array(["b", "ö", "", "", "a", None, "d", "本", "\u0301", "b"]),
        "n": pa.array([2, 0, -1, 5, 3, None, 100, 4, -2, 1], pa.int32()),
        "float": pa.array([1.5, -2.5, math.nan, math.inf, None, -0.0, 0.25, -math.inf, 7.999, 1e300]),
        "unit": pa.array([0.5, -0.5, 0.0, 1.0, None, -1.0, 0.25, 0.75, -0.25, 0.1]),
        "positive": pa.array([1.0, 2.5, 1000.0, 1e-9, None, 0.5, 3.0, 10.0, 1e300, 64.0]),
        "large": pa.array([1, -7, 2**53 + 1, -(2**60), None, 7, 0, 10, -1, 86_400], pa.int64()),
        "seconds": pa.array([0, -1, 1_600_000_000, 4_102_444_800, None, 7, 951_782_400, -86_401, 1, 86_399]),
        "ts": pa.array(
            [
                dt.datetime(2020, 2, 29, 23, 59, 59, 999_999), dt.datetime(1969, 12, 31, 23, 59, 59, 500_000), None,
                dt.datetime(2024, 12, 30), dt.datetime(1900, 1, 1), dt.datetime(2021, 1, 3, 12),
                dt.datetime(2038, 1, 19, 3, 14, 8), dt.datetime(2024, 3, 31, 2, 30), dt.datetime(2024, 10, 27, 2, 30),
                dt.datetime(2023, 1, 31, 5),
            ],
            pa.timestamp("us"),
        ),
        "other": pa.array(
            [
                dt.datetime(2021, 2, 28, 23, 59, 59, 999_999), dt.datetime(1970, 1, 1), dt.datetime(2020, 1, 1),
                dt.datetime(2024, 11, 30), dt.datetime(2000, 1, 1), None, dt.datetime(2038, 1, 19, 3, 14, 7),
                dt.datetime(2023, 3, 31, 2, 29), dt.datetime(2025, 10, 27, 2, 30), dt.datetime(2023, 2, 28, 6),
            ],
            pa.timestamp("us"),
        ),
        "day": pa.array([dt.date(2020, 2, 29), dt.date(1969, 12, 31), None, *[dt.date(1900, 1, 1)] * 7]),
        "stamp": pa.array(
            [
                "2020-02-29 23:59:59.999999", "1969-12-31 23:59:59", "2020-02-30 00:00:00", "", None, "x",
                "2020-1-1 1:1:1", "2020-01-01 00:00:00.5", "2020-01-01", " 2020-01-01 00:00:00",
            ]
        ),
        "days": pa.array(
            ["2020-02-29", "29.02.2020", "2021-02-29", "", None, "x", "2020-1-1", "0001-01-01", "9999-12-31",
             "2020-01-01x"],
        ),
        "numbers": pa.array([[1, 2, 2], [], None, [None], [3, None, -1], [5], [0], [1, None, None], [2], [9, 8]]),
        "words": pa.array([["a", "b"], [], None, [None, "x"], ["", ""], ["ä"], ["b", None, "a"], ["b"], ["c"], ["d"]]),
        "pairs": pa.array([[("a", 1), ("b", None)], [], None, [("b", 2)], *[[("ä", 3)]] * 6], MAP),
        "numbered": pa.array([[(7, "x"), (1, "y")], [], None, [(-1, None)], *[[(2, "ä"), (-1, "z")]] * 6], NUMBERED),
        "place": pa.array(
            [{"city": "x", "at": {"Lat": 1.5}}, None, {"city": None, "at": None}, *[{"city": "y"}] * 7], PLACE
        ),
    }
)  # fmt: skip

SAME = [
    "CONCAT_WS('-', text, part, n)", "CONCAT_WS(part, text, 'x')", "CONCAT_WS('', part, part)", "REPEAT(text, n % 4)",
    "REPEAT(part, n)", "LEFT(text, n)", "RIGHT(text, n)", "LEFT(text, 2)", "RIGHT(text, -1)", "REVERSE(text)",
    "INSTR(text, part)", "STRPOS(text, 'b')", "POSITION(part IN text)", "INSTR(text, '')", "INSTR(text, 'zz')",
    "CHAR_LENGTH(text)", "CHARACTER_LENGTH(part)", "CONTAINS(text, part)", "STARTS_WITH(text, part)",
    "LPAD(text, n, '*-')", "RPAD(text, n, 'ä')", "LPAD(part, 3, 'xyz')", "RPAD(text, 4, ' ')", "LPAD(NULL, 3, 'x')",
    "SIGN(n)", "SIGN(float)", "SIGN(large)", "LOG2(positive)", "LOG10(positive)", "LOG(2, positive)", "CBRT(float)",
    "SIN(unit)", "COS(unit)", "TAN(unit)", "ASIN(unit)", "ACOS(unit)", "ATAN(float)", "SINH(unit)", "COSH(unit)",
    "TANH(float)", "ATAN2(unit, positive)", "DEGREES(float)", "RADIANS(unit)", "TRUNC(float)", "TRUNC(n)",
    "IFNULL(n, 7)", "COALESCE(text, part)", "DAYOFMONTH(ts)", "DAYOFYEAR(ts)", "DAYOFMONTH(day)",
    "ARRAY_CONTAINS(numbers, 2)", "ARRAY_CONTAINS(words, part)", "LIST_CONTAINS(words, 'a')", "numbers[1]",
    "numbers[-1]", "numbers[n]",
    "numbers[n + 1]", "numbers[CAST(1 AS INT)]", "numbers[0]", "words[2]",
    "place.city", "place.at.lat", "odd.place.city",
    "IF(CARDINALITY(pairs) > 0, 1, 0)", "ARRAY[n, 7][1]", "[text, part][2]", "CARDINALITY(MAP_KEYS(pairs))",
    "ts AT TIME ZONE 'America/New_York' AT TIME ZONE 'UTC'", "ENDS_WITH(text, part)",
    "REPLACE('bc', 'b', text)", "ts + INTERVAL '1' MONTH", "ts - INTERVAL '13' MONTH", "INTERVAL '1' YEAR + ts",
    "day + INTERVAL '-2' QUARTER", "day - INTERVAL '1' MONTH", "DATE_TRUNC('quarter', ts)", "EXTRACT(DOY FROM ts)",
]  # fmt: skip
"""Expressions that are the same text in DuckDB."""

OTHERS = {
    "ENDSWITH(text, part)": "ENDS_WITH(text, part)",
    "STARTSWITH(text, 'a')": "STARTS_WITH(text, 'a')",
    "LOCATE(part, text)": "INSTR(text, part)",
    "LOCATE('b', text, 3)": "CASE INSTR(text[3:], 'b') WHEN 0 THEN 0 ELSE INSTR(text[3:], 'b') + 2 END",
    "OCTET_LENGTH(text)": "OCTET_LENGTH(ENCODE(text))",
    "REGEXP(text, '^[aÄ].*b')": "REGEXP_MATCHES(text, '^[aÄ].*b')",
    "REGEXP_REPLACE(text, '(a)(b)', '<$2$1>')": "REGEXP_REPLACE(text, '(a)(b)', '<\\2\\1>', 'g')",
    "REGEXP_REPLACE(text, 'b', '$name$')": "REGEXP_REPLACE(text, 'b', '$name$', 'g')",
    "REPLACE(text, 'zz', part)": "REPLACE(text, 'zz', part)",
    "numbered[1]": "numbered[1]",
    "numbered[-1]": "numbered[-1]",
    "REGEXP_REPLACE(text, 'b', '\\\\$')": "REGEXP_REPLACE(text, 'b', '\\\\$', 'g')",
    "REGEXP_COUNT(text, 'a|b')": "LEN(REGEXP_EXTRACT_ALL(text, 'a|b'))",
    "TO_BASE64(text)": "TO_BASE64(ENCODE(text))",
    "FROM_BASE64(TO_BASE64(text))": "text",
    "FROM_BASE64('?')": "NULL",
    "FROM_BASE64('4pyT8J+YgEE=')": "'✓😀A'",
    "FROM_BASE64('/w==')": "NULL",
    "FROM_BASE64('7aCA')": "NULL",
    "HEX(text)": "HEX(text)",
    "CARDINALITY(SPLIT(text, 'b'))": "LEN(STRING_SPLIT(text, 'b'))",
    "SPLIT(text, 'b')[-1]": "STRING_SPLIT(text, 'b')[-1]",
    "TRUNCATE(float, 1)": "TRUNC(float * 10) / 10",
    "TO_TIMESTAMP(stamp)": "TRY_STRPTIME(stamp, ['%Y-%m-%d %H:%M:%S.%f', '%Y-%m-%d %H:%M:%S'])",
    "TO_TIMESTAMP(days, 'yyyy-MM-dd')": "TRY_STRPTIME(days, '%Y-%m-%d')",
    "TO_DATE(days)": "CAST(TRY_STRPTIME(days, '%Y-%m-%d') AS DATE)",
    "TO_DATE(days, 'dd.MM.yyyy')": "CAST(TRY_STRPTIME(days, '%d.%m.%Y') AS DATE)",
    "UNIX_TIMESTAMP(ts)": "CAST(FLOOR(EPOCH(ts)) AS BIGINT)",
    "UNIX_TIMESTAMP('2020-01-01 00:00:00')": "1577836800",
    "FROM_UNIXTIME(seconds)": "STRFTIME(MAKE_TIMESTAMP(seconds * 1000000), '%Y-%m-%d %H:%M:%S')",
    "FROM_UNIXTIME(seconds, 'dd/MM/yyyy')": "STRFTIME(MAKE_TIMESTAMP(seconds * 1000000), '%d/%m/%Y')",
    "TO_TIMESTAMP_LTZ(seconds, 0) AT TIME ZONE 'Asia/Tokyo'": "MAKE_TIMESTAMP((seconds + 32400) * 1000000)",
    "TO_TIMESTAMP_LTZ(seconds, 3) AT TIME ZONE 'UTC'": "MAKE_TIMESTAMP(seconds * 1000)",
    "DAYOFWEEK(ts)": "DAYOFWEEK(ts) + 1",
    "CONVERT_TZ('2024-07-01 12:00:00', 'UTC', 'Europe/Berlin')": "'2024-07-01 14:00:00'",
    "ARRAY_JOIN(words, '-')": "ARRAY_TO_STRING(words, '-')",
    "ARRAY_JOIN(words, '-', '?')": "ARRAY_TO_STRING(LIST_TRANSFORM(words, lambda x: COALESCE(x, '?')), '-')",
    "ARRAY_MAX(numbers)": "LIST_MAX(numbers)",
    "ARRAY_MIN(words)": "LIST_MIN(words)",
    "ARRAY_REVERSE(numbers)[1]": "LIST_REVERSE(numbers)[1]",
    "CARDINALITY(numbers)": "LEN(numbers)",
    "CARDINALITY(ARRAY_CONCAT(numbers, ARRAY[large]))": "LEN(numbers) + 1",
    "pairs['b']": "pairs['b']",
    "MAP_VALUES(pairs)[1]": "MAP_VALUES(pairs)[1]",
    "NVL(part, text)": "COALESCE(part, text)",
}
"""Expressions, and what they are in DuckDB."""

UNITS = ("MICROSECOND", "MILLISECOND", "SECOND", "MINUTE", "HOUR", "DAY", "WEEK", "MONTH", "QUARTER", "YEAR")
for unit in UNITS:
    OTHERS[f"TIMESTAMPADD({unit}, n, ts)"] = f"ts + n * INTERVAL 1 {unit}"
    OTHERS[f"TIMESTAMPDIFF({unit}, ts, other)"] = f"DATE_SUB('{unit}', ts, other)"
    OTHERS[f"TIMESTAMPDIFF({unit}, other, ts)"] = f"DATE_SUB('{unit}', other, ts)"


OF_TWO_TEXTS = [
    "CONCAT_WS({1}, {0}, {0})", "INSTR({0}, {1})", "LOCATE({1}, {0}, 2)", "ARRAY_JOIN(SPLIT({0}, {1}), '|')",
    "REPLACE({0}, 'b', {1})", "ARRAY_JOIN(ARRAY[{0}, 'x'], {1})", "ARRAY_JOIN(ARRAY[{0}, NULL], {1}, '?')",
    "LPAD({0}, 5, {1})", "CONTAINS({0}, {1})", "STARTSWITH({0}, {1})", "ENDSWITH({0}, {1})", "{0} || {1}",
    "NULLIF({0}, {1})",
]  # fmt: skip


def results(expressions: list[str], tmp_path: Path, rows: pa.Table = ROWS) -> dict[int, list[Any]]:
    query = f"SELECT id, {', '.join(f'{e} AS c{i}' for i, e in enumerate(expressions))} FROM odd"
    pipeline, sink = hg.Pipeline("functions"), Collect(tmp_path)
    hg.sql(query, odd=pipeline.source(hg.FromRows(rows, batch_rows=3), name="rows")).sink(sink)
    run(pipeline, timeout_s=300)
    return {row.pop("id"): list(row.values()) for row in sink.rows()}


def test_functions_of_odd_values_are_those_of_duckdb(tmp_path: Path) -> None:
    pairs = {**{one: one for one in SAME}, **OTHERS}
    found = results(list(pairs), tmp_path)
    connection = duckdb.connect()
    connection.execute("SET timezone = 'UTC'")
    connection.register("odd", ROWS)
    query = ", ".join(f"{text} AS c{i}" for i, text in enumerate(pairs.values()))
    wanted = {row[0]: row[1:] for row in connection.sql(f"SELECT id, {query} FROM odd").fetchall()}
    differences = [
        (text, row, plain(found[row][i]), plain(wanted[row][i]))
        for i, text in enumerate(pairs)
        for row in sorted(found)
        if plain(found[row][i]) != plain(wanted[row][i])
    ]
    assert differences == []


JUDGED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "TRY_CAST('-2.75' AS BIGINT)": lambda row: -2,
    "TRY_CAST(' 7.9 ' AS INT)": lambda row: 7,
    "TRY_CAST(' -7.25 ' AS DOUBLE)": lambda row: -7.25,
    "TRY_CAST('1.2.3' AS BIGINT)": lambda row: None,
    "LOCATE('b', text, n)": lambda r: (
        None if r["text"] is None or r["n"] is None else r["text"].find("b", r["n"] - 1) + 1 if r["n"] > 0 else 0
    ),
    "CARDINALITY(ARRAY_DISTINCT(numbers))": lambda r: None if r["numbers"] is None else len({*r["numbers"]}),
    "LPAD('abc', 5, '')": lambda r: None,
    "RPAD('abc', 2, '')": lambda r: "ab",
    "COT(positive)": lambda r: None if r["positive"] is None else 1 / math.tan(r["positive"]),
    "UNIX_TIMESTAMP('x')": lambda r: None,
    "CONVERT_TZ('2024-03-31 02:30:00', 'Europe/Berlin', 'UTC')": lambda r: None,  # the clock left it out
    "CONVERT_TZ('2024-10-27 02:30:00', 'Europe/Berlin', 'UTC')": lambda r: "2024-10-27 00:30:00",  # the first of two
    "ts AT TIME ZONE 'Europe/Berlin' AT TIME ZONE 'Europe/Berlin'": lambda r: (
        None if r["ts"] == dt.datetime(2024, 3, 31, 2, 30) else r["ts"]
    ),
    "INITCAP('heLLo wORLD-ümlaut x_y 2nd')": lambda r: "Hello World-Ümlaut X_Y 2Nd",
}  # fmt: skip


def test_functions_that_duckdb_has_not_are_those_of_python(tmp_path: Path) -> None:
    found = results(list(JUDGED), tmp_path)
    differences = [
        (text, row["id"], plain(found[row["id"]][i]), plain(judge(row)))
        for i, (text, judge) in enumerate(JUDGED.items())
        for row in ROWS.to_pylist()
        if plain(found[row["id"]][i]) != plain(judge(row))
    ]
    assert differences == []


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("MD5(text)", "the function MD5 is not there yet; use map with Python's hashlib"),
        ("JSON_VALUE(text, '$.a')", "the function JSON_VALUE is not there yet; use map with Python's json"),
        ("JSON_EXISTS(text, '$.a')", "the function JSON_EXISTS is not there yet; use map with Python's json"),
        ("SHA256(text)", "the function SHA256 is not there yet"),
        ("LOG(positive)", "write LN or LOG10"),
        ("NOW()", "the function NOW is not there yet; use PROCTIME"),
        ("LPAD(text)", "LPAD takes 2 to 3 arguments, not 1"),
        ("CONCAT_WS('x')", "CONCAT_WS takes 2 or more arguments, not 1"),
        ("REVERSE(text, 1)", "REVERSE takes 1 arguments, not 2"),
        ("REVERSE(n)", "REVERSE needs a text; its argument stands for numbers"),
        ("LEFT(text, float)", "LEFT needs an integer; CAST its argument to BIGINT"),
        ("REGEXP_REPLACE(text, part, 'x')", "REGEXP_REPLACE with a pattern that is no literal"),
        ("REGEXP_REPLACE(text, '(', 'x')", "is no regular expression"),
        ("REGEXP_REPLACE(text, '(a)', '$1$10')", "names group 10, and '\\(a\\)' has none"),
        ("REGEXP_REPLACE(text, 'a', 'x', 'i')", "REGEXP_REPLACE with the flags 'i'"),
        ("TIMESTAMPADD(FORTNIGHT, 1, ts)", "TIMESTAMPADD with FORTNIGHT is not there yet; use one of MICROSECOND"),
        ("TO_TIMESTAMP(text, 'yy')", "TO_TIMESTAMP with 'yy' is not there yet"),
        ("TO_TIMESTAMP(text, 'dd.MM.yyyy HH')", "is no pattern of such a time: Please either specify both hour"),
        ("TO_TIMESTAMP_LTZ(n, 6)", "another precision than 0 or 3"),
        ("ts AT TIME ZONE 'Mars/Base'", "there is no time zone 'Mars/Base'"),
        ("CARDINALITY(text)", "CARDINALITY needs an array or a map"),
        ("MAP_KEYS(numbers)", "MAP_KEYS needs a map"),
        ("ARRAY_CONTAINS(numbers, 'x')", "ARRAY_CONTAINS mixes numbers and texts"),
        ("ARRAY_CONCAT(words, NULL)", "ARRAY_CONCAT needs an array or a map"),
        ("ARRAY_JOIN(numbers, '-')", "ARRAY_JOIN needs a text; its argument stands for numbers"),
        ("ARRAY[]", "an ARRAY without elements is not there yet"),
        ("[numbers, numbers]", "an ARRAY of arrays is not there yet"),
        ("pairs[1]", 'a key of "pairs" mixes texts and numbers'),
        ("numbered[n]", "with a key that is no literal"),
        ("place[1]", "is no array and no map, so it has no element"),
        ("numbers[1:2]", "name one element, as in a"),
        ("numbers[float]", "is named by an integer"),
        ("place.country", "has no field 'country' \\(city, at\\)"),
        ("text.length", "has no field 'length' \\(it is no row\\)"),
        ("nowhere.city", "there is no column 'nowhere.city'"),
    ],
)
def test_what_a_function_does_not_take_is_one_sentence(expression: str, said: str) -> None:
    pipeline = hg.Pipeline("functions")
    with pytest.raises(UsageError, match=said) as caught:
        hg.sql(f"SELECT {expression} AS x FROM odd", odd=pipeline.source(hg.FromRows(ROWS)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "expression",
    [
        "FROM_UNIXTIME(large)",
        "TO_TIMESTAMP_LTZ(large, 0)",
        "TIMESTAMPADD(DAY, large, ts)",
        "TIMESTAMPADD(YEAR, large, ts)",
    ],
)
def test_a_number_too_large_for_a_time_fails(expression: str, tmp_path: Path) -> None:
    pipeline = hg.Pipeline("functions")
    rows = pipeline.source(hg.FromRows(ROWS.slice(3, 1)))
    hg.sql(f"SELECT {expression} AS x FROM odd", odd=rows).sink(Collect(tmp_path))
    with pytest.raises(HeadgateError, match=r"conversion from|cannot advance"):
        run(pipeline, timeout_s=300)


@pytest.mark.parametrize("rows", [slice(0, None), slice(5, 6)], ids=["all", "a row whose text is null"])
def test_a_literal_is_as_a_column_that_holds_it(rows: slice, tmp_path: Path) -> None:
    """Of one text that is the same in all rows and one that is not."""
    odd = ROWS.append_column("same", pa.array(["abcb"] * len(ROWS))).slice(rows.start, len(ROWS[rows]))
    literal, column = (
        [text.format(*texts) for text in OF_TWO_TEXTS for texts in ((one, "part"), ("part", one))]
        for one in ("'abcb'", "same")
    )

    found = results([*literal, *column], tmp_path, odd)

    for values in found.values():
        assert dict(zip(literal, values[: len(literal)], strict=True)) == dict(
            zip(literal, values[len(literal) :], strict=True)
        )
