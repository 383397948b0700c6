"""Pipelines whose keyed state is in RocksDB (SM48): everything else is as without it.

The library is native, and its files are real ones, in a directory for temporary files that goes with the run. It can
run here because nobody else sees them: a database is read and written within steps of its own worker, and what survives
a process is in checkpoints, on the disks of the machine room. Faults of that directory are for tests of the parts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable

from headgate.model.config import RocksState
from headgate.sim.product.expiring import ExpiringRun
from headgate.sim.product.run import EVENTS_MAX, Result, Run, result_of
from headgate.sim.product.timed import TimedRun
from headgate.sim.world import Violation

MEMORY_BYTES = 16 << 20


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


class RocksTimedRun(RocksRun, TimedRun):
    """A run with timers in RocksDB."""


class RocksExpiringRun(RocksRun, ExpiringRun):
    """A run with state in RocksDB that expires."""


KINDS: tuple[Callable[..., Run], ...] = (RocksRun, RocksTimedRun, RocksRun, RocksExpiringRun)
"""What a seed runs, by turns."""


def run_seed(seed: int, *, is_traced: bool = False, events_max: int = EVENTS_MAX) -> Result:
    """Run one seed."""
    run = KINDS[seed % len(KINDS)](seed, is_traced=is_traced, events_max=events_max)
    return result_of(run, seed, is_traced=is_traced)
