"""What goes wrong in a run, drawn from its seed (X3, "swarm": some runs have no crashes but terrible disks).

Each run switches a random half of the faults on. Faults that end a generation share a budget, so that a run makes
progress. ``heal`` ends all of them: what follows is the liveness phase.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from enum import Enum

from headgate.sim.world import Crashed, Process


class Fault(Enum):
    """A kind of fault, with its probability per opportunity when it is switched on."""

    WORKER_CRASH = ("worker-crash", 0.003)
    DRIVER_CRASH = ("driver-crash", 0.005)
    WORKER_PAUSE = ("worker-pause", 0.002)
    DRIVER_PAUSE = ("driver-pause", 0.02)
    LINK_LOSS = ("link-loss", 0.003)
    PEER_LOSS = ("peer-loss", 0.0005)
    USER_FAILURE = ("user-failure", 0.0005)
    SLOW = ("slow", 0.1)
    PUT_FAILS = ("put-fails", 0.05)
    PUT_FAILS_AFTER = ("put-fails-after-effect", 0.03)
    PREPARE_FAILS = ("prepare-fails", 0.05)
    PREPARE_FAILS_AFTER = ("prepare-fails-after-effect", 0.05)
    GET_FAILS = ("get-fails", 0.02)
    RESERVE_FAILS = ("reserve-fails", 0.05)
    MANIFEST_FAILS = ("manifest-fails", 0.05)
    MANIFEST_UNKNOWN = ("manifest-unknown", 0.1)
    MANIFEST_SLOW = ("manifest-slow", 0.3)
    CLAIM_UNKNOWN = ("claim-unknown", 0.04)
    HINT_FAILS = ("hint-fails", 0.1)
    COMMIT_FAILS = ("commit-fails", 0.1)
    COMMIT_UNKNOWN = ("commit-unknown", 0.1)
    NOTIFY_LOST = ("notify-lost", 0.15)
    NOTIFY_REORDERED = ("notify-reordered", 0.2)
    DUPLICATED = ("duplicated", 0.1)
    LINGER = ("linger", 0.3)
    NO_RETRY_NOTICE = ("stuck-before-registering", 0.02)
    STORAGE_GONE = ("storage-gone", 0.0005)
    SECOND_DRIVER = ("second-driver", 0.0)
    DAMAGE = ("damage", 0.0)
    STOP = ("stop", 0.0)
    CANCEL = ("cancel", 0.0)
    DRAIN = ("drain", 0.0)
    SYNC_FAILS = ("sync-fails", 0.02)
    POWER_CUT = ("power-cut", 0.6)
    LOOK_CRASH = ("crash-before-a-look", 0.003)
    LOOK_CRASH_STALE = ("crash-behind-a-stale-put", 0.7)
    LOOK_PAUSE = ("pause-before-a-look", 0.005)
    START_OVER = ("start-over", 0.0)
    READ_BAD = ("bad-read", 0.1)
    ASK_FAILS = ("ask-fails", 0.05)
    TELL_CRASH = ("crash-while-telling", 0.02)
    LOG_CRASH = ("crash-with-a-log", 0.4)
    TARGET_DENIES = ("target-denies", 0.3)

    def __init__(self, title: str, rate: float) -> None:
        self.title = title
        self.rate = rate


DISRUPTIVE = frozenset(
    {
        Fault.WORKER_CRASH,
        Fault.DRIVER_CRASH,
        Fault.LINK_LOSS,
        Fault.PEER_LOSS,
        Fault.USER_FAILURE,
        Fault.MANIFEST_UNKNOWN,
        Fault.CLAIM_UNKNOWN,
        Fault.WORKER_PAUSE,
        Fault.DRIVER_PAUSE,
        Fault.NO_RETRY_NOTICE,
        Fault.LOG_CRASH,
        Fault.TARGET_DENIES,
        Fault.LOOK_CRASH,
        Fault.LOOK_PAUSE,
        Fault.TELL_CRASH,
        Fault.SYNC_FAILS,
    }
)
"""Faults that (may) end a generation: they share ``Faults.budget``."""


LOOKS = frozenset({Fault.LOOK_CRASH, Fault.LOOK_CRASH_STALE, Fault.LOOK_PAUSE, Fault.SYNC_FAILS, Fault.POWER_CUT})
"""Faults around a put to the log, with dice of their own."""

LIVES = frozenset({Fault.START_OVER, Fault.ASK_FAILS, Fault.TELL_CRASH})

DRAWN_ELSEWHERE = frozenset({Fault.DRAIN, Fault.LOG_CRASH, Fault.TARGET_DENIES}) | LOOKS | LIVES | {Fault.READ_BAD}
"""Faults with a draw of their own, so that what other seeds do stays as it was."""


@dataclass(slots=True)
class Faults:
    """The faults of one run."""

    rng: random.Random
    rates: dict[Fault, float] = field(default_factory=dict)
    budget: int = 6
    is_healed: bool = False
    looks: random.Random = field(default_factory=lambda: random.Random(0))
    """Dice for what happens around a put to the log."""
    owners: random.Random = field(default_factory=lambda: random.Random(0))
    """Dice for lives and the targets that remember them."""
    reads: random.Random = field(default_factory=lambda: random.Random(0))
    """Dice for reads that are bad once."""
    storage_gone_until_ms: int = 0
    syncs_fail_until_ms: int = 0

    @classmethod
    def draw(cls, rng: random.Random, *, has_none: bool = False) -> Faults:
        """Switch a random half of the faults on, more or less often than usual."""
        faults = cls(rng, budget=rng.choice((1, 2, 3, 5, 8)))
        share = rng.choice((0.2, 0.4, 0.6))
        scale = rng.choice((0.5, 1.0, 2.0))
        for fault in [fault for fault in Fault if fault not in DRAWN_ELSEWHERE]:
            if rng.random() < share and not has_none:
                faults.rates[fault] = min(fault.rate * scale, 0.5)
        return faults

    def draw_drain(self, seed: int) -> None:
        """Have one run in four drained. A draw of its own, so that what other seeds do stays as it was."""
        if random.Random(f"drain {seed}").random() < 0.25:
            self.rates[Fault.DRAIN] = Fault.DRAIN.rate

    def draw_denials(self, seed: int) -> None:
        """Have a target deny promised output in one run of eight. A draw of its own, too."""
        if random.Random(f"denial {seed}").random() < 0.125:
            self.rates[Fault.TARGET_DENIES] = Fault.TARGET_DENIES.rate

    def draw_looks(self, seed: int) -> None:
        """Have puts to the log fail to be durable, or their writers stop or die behind them, in one run of three."""
        self.looks = random.Random(f"looks {seed}")
        if self.rates and self.looks.random() < 0.33:
            self.rates.update({fault: fault.rate for fault in LOOKS})

    def draw_lives(self, seed: int) -> None:
        """Have the checkpoints removed in one run in four, and targets that are hard to ask. Dice of its own, too."""
        self.owners = random.Random(f"lives {seed}")
        if self.rates and self.owners.random() < 0.25:
            self.rates.update({fault: fault.rate for fault in LIVES})
        self.reads = random.Random(f"reads {seed}")
        if self.rates and self.reads.random() < 0.25:
            self.rates[Fault.READ_BAD] = Fault.READ_BAD.rate

    def draw_loops(self, share: float) -> None:
        """Have the faults that end a generation strike less often, but then while loop logs are not empty."""
        for fault in DISRUPTIVE & self.rates.keys():
            self.rates[fault] *= share
        if self.rates and self.rng.random() < 0.6:
            self.rates[Fault.LOG_CRASH] = Fault.LOG_CRASH.rate
            self.budget += 3

    def has(self, fault: Fault) -> bool:
        """Whether ``fault`` is switched on in this run."""
        return fault in self.rates and not self.is_healed

    def strikes(self, fault: Fault) -> bool:
        """Whether ``fault`` happens at this opportunity."""
        rate = self.rates.get(fault)
        dice = self._dice_for(fault)
        if rate is None or self.is_healed or dice.random() >= rate:
            return False
        if fault in DISRUPTIVE:
            if self.budget <= 0:
                return False
            self.budget -= 1
        return True

    def _dice_for(self, fault: Fault) -> random.Random:
        if fault is Fault.READ_BAD:
            return self.reads
        return self.looks if fault in LOOKS else self.owners if fault in LIVES else self.rng

    def crash_point(self, process: Process, fault: Fault) -> None:
        """Kill ``process`` here, perhaps.

        Raises:
            Crashed
        """
        if self.strikes(fault):
            raise Crashed(fault.title)

    def delay_ms(self, usual_max_ms: int) -> int:
        """Return a random delay; now and then a very long one."""
        if self.strikes(Fault.SLOW):
            return self.rng.randint(1, usual_max_ms * 30)
        return self.rng.randint(0, usual_max_ms)

    def is_sync_failing(self, now_ms: int) -> bool:
        """Whether a sync fails now; once it does, others may for a while."""
        if self.is_healed:
            return False
        if now_ms >= self.syncs_fail_until_ms and self.strikes(Fault.SYNC_FAILS):
            self.syncs_fail_until_ms = now_ms + self.looks.choice((1, 1, 50, 300))
            return True
        return now_ms < self.syncs_fail_until_ms and self.looks.random() < 0.7

    def is_storage_gone(self, now_ms: int) -> bool:
        """Whether the checkpoint storage refuses everything now (F11); may begin such a time."""
        if self.is_healed:
            return False
        if self.strikes(Fault.STORAGE_GONE):
            self.storage_gone_until_ms = now_ms + self.rng.randint(50, 1_500)
        return now_ms < self.storage_gone_until_ms

    def heal(self) -> None:
        """End all faults."""
        self.is_healed = True
