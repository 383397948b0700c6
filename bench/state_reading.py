"""State as a DataFrame: all keys of a checkpoint through ``format("headgate-state")``, beside the same rows in Parquet.

A savepoint of one state with a number per key is made of a frame, in as many parts as there are cores, and the same
rows are written as Parquet, a file for each core. Spark reads either and drops the rows, in turns, after one reading of
each that is not measured. Settings: ``keys``, ``turns``, ``cores``.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

import headgate as hg
from bench.harness import Options, Result, at_most, median
from bench.peers.structured_streaming import session
from bench.stateful import NODE, ByBatch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

RATIO_MAX = 3.0

NAME = "state_reading"


def run(options: Options) -> Result:
    """Read both in turns."""
    keys, turns = int(options.number("keys", 10_000_000, quick=500_000)), int(options.number("turns", 7, quick=3))
    cores = int(options.number("cores", 2))
    rows = pl.DataFrame({"key": np.arange(keys), "value": np.random.default_rng(7).integers(0, 1 << 40, keys)})
    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as directory:
        saved, columns = f"{directory}/saved", f"{directory}/columns"
        hg.new_savepoint(pipeline(cores), saved).with_state(NODE, "total", rows).write()
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the data source runs in Python workers
        spark = session(cores)
        try:
            hg.register_state_source(spark)
            spark.createDataFrame(rows.to_arrow()).repartition(cores).write.parquet(columns)
            reader = spark.read.format("headgate-state").option("operator", NODE)
            frames: dict[str, Callable[[], DataFrame]] = {
                "state": lambda: reader.load(saved),
                "parquet": lambda: spark.read.parquet(columns),
            }
            for name, frame in frames.items():
                if frame().count() != keys:
                    raise RuntimeError(f"{name} has not {keys} rows")
            taken = [{name: read_s(frame()) for name, frame in frames.items()} for _ in range(turns)]
        finally:
            spark.stop()
    figures: dict[str, Any] = {"keys": keys}
    figures |= {f"{name}_s": median([turn[name] for turn in taken]) for name in frames}
    figures["ratio"] = median([turn["state"] / turn["parquet"] for turn in taken])
    return Result(figures, {"ratio": at_most(RATIO_MAX)})


def pipeline(parallelism: int) -> hg.Pipeline:
    """Return a pipeline that has the state."""
    p = hg.Pipeline("reading", parallelism=parallelism)
    source = p.source(hg.Generator(columns={"key": hg.Uniform(0, 10), "value": hg.Uniform(0, 10)}))
    source.key_by("key").process(ByBatch(), name=NODE).sink(hg.Discard())
    return p


def read_s(frame: DataFrame) -> float:
    """Return how long Spark takes to read all rows and columns."""
    begun = time.perf_counter()
    frame.write.format("noop").mode("overwrite").save()
    return time.perf_counter() - begun
