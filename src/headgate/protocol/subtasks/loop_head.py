"""The log of one loop head: what circulated between its barrier and the sentinel (rules L1–L21, docs/spec/loops.md).

One ``LoopHead`` per head subtask, composed by ``protocol.subtasks.subtask``. It knows channels and checkpoint ids,
never records. A barrier on a feedback channel is the sentinel: the subtask that feeds the loop back sends it when it
has aligned, in line with its records. Counterparts: those subtasks; the aligner of the head's regular inputs. Source:
ABS paper, Algorithm 2; FLIP-16.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias, assert_never

from headgate.model.ids import ChannelIndex, CheckpointId
from headgate.protocol.checkpoints.abort_reasons import AbortReason
from headgate.protocol.machine import Ignored, Machine
from headgate.protocol.subtasks.alignment import BlockChannel, Decline, UnblockChannels


@dataclass(frozen=True, slots=True)
class SnapshotTaken:
    """EVENT: the barrier of ``checkpoint`` is aligned on the regular inputs; the head's own state is frozen."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class GivenUp:
    """EVENT: this head will never take ``checkpoint`` nor an older one: cancelled or overtaken here."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class SentinelReceived:
    """EVENT: the sentinel of ``checkpoint`` reached the head of feedback ``channel``."""

    channel: ChannelIndex
    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class FeedbackReceived:
    """EVENT: records reached the head of feedback ``channel``."""

    channel: ChannelIndex


@dataclass(frozen=True, slots=True)
class Released:
    """EVENT: ``checkpoint`` was aborted or subsumed."""

    checkpoint: CheckpointId


Event: TypeAlias = SnapshotTaken | GivenUp | SentinelReceived | FeedbackReceived | Released


@dataclass(frozen=True, slots=True)
class OpenLog:
    """EFFECT: begin the log of ``checkpoint``; its snapshot is not written before ``SealLog``."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class LogFeedback:
    """EFFECT: append the records at hand to the logs of these checkpoints, before they are forwarded."""

    checkpoints: tuple[CheckpointId, ...]


@dataclass(frozen=True, slots=True)
class ForwardFeedback:
    """EFFECT: process the records at hand."""


