"""A driver of its own, which a test kills: a streaming query from one stream into another."""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession
from tests.spark.support.sessions import run_to_end

import headgate as hg


def main(store: str, checkpoints: str) -> None:
    """Run until it is killed."""
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    session = builder.config("spark.driver.host", "127.0.0.1").getOrCreate()
    hg.register_streams(session)
    events = session.readStream.format("headgate").options(store=store, rows_per_batch=20_000).load("in")
    output = events.writeStream.format("headgate").options(store=store, checkpointLocation=checkpoints)
    run_to_end(output.trigger(processingTime="200 milliseconds"), "out")  # it looks all the time otherwise


if __name__ == "__main__":
    main(*sys.argv[1:])
