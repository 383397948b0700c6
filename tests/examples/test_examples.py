"""Every example is a program that ``headgate run`` can load; a new one has to be added here with its arguments."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import polars as pl
import pytest
from tests.conftest import few

import headgate as hg
from headgate import testing
from headgate.cli.options import load_pipeline
from headgate.connectors.files.file_committer import read_committed
from headgate.model.ids import NodeName
from headgate.operators.expressions import ExpressionsSpec
from headgate.store.store import Store
from headgate.store.streams import TEXT_SCHEMA
from headgate.testing import EOF, PAUSE, Collect, ScriptedSource, run

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


def test_limits_change_while_readings_flow(
    example: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module = example("changing_rules")
    deadline = time.monotonic() + 300
    with testing.running(module.p, parallelism=2, checkpoint_dir=tmp_path / "checkpoints") as handle:
        looked_at: object = None
        while True:
            progress = handle.progress
            assert progress.state is not hg.PipelineState.FAILED
            assert time.monotonic() < deadline, "no two limits were ever exceeded"
            if progress.last_checkpoint != looked_at or progress.state is hg.PipelineState.FINISHED:
                found, looked_at = _exceeded(), progress.last_checkpoint  # output comes with checkpoints
                if found.height and found["limit"].n_unique() > 1:
                    break
            time.sleep(0.02)
        handle.stop()
    found = _exceeded()
    assert (found["value"] > found["limit"]).all()
    assert found["limit"].is_between(30, 50).all()
    assert found.select("sensor", "number").is_unique().all()
    limits = hg.read_state(tmp_path / "checkpoints" / "changing-rules", "check", "limits")
    assert set(limits["map_key"]) <= {"heat", "wind"}


def _exceeded() -> pl.DataFrame:
    try:
        found = read_committed("out/exceeded")
    except FileNotFoundError:
        return pl.DataFrame()
    return found if found.width else pl.DataFrame()


ROOT = Path(__file__).resolve().parents[2]

LINES = [
    "17/06/09 20:10:40 INFO executor.CoarseGrainedExecutorBackend: Registered signal handlers",
    "26/11/21 01:31:44 ERROR TaskSetManager: Task 3 failed",
    "081109 203615 148 INFO dfs.DataNode$PacketResponder: PacketResponder 1 terminating",
    "2015-07-29 17:41:44,747 - INFO  [QuorumPeer[myid=1]/0:0:0:0:0:0:0:0:2181:FastLeaderElection@774] - Notification",
    "2015-07-29 19:04:12,394 - WARN  [/10.10.34.11:3888:QuorumCnxManager$Listener@493] - Received connection",
    "2024-02-29 12:00:00,001 DEBUG [main] org.example.App - started",
    "2024-02-29T12:00:00.001 DEBUG org.example.App: started",
    "2023-02-29 12:00:00 INFO org.example.App: there is no such day",
    "17/06/09 25:10:40 INFO Executor: there is no such hour",
    "17/06/09 20:10:40 LOUD Executor: there is no such level",
    "17/06/09 20:10:40 INFO a line without a service",
    "[Sun Dec 04 04:47:44 2005] [error] mod_jk child workerEnv in error state 6",
    "\tat org.apache.spark.rdd.RDD.iterator(RDD.scala:338)",
    "26/11/21 01:31:44 INFO Utils: ü and 日本",
    "",
]


def loaded(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module


@pytest.fixture
def expressions(tmp_path: Path) -> ExpressionsSpec:
    store = str(tmp_path / "store")
    with Store.open(store) as opened:
        opened.create_stream("app/logs", TEXT_SCHEMA)
    example = loaded(ROOT / "examples" / "log_errors.py", "log_errors_example")
    pipeline = example.pipeline(["--store", store])
    spec = pipeline.definition().graph.node(NodeName("select")).spec
    assert isinstance(spec, ExpressionsSpec)
    return spec


def test_pipeline_and_recount_read_every_line_alike(expressions: ExpressionsSpec) -> None:
    parse = loaded(ROOT / "scripts" / "demo" / "recount.py", "recount_module").parse
    frame = expressions.steps[0].apply(pl.DataFrame({"line": LINES}).lazy()).collect()
    for line, row in zip(LINES, frame.to_dicts(), strict=True):
        parsed = parse(line)
        if parsed is None:
            assert row["ts"] is None, line
        else:
            second = int(row["ts"].replace(tzinfo=UTC).timestamp())
            assert (row["level"], row["service"], second) == (parsed.level, parsed.service, parsed.second), line
    assert frame["ts"].null_count() == 7


def test_a_recount_tells_counted_filtered_and_unparsed_lines_apart() -> None:
    recount = loaded(ROOT / "scripts" / "demo" / "recount.py", "recount_module").recount
    result = recount(LINES, frozenset({"INFO"}), 5)
    assert (result.counts.total(), result.filtered, result.unparsed) == (4, 4, 7)
    assert result.lines == len(LINES)


SILENCE = timedelta(seconds=1)
BEGIN = datetime(2026, 1, 1)
MACHINES = 5
SCHEMA = {"machine": int, "ts": datetime}


def readings(seed: int) -> list[dict[str, Any]]:
    """Return readings up to 200 ms out of order, with gaps of up to three times ``SILENCE`` per machine."""
    random, found = Random(seed), []
    for machine in range(MACHINES):
        at = BEGIN
        for _ in range(40):
            at += timedelta(milliseconds=random.choice([random.randint(1, 900), random.randint(800, 3_000)]))
            found.append({"machine": machine, "ts": at})
    return sorted(found, key=lambda row: row["ts"] + timedelta(milliseconds=random.randint(0, 200)))


def silences(rows: list[dict[str, Any]]) -> set[tuple[int, datetime]]:
    """Return machine and last reading of each silence, by plain Python."""
    found = set()
    for machine in range(MACHINES):
        times = sorted(row["ts"] for row in rows if row["machine"] == machine)
        nexts = [*times[1:], datetime.max]
        found |= {(machine, at) for at, later in zip(times, nexts, strict=True) if later - at >= SILENCE}
    return found


@pytest.fixture
def found_by(example: Callable[[str], ModuleType], tmp_path: Path) -> Callable[..., list[tuple[int, datetime]]]:
    """Run the example's function on a source; return machine and last reading of each silence."""
    module = example("silence_alerts")
    assert module.SILENCE == SILENCE

    def found_by(source: Any, parallelism: int = 1) -> list[tuple[int, datetime]]:
        p, sink = hg.Pipeline("silence", parallelism=parallelism), Collect(tmp_path / "out")
        stream = p.source(source).with_timestamps("ts", out_of_orderness="200ms")
        stream.key_by("machine").process(module.Silence(), name="silence").sink(sink)
        run(p)
        return [(row["machine"], row["last_reading"].replace(tzinfo=None)) for row in sink.rows()]

    return found_by


