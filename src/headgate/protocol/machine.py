"""What all machines share: a bounded story of their events, and dying of a broken rule.

A machine takes one event and returns the effects to run, in order. It does no I/O, reads no clock, draws no random
numbers and never assumes that an effect succeeded: outcomes come back as events.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from headgate.errors import ProtocolViolation

STORY_MAX = 64
"""Events kept for error messages: enough to see one checkpoint, bounded because machines live for months."""


@dataclass(frozen=True, slots=True)
class Ignored:
    """EFFECT: the event was legal but changes nothing. Says why, so that tests tell it from forgotten."""

    reason: str


class Machine:
    """Base of the machines: keeps the story, and refuses to go on after a broken rule."""

    def __init__(self) -> None:
        self._story: deque[str] = deque(maxlen=STORY_MAX)
        self._dead: ProtocolViolation | None = None

    @property
    def story(self) -> tuple[str, ...]:
        """The last events, oldest first."""
        return tuple(self._story)

    def _begin(self, event: object) -> None:
        """Record ``event``; raise again if this machine is dead."""
        if self._dead is not None:
            raise self._dead
        self._story.append(repr(event))

    def _violation(self, problem: str) -> ProtocolViolation:
        """Kill the machine and return the error to raise."""
        self._dead = ProtocolViolation(type(self).__name__, problem, self.story)
        return self._dead
