"""Flink SQL's half of ``bench/real_input``: windows of 5 s over files of bids, exactly once to files of Parquet.

It does not read files in their order, so its watermark waits for all of them; then no bid is late, and windows are
written at the end. The clock runs from the submission of the job, its planning included, to its end; the JVM has
started before. Runs in the environment of ``bench/peers/install.py``; its last printed line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.machine import CpuMeter
from bench.peers.flink_sql import environment, free_port, settings

INTERVAL_MS = 1_000
KEY_TYPES = {"auction": "BIGINT", "user": "STRING"}
OPTIONS = {
    "json": "'format' = 'json', 'json.timestamp-format.standard' = 'ISO-8601'",
    "csv": "'format' = 'csv', 'csv.ignore-parse-errors' = 'true'",  # the header
    "parquet": "'format' = 'parquet', 'parquet.utc-timezone' = 'true'",
}


def source_sql(files: Path) -> str:
    """Return the table of the directory ``files``, which has the name of its format."""
    form = files.name.removesuffix(".gz")
    # Its CSV knows no "T" between date and time.
    time_type, time_of = ("STRING", "REPLACE(date_time, 'T', ' ')") if form == "csv" else ("TIMESTAMP(6)", "date_time")
    return (
        "CREATE TEMPORARY TABLE bids (auction BIGINT, `user` STRING, price BIGINT, channel STRING, url STRING,"
        f" date_time {time_type}, ts AS CAST({time_of} AS TIMESTAMP(3)),"
        " WATERMARK FOR ts AS ts - INTERVAL '1' HOUR)"
        f" WITH ('connector' = 'filesystem', 'path' = 'file://{files}', {OPTIONS[form]})"
    )


def sink_sql(output: Path, key: str) -> str:
    """Return the table of results."""
    return (
        f"CREATE TEMPORARY TABLE results (window_start TIMESTAMP(3), `{key}` {KEY_TYPES[key]}, bids BIGINT,"
        " total BIGINT, highest BIGINT)"
        f" WITH ('connector' = 'filesystem', 'path' = 'file://{output}', {OPTIONS['parquet']})"
    )


def query_sql(key: str) -> str:
    """Return the windows."""
    return (
        f"INSERT INTO results SELECT window_start, `{key}`, COUNT(*), SUM(price), MAX(price)"
        " FROM TABLE(TUMBLE(TABLE bids, DESCRIPTOR(ts), INTERVAL '5' SECOND))"
        f" GROUP BY window_start, window_end, `{key}`"
    )


def measure(files: Path, output: Path, key: str, jars: Sequence[str], parallelism: int) -> dict[str, float]:
    """Run the job to its end."""
    directory = tempfile.mkdtemp(prefix="headgate-peer-")
    chosen = settings(
        parallelism=parallelism, directory=directory, port=free_port(), checkpoint_interval_ms=INTERVAL_MS
    )
    chosen["pipeline.jars"] = ";".join(f"file://{jar}" for jar in jars)
    chosen["table.local-time-zone"] = "UTC"
    chosen["restart-strategy.type"] = "none"  # a file that cannot be read is an error, and not read for ever
    try:
        tables = environment(chosen)
        tables.execute_sql(source_sql(files))
        tables.execute_sql(sink_sql(output, key))
        meter, begun = CpuMeter(), time.monotonic()
        tables.execute_sql(query_sql(key)).wait()
        return {"s": time.monotonic() - begun, "cpu_s": meter.cpu_seconds()}
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure once; print the result as the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--key", default="user")
    parser.add_argument("--jars", nargs="+", required=True)
    parser.add_argument("--cores", type=int, default=2)
    options = parser.parse_args(arguments)
    try:
        import pyflink  # noqa: F401
    except ImportError:
        sys.exit("apache-flink is not installed in this environment: run `make bench-peers`")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    found = measure(options.files, options.output, options.key, options.jars, options.cores)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
