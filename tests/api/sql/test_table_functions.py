"""UNNEST, VALUES and grouping sets against DuckDB, over arrays that are empty or null."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from tests.operators.changes_model import applied

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
