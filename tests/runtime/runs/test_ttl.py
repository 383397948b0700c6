"""State with a TTL, with the real driver and real workers: declared later, changed, taken away, and gone."""

from __future__ import annotations

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
from headgate.model.plan import PipelineDefinition

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import tests

Start = Any


class Numbering(hg.ProcessFunction):
    """Numbers the records of each key, and forgets each of them at once in another state."""

    schema = {"key": pa.int64(), "number": pa.int64(), "left": pa.int64()}

    def __init__(self, ttl: hg.TTL | None) -> None:
        self.ttl = ttl

    def open(self, state: hg.StateHandle) -> None:
        self.count = state.value("count", pa.int64(), ttl=self.ttl)
        self.short = state.list("short", pa.int64(), ttl=hg.TTL("1ms"))

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> Iterator[dict[str, Any]]:
        number = self.count.get(0) + 1
        self.count.put(number)
        self.short.append(number)
        yield {"key": context.key, "number": number, "left": 0}


def test_a_ttl_is_given_and_taken_away_between_runs(start: Start, tmp_path: Path) -> None:
    source = generator(6_000, splits=None)

    def numbered(ttl: hg.TTL | None, parallelism: int, rate: int | None) -> PipelineDefinition:
        pipeline = pipeline_at(tmp_path, parallelism=parallelism)
        stream = pipeline.source(replace(source, rows_per_second=rate)).key_by("key")
        stream.process(Numbering(ttl), name="numbering").sink(hg.FileSink(tmp_path / "out", "parquet"))
        return definition_of(pipeline)

    for ttl, parallelism in ((None, 2), (hg.TTL("1h", "read_and_write"), 3), (hg.TTL("2h"), 2)):
        run = start(numbered(ttl, parallelism, 2_000))
        run.wait_checkpoints(2)
        if ttl is not None and ttl.update == "read_and_write":
            run.kill(1)
            run.wait_restarts(1)
            run.wait_checkpoints(1)
        run.driver.stop()
        assert not run.result().is_finished
        newest = next(tmp_path.rglob("log")).parent
        assert hg.read_state(newest, "numbering", "short").height < 3_000, "what expired is in no snapshot"
    assert start(numbered(None, 3, None)).result().is_finished
    wanted = events(source).with_columns(number=pl.int_range(1, pl.len() + 1).over("key"), left=pl.lit(0))
    same(read_committed(str(tmp_path / "out")), wanted.select("key", "number", "left"))
