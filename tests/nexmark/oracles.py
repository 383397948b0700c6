"""What NEXMark's queries must find, in DuckDB's SQL over the same events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import duckdb
import numpy as np
import polars as pl

from headgate.nexmark.events import SCHEMAS, Kind, Nexmark

DAY = "strftime(date_time, '%Y-%m-%d')"
TEN = "time_bucket(INTERVAL '10' SECOND, date_time, TIMESTAMP '2000-01-01')"
HOPS = (
    "(SELECT *, time_bucket(INTERVAL '2' SECOND, date_time, TIMESTAMP '2000-01-01') - to_seconds(2 * k) AS w FROM bid, "
    "range(5) AS r(k))"
)


def statistics(*columns: str) -> str:
    ranges = ("true", "price < 10000", "price >= 10000 AND price < 1000000", "price >= 1000000")
    counted = ["*" if column == "bid" else f"DISTINCT {column}" for column in columns]
    return ", ".join(f"count({one}) FILTER (WHERE {prices})" for one in counted for prices in ranges)


ORACLES = {
    "q0": "SELECT auction, bidder, price, date_time, extra FROM bid",
    "q1": "SELECT auction, bidder, 0.908 * price AS price, date_time, extra FROM bid",
    "q2": "SELECT auction, price FROM bid WHERE auction % 123 = 0",
    "q14": """
        SELECT auction, bidder, 0.908 * price AS price,
            CASE WHEN hour(date_time) BETWEEN 8 AND 18 THEN 'dayTime'
                WHEN hour(date_time) <= 6 OR hour(date_time) >= 20 THEN 'nightTime' ELSE 'otherTime' END,
            date_time, extra, length(extra) - length(replace(extra, 'c', ''))
        FROM bid WHERE 0.908 * price > 1000000 AND 0.908 * price < 50000000""",
    "q21": """
        SELECT * FROM (SELECT auction, bidder, price, channel,
            CASE lower(channel) WHEN 'apple' THEN '0' WHEN 'google' THEN '1' WHEN 'facebook' THEN '2'
                WHEN 'baidu' THEN '3' ELSE nullif(regexp_extract(url, 'channel_id=([^&]*)', 1), '') END AS channel_id
            FROM bid) WHERE channel_id IS NOT NULL""",
    "q22": """
        SELECT auction, bidder, price, channel, split_part(url, '/', 4), split_part(url, '/', 5),
            split_part(url, '/', 6) FROM bid""",
    "q3": """
        SELECT name, city, state, a.id FROM auction AS a JOIN person AS p ON a.seller = p.id
        WHERE category = 10 AND state IN ('OR', 'ID', 'CA')""",
    "q4": """
        SELECT category, avg(final) FROM (SELECT a.id, category, max(price) AS final FROM auction AS a JOIN bid AS b
            ON a.id = b.auction AND b.date_time BETWEEN a.date_time AND expires GROUP BY ALL) GROUP BY category""",
    "q8": f"""
        SELECT DISTINCT p.id, name, p.ten FROM (SELECT *, {TEN} AS ten FROM person) AS p
        JOIN (SELECT *, {TEN} AS ten FROM auction) AS a ON p.id = a.seller AND p.ten = a.ten""",
    "q9": """
        SELECT * FROM (SELECT a.id, price, b.date_time, row_number() OVER
            (PARTITION BY a.id ORDER BY price DESC, b.date_time) AS rank FROM auction AS a JOIN bid AS b
            ON a.id = b.auction AND b.date_time BETWEEN a.date_time AND expires) WHERE rank = 1""",
    "q13": "SELECT auction, bidder, price, date_time, auction % 10000 FROM bid",
    "q20": """
        SELECT b.*, a.* EXCLUDE (id) FROM bid AS b JOIN auction AS a ON b.auction = a.id WHERE category = 10""",
    "q5": f"""
        SELECT auction, n FROM (SELECT *, max(n) OVER (PARTITION BY w) AS most FROM
            (SELECT auction, w, count(*) AS n FROM {HOPS} GROUP BY ALL)) WHERE n = most""",
    "q7": f"""
        SELECT auction, bidder, price, date_time, extra FROM
            (SELECT *, max(price) OVER (PARTITION BY {TEN}) AS most FROM bid) WHERE price = most""",
    "q11": """
        SELECT bidder, count(*), min(date_time), max(date_time) + INTERVAL '10' SECOND FROM
            (SELECT *, sum(CAST(gap AS INT)) OVER (PARTITION BY bidder ORDER BY date_time) AS session FROM
                (SELECT *, coalesce(date_time - lag(date_time) OVER (PARTITION BY bidder ORDER BY date_time)
                    >= INTERVAL '10' SECOND, false) AS gap FROM bid)) GROUP BY bidder, session""",
    "q10": f"SELECT auction, bidder, price, date_time, extra, {DAY}, strftime(date_time, '%H:%M') FROM bid",
    "q12": "SELECT bidder, count(*) FROM bid GROUP BY bidder",
    "q15": f"SELECT {DAY} AS day, {statistics('bid', 'bidder', 'auction')} FROM bid GROUP BY day",
    "q16": f"""
        SELECT channel, {DAY} AS day, strftime(max(date_time), '%H:%M'), {statistics("bid", "bidder", "auction")}
        FROM bid GROUP BY channel, day""",
    "q17": f"""
        SELECT auction, {DAY} AS day, {statistics("bid")}, min(price), max(price), avg(price), sum(price)
        FROM bid GROUP BY auction, day""",
    "q18": "SELECT bidder, auction, max(date_time) FROM bid GROUP BY bidder, auction",
    "q19": """
        SELECT auction, price, rank FROM
            (SELECT *, row_number() OVER (PARTITION BY auction ORDER BY price DESC) AS rank FROM bid)
        WHERE rank <= 10""",
}
TIED = {
    "q9": ["id", "price", "date_time_bid", "rank"],
    "q18": ["bidder", "auction", "date_time"],
    "q19": ["auction", "price", "rank_number"],
}
"""Columns that do not depend on which of several equal bids came first."""


def database(source: Callable[[Kind], Nexmark]) -> duckdb.DuckDBPyConnection:
    """Return a database with the tables ``person``, ``auction`` and ``bid``: all events of ``source``."""
    found = duckdb.connect()
    for kind in SCHEMAS:
        events = source(kind)
        assert events.events is not None
        batch = events.batch(np.arange(events.events, dtype=np.int64))
        found.register(kind, pl.DataFrame(batch).to_arrow())  # type: ignore[arg-type]
    return found


def expected_rows(name: str, events: duckdb.DuckDBPyConnection) -> list[tuple[Any, ...]]:
    """Return the rows that query ``name`` must have found, in the order of ``found_rows``."""
    expected = events.sql(ORACLES[name]).pl()
    assert len(expected)
    return _sorted(expected)


def found_rows(name: str, changes: list[dict[str, Any]], keys: tuple[str, ...] | None) -> list[tuple[Any, ...]]:
    """Return the rows that query ``name`` has found.

    Args:
        name: of the query.
        changes: its results; those of one key in the order in which they were written.
        keys: of a stream with changes; else None.
    """
    rows = changes if keys is None else table_of(changes, keys)
    found = pl.DataFrame(rows, infer_schema_length=None)
    if name == "q12":  # when its windows end is up to the clock
        found = found.group_by("bidder").agg(pl.col("bid_count").sum())
    return _sorted(found.select(TIED.get(name, found.columns)))


def _sorted(frame: pl.DataFrame) -> list[tuple[Any, ...]]:
    floats = [name for name, dtype in frame.schema.items() if dtype.is_float()]
    rounded = frame.with_columns(pl.col(floats).round(4), pl.col(pl.Datetime).cast(pl.Datetime("us")))
    return sorted(rounded.rows(), key=str)


def table_of(changes: list[dict[str, Any]], keys: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the rows that are left at the end. Without keys each row that goes was there."""
    if not keys:
        rows: list[dict[str, Any]] = []
        for change in changes:
            is_new = change.pop("op") in ("insert", "update_after")
            rows.append(change) if is_new else rows.remove(change)
        return rows
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for change in changes:
        op = change.pop("op")
        key = tuple(change[name] for name in keys)
        if op == "delete":
            found.pop(key, None)
        elif op != "update_before":
            found[key] = change
    return list(found.values())
