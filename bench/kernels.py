"""Microbenchmark of the columnar hot path in one thread: generate, combine, partition, merge.

Prints nanoseconds per event of each part and events per second per core, at 1,000 and 100,000 keys, as if two workers
ran it: each of the two partitions is merged by its own operator, and both merges are paid here, which is what one
worker pays when its peer does the same. Run: ``python bench/kernels.py``.
"""

from __future__ import annotations

import json
import os
import sys
import time

os.environ.setdefault("POLARS_MAX_THREADS", "1")

import numpy as np
import polars as pl
import pyarrow as pa

from headgate.environment import SYSTEM_CLOCK
from headgate.model.graph import OutputTag
from headgate.operators.base import Operator, OperatorContext
from headgate.operators.keys import partition
from headgate.operators.windows.aligned_windows import WindowOperators, window_operators
from headgate.operators.windows.window_assigner import tumbling
from headgate.operators.windows.window_plan import WindowedAggregate

BATCH_ROWS = 65_536
EVENTS = 30_000_000
EVENTS_PER_SECOND = 2_000_000
"""Event time: how many events fall into one second of it."""
BARRIER_EVERY_EVENTS = 10_000_000
TARGETS = {1_000: 15e6, 100_000: 7.5e6}
SCHEMA = pa.schema([("key", pa.int64()), ("value", pa.int64()), ("ts", pa.timestamp("us"))])


class Collector:
    """An output that keeps batches until they are taken, and timings of nothing."""

    def __init__(self) -> None:
        self.batches: list[pa.RecordBatch] = []

    def emit(self, batch: pa.RecordBatch) -> None:
        self.batches.append(batch)

    def emit_to(self, tag: OutputTag, batch: pa.RecordBatch) -> None:
        raise AssertionError(tag)

    def emit_watermark(self, watermark_ms: int) -> None:
        pass

    def emit_idle(self, is_idle: bool) -> None:
        pass

    def divert(self, bad: pa.RecordBatch) -> None:
        raise AssertionError(bad)

    def take(self) -> list[pa.RecordBatch]:
        batches, self.batches = self.batches, []
        return batches


class Clock:
    """Seconds spent by part."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self.turn_max_s = 0.0
        self._last = time.perf_counter()
        self._turn = self._last

    def lap(self, part: str) -> None:
        now = time.perf_counter()
        self.spent[part] = self.spent.get(part, 0.0) + now - self._last
        self._last = now

    def turn(self) -> None:
        self.turn_max_s = max(self.turn_max_s, self._last - self._turn)
        self._turn = self._last


def opened(operator: Operator, index: int) -> tuple[Operator, Collector]:
    context = OperatorContext("bench", "window", index, 2, 128, SYSTEM_CLOCK.monotonic_ms)
    context.is_busy = True
    output = Collector()
    operator.open(context, output)
    return operator, output


def generate(rng: np.random.Generator, keys: int, start: int) -> pa.RecordBatch:
    """Key and value of the event come from one 64-bit draw; event time is its number at a constant rate."""
    draws = rng.bit_generator.random_raw(BATCH_ROWS)
    key = ((draws & np.uint64(0xFFFFFFFF)) * np.uint64(keys)) >> np.uint64(32)
    value = draws >> np.uint64(54)
    us = np.arange(start, start + BATCH_ROWS) // (EVENTS_PER_SECOND // 1_000_000)
    arrays = [pa.array(key.view(np.int64)), pa.array(value.view(np.int64)), pa.array(us).view(pa.timestamp("us"))]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def run(operators: WindowOperators, keys: int) -> tuple[Clock, int]:
    assert operators.combine is not None
    combine, combined = opened(operators.combine.build(), 0)
    merges = [opened(operators.window.build(), i) for i in range(2)]
    rng = np.random.default_rng(7)
    clock, rows, next_barrier = Clock(), 0, BARRIER_EVERY_EVENTS

    def exchange() -> None:
        nonlocal rows
        clock.lap("combine")
        for batch in combined.take():
            rows += batch.num_rows
            parts = partition(batch, operators.keys, 128, 2)
            clock.lap("partition")
            for (merge, _), part in zip(merges, parts, strict=True):
                if part is not None:
                    merge.process(part)
            clock.lap("merge")

    for start in range(0, EVENTS, BATCH_ROWS):
        batch = generate(rng, keys, start)
        clock.lap("generate")
        combine.process(batch)
        exchange()
        watermark_ms = (start + BATCH_ROWS) * 1_000 // EVENTS_PER_SECOND - 1
        combine.on_watermark(watermark_ms)
        exchange()
        for merge, output in merges:
            merge.on_watermark(watermark_ms)
            output.take()
        clock.lap("fire")
        if start >= next_barrier:
            next_barrier += BARRIER_EVERY_EVENTS
            combine.before_barrier()
            exchange()
            frozen = [merge.freeze() for merge, _ in merges]
            clock.lap("freeze")
            for state in frozen:
                assert state is not None
                state.encode()
            clock.lap("encode")
        clock.turn()
    return clock, rows


def main() -> None:
    figures: dict[str, float] = {}
    aggregates = (pl.len().alias("n"), pl.col("value").sum().alias("total"))
    for keys, target in TARGETS.items():
        aggregate = WindowedAggregate(("key",), "ts", tumbling(5_000), aggregates)
        operators = window_operators(aggregate, SCHEMA, "window")
        clock, rows = run(operators, keys)
        per_event = {part: seconds / EVENTS * 1e9 for part, seconds in clock.spent.items()}
        rate = EVENTS / sum(clock.spent.values())
        print(f"{keys:,} keys: {rate / 1e6:.1f} M events/s/core (target {target / 1e6:.1f}), ns per event:")
        print("  " + ", ".join(f"{part} {ns:.1f}" for part, ns in per_event.items()))
        print(f"  partial rows {rows / EVENTS:.3f} per event, longest turn {clock.turn_max_s * 1e3:.1f} ms")
        figures[f"events_per_second_{keys}_keys"] = round(rate)
    targets = {f"events_per_second_{keys}_keys": target for keys, target in TARGETS.items()}
    met = all(figures[name] >= target for name, target in targets.items())
    print(json.dumps({"bench": "kernels", "figures": figures, "targets": targets, "met": met}))
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
