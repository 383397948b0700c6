"""Drivers that are killed, at named points and at random, and two at once: the same command continues (F3, F6, F15)."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import few
from tests.support.sqlite_sinks import connect

from crash.support.processes import STARTED_S, STEP_S, Life, kill
from crash.support.results import assert_clean, assert_nothing_twice, assert_standard
from crash.support.standing import SPARK_IN_DEEP

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


@pytest.mark.parametrize("with_spark", SPARK_IN_DEEP)
def test_a_second_driver_names_the_first_one_and_stops(
    spec: Spec, launch: Launch, tmp_path: Path, with_spark: bool
) -> None:
    rows = 2_000_000
    what = spec("standard", rows=rows)  # longer than the second one takes to start; it is stopped then
    first = launch(what, with_spark=with_spark)
    first.running()
    second = launch(what, with_spark=with_spark)
    error = second.failed()["error"]
    assert error.startswith(f"pipeline '{what['name']}' is already run by process {first.child.pid} on ")
    assert second.child.exit_code() == 2
    second.child.assert_gone()
    first.checkpoint()
    first.child.signal(signal.SIGTERM)
    assert not first.result()["is_finished"]
    assert first.child.exit_code() == 0
    assert_nothing_twice(tmp_path, rows)
    assert_clean(tmp_path)


@pytest.mark.parametrize("with_spark", SPARK_IN_DEEP)
@pytest.mark.parametrize("completed", few([6, 1], 1))
def test_a_driver_that_wakes_after_its_replacement_says_so_and_changes_nothing(
    spec: Spec, launch: Launch, tmp_path: Path, completed: int, with_spark: bool
) -> None:  # R40
    """On an object store there is no lock of the machine: only the log and the sinks' fences tell who runs.

    After six checkpoints the heir has pruned its own claim and everything that the sleeper knows.
    """
    where = f"obstore+file://{tmp_path}/checkpoints"
    what = spec("standard", rows=60_000, checkpoints=where, only_files=True)
    zombie = launch(what, with_spark=with_spark)
    zombie.running()
    zombie.checkpoint(2)
    os.kill(zombie.child.pid, signal.SIGSTOP)
    try:
        heir = launch(what, with_spark=with_spark)
        heir.note("continues from checkpoint")
        heir.running()
        heir.checkpoint(completed)
    finally:
        kill(zombie.child.pid, signal.SIGCONT)
    error = zombie.failed()
    assert error["kind"] == "FencedError"
    ways = ("generation 1 was replaced by generation 2", "generation 2 of this pipeline was started elsewhere")
    assert any(way in error["error"] for way in ways), error
    assert zombie.child.exit_code() == 4
    zombie.child.assert_gone()
    assert heir.result()["restarts"] == 0  # the one that wakes takes nothing back
    assert heir.child.exit_code() == 0
    assert_standard(tmp_path, 60_000)
    assert_clean(tmp_path)


OWN_SINK_ROWS = 16_000
START_S = 3 * STARTED_S
"""Five JVMs start in a row, beside whatever else runs."""

POINTS = {"before-manifest": 2, "after-manifest": 3, "in-recover": 2, "in-commit": 3, "after-commit": 2}
"""In the order in which a start passes them first; one kills each start."""


def assert_exactly_once(root: Path) -> None:
    """Both sinks together have each number once, and nothing waits for anybody."""
    with connect(str(root / "numbers.db")) as target:
        found = target.execute("select number, text from numbers order by number").fetchall()
        waiting = target.execute("select count(*) from waiting").fetchone()
    assert len(found) == OWN_SINK_ROWS, f"{len(found)} of {OWN_SINK_ROWS} records"
    assert found == [(n, str(n)) for n in range(OWN_SINK_ROWS)]
    assert waiting == (0,)
    assert_clean(root)


@pytest.mark.deep  # as the kit for sinks kills them, and the tests above drivers
@pytest.mark.parametrize("with_spark", SPARK_IN_DEEP)
@pytest.mark.early
def test_own_sinks_have_every_record_once_wherever_in_a_commit_the_driver_is_killed(
    spec: Spec, launch: Launch, tmp_path: Path, with_spark: bool
) -> None:
    what = spec("own_sinks", rows=OWN_SINK_ROWS, rate=4_000, gate=None)
    markers = {point: tmp_path / f"killed-{point}" for point in POINTS}
    points = ";".join(f"{point}:{count}:{markers[point]}" for point, count in POINTS.items())
    for _ in POINTS:
        life = launch(what, with_spark=with_spark, HEADGATE_KILL_AT=points)
        assert life.child.exit_code(START_S) == -9, life.child.tale("it was not killed")
        life.child.assert_gone()
    life = launch(what, with_spark=with_spark)
    assert life.result(START_S)["is_finished"]
    assert life.child.exit_code() == 0
    assert [point for point, marker in markers.items() if not marker.exists()] == []
    assert_exactly_once(tmp_path)
