"""``join`` as users write it: what comes out of a run, and what is refused when the pipeline is built."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import polars as pl
import pytest

import headgate as hg
from headgate import testing
from headgate.errors import UsageError
from headgate.testing import Collect

Rows: TypeAlias = Callable[[Callable[[Any, Any], Any]], list[tuple[Any, ...]]]

ORDERS = [
    {"order": 1, "item": "tea", "at": 1_000},
    {"order": 2, "item": "milk", "at": 2_000},
    {"order": 3, "item": "rice", "at": 3_000},
    {"order": None, "item": "salt", "at": 3_000},
]
PAYMENTS = [
    {"id": 2, "amount": 5, "at": 2_500},
    {"id": 1, "amount": 7, "at": 99_000},
    {"id": None, "amount": 1, "at": 1},
]


def streams() -> tuple[hg.Stream, hg.Stream]:
    p = hg.Pipeline("joined")
    orders = p.source(hg.FromRows(ORDERS), name="orders").with_timestamps("at")
    return orders, p.source(hg.FromRows(PAYMENTS), name="payments").with_timestamps("at", out_of_orderness="5m")


def refusal(**options: Any) -> str:
    orders, payments = streams()
    right = options.pop("right", payments)
    with pytest.raises(UsageError) as caught:
        orders.join(right, **({"left_on": "order", "right_on": "id"} | options))
    return caught.value.message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "join needs to know how long rows wait: give within="),
        ({"ttl": None, "within": ("0s", "1s")}, "join takes only one bound: give within="),
        ({"within": ("1s", "0s")}, "the first bound of within= must not be later than the second"),
        ({"within": "1s"}, "within= is the least and the greatest value of right time - left time"),
        ({"within": ("1s", "soon")}, "a bound of within= must look like '500ms'"),
        ({"within": (5, 10)}, "is 5 without a unit"),
        ({"window": "10s"}, "window= must be a window such as headgate.Tumbling('10s')"),
        ({"ttl": None, "how": "outer"}, "how= must be one of inner, left, right, full, semi, anti, not 'outer'"),
        ({"ttl": None, "left_on": "item"}, "'item' (large_string) and 'id' (int64) have different types; cast one"),
        ({"ttl": None, "left_on": None}, "join needs its key: on='id', or left_on='id' and right_on="),
        ({"ttl": None, "on": "at"}, "give either on= or left_on= and right_on="),
        ({"ttl": None, "left_on": ["order", "at"]}, "left_on= has 2 columns and right_on= has 1"),
        ({"ttl": None, "left_on": pl.col("order"), "right_on": "id"}, "names of columns"),
        ({"ttl": None, "left_on": "nothing"}, "'nothing'"),
        ({"ttl": None, "right": "payments"}, "join takes a stream, not str"),
        ({"ttl": None, "suffix": ""}, "suffix= must be text"),
        ({"ttl": None, "right": streams()[1]}, "these belong to two"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    assert message in refusal(**options)


def test_more_that_is_refused() -> None:
    orders, payments = streams()
    renamed = payments.select("id", at="at", at_right="at")
    with pytest.raises(UsageError, match="would have two columns 'at_right'; rename one"):
        orders.join(renamed, left_on="order", right_on="id", ttl=None)
    with pytest.raises(UsageError, match="the right side of the join, 'select-2', has no event times"):
        orders.join(payments.select("id"), left_on="order", right_on="id", within=("0s", "1s"))
    with pytest.raises(UsageError, match="leave key_by out"):
        orders.join(payments.key_by("id"), left_on="order", right_on="id", ttl=None)
    with pytest.raises(UsageError, match="call it on the stream before key_by"):
        orders.key_by("order").join(payments)
    with pytest.raises(UsageError, match="leave broadcast"):
        orders.join(payments.broadcast(), left_on="order", right_on="id", ttl=None)
    odd = payments.with_columns(pl.lit(1).alias("headgate.window"))
    with pytest.raises(UsageError, match=r"joins have a column 'headgate\.window' themselves; give yours another name"):
        orders.join(odd, left_on="order", right_on="id", window=hg.Tumbling("1s"))


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    def run(make: Callable[[Any, Any], Any]) -> list[tuple[Any, ...]]:
        sink = Collect(tmp_path / "rows")
        orders, payments = streams()
        make(orders, payments).sink(sink)
        testing.run(orders._pipeline, timeout_s=300)  # type: ignore[arg-type]
        return sorted((tuple(row.values()) for row in sink.rows()), key=repr)

    return run


def test_an_interval_join_with_null_keys_and_what_has_no_partner(rows: Rows) -> None:
    found = rows(lambda o, p: o.join(p, left_on="order", right_on="id", within=("0s", "1m"), how="full"))
    assert found == [
        (1, "tea", 1_000, None, None),
        (1, None, None, 7, 99_000),
        (2, "milk", 2_000, 5, 2_500),
        (3, "rice", 3_000, None, None),
        (None, "salt", 3_000, None, None),
        (None, None, None, 1, 1),
    ]


def test_a_window_follows_an_interval_join(rows: Rows) -> None:
    def counted(o: Any, p: Any) -> Any:
        joined = o.join(p, left_on="order", right_on="id", within=("0s", "2m"))
        return joined.key_by("order").window(hg.Tumbling("1s")).agg(n=pl.len()).select("order", "n")

    assert rows(counted) == [(1, 1), (2, 1)]


def test_a_stream_joins_itself_and_the_result_again(rows: Rows) -> None:
    def again(o: Any, p: Any) -> Any:
        both = o.join(o, on="order", ttl=None, suffix="_2")
        return both.join(p, left_on="order", right_on="id", ttl="1h", how="semi").select("order", "item", "item_2")

    assert rows(again) == [(1, "tea", "tea"), (2, "milk", "milk")]


def test_columns_with_odd_names(rows: Rows) -> None:
    def odd(o: Any, p: Any) -> Any:
        left = o.select(pl.col("order").alias("a: b, <c>"), pl.col("at"))
        right = p.select(pl.col("id").alias("ü "), pl.col("amount").alias("; x>"), "at")
        return left.join(right, left_on="a: b, <c>", right_on="ü ", window=hg.Tumbling("1s"), how="inner")

    (found,) = rows(odd)
    assert found[:4] == (2, 2_000, 5, 2_500)


def test_an_as_of_join(rows: Rows) -> None:
    def latest(o: Any, p: Any) -> Any:
        return p.join_asof(o, by_left="id", by_right="order", tolerance="1m").select("id", "amount", "item", "at_right")

    assert rows(latest) == [(1, 7, None, None), (2, 5, "milk", 2_000), (None, 1, None, None)]


def test_a_table_with_versions(rows: Rows) -> None:
    def versions(o: Any, p: Any) -> Any:
        table = o.select("order", "item", "at", op=pl.lit("update_after")).filter(pl.col("order").is_not_null())
        return p.join_asof(table.records_as_changes("order"), by_left="id", by_right="order", how="inner")

    assert rows(versions) == [(1, 7, 99_000, "tea", 1_000), (2, 5, 2_500, "milk", 2_000)]


def test_what_an_as_of_join_refuses() -> None:
    orders, payments = streams()
    with pytest.raises(UsageError, match="how= of join_asof must be left or inner, not 'full'"):
        payments.join_asof(orders, by_left="id", by_right="order", how="full")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="join needs its key: by='id', or by_left='id'"):
        payments.join_asof(orders, by_left="id")
    table = orders.select("order", "at", op=pl.lit("insert")).records_as_changes("order")
    with pytest.raises(UsageError, match=r"changes of rows with the key \(order\), so join by that, not by \(at\)"):
        payments.join_asof(table, by_left="id", by_right="at")
    with pytest.raises(UsageError, match="has changes"):
        payments.join(table, left_on="id", right_on="order", within=("0s", "1s"))


def table_of(changes: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return the rows that are left; the last column is ``op``."""
    found = Counter[tuple[Any, ...]]()
    for *row, op in changes:
        found[tuple(row)] += 1 if op in ("insert", "update_after") else -1
    return sorted(found.elements(), key=repr)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("left", [(1, "tea", 7), (2, "milk", 5), (3, "rice", None), (None, "salt", None)]),
        ("full", [(1, "tea", 7), (2, "milk", 5), (3, "rice", None), (None, "salt", None), (None, None, 1)]),
        ("anti", [(3, "rice"), (None, "salt")]),
    ],
)
def test_a_row_without_a_partner_is_taken_back_when_one_comes(rows: Rows, how: Any, expected: list[Any]) -> None:
    def joined(o: Any, p: Any) -> Any:
        found = o.select("order", "item").join(
            p.select("id", "amount"), left_on="order", right_on="id", how=how, ttl=None
        )
        assert found.columns[-1] == "op"
        return found

    assert table_of(rows(joined)) == sorted(expected, key=repr)


