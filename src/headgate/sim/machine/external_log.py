"""A log of records outside, which can be read again from any place that no process has given up.

Not a part of any process.

Records come over time. Who reads says how far it will never ask again, and the feed forgets what is before that.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from headgate.sim.machine.faults import Fault, Faults
from headgate.sim.machine.tasks import Tasks

STEP_MS = 2
"""Usual time of one call, at most."""

FAILURE_RATE = 0.2
"""Of the opportunities at which reading fails, so many do: each ends a generation."""

T = TypeVar("T")


@dataclass
class Part(Generic[T]):
    """One part of the feed.

    Attributes:
        rows: all that it will ever have.
        written: how many of them there are.
        forgotten: how many of these it has forgotten.
    """

    rows: Sequence[T]
    written: int = 0
    forgotten: int = 0


class Feed(Generic[T]):
    """Parts by name."""

    def __init__(self, tasks: Tasks, faults: Faults, rng: random.Random, parts: Mapping[str, Sequence[T]]) -> None:
        self._tasks = tasks
        self._faults = faults
        self._rng = rng
        self.parts = {name: Part(rows) for name, rows in parts.items()}

    def begin(self, spread_ms: int) -> None:
        """Have the records come, within about ``spread_ms``."""
        for part in self.parts.values():
            pause_ms = max(1, spread_ms * 6 // max(1, len(part.rows)))
            self._tasks.world.at(self._rng.randint(0, 20), self._append, part, pause_ms)

    def read(self, name: str, at: int, count: int) -> tuple[Sequence[T], bool]:
        """Return at most ``count`` records from ``at`` on, and whether none will ever follow those.

        Raises:
            OSError: it was not reached, or has forgotten what is asked for.
        """
        part = self.parts[name]
        self._tasks.park(self._rng.randint(0, STEP_MS))
        if self._faults.strikes(Fault.GET_FAILS) and self._rng.random() < FAILURE_RATE:
            raise OSError("the feed was not reached")
        if at < part.forgotten:
            raise OSError(f"the feed has forgotten what was before {part.forgotten} of {name}, {at} is asked for")
        found = part.rows[at : min(at + count, part.written)]
        return found, at + len(found) == len(part.rows)

    def forget(self, name: str, before: int) -> None:
        """No process asks for records before this one any more. Idempotent.

        Raises:
            OSError: it was not reached, or did not answer.
        """
        self._tasks.park(self._rng.randint(0, STEP_MS))
        if self._faults.strikes(Fault.PUT_FAILS):
            raise OSError("the feed was not reached")
        part = self.parts[name]
        part.forgotten = max(part.forgotten, before)
        if self._faults.strikes(Fault.PUT_FAILS_AFTER):
            raise OSError("the feed did not answer")

    def _append(self, part: Part[T], pause_ms: int) -> None:
        part.written = min(part.written + self._rng.randint(1, 6), len(part.rows))
        if part.written < len(part.rows):
            self._tasks.world.at(self._rng.randint(1, 2 * pause_ms), self._append, part, pause_ms)
