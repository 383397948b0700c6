"""When a driver gives a sign of life, and what it says (SB1). Counterpart: ``runtime.driver.heart``, which writes."""

from __future__ import annotations

from headgate.model.heartbeat import Beat, Course
from headgate.model.ids import Generation

BEAT_MS = 2_000
"""Between two beats: on an object store each is a request that costs money."""


class Pulse:
    """The beats of one driver: at a claim, at a wish of its user, and every ``BEAT_MS``."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._count = 0
        self._said: tuple[Generation, Course] | None = None
        self._due_ms = 0

    def beat(self, now_ms: int, generation: Generation, course: Course) -> Beat | None:
        """Return the beat that is due, or None. What it returned counts as written."""
        if self._said == (generation, course) and now_ms < self._due_ms:
            return None
        self._said, self._due_ms = (generation, course), now_ms + BEAT_MS
        self._count += 1
        return Beat(generation, self._owner, self._count, course)
