"""One live subtask: runs the effects of its ``Subtask`` machine as ``runtime.subtaskrunner`` does.

Elements of a channel are read in order unless the machine has blocked it; a freeze copies the state and seals the
sinks' transactions under the checkpoint's id; the barrier goes out in line with the records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from headgate.model.graph import Partitioner
from headgate.model.ids import ChannelIndex, CheckpointId, NodeName, SubtaskId
from headgate.model.plan import PlanEdge, Vertex
from headgate.protocol import subtask as machine
from headgate.protocol import watermarks
from headgate.sim import history, network
from headgate.sim.chain import Chain
from headgate.sim.faults import Fault
from headgate.sim.history import Record
from headgate.sim.marks import Mark
from headgate.sim.network import Channel, Element
from headgate.sim.storemodel import Transaction
from headgate.sim.uploads import Job, Uploads
from headgate.sim.workload import OUT_OF_ORDER_MS

if TYPE_CHECKING:
    from headgate.sim.worker import Worker


@dataclass(frozen=True, slots=True)
class Former:
    """The snapshot of one former subtask of a vertex, at the parallelism of its time."""

    index: int
    parallelism: int
    data: bytes


class SubtaskHost:
    """One subtask in its worker."""

    def __init__(self, worker: Worker, vertex: Vertex, fabric: network.Fabric, formers: Sequence[Former]) -> None:
        self.worker = worker
        self.env = worker.env
        plan = worker.plan
        self.subtask = SubtaskId(vertex.id, worker.index)
        snapshots = {former.index: msgspec.msgpack.decode(former.data) for former in formers}
        is_finished = self._had_finished(formers, snapshots)
        if is_finished:
            self.env.marks.reach(Mark.RESTORED_FINISHED)
        inputs = plan.inputs(self.subtask)
        self.inputs = [fabric.channel(i.edge.index, i.upstream.index, worker.index) for i in inputs]
        for channel in self.inputs:
            channel.receiver = worker
        self._outputs = self._attach(plan.outputs(vertex.id), fabric)
        self._machine = machine.Subtask(len(inputs), is_restored_finished=is_finished)
        self._merger = watermarks.WatermarkMerger(max(len(inputs), 1))
        self._chain = Chain(plan, vertex, self._send, self._write, worker.index)
        self._tracker = watermarks.WatermarkTracker(OUT_OF_ORDER_MS, None)
        if formers:
            self._chain.restore([snapshot["state"] for snapshot in snapshots.values()])
            self._tracker.restore(newest_times([snapshot["tracker"] for snapshot in snapshots.values()]))
        self._open: dict[NodeName, Transaction] = {}
        self._uploads = Uploads(self)
        self.blocked: set[int] = set()
        self._ended: set[int] = set()
        self._has_source_ended = False
        self.is_source = not inputs
        self._is_over = self.is_source and is_finished
        self.next_poll_ms = 0

    def _had_finished(self, formers: Sequence[Former], snapshots: Mapping[int, Mapping[str, Any]]) -> bool:
        """Whether all former subtasks had finished; at the same parallelism only this one counts (R17)."""
        is_moved = any(former.parallelism != self.worker.plan.parallelism for former in formers)
        flags = [bool(s["is_finished"]) for index, s in snapshots.items() if is_moved or index == self.subtask.index]
        if is_moved and any(flags) and not all(flags):
            self.env.marks.reach(Mark.RESCALED_PARTLY_FINISHED)
        return bool(flags) and all(flags)

    def _attach(self, edges: tuple[PlanEdge, ...], fabric: network.Fabric) -> dict[tuple[int, int], Channel]:
        found = {}
        for edge in edges:
            everybody = range(self.worker.plan.parallelism)
            receivers = (self.worker.index,) if edge.partitioner is Partitioner.FORWARD else tuple(everybody)
            for receiver in receivers:
                found[edge.index, receiver] = fabric.channel(edge.index, self.worker.index, receiver)
        return found

    def start(self) -> None:
        """Announce the splits."""
        if self.is_source and not self._is_over:
            event = watermarks.OriginsAssigned(self._chain.splits, self.env.world.now_ms)
            self._on_event_time(self._tracker.handle(event))

    def drain(self) -> None:
        """Read nothing more: a source ends with its next poll (E7)."""
        if self.is_source:
            self._is_over = True
            self.next_poll_ms = self.env.world.now_ms

    # -- what can be done now -----------------------------------------------------------------------------------

    @property
    def is_stalled(self) -> bool:
        """Whether an output channel is full."""
        limit = self.env.options.credit_elements
        return any(len(channel.queue) >= limit for channel in self._outputs.values())

    @property
    def has_source_input(self) -> bool:
        """Whether the source still has something to deliver or to say."""
        return self.is_source and not self._has_source_ended

    def poll(self) -> None:
        """Let the source deliver."""
        now, rng = self.env.world.now_ms, self.env.rng
        self.next_poll_ms = now + rng.randint(1, self.env.options.source_pause_ms)
        splits = self._chain.splits
        if self._is_over or not splits:
            if splits:
                self.env.marks.reach(Mark.ENDED_EARLY)
            self._has_source_ended = True
            self.handle(machine.SourceEnded())
            return
        split = rng.choice(splits)
        latest = self._chain.poll(split, rng.randint(1, 3))
        self._on_event_time(self._tracker.handle(watermarks.RecordsSeen(split, latest, now)))
        if split not in self._chain.splits:
            self._on_event_time(self._tracker.handle(watermarks.OriginFinished(split, now)))

    def read(self, index: int) -> None:
        """Take the element at the head of input ``index``."""
        channel = self.inputs[index]
        _, element = channel.queue.popleft()
        kind, value = element
        at = ChannelIndex(index)
        match kind:
            case "records":
                self._chain.process(value)
            case "barrier":
                if index in self._ended:
                    self.env.marks.reach(Mark.BARRIER_AFTER_END)
                self.handle(machine.BarrierReceived(at, value))
            case "cancel":
                self.env.marks.reach(Mark.CANCEL_MARKER)
                self.handle(machine.CancelReceived(at, value))
            case "watermark":
                self._on_event_time(self._merger.handle(watermarks.WatermarkReceived(at, value)))
            case "idle":
                self._on_event_time(self._merger.handle(watermarks.IdleReceived(at, value)))
            case _:
                self._ended.add(index)
                self._on_event_time(self._merger.handle(watermarks.InputEnded(at)))
                self.handle(machine.EndReceived(at))

    # -- the machine --------------------------------------------------------------------------------------------

    def handle(self, event: machine.Event) -> None:
        """Give ``event`` to the machine and run its effects, in order; the worker may die between any two."""
        effects = self._machine.handle(event)
        self.worker.tell(f"{self.subtask} {_short(event)} → {', '.join(_short(e) for e in effects)}")
        for effect in effects:
            self.env.faults.crash_point(self.worker, Fault.WORKER_CRASH)
            self._run(effect)
        assert self._machine.blocked == self.blocked, "blocked channels are those that the machine blocked"
        pending = len(self._machine.pending_committables)
        self.env.level(f"{self.subtask} pending committables", pending, 400)

    def _run(self, effect: machine.Effect) -> None:
        marks, worker = self.env.marks, self.worker
        match effect:
            case machine.BlockChannel():
                marks.reach(Mark.ALIGNED)
                self.blocked.add(effect.channel)
            case machine.UnblockChannels():
                self.blocked.difference_update(effect.channels)
            case machine.TakeSnapshot():
                self._freeze(effect.checkpoint)
            case machine.EmitBarrier():
                self._broadcast(("barrier", effect.checkpoint))
                self.env.note(history.BarrierPassed(worker.generation, self.subtask, effect.checkpoint, True))
            case machine.EmitCancel():
                self._broadcast(("cancel", effect.checkpoint))
                self.env.note(history.BarrierPassed(worker.generation, self.subtask, effect.checkpoint, False))
            case machine.Decline():
                message = network.Declined(worker.generation, self.subtask, effect.checkpoint, effect.reason)
                worker.send(message)
            case machine.Acknowledge():
                worker.send(
                    network.Acked(
                        worker.generation, self.subtask, effect.checkpoint, effect.handle, effect.committables
                    )
                )
            case machine.CancelWrite():
                self._uploads.cancel(effect.checkpoint)
            case machine.FinishOperators():
                self._on_event_time([watermarks.EmitWatermark(watermarks.WATERMARK_MAX_MS)])
                self._chain.finish()
                self.env.note(history.Finished(worker.generation, self.subtask))
            case machine.EmitEnd():
                self._broadcast(("end", None))
            case machine.ReportFinished():
                worker.send(network.FinishedInput(worker.generation, self.subtask))
            case machine.Ignored():
                self._note_ignored(effect.reason)

    def _note_ignored(self, reason: str) -> None:
        if "remembered until the barrier" in reason:
            self.env.marks.reach(Mark.ABORT_BEFORE_BARRIER)

    def _freeze(self, checkpoint: CheckpointId) -> None:
        content = {
            "is_finished": self._machine.is_finished,
            "state": self._chain.freeze(),
            "tracker": self._tracker.snapshot(),
        }
        sealed = [self._open[node] for node in sorted(self._open)]
        self._open.clear()
        self._uploads.start(Job(checkpoint, msgspec.msgpack.encode(content), sealed))

    # -- what leaves --------------------------------------------------------------------------------------------

    def _on_event_time(self, effects: list[watermarks.Effect]) -> None:
        for effect in effects:
            match effect:
                case watermarks.EmitWatermark():
                    self._chain.advance(effect.watermark_ms)
                    self._broadcast(("watermark", effect.watermark_ms))
                    self.env.note(history.WatermarkSent(self.worker.generation, self.subtask, effect.watermark_ms))
                case watermarks.EmitIdle():
                    self._broadcast(("idle", effect.is_idle))

    def _send(self, edge: PlanEdge, receiver: int, records: tuple[Record, ...]) -> None:
        self._push(self._outputs[edge.index, receiver], ("records", records))

    def _broadcast(self, element: Element) -> None:
        for channel in self._outputs.values():
            self._push(channel, element)

    def _push(self, channel: Channel, element: Element) -> None:
        channel.push(element, self.env.world.now_ms, self.env.message_delay_ms())
        limit = self.env.options.credit_elements + 200
        self.env.level(f"{self.subtask} elements in flight", len(channel.queue), limit)

    def _write(self, node: NodeName, records: list[Record]) -> None:
        transaction = self._open.get(node)
        if transaction is None:
            transaction = self.env.store.begin(str(node), self.worker.index, self.worker.generation)
            self._open[node] = transaction
        transaction.records.extend(records)

    def close(self) -> None:
        """Abandon what is open; what is prepared stays."""
        for transaction in self._open.values():
            self.env.store.discard(transaction)


def newest_times(trackers: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Merge the latest event times of splits; what a former owner kept of one is older (W9)."""
    latest: dict[str, int] = {}
    for tracker in trackers:
        for split, max_ms in tracker.items():
            latest[split] = max(max_ms, latest.get(split, max_ms))
    return latest


def _short(thing: object) -> str:
    checkpoint = getattr(thing, "checkpoint", None)
    channel = getattr(thing, "channel", None)
    text = type(thing).__name__
    if channel is not None:
        text += f" c{channel}"
    return text if checkpoint is None else f"{text} {checkpoint}"
