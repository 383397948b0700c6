"""A pipeline stops, its program is changed, and it goes on with its state: real workers, both backends, others of them.

The program counts records of each key in every kind of state. The changed one has other types, names and fields for
them, and must come to the counts that it would have had from the beginning.
"""

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
from tests.runtime.running import definition_of, pipeline_at
from tests.runtime.runs.test_results import events, generator, same

import headgate as hg
from headgate.connectors.files.file_committer import read_committed
from headgate.model.config import MemoryState, RocksState, StateConfig
from headgate.model.plan import PipelineDefinition

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import tests

Start = Any
PLACE = pa.struct([("shop", pa.int32()), ("note", pa.large_string())])
NEW_PLACE = pa.struct([("store", pa.int64()), ("visits", pa.int32())])


class Former(hg.ProcessFunction):
    """The program before."""

    schema = {"key": pa.int64(), "id": pa.int64(), "n": pa.int64()}

    def open(self, state: hg.StateHandle) -> None:
        self.count = state.value("count", pa.int32())
        self.ids = state.list("ids", pa.int32())
        self.last = state.map("last", pa.int64(), PLACE)
        self.useless = state.value("useless", bool)

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> Iterator[dict[str, Any]]:
        self.count.put((self.count.get() or 0) + 1)
        self.ids.append(row["id"])
        self.last.put(row["id"] % 5, {"shop": row["id"], "note": "?"})
        self.useless.put(True)
        yield {"key": context.key, "id": row["id"], "n": self.count.get()}


class Changed(hg.ProcessFunction):
    """The program behind: wider, under another name, with another field and one less, and another state."""

    schema = Former.schema

    def open(self, state: hg.StateHandle) -> None:
        self.total = state.value("total", pa.int64(), evolution=hg.Evolution(renamed_from="count"))
        self.ids = state.list("ids", pa.float64())
        placed = hg.Evolution(defaults={"visits": 0}, renamed={"shop": "store"})
        self.last = state.map("last", pa.int64(), NEW_PLACE, evolution=placed)
        self.fresh = state.value("fresh", pa.int64(), evolution=hg.Evolution(starts_empty=True))
        state.forget("useless")

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> Iterator[dict[str, Any]]:
        self.total.put((self.total.get() or 0) + 1)
        self.ids.append(float(row["id"]))
        self.fresh.put((self.fresh.get() or 0) + 1)
        found = self.ids.get()
        assert len(found) == self.total.get()
        place = row["id"] % 5
        before = self.last.get(place)
        assert before is None or before["store"] == [one for one in found[:-1] if one % 5 == place][-1]
        self.last.put(place, {"store": row["id"], "visits": 0 if before is None else before["visits"] + 1})
        assert self.total.get() > self.fresh.get() or self.total.get() == sum(
            v["visits"] + 1 for _, v in self.last.items()
        )
        yield {"key": context.key, "id": row["id"], "n": self.total.get()}


class FormerBatch(hg.BatchProcessFunction):
    schema = {"key": pa.int64(), "n": pa.int64()}

    def open(self, state: hg.BatchStateHandle) -> None:
        self.n = state.value("n", pa.int32())

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame:
        changed = self.n.update(1, "add")
        return batch.select("key", n=self.n.get().cast(pl.Int64)).filter(changed)


class ChangedBatch(FormerBatch):
    def open(self, state: hg.BatchStateHandle) -> None:
        self.n = state.value("m", pa.int64(), evolution=hg.Evolution(renamed_from="n"))


def add(total: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    return {**total, "id": total["id"] + row["id"]}


def counted(
    root: Path, source: hg.Generator, parallelism: int, state: StateConfig, *, is_changed: bool
) -> PipelineDefinition:
    pipeline = pipeline_at(root, parallelism=parallelism)
    stream = pipeline.source(source, name="in").select("key", "id")
    keyed = stream.key_by("key", name="keyed")
    rows = keyed.process(Changed() if is_changed else Former(), name="rows")
    rows.sink(hg.FileSink(root / "rows", "parquet"), name="rows-out")
    batches = keyed.process(ChangedBatch() if is_changed else FormerBatch(), name="batches")
    batches.sink(hg.FileSink(root / "batches", "parquet"), name="batches-out")
    if is_changed:
        given = pl.col("id").alias("ident"), pl.lit("here").alias("place")
        wider = stream.select("key", *given).key_by("key", name="keyed-wider")
        told = hg.Evolution(defaults={"place": "before"}, renamed={"id": "ident"})
        sums = wider.reduce(
            lambda total, row: {**total, "ident": total["ident"] + row["ident"]}, name="sums", evolution=told
        )
        sums = sums.select("key", pl.col("ident").alias("id"))
    else:
        sums = keyed.reduce(add, name="sums")
    sums.sink(hg.FileSink(root / "sums", "parquet"), name="sums-out")
    definition = definition_of(pipeline)
    return replace(definition, config=replace(definition.config, state=state))


@pytest.mark.parametrize(("backend", "parallelism"), [("memory", 2), ("rocksdb", 3)])
def test_a_changed_program_goes_on_with_the_state_of_the_one_before(
    start: Start, tmp_path: Path, backend: str, parallelism: int
) -> None:  # EV1, EV2, EV6, EV7
    state: StateConfig = MemoryState() if backend == "memory" else RocksState(16 << 20, str(tmp_path / "local"))
    source = replace(generator(4_000, splits=None), rows_per_second=1_000)
    run = start(counted(tmp_path, source, 2, state, is_changed=False))
    run.wait_checkpoints(2)
    run.driver.stop()
    assert not run.result().is_finished
    run = start(counted(tmp_path, replace(source, rows_per_second=3_000), parallelism, state, is_changed=True))
    run.wait_checkpoints(1)
    run.kill(0)
    assert run.result().is_finished
    said = "\n".join(run.notes)
    for text in (
        "operator 'rows': state 'count' becomes 'total'",
        "operator 'rows': in state 'ids', int32 becomes double",
        "operator 'rows': in state 'last', 'visits' is added",
        "state 'fresh' of operator 'rows' is new: it starts empty",
        "state 'useless' of operator 'rows' is left behind",
        "operator 'sums': in state 'accumulators', 'place' is added",
    ):
        assert text in said
    wanted = events(source).select("key", "id")
    rows = read_committed(str(tmp_path / "rows"))
    same(rows.select("key", "id"), wanted)
    totals = wanted.group_by("key").agg(n=pl.len().cast(pl.Int64))
    for directory in ("rows", "batches"):
        found = read_committed(str(tmp_path / directory))
        same(found.group_by("key").agg(pl.col("n").max()), totals)
    sums = read_committed(str(tmp_path / "sums")).group_by("key").agg(pl.col("id").max())
    same(sums, wanted.group_by("key").agg(pl.col("id").sum()))
