"""Virtual time, and the story of a run (SM1).

Everything that happens in a simulation is a call at a virtual millisecond, in an order that the seed decides.
``sim.machine.tasks`` puts processes and their threads on top. Never reads a clock.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections import deque
from collections.abc import Callable
from typing import Any

STORY_MAX = 400
"""Lines of the story kept for a failure: a few checkpoints before it."""


class Violation(Exception):  # noqa: N818 - a finding, not an error of ours
    """An invariant was broken. ``invariant`` is its number in the reference (I1 … I10)."""

    def __init__(self, invariant: str, problem: str) -> None:
        super().__init__(invariant, problem)
        self.invariant = invariant
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.invariant}: {self.problem}"


class World:
    """The queue of what will happen, the seed's random numbers, and the story of what happened."""

    def __init__(self, seed: int, *, is_traced: bool = False) -> None:
        self.random = random.Random(seed)
        self.now_ms = 0
        self.events_count = 0
        self.story: deque[str] = deque(maxlen=None if is_traced else STORY_MAX)
        self._digest = hashlib.blake2b(digest_size=16)
        self._queue: list[tuple[int, float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = 0

    @property
    def digest(self) -> str:
        """Fingerprint of the story so far: equal for equal runs."""
        return self._digest.hexdigest()

    def at(self, delay_ms: int, call: Callable[..., None], *args: Any) -> None:
        """Run ``call`` after ``delay_ms``; calls of one millisecond run in random order."""
        self._serial += 1
        heapq.heappush(self._queue, (self.now_ms + delay_ms, self.random.random(), self._serial, call, args))

    def tell(self, who: str, what: str) -> None:
        """Add a line to the story."""
        line = f"{self.now_ms:7d} {who:<14} {what}"
        self._digest.update(line.encode())
        self.story.append(line)

    def run(self, is_over: Callable[[], bool], until_ms: int, events_max: int) -> bool:
        """Run until ``is_over`` (True), or until time or events are used up or nothing is left (False)."""
        while not is_over():
            if not self._queue or self._queue[0][0] > until_ms or self.events_count >= events_max:
                return False
            self.now_ms, _, _, call, args = heapq.heappop(self._queue)
            self.events_count += 1
            call(*args)
        return True
