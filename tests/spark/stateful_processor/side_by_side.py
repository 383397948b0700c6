"""The same processors on the same data under Structured Streaming and under Headgate, in one Spark session.

Run by ``test_side_by_side`` as a process of its own: prints one JSON object.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import timestamp_millis
from pyspark.sql.types import StructType

import headgate as hg
from headgate.spark.stateful_handles import struct_of
from spark.stateful_processor.stateful_processors import GAP_MS, OUTPUT, Kinds, Sessions, SessionsInPandas

TRIES = 10
"""Spark waits ten seconds for Python, whatever else the machine does; a query goes on where it was."""

SCHEMA = "user STRING, page STRING, ms BIGINT, amount DOUBLE"
FILES, ROWS_PER_FILE = 2, 100
TEXTS = [
    SCHEMA,
    "a int not null, b: array<struct<c: date, `d e`: decimal(10,2)>> comment 'x', m map<string, tinyint>",
    "`ü` binary, t timestamp_ntz, u TIMESTAMP_LTZ, f REAL, n NUMERIC(3), l LONG, s SHORT, y BYTE, o BOOLEAN",
]


def visits() -> list[list[dict[str, Any]]]:
    """Return the rows of each file, in the order of their times; the last one only moves event time on."""
    dice, now, files = random.Random(7), 0, []
    for _ in range(FILES):
        rows = []
        for _ in range(ROWS_PER_FILE):
            now += dice.choice((1, 100, 3_000, GAP_MS + 1))
            rows.append({"user": dice.choice("abcd"), "page": dice.choice("xyz"), "ms": now, "amount": 0.5})
        files.append(rows)
    return [*files, [{"user": "flush", "page": "x", "ms": now + 10 * GAP_MS, "amount": 0.0}]]


def read_alike(text: str) -> bool:
    """Whether both readings of DDL text have the same names, types and nulls."""
    readings = (struct_of(text), StructType.fromDDL(text))
    ours, sparks = ([(one.name, one.dataType, one.nullable) for one in found] for found in readings)
    return ours == sparks


def streamed(spark: SparkSession, directory: Path, name: str, processor: Any, output: str, mode: str) -> list[Any]:
    """Return what Structured Streaming makes of the files, one a micro-batch; without times, of the first file."""
    files = str(directory / "in" / ("*.json" if mode == "eventTime" else "0*.json"))
    source = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(files)
    timed = source.withColumn("time", timestamp_millis("ms")).withWatermark("time", "0 seconds")
    grouped = (timed if mode == "eventTime" else source).groupBy("user")
    verb = grouped.transformWithStateInPandas if name == "pandas" else grouped.transformWithState
    initial = totals(spark).groupBy("user") if mode == "eventTime" else None
    writer = (
        verb(processor, output, "append", mode, initial)
        .writeStream.format("parquet")
        .option("checkpointLocation", str(directory / f"{name}-checkpoints"))
        .trigger(availableNow=True)
    )
    for tries_left in reversed(range(TRIES)):
        try:
            writer.start(str(directory / name)).awaitTermination()
            break
        except StreamingQueryException as error:
            if "Python worker failed to connect back" not in str(error) or not tries_left:
                raise
    return [list(row) for row in spark.read.schema(output).parquet(str(directory / name)).collect()]


def totals(spark: SparkSession) -> DataFrame:
    return spark.createDataFrame([("a", 100.0), ("z", 7.0)], "user STRING, amount DOUBLE")


def under_headgate(spark: SparkSession, name: str, processor: Any, output: str, mode: str) -> list[Any]:
    rows = [row for file in visits() for row in file]
    keyed = hg.Pipeline(name, parallelism=2).source(hg.FromRows(rows)).with_timestamps("ms").key_by("user")
    verb = keyed.transform_with_state_in_pandas if "pandas" in name else keyed.transform_with_state
    found = verb(processor, output, time_mode=mode, initial_state=totals(spark) if mode == "eventTime" else None)
    return [list(row) for row in found.collect().rows()]


def comparable(rows: list[Any]) -> list[list[Any]]:
    """Sessions close by a timer or by the next record, as batches fall; the record of the end is nobody's."""
    told = [["closed" if value in ("expired", "passed") else value for value in row] for row in rows]
    return sorted(row for row in told if row[0] != "flush")


def main(directory: Path) -> None:
    (directory / "in").mkdir()
    for number, rows in enumerate(visits()):
        path = directory / "in" / f"{number}.json"
        path.write_text("\n".join(json.dumps(row) for row in rows))
        os.utime(path, (number + 1, number + 1))  # Spark reads files in the order of their times
    provider = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "1")
        .config("spark.python.daemon.module", "headgate.spark.python_daemon")  # forks what has its imports done
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.streaming.stateStore.providerClass", provider)
        .getOrCreate()
    )
    told: dict[str, Any] = {"ddl": [read_alike(text) for text in TEXTS]}
    runs = [
        ("rows", Sessions(), OUTPUT, "eventTime"),
        ("pandas", SessionsInPandas(), OUTPUT, "eventTime"),
        ("kinds", Kinds(), "user STRING, said STRING", "none"),
    ]
    for run in runs:
        found = {"spark": streamed(spark, directory, *run), "headgate": under_headgate(spark, *run)}
        told[run[0]] = {engine: comparable(rows) for engine, rows in found.items()}
    print(json.dumps(told))
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
