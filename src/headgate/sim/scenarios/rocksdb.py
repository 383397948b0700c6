"""Pipelines with keyed state that is in RocksDB (SM48): everything else is as without it.

The library is native, and its files are real ones, in a directory for temporary files that goes with the run. It can
run here because no other process sees them: a database is read and written within steps of its own worker, and what
survives a process is in checkpoints, on the disks of the machine room. Faults of that directory are for tests of the
parts.
"""

from __future__ import annotations

import tempfile
from typing import Any

from headgate.model.config import RocksState
from headgate.sim.machine.faults import Fault
from headgate.sim.product.run import Run
from headgate.sim.scenarios.timers import TimedRun
from headgate.sim.scenarios.ttl import ExpiringRun
from headgate.sim.world import Violation
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
        """See ``Run``."""
        with tempfile.TemporaryDirectory(prefix="headgate-sim-") as self._directory:
            return super().run()

    def start(self) -> None:
        """Start the pipeline."""
        self.settings.state = RocksState(MEMORY_BYTES, self._directory)
        super().start()


class RocksFilesRun(RocksRun):
    """A run with checkpoints that share the files of databases, however small these are (RB20).

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


class RocksTimedRun(RocksRun, TimedRun):
    """A run with timers in RocksDB."""


class RocksExpiringRun(RocksRun, ExpiringRun):
    """A run with state in RocksDB that expires."""


class RocksTimedFilesRun(RocksFilesRun, TimedRun):
    """A run with timers in files that checkpoints share (RB24)."""


class RocksExpiringFilesRun(RocksFilesRun, ExpiringRun):
    """A run with state that expires in files that checkpoints share (RB24)."""


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
