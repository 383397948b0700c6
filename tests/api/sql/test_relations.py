"""Tables of queries: UNNEST, VALUES and grouping sets against DuckDB, windows and joins by the clock."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from tests.operators.harness import applied

import headgate as hg
from headgate.errors import UsageError
from headgate.testing import Collect, run

ITEM = pa.struct([("sku", pa.string()), ("qty", pa.int64())])
STOCK = pa.map_(pa.string(), pa.int64())
ORDERS = pa.table(
    {
        "id": pa.array([1, 2, 3, 4, 5]),
        "tags": pa.array([["a", "b"], [], None, [None, "a"], ["b"]]),
        "items": pa.array(
            [[("x", 1), ("y", 2)], None, [], [("x", None)], [None, ("z", 3)]], pa.list_(ITEM)
        ),
        "stock": pa.array([[("north", 1)], [], None, [("south", None), ("north", 4)], []], STOCK),
        "ts": pa.array([datetime(2026, 1, 1, 0, 0, second) for second in (1, 2, 11, 12, 21)], pa.timestamp("us")),
    }
)  # fmt: skip

QUERIES: dict[str, tuple[str, str]] = {
    "scalars": ("SELECT id, tag FROM orders CROSS JOIN UNNEST(orders.tags) AS t (tag)", ""),
    "comma": ("SELECT o.id, t.tag FROM orders AS o, UNNEST(o.tags) AS t (tag) WHERE t.tag <> 'b'", ""),
    "lateral": (
        "SELECT id, tag FROM orders CROSS JOIN LATERAL UNNEST(tags) AS t (tag)",
        "SELECT id, tag FROM orders, UNNEST(tags) AS t (tag)",
    ),
    "left": ("SELECT id, tag FROM orders LEFT JOIN UNNEST(tags) AS t (tag) ON TRUE", ""),
    "ordinality": ("SELECT id, tag, n FROM orders CROSS JOIN UNNEST(tags) WITH ORDINALITY AS t (tag, n)", ""),
    "left ordinality": ("SELECT id, n FROM orders LEFT JOIN UNNEST(tags) WITH ORDINALITY AS t (tag, n) ON TRUE", ""),
    "rows": (
        "SELECT id, sku, qty * 2 AS twice FROM orders CROSS JOIN UNNEST(items) AS i (sku, qty)",
        "SELECT id, i.item.sku, i.item.qty * 2 FROM orders, UNNEST(items) AS i (item)",
    ),
    "whole rows": (
        "SELECT id, i.item.sku AS sku FROM orders CROSS JOIN UNNEST(items) AS i (item)",
        "SELECT id, i.item.sku FROM orders, UNNEST(items) AS i (item)",
    ),
    "maps": (
        "SELECT id, place, n FROM orders LEFT JOIN UNNEST(stock) AS s (place, n) ON TRUE",
        "SELECT id, s.e.key, s.e.value FROM orders LEFT JOIN UNNEST(MAP_ENTRIES(stock)) AS s (e) ON TRUE",
    ),
    "two": (
        "SELECT id, tag, sku FROM orders, UNNEST(tags) AS t (tag), UNNEST(items) AS i (sku, qty)",
        "SELECT id, tag, i.item.sku FROM orders, UNNEST(tags) AS t (tag), UNNEST(items) AS i (item)",
    ),
    "computed": ("SELECT id, w FROM orders CROSS JOIN UNNEST([id, id + 1]) AS w (w)", ""),
    "windows": (
        """SELECT tag, COUNT(*) AS n, window_start
        FROM TABLE(TUMBLE(TABLE orders, DESCRIPTOR(ts), INTERVAL '10' SECOND))
        CROSS JOIN UNNEST(tags) AS t (tag) WHERE tag IS NOT NULL GROUP BY tag, window_start, window_end""",
        """SELECT tag, COUNT(*), TIME_BUCKET(INTERVAL '10' SECOND, ts) AS w FROM orders, UNNEST(tags) AS t (tag)
        WHERE tag IS NOT NULL GROUP BY tag, w""",
    ),
    "of a subquery": (
        "SELECT id, tag FROM (SELECT id, tags FROM orders WHERE id > 1) AS o CROSS JOIN UNNEST(o.tags) AS t (tag)", "",
    ),
    "values": (
        """SELECT o.id, v.name FROM orders AS o
        JOIN (VALUES (1, 'one'), (4, 'four'), (9, NULL)) AS v (id, name) ON o.id = v.id""",
        "",
    ),
    "values of types": (
        """SELECT id, name, day
        FROM (VALUES (1, 0.5, NULL, DATE '2020-01-01'), (-2, 1.25, 'ä', NULL)) AS v (id, n, name, day)
        WHERE n > 0 UNION ALL SELECT id, tags[1], CAST(ts AS DATE) FROM orders""",
        "",
    ),
    "rollup": (
        """SELECT window_start, id % 2 AS odd, id > 3 AS high, COUNT(*) AS n, SUM(id) AS total, GROUPING(id % 2) AS g,
        GROUPING(id % 2, id > 3) AS gg
        FROM TABLE(TUMBLE(TABLE orders, DESCRIPTOR(ts), INTERVAL '20' SECOND))
        GROUP BY window_start, window_end, ROLLUP (id % 2, (id > 3))""",
        """SELECT TIME_BUCKET(INTERVAL '20' SECOND, ts) AS w, id % 2, id > 3, COUNT(*), SUM(id), GROUPING(id % 2),
        GROUPING(id % 2, id > 3)
        FROM orders GROUP BY TIME_BUCKET(INTERVAL '20' SECOND, ts), ROLLUP (id % 2, (id > 3))""",
    ),
    "cube": (
        """SELECT window_start, id % 2 AS odd, id > 3 AS high, COUNT(*) AS n
        FROM TABLE(TUMBLE(TABLE orders, DESCRIPTOR(ts), INTERVAL '20' SECOND))
        GROUP BY window_start, window_end, CUBE (id % 2, (id > 3)) HAVING COUNT(*) > 1""",
        """SELECT TIME_BUCKET(INTERVAL '20' SECOND, ts), id % 2, id > 3, COUNT(*)
        FROM orders GROUP BY TIME_BUCKET(INTERVAL '20' SECOND, ts), CUBE (id % 2, (id > 3)) HAVING COUNT(*) > 1""",
    ),
    "sets": (
        """SELECT window_end, id, id % 2 AS odd, MAX(id) AS m
        FROM TABLE(TUMBLE(TABLE orders, DESCRIPTOR(ts), INTERVAL '20' SECOND))
        GROUP BY window_start, window_end, GROUPING SETS ((id, id % 2), (id % 2), ())""",
        """SELECT TIME_BUCKET(INTERVAL '20' SECOND, ts) + INTERVAL '20' SECOND, id, id % 2, MAX(id)
        FROM orders GROUP BY TIME_BUCKET(INTERVAL '20' SECOND, ts), GROUPING SETS ((id, id % 2), (id % 2), ())""",
    ),
}  # fmt: skip


def result(query: str, path: Path) -> list[dict[str, Any]]:
    pipeline, sink = hg.Pipeline("p"), Collect(path)
    orders = pipeline.source(hg.FromRows(ORDERS, batch_rows=2), name="orders").with_timestamps("ts")
    hg.sql(query, orders=orders).sink(sink)
    run(pipeline, timeout_s=300)
    return sink.rows()


@pytest.mark.parametrize("name", QUERIES)
def test_rows_of_tables_that_are_made_are_those_of_duckdb(name: str, tmp_path: Path) -> None:
    query, other = QUERIES[name]
    connection = duckdb.connect()
    connection.register("orders", ORDERS)
    found = [tuple(row.values()) for row in result(query, tmp_path)]
    assert sorted(map(repr, found)) == sorted(map(repr, connection.sql(other or query).fetchall()))


RANKED = """SELECT window_start, odd, n FROM (
    SELECT *, ROW_NUMBER() OVER (PARTITION BY window_start, window_end ORDER BY n DESC) AS place
    FROM (SELECT window_start, window_end, id % 2 AS odd, COUNT(*) AS n
        FROM TABLE(TUMBLE(TABLE orders, DESCRIPTOR(ts), INTERVAL '20' SECOND))
        WHERE id < 5 GROUP BY window_start, window_end, ROLLUP (id % 2)) AS g) AS r WHERE place <= 1"""


def test_a_ranking_of_grouping_sets_is_one_of_windows(tmp_path: Path) -> None:
    assert result(RANKED, tmp_path) == [{"window_start": datetime(2026, 1, 1), "odd": None, "n": 4}]


def test_grouping_sets_without_windows_are_changes(tmp_path: Path) -> None:
    query = "SELECT id % 2 AS odd, COUNT(*) AS n FROM orders GROUP BY ROLLUP (id % 2)"
    table = applied([{**row, "key": str(row["odd"])} for row in result(query, tmp_path)], ["key"], retractions=True)
    assert {row["key"]: row["n"] for row in table} == {"0": 2, "1": 3, "None": 5}


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("SELECT id FROM orders CROSS JOIN UNNEST(id) AS t (x)", "UNNEST needs an array or a map, and id is none"),
        (
            "SELECT id FROM orders CROSS JOIN UNNEST(tags) AS t (x, y)",
            "UNNEST names 2 columns, but its elements have 1",
        ),
        ("SELECT id FROM orders CROSS JOIN UNNEST(tags, items) AS t (x, y)", "UNNEST of several arrays"),
        ("SELECT id FROM orders LEFT JOIN UNNEST(tags) AS t (x) ON x = 'a'", "LEFT JOIN UNNEST with a condition"),
        ("SELECT id FROM orders CROSS JOIN LATERAL (SELECT 1 AS x) AS t", "LATERAL"),
        (
            "SELECT tag FROM (SELECT id % 2 AS b, ARRAY_AGG(id) AS ids FROM orders GROUP BY id % 2) AS g "
            "CROSS JOIN UNNEST(g.ids) AS t (tag)",
            "cannot be kept up to date record by record",
        ),
        (
            "SELECT id, UNNEST(tags) AS tag FROM orders",
            "UNNEST in an expression is not there yet; write FROM t",
        ),
        ("VALUES (1, 2)", r"VALUES as a query is not there yet; write SELECT \* FROM \(VALUES"),
        ("SELECT a FROM (VALUES (1), (2, 3)) AS v (a)", "the rows of VALUES have different numbers of columns"),
        ("SELECT a FROM (VALUES (1), ('x')) AS v (a)", "VALUES mixes numbers and texts; CAST one of them"),
        ("SELECT id, GROUPING(ts) AS g FROM orders GROUP BY ROLLUP (id)", "needs columns of GROUP BY"),
        ("SELECT id, COUNT(*) AS n FROM orders GROUP BY id WITH ROLLUP", "WITH ROLLUP|ROLLUP is not there yet"),
    ],
)
def test_what_makes_no_rows_is_one_sentence(query: str, said: str) -> None:
    pipeline = hg.Pipeline("p")
    orders = pipeline.source(hg.FromRows(ORDERS)).with_timestamps("ts")
    with pytest.raises(UsageError, match=said) as caught:
        hg.sql(query, orders=orders)
    assert "\n" not in str(caught.value)


AGGREGATES = {
    "FIRST_VALUE(n)": "FIRST(n ORDER BY i) FILTER (n IS NOT NULL)",
    "LAST_VALUE(n)": "LAST(n ORDER BY i) FILTER (n IS NOT NULL)",
    "FIRST_VALUE(s) FILTER (WHERE i > 1)": "FIRST(s ORDER BY i) FILTER (i > 1 AND s IS NOT NULL)",
    "LISTAGG(s)": "STRING_AGG(s, ',' ORDER BY i)",
    "STRING_AGG(s, ' + ')": "STRING_AGG(s, ' + ' ORDER BY i)",
    "ARRAY_AGG(n)": "ARRAY_AGG(n ORDER BY i)",
    "APPROX_COUNT_DISTINCT(s)": "COUNT(DISTINCT s)",
    "COUNT(DISTINCT n)": "COUNT(DISTINCT n)",
    "MEDIAN(n)": "MEDIAN(n)",
}
GROUPS = pa.table(
    {
        "k": pa.array(["a", "b", "a", "c", "a", "b", "a"]),
        "i": pa.array(range(7)),
        "n": pa.array([None, None, 3, None, 1, 4, 3]),
        "s": pa.array(["x", "", None, None, "ä", "y", "x"]),
        "ts": pa.array([datetime(2026, 1, 1)] * 7, pa.timestamp("us")),
    }
)  # fmt: skip


def test_aggregates_of_windows_are_those_of_duckdb(tmp_path: Path) -> None:
    pipeline, sink = hg.Pipeline("p"), Collect(tmp_path)
    rows = pipeline.source(hg.FromRows(GROUPS, batch_rows=2)).with_timestamps("ts")
    made = ", ".join(f"{text} AS c{i}" for i, text in enumerate(AGGREGATES))
    table = "TABLE(TUMBLE(TABLE t, DESCRIPTOR(ts), INTERVAL '1' DAY))"
    hg.sql(f"SELECT k, {made} FROM {table} GROUP BY k, window_start, window_end", t=rows).sink(sink)
    run(pipeline, timeout_s=300)
    connection = duckdb.connect()
    connection.register("t", GROUPS)
    others = ", ".join(AGGREGATES.values())
    wanted = connection.sql(f"SELECT k, {others} FROM t GROUP BY k ORDER BY k").fetchall()
    assert sorted(tuple(row.values()) for row in sink.rows()) == wanted


BIDS = [{"bidder": n % 3, "auction": n, "price": 10 * n} for n in range(60)]
SIDE = [{"key": n, "value": f"v{n}"} for n in range(5)]
NOW = "(SELECT *, PROCTIME() AS now FROM bid) AS b"
WINDOWS = "TABLE(TUMBLE(TABLE b, DESCRIPTOR(now), INTERVAL '10' SECOND))"
LOOKUP = f"SELECT b.auction, s.value FROM {NOW} {{}} JOIN side FOR SYSTEM_TIME AS OF b.now AS s ON {{}}"


def tables(parallelism: int = 1) -> tuple[hg.Pipeline, dict[str, hg.Stream]]:
    pipeline = hg.Pipeline("now", parallelism=parallelism, checkpointing=hg.Checkpointing(interval="50ms"))
    bids = pa.Table.from_pylist(BIDS)
    bid = pipeline.source(hg.FromRows(bids, splits=2, batch_rows=7))
    return pipeline, {"bid": bid, "side": pipeline.source(hg.FromRows(pa.Table.from_pylist(SIDE)))}


def refused(query: str) -> str:
    with pytest.raises(UsageError) as error:
        hg.sql(query, **tables()[1])
    return str(error.value)


def test_windows_by_the_clock_and_lookups_see_each_record_once(tmp_path: Path) -> None:
    pipeline, streams = tables(parallelism=2)
    queries = {
        "windows": f"WITH b AS (SELECT *, PROCTIME() AS now FROM bid) SELECT bidder, COUNT(*) AS bids, window_start, "
        f"window_end FROM {WINDOWS} GROUP BY bidder, window_start, window_end",
        "inner": LOOKUP.format("", "MOD(b.auction, 7) = s.key"),
        "left": LOOKUP.format("LEFT", "s.key = b.auction"),
        "chained": f"WITH b AS (SELECT b.*, s.value AS first FROM {NOW} JOIN side FOR SYSTEM_TIME AS OF now AS s "
        "ON b.auction = s.key) SELECT b.auction, b.first, s.value FROM b JOIN side FOR SYSTEM_TIME AS OF b.now AS s "
        "ON b.auction + 1 = s.key",
    }
    sinks = {name: Collect(tmp_path / name) for name in queries}
    for name, query in queries.items():
        hg.sql(query, **streams).sink(sinks[name], name=name)
    run(pipeline, timeout_s=300)
    counted = sinks["windows"].rows()
    assert {row["bidder"]: 20 for row in counted} == {
        bidder: sum(row["bids"] for row in counted if row["bidder"] == bidder) for bidder in range(3)
    }
    assert all((row["window_end"] - row["window_start"]).total_seconds() == 10 for row in counted)
    inner = sorted((row["auction"], row["value"]) for row in sinks["inner"].rows())
    assert inner == [(n, f"v{n % 7}") for n in range(60) if n % 7 < 5]
    left = sorted((row["auction"], row["value"]) for row in sinks["left"].rows())
    assert left == [(n, f"v{n}" if n < 5 else None) for n in range(60)]
    assert sorted(row["auction"] for row in sinks["chained"].rows()) == [0, 1, 2, 3]


def test_the_clock_stands_only_where_it_is_read() -> None:
    windows = f"WITH b AS (SELECT *, PROCTIME() AS now FROM bid) SELECT {{}} FROM {WINDOWS}"
    session = windows.replace("TUMBLE", "SESSION").format("COUNT(*) AS n") + " GROUP BY window_start, window_end"
    assert "PROCTIME() as result column 'now'" in refused(f"SELECT * FROM {NOW}")
    assert "SELECT of nothing but PROCTIME()" in refused("SELECT PROCTIME() AS now FROM bid")
    assert "PROCTIME() in an expression" in refused(f"SELECT auction FROM {NOW} WHERE now IS NOT NULL")
    assert "PROCTIME() in an expression" in refused(f"SELECT MAX(now) AS latest FROM {NOW} GROUP BY bidder")
    assert "SESSION over PROCTIME()" in refused(session)
    assert "without GROUP BY is not there yet" in refused(windows.format("bidder, window_start"))
    again = windows.format("bidder, COUNT(*) AS n, window_start, window_end")
    again = f"SELECT MAX(n) AS most FROM ({again} GROUP BY bidder, window_start, window_end) GROUP BY window_end"
    assert "of windows of processing time is not there yet; aggregate them in one query" in refused(again)


def test_a_lookup_needs_the_clock_and_a_table_after_join() -> None:
    assert "FOR SYSTEM_TIME AS OF" in refused(LOOKUP.replace("b.now", "b.price").format("", "b.auction = s.key"))
    assert "use JOIN or LEFT JOIN" in refused(LOOKUP.format("FULL", "b.auction = s.key"))
    assert "put that table after JOIN" in refused("SELECT key FROM side FOR SYSTEM_TIME AS OF PROCTIME() AS s")
    assert "JOIN without equal columns" in refused(LOOKUP.format("", "b.auction > s.key"))


def test_a_column_of_the_user_is_not_taken_for_the_clock(tmp_path: Path) -> None:
    pipeline = hg.Pipeline("own")
    rows = pipeline.source(hg.FromRows([{"__proctime": 7}, {"__proctime": None}]))
    sink = Collect(tmp_path)
    hg.sql("SELECT __proctime, __proctime + 1 AS more FROM t WHERE __proctime > 3", t=rows).sink(sink)
    run(pipeline, timeout_s=300)
    assert sink.rows() == [{"__proctime": 7, "more": 8}]
