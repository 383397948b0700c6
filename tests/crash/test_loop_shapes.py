"""Shapes of loops that exist only for real, on Spark: what they do when they are killed, stopped, moved (A7)."""

# Rules: F20, F21, F23

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import few

from crash.loop_kills import TIMES, kill_and_finish
from crash.loop_results import (
    assert_amplified,
    assert_drained,
    assert_flip16,
    assert_graphs,
    assert_reachability,
    assert_trips,
    copies,
    dijkstra,
    edges_of,
    given,
    skip_without_graphs,
)
from crash.pacing import hurry
from crash.processes import Life, kill

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.timeout(1_800)]

Spec = Callable[..., dict[str, Any]]
Run = Callable[[dict[str, Any]], Life]
Told = Callable[[Life], None]

ROWS = 400 * (TIMES + 2)
RATE = 300
CREDIT_OF_ONE_BATCH = {"credit_bytes": 1_024, "loop_memory_bytes": 64 << 10}


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


def test_the_given_distances_are_those_of_dijkstra() -> None:
    skip_without_graphs()
    for graph, source in (("example-undirected", 2), ("example-directed", 1)):
        edges = edges_of(graph)
        both = edges if graph == "example-directed" else edges + [(b, a, weight) for a, b, weight in edges]
        found, result = dijkstra(both, source), given(graph, "SSSP")
        assert {v: found.get(v, float("inf")) for v in result} == pytest.approx(result, rel=1e-4)
