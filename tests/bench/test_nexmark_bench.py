"""The comparison of NEXMark: which results are equal, which ratios are made, and what the files hold."""

from __future__ import annotations

import datetime as dt
import itertools
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from bench.harness import Options
from bench.nexmark import judged, run
from bench.nexmark_files import write_events
from bench.nexmark_results import digest, last_rows
from bench.nexmark_texts import FLINK, STREAMING

from headgate.nexmark import QUERIES


def measured(cpu_s: float, results: int = 5, text: str = "abc", **more: Any) -> dict[str, Any]:
    return {"results": results, "digest": text, "turns": [{"s": 9.0, "cpu_s": cpu_s}, {"s": 1.0, "cpu_s": 99.0}]} | more


def test_ratios_are_of_processor_time_in_the_best_turn_and_their_mean_is_geometric() -> None:
    found = {
        "headgate": {"q0": measured(1.0, memory=[{"s": 1, "cpu_s": 0.25}]), "q3": measured(1.0)},
        "flink": {"q0": measured(16.0), "q3": measured(4.0)},
    }
    result = judged(["q0", "q3"], 1_000_000, found, {})
    assert result.figures["q0/headgate/events_per_core"] == 1_000_000
    assert (result.figures["q0/ratio_to_flink"], result.figures["q3/ratio_to_flink"]) == (16, 4)
    assert result.figures["mean_ratio_to_flink"] == 8
    assert result.figures["q0/per_core"] == 4_000_000
    assert result.met


def test_no_ratio_is_made_of_different_work() -> None:
    ours = {"q0": measured(1.0), "q1": measured(1.0)}
    theirs = {"q0": measured(1.0, results=4), "q1": measured(1.0, text="abd")}
    result = judged(["q0", "q1"], 1_000_000, {"headgate": ours, "flink": theirs}, {})
    assert result.figures["q0/flink/unequal"] == "4 results, Headgate has 5"
    assert "q1/flink/unequal" in result.figures
    assert not [name for name in result.figures if "ratio" in name]
    assert result.verdict("q1/ratio_to_flink") == "missed"


def test_a_peer_that_is_missing_or_failed_is_said() -> None:
    found = {"headgate": {"q2": measured(0.1)}, "streaming": {"q2": {"error": "no"}}}
    result = judged(["q2"], 1_000_000, found, {"flink": "Flink SQL is not installed: run `make bench-peers`"})
    assert result.figures["flink_missing"].startswith("Flink SQL is not installed")
    assert result.figures["q2/streaming/error"] == "no"
    assert result.verdict("q2/ratio_to_flink") == "skipped"


def test_unknown_queries_are_refused() -> None:
    with pytest.raises(ValueError, match="there is no query 'q6'; there are q0, q1"):
        run(Options(settings={"queries": "q0,q6"}))


def test_digests_do_not_depend_on_order_types_of_numbers_or_the_clock() -> None:
    at = dt.datetime(2015, 7, 15, 1, 2, 3, 4_000)
    rows = [{"a": Decimal("1.500"), "at": at, "x": None}, {"a": Decimal("2"), "at": at, "x": "é"}]
    same = [{"x": "é", "at": at.replace(tzinfo=dt.UTC), "a": Decimal("2.0")}, rows[0] | {"a": Decimal("1.5")}]
    assert digest("q1", rows) == digest("q1", same)
    assert digest("q1", rows) != digest("q1", rows[:1])
    assert digest("q1", rows) != digest("q1", [*rows, rows[1]])
    assert digest("q4", [{"category": 1, "average": 7.9}]) == digest("q4", [{"category": 1, "average": 7}])
    windows = [{"bidder": 1, "bid_count": 2, "starttime": at}, {"bidder": 1, "bid_count": 3, "starttime": None}]
    assert digest("q12", windows) == digest("q12", [{"bidder": 1, "bid_count": 5, "starttime": at}])


def test_changes_become_the_rows_that_are_left() -> None:
    changes = [
        {"auction": 1, "rank_number": 1, "price": 5, "op": "insert"},
        {"auction": 1, "rank_number": 1, "price": 5, "op": "update_before"},
        {"auction": 1, "rank_number": 1, "price": 7, "op": "update_after"},
        {"auction": 1, "rank_number": 2, "price": 5, "op": "insert"},
        {"auction": 1, "rank_number": 2, "price": 5, "op": "delete"},
    ]
    assert last_rows("q19", changes) == [{"auction": 1, "rank_number": 1, "price": 7}]
    assert last_rows("q0", [{"a": 1}, {"a": 1}]) == [{"a": 1}, {"a": 1}]


def test_both_divisions_of_the_files_hold_the_same_events(tmp_path: Path) -> None:
    counts = write_events(tmp_path, 1_130, 100, 3)
    assert counts == {"person": 23, "auction": 69, "bid": 1_038}
    for kind, count in counts.items():
        whole = [pl.read_parquet(tmp_path / "whole" / kind / f"{worker}.parquet") for worker in range(2)]
        *parts, last = (pl.read_parquet(path) for path in sorted((tmp_path / "parts" / kind).iterdir()))
        columns = whole[0].columns
        assert pl.concat(whole).sort(columns).equals(pl.concat(parts).sort(columns))
        assert sum(len(part) for part in parts) == count
        assert all(frame["date_time"].is_sorted() for frame in (*whole, *parts))
        assert all(a["date_time"].max() <= b["date_time"].min() for a, b in itertools.pairwise(parts))
        assert last["date_time"].item() > parts[-1]["date_time"].max() + dt.timedelta(minutes=50)


def test_there_is_a_text_for_each_query() -> None:
    assert FLINK.keys() | STREAMING.keys() <= QUERIES.keys()
