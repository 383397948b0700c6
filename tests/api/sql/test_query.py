"""Queries in SQL: results against DuckDB on the same rows, and what is refused."""

from __future__ import annotations

import datetime as dt
import random
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from tests.nexmark.oracles import table_of
from tests.support.unreported import seldom_reported

import headgate as hg
from headgate.errors import PipelineFailed, UsageError
from headgate.testing import Collect, run

SCHEMA = pa.schema(
    {
        "id": pa.int64(),
        "auction": pa.int64(),
        "price": pa.int64(),
        "change": pa.float64(),
        "text": pa.string(),
        "flag": pa.bool_(),
        "ts": pa.timestamp("us"),
    }
)
START = dt.datetime(2020, 2, 28, 23, 58)

PATIENCE_S = 900
"""For all queries in one run, on a machine that does much else."""


def rows() -> pa.Table:
    rng = random.Random(7)
    texts = ["abc", "Bc", None, "dé/x/y", "", "a/b", "x%y_z", "channel_id=42&b", "AbC "]
    found = []
    for i in range(400):
        values = [rng.randrange(7), rng.choice([None, rng.randrange(-50, 1_000)]), rng.choice([None, rng.random()])]
        at = START + dt.timedelta(seconds=i * 0.7 - rng.random() * 3)
        found.append(
            dict(zip(SCHEMA.names, [i, *values, rng.choice(texts), rng.choice([True, False, None]), at], strict=True))
        )
    return pa.Table.from_pylist(found, schema=SCHEMA)


ROWS = rows()


def bids(pipeline: hg.Pipeline) -> hg.Stream:
    source = hg.FromRows(ROWS, splits=2, batch_rows=100)
    return pipeline.source(source, name="bids").with_timestamps("ts", out_of_orderness="5s")


SCALARS = [
    "price + 1", "price - auction", "-price", "price * 0.908", "price / 7", "price % 7",
    "MOD(price, -7)", "price % (auction - 3)", "change * 2.5", "price > 100", "price > 100 AND flag",
    "price > 100 OR flag", "NOT flag", "price IS NULL", "price IS NOT NULL", "flag IS TRUE",
    "price BETWEEN 10 AND 500", "price NOT BETWEEN 10 AND 500", "auction IN (1, 2, 3)", "auction NOT IN (1, 2)",
    "text IN ('abc', NULL)", "text LIKE 'a%'", "text LIKE '_b_'", "text LIKE 'x\\%y%'", "text ILIKE 'ab%'",
    "text NOT LIKE '%c'", "CASE WHEN price > 500 THEN 'high' WHEN price > 100 THEN 'middle' ELSE 'low' END",
    "CASE auction WHEN 1 THEN 'one' WHEN 2 THEN 'two' END", "IF(flag, 1, 0)", "COALESCE(price, auction, 0)",
    "NULLIF(auction, 3)", "GREATEST(price, 100)", "LEAST(price, 100)", "CAST(price AS DOUBLE)",
    "CAST(auction AS VARCHAR)", "TRY_CAST(text AS BIGINT)", "CAST(price AS DECIMAL(12, 2))", "text || '!'",
    "CONCAT(text, '-', auction)", "LOWER(text)", "UPPER(text)", "LENGTH(text)", "TRIM(text)", "SUBSTRING(text, 2, 3)",
    "REPLACE(text, 'b', 'xx')", "SPLIT_PART(text, '/', 2)", "ABS(price)", "FLOOR(change * 10)", "CEIL(change * 10)",
    "ROUND(change, 2)", "SQRT(ABS(price))", "POWER(auction, 2)", "YEAR(ts)", "MONTH(ts)", "DAY(ts)", "HOUR(ts)",
    "MINUTE(ts)", "SECOND(ts)", "EXTRACT(HOUR FROM ts)", "DATE_TRUNC('minute', ts)", "STRFTIME(ts, '%Y-%m-%d %H:%M')",
    "ts + INTERVAL '90' SECOND", "ts > TIMESTAMP '2020-02-29 00:00:00'", "CAST(ts AS DATE)", "starts_with(text, 'a')",
    "(price + 1) * 2", "price IS DISTINCT FROM auction", "text = 'abc'", "price <> 5", "1.5", "'it''s'",
    "CAST(NULL AS BIGINT)",
]  # fmt: skip

TUMBLED = "TABLE(TUMBLE(TABLE bids, DESCRIPTOR(ts), INTERVAL '10' SECOND))"
TUMBLE = f"FROM {TUMBLED} GROUP BY"
BUCKET = "time_bucket(INTERVAL '10' SECOND, ts, TIMESTAMP '2000-01-01')"

HOP = "FROM TABLE(HOP(TABLE bids, DESCRIPTOR(ts), INTERVAL '2' SECOND, INTERVAL '10' SECOND)) GROUP BY"
HOPS = (
    "(SELECT *, time_bucket(INTERVAL '2' SECOND, ts, TIMESTAMP '2000-01-01') - to_seconds(2 * k) AS w FROM bids, "
    "range(5) AS r(k))"
)

