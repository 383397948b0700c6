"""The main job's expressions and the demo's plain recount read the same lines in two ways: they must agree."""

from __future__ import annotations

import importlib.util
import sys
from datetime import UTC
from pathlib import Path
from types import ModuleType

import polars as pl
import pytest

from headgate.model.ids import NodeName
from headgate.operators.catalog import ExpressionsSpec
from headgate.store.store import Store
from headgate.store.streams import TEXT_SCHEMA

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
