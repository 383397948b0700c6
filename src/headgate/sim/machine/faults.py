"""What goes wrong in the machine room, drawn from the seed: each run switches some kinds of faults on.

``heal`` ends all of them. Those that end a process or a generation share a budget, so that a run makes progress.
"""

from __future__ import annotations

import random
from enum import Enum


class Fault(Enum):
    """A kind of fault, and how often it happens per opportunity when it is switched on.

    Those of rate 0 are for runs that are about them (``product.focus``).
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
