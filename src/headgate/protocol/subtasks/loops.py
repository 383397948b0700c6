"""Loops in one subtask: the head's log of feedback, and the part in a nest: probes, rounds and the end.

Rules L1–L21 and L27–L37 of docs/spec/loops.md.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import TypeAlias, assert_never

from headgate.dataclass import dataclass
from headgate.model.ids import ChannelIndex, CheckpointId
from headgate.protocol.checkpoints.coordinator_events import AbortReason
from headgate.protocol.loop_prober import CloseRound, PassProbe, Probe, ProbeAligner, ProbeReceived
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


HeadEvent: TypeAlias = SnapshotTaken | GivenUp | SentinelReceived | FeedbackReceived | Released


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


HeadEffect: TypeAlias = (
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

    def handle(self, event: HeadEvent) -> list[HeadEffect]:
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

    def _on_snapshot(self, checkpoint: CheckpointId) -> list[HeadEffect]:  # L1
        assert checkpoint not in self._pending, "a snapshot opens one log (L1)"
        # A sentinel that came first (a short way round) closes its channel: what came after it is after the cut.
        open_channels = {c for c, sentinel in self._sentinels.items() if sentinel < checkpoint}
        effects: list[HeadEffect] = [OpenLog(checkpoint)]
        if any(sentinel > checkpoint for sentinel in self._sentinels.values()):
            # L3: one of its own would have been held; the tail of that channel gave the checkpoint up.
            effects += [DropLog(checkpoint), Decline(checkpoint, AbortReason.OVERTAKEN)]
        elif open_channels:
            self._pending[checkpoint] = open_channels
        else:
            effects.append(SealLog(checkpoint))
        return effects + self._advance(checkpoint)

    def _on_sentinel(self, channel: ChannelIndex, checkpoint: CheckpointId) -> list[HeadEffect]:
        if checkpoint <= self._sentinels[channel] or channel in self._held:
            raise self._violation(f"sentinel of {checkpoint} on channel {channel} after {self._sentinels[channel]}")
        self._sentinels[channel] = checkpoint
        effects: list[HeadEffect] = []
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

    def _on_feedback(self, channel: ChannelIndex) -> list[HeadEffect]:  # L2
        if channel in self._held:
            raise self._violation(f"records on channel {channel}, which is held")
        # One record may be in several logs: it was in flight at the cut of each checkpoint that is still open here.
        logs = tuple(c for c in self.pending if channel in self._pending[c])
        return [LogFeedback(logs), ForwardFeedback()] if logs else [ForwardFeedback()]

    def _on_released(self, checkpoint: CheckpointId) -> list[HeadEffect]:  # L5
        effects: list[HeadEffect] = []
        if checkpoint > self._current:  # its sentinel may still come, its barrier perhaps never
            self._released[checkpoint] = None
            if len(self._released) > self.RELEASED_MAX:
                self._released.popitem(last=False)
        if checkpoint in self._pending:
            del self._pending[checkpoint]
            effects.append(DropLog(checkpoint))
        effects += self._release([c for c, held in self._held.items() if held == checkpoint])
        return effects or [Ignored("no log of it is open here")]

    def _advance(self, checkpoint: CheckpointId) -> list[HeadEffect]:
        """Move the head past ``checkpoint``: elements after its sentinel may be read."""
        self._current = max(self._current, checkpoint)
        for old in [c for c in self._released if c <= self._current]:
            del self._released[old]
        return self._release([c for c, held in self._held.items() if held <= self._current])

    def _release(self, channels: list[ChannelIndex]) -> list[HeadEffect]:
        for channel in channels:
            del self._held[channel]
        return [UnblockChannels(tuple(sorted(channels)))] if channels else []

    def _check(self) -> None:
        assert all(channels for channels in self._pending.values()), "a log without open channels is sealed"
        assert all(self._sentinels[c] < m for m, channels in self._pending.items() for c in channels), (
            "a log waits for sentinels that have not come (L4)"
        )
        assert all(self._sentinels[c] == held for c, held in self._held.items()), "held at the sentinel that it met"
        assert all(c <= self._current for c in self._pending), "a log opens when its barrier is aligned (L1)"
        assert all(c > self._current for c in self._held.values()), "a channel is held for a barrier to come (L6)"
        assert all(c > self._current for c in self._released), "what is past is not remembered (L5)"
        assert len(self._released) <= self.RELEASED_MAX, "as many given-up checkpoints are remembered as allowed"


@dataclass(frozen=True, slots=True)
class RoundProgress:
    """Progress of rounds in one subtask: part of its snapshot (L36). -1: no round.

    Attributes:
        closed: the last round that has ended for the operators.
        started: heads only: the round of the last probe passed.
        highest: heads only: the highest round of any record forwarded.
    """

    closed: int = -1
    started: int = -1
    highest: int = -1


NO_ROUNDS = RoundProgress()


@dataclass(frozen=True, slots=True)
class LoopPlace:
    """Where a subtask stands in its nest.

    Attributes:
        inside: input channels from within the nest, feedback aside; probes come on them.
        outside: input channels from outside the nest.
        feedback: heads only: feedback channels.
        is_leaf: sends nothing on within the nest.
    """

    inside: frozenset[ChannelIndex] = frozenset()
    outside: frozenset[ChannelIndex] = frozenset()
    feedback: frozenset[ChannelIndex] = frozenset()
    is_leaf: bool = False


@dataclass(frozen=True, slots=True)
class ProbeOrdered:
    """EVENT (heads of the outermost loop): the driver starts ``probe``."""

    probe: Probe


@dataclass(frozen=True, slots=True)
class FeedbackForwarded:
    """EVENT: feedback records (or replayed ones) of at most ``round_`` are on their way into the body."""

    round_: int = -1


@dataclass(frozen=True, slots=True)
class OutsideEnded:
    """EVENT: nothing will come any more on ``channel``, which leads into the nest from outside."""

    channel: ChannelIndex


ParticipantEvent: TypeAlias = ProbeReceived | ProbeOrdered | FeedbackForwarded | OutsideEnded


@dataclass(frozen=True, slots=True)
class AdvanceToEnd:
    """EFFECT: event time has ended for everything downstream of this head: send the last watermark (L37)."""


@dataclass(frozen=True, slots=True)
class ReportEntranceEnded:
    """EFFECT: tell the driver that nothing will enter the nest here any more."""

    started_round: int
    highest_round: int


@dataclass(frozen=True, slots=True)
class ReportProbe:
    """EFFECT: tell the driver that the probe has come back, and how many batches came back with it."""

    number: int
    count: int
    highest_round: int


ParticipantEffect: TypeAlias = PassProbe | CloseRound | AdvanceToEnd | ReportEntranceEnded | ReportProbe | Ignored


class LoopParticipant(Machine):
    """Probes and rounds of one subtask."""

    def __init__(self, place: LoopPlace, restored: RoundProgress = NO_ROUNDS) -> None:
        super().__init__()
        self._place = place
        self._aligner = ProbeAligner(place.inside, restored.closed)
        self._started = restored.started
        self._highest = restored.highest
        self._outside = set(place.outside)
        self._count = 0
        self._number = 0
        self._returned = dict.fromkeys(place.feedback, 0)

    @property
    def progress(self) -> RoundProgress:
        """Part of the snapshot."""
        return RoundProgress(self._aligner.closed_round, self._started, self._highest)

    def handle(self, event: ParticipantEvent) -> list[ParticipantEffect]:
        """Advance by one event; return the effects to run, in order.

        Raises:
            ProtocolViolation: a probe that no peer can have sent.
        """
        self._begin(event)
        effects = self._dispatch(event)
        self._check()
        return effects

    def _dispatch(self, event: ParticipantEvent) -> list[ParticipantEffect]:
        match event:
            case ProbeReceived() if event.channel in self._place.feedback:
                return self._on_returned(event)
            case ProbeReceived():
                return [e for effect in self._aligner.handle(event) for e in self._passing(effect)]
            case ProbeOrdered():
                return [e for effect in self._aligner.pass_on(event.probe) for e in self._passing(effect)]
            case FeedbackForwarded():
                self._count += 1
                self._highest = max(self._highest, event.round_)
                return [Ignored("counted")]
            case OutsideEnded():
                return self._on_outside_ended(event)
            case _:
                assert_never(event)

    def _passing(self, effect: PassProbe | CloseRound | Ignored) -> list[ParticipantEffect]:
        """Add what a head and a leaf do when a probe passes them."""
        if not isinstance(effect, PassProbe):
            return [effect]
        probe, effects = effect.probe, list[ParticipantEffect]()
        if self._place.feedback:
            self._number, self._count = probe.number, 0  # L34: counts what comes back from here on
            self._started = max(self._started, probe.round_)
            if probe.is_last_watermark:
                effects.append(AdvanceToEnd())
        effects.append(effect)
        if self._place.feedback:
            effects += self._report()
        # it may be back already, on every channel: a body without a shuffle lets another head pass it earlier
        elif self._place.is_leaf:
            effects.append(ReportProbe(probe.number, 0, -1))
        return effects

    def _on_returned(self, event: ProbeReceived) -> list[ParticipantEffect]:
        number, channel = event.probe.number, event.channel
        if number != self._returned[channel] + 1 or number > self._number + 1:
            raise self._violation(f"probe {number} came back on channel {channel} unasked")
        self._returned[channel] = number
        # No subtask can be two ahead: the driver starts a probe when all have answered the one before.
        if number > self._number:  # a body without a shuffle: another head passed it earlier than this one
            return [Ignored("the probe came back before it passed this head")]
        return self._report() or [Ignored("other feedback channels have not brought the probe back")]

    def _report(self) -> list[ParticipantEffect]:
        if min(self._returned.values()) < self._number:
            return []
        return [ReportProbe(self._number, self._count, self._highest)]

    def _on_outside_ended(self, event: OutsideEnded) -> list[ParticipantEffect]:
        self._outside.discard(event.channel)
        if self._outside:
            return [Ignored("records may still enter on other channels")]
        return [ReportEntranceEnded(self._started, self._highest)]

    def _check(self) -> None:
        assert self._outside <= self._place.outside, "only channels from outside the nest end its entrance"
        assert all(number <= self._number + 1 for number in self._returned.values()), (
            "no channel is a probe ahead (L34)"
        )
        assert self._count >= 0, "what came back is counted"
