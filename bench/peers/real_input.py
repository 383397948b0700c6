"""The windows of ``bench/real_input`` in Structured Streaming, and in Polars as the limit, over the same files.

Structured Streaming reads what is there, one file in each micro-batch (``availableNow``), with its state in RocksDB,
and writes Parquet exactly once; the clock runs from the start of the first batch to the end of the last. Its watermark
never passes the last window, which is not written. Polars reads all files at once, in its streaming or its in-memory
engine, and writes one file of Parquet; nothing is durable before the end. Runs as a process of its own:
``python -m bench.peers.real_input SYSTEM FILES OUTPUT``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import polars as pl

from bench.bid_files import COLUMNS
from bench.machine import CpuMeter
from bench.peers.structured_streaming import settings

SYSTEMS = ("streaming", "polars-streaming", "polars-in-memory")
TYPES: dict[object, str] = {int: "bigint", str: "string"}


def streaming(files: Path, output: Path, key: str, cores: int) -> dict[str, Any]:
    """Run Structured Streaming."""
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as f

    builder = SparkSession.builder
    for name, value in settings(cores).items():
        builder = builder.config(name, value)
    spark = builder.config("spark.sql.session.timeZone", "UTC").getOrCreate()
    schema = ", ".join(f"{name} {TYPES.get(kind, 'timestamp')}" for name, kind in COLUMNS.items())
    form = files.name.removesuffix(".gz")
    with tempfile.TemporaryDirectory(prefix="headgate-peer-") as directory:
        read = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1)
        bids = (read.option("header", "true") if form == "csv" else read).format(form).load(str(files))
        results = (
            bids.withWatermark("date_time", "0 seconds")
            .groupBy(f.window("date_time", "5 seconds"), key)
            .agg(f.count(f.lit(1)).alias("bids"), f.sum("price").alias("total"), f.max("price").alias("highest"))
            .select(f.col("window.start").alias("window_start"), key, "bids", "total", "highest")
        )
        writer = results.writeStream.format("parquet").outputMode("append").trigger(availableNow=True)
        meter = CpuMeter()
        query = writer.option("checkpointLocation", f"{directory}/c").start(str(output))
        query.awaitTermination()
        cpu_s = meter.cpu_seconds()
        batches = [batch for batch in query.recentProgress if batch["numInputRows"] or batch["batchId"]]
        spark.stop()
    busy_s = sum(float(batch["durationMs"]["triggerExecution"]) for batch in batches) / 1_000
    return {"s": busy_s, "cpu_s": cpu_s, "batches": len(batches)}


def polars(files: Path, output: Path, key: str, engine: Literal["streaming", "in-memory"]) -> dict[str, Any]:
    """Run Polars."""
    meter, started = CpuMeter(), time.monotonic()
    path = f"{files}/*"
    texts = {name: pl.Int64 if kind is int else pl.String for name, kind in COLUMNS.items()}
    if files.name == "parquet":
        bids = pl.scan_parquet(path)
    else:
        read = pl.scan_csv(path, schema=texts) if files.name == "csv" else pl.scan_ndjson(path, schema=texts)
        bids = read.with_columns(pl.col("date_time").str.to_datetime("%Y-%m-%dT%H:%M:%S%.f", time_unit="us"))
    windows = bids.group_by(pl.col("date_time").dt.truncate("5s").alias("window_start"), key)
    results = windows.agg(bids=pl.len(), total=pl.col("price").sum(), highest=pl.col("price").max())
    output.mkdir(parents=True, exist_ok=True)
    results.collect(engine=engine).write_parquet(output / "all.parquet")
    return {"s": time.monotonic() - started, "cpu_s": meter.cpu_seconds()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure; print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("files", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--key", default="user")
    parser.add_argument("--cores", type=int, default=2)
    options = parser.parse_args(arguments)
    if options.system == "streaming":
        found = streaming(options.files, options.output, options.key, options.cores)
    else:
        engine: Any = options.system.removeprefix("polars-")
        found = polars(options.files, options.output, options.key, engine)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
