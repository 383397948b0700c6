"""What one subtask replays after a restore, and what it records when a barrier overtakes (UA7, UA12, UA13).

Counterparts: ``protocol.checkpoints.overtake`` says when, ``runtime.checkpoints.in_flight`` has the bytes. Recording
copies references only: what is recorded stands in the queues anyway, and credit bounds it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import pyarrow as pa

from headgate import fault_points
from headgate.model.ids import ChannelIndex
from headgate.runtime.checkpoints.in_flight import FrozenInFlight, Replay, Way


class InFlight:
    """The records in flight to one subtask, as far as checkpoints have to do with them."""

    def __init__(self, ways: Sequence[Way] = (), replay: Replay | None = None) -> None:
        """Make it; ``ways`` are the input channels, ``replay`` is what was restored."""
        self._ways = tuple(ways)
        self._replay = replay
        self._rest: deque[tuple[ChannelIndex, pa.RecordBatch]] = deque()
        self._recorded: dict[ChannelIndex, list[pa.RecordBatch]] = {}

    @property
    def is_replaying(self) -> bool:
        """Whether something was restored that may still have to be processed (UA12)."""
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
        """A snapshot was taken, and barriers overtake: what is left of the replay is in front of them (UA13)."""
        self._recorded = {}
        if self._replay is not None:
            self._rest.extend(self._replay)
            self._replay = None
        for channel, batch in self._rest:
            self.record(channel, [batch])

    def record(self, channel: ChannelIndex, batches: Sequence[pa.RecordBatch]) -> None:
        """Add what stands in front of the barrier on ``channel``."""
        if batches:
            self._recorded.setdefault(channel, []).extend(batches)

    def taken(self) -> FrozenInFlight | None:
        """Return all that was recorded; None: nothing was in flight."""
        recorded, self._recorded = self._recorded, {}
        return FrozenInFlight(self._ways, recorded) if recorded else None

    def drop(self) -> None:
        """The snapshot was given up (UA10)."""
        self._recorded = {}
