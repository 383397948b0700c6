"""``PROCTIME()`` in SQL: windows by the clock, and joins with what a table has when a record comes."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

import headgate as hg
from headgate.errors import UsageError
from headgate.testing import Collect, run

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