QUERIES: dict[str, tuple[str, str | None]] = {
    "scalars": (f"SELECT id, {', '.join(f'{e} AS c{i}' for i, e in enumerate(SCALARS))} FROM bids", None),
    "where": ("SELECT b.id, Price AS p FROM bids AS b WHERE b.price > 100 AND NOT flag", None),
    "star": ("SELECT *, price + 1 AS more FROM bids WHERE price >= 900", None),
    "nested": (
        "WITH a AS (SELECT id, price * 2 AS twice FROM bids), c(x) AS (SELECT twice FROM a) "
        "SELECT x FROM c WHERE x > 50 UNION ALL SELECT s.id FROM (SELECT id FROM bids WHERE auction = 1) AS s",
        None,
    ),
    "quoted": (
        """SELECT "price" AS "the price", `id` FROM "bids" WHERE text = 'a/b'""",
        """
        SELECT price AS "the price", id FROM bids WHERE text = 'a/b'""",
    ),
    "index": (
        "SELECT id, SPLIT_INDEX(text, '/', 1) AS a, REGEXP_EXTRACT(text, 'channel_id=([^&]*)', 1) AS b, "
        "DATE_FORMAT(ts, 'yyyy-MM-dd HH:mm') AS c, CHAR_LENGTH(text) AS d FROM bids",
        "SELECT id, string_split(text, '/')[2], nullif(regexp_extract(text, 'channel_id=([^&]*)', 1), ''), "
        "strftime(ts, '%Y-%m-%d %H:%M'), length(text) FROM bids",
    ),
    "tumble": (
        "SELECT auction, COUNT(*) AS n, COUNT(price) AS p, SUM(price) AS s, AVG(change) AS a, MIN(price) AS lo, "
        "MAX(ts) AS hi, COUNT(DISTINCT text) AS d, COUNT(*) FILTER (WHERE price > 100) AS c, SUM(price) FILTER (WHERE "
        "flag) AS f, MAX(price) - MIN(price) + 1 AS r, window_start, window_end "
        f"{TUMBLE} auction, window_start, window_end",
        "SELECT auction, COUNT(*), COUNT(price), SUM(price), AVG(change), MIN(price), MAX(ts), COUNT(DISTINCT text), "
        "COUNT(*) FILTER (WHERE price > 100), SUM(price) FILTER (WHERE flag), MAX(price) - MIN(price) + 1, "
        f"{BUCKET} AS w, w + INTERVAL '10' SECOND FROM bids GROUP BY auction, w",
    ),
    "having": (
        f"SELECT COUNT(*) AS n, window_end AS e {TUMBLE} window_start, window_end HAVING MAX(price) > 950",
        f"SELECT COUNT(*), {BUCKET} + INTERVAL '10' SECOND AS w FROM bids GROUP BY w HAVING MAX(price) > 950",
    ),
    "function": (
        "SELECT auction % 2 AS odd, COUNT(*) AS n, TUMBLE_START(ts, INTERVAL '1' MINUTE) AS w FROM bids "
        "WHERE price IS NOT NULL GROUP BY 1, TUMBLE(ts, INTERVAL '1' MINUTE)",
        "SELECT auction % 2, COUNT(*), date_trunc('minute', ts) AS w FROM bids WHERE price IS NOT NULL GROUP BY ALL",
    ),
    "twice": (
        f"SELECT MAX(n) AS m, w FROM (SELECT auction, COUNT(*) AS n, window_start AS w {TUMBLE} auction, window_start, "
        "window_end) GROUP BY w",
        f"SELECT MAX(n), w FROM (SELECT auction, COUNT(*) AS n, {BUCKET} AS w FROM bids GROUP BY ALL) GROUP BY w",
    ),
    "zero": (
        "SELECT id, price / (auction - 3) AS c FROM bids",
        """
        SELECT id, price / nullif(auction - 3, 0) FROM bids""",
    ),
    "hop": (
        f"SELECT auction, COUNT(*) AS n, window_start, window_end {HOP} auction, window_start, window_end",
        f"SELECT auction, COUNT(*), w, w + INTERVAL '10' SECOND FROM {HOPS} GROUP BY auction, w",
    ),
    "hop twice": (
        f"SELECT MAX(n) AS m, w, e FROM (SELECT COUNT(*) AS n, window_start AS w, window_end AS e {HOP} auction, "
        "window_start, window_end) GROUP BY w, e",
        f"SELECT MAX(n), w, w + INTERVAL '10' SECOND FROM (SELECT COUNT(*) AS n, w FROM {HOPS} GROUP BY auction, w) "
        "GROUP BY w",
    ),
    "session": (
        "SELECT auction, COUNT(*) AS n, SESSION_START(ts, INTERVAL '4' SECOND) AS a, SESSION_END(ts, INTERVAL '4' "
        "SECOND) AS e FROM bids GROUP BY auction, SESSION(ts, INTERVAL '4' SECOND)",
        "SELECT auction, COUNT(*), MIN(ts), MAX(ts) + INTERVAL '4' SECOND FROM (SELECT *, SUM(CAST(gap AS INT)) OVER "
        "(PARTITION BY auction ORDER BY ts) AS s FROM (SELECT *, coalesce(ts - lag(ts) OVER (PARTITION BY auction "
        "ORDER BY ts) >= INTERVAL '4' SECOND, false) AS gap FROM bids)) GROUP BY auction, s",
    ),
    "join": (
        "SELECT a.id, b.price AS p, b.text FROM bids AS a JOIN bids AS b ON a.id = b.auction AND b.price > 3",
        None,
    ),
    "join using": (
        "SELECT a.id, b.twice FROM bids AS a JOIN (SELECT id, price * 2 AS twice FROM bids) AS b USING (id)",
        None,
    ),
    "join near in time": (
        "SELECT a.id, b.id AS other FROM bids AS a JOIN bids AS b ON a.auction = b.auction AND b.ts BETWEEN "
        "a.ts - INTERVAL '3' SECOND AND a.ts + INTERVAL '1' SECOND AND a.id <> b.id",
        None,
    ),
    "join near in time in WHERE": (
        "SELECT a.id, b.id AS other FROM bids AS a JOIN bids AS b ON a.auction = b.auction WHERE a.ts < b.ts AND "
        "a.ts > b.ts - INTERVAL '5' SECOND AND b.flag",
        None,
    ),
    "left join near in time": (
        "SELECT a.id, b.id AS other FROM bids AS a LEFT JOIN bids AS b ON a.id = b.auction AND (b.ts) >= a.ts AND "
        "b.ts <= a.ts + INTERVAL '1' MINUTE",
        None,
    ),
    "full join near in time": (
        "SELECT a.id, b.id AS other FROM bids AS a FULL JOIN (SELECT id, auction * 3 AS x, ts AS at FROM bids) AS b "
        "ON a.id = b.x AND a.ts - b.at <= INTERVAL '1' SECOND AND a.ts > b.at - INTERVAL '40' SECOND AND b.at > a.ts "
        "- INTERVAL '1' SECOND",
        None,
    ),
    "left join": (
        "SELECT a.id, b.id AS other FROM bids AS a LEFT JOIN (SELECT id, auction FROM bids WHERE flag) AS b ON a.id = "
        "b.auction",
        None,
    ),
    "join of tables": (
        "SELECT a.auction, a.n, b.m FROM (SELECT auction, COUNT(*) AS n FROM bids GROUP BY auction) AS a FULL JOIN "
        "(SELECT auction * 2 AS x, MAX(price) AS m FROM bids GROUP BY auction * 2) AS b ON a.auction = b.x",
        None,
    ),
    "join of windows": (
        f"SELECT a.auction, a.n, b.most FROM (SELECT auction, COUNT(*) AS n, window_start AS w, window_end AS e {HOP} "
        "auction, window_start, window_end) AS a JOIN (SELECT MAX(n) AS most, w, e FROM (SELECT COUNT(*) AS n, "
        f"window_start AS w, window_end AS e {HOP} auction, window_start, window_end) GROUP BY w, e) AS b ON a.w = b.w "
        "AND a.e = b.e AND a.n >= b.most",
        "SELECT auction, n, most FROM (SELECT *, MAX(n) OVER (PARTITION BY w) AS most FROM "
        f"(SELECT auction, COUNT(*) AS n, w FROM {HOPS} GROUP BY auction, w)) WHERE n = most",
    ),
    "top of windows": (
        "SELECT n, window_end, rn FROM (SELECT *, ROW_NUMBER() OVER (PARTITION BY window_start, window_end ORDER BY n "
        f"DESC) AS rn FROM (SELECT auction, COUNT(*) AS n, window_start, window_end {TUMBLE} auction, window_start, "
        "window_end)) WHERE rn <= 2",
        "SELECT n, w + INTERVAL '10' SECOND, rn FROM (SELECT *, ROW_NUMBER() OVER (PARTITION BY w ORDER BY n DESC) AS "
        f"rn FROM (SELECT COUNT(*) AS n, {BUCKET} AS w FROM bids GROUP BY auction, w)) WHERE rn <= 2",
    ),
    "running": (
        "SELECT auction, COUNT(*) AS n, SUM(price) AS s, COUNT(DISTINCT text) AS d, COUNT(*) FILTER (WHERE flag) AS f, "
        "MAX(price) AS m FROM bids GROUP BY auction",
        None,
    ),
    "running twice": (
        "SELECT n % 2 AS odd, COUNT(*) AS c, MAX(s) AS s FROM (SELECT auction, COUNT(*) AS n, SUM(price) AS s FROM "
        "bids GROUP BY auction) GROUP BY n % 2",
        None,
    ),
    "last": (
        "SELECT id, auction, ts FROM (SELECT *, ROW_NUMBER() OVER (PARTITION BY auction ORDER BY ts DESC) AS rn FROM "
        "bids) WHERE rn = 1",
        None,
    ),
    "top": (
        "SELECT auction, id, rn FROM (SELECT *, ROW_NUMBER() OVER (PARTITION BY auction ORDER BY price DESC, ts) AS rn "
        "FROM bids WHERE price IS NOT NULL) WHERE rn <= 3 AND auction > 2",
        None,
    ),
    "top with a bound below": (
        "SELECT auction, id FROM (SELECT *, ROW_NUMBER() OVER (PARTITION BY auction ORDER BY id) AS rn FROM bids) "
        "WHERE rn > 1 AND rn < 4",
        None,
    ),
    "top of an aggregate": (
        "SELECT auction, flag, n, rn FROM (SELECT *, ROW_NUMBER() OVER (PARTITION BY flag ORDER BY n DESC, auction) AS "
        "rn FROM (SELECT auction, flag, COUNT(*) AS n FROM bids WHERE flag IS NOT NULL GROUP BY auction, flag)) WHERE "
        "rn <= 3",
        None,
    ),
    "the three with most": (
        "SELECT auction, n FROM (SELECT auction, COUNT(*) AS n, ROW_NUMBER() OVER (ORDER BY COUNT(*) DESC, auction) AS "
        "rn FROM bids GROUP BY auction) WHERE rn <= 3",
        "SELECT auction, COUNT(*) AS n FROM bids GROUP BY auction ORDER BY n DESC, auction LIMIT 3",
    ),
    "the one with most": (
        "SELECT auction FROM (SELECT *, ROW_NUMBER() OVER (ORDER BY n DESC, auction) AS rn FROM (SELECT auction, "
        "COUNT(*) AS n FROM bids GROUP BY auction)) WHERE rn = 1",
        None,
    ),
    "how often each auction is among the top": (
        "SELECT flag, COUNT(*) AS c, SUM(n) AS s FROM (SELECT *, ROW_NUMBER() OVER (PARTITION BY flag ORDER BY n, "
        "auction) AS rn FROM (SELECT auction, flag, COUNT(*) AS n FROM bids WHERE flag IS NOT NULL GROUP BY auction, "
        "flag)) WHERE rn <= 4 GROUP BY flag",
        None,
    ),
    "join of integers of other sizes and of a date": (
        "SELECT a.id, b.id AS other FROM (SELECT id, CAST(auction AS SMALLINT) AS small, CAST(ts AS DATE) AS day "
        "FROM bids) AS a LEFT JOIN (SELECT id, auction, DATE_TRUNC('hour', ts) AS hour FROM bids) AS b ON a.small = "
        "b.auction AND a.day = b.hour",
        None,
    ),
    "over a range": (
        "SELECT id, SUM(price) OVER (PARTITION BY auction ORDER BY ts RANGE BETWEEN INTERVAL '9' SECOND PRECEDING AND "
        "CURRENT ROW) AS s, COUNT(*) FILTER (WHERE price > 100) OVER w AS c, AVG(change) OVER w AS a, MIN(text) OVER w "
        "AS t, COUNT(DISTINCT flag) OVER w AS d FROM bids WINDOW w AS (PARTITION BY auction ORDER BY ts RANGE INTERVAL "
        "'9' SECOND PRECEDING)",
        "SELECT id, SUM(price) OVER w, COUNT(*) FILTER (WHERE price > 100) OVER w, AVG(change) OVER w, MIN(text) OVER "
        "w, COUNT(DISTINCT flag) OVER w FROM bids WINDOW w AS (PARTITION BY auction ORDER BY ts RANGE BETWEEN INTERVAL "
        "'9' SECOND PRECEDING AND CURRENT ROW)",
    ),
    "over rows": (
        "SELECT id, price - LAG(price) OVER (PARTITION BY auction ORDER BY ts) AS p, LAG(text, 3, 'none') OVER "
        "(PARTITION BY auction ORDER BY ts) AS q, SUM(price) OVER (PARTITION BY auction ORDER BY ts ROWS BETWEEN 4 "
        "PRECEDING AND CURRENT ROW) / 2 AS s, FIRST_VALUE(id) OVER (PARTITION BY auction % 2 ORDER BY ts ROWS 2 "
        "PRECEDING) AS f, LAST_VALUE(price) OVER (ORDER BY ts ROWS UNBOUNDED PRECEDING) AS l FROM bids WHERE id > 9",
        "SELECT id, price - LAG(price) OVER (PARTITION BY auction ORDER BY ts), LAG(text, 3, 'none') OVER (PARTITION "
        "BY auction ORDER BY ts), SUM(price) OVER (PARTITION BY auction ORDER BY ts ROWS BETWEEN 4 PRECEDING AND "
        "CURRENT ROW) / 2, FIRST_VALUE(id) OVER (PARTITION BY auction % 2 ORDER BY ts ROWS BETWEEN 2 PRECEDING AND "
        "CURRENT ROW), LAST_VALUE(price) OVER (ORDER BY ts ROWS UNBOUNDED PRECEDING) FROM bids WHERE id > 9",
    ),
    "over results of windows": (
        "SELECT auction, w, SUM(n) OVER (PARTITION BY auction ORDER BY e RANGE BETWEEN INTERVAL '20' SECOND PRECEDING "
        f"AND CURRENT ROW) AS s FROM (SELECT auction, COUNT(*) AS n, window_start AS w, window_end AS e {TUMBLE} "
        "auction, window_start, window_end)",
        "SELECT auction, w, SUM(n) OVER (PARTITION BY auction ORDER BY w RANGE BETWEEN INTERVAL '20' SECOND PRECEDING "
        f"AND CURRENT ROW) FROM (SELECT auction, COUNT(*) AS n, {BUCKET} AS w FROM bids GROUP BY ALL)",
    ),
    "ranks by time": (
        "SELECT auction, w, n, RANK() OVER (ORDER BY w) AS r, DENSE_RANK() OVER (ORDER BY w) AS d, RANK() OVER "
        "(PARTITION BY auction ORDER BY w) - SUM(n) OVER (ORDER BY w) AS q FROM (SELECT auction, window_start AS w, "
        f"COUNT(*) AS n {TUMBLE} auction, window_start, window_end)",
        "SELECT auction, w, n, RANK() OVER (ORDER BY w), DENSE_RANK() OVER (ORDER BY w), RANK() OVER (PARTITION BY "
        f"auction ORDER BY w) - SUM(n) OVER (ORDER BY w) FROM (SELECT auction, {BUCKET} AS w, COUNT(*) AS n FROM bids "
        "GROUP BY ALL)",
    ),
    "over rows of the same time": (
        "SELECT auction, w, SUM(n) OVER (ORDER BY w RANGE BETWEEN CURRENT ROW AND CURRENT ROW) AS s, COUNT(*) OVER "
        "(ORDER BY w RANGE BETWEEN INTERVAL '0' SECOND PRECEDING AND CURRENT ROW) AS c FROM (SELECT auction, "
        f"window_start AS w, COUNT(*) AS n {TUMBLE} auction, window_start, window_end)",
        "SELECT auction, w, SUM(n) OVER (PARTITION BY w), COUNT(*) OVER (PARTITION BY w) FROM (SELECT auction, "
        f"{BUCKET} AS w, COUNT(*) AS n FROM bids GROUP BY ALL)",
    ),
    "numbers by time": (
        "SELECT auction % 3 AS part, ROW_NUMBER() OVER (PARTITION BY auction % 3 ORDER BY ts) AS rn FROM bids",
        None,
    ),
    "numbers by time without the first ones, and around it": (
        "SELECT auction, COUNT(*) AS n, MAX(rn) AS most FROM (SELECT *, ROW_NUMBER() OVER (PARTITION BY auction ORDER "
        "BY ts) AS rn FROM bids) WHERE rn > 2 GROUP BY auction",
        None,
    ),
    "over all rows so far, and around it": (
        "SELECT auction, COUNT(*) AS n FROM (SELECT *, SUM(price) OVER (PARTITION BY auction ORDER BY ts) AS s, "
        "STDDEV(change) OVER (PARTITION BY auction ORDER BY ts) AS d FROM bids) WHERE s > 900 AND d > 0.2 GROUP BY "
        "auction",
        None,
    ),
    "distinct": (
        f"SELECT auction, window_start {TUMBLE} auction, window_start, window_end",
        f"SELECT DISTINCT auction, {BUCKET} FROM bids",
    ),
    "in a subquery": (
        "SELECT id, price FROM bids WHERE price IN (SELECT price FROM bids WHERE flag) AND id > 5",
        None,
    ),
    "in a correlated subquery of tuples": (
        "SELECT id FROM bids AS b WHERE (auction, price) IN (SELECT auction, price FROM bids AS c WHERE c.text = "
        "b.text AND c.flag)",
        "SELECT id FROM bids AS b WHERE EXISTS (SELECT 1 FROM bids AS c WHERE c.auction = b.auction AND c.price = "
        "b.price AND c.text = b.text AND c.flag)",
    ),
    "in tables without each other, about the row": (
        "SELECT id FROM bids AS b WHERE price IN (SELECT price FROM bids AS c WHERE c.auction = b.auction EXCEPT "
        "SELECT price FROM bids AS d WHERE d.auction = b.auction AND flag)",
        None,
    ),
    "in a table that changes": (
        "SELECT id FROM bids WHERE auction IN (SELECT auction FROM bids GROUP BY auction HAVING COUNT(*) > 57)",
        None,
    ),
    "windows again after a condition near in time": (
        "SELECT window_start AS w, window_end AS e, SUM(n) AS n FROM (SELECT auction, window_start, window_end, "
        f"COUNT(*) AS n {TUMBLE} auction, window_start, window_end) AS a WHERE EXISTS (SELECT 1 FROM bids AS b WHERE "
        "b.auction = a.auction AND b.flag AND b.ts >= a.window_start AND b.ts < a.window_end) "
        "GROUP BY window_start, window_end",
        f"SELECT w, w + INTERVAL '10' SECOND, SUM(n) FROM (SELECT auction, {BUCKET} AS w, COUNT(*) AS n FROM bids "
        "GROUP BY ALL) AS a WHERE EXISTS (SELECT 1 FROM bids AS b WHERE b.auction = a.auction AND b.flag AND "
        "b.ts >= w AND b.ts < w + INTERVAL '10' SECOND) GROUP BY w",
    ),
    "windows again after a join near in time": (
        "SELECT a.window_start AS w, a.window_end AS e, COUNT(b.id) AS n FROM (SELECT auction, window_start, "
        f"window_end, COUNT(*) AS n {TUMBLE} auction, window_start, window_end) AS a LEFT JOIN bids AS b ON "
        "b.auction = a.auction AND b.ts BETWEEN a.window_start AND a.window_start + INTERVAL '3' SECOND "
        "GROUP BY a.window_start, a.window_end",
        f"SELECT w, w + INTERVAL '10' SECOND, COUNT(b.id) FROM (SELECT auction, {BUCKET} AS w, COUNT(*) AS n FROM "
        "bids GROUP BY ALL) AS a LEFT JOIN bids AS b ON b.auction = a.auction AND b.ts BETWEEN w AND "
        "w + INTERVAL '3' SECOND GROUP BY w",
    ),
    "not in": (
        "SELECT id FROM bids WHERE price IS NOT NULL AND price NOT IN (SELECT id FROM bids WHERE id > 7) AND id IN "
        "(SELECT price FROM bids WHERE price IN (SELECT id FROM bids WHERE NOT flag))",
        None,
    ),
    "not in a table that changes": (
        "SELECT id FROM bids WHERE auction <> 9 AND NOT (auction IN (SELECT auction FROM bids GROUP BY auction HAVING "
        "COUNT(*) > 57))",
        None,
    ),
    "not in nothing": (
        "SELECT id FROM bids WHERE id < 9 AND id NOT IN (SELECT id FROM bids WHERE id < 0)",
        None,
    ),
    "exists": (
        "SELECT b.id FROM bids AS b WHERE EXISTS (SELECT 1 FROM bids AS c WHERE c.auction * 40 = b.id AND c.flag)",
        None,
    ),
    "not exists": (
        "SELECT id FROM bids WHERE NOT EXISTS (SELECT * FROM (SELECT price AS p, flag AS f FROM bids WHERE id % 3 = 0) "
        "AS s WHERE p = price AND f = flag)",
        None,
    ),
    "exists near in time": (
        "SELECT b.id FROM bids AS b WHERE EXISTS (SELECT 1 FROM bids AS c WHERE c.auction = b.auction AND c.ts BETWEEN "
        "b.ts AND b.ts + INTERVAL '2' SECOND AND c.price > 500)",
        None,
    ),
    "not exists near in time": (
        "SELECT id FROM bids AS b WHERE NOT EXISTS (SELECT 1 FROM bids AS c WHERE c.auction = b.auction AND c.ts >= "
        "b.ts + INTERVAL '1' SECOND AND c.ts < b.ts + INTERVAL '9' SECOND)",
        None,
    ),
    "count of rows in a subquery": (
        "SELECT auction, COUNT(*) AS n FROM bids WHERE id IN (SELECT price FROM bids) GROUP BY auction",
        None,
    ),
    "distinct rows": ("SELECT DISTINCT price, flag FROM bids", None),
    "distinct rows of a table that changes": (
        "SELECT DISTINCT n, m FROM (SELECT COUNT(*) % 2 AS n, CASE WHEN auction % 2 = 0 THEN MAX(price) END AS m FROM "
        "bids GROUP BY auction)",
        None,
    ),
    "distinct floats": (
        "SELECT DISTINCT change, x FROM (SELECT change, CASE id % 3 WHEN 0 THEN CAST('nan' AS DOUBLE) WHEN 1 THEN "
        "0.0e0 ELSE -0.0e0 END AS x FROM bids WHERE change IS NULL)",
        None,
    ),
    "union": (
        "SELECT price, flag FROM bids UNION SELECT id, NOT flag FROM bids UNION SELECT 1 AS x, flag FROM bids WHERE "
        "id < 0",
        None,
    ),
    "union of decimals and times": (
        "SELECT CAST(price AS DECIMAL(10, 2)) AS p, ts FROM bids WHERE id < 50 UNION SELECT CAST(price AS DECIMAL(10, "
        "2)), ts FROM bids WHERE id > 40 AND id < 60",
        None,
    ),
    "intersect": (
        "SELECT price, flag FROM bids WHERE id < 200 INTERSECT SELECT price, flag FROM bids WHERE id >= 200",
        None,
    ),
    "except": (
        "SELECT price, flag FROM bids WHERE id < 200 EXCEPT SELECT price, flag FROM bids WHERE id >= 200",
        None,
    ),
    "except of tables that change": (
        "SELECT auction, COUNT(*) % 5 AS n FROM bids GROUP BY auction EXCEPT SELECT auction, COUNT(*) % 5 FROM bids "
        "WHERE flag GROUP BY auction",
        None,
    ),
    "union all of a table that changes and rows": (
        "SELECT n, COUNT(*) AS c FROM (SELECT auction, COUNT(*) AS n FROM bids GROUP BY auction UNION ALL SELECT "
        "auction, id FROM bids WHERE id < 10) GROUP BY n",
        None,
    ),
    "a window and the one before": (
        f"WITH w AS (SELECT auction, COUNT(*) AS n, window_start, window_end {TUMBLE} auction, window_start, window_end"
        ") SELECT a.auction, a.n, b.n AS m FROM w AS a JOIN w AS b ON a.auction = b.auction AND a.window_start = "
        "b.window_end",
        f"WITH w AS (SELECT auction, COUNT(*) AS n, {BUCKET} AS w FROM bids GROUP BY auction, {BUCKET}) SELECT "
        "a.auction, a.n, b.n AS m FROM w AS a JOIN w AS b ON a.auction = b.auction AND a.w = b.w + INTERVAL '10' "
        "SECOND",
    ),
    "groups and subqueries of last rows": (
        "SELECT flag, COUNT(*) AS c FROM (SELECT *, ROW_NUMBER() OVER (PARTITION BY auction ORDER BY id DESC) AS rn "
        "FROM bids WHERE flag IS NOT NULL) AS s WHERE s.RN = 1 AND price IN (SELECT price FROM bids) "
        "GROUP BY flag",
        None,
    ),
    "distinct last rows": (
        "SELECT DISTINCT Auction, price FROM (SELECT *, ROW_NUMBER() OVER (PARTITION BY auction ORDER BY id DESC) AS "
        "rn FROM bids) WHERE rn = 1",
        None,
    ),
    "numbers by another name": (
        "SELECT s.a, s.N AS n FROM (SELECT auction, id, ROW_NUMBER() OVER (PARTITION BY auction ORDER BY id) AS rn "
        "FROM bids) AS s(a, i, n) WHERE s.n <= 2",
        None,
    ),
    "versions at an event time": (
        "WITH q AS (SELECT auction * 2 AS k, price AS p, ts AS at FROM bids WHERE id % 3 = 0) SELECT a.id, q.p FROM "
        "bids AS a JOIN q FOR SYSTEM_TIME AS OF a.ts AS q ON a.auction = q.k AND a.price > 3",
        "SELECT a.id, q.p FROM bids AS a ASOF JOIN (SELECT auction * 2 AS k, price AS p, ts AS at FROM bids WHERE id "
        "% 3 = 0) AS q ON a.auction = q.k AND a.ts >= q.at WHERE a.price > 3",
    ),
    "versions at an event time or none": (
        "WITH q AS (SELECT auction * 2 AS k, price AS p, ts AS at FROM bids WHERE id % 3 = 0) SELECT a.id, q.p FROM "
        "bids AS a LEFT JOIN q FOR SYSTEM_TIME AS OF a.ts ON a.auction = q.k",
        "SELECT a.id, q.p FROM bids AS a ASOF LEFT JOIN (SELECT auction * 2 AS k, price AS p, ts AS at FROM bids WHERE "
        "id % 3 = 0) AS q ON a.auction = q.k AND a.ts >= q.at",
    ),
    "no group": (
        "SELECT id, window_end FROM TABLE(TUMBLE(TABLE bids, DESCRIPTOR(ts), INTERVAL '10' SECOND)) WHERE price > 500",
        f"SELECT id, {BUCKET} + INTERVAL '10' SECOND FROM bids WHERE price > 500",
    ),
}