def test_tables_that_change_are_joined(rows: Rows) -> None:
    """A count per key, joined with a count per key, and counted again."""

    def joined(o: Any, p: Any) -> Any:
        items = o.filter(pl.col("order").is_not_null()).key_by("order").agg(items=pl.len(), retractions=True)
        amounts = p.filter(pl.col("id").is_not_null()).key_by("id").agg(paid=pl.col("amount").sum())
        both = items.join(amounts, left_on="order", right_on="id", how="left", ttl=None)
        return (
            both.with_columns(is_paid=pl.col("paid").is_not_null()).key_by("is_paid").agg(n=pl.len(), retractions=True)
        )

    assert table_of(rows(joined)) == [(False, 1), (True, 2)]


@pytest.mark.parametrize("dtype", [pl.Float32, pl.Float64])
@pytest.mark.parametrize("is_table", [False, True])
def test_no_nan_is_equal_to_another(dtype: Any, is_table: bool, tmp_path: Path) -> None:
    p, sink = hg.Pipeline("nan"), Collect(tmp_path / "rows")
    keys = pl.DataFrame({"k": [math.nan, -0.0, None, 1.0]}, schema={"k": dtype})
    left = p.source(hg.FromRows(keys.with_row_index("left")), name="left")
    right = p.source(hg.FromRows(keys.with_row_index("right").with_columns(pl.col("k") + 0.0)), name="right")
    bound: Any = {} if is_table else {"ttl": None}
    left.join(right.broadcast() if is_table else right, on="k", how="semi", **bound).sink(sink)
    testing.run(p, timeout_s=300)
    assert sorted(row["left"] for row in sink.rows()) == [1, 3]


