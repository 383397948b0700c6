"""Connected components and shortest paths on Spark, while the graph comes in and workers are killed (A3, A4).

The graphs and their results are LDBC Graphalytics' small examples. Many copies of both stand side by side, so that
there is something to kill; each copy must have the result that came with it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crash.loop_kills import TIMES, kill_and_finish
from crash.loop_results import assert_graphs, copies, dijkstra, edges_of, given, skip_without_graphs
from crash.processes import Life

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.timeout(1_800)]

COPIES = 20 * (TIMES + 2)
GRAPHS = [("example-undirected", COPIES, 0), ("example-directed", COPIES, COPIES)]


@pytest.mark.parametrize("algorithm", ["components", "paths"])
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
