"""Checkpoints under back-pressure: a sink that takes a tenth of what would come, aligned and unaligned.

Generated events → shuffle → sink, two workers. First without a brake, to know the throughput; then with a brake in
front of the sink, in its own thread, that lets a tenth through: with aligned checkpoints, and with checkpoints that
overtake at once. Judged is the longest of each kind.
Settings: ``seconds`` of each run, ``interval_ms``, ``share`` that the brake lets through.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

import headgate as hg
from bench.harness import Options, Result, at_most, median
from bench.running import Reports, rates, records_out, reports_after, running, wait_for
from headgate.model.ids import CheckpointId
from headgate.model.progress import PendingCheckpoint, SilentObserver

NAME = "back_pressure"

ALIGNED_S_MAX = 5.0
UNALIGNED_S_MAX = 1.0
WARM_UP_S = 3.0

BRAKED = "brake"


def run(options: Options) -> Result:
    """Return the durations of checkpoints with either kind."""
    seconds = options.number("seconds", 20, quick=6)
    interval_ms = int(options.number("interval_ms", 1_000))
    free = throughput(seconds)
    rate = free * options.number("share", 0.1)
    figures: dict[str, Any] = {"free_events_per_s": free}
    for kind, timeout_ms in (("aligned", None), ("unaligned", 0)):
        found = braked(rate, seconds, interval_ms, timeout_ms)
        figures |= {
            f"{kind}_share_let_through": found.events_per_s / free,
            f"{kind}_s_median": median(found.seconds) if found.seconds else float("nan"),
            f"{kind}_s_max": max(found.seconds, default=float("nan")),
            kind: found.seconds,
        }
    targets = {"aligned_s_max": at_most(ALIGNED_S_MAX), "unaligned_s_max": at_most(UNALIGNED_S_MAX)}
    return Result(figures, targets)


def throughput(seconds: float) -> float:
    """Return the events per second of both workers that the sink takes when nothing brakes it."""
    directory = tempfile.mkdtemp(prefix="headgate-bench-")
    try:
        definition = pipeline(directory, None, 1_000, None).definition()
        with running(definition) as handle:
            handle.wait(WARM_UP_S)
            before = wait_for(handle, _has_records, "deliver")
            handle.wait(seconds)
            return sum(rates(BRAKED, before, handle.driver.run_progress.reports()).values())
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Braked:
    """What was measured behind the brake."""

    events_per_s: float
    seconds: list[float]
    """That each checkpoint took (``with_pending``)."""


def braked(rate: float, seconds: float, interval_ms: int, timeout_ms: int | None) -> Braked:
    """Return how long checkpoints take while the sink takes ``rate`` events per second."""
    directory = tempfile.mkdtemp(prefix="headgate-bench-")
    try:
        taken = Taken()
        definition = pipeline(directory, rate, interval_ms, timeout_ms).definition()
        with running(definition, taken) as handle:
            handle.wait(WARM_UP_S)
            before = wait_for(handle, _has_records, "deliver")
            taken.seconds.clear()
            handle.wait(seconds)
            found = with_pending(taken.seconds, handle.progress.pending_checkpoint)
            return Braked(sum(rates(BRAKED, before, reports_after(handle, before)).values()), found)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def with_pending(seconds: Sequence[float], pending: PendingCheckpoint | None) -> list[float]:
    """Return ``seconds`` with the age of what is under way, if that took longer already: one may never end."""
    age_s = 0.0 if pending is None else pending.age_ms / 1_000
    return [*seconds, age_s] if age_s > max(seconds, default=0.0) else list(seconds)


def _has_records(reports: Reports) -> bool:
    return len(reports) == 2 and all(records_out(report, BRAKED) > 0 for report in reports.values())


def pipeline(directory: str, rate: float | None, interval_ms: int, timeout_ms: int | None) -> hg.Pipeline:
    """Return the pipeline under test; ``rate`` is that of both workers together."""
    timeout = None if timeout_ms is None else f"{timeout_ms}ms"
    checkpointing = hg.Checkpointing(interval=f"{interval_ms}ms", dir=directory, alignment_timeout=timeout)
    p = hg.Pipeline("back-pressure", parallelism=2, checkpointing=checkpointing)
    source = hg.Generator(columns={"key": hg.Uniform(0, 100_000), "value": hg.Uniform(0, 1_000)})
    brake = Brake(None if rate is None else rate / 2)
    keyed = p.source(source).rebalance().map_batches(brake, as_arrow=True, name=BRAKED)
    keyed.sink(hg.Discard(), name="sink")
    return p


class Brake:
    """Lets so many events through in a second; None: all."""

    def __init__(self, rate: float | None, sleep: Callable[[float], None] = time.sleep) -> None:
        self._rate = rate
        self._sleep = sleep

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return ``batch``, after the time that it takes."""
        if self._rate is not None and batch.num_rows:
            self._sleep(batch.num_rows / self._rate)
        return batch


class Taken(SilentObserver):
    """Notes how long checkpoints took."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_checkpoint(self, checkpoint: CheckpointId, duration_ms: int, size_bytes: int) -> None:
        """See ``Observer``."""
        self.seconds.append(duration_ms / 1_000)
