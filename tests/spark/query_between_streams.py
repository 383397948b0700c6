"""A driver of its own, which a test kills: a streaming query from one stream into another."""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession

import headgate as hg


def main(store: str, checkpoints: str) -> None:
    """Run until somebody ends it."""
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    session = builder.config("spark.driver.host", "127.0.0.1").getOrCreate()
    hg.register_streams(session)
    events = session.readStream.format("headgate").options(store=store, rows_per_batch=20_000).load("in")
    output = events.writeStream.format("headgate").options(store=store, checkpointLocation=checkpoints)
    output.start("out").awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
