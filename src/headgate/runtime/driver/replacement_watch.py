"""Looks whether another driver has taken the pipeline over, also while nothing else touches the log (C38, X9).

Counterpart: ``runtime.checkpoints.log``. Only an idle driver needs it: who writes is told by what it writes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from headgate.errors import StorageError
from headgate.model.ids import Generation
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.driver.event_loop import Timers
from headgate.threads import Pool

PERIOD_MS = 1_000
"""How soon an idle driver notices that another one has taken over."""


class ReplacementWatch:
    """Looks into the log, one look at a time: storage may hang."""

    def __init__(
        self, log: CheckpointLog, pool: Pool, timers: Timers, on_replaced: Callable[[Generation], None]
    ) -> None:
        """``on_replaced`` is called in the event thread with the generation of the other driver."""
        self._log = log
        self._pool = pool
        self._timers = timers
        self._on_replaced = on_replaced
        self._is_looking = False

    def look(self) -> None:
        """Look, unless the last look has not ended; its outcome comes later."""
        if not self._is_looking:
            self._is_looking = True
            self._pool.submit(self._look)

    def _look(self) -> None:
        """Runs in the storage thread."""
        newer = None
        try:
            with contextlib.suppress(StorageError):  # looked at again, and at every write
                newer = self._log.newer_generation()
        finally:
            self._is_looking = False
        if newer is not None:
            found = newer
            self._timers.post(lambda: self._on_replaced(found))
