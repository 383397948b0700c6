"""Pipelines with functions that have timers or state with a TTL, restored at other parallelisms, on any backend.

Each record of a key registers the timer of its window and a reminder after it, which the window deletes or leaves. So
what must come out follows from the records alone (TM6). What a function sees of state with a TTL depends on
when it sees it, so its results say what time it was: the judge replays them against plain dicts with that clock.

Other runs have their keyed state in RocksDB, or checkpoints that refer to chunks of state in memory. RocksDB is native,
and its files are real ones, in a directory that goes with the run. It can run here because no other process sees them:
what survives a process is in checkpoints, on simulated disks. State is small in these runs: files and chunks are
written however small they are.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import polars as pl
import pyarrow as pa

import headgate as hg
from headgate.connectors.base import Sink
from headgate.dataclass import dataclass
from headgate.model.config import RocksState
from headgate.model.manifest import Manifest
from headgate.sim.machine.world import Bound, Fault, Violation
from headgate.sim.product.fault_injection import Kills
from headgate.sim.product.run import Run
from headgate.sim.product.settings import Exactly
from headgate.sim.product.steps import OUT_OF_ORDER_MS, WINDOW_MS, Row
from headgate.sim.product.workloads import TYPED, WORKLOADS, Branches, Job, Values, Workload, draw_splits
from headgate.state import snapshot
from headgate.state.backend import TIMERS, TimeKind
from headgate.state.memory import change_tracking, column_backend, incremental_snapshot
from headgate.state.rocksdb import database_snapshot
from headgate.state.rocksdb.database import SharedMemory

REMINDER_MS = 1_001
"""From the end of a window to its reminder: no window ends then."""
NEXT_MS = 11
REMINDERS = 3
FLUSH_MS = 10**12
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
        timed = sources[0].with_timestamps("t", out_of_orderness=f"{OUT_OF_ORDER_MS}ms")
        Branches.build(self, [timed], sink_to)


class TimedRun(Run):
    """The user of one such pipeline, with drivers that die after checkpoints that hold something to be restored."""

    IS_PLAIN = True
    SUBJECT = "timers"
    RESCALE_RATE = 0.6
    RESCALES_FIRST = True

    def _draw(self) -> None:
        rng, settings = self.rng, self.settings
        settings.job = self._draw_job(rng)
        settings.inputs = settings.inputs[:1]
        if settings.files is None:
            settings.inputs = [draw_splits(rng, 0, rng.choice((1, 2, 4)), rng.choice((60, 200, 400)))]
        settings.fix_input()
        settings.checkpointing = replace(settings.checkpointing, interval=f"{rng.choice((10, 20, 40))}ms")
        self._draw_deaths(0.8, (Fault.DRIVER_CRASH, Fault.POWER_CUT, Fault.STOP), 6)
        # mostly the driver: the next one may have another parallelism
        self._kills = Kills(self, rng.choice((1, 2, 4)), 0.4, drivers_rate=0.7)

    def _draw_job(self, rng: random.Random) -> Job:
        return Timed(tuple(rng.sample(TIMED, rng.choice((1, 2, 3)))))

    def _is_of_interest(self, rows: Mapping[str, int]) -> bool:
        """Whether what a checkpoint holds of an operator, the rows of each state, is worth a restore."""
        return bool(rows.get(EVENT_TIMERS))

    def _on_manifest(self, manifest: Manifest, files: Mapping[str, frozenset[str]]) -> None:
        """A checkpoint completes. Perhaps a process dies, so that what it holds is restored."""
        super()._on_manifest(manifest, files)
        held = [rows for part in manifest.parts for rows in (part.rows or {}).values()]
        if any(map(self._is_of_interest, held)):
            self._kills.perhaps()


SLOTS = 3
"""Entries of each key's map."""

TTL_COLUMNS = ("k", "number", "n", "size", "now", "value", "elements", "total", "entries", "entry")
TTL_SCHEMA = {name: pa.int64() for name in TTL_COLUMNS}
NONE = -1


