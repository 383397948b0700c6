"""SIGKILL of the driver and of its JVM, at named points and at random; the same command continues (F3)."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crash.processes import STEP_S, Life, kill
from crash.results import assert_clean, assert_standard
from crash.standing import SPARK_IN_DEEP

pytestmark = [pytest.mark.crash, pytest.mark.timeout(1_800)]

Spec = Callable[..., dict[str, Any]]
Launch = Callable[..., Life]
ROWS = 24_000
MANY = 80_000
"""The points of a commit come only where there is something to commit: more than is read before the last of them."""

DRIVER_POINTS = {
    "in-put-if-absent": 1,
    "after-life": 1,
    "after-claim": 1,
    "before-ack": 3,
    "before-manifest": 1,
    "after-manifest": 2,
    "in-recover": 2,
    "in-commit": 3,
    "in-publish": 3,
    "after-commit": 2,
}
"""In the order in which a start passes them first; one kills each start, so that each start continues another one."""


@pytest.mark.parametrize("with_spark", SPARK_IN_DEEP)
@pytest.mark.early
def test_a_driver_killed_at_each_named_point_continues_by_the_same_command(
    spec: Spec, launch: Launch, tmp_path: Path, with_spark: bool
) -> None:
    what = spec("standard", rows=MANY, inline_bytes_max=0, gate=None)
    markers = {point: tmp_path / f"killed-{point}" for point in DRIVER_POINTS}
    points = ";".join(f"{point}:{count}:{markers[point]}" for point, count in DRIVER_POINTS.items())
    for _ in range(len(DRIVER_POINTS)):
        life = launch(what, with_spark=with_spark, HEADGATE_KILL_AT=points)
        code = life.child.exit_code(2 * STEP_S)
        life.child.assert_gone()
        if code == 0:
            break
        assert code == -9, life.child.tale(f"exit code {code}")
    else:
        life = launch(what, with_spark=with_spark)
        life.result(2 * STEP_S)
        assert life.child.exit_code() == 0
    assert [point for point, marker in markers.items() if not marker.exists()] == []
    assert_standard(tmp_path, MANY)
    assert_clean(tmp_path)


@pytest.mark.deep  # kill-drivers has it for minutes; named points are above
@pytest.mark.spark
def test_a_driver_killed_at_random_continues_and_ends_only_once(
    spec: Spec, launch: Launch, tmp_path: Path, dice: random.Random
) -> None:
    what = spec("standard", rows=ROWS, rate=2_000)
    life = launch(what)
    life.running()
    life.checkpoint()
    threading.Event().wait(dice.uniform(0.0, 1.0))  # the fault's time: not a wait for anything
    life.child.kill()
    life.child.assert_gone()  # workers leave when their driver is gone, the JVM when its input closes

    life = launch(what)
    life.note("continues from checkpoint")
    life.running()
    threading.Event().wait(dice.uniform(0.0, 0.5))  # the fault's time: not a wait for anything
    kill(life.child.jvm())  # the JVM alone: workers lose Spark, the driver loses its session
    code = life.child.exit_code()
    assert code == 1, life.child.tale(f"exit code {code}")
    assert "Error: Spark's JVM has ended" in life.child.stderr()
    assert "Traceback" not in life.child.stderr(), life.child.stderr()
    life.child.assert_gone()

    life = launch(what)
    result = life.result()
    assert result["is_finished"]
    assert life.child.exit_code() == 0
    life.child.assert_gone()
    assert_standard(tmp_path, ROWS)
    assert_clean(tmp_path)

    life = launch(what)
    life.note("has already processed all its input")
    assert life.result()["is_finished"]
    assert life.child.exit_code() == 0
    assert_standard(tmp_path, ROWS)
