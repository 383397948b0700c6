"""Hears from the run what the page shows, and passes it on to whoever shows it elsewhere."""

from __future__ import annotations

from headgate.clock import SYSTEM_CLOCK, Clock
from headgate.model.ids import CheckpointId
from headgate.model.progress import Observer, Progress
from headgate.web.story import Story


class WatchedByPage:
    """An ``Observer`` in front of another one."""

    def __init__(self, story: Story, other: Observer, clock: Clock = SYSTEM_CLOCK) -> None:
        self._story = story
        self._other = other
        self._clock = clock

    def on_progress(self, progress: Progress) -> None:
        """See ``Observer``."""
        self._story.progressed(progress, self._clock.wall_ms(), self._clock.monotonic_ms())
        self._other.on_progress(progress)

    def on_restart(self, reason: str, delay_ms: int) -> None:
        """See ``Observer``."""
        self._story.restarted(reason, delay_ms, self._clock.wall_ms())
        self._other.on_restart(reason, delay_ms)

    def on_note(self, text: str) -> None:
        """See ``Observer``."""
        self._story.noted(text, self._clock.wall_ms())
        self._other.on_note(text)

    def on_checkpoint(self, checkpoint: CheckpointId, duration_ms: int, size_bytes: int) -> None:
        """See ``Observer``."""
        self._story.checkpoint_completed(checkpoint, duration_ms, size_bytes, self._clock.wall_ms())
        self._other.on_checkpoint(checkpoint, duration_ms, size_bytes)
