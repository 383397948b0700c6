from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.connectors.source_reading import context, read_all, read_over_subtasks

from headgate.errors import UsageError
from headgate.nexmark.events import BASE_MS, SCHEMAS, Kind, Nexmark
from headgate.testing.source_kit import check_source

KINDS: tuple[Kind, ...] = ("person", "auction", "bid")
SHARES = {"person": 1, "auction": 3, "bid": 46}
EVENTS = 100_000


def frame(kind: Kind, events: int = EVENTS, first: int = 0, **options: object) -> pl.DataFrame:
    source = Nexmark(kind, events=events, **options)  # type: ignore[arg-type]
    found = pl.from_arrow(source.batch(np.arange(first, first + events, dtype=np.int64)))
    assert isinstance(found, pl.DataFrame)
    return found


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_it_passes_the_conformance_kit(kind: Kind) -> None:
    rows = check_source(Nexmark(kind, events=130, batch_rows=17, out_of_order_group=3), parallelisms=(1, 2))
    assert rows


@given(st.integers(0, 10**12), st.sampled_from([1, 10, 50]))
def test_each_cycle_has_one_person_three_auctions_and_46_bids(first: int, group: int) -> None:
    first -= first % 50 if group > 1 else 0  # only whole groups are complete
    for kind, share in SHARES.items():
        numbers = np.arange(first, first + 50, dtype=np.int64)
        assert Nexmark(kind, out_of_order_group=group).batch(numbers).num_rows == share  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("events", [0, 1, 4, 49, 50, 51, 333])
def test_records_do_not_depend_on_splits_subtasks_or_batches(kind: Kind, events: int) -> None:
    expected = frame(kind, events).sort(pl.all()).to_dicts()
    for splits, parallelism, rows in ((1, 1, 7), (3, 2, 64), (5, 3, 1), (2, 5, 1_000)):
        source = Nexmark(kind, events=events, splits=splits, batch_rows=rows)
        found = read_over_subtasks(source, parallelism)
        assert sorted(found, key=lambda row: tuple(row.values())) == expected


@given(st.integers(0, 12), st.integers(1, 3), st.integers(1, 3))
def test_reading_continues_at_any_position(polls: int, before: int, after: int) -> None:
    source = Nexmark("auction", events=500, batch_rows=37, columns=("id", "seller", "extra"))
    rows, positions = [], {}
    for index in range(before):
        reader = source.open(context(index, before))
        for _ in range(polls):
            batch = reader.poll()
            rows += batch.batch.to_pylist() if batch is not None else []
        positions |= reader.positions()
    for index in range(after):
        rows += read_all(source.open(context(index, after, positions)))[0]
    expected = frame("auction", 500, columns=("id", "seller", "extra")).to_dicts()
    assert sorted(rows, key=lambda row: row["id"]) == expected


def within(share: float, expected: float, count: int) -> bool:
    return abs(share - expected) < 3 * math.sqrt(expected * (1 - expected) / count)


