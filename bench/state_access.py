"""State of process functions: gets and puts per second and core, by row and by batch, in memory and on RocksDB.

One subtask in this process, a function that gets its key's value and puts another one, for each record: what a user's
function pays, the making of its rows or frames included. Every key has a value before the clock starts, and records are
drawn anew all the time. A rate is that of wall time or of processor time (all threads, those of RocksDB too), whichever
is lower. Settings: ``seconds`` (of each), ``keys`` (in memory), ``rocksdb_keys``, ``memory_mb`` (of RocksDB),
``batch_rows``.
"""

from __future__ import annotations

from typing import Any

import headgate as hg
from bench.harness import Options, Result, at_least
from bench.stateful import DRAWS, ByBatch, ByRow, Draw, batches_of, every_key, opened, records_per_s
from headgate.model.config import MemoryState, RocksState, StateConfig

NAME = "state_access"

TARGETS = {
    "memory_rows_zipf_per_s": 400_000.0,
    "memory_batches_zipf_per_s": 3_000_000.0,
    "memory_rows_uniform_per_s": 400_000.0,
    "memory_batches_uniform_per_s": 3_000_000.0,
    "rocksdb_batches_zipf_per_s": 400_000.0,
}
BATCHES = 32


def run(options: Options) -> Result:
    """Measure every form on either backend, with hot keys and without."""
    seconds = options.number("seconds", 10, quick=2)
    batch_rows = int(options.number("batch_rows", 65_536))
    keys = int(options.number("keys", 1_000_000, quick=200_000))
    rocksdb_keys = int(options.number("rocksdb_keys", 10_000_000, quick=500_000))
    rocks = RocksState(int(options.number("memory_mb", 512)) << 20, None)
    figures: dict[str, Any] = {"keys": keys, "rocksdb_keys": rocksdb_keys, "batch_rows": batch_rows}
    for draw in DRAWS:
        for function in (ByRow(), ByBatch()):
            form = "rows" if isinstance(function, ByRow) else "batches"
            rate = measure(function, MemoryState(), draw, keys, batch_rows, seconds)
            figures[f"memory_{form}_{draw}_per_s"] = rate
        figures[f"rocksdb_batches_{draw}_per_s"] = measure(ByBatch(), rocks, draw, rocksdb_keys, batch_rows, seconds)
    return Result(figures, {name: at_least(bound) for name, bound in TARGETS.items()})


def measure(
    function: hg.ProcessFunction | hg.BatchProcessFunction,
    state: StateConfig,
    draw: Draw,
    keys: int,
    batch_rows: int,
    seconds: float,
) -> float:
    """Return how many records per second get and put the value of their key."""
    with opened(function, state) as operator:
        for batch in every_key(keys, batch_rows):
            operator.process(batch)
        operator.process(batches_of(draw, keys, batch_rows, 1)[0])
        return records_per_s(operator, lambda seed: batches_of(draw, keys, batch_rows, BATCHES, seed), seconds)
