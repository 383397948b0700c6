"""Takeover between drivers: the run that a new driver follows, and how a replaced driver notices (C38, X9).

``cli`` sets what a driver follows, when a supervisor starts it again or a standby takes over; ``driver`` goes by it.
The claim in the checkpoint log fences the replaced driver; one that writes learns of it there, an idle one by
``ReplacementWatch``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from headgate.environment import Pool
from headgate.errors import StorageError
from headgate.model.heartbeat import Course
from headgate.model.ids import Generation
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.driver.event_loop import Timers
from headgate.runtime.surroundings import Surroundings


def _ignore_claim(generation: Generation) -> None:
    """No supervisor wants to know."""


def _ignore_course(course: Course) -> None:
    """No supervisor starts this driver again."""


@dataclass(frozen=True, slots=True)
class Takeover:
    """The run that a new driver follows.

    Attributes:
        claimant: name in the claim; "": differs for every driver. One supervisor's drivers share theirs (KR10).
        after: the generation that this driver follows: it does not claim after a newer one of another driver (X9).
            None: it follows any.
        on_claim: called with every generation that this driver claims.
        lock_nonce: the silent run that has the lock to be broken, whether its process is there or not (SB8).
        on_course: called with what the user asks of this driver, as soon as it is known (KR13).
        keeper: the process that starts this driver again, 0: none. What is asked of the driver goes to it (KR14).
        restarts: how often it has done so (KR2).
    """

    claimant: str = ""
    after: Generation | None = None
    on_claim: Callable[[Generation], None] = _ignore_claim
    lock_nonce: str | None = None
    on_course: Callable[[Course], None] = _ignore_course
    keeper: int = 0
    restarts: int = 0


_takeover: ContextVar[Takeover] = ContextVar("headgate_takeover", default=Takeover())  # noqa: B039  frozen


def current_takeover() -> Takeover:
    """Return what a driver that is made now goes by."""
    return _takeover.get()


@contextmanager
def taking_over(given: Takeover) -> Iterator[None]:
    """Drivers that are made within this block go by ``given``."""
    token = _takeover.set(given)
    try:
        yield
    finally:
        _takeover.reset(token)


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