class Fading(hg.ProcessFunction):
    """Tells with each record what its key still has, then adds to it."""

    schema = TTL_SCHEMA

    def __init__(self, ttl: hg.TTL) -> None:
        self.ttl = ttl

    def open(self, state: hg.StateHandle) -> None:
        self.count = state.value("count", pa.int64())
        self.value = state.value("value", pa.int64(), ttl=self.ttl)
        self.list = state.list("list", pa.int64(), ttl=self.ttl)
        self.map = state.map("map", pa.int64(), pa.int64(), ttl=self.ttl)

    def process(self, row: Row, context: hg.ProcessContext) -> Iterator[Row]:
        """Look, then write."""
        number, n = self.count.get(0) + 1, row["n"]
        self.count.put(number)
        elements, slot = self.list.get(), n % SLOTS
        entries = len(self.map) if number % 2 else NONE
        seen = {"value": self.value.get(NONE), "elements": len(elements), "total": sum(elements)}
        seen |= {"entries": entries, "entry": self.map.get(slot, NONE)}
        self.value.put(n)
        self.list.append(n)
        self.map.put(slot, n)
        now = context.timers.processing_time_ms
        yield {"k": context.key, "number": number, "n": n, "size": 1, "now": now, **seen}


class FadingByBatch(hg.BatchProcessFunction):
    """The same for the records of each key in a batch together."""

    schema = TTL_SCHEMA

    def __init__(self, ttl: hg.TTL) -> None:
        self.ttl = ttl

    def open(self, state: hg.BatchStateHandle) -> None:
        self.count = state.value("count", pa.int64())
        self.value = state.value("value", pa.int64(), ttl=self.ttl)
        self.list = state.list("list", pa.int64(), ttl=self.ttl)
        self.map = state.map("map", pa.int64(), pa.int64(), ttl=self.ttl)

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame:
        """Look, then write."""
        parts = batch.group_by("k", maintain_order=True).agg(pl.col("n").sum(), size=pl.len().cast(pl.Int64))
        keys, n = context.lookup(parts), parts["n"]
        self.count.update(1, "add", keys=keys)
        slots, number = n % SLOTS, self.count.get(keys=keys)
        seen = parts.with_columns(
            number=number,
            now=context.timers.processing_time_ms,
            value=self.value.get(keys=keys).fill_null(NONE),
            elements=self.list.counts(keys=keys).cast(pl.Int64),
            total=self.list.get(keys=keys).list.sum(),
            entries=self._entries(number % 2 == 1, keys),
            entry=self.map.get(slots, keys=keys).fill_null(NONE),
        )
        self.value.update(n, "last", keys=keys)
        self.list.append(n, keys=keys)
        self.map.put(slots, n, keys=keys)
        return seen

    def _entries(self, where: pl.Series, keys: hg.Keys) -> pl.Series:
        rows, _, _ = self.map.items(where, keys=keys)
        counts = Counter(rows.to_list())
        return pl.Series([counts[row] if is_asked else NONE for row, is_asked in enumerate(where)], dtype=pl.Int64)


def _totals(rows: Sequence[Row]) -> Counter[Values]:
    """Return, for each key, how many records it has and what they add up to."""
    counts = Counter(row["k"] for row in rows)
    totals: Counter[int] = Counter()
    for row in rows:
        totals[row["k"]] += row["n"]
    return Counter((k, counts[k], totals[k]) for k in counts)


