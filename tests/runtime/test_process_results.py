"""Whole pipelines with the real driver and real worker processes: what comes out equals a plain recount."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from pyspark import cloudpickle
from running import definition_of, pipeline_at

import headgate as hg
from headgate.connectors.base import SourceContext
from headgate.connectors.filecommit import read_committed

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import tests

Start = Any


def generator(
    rows: int, rate: float | None = None, *, keys: int = 20, splits: int = 3, batch: int = 500
) -> hg.Generator:
    return hg.Generator(
        columns={"id": hg.RowNumber(), "key": hg.Uniform(0, keys), "value": hg.Uniform(0, 1_000)},
        rows=rows,
        rows_per_second=rate,
        time="deterministic",
        splits=splits,
        batch_rows=batch,
        pool_rows=65_536,
    )


def events(source: hg.Generator) -> pl.DataFrame:
    reader = source.open(SourceContext("p", "source", 0, 1, None))
    batches = []
    while not reader.is_finished():
        polled = reader.poll()
        if polled is not None:
            batches.append(polled.batch)
    return pl.from_arrow(pa.Table.from_batches(batches)).sort("id")


def same(found: pl.DataFrame, expected: pl.DataFrame) -> None:
    columns = expected.columns
    assert found.select(columns).sort(columns).rows() == expected.sort(columns).rows()


def windowed(root: Path, source: hg.Generator, **options: Any) -> hg.Pipeline:
    pipeline = pipeline_at(root, **options)
    stream = pipeline.source(source).with_timestamps("ts")
    counts = stream.key_by("key").window(hg.Tumbling("1s")).agg(n=pl.len(), total=pl.col("value").sum())
    counts.sink(hg.FileSink(root / "out", "parquet"), name="out")
    return pipeline


def recounted(source: hg.Generator) -> pl.DataFrame:
    start = pl.col("ts").dt.truncate("1s").alias("window_start")
    return events(source).group_by("key", start).agg(n=pl.len().cast(pl.Int64), total=pl.col("value").sum())


@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_a_windowed_count_equals_a_recount(start: Start, tmp_path: Path, parallelism: int) -> None:
    source = generator(20_000)
    run = start(definition_of(windowed(tmp_path, source, parallelism=parallelism)))
    result = run.result()
    assert result.is_finished
    assert run.restarts == []
    same(read_committed(str(tmp_path / "out")), recounted(source))
    assert set(run.launcher.codes.values()) == {0}