NUMBER = "ROW_NUMBER() OVER (PARTITION BY auction ORDER BY id)"


def normal(frame: pl.DataFrame) -> list[str]:
    """Return rows as text: DuckDB has other widths of numbers."""

    def plain(value: Any) -> Any:
        if isinstance(value, float):
            return f"{value:.6g}"
        if isinstance(value, bool) or value is None or isinstance(value, str | dt.datetime | dt.date):
            return value
        return f"{float(value):.9g}"

    def number(value: Any) -> Any:
        return float(value) if isinstance(value, str) and value.replace(".", "").lstrip("-").isdecimal() else value

    return sorted(str([number(plain(value)) for value in row]) for row in frame.rows())


@cache
def database() -> duckdb.DuckDBPyConnection:
    found = duckdb.connect(config={"error_on_division_by_zero": "false"})
    found.register("bids", ROWS)
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], pl.DataFrame]:
    """The results of all queries, of one run."""
    pipeline = hg.Pipeline("queries", parallelism=2)
    stream, sinks, keys = bids(pipeline), {}, {}
    for name, (query, _) in QUERIES.items():
        sinks[name] = Collect(tmp_path_factory.mktemp("results"))
        found = hg.sql(query, bids=stream)
        keys[name] = found._change_keys
        found.sink(sinks[name])
    with seldom_reported():
        run(pipeline, timeout_s=PATIENCE_S)

    def read(name: str) -> pl.DataFrame:
        rows, key = sinks[name].rows(), keys[name]
        return pl.DataFrame(rows if key is None else table_of(rows, key), infer_schema_length=None)

    return read


