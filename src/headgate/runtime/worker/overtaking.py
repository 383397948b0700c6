"""What a subtask needs when barriers may overtake, and what it measures then (UA4, UA6, UA19).

Counterparts: ``runtime.worker.subtask_runner``, which has a ``Timing``, and ``runtime.worker.worker``.
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


class Timing:
    """When the barriers of one subtask overtake, and what it measures. Where none may, nothing is measured."""

    def __init__(self, overtaking: Overtaking | None, *, has_late_inputs: bool) -> None:
        """Make it; ``has_late_inputs``: a barrier takes credit to come here (UA20)."""
        self._overtaking = overtaking
        self._has_late_inputs = has_late_inputs
        self._delays = Delays()
        self._deadline: tuple[CheckpointId, int] | None = None

    @property
    def is_interrupted(self) -> bool:
        """Whether something came that a turn must not delay (UA4)."""
        return self._overtaking is not None and self._overtaking.is_interrupted()

    @property
    def deadline_ms(self) -> int | None:
        """When it goes over unless it has aligned before (UA6); None: it does not align."""
        return None if self._deadline is None else self._deadline[1]

    def arm(self, checkpoint: CheckpointId) -> None:
        """It begins to align for ``checkpoint``."""
        assert self._overtaking is not None
        self._deadline = checkpoint, self._deadline_of(checkpoint, self._overtaking)

    def timed_out(self, now_ms: int) -> CheckpointId | None:
        """Return the checkpoint whose alignment took too long, once."""
        if self._deadline is None or now_ms < self._deadline[1]:
            return None
        (checkpoint, _), self._deadline = self._deadline, None
        return checkpoint

    def _deadline_of(self, checkpoint: CheckpointId, overtaking: Overtaking) -> int:
        """Return when barriers of ``checkpoint`` overtake, by this worker's clock alone (UA6, UA20)."""
        now_ms = overtaking.clock_ms()
        begun_ms = now_ms if self._has_late_inputs else self._delays.begun_ms(checkpoint, now_ms)
        return begun_ms + overtaking.timeout_ms

    def triggered(self, checkpoint: CheckpointId) -> None:
        """The driver has triggered ``checkpoint`` (UA19)."""
        if self._overtaking is not None:
            self._delays.triggered(checkpoint, self._overtaking.clock_ms())

    def arrived(self, checkpoint: CheckpointId) -> None:
        """A barrier of ``checkpoint`` came, or was read."""
        if self._overtaking is not None:
            self._delays.arrived(checkpoint, self._overtaking.clock_ms())

    def frozen(self, checkpoint: CheckpointId) -> None:
        """The snapshot of ``checkpoint`` was taken."""
        if self._overtaking is not None:
            self._delays.frozen(checkpoint, self._overtaking.clock_ms())

    def taken(self, checkpoint: CheckpointId) -> SnapshotDelays | None:
        """Return what ``checkpoint`` took, once; None: nobody knows any more, or it is not measured."""
        return None if self._overtaking is None else self._delays.taken(checkpoint)
