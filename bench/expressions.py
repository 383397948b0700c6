"""Expressions: what one batch costs in ``filter`` and ``with_columns``, beside Polars' own query with its defaults.

Both take an Arrow batch and give one, in one thread of this process and in turns. Batches of a few rows are what a
pipeline at low latency is made of; 65,536 rows are full speed. Judged is the ratio of processor time, operator to
query. Settings: ``turns`` (per size; a turn measures both).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from bench.harness import Options, Result, at_most, median
from bench.outputs import Nowhere
from headgate.environment import SYSTEM_CLOCK
from headgate.operators.base import LazyRows, OperatorContext, as_batch
from headgate.operators.expressions import ExpressionsSpec, filter_spec, fuse, with_columns_spec

NAME = "expressions"

RATIO_MAX = 1.0
TURN_S = 0.2
SIZES = (8, 256, 65_536)
KEPT = pl.col("value") % 10 != 0
DOUBLED = (pl.col("value") * 2).alias("doubled")


class Last(Nowhere):
    """An output that remembers the latest batch."""

    def __init__(self) -> None:
        self.batch: pa.RecordBatch | None = None

    def emit(self, batch: pa.RecordBatch | LazyRows) -> None:
        """See ``Output``: all columns are made, as a sink needs them."""
        self.batch = as_batch(batch)


def run(options: Options) -> Result:
    """Measure the operator and the query by turns, for every size."""
    turns = int(options.number("turns", 15, quick=5))
    figures: dict[str, Any] = {}
    for rows in SIZES:
        batch = batch_of(rows)
        operator, query = operator_for(), query_for()
        pairs = [(_cpu_us(operator, batch), _cpu_us(query, batch)) for _ in range(turns)]
        figures[f"operator_cpu_us_{rows}_rows"] = median([pair[0] for pair in pairs])
        figures[f"query_cpu_us_{rows}_rows"] = median([pair[1] for pair in pairs])
        figures[f"ratio_{rows}_rows"] = median([ours / theirs for ours, theirs in pairs])
    return Result(figures, {f"ratio_{rows}_rows": at_most(RATIO_MAX) for rows in SIZES})


def batch_of(rows: int) -> pa.RecordBatch:
    """Return a batch of an integer key, an integer value and a short text."""
    rng = np.random.default_rng(7)
    texts = pa.array([f"text-{number % 100}" for number in range(rows)])
    return pa.record_batch({"key": rng.integers(0, 1_000, rows), "value": rng.integers(0, 1_000, rows), "text": texts})


def operator_for() -> Callable[[pa.RecordBatch], pa.RecordBatch | None]:
    """Return what runs both expressions as Headgate does."""
    spec: ExpressionsSpec = fuse([filter_spec(KEPT), with_columns_spec(DOUBLED)])
    operator, output = spec.build(), Last()
    operator.open(OperatorContext("bench", "expressions", 0, 1, 128, SYSTEM_CLOCK.monotonic_ms), output)

    def process(batch: pa.RecordBatch) -> pa.RecordBatch | None:
        operator.process(batch)
        return output.batch

    return process


def query_for() -> Callable[[pa.RecordBatch], pa.RecordBatch | None]:
    """Return what runs them as a query of Polars with its default engine."""

    def process(batch: pa.RecordBatch) -> pa.RecordBatch | None:
        frame = pl.from_arrow(batch)
        assert isinstance(frame, pl.DataFrame)
        return frame.lazy().filter(KEPT).with_columns(DOUBLED).collect().to_arrow().combine_chunks().to_batches()[0]

    return process


def _cpu_us(process: Callable[[pa.RecordBatch], object], batch: pa.RecordBatch) -> float:
    """Return the processor time per batch, of all threads, over at least ``TURN_S``."""
    process(batch)
    times, ends, cpu = 0, time.perf_counter() + TURN_S, time.process_time()
    while time.perf_counter() < ends:
        process(batch)
        times += 1
    return (time.process_time() - cpu) / times * 1e6
