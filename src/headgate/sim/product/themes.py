"""Seeds with a subject: some runs meet one kind of trouble again and again, and long enough for what follows from it.

What is rare in a run of usual faults (a checkpoint that is declined after another one, two damaged entries of the log,
a log of a loop that is given up) is usual here. Drawn from a generator of its own, so that a seed without a subject is
what it would be without this module.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from headgate.model.config import Duration
from headgate.sim.machine.faults import Fault, Faults
from headgate.sim.product.settings import Settings

FOCUS_RATE = 0.3
"""Of the seeds, so many have a subject."""

LASTS_MS = 6_000
"""Virtual time until nothing fails any more."""


@dataclass(frozen=True, slots=True)
class Focus:
    """One subject.

    Attributes:
        rates: of faults that are switched on, how often each strikes, other than usual.
        is_alone: no other faults are on, so that the run gets far enough.
        interval, timeout, min_pause, max_concurrent: of checkpoints.
        budget: of disruptions.
    """

    title: str
    rates: Mapping[Fault, float]
    interval: Duration = "20ms"
    timeout: Duration = "1s"
    min_pause: Duration = 0
    max_concurrent: int = 1
    budget: int = 25
    is_alone: bool = False


SUBJECTS = (
    Focus(
        "damage",
        {Fault.DAMAGE: 0.7, Fault.STOP: 0.7, Fault.DRIVER_CRASH: 0.7, Fault.AWAY: 0.05},
        min_pause="5ms",
        is_alone=True,
    ),
    Focus(
        "checkpoints that end otherwise than well",
        {Fault.PART_FAILS: 0.75, Fault.SLOW: 0.1, Fault.WORKER_CRASH: 0.5},
        interval="10ms",
        timeout="20s",  # longer than a worker tries to write its part
        max_concurrent=3,
    ),
    Focus(
        "checkpoints that overlap and expire",
        {Fault.SLOW: 0.3, Fault.LINK_LOSS: 0.3, Fault.WORKER_PAUSE: 1.0},
        interval="10ms",
        timeout="60ms",
        max_concurrent=3,
    ),
    Focus("reads that fail", {Fault.GET_FAILS: 0.15, Fault.BAD_READ: 0.1, Fault.WORKER_CRASH: 2.0}),
    Focus("output that vanishes", {Fault.DENIED: 0.3, Fault.WORKER_CRASH: 1.0, Fault.DRIVER_CRASH: 1.0}),
)


def draw_focus(seed: int) -> Focus | None:
    """Return the subject of a seed, if it has one."""
    rng = random.Random(f"focus of seed {seed}")
    return rng.choice(SUBJECTS) if rng.random() < FOCUS_RATE else None


def put_in_focus(focus: Focus, settings: Settings, faults: Faults) -> None:
    """Have a run be about its subject."""
    faults.on = set(focus.rates) | (set() if focus.is_alone else faults.on)
    faults.rates.update(focus.rates)
    faults.budget = focus.budget
    settings.inline_bytes_max = 0
    settings.on_damaged = "previous"
    settings.checkpointing = replace(
        settings.checkpointing,
        interval=focus.interval,
        timeout=focus.timeout,
        min_pause=focus.min_pause,
        max_concurrent=focus.max_concurrent if not focus.min_pause else 1,
        tolerable_failures=20,  # a link that was cut is only noticed by checkpoints that expire
        retained=3,
    )
