"""When a loop is empty and when a round is over: probes that go round with the records (L27–L37, docs/spec/loops.md).

``LoopProber`` lives in the driver, one per nest of loops and generation: it starts probes, adds up what the heads
counted, and decides. ``ProbeAligner`` lives in every subtask of the nest: it passes a probe on when it has come on
all inputs from within the nest. Both know numbers only. No clock decides that a loop has ended.
Source: Flink ML's ``SharedProgressAligner`` (sums of counts per round); Chandy and Lamport's channel states.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum
from typing import TypeAlias, assert_never

from headgate.dataclass import dataclass
from headgate.model.ids import ChannelIndex, SubtaskId
from headgate.protocol.machine import Ignored, Machine


@dataclass(frozen=True, slots=True)
class Probe:
    """What goes round. Everything a head emitted before it has been processed where it arrives.

    Attributes:
        number: of the probe, from 1, rising within one generation.
        round_: every record of the outermost loop up to this round was emitted before the probe (-1: no rounds).
        is_closing: every such record has been processed, inner loops included: the round is over (L35).
        is_last_watermark: event time ends here: no record will come from outside and nothing circulates (L37).
    """

    number: int
    round_: int = -1
    is_closing: bool = False
    is_last_watermark: bool = False


@dataclass(frozen=True, slots=True)
class ProbeReceived:
    """EVENT: ``probe`` reached the head of input ``channel``."""

    channel: ChannelIndex
    probe: Probe


@dataclass(frozen=True, slots=True)
class PassProbe:
    """EFFECT: flush what operators hold back, then send the probe on every output within the nest."""

    probe: Probe


@dataclass(frozen=True, slots=True)
class CloseRound:
    """EFFECT: tell the operators within the nest that the round is over, before the probe is passed on."""

    round_: int


ProbeAlignerEffect: TypeAlias = PassProbe | CloseRound | Ignored


class ProbeAligner(Machine):
    """Passes a probe on when it has come on every input from within the nest. Never blocks a channel (L33)."""

    def __init__(self, channels: Collection[ChannelIndex], closed_round: int = -1) -> None:
        super().__init__()
        self._numbers = dict.fromkeys(channels, 0)
        self._probes: dict[int, Probe] = {}
        self._passed = 0
        self._closed_round = closed_round

    @property
    def closed_round(self) -> int:
        """The last round that has ended for the operators. Part of the snapshot (L36)."""
        return self._closed_round

    def handle(self, event: ProbeReceived) -> list[ProbeAlignerEffect]:
        """Advance by one event; return the effects to run, in order.

        Raises:
            ProtocolViolation: a probe that is not the next one of its channel, or on a channel that carries none.
        """
        self._begin(event)
        probe = event.probe
        if self._numbers.get(event.channel, -1) + 1 != probe.number:
            raise self._violation(f"probe {probe.number} on channel {event.channel}, which is not the next one")
        self._numbers[event.channel] = probe.number
        self._probes[probe.number] = probe
        effects: list[ProbeAlignerEffect] = []
        while self._passed < min(self._numbers.values()):
            effects += self.pass_on(self._probes.pop(self._passed + 1))
        self._check()
        return effects or [Ignored("the probe is missing on other channels")]

    def pass_on(self, probe: Probe) -> list[ProbeAlignerEffect]:
        """Return what to do with a probe that is complete here (or that a head has to start)."""
        if probe.number != self._passed + 1:
            raise self._violation(f"probe {probe.number} was ordered after {self._passed}")
        self._passed = probe.number
        effects: list[ProbeAlignerEffect] = []
        if probe.is_closing and probe.round_ > self._closed_round:
            self._closed_round = probe.round_
            effects.append(CloseRound(probe.round_))
        return [*effects, PassProbe(probe)]

    def _check(self) -> None:
        assert all(number > self._passed for number in self._probes), "what has passed is not held (L33)"


# -- the driver's side ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EntranceEnded:
    """EVENT: ``subtask`` has read everything that comes from outside the nest.

    ``started_round`` and ``highest_round``: heads of the outermost loop only; what their snapshot held.
    """

    subtask: SubtaskId
    started_round: int = -1
    highest_round: int = -1


@dataclass(frozen=True, slots=True)
class ProbeReturned:
    """EVENT: the probe has come back to the head ``subtask`` on all its feedback channels, or ended at a leaf.

    ``count`` batches came back to it since it passed the probe; ``highest_round`` is that of any record
    that it ever forwarded. A leaf counts nothing.
    """

    subtask: SubtaskId
    number: int
    count: int
    highest_round: int = -1


ProberEvent: TypeAlias = EntranceEnded | ProbeReturned


@dataclass(frozen=True, slots=True)
class StartProbe:
    """EFFECT: after ``after_ms``, tell every head of the outermost loop to send ``probe``."""

    probe: Probe
    after_ms: int


@dataclass(frozen=True, slots=True)
class RoundFinished:
    """EFFECT: tell the user's callback that no record of ``round_`` or an earlier one is anywhere (L35)."""

    round_: int


