"""The keyed update in Spark Structured Streaming with RocksDB: the peer of ``bench/keyed_update.py``.

Count and last value per key in update mode, with the settings of ``structured_streaming`` and RocksDB's memory bounded
as Headgate's is. The state is filled once; every size of micro-batches then goes on from its checkpoint. Run as a
process with a JVM of its own: ``python -m bench.peers.keyed_update --keys 1000000``; its last line is one JSON object,
with what each way to draw keys reached.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bench.peers.structured_streaming import ROCKSDB, figures_of, settings, summary_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

BATCH_ROWS = (100_000, 400_000, 1_600_000, 6_400_000)
BATCH_ROWS_QUICK = (100_000, 400_000)
FILL_BATCH_ROWS = 2_000_000
DRAWS = ("zipf", "uniform")
SCATTER = 2_654_435_761

WARMUP_BATCHES = 2
MEASURED_BATCHES_MIN = 3
SECONDS_MAX = 3_600
"""What takes longer is an error, not a slow result."""


def updates(spark: SparkSession, key: Column, *, batch_rows: int, cores: int) -> DataFrame:
    """Return the streaming query: columns ``key``, ``count``, ``last``."""
    from pyspark.sql import functions as f

    source = (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", batch_rows)
        .option("numPartitions", cores)
        .load()
    )
    events = source.select(key.alias("key"), (f.col("value") % f.lit(1_000)).alias("value"))
    return events.groupBy("key").agg(f.count(f.lit(1)).alias("count"), f.last("value").alias("last"))


def key_of(draw: str, keys: int) -> Column:
    """Return the key of record ``value``: each one once and then again (``fill``), or as ``draw`` says."""
    from pyspark.sql import functions as f

    number = f.col("value")
    mixed = f.xxhash64(number)
    match draw:
        case "fill":
            return number * f.lit(SCATTER) % f.lit(keys)
        case "uniform":
            return f.pmod(mixed, f.lit(keys))
        case _:
            share = f.shiftrightunsigned(mixed, 11).cast("double") / f.lit(float(1 << 53))
            return f.pow(f.lit(float(keys)), share).cast("long") * f.lit(SCATTER) % f.lit(keys)


class Peer:
    """One query that is stopped and goes on with other keys and other sizes of micro-batches."""

    def __init__(self, spark: SparkSession, keys: int, cores: int, directory: str) -> None:
        self._spark = spark
        self._keys = keys
        self._cores = cores
        self._directory = directory

    def fill(self, batch_rows: int) -> float:
        """Give every key its state; return how many seconds that takes."""
        begun = time.monotonic()
        batches = -(-self._keys // batch_rows)
        self._run("fill", batch_rows, batches=batches, seconds=0)
        return time.monotonic() - begun

    def measure(self, draw: str, batch_rows: int, seconds: float) -> dict[str, float]:
        """Return the figures of one size of micro-batches."""
        wanted = WARMUP_BATCHES + MEASURED_BATCHES_MIN
        progress = self._run(draw, batch_rows, batches=wanted, seconds=seconds)
        return figures_of(progress[WARMUP_BATCHES:], batch_rows)

    def _run(self, draw: str, batch_rows: int, *, batches: int, seconds: float) -> list[Any]:
        """Run until there were so many micro-batches, and for so long behind the warm-up; return their progress."""
        query = (
            updates(self._spark, key_of(draw, self._keys), batch_rows=batch_rows, cores=self._cores)
            .writeStream.format("noop")
            .outputMode("update")
            .option("checkpointLocation", self._directory)
            .start()
        )
        begun = time.monotonic()
        warm: float | None = None
        try:
            while True:
                found = [batch for batch in query.recentProgress if batch["numInputRows"] > 0]
                if warm is None and len(found) >= WARMUP_BATCHES:
                    warm = time.monotonic()
                if len(found) >= batches and warm is not None and time.monotonic() - warm >= seconds:
                    return found
                if not query.isActive:
                    raise RuntimeError(f"the query stopped after {len(found)} micro-batches: {query.exception()}")
                if time.monotonic() - begun > SECONDS_MAX:
                    raise RuntimeError(f"only {len(found)} of {batches} micro-batches in {SECONDS_MAX} s")
                query.awaitTermination(0.2)
        finally:
            query.stop()


def session(cores: int, memory_mb: int) -> SparkSession:
    """Start a local Spark with the peer's settings."""
    from pyspark.sql import SparkSession

    own = {f"{ROCKSDB}.boundedMemoryUsage": "true", f"{ROCKSDB}.maxMemoryUsageMB": str(memory_mb)}
    builder = SparkSession.builder.appName("keyed-update-peer")
    for name, value in (settings(cores) | own).items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill the state, measure every size for each draw, and print the result as the last line."""
    parser = argparse.ArgumentParser(description="count and last value per key in Structured Streaming")
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--memory-mb", type=int, default=2_000)
    parser.add_argument("--seconds", type=float, default=60.0, help="measured time per size")
    parser.add_argument("--batch-rows", type=int, nargs="+", default=list(BATCH_ROWS))
    parser.add_argument("--draws", nargs="+", choices=DRAWS, default=list(DRAWS), help="how keys are drawn")
    options = parser.parse_args(arguments)
    directory = tempfile.mkdtemp(prefix="headgate-peer-")
    spark = session(options.cores, options.memory_mb)
    try:
        peer = Peer(spark, options.keys, options.cores, directory)
        result: dict[str, Any] = {"peer": "keyed_update", "version": spark.version, "keys": options.keys}
        result["fill_s"] = peer.fill(min(FILL_BATCH_ROWS, options.keys))
        for draw in options.draws:
            sizes = []
            for rows in options.batch_rows:
                sizes.append(peer.measure(draw, rows, options.seconds))
                print(json.dumps({"draw": draw} | sizes[-1]), flush=True)
            result[draw] = summary_of(sizes) | {"sizes": sizes}
    finally:
        spark.stop()
        shutil.rmtree(directory, ignore_errors=True)
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
