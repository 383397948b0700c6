"""SIGKILL of workers on local Spark: at random, all at once, and at named points (F1, F2)."""

# Rules: F4, F22

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import psutil
import pytest
from tests.conftest import few

from crash.cluster import Cluster
from crash.pipelines import STOPPED_MS, generated
from crash.processes import STARTED_S, Life, kill, until
from crash.processor_pipeline import FIRST, expected_steps
from crash.results import assert_clean, assert_equal, assert_standard
from headgate.connectors.files.file_committer import read_committed

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.timeout(1_800)]

Spec = Callable[..., dict[str, Any]]
Run = Callable[[dict[str, Any]], Life]
Told = Callable[[Life], None]


def test_workers_killed_at_random_lose_and_double_nothing(
    spec: Spec, run: Run, tmp_path: Path, dice: random.Random, told: Told
) -> None:
    life = run(spec("standard", rows=40_000))
    generation = 0
    for round_ in range(4):
        running = life.running(after=generation)
        generation = running["generation"]
        if round_ % 2:
            life.checkpoint()
        threading.Event().wait(dice.uniform(0.0, 1.0))  # the fault's time, not a wait for anything
        victims = list(running["workers"].values())
        dice.shuffle(victims)
        for pid in victims[: 2 if round_ == 2 else 1]:
            kill(pid)
        life.restart()
    result = life.result()
    told(life)
    assert result["restarts"] == 4
    assert_standard(tmp_path, 40_000)
    assert_clean(tmp_path)


WORKER_POINTS = {
    "before-snapshot": 7,
    "in-put": 5,
    "after-prepare": 9,
    "after-snapshot-before-ack": 11,
    "in-restore": 3,
}


def test_workers_killed_at_each_named_point(spec: Spec, run: Run, tmp_path: Path, told: Told) -> None:
    markers = {point: tmp_path / f"killed-{point}" for point in WORKER_POINTS}
    points = ";".join(f"{point}:{count}:{markers[point]}" for point, count in WORKER_POINTS.items())
    life = run(spec("standard", rows=40_000, rate=4_000, kill_at=points, inline_bytes_max=0))
    until(lambda: all(marker.exists() for marker in markers.values()), "a kill at each point", STARTED_S)
    result = life.result()
    told(life)
    assert [point for point, marker in markers.items() if not marker.exists()] == []
    assert result["restarts"] >= len(WORKER_POINTS) - 1  # two workers may fall in one generation
    assert_standard(tmp_path, 40_000)
    assert_clean(tmp_path)


def test_a_worker_lost_before_the_first_checkpoint_starts_from_the_beginning(
    spec: Spec, run: Run, tmp_path: Path
) -> None:
    life = run(spec("standard", interval="1h"))
    kill(next(iter(life.running()["workers"].values())))
    life.restart()
    life.result()
    assert_standard(tmp_path, 20_000)
    assert_clean(tmp_path)


def test_a_worker_that_wakes_beside_its_replacement_changes_nothing(
    spec: Spec, launch: Callable[..., Life], tmp_path: Path, told: Told
) -> None:
    """Spark kills a lingering worker after two seconds; here it may linger, and there are slots for all (I8)."""
    linger = "--conf spark.python.task.killTimeout=10m pyspark-shell"
    what = spec("standard", rows=60_000, heartbeat_timeout_ms=STOPPED_MS, master="local[4]")
    life = launch(what, PYSPARK_SUBMIT_ARGS=linger)
    running = life.running()
    life.checkpoint(2)
    zombie = psutil.Process(running["workers"]["0"])
    zombie.suspend()
    assert "silent" in life.restart()["reason"]
    following = life.running(after=running["generation"])
    assert zombie.pid not in following["workers"].values()
    life.checkpoint()
    assert zombie.status() == psutil.STATUS_STOPPED
    zombie.resume()
    until(lambda: not zombie.is_running() or zombie.status() == psutil.STATUS_ZOMBIE, "the zombie's end")
    life.checkpoint()
    result = life.result()
    told(life)
    assert result["restarts"] == 1
    assert life.child.exit_code() == 0
    life.child.assert_gone()
    assert_standard(tmp_path, 60_000)
    assert_clean(tmp_path)


STARTING_S = 1.5
"""About so long after its first Python process a start is over."""


@pytest.mark.xdist_group("cluster")
def test_executors_that_die_during_the_first_start_are_replaced(  # G9
    cluster: Cluster,
    spec: Callable[..., dict[str, Any]],
    launch: Callable[..., Life],
    tmp_path: Path,
    dice: random.Random,
    told: Callable[[Life], None],
) -> None:
    life = launch(spec("standard", rows=20_000, master=cluster.url))
    before: set[int] = set()
    for moment in (0, dice.random(), 0):
        found = until(lambda before=before: cluster.pythons(before), "a Python process of the next start")
        time.sleep(moment * STARTING_S)  # the moment of the kill: not a wait for anything
        before |= cluster.pythons().keys()
        for executor in found.values():
            kill(executor)
    told(life)
    assert life.result()["is_finished"]
    assert life.seen("restart")
    assert life.child.exit_code() == 0
    life.child.assert_gone()
    cluster.assert_idle()
    assert_standard(tmp_path, 20_000)
    assert_clean(tmp_path)


ROWS = 60_000


@pytest.mark.parametrize("state", few(["rocksdb", "memory"], 1))
def test_a_killed_worker_and_another_parallelism_change_no_result(
    state: str, spec: Callable[..., dict[str, Any]], run: Callable[[dict[str, Any]], Life], tmp_path: Path
) -> None:
    what = spec("processors", rows=ROWS, state=state, rate=6_000)
    life = run(what)
    running = life.running()
    life.checkpoint()
    kill(running["workers"]["0"])
    life.restart()
    life.running(after=running["generation"])
    life.checkpoint()
    life.child.send({"stop": what["name"]})
    assert not life.result()["is_finished"]
    last = run({**what, "parallelism": 1})
    last.note("continues from checkpoint")
    assert last.result()["is_finished"]
    found = read_committed(str(tmp_path / "numbered"))
    records = found.filter(pl.col("what") == "record").sort("key", "n")
    assert_equal(records.select("id", "key"), generated(ROWS).select("id", "key"), "records")
    counts = pl.int_range(FIRST + 1, FIRST + pl.len() + 1, dtype=pl.Int64).over("key")
    assert_equal(records.select("key", "n"), records.select("key", n=counts), "numbers")
    steps = found.filter(pl.col("what") == "step").select("key", "id")
    assert_equal(steps, expected_steps(ROWS), "steps")
    assert_clean(tmp_path)
