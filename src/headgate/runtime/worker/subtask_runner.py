"""Runs one subtask: reads its inputs or its source, calls its chain, and carries out what its machine orders.

Everything here happens in the mailbox thread. Decisions about checkpoints are the machine's; this module only maps
elements to events and effects to calls (walks: ARCHITECTURE.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import assert_never

import msgspec
import pyarrow as pa

from headgate import fault_points
from headgate.codec.frames import Barrier, BatchElement, Cancel, Element, EndOfData, Idle, Watermark
from headgate.codec.snapshot import FINISHED_PREFIX, IN_FLIGHT_PREFIX, POSITIONS_PREFIX, ROUNDS_PREFIX
from headgate.connectors.base import SourceBatch
from headgate.connectors.induced import CheckpointMarker
from headgate.errors import UsageError
from headgate.model.graph import MAIN_INPUT
from headgate.model.ids import ChannelIndex, CheckpointId
from headgate.model.manifest import SubtaskEntry
from headgate.model.options import Alignment, CheckpointOptions
from headgate.protocol.loops.rounds import Probe, ProbeReceived
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
from headgate.runtime.checkpoints.uploads import FrozenSubtask, SavepointPart
from headgate.runtime.wire.channels import InputChannel
from headgate.runtime.worker.hooks import Hooks
from headgate.runtime.worker.overtaking import Delays, Overtaking
from headgate.runtime.worker.sources import MarkerReports, Source
from headgate.runtime.worker.subtask_parts import SubtaskParts

ELEMENTS_PER_TURN_MAX = 16
"""Elements one subtask may process before the mailbox looks at the others: bounds a barrier's wait (C48)."""


