"""Structured Streaming's half of ``bench/kafka``: reads a topic into nothing, or copies it to another one.

Micro-batches of several sizes; the best rate counts. The first batches of each size are not measured. Its sink for
Kafka is at least once. Run by ``bench/kafka``; its last printed line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.machine import CpuMeter
from bench.peers.install import streaming_connector
from bench.peers.structured_streaming import figures_of

CORES = 2
WARMUP_BATCHES = 2
SCHEMA = "id LONG, user STRING, amount DOUBLE"
SHARES = (8, 4)
"""A micro-batch holds this part of the topic."""

TIMEOUT_S = 300.0


def session(jars: Sequence[Path]) -> Any:
    """Start a local Spark with the connector."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName("kafka-peer")
    chosen = {
        "spark.master": f"local[{CORES}]",
        "spark.driver.memory": "4g",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.jars": ",".join(map(str, jars)),
    }
    for name, value in chosen.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def query(spark: Any, brokers: str, topic: str, target: str | None, batch_rows: int, directory: str) -> Any:
    """Start to read, with JSON decoded unless the topic is raw; or to copy."""
    from pyspark.sql import functions as f

    options = {
        "kafka.bootstrap.servers": brokers,
        "subscribe": topic,
        "startingOffsets": "earliest",
        "maxOffsetsPerTrigger": str(batch_rows),
        "kafka.fetch.max.bytes": str(50 << 20),
        "kafka.max.partition.fetch.bytes": str(16 << 20),
        "kafka.max.poll.records": "100000",
    }
    read = spark.readStream.format("kafka").options(**options).load()
    if target is not None:
        written = read.select("value").writeStream.format("kafka").option("kafka.bootstrap.servers", brokers)
        return written.option("topic", target).option("checkpointLocation", directory).start()
    if topic.startswith("raw"):
        rows = read.select("value", "timestamp", "partition", "offset")
    else:
        rows = read.select(f.from_json(f.col("value").cast("string"), SCHEMA).alias("row")).select("row.*")
    return rows.writeStream.format("noop").option("checkpointLocation", directory).start()


def measure(
    spark: Any, brokers: str, topic: str, target: str | None, batch_rows: int, batches: int
) -> dict[str, float]:
    """Run one size; return its figures."""
    directory = tempfile.mkdtemp(prefix="headgate-peer-")
    started = query(spark, brokers, topic, target, batch_rows, directory)
    try:
        begun = time.monotonic()
        warm = done_after(started, WARMUP_BATCHES, begun)
        meter = CpuMeter()
        done = done_after(started, batches, begun)
        rows = sum(int(one["numInputRows"]) for one in done[len(warm) :])
        cpu_s, idle_s, seconds = meter.cpu_seconds(), meter.idle_seconds(), meter.seconds()
    finally:
        started.stop()
        shutil.rmtree(directory, ignore_errors=True)
    figures = figures_of(done[WARMUP_BATCHES:], batch_rows)
    return {
        "records_per_s": figures["events_per_s"],
        "records_per_cpu_s": rows / cpu_s,
        "cpu_cores_used": cpu_s / seconds,
        "cores_idle": idle_s / seconds,
        "batch_rows": batch_rows,
    }


def done_after(started: Any, batches: int, begun_s: float) -> list[Any]:
    """Wait for so many micro-batches with records; return their progress."""
    while len(done := [one for one in started.recentProgress if one["numInputRows"] > 0]) < batches:
        if not started.isActive or time.monotonic() - begun_s > TIMEOUT_S:
            raise RuntimeError(f"only {len(done)} of {batches} micro-batches: {started.exception()}")
        time.sleep(0.05)
    return done


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all sizes; print the best as the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--brokers", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--target", help="copy to this topic, instead of reading to nothing")
    parser.add_argument("--records", type=int, required=True)
    options = parser.parse_args(arguments)
    spark = session(streaming_connector())
    try:
        found = [
            measure(spark, options.brokers, options.topic, options.target, options.records // share, share)
            for share in SHARES
        ]
    finally:
        spark.stop()
    print(json.dumps(max(found, key=lambda one: one["records_per_s"])), flush=True)


if __name__ == "__main__":
    main()
