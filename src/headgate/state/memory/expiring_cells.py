"""Objects by key of a state with a TTL: cells that show only living keys, and give expired ones up bit by bit (TL8).

Every key is in one of two heaps: those that this round has yet to look at, and those that it has seen or that came
since. Counterpart: ``state.expiring_rows``, which says what the objects are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headgate.state.descriptors import StateKind
from headgate.state.expiring_rows import LIVE, last_expiry, no_longer_than
from headgate.state.memory.cells import MemoryCells
from headgate.state.memory.changes import Interval
from headgate.state.ttl import TTL, StateTime

SWEEP_KEYS = 64
"""So many keys are looked at in a turn, two more for each that came since, and one for each that was changed.

So a round ends before there are twice as many keys, or more elements and entries than keys could be changed.
"""


class ExpiringCells(MemoryCells):
    """One state with a TTL: see ``backend.RowCells``."""

    def __init__(self, kind: StateKind, ttl: TTL, time: StateTime, interval: Interval | None = None) -> None:
        super().__init__(interval)
        self._kind = kind
        self._live = LIVE[kind]
        self._ttl_ms = ttl.duration_ms
        self._time = time
        self._to_see: dict[Any, None] = {}
        self._seen: dict[Any, None] = {}
        self._due = 0

    def put(self, key: Any, value: Any) -> None:
        """See ``RowCells``."""
        super().put(key, value)
        if key not in self._seen and key not in self._to_see:
            self._seen[key] = None
            self._due += 2

    def writable(self, key: Any) -> Any:
        """See ``RowCells``."""
        self._due += 1
        return super().writable(key)

    def keys(self) -> Iterator[Any]:
        """See ``RowCells``: those of which anything lives."""
        now_ms, held = self._time.now_ms, super().keys()
        return (key for key in held if last_expiry(self._kind, self.get(key)) > now_ms)

    def sweep(self) -> None:
        """Forget what has expired of some keys (TL8)."""
        if not self._to_see:
            self._to_see, self._seen = self._seen, {}
        now_ms = self._time.now_ms
        for _ in range(min(SWEEP_KEYS + self._due, len(self._to_see))):
            key, _ = self._to_see.popitem()
            if self._live(self, key, now_ms) is not None:
                self._seen[key] = None
        self._due = 0

    def end_restore(self) -> None:
        """See ``backend.TimedBackend``."""
        now_ms = self._time.now_ms
        limit_ms = now_ms + self._ttl_ms
        for key in list(super().keys()):
            found = self.get(key)
            kept = no_longer_than(self._kind, found, limit_ms)
            (self._set if kept == found else self.put)(key, kept)  # in another order, perhaps, which changes nothing
            self._live(self, key, now_ms)
        self._due = 0
