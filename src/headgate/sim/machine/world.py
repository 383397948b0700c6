"""What a seed decides: virtual time, random numbers, faults, and the story of a run.

Everything that happens in a simulation is a call at a virtual millisecond, in an order that the seed decides.
``machine.tasks`` puts processes and their threads on top. Never reads a clock.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, TypeAlias

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


class Fault(Enum):
    """A kind of fault, and how often it happens per opportunity when it is switched on.

    Those of rate 0 are for runs that are about them (``product.fault_injection``).
    """

    SLOW = ("slow", 0.05)
    PUT_FAILS = ("put-fails", 0.05)
    PUT_FAILS_AFTER = ("put-fails-after-its-effect", 0.04)
    PUT_LANDS_LATE = ("put-lands-late", 0.03)
    SYNC_FAILS = ("sync-fails", 0.04)
    GET_FAILS = ("get-fails", 0.03)
    BAD_READ = ("bad-read", 0.01)
    STORAGE_GONE = ("storage-gone", 0.003)
    LINGER = ("linger", 0.3)
    WORKER_CRASH = ("worker-crash", 1.0)
    DRIVER_CRASH = ("driver-crash", 1.0)
    WORKER_PAUSE = ("worker-pause", 1.0)
    DRIVER_PAUSE = ("driver-pause", 1.0)
    LINK_LOSS = ("link-loss", 1.0)
    POWER_CUT = ("power-cut", 0.3)
    CLOCK_STEP = ("clock-step", 1.0)
    STOP = ("stop", 0.5)
    CANCEL = ("cancel", 0.3)
    SECOND_DRIVER = ("second-driver", 0.5)
    DRAIN = ("drain", 0.15)
    USER_CODE = ("user-code-raises", 0.02)
    DAMAGE = ("damage", 0.3)
    AWAY = ("checkpoints-away", 0.2)
    DENIED = ("prepared-output-gone", 0.1)
    PART_FAILS = ("part-of-a-snapshot-cannot-be-written", 0.0)

    def __init__(self, title: str, rate: float) -> None:
        self.title = title
        self.rate = rate


class Faults:
    """The faults of one run.

    ``puts_land_late``: the disks are object stores, where a put that timed out may still take effect.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        share = 0 if rng.random() < 0.05 else rng.choice((0.2, 0.4, 0.6))
        self.on = {fault for fault in Fault if fault.rate and rng.random() < share}
        if share and rng.random() < 0.5:
            self.on.add(Fault.WORKER_CRASH)
        self.rates = {fault: fault.rate for fault in Fault}
        self.budget = rng.choice((2, 6, 15))
        self.is_healed = False
        self.puts_land_late = rng.random() < 0.3
        self._storage_gone_until_ms = 0

    def has(self, fault: Fault) -> bool:
        """Whether ``fault`` may happen now."""
        return fault in self.on and not self.is_healed

    def strikes(self, fault: Fault) -> bool:
        """Whether ``fault`` happens at this opportunity."""
        return self.has(fault) and self._rng.random() < self.rates[fault]

    def spend(self) -> bool:
        """Take one disruption from the budget; False when it is used up."""
        self.budget -= 1
        return self.budget >= 0

    def delay_ms(self, usual_max_ms: int) -> int:
        """Return a random delay; now and then a very long one."""
        if self.strikes(Fault.SLOW):
            return self._rng.randint(1, usual_max_ms * 30)
        return self._rng.randint(0, usual_max_ms)

    def is_storage_gone(self, now_ms: int) -> bool:
        """Whether storage refuses everything now; may begin such a time."""
        if self.is_healed:
            return False
        if self.strikes(Fault.STORAGE_GONE):
            self._storage_gone_until_ms = now_ms + self._rng.randint(50, 1_500)
        return now_ms < self._storage_gone_until_ms

    def heal(self) -> None:
        """End all faults."""
        self.is_healed = True


Bound: TypeAlias = tuple[object, str, object]
"""A module or class, the name of what it has, and what it has instead."""


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Have ``owner`` have ``value`` instead of what it usually has."""
    usual = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, usual)
