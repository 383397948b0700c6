"""Kills of what runs a loop, and what the pipelines of ``loop_pipelines.py`` must have written, computed plainly."""

from __future__ import annotations

import heapq
import os
import random
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from crash.support import loop_pipelines
from crash.support.pacing import hurry
from crash.support.processes import Life, kill
from crash.support.results import assert_clean, assert_equal
from headgate.connectors.files.file_committer import read_committed

GRAPHS = Path(__file__).resolve().parents[4] / "shared" / "data" / "graphs"
"""The graphs of LDBC Graphalytics, beside the repository."""

Distances = dict[int, float]


def committed(root: Path, name: str = "out") -> pl.DataFrame:
    """Return what a sink has committed; nothing else may be left of the run."""
    assert_clean(root)
    return read_committed(str(root / name))


# -- FLIP-16 --------------------------------------------------------------------------------------------------------


def assert_flip16(root: Path, rows: int) -> None:
    """Per key: counter = records of the source = records in the sink; one event lost or doubled shows in ``events``."""
    found = committed(root)
    expected = loop_pipelines.flip16_input(rows)
    assert_equal(found, expected, "records that came out")
    last = found.group_by("key").agg(pl.all().sort_by("events").last(), n=pl.len().cast(pl.Int64))
    sources = expected.group_by("key").agg(sources=pl.len().cast(pl.Int64))
    both = last.join(sources, on="key", how="full", coalesce=True)
    wrong = both.filter(
        (pl.col("counter") != pl.col("sources")) | (pl.col("n") != pl.col("sources")) | pl.col("counter").is_null()
    )
    assert wrong.is_empty(), wrong
    assert both.filter(pl.col("events") != 2 * pl.col("sources")).is_empty(), "an event counted twice or never"
    assert found.select("key", "events").is_unique().all(), "two events with one number: state went back"


# -- sums of rounds -------------------------------------------------------------------------------------------------


def assert_rounds(root: Path) -> None:
    found = committed(root).select("round", "value").sort("round").rows()
    assert found == [(round_, 1_998_000) for round_ in range(loop_pipelines.ROUNDS)]


# -- graphs ---------------------------------------------------------------------------------------------------------


def skip_without_graphs() -> None:
    if not (GRAPHS / "example-directed.e").exists():
        pytest.skip(f"the LDBC example graphs are not at {GRAPHS}")


def edges_of(graph: str) -> list[tuple[int, int, float]]:
    lines = (GRAPHS / f"{graph}.e").read_text().splitlines()
    return [(int(a), int(b), float(weight)) for a, b, weight in (line.split() for line in lines)]


def given(graph: str, result: str) -> dict[int, float]:
    """Return the result that came with the graph: of ``WCC`` or ``SSSP``."""
    lines = (GRAPHS / f"{graph}-{result}").read_text().splitlines()
    return {int(vertex): float(value) for vertex, value in (line.split() for line in lines)}


def copies(graph: str, algorithm: str, count: int, first: int) -> pl.DataFrame:
    """Return what the pipeline reads: ``count`` copies of the graph, side by side, each with vertices of its own."""
    rows: list[dict[str, Any]] = []
    for copy in range(first, first + count):
        offset = copy * 100
        for a, b, weight in edges_of(graph):
            a, b = a + offset, b + offset
            if algorithm == "components":
                rows += [{"vertex": a, "to": b, "label": a}, {"vertex": b, "to": a, "label": b}]
            else:
                rows.append({"vertex": a, "to": b, "distance": weight})
                if graph == "example-undirected":
                    rows.append({"vertex": b, "to": a, "distance": weight})
        if algorithm == "paths":
            source = offset + (1 if graph == "example-directed" else 2)
            rows.append({"vertex": source, "to": None, "distance": 0.0})
    value = {"label": pl.Int64} if algorithm == "components" else {"distance": pl.Float64}
    return pl.DataFrame(rows, schema={"vertex": pl.Int64, "to": pl.Int64, **value})


def assert_graphs(root: Path, graphs: list[tuple[str, int, int]], algorithm: str) -> None:
    """Every copy of every (graph, count, first copy) has the result that came with it; no change was told twice."""
    found = committed(root)
    assert found.is_unique().all(), "a change was told twice"
    column = found.columns[1]
    last = dict(found.group_by("vertex").agg(pl.col(column).min()).iter_rows())
    for graph, count, first in graphs:
        result = given(graph, "WCC" if algorithm == "components" else "SSSP")
        for copy in range(first, first + count):
            mine = {vertex: last.pop(vertex + copy * 100, float("inf")) for vertex in result}
            if algorithm == "components":
                assert {v: label - copy * 100 for v, label in mine.items()} == result, (graph, copy)
            else:
                assert mine == pytest.approx(result, rel=1e-4, abs=0.0), (graph, copy)
    assert last == {}


def dijkstra(edges: list[tuple[int, int, float]], source: int) -> Distances:
    """Return the distance of every vertex that ``source`` reaches."""
    outgoing = defaultdict(list)
    for a, b, weight in edges:
        outgoing[a].append((b, weight))
    found: Distances = {}
    queue = [(0.0, source)]
    while queue:
        distance, vertex = heapq.heappop(queue)
        if vertex not in found:
            found[vertex] = distance
            for to, weight in outgoing[vertex]:
                heapq.heappush(queue, (distance + weight, to))
    return found


# -- reachability ---------------------------------------------------------------------------------------------------