class KeyModel:
    """What one key has: pairs of what was written and when it expires."""

    def __init__(self, ttl_ms: int, *, is_renewed: bool) -> None:
        self._ttl_ms = ttl_ms
        self._is_renewed = is_renewed
        self._value: tuple[int, int] | None = None
        self._list: list[tuple[int, int]] = []
        self._map: dict[int, tuple[int, int]] = {}

    def look(self, now_ms: int, slot: int, *, is_counting: bool) -> tuple[int, ...]:
        """Return what a function sees: value, elements, their sum, entries if they are counted, one entry."""
        self._value = self._value if self._value is not None and self._value[1] > now_ms else None
        self._list = [pair for pair in self._list if pair[1] > now_ms]
        self._map = {key: pair for key, pair in self._map.items() if pair[1] > now_ms}
        if self._is_renewed:
            expires = now_ms + self._ttl_ms
            self._value = None if self._value is None else (self._value[0], expires)
            self._list = [(stored, expires) for stored, _ in self._list]
            renewed = set(self._map) if is_counting else {slot} & self._map.keys()
            self._map |= {key: (self._map[key][0], expires) for key in renewed}
        value, entry = self._value or (NONE, 0), self._map.get(slot, (NONE, 0))
        total = sum(stored for stored, _ in self._list)
        return value[0], len(self._list), total, len(self._map) if is_counting else NONE, entry[0]

    def write(self, now_ms: int, slot: int, n: int) -> None:
        """Do what a function does after that."""
        self._value = n, now_ms + self._ttl_ms
        self._list.append(self._value)
        self._map[slot] = self._value


@dataclass
class Judge(Exactly):
    """Replays the results of each key.

    Attributes:
        ttls: of each sink that is judged so.
        expired, lived: how often state was seen to be gone, and to be there.
    """

    ttls: Mapping[str, hg.TTL]
    expired: int = 0
    lived: int = 0

    def problem(self, sink: str, found: Counter[Values], wanted: Counter[Values], *, has_failed: bool) -> str | None:
        by_key: dict[int, list[Values]] = {}
        for record in sorted(found.elements()):
            by_key.setdefault(record[0], []).append(record)
        totals = Counter((k, sum(r[3] for r in rows), sum(r[2] for r in rows)) for k, rows in by_key.items())
        problem = super().problem(sink, totals, wanted, has_failed=has_failed)
        for k, rows in by_key.items():
            problem = problem or self._wrong(k, rows, self.ttls[sink])
        return problem

    def _wrong(self, key: int, rows: Sequence[Values], ttl: hg.TTL) -> str | None:
        model = KeyModel(ttl.duration_ms, is_renewed=ttl.update == "read_and_write")
        before_ms = 0
        for at, (_, number, n, _, now_ms, *seen) in enumerate(rows, start=1):
            if number != at or now_ms < before_ms:
                return f"key {key} has number {number} at {now_ms} ms where {at} is due, behind {before_ms} ms"
            due = model.look(now_ms, n % SLOTS, is_counting=number % 2 == 1)
            if tuple(seen) != due:
                return f"key {key} saw {seen} with number {number} at {now_ms} ms, and had {due}, by {ttl}"
            if at > 1:
                self.expired += due[0] == NONE
                self.lived += due[0] != NONE
            model.write(now_ms, n % SLOTS, n)
            before_ms = now_ms
        return None


def _fading(ttl: hg.TTL, *, is_by_row: bool) -> Workload:
    name = f"fading-{'row' if is_by_row else 'batch'}-{ttl.update.replace('_', '-')}"
    function = Fading(ttl) if is_by_row else FadingByBatch(ttl)
    return Workload(
        name, TTL_COLUMNS, lambda rows: rows.key_by("k").process(function, name=f"{name}-op"), _totals, rises=True
    )


class ExpiringRun(TimedRun):
    """The user of one such pipeline."""

    SUBJECT = "ttl"

    def _draw_job(self, rng: random.Random) -> Job:
        updates: tuple[Literal["write", "read_and_write"], ...] = ("write", "read_and_write")
        drawn = rng.sample(
            [(update, is_by_row) for update in updates for is_by_row in (True, False)], rng.choice((1, 2))
        )
        ttls = [hg.TTL(f"{rng.choice((3, 10, 25, 60, 150))}ms", update) for update, _ in drawn]
        workloads = [_fading(ttl, is_by_row=by_row) for ttl, (_, by_row) in zip(ttls, drawn, strict=True)]
        self.settings.judge = Judge({workload.name: ttl for workload, ttl in zip(workloads, ttls, strict=True)})
        return Branches(workloads)

    def start(self) -> None:
        """See ``Run``. The workers of each start may be on machines with dates that differ from those before."""
        self.clock_shift_ms += self.rng.choice((0, 0, -40, 40, -3_600_000, 5_000))
        super().start()

    def _is_of_interest(self, rows: Mapping[str, int]) -> bool:
        return bool(rows.get("map"))


