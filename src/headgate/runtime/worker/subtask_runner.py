"""Runs one subtask.

Reads its inputs or its source, calls its chain, takes snapshots, carries out its machine's orders.

Everything here happens in the mailbox thread. Decisions about checkpoints are the machine's; this module only maps
elements to events and effects to calls (walks: ARCHITECTURE.md). ``source_runner`` reads the source, ``unaligned``
knows when barriers overtake and which records they overtook.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import assert_never

import msgspec
import pyarrow as pa

from headgate import fault_points
from headgate.codec.frames import Barrier, BatchElement, Cancel, Element, EndOfData, Idle, Watermark
from headgate.codec.snapshot import FINISHED_PREFIX, IN_FLIGHT_PREFIX, POSITIONS_PREFIX, ROUNDS_PREFIX, encode_positions
from headgate.dataclass import dataclass
from headgate.environment import close_all
from headgate.errors import UsageError
from headgate.model.config import Alignment, CheckpointOptions
from headgate.model.graph import MAIN_INPUT
from headgate.model.ids import ChannelIndex, CheckpointId
from headgate.model.manifest import Totals
from headgate.model.progress import SourceProgress
from headgate.protocol import loop_prober
from headgate.protocol.loop_prober import Probe, ProbeReceived
from headgate.protocol.machine import Ignored
from headgate.protocol.subtasks import alignment, externally_induced, loops, unaligned
from headgate.protocol.subtasks import subtask as machine
from headgate.protocol.watermarks import (
    ChannelOrigin,
    EmitIdle,
    EmitWatermark,
    IdleReceived,
    InputEnded,
    MergerEvent,
    WatermarkMerger,
    WatermarkReceived,
)
from headgate.runtime.checkpoints.channel_state import ChannelState
from headgate.runtime.checkpoints.snapshot_writer import SavepointPart, SubtaskSnapshot
from headgate.runtime.wire.channels import InputChannel, ReceivingChannel
from headgate.runtime.worker.chain import EdgeOutlet, HeldBack, InputMeter
from headgate.runtime.worker.listeners import SubtaskListeners
from headgate.runtime.worker.source_runner import SourceRunner, SourceState
from headgate.runtime.worker.subtask_parts import SubtaskParts
from headgate.runtime.worker.unaligned import AlignmentTimer


@dataclass(frozen=True, slots=True)
class Durations:
    """Measured: waiting for barriers, and the synchronous part."""

    align_us: int
    freeze_us: int


class SnapshotTaker:
    """Takes the snapshots of one subtask, from the first barrier to the hand-over to the writer."""

    def __init__(
        self, parts: SubtaskParts, subtask: machine.Subtask, source: SourceState | None, listeners: SubtaskListeners
    ) -> None:
        self._listeners = listeners
        self.sinks = dict(parts.sinks)
        self._vertex = str(parts.subtask.vertex)
        self._chain = parts.chain
        self._machine = subtask
        self._source = source
        self._clock_ns = parts.clock_ns
        self._align_started: dict[CheckpointId, int] = {}
        self._frozen: SubtaskSnapshot | None = None

    def note_barrier(self, checkpoint: CheckpointId) -> None:
        """A barrier of ``checkpoint`` came, or was read."""
        if checkpoint > max(self._align_started, default=CheckpointId(0)):  # an older one may be read later
            self._align_started = {checkpoint: self._clock_ns()}

    def take(self, checkpoint: CheckpointId, options: CheckpointOptions) -> Durations:
        """The synchronous part: flush, then seal what the sinks were given, and take references."""
        assert self._frozen is None, "the snapshot before has been handed over to the writer"
        fault_points.reach("before-snapshot")
        begun_ns = self._clock_ns()
        self._chain.before_barrier()
        # What the flush sent stands in front of the barrier. From here to the barrier nothing may be processed or sent:
        # the frozen state, the positions and the sealed output are one cut.
        flushed_ns = self._clock_ns()
        plain = self._plain(checkpoint, options)
        # Sealed, not prepared: the target is asked in the upload thread, and nothing is visible before the manifest is
        # durable and the driver has committed.
        sealed = [(node, sink.seal(checkpoint)) for node, sink in self.sinks.items()]
        lists = self._listeners.snapshot(checkpoint)  # it may still change what the chain freezes
        savepoint = None if options.target is None else SavepointPart(options.target, self._copied(plain))
        others = {**lists, **self._chain.freeze_broadcast(is_own=options.alignment.may_overtake)}
        self._frozen = SubtaskSnapshot(checkpoint, self._chain.freeze(), plain, sealed, others, savepoint)
        if options.is_last:
            self._chain.set_stopping()
        align_us = (begun_ns - self._align_started.pop(checkpoint, begun_ns)) // 1000
        return Durations(align_us, (self._clock_ns() - flushed_ns) // 1000)

    def _plain(self, checkpoint: CheckpointId, options: CheckpointOptions) -> dict[str, bytes]:
        """Return the small sections."""
        vertex = self._chain.vertex
        flag = b"\x01" if self._machine.is_finished else b"\x00"
        plain: dict[str, bytes] = {f"{FINISHED_PREFIX}{node.name}": flag for node in vertex.nodes}
        if vertex.nest is not None:
            plain[f"{ROUNDS_PREFIX}{vertex.head.name}"] = msgspec.msgpack.encode(self._machine.rounds)
        if self._source is not None:
            positions = self._source.positions(checkpoint, is_last=options.is_last)
            plain[f"{POSITIONS_PREFIX}{vertex.head.name}"] = encode_positions(positions)
        return plain

    def _copied(self, plain: Mapping[str, bytes]) -> Mapping[str, bytes]:
        """Return the small sections of a snapshot as a savepoint has them (SV9)."""
        positions = None if self._source is None else self._source.unprocessed_from
        if positions is None:
            return plain
        return {**plain, f"{POSITIONS_PREFIX}{self._chain.vertex.head.name}": encode_positions(positions)}

    def hand_over(self) -> SubtaskSnapshot:
        """Return the snapshot, once."""
        assert self._frozen is not None, "a snapshot is handed over once"
        frozen, self._frozen = self._frozen, None
        return frozen

    def hand_over_with(self, recorded: ChannelState | None) -> SubtaskSnapshot:
        """Return the snapshot with its channel state."""
        frozen = self.hand_over()
        if recorded is None:
            return frozen
        return replace(frozen, lists={**frozen.lists, (IN_FLIGHT_PREFIX, self._vertex): recorded})

    def hand_over_empty(self) -> SubtaskSnapshot:
        """Release the state; return the sealed output alone, which the next snapshot prepares (UA10)."""
        frozen = self.hand_over()
        frozen.release()  # nothing is going to write it
        return replace(frozen, states={}, lists={})


ELEMENTS_PER_TURN_MAX = 16
"""Elements one subtask may process before the mailbox looks at the others: bounds a barrier's wait."""


