"""What a driver is called, and what it writes beside the log for standbys (docs/spec/standby.md)."""

from __future__ import annotations

from enum import Enum

from headgate.dataclass import dataclass
from headgate.model.ids import CheckpointId, Generation

_DRIVER = ", driver "


def driver_id(owner: str, token: str) -> str:
    """Return the name of one driver of ``owner``; ``token`` differs for each."""
    return f"{owner}{_DRIVER}{token}"


def supervisor_id(process_id: int, host: str) -> str:
    """Return the owner of a driver that a supervisor starts again when it has died."""
    return f"supervisor {process_id} on {host}"


def owner_of(name: str) -> str:
    """Return the owner of the driver that claims under ``name``."""
    return name.partition(_DRIVER)[0]


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
    """It failed, and a user has to change something before the next start."""


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
