"""10,000,000 events of a stream as a Spark DataFrame, beside the same rows in JSON lines and in Parquet.

Rows have a number, a text and a time. Spark reads each and drops the rows, in turns, after one reading of each that is
not measured. JSON lines get their columns told, since finding them out would read the files twice. Settings: ``rows``,
``turns``, ``cores``.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

import headgate as hg
from bench.harness import Options, Result, at_most, median
from bench.peers.structured_streaming import session
from bench.state_reading import read_s

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

NAME = "store_dataframe"

JSON_MAX, PARQUET_MAX = 1.0, 2.0
STREAM = "bench/rows"
BATCH_ROWS = 1_000_000


def run(options: Options) -> Result:
    """Read all three in turns."""
    rows, turns = int(options.number("rows", 10_000_000, quick=500_000)), int(options.number("turns", 7, quick=3))
    cores = int(options.number("cores", 2))
    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as directory:
        store = f"{directory}/store"
        fill(store, rows)
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the data source runs in Python workers
        spark = session(cores)
        try:
            hg.register_streams(spark)
            stream = spark.read.format("headgate").option("store", store)
            whole = stream.load(STREAM)
            whole.repartition(cores).write.json(f"{directory}/json")
            whole.repartition(cores).write.parquet(f"{directory}/parquet")
            frames: dict[str, Callable[[], DataFrame]] = {
                "stream": lambda: stream.load(STREAM),
                "json": lambda: spark.read.schema(whole.schema).json(f"{directory}/json"),
                "parquet": lambda: spark.read.parquet(f"{directory}/parquet"),
            }
            for name, frame in frames.items():
                if frame().count() != rows:
                    raise RuntimeError(f"{name} has not {rows} rows")
            for frame in frames.values():
                read_s(frame())
            taken = [{name: read_s(frame()) for name, frame in frames.items()} for _ in range(turns)]
        finally:
            spark.stop()
    figures: dict[str, Any] = {"rows": rows}
    figures |= {f"{name}_s": median([turn[name] for turn in taken]) for name in frames}
    for name in ("json", "parquet"):
        figures[f"against_{name}"] = median([turn["stream"] / turn[name] for turn in taken])
    return Result(figures, {"against_json": at_most(JSON_MAX), "against_parquet": at_most(PARQUET_MAX)})


def fill(root: str, rows: int) -> None:
    """Write the rows into a stream of a new store."""
    random = np.random.default_rng(7)
    with hg.Store.open(root) as store:
        for first in range(0, rows, BATCH_ROWS):
            count = min(BATCH_ROWS, rows - first)
            numbers = np.arange(first, first + count)
            texts = pl.Series(random.integers(0, 1_000_000, count)).cast(pl.String)
            columns = {"id": numbers, "item": "item-" + texts, "at": numbers.astype("datetime64[us]")}
            batch = pl.DataFrame(columns).to_arrow().combine_chunks().to_batches()[0]
            store.create_stream(STREAM, batch.schema, routing_key="id", if_not_exists=True)
            with store.writer(STREAM, linger=None) as writer:
                writer.append(batch)