def _has_marker(channel: ReceivingChannel) -> bool:
    return isinstance(channel, InputChannel) and channel.has_marker


class SubtaskRunner:
    """One subtask in its worker."""

    def __init__(self, parts: SubtaskParts) -> None:
        self.subtask = parts.subtask
        self.chain = parts.chain
        self._inputs = list(parts.inputs)
        self._input_names = [MAIN_INPUT] * len(self._inputs) if parts.input_names is None else list(parts.input_names)
        assert len(self._input_names) == len(self._inputs), "each channel belongs to an input of the operator"
        self.meter = InputMeter(self._inputs, parts.clock_ns)
        self._outlets = list(parts.outlets)
        source = SourceState.of(parts.reader, parts.mode, is_over=parts.is_draining)
        self._writer = parts.make_writer()
        self._reports = parts.reports
        # Feedback channels are the last ones, so a regular channel has the same index here, in the machine and in the
        # merger.
        regular_count = len(self._inputs) - (0 if parts.place is None else len(parts.place.feedback))
        self._machine = machine.Subtask(
            regular_count,
            is_restored_finished=parts.is_restored_finished,
            place=parts.place,
            rounds=parts.rounds,
            induced_from=None if source is None or source.markers is None else parts.first_checkpoint,
            alignment=parts.mode.alignment if parts.unaligned is None else Alignment.TIMED,
            is_immediate=parts.unaligned is not None and parts.unaligned.timeout_ms == 0,
            late=parts.late_inputs,
        )
        self._recorder = parts.recorder
        self._alignment_timer = AlignmentTimer(parts.unaligned, has_late_inputs=bool(parts.late_inputs))
        self._arriving = [channel for channel in self._inputs if isinstance(channel, InputChannel)]
        # a source has no channels: its merger is never given an event
        self._merger = WatermarkMerger(max(regular_count, 1))
        self._origins = [ChannelOrigin(ChannelIndex(index)) for index in range(regular_count)]
        self._nest = parts.chain.vertex.nest
        self._next_input = 0
        self._may_resume = parts.is_restored_finished
        self._listeners = parts.listeners or SubtaskListeners(parts.chain)
        self._snapshots = SnapshotTaker(parts, self._machine, source, self._listeners)
        self._source = None
        if source is not None:
            self._source = SourceRunner(source, parts, self._machine, self.handle, self._resume)
        place, rounds = parts.place, parts.rounds
        has_rounds = max(rounds.started, rounds.closed) >= 0  # they are about input that had ended
        self._entrances_closed = place.outside if place is not None and has_rounds else frozenset()
        self._clock_ns = parts.clock_ns
        self.held_back = HeldBack(parts.clock_ns)
        self._counted: dict[CheckpointId, Totals] = {}
        self._head = parts.chain.head.operator
        self._was_full = False
        self._held_ends: deque[ChannelIndex] = deque()

    # -- the mailbox's calls ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Announce the splits, or the channels, once, before the first step."""
        if self._source is None:
            self.chain.on_splits(self._origins)  # W17
        else:
            self._source.start()

    def _resume(self) -> None:
        """There is more input; if all had ended when the restored snapshot was taken, operators must know (T10)."""
        if self._may_resume:
            self._may_resume = False
            self.handle(machine.InputResumed())

    def drain(self) -> None:
        """Read nothing more: the source, if there is one, ends with the next step (E7)."""
        if self._source is not None:
            self._source.drain()

    def read_to(self, limit_ms: int) -> None:
        """Sources may read so far."""
        if self._source is not None:
            self._source.read_to(limit_ms)

    def share(self, splits: int, part: int) -> None:
        """All subtasks of the source read so many splits together, and may read ``part``."""
        if self._source is not None:
            self._source.share(splits, part)

    def announce(self, checkpoint: CheckpointId, options: CheckpointOptions) -> None:
        """A checkpoint has begun, and the coordinator's hooks are called: markers of it may come (EI20)."""
        if self._source is not None and self._source.sets_barriers:
            self._source.see_splits()
            self.handle(machine.CheckpointAnnounced(checkpoint, options))

    def trigger(self, checkpoint: CheckpointId, options: CheckpointOptions) -> None:
        """Have a source send its barrier now, unless it sets its barriers itself (T1, C47)."""
        if self._source is not None:
            self._source.see_splits()
        self.handle(machine.TriggerReceived(checkpoint, options))

    @property
    def is_source(self) -> bool:
        """Whether the coordinator triggers this subtask."""
        return self._source is not None

    def source_progress(self) -> SourceProgress | None:
        """Return how far its source was read; None: it has none."""
        return None if self._source is None else self._source.progress()

    @property
    def is_listening(self) -> bool:
        """Whether something of the user's hears of checkpoints."""
        return self._listeners.is_listening

    @property
    def can_send(self) -> bool:
        """Whether every outgoing channel has credit."""
        return all(outlet.can_send for outlet in self._outlets)

    def step(self) -> bool:
        """Process some input if there is any and the outputs have room; return whether anything was done."""
        may_send = self.can_send
        self._note_held_back(not may_send and self._has_work)
        if self._source is not None:
            return may_send and self._source.step()
        did = self._end_held()
        for _ in range(ELEMENTS_PER_TURN_MAX):
            # asked for each element, because each may use the credit up: then its results, and a barrier, still go out
            if not self.can_send or not self._step_input():
                break
            did = True
            if self._alignment_timer.is_interrupted:
                break
        return did

    def _note_held_back(self, is_held_back: bool) -> None:
        if is_held_back or self.held_back.lasts:
            self.held_back.note(is_held_back)
            for outlet in self._outlets:
                outlet.held_back.note(is_held_back and not outlet.can_send)

    @property
    def _has_work(self) -> bool:
        """Whether it would process something if the channels out of it had room; a source always would."""
        if self._source is not None:
            return not self._source.has_ended and not self._machine.is_suspended
        return self._recorder.is_replaying or any(len(c) and not c.is_blocked for c in self._inputs)

    @property
    def outlets(self) -> Sequence[EdgeOutlet]:
        """The edges that leave it."""
        return self._outlets

    @property
    def queued(self) -> tuple[int, int]:
        """How many elements wait on its inputs, set aside or not, and how many bytes their records have."""
        return sum(len(c) for c in self._inputs), sum(c.size_bytes for c in self._inputs)

    def note_arrivals(self) -> None:
        """Tell the machine of barriers and cancel markers that came, however much stands in front of them (UA4)."""
        for index, channel in enumerate(self._arriving):
            while (marker := channel.arrived()) is not None:
                if isinstance(marker, Barrier):
                    self._note_barrier(marker.checkpoint)
                    self.handle(unaligned.BarrierArrived(ChannelIndex(index), marker.checkpoint, marker.options))
                else:
                    self.handle(unaligned.CancelArrived(ChannelIndex(index), marker.checkpoint))

    @property
    def deadline_ms(self) -> int | None:
        """When it goes over unless it has aligned before (UA6); None: it does not align."""
        return self._alignment_timer.deadline_ms

    def note_trigger(self, checkpoint: CheckpointId) -> None:
        """The driver has triggered ``checkpoint``: its barriers are on their way."""
        self._alignment_timer.triggered(checkpoint)

    def tick(self, now_ms: int) -> None:
        """Let operators act on processing time; not after the end of a source, where only barriers may follow."""
        timed_out = self._alignment_timer.timed_out(now_ms)
        if timed_out is not None:
            self.handle(unaligned.AlignmentTimedOut(timed_out))
        if self._source is not None:
            self._source.tick(now_ms)
        if self.can_send and not self._has_ended:
            self.chain.tick(now_ms)

    @property
    def _has_ended(self) -> bool:
        return self._source is not None and self._source.has_ended

    def wakeup_ms(self, now_ms: int) -> int | None:
        """Return how long the mailbox may sleep for the sake of this subtask's source and timers, or None.

        Without credit it can do nothing but go over, however much is due: credit wakes the mailbox.
        """
        deadline_ms = self._alignment_timer.deadline_ms
        waits_ms = [] if deadline_ms is None else [max(deadline_ms - now_ms, 0)]
        if self.can_send and not self._has_ended:
            due_ms = self.chain.next_tick_ms()
            waits_ms += [] if due_ms is None else [max(due_ms - now_ms, 0)]
            if (self._was_full and not self._head.is_full) or (self._held_ends and not self._head.is_waiting):
                waits_ms.append(0)
            read_ms = None if self._source is None else self._source.wakeup_ms()
            waits_ms += [] if read_ms is None else [read_ms]
        return min(waits_ms, default=None)

    def handle(self, event: machine.Event, text: str = "") -> None:
        """Give the machine an event from the coordinator or from the snapshot writer; carry out its effects."""
        if isinstance(event, machine.CompleteReceived) and self._source is not None:
            self._source.completed(event.checkpoint)
        for effect in self._machine.handle(event):
            # strictly in the order of the list: the machine relies on snapshot before barrier, and cancel before
            # decline
            self._run(effect, text)
        match event:  # whether or not it has finished
            case alignment.AbortReceived():
                self._counted.pop(event.checkpoint, None)
                self._listeners.aborted(event.checkpoint)
            case machine.CompleteReceived():
                self._writer.completed(event.checkpoint)
                self._listeners.completed(event.checkpoint)

    def close(self) -> None:
        """Release everything; never commits or aborts prepared output."""
        readers = () if self._source is None else (self._source,)
        close_all(one.close for one in (self._writer, *readers, *self._snapshots.sinks.values(), self.chain))

    # -- input --------------------------------------------------------------------------------------------------

    def _step_input(self) -> bool:
        self._was_full = self._head.is_full
        # Restored records in flight come first: they were sent before anything that is in the queues now. Without room
        # in the operator only a barrier may still drive them on, so that no checkpoint waits for it.
        if self._recorder.is_replaying and (not self._was_full or any(map(_has_marker, self._inputs))):
            return self._replay_next()
        if self._recorder.is_replaying:
            return False
        # regular channels only (a loop head reads its feedback itself), beginning after the one read last: a busy
        # channel starves none
        count = len(self._origins)
        for offset in range(count):
            index = (self._next_input + offset) % count
            if self._was_full and not _has_marker(self._inputs[index]):
                continue  # a barrier does not wait: what is in front of it goes into the state
            element = self._inputs[index].poll()
            if element is not None:
                self._next_input = (index + 1) % count
                self._on_element(ChannelIndex(index), element)
                return True
        return False

    def _replay_next(self) -> bool:
        restored = self._recorder.next()
        if restored is not None:
            self._on_batch(*restored)
        return True

    def _on_batch(self, channel: ChannelIndex, batch: pa.RecordBatch) -> None:
        self._resume()
        if channel in self._entrances_closed:
            raise UsageError(
                f"more input came to loop '{self._nest}' after its input had ended and its rounds had begun, "
                "so there is no round that it could belong to; take the added input away until the loop has "
                "ended, or run the pipeline under a new name"
            )
        self.chain.set_origin(self._origins[channel])
        self.meter.work(channel, partial(self.chain.head.process, batch, self._input_names[channel]))

    def _on_element(self, channel: ChannelIndex, element: Element) -> None:
        match element:
            case BatchElement():
                self._on_batch(channel, element.batch)
            case Watermark():
                self._merge(WatermarkReceived(channel, element.watermark_ms))
            case Idle():
                self._merge(IdleReceived(channel, element.is_idle))
            case Barrier():
                self._note_barrier(element.checkpoint)
                self.handle(alignment.BarrierReceived(channel, element.checkpoint, element.options))
            case Cancel():
                self.handle(alignment.CancelReceived(channel, element.checkpoint))
            case EndOfData():
                # queued even if it may end at once: an end that waits already must not be passed
                self._held_ends.append(channel)
                self._end_held()
            case Probe():
                self.handle(ProbeReceived(channel, element))
            case _:
                assert_never(element)

    def _end_held(self) -> bool:
        """Let the inputs end that have, once the operator has all answers; return whether any did."""
        did = False
        while self._held_ends and not self._head.is_waiting:
            did, channel = True, self._held_ends.popleft()
            self.chain.on_split_finished(self._origins[channel])  # W5
            # event time before the machine: the end of the last channel finishes the operators
            self._merge(InputEnded(channel))
            self.handle(machine.EndReceived(channel))
        return did

    def _merge(self, event: MergerEvent) -> None:
        """Event time of one input changed: pass on what that means for all of them."""
        for effect in self._merger.handle(event):
            match effect:
                case EmitWatermark():
                    self.chain.advance(effect.watermark_ms)
                case EmitIdle():
                    self.chain.head.operator.on_idle(effect.is_idle)

    # -- effects ------------------------------------------------------------------------------------------------

    def _run(self, effect: machine.Effect, text: str) -> None:
        match effect:
            case alignment.BlockChannel():
                # aligning begins, or goes on: what follows the barrier on this channel stays in its queue until the
                # others have it
                assert not self._inputs[effect.channel].is_blocked, "a barrier was read from a blocked channel"
                self._inputs[effect.channel].block()
            case alignment.UnblockChannels():
                for channel in effect.channels:
                    self._inputs[channel].unblock()
            case externally_induced.ReadOn():
                assert self._source is not None, "only sources meet markers"
                self._source.read_on(effect.splits)
            case alignment.TakeSnapshot():
                self._take_snapshot(effect.checkpoint, options=effect.options)
            case alignment.EmitBarrier():
                self._emit_barrier(effect)
            case alignment.EmitCancel():
                for outlet in self._outlets:
                    outlet.send_element(Cancel(effect.checkpoint))
            case alignment.Decline():
                self._reports.decline(self.subtask, effect.checkpoint, effect.reason, text)
            case machine.Acknowledge():
                assert effect.entry.subtask == self.subtask, "a subtask acknowledges its own snapshot"
                # The subtask's part is durable. Its totals are of the barrier, not of now: they were counted with the
                # snapshot.
                delays = self._alignment_timer.taken(effect.checkpoint)
                counted = self._counted.pop(effect.checkpoint, {})
                entry = replace(effect.entry, delays=delays, totals=counted)
                self._reports.acknowledge(effect.checkpoint, entry, effect.copied)
            case unaligned.ArmAlignmentTimer():
                self._alignment_timer.arm(effect.checkpoint)
            case unaligned.RecordChannels():
                for channel in effect.channels:
                    # copied, not taken: they are processed in their turn as well, after the snapshot
                    waiting = self._arriving[channel].waiting_before(effect.checkpoint)
                    self._recorder.record(channel, [element.batch for element in waiting])
            case unaligned.AllRecorded():
                self._write_recorded()
            case unaligned.DropRecording():
                self._drop_recording(effect.checkpoint)
            case machine.CancelWrite():
                self._writer.cancel(effect.checkpoint)
            case machine.FinishOperators():
                self.chain.finish()
            case machine.ResumeOperators():
                self.chain.resume()
            case machine.EmitEnd():
                for outlet in self._outlets:
                    outlet.send_element(EndOfData())
            case machine.ReportFinished():
                self._reports.finished(self.subtask)
            case loop_prober.PassProbe():
                self._pass_probe(effect.probe)
            case loop_prober.CloseRound():
                assert self._nest is not None, "only loops have rounds"
                self.chain.on_round(effect.round_, self._nest)
            case loops.ReportEntranceEnded():
                self._reports.entrance_ended(self.subtask, effect)
            case loops.ReportProbe():
                self._reports.probe_returned(self.subtask, effect)
            case Ignored():
                return
            case _:
                raise AssertionError(f"only loop heads are given {effect}")

    def _pass_probe(self, probe: Probe) -> None:
        """Send a probe after everything that operators hold back (L27); it does not leave its nest."""
        self.chain.before_barrier()
        for outlet in self._outlets:
            if outlet.edge.nest is not None:
                outlet.send_element(probe)

    def _note_barrier(self, checkpoint: CheckpointId) -> None:
        self._snapshots.note_barrier(checkpoint)
        self._alignment_timer.arrived(checkpoint)

    def _take_snapshot(self, checkpoint: CheckpointId, *, options: CheckpointOptions) -> None:
        """The synchronous part, from here to the barrier."""
        took = self._snapshots.take(checkpoint, options)
        self._counted[checkpoint] = self.chain.counted()  # OM1: what came before the barrier, and nothing else
        self._alignment_timer.frozen(checkpoint)
        self._reports.snapshot_taken(self.subtask, checkpoint, took.align_us, took.freeze_us)

    def _emit_barrier(self, effect: alignment.EmitBarrier) -> None:
        """Barrier first, then the write: the barrier is on the critical path of everybody downstream.

        It needs no credit, here or anywhere. On a feedback edge it is the sentinel.
        """
        for outlet in self._outlets:
            outlet.send_element(Barrier(effect.checkpoint, effect.options))
        if effect.options.alignment is Alignment.OVERTAKING:
            fault_points.reach("overtook")
            # before RecordChannels, which comes with the next effects: what was left of a replay stands in front of the
            # queues
            self._recorder.begin()
            return  # not before all is recorded (UA8)
        self._begin_write(self._snapshots.hand_over())

    def _write_recorded(self) -> None:
        """The snapshot is whole: before that nothing of it is durable."""
        self._begin_write(self._snapshots.hand_over_with(self._recorder.take_recorded()))

    def _drop_recording(self, checkpoint: CheckpointId) -> None:
        """Forget the state and what was recorded; the writer keeps the sealed output for the next snapshot (UA10)."""
        self._recorder.drop()
        self._writer.cancel(checkpoint)
        self._begin_write(self._snapshots.hand_over_empty())

    def _begin_write(self, frozen: SubtaskSnapshot) -> None:
        self._writer.start(frozen)