def test_ids_follow_each_other_and_hot_ones_have_their_share() -> None:
    persons, auctions, bids = (frame(kind) for kind in KINDS)
    assert persons["id"].to_list() == list(range(1_000, 1_000 + EVENTS // 50))
    assert auctions["id"].to_list() == list(range(1_000, 1_000 + EVENTS // 50 * 3))
    hot_auction = (bids["auction"] - 1_000) % 100 == 0
    assert within(hot_auction.sum() / len(bids), 0.5 + 0.5 * 0.009, len(bids) // 4)  # some of the others are hot, too
    assert within(((bids["bidder"] - 1_000) % 100 == 1).mean(), 0.75 + 0.25 * 0.01, len(bids) // 4)  # type: ignore[arg-type]
    assert within(((auctions["seller"] - 1_000) % 100 == 0).mean(), 0.75 + 0.25 * 0.01, len(auctions) // 4)  # type: ignore[arg-type]
    assert within(bids["channel"].is_in(["Google", "Facebook", "Baidu", "Apple"]).mean(), 0.5, len(bids))  # type: ignore[arg-type]


def test_partners_of_joins_are_within_reach() -> None:
    persons, auctions, bids = (frame(kind).with_row_index("n") for kind in KINDS)
    last_auction = bids["n"] // 46 * 3 + 2 + 1_000
    assert (bids["auction"] <= last_auction + 10).all()
    assert (bids["auction"] >= last_auction - 200).all()
    last_person = bids["n"] // 46 + 1_000
    assert (bids["bidder"] <= last_person + 10).all()
    assert (bids["bidder"] >= last_person - 1_000).all()
    seller_limit = auctions["n"] // 3 + 1_000 + 10
    assert (auctions["seller"] <= seller_limit).all()
    life_ms = (auctions["expires"] - auctions["date_time"]).dt.total_milliseconds()
    assert life_ms.min() > 0  # type: ignore[operator]
    assert life_ms.max() <= 2 * 167 + 1  # type: ignore[operator]
    assert len(persons)


def test_times_prices_and_texts_are_as_specified() -> None:
    persons, auctions, bids = (frame(kind, tps=1_000) for kind in KINDS)
    assert persons["date_time"].dt.epoch("ms").to_list() == [BASE_MS + 50 * n for n in range(len(persons))]
    assert bids["price"].min() >= 100
    assert bids["price"].max() <= 10**8
    for power in range(2, 8):  # each magnitude is as likely
        assert within(bids["price"].is_between(10**power, 10 ** (power + 1) - 1).mean(), 1 / 6, len(bids) // 4)  # type: ignore[arg-type]
    assert (auctions["reserve"] > auctions["initial_bid"]).all()
    assert auctions["category"].unique().sort().to_list() == [10, 11, 12, 13, 14]
    sizes = persons.select(pl.sum_horizontal(pl.col(pl.String).str.len_bytes()) + 8).to_series()
    assert abs(sizes.mean() - 200) < 2  # type: ignore[operator, arg-type]
    assert abs(bids["extra"].str.len_bytes().mean() - 68) < 1  # type: ignore[operator, arg-type]
    assert bids["extra"].str.contains("^[a-z]*$").all()
    numbered = bids.filter(pl.col("channel").str.starts_with("channel-"))
    with_id = numbered["url"].str.contains("&channel_id=[0-9]+$")
    assert abs(with_id.mean() - 0.9) < 0.02  # type: ignore[operator, arg-type]
    assert bids.group_by("channel").agg(pl.col("url").n_unique())["url"].max() == 1
    assert bids["url"].str.contains("^https://www.nexmark.com/[a-z_]*/[a-z_]*/[a-z_]*/item.htm").all()


def test_values_are_frozen() -> None:
    assert frame("bid", 6).select("auction", "bidder", "price").rows() == [(1000, 1001, 1646), (1012, 1001, 59054040)]
    assert frame("auction", 4).select("id", "seller", "category", "initial_bid").row(0) == (1000, 1007, 10, 876)
    assert frame("person", 1).row(0)[1:4] == ("Luke Bartels", "rlqap@qzdf.com", "3330 5243 1098 3550")
    assert frame("bid", 6, seed=1)["price"].to_list() != frame("bid", 6)["price"].to_list()


def test_compat_has_the_peculiarities_of_the_reference() -> None:
    persons, auctions, bids = (frame(kind, compat=True) for kind in KINDS)
    assert persons["id"].min() == auctions["id"].min() == 1_001
    assert bids["bidder"].min() >= 2_000  # type: ignore[operator]
    assert bids["extra"].str.contains("[H-Z]").mean() > 0.99  # type: ignore[operator]


def test_groups_change_the_order_and_nothing_else() -> None:
    plain, mixed = frame("bid", 10_000), frame("bid", 10_000, out_of_order_group=100)
    assert plain.rows() != mixed.rows()
    assert sorted(plain.rows()) == sorted(mixed.rows())
    times = mixed["date_time"].dt.epoch("ms").to_list()
    assert max(a - b for a, b in pairwise(times)) <= 10


def test_wrong_options_are_refused() -> None:
    for kind in KINDS:
        assert Nexmark(kind).schema() == SCHEMAS[kind]
    for source, said in [
        (Nexmark("bids"), "must be 'person', 'auction' or 'bid'"),  # type: ignore[arg-type]
        (Nexmark("bid", tps=0), r"Nexmark\(tps=0\) must be positive"),
        (Nexmark("bid", events=-1), "must not be negative"),
        (Nexmark("bid", columns=("cost",)), "has no column 'cost'; it has auction, bidder"),
        (Nexmark("bid", columns=("price", "price")), "names a column twice"),
        (Nexmark("bid", columns="price"), "takes the names of columns"),  # type: ignore[arg-type]
    ]:
        with pytest.raises(UsageError, match=said):
            source.schema()
    assert Nexmark("bid").how_to_end() == "give Nexmark(events=...)"
    assert Nexmark("bid").identity() != Nexmark("bid", seed=1).identity()
