"""A loop whose workers and driver die at named points, or are stopped; nothing is lost or doubled (loops.md A7)."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crash.cluster import Cluster
from crash.loop_kills import TIMES
from crash.loop_results import assert_flip16, assert_trips
from crash.pacing import hurry
from crash.pipelines import STOPPED_MS
from crash.processes import STARTED_S, STEP_S, Life, kill, until
from crash.standing import SPARK_IN_DEEP

pytestmark = [pytest.mark.crash, pytest.mark.timeout(1_800)]

Spec = Callable[..., dict[str, Any]]
Run = Callable[[dict[str, Any]], Life]
Launch = Callable[..., Life]
Told = Callable[[Life], None]

WORKER_POINTS = {
    "before-snapshot": 7,
    "log-opened": 3,
    "log-sealed": 5,
    "after-prepare": 9,
    "in-put": 5,
    "after-snapshot-before-ack": 11,
    "in-restore": 2,
}

REPLAY_POINTS = [("log-sealed", 3), ("in-replay", 1), ("in-replay", 1), ("in-replay", 2)]

DRIVER_POINTS = [("after-manifest", 3), ("before-manifest", 3), ("before-ack", 9), ("in-recover", 1), ("in-publish", 3)]

DRIVER_KILLS = TIMES if TIMES > 3 else 1
"""Each costs the start of a driver."""


class Faults:
    """What HEADGATE_KILL_AT says, and which of it has happened."""

    def __init__(self, root: Path, points: list[tuple[str, int]]) -> None:
        markers = [root / f"killed-{number}-{point}" for number, (point, _) in enumerate(points)]
        self.text = ";".join(f"{p}:{count}:{marker}" for (p, count), marker in zip(points, markers, strict=True))
        self._markers = markers

    def missing(self) -> list[str]:
        return [marker.name for marker in self._markers if not marker.exists()]

    def wait(self, life: Life) -> None:
        """Wait until all have happened."""
        until(lambda: not self.missing() or life.seen("result") or life.seen("failed"), "all kills", STARTED_S)
        assert self.missing() == [], life.child.tale("points that were not reached")


@pytest.mark.spark
@pytest.mark.parametrize("number", range(-(-TIMES // len(WORKER_POINTS))))
def test_workers_of_a_loop_killed_at_each_named_point(
    spec: Spec, run: Run, tmp_path: Path, told: Told, number: int
) -> None:
    faults = Faults(tmp_path, [(point, count + number) for point, count in WORKER_POINTS.items()])
    what = spec("flip16", rows=12_000, rate=1_000, repartitioned=True, kill_at=faults.text, inline_bytes_max=0)
    life = run(what)
    faults.wait(life)
    hurry(tmp_path)
    result = life.result()
    told(life)
    assert result["restarts"] >= len(WORKER_POINTS) - 1  # two workers may fall in one generation
    assert_flip16(tmp_path, 12_000)


@pytest.mark.spark
@pytest.mark.parametrize("number", range(-(-TIMES // len(REPLAY_POINTS))))
def test_a_replay_that_fails_again_and_again_replays_the_same(
    spec: Spec, run: Run, tmp_path: Path, told: Told, number: int
) -> None:  # F22
    """The log of the last checkpoint holds all records; each time the replay is killed in another place."""
    faults = Faults(tmp_path, [(point, count + (number if "log" in point else 0)) for point, count in REPLAY_POINTS])
    what = spec("trips", rows=2_000, rate=1_000)
    life = run({**what, "kill_at": faults.text})
    faults.wait(life)
    hurry(tmp_path)
    result = life.result()
    told(life)
    assert result["restarts"] >= len(REPLAY_POINTS) - 1
    assert_trips(tmp_path, 2_000)


@pytest.mark.spark
@pytest.mark.parametrize("number", range(-(-TIMES // 10)))
def test_a_worker_that_dies_between_the_end_of_the_loop_and_the_final_checkpoint(
    spec: Spec, run: Run, tmp_path: Path, told: Told, number: int
) -> None:  # L29, F23
    what = spec("trips", rows=2_000, rate=1_000)
    life = run(what)
    life.running()
    life.checkpoint(2 + number)
    life.child.send({"stop": what["name"]})
    assert not life.result()["is_finished"]
    points = [("before-snapshot", 1), ("before-snapshot", 1), ("after-prepare", 1), ("after-snapshot-before-ack", 1)]
    faults = Faults(tmp_path, points)
    hurry(tmp_path)
    life = run({**what, "kill_at": faults.text, "interval": "1h"})
    result = life.result()
    told(life)
    assert faults.missing() == []
    assert len(life.seen("checkpoint")) == 1, "the final checkpoint is the only one, so all died behind the loop's end"
    assert result["is_finished"]
    assert_trips(tmp_path, 2_000)


@pytest.mark.parametrize("with_spark", SPARK_IN_DEEP)
def test_the_driver_of_a_loop_killed_again_and_again_continues_by_the_same_command(
    spec: Spec, launch: Launch, tmp_path: Path, dice: random.Random, with_spark: bool
) -> None:
    """At a named point and at random, in turn."""
    rows = 1_500 * (DRIVER_KILLS + 1)
    what = spec("flip16", rows=rows, rate=1_000, repartitioned=True, inline_bytes_max=0)
    for number in range(DRIVER_KILLS):
        if number % 2 == 0:
            points = [DRIVER_POINTS[number // 2 % len(DRIVER_POINTS)]]
            (tmp_path / f"driver-{number}").mkdir()
            life = launch(
                what, with_spark=with_spark, HEADGATE_KILL_AT=Faults(tmp_path / f"driver-{number}", points).text
            )
            assert life.child.exit_code(2 * STEP_S) == -9, life.child.tale("not killed")
        else:
            life = launch(what, with_spark=with_spark)
            life.running()
            threading.Event().wait(dice.uniform(0.0, 1.0))  # the fault's time: not a wait for anything
            life.child.kill()
        life.child.assert_gone()
    hurry(tmp_path)
    life = launch(what, with_spark=with_spark)
    assert life.result(2 * STEP_S)["is_finished"]
    assert life.child.exit_code() == 0
    life.child.assert_gone()
    assert_flip16(tmp_path, rows)


@pytest.mark.spark
def test_stopped_workers_of_a_loop_are_replaced_and_change_nothing_when_they_wake(
    spec: Spec, run: Run, tmp_path: Path, told: Told, dice: random.Random
) -> None:  # F4
    kills = max(1, TIMES // 3)
    rows = 3_000 * (kills + 1)
    what = spec("flip16", rows=rows, rate=700, repartitioned=True, heartbeat_timeout_ms=STOPPED_MS)
    life = run(what)
    generation = 0
    for _ in range(kills):
        running = life.running(after=generation)
        generation = running["generation"]
        life.checkpoint()
        zombie = dice.choice(list(running["workers"].values()))
        os.kill(zombie, signal.SIGSTOP)
        assert "silent" in life.restart()["reason"]
        kill(zombie, signal.SIGCONT)
    life.running(after=generation)
    hurry(tmp_path)
    assert life.result()["is_finished"]
    told(life)
    assert_flip16(tmp_path, rows)


@pytest.mark.spark
@pytest.mark.deep
@pytest.mark.xdist_group("cluster")
def test_a_loop_on_a_cluster_loses_workers_an_executor_and_its_driver(
    cluster: Cluster, spec: Spec, launch: Launch, tmp_path: Path, told: Told
) -> None:
    what = spec("flip16", rows=8_000, rate=700, repartitioned=True, master=cluster.url)
    life = launch(what)
    running = life.running()
    life.checkpoint()
    kill(running["workers"]["0"])
    life.restart()
    running = life.running(after=running["generation"])
    life.checkpoint()
    kill(cluster.executors()[0].pid)
    life.restart()
    running = life.running(after=running["generation"])
    life.checkpoint()
    kill(cluster.executors()[0].pid)  # executor and driver at once
    life.child.kill()
    told(life)
    life.child.assert_gone()
    cluster.assert_idle()
    hurry(tmp_path)
    life = launch(what)
    life.note("continues from checkpoint")
    assert life.result()["is_finished"]
    assert life.child.exit_code() == 0
    life.child.assert_gone()
    assert_flip16(tmp_path, 8_000)