def final_graph(events: list[dict[str, Any]]) -> tuple[set[int], dict[int, dict[int, int]]]:
    """Return the sources and the links (node to link id to node) that are left after ``events``."""
    sources: set[int] = set()
    links: dict[int, dict[int, int]] = defaultdict(dict)
    for event in events:
        match event["what"]:
            case "add-source":
                sources.add(event["node"])
            case "delete-source":
                sources.remove(event["node"])
            case "add-link":
                links[event["node"]][event["link"]] = event["to"]
            case "delete-link":
                del links[event["node"]][event["link"]]
    return sources, links


def reached_from(source: int, links: dict[int, dict[int, int]]) -> set[int]:
    """Breadth first."""
    found, front = {source}, [source]
    while front:
        front = [to for node in front for to in links.get(node, {}).values() if to not in found and not found.add(to)]
    return found


def simple_paths(source: int, links: dict[int, dict[int, int]]) -> set[str]:
    """Return every path without a cycle, in the words of ``loop_pipelines.Reach``."""
    found: set[str] = set()
    stack = [(source, (source,), str(source))]
    while stack:
        node, passed, path = stack.pop()
        found.add(path)
        for link, to in links.get(node, {}).items():
            if to not in passed:
                stack.append((to, (*passed, to), f"{path} {link}>{to}"))
    return found


def assert_reachability(root: Path, spec: dict[str, Any]) -> None:
    """The paths that are left are those of the final graph, each told once more often than it was taken back."""
    events = loop_pipelines.reachability_events(spec["rows"], spec["events_seed"], deletes=spec["deletes"])
    sources, links = final_graph(events)
    changes = committed(root)
    balance = changes.group_by("node", "path").agg(pl.col("change").sum(), n=pl.len())
    assert balance["change"].is_in([0, 1]).all(), balance.filter(~pl.col("change").is_in([0, 1])).head(5)
    left = balance.filter(pl.col("change") == 1)
    pairs = {(int(path.split(" ")[0]), node) for node, path in left.select("node", "path").iter_rows()}
    assert pairs == {(source, node) for source in sources for node in reached_from(source, links)}
    assert set(left["path"]) == {path for source in sources for path in simple_paths(source, links)}
    assert left["path"].is_unique().all()
    if not spec["deletes"]:
        assert balance["n"].max() == 1


# -- shapes ---------------------------------------------------------------------------------------------------------


def assert_trips(root: Path, rows: int, name: str = "out", *, is_nested: bool = False, has_short: bool = False) -> None:
    """Every record came out once, after as many trips as it says."""
    came_in = loop_pipelines.trips_input(rows)
    if has_short:
        came_in = pl.concat([came_in, *(loop_pipelines.short_input(n * loop_pipelines.SHORT) for n in range(2))])
    expected = came_in.select("id", trips=pl.col("left") * (pl.col("left") + 1) // 2 if is_nested else pl.col("left"))
    assert_equal(committed(root, name), expected, name)


def assert_amplified(root: Path, rows: int) -> None:
    """Each record became a thousand."""
    found = committed(root)
    assert found.height == 1_000 * rows
    assert (found["id"].min(), found["id"].max(), found["id"].n_unique()) == (0, 1_000 * rows - 1, 1_000 * rows)


def assert_drained(root: Path, splits: int) -> None:
    """What came out is what was read: of each split the records up to one, all of them, after all their trips."""
    found = committed(root).sort("id")
    for split in range(splits):
        mine = found.filter(pl.col("id") % splits == split)
        assert mine["id"].to_list() == list(range(split, split + splits * mine.height, splits))
    expected = found.select("id").with_columns(trips=loop_pipelines.TRIPS)
    assert_equal(found, expected, "drained")


TIMES = int(os.environ.get("HEADGATE_TEST_TIMES", "2"))
"""Kills of each scenario."""

PAUSE_S = 0.8
"""Up to so long a generation runs undisturbed."""

EVERYBODY = 4
"""Every so many kills hit all workers at once."""


def kill_workers(life: Life, dice: random.Random, times: int, *, workers: int = 2, after: int = 0) -> int:
    """SIGKILL workers ``times`` times; the first time, and then every second one, not before a checkpoint.

    Return the last generation killed.
    """
    generation = after
    for number in range(times):
        running = life.running(after=generation, workers=workers)
        generation = running["generation"]
        if number % 2 == 0:
            life.checkpoint()
        threading.Event().wait(dice.uniform(0.0, PAUSE_S))  # the fault's time, not a wait for anything
        victims = list(running["workers"].values())
        dice.shuffle(victims)
        for pid in victims if number % EVERYBODY == EVERYBODY - 1 else victims[:1]:
            kill(pid)
        life.restart()
    return generation


def kill_and_finish(life: Life, dice: random.Random, spec: dict[str, Any], times: int = TIMES) -> dict[str, Any]:
    """Kill workers ``times`` times while input comes slowly, let it hurry, kill once more, and wait for the end."""
    workers = spec.get("parallelism", 2)
    generation = kill_workers(life, dice, times - 1, workers=workers)
    running = life.running(after=generation, workers=workers)
    hurry(Path(spec["root"]))
    threading.Event().wait(dice.uniform(0.0, 0.3))  # the fault's time: not a wait for anything
    if not life.seen("result"):  # else it has ended within so short a time, which is no failure
        kill(next(iter(running["workers"].values())))
    result = life.result()
    assert result["is_finished"]
    assert result["restarts"] >= times - 1
    print(f"{result['restarts']} kills")
    return result
