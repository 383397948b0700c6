from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import polars as pl
import pytest
from tests.conftest import few
from tests.operators.harness import applied

import headgate as hg
from headgate.testing import EOF, PAUSE, Collect, FailOnce, ScriptedSource, run

Rows = list[dict[str, Any]]

BEFORE = [
    {"id": 1, "team": "a", "n": 1, "op": "insert"},
    {"id": 2, "team": "a", "n": 8, "op": "insert"},
    {"id": 1, "team": "a", "n": 1, "op": "update_before"},
    {"id": 1, "team": "b", "n": 9, "op": "update_after"},
    {"id": 2, "team": "a", "n": 8, "op": "update_before"},
    {"id": 2, "team": "a", "n": 2, "op": "update_after"},
    {"id": 2, "team": "a", "n": 2, "op": "delete"},
    {"id": 3, "team": "b", "n": 7, "op": "insert"},
]
TABLE = [{"id": 1, "team": "b", "n": 9}, {"id": 3, "team": "b", "n": 7}]


def changing(rows: Rows = BEFORE, *, retractions: bool = True) -> hg.Stream:
    return hg.Pipeline("test").source(hg.FromRows(rows)).records_as_changes("id", retractions=retractions)


def results(stream: hg.Stream) -> Rows:
    with TemporaryDirectory() as directory:
        sink = Collect(f"{directory}/out")
        stream.sink(sink)
        run(stream._pipeline, parallelism=1, checkpoint_dir=directory)
        return sink.rows()


@pytest.mark.parametrize("retractions", [True, False])
def test_a_filter_is_one_of_the_table(retractions: bool) -> None:
    found = results(changing(retractions=retractions).filter(pl.col("n") > 5))
    assert applied(found, ["id"], retractions=retractions) == TABLE
    kept = results(changing(retractions=retractions).filter(pl.col("n") < 3))
    assert applied(kept, ["id"], retractions=retractions) == []


def test_a_filter_by_keys_keeps_updates_whole() -> None:
    found = results(changing().filter(pl.col("id") == 1))
    assert [row["op"] for row in found] == ["insert", "update_before", "update_after"]


def test_upserts_have_no_rows_from_before() -> None:
    found = results(changing(retractions=False))
    assert [row["op"] for row in found] == ["insert", "insert", "update_after", "update_after", "delete", "insert"]


def test_select_renames_keys_and_follows_them() -> None:
    stream = changing().select("op", key="id", double=pl.col("n") * 2)
    assert stream._change_keys == ("key",)
    assert changing().with_columns(n=pl.col("n") + 1)._change_keys == ("id",)
    assert changing().select(pl.all().exclude("n"))._change_keys == ("id",)
    assert changing().select("op", "n")._change_keys == ()
    assert changing().with_columns(id=pl.col("id") + 1)._change_keys == ()


def test_an_op_that_is_none_is_a_bad_record() -> None:
    rows = [{"id": 1, "op": "insert"}, {"id": None, "op": "insert"}, {"id": 2, "op": "c"}, {"id": 3, "op": None}]
    pipeline = hg.Pipeline("test", bad_records=hg.DeadLetter(hg.Discard()))
    changes = pipeline.source(hg.FromRows(rows)).records_as_changes("id")
    assert results(changes) == [{"id": 1, "op": "insert"}]