def test_upserts_are_joined_by_their_key_alone() -> None:
    orders, payments = streams()
    table = orders.select("order", "item", op=pl.lit("insert")).records_as_changes("order", retractions=False)
    payments.join(table, left_on="id", right_on="order", ttl=None)
    with pytest.raises(
        UsageError, match=r"only a join by exactly their key \(order\) can take them; join by that, or give 'changes'"
    ):
        payments.select(item=pl.lit("tea")).join(table, on="item", ttl=None)
    wider = payments.select("id", item=pl.lit("tea"))
    with pytest.raises(UsageError, match="only a join by exactly their key"):  # an update may have another item
        wider.join(table, left_on=["id", "item"], right_on=["order", "item"], ttl=None)
    with pytest.raises(UsageError, match="only a join by exactly their key"):
        table.join(wider, left_on=["order", "item"], right_on=["id", "item"], ttl=None)


@pytest.mark.parametrize("is_as_of", [False, True])
def test_results_of_windows_are_in_time_for_a_join_near_their_beginning(tmp_path: Path, is_as_of: bool) -> None:
    p = hg.Pipeline("near", parallelism=2)
    keys = {"key": hg.Choice((1, 2))}
    source = hg.Generator(keys, rows=4_000, time="deterministic", step_us=10_000, batch_rows=9)
    events = p.source(source, name="events").with_timestamps("ts")
    counts = events.key_by("key").window(hg.Tumbling("2s")).agg(n=pl.len())
    sink = Collect(tmp_path / "rows")
    joined = (
        counts.join_asof(events, by="key", tolerance="2s")
        if is_as_of
        else counts.join(events, on="key", within=("0s", "1999ms"))
    )
    joined.sink(sink)
    result = testing.run(p, timeout_s=300)
    assert result.late_records == 0
    assert len(sink.rows()) == (40 if is_as_of else 4_000)