@dataclass(frozen=True, slots=True)
class EndLoop:
    """EFFECT: tell every head of the nest that nothing circulates and nothing will: end of data follows (L29)."""


ProberEffect: TypeAlias = StartProbe | RoundFinished | EndLoop | Ignored


class Phase(Enum):
    """What the prober waits for."""

    ENTERING = "the end of what comes from outside"
    PROBING = "a probe"
    FLUSHING = "the probe that carries the last watermark"
    ENDED = "nothing"


LEGAL_PHASES: dict[Phase, frozenset[Phase]] = {
    Phase.ENTERING: frozenset({Phase.PROBING}),
    Phase.PROBING: frozenset({Phase.FLUSHING}),
    Phase.FLUSHING: frozenset({Phase.PROBING, Phase.ENDED}),
    Phase.ENDED: frozenset(),
}


@dataclass(slots=True)
class _Answers:
    """What came back with the current probe."""

    inner_count: int = 0
    outer_count: int = 0


class LoopProber(Machine):
    """Finds out that a nest of loops is empty, and which rounds of its outermost loop are over."""

    PAUSE_MS = 5
    """Between probes that found the loop busy: they cost a trip through every subtask, and nothing waits for them."""

    def __init__(
        self,
        entrances: Collection[SubtaskId],
        outer_heads: Collection[SubtaskId],
        inner_heads: Collection[SubtaskId],
        leaves: Collection[SubtaskId],
        *,
        has_rounds: bool,
    ) -> None:
        """Make the prober of a nest.

        Args:
            entrances: subtasks that records enter from outside; the outermost heads are among them.
            outer_heads: subtasks of the outermost loop's head.
            inner_heads: subtasks of the heads of the loops inside.
            leaves: subtasks in the nest that send nothing on within it: probes end there.
            has_rounds: the outermost loop counts rounds.
        """
        super().__init__()
        assert outer_heads, "a nest of loops has a head"
        assert frozenset(outer_heads) <= frozenset(entrances), "records enter a nest at its heads, too"
        self._entering = set(entrances)
        self._outer_heads = frozenset(outer_heads)
        self._asked = self._outer_heads | frozenset(inner_heads) | frozenset(leaves)
        self._has_inner = bool(inner_heads)
        self._has_rounds = has_rounds
        self._phase = Phase.ENTERING
        self._probe = Probe(0)
        self._waiting: set[SubtaskId] = set()
        self._answers = _Answers()
        self._start_rounds: list[int] = []
        self._round = -1
        self._highest_round = -1
        self._is_closed = False

    @property
    def phase(self) -> Phase:
        """What the prober waits for."""
        return self._phase

    def handle(self, event: ProberEvent) -> list[ProberEffect]:
        """Advance by one event; return the effects to run, in order.

        Raises:
            ProtocolViolation: an answer to a probe that was never started.
        """
        self._begin(event)
        match event:
            case EntranceEnded():
                effects = self._on_entrance_ended(event)
            case ProbeReturned():
                effects = self._on_returned(event)
            case _:
                assert_never(event)
        self._check()
        return effects

    def _on_entrance_ended(self, event: EntranceEnded) -> list[ProberEffect]:
        if event.subtask not in self._entering:
            return [Ignored("reported before")]
        self._entering.remove(event.subtask)
        if event.subtask in self._outer_heads:
            self._start_rounds.append(event.started_round)
            self._highest_round = max(self._highest_round, event.highest_round)
        if self._entering:
            return [Ignored("records may still come in elsewhere")]
        self._enter(Phase.PROBING)
        if self._has_rounds:
            self._round = max(min(self._start_rounds), 0)  # L36: what was under way begins again
        return self._next_probe()

    def _on_returned(self, event: ProbeReturned) -> list[ProberEffect]:
        if not 1 <= event.number <= self._probe.number:
            raise self._violation(f"{event.subtask} answered probe {event.number}, which was never started")
        if event.number < self._probe.number or event.subtask not in self._waiting:
            return [Ignored("answered before")]
        self._waiting.remove(event.subtask)
        if event.subtask in self._outer_heads:
            self._answers.outer_count += event.count
            self._highest_round = max(self._highest_round, event.highest_round)
        else:
            self._answers.inner_count += event.count
        return [Ignored("the probe is still under way")] if self._waiting else self._on_complete()

    def _on_complete(self) -> list[ProberEffect]:
        answers = self._answers
        # Not with the first probe: so nothing hangs on the order in which the parts of a generation start.
        is_empty = answers.inner_count + answers.outer_count == 0 and self._probe.number > 1  # L34
        effects: list[ProberEffect] = []
        if self._probe.is_closing and not self._is_closed:
            self._is_closed = True
            effects.append(RoundFinished(self._round))
        if self._phase is Phase.FLUSHING:
            # The last watermark may have set records free (windows, timers): only a probe that found none ends it all.
            if is_empty and (self._round >= self._highest_round or not self._has_rounds):  # L35: none is left out
                self._enter(Phase.ENDED)
                return [*effects, EndLoop()]
            self._enter(Phase.PROBING)
        elif self._has_rounds and answers.inner_count == 0 and self._is_closed and self._round < self._highest_round:
            # Inner loops were empty at the end of a round: what comes next is the next round's first trip.
            self._round, self._is_closed = self._round + 1, False
            return effects + self._next_probe(is_closing=not self._has_inner)
        elif self._has_rounds and not self._is_closed:
            # A probe that closes must be later than one that found the inner loops empty: what they still turn is of
            # this round.
            return effects + self._next_probe(is_closing=answers.inner_count == 0)
        elif is_empty:
            self._enter(Phase.FLUSHING)
        return effects + self._next_probe(is_busy=not is_empty)

    def _next_probe(self, *, is_closing: bool | None = None, is_busy: bool = False) -> list[ProberEffect]:
        if is_closing is None:  # the first one of a nest without inner loops closes its round by itself
            is_closing = self._has_rounds and not self._is_closed and not self._has_inner
        is_flush = self._phase is Phase.FLUSHING
        self._probe = Probe(self._probe.number + 1, self._round, is_closing, is_flush)
        self._waiting, self._answers = set(self._asked), _Answers()
        return [StartProbe(self._probe, self.PAUSE_MS if is_busy else 0)]

    def _enter(self, phase: Phase) -> None:
        assert phase in LEGAL_PHASES[self._phase], f"{self._phase} → {phase}"
        self._phase = phase

    def _check(self) -> None:
        assert (self._phase is Phase.ENTERING) == bool(self._entering), "probes start when nothing enters (L27)"
        assert self._waiting <= self._asked, "only what was asked is awaited"
        assert bool(self._waiting) == (self._phase in (Phase.PROBING, Phase.FLUSHING)), "one probe at a time (L34)"
