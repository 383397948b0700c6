"""Barrier alignment for one subtask (ABS paper, Algorithm 1; rules A1–A10 of docs/spec/alignment.md).

One ``Aligner`` per subtask. It never reads a channel; it tells the interpreter which channels may be read. Its events
and effects are also those of ``unaligned`` and ``weaker_guarantees``, which take its place. Counterparts: the
``Coordinator``, which asks for checkpoints and aborts them, and the interpreter in ``runtime.worker``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator
from enum import Enum
from typing import TypeAlias, assert_never

from headgate.dataclass import dataclass
from headgate.model.config import ORDINARY, CheckpointOptions
from headgate.model.ids import ChannelIndex, CheckpointId
from headgate.protocol.checkpoints.coordinator_events import AbortReason
from headgate.protocol.machine import Ignored, Machine


class AbortedIds:
    """The newest ids that were aborted early, in the order in which that was heard."""

    COUNT_MAX = 128
    """As many as Flink remembers; barriers of older ones cannot arrive any more."""

    def __init__(self) -> None:
        self._ids: OrderedDict[CheckpointId, None] = OrderedDict()

    def __contains__(self, checkpoint: CheckpointId) -> bool:
        """Return whether ``checkpoint`` is remembered."""
        return checkpoint in self._ids

    def __iter__(self) -> Iterator[CheckpointId]:
        """Go through all of them."""
        return iter(self._ids)

    def add(self, checkpoint: CheckpointId) -> None:
        """Remember ``checkpoint``; forget the one that was heard of first if there are too many."""
        self._ids[checkpoint] = None
        if len(self._ids) > self.COUNT_MAX:
            self._ids.popitem(last=False)

    def discard(self, checkpoint: CheckpointId) -> bool:
        """Forget ``checkpoint``; return whether it was remembered."""
        return self._ids.pop(checkpoint, self) is None

    def discard_up_to(self, checkpoint: CheckpointId) -> bool:
        """Forget ``checkpoint`` and everything older; return whether it was remembered itself."""
        was_aborted = checkpoint in self._ids
        for old in [c for c in self._ids if c <= checkpoint]:
            del self._ids[old]
        return was_aborted


@dataclass(frozen=True, slots=True)
class BarrierReceived:
    """EVENT: the barrier of ``checkpoint`` reached the head of ``channel``."""

    channel: ChannelIndex
    checkpoint: CheckpointId
    options: CheckpointOptions = ORDINARY


@dataclass(frozen=True, slots=True)
class CancelReceived:
    """EVENT: the cancel marker of ``checkpoint`` reached the head of ``channel``."""

    channel: ChannelIndex
    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class AbortReceived:
    """EVENT: the coordinator aborted ``checkpoint``."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class ChannelEnded:
    """EVENT: nothing will ever come on ``channel`` again; it counts as aligned."""

    channel: ChannelIndex


Event: TypeAlias = BarrierReceived | CancelReceived | AbortReceived | ChannelEnded


@dataclass(frozen=True, slots=True)
class BlockChannel:
    """EFFECT: do not read ``channel`` until it is unblocked."""

    channel: ChannelIndex


@dataclass(frozen=True, slots=True)
class UnblockChannels:
    """EFFECT: read these channels again, what waits in them first."""

    channels: tuple[ChannelIndex, ...]


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """EFFECT: flush what belongs in front of the barrier, then freeze, before any further element."""

    checkpoint: CheckpointId
    options: CheckpointOptions = ORDINARY


@dataclass(frozen=True, slots=True)
class EmitBarrier:
    """EFFECT: send the barrier on every output channel."""

    checkpoint: CheckpointId
    options: CheckpointOptions = ORDINARY


