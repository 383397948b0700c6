"""Headgate's half of the windowed count: generated events → hash shuffle → 5 s tumbling count and sum per key.

Measured from what the workers report about themselves (records delivered by the source, with the worker's own
clock), after a warm-up. The latency run puts a probe around the window operator: for every partial row that
arrives it takes the *oldest* event in it, so the figure is an upper bound for every event.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

import headgate as hg
from bench.harness import median
from bench.running import clock_s, records_out
from headgate.model.plan import PipelineDefinition
from headgate.model.progress import PipelineState
from headgate.operators.base import Operator, OperatorSpec

WARM_UP_S = 3.0
BUCKETS_MS = (1, 2, 3, 5, 7, 10, 15, 20, 25, 30, 40, 50, 75, 100, 150, 200, 300, 500, 1_000, 5_000)
START_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Probe:
    """A window operator with a clock in front of it; ``column`` holds the oldest event time of a partial row."""

    spec: OperatorSpec
    column: str

    def build(self) -> Operator:
        """Return the operator with its probe."""
        operator, column = self.spec.build(), self.column
        process = operator.process

        def probed(batch: pa.RecordBatch) -> None:
            now_us = time.time_ns() // 1_000  # noqa: TID251 - event times are dates
            oldest = np.asarray(batch.column(column).cast(pa.int64()))
            rows = np.asarray(batch.column("__rows"))
            late = np.searchsorted(np.array(BUCKETS_MS) * 1_000, now_us - oldest)
            for bucket, count in enumerate(np.bincount(late, weights=rows, minlength=len(BUCKETS_MS) + 1)):
                if count:
                    operator.context.metrics.add(f"bucket-{bucket}", int(count))
            process(batch)

        operator.process = probed  # type: ignore[method-assign]
        return operator


def pipeline(keys: int, interval_ms: int | None, rate: int | None, directory: str, with_age: bool) -> hg.Pipeline:
    """Return the pipeline under test."""
    p = hg.Pipeline(
        "windowed-count",
        parallelism=2,
        checkpointing=hg.Checkpointing(interval=f"{interval_ms}ms" if interval_ms else "1d", dir=directory),
        restart=hg.FixedDelay(delay="100ms"),  # kills in a row must not measure a growing delay
    )
    source = hg.Generator(
        columns={"key": hg.Uniform(0, keys), "value": hg.Uniform(0, 1_000)}, rows_per_second=rate, time="processing"
    )
    aggregates: dict[str, Any] = {"count": pl.len(), "sum": pl.col("value").sum()}
    if with_age:
        aggregates["oldest"] = pl.col("ts").min()
    stream = p.source(source).with_timestamps("ts", out_of_orderness="0s")
    stream.key_by("key").window(hg.Tumbling("5s")).agg(**aggregates).sink(hg.Discard())
    return p


def measure_headgate(
    keys: int, seconds: float, checkpoint_interval_ms: int | None, rate: int | None = None
) -> dict[str, Any]:
    """Run for ``seconds`` after the warm-up; ``rate`` limits the events per second of both workers together."""
    directory = tempfile.mkdtemp(prefix="headgate-bench-")
    try:
        definition = pipeline(keys, checkpoint_interval_ms, rate, directory, with_age=rate is not None).definition()
        if rate is not None:
            definition = _with_probe(definition)
        return _measure(definition, seconds)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _measure(definition: PipelineDefinition, seconds: float) -> dict[str, Any]:
    from pyspark import cloudpickle

    import bench
    from headgate.spark.session import start_pipeline

    cloudpickle.register_pickle_by_value(bench)  # the probe: workers need not find this directory
    handle = start_pipeline(definition)
    deadline = time.monotonic() + START_TIMEOUT_S
    while handle.progress.state is not PipelineState.RUNNING or not handle.driver.run_progress.reports():
        if time.monotonic() > deadline:
            raise RuntimeError(f"the pipeline did not start within {START_TIMEOUT_S} s")
        handle.wait(0.05)
    handle.wait(WARM_UP_S)
    before = handle.driver.run_progress.reports()
    seen = set(handle.alignments())
    checkpoints_before = len(handle.checkpoints())
    handle.wait(seconds)
    after = handle.driver.run_progress.reports()
    reported = handle.alignments().items()
    found = [one for checkpoint, subtasks in reported if checkpoint not in seen for one in subtasks]
    alignments = [one for one in found if one.subtask.startswith("window[")]
    checkpoints = handle.checkpoints()[checkpoints_before:]
    handle.cancel()
    handle.wait()
    per_worker = [
        (records_out(after[w], "source") - records_out(before[w], "source")) / (clock_s(after[w]) - clock_s(before[w]))
        for w in sorted(before)
    ]
    return {
        "events_per_s": sum(per_worker),
        "alignment_ms_median": median([a.aligned_us / 1000 for a in alignments]) if alignments else 0.0,
        "freeze_ms_median": median([a.frozen_us / 1000 for a in alignments]) if alignments else 0.0,
        "latency_ms_p99": _percentile(before, after, 0.99),
        "checkpoints": len(checkpoints),
        "checkpoint_ms_median": median([float(c.duration_ms) for c in checkpoints]) if checkpoints else 0.0,
        "checkpoint_bytes": max((c.size_bytes for c in checkpoints), default=0),
    }


def _percentile(before: dict[int, Any], after: dict[int, Any], q: float) -> float:
    """Return the upper bound of the bucket in which the ``q`` quantile lies; 0 without a probe."""
    counts = np.zeros(len(BUCKETS_MS) + 1)
    for sign, reports in ((1, after), (-1, before)):
        for report in reports.values():
            for name, _, count in report:
                if name.startswith("bucket-"):
                    counts[int(name.removeprefix("bucket-"))] += sign * count
    if counts.sum() == 0:
        return 0.0
    bucket = int(np.searchsorted(np.cumsum(counts) / counts.sum(), q))
    return float(BUCKETS_MS[bucket]) if bucket < len(BUCKETS_MS) else float("inf")


def _with_probe(definition: PipelineDefinition) -> PipelineDefinition:
    """Put the probe around the window operator."""
    schema = next(definition.schema(n.name) for n in definition.graph.nodes if str(n.name) == "window-combine")
    column = next(f.name for f in schema if pa.types.is_timestamp(f.type) or f.name == schema.names[-1])  # type: ignore[attr-defined]
    vertices = tuple(
        replace(
            vertex,
            nodes=tuple(
                replace(node, spec=Probe(node.spec, column)) if str(node.name) == "window" else node  # type: ignore[arg-type]
                for node in vertex.nodes
            ),
        )
        for vertex in definition.plan.vertices
    )
    return replace(definition, plan=replace(definition.plan, vertices=vertices))
