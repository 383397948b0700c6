"""Checkpoints of state in memory that share chunks, with the real driver and real workers that are killed."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
from pyspark import cloudpickle
from tests.conftest import IS_DEEP
from tests.runtime.running import definition_of, pipeline_at
from tests.runtime.runs.test_results import generator
from tests.runtime.runs.test_rocksdb_increments import PADS, check, has_shared, manifests, random_bytes
from tests.runtime.runs.test_unaligned import KilledAt

import headgate as hg
from headgate.model.config import MemoryState, RocksState
from headgate.model.plan import PipelineDefinition

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import tests

Start = Any


class Padded(hg.BatchProcessFunction):
    """Counts the records of a key, beside a map that is large from the beginning and changes little."""

    schema = {"key": pa.int64(), "id": pa.int64(), "n": pa.int64()}

    def open(self, state: hg.BatchStateHandle) -> None:
        self.n = state.value("n", pa.int64())
        self.pads = state.map("pads", pa.int64(), pa.large_binary())

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame:
        in_batch = batch.select(pl.int_range(1, pl.len() + 1).over("key")).to_series()
        found = batch.select("key", "id", n=self.n.get().fill_null(0) + in_batch)
        self.n.put(found["n"])
        pads = pl.DataFrame({"at": range(PADS)}, schema={"at": pl.Int64})
        new = found.filter(pl.col("n") == 1).select("key").join(pads, how="cross")
        if len(new):
            self.pads.put(new["at"], padded_with(new["key"], new["at"]), keys=context.lookup(new))
        at = found["n"] % PADS
        self.pads.put(at, padded_with(found["key"], at))
        return found


def padded_with(keys: pl.Series, at: pl.Series) -> pl.Series:
    return pl.Series([random_bytes(key, place) for key, place in zip(keys, at, strict=True)], dtype=pl.Binary)


def padded(root: Path, source: hg.Generator, parallelism: int, state: Any = None) -> PipelineDefinition:
    pipeline = pipeline_at(root, parallelism=parallelism, interval="300ms", retained=2)
    stream = pipeline.source(source).select("key", "id")
    stream.key_by("key").process(Padded(), name="padded").sink(hg.FileSink(root / "rows", "parquet"), name="rows")
    definition = definition_of(pipeline)
    return replace(definition, config=replace(definition.config, state=state or MemoryState()))


def shares_again(root: Path) -> bool:
    """Whether the newest checkpoint refers to a file of a generation before its own."""
    kept = manifests(root)
    return bool(kept) and any(".g" in p.path and f".g{kept[-1].generation}" not in p.path for p in kept[-1].parts)


# SF15
def test_chunks_are_shared_exactly_once_over_kills_rescaling_and_another_backend(start: Start, tmp_path: Path) -> None:
    source = replace(generator(6_000, splits=None), rows_per_second=300)
    run = start(padded(tmp_path, source, 2))
    for restarts in (1, 2) if IS_DEEP else (1,):
        run.wait(lambda: has_shared(tmp_path), "a checkpoint that refers to chunks of an earlier one")
        run.kill(restarts % 2)
        run.wait_restarts(restarts)
        run.wait(lambda: shares_again(tmp_path), "a checkpoint that refers to chunks of a former generation")
        run.wait_checkpoints(1)
    run.driver.stop()
    assert not run.result().is_finished
    needed = {path for manifest in manifests(tmp_path) for path in manifest.files}
    root = tmp_path / "checkpoints" / "p"
    there = {str(path.relative_to(root)) for path in root.glob("chk-*/*")}
    assert needed == there, "nothing that is needed is gone, nothing else stays"
    run = start(padded(tmp_path, source, 3, RocksState(32 << 20, str(tmp_path / "local"))))
    run.wait_checkpoints(1)
    run.driver.stop()
    assert not run.result().is_finished
    run = start(padded(tmp_path, replace(source, rows_per_second=3_000), 1))
    run.wait_checkpoints(1)
    run.kill(0)
    assert run.result().is_finished
    check(tmp_path, source)


# F1, F22
def test_workers_that_die_while_they_write_and_restore_chunks_lose_nothing(start: Start, tmp_path: Path) -> None:
    source = replace(generator(4_000, splits=None), rows_per_second=300)
    killed = KilledAt(tmp_path, (("in-put", 8), ("after-snapshot-before-ack", 4), ("in-restore", 2), ("in-restore", 3)))
    run = start(padded(tmp_path, source, 2), prepare=killed)
    run.wait(lambda: not killed.missing(), "all have died")
    run.wait(lambda: has_shared(tmp_path), "a checkpoint that refers to chunks of an earlier one")
    assert run.result().is_finished
    check(tmp_path, source)
