"""Busy time of operators and edges, and backpressure of subtasks.

Read twice a second by ``metrics``. It costs two readings of the clock for each call of an operator, so for each
batch, never for each record. Operators call each other, so time is charged to the one that runs now: an operator's
own time, without that of those below it in the chain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headgate.dataclass import dataclass
from headgate.model.ids import ChannelIndex
from headgate.runtime.wire.channels import ReceivingChannel


@dataclass(slots=True)
class NodeTotals:
    """What went through one node since the generation began, and what it cost."""

    records_in: int = 0
    records_out: int = 0
    watermark_ms: int | None = None
    bad_records: int = 0
    busy_ns: int = 0
    node: str = ""


class Stopwatch:
    """Charges the time of one thread to one operator at a time."""

    def __init__(self, clock_ns: Callable[[], int] = lambda: 0) -> None:
        """``clock_ns``: of the surroundings; without one nothing is measured."""
        self._clock_ns = clock_ns
        self._since_ns = 0
        self.running: NodeTotals | None = None
        """The operator that runs now; None: the runtime itself."""

    def switch(self, to: NodeTotals | None) -> NodeTotals | None:
        """Charge ``to`` from now on; return the operator charged until now, to switch back to.

        There is no switch back when an operator raises: its worker ends, and ``running`` still names the operator.
        """
        now_ns = self._clock_ns()
        before = self.running
        if before is not None:
            before.busy_ns += now_ns - self._since_ns
        self._since_ns = now_ns
        self.running = to
        return before


class HeldBack:
    """How long one subtask could not work because the channels out of it had no room (backpressure)."""

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self._clock_ns = clock_ns
        self._total_ns = 0
        self._since_ns: int | None = None

    @property
    def lasts(self) -> bool:
        """Whether it was when it was noted last."""
        return self._since_ns is not None

    def note(self, is_held_back: bool) -> None:
        """Say whether it is; the clock is read only when that changes."""
        if is_held_back is (self._since_ns is not None):
            return
        now_ns = self._clock_ns()
        if self._since_ns is not None:
            self._total_ns += now_ns - self._since_ns
        self._since_ns = now_ns if is_held_back else None

    @property
    def total_ns(self) -> int:
        """Until now."""
        return self._total_ns + (0 if self._since_ns is None else self._clock_ns() - self._since_ns)


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
