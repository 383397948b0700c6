"""Records that are in the subtask of their key already are not sent anywhere, and results stay the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from tests.killing import run_killing

import headgate as hg
from headgate.model.graph import Partitioner
from headgate.testing import Collect, run

AUCTIONS = [{"id": i, "seller": i % 7, "note": f"auction {'x' * (i % 30)}"} for i in range(60)]
BIDS = [{"auction": i * 13 % 70, "price": i * 31 % 97, "text": None if i % 5 == 0 else f"bid {i}"} for i in range(900)]


def streams(pipeline: hg.Pipeline) -> tuple[hg.Stream, hg.Stream]:
    return (
        pipeline.source(hg.FromRows(AUCTIONS, splits=3, batch_rows=8), name="auctions"),
        pipeline.source(hg.FromRows(BIDS, splits=3, batch_rows=50), name="bids"),
    )


def joined(pipeline: hg.Pipeline, how: Any = "inner") -> hg.Stream:
    auctions, bids = streams(pipeline)
    return auctions.join(bids, left_on="id", right_on="auction", ttl=None, how=how)


def shuffles_to(stream: hg.Stream, name: str) -> bool:
    stream.sink(hg.Discard())
    graph = stream._pipeline.definition().graph
    return any(
        edge.partitioner is Partitioner.HASH for node in graph.nodes if node.name == name for edge in node.inputs
    )


@pytest.mark.parametrize(
    ("change", "key", "is_needed"),
    [
        (lambda pairs: pairs, "id", False),
        (lambda pairs: pairs.filter(pl.col("price") > 5), "id", False),
        (lambda pairs: pairs.select(pl.col("id").alias("auction"), "price"), "auction", False),
        (lambda pairs: pairs.with_columns(price=pl.col("price") + 1), "id", False),
        (lambda pairs: pairs.with_columns(id=pl.col("id") // 2), "id", True),
        (lambda pairs: pairs.select((pl.col("id") // 2).alias("id"), "price"), "id", True),
        (lambda pairs: pairs.select(pl.col("seller").alias("id"), "price"), "id", True),
        (lambda pairs: pairs.map_batches(lambda batch: batch), "id", True),
        (lambda pairs: pairs.rebalance(), "id", True),
        (lambda pairs: pairs, "seller", True),
    ],
)
def test_a_shuffle_is_left_out_where_the_key_is_that_of_the_join(change: Any, key: str, is_needed: bool) -> None:
    pairs = change(joined(hg.Pipeline("test")))
    assert shuffles_to(pairs.key_by(key).top(1, by="price", within=None), "top") is is_needed


@pytest.mark.parametrize("how", ["right", "full", "left"])
def test_rows_without_a_partner_are_sent_to_the_subtask_of_their_key(how: str) -> None:
    pairs = joined(hg.Pipeline("test"), how).filter(pl.col("id").is_not_null())
    assert shuffles_to(pairs.key_by("id").top(1, by="price", within=None), "top")


@pytest.mark.parametrize("parallelism", [1, 2, 3])
@pytest.mark.parametrize("is_killed", [False, True])
def test_the_best_partner_of_each_row_is_the_same(parallelism: int, is_killed: bool, tmp_path: Path) -> None:
    checkpoints = hg.Checkpointing(interval="20ms", dir=str(tmp_path / "c"))
    pipeline = hg.Pipeline("test", parallelism=parallelism, checkpointing=checkpoints)
    some = joined(pipeline).filter(pl.col("price") % 3 != 0)
    best = some.key_by("id").top(2, by=["price", "text"], descending=[True, False], within=None)
    sink = Collect(tmp_path / "out")
    best.sink(sink)
    if is_killed:
        run_killing(pipeline, 1)
    else:
        run(pipeline)
    found = {(row["id"], row["rank"]): (row["price"], row["text"], row["note"]) for row in sink.rows()}
    pairs = pl.DataFrame(AUCTIONS).join(pl.DataFrame(BIDS), left_on="id", right_on="auction")
    ordered = pairs.filter(pl.col("price") % 3 != 0).sort("price", "text", descending=[True, False], nulls_last=True)
    expected = {
        (row["id"], rank): (row["price"], row["text"], row["note"])
        for _, rows in ordered.group_by("id", maintain_order=True)
        for rank, row in enumerate(rows.head(2).to_dicts(), 1)
    }
    assert found == expected
