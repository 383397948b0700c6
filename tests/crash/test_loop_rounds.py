"""Flink ML's scenario on Spark: the sum of every round is 1,998,000, once, whatever fails (loops.md A2)."""

# Rules: F16

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import few

from crash.loop_kills import TIMES, kill_workers
from crash.loop_results import assert_rounds
from crash.pacing import hurry
from crash.processes import Life, kill, until

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.timeout(1_800)]

Spec = Callable[..., dict[str, Any]]
Run = Callable[[dict[str, Any]], Life]
Told = Callable[[Life], None]


@pytest.mark.parametrize("each_record", few([True, False], 1), ids=["every-record-goes-round", "the-sum-goes-round"])
def test_every_round_sums_up_once_whatever_is_killed(
    spec: Spec, run: Run, tmp_path: Path, dice: random.Random, told: Told, each_record: bool
) -> None:
    """Half of the kills while there is input, half while rounds end; runs are added until all have happened."""
    killed, number = 0, 0
    while killed < TIMES:
        number += 1
        root = tmp_path / f"run-{number}"
        root.mkdir()
        rate = 4_000 / (TIMES + 1)  # the input lasts longer than the kills
        what = spec("rounds", root=str(root), rate=rate, each_record=each_record, on_round_s=0.5)
        life = run(what)
        begun = min(TIMES - killed, (TIMES + 1) // 2)
        generation = kill_workers(life, dice, begun)
        running = life.running(after=generation)
        hurry(root)
        killed += begun + kill_in_rounds(life, dice, running, TIMES - killed - begun)
        result = life.result()
        assert result["is_finished"]
        assert_rounds(root)
        told(life)
    print(f"{killed} kills in {number} runs")


def kill_in_rounds(life: Life, dice: random.Random, running: dict[str, Any], times: int) -> int:
    """Kill workers ``times`` times, or as often as there is time until the end; return how often."""
    for number in range(times):
        threading.Event().wait(dice.uniform(0.1, 1.5))  # the fault's time: not a wait for anything
        restarts = len(life.seen("restart"))
        if life.seen("result"):
            return number
        kill(dice.choice(list(running["workers"].values())))
        until(lambda before=restarts: life.seen("result") or len(life.seen("restart")) > before, "the restart")
        if len(life.seen("restart")) == restarts:
            return number
        running = life.running(after=running["generation"])
    return times


def test_every_round_sums_up_once_when_a_function_raises_at_several_points(
    spec: Spec, run: Run, tmp_path: Path
) -> None:
    points = [1_000, 4_000, 8_000]  # in one life each: every failure begins the count again
    what = spec("rounds", rate=1_000, interval="100ms", each_record=True, raises_at=points)
    hurry(tmp_path)
    life = run(what)
    result = life.result()
    assert [p for p in points if not (tmp_path / f"raised-{p}").exists()] == []
    assert result["restarts"] == len(points)
    assert_rounds(tmp_path)
