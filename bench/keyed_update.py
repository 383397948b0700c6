"""A keyed update with state beyond memory: Headgate on RocksDB beside Structured Streaming's RocksDB provider.

Count and last value per key, for every record, with as many keys as are asked for and hot keys (Zipf) or without, two
workers on two cores, exactly-once checkpoints on disk, what changed is discarded. First every key gets its state, in an
order that is none; then rates are taken. Headgate runs for ten minutes, in slices, so that a decay shows: judged is the
last third against the first. The peer's half is ``bench/peers/keyed_update.py``: the best of several sizes of
micro-batches. Keys are made of a running number in the same way on both sides. Both may use ``memory_mb`` for RocksDB,
all workers together. Settings: ``keys``, ``minutes``, ``slice_s``, ``memory_mb``, ``interval_ms`` (of checkpoints),
``source_rows`` (of a batch of our source), ``peer`` (0: leave it out), ``peer_seconds`` (of each size), ``batch_rows``
(list, of the peer), ``draw`` (zipf or uniform: only that one).
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import polars as pl
import pyarrow as pa

import headgate as hg
from bench.harness import Options, Result, Target, at_least, median, skipped
from bench.peers.keyed_update import BATCH_ROWS, BATCH_ROWS_QUICK
from bench.peers.measure import measure_keyed_update
from bench.running import Reports, rates, records_out, reports_after, running
from bench.stateful import DRAWS, SCATTER, Draw
from headgate.spark.session import SparkHandle

NAME = "keyed_update"

RATIO_MIN = 3.0
STEADY_MIN = 0.8
"""Of the last third's rate to the first's: less than runs of one program differ by on a shared machine (1 to 0.8)."""

PARALLELISM = 2
SOURCE_ROWS = 524_288
"""Of a batch, half for each worker: about half a second of work. The peer has the best of several sizes."""
FILL_TIMEOUT_S = 3_600.0
SLICES_MIN = 3


class CountAndLast(hg.BatchProcessFunction):
    """Counts the records of each key and keeps the last value; returns what changed, once for each key of a batch."""

    schema = {"key": pa.int64(), "count": pa.int64(), "last": pa.int64()}

    def open(self, state: hg.BatchStateHandle) -> None:
        """See ``BatchProcessFunction``."""
        self.count = state.value("count", pa.int64())
        self.last = state.value("last", pa.int64())

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame:
        """See ``BatchProcessFunction``."""
        self.last.put(batch["value"])
        changed = self.count.update(1, "add")
        return batch.select("key", count=self.count.get(), last=pl.col("value")).filter(changed)


def run(options: Options) -> Result:
    """Measure both for each way to draw keys."""
    keys = int(options.number("keys", 50_000_000, quick=500_000))
    figures: dict[str, Any] = {"keys": keys}
    targets: dict[str, Target] = {}
    draws = [draw for draw in DRAWS if options.settings.get("draw", draw) == draw]
    for draw in draws:
        found = measure_headgate(draw, keys, options)
        figures |= {f"headgate_{draw}_{name}": value for name, value in found.items()}
        targets[f"headgate_{draw}_steady"] = at_least(STEADY_MIN)
    peer = peer_rates(keys, draws, options) if options.number("peer", 1) else {}
    for draw in draws:
        figures |= {f"structured_streaming_{draw}": peer.get(draw)}
        best = peer[draw]["events_per_s_best"] if peer else None
        figures[f"ratio_{draw}"] = figures[f"headgate_{draw}_per_s"] / best if best else None
        target = at_least(RATIO_MIN)
        targets[f"ratio_{draw}"] = target if peer else skipped(target, "the peer was left out")
    return Result(figures, targets)


def measure_headgate(draw: Draw, keys: int, options: Options) -> dict[str, Any]:
    """Return the records per second of both workers: the median of all slices, and how steady they are."""
    slice_s = options.number("slice_s", 10, quick=3)
    slices = max(SLICES_MIN, round(options.number("minutes", 10, quick=0.25) * 60 / slice_s))
    directory = tempfile.mkdtemp(prefix="headgate-bench-")
    try:
        with running(pipeline(draw, keys, directory, options).definition()) as handle:
            begun = time.monotonic()
            reports = filled(handle, keys)
            fill_s = time.monotonic() - begun
            found: list[float] = []
            for _ in range(slices):
                handle.wait(slice_s)
                after = reports_after(handle, reports)
                found.append(sum(rates("source", reports, after).values()))
                reports = after
            checkpoints = [one for one in handle.checkpoints() if one.size_bytes]
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return {
        "per_s": median(found),
        "steady": steadiness(found),
        "fill_s": fill_s,
        "checkpoint_mb": median([one.size_bytes / 1e6 for one in checkpoints]) if checkpoints else 0.0,
        "checkpoint_ms": median([float(one.duration_ms) for one in checkpoints]) if checkpoints else 0.0,
        "slices": found,
    }


def pipeline(draw: Draw, keys: int, directory: str, options: Options) -> hg.Pipeline:
    """Return the pipeline under test."""
    memory = int(options.number("memory_mb", 2_000, quick=200) * 1_000_000) // PARALLELISM
    p = hg.Pipeline(
        "keyed-update",
        parallelism=PARALLELISM,
        checkpointing=hg.Checkpointing(
            interval=f"{int(options.number('interval_ms', 10_000, quick=2_000))}ms", dir=f"{directory}/checkpoints"
        ),
        state=hg.RocksDB(memory=memory, dir=f"{directory}/local"),
    )
    rows = int(options.number("source_rows", SOURCE_ROWS))
    source = p.source(hg.Generator(columns={"n": hg.RowNumber()}, timestamp=None, batch_rows=rows))
    stream = source.select(key_of(draw, keys), value=pl.col("n") % 1_000)
    stream.key_by("key").process(CountAndLast(), name="counted").sink(hg.Discard())
    return p


def key_of(draw: Draw, keys: int) -> pl.Expr:
    """Return the key of record ``n``: each one once, then as ``draw`` says."""
    number, mixed = pl.col("n"), pl.col("n").hash(7)
    if draw == "uniform":
        drawn = (mixed % keys).cast(pl.Int64)
    else:
        share = (mixed // (1 << 11)).cast(pl.Float64) / float(1 << 53)  # 0 to 1
        drawn = pl.lit(float(keys)).pow(share).cast(pl.Int64) * SCATTER % keys
    return pl.when(number < keys).then(number * SCATTER % keys).otherwise(drawn).alias("key")


def filled(handle: SparkHandle, keys: int) -> Reports:
    """Wait until every key has its state; return the reports of then.

    Raises:
        RuntimeError: that does not happen in time.
    """
    deadline = time.monotonic() + FILL_TIMEOUT_S
    while time.monotonic() < deadline:
        reports = handle.driver.run_progress.reports()
        # splits may be ahead of each other: each has its part of the keys
        if len(reports) == PARALLELISM and all(
            records_out(report, "source") >= keys / PARALLELISM for report in reports.values()
        ):
            return reports
        if handle.wait(1.0):
            raise RuntimeError("the pipeline ended while its state was filled")
    raise RuntimeError(f"the state was not filled within {FILL_TIMEOUT_S:g} s")


def steadiness(slices: Sequence[float]) -> float:
    """Return the median rate of the last third of ``slices`` as a share of the first third's."""
    third = max(1, len(slices) // 3)
    return median(slices[-third:]) / median(slices[:third])


def peer_rates(keys: int, draws: Sequence[Draw], options: Options) -> dict[str, Any]:
    """Return what Structured Streaming reaches, by the way keys are drawn."""
    return measure_keyed_update(
        keys,
        draws=draws,
        batch_rows=options.numbers("batch_rows", BATCH_ROWS_QUICK if options.quick else BATCH_ROWS),
        seconds=options.number("peer_seconds", 60, quick=10),
        memory_mb=int(options.number("memory_mb", 2_000, quick=200)),
    )