REFUSED: dict[str, tuple[Callable[[hg.Stream], Any], str]] = {
    "map": (lambda s: s.map(lambda row: row), "has changes"),
    "flat_map": (lambda s: s.flat_map(lambda row: [row]), "has changes"),
    "map_batches": (lambda s: s.map_batches(lambda frame: frame), "has changes"),
    "a function as filter": (lambda s: s.filter(lambda row: True), "has changes"),
    "union": (lambda s: s.union(s.changes_as_records()), "has changes"),
    "union of upserts": (lambda s: s.union(s.changes_as_records().records_as_changes("id")), "has changes"),
    "union with it": (lambda s: s.changes_as_records().union(s), "has changes"),
    "rebalance": (lambda s: s.rebalance(), "has changes"),
    "connect": (lambda s: s.changes_as_records().connect(s.broadcast()), "has changes"),
    "broadcast for a function": (lambda s: s.broadcast().map(lambda row: row), "has changes"),
    "broadcast for an expression": (lambda s: s.broadcast().filter(pl.col("id") > 1), "can only be joined"),
    "broadcast for a sink": (lambda s: s.broadcast().sink(hg.Discard()), "can only be joined"),
    "iterate": (lambda s: s.iterate(lambda loop: (loop, loop)), "has changes"),
    "reduce": (lambda s: s.key_by("id").reduce(lambda a, b: a), "has changes"),
    "window": (lambda s: s.with_timestamps("n").key_by("id").window(hg.Tumbling("1s")).agg(pl.len()), "has changes"),
    "filter by op": (lambda s: s.filter(pl.col("op") == "insert"), "choose changes by their 'op'"),
    "select without op": (lambda s: s.select("id"), "must keep its column 'op'"),
    "another op": (lambda s: s.with_columns(op=pl.lit("insert")), "must keep its column 'op'"),
    "key_by op": (lambda s: s.key_by("op"), "cannot be a key"),
    "twice": (lambda s: s.records_as_changes("id"), "has changes already"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_know_changes_refuses_them(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(hg.UsageError, match=message):
        call(changing())


def test_upserts_must_keep_their_keys() -> None:
    with pytest.raises(hg.UsageError, match="must keep its key 'id'"):
        changing(retractions=False).select("op", "n")
    with pytest.raises(hg.UsageError, match=r"key_by\(team\): the changes are upserts of rows by id"):
        changing(retractions=False).key_by("team")
    assert changing().key_by("team").keys == ("team",)


def test_records_that_are_no_changes_are_refused() -> None:
    plain = hg.Pipeline("test").source(hg.FromRows([{"id": 1, "n": 1, "op": 3}]))
    with pytest.raises(hg.UsageError, match="column 'op' must be text"):
        plain.records_as_changes("id")
    with pytest.raises(hg.UsageError, match="there is no column 'op'"):
        plain.select("id").records_as_changes("id")
    with pytest.raises(hg.UsageError, match="needs the columns that identify a row"):
        changing().changes_as_records().records_as_changes()
    with pytest.raises(hg.UsageError, match="there is no column 'x'"):
        changing().changes_as_records().records_as_changes("x")
    with pytest.raises(hg.UsageError, match="cannot be a key"):
        changing().changes_as_records().records_as_changes("op")
    with pytest.raises(hg.UsageError, match="has no changes"):
        plain.changes_as_records()


def test_changes_as_records_are_ordinary_records() -> None:
    found = results(changing().changes_as_records().filter(pl.col("op") == "delete").map(lambda row: row))
    assert found == [{"id": 2, "team": "a", "n": 2, "op": "delete"}]


def test_an_aggregate_of_aggregates_takes_the_old_ones_back() -> None:
    rows = [{"auction": i % 5, "category": i % 5 % 2, "price": i * 7 % 31, "unused": "x"} for i in range(60)]
    bids = hg.Pipeline("test").source(hg.FromRows(rows))
    highest = bids.key_by("auction", "category").agg(price=pl.col("price").max(), retractions=True)
    assert highest._change_keys == ("auction", "category")
    found = results(highest.select("category", "price", "op").key_by("category").agg(pl.col("price").mean()))
    frame = pl.DataFrame(rows).group_by("auction", "category").agg(pl.col("price").max())
    expected = frame.group_by("category").agg(pl.col("price").mean()).sort("category").to_dicts()
    assert applied(found, ["category"], retractions=False, strict=True) == expected


@pytest.mark.parametrize("retractions", [True, False])
def test_the_top_of_an_aggregate_follows_it(retractions: bool) -> None:
    rows = [{"category": i % 2, "product": i * i % 11, "n": i} for i in range(200)]
    sales = hg.Pipeline("test").source(hg.FromRows(rows, batch_rows=7))
    counts = sales.key_by("category", "product").agg(sold=pl.len(), retractions=retractions)
    top = counts.key_by("category").top(3, by=["sold", "product"], within=None)
    assert top._change_keys == ("category", "rank")
    found = applied(results(top), ["category", "rank"], retractions=False, strict=True)
    counted = pl.DataFrame(rows).group_by("category", "product").agg(sold=pl.len())
    best = counted.sort("category", "sold", "product", descending=[False, True, True]).group_by(
        "category", maintain_order=True
    )
    expected = best.head(3).with_columns(rank=pl.int_range(1, pl.len() + 1).over("category"))
    assert found == expected.to_dicts()


def test_a_union_of_tables_has_the_rows_of_both() -> None:
    stream = changing()
    both = stream.union(stream.filter(pl.col("n") > 8))
    assert both._change_keys == ()
    counts = both.key_by("id").agg(rows=pl.len(), n=pl.col("n").sum())
    assert applied(results(counts), ["id"], retractions=False) == [
        {"id": 1, "rows": 2, "n": 18},
        {"id": 3, "rows": 1, "n": 7},
    ]


def test_only_the_columns_that_an_aggregate_needs_travel() -> None:
    pipeline = hg.Pipeline("test")
    rows = pipeline.source(hg.FromRows([{"a": 1, "b": 2, "c": 3}]))
    rows.key_by("a").agg(pl.col("b").sum()).sink(hg.Discard())
    nodes = {str(node.name): node for node in pipeline.definition().graph.nodes}
    assert nodes["agg-columns"].schema_text == "a: int64, b: int64"
    assert list(nodes) == ["source", "key-by", "agg-columns", "agg", "sink"]


BIDS = [{"auction": i % 3, "bidder": i % 4, "price": i * 7 % 31, "ms": i * 100} for i in range(60)]


def test_the_auctions_with_the_most_bids_of_each_window() -> None:
    counted = [row for row in BIDS if row["auction"] or row["price"] % 2]
    bids = hg.Pipeline("test").source(hg.FromRows(counted))
    counts = bids.with_timestamps("ms").key_by("auction").window(hg.Tumbling("2s")).agg(bids=pl.len())
    found = results(counts.top_per_window(1, by="bids", ties=True, rank="rank"))
    expected = {
        (auction, window, len(rows))
        for window in range(3)
        for auction in range(3)
        if (rows := [b for b in counted if b["auction"] == auction and b["ms"] // 2_000 == window])
    }
    most = {window: max(count for _, other, count in expected if other == window) for window in range(3)}
    best = {one for one in expected if one[2] == most[one[1]]}
    assert {(row["auction"], row["window_start"].second // 2, row["bids"]) for row in found} == best
    assert len(found) == len(best) > 3
    assert {row["rank"] for row in found} == {1}


def test_the_top_of_each_key_and_window() -> None:
    bids = hg.Pipeline("test").source(hg.FromRows(BIDS)).with_timestamps("ms")
    counts = bids.key_by("auction", "bidder").window(hg.Tumbling("2s")).agg(price=pl.col("price").max())
    found = results(counts.key_by("auction").top_per_window(1, by="price"))
    frame = pl.DataFrame(BIDS).group_by("auction", pl.col("ms") // 2_000).agg(pl.col("price").max())
    assert sorted((row["auction"], row["price"]) for row in found) == sorted(frame.select("auction", "price").rows())


def bids_in_time() -> Any:
    return hg.Pipeline("test").source(hg.FromRows(BIDS)).with_timestamps("ms")


WINDOWS = [hg.Tumbling("2s"), hg.Sliding("2s", "500ms"), hg.Tumbling("2s", "1s")]


@pytest.mark.parametrize(("count", "ties", "window"), few(product((1, 3), (False, True), WINDOWS), 4))
def test_the_top_of_records_in_windows(count: int, ties: bool, window: Any) -> None:
    rows = [{**row, "price": row["price"] % 7} for row in BIDS]
    bids = hg.Pipeline("test").source(hg.FromRows(rows, batch_rows=7)).with_timestamps("ms")
    found = results(bids.top_per_window(count, by="price", window=window, ties=ties, rank="rank"))
    windows, expected = window.aligned(), []
    for start in range(windows.offset_ms - 4_000, 8_000, windows.slide_ms):
        inside = [row for row in rows if start <= row["ms"] < start + windows.size_ms]
        ordered = sorted(inside, key=lambda row: -row["price"])
        for place, row in enumerate(ordered, 1):
            rank = 1 + sum(one["price"] > row["price"] for one in inside) if ties else place
            if rank <= count:
                expected.append((start, start + windows.size_ms, rank, row["price"], row["ms"]))
    shown = [
        (milliseconds(row["window_start"]), milliseconds(row["window_end"]), row["rank"], row["price"], row["ms"])
        for row in found
    ]
    assert sorted(shown) == sorted(expected)


def milliseconds(at: datetime) -> int:
    return (at - datetime(1970, 1, 1)) // timedelta(milliseconds=1)


def test_the_top_of_each_key_of_records_in_windows() -> None:
    found = results(bids_in_time().key_by("auction", "bidder").top_per_window(1, by="price", window=hg.Tumbling("2s")))
    frame = pl.DataFrame(BIDS).group_by("auction", "bidder", pl.col("ms") // 2_000).agg(pl.col("price").max())
    expected = frame.select("auction", "bidder", "price").rows()
    assert sorted((row["auction"], row["bidder"], row["price"]) for row in found) == sorted(expected)


def test_windows_of_records_say_what_is_wrong() -> None:
    bids = bids_in_time()
    with pytest.raises(hg.UsageError, match="window= is a tumbling or sliding window of event time"):
        bids.top_per_window(1, by="price", window=hg.Session("2s"))
    with pytest.raises(hg.UsageError, match="window= is a tumbling or sliding window of event time"):
        bids.top_per_window(1, by="price", window=hg.Tumbling("2s", time="processing"))
    with pytest.raises(hg.UsageError, match=r"window= needs event times; call .with_timestamps"):
        hg.Pipeline("test").source(hg.FromRows(BIDS)).top_per_window(1, by="price", window=hg.Tumbling("2s"))
    with pytest.raises(hg.UsageError, match="there is a column 'window_start' already"):
        bids.with_columns(window_start=pl.lit(1)).top_per_window(1, by="price", window=hg.Tumbling("2s"))
    with pytest.raises(hg.UsageError, match="no column 'cost'"):
        bids.top_per_window(1, by="cost", window=hg.Tumbling("2s"))
    with pytest.raises(hg.UsageError, match="top_per_window takes results of windows"):
        bids.top_per_window(1, by="price")


def test_the_highest_bids_of_each_auction() -> None:
    bids = hg.Pipeline("test").source(hg.FromRows(BIDS))
    ranked = bids.key_by("auction").top(2, by=["price", "ms"], descending=[True, False], within=None)
    assert ranked._change_keys == ("auction", "rank")
    table = applied(results(ranked), ["auction", "rank"], retractions=False, strict=True)
    ordered = pl.DataFrame(BIDS).sort(["auction", "price", "ms"], descending=[False, True, False])
    assert [row["ms"] for row in table] == ordered.group_by("auction", maintain_order=True).head(2)["ms"].to_list()


def test_the_last_bid_of_each_bidder() -> None:
    bids = hg.Pipeline("test").source(hg.FromRows(BIDS))
    last = bids.key_by("bidder").deduplicate("last", by="ms", within=None)
    table = applied(results(last), ["bidder"], retractions=False, strict=True)
    assert [row["ms"] for row in table] == [5600, 5700, 5800, 5900]
    first = hg.Pipeline("test").source(hg.FromRows(BIDS)).key_by("bidder").deduplicate(within="1h")
    assert first._change_keys is None
    assert [row["ms"] for row in results(first)] == [0, 100, 200, 300]


def test_what_keeps_rows_says_what_is_wrong() -> None:
    keyed = hg.Pipeline("test").source(hg.FromRows(BIDS)).key_by("auction")
    with pytest.raises(hg.UsageError, match="keep is 'first' or 'last'"):
        keyed.deduplicate("any", within=None)  # type: ignore[arg-type]
    with pytest.raises(hg.UsageError, match="within= does not go with retractions"):
        keyed.deduplicate("last", within="1h", retractions=True)
    with pytest.raises(hg.UsageError, match="within= does not go with retractions"):
        keyed.top(3, by="price", rank=None, within="1h")
    for count in (0, True, 1.5, "3"):
        with pytest.raises(hg.UsageError, match="must be a whole number from 1 on"):
            keyed.top(count, by="price", within=None)  # type: ignore[arg-type]
    with pytest.raises(hg.UsageError, match="takes results of windows"):
        keyed.top_per_window(3, by="price")
    with pytest.raises(hg.UsageError, match="there is no column 'op'"):
        changing().key_by("id").top(3, by="op", within=None)
    with pytest.raises(hg.UsageError, match="has changes"):
        changing().key_by("id").deduplicate(within=None)
    with pytest.raises(AttributeError, match=r"it is key_by\('column'\).deduplicate"):
        changing().distinct()


def test_aggregates_refuse_what_they_cannot_take_back() -> None:
    upserts = changing(retractions=False)
    with pytest.raises(hg.UsageError, match="an aggregate of changes must take the old rows back"):
        upserts.key_by("id").agg(pl.len())
    with pytest.raises(hg.UsageError, match="agg needs a key"):
        upserts.agg(pl.len())
    with pytest.raises(hg.UsageError, match="from 1 ms"):
        changing().changes_as_records().key_by("id").agg(pl.len().alias("rows"), ttl="0s")


def test_a_lost_worker_changes_no_table(tmp_path: Path) -> None:
    pipeline = hg.Pipeline(
        "test", checkpointing=hg.Checkpointing(interval="20ms"), restart=hg.FixedDelay(delay="10ms"), parallelism=2
    )
    halves = [[{"k": i % 5, "n": i * 7 % 31, "id": i} for i in range(start, start + 200)] for start in (0, 200)]
    scripts = [
        [half[:99], PAUSE, PAUSE, half[99:150], FailOnce(tmp_path / f"failed-{i}"), half[150:], EOF]
        for i, half in enumerate(halves)
    ]
    rows = pipeline.source(ScriptedSource(*scripts, schema={"k": int, "n": int, "id": int}, pause_ms=30))
    totals, best = Collect(tmp_path / "totals"), Collect(tmp_path / "best")
    rows.key_by("k").agg(total=pl.col("n").sum(), ids=pl.col("id").n_unique(), retractions=True).sink(totals)
    rows.key_by("k").top(2, by=["n", "id"], within=None).sink(best)
    assert run(pipeline, checkpoint_dir=tmp_path / "checkpoints").is_finished
    frame = pl.DataFrame(halves[0] + halves[1])
    expected = frame.group_by("k").agg(total=pl.col("n").sum(), ids=pl.col("id").n_unique()).sort("k")
    assert applied(totals.rows(), ["k"], retractions=True, strict=True) == expected.to_dicts()
    ordered = frame.sort(["k", "n", "id"], descending=[False, True, True]).group_by("k", maintain_order=True).head(2)
    table = applied(best.rows(), ["k", "rank"], retractions=False, strict=True)
    assert [(row["k"], row["id"]) for row in table] == ordered.select("k", "id").rows()
