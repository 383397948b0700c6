"""The comparison of the windowed count: order of runs, ratios, targets."""

from __future__ import annotations

from typing import Any

import pytest
from bench.harness import Options
from bench.peers.measure import NotInstalled
from bench.windowed_count import compare, measure_headgate_runs

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
