"""Unaligned checkpoints in one subtask: when barriers overtake, the records that they overtook, and their replay.

``protocol.checkpoints`` decides, ``runtime.checkpoints.channel_state`` has the bytes. Recording copies references
only: recorded batches stand in the queues anyway, and credit bounds them (UA4–UA8, UA10).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import pyarrow as pa

from headgate import fault_points
from headgate.dataclass import dataclass
from headgate.model.ids import ChannelIndex, CheckpointId
from headgate.model.manifest import SnapshotDelays
from headgate.runtime.checkpoints.channel_state import ChannelState, NamedChannel, Replay


@dataclass(frozen=True, slots=True)
class UnalignedOptions:
    """What a subtask needs when barriers may overtake.

    Attributes:
        timeout_ms: from the trigger of the checkpoint.
        clock_ms: processing time.
        is_interrupted: whether something came that a turn must not delay (UA4).
    """

    timeout_ms: int
    clock_ms: Callable[[], int]
    is_interrupted: Callable[[], bool]


class DelayClock:
    """How long the newest checkpoint took to come here, and then to be taken."""

    def __init__(self) -> None:
        self._triggered: dict[CheckpointId, int] = {}
        self._arrived: dict[CheckpointId, int] = {}
        self._frozen: dict[CheckpointId, SnapshotDelays] = {}

    def triggered(self, checkpoint: CheckpointId, now_ms: int) -> None:
        """The driver has triggered ``checkpoint``."""
        # only the newest: an older one is not measured any more, so nothing grows with checkpoints that were given up
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
        """Return what ``checkpoint`` took, once; None: forgotten."""
        return self._frozen.pop(checkpoint, None)


class AlignmentTimer:
    """When the barriers of one subtask overtake, and what it measures. Where none may, nothing is measured."""

    def __init__(self, overtaking: UnalignedOptions | None, *, has_late_inputs: bool) -> None:
        """Make it; ``has_late_inputs``: a barrier takes credit to come here (UA20)."""
        self._overtaking = overtaking
        self._has_late_inputs = has_late_inputs
        self._delays = DelayClock()
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
        assert self._overtaking is not None, "the machine times alignment only where barriers may overtake"
        self._deadline = checkpoint, self._deadline_of(checkpoint, self._overtaking)

    def timed_out(self, now_ms: int) -> CheckpointId | None:
        """Return the checkpoint that aligned for too long, once."""
        if self._deadline is None or now_ms < self._deadline[1]:
            return None
        # A deadline of a checkpoint that has ended stays until it fires or is replaced; the machine ignores it then.
        (checkpoint, _), self._deadline = self._deadline, None
        return checkpoint

    def _deadline_of(self, checkpoint: CheckpointId, overtaking: UnalignedOptions) -> int:
        """Return when barriers of ``checkpoint`` overtake, by this worker's clock alone (UA6, UA20)."""
        now_ms = overtaking.clock_ms()
        begun_ms = now_ms if self._has_late_inputs else self._delays.begun_ms(checkpoint, now_ms)
        return begun_ms + overtaking.timeout_ms

    def triggered(self, checkpoint: CheckpointId) -> None:
        """The driver has triggered ``checkpoint``."""
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
        """Return what ``checkpoint`` took, once; None: forgotten, or not measured."""
        return None if self._overtaking is None else self._delays.taken(checkpoint)


class ChannelRecorder:
    """The records in flight to one subtask, as far as checkpoints have to do with them."""

    def __init__(self, channels: Sequence[NamedChannel] = (), replay: Replay | None = None) -> None:
        """Make it; ``channels`` are the input channels, ``replay`` is what was restored."""
        self._channels = tuple(channels)
        self._replay = replay
        self._rest: deque[tuple[ChannelIndex, pa.RecordBatch]] = deque()
        self._recorded: dict[ChannelIndex, list[pa.RecordBatch]] = {}

    @property
    def is_replaying(self) -> bool:
        """Whether something was restored that may still have to be processed."""
        return self._replay is not None or bool(self._rest)

    def next(self) -> tuple[ChannelIndex, pa.RecordBatch] | None:
        """Return the next restored batch and its channel; None: that was all."""
        if not self._rest and self._replay is not None:
            fault_points.reach("in-replay")
            found = next(self._replay, None)
            if found is None:
                self._replay = None
                return None
            return found
        return self._rest.popleft() if self._rest else None

    def begin(self) -> None:
        """A snapshot was taken, and barriers overtake: what is left of the replay is in front of them."""
        assert not self._recorded, "the recording before was taken or dropped (UA8, UA10)"
        self._recorded = {}
        if self._replay is not None:
            # The rest of the replay goes into memory: it is in this snapshot and is still processed, and the iterator
            # reads each part once.
            self._rest.extend(self._replay)
            self._replay = None
        for channel, batch in self._rest:
            self.record(channel, [batch])

    def record(self, channel: ChannelIndex, batches: Sequence[pa.RecordBatch]) -> None:
        """Add what stands in front of the barrier on ``channel``."""
        if batches:
            self._recorded.setdefault(channel, []).extend(batches)

    def take_recorded(self) -> ChannelState | None:
        """Return all that was recorded; None: nothing was in flight."""
        recorded, self._recorded = self._recorded, {}
        return ChannelState(self._channels, recorded) if recorded else None

    def drop(self) -> None:
        """The snapshot was given up (UA10)."""
        self._recorded = {}
