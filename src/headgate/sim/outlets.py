"""What leaves a simulated subtask: elements on its output channels, and records in its sinks' transactions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headgate.model.graph import Partitioner
from headgate.model.ids import NodeName, SubtaskId
from headgate.model.plan import PlanEdge
from headgate.protocol.loops.rounds import Probe
from headgate.sim import history, network
from headgate.sim.history import Record
from headgate.sim.network import Channel, Element
from headgate.sim.storemodel import Transaction

if TYPE_CHECKING:
    from headgate.sim.worker import Worker

FEEDBACK_MAX = 4_000
"""Elements in one feedback channel: these have no credits (L22), but no run needs more."""


class Outlets:
    """Output channels and open transactions of one subtask."""

    def __init__(self, worker: Worker, subtask: SubtaskId, edges: tuple[PlanEdge, ...], fabric: network.Fabric) -> None:
        self._worker = worker
        self._env = worker.env
        self._subtask = subtask
        self.channels: dict[tuple[int, int], Channel] = {}
        self._open: dict[NodeName, Transaction] = {}
        self._edges = {edge.index: edge for edge in edges}
        for edge in edges:
            everybody = range(worker.plan.parallelism)
            receivers = (worker.index,) if edge.partitioner is Partitioner.FORWARD else tuple(everybody)
            for receiver in receivers:
                channel = fabric.channel(edge.index, worker.index, receiver)
                channel.is_feedback = edge.is_feedback
                self.channels[edge.index, receiver] = channel
        self._bounded = [channel for channel in self.channels.values() if not channel.is_feedback]

    # -- channels -----------------------------------------------------------------------------------------------

    @property
    def is_stalled(self) -> bool:
        """Whether a channel is full. Feedback channels never are (L22)."""
        limit = self._env.options.credit_elements
        for channel in self._bounded:  # noqa: SIM110 - asked for every action of every run, and twice as fast
            if len(channel.queue) >= limit:
                return True
        return False

    def send(self, edge: PlanEdge, receiver: int, records: tuple[Record, ...]) -> None:
        """Send records to one receiver of an edge."""
        self._push(self.channels[edge.index, receiver], ("records", records))

    def broadcast(self, element: Element) -> None:
        """Send an element on every channel."""
        for channel in self.channels.values():
            self._push(channel, element)

    def pass_probe(self, probe: Probe) -> None:
        """Send a probe on every channel within the nest of loops, feedback too (L32)."""
        for (edge, _), channel in self.channels.items():
            if self._edges[edge].nest is not None:
                self._push(channel, ("probe", probe))

    def _push(self, channel: Channel, element: Element) -> None:
        channel.push(element, self._env.world.now_ms, self._env.message_delay_ms())
        if channel.is_feedback:
            records = element[1] if element[0] == "records" else ()
            sentinel = element[1] if element[0] == "barrier" else None
            generation = self._worker.generation
            self._env.note(history.FeedbackSent(generation, channel.name, channel.sent_count, records, sentinel))
        limit = FEEDBACK_MAX if channel.is_feedback else self._env.options.credit_elements + 200
        self._env.level(f"{self._subtask} elements in flight", len(channel.queue), limit)

    # -- sinks --------------------------------------------------------------------------------------------------

    def write(self, node: NodeName, records: list[Record]) -> None:
        """Add records to the open transaction of a sink."""
        transaction = self._open.get(node)
        if transaction is None:
            transaction = self._env.store.begin(str(node), self._worker.index, self._worker.generation)
            self._open[node] = transaction
        transaction.records.extend(records)

    def seal(self) -> list[Transaction]:
        """Return the open transactions, by sink; what follows goes into new ones."""
        sealed = [self._open[node] for node in sorted(self._open)]
        self._open.clear()
        return sealed

    def close(self) -> None:
        """Abandon what is open; what is prepared stays."""
        for transaction in self._open.values():
            self._env.store.discard(transaction)
