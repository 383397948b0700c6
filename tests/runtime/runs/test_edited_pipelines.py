"""A pipeline that was edited between two runs continues with the state of its operators, however they are chained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
from tests.runtime.running import definition_of, pipeline_at
from tests.runtime.runs.test_results import generator, recounted, same

import headgate as hg
from headgate.connectors.files.file_committer import read_committed
from headgate.model.plan import PipelineDefinition


def windowed(root: Path, source: hg.Generator, *, is_rebalanced: bool) -> PipelineDefinition:
    pipeline = pipeline_at(root, parallelism=2)
    stream = pipeline.source(source)
    if is_rebalanced:
        stream = stream.rebalance()
    stream = stream.with_timestamps("ts", out_of_orderness="1d")
    counts = stream.key_by("key").window(hg.Tumbling("1s")).agg(n=pl.len(), total=pl.col("value").sum())
    counts.sink(hg.FileSink(root / "out", "parquet"), name="out")
    return definition_of(pipeline)


def test_a_rebalance_between_two_runs_keeps_every_operators_state(start: Any, tmp_path: Path) -> None:  # R12
    source = generator(20_000, 10_000)
    first = start(windowed(tmp_path, source, is_rebalanced=False))
    first.wait_checkpoints(2)
    first.driver.stop()
    assert not first.result().is_finished
    second = start(windowed(tmp_path, source, is_rebalanced=True))
    assert second.result().is_finished
    assert any("continues from checkpoint" in note for note in second.notes)
    same(read_committed(str(tmp_path / "out")), recounted(source))
