"""Pipelines with checkpoints that refer to chunks of state in memory (SM89): everything else is as without it.

State is small in these runs and would be written as rows. So a chunk is written however small it is, chains are short,
and little is remembered of what changed. Counterpart: ``state.memory.chunked``.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from headgate.sim.machine.replacement import Bound
from headgate.sim.product.run import Run
from headgate.sim.product.typed_state import TYPED
from headgate.sim.product.workloads import WORKLOADS, Branches, Job
from headgate.sim.scenarios.timers import TimedRun
from headgate.sim.scenarios.ttl import ExpiringRun
from headgate.state import snapshot
from headgate.state.memory import change_tracking, column_backend, incremental_snapshot

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


class TimedChunksRun(ChunksRun, TimedRun):
    """A run with timers, in chunks."""


class ExpiringChunksRun(ChunksRun, ExpiringRun):
    """A run with state that expires, in chunks."""


class WindowedChunksRun(ChunksRun, TimedRun):
    """A run with windows of both kinds, in chunks."""

    SUBJECT = "windows in chunks"

    def _draw_job(self, rng: random.Random) -> Job:
        kept = [workload for workload in TYPED if workload.name == "buffered"]
        merged = [workload for workload in WORKLOADS if workload.name == "windowed"]
        return Branches((*kept, *merged[: rng.choice((0, 1))]))

    def _is_of_interest(self, rows: Mapping[str, int]) -> bool:
        return bool(rows.get("records"))


CHUNKS_KINDS = (
    *(ChunksRun, ExpiringChunksRun, WindowedChunksRun, TimedChunksRun),
    *(ChunksRun, ExpiringChunksRun, ChunksRun, TimedChunksRun),
)
"""What a seed runs, by turns."""
