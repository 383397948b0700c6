"""Loops on Spark whose workers and driver die, are stopped or moved: nothing is lost or doubled (A1, A2, A7)."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.conftest import few

from crash.support.cluster import Cluster
from crash.support.loop_results import (
    TIMES,
    assert_amplified,
    assert_drained,
    assert_flip16,
    assert_graphs,
    assert_reachability,
    assert_rounds,
    assert_trips,
    copies,
    dijkstra,
    edges_of,
    given,
    kill_and_finish,
    kill_workers,
    skip_without_graphs,
)
from crash.support.pacing import hurry
from crash.support.pipelines import STOPPED_MS
from crash.support.processes import STARTED_S, STEP_S, Life, kill, until
from crash.support.standing import SPARK_IN_DEEP
from headgate.codec.loop_log import decode_log
from headgate.model.manifest import Manifest
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.storage.base import NotFound
from headgate.storage.urls import open_storage

pytestmark = [pytest.mark.crash, pytest.mark.timeout(1800)]


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


FLIP16_ROWS = 1_000 * (TIMES + 2)
FLIP16_RATE = 700


@pytest.mark.spark
@pytest.mark.early
@pytest.mark.xdist_group("wide")
def test_two_n_minus_n_is_n_with_four_heads(
    spec: Spec,
    run_wide: Callable[[dict[str, Any]], Life],
    tmp_path: Path,
    dice: random.Random,
    told: Callable[[Life], None],
) -> None:
    what = spec("flip16", rows=FLIP16_ROWS, rate=FLIP16_RATE, parallelism=4, repartitioned=True)
    life = run_wide(what)
    kill_and_finish(life, dice, what)
    told(life)
    assert_flip16(tmp_path, FLIP16_ROWS)


# Rules: F16


@pytest.mark.spark
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


@pytest.mark.spark
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


# Rules: F20, F21, F23


ROWS = 400 * (TIMES + 2)
RATE = 300
CREDIT_OF_ONE_BATCH = {"credit_bytes": 1_024, "loop_memory_bytes": 64 << 10}


@pytest.mark.spark
@pytest.mark.parametrize("shape", few(["side_by_side", "nested", "outside"], 1))
def test_a_shape_loses_and_doubles_nothing_whatever_is_killed(
    spec: Spec, run: Run, tmp_path: Path, dice: random.Random, told: Told, shape: str
) -> None:
    runtime = CREDIT_OF_ONE_BATCH if shape == "outside" else {}
    what = spec(shape, rows=ROWS, rate=RATE, runtime=runtime)
    life = run(what)
    kill_and_finish(life, dice, what)
    told(life)
    for name in ("beside", "behind") if shape == "side_by_side" else ("out",):
        assert_trips(tmp_path, ROWS, name, is_nested=shape == "nested", has_short=shape == "outside")


@pytest.mark.spark
@pytest.mark.deep  # tests/runtime/runs makes ten of one, in a long queue
def test_a_loop_that_makes_a_thousand_of_one_with_credits_of_one_batch(
    spec: Spec, run: Run, tmp_path: Path, dice: random.Random, told: Told
) -> None:
    rows = 30 * (TIMES + 2)
    what = spec("amplifying", rows=rows, rate=30, runtime=CREDIT_OF_ONE_BATCH)
    life = run(what)
    kill_and_finish(life, dice, what)
    told(life)
    assert_amplified(tmp_path, rows)


PARALLELISMS = [1, 2, 1, 3, 1, 5, 2, 3, 2, 5, 3, 5, 1] if TIMES > 3 else [2, 5, 3, 1]
"""The long form moves from each of 1, 2, 3 and 5 to each other one."""


@pytest.mark.spark
@pytest.mark.deep
@pytest.mark.early
@pytest.mark.xdist_group("wide")
@pytest.mark.parametrize("pipeline", ["nested", "flip16", "trips"])
def test_a_loop_stopped_with_records_under_way_goes_on_at_another_parallelism(
    spec: Spec, run_wide: Run, tmp_path: Path, dice: random.Random, pipeline: str
) -> None:
    rows = 700 * len(PARALLELISMS)
    what = spec(pipeline, rows=rows, rate=500)
    for parallelism in PARALLELISMS[:-1]:
        life = run_wide({**what, "parallelism": parallelism})
        running = life.running(workers=parallelism)
        if dice.random() < 0.5:
            kill(dice.choice(list(running["workers"].values())))
            life.restart()
            life.running(after=running["generation"], workers=parallelism)
        life.checkpoint()
        life.child.send({"stop": what["name"]})
        assert not life.result()["is_finished"]
    hurry(tmp_path)
    last = run_wide({**what, "parallelism": PARALLELISMS[-1]})
    last.note("continues from checkpoint")
    assert last.result()["is_finished"]
    if pipeline == "flip16":
        assert_flip16(tmp_path, rows)
    else:
        assert_trips(tmp_path, rows, is_nested=pipeline == "nested")


@pytest.mark.spark
@pytest.mark.deep
@pytest.mark.parametrize("number", range(-(-TIMES // 10)))
def test_a_drained_loop_brings_everything_out_that_was_read(
    spec: Spec, run: Run, tmp_path: Path, dice: random.Random, told: Told, number: int
) -> None:  # E7
    """Killed in mid-drain: every trip takes a while, so what was read last is still on its way."""
    what = spec("trips", rows=40_000, rate=2_000, lag_s=0.1)
    life = run(what)
    running = life.running()
    life.checkpoint(2)
    life.child.send({"drain": life.name})
    life.wait("draining", lambda e: e["event"] == "progress" and e["state"] == "draining")
    kill(dice.choice(list(running["workers"].values())))
    life.restart()
    result = life.result()
    told(life)
    assert (result["is_finished"], result["is_drained"]) == (True, True)
    assert 0 < result["records_in"] < 40_000
    assert_drained(tmp_path, 4)


@pytest.mark.spark
@pytest.mark.deep
@pytest.mark.parametrize("deletes", [True, False], ids=["insertions-and-deletions", "insertions"])
def test_what_is_reached_is_what_a_search_finds_whatever_is_killed(
    spec: Callable[..., dict[str, Any]],
    run: Callable[[dict[str, Any]], Life],
    tmp_path: Path,
    dice: random.Random,
    told: Callable[[Life], None],
    deletes: bool,
) -> None:
    rows = 400 * (TIMES + 2)
    what = spec("reachability", rows=rows, rate=350, deletes=deletes, events_seed=dice.randrange(1 << 30))
    life = run(what)
    kill_and_finish(life, dice, what)
    told(life)
    assert_reachability(tmp_path, what)


COPIES = 20 * (TIMES + 2)
GRAPHS = [("example-undirected", COPIES, 0), ("example-directed", COPIES, COPIES)]


@pytest.mark.spark
@pytest.mark.parametrize("algorithm", few(["paths", "components"], 1))
def test_every_copy_of_the_graphs_has_its_result_whatever_is_killed(
    spec: Callable[..., dict[str, Any]],
    run: Callable[[dict[str, Any]], Life],
    tmp_path: Path,
    dice: random.Random,
    told: Callable[[Life], None],
    algorithm: str,
) -> None:
    skip_without_graphs()
    edges = copies(GRAPHS[0][0], algorithm, *GRAPHS[0][1:]).vstack(copies(GRAPHS[1][0], algorithm, *GRAPHS[1][1:]))
    edges = edges.sample(fraction=1.0, shuffle=True, seed=dice.randrange(1 << 30))
    edges.write_parquet(tmp_path / "graph.parquet")
    rate = edges.height / (TIMES + 2)
    what = spec("graph", algorithm=algorithm, graph=str(tmp_path / "graph.parquet"), rate=rate)
    life = run(what)
    kill_and_finish(life, dice, what)
    told(life)
    assert_graphs(tmp_path, GRAPHS, algorithm)


@pytest.mark.spark
def test_the_given_distances_are_those_of_dijkstra() -> None:
    skip_without_graphs()
    for graph, source in (("example-undirected", 2), ("example-directed", 1)):
        edges = edges_of(graph)
        both = edges if graph == "example-directed" else edges + [(b, a, weight) for a, b, weight in edges]
        found, result = dijkstra(both, source), given(graph, "SSSP")
        assert {v: found.get(v, float("inf")) for v in result} == pytest.approx(result, rel=1e-4)


SNAPSHOT_ROWS = 5_000
TEXT_BYTES = 100
SCHEMA = pa.schema({"id": pa.int64(), "text": pa.large_string()})
INDEX_BYTES_MAX = 8_000
"""Header, schema and the counts of 128 key groups, in the logs of both heads."""


class Contents:
    """The newest checkpoint: bytes of state, bytes and records of the loop's log."""

    def __init__(self, root: Path, name: str) -> None:
        log = CheckpointLog(open_storage(str(root / "checkpoints")), name)
        manifests = [e.content for e in log.observe().entries if isinstance(e.content, Manifest)]
        newest = max(manifests, key=lambda manifest: manifest.checkpoint)
        self.checkpoint = newest.checkpoint
        self.state_bytes = self.log_bytes = self.log_rows = 0
        for entry in newest.entries:
            sections = log.files.sections(entry)
            self.state_bytes += sum(len(part) for part in sections.get("state/remember", ()))
            self.state_bytes += sum(part.size_bytes for part in entry.parts if part.section == "files/remember")
            for part in sections.get("state/loop", ()):
                self.log_bytes += len(part)
                self.log_rows += decode_log(part, SCHEMA, "the newest checkpoint").rows


