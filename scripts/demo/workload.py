"""A Spark program whose only purpose here is the log it writes: jobs of many small tasks and blocks, one after another,
until it is told to stop (by a file) or has no parent any more.

Usage: workload.py STOP_FILE
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from pyspark.sql import SparkSession

PAUSE_S = 0.1
MAP_TASKS, REDUCE_TASKS, KEYS = 100, 16, 64


def main(stop_file: Path) -> None:
    """Run queries."""
    parent = os.getppid()
    os.nice(10)  # the pipeline comes first
    spark = (
        SparkSession.builder.master("local[1]")
        .appName("demo-workload")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.adaptive.enabled", "false")
        .config("spark.sql.shuffle.partitions", str(REDUCE_TASKS))
        .getOrCreate()
    )
    while not stop_file.exists() and os.getppid() == parent:
        # Small tasks and small shuffle blocks: their lives are what Spark logs most about.
        numbers = spark.range(0, MAP_TASKS * KEYS, 1, MAP_TASKS)
        numbers.groupBy((numbers.id % KEYS).alias("key")).count().write.format("noop").mode("overwrite").save()
        time.sleep(PAUSE_S)
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
