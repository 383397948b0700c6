"""The part that one subtask plays in a nest of loops: probes, rounds and the end (rules L27–L37, docs/spec/loops.md).

Composed by ``protocol.subtasks.subtask``, beside the aligner and, in heads, beside the ``LoopHead``. Counterpart: the
``LoopProber`` in the driver.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, assert_never

from headgate.model.ids import ChannelIndex
from headgate.protocol.loop_prober import CloseRound, PassProbe, Probe, ProbeAligner, ProbeReceived
from headgate.protocol.machine import Ignored, Machine


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


Event: TypeAlias = ProbeReceived | ProbeOrdered | FeedbackForwarded | OutsideEnded


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


Effect: TypeAlias = PassProbe | CloseRound | AdvanceToEnd | ReportEntranceEnded | ReportProbe | Ignored


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

    def handle(self, event: Event) -> list[Effect]:
        """Advance by one event; return the effects to run, in order.

        Raises:
            ProtocolViolation: a probe that no peer can have sent.
        """
        self._begin(event)
        effects = self._dispatch(event)
        self._check()
        return effects

    def _dispatch(self, event: Event) -> list[Effect]:
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

    def _passing(self, effect: PassProbe | CloseRound | Ignored) -> list[Effect]:
        """Add what a head and a leaf do when a probe passes them."""
        if not isinstance(effect, PassProbe):
            return [effect]
        probe, effects = effect.probe, list[Effect]()
        if self._place.feedback:
            self._number, self._count = probe.number, 0  # L34: counts what comes back from here on
            self._started = max(self._started, probe.round_)
            if probe.is_last_watermark:
                effects.append(AdvanceToEnd())
        effects.append(effect)
        if self._place.feedback:
            effects += self._report()
        elif self._place.is_leaf:
            effects.append(ReportProbe(probe.number, 0, -1))
        return effects

    def _on_returned(self, event: ProbeReceived) -> list[Effect]:
        number, channel = event.probe.number, event.channel
        if number != self._returned[channel] + 1 or number > self._number + 1:
            raise self._violation(f"probe {number} came back on channel {channel} unasked")
        self._returned[channel] = number
        # No subtask can be two ahead: the driver starts a probe when all have answered the one before.
        if number > self._number:  # a body without a shuffle: another head passed it earlier than this one
            return [Ignored("the probe came back before it passed this head")]
        return self._report() or [Ignored("other feedback channels have not brought the probe back")]

    def _report(self) -> list[Effect]:
        if min(self._returned.values()) < self._number:
            return []
        return [ReportProbe(self._number, self._count, self._highest)]

    def _on_outside_ended(self, event: OutsideEnded) -> list[Effect]:
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