@pytest.mark.xdist_group("sql")  # one run of all queries
@pytest.mark.parametrize("name", QUERIES)
def test_results_are_those_of_duckdb(name: str, results: Callable[[str], pl.DataFrame]) -> None:
    query, other = QUERIES[name]
    expected = database().sql(other or query).pl()
    assert len(expected)
    assert normal(results(name)) == normal(expected)


def test_the_result_is_a_stream_with_event_time_that_mixes_with_python() -> None:
    pipeline = hg.Pipeline("mixed")
    cheap = hg.sql("SELECT auction, price, ts AS at FROM bids WHERE price < 10", bids=bids(pipeline))
    counted = cheap.key_by("auction").window(hg.Tumbling("1m")).agg(n=pl.len())
    again = hg.sql("SELECT auction, n FROM counted WHERE n > 1", counted=counted)
    assert cheap.columns == ["auction", "price", "at"]
    assert again.columns == ["auction", "n"]


@pytest.mark.parametrize(
    ("condition", "has_windows"),
    [
        ("b.ts BETWEEN a.window_start AND a.window_end", True),
        ("b.ts BETWEEN a.window_start - INTERVAL '1' DAY AND a.window_start", True),
        ("b.flag", False),
    ],
)
def test_windows_survive_a_condition_that_rows_meet_by_a_certain_time(condition: str, has_windows: bool) -> None:
    made = hg.sql(
        "SELECT window_start, window_end, SUM(n) AS n FROM (SELECT auction, window_start, window_end, COUNT(*) AS n "
        f"{TUMBLE} auction, window_start, window_end) AS a WHERE EXISTS (SELECT 1 FROM bids AS b WHERE b.auction = "
        f"a.auction AND {condition}) GROUP BY window_start, window_end",
        bids=bids(hg.Pipeline("again")),
    )
    assert made.columns == ["window_start", "window_end", "n", *([] if has_windows else ["op"])]


