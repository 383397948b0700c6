"""What comes to one subtask over each of its edges: what waits there, and how long it worked on what came (OM14).

Counterpart: ``runtime.worker.outlets``, the sending end of an edge. Read twice a second by ``runtime.worker.metrics``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headgate.model.ids import ChannelIndex
from headgate.runtime.wire.feedback import ReceivingChannel


@dataclass(slots=True)
class EdgeInput:
    """The receiving end of one edge, seen from one subtask."""

    channels: list[ReceivingChannel]
    busy_ns: int = 0

    @property
    def queued(self) -> tuple[int, int]:
        """How many elements wait, set aside or not, and how many bytes their records have."""
        return sum(map(len, self.channels)), sum(channel.size_bytes for channel in self.channels)

    @property
    def fill(self) -> float:
        """The share of the credit that waits on the fullest channel."""
        return max(channel.fill for channel in self.channels)


class InputMeter:
    """The edges that end at one subtask. It costs two readings of the clock for each batch."""

    def __init__(self, inputs: Sequence[ReceivingChannel], clock_ns: Callable[[], int]) -> None:
        self._clock_ns = clock_ns
        self.edges: dict[int, EdgeInput] = {}
        for channel in inputs:
            self.edges.setdefault(channel.key.edge, EdgeInput([])).channels.append(channel)
        self._by_channel = [self.edges[channel.key.edge] for channel in inputs]

    def work(self, channel: ChannelIndex, call: Callable[[], object]) -> None:
        """Make ``call``, which is the work on what came on ``channel``."""
        began_ns = self._clock_ns()
        call()
        self._by_channel[channel].busy_ns += self._clock_ns() - began_ns
