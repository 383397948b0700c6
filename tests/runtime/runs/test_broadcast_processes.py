"""A broadcast side in real worker processes that are killed, at named points too: nothing lost, nothing twice."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from pyspark import cloudpickle
from tests.conftest import few
from tests.runtime.running import definition_of, pipeline_at
from tests.runtime.runs.test_results import events, generator, same
from tests.runtime.runs.test_unaligned import KilledAt

import headgate as hg
from headgate.connectors.files.file_committer import read_committed
from headgate.model.config import RocksState
from headgate.model.plan import PipelineDefinition

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import tests

Start = Any
RULES = 600


class Told(hg.BroadcastProcessFunction):
    """Numbers events by key; tells every rule, with a digest of all before it, from each subtask."""

    schema = {"key": pa.int64(), "id": pa.int64(), "n": pa.int64(), "subtask": pa.int64()}

    def open(self, state: hg.StateHandle) -> None:
        self.count = state.value("count", pa.int64())
        self.rules = state.broadcast("rules", pa.int64(), pa.int64())

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> Iterator[dict[str, Any]]:
        n = self.count.get(0) + 1
        self.count.put(n)
        yield {"key": row["key"], "id": row["id"], "n": n, "subtask": -1}

    def process_broadcast(self, row: dict[str, Any], context: hg.BroadcastContext) -> Iterator[dict[str, Any]]:
        digest = (self.rules.get(-1, 0) * 31 + row["id"] + 1) % 1_000_003
        self.rules.put(-1, digest)
        self.rules.put(row["id"] % 50, digest)
        yield {"key": -1, "id": row["id"], "n": digest, "subtask": context.subtask_index}


def told(root: Path, parallelism: int, timeout: Any) -> PipelineDefinition:
    pipeline = pipeline_at(root, parallelism=parallelism, interval="100ms", alignment_timeout=timeout)
    rules = replace(generator(RULES, splits=3), rows_per_second=150)
    source = replace(generator(6_000, splits=4), rows_per_second=1_500)
    side = pipeline.source(rules, name="rules").select("id")
    stream = pipeline.source(source, name="events").select("key", "id")
    found = stream.key_by("key").connect(side.broadcast()).process(Told(), name="told")
    found.sink(hg.FileSink(root / "rows", "parquet", roll_interval=0), name="rows")
    definition = definition_of(pipeline)
    return replace(definition, config=replace(definition.config, state=RocksState(16 << 20, str(root / "local"))))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("timeout", few([None, 0], 1))
def test_killed_workers_tell_every_rule_once_and_alike(start: Start, tmp_path: Path, timeout: Any) -> None:
    points = (("before-snapshot", 9), ("in-restore", 3), ("after-snapshot-before-ack", 4), ("in-put", 12))
    killed = KilledAt(tmp_path, points)
    run = start(told(tmp_path, 2, timeout), prepare=killed)
    run.wait_checkpoints(2)
    run.kill(0)
    run.wait(lambda: len(killed.missing()) < len(points), "a worker died at a named point")
    run.wait_checkpoints(1)
    run.kill(1)
    assert run.result().is_finished
    rows = read_committed(str(tmp_path / "rows"))
    same(rows.filter(pl.col("subtask") < 0).select("key", "id"), events(generator(6_000, splits=4)).select("key", "id"))
    rules = rows.filter(pl.col("subtask") >= 0)
    assert rules.select("id", "subtask").is_unique().all(), "a subtask told a rule twice"
    assert rules.height == 2 * RULES
    assert rules.group_by("id").agg(pl.col("n").n_unique())["n"].max() == 1, "copies differ"
