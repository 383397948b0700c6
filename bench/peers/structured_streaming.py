"""The windowed count in Spark Structured Streaming: the first peer of ``bench/windowed_count``.

Counterpart of ``bench/headgate_windowed.py``: the same events (key, value, timestamp), the same 5 s tumbling count
and sum per key, two cores, exactly-once checkpoints on disk, output discarded. Structured Streaming trades latency
for throughput by the size of its micro-batches, so one measurement is a sweep over sizes. Every setting that speeds
it up without weakening exactly-once is switched on. Runs as a process with a JVM of its own:
``python -m bench.peers.structured_streaming --keys 1000``; its last printed line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from bench.machine import CpuMeter

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

BATCH_ROWS = (100_000, 250_000, 500_000, 1_000_000, 2_000_000, 4_000_000, 8_000_000, 16_000_000)
"""Sizes of the sweep, in rows per micro-batch."""

BATCH_ROWS_QUICK = (100_000, 1_000_000, 4_000_000, 16_000_000)

WARMUP_BATCHES = 3
"""First micro-batches of each size that are not measured: planning, code generation, opening RocksDB."""

MEASURED_BATCHES_MIN = 5
"""Below this a median says nothing; large micro-batches run longer than asked for because of it."""

SIZE_SECONDS_MAX = 120
"""A size that has not delivered its batches by then is an error, not a slow result."""

BATCH_MS_MAX = 1_000
"""The bound of "its best with micro-batches of at most one second"."""

BATCH_MS_AIMED = 930
"""Where the extra size between two sizes of the sweep aims, a little under the bound."""

PROVIDER = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
ROCKSDB = "spark.sql.streaming.stateStore.rocksdb"


def settings(cores: int) -> dict[str, str]:
    """Return the Spark configuration of the peer; also what docs/benchmarks.md quotes."""
    return {
        "spark.master": f"local[{cores}]",
        "spark.driver.memory": "6g",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.sql.shuffle.partitions": str(cores),
        "spark.sql.streaming.stateStore.providerClass": PROVIDER,
        f"{ROCKSDB}.changelogCheckpointing.enabled": "true",
        # Counting the rows of the state costs a read per write; off is the documented setting for speed.
        f"{ROCKSDB}.trackTotalNumberOfRows": "false",
        "spark.sql.streaming.numRecentProgressUpdates": "10000",
    }


def advance_ms(batch_rows: int) -> int:
    """Return how far event time moves per micro-batch.

    Roughly the time such a batch takes, so that windows close about as often as with events stamped by the clock.
    """
    return max(200, batch_rows // 6_000)


def windowed_count(
    spark: SparkSession, *, keys: int, batch_rows: int, cores: int, batch_ms: int | None = None
) -> DataFrame:
    """Return the streaming query: columns ``window``, ``key``, ``events``, ``total``.

    All rows of a micro-batch carry one event time, ``batch_ms`` (default: ``advance_ms``) after the batch before.
    """
    from pyspark.sql import functions as f

    source = (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", batch_rows)
        .option("numPartitions", cores)
        .option("startTimestamp", 1_700_000_000_000)
        .option("advanceMillisPerBatch", batch_ms or advance_ms(batch_rows))
        .load()
    )
    # A multiplier coprime to any number of keys in use scatters the running number over the keys; cheaper than a hash.
    events = source.select(
        (f.col("value") * f.lit(2_654_435_761) % f.lit(keys)).alias("key"),
        (f.col("value") % f.lit(1_000)).alias("value"),
        f.col("timestamp"),
    )
    return (
        events.withWatermark("timestamp", "0 seconds")
        .groupBy(f.window("timestamp", "5 seconds"), "key")
        .agg(f.count(f.lit(1)).alias("events"), f.sum("value").alias("total"))
    )


def figures_of(progress: Sequence[Mapping[str, Any]], batch_rows: int) -> dict[str, float]:
    """Return throughput and batch time of the micro-batches in ``progress``, warm-up already removed.

    The clock runs from the start of the first batch to the end of the last, so pauses between batches count.
    """
    durations = [float(batch["durationMs"]["triggerExecution"]) for batch in progress]
    starts = [_epoch_ms(str(batch["timestamp"])) for batch in progress]
    elapsed_ms = starts[-1] + durations[-1] - starts[0]
    rows = sum(int(batch["numInputRows"]) for batch in progress)
    return {
        "batch_rows": batch_rows,
        "batches": len(progress),
        "events_per_s": round(rows / elapsed_ms * 1_000),
        "batch_ms_median": statistics.median(durations),
        "batch_ms_max": max(durations),
    }


def summary_of(sizes: Sequence[Mapping[str, float]]) -> dict[str, float | None]:
    """Return the best throughput at any latency and the best with batches of at most a second (None: no such size)."""
    fast = [size for size in sizes if size["batch_ms_median"] <= BATCH_MS_MAX]
    best = max(sizes, key=lambda size: size["events_per_s"])
    best_fast = max(fast, key=lambda size: size["events_per_s"], default=None)
    return {
        "events_per_s_best": best["events_per_s"],
        "batch_rows_best": best["batch_rows"],
        "batch_ms_best": best["batch_ms_median"],
        "events_per_s_best_1s": best_fast["events_per_s"] if best_fast else None,
        "batch_rows_best_1s": best_fast["batch_rows"] if best_fast else None,
        "batch_ms_best_1s": best_fast["batch_ms_median"] if best_fast else None,
    }


def size_for_one_second(sizes: Sequence[Mapping[str, float]]) -> int | None:
    """Return a size between the sweep's last below and first above a second, or None where there is no such pair.

    Without it the peer's best at a second would depend on how coarse the sweep happens to be.
    """
    ordered = sorted(sizes, key=lambda size: size["batch_rows"])
    for below, above in itertools.pairwise(ordered):
        low, high = below["batch_ms_median"], above["batch_ms_median"]
        if low < BATCH_MS_AIMED < high and high > BATCH_MS_MAX:
            share = (BATCH_MS_AIMED - low) / (high - low)
            rows = below["batch_rows"] + share * (above["batch_rows"] - below["batch_rows"])
            return int(rows) // 10_000 * 10_000
    return None


def measure(
    spark: SparkSession, *, keys: int, batch_rows: int, cores: int, seconds: float, mode: str
) -> dict[str, float]:
    """Run one size for about ``seconds`` after its warm-up and return its figures."""
    directory = tempfile.mkdtemp(prefix="headgate-peer-")
    query = (
        windowed_count(spark, keys=keys, batch_rows=batch_rows, cores=cores)
        .writeStream.format("noop")
        .outputMode(mode)
        .option("checkpointLocation", directory)
        .start()
    )
    try:
        _wait_for(query, batches=WARMUP_BATCHES, seconds=0)
        meter = CpuMeter()
        _wait_for(query, batches=WARMUP_BATCHES + MEASURED_BATCHES_MIN, seconds=seconds)
        cores_used = meter.cpu_seconds() / meter.seconds()
        progress = _batches(query)[WARMUP_BATCHES:]
    finally:
        query.stop()
        shutil.rmtree(directory, ignore_errors=True)
    figures = figures_of(progress, batch_rows)
    # Below the cores of the machine, something else was running and the rate is too low.
    return figures | {
        "cpu_cores_used": round(cores_used, 2),
        "events_per_cpu_s": round(figures["events_per_s"] / cores_used),
    }


def sweep(spark: SparkSession, *, keys: int, cores: int, seconds: float, mode: str, sizes: Sequence[int]) -> list[Any]:
    """Measure every size, then the one that should take just under a second; print a line for each."""
    # The first query of a JVM pays for class loading and compilation; it is thrown away.
    measure(spark, keys=keys, batch_rows=min(1_000_000, max(sizes)), cores=cores, seconds=3, mode=mode)
    results: list[dict[str, float]] = []
    for rows in sizes:
        results.append(measure(spark, keys=keys, batch_rows=rows, cores=cores, seconds=seconds, mode=mode))
        print(json.dumps(results[-1]), flush=True)
    between = size_for_one_second(results)
    if between is not None and between not in sizes:
        results.append(measure(spark, keys=keys, batch_rows=between, cores=cores, seconds=seconds, mode=mode))
        print(json.dumps(results[-1]), flush=True)
    return results


def session(cores: int) -> SparkSession:
    """Start a local Spark with the peer's settings."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName("windowed-count-peer")
    for name, value in settings(cores).items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the sweep and print its result as the last line."""
    parser = argparse.ArgumentParser(description="windowed count in Structured Streaming")
    parser.add_argument("--keys", type=int, default=1_000)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=8.0, help="measured time per micro-batch size")
    parser.add_argument("--mode", choices=["append", "update"], default="append")
    parser.add_argument("--batch-rows", type=int, nargs="+", default=list(BATCH_ROWS))
    options = parser.parse_args(arguments)
    spark = session(options.cores)
    try:
        sizes = sweep(
            spark,
            keys=options.keys,
            cores=options.cores,
            seconds=options.seconds,
            mode=options.mode,
            sizes=options.batch_rows,
        )
        version = spark.version
    finally:
        spark.stop()
    head = {"peer": "structured_streaming", "version": version, "keys": options.keys, "mode": options.mode}
    print(json.dumps(head | summary_of(sizes) | {"sizes": sizes}), flush=True)


def _batches(query: StreamingQuery) -> list[Mapping[str, Any]]:
    return [batch for batch in query.recentProgress if batch["numInputRows"] > 0]


def _wait_for(query: StreamingQuery, *, batches: int, seconds: float) -> None:
    started = time.monotonic()
    while time.monotonic() - started < seconds or len(_batches(query)) < batches:
        if not query.isActive:
            raise RuntimeError(f"the query stopped before {batches} micro-batches were done: {query.exception()}")
        if time.monotonic() - started > SIZE_SECONDS_MAX:
            raise RuntimeError(f"only {len(_batches(query))} of {batches} micro-batches in {SIZE_SECONDS_MAX} s")
        time.sleep(0.2)


def _epoch_ms(timestamp: str) -> float:
    return datetime.fromisoformat(timestamp.replace("Z", "+00:00")).timestamp() * 1_000


if __name__ == "__main__":
    main()
