"""What a driver tells about itself beside the log, for standbys (docs/spec/standby.md)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from headgate.model.ids import CheckpointId, Generation

HEARTBEAT_VERSION = 1

REASON_CHARS_MAX = 500
"""Of a failure: a heartbeat is small."""


class Course(Enum):
    """What a run is at, or how it ended."""

    RUNNING = "running"
    STOPPING = "stopping"
    """Its user asked it to stop."""
    DRAINING = "draining"
    """Its user asked it to drain."""
    STOPPED = "stopped"
    DRAINED = "drained"
    FINISHED = "finished"
    FAILED = "failed"
    """Starting again may help."""
    FAILED_FOR_GOOD = "failed-for-good"
    """Somebody has to change something first."""


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life of one generation, or its last word.

    Attributes:
        owner: under which name it was claimed.
        count: differs from beat to beat.
        checkpoint: the newest completed one, at the end.
        reason: of a failure.
        was_draining: whether a run that failed had been asked to drain.
    """

    generation: Generation
    owner: str
    count: int
    course: Course = Course.RUNNING
    checkpoint: CheckpointId | None = None
    reason: str = ""
    was_draining: bool = False
