"""Barriers of one subtask that overtake what waits when they wait too long (rules UA4–UA10 of docs/spec/unaligned.md).

One ``TimeoutAligner`` per subtask, in place of the ``Aligner`` and with its events and effects, where the pipeline has
an alignment timeout. It begins a checkpoint when a barrier arrives in a queue, aligns as the ``Aligner`` does, and goes
over when that takes too long: snapshot at once, and what stands in front of the barriers is recorded. It never reads a
channel. Source: Flink's ``SingleCheckpointBarrierHandler``. Counterparts: those downstream, which see from a barrier
whether it overtook.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import TypeAlias, assert_never

from headgate.dataclass import dataclass
from headgate.model.config import ORDINARY, Alignment, CheckpointOptions
from headgate.model.ids import ChannelIndex, CheckpointId
from headgate.protocol.checkpoints.coordinator_events import AbortReason
from headgate.protocol.machine import Ignored, Machine
from headgate.protocol.subtasks import alignment
from headgate.protocol.subtasks.alignment import (
    AbortedIds,
    AbortReceived,
    BarrierReceived,
    BlockChannel,
    CancelReceived,
    ChannelEnded,
    Decline,
    EmitBarrier,
    EmitCancel,
    TakeSnapshot,
    UnblockChannels,
)


@dataclass(frozen=True, slots=True)
class BarrierArrived:
    """EVENT: the barrier of ``checkpoint`` came into the queue of ``channel``; what is in front of it waits."""

    channel: ChannelIndex
    checkpoint: CheckpointId
    options: CheckpointOptions = ORDINARY


@dataclass(frozen=True, slots=True)
class CancelArrived:
    """EVENT: the cancel marker of ``checkpoint`` came into the queue of ``channel``."""

    channel: ChannelIndex
    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class AlignmentTimedOut:
    """EVENT: the timeout has passed since ``ArmAlignmentTimer``."""

    checkpoint: CheckpointId


Event: TypeAlias = alignment.Event | BarrierArrived | CancelArrived | AlignmentTimedOut


@dataclass(frozen=True, slots=True)
class ArmAlignmentTimer:
    """EFFECT: report ``AlignmentTimedOut`` when the timeout has passed."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class RecordChannels:
    """EFFECT: add what stands in front of the barrier in the queues of ``channels`` to the snapshot."""

    checkpoint: CheckpointId
    channels: tuple[ChannelIndex, ...]


