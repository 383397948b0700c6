"""Whether a driver runs a pipeline where no lock tells: in an object store (SO8 of docs/spec/starting-over.md).

It beats (docs/spec/standby.md): who sees no beat for as long as a standby waits takes it for gone. One that
lives all the same was replaced, and is fenced.
"""

from __future__ import annotations

from headgate.model.heartbeat import Course
from headgate.protocol.supervision.standby import Standby
from headgate.runtime.driver.lookout import Lookout
from headgate.runtime.driver.pipeline_lock import AlreadyRunning
from headgate.runtime.surroundings import Surroundings
from headgate.storage.base import Storage

_AT_WORK = frozenset({Course.RUNNING, Course.STOPPING, Course.DRAINING})


def refuse_if_alive(storage: Storage, pipeline: str, around: Surroundings) -> None:
    """Wait for a sign of life of a run whose end nobody told.

    Raises:
        AlreadyRunning: there was one.
        StorageError
    """
    lookout = Lookout(storage, pipeline, "")
    first = lookout.all()
    if not first.generation or not first.knows_beats or first.course not in _AT_WORK:
        return
    for _ in range(Standby.SILENCE_MS // Standby.LOOK_MS):
        around.sleep(Standby.LOOK_MS / 1000)
        seen = lookout.beat(first.generation)
        if seen.course not in _AT_WORK:
            return
        if seen.mark != first.mark:
            raise AlreadyRunning(
                f"pipeline '{pipeline}' is run by {seen.owner or 'another process'}, and cannot start over meanwhile; "
                "stop it first"
            )
