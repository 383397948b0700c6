"""Pipelines under back-pressure, with unaligned checkpoints, also with a broadcast side.

Small credit and a function that takes its time make the queues (UA7, UA8, UA10 of docs/spec/unaligned.md). With a
broadcast side every subtask makes of each record of the side a digest that depends on all before it and on their order:
the digests of all subtasks must be one (docs/spec/broadcast.md).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace

import polars as pl
import pyarrow as pa

import headgate as hg
from headgate.codec.snapshot import IN_FLIGHT_PREFIX
from headgate.connectors.base import Sink
from headgate.dataclass import dataclass
from headgate.model.manifest import Manifest
from headgate.sim.machine.world import Fault
from headgate.sim.product.fault_injection import Kills
from headgate.sim.product.run import Run
from headgate.sim.product.steps import OUT_OF_ORDER_MS, WINDOW_MS, FirstOfEqual, Row
from headgate.sim.product.workloads import WORKLOADS, Branches, Values, draw_splits
from headgate.sim.scenarios.guarantees import LOOPS, keeps_graph

GRAPHS_RATE = 0.5
"""Of the seeds that have a graph without a loop, so many keep it."""
ROWS = 400


@dataclass(frozen=True)
class Slowed(Branches):
    """Branches after a shuffle, each with a function that takes its time in front of its sink."""

    slow: Callable[[], None] = field(default=lambda: None)
    is_joined: bool = False
    """Whether records come on several edges, which do not lead from the source alone."""

    def build(self, sources: Sequence[hg.Stream], sink_to: Callable[[str], Sink]) -> None:
        source = sources[0].with_timestamps("t", out_of_orderness=f"{OUT_OF_ORDER_MS}ms")
        rows = source.rebalance().filter(self._slowly, name="spread")
        if self.is_joined:
            even = rows.filter(lambda row: row["n"] % 2 == 0, name="even")
            odd = source.filter(lambda row: row["n"] % 2 == 1, name="odd")
            rows = even.union(odd).filter(self._slowly, name="joined")
        for workload in self.workloads:
            made = _windows(rows) if workload.name == "windowed" else workload.build(rows)
            made = made.filter(self._slowly, name=f"slow-{workload.name}")
            made.sink(sink_to(workload.name), name=workload.name)

    def _slowly(self, row: Row) -> bool:
        self.slow()
        return True


def _windows(rows: hg.Stream) -> hg.Stream:
    """As the workload does, with event time from the source: after a shuffle splits are mixed."""
    return rows.key_by("k").window(hg.Tumbling(f"{WINDOW_MS}ms")).agg(n=pl.len(), v=pl.col("v").sum())


class OvertakingRun(Run):
    """The user of one such pipeline."""

    IS_PLAIN = True
    SUBJECT = "overtaking"
    RESCALE_RATE = 0.6
    RESCALES_FIRST = True

    def _draw(self) -> None:
        super()._draw()
        rng, settings = self.rng, self.settings
        settings.checkpointing = replace(
            settings.checkpointing,
            max_concurrent=1,
            alignment_timeout=rng.choice((0, 0, "3ms", "10ms", "40ms")),
            timeout=f"{rng.choice((100, 500, 3_000))}ms",
            tolerable_failures=rng.choice((2, 5, 50)),
        )
        settings.credit_bytes = rng.choice((1, 2_000, 40_000))
        settings.pace = replace(settings.pace, batch_rows=rng.choice((2, 8)), pause_ms=1)
        self._slow_rate, self._pause_ms = rng.choice((0.2, 0.6, 1.0)), rng.choice((2, 10, 80))
        if not keeps_graph(self, rng, GRAPHS_RATE):
            found = rng.sample([w for w in WORKLOADS if w.name not in LOOPS], rng.choice((1, 1, 2)))
            settings.job = Slowed(tuple(found), slow=self._take_time, is_joined=rng.random() < 0.5)
            settings.inputs = settings.inputs[:1]
            if settings.files is None:
                settings.inputs = [draw_splits(rng, 0, rng.choice((1, 2, 4)), ROWS)]
            settings.fix_input()
        self._draw_deaths(0.8, (Fault.DRIVER_CRASH, Fault.POWER_CUT, Fault.STOP), 6)
        self._kills = Kills(self, rng.choice((0, 2, 5)), 0.6)

    def _on_manifest(self, manifest: Manifest, files: Mapping[str, frozenset[str]]) -> None:
        """A checkpoint completes. If something was in flight, perhaps a process dies, so that it is restored."""
        super()._on_manifest(manifest, files)
        if any(part.section.startswith(IN_FLIGHT_PREFIX) for part in manifest.parts):
            self._kills.perhaps()

    def _take_time(self) -> None:
        if not self.faults.is_healed and self.rng.random() < self._slow_rate:
            self.tasks.park(self.rng.randint(0, self._pause_ms))


SINK = "sided"
TOLD = {"k": pa.int64(), "n": pa.int64(), "v": pa.int64()}
ALIGNED_RATE = 0.4
"""Of the seeds so many have barriers that never overtake."""

EVENTS = 160
RULES = 80

SIDE_SINK = "side"
TRIPS = 3


def folded(so_far: int, row: Row) -> int:
    """Return what a digest becomes by one more record."""
    return int(so_far * 31 + row["n"] * 7 + row["v"] + 1) % 1_000_003


class Told(hg.BroadcastProcessFunction):
    """Every event once; every record of the side from each subtask, below zero, with the digest of all so far."""

    schema = TOLD

    def open(self, state: hg.StateHandle) -> None:
        self.rules = state.broadcast("rules", pa.int64(), pa.int64())

    def process(self, row: Row, context: hg.ProcessContext) -> Iterator[Row]:
        """Pass it on."""
        yield {"k": row["k"], "n": row["n"], "v": 0}

    def process_broadcast(self, row: Row, context: hg.BroadcastContext) -> Iterator[Row]:
        """Fold it in: for all, and for its key, which some records take away again."""
        digest = folded(self.rules.get(-1, 0), row)
        self.rules.put(-1, digest)
        if row["v"] % 7 == 0:
            self.rules.remove(row["k"])
        else:
            self.rules.put(row["k"], folded(self.rules.get(row["k"], 0), row))
        of_keys = sum(value for key, value in self.rules.items() if key >= 0)
        yield {"k": row["k"], "n": -1 - row["n"], "v": digest * 1_000 + of_keys % 1_000}


class Numbered(Told):
    """The same; events are numbered by key."""

    def open(self, state: hg.StateHandle) -> None:
        super().open(state)
        self.count = state.value("count", pa.int64())

    def process(self, row: Row, context: hg.ProcessContext) -> Iterator[Row]:
        """Number it."""
        number = self.count.get(0) + 1
        self.count.put(number)
        yield {"k": row["k"], "n": number, "v": 0}


class ToldBatches(hg.BatchBroadcastProcessFunction):
    """As ``Numbered``, by batch."""

    schema = TOLD

    def open(self, state: hg.BatchStateHandle) -> None:
        self.rules = state.broadcast("rules", pa.int64(), pa.int64())
        self.count = state.value("count", pa.int64())

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame:
        """Number the records of the batch after those before."""
        within = batch.select(pl.int_range(1, pl.len() + 1, dtype=pl.Int64).over("k")).to_series()
        numbers = self.count.get().fill_null(0) + within
        self.count.put(numbers)
        return batch.select("k", n=numbers, v=pl.lit(0, pl.Int64))

    def process_broadcast(self, batch: pl.DataFrame, context: hg.BroadcastContext) -> pl.DataFrame:
        """Fold its rows in, one after the other."""
        return pl.DataFrame([self._told(row) for row in batch.rows(named=True)], schema=dict.fromkeys(TOLD, pl.Int64))

    def _told(self, row: Row) -> Row:
        every, key = pl.Series([-1]), pl.Series([row["k"]])
        digest = folded(self.rules.get(every)[0] or 0, row)
        self.rules.put(every, digest)
        if row["v"] % 7 == 0:
            self.rules.remove(key)
        else:
            self.rules.put(key, folded(self.rules.get(key)[0] or 0, row))
        of_keys = self.rules.frame().filter(pl.col("key") >= 0)["value"].sum()
        return {"k": row["k"], "n": -1 - row["n"], "v": digest * 1_000 + of_keys % 1_000}


@dataclass(frozen=True)
class Sided:
    """One function with a broadcast side: of other sources, or of some records of the only one.

    Attributes:
        how: ``row`` or ``batch``, by key; ``plain`` by row without a key.
        slow: takes time; each subtask another one.
    """

    how: str
    slow: Callable[[], None] = field(default=lambda: None)
    is_picky: bool = False

    @property
    def columns(self) -> dict[str, tuple[str, ...]]:
        return {SINK: ("k", "n")}

    @property
    def rising(self) -> frozenset[str]:
        return frozenset()

    def build(self, sources: Sequence[hg.Stream], sink_to: Callable[[str], Sink]) -> None:
        events, side = sources[0], sources[1:]
        rules = _rules(events, side)
        broadcast = rules.broadcast()
        if self.how == "plain":
            labelled = events.rebalance().connect(broadcast).process(Told(), name="told")
        else:
            function = Numbered() if self.how == "row" else ToldBatches()
            labelled = events.key_by("k", name="by").connect(broadcast).process(function, name="told")
        self._write_once(labelled.filter(self._slowly, name="slowed"), sink_to)

    def _write_once(self, labelled: hg.Stream, sink_to: Callable[[str], Sink]) -> None:
        """Write events, and of each record of the side one of its copies."""
        copies = labelled.filter(lambda row: row["n"] < 0, name="copies")
        once = copies.key_by("k", name="copies-by").process(FirstOfEqual(), name="once")
        labelled.filter(lambda row: row["n"] >= 0, name="events").union(once).sink(sink_to(SINK), name=SINK)

    def expected(self, inputs: Sequence[Sequence[Row]]) -> dict[str, Counter[Values]]:
        events, rules = inputs[0], _rows_of_side(inputs)
        found: Counter[Values] = Counter((row["k"], -1 - row["n"]) for row in rules)
        if self.how == "plain":
            found.update((row["k"], row["n"]) for row in events)
        else:
            per_key = Counter(row["k"] for row in events)
            found.update((k, number) for k, count in per_key.items() for number in range(1, count + 1))
        return {SINK: found}

    def _slowly(self, row: Row) -> bool:
        self.slow()
        return True


def _rules(events: hg.Stream, side: Sequence[hg.Stream]) -> hg.Stream:
    return side[0].union(*side[1:]) if side else events.filter(lambda row: row["v"] % 3 == 0, name="rules")


def _rows_of_side(inputs: Sequence[Sequence[Row]]) -> list[Row]:
    events, *side = inputs
    return [row for rows in side for row in rows] if side else [row for row in events if row["v"] % 3 == 0]


class Going(Told):
    """Takes one trip from every event, in a loop."""

    schema = TOLD | {"left": pa.int64()}

    def process(self, row: Row, context: hg.ProcessContext) -> Iterator[Row]:
        """Have it go on."""
        yield {"k": row["k"], "n": row["n"], "v": 0, "left": row["left"] - 1}

    def process_broadcast(self, row: Row, context: hg.BroadcastContext) -> Iterator[Row]:
        """Tell what ``Told`` does; that leaves the loop."""
        for labelled in super().process_broadcast(row, context):
            yield {**labelled, "left": 0}


@dataclass(frozen=True)
class Looped(Sided):
    """Events go round a loop, in which a function has a broadcast side.

    Attributes:
        how: where the side comes from: ``outside`` of the loop, or ``inside``, where some events of each trip are sent.
    """

    def build(self, sources: Sequence[hg.Stream], sink_to: Callable[[str], Sink]) -> None:
        events, side = sources[0], sources[1:]
        outside = _rules(events, side)
        going = events.select("k", "n", v=pl.lit(0, pl.Int64), left=pl.col("n") % TRIPS + 1, name="going")

        def body(loop: hg.Stream) -> tuple[hg.Stream, hg.Stream]:
            broadcast = (_inside(loop) if self.how == "inside" else outside).broadcast()
            labelled = loop.key_by("k", name="by").connect(broadcast).process(Going(), name="told")
            slowed = labelled.filter(self._slowly, name="slowed")
            return slowed.filter(pl.col("left") > 0).rebalance(), slowed.filter(pl.col("left") <= 0)

        labelled = going.iterate(body, name="loop").select("k", "n", "v", name="behind")
        self._write_once(labelled, sink_to)
        if self.how == "inside":
            outside.sink(sink_to(SIDE_SINK), name=SIDE_SINK)

    @property
    def columns(self) -> dict[str, tuple[str, ...]]:
        return super().columns | ({SIDE_SINK: ("k", "n")} if self.how == "inside" else {})

    def expected(self, inputs: Sequence[Sequence[Row]]) -> dict[str, Counter[Values]]:
        events, outside = inputs[0], _rows_of_side(inputs)
        found: Counter[Values] = Counter((row["k"], row["n"]) for row in events)
        if self.how == "outside":
            found.update((row["k"], -1 - row["n"]) for row in outside)
            return {SINK: found}
        for row in events:
            if row["n"] % 3 == 0:
                found.update((row["k"], -1 - (row["n"] * 10 + left)) for left in range(1, row["n"] % TRIPS + 2))
        return {SINK: found, SIDE_SINK: Counter((row["k"], row["n"]) for row in outside)}


def _inside(loop: hg.Stream) -> hg.Stream:
    """Return what a loop tells itself: some events of each trip."""
    some = loop.filter(pl.col("n") % 3 == 0)
    return some.select("k", n=pl.col("n") * 10 + pl.col("left"), v=pl.col("left"), name="telling")


class SidedRun(OvertakingRun):
    """The user of one such pipeline."""

    def _draw(self) -> None:
        super()._draw()
        rng = random.Random(f"sides of seed {self.seed}")
        settings = self.settings
        settings.fix_input()
        if settings.files is None:
            settings.inputs = [draw_splits(rng, 0, rng.choice((1, 2, 3)), EVENTS)]
            for source in range(1, rng.choice((1, 2, 3))):
                settings.inputs.append(draw_splits(rng, source, rng.choice((1, 2)), RULES))
        settings.job = Sided(rng.choice(("row", "batch", "plain")), slow=self._take_time)
        if rng.random() < ALIGNED_RATE:
            settings.checkpointing = replace(settings.checkpointing, alignment_timeout=None)


class LoopedRun(SidedRun):
    """The user of one with a loop, with barriers that never overtake (UA2)."""

    def _draw(self) -> None:
        super()._draw()
        rng = random.Random(f"looped sides of seed {self.seed}")
        self.settings.job = Looped(rng.choice(("outside", "inside")), slow=self._take_time)
        self.settings.checkpointing = replace(self.settings.checkpointing, alignment_timeout=None)


BROADCAST_KINDS = (SidedRun, SidedRun, SidedRun, SidedRun, LoopedRun)
