"""One live subtask: runs the effects of its ``Subtask`` machine as ``runtime.worker.subtask_runner`` does.

Elements of a channel are read in order unless the machine has blocked it; a freeze copies the state and seals the
sinks' transactions under the checkpoint's id; the barrier goes out in line with the records.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from headgate.model.ids import ChannelIndex, CheckpointId, SubtaskId
from headgate.model.plan import Vertex
from headgate.protocol import watermarks
from headgate.protocol.subtasks import subtask as machine
from headgate.sim import history, network
from headgate.sim.chain import Chain
from headgate.sim.faults import Fault
from headgate.sim.headside import HeadSide
from headgate.sim.history import Record
from headgate.sim.kinds import OUT_OF_ORDER_MS
from headgate.sim.marks import Mark
from headgate.sim.network import Channel
from headgate.sim.outlets import Outlets
from headgate.sim.restoring import Former, newest_times, place_of, restored_rounds
from headgate.sim.uploads import Job, Uploads

if TYPE_CHECKING:
    from headgate.sim.worker import Worker


class SubtaskHost:
    """One subtask in its worker."""

    def __init__(
        self,
        worker: Worker,
        vertex: Vertex,
        fabric: network.Fabric,
        formers: Sequence[Former],
        *,
        is_draining: bool = False,
    ) -> None:
        self.worker = worker
        self.env = worker.env
        plan = worker.plan
        self.vertex: Vertex = vertex
        self.subtask: SubtaskId = SubtaskId(vertex.id, worker.index)
        snapshots = {former.index: msgspec.msgpack.decode(former.data) for former in formers}
        is_finished = self._had_finished(formers, snapshots)
        if is_finished:
            self.env.marks.reach(Mark.RESTORED_FINISHED)
        inputs = plan.inputs(self.subtask)
        self.inputs = [fabric.channel(i.edge.index, i.upstream.index, worker.index) for i in inputs]
        for channel in self.inputs:
            channel.receiver = worker
        self._outlets = Outlets(worker, self.subtask, plan.outputs(vertex.id), fabric)
        regular_count = sum(not i.edge.is_feedback for i in inputs)
        self._feedback = range(regular_count, len(inputs))
        self._machine = machine.Subtask(
            regular_count,
            is_restored_finished=is_finished,
            place=place_of(plan, vertex, self.subtask),
            rounds=restored_rounds(snapshots),
        )
        self._merger = watermarks.WatermarkMerger(max(regular_count, 1))
        self.head = HeadSide(self) if vertex.is_loop_head else None
        self._chain = Chain(plan, vertex, self._outlets.send, self._outlets.write, worker.index)
        self._tracker = watermarks.WatermarkTracker(OUT_OF_ORDER_MS, None)
        if formers:
            self._chain.restore([snapshot["state"] for snapshot in snapshots.values()])
            self._tracker.restore(newest_times([snapshot["tracker"] for snapshot in snapshots.values()]))
        if self.head is not None:
            is_moved = any(former.parallelism != plan.parallelism for former in formers)
            self.head.restore({index: s["log"] for index, s in snapshots.items()}, is_moved=is_moved)
            if self._machine.rounds.started >= 0 and not is_finished:
                self.env.marks.reach(Mark.RESTORED_IN_ROUND)
        self._uploads = Uploads(self)
        self.blocked: set[int] = set()
        self._ended: set[int] = set()
        self._has_source_ended = False
        self.is_source = not inputs
        self._is_over = self.is_source and is_draining  # E9
        self._may_resume = is_finished
        self.next_poll_ms = 0

    def _had_finished(self, formers: Sequence[Former], snapshots: Mapping[int, Mapping[str, Any]]) -> bool:
        """Whether all former subtasks had finished; at the same parallelism only this one counts (R17)."""
        is_moved = any(former.parallelism != self.worker.plan.parallelism for former in formers)
        flags = [bool(s["is_finished"]) for index, s in snapshots.items() if is_moved or index == self.subtask.index]
        if is_moved and any(flags) and not all(flags):
            self.env.marks.reach(Mark.RESCALED_PARTLY_FINISHED)
        return bool(flags) and all(flags)

    def start(self) -> None:
        """Announce the splits."""
        if self.is_source and not self._is_over:
            if self._chain.splits:
                self._resume()
            event = watermarks.OriginsAssigned(self._chain.splits, self.env.world.now_ms)
            self._on_event_time(self._tracker.handle(event))

    def _resume(self) -> None:
        """There is more input; the machine must know if all had ended when the restored snapshot was taken (T10)."""
        if self._may_resume:
            self._may_resume = False
            self.env.marks.reach(Mark.RESUMED if self.is_source else Mark.RESUMED_BEHIND)
            self.env.note(history.Resumed(self.worker.generation, self.subtask))
            self.handle(machine.InputResumed())

    def drain(self) -> None:
        """Read nothing more: a source ends with its next poll (E7)."""
        if self.is_source:
            self._is_over = True
            self.next_poll_ms = self.env.world.now_ms

    # -- what can be done now -----------------------------------------------------------------------------------

    @property
    def is_stalled(self) -> bool:
        """Whether an output channel is full."""
        return self._outlets.is_stalled

    def is_held_back(self, index: int) -> bool:
        """Whether input ``index``, which is not blocked, must wait: for the replay, or because of throttling."""
        if self.head is None:
            return False
        if self.head.is_replaying:
            return True
        queued = sum(len(self.inputs[i].queue) for i in self._feedback)
        return index < self._feedback.start and self.head.is_throttled(queued)

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
        kind, value = channel.take()
        at = ChannelIndex(index)
        if self.head is not None:
            self._note_read(index, channel, is_records=kind == "records")
        match kind:
            case "records" if index in self._feedback:
                self._resume()
                assert self.head is not None
                self.head.receive(at, channel.taken_count, value)
            case "records":
                self._resume()
                self.process(value)
            case "probe":
                self.handle(machine.ProbeReceived(at, value))
            case "barrier":
                if index in self._ended:
                    self.env.marks.reach(Mark.BARRIER_AFTER_END)
                self.handle(machine.BarrierReceived(at, value))
            case "cancel":
                self.env.marks.reach(Mark.CANCEL_MARKER)
                self.handle(machine.CancelReceived(at, value))
            case "watermark" | "idle" if index in self._feedback:
                pass
            case "watermark":
                self._merge(self._merger.handle(watermarks.WatermarkReceived(at, value)))
            case "idle":
                self._merge(self._merger.handle(watermarks.IdleReceived(at, value)))
            case _:
                self._ended.add(index)
                if index not in self._feedback:
                    self._merge(self._merger.handle(watermarks.InputEnded(at)))
                self.handle(machine.EndReceived(at))

    def process(self, records: tuple[Record, ...]) -> None:
        """Let the operators process records."""
        self._chain.process(records)

    def group_of(self, record: Record) -> int:
        """Return the key group of ``record``."""
        return self._chain.group_of(record[2])

    def _note_read(self, index: int, channel: Channel, *, is_records: bool) -> None:
        generation = self.worker.generation
        self.env.note(history.InputRead(generation, self.subtask))
        if index in self._feedback:
            read = history.FeedbackRead(generation, self.subtask, channel.name, channel.taken_count, is_records)
            self.env.note(read)

    def _merge(self, effects: list[watermarks.Effect]) -> None:
        """Advance event time; a loop head waits until the loop is empty (L37)."""
        if self.head is None:
            self._on_event_time(effects)

    # -- the machine --------------------------------------------------------------------------------------------

    def handle(self, event: machine.Event) -> None:
        """Give ``event`` to the machine and run its effects, in order; the worker may die between any two."""
        effects = self._machine.handle(event)
        self.worker.tell(f"{self.subtask} {_short(event)} → {', '.join(_short(e) for e in effects)}")
        if any(isinstance(effect, machine.DropLog) for effect in effects):
            is_overtaken = any(isinstance(effect, machine.Decline) for effect in effects)
            self.env.marks.reach(Mark.LOG_OVERTAKEN if is_overtaken else Mark.LOG_RELEASED)
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
                marks.reach(Mark.CHANNEL_HELD if effect.channel in self._feedback else Mark.ALIGNED)
                self.blocked.add(effect.channel)
            case machine.UnblockChannels():
                self.blocked.difference_update(effect.channels)
            case machine.TakeSnapshot():
                self._freeze(effect.checkpoint)
            case machine.EmitBarrier():
                self._outlets.broadcast(("barrier", effect.checkpoint))
                self.env.note(history.BarrierPassed(worker.generation, self.subtask, effect.checkpoint, True))
            case machine.EmitCancel():
                if self.head is not None:
                    self.head.is_past(effect.checkpoint)
                self._outlets.broadcast(("cancel", effect.checkpoint))
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
            case machine.ResumeOperators():
                pass  # nodes keep no event time in their state
            case machine.EmitEnd():
                self._outlets.broadcast(("end", None))
            case machine.ReportFinished():
                worker.send(network.FinishedInput(worker.generation, self.subtask))
            case machine.Ignored():
                self._note_ignored(effect.reason)
            case _:
                self._run_loop(effect)

    def _run_loop(self, effect: machine.Effect) -> None:
        """Run an effect that only subtasks in loops have."""
        worker = self.worker
        match effect:
            case machine.PassProbe():
                self._chain.flush()
                self._outlets.pass_probe(effect.probe)
            case machine.CloseRound():
                self._chain.close_round(effect.round_)
            case machine.AdvanceToEnd():
                self._on_event_time([watermarks.EmitWatermark(watermarks.WATERMARK_MAX_MS)])
            case machine.ReportEntranceEnded():
                worker.send(
                    network.EntranceEnded(worker.generation, self.subtask, effect.started_round, effect.highest_round)
                )
            case machine.ReportProbe():
                worker.send(
                    network.ProbeReturned(
                        worker.generation, self.subtask, effect.number, effect.count, effect.highest_round
                    )
                )
            case _:
                self._run_log(effect)

    def _run_log(self, effect: machine.Effect) -> None:
        """Run an effect about the log of a loop head."""
        assert self.head is not None
        match effect:
            case machine.OpenLog():
                self.head.open(effect.checkpoint)
            case machine.LogFeedback():
                self.head.log(effect.checkpoints)
            case machine.ForwardFeedback():
                self.head.forward()
            case machine.SealLog():
                self._uploads.start(self.head.seal(effect.checkpoint))
            case machine.DropLog():
                self._uploads.keep(effect.checkpoint, self.head.drop(effect.checkpoint))
            case _:
                raise AssertionError(f"nobody runs {effect}")

    def _note_ignored(self, reason: str) -> None:
        if "remembered until the barrier" in reason:
            self.env.marks.reach(Mark.ABORT_BEFORE_BARRIER)

    def _freeze(self, checkpoint: CheckpointId) -> None:
        self._chain.flush()  # U8: before anything is sealed
        content: dict[str, Any] = {
            "is_finished": self._machine.is_finished,
            "state": self._chain.freeze(),
            "tracker": self._tracker.snapshot(),
        }
        if self.vertex.nest is not None:
            content["rounds"] = dataclasses.astuple(self._machine.rounds)
        sealed = self._outlets.seal()
        if self.head is None:
            self._uploads.start(Job(checkpoint, msgspec.msgpack.encode(content), sealed))
        else:
            self.head.is_past(checkpoint)
            self.head.freeze(checkpoint, content, sealed)

    # -- what leaves --------------------------------------------------------------------------------------------

    def _on_event_time(self, effects: list[watermarks.Effect]) -> None:
        for effect in effects:
            match effect:
                case watermarks.EmitWatermark():
                    self._chain.advance(effect.watermark_ms)
                    self._outlets.broadcast(("watermark", effect.watermark_ms))
                    self.env.note(history.WatermarkSent(self.worker.generation, self.subtask, effect.watermark_ms))
                case watermarks.EmitIdle():
                    self._outlets.broadcast(("idle", effect.is_idle))

    def close(self) -> None:
        """Abandon what is open; what is prepared stays."""
        self._outlets.close()


def _short(thing: object) -> str:
    checkpoint = getattr(thing, "checkpoint", None)
    channel = getattr(thing, "channel", None)
    text = type(thing).__name__
    if channel is not None:
        text += f" c{channel}"
    return text if checkpoint is None else f"{text} {checkpoint}"