def newest(root: Path, name: str, after: int = 0) -> Contents:
    """Return the contents of the first checkpoint found above ``after``."""

    def look() -> Contents | None:
        try:
            found = Contents(root, name)
        except (NotFound, ValueError):  # pruned while it was read, or not there yet
            return None
        return found if found.checkpoint > after else None

    found: Contents = until(look, f"a checkpoint above {after}")
    return found


@pytest.mark.spark
@pytest.mark.parametrize("circulating", few([40, 0], 1))
def test_a_checkpoint_holds_the_state_and_only_what_circulates(
    spec: Callable[..., dict[str, Any]], run: Callable[[dict[str, Any]], Life], tmp_path: Path, circulating: int
) -> None:
    what = spec("remember", rows=SNAPSHOT_ROWS, rate=5_000, circulating=circulating, interval="100ms")
    life = run(what)
    running = life.running()
    read = SNAPSHOT_ROWS - 4  # the source holds the last record of each split back

    def is_full() -> bool:
        return newest(tmp_path, what["name"]).state_bytes >= read * TEXT_BYTES

    until(is_full, "everything in state", STEP_S)
    after = 0
    for number in range(10):
        if number == 5:
            kill(running["workers"]["0"])
            life.restart()
        found = newest(tmp_path, what["name"], after)
        after = found.checkpoint
        assert found.log_rows == circulating, (number, found.checkpoint)  # it never rests, so it is in transit
        assert found.log_bytes <= INDEX_BYTES_MAX + circulating * (TEXT_BYTES + 40) * 2
        assert read * TEXT_BYTES <= found.state_bytes <= 2 * read * (TEXT_BYTES + 60), "what was replaced is bounded"
    life.child.send({"stop": what["name"]})
    assert not life.result()["is_finished"]
