"""Pipelines under back-pressure with barriers that overtake what waits.

Restored again and again at another parallelism.

What is drawn comes from a generator of its own; everything else a seed decides as without it. Small credit and a
function that takes its time make the queues. Rules UA7–UA15 of docs/spec/unaligned.md; the verdict is that of exactly
once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import polars as pl

import headgate as hg
from headgate.codec.snapshot import IN_FLIGHT_PREFIX
from headgate.connectors.base import Sink
from headgate.errors import UsageError
from headgate.model.manifest import Manifest
from headgate.sim.machine.faults import Fault
from headgate.sim.product.graphs import Graph
from headgate.sim.product.history import History
from headgate.sim.product.records import OUT_OF_ORDER_MS, WINDOW_MS, Row
from headgate.sim.product.run import Run
from headgate.sim.product.workloads import WORKLOADS, Branches, draw_splits
from headgate.sim.scenarios.guarantees import LOOPS

GRAPHS_RATE = 0.5
"""Of the seeds that have a graph without a loop, so many keep it."""
ROWS = 400
RESCALE_RATE = 0.6
"""How often a start has another parallelism."""


@dataclass(frozen=True)
class Slowed(Branches):
    """Branches after a shuffle, each with a function that takes its time in front of its sink."""

    slow: Callable[[], None] = field(default=lambda: None)
    is_joined: bool = False
    """Whether records come on several edges, which do not lead from the source alone."""

    def build(self, sources: Sequence[hg.Stream], sink_to: Callable[[str], Sink]) -> None:
        """See ``Job``."""
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

    def _draw(self) -> None:
        super()._draw()
        rng = self._rng = random.Random(f"overtaking of seed {self.seed}")
        settings = self.settings
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
        if not self._keeps_graph():
            found = rng.sample([w for w in WORKLOADS if w.name not in LOOPS], rng.choice((1, 1, 2)))
            settings.job = Slowed(tuple(found), slow=self._take_time, is_joined=rng.random() < 0.5)
            settings.inputs = settings.inputs[:1]
            if settings.files is None:
                settings.inputs = [draw_splits(rng, 0, rng.choice((1, 2, 4)), ROWS)]
            settings.hidden.clear()
            settings.grows = False
        if rng.random() < 0.8:  # somebody dies, and a new driver starts
            self.faults.on |= {rng.choice((Fault.DRIVER_CRASH, Fault.POWER_CUT, Fault.STOP)), Fault.WORKER_CRASH}
            self.faults.budget += 6
        self._kills_left = rng.choice((0, 2, 5))
        self.history = History(settings.checkpointing.retained, self._on_manifest)

    def start(self) -> None:
        """See ``Run``."""
        if self._rng.random() < RESCALE_RATE:
            self.settings.parallelism = self._rng.choice((1, 2, 3))
        super().start()

    def _on_manifest(self, manifest: Manifest, files: Mapping[str, frozenset[str]]) -> None:
        """A checkpoint completes. If something was in flight, perhaps a process dies, so that it is restored."""
        self.harm.on_manifest(manifest, files)
        has_records = any(part.section.startswith(IN_FLIGHT_PREFIX) for part in manifest.parts)
        if has_records and self._kills_left and not self.faults.is_healed and self._rng.random() < 0.6:
            self._kills_left -= 1
            self.world.at(self._rng.randint(0, 10), self._kill)

    def _kill(self) -> None:
        living = [p for one in self.started for p in (one.process, *one.spark.workers) if p.is_alive]
        if living and not self.faults.is_healed:
            self._rng.choice(living).kill()

    def _take_time(self) -> None:
        if not self.faults.is_healed and self._rng.random() < self._slow_rate:
            self.tasks.park(self._rng.randint(0, self._pause_ms))

    def _keeps_graph(self) -> bool:
        settings = self.settings
        if not isinstance(settings.job, Graph) or self._rng.random() >= GRAPHS_RATE:
            return False
        try:
            settings.definition(settings.listed(), lambda: 0, lambda: False)
        except UsageError:
            return False
        return True
