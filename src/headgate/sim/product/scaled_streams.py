"""Somebody scales the streams of a simulated pipeline again and again, while it reads and writes them (SM86).

Splits, merges and resizes at any moment, as any user can: between an append and its answer, between the parts of a
transaction, before its commit, while subtasks open. Drawn from a generator of its own. Counterpart: ``streams``.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from headgate.errors import HeadgateError
from headgate.store.store import Store

RATE = 0.4
"""So many of the seeds with streams have it."""

SEGMENTS_MAX = 5


class Scaler:
    """Scales ``streams`` of the store at ``root``."""

    def __init__(self, seed: int, root: str, streams: Sequence[str]) -> None:
        self._rng = random.Random(f"who scales the streams of seed {seed}")
        self._root, self._streams = root, streams
        self.is_drawn = self._rng.random() < RATE
        self.scaled_count = 0

    def pause_ms(self) -> int:
        """Return how long until the next time."""
        return self._rng.randint(10, 120)

    def scale(self) -> str:
        """Scale a stream that is there; return what could not be done, if anything."""
        try:
            store = Store.shared(self._root)
            there = {info.name for info in store.list_streams()}
            self._scale(store, self._rng.choice([name for name in self._streams if name in there]))
        except HeadgateError as problem:
            return str(problem)
        self.scaled_count += 1
        return ""

    def _scale(self, store: Store, name: str) -> None:
        present = [segment.segment_id for segment in store.layout(name).present]
        at = self._rng.randrange(len(present))
        how = self._rng.random()
        if how < 0.15:
            store.resize(name, self._rng.randint(1, SEGMENTS_MAX - 1))
        elif (how < 0.55 or len(present) == 1) and len(present) < SEGMENTS_MAX:
            store.split(name, present[at], self._rng.randint(2, 3))
        else:
            store.merge(name, present[max(0, at - 1) : at + 1] if at else present[:2])
