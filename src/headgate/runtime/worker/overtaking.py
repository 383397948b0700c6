"""What a subtask needs when barriers may overtake, and what it measures then (UA4, UA6, UA19).

Counterparts: ``runtime.worker.subtask_runner``, which has one of each, and ``runtime.worker.worker``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headgate.model.ids import CheckpointId
from headgate.model.manifest import SnapshotDelays


@dataclass(frozen=True, slots=True)
class Overtaking:
    """What a subtask needs when barriers may overtake.

    Attributes:
        timeout_ms: from the trigger of the checkpoint.
        clock_ms: processing time.
        is_interrupted: whether something came that a turn must not delay (UA4).
    """

    timeout_ms: int
    clock_ms: Callable[[], int]
    is_interrupted: Callable[[], bool]


class Delays:
    """How long the newest checkpoint took to come here, and then to be taken (UA19)."""

    def __init__(self) -> None:
        self._triggered: dict[CheckpointId, int] = {}
        self._arrived: dict[CheckpointId, int] = {}
        self._frozen: dict[CheckpointId, SnapshotDelays] = {}

    def triggered(self, checkpoint: CheckpointId, now_ms: int) -> None:
        """The driver has triggered ``checkpoint``."""
        self._triggered = {checkpoint: now_ms}

    def begun_ms(self, checkpoint: CheckpointId, now_ms: int) -> int:
        """Return when ``checkpoint`` was triggered, as this worker heard it; now, if it has not heard of that (UA6)."""
        return self._triggered.get(checkpoint, now_ms)

    def arrived(self, checkpoint: CheckpointId, now_ms: int) -> None:
        """A barrier of ``checkpoint`` came, or was read."""
        if checkpoint > max(self._arrived, default=CheckpointId(0)):  # an older one may be read later
            self._arrived = {checkpoint: now_ms}

    def frozen(self, checkpoint: CheckpointId, now_ms: int) -> None:
        """The snapshot of ``checkpoint`` was taken."""
        arrived_ms = self._arrived.get(checkpoint, now_ms)
        start_ms = max(arrived_ms - self._triggered.get(checkpoint, arrived_ms), 0)
        self._frozen = {checkpoint: SnapshotDelays(start_ms, now_ms - arrived_ms)}

    def taken(self, checkpoint: CheckpointId) -> SnapshotDelays | None:
        """Return what ``checkpoint`` took, once; None: nobody knows any more."""
        return self._frozen.pop(checkpoint, None)
