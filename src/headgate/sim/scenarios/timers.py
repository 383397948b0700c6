"""Pipelines with functions that have timers, restored again and again at another parallelism.

What is drawn comes from a generator of its own; everything else a seed decides as without it. Each record of a key
registers the timer of its window and a reminder after it, which the window deletes or leaves; a reminder registers the
next one. So what must come out follows from the records alone (TM2 to TM9). The verdict is that of exactly once (SM60).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import polars as pl
import pyarrow as pa

import headgate as hg
from headgate.connectors.base import Sink
from headgate.model.manifest import Manifest
from headgate.sim.machine.faults import Fault
from headgate.sim.product.history import History
from headgate.sim.product.records import OUT_OF_ORDER_MS, WINDOW_MS, Row
from headgate.sim.product.run import Run
from headgate.sim.product.workloads import Branches, Job, Values, Workload, draw_splits
from headgate.state.backend import TIMERS, TimeKind

REMINDER_MS = 1_001
"""From the end of a window to its reminder: no window ends then."""
NEXT_MS = 11
REMINDERS = 3
FLUSH_MS = 10**12
RESCALE_RATE = 0.6
EVENT_TIMERS = f"{TIMERS}.{TimeKind.EVENT_TIME.value}"


def _end_of(time_ms: int) -> int:
    return (time_ms // WINDOW_MS + 1) * WINDOW_MS


def _number_of(time_ms: int) -> int:
    """Return which reminder of its window it is, from 0 on; -1: the window itself."""
    return (time_ms % WINDOW_MS - REMINDER_MS % WINDOW_MS) // NEXT_MS if time_ms % WINDOW_MS else -1


class Alarms(hg.ProcessFunction):
    """Windows and reminders; tells with each result whether its timer fired in its turn and not early."""

    schema = {"k": pa.int64(), "at": pa.int64(), "n": pa.int64(), "v": pa.int64(), "is_right": pa.int64()}

    def open(self, state: hg.StateHandle) -> None:
        """Declare."""
        self.counts = state.map("counts", pa.int64(), pa.int64())
        self.sums = state.map("sums", pa.int64(), pa.int64())
        self.last = state.value("last", pa.int64())

    def process(self, row: Row, context: hg.ProcessContext) -> None:
        """Count, and have the window end."""
        end = _end_of(row["t"])
        self.counts.put(end, self.counts.get(end, 0) + 1)
        self.sums.put(end, self.sums.get(end, 0) + row["v"])
        context.timers.register_event_time(end)
        context.timers.register_event_time(end + REMINDER_MS)

    def on_timer(self, timer: hg.Timer, context: hg.ProcessContext) -> Iterator[Row]:
        """Emit the window, or that there is a reminder."""
        at, number = timer.time_ms, _number_of(timer.time_ms)
        is_right = self.last.get(0) < at <= (context.timers.event_time_ms or 0)
        self.last.put(at)
        n, v = self.counts.get(at, -1), self.sums.get(at, number)
        if number < 0:
            self.counts.remove(at)
            self.sums.remove(at)
            if v % 2 == 0:
                context.timers.delete_event_time(at + REMINDER_MS)
        elif number + 1 < REMINDERS:
            context.timers.register_event_time(at + NEXT_MS)
        yield {"k": context.key, "at": at, "n": n, "v": v, "is_right": int(is_right)}


class AlarmsByBatch(hg.BatchProcessFunction):
    """The same, many keys at a time."""

    schema = Alarms.schema

    def open(self, state: hg.BatchStateHandle) -> None:
        """Declare."""
        self.counts = state.map("counts", pa.int64(), pa.int64())
        self.sums = state.map("sums", pa.int64(), pa.int64())
        self.last = state.value("last", pa.int64())

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> None:
        """Count, and have the windows end."""
        ends = (batch["t"] // WINDOW_MS + 1) * WINDOW_MS
        parts = batch.group_by("k", ends.alias("end"), maintain_order=True).agg(n=pl.len(), v=pl.col("v").sum())
        keys = context.lookup(parts)
        counts = self.counts.get(parts["end"], keys=keys).fill_null(0) + parts["n"].cast(pl.Int64)
        sums = self.sums.get(parts["end"], keys=keys).fill_null(0) + parts["v"]
        self.counts.put(parts["end"], counts, keys=keys)
        self.sums.put(parts["end"], sums, keys=keys)
        context.timers.register_event_time(ends)
        context.timers.register_event_time(ends + REMINDER_MS)

    def on_timer(self, timers: hg.FiredTimers, context: hg.BatchContext) -> pl.DataFrame:
        """Emit windows, and that there are reminders."""
        at = timers.times_ms
        numbers = pl.Series([_number_of(time_ms) for time_ms in at])
        is_right = (self.last.get().fill_null(0) < at) & (at <= (context.timers.event_time_ms or 0))
        self.last.put(at)
        counts, sums = self.counts.get(at).fill_null(-1), self.sums.get(at)
        self.counts.remove(at)
        self.sums.remove(at)
        sums = pl.select(pl.coalesce(sums, numbers)).to_series()
        context.timers.delete_event_time(at + REMINDER_MS, where=(numbers < 0) & (sums % 2 == 0))
        context.timers.register_event_time(at + NEXT_MS, where=(numbers >= 0) & (numbers + 1 < REMINDERS))
        return context.keys.frame().with_columns(at=at, n=counts, v=sums, is_right=is_right.cast(pl.Int64))


class Ticks(hg.ProcessFunction):
    """Holds each record back for a while of processing time, at most until all input has ended."""

    schema = {"k": pa.int64(), "n": pa.int64(), "is_right": pa.int64()}

    def open(self, state: hg.StateHandle) -> None:
        """Declare."""
        self.held = state.map("held", pa.int64(), pa.int64())

    def process(self, row: Row, context: hg.ProcessContext) -> None:
        """Hold it."""
        due = context.timers.processing_time_ms + row["v"] % 30
        self.held.put(row["n"], due)
        context.timers.register_processing_time(due)
        context.timers.register_event_time(FLUSH_MS)

    def on_timer(self, timer: hg.Timer, context: hg.ProcessContext) -> Iterator[Row]:
        """Send on what was held for this time, or all that is left."""
        is_right = context.timers.is_end if timer.is_event_time else context.timers.processing_time_ms >= timer.time_ms
        for n, due in self.held.items():
            if timer.is_event_time or due == timer.time_ms:
                self.held.remove(n)
                yield {"k": context.key, "n": n, "is_right": int(is_right)}


def _alarms(rows: Sequence[Row]) -> Counter[Values]:
    counts: Counter[tuple[int, int]] = Counter()
    sums: Counter[tuple[int, int]] = Counter()
    for row in rows:
        counts[row["k"], _end_of(row["t"])] += 1
        sums[row["k"], _end_of(row["t"])] += row["v"]
    found: Counter[Values] = Counter()
    for (k, end), n in counts.items():
        found[k, end, n, sums[k, end], 1] += 1
        if sums[k, end] % 2:
            found.update((k, end + REMINDER_MS + i * NEXT_MS, -1, i, 1) for i in range(REMINDERS))
    return found


COLUMNS = ("k", "at", "n", "v", "is_right")
TIMED = (
    Workload("alarms", COLUMNS, lambda rows: rows.key_by("k").process(Alarms(), name="alarming"), _alarms),
    Workload("alarms-batch", COLUMNS, lambda rows: rows.key_by("k").process(AlarmsByBatch(), name="batches"), _alarms),
    Workload(
        "ticks",
        ("k", "n", "is_right"),
        lambda rows: rows.key_by("k").process(Ticks(), name="ticking"),
        lambda rows: Counter((row["k"], row["n"], 1) for row in rows),
    ),
)


@dataclass(frozen=True, slots=True)
class Timed(Branches):
    """Branches that have event time from the source."""

    def build(self, sources: Sequence[hg.Stream], sink_to: Callable[[str], Sink]) -> None:
        """See ``Job``."""
        timed = sources[0].with_timestamps("t", out_of_orderness=f"{OUT_OF_ORDER_MS}ms")
        Branches.build(self, [timed], sink_to)


class TimedRun(Run):
    """The user of one such pipeline, with drivers that die after checkpoints that hold something to be restored."""

    IS_PLAIN = True

    SUBJECT = "timers"

    def _draw(self) -> None:
        rng = self._rng = random.Random(f"{self.SUBJECT} of seed {self.seed}")
        settings = self.settings
        settings.job = self._draw_job(rng)
        settings.inputs = settings.inputs[:1]
        if settings.files is None:
            settings.inputs = [draw_splits(rng, 0, rng.choice((1, 2, 4)), rng.choice((60, 200, 400)))]
        settings.hidden.clear()
        settings.grows = False
        settings.checkpointing = replace(settings.checkpointing, interval=f"{rng.choice((10, 20, 40))}ms")
        if rng.random() < 0.8:  # somebody dies, and a new driver starts
            self.faults.on |= {rng.choice((Fault.DRIVER_CRASH, Fault.POWER_CUT, Fault.STOP)), Fault.WORKER_CRASH}
            self.faults.budget += 6
        self._kills_left = rng.choice((1, 2, 4))
        self.history = History(settings.checkpointing.retained, self._on_manifest)

    def _draw_job(self, rng: random.Random) -> Job:
        return Timed(tuple(rng.sample(TIMED, rng.choice((1, 2, 3)))))

    def _is_of_interest(self, rows: Mapping[str, int]) -> bool:
        """Whether what a checkpoint holds of an operator, the rows of each state, is worth a restore."""
        return bool(rows.get(EVENT_TIMERS))

    def start(self) -> None:
        """See ``Run``."""
        if self._rng.random() < RESCALE_RATE:
            self.settings.parallelism = self._rng.choice((1, 2, 3))
        super().start()

    def _on_manifest(self, manifest: Manifest, files: Mapping[str, frozenset[str]]) -> None:
        """A checkpoint completes. Perhaps a process dies, so that what it holds is restored."""
        self.harm.on_manifest(manifest, files)
        held = [rows for part in manifest.parts for rows in (part.rows or {}).values()]
        if (
            any(map(self._is_of_interest, held))
            and self._kills_left
            and not self.faults.is_healed
            and self._rng.random() < 0.4
        ):
            self._kills_left -= 1
            self.world.at(self._rng.randint(0, 10), self._kill)

    def _kill(self) -> None:
        """Mostly the driver: the next one may have another parallelism."""
        drivers = [one.process for one in self.started if one.process.is_alive]
        workers = [p for one in self.started for p in one.spark.workers if p.is_alive]
        living = drivers if drivers and self._rng.random() < 0.7 else workers
        if living and not self.faults.is_healed:
            self._rng.choice(living).kill()