@dataclass(frozen=True, slots=True)
class SealLog:
    """EFFECT: the log of ``checkpoint`` is complete: write it with the frozen state."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class DropLog:
    """EFFECT: forget the log of ``checkpoint`` and its frozen state; sealed output stays for the next snapshot."""

    checkpoint: CheckpointId


Effect: TypeAlias = (
    OpenLog | LogFeedback | ForwardFeedback | SealLog | DropLog | BlockChannel | UnblockChannels | Decline | Ignored
)


class LoopHead(Machine):
    """Which feedback records belong to which pending checkpoint."""

    RELEASED_MAX = 128
    """Checkpoints remembered that were given up before anything of them came here; as many as the ``Aligner`` does."""

    def __init__(self, channels: Iterable[ChannelIndex]) -> None:
        super().__init__()
        self._sentinels = {channel: CheckpointId(0) for channel in channels}
        assert self._sentinels, "a loop head has a feedback channel"
        self._pending: dict[CheckpointId, set[ChannelIndex]] = {}
        self._held: dict[ChannelIndex, CheckpointId] = {}
        self._current = CheckpointId(0)
        self._released: OrderedDict[CheckpointId, None] = OrderedDict()

    @property
    def pending(self) -> tuple[CheckpointId, ...]:
        """Checkpoints with an open log, ascending."""
        return tuple(sorted(self._pending))

    @property
    def held(self) -> frozenset[ChannelIndex]:
        """Feedback channels that must not be read now (L6)."""
        return frozenset(self._held)

    def handle(self, event: Event) -> list[Effect]:
        """Advance by one event; return the effects to run, in order.

        Raises:
            ProtocolViolation: sentinels of one channel that do not rise, or records on a channel that is held.
        """
        self._begin(event)
        match event:
            case SnapshotTaken():
                effects = self._on_snapshot(event.checkpoint)
            case GivenUp():
                effects = self._advance(event.checkpoint)
            case SentinelReceived():
                effects = self._on_sentinel(event.channel, event.checkpoint)
            case FeedbackReceived():
                effects = self._on_feedback(event.channel)
            case Released():
                effects = self._on_released(event.checkpoint)
            case _:
                assert_never(event)
        self._check()
        return effects

    def _on_snapshot(self, checkpoint: CheckpointId) -> list[Effect]:  # L1
        # A sentinel that came first (a short way round) closes its channel: what came after it is after the cut.
        open_channels = {c for c, sentinel in self._sentinels.items() if sentinel < checkpoint}
        effects: list[Effect] = [OpenLog(checkpoint)]
        if any(sentinel > checkpoint for sentinel in self._sentinels.values()):
            # L3: one of its own would have been held; the tail of that channel gave the checkpoint up.
            effects += [DropLog(checkpoint), Decline(checkpoint, AbortReason.OVERTAKEN)]
        elif open_channels:
            self._pending[checkpoint] = open_channels
        else:
            effects.append(SealLog(checkpoint))
        return effects + self._advance(checkpoint)

    def _on_sentinel(self, channel: ChannelIndex, checkpoint: CheckpointId) -> list[Effect]:
        if checkpoint <= self._sentinels[channel] or channel in self._held:
            raise self._violation(f"sentinel of {checkpoint} on channel {channel} after {self._sentinels[channel]}")
        self._sentinels[channel] = checkpoint
        effects: list[Effect] = []
        for pending in [c for c in self.pending if c < checkpoint and channel in self._pending[c]]:
            del self._pending[pending]  # L3: the loop tail gave it up
            effects += [DropLog(pending), Decline(pending, AbortReason.OVERTAKEN)]
        mine = self._pending.get(checkpoint)
        if mine is not None:
            mine.discard(channel)  # L11: this channel only
            if not mine:
                del self._pending[checkpoint]
                effects.append(SealLog(checkpoint))
        if checkpoint > self._current and checkpoint not in self._released:  # L6
            self._held[channel] = checkpoint
            effects.append(BlockChannel(channel))
        return effects or [Ignored("a sentinel that no log waits for")]

    def _on_feedback(self, channel: ChannelIndex) -> list[Effect]:  # L2
        if channel in self._held:
            raise self._violation(f"records on channel {channel}, which is held")
        # One record may be in several logs: it was in flight at the cut of each checkpoint that is still open here.
        logs = tuple(c for c in self.pending if channel in self._pending[c])
        return [LogFeedback(logs), ForwardFeedback()] if logs else [ForwardFeedback()]

    def _on_released(self, checkpoint: CheckpointId) -> list[Effect]:  # L5
        effects: list[Effect] = []
        if checkpoint > self._current:  # its sentinel may still come, its barrier perhaps never
            self._released[checkpoint] = None
            if len(self._released) > self.RELEASED_MAX:
                self._released.popitem(last=False)
        if checkpoint in self._pending:
            del self._pending[checkpoint]
            effects.append(DropLog(checkpoint))
        effects += self._release([c for c, held in self._held.items() if held == checkpoint])
        return effects or [Ignored("no log of it is open here")]

    def _advance(self, checkpoint: CheckpointId) -> list[Effect]:
        """Move the head past ``checkpoint``: elements after its sentinel may be read."""
        self._current = max(self._current, checkpoint)
        for old in [c for c in self._released if c <= self._current]:
            del self._released[old]
        return self._release([c for c, held in self._held.items() if held <= self._current])

    def _release(self, channels: list[ChannelIndex]) -> list[Effect]:
        for channel in channels:
            del self._held[channel]
        return [UnblockChannels(tuple(sorted(channels)))] if channels else []

    def _check(self) -> None:
        assert all(channels for channels in self._pending.values()), "a log without open channels is sealed"
        assert all(self._sentinels[c] < m for m, channels in self._pending.items() for c in channels), (
            "a log waits for sentinels that have not come (L4)"
        )
        assert all(self._sentinels[c] == held for c, held in self._held.items()), "held at the sentinel that it met"