@pytest.mark.parametrize("parallelism", [1, 3])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("batch_rows", [1, 7, 1_000])
def test_silences_do_not_depend_on_batches_splits_and_parallelism(
    batch_rows: int, splits: int, parallelism: int, found_by: Callable[..., list[tuple[int, datetime]]]
) -> None:
    rows = readings(batch_rows + splits)
    source = hg.FromRows(rows, splits=splits, batch_rows=batch_rows)
    assert sorted(found_by(source, parallelism)) == sorted(silences(rows))


@pytest.mark.parametrize("step", [1_000, 20])
def test_silences_of_a_backlog_are_those_of_a_live_run(
    step: int, found_by: Callable[..., list[tuple[int, datetime]]]
) -> None:
    rows = readings(1)
    script = [item for at in range(0, len(rows), step) for item in (rows[at : at + step], PAUSE)]
    source = ScriptedSource([*script, EOF], schema=SCHEMA, pause_ms=12)
    assert sorted(found_by(source)) == sorted(silences(rows))


def test_five_readings_an_hour_apart_are_five_silences(found_by: Callable[..., list[tuple[int, datetime]]]) -> None:
    rows = [{"machine": 0, "ts": datetime(2026, 1, 1, hour)} for hour in range(5)]
    assert len(found_by(hg.FromRows(rows))) == 5
