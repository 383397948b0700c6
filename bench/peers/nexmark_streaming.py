"""Structured Streaming's half of ``bench/nexmark``: queries over the files, their results thrown away.

A micro-batch takes the next file of each kind and is a checkpoint; the state is in RocksDB. A last file, with records
an hour later, closes the windows; these records are not among the results. First a query runs over the small files:
its results are collected, and the JVM is warm. The clock runs from the start of the first micro-batch to the end of
the last. Runs as a process of its own; its last printed line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.machine import CpuMeter
from bench.nexmark_results import digest, last_rows
from bench.nexmark_texts import STREAMING, UPDATING
from bench.peers.structured_streaming import settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CORES = 2
SIDE_ROWS = 10_000
ERROR_CHARACTERS = 2_000
QUIET_S = 1_800
"""Records that are so much later than all before them close the windows and are left out."""

COLUMNS = {
    "person": "id bigint, name string, email_address string, credit_card string, city string, state string, "
    "date_time timestamp, extra string",
    "auction": "id bigint, item_name string, description string, initial_bid bigint, reserve bigint, "
    "date_time timestamp, expires timestamp, seller bigint, category bigint, extra string",
    "bid": "auction bigint, bidder bigint, price bigint, channel string, url string, date_time timestamp, extra string",
}


def session() -> SparkSession:
    """Start a local Spark with the peer's settings."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName("nexmark-peer")
    for name, value in settings(CORES).items():
        builder = builder.config(name, value)
    return builder.config("spark.sql.session.timeZone", "UTC").getOrCreate()


def stream_of(spark: SparkSession, query: str, files: Path) -> DataFrame:
    """Return the results of a query over the tables of ``files``, one more file of each in a micro-batch."""
    from pyspark.sql import functions as f

    for kind, columns in COLUMNS.items():
        last = sorted((files / kind).glob("*.parquet"))[-1]
        latest = spark.read.schema(columns).parquet(str(last)).agg(f.max("date_time")).collect()[0][0]
        read = spark.readStream.schema(columns).option("maxFilesPerTrigger", 1).parquet(str(files / kind))
        events = read.withWatermark("date_time", "4 seconds").where(
            f.col("date_time") < f.lit(latest) - f.expr(f"INTERVAL {QUIET_S} SECONDS")
        )
        events.createOrReplaceTempView(kind)
        if kind == "bid":
            plain = read.where(f.col("date_time") < f.lit(latest) - f.expr(f"INTERVAL {QUIET_S} SECONDS"))
            plain.withColumn("p_time", f.current_timestamp()).createOrReplaceTempView("bid_now")
    spark.range(SIDE_ROWS).select(f.col("id").alias("key"), f.col("id").alias("value")).createOrReplaceTempView(
        "side_input"
    )
    return spark.sql(STREAMING[query])


def results(spark: SparkSession, query: str, files: Path) -> dict[str, Any]:
    """Run to the end and return how many rows are left of the results, and their digest."""
    rows: list[dict[str, Any]] = []

    def collect(frame: DataFrame, _batch: int) -> None:
        rows.extend(row.asDict() for row in frame.collect())

    with tempfile.TemporaryDirectory(prefix="headgate-peer-") as directory:
        writer = stream_of(spark, query, files).writeStream.foreachBatch(collect).outputMode(_mode(query))
        writer = writer.option("checkpointLocation", f"{directory}/c").trigger(availableNow=True)
        writer.start().awaitTermination()
    if query == "q12":  # the last value of each window
        rows = list({(row["bidder"], row["starttime"]): row for row in rows}.values())
    return digest(query, last_rows(query, rows))


def measure(spark: SparkSession, query: str, files: Path) -> dict[str, float]:
    """Run to the end; return the seconds by the clock and of processor time."""
    with tempfile.TemporaryDirectory(prefix="headgate-peer-") as directory:
        stream = stream_of(spark, query, files)
        writer = stream.writeStream.outputMode(_mode(query)).trigger(availableNow=True)
        if query == "q10":
            writer = writer.format("csv").partitionBy("dt", "hm").option("path", f"{directory}/out")
        else:
            writer = writer.format("noop")
        meter = CpuMeter()
        running = writer.option("checkpointLocation", f"{directory}/c").start()
        running.awaitTermination()
        cpu_s = meter.cpu_seconds()
        batches = running.recentProgress
    return {"s": _elapsed_s(batches), "cpu_s": cpu_s, "batches": len(batches)}


def of_query(spark: SparkSession, query: str, options: argparse.Namespace) -> dict[str, Any]:
    """Check one query, then measure it; one that fails is an ``error`` and leaves the others alone."""
    try:
        found = results(spark, query, options.check_files / "parts")
        return found | {"turns": [measure(spark, query, options.files / "parts") for _ in range(options.turns)]}
    except Exception as error:  # whatever Spark says
        return {"error": str(error).strip()[:ERROR_CHARACTERS]}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run queries one after another; print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("queries", nargs="+", choices=list(STREAMING))
    parser.add_argument("--files", type=Path, required=True)
    parser.add_argument("--check-files", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=1)
    options = parser.parse_args(arguments)
    spark = session()
    found: dict[str, dict[str, Any]] = {}
    for query in options.queries:
        found[query] = of_query(spark, query, options)
        print(query, json.dumps(found[query]), flush=True)
    spark.stop()
    print(json.dumps(found), flush=True)


def _mode(query: str) -> str:
    return "update" if query in UPDATING else "append"


def _elapsed_s(batches: Sequence[Mapping[str, Any]]) -> float:
    """Return the time from the start of the first micro-batch to the end of the last."""

    def at(batch: Mapping[str, Any]) -> float:
        return datetime.fromisoformat(str(batch["timestamp"]).replace("Z", "+00:00")).timestamp()

    return at(batches[-1]) + float(batches[-1]["durationMs"]["triggerExecution"]) / 1_000 - at(batches[0])


if __name__ == "__main__":
    main()
