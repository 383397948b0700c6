"""Headgate's half of connected components: random edges → the loop of ``examples/connected_components.py`` → files.

One run inserts every edge, drains the loop and ends; the clock runs from the first edges that leave the source, by the
worker's clock, to the end of the pipeline, final checkpoint and commit included. Every run's labels are checked.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

import headgate as hg
from bench.components import smallest_connected
from bench.harness import CpuMeter, median
from bench.running import records_out, wrapped
from headgate.connectors.files.file_committer import read_committed
from headgate.model.plan import PipelineDefinition
from headgate.model.progress import SilentObserver
from headgate.operators.base import Operator, OperatorSpec

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "connected_components.py"
FIRST = "both-ways"
STARTED = "first-edges-us"


@dataclass(frozen=True, slots=True)
class FirstEdges:
    """The first operator with a clock in front of it."""

    spec: OperatorSpec

    def build(self) -> Operator:
        """Return the operator; it reports when it got its first batch."""
        operator = self.spec.build()
        process = operator.process

        def clocked(batch: pa.RecordBatch) -> None:
            operator.process = process  # type: ignore[method-assign]
            operator.context.metrics.add(STARTED, time.monotonic_ns() // 1_000)
            process(batch)

        operator.process = clocked  # type: ignore[method-assign]
        return operator


def pipeline(edges: int, vertices: int, interval_ms: int | None, directory: str) -> hg.Pipeline:
    """Return the pipeline under test; labels go to ``directory``/labels."""
    checkpoints = hg.Checkpointing(interval=f"{interval_ms}ms" if interval_ms else "1d", dir=f"{directory}/checkpoints")
    p = hg.Pipeline("components", parallelism=2, checkpointing=checkpoints)
    columns = {"a": hg.Uniform(0, vertices), "b": hg.Uniform(0, vertices)}
    source = hg.Generator(columns=columns, rows=edges, timestamp=None, pool_rows=pool_rows(edges))
    _example().build(p.source(source)).sink(hg.FileSink(f"{directory}/labels", "parquet"))
    return p


def pool_rows(edges: int) -> int:
    """Return a size of the generator's pool in which no edge occurs twice."""
    return 1 << max(edges - 1, 1).bit_length()


def expected_labels(edges: int, vertices: int) -> np.ndarray[Any, Any]:
    """Return the smallest connected vertex of each vertex, for the edges of ``pipeline``."""
    found = _generated(edges, vertices)
    return smallest_connected(found["a"].to_numpy(), found["b"].to_numpy(), vertices)


def is_right(changes: pl.DataFrame, expected: np.ndarray[Any, Any], edges: int) -> bool:
    """Return whether ``changes`` end with the ``expected`` label for each vertex that has an edge."""
    found = changes.group_by("vertex").agg(pl.col("label").min())
    ends = _generated(edges, len(expected))
    vertices = np.unique(np.concatenate([ends["a"].to_numpy(), ends["b"].to_numpy()]))
    right = bool((expected[found["vertex"].to_numpy()] == found["label"].to_numpy()).all())
    return right and np.array_equal(np.sort(found["vertex"].to_numpy()), vertices)


@contextmanager
def spark() -> Iterator[Any]:
    """One local Spark for all runs, as Headgate makes it."""
    from pyspark import cloudpickle

    import bench
    from headgate.spark.session import make_context

    cloudpickle.register_pickle_by_value(bench)  # workers need not find these directories
    cloudpickle.register_pickle_by_value(_example())
    context = make_context("components", 2, None)
    try:
        yield context
    finally:
        context.stop()


def measure(context: Any, edges: int, vertices: int, interval_ms: int | None, expected: Any) -> dict[str, Any]:
    """Insert all edges once; return the rate and what it took.

    Raises:
        RuntimeError: the labels are wrong.
    """
    directory = tempfile.mkdtemp(prefix="headgate-bench-")
    try:
        definition = wrapped(pipeline(edges, vertices, interval_ms, directory).definition(), FIRST, FirstEdges)
        measured = _measure(context, definition, edges)
        changes = read_committed(f"{directory}/labels")
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if not is_right(changes, expected, edges):
        raise RuntimeError(f"labels of {edges} edges are not those that numpy finds ({changes.height} changes)")
    return measured | {"label_changes": changes.height}


class _Seen(SilentObserver):
    """Notes sizes and times of checkpoints."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.durations_ms: list[int] = []

    def on_checkpoint(self, checkpoint: Any, duration_ms: int, size_bytes: int) -> None:
        self.sizes.append(size_bytes)
        self.durations_ms.append(duration_ms)


def _measure(context: Any, definition: PipelineDefinition, edges: int) -> dict[str, Any]:
    from headgate.spark.session import start_pipeline

    seen, ended, meter = _Seen(), [], CpuMeter()
    handle = start_pipeline(definition, spark=context, observer=seen)
    handle.driver.result.add_done_callback(lambda _: ended.append(time.monotonic()))
    handle.wait()
    cpu_s = meter.cpu_seconds()
    reports = handle.driver.run_progress.reports()
    started = min(sample.value for r in reports.values() for sample in r if sample.name == STARTED) / 1e6
    seconds = ended[0] - started
    news = sum(records_out(report, "components") for report in reports.values())
    return {
        "edges_per_s": edges / seconds,
        "seconds": seconds,
        "edges_per_cpu_s": edges / cpu_s,  # driver and JVM and the start included
        "labels_told": news - 2 * edges,
        "checkpoints": len(seen.sizes),
        "checkpoint_ms_median": median([float(d) for d in seen.durations_ms]),
        "checkpoint_bytes_max": max(seen.sizes),
    }


def _generated(edges: int, vertices: int) -> pl.DataFrame:
    """Return the edges that the generator makes."""
    rows = pool_rows(edges)
    a, b = (hg.Uniform(0, vertices).pool(rows, seed) for seed in (0, SECOND_SEED))
    return pl.DataFrame({"a": pl.from_arrow(a), "b": pl.from_arrow(b)}).head(edges)


SECOND_SEED = 7_919
"""Seed of the generator's second column, when its first has 0."""


def _example() -> ModuleType:
    name = "bench_connected_components"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, EXAMPLE)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