class SubtaskRunner:
    """One subtask in its worker."""

    def __init__(self, parts: SubtaskParts) -> None:
        self.subtask = parts.subtask
        self.chain = parts.chain
        self._inputs = list(parts.inputs)
        self._input_names = [MAIN_INPUT] * len(self._inputs) if parts.input_names is None else list(parts.input_names)
        self._outlets = list(parts.outlets)
        self._sinks = dict(parts.sinks)
        self._source = Source.of(parts.reader, parts.mode, is_over=parts.is_draining)
        self._marker_reports = MarkerReports(parts.reads_on_ms) if self._sets_barriers else None
        self._writer = parts.make_writer()
        self._reports = parts.reports
        regular_count = len(self._inputs) - (0 if parts.place is None else len(parts.place.feedback))
        self._machine = machine.Subtask(
            regular_count,
            is_restored_finished=parts.is_restored_finished,
            place=parts.place,
            rounds=parts.rounds,
            induced_from=parts.first_checkpoint if self._sets_barriers else None,
            alignment=parts.mode.alignment if parts.overtaking is None else Alignment.TIMED,
            is_immediate=parts.overtaking is not None and parts.overtaking.timeout_ms == 0,
            late=parts.late_inputs,
        )
        self._in_flight = parts.in_flight
        self._overtaking = parts.overtaking
        self._arriving = [channel for channel in self._inputs if isinstance(channel, InputChannel)]
        self._deadline: tuple[CheckpointId, int] | None = None
        self._has_late_inputs = bool(parts.late_inputs)
        self._delays = Delays()
        self._merger = WatermarkMerger(max(regular_count, 1))
        self._origins = [ChannelOrigin(ChannelIndex(index)) for index in range(regular_count)]
        self._nest = parts.chain.vertex.nest
        self._next_input = 0
        self._has_ended = False
        self._may_resume = parts.is_restored_finished
        self._hooks = parts.hooks or Hooks(parts.chain)
        place, rounds = parts.place, parts.rounds
        has_rounds = max(rounds.started, rounds.closed) >= 0  # L39: they are about input that had ended
        self._entrances_closed = place.outside if place is not None and has_rounds else frozenset()
        self._clock_ns = parts.clock_ns
        self._align_started: dict[CheckpointId, int] = {}
        self._frozen: FrozenSubtask | None = None

    # -- the mailbox's calls ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Announce the splits, or the channels, once, before the first step."""
        if self._source is None:
            self.chain.on_splits(self._origins)  # W17
        elif not self._source.is_over:
            if not self._source.reader.is_finished():
                self._resume()
            self._update_splits(self._source)
        self._see_splits()

    def _resume(self) -> None:
        """There is more input; if all had ended when the restored snapshot was taken, operators must know (T10)."""
        if self._may_resume:
            self._may_resume = False
            self.handle(machine.InputResumed())

    def drain(self) -> None:
        """Read nothing more: the source ends with the next step, and its positions stay where they are (E7, E8)."""
        if self._source is None:
            return
        if self._source.ahead is not None:
            self._source.ahead.end()
        else:
            self._source.is_over = True
        self._see_splits()  # EI26: no marker is met any more

    def announce(self, checkpoint: CheckpointId, options: CheckpointOptions) -> None:
        """A checkpoint has begun, and the coordinator's hooks are called: markers of it may come (EI20)."""
        if self._sets_barriers:
            self._see_splits()
            self.handle(machine.CheckpointAnnounced(checkpoint, options))

    def trigger(self, checkpoint: CheckpointId, options: CheckpointOptions) -> None:
        """Have a source send its barrier now, unless it sets its barriers itself (T1, C47)."""
        self._see_splits()
        self.handle(machine.TriggerReceived(checkpoint, options))

    @property
    def _sets_barriers(self) -> bool:
        return self._source is not None and self._source.markers is not None

    @property
    def is_source(self) -> bool:
        """Whether the coordinator triggers this subtask."""
        return self._source is not None

    @property
    def is_listening(self) -> bool:
        """Whether something of the user's hears of checkpoints."""
        return self._hooks.is_listening

    @property
    def can_send(self) -> bool:
        """Whether every outgoing channel has credit."""
        return all(outlet.can_send for outlet in self._outlets)

    def step(self) -> bool:
        """Process some input if there is any and the outputs have room; return whether anything was done."""
        if self._source is not None:
            return self._step_source(self._source)
        did = False
        for _ in range(ELEMENTS_PER_TURN_MAX):
            if not self.can_send or not self._step_input():
                break
            did = True
            if self._overtaking is not None and self._overtaking.is_interrupted():
                break
        return did

    def note_arrivals(self) -> None:
        """Tell the machine of barriers and cancel markers that came, however much stands in front of them (UA4)."""
        for index, channel in enumerate(self._arriving):
            while (marker := channel.arrived()) is not None:
                if isinstance(marker, Barrier):
                    self._note_barrier(marker.checkpoint)
                    self.handle(machine.BarrierArrived(ChannelIndex(index), marker.checkpoint, marker.options))
                else:
                    self.handle(machine.CancelArrived(ChannelIndex(index), marker.checkpoint))

    @property
    def deadline_ms(self) -> int | None:
        """When it goes over unless it has aligned before (UA6); None: it does not align."""
        return None if self._deadline is None else self._deadline[1]

    def note_trigger(self, checkpoint: CheckpointId) -> None:
        """The driver has triggered ``checkpoint``: its barriers are on their way (UA19)."""
        if self._overtaking is not None:
            self._delays.triggered(checkpoint, self._overtaking.clock_ms())

    def tick(self, now_ms: int) -> None:
        """Let operators act on processing time; not behind the end of a source, where only barriers may follow."""
        if self._deadline is not None and now_ms >= self._deadline[1]:
            (checkpoint, _), self._deadline = self._deadline, None
            self.handle(machine.AlignmentTimedOut(checkpoint))
        if self._marker_reports is not None:
            self._tell_reading(self._marker_reports, now_ms)
        if self.can_send and not self._has_ended:
            self.chain.tick(now_ms)

    def _tell_reading(self, reports: MarkerReports, now_ms: int) -> None:
        assert self._source is not None
        uncut = reports.due(self._machine.awaited_markers, self._source.read_count, now_ms)
        if uncut is not None:
            self._reports.reads_on(self.subtask, uncut)

    def wakeup_ms(self, now_ms: int) -> int | None:
        """Return how long the mailbox may sleep for the sake of this subtask's source and timers, or None.

        Without credit it can do nothing but go over, however much is due: credit wakes the mailbox.
        """
        waits_ms = [] if self._deadline is None else [max(self._deadline[1] - now_ms, 0)]
        if not self.can_send or self._has_ended:
            return min(waits_ms, default=None)
        due_ms = self.chain.next_tick_ms()
        waits_ms += [] if due_ms is None else [max(due_ms - now_ms, 0)]
        if self._source is not None and not self._machine.is_suspended and not self._stands_still(self._source):
            waits_ms.append(self._source.reader.wakeup_ms())
        return min(waits_ms, default=None)

    def handle(self, event: machine.Event, text: str = "") -> None:
        """Give the machine an event from the coordinator or from the snapshot writer; carry out its effects."""
        if isinstance(event, machine.CompleteReceived) and self._source is not None and self._source.ahead is not None:
            self._source.ahead.completed(event.checkpoint)
        for effect in self._machine.handle(event):
            self._run(effect, text)
        match event:  # HL9: whether or not it has finished
            case machine.CompleteReceived():
                self._hooks.completed(event.checkpoint)
            case machine.AbortReceived():
                self._hooks.aborted(event.checkpoint)

    def close(self) -> None:
        """Release everything; never commits or aborts prepared output."""
        self._writer.close()
        if self._source is not None:
            self._source.reader.close()
        for sink in self._sinks.values():
            sink.close()
        self.chain.close()

    # -- input --------------------------------------------------------------------------------------------------

    def _step_source(self, source: Source) -> bool:
        if self._has_ended or self._machine.is_suspended or not self.can_send:
            return False
        polled = source.poll()
        if isinstance(polled, CheckpointMarker):
            self._meet(source, polled)
            return True
        if polled is not None:
            self._process_polled(source, polled)
            return True
        if not source.is_over:
            self._update_splits(source)
            if not source.reader.is_finished():
                self._see_splits()
                return False
        self._has_ended = True
        self.handle(machine.SourceEnded())
        self._see_splits()  # behind the end of data: a source at its end counts as cut (EI25)
        return True

    def _meet(self, source: Source, marker: CheckpointMarker) -> None:
        """The reader stands behind a marker; it goes on when the machine says so (EI21)."""
        self._see_splits()
        if source.check_marker(marker, self._machine.held_splits, str(self.chain.vertex.head.name)):
            self.handle(machine.MarkerMet(marker.split, CheckpointId(marker.checkpoint_id)))

    def _see_splits(self) -> None:
        """Tell the machine of a source that sets its barriers which splits may still bring one, if that changed."""
        source = self._source
        if source is None or source.markers is None:
            return
        now = machine.SplitsSeen(()) if self._has_ended else source.splits_now()
        if now != source.seen:
            source.seen = now
            self.handle(now)

    def _stands_still(self, source: Source) -> bool:
        """Whether nothing can be read before a message comes: every split stands behind its marker."""
        held = self._machine.held_splits
        return bool(held) and set(source.seen.splits) <= set(held)

    def _process_polled(self, source: Source, polled: SourceBatch) -> None:
        source.check_records(polled, self._machine.held_splits, str(self.chain.vertex.head.name))
        self._resume()
        if polled.split not in source.splits:
            self._update_splits(source, polled.split)
        self.chain.set_origin(polled.split)
        if polled.bad is not None:
            self.chain.head.output.divert(polled.bad)
        if polled.batch.num_rows:
            self.chain.head.process(polled.batch)
        if polled.is_split_finished:
            source.finished_splits.add(polled.split)
            self.chain.on_split_finished(polled.split)
            self._see_splits()

    def _update_splits(self, source: Source, also: str | None = None) -> None:
        owned = tuple(source.reader.splits())
        if also is not None and also not in owned:
            owned = (*owned, also)
        if owned != source.splits:
            source.splits = owned
            self.chain.on_splits(owned)

    def _step_input(self) -> bool:
        if self._in_flight.is_replaying:  # UA12
            return self._replay_next()
        count = len(self._origins)
        for offset in range(count):
            index = (self._next_input + offset) % count
            element = self._inputs[index].poll()
            if element is not None:
                self._next_input = (index + 1) % count
                self._on_element(ChannelIndex(index), element)
                return True
        return False

    def _replay_next(self) -> bool:
        restored = self._in_flight.next()
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
        self.chain.head.process(batch, self._input_names[channel])

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
                self.handle(machine.BarrierReceived(channel, element.checkpoint, element.options))
            case Cancel():
                self.handle(machine.CancelReceived(channel, element.checkpoint))
            case EndOfData():
                self.chain.on_split_finished(self._origins[channel])  # W5
                self._merge(InputEnded(channel))
                self.handle(machine.EndReceived(channel))
            case Probe():
                self.handle(ProbeReceived(channel, element))
            case _:
                assert_never(element)

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
            case machine.BlockChannel():
                self._inputs[effect.channel].block()
            case machine.UnblockChannels():
                for channel in effect.channels:
                    self._inputs[channel].unblock()
            case machine.ReadOn():
                assert self._source is not None
                assert self._source.markers is not None
                self._source.markers.read_on(effect.splits)
            case machine.TakeSnapshot():
                self._take_snapshot(effect.checkpoint, options=effect.options)
            case machine.EmitBarrier():
                self._emit_barrier(effect)
            case machine.EmitCancel():
                for outlet in self._outlets:
                    outlet.send_element(Cancel(effect.checkpoint))
            case machine.Decline():
                self._reports.decline(self.subtask, effect.checkpoint, effect.reason, text)
            case machine.Acknowledge():
                delays = self._delays.taken(effect.checkpoint) if self._overtaking is not None else None
                entry = SubtaskEntry(self.subtask, effect.parts, effect.committables, delays)
                self._reports.acknowledge(effect.checkpoint, entry, effect.copied)
            case machine.ArmAlignmentTimer():
                assert self._overtaking is not None
                self._deadline = effect.checkpoint, self._deadline_of(effect.checkpoint, self._overtaking)
            case machine.RecordChannels():
                for channel in effect.channels:
                    waiting = self._arriving[channel].waiting_before(effect.checkpoint)
                    self._in_flight.record(channel, [element.batch for element in waiting])
            case machine.AllRecorded():
                self._write_recorded()
            case machine.DropRecording():
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
            case machine.PassProbe():
                self._pass_probe(effect.probe)
            case machine.CloseRound():
                assert self._nest is not None
                self.chain.on_round(effect.round_, self._nest)
            case machine.ReportEntranceEnded():
                self._reports.entrance_ended(self.subtask, effect)
            case machine.ReportProbe():
                self._reports.probe_returned(self.subtask, effect)
            case machine.Ignored():
                return
            case _:
                raise AssertionError(f"only loop heads are given {effect}")

    def _deadline_of(self, checkpoint: CheckpointId, overtaking: Overtaking) -> int:
        """Return when barriers of ``checkpoint`` overtake, by this worker's clock alone (UA6, UA20)."""
        now_ms = overtaking.clock_ms()
        begun_ms = now_ms if self._has_late_inputs else self._delays.begun_ms(checkpoint, now_ms)
        return begun_ms + overtaking.timeout_ms

    def _pass_probe(self, probe: Probe) -> None:
        """Send a probe behind everything that operators hold back (L27); it does not leave its nest (L32)."""
        self.chain.before_barrier()
        for outlet in self._outlets:
            if outlet.edge.nest is not None:
                outlet.send_element(probe)

    def _note_barrier(self, checkpoint: CheckpointId) -> None:
        if checkpoint > max(self._align_started, default=CheckpointId(0)):  # an older one may be read later
            self._align_started = {checkpoint: self._clock_ns()}
        if self._overtaking is not None:
            self._delays.arrived(checkpoint, self._overtaking.clock_ms())

    def _take_snapshot(self, checkpoint: CheckpointId, *, options: CheckpointOptions) -> None:
        """The synchronous part: flush (U8), then seal what the sinks were given, and take references (ST5)."""
        fault_points.reach("before-snapshot")
        begun_ns = self._clock_ns()
        self.chain.before_barrier()
        flushed_ns = self._clock_ns()
        flag = b"\x01" if self._machine.is_finished else b"\x00"
        plain: dict[str, bytes] = {f"{FINISHED_PREFIX}{node.name}": flag for node in self.chain.vertex.nodes}
        if self._nest is not None:
            plain[f"{ROUNDS_PREFIX}{self.chain.vertex.head.name}"] = msgspec.msgpack.encode(self._machine.rounds)
        if self._source is not None:
            section = f"{POSITIONS_PREFIX}{self.chain.vertex.head.name}"
            plain[section] = msgspec.msgpack.encode(self._source.positions(checkpoint, is_last=options.is_last))
        sealed = [(node, sink.seal(checkpoint)) for node, sink in self._sinks.items()]
        lists = self._hooks.snapshot(checkpoint)  # HL11: it may still change what the chain freezes
        savepoint = None if options.target is None else SavepointPart(options.target, self._copied(plain))
        self._frozen = FrozenSubtask(checkpoint, self.chain.freeze(), plain, sealed, lists, savepoint)
        if options.is_last:
            self.chain.set_stopping()
        if self._overtaking is not None:
            self._delays.frozen(checkpoint, self._overtaking.clock_ms())
        align_us = (begun_ns - self._align_started.pop(checkpoint, begun_ns)) // 1000
        freeze_us = (self._clock_ns() - flushed_ns) // 1000
        self._reports.snapshot_taken(self.subtask, checkpoint, align_us, freeze_us)

    def _copied(self, plain: Mapping[str, bytes]) -> Mapping[str, bytes]:
        """Return the small sections of a snapshot as a savepoint has them (SV9)."""
        positions = None if self._source is None else self._source.unprocessed_from
        if positions is None:
            return plain
        return {**plain, f"{POSITIONS_PREFIX}{self.chain.vertex.head.name}": msgspec.msgpack.encode(positions)}

    def _emit_barrier(self, effect: machine.EmitBarrier) -> None:
        """Barrier first, then the write: the barrier is on the critical path of everybody downstream.

        It needs no credit, here or anywhere (UA9). On a feedback edge it is the sentinel (L8).
        """
        for outlet in self._outlets:
            outlet.send_element(Barrier(effect.checkpoint, effect.options))
        if effect.options.alignment is Alignment.OVERTAKING:
            fault_points.reach("overtook")
            self._in_flight.begin()
            return  # not before all is recorded (UA8)
        self._begin_write(self._thawed())

    def _thawed(self) -> FrozenSubtask:
        assert self._frozen is not None
        frozen, self._frozen = self._frozen, None
        return frozen

    def _write_recorded(self) -> None:
        """The snapshot is whole: before that nothing of it is durable (UA11)."""
        frozen, recorded = self._thawed(), self._in_flight.taken()
        if recorded is not None:
            frozen = replace(frozen, lists={**frozen.lists, (IN_FLIGHT_PREFIX, str(self.subtask.vertex)): recorded})
        self._begin_write(frozen)

    def _drop_recording(self, checkpoint: CheckpointId) -> None:
        """Forget the state and what was recorded; the writer keeps the sealed output for the next snapshot (UA10)."""
        self._in_flight.drop()
        self._writer.cancel(checkpoint)
        frozen = self._thawed()
        frozen.release()  # U6
        self._begin_write(replace(frozen, states={}, lists={}))

    def _begin_write(self, frozen: FrozenSubtask) -> None:
        self._writer.start(frozen)
