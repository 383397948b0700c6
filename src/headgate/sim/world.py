"""Virtual time, processes that crash and pause, and the story of a run (X1).

Everything that happens in a simulation is a call at a virtual millisecond, in an order that the seed decides. A
``Process`` is a worker or a driver: once dead, nothing of it runs any more; while paused, its calls wait. Shared
things (storage, the sinks' store) are plain objects that outlive processes. Never reads a clock.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from headgate.errors import HeadgateError

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


class Crashed(Exception):  # noqa: N818 - control flow of the simulator
    """The process that is running dies here."""


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


class Process:
    """Something that can crash and be paused. Subclasses post calls to themselves and to others."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.is_alive = True
        self.is_paused = False
        self._waiting: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def post(self, delay_ms: int, call: Callable[..., None], *args: Any) -> None:
        """Run ``call`` in this process after ``delay_ms``."""
        self.world.at(delay_ms, self._run, call, args)

    def _run(self, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        if not self.is_alive:
            return
        if self.is_paused:
            self._waiting.append((call, args))
            return
        try:
            call(*args)
        except Crashed as crash:
            self.kill(str(crash))
        except (AssertionError, HeadgateError, KeyError, IndexError) as error:
            raise Violation("machine", f"{self.name}: {type(error).__name__}: {error}") from error

    def pause(self) -> None:
        """Stop running, as by SIGSTOP: everything that is for this process waits."""
        self.is_paused = True
        self.tell("paused")

    def resume(self) -> None:
        """Go on, as by SIGCONT."""
        if not self.is_paused or not self.is_alive:
            return
        self.is_paused = False
        self.tell("resumed")
        waiting, self._waiting = self._waiting, []
        self.world.at(0, self._catch_up, waiting)

    def _catch_up(self, waiting: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
        for call, args in waiting:
            self._run(call, args)

    def kill(self, why: str) -> None:
        """Die at once: nothing of this process runs any more."""
        if self.is_alive:
            self.is_alive = False
            self.tell(f"died: {why}")
            self.on_death()

    def on_death(self) -> None:
        """Hook: others learn of it through their connections."""

    def tell(self, what: str) -> None:
        """Add a line to the story, in this process's name."""
        self.world.tell(self.name, what)