def test_a_join_near_in_time_has_event_time_and_another_one_has_none() -> None:
    stream = bids(hg.Pipeline("near"))
    text = "SELECT a.id AS id, a.ts AS ts FROM bids AS a JOIN bids AS b ON a.id = b.auction AND b.ts >= a.ts"
    near = hg.sql(f"{text} AND b.ts < a.ts + INTERVAL '5' SECOND", bids=stream)
    near.key_by("id").window(hg.Tumbling("1m")).agg(n=pl.len())
    with pytest.raises(UsageError, match="with_timestamps"):
        hg.sql(text, bids=stream).key_by("id").window(hg.Tumbling("1m")).agg(n=pl.len())


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("SELECT FROM", "sql: Expected"),
        ("SELECT 1; SELECT 2", "sql takes one query, not 2"),
        ("DELETE FROM bids", "DELETE is not there yet"),
        ("SELECT 1", "a query needs FROM"),
        ("SELECT cost FROM bids", "there is no column 'cost'; there are id, auction"),
        ("SELECT * FROM asks", r"there is no table 'asks' \(there are: bids\); give sql\(..., asks=stream\)"),
        ("SELECT DISTINCT ON (id) id FROM bids", "DISTINCT ON is not there yet; use ROW_NUMBER"),
        ("SELECT id FROM bids ORDER BY id", "ORDER BY is not there yet; a stream has no end to sort at"),
        ("SELECT id FROM bids LIMIT 3", "LIMIT is not there yet"),
        ("SELECT id, id FROM bids", "two result columns are called 'id'; give one another name with AS"),
        ("SELECT id FROM bids EXCEPT ALL SELECT id FROM bids", "EXCEPT ALL is not there yet; write EXCEPT, which"),
        ("SELECT id FROM bids WHERE id IN (SELECT DISTINCT ON (auction) id FROM bids)", "DISTINCT ON is not there yet"),
        ("SELECT id FROM bids AS b WHERE EXISTS (SELECT 1 AS x FROM bids AS c WHERE c.id = b.auction UNION ALL SELECT "
         "1 FROM bids AS c WHERE c.price = b.auction AND c.id = b.id)", "UNION of queries with different conditions"),
        ("SELECT a.id FROM bids AS a LEFT JOIN bids FOR SYSTEM_TIME AS OF a.ts AS b ON a.id = b.auction AND b.ts "
         "BETWEEN a.ts - INTERVAL '1' SECOND AND a.ts", "LEFT JOIN with a condition that is no equality"),
        (f"SELECT a.id FROM {TUMBLED} AS a LEFT JOIN {TUMBLED} AS b ON a.id = b.auction AND a.window_end = "
         "b.window_end AND b.ts BETWEEN a.ts - INTERVAL '1' SECOND AND a.ts", "LEFT JOIN with a condition that is no"),
        ("SELECT id FROM (SELECT DISTINCT id, PROCTIME() AS now FROM bids)", "PROCTIME.. in column 'now' is"),
        ("SELECT id AS op FROM bids UNION ALL SELECT n FROM (SELECT auction, COUNT(*) AS n FROM bids GROUP BY auction)",
         "column 'op' of a result that changes says what changes"),
        ("SELECT id FROM bids UNION SELECT text FROM bids", "'id' of type Int64 and 'text' of type String; CAST one"),
        ("SELECT id FROM bids UNION ALL SELECT id, text FROM bids", "UNION of 1 and 2 columns"),
        ("SELECT id FROM bids WHERE COUNT(*) > 1", "WHERE cannot have an aggregate; use HAVING"),
        ("SELECT id FROM bids WHERE flag OR id IN (SELECT 1)", "a subquery in an expression is not there yet"),
        ("SELECT id FROM bids WHERE id IN (SELECT id, price FROM bids)", "IN compares 1 values with 2 columns"),
        ("SELECT id FROM bids WHERE price NOT IN (SELECT id FROM bids WHERE id > 0)",
         "NOT IN with values that may be null is not there yet; write WHERE price IS NOT NULL beside it, or use NOT"),
        ("SELECT id FROM bids WHERE id > 0 AND id NOT IN (SELECT price FROM bids WHERE flag)",
         "may be null is not there yet; write WHERE price IS NOT NULL in the subquery, or use NOT EXISTS"),
        ("SELECT id FROM bids WHERE id > 0 AND id NOT IN (SELECT price + 1 AS p FROM bids WHERE price > 0)",
         "may be null is not there yet; use NOT EXISTS"),
        ("SELECT id FROM bids WHERE EXISTS (SELECT 1 FROM bids AS c WHERE c.id > 3)", "names no column of the one"),
        ("SELECT id FROM bids AS b WHERE EXISTS (SELECT 1 FROM bids AS c WHERE c.id > b.id)", "without equal columns"),
        ("SELECT id FROM bids AS b WHERE EXISTS (SELECT 1 FROM bids AS c WHERE c.id = b.id AND c.price > b.price)",
         "EXISTS with a condition that is no equality is not there yet"),
        ("SELECT id FROM bids AS b WHERE EXISTS (SELECT COUNT(*) FROM bids AS c WHERE c.id = b.id)",
         "an aggregate in a subquery that names a column of the query around it is not there yet"),
        ("SELECT id FROM bids AS b WHERE EXISTS (SELECT 1 FROM bids AS c WHERE c.id = d.id)", "no column 'd.id'"),
        ("SELECT auction, COUNT(*) AS n FROM TABLE(HOP(TABLE bids, DESCRIPTOR(ts), INTERVAL '1' HOUR, INTERVAL '2' "
         "HOUR)) WHERE id IN (SELECT price FROM bids) GROUP BY auction, window_start, window_end", "of overlapping"),
        ('SELECT auction, COUNT(*) AS op FROM bids GROUP BY auction', "column 'op' of a result that changes says what"),
        ("SELECT * FROM bids MATCH_RECOGNIZE (ORDER BY ts PATTERN (A B) DEFINE A AS price > 1)", "use key_by"),
        ("SELECT LEAD(price) OVER (ORDER BY ts) AS p FROM bids", "the rows after a row are not known; use LAG"),
        ("SELECT RANK() OVER (ORDER BY price) AS p FROM bids", "order by the event time of the table alone, 'ts'"),
        ("SELECT RANK() OVER (ORDER BY ts ROWS 2 PRECEDING) AS p FROM bids", "leave the frame out"),
        ("SELECT NTILE(3) OVER (ORDER BY ts) AS p FROM bids", r"NTILE\(3\) OVER is not there yet; how many rows there"),
        ("SELECT id, ROW_NUMBER() OVER (ORDER BY ts DESC) AS p FROM bids", "or order by the event time alone"),
        ("SELECT SUM(price) OVER (PARTITION BY id) AS p FROM bids", "needs ORDER BY and the event time"),
        ("SELECT SUM(price) OVER (ORDER BY id) AS p FROM bids", "order by the event time of the table alone, 'ts'"),
        ("SELECT SUM(price) OVER (ORDER BY ts DESC) AS p FROM bids", "leave DESC out"),
        ("SELECT SUM(price) OVER (ORDER BY ts ROWS BETWEEN 1 PRECEDING AND 1 FOLLOWING) AS p FROM bids",
         "let it end at CURRENT ROW"),
        ("SELECT SUM(price) OVER (ORDER BY ts ROWS CURRENT ROW) AS p FROM bids", "write RANGE BETWEEN INTERVAL"),
        ("SELECT SUM(price) OVER (ORDER BY ts ROWS 0 PRECEDING) AS p FROM bids", "from 1 on"),
        ("SELECT LAG(price, id) OVER (ORDER BY ts) AS p FROM bids", "looks back a whole number of rows, from 1 on"),
        ("SELECT LAG(price IGNORE NULLS) OVER (ORDER BY ts) AS p FROM bids", "leave it out: rows with a null count"),
        ("SELECT SUM(price) OVER w AS p FROM bids", r"there is no window 'w' \(there are: none\)"),
        ("SELECT id FROM bids WHERE SUM(price) OVER (ORDER BY ts) > 3", "select it in a subquery, and use its name"),
        ("SELECT auction, COUNT(*) AS n, SUM(auction) OVER (ORDER BY ts) AS p FROM bids GROUP BY auction",
         "OVER beside GROUP BY or an aggregate is not there yet; group in a subquery"),
        ("SELECT KURTOSIS(price) OVER (ORDER BY ts) AS p FROM bids", "the aggregate KURTOSIS is not there yet"),
        ("SELECT SUM(n) OVER (ORDER BY ts) AS s FROM (SELECT ts, COUNT(*) AS n FROM bids GROUP BY ts)", "OVER"),
        ("SELECT a.id FROM bids AS a JOIN bids FOR SYSTEM_TIME AS OF a.id AS b ON a.id = b.id", "name the event time"),
        ("SELECT SOUNDEX(text) FROM bids", "the function SOUNDEX is not there yet; use with_columns"),
        ("SELECT KURTOSIS(price) AS m FROM TABLE(TUMBLE(TABLE bids, DESCRIPTOR(ts), INTERVAL '1' HOUR)) GROUP BY "
         "window_start", "the aggregate KURTOSIS is not there yet"),
        ("SELECT id FROM TABLE(TUMBLE(TABLE bids, DESCRIPTOR(price), INTERVAL '1' HOUR))", "the event time of"),
        ("SELECT id FROM TABLE(TUMBLE(TABLE bids, DESCRIPTOR(ts), INTERVAL '1' MONTH))", "INTERVAL in MONTH is not"),
        ("SELECT id FROM TABLE(TUMBLE(TABLE bids, DESCRIPTOR(ts), 10))", "write a length as INTERVAL '10' SECOND"),
        ("SELECT id, COUNT(*) AS n FROM TABLE(TUMBLE(TABLE bids, DESCRIPTOR(ts), INTERVAL '1' HOUR)) GROUP BY auction, "
         "window_start", "column 'id' is neither in GROUP BY nor in an aggregate"),
        ("SELECT price FROM bids WHERE text LIKE text", "LIKE with a pattern that is no literal is not there yet"),
        ("SELECT NULL AS nothing FROM bids", "NULL needs a type to be column 'nothing'; write CAST"),
        ("SELECT text + 1 AS c FROM bids", "is about numbers and texts; arithmetic is of numbers and of times"),
        ("SELECT a.id FROM bids AS a LEFT JOIN bids AS b ON a.id = b.auction AND b.ts > a.ts", "with a condition that"),
        ("SELECT a.id FROM bids AS a JOIN bids AS b ON a.id = b.text", "mixes numbers and texts; CAST one of them"),
        ("SELECT a.id FROM bids AS a JOIN bids AS b ON a.id = b.change", "compares Int64 with Float64; CAST one of"),
        ("SELECT a.id FROM bids AS a JOIN bids AS b ON a.id * 1.5 = b.id * 1.5", "by decimals, is not there yet; CAST"),
        (f"SELECT id, {NUMBER} AS rn FROM bids", "without a bound is not there yet; add WHERE rn <= 10 in a SELECT"),
        (f"SELECT COUNT(*) AS n FROM (SELECT id, {NUMBER} AS rn FROM bids)", "without a bound is not there yet"),
        (f"SELECT id FROM (SELECT id, {NUMBER} AS rn FROM bids) WHERE 2 >= rn", "without a bound is not there yet"),
        (f"SELECT t.id FROM (SELECT id, {NUMBER} AS rn FROM bids) AS t JOIN bids AS b ON t.id = b.id WHERE rn < 3",
         "without a bound is not there yet"),
        (f"SELECT id, {NUMBER} AS rn FROM bids UNION ALL SELECT id, id FROM bids", "without a bound is not there yet"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_one_sentence(query: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as raised:
        hg.sql(query, bids=bids(hg.Pipeline("refused")))
    assert "\n" not in str(raised.value)


def test_a_null_key_is_called_by_its_name(tmp_path: Path) -> None:
    pipeline = hg.Pipeline("nulls")
    hg.sql("SELECT text, COUNT(*) AS n FROM bids GROUP BY text", bids=bids(pipeline)).sink(Collect(tmp_path))
    with pytest.raises(PipelineFailed, match="its key 'text' is null"):
        run(pipeline, timeout_s=PATIENCE_S)


def test_a_query_that_is_refused_leaves_nothing_in_the_pipeline() -> None:
    pipeline = hg.Pipeline("refused")
    stream = bids(pipeline)
    with pytest.raises(UsageError, match="WHERE cannot have an aggregate"):
        hg.sql("SELECT id FROM (SELECT id FROM bids WHERE id > 1) WHERE COUNT(id) > 1", bids=stream)
    hg.sql("SELECT id FROM bids", bids=stream).sink(hg.Discard())
    assert "filter" not in pipeline.describe()


def test_tables_are_streams_with_event_time_where_windows_are() -> None:
    stream = bids(hg.Pipeline("tables"))
    with pytest.raises(UsageError, match="bids must be a stream without a key, not KeyedStream"):
        hg.sql("SELECT * FROM bids", bids=stream.key_by("id"))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="TUMBLE needs event times; call"):
        hg.sql("SELECT * FROM TABLE(TUMBLE(TABLE bids, DESCRIPTOR(id), INTERVAL '1' HOUR))", bids=stream.select("id"))
    with pytest.raises(UsageError, match="sql takes the text of a query"):
        hg.sql(stream)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="bids has a column '__kind_0', as queries name columns of their own"):
        hg.sql("SELECT DISTINCT * FROM bids", bids=stream.select("id", pl.col("auction").alias("__kind_0")))


def test_without_sqlglot_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from headgate.api.sql import expressions as sql_expressions

    sql_expressions.exp.cache_clear()
    monkeypatch.setitem(sys.modules, "sqlglot.expressions", None)
    with pytest.raises(UsageError, match=r"pip install 'headgate-streams\[sql\]'"):
        hg.sql("SELECT 1")
    sql_expressions.exp.cache_clear()