@dataclass(frozen=True, slots=True)
class EmitCancel:
    """EFFECT: send the cancel marker on every output channel, so that no subtask downstream waits."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class Decline:
    """EFFECT: tell the coordinator that this subtask gives ``checkpoint`` up."""

    checkpoint: CheckpointId
    reason: AbortReason


Effect: TypeAlias = BlockChannel | UnblockChannels | TakeSnapshot | EmitBarrier | EmitCancel | Decline | Ignored


class Phase(Enum):
    """What the aligner waits for."""

    FLOWING = "the first barrier of a newer checkpoint"
    ALIGNING = "the barriers of the current checkpoint on the remaining channels"


LEGAL_PHASES: dict[Phase, frozenset[Phase]] = {
    Phase.FLOWING: frozenset({Phase.ALIGNING}),
    Phase.ALIGNING: frozenset({Phase.FLOWING}),
}


class BarrierMachine(Machine, ABC):
    """What the machines that receive the barriers of one subtask have in common."""

    def __init__(self, channels_count: int) -> None:
        assert channels_count >= 1, "barriers come on channels; a source has one of its own"
        super().__init__()
        self._channels_count = channels_count
        self._ended: set[ChannelIndex] = set()
        self._aborted = AbortedIds()

    def handle(self, event: Event) -> list[Effect]:
        """Advance by one event; return the effects to run, in order.

        Raises:
            ProtocolViolation: second barrier on a channel, or any event on an ended channel.
        """
        self._begin(event)
        match event:
            case BarrierReceived():
                effects = self._on_barrier(event)
            case CancelReceived():
                effects = self._on_cancel(event)
            case AbortReceived():
                effects = self._on_abort(event.checkpoint)
            case ChannelEnded():
                effects = self._on_end(event.channel)
            case _:
                assert_never(event)
        self._check()
        return effects

    @abstractmethod
    def _on_barrier(self, event: BarrierReceived) -> list[Effect]: ...

    @abstractmethod
    def _on_cancel(self, event: CancelReceived) -> list[Effect]: ...

    @abstractmethod
    def _on_abort(self, checkpoint: CheckpointId) -> list[Effect]: ...

    @abstractmethod
    def _on_end(self, channel: ChannelIndex) -> list[Effect]: ...

    @abstractmethod
    def _check(self) -> None: ...

    def _refuse_ended(self, channel: ChannelIndex) -> None:  # A10, GM17
        if channel in self._ended:
            raise self._violation(f"event on channel {channel}, which has ended")


class Aligner(BarrierMachine):
    """Aligns the barriers of one checkpoint at a time."""

    def __init__(self, channels_count: int) -> None:
        super().__init__(channels_count)
        self._phase = Phase.FLOWING
        self._current = CheckpointId(0)
        self._options = ORDINARY
        self._blocked: set[ChannelIndex] = set()

    @property
    def phase(self) -> Phase:
        """What the aligner waits for."""
        return self._phase

    @property
    def current(self) -> CheckpointId:
        """Highest checkpoint id seen (0: none)."""
        return self._current

    @property
    def blocked(self) -> frozenset[ChannelIndex]:
        """Channels that must not be read now."""
        return frozenset(self._blocked)

    def _on_barrier(self, event: BarrierReceived) -> list[Effect]:
        self._refuse_ended(event.channel)
        if event.checkpoint < self._current:
            return [Ignored("barrier of an older checkpoint")]  # A3
        if event.checkpoint == self._current:
            if self._phase is Phase.FLOWING:
                return [Ignored("barrier of a finished checkpoint")]
            if event.channel in self._blocked:
                raise self._violation(f"second barrier of {event.checkpoint} on channel {event.channel}")
            if event.options != self._options:  # A11
                raise self._violation(f"a barrier of {event.checkpoint} wants {event.options}, not {self._options}")
            return self._align(event.channel)
        # Channels are in order: a sender of the newer barrier will never send the missing one.
        abandoned = self._abandon(AbortReason.OVERTAKEN)  # A4
        self._current, self._options = event.checkpoint, event.options
        if self._aborted.discard_up_to(event.checkpoint):  # A8: no snapshot, but no subtask downstream may wait
            return [*abandoned, EmitCancel(event.checkpoint)]
        self._enter(Phase.ALIGNING)
        return abandoned + self._align(event.channel)

    def _on_cancel(self, event: CancelReceived) -> list[Effect]:
        self._refuse_ended(event.channel)
        if event.checkpoint < self._current:
            return [Ignored("cancel marker of an older checkpoint")]
        if event.checkpoint == self._current:
            if self._phase is Phase.FLOWING:
                return [Ignored("cancel marker of a finished checkpoint")]
            return self._abandon(AbortReason.CANCELLED_UPSTREAM)  # A5
        abandoned = self._abandon(AbortReason.OVERTAKEN)  # A6
        self._current = event.checkpoint
        was_aborted = self._aborted.discard_up_to(event.checkpoint)
        given_up: list[Effect] = [EmitCancel(event.checkpoint)]
        if not was_aborted:
            given_up.append(Decline(event.checkpoint, AbortReason.CANCELLED_UPSTREAM))
        return abandoned + given_up

    def _on_abort(self, checkpoint: CheckpointId) -> list[Effect]:
        if checkpoint < self._current:
            return [Ignored("abort of an older checkpoint")]
        if checkpoint == self._current:
            if self._phase is Phase.FLOWING:
                return [Ignored("abort of a checkpoint that this subtask has finished")]
            return [EmitCancel(self._current), *self._release()]  # A9: the coordinator knows, no decline
        # The control connection is faster than the channels: without this the barrier would begin an alignment that
        # nobody waits for, and block channels until a newer checkpoint comes.
        self._aborted.add(checkpoint)
        return [Ignored("abort remembered until the barrier comes")]

    def _on_end(self, channel: ChannelIndex) -> list[Effect]:
        self._refuse_ended(channel)
        self._ended.add(channel)
        self._blocked.discard(channel)
        if self._phase is Phase.ALIGNING and self._missing() == 0:
            return self._complete()
        return [Ignored("an ended channel counts as aligned")]  # A7

    def _align(self, channel: ChannelIndex) -> list[Effect]:
        """Count ``channel`` as aligned. The last one completes: its channel never blocks (A2)."""
        assert self._phase is Phase.ALIGNING, "only an alignment counts channels (A1)"
        assert channel not in self._blocked, "a channel is counted once (A10)"
        if self._missing() == 1:
            return self._complete()
        self._blocked.add(channel)
        return [BlockChannel(channel)]  # A1

    def _complete(self) -> list[Effect]:
        assert self._missing() <= 1, "every other channel has delivered the barrier or ended (A2, A7)"
        return [
            TakeSnapshot(self._current, self._options),
            EmitBarrier(self._current, self._options),
            *self._release(),
        ]

    def _abandon(self, reason: AbortReason) -> list[Effect]:
        """Give the current checkpoint up, if one is being aligned: downstream first, then the coordinator."""
        if self._phase is Phase.FLOWING:
            return []
        return [EmitCancel(self._current), Decline(self._current, reason), *self._release()]

    def _release(self) -> list[Effect]:
        self._enter(Phase.FLOWING)
        blocked, self._blocked = tuple(sorted(self._blocked)), set()
        return [UnblockChannels(blocked)] if blocked else []

    def _missing(self) -> int:
        return self._channels_count - len(self._blocked) - len(self._ended)

    def _enter(self, phase: Phase) -> None:
        assert phase in LEGAL_PHASES[self._phase], f"{self._phase} → {phase}"
        self._phase = phase

    def _check(self) -> None:
        assert self._phase is Phase.ALIGNING or not self._blocked, "only an alignment blocks channels"
        assert not self._blocked & self._ended, "an ended channel does not block"
        assert len(self._blocked) + len(self._ended) <= self._channels_count, "channels are counted once"
        if self._phase is Phase.ALIGNING:
            assert self._missing() > 0, "an alignment waits for a channel"
