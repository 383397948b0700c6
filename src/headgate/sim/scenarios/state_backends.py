"""Pipelines with keyed state in RocksDB, or with checkpoints that refer to chunks of state in memory.

RocksDB is native, and its files are real ones, in a directory that goes with the run. It can run here because no other
process sees them: what survives a process is in checkpoints, on simulated disks. State is small in these runs: files
and chunks are written however small they are.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping
from typing import Any

from headgate.model.config import RocksState
from headgate.sim.machine.world import Bound, Fault, Violation
from headgate.sim.product.run import Run
from headgate.sim.product.workloads import TYPED, WORKLOADS, Branches, Job
from headgate.sim.scenarios.timers import ExpiringRun, TimedRun
from headgate.state import snapshot
from headgate.state.memory import change_tracking, column_backend, incremental_snapshot
from headgate.state.rocksdb import database_snapshot
from headgate.state.rocksdb.database import SharedMemory

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
