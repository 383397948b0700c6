"""In whose place a driver is started: what one that is started again, or takes over, must know of those before it.

Counterparts: ``cli.kept`` and ``cli.standby`` (set it), ``runtime.driver.driver`` (goes by it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from headgate.model.heartbeat import Course
from headgate.model.ids import Generation


def _tell_nobody(generation: Generation) -> None:
    """Nobody waits for it."""


def _wish_for_nobody(course: Course) -> None:
    """Nobody starts this driver again."""


@dataclass(frozen=True, slots=True)
class Succession:
    """Attributes:
    claimant: who claims; "" for a name that differs for every driver. One keeper's drivers share theirs (KR10).
    after: the generation that this driver follows: it does not claim behind anybody else's newer one (X9). None: it
        follows whoever was there.
    tell_claim: called with every generation that this driver claims.
    lock_nonce: the run whose lock this driver breaks: it has been silent, whether its process is there or not (SB8).
    tell_wish: called with what the user asks of this driver, as soon as it is known (KR13).
    keeper: the process that starts this driver again, 0: none. What is asked of the driver goes to it (KR14).
    restarts: how often it has done so (KR2).
    """

    claimant: str = ""
    after: Generation | None = None
    tell_claim: Callable[[Generation], None] = _tell_nobody
    lock_nonce: str | None = None
    tell_wish: Callable[[Course], None] = _wish_for_nobody
    keeper: int = 0
    restarts: int = 0


_succession: ContextVar[Succession] = ContextVar("headgate_succession", default=Succession())  # noqa: B039  frozen


def succession() -> Succession:
    """Return what a driver that is made now goes by."""
    return _succession.get()


@contextmanager
def succeeding(given: Succession) -> Iterator[None]:
    """Drivers that are made within this block go by ``given``."""
    token = _succession.set(given)
    try:
        yield
    finally:
        _succession.reset(token)
