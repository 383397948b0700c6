"""The comparison of the windowed count: order of runs, ratios, targets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from bench.back_pressure import BRAKED, Brake, Taken, pipeline, with_pending
from bench.bid_files import FORMATS, write_bids
from bench.harness import Options
from bench.headgate_real_input import in_process
from bench.peers.measure import NotInstalled
from bench.peers.real_input import polars
from bench.real_input import check, results
from bench.windowed_count import compare, measure_headgate_runs

from headgate.model.ids import CheckpointId
from headgate.model.progress import PendingCheckpoint

HEADGATE = {
    "events_per_s": 20e6,
    "events_per_s_no_checkpoints": 20.5e6,
    "latency_ms_p99": 30.0,
    "alignment_ms_median": 2.0,
}
STREAMING = {"events_per_s_best": 7e6, "events_per_s_best_1s": 2e6}
FLINK = {"events_per_s": 0.5e6}


def test_all_targets_of_100000_keys_are_judged() -> None:
    result = compare(100_000, HEADGATE, STREAMING, FLINK)
    assert {name: result.verdict(name) for name in result.targets} == {
        "slowdown_by_checkpoints_100000_keys": "met",
        "latency_ms_p99_100000_keys": "met",
        "alignment_ms_median_100000_keys": "met",
        "ratio_streaming_best_100000_keys": "met",
        "ratio_streaming_best_1s_100000_keys": "met",
        "ratio_flink_100000_keys": "met",
    }
    assert result.figures["ratio_flink_100000_keys"] == pytest.approx(40)


def test_targets_of_1000_keys_are_stricter_and_know_no_second() -> None:
    result = compare(1_000, HEADGATE, STREAMING, FLINK)
    assert result.verdict("ratio_streaming_best_1000_keys") == "missed"
    assert "ratio_streaming_best_1s_1000_keys" not in result.targets
    assert result.figures["ratio_streaming_best_1s_1000_keys"] == pytest.approx(10)


def test_without_flink_its_target_is_skipped_and_the_rest_still_counts() -> None:
    result = compare(100_000, HEADGATE, STREAMING, NotInstalled("Flink SQL is not installed"))
    assert result.targets["ratio_flink_100000_keys"] == {"at_least": 20.0, "skipped": "not installed"}
    assert result.met
    assert not compare(1_000, HEADGATE, STREAMING, NotInstalled("x")).met


def test_slow_checkpoints_late_events_and_long_alignment_are_missed() -> None:
    slow = HEADGATE | {"events_per_s_no_checkpoints": 22e6, "latency_ms_p99": 51.0, "alignment_ms_median": 5.1}
    result = compare(100_000, slow, STREAMING, FLINK)
    missed = {name for name in result.targets if result.verdict(name) == "missed"}
    assert missed == {
        "slowdown_by_checkpoints_100000_keys",
        "latency_ms_p99_100000_keys",
        "alignment_ms_median_100000_keys",
    }


def test_numbers_of_keys_without_goals_are_shown_but_not_compared() -> None:
    result = compare(10, HEADGATE, STREAMING, FLINK)
    assert "ratio_flink_10_keys" in result.figures
    assert not any(name.startswith("ratio") for name in result.targets)


def test_checkpoints_off_and_on_alternate_and_latency_runs_at_half_the_median_rate() -> None:
    calls: list[tuple[int | None, int | None]] = []
    latencies = iter([5.0] * 6 + [75.0, 20.0, 30.0])
    rates = iter([100.0, 90.0, 104.0, 96.0, 110.0, 92.0, 46.0, 45.0, 44.0])

    def measure(keys: int, seconds: float, interval: int | None, rate: int | None = None) -> dict[str, Any]:
        assert (keys, seconds) == (10, 10)
        calls.append((interval, rate))
        return {"events_per_s": next(rates), "alignment_ms_median": 1.0, "latency_ms_p99": next(latencies)}

    figures = measure_headgate_runs(measure, 10, Options(settings={"pairs": "3"}))
    assert calls == [(None, None), (1_000, None)] * 3 + [(1_000, 46)] * 3
    assert (figures["events_per_s"], figures["events_per_s_no_checkpoints"]) == (92.0, 104.0)
    assert (figures["latency_ms_p99"], figures["events_per_s_at_half"]) == (30.0, 45.0)
    assert figures["events_per_s_spread"] == pytest.approx(6 / 92)


BIDS = 2_000


@pytest.mark.long
def test_results_are_compared_row_by_row(tmp_path: Path) -> None:
    write_bids(tmp_path, BIDS)
    found = {}
    for form in FORMATS:
        polars(tmp_path / form, tmp_path / "polars" / form, "user", "streaming")
        in_process(tmp_path / form, tmp_path / "headgate" / form, "user", parallelism=2)
        for system in ("polars", "headgate"):
            found[system, form] = results(tmp_path / system / form, "user")
    expected = found["polars", "json"]
    assert expected["bids"].sum() == BIDS
    for (system, form), rows in found.items():
        check(f"{form}/{system}", rows, expected, is_last_missing=False)
    last = pl.col("window_start") == expected["window_start"].max()
    check("without the last window", expected.filter(~last), expected, is_last_missing=True)
    wrong = expected.with_columns(total=pl.when(pl.int_range(pl.len()) == 0).then(0).otherwise("total"))
    for rows in (wrong, expected[1:], expected.filter(~last)):
        with pytest.raises(RuntimeError, match="json/other has other results"):
            check("json/other", rows, expected, is_last_missing=False)


def test_the_brake_takes_the_time_of_its_rate() -> None:
    slept: list[float] = []
    batch = pa.RecordBatch.from_pydict({"a": [1, 2, 3]})
    assert Brake(30.0, slept.append)(batch) is batch
    assert Brake(None, slept.append)(batch) is batch
    assert Brake(30.0, slept.append)(batch.slice(0, 0)).num_rows == 0
    assert slept == [0.1]


def test_either_kind_of_checkpoint_is_asked_for(tmp_path: Path) -> None:
    for timeout_ms in (None, 0):
        definition = pipeline(str(tmp_path), 1_000.0, 500, timeout_ms).definition()
        assert definition.config.checkpoints.alignment_timeout_ms == timeout_ms
        assert BRAKED in {str(node.name) for vertex in definition.plan.vertices for node in vertex.nodes}


def test_durations_are_noted_in_seconds() -> None:
    taken = Taken()
    taken.on_checkpoint(CheckpointId(1), 1_500, 10)
    assert taken.seconds == [1.5]


def test_a_checkpoint_that_does_not_end_counts_with_its_age() -> None:
    old = PendingCheckpoint(CheckpointId(2), 7_000, ())
    assert with_pending([0.5, 0.7], old) == [0.5, 0.7, 7.0]
    assert with_pending([], old) == [7.0]
    assert with_pending([0.5, 8.0], old) == [0.5, 8.0]
    assert with_pending([0.5], None) == [0.5]


def test_the_brake_is_in_the_thread_of_the_sink(tmp_path: Path) -> None:
    definition = pipeline(str(tmp_path), 1_000.0, 500, None).definition()
    (chain,) = (vertex for vertex in definition.plan.vertices if not vertex.is_source)
    assert [str(node.name) for node in chain.nodes] == [BRAKED, "sink"]
