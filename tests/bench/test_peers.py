"""Peers of the benchmarks: running them as processes, what they count, and the comparison of NEXMark."""

from __future__ import annotations

import datetime as dt
import itertools
import subprocess
import sys
from collections import Counter
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
from bench.peers import measure
from bench.peers.flink_sql import rate_of
from bench.peers.install import environment_python
from bench.peers.measure import (
    NotInstalled,
    PeerFailedError,
    end_group,
    flink_is_installed,
    last_object,
    measure_flink,
    run_peer,
)
from bench.peers.structured_streaming import figures_of, session, size_for_one_second, summary_of, windowed_count

from headgate.nexmark import QUERIES

PYTHON = Path(sys.executable)


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of a module ``stand_in`` that ``run_peer`` can run."""
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    return tmp_path / "stand_in.py"


def test_the_last_line_is_the_result_and_noise_before_it_is_ignored(peer: Path) -> None:
    peer.write_text("import json, sys\nprint('noise {')\nprint(json.dumps({'arguments': sys.argv[1:]}))\n")
    assert run_peer(PYTHON, "stand_in", ["--keys", "5"]) == {"arguments": ["--keys", "5"]}


def test_a_peer_that_fails_is_named_with_its_last_words(peer: Path) -> None:
    peer.write_text("import sys\nsys.exit('no Java here')\n")
    with pytest.raises(PeerFailedError, match=r"stand_in ended with status 1:\nno Java here"):
        run_peer(PYTHON, "stand_in", [])


def test_a_peer_that_hangs_is_an_error_after_its_time(peer: Path) -> None:
    peer.write_text("import signal\nsignal.pause()\n")
    with pytest.raises(PeerFailedError, match="stand_in did not end within 1 s"):
        run_peer(PYTHON, "stand_in", [], timeout_seconds=1)


def test_ending_a_peer_ends_what_it_started() -> None:
    grandchild = "import signal; print('up', flush=True); signal.pause()"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
    with subprocess.Popen([PYTHON, "-c", child], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        end_group(process)
        # The pipe ends only when the last process that could write to it is gone.
        assert process.stdout.read() == b""


def test_files_a_peer_leaves_behind_are_gone(peer: Path) -> None:
    peer.write_text("import json, tempfile\nprint(json.dumps({'left': tempfile.mkdtemp()}))\n")
    assert not Path(run_peer(PYTHON, "stand_in", [])["left"]).exists()


@pytest.mark.parametrize("printed", ["", "\n", "not json", "[1]", '{"a": 1}\nbye'])
def test_output_without_an_object_on_its_last_line_is_refused(printed: str) -> None:
    with pytest.raises(PeerFailedError, match="no JSON object on its last line"):
        last_object(printed, "stand_in")


def test_a_missing_flink_is_one_clear_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "environment_python", lambda: tmp_path / "bin" / "python")
    assert measure_flink(10) == NotInstalled("Flink SQL is not installed: run `make bench-peers`")


def test_rate_runs_from_the_first_look_to_the_last() -> None:
    assert rate_of([(10.0, 500), (11.0, 900), (12.0, 2_500)]) == 1_000
    with pytest.raises(ValueError, match="two looks"):
        rate_of([(1.0, 5)])


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


FLINK_PYTHON = environment_python()


@pytest.mark.spark
@pytest.mark.skipif(not flink_is_installed(FLINK_PYTHON), reason="Flink SQL is not installed: run `make bench-peers`")
def test_it_counts_every_event_once() -> None:
    counted = run_peer(FLINK_PYTHON, "bench.peers.flink_sql", ["--keys", "7", "--check-rows", "100000"])
    assert (counted["events"], counted["keys"]) == (100_000, 7)
    # No group twice: each window has a row for each of the 7 keys at most.
    assert counted["groups"] <= 7 * counted["windows"]


def batch(second: float, duration_ms: int, rows: int) -> dict[str, object]:
    timestamp = f"2026-01-01T00:00:{second:06.3f}Z"
    return {"timestamp": timestamp, "durationMs": {"triggerExecution": duration_ms}, "numInputRows": rows}


def size(rows: int, rate: float, batch_ms: float) -> dict[str, float]:
    return {"batch_rows": rows, "events_per_s": rate, "batch_ms_median": batch_ms}


def test_throughput_counts_pauses_between_batches() -> None:
    progress = [batch(1.0, 400, 1_000), batch(1.5, 300, 1_000), batch(2.5, 500, 1_000)]
    assert figures_of(progress, 1_000) == {
        "batch_rows": 1_000,
        "batches": 3,
        "events_per_s": 1_500,  # 3,000 rows in 2 s
        "batch_ms_median": 400,
        "batch_ms_max": 500,
    }


def test_best_at_a_second_ignores_slower_batches() -> None:
    summary = summary_of([size(1, 10, 200), size(2, 30, 1_000), size(3, 90, 1_001)])
    assert (summary["events_per_s_best"], summary["events_per_s_best_1s"]) == (90, 30)
    assert summary_of([size(3, 90, 1_001)])["events_per_s_best_1s"] is None


def test_the_extra_size_lies_where_a_batch_takes_just_under_a_second() -> None:
    assert size_for_one_second([size(4_000_000, 1, 1_430), size(2_000_000, 1, 430)]) == 3_000_000
    assert size_for_one_second([size(1_000_000, 1, 400), size(2_000_000, 1, 900)]) is None
    assert size_for_one_second([size(1_000_000, 1, 1_400)]) is None


@pytest.mark.spark
@pytest.mark.deep
def test_it_counts_every_event_once_in_the_right_window(tmp_path: Path) -> None:
    keys, rows, batches = 7, 1_000, 12  # windows of 5 batches
    spark = session(1)
    try:
        query = (
            windowed_count(spark, keys=keys, batch_rows=rows, cores=1, batch_ms=1_000)
            .writeStream.format("memory")
            .queryName("counted")
            .outputMode("append")
            .option("checkpointLocation", str(tmp_path))
            .start()
        )
        while (query.lastProgress or {"batchId": -1})["batchId"] < batches:
            query.awaitTermination(0.2)  # raises what ended the query
        query.stop()
        counted = spark.sql("SELECT unix_millis(window.start) AS start, key, events, total FROM counted").collect()
    finally:
        spark.stop()
    per_window = 5 * rows
    assert counted
    for number, start in enumerate(sorted({row.start for row in counted})):
        values = range(number * per_window, (number + 1) * per_window)
        expected, totals = Counter[int](), Counter[int]()
        for value in values:
            key = value * 2_654_435_761 % keys
            expected[key] += 1
            totals[key] += value % 1_000
        found = {row.key: (row.events, row.total) for row in counted if row.start == start}
        assert found == {key: (expected[key], totals[key]) for key in expected}
