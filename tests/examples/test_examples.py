"""Every example is a program that ``headgate run`` can load; a new one has to be added here with its arguments."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import polars as pl
import pytest
from tests.conftest import few

import headgate as hg
from headgate.cli.options import load_pipeline
from headgate.store.store import Store
from headgate.store.streams import TEXT_SCHEMA

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
KNOWN = {
    "acknowledge_messages.py",
    "changing_rules.py",
    "connected_components.py",
    "first_payments.py",
    "log_errors.py",
    "online_learning.py",
    "own_sinks.py",
    "pagerank.py",
    "publish_files.py",
    "reachability.py",
    "row_functions.py",
    "shop_audit.py",
    "shortest_paths.py",
    "silence_alerts.py",
    "sql_sink.py",
    "stateful_processor.py",
    "totals_from_history.py",
    "windowed_counts.py",
}


def arguments(example: str, tmp_path: Path) -> list[str]:
    if example == "row_functions.py":
        (tmp_path / "payments.txt").write_text('{"user": "ann", "amount": 3}\n', encoding="utf-8")
        return [str(tmp_path / "payments.txt")]
    if example == "publish_files.py":
        return [str(tmp_path / "published")]
    if example == "shop_audit.py":
        return [str(tmp_path / "shop.db")]
    if example == "log_errors.py":
        with Store.open(str(tmp_path / "store")) as store:
            store.create_stream("app/logs", TEXT_SCHEMA)
        return ["--store", str(tmp_path / "store")]
    if example == "sql_sink.py":
        return [f"sqlite:///{tmp_path}/shop.db"]
    return []


def test_every_example_is_known() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == KNOWN


@pytest.mark.parametrize("example", sorted(KNOWN))
def test_every_example_builds_its_plan(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")
    pipeline = load_pipeline(str(EXAMPLES / example), arguments(example, tmp_path))
    assert pipeline.describe().startswith(f"pipeline {pipeline.name}: ")


GRAPHS = Path(__file__).resolve().parents[3] / "shared" / "data" / "graphs"

needs_graphs = pytest.mark.skipif(
    not GRAPHS.is_dir(), reason="the LDBC example graphs are not beside the project (../shared/data/graphs)"
)

Example = Callable[[str], ModuleType]
Results = Callable[[Callable[[hg.Pipeline], tuple[hg.Stream, ...]]], list[pl.DataFrame]]


def growing(rows: object) -> hg.FromRows:
    return hg.FromRows(rows, splits=3, batch_rows=20)  # type: ignore[arg-type]


def test_components_are_those_of_union_find(example: Example, results: Results) -> None:
    module = example("connected_components")
    edges = module.random_edges(vertices=600, edges=500)
    [changes] = results(lambda p: (module.build(p.source(growing(edges))),))
    assert module.final(changes) == module.component_of(edges)


def test_distances_are_those_of_dijkstra(example: Example, results: Results) -> None:
    module = example("shortest_paths")
    edges = module.random_edges(vertices=100, edges=300)
    start = hg.FromRows([{"vertex": 3}])
    [found] = results(lambda p: (module.build(p.source(growing(edges)), p.source(start)),))
    assert module.final(found) == module.distances(edges, 3)


def test_ranks_are_those_of_power_iteration(example: Example, results: Results) -> None:
    module = example("pagerank")
    edges = module.random_edges(vertices=40, edges=150)
    [changes] = results(lambda p: (module.build(p.source(growing(edges))),))
    assert module.largest_error(changes, edges) <= module.ERROR_MAX


def test_weights_are_learned_and_every_example_is_used_once(example: Example, results: Results) -> None:
    module = example("online_learning")
    examples = module.random_examples(3_000)
    predictions, models = results(lambda p: module.build(p.source(growing(examples))))
    is_right, weights = module.learned(predictions, models, 3_000)
    assert is_right, weights


@pytest.mark.parametrize("seed", few([1, 2, 3], 1))
def test_what_is_reachable_is_what_a_search_of_the_last_graph_finds(
    example: Example, results: Results, seed: int
) -> None:
    module = example("reachability")
    changes = module.random_changes(vertices=60, changes=200, seed=seed)
    assert {row["what"] for row in changes} == {"link", "unlink"}
    [found] = results(lambda p: (module.build(p.source(growing(changes))),))
    assert module.final(found) == module.reachable(changes)


def test_checks_refuse_what_is_wrong(example: Example) -> None:
    """A check that cannot fail proves nothing."""
    edges = [{"a": 0, "b": 1}, {"a": 1, "b": 0}]
    changes = pl.DataFrame({"vertex": [0, 0, 1], "amount": [0.5, 0.5, 1.0]})
    assert example("pagerank").largest_error(changes, edges) < 1e-6
    assert example("pagerank").largest_error(changes.head(2), edges) == float("inf")
    assert example("pagerank").largest_error(pl.concat([changes, changes[:1]]), edges) == pytest.approx(0.5)
    with pytest.raises(AssertionError, match="counted twice"):
        example("reachability").final(pl.DataFrame({"source": [1, 1], "vertex": [2, 2], "change": [1, 1]}))
    learned = example("online_learning").learned
    models = pl.DataFrame({"examples": [2], "weights": [[2.0, -1.0, 0.5, 3.0]]})
    assert learned(pl.DataFrame({"id": [1, 0]}), models, 2)[0]
    assert not learned(pl.DataFrame({"id": [0, 0]}), models, 2)[0]
    other = pl.DataFrame({"examples": [2], "weights": [[2.0, -1.0, 0.5, 3.1]]})
    assert not learned(pl.DataFrame({"id": [0, 1]}), other, 2)[0]


def edges_of(graph: str) -> pl.DataFrame:
    columns = {"a": pl.Int64(), "b": pl.Int64(), "weight": pl.Float64()}
    return pl.read_csv(GRAPHS / f"{graph}.e", separator=" ", has_header=False, schema=columns)


def results_of(graph: str, algorithm: str) -> dict[int, float]:
    columns = {"vertex": pl.Int64(), "value": pl.Float64()}
    found = pl.read_csv(GRAPHS / f"{graph}-{algorithm}", separator=" ", has_header=False, schema=columns)
    return dict(found.iter_rows())


@needs_graphs
@pytest.mark.parametrize("graph", ["example-directed", "example-undirected"])
def test_components_are_those_of_ldbc(example: Example, results: Results, graph: str) -> None:
    module = example("connected_components")
    [changes] = results(lambda p: (module.build(p.source(growing(edges_of(graph))).select("a", "b")),))
    assert module.final(changes) == results_of(graph, "WCC")


@needs_graphs
@pytest.mark.parametrize(("graph", "source"), [("example-directed", 1), ("example-undirected", 2)])
def test_distances_are_those_of_ldbc(example: Example, results: Results, graph: str, source: int) -> None:
    module = example("shortest_paths")
    edges, start = edges_of(graph), hg.FromRows([{"vertex": source}])
    if graph == "example-undirected":
        edges = pl.concat([edges, edges.select(a="b", b="a", weight="weight")])
    [found] = results(lambda p: (module.build(p.source(growing(edges)), p.source(start)),))
    expected = {v: d for v, d in results_of(graph, "SSSP").items() if d != float("inf")}
    assert module.final(found) == pytest.approx(expected, abs=1e-9)
