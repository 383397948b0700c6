"""What benchmarks of state share: keys, functions that get and put, and one subtask of them in this process.

An operator here is the product's own, with its state where ``StateConfig`` says, but without channels, checkpoints and
Spark: what is measured is the state and what a user's function pays for it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, Literal, TypeAlias

import numpy as np
import polars as pl
import pyarrow as pa

import headgate as hg
from bench.outputs import Nowhere
from headgate.environment import SYSTEM_CLOCK
from headgate.model.config import StateConfig
from headgate.operators.base import Operator, OperatorContext
from headgate.operators.process.batch_process import batch_process_spec
from headgate.operators.process.row_process import row_process_spec
from headgate.state.worker_backends import worker_states

GROUPS = 128
NODE = "counted"
SCHEMA = pa.schema([("key", pa.int64()), ("value", pa.int64())])

SCATTER = 2_654_435_761
"""A prime: multiplied by it, keys that are used alike are not neighbours."""

Draw: TypeAlias = Literal["uniform", "zipf"]
DRAWS: tuple[Draw, ...] = ("zipf", "uniform")


class ByRow(hg.ProcessFunction):
    """Adds each record's value to its key's: one get and one put."""

    def open(self, state: hg.StateHandle) -> None:
        """See ``ProcessFunction``."""
        self.total = state.value("total", pa.int64())

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> None:
        """See ``ProcessFunction``."""
        self.total.put(self.total.get(0) + row["value"])


class ByBatch(hg.BatchProcessFunction):
    """Gets what each row's key has, and puts it together with the row's value; of equal keys the last row wins."""

    def open(self, state: hg.BatchStateHandle) -> None:
        """See ``BatchProcessFunction``."""
        self.total = state.value("total", pa.int64())

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> None:
        """See ``BatchProcessFunction``."""
        self.total.put(self.total.get().fill_null(0) + batch["value"])


@contextmanager
def opened(function: hg.ProcessFunction | hg.BatchProcessFunction, state: StateConfig) -> Iterator[Operator]:
    """Yield the only subtask of an operator that calls ``function``; a database is in a directory of its own."""
    if isinstance(function, hg.ProcessFunction):
        operator = row_process_spec(NODE, ("key",), function, SCHEMA).build()
    else:
        operator = batch_process_spec(NODE, ("key",), function, SCHEMA).build()
    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as directory:
        worker = worker_states(state, directory)
        try:
            states = worker.of(NODE, 0, GROUPS)
            context = OperatorContext("bench", NODE, 0, 1, GROUPS, SYSTEM_CLOCK.monotonic_ms, states=states)
            operator.open(context, Nowhere())
            yield operator
        finally:
            operator.close()
            worker.close()


def drawn(draw: Draw, keys: int, rows: int, random: np.random.Generator) -> np.ndarray:
    """Return ``rows`` of the numbers below ``keys``: equally likely, or the n-th one as 1/n of the first (Zipf)."""
    if draw == "uniform":
        return random.integers(0, keys, rows)
    rank = (float(keys) ** random.random(rows)).astype(np.int64)  # 1 to keys
    return rank * SCATTER % keys


def batches_of(draw: Draw, keys: int, rows: int, count: int, seed: int = 7) -> list[pa.RecordBatch]:
    """Return ``count`` batches of ``rows`` records."""
    random = np.random.default_rng(seed)
    return [
        pa.record_batch([drawn(draw, keys, rows, random), random.integers(0, 1_000, rows)], schema=SCHEMA)
        for _ in range(count)
    ]


def every_key(keys: int, rows: int) -> Iterator[pa.RecordBatch]:
    """Yield each of ``keys`` keys once, in batches of ``rows``."""
    for start in range(0, keys, rows):
        some = np.arange(start, min(start + rows, keys))
        yield pa.record_batch([some, some % 1_000], schema=SCHEMA)


class Stopwatch:
    """Wall and processor seconds of this process since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def seconds(self) -> float:
        """Return the larger of the two: neither waiting nor a second thread makes anything look faster."""
        return max(time.perf_counter() - self._wall, time.process_time() - self._cpu)


def records_per_s(operator: Operator, draw: Callable[[int], Sequence[pa.RecordBatch]], seconds: float) -> float:
    """Have the operator process batches; return the records per second and core.

    ``draw``: returns batches for a seed. They are drawn anew again and again, at nobody's cost: keys that come again
    because a benchmark repeats itself are in a cache.
    """
    watch, drawing_s, records = Stopwatch(), 0.0, 0
    for seed in count(1):
        begun_s = time.thread_time()
        batches = draw(seed)
        drawing_s += time.thread_time() - begun_s
        for batch in batches:
            operator.process(batch)
            records += batch.num_rows
        if watch.seconds() - drawing_s >= seconds:
            break
    return records / (watch.seconds() - drawing_s)
