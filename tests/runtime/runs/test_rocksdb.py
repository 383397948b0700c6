"""State in RocksDB, with the real driver and real workers that are killed, and another backend at another start."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
from pyspark import cloudpickle
from tests.runtime.running import definition_of, pipeline_at
from tests.runtime.runs.test_results import events, generator, same

import headgate as hg
from headgate.connectors.files.file_committer import read_committed
from headgate.model.config import MemoryState, RocksState, StateConfig
from headgate.model.plan import PipelineDefinition

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import tests

Start = Any
STEP_MS = 100


class Collected(hg.ProcessFunction):
    """Passes each record on with how many of its key there were, and the sum of their ids."""

    schema = {"key": pa.int64(), "id": pa.int64(), "n": pa.int64(), "sum": pa.int64()}

    def open(self, state: hg.StateHandle) -> None:
        self.sum = state.value("sum", pa.int64())
        self.ids = state.list("ids", pa.int64())
        self.last = state.map("last", pa.large_string(), pa.int64())

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> Iterator[dict[str, Any]]:
        self.sum.put((self.sum.get() or 0) + row["id"])
        self.ids.append(row["id"])
        place = f"{row['id'] % 7}"
        self.last.put(place, max(row["id"], self.last.get(place, 0)))
        assert self.sum.get() == sum(self.ids.get())
        assert max(found for _, found in self.last.items()) == max(self.ids.get())
        yield {"key": context.key, "id": row["id"], "n": len(self.ids), "sum": self.sum.get()}


class Counted(hg.BatchProcessFunction):
    """The same by batch: one record per key and batch counts for all of them."""

    schema = {"key": pa.int64(), "n": pa.int64()}

    def open(self, state: hg.BatchStateHandle) -> None:
        self.n = state.value("n", pa.int64())
        self.ids = state.list("ids", pa.int64())

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame:
        changed = self.n.update(1, "add")
        self.ids.append(batch["id"])
        assert (self.ids.counts() == self.n.get()).all()
        return batch.select("key", n=self.n.get()).filter(changed)


def add(total: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    return {**total, "id": total["id"] + row["id"]}


def kept(root: Path, source: hg.Generator, parallelism: int, state: StateConfig) -> PipelineDefinition:
    pipeline = pipeline_at(root, parallelism=parallelism)
    stream = pipeline.source(source).select("key", "id")
    keyed = stream.key_by("key")
    keyed.process(Collected(), name="collected").sink(hg.FileSink(root / "rows", "parquet"), name="rows")
    keyed.process(Counted(), name="counted").sink(hg.FileSink(root / "batches", "parquet"), name="batches")
    keyed.reduce(add, name="summed").sink(hg.FileSink(root / "sums", "parquet"), name="sums")
    definition = definition_of(pipeline)
    return replace(definition, config=replace(definition.config, state=state))


def test_state_in_rocksdb_is_exactly_once_over_kills_and_goes_on_in_memory_and_back(
    start: Start, tmp_path: Path
) -> None:
    local = tmp_path / "local"
    source = replace(generator(6_000, splits=None), rows_per_second=1_500)
    rocks = RocksState(16 << 20, str(local))
    run = start(kept(tmp_path, source, 2, rocks))
    run.wait_checkpoints(2)
    directories = [path for path in local.rglob("*") if path.is_dir()]
    assert len([path for path in directories if path.name == "db"]) == 6
    (parent,) = local.iterdir()
    assert stat.S_IMODE(parent.stat().st_mode) == 0o700
    assert parent.name == f"headgate-state-{os.getuid()}"
    run.kill(1)
    run.wait_restarts(1)
    run.wait_checkpoints(1)
    assert len(list(local.rglob("db"))) == 6, "what the killed worker left is gone"
    run.driver.stop()
    assert not run.result().is_finished
    assert not list(local.rglob("*.sst")), "nothing stays when the workers end"
    run = start(kept(tmp_path, source, 3, MemoryState()))
    run.wait_checkpoints(2)
    run.driver.stop()
    assert not run.result().is_finished
    run = start(kept(tmp_path, replace(source, rows_per_second=3_000), 1, rocks))
    run.wait_checkpoints(1)
    run.kill(0)
    assert run.result().is_finished
    wanted = events(source).select("key", "id")
    rows = read_committed(str(tmp_path / "rows"))
    same(rows.select("key", "id"), wanted)
    for column in ("n", "sum"):
        last = rows.group_by("key").agg(pl.col(column).max())
        totals = wanted.group_by("key").agg(n=pl.len().cast(pl.Int64), sum=pl.col("id").sum())
        same(last, totals.select("key", column))
    counts = read_committed(str(tmp_path / "batches")).group_by("key").agg(pl.col("n").max())
    same(counts, wanted.group_by("key").agg(n=pl.len().cast(pl.Int64)))
    sums = read_committed(str(tmp_path / "sums")).group_by("key").agg(pl.col("id").max())
    same(sums, wanted.group_by("key").agg(pl.col("id").sum()))


def test_an_operator_has_its_state_where_it_says(start: Start, tmp_path: Path) -> None:
    local = tmp_path / "local"
    source = replace(generator(1_500, splits=None), rows_per_second=750)
    pipeline = pipeline_at(tmp_path, parallelism=2)
    keyed = pipeline.source(source).select("key", "id").key_by("key")
    on_disk = hg.RocksDB(memory="16MB", dir=str(local))
    keyed.reduce(add, name="summed", state=on_disk).sink(hg.FileSink(tmp_path / "sums", "parquet"), name="sums")
    keyed.process(Counted(), name="counted").sink(hg.FileSink(tmp_path / "batches", "parquet"), name="batches")
    run = start(definition_of(pipeline))
    run.wait_checkpoints(1)
    assert len(list(local.rglob("db"))) == 2, "one operator of two, in each of two workers"
    assert run.result().is_finished
    wanted = events(source).select("key", "id")
    sums = read_committed(str(tmp_path / "sums")).group_by("key").agg(pl.col("id").max())
    same(sums, wanted.group_by("key").agg(pl.col("id").sum()))
    counts = read_committed(str(tmp_path / "batches")).group_by("key").agg(pl.col("n").max())
    same(counts, wanted.group_by("key").agg(n=pl.len().cast(pl.Int64)))
