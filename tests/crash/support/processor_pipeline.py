"""A stateful processor of PySpark's in a pipeline that tests run and break: timers, every kind of state, totals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

import headgate as hg
from crash.support.pipelines import KEYS, Pipeline, generated, generator, make

STEP_MS = 500
FIRST = 1_000
"""Where the count of each key begins."""


class Numbering(StatefulProcessor):
    """Numbers the records of each key, and tells at each step of event time that there were some."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.count = handle.getValueState("count", "n BIGINT")
        self.halves = handle.getMapState("halves", "half INT", "n BIGINT")
        self.last = handle.getListState("last", "id BIGINT")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        for row in rows:
            n = self.count.get()[0] + 1
            self.count.update((n,))
            half = (row.id % 2,)
            before = self.halves.getValue(half)
            self.halves.updateValue(half, (1 if before is None else before.n + 1,))
            assert sum(n for _, (n,) in self.halves.iterator()) == n - FIRST
            self.last.put([*list(self.last.get())[-2:], (row.id,)])

            self.handle.registerTimer(-(-row.ms // STEP_MS) * STEP_MS)
            yield Row(key=key[0], what="record", id=row.id, n=n)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        yield Row(key=key[0], what="step", id=expiredTimerInfo.getExpiryTimeInMs(), n=0)

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        assert not self.count.exists()
        self.count.update((initialState.n,))


def processors(spec: dict[str, Any]) -> Pipeline:
    """Records of a source with four splits, numbered behind a shuffle."""
    state = hg.RocksDB(memory="64MB") if spec.get("state") == "rocksdb" else hg.Memory()
    pipeline = make(spec, state=state)
    source = pipeline.source(generator(spec["rows"], spec["rate"]), name="in").with_timestamps("ts")
    rows = source.with_columns(ms=pl.col("ts").dt.epoch("ms"))
    begin = pl.DataFrame({"key": range(KEYS), "n": [FIRST] * KEYS})
    numbered = rows.key_by("key").transform_with_state(
        Numbering(),
        {"key": pa.int64(), "what": pa.string(), "id": pa.int64(), "n": pa.int64()},
        time_mode="eventTime",
        initial_state=begin,
        name="numbered",
    )
    numbered.sink(hg.FileSink(Path(spec["root"]) / "numbered", "parquet", roll_interval=0), name="out")
    return pipeline


def expected_steps(rows: int) -> pl.DataFrame:
    """Return which steps each key must tell of, once each."""
    steps = -(-pl.col("ts").dt.epoch("ms") // STEP_MS) * STEP_MS
    return generated(rows).select("key", id=steps).unique().sort("key", "id")
