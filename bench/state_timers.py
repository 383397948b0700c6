"""Timers: registered and fired per second and core, millions of them in one subtask.

Each key registers one timer of event time, in random order of times; then watermarks pass, in steps, until all have
fired. By batch, as with thousands of keys a call, and with fewer timers by row. Registering and firing are measured
together. Both backends; judged is the one in memory. Settings: ``timers`` (by batch), ``row_timers``,
``rocksdb_timers``, ``memory_mb`` (of RocksDB), ``batch_rows``, ``steps`` (of the watermark).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

import headgate as hg
from bench.harness import Options, Result, at_least
from bench.stateful import SCHEMA, Stopwatch, opened
from headgate.model.config import MemoryState, RocksState, StateConfig

NAME = "state_timers"

RATE_MIN = 500_000.0
SPAN_MS = 1_000_000
"""Times are below it, so many keys have the same one."""


class TimersByRow(hg.ProcessFunction):
    """Registers a timer for each record, at its value, and counts those that fire."""

    fired = 0

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> None:
        """See ``ProcessFunction``."""
        context.timers.register_event_time(row["value"])

    def on_timer(self, timer: hg.Timer, context: hg.ProcessContext) -> None:
        """See ``ProcessFunction``."""
        self.fired += 1


class TimersByBatch(hg.BatchProcessFunction):
    """The same, by batch."""

    fired = 0

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> None:
        """See ``BatchProcessFunction``."""
        context.timers.register_event_time(batch["value"])

    def on_timer(self, timers: hg.FiredTimers, context: hg.BatchContext) -> None:
        """See ``BatchProcessFunction``."""
        self.fired += len(timers)


def run(options: Options) -> Result:
    """Measure both forms in memory, and batches on RocksDB."""
    count = int(options.number("timers", 5_000_000, quick=500_000))
    by_row = int(options.number("row_timers", 1_000_000, quick=100_000))
    on_disk = int(options.number("rocksdb_timers", 5_000_000, quick=200_000))
    rocks = RocksState(int(options.number("memory_mb", 512)) << 20, None)
    batch_rows, steps = int(options.number("batch_rows", 65_536)), int(options.number("steps", 100))
    figures: dict[str, Any] = {}
    for name, function, state, timers in (
        ("memory_batches", TimersByBatch(), MemoryState(), count),
        ("memory_rows", TimersByRow(), MemoryState(), by_row),
        ("rocksdb_batches", TimersByBatch(), rocks, on_disk),
    ):
        found = measure(function, state, timers, batch_rows, steps)
        figures |= {f"{name}_{what}": value for what, value in found.items()}
    return Result(figures, {"memory_batches_per_s": at_least(RATE_MIN)})


def measure(
    function: TimersByRow | TimersByBatch, state: StateConfig, timers: int, batch_rows: int, steps: int
) -> dict[str, float]:
    """Return how many timers per second are registered and fired, and how long either takes.

    Raises:
        RuntimeError: not every timer fired once.
    """
    batches = batches_of(timers, batch_rows)
    with opened(function, state) as operator:
        watch = Stopwatch()
        for batch in batches:
            operator.process(batch)
        registered_s = watch.seconds()
        for step in range(1, steps + 1):
            operator.on_watermark(SPAN_MS * step // steps)
        both_s = watch.seconds()
        used = operator.user_object
        assert isinstance(used, TimersByRow | TimersByBatch)
        if used.fired != timers:
            raise RuntimeError(f"{used.fired} of {timers} timers fired")
    return {
        "timers": float(timers),
        "per_s": timers / both_s,
        "register_s": registered_s,
        "fire_s": both_s - registered_s,
    }


def batches_of(timers: int, batch_rows: int) -> list[pa.RecordBatch]:
    """Return a record for each timer: the key, which no other one has, and the time."""
    random, found = np.random.default_rng(7), []
    for start in range(0, timers, batch_rows):
        keys = np.arange(start, min(start + batch_rows, timers))
        times = random.integers(0, SPAN_MS, len(keys))
        found.append(pa.record_batch([keys, times], schema=SCHEMA))
    return found