MEMORY_BYTES = 16 << 20

CACHE_BYTES = 1 << 10
"""So little that hardly anything stays in front of a database."""

FILES_MAX = 100_000
"""So many files of one database do not make writes wait for a compaction that never comes."""


class RocksRun(Run):
    """A run with RocksDB."""

    _directory = ""

    def run(self) -> Violation | None:
        with tempfile.TemporaryDirectory(prefix="headgate-sim-") as self._directory:
            return super().run()

    def start(self) -> None:
        self.settings.state = RocksState(MEMORY_BYTES, self._directory)
        super().start()


class RocksFilesRun(RocksRun):
    """A run with checkpoints that share the files of databases, however small these are.

    RocksDB compacts nothing here: when it did would be up to its own threads, and a seed would not be repeated exactly.
    Its files have numbers of their own in them, so checksums differ from run to run: none is damaged, which would tell.
    """

    def _draw(self) -> None:
        super()._draw()
        self.faults.on -= {Fault.DAMAGE, Fault.AWAY}
        usual = SharedMemory.options

        def options(self: SharedMemory, **of_it: Any) -> Any:
            made = usual(self, **of_it)
            made.set_disable_auto_compactions(True)
            made.set_level_zero_slowdown_writes_trigger(FILES_MAX)
            made.set_level_zero_stop_writes_trigger(FILES_MAX)
            return made

        self.bounds += [
            (database_snapshot, "SIZE_BYTES_MIN", 1),
            (SharedMemory, "options", options),
            (SharedMemory, "cache_bytes", property(lambda self: CACHE_BYTES)),
        ]


def both(first: type[Run], second: type[Run]) -> type[Run]:
    """Return the kind of runs that are of both kinds."""
    return type(f"{first.__name__}And{second.__name__}", (first, second), {})


RocksTimedRun, RocksExpiringRun = both(RocksRun, TimedRun), both(RocksRun, ExpiringRun)
RocksTimedFilesRun, RocksExpiringFilesRun = both(RocksFilesRun, TimedRun), both(RocksFilesRun, ExpiringRun)

ROCKSDB_KINDS = (
    RocksRun,
    RocksTimedRun,
    RocksFilesRun,
    RocksExpiringRun,
    RocksRun,
    RocksTimedFilesRun,
    RocksFilesRun,
    RocksExpiringFilesRun,
)
"""What a seed runs, by turns."""


BOUNDS: tuple[Bound, ...] = (
    (incremental_snapshot, "SIZE_BYTES_MIN", 1),
    (incremental_snapshot, "CHUNKS_MAX", 4),
    (change_tracking, "KEYS_FREE", 8),
    (snapshot, "RANGE_BYTES_MIN", 256),
    (column_backend, "_RENUMBER_MIN", 16),
)


class ChunksRun(Run):
    """A run with checkpoints that refer to chunks."""

    def _draw(self) -> None:
        super()._draw()
        self.bounds += BOUNDS


class WindowedChunksRun(ChunksRun, TimedRun):
    """A run with windows of both kinds, in chunks."""

    SUBJECT = "windows in chunks"

    def _draw_job(self, rng: random.Random) -> Job:
        kept = [workload for workload in TYPED if workload.name == "buffered"]
        merged = [workload for workload in WORKLOADS if workload.name == "windowed"]
        return Branches((*kept, *merged[: rng.choice((0, 1))]))

    def _is_of_interest(self, rows: Mapping[str, int]) -> bool:
        return bool(rows.get("records"))


TimedChunksRun, ExpiringChunksRun = both(ChunksRun, TimedRun), both(ChunksRun, ExpiringRun)

CHUNKS_KINDS = (
    *(ChunksRun, ExpiringChunksRun, WindowedChunksRun, TimedChunksRun),
    *(ChunksRun, ExpiringChunksRun, ChunksRun, TimedChunksRun),
)
"""What a seed runs, by turns."""