@dataclass(frozen=True, slots=True)
class AllRecorded:
    """EFFECT: the snapshot is whole; write it."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class DropRecording:
    """EFFECT: the snapshot is given up before all was recorded; its sealed output goes with the next one."""

    checkpoint: CheckpointId


Effect: TypeAlias = alignment.Effect | ArmAlignmentTimer | RecordChannels | AllRecorded | DropRecording


class Phase(Enum):
    """What the machine waits for."""

    FLOWING = "the first barrier of a newer checkpoint"
    ALIGNING = "the barriers of the current checkpoint to be read on the remaining channels, or the timeout"
    RECORDING = "the barriers of the current checkpoint to arrive on the channels that are held"


LEGAL_PHASES: dict[Phase, frozenset[Phase]] = {
    Phase.FLOWING: frozenset({Phase.ALIGNING}),
    Phase.ALIGNING: frozenset({Phase.FLOWING, Phase.RECORDING}),
    Phase.RECORDING: frozenset({Phase.FLOWING}),
}


class TimeoutAligner(Machine):
    """Aligns the barriers of one checkpoint at a time, for a while."""

    def __init__(self, channels_count: int, *, is_immediate: bool, late: frozenset[ChannelIndex] = frozenset()) -> None:
        """Make the machine.

        ``is_immediate``: the timeout is 0. ``late``: channels with a barrier that takes credit (UA20).
        """
        assert channels_count >= 1, "barriers come on channels; a source has one of its own"
        super().__init__()
        self._channels = frozenset(ChannelIndex(index) for index in range(channels_count))
        self._is_immediate = is_immediate
        self._late = late
        self._has_overtaken = False
        """Whether a barrier of the current checkpoint has."""
        self._phase = Phase.FLOWING
        self._current = CheckpointId(0)
        self._options = ORDINARY
        self._arrived: set[ChannelIndex] = set()
        self._read: set[ChannelIndex] = set()
        self._held: set[ChannelIndex] = set()
        self._ended: set[ChannelIndex] = set()
        self._aborted = AbortedIds()

    @property
    def phase(self) -> Phase:
        """What the machine waits for."""
        return self._phase

    @property
    def current(self) -> CheckpointId:
        """Highest checkpoint id seen (0: none)."""
        return self._current

    @property
    def recording(self) -> CheckpointId | None:
        """The checkpoint with a snapshot that was taken and is not whole yet."""
        return self._current if self._phase is Phase.RECORDING else None

    @property
    def blocked(self) -> frozenset[ChannelIndex]:
        """Channels that must not be read now."""
        match self._phase:
            case Phase.FLOWING:
                return frozenset()
            case Phase.ALIGNING:
                return frozenset(self._read)
            case Phase.RECORDING:
                return frozenset(self._held)

    def handle(self, event: Event) -> list[Effect]:
        """Advance by one event; return the effects to run, in order.

        Raises:
            ProtocolViolation: second barrier on a channel, barriers that contradict each other, or any event on an
                ended channel.
        """
        self._begin(event)
        match event:
            case BarrierArrived():
                effects = self._on_arrived(event)
            case BarrierReceived():
                effects = self._on_read(event)
            case CancelArrived() | CancelReceived():
                effects = self._on_cancel(event.channel, event.checkpoint)
            case AlignmentTimedOut():
                effects = self._on_timeout(event.checkpoint)
            case AbortReceived():
                effects = self._on_abort(event.checkpoint)
            case ChannelEnded():
                effects = self._on_end(event.channel)
            case _:
                assert_never(event)
        self._check()
        return effects

    # -- barriers ---------------------------------------------------------------------------------------------------

    def _on_arrived(self, event: BarrierArrived) -> list[Effect]:  # UA4
        self._refuse_ended(event.channel)
        if self._is_over(event.checkpoint):
            return [Ignored("barrier of a finished or older checkpoint arrived")]
        if event.checkpoint == self._current and event.channel in self._arrived:
            if event.channel in self._read:
                return [Ignored("the barrier was read before its arrival was reported")]
            raise self._violation(f"second barrier of {event.checkpoint} on channel {event.channel}")
        return self._note(event.channel, event.checkpoint, event.options, is_read=False)

    def _on_read(self, event: BarrierReceived) -> list[Effect]:
        self._refuse_ended(event.channel)
        channel, checkpoint = event.channel, event.checkpoint
        if self._is_over(checkpoint):
            return [Ignored("barrier of a finished or older checkpoint")]
        if checkpoint == self._current and self._phase is Phase.RECORDING:
            if channel in self._arrived:
                return [Ignored("what stood in front of this barrier was recorded")]
            raise self._violation(f"the barrier of {checkpoint} was read on channel {channel}, which is held")
        if checkpoint == self._current and channel in self._arrived:
            if channel in self._read:
                raise self._violation(f"second barrier of {checkpoint} on channel {channel}")
            return self._align(channel)
        return self._note(channel, checkpoint, event.options, is_read=True)

    def _note(
        self, channel: ChannelIndex, checkpoint: CheckpointId, options: CheckpointOptions, *, is_read: bool
    ) -> list[Effect]:
        """Take the first sign of a barrier on ``channel``, of the current checkpoint or of a newer one."""
        assert checkpoint >= self._current, "barriers of older checkpoints are ignored before (A3)"
        effects: list[Effect] = []
        is_newer = checkpoint > self._current
        if is_newer:
            effects = self._give_up(AbortReason.OVERTAKEN)  # A4, UA10
            self._current, self._has_overtaken = checkpoint, False
            self._options = _as_sent(options)
            if self._aborted.discard_up_to(checkpoint):  # A8: no snapshot, but no subtask downstream may wait
                return [*effects, EmitCancel(checkpoint)]
            self._enter(Phase.ALIGNING)
            self._arrived, self._read = set(), set()
        elif not _agree(options, self._options):  # A11, UA3
            raise self._violation(f"a barrier of {checkpoint} wants {options}, not {self._options}")
        # looked at before this barrier counts: the timer is armed once, by the one that makes channels free to be held
        was_free = not is_newer and self._is_free
        self._arrived.add(channel)
        self._has_overtaken = self._has_overtaken or options.alignment is Alignment.OVERTAKING
        found = self._act(channel, is_read=is_read)
        if self._may_overtake and self._phase is Phase.ALIGNING and self._is_free and not was_free:
            effects.append(ArmAlignmentTimer(checkpoint))
        return [*effects, *found] or [Ignored("a barrier arrived, and waits to be read")]

    def _act(self, channel: ChannelIndex, *, is_read: bool) -> list[Effect]:
        """Return what the barrier on ``channel`` causes, which has just arrived, or was read at once."""
        if self._phase is Phase.RECORDING:
            return self._record(channel)
        if self._is_due:
            return self._go_over(channel if is_read else None)
        return self._align(channel) if is_read else []

    @property
    def _may_overtake(self) -> bool:
        return self._options.alignment.may_overtake

    @property
    def _is_free(self) -> bool:
        """Whether channels may be held: every barrier that takes credit has arrived (UA20)."""
        return self._late <= self._arrived | self._ended

    @property
    def _is_due(self) -> bool:
        """Whether it goes over without waiting for the timeout (UA6)."""
        return self._may_overtake and self._is_free and (self._has_overtaken or self._is_immediate)

    def _align(self, channel: ChannelIndex) -> list[Effect]:
        """Count ``channel`` as read. The last one completes, and never blocks (A2, UA5)."""
        if self._channels - self._read - self._ended == {channel}:
            return self._complete()
        self._read.add(channel)
        return [BlockChannel(channel)]

    def _complete(self) -> list[Effect]:
        snapshot, barrier = TakeSnapshot(self._current, self._options), EmitBarrier(self._current, self._options)
        return [snapshot, barrier, *self._release()]

    def _on_timeout(self, checkpoint: CheckpointId) -> list[Effect]:
        if self._phase is not Phase.ALIGNING or checkpoint != self._current:
            return [Ignored("this checkpoint is not aligned any more")]
        return self._go_over()

    def _go_over(self, just_read: ChannelIndex | None = None) -> list[Effect]:  # UA7
        # Barriers overtake from here: the snapshot is taken and the barrier leaves at once. What stands in front of
        # barriers that have arrived is recorded now; channels without one are held, and recorded when it arrives.
        options = replace(self._options, alignment=Alignment.OVERTAKING)
        effects: list[Effect] = [TakeSnapshot(self._current, options), EmitBarrier(self._current, options)]
        blocked = tuple(sorted(self._read))
        # just taken out of its queue, so it was never blocked, and nothing stands in front of it
        if just_read is not None:
            self._read.add(just_read)
        waiting = tuple(sorted(self._arrived - self._read - self._ended))
        if waiting:
            effects.append(RecordChannels(self._current, waiting))
        if blocked:
            effects.append(UnblockChannels(blocked))
        self._held = set(self._channels - self._arrived - self._ended)
        self._enter(Phase.RECORDING)
        if not self._held:
            return [*effects, *self._all_recorded()]
        return [*effects, *(BlockChannel(channel) for channel in sorted(self._held))]

    def _record(self, channel: ChannelIndex) -> list[Effect]:
        self._held.discard(channel)
        effects: list[Effect] = [RecordChannels(self._current, (channel,)), UnblockChannels((channel,))]
        return effects if self._held else [*effects, *self._all_recorded()]

    def _all_recorded(self) -> list[Effect]:
        self._enter(Phase.FLOWING)
        return [AllRecorded(self._current)]

    # -- what ends a checkpoint -------------------------------------------------------------------------------------

    def _on_cancel(self, channel: ChannelIndex, checkpoint: CheckpointId) -> list[Effect]:
        self._refuse_ended(channel)
        if self._is_over(checkpoint):
            return [Ignored("cancel marker of a finished or older checkpoint")]
        if checkpoint == self._current:
            return self._give_up(AbortReason.CANCELLED_UPSTREAM)  # A5, UA10
        given_up = self._give_up(AbortReason.OVERTAKEN)  # A6
        self._current = checkpoint
        was_aborted = self._aborted.discard_up_to(checkpoint)
        effects: list[Effect] = [*given_up, EmitCancel(checkpoint)]
        return effects if was_aborted else [*effects, Decline(checkpoint, AbortReason.CANCELLED_UPSTREAM)]

    def _on_abort(self, checkpoint: CheckpointId) -> list[Effect]:
        if self._is_over(checkpoint):
            return [Ignored("abort of a checkpoint that this subtask has finished")]
        if checkpoint == self._current:  # A9, UA10: the coordinator knows, no decline
            return [effect for effect in self._give_up(AbortReason.OVERTAKEN) if not isinstance(effect, Decline)]
        self._aborted.add(checkpoint)
        return [Ignored("abort remembered until the barrier comes")]

    def _on_end(self, channel: ChannelIndex) -> list[Effect]:  # A7
        self._refuse_ended(channel)
        was_free = self._is_free
        self._ended.add(channel)
        self._read.discard(channel)
        if self._phase is Phase.ALIGNING and self._channels == self._read | self._ended:
            return self._complete()
        if self._phase is Phase.ALIGNING and self._may_overtake and self._is_free and not was_free:
            return self._go_over() if self._is_due else [ArmAlignmentTimer(self._current)]
        if self._phase is Phase.RECORDING and channel in self._held:  # nothing is in front of it any more
            self._held.discard(channel)
            return [] if self._held else self._all_recorded()
        return [Ignored("an ended channel counts as aligned")]

    def _give_up(self, reason: AbortReason) -> list[Effect]:
        """Give the current checkpoint up. Downstream gets a marker only where it has no barrier yet (UA10)."""
        match self._phase:
            case Phase.FLOWING:
                return []
            case Phase.ALIGNING:
                return [EmitCancel(self._current), Decline(self._current, reason), *self._release()]
            case Phase.RECORDING:
                return [DropRecording(self._current), Decline(self._current, reason), *self._release()]

    def _release(self) -> list[Effect]:
        blocked = tuple(sorted(self.blocked))
        self._enter(Phase.FLOWING)
        return [UnblockChannels(blocked)] if blocked else []

    # -- helpers ----------------------------------------------------------------------------------------------------

    def _is_over(self, checkpoint: CheckpointId) -> bool:
        """Whether nothing about ``checkpoint`` matters here any more (A3)."""
        return checkpoint < self._current or (checkpoint == self._current and self._phase is Phase.FLOWING)

    def _refuse_ended(self, channel: ChannelIndex) -> None:  # A10
        if channel in self._ended:
            raise self._violation(f"event on channel {channel}, which has ended")

    def _enter(self, phase: Phase) -> None:
        assert phase in LEGAL_PHASES[self._phase], f"{self._phase} → {phase}"
        self._phase = phase

    def _check(self) -> None:
        assert self._channels - self.blocked, "some channel can always be read, or the machine waits for none"
        if self._phase is Phase.ALIGNING:
            assert self._read <= self._arrived, "what was read has arrived (UA4)"
            assert self._channels - self._read - self._ended, "an alignment waits for a channel"
        if self._phase is Phase.RECORDING:
            assert self._held, "an alignment waits for a channel"
            assert not self._held & self._late, "a channel with a barrier that takes credit is not held (UA20)"
            assert not self._held & (self._arrived | self._ended), "a channel is held until its barrier arrives (UA7)"


def _as_sent(options: CheckpointOptions) -> CheckpointOptions:
    """Return what a barrier was before it overtook: one that is aligned here goes on like this."""
    return replace(options, alignment=Alignment.TIMED) if options.alignment.may_overtake else options


def _agree(one: CheckpointOptions, other: CheckpointOptions) -> bool:
    """Whether two barriers can be of one checkpoint: they differ at most in whether they overtook (UA3)."""
    is_alike = one.alignment is other.alignment or (one.alignment.may_overtake and other.alignment.may_overtake)
    return is_alike and replace(one, alignment=other.alignment) == other
