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
from headgate.runtime.surroundings import Surroundings
from headgate.threads import Pool

PERIOD_MS = 1_000
"""How soon an idle driver notices that another one has taken over."""

HANGS_MS = 5_000
"""A look that takes longer may be on a connection that is dead, which its client notices after a minute or more."""

LOOKS_MAX = 4
"""Looks at one time: the last one that began, and those that hang."""


class ReplacementWatch:
    """Looks into the log, one look at a time; where one hangs, another one beside it."""

    def __init__(
        self,
        log: CheckpointLog,
        pool: Pool,
        timers: Timers,
        on_replaced: Callable[[Generation], None],
        around: Surroundings,
    ) -> None:
        """``on_replaced`` is called in the event thread with the generation of the other driver.

        A look that hung may be from before a claim of this driver itself: then that is what it has seen.
        """
        self._log = log
        self._pool = pool
        self._timers = timers
        self._on_replaced = on_replaced
        self._around = around
        self._looks_count = 0
        self._begun_ms: dict[int, int] = {}
        """Of each look that has not ended."""

    def look(self) -> None:
        """Look, unless the last look has neither ended nor hangs; its outcome comes later. In the event thread."""
        now_ms, begun_ms = self._around.monotonic_ms(), list(self._begun_ms.values())
        if not begun_ms:
            self._begin(self._pool, now_ms)
        elif len(begun_ms) < LOOKS_MAX and now_ms - max(begun_ms) >= HANGS_MS:
            beside = self._around.pool(1, "headgate-look", is_daemon=True)
            self._begin(beside, now_ms)
            beside.shutdown(wait=False)

    def _begin(self, pool: Pool, now_ms: int) -> None:
        self._looks_count += 1
        self._begun_ms[self._looks_count] = now_ms
        pool.submit(self._look, self._looks_count)

    def _look(self, number: int) -> None:
        """Runs in the storage thread, or in one beside it."""
        newer = None
        try:
            with contextlib.suppress(StorageError):  # looked at again, and at every write
                newer = self._log.newer_generation()
        finally:
            del self._begun_ms[number]
        if newer is not None:
            found = newer
            self._timers.post(lambda: self._on_replaced(found))
