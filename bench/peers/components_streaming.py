"""Connected components as a micro-batch loop in Structured Streaming: a peer of ``bench/loops.py``.

Counterpart of ``examples/connected_components.py``: the same algorithm (labels become the smallest of the neighbours'
labels until none changes) on random edges of the same number, written with ``foreachBatch``, which is how Spark loops:
within a micro-batch joins are repeated until no label changes. Tuned as far as it goes: labels and edges stay cached
and partitioned by vertex, so that only candidates are shuffled; one job per round; lineage is cut by local
checkpoints; as many partitions as cores. Labels and edges are written at the end of every micro-batch, without which
nothing would survive a failure. Runs as a process of its own: ``python -m bench.peers.components_streaming``; its
last printed line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq

from bench.components import smallest_connected
from bench.machine import CpuMeter

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


def settings(cores: int) -> dict[str, str]:
    """Return the Spark configuration of the peer."""
    return {
        "spark.master": f"local[{cores}]",
        "spark.driver.memory": "6g",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.sql.shuffle.partitions": str(cores),
        # Plans are known beforehand: re-planning at every stage and guessing broadcasts only cost time here.
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.autoBroadcastJoinThreshold": "-1",
        "spark.sql.join.preferSortMergeJoin": "false",
        "spark.sql.parquet.compression.codec": "lz4_raw",
    }


class Components:
    """The state between micro-batches, and what is done in each."""

    def __init__(self, spark: SparkSession, cores: int, directory: str, batches: int) -> None:
        self._cores, self._directory, self._batches = cores, directory, batches
        self._labels = self._kept(spark.createDataFrame([], "vertex long, label long, is_new boolean"))
        self._edges = self._kept(spark.createDataFrame([], "vertex long, to long"))
        self.rounds: list[int] = []
        self.ends: list[float] = []

    def take(self, batch: DataFrame, number: int) -> None:
        """Add the edges (``a``, ``b``) of a micro-batch and repeat rounds until no label changes."""
        from pyspark.sql import functions as f

        if number >= self._batches:
            return  # the source is endless
        there = batch.select(f.col("a").alias("vertex"), f.col("b").alias("to"))
        new = self._kept(there.union(batch.select(f.col("b").alias("vertex"), f.col("a").alias("to"))))
        edges = self._kept(self._edges.union(new))
        self._release(self._edges)
        self._edges = edges
        own = f.coalesce("label", "vertex").alias("label")
        fresh = new.select("vertex").distinct().join(self._labels, "vertex", "full")
        self._relabel(self._kept(fresh.select("vertex", own, f.lit(False).alias("is_new"))))
        told = new.join(self._labels, "vertex").select(f.col("to").alias("vertex"), "label")
        rounds = 0
        while self._improve(told):
            rounds += 1
            told = (
                self._labels.filter("is_new").join(self._edges, "vertex").select(f.col("to").alias("vertex"), "label")
            )
        self._release(new)
        self._labels.select("vertex", "label").write.mode("overwrite").parquet(
            f"{self._directory}/labels/batch={number}"
        )
        batch.select("a", "b").write.mode("overwrite").parquet(f"{self._directory}/edges/batch={number}")
        self.rounds.append(rounds)
        self.ends.append(time.monotonic())

    def labels(self) -> tuple[Any, Any]:
        """Return vertices and their labels, as numpy arrays."""
        frame = self._labels.select("vertex", "label").toPandas()
        return frame["vertex"].to_numpy(), frame["label"].to_numpy()

    def _improve(self, told: DataFrame) -> bool:
        """Give each vertex the smallest label it was told, if it is smaller; return whether there was one."""
        from pyspark.sql import functions as f

        best = told.groupBy("vertex").agg(f.min("label").alias("best"))
        # A left join keeps the labels where they are; only ``told`` is shuffled.
        joined = self._labels.select("vertex", "label").join(best, "vertex", "left")
        is_new = f.coalesce(f.col("best") < f.col("label"), f.lit(False)).alias("is_new")
        self._relabel(joined.select("vertex", f.least("label", "best").alias("label"), is_new).localCheckpoint())
        return not self._labels.filter("is_new").isEmpty()

    def _relabel(self, labels: DataFrame) -> None:
        self._release(self._labels)
        self._labels = labels

    def _kept(self, frame: DataFrame) -> DataFrame:
        return frame.repartition(self._cores, "vertex").localCheckpoint()

    def _release(self, frame: DataFrame) -> None:
        """Free what a local checkpoint holds, rather than wait for the JVM's collector."""
        frame._jdf.queryExecution().analyzed().rdd().unpersist(False)


