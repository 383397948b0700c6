"""Runs the head of a loop: replay first, feedback in turns with regular input, and the log of what came back.

Decisions are those of ``protocol.subtasks.subtask`` with its ``LoopHead`` and ``LoopPart``; here are queues, throttling
and the log's memory (rules L17–L26 of docs/spec/loops.md). Counterparts: ``runtime.wire.feedback`` (the queues),
``runtime.worker.loop_log`` (the log), the driver's ``runtime.driver.looping``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import pyarrow as pa

from headgate import fault_points
from headgate.codec.frames import Barrier, BatchElement, Cancel, Element, EndOfData, Idle, Watermark
from headgate.errors import UsageError
from headgate.model.ids import ChannelIndex, CheckpointId, NodeName
from headgate.model.progress import LoopProgress
from headgate.operators.base import WATERMARK_MAX_MS
from headgate.operators.loop_head import LoopHeadOperator
from headgate.protocol.loops.rounds import Probe, ProbeReceived
from headgate.protocol.subtasks import subtask as machine
from headgate.protocol.watermarks import MergerEvent
from headgate.runtime.checkpoints.uploads import FrozenSubtask
from headgate.runtime.wire.feedback import FeedbackChannel, Waiting
from headgate.runtime.worker.loop_log import LoopLog
from headgate.runtime.worker.subtask_parts import SubtaskParts
from headgate.runtime.worker.subtask_runner import SubtaskRunner


@dataclass(slots=True)
class LoopState:
    """What a loop head has beside an ordinary subtask.

    Attributes:
        operator: the live head operator of the chain.
        log: of what came back.
        replay: the restored log.
        high_water_bytes: queued feedback above which regular input waits (L25).
    """

    operator: LoopHeadOperator
    log: LoopLog
    replay: Iterator[pa.RecordBatch]
    high_water_bytes: int


class LoopHeadRunner(SubtaskRunner):
    """One head subtask in its worker."""

    def __init__(self, parts: SubtaskParts, loop: LoopState) -> None:
        super().__init__(parts)
        self._loop = loop
        regular_count = len(self._origins)
        self._feedback = [channel for channel in self._inputs[regular_count:] if isinstance(channel, FeedbackChannel)]
        self._first_feedback = regular_count
        self._is_replaying = True
        self._turn = [0] * len(self._feedback)
        self._next_feedback = 0
        self._expected: set[CheckpointId] = set()
        self._last_snapshot = CheckpointId(0)
        self._is_end_out = False
        self._waiting: dict[CheckpointId, FrozenSubtask] = {}
        self._released: set[CheckpointId] = set()
        self._came_back = 0
        self._throttled_since_ns = 0
        self._throttled_ns = 0
        self._opened: dict[CheckpointId, int] = {}
        self._trip_ns = 0

    @property
    def queued_bytes(self) -> int:
        """Feedback that waits, in memory and on disk."""
        return sum(channel.size_bytes for channel in self._feedback)

    def progress(self) -> LoopProgress:
        """Return what this head measured."""
        metrics = [channel.metrics for channel in self._feedback]
        return LoopProgress(
            NodeName(str(self.subtask.vertex)),
            queued_batches=sum(m.elements for m in metrics),
            queued_bytes=sum(m.size_bytes for m in metrics),
            queued_bytes_max=sum(m.size_bytes_max for m in metrics),
            spilled_bytes=sum(m.spilled_bytes for m in metrics),
            log_bytes=self._loop.log.memory_bytes + self._loop.log.spilled_bytes,
            held_channels=sum(channel.is_blocked for channel in self._feedback),
            came_back=self._came_back,
            throttled_ms=self._throttled_ns // 1_000_000,
            trip_ms=self._trip_ns // 1_000_000,
            round_=self._machine.rounds.started,
        )

    def expect(self, checkpoint: CheckpointId) -> None:
        """A checkpoint was triggered: its barrier must not wait behind throttled input (L25).

        The barrier may have been quicker than the message.
        """
        if checkpoint > self._last_snapshot:
            self._expected.add(checkpoint)
            self._turn = [min(left, 1) for left in self._turn]  # a long queue delays no barrier (L24)

    def handle(self, event: machine.Event, text: str = "") -> None:
        """See ``SubtaskRunner``."""
        if isinstance(event, machine.AbortReceived):
            self._expected.discard(event.checkpoint)
        super().handle(event, text)

    def close(self) -> None:
        """See ``SubtaskRunner``."""
        try:
            super().close()
        finally:
            self._loop.log.close()

    # -- input --------------------------------------------------------------------------------------------------

    def _step_input(self) -> bool:
        if self._is_replaying:
            return self._replay_next()  # L17, L18: nothing else is read before
        self._log_what_waits()
        if self._read_feedback():  # L23
            return True
        # L24: a turn is over; one regular element, then what has come back by now
        self._turn = [0 if channel.is_blocked else len(channel) for channel in self._feedback]
        if self._expected:
            self._turn = [min(left, 1) for left in self._turn]
        if not self._is_throttled() and super()._step_input():
            return True
        return self._read_feedback()

    def _is_throttled(self) -> bool:
        """Whether regular input waits for the loop to drain (L25)."""
        is_throttled = not self._expected and self.queued_bytes > self._loop.high_water_bytes
        now_ns = self._clock_ns()
        if self._throttled_since_ns:
            self._throttled_ns += now_ns - self._throttled_since_ns
        self._throttled_since_ns = now_ns if is_throttled else 0
        return is_throttled

    def _replay_next(self) -> bool:
        fault_points.reach("in-replay")
        batch = next(self._loop.replay, None)
        if batch is None:
            self._is_replaying = False
            return True
        self._forward(batch, self._loop.operator.highest_round(batch))
        return True

    def _read_feedback(self) -> bool:
        """Process the next element of this turn that came back, or batches that were merged; False: there is none."""
        count = len(self._feedback)
        for offset in range(count):
            at = (self._next_feedback + offset) % count
            if not self._turn[at]:
                continue
            channel = self._feedback[at]
            taken_before = channel.taken_total
            element = channel.poll()
            if element is None:  # it is held since the turn began: its share would delay the barrier that it waits for
                self._turn[at] = 0
                continue
            self._turn[at] = max(self._turn[at] - (channel.taken_total - taken_before), 0)
            self._next_feedback = (at + 1) % count
            index = ChannelIndex(self._first_feedback + at)
            if isinstance(element, BatchElement):
                self.meter.work(index, partial(self._on_feedback, index, element.batch))
            else:
                self._on_feedback_control(index, element)
            return True
        return False

    def _log_what_waits(self) -> None:
        """Complete open logs whose sentinels wait in the queue: a long queue delays no checkpoint (L41)."""
        if not self._opened:
            return
        for at, channel in enumerate(self._feedback):
            index = ChannelIndex(self._first_feedback + at)
            for checkpoint in sorted(self._opened.keys() & channel.waiting_sentinels):
                waiting = channel.take_sentinels(checkpoint)
                if waiting is None:
                    break  # the loop has ended: what little waits is read in order
                self._turn[at] = min(self._turn[at], len(channel))
                self._log_waiting(checkpoint, waiting)
                for sentinel in waiting.sentinels:
                    self.handle(machine.BarrierReceived(index, sentinel.checkpoint, sentinel.options))

    def _log_waiting(self, checkpoint: CheckpointId, waiting: Waiting) -> None:
        log, operator = self._loop.log, self._loop.operator
        for one in waiting.batches:
            if isinstance(one, BatchElement):
                log.append(operator.returning(one.batch)[0], [checkpoint])
            elif operator.counts_rounds:  # it is logged as it will be processed
                log.append(operator.returning(waiting.file.read(one))[0], [checkpoint])
                waiting.file.free(one)
            else:
                log.append_spilled(one, waiting.file, checkpoint)

    def _on_feedback(self, channel: ChannelIndex, came_back: pa.RecordBatch) -> None:
        batch, round_ = self._loop.operator.returning(came_back)
        if batch.num_rows == 0:  # L38
            return
        if self._is_end_out:
            raise UsageError(
                f"loop '{self.subtask.vertex}': {batch.num_rows} records came back after the loop had ended, so they "
                "cannot go round any more; an operator of its body sends them in finish(), where nothing may be fed "
                "back: let it send them because of a record, of the last watermark, or of the end of a round"
            )
        self._resume()
        for effect in self._machine.handle(machine.FeedbackReceived(channel)):
            match effect:
                case machine.LogFeedback():
                    self._loop.log.append(batch, effect.checkpoints)
                case machine.ForwardFeedback():
                    self._forward(batch, round_)
                case _:
                    self._run(effect, "")

    def _forward(self, batch: pa.RecordBatch, round_: int) -> None:
        self._came_back += batch.num_rows
        self.handle(machine.FeedbackForwarded(round_))
        self.chain.set_origin("feedback")
        self.chain.head.reenter(batch, self._loop.operator.forward)

    def _on_feedback_control(self, channel: ChannelIndex, element: Element) -> None:
        match element:
            case Barrier():
                self.handle(machine.BarrierReceived(channel, element.checkpoint, element.options))
            case Cancel():
                self.handle(machine.CancelReceived(channel, element.checkpoint))
            case EndOfData():
                self.handle(machine.EndReceived(channel))
            case Probe():
                self.handle(ProbeReceived(channel, element))
            case Watermark() | Idle():
                return  # L37: event time does not go round
            case BatchElement():
                raise AssertionError("records are not control")

    def _merge(self, event: MergerEvent) -> None:
        """Event time waits at the head until the loop is empty (L37)."""

    # -- effects ------------------------------------------------------------------------------------------------

    def _run(self, effect: machine.Effect, text: str) -> None:
        match effect:
            case machine.OpenLog():
                fault_points.reach("log-opened")
                self._opened[effect.checkpoint] = self._clock_ns()
                self._loop.log.open(effect.checkpoint)
            case machine.SealLog():
                self._seal(effect.checkpoint)
            case machine.DropLog():
                self._drop(effect.checkpoint)
            case machine.AdvanceToEnd():
                self.chain.advance(WATERMARK_MAX_MS)
            case machine.TakeSnapshot() | machine.EmitCancel():
                self._last_snapshot = max(self._last_snapshot, effect.checkpoint)
                self._expected = {c for c in self._expected if c > effect.checkpoint}
                super()._run(effect, text)
            case machine.EmitEnd():
                self._is_end_out = True
                super()._run(effect, text)
            case _:
                super()._run(effect, text)

    def _begin_write(self, frozen: FrozenSubtask) -> None:
        """Not before the log is sealed (L4)."""
        self._waiting[frozen.checkpoint] = frozen

    def _seal(self, checkpoint: CheckpointId) -> None:
        fault_points.reach("log-sealed")
        self._trip_ns = self._clock_ns() - self._opened.pop(checkpoint)
        frozen = self._waiting[checkpoint]
        node = str(self.chain.vertex.head.name)
        states = {**frozen.states, node: self._loop.log.seal(checkpoint)}
        self._release(replace(frozen, states=states))

    def _drop(self, checkpoint: CheckpointId) -> None:
        """Forget log and state; the writer keeps the sealed output for the next snapshot (L5)."""
        del self._opened[checkpoint]
        self._loop.log.drop(checkpoint)
        self._writer.cancel(checkpoint)
        frozen = self._waiting[checkpoint]
        frozen.release()  # U6
        self._release(replace(frozen, states={}, lists={}, savepoint=None))

    def _release(self, frozen: FrozenSubtask) -> None:
        """Hand over to the writer, not before what was frozen earlier: output is prepared in its order (K3)."""
        self._waiting[frozen.checkpoint] = frozen
        self._released.add(frozen.checkpoint)
        for checkpoint in sorted(self._waiting):
            if checkpoint not in self._released:
                return
            self._released.remove(checkpoint)
            self._writer.start(self._waiting.pop(checkpoint))
