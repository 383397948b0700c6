"""The cost of checkpoints: what is compared, what is judged, and the pipeline that is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bench.checkpoint_overhead import OVERHEAD_MAX, WINDOW_S, WINDOW_S_QUICK, Compared, judged, pipeline
from bench.on_demand import Window

from headgate.model.config import Guarantee
from headgate.model.graph import Partitioner


def window(rate: float, wanted: int = 0, completed: int = 0) -> Window:
    return Window(rate, rate / 2, wanted, completed, 10.0 if completed else 0.0)


def compared(*costs: float) -> list[Compared]:
    return [Compared(window(1_000.0), window(1_000.0 * (1 - cost), 5, 4)) for cost in costs]


def measured(cost: float) -> dict[int, list[Compared]]:
    return {interval_ms: compared(cost, cost + 0.002, cost - 0.002) for interval_ms in OVERHEAD_MAX}


def test_every_mode_and_interval_has_its_target() -> None:
    result = judged({"exactly_once": measured(0.019), "at_least_once": measured(0.04)})
    verdicts = {name: result.verdict(name) for name in result.targets}
    assert {name: verdict for name, verdict in verdicts.items() if name.startswith("overhead")} == {
        "overhead_exactly_once_10000ms": "met",
        "overhead_exactly_once_3000ms": "met",
        "overhead_exactly_once_1000ms": "met",
        "overhead_exactly_once_250ms": "met",
        "overhead_at_least_once_10000ms": "missed",
        "overhead_at_least_once_3000ms": "missed",
        "overhead_at_least_once_1000ms": "met",
        "overhead_at_least_once_250ms": "met",
    }
    assert result.figures["overhead_exactly_once_1000ms"] == pytest.approx(0.019)
    assert result.figures["overhead_exactly_once_1000ms_quartiles"] == "1.8% to 2.0%"


def test_a_cost_without_the_checkpoints_is_not_believed() -> None:
    result = judged({"exactly_once": measured(0.0)})
    assert result.figures["completed_exactly_once_250ms"] == 0.8
    assert result.verdict("completed_exactly_once_250ms") == "met"
    few = [Compared(window(1_000.0), window(1_000.0, 5, 3))]
    late = judged({"exactly_once": {250: few}})
    assert late.verdict("overhead_exactly_once_250ms") == "met"
    assert late.verdict("completed_exactly_once_250ms") == "missed"
    assert not late.met


def test_what_was_measured_is_in_the_result() -> None:
    figures: Any = judged({"exactly_once": measured(0.0)}).figures
    told = figures["measurements"][0]
    assert (told["mode"], told["interval_ms"], told["at_most"], len(told["pairs"])) == ("exactly_once", 10_000, 0.02, 3)
    assert told["checkpoint_ms_median"] == 10.0


def test_an_interval_that_was_not_measured_is_skipped() -> None:
    result = judged({"exactly_once": {250: compared(0.1)}})
    assert result.verdict("overhead_exactly_once_10000ms") == "skipped"
    assert result.verdict("overhead_exactly_once_250ms") == "met"
    assert result.met


def test_windows_hold_whole_intervals() -> None:
    for windows in (WINDOW_S, WINDOW_S_QUICK):
        assert all(length_s * 1_000 % interval_ms == 0 for interval_ms, length_s in windows.items())
    assert WINDOW_S.keys() == OVERHEAD_MAX.keys()


@pytest.mark.parametrize("mode", ["exactly_once", "at_least_once"])
def test_the_pipeline_has_three_full_shuffles_and_takes_no_checkpoint_by_itself(tmp_path: Path, mode: str) -> None:
    definition = pipeline(str(tmp_path), mode, 100).definition()
    shuffles = [edge.partitioner for edge in definition.plan.edges]
    assert len(shuffles) == 3
    assert Partitioner.FORWARD not in shuffles
    assert definition.config.checkpoints.interval_ms == 0
    assert definition.config.checkpoints.mode is Guarantee(mode)