def ends(vertices: int) -> list[Column]:
    """Return the ends of edge number ``value``: pseudo-random vertices."""
    from pyspark.sql import functions as f

    return [
        f.pmod(f.xxhash64("value", f.lit(seed)), f.lit(vertices)).alias(name) for seed, name in enumerate(("a", "b"))
    ]


def measure(spark: SparkSession, *, count: int, vertices: int, batch_rows: int, cores: int) -> dict[str, Any]:
    """Insert ``count`` edges in micro-batches of ``batch_rows``; return the rate and whether the labels are right."""
    with tempfile.TemporaryDirectory(prefix="headgate-peer-", ignore_cleanup_errors=True) as directory:
        batches = -(-count // batch_rows)
        components = Components(spark, cores, directory, batches)
        source = (
            spark.readStream.format("rate-micro-batch")
            .option("rowsPerBatch", batch_rows)
            .option("numPartitions", cores)
            .load()
            .select(*ends(vertices))
        )
        meter = CpuMeter()
        started = time.monotonic()
        query = source.writeStream.foreachBatch(components.take).option("checkpointLocation", f"{directory}/q").start()
        try:
            while len(components.ends) < batches and query.isActive:
                time.sleep(0.01)
            cpu_s, cores_used = meter.cpu_seconds(), meter.cpu_seconds() / meter.seconds()
        finally:
            query.stop()
        if len(components.ends) < batches:
            raise RuntimeError(
                f"the query stopped after {len(components.ends)} of {batches} batches: {query.exception()}"
            )
        seconds = components.ends[-1] - started
        inserted = pq.read_table(f"{directory}/edges")
        vertex, label = components.labels()
    a, b = inserted["a"].to_numpy(), inserted["b"].to_numpy()
    expected, with_edges = smallest_connected(a, b, vertices), np.union1d(a, b)
    return {
        "edges_per_s": batches * batch_rows / seconds,
        "edges": batches * batch_rows,
        "batch_rows": batch_rows,
        "seconds": round(seconds, 2),
        "rounds": components.rounds,
        "cpu_cores_used": round(cores_used, 2),
        "edges_per_cpu_s": batches * batch_rows / cpu_s,
        "is_right": np.array_equal(np.sort(vertex), with_edges) and bool((expected[vertex] == label).all()),
    }


def session(cores: int) -> SparkSession:
    """Start a local Spark with the peer's settings."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName("components-peer")
    for name, value in settings(cores).items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every size and print the result as the last line."""
    parser = argparse.ArgumentParser(description="connected components with foreachBatch")
    parser.add_argument("--edges", type=int, default=1_000_000)
    parser.add_argument("--vertices", type=int, default=500_000)
    parser.add_argument("--batch-rows", type=int, nargs="+", default=[100_000])
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--warm-up", type=int, default=50_000, help="edges of a loop that is not measured")
    options = parser.parse_args(arguments)
    spark = session(options.cores)
    try:
        # The first loop of a JVM pays for class loading and compilation; it is thrown away.
        if options.warm_up:
            warm_up = options.warm_up
            measure(spark, count=warm_up, vertices=warm_up // 2, batch_rows=warm_up // 2, cores=options.cores)
        sizes = []
        for rows in options.batch_rows:
            sizes.append(
                measure(spark, count=options.edges, vertices=options.vertices, batch_rows=rows, cores=options.cores)
            )
            print(json.dumps(sizes[-1]), flush=True)
        version = spark.version
    finally:
        spark.stop()
    head = {"peer": "structured_streaming", "version": version, "is_right": all(size["is_right"] for size in sizes)}
    print(json.dumps(head | summary_of(sizes) | {"sizes": sizes}), flush=True)


def summary_of(sizes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the rate with most micro-batches, where the graph grows, and with fewest."""
    ordered = sorted(sizes, key=lambda size: size["batch_rows"])
    return {
        "edges_per_s_growing": ordered[0]["edges_per_s"],
        "edges_per_s_at_once": ordered[-1]["edges_per_s"],
        "edges_per_cpu_s_growing": ordered[0]["edges_per_cpu_s"],
    }


if __name__ == "__main__":
    main()
