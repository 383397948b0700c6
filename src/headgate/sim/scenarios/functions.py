"""Pipelines with triggers, late records, two keyed inputs and asynchronous calls, after one source or two in a row.

What each must have committed comes from plain Python over the records. A trigger may fire at any time and a record may
be late or not: such results are added up by key and window.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import polars as pl
import pyarrow as pa

import headgate as hg
from headgate.connectors.base import Source
from headgate.dataclass import dataclass
from headgate.sim.product.settings import Exactly
from headgate.sim.product.source import PacedSplits
from headgate.sim.product.steps import WINDOW_MS, Row
from headgate.sim.product.verdict import Verdict
from headgate.sim.product.workloads import Job, Splits, Values, Workload
from headgate.sim.scenarios.timers import Timed, TimedRun

COUNT = 3
LATENESS_MS = 25
PART = 12
_START = pl.col("window_start").dt.epoch("ms")


class EveryThree(hg.Trigger):
    """Fires after each three records of a window, and forgets them; and at its end."""

    def open(self, state: hg.StateHandle) -> None:
        self.count = state.value("count", pa.int64())

    def on_element(self, row: Row, context: hg.TriggerContext) -> hg.TriggerResult:
        """Count."""
        assert context.window_end_ms is not None
        context.timers.register_event_time(context.window_end_ms - 1)
        count = self.count.get(0) + 1
        self.count.put(count % COUNT or None)
        return hg.TriggerResult.CONTINUE if count % COUNT else hg.TriggerResult.FIRE_AND_PURGE

    def on_event_time(self, time_ms: int, context: hg.TriggerContext) -> hg.TriggerResult:
        """It has ended."""
        return hg.TriggerResult.FIRE_AND_PURGE


class AtEnd(hg.Trigger):
    """Fires when a window ends; has everything of it then."""

    def on_batch(self, rows: pl.DataFrame, context: hg.TriggerContext) -> hg.TriggerResult:
        """Have the window fire at its end."""
        assert context.window_end_ms is not None
        context.timers.register_event_time(context.window_end_ms - 1)
        return hg.TriggerResult.CONTINUE

    def on_event_time(self, time_ms: int, context: hg.TriggerContext) -> hg.TriggerResult:
        """It has ended."""
        assert time_ms + 1 == context.window_end_ms, "a timer of another window"
        return hg.TriggerResult.FIRE_AND_PURGE


class NowAndThen(hg.Trigger):
    """Fires by the clock, and when the window takes no more records, and forgets what it emitted."""

    def __init__(self, lateness_ms: int) -> None:
        self.lateness_ms = lateness_ms

    def open(self, state: hg.StateHandle) -> None:
        self.due = state.value("due", pa.int64())

    def on_batch(self, rows: pl.DataFrame, context: hg.TriggerContext) -> hg.TriggerResult:
        """Have the window fire soon, if it does not yet."""
        assert context.window_end_ms is not None
        context.timers.register_event_time(context.window_end_ms - 1 + self.lateness_ms)
        if not self.due.exists:
            due = context.timers.processing_time_ms + 1 + rows["v"][0] % 40
            self.due.put(due)
            context.timers.register_processing_time(due)
        return hg.TriggerResult.CONTINUE

    def on_processing_time(self, time_ms: int, context: hg.TriggerContext) -> hg.TriggerResult:
        """The time has come."""
        assert time_ms == self.due.get(), "a timer of another window"
        self.due.clear()
        return hg.TriggerResult.FIRE_AND_PURGE

    def on_event_time(self, time_ms: int, context: hg.TriggerContext) -> hg.TriggerResult:
        """It takes no more."""
        return hg.TriggerResult.FIRE_AND_PURGE


def _triggered(trigger: hg.Trigger) -> Callable[[hg.Stream], hg.Stream]:
    def build(rows: hg.Stream) -> hg.Stream:
        windows = rows.key_by("k").window(hg.Tumbling(f"{WINDOW_MS}ms"), trigger=trigger)
        return _sums_of(windows)

    return build


def _sums_of(windows: hg.WindowedStream[hg.Stream]) -> hg.Stream:
    found = windows.agg(n=pl.len(), v=pl.col("v").sum())
    return found.select("k", n=pl.col("n").cast(pl.Int64), v=pl.col("v"), at=_START)


def _per_window(rows: Sequence[Row]) -> dict[tuple[int, int], list[int]]:
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row in rows:
        found[row["k"], row["t"] - row["t"] % WINDOW_MS].append(row["v"])
    return found


def _sums(rows: Sequence[Row]) -> Counter[Values]:
    return Counter((k, len(values), sum(values), at) for (k, at), values in _per_window(rows).items())


def _late(rows: hg.Stream) -> hg.Stream:
    """Windows that take too little disorder, and what comes too late for them."""
    timed = rows.with_timestamps("t", name="hurried")
    found = (
        timed.key_by("k").window(hg.Tumbling(f"{WINDOW_MS}ms"), late_output="late").agg(n=pl.len(), v=pl.col("v").sum())
    )
    start = pl.col("t") - pl.col("t") % WINDOW_MS
    late = found.side_output("late").select("k", n=pl.lit(1, pl.Int64), v=pl.col("v"), at=start)
    return found.select("k", n=pl.col("n").cast(pl.Int64), v=pl.col("v"), at=_START).union(late)


def _late_for_triggers(rows: hg.Stream) -> hg.Stream:
    """The same with a trigger, which fires for late records, too."""
    timed = rows.with_timestamps("t", name="hurried-too")
    windows = timed.key_by("k").window(
        hg.Tumbling(f"{WINDOW_MS}ms"),
        trigger=NowAndThen(LATENESS_MS),
        late_output="late",
        allowed_lateness=f"{LATENESS_MS}ms",
    )
    found = windows.agg(n=pl.len(), v=pl.col("v").sum())
    start = pl.col("t") - pl.col("t") % WINDOW_MS
    late = found.side_output("late").select("k", n=pl.lit(1, pl.Int64), v=pl.col("v"), at=start)
    return found.select("k", n=pl.col("n").cast(pl.Int64), v=pl.col("v"), at=_START).union(late)


class Match(hg.CoProcessFunction):
    """Pairs the records of two streams that have a key, whichever came first."""

    schema = {"k": pa.int64(), "n": pa.int64(), "other": pa.int64()}

    def open(self, state: hg.StateHandle) -> None:
        self.left = state.list("left", pa.int64())
        self.right = state.list("right", pa.int64())

    def process_left(self, row: Row, context: hg.ProcessContext) -> Iterator[Row]:
        """Pair it with what the right stream had."""
        self.left.append(row["n"])
        for other in self.right.get():
            yield {"k": row["k"], "n": row["n"], "other": other}

    def process_right(self, row: Row, context: hg.ProcessContext) -> Iterator[Row]:
        """Pair it with what the left stream had."""
        self.right.append(row["n"])
        for n in self.left.get():
            yield {"k": row["k"], "n": n, "other": row["n"]}


class MatchBatches(hg.BatchCoProcessFunction):
    """The same, many keys at a time."""

    schema = Match.schema

    def open(self, state: hg.BatchStateHandle) -> None:
        self.left = state.list("left", pa.int64())
        self.right = state.list("right", pa.int64())

    def process_left(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame:
        """Pair them with what the right stream had."""
        self.left.append(batch["n"])
        rows, others = self.right.explode()
        return pl.DataFrame({"k": batch["k"][rows], "n": batch["n"][rows], "other": others})

    def process_right(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame:
        """Pair them with what the left stream had."""
        self.right.append(batch["n"])
        rows, n = self.left.explode()
        return pl.DataFrame({"k": batch["k"][rows], "n": n, "other": batch["n"][rows]})


def _connected(
    make: Callable[[], hg.CoProcessFunction | hg.BatchCoProcessFunction],
) -> Callable[[hg.Stream], hg.Stream]:
    def build(rows: hg.Stream) -> hg.Stream:
        parted = rows.with_columns(part=pl.col("n") // PART)
        left, right = parted.filter(pl.col("n") % 2 == 0), parted.filter(pl.col("n") % 2 == 1)
        return left.key_by("k", "part").connect(right.key_by("k", "part")).process(make())

    return build


def _matched(rows: Sequence[Row]) -> Counter[Values]:
    parts: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row in rows:
        parts[row["k"], row["n"] // PART].append(row["n"])
    return Counter(
        (k, n, other) for (k, _), ns in parts.items() for n in ns for other in ns if n % 2 == 0 and other % 2 == 1
    )


class Ask(hg.AsyncFunction):
    """Doubles a value after a while; of some records the first call fails."""

    async def open(self) -> None:
        self.asked: set[int] = set()

    async def call(self, row: Row) -> Row:
        """Answer."""
        for _ in range(row["v"] % 3):
            await asyncio.sleep(0)
        if row["n"] % 5 == 0 and row["n"] not in self.asked:
            self.asked.add(row["n"])
            raise OSError("busy")
        return {**row, "v": row["v"] * 2}


def _asked(*, ordered: bool) -> Callable[[hg.Stream], hg.Stream]:
    def build(rows: hg.Stream) -> hg.Stream:
        return rows.map_async(Ask(), limit=7, retries=2, retry_delay="5ms", timeout="10s", ordered=ordered)

    return build


def _asked_then_summed(rows: hg.Stream) -> hg.Stream:
    """Event time waits for the answers of the records before it."""
    answered = _asked(ordered=False)(rows)
    return _sums_of(answered.key_by("k").window(hg.Tumbling(f"{WINDOW_MS}ms")))


def _doubled(rows: Sequence[Row]) -> Counter[Values]:
    return Counter((row["n"], row["v"] * 2) for row in rows)


def _threes(rows: Sequence[Row]) -> Counter[Values]:
    found: Counter[Values] = Counter()
    for (k, at), values in _per_window(rows).items():
        found[k, COUNT, at] += len(values) // COUNT
        if len(values) % COUNT:
            found[k, len(values) % COUNT, at] += 1
    return +found


ADDED_UP = frozenset({"now-and-then", "late", "late-triggers"})
"""Sinks of which the records of a key and a window are added up."""

SUMS = ("k", "n", "v", "at")
WORKLOADS = (
    Workload("threes", ("k", "n", "at"), _triggered(EveryThree()), _threes),
    Workload("at-end", SUMS, _triggered(AtEnd()), _sums),
    Workload("now-and-then", SUMS, _triggered(NowAndThen(0)), _sums),
    Workload("late", SUMS, _late, _sums),
    Workload("late-triggers", SUMS, _late_for_triggers, _sums),
    Workload("matched", ("k", "n", "other"), _connected(Match), _matched),
    Workload("matched-batches", ("k", "n", "other"), _connected(MatchBatches), _matched),
    Workload("asked", ("n", "v"), _asked(ordered=True), _doubled),
    Workload("asked-any", ("n", "v"), _asked(ordered=False), _doubled),
    Workload(
        "asked-sums",
        SUMS,
        _asked_then_summed,
        lambda rows: _sums([{**row, "v": row["v"] * 2} for row in rows]),
    ),
)


@dataclass
class SumJudge(Exactly):
    """Adds up what a window emits piece by piece."""

    def problem(self, sink: str, found: Counter[Values], wanted: Counter[Values], *, has_failed: bool) -> str | None:
        if sink in ADDED_UP:
            sums: dict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0])
            for (k, n, v, at), times in found.items():
                sums[k, at][0] += n * times
                sums[k, at][1] += v * times
            found = Counter({(k, n, v, at): 1 for (k, at), (n, v) in sums.items()})
        return super().problem(sink, found, wanted, has_failed=has_failed)


def _halves(splits: Splits) -> tuple[list[str], list[str]]:
    """Return which splits the first and the second of two sources in a row have."""
    names = sorted(splits)
    return names[: len(names) // 2], names[len(names) // 2 :]


class _Verdict(Verdict):
    """Knows how far two sources in a row were read."""

    def _rows_read(self, splits: Splits, positions: Mapping[str, bytes]) -> dict[str, int]:
        begun = [int(at) for name, at in positions.items() if name.startswith("begun/")]
        if not begun:
            return super()._rows_read(splits, positions)
        first, second = _halves(splits)
        is_second = max(begun) == 1
        if is_second:
            read = {name.removeprefix("1/"): at for name, at in positions.items() if name.startswith("1/")}
            return {name: len(splits[name]) for name in first} | super()._rows_read(splits, read)
        read = {name.removeprefix("0/"): at for name, at in positions.items() if name.startswith("0/")}
        return super()._rows_read(splits, read) | dict.fromkeys(second, 0)


class FunctionRun(TimedRun):
    """The user of some such pipelines."""

    SUBJECT = "functions"
    VERDICT = _Verdict

    def _draw_job(self, rng: random.Random) -> Job:
        self.settings.judge = SumJudge()
        self._is_hybrid = rng.random() < 0.3
        return Timed(tuple(rng.sample(WORKLOADS, rng.choice((1, 2, 3)))))

    def _source(self, listed: Splits, index: int, trouble: Callable[[], bool]) -> Source:
        """Return the source; of some runs it is two, of which the second has the later records."""
        if not self._is_hybrid or self.settings.files is not None or len(listed) < 2:
            return super()._source(listed, index, trouble)
        parts = ({name: listed[name] for name in names} for names in _halves(listed))
        return hg.Hybrid(*(PacedSplits(part, self.settings.pace, self._now_ms, trouble) for part in parts))

    def _is_of_interest(self, rows: Mapping[str, int]) -> bool:
        return any(rows.values())
