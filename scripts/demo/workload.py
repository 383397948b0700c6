"""A Spark program whose only purpose here is the log it writes: jobs of many small tasks, one after another,
until it is told to stop (by a file) or has no parent any more.

Usage: workload.py STOP_FILE
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pyspark.sql import SparkSession

TASKS = 500


def main(stop_file: Path) -> None:
    """Run queries."""
    parent = os.getppid()
    spark = (
        SparkSession.builder.master("local[1]")
        .appName("demo-workload")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    while not stop_file.exists() and os.getppid() == parent:
        # Many small tasks: what Spark logs most about is the life of a task.
        spark.range(0, TASKS, 1, TASKS).selectExpr("id % 7 AS key").write.format("noop").mode("overwrite").save()
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
