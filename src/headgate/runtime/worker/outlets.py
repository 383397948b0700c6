"""The edges that leave a vertex: routing by partitioner onto output channels.

Counterpart: ``runtime.wire.channels``, which carries elements. Data is routed; everything else goes to every channel of
the edge, in line with the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa

from headgate.codec.frames import Element, Idle, Watermark, batch_element
from headgate.model.graph import Partitioner
from headgate.model.plan import Plan, PlanEdge
from headgate.operators.partition import partition
from headgate.runtime.wire.channels import OutputChannel
from headgate.runtime.worker.stopwatch import HeldBack

BATCH_BYTES_MAX = 8 << 20
"""Larger batches are cut before they are sent, so that one batch cannot overdraw a credit window many times."""


class EdgeOutlet:
    """One plan edge, seen from one upstream subtask.

    ``channels`` are ordered by downstream subtask (a FORWARD edge has one). Measured of it (OM14): ``records`` sent,
    and ``held_back``, which whoever is held back notes.
    """

    def __init__(
        self,
        edge: PlanEdge,
        plan: Plan,
        channels: Sequence[OutputChannel],
        subtask_index: int,
        clock_ns: Callable[[], int] = lambda: 0,
    ) -> None:
        self.edge = edge
        self.records = 0
        self.held_back = HeldBack(clock_ns)
        self._plan = plan
        self._channels = list(channels)
        self._next = subtask_index % len(self._channels)  # rebalancing starts spread over the receivers

    @property
    def can_send(self) -> bool:
        """Whether every channel has credit left."""
        return all(channel.can_send for channel in self._channels)

    def send(self, batch: pa.RecordBatch) -> None:
        """Route ``batch`` to its downstream subtasks."""
        if batch.nbytes > BATCH_BYTES_MAX and batch.num_rows > 1:
            half = batch.num_rows // 2
            self.send(batch.slice(0, half))
            self.send(batch.slice(half))
            return
        self.records += batch.num_rows
        match self.edge.partitioner:
            case Partitioner.FORWARD | Partitioner.FIRST:
                self._channels[0].send(batch_element(batch))
            case Partitioner.HASH:
                plan = self._plan
                parts = partition(batch, self.edge.keys, plan.max_parallelism, plan.parallelism)
                for channel, part in zip(self._channels, parts, strict=True):
                    if part is not None:
                        channel.send(batch_element(part))
            case Partitioner.REBALANCE:
                self._channels[self._next].send(batch_element(batch))
                self._next = (self._next + 1) % len(self._channels)
            case Partitioner.BROADCAST:
                element = batch_element(batch)
                for channel in self._channels:
                    channel.send(element)

    def send_watermark(self, watermark_ms: int) -> None:
        """Send a watermark on every channel."""
        self.send_element(Watermark(watermark_ms))

    def send_idle(self, is_idle: bool) -> None:
        """Send an idleness change on every channel."""
        self.send_element(Idle(is_idle))

    def send_element(self, element: Element) -> None:
        """Send anything but records on every channel."""
        for channel in self._channels:
            channel.send(element)
