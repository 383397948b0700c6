"""Loops: what counts as right, order of runs, ratios and targets, and that the peers find the components."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from bench.components import smallest_connected
from bench.headgate_components import FIRST, FirstEdges, expected_labels, is_right, pipeline, pool_rows
from bench.loops import compare, measure_pairs
from bench.peers.install import PATHWAY_ENVIRONMENT, environment_python
from bench.peers.measure import NotInstalled, measure_components_pathway, run_peer
from bench.running import wrapped

HEADGATE = {
    "edges_per_s": 300_000.0,
    "edges_per_cpu_s": 150_000.0,
    "slowdowns": [0.02, 0.09, 0.3],
    "slowdowns_per_label": [0.01],
}
STREAMING = {
    "edges_per_s_growing": 20_000.0,
    "edges_per_s_at_once": 60_000.0,
    "edges_per_cpu_s_growing": 15_000.0,
    "is_right": True,
}
PATHWAY = {"edges_per_s_at_once": 15_000.0, "edges_per_cpu_s": 7_500.0, "is_right": True}
SIZE = {"edges": 1_000_000, "vertices": 500_000}


def test_numpy_finds_the_smallest_connected_vertex_along_a_path() -> None:
    count = 1_000
    order = np.random.default_rng(1).permutation(count)
    assert smallest_connected(order[:-1], order[1:], count).tolist() == [0] * count
    assert smallest_connected(order[:-1:2], order[1::2], count)[order[0]] == min(order[:2])
    assert smallest_connected(np.array([3]), np.array([1]), 4).tolist() == [0, 1, 2, 1]


def test_labels_are_right_only_if_each_vertex_with_an_edge_ends_with_its_own() -> None:
    edges, vertices = 40, 50
    expected = expected_labels(edges, vertices)
    with_edges = [vertex for vertex in range(vertices) if expected[vertex] != vertex]
    roots = sorted({int(expected[vertex]) for vertex in with_edges})
    changes = pl.DataFrame({"vertex": [*with_edges, *with_edges, *roots], "label": 0}).with_columns(
        label=pl.Series([*with_edges, *expected[with_edges].tolist(), *roots])
    )
    alone = set(range(vertices)) - set(changes["vertex"])
    assert alone, "the graph leaves no vertex alone; choose other numbers"
    assert is_right(changes, expected, edges)
    assert not is_right(changes.filter(pl.col("vertex") != roots[0]), expected, edges)
    assert not is_right(changes[: len(with_edges)], expected, edges)
    more = pl.DataFrame({"vertex": [min(alone)], "label": [min(alone)]})
    assert not is_right(pl.concat([changes, more]), expected, edges)


def test_no_edge_occurs_twice_because_the_pool_is_short() -> None:
    assert [pool_rows(edges) for edges in (1, 2, 3, 1_000_000)] == [2, 2, 4, 1 << 20]


def test_the_clock_is_in_front_of_the_first_operator(tmp_path: Path) -> None:
    definition = wrapped(pipeline(100, 50, 1_000, str(tmp_path)).definition(), FIRST, FirstEdges)
    specs = {str(node.name): node.spec for vertex in definition.plan.vertices for node in vertex.nodes}
    assert isinstance(specs[FIRST], FirstEdges)


def test_checkpoints_off_and_on_alternate_after_a_first_run_that_does_not_count() -> None:
    calls: list[int | None] = []
    rates = iter([1.0, 100.0, 90.0, 110.0, 100.0, 120.0, 60.0])

    def measure(interval_ms: int | None) -> dict[str, Any]:
        calls.append(interval_ms)
        rate = next(rates)
        return {
            "edges_per_s": rate,
            "seconds": 10.0,
            "edges_per_cpu_s": rate / 2,
            "labels_told": 2 * rate,
            "checkpoint_bytes_max": int(rate),
        }

    figures = measure_pairs(measure, 3)
    assert calls == [1_000, *[None, 1_000] * 3]
    assert (figures["edges_per_s"], figures["edges_per_s_no_checkpoints"]) == (90.0, 110.0)
    assert figures["slowdowns"] == pytest.approx([0.1, 1 / 11, 0.5])
    assert figures["slowdowns_per_label"] == pytest.approx([0.1, 1 / 11, 0.5])
    assert figures["checkpoint_bytes_max"] == 100
    assert figures["edges_per_cpu_s"] == 45.0


def test_all_targets_are_judged() -> None:
    result = compare(SIZE, HEADGATE, STREAMING, PATHWAY)
    assert {name: result.verdict(name) for name in result.targets} == {
        "edges_per_s": "met",
        "slowdown_by_checkpoints": "met",
        "ratio_streaming": "met",
        "ratio_pathway": "met",
    }
    assert result.figures["ratio_streaming"] == pytest.approx(15)
    assert result.figures["ratio_streaming_at_once"] == pytest.approx(5)
    assert result.figures["ratio_streaming_per_cpu_s"] == pytest.approx(10)
    assert result.figures["ratio_pathway_per_cpu_s"] == pytest.approx(20)
    slow = compare(SIZE, HEADGATE | {"edges_per_s": 74_999.0, "slowdowns": [0.11]}, STREAMING, PATHWAY)
    assert {slow.verdict(name) for name in slow.targets} == {"missed"}


def test_a_peer_with_wrong_labels_is_no_peer_that_was_beaten() -> None:
    result = compare(SIZE, HEADGATE, STREAMING | {"is_right": False}, PATHWAY)
    assert result.verdict("ratio_streaming") == "missed"


def test_without_pathway_its_target_is_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    result = compare(SIZE, HEADGATE, STREAMING, NotInstalled("Pathway is not installed: run `make bench-peers`"))
    assert result.verdict("ratio_pathway") == "skipped"
    assert result.met
    assert "Pathway is not installed" in capsys.readouterr().out


@pytest.mark.spark
@pytest.mark.deep
def test_the_micro_batch_loop_finds_the_components() -> None:
    arguments = ["--edges", "600", "--vertices", "500", "--batch-rows", "300", "--warm-up", "0"]
    found = run_peer(Path(sys.executable), "bench.peers.components_streaming", arguments)
    assert found["is_right"]
    assert found["sizes"][0]["edges"] == 600
    assert len(found["sizes"][0]["rounds"]) == 2
    assert found["edges_per_s_growing"] == found["edges_per_s_at_once"] == found["sizes"][0]["edges_per_s"]


@pytest.mark.spark
@pytest.mark.skipif(
    not environment_python(PATHWAY_ENVIRONMENT).exists(), reason="Pathway is not installed: run `make bench-peers`"
)
def test_pathway_finds_the_components() -> None:
    found = measure_components_pathway(600, 500)
    assert isinstance(found, dict)
    assert found["is_right"]
