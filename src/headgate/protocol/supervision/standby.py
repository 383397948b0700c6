"""When a driver gives a sign of life, and what it says (SB1). Counterpart: ``runtime.driver.takeover``, which
writes."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import TypeAlias, assert_never

from headgate.dataclass import dataclass
from headgate.model.ids import Generation
from headgate.model.pipeline_identity import Beat, Course
from headgate.protocol.machine import Ignored, Machine
from headgate.protocol.supervision.supervisor_events import Begin

BEAT_MS = 2_000
"""Between two beats: on an object store each is a request that costs money."""


class HeartbeatTimer:
    """The beats of one driver: at a claim, at a wish of its user, and every ``BEAT_MS``."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._count = 0
        self._said: tuple[Generation, Course] | None = None
        self._due_ms = 0

    def beat(self, now_ms: int, generation: Generation, course: Course) -> Beat | None:
        """Return the beat that is due, or None. What it returned counts as written."""
        if self._said == (generation, course) and now_ms < self._due_ms:
            return None
        self._said, self._due_ms = (generation, course), now_ms + BEAT_MS
        self._count += 1
        return Beat(generation, self._owner, self._count, course)


@dataclass(frozen=True, slots=True)
class Observed:
    """State of the newest generation, as read from storage.

    Attributes:
        generation: the newest one in the log; 0: none has ever run.
        mark: differs from one sign of life to the next; "" without any.
        course: what the run is at, or how it ended. A beat that says nothing counts as running.
        owner: the name under which it was claimed, "" if that is unknown.
        is_ours: claimed by a driver of this standby's own supervisor, which is dead.
        knows_beats: whether there is any heartbeat, of whatever generation (SB11).
        reason: why it failed.
        was_draining: whether one that failed had been asked to drain.
    """

    generation: Generation
    mark: str = ""
    course: Course = Course.RUNNING
    owner: str = ""
    is_ours: bool = False
    knows_beats: bool = True
    reason: str = ""
    was_draining: bool = False


@dataclass(frozen=True, slots=True)
class Looked:
    """EVENT: a look that began and ended at these times found ``observed``.

    ``is_all``: it looked at everything; else only at the beats of the generation that is known.
    """

    began_ms: int
    ended_ms: int
    observed: Observed
    is_all: bool


@dataclass(frozen=True, slots=True)
class LookFailed:
    """EVENT: storage did not answer."""

    problem: str


@dataclass(frozen=True, slots=True)
class PauseOver:
    """EVENT: the pause before the next look has passed."""


@dataclass(frozen=True, slots=True)
class TakeoverLost:
    """EVENT: another driver claimed first."""


Event: TypeAlias = Begin | Looked | LookFailed | PauseOver | TakeoverLost


@dataclass(frozen=True, slots=True)
class LookAtAll:
    """EFFECT: read the log, the heartbeats, and how the newest run ended."""


@dataclass(frozen=True, slots=True)
class LookAtBeat:
    """EFFECT: read the beat of one generation."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Pause:
    """EFFECT: ``PauseOver`` after this time."""

    after_ms: int


class Notice(Enum):
    """What a standby waits for, or does."""

    WATCHING = "another driver runs it"
    NOT_STARTED = "no driver has written a heartbeat yet"
    STOPPED = "its user stopped it"
    FAILED_FOR_GOOD = "it failed, and starting it again would not help"
    UNREACHABLE = "storage does not answer"
    OUTRUN = "another driver took over"
    TAKING_OVER = "taking over"


@dataclass(frozen=True, slots=True)
class Say:
    """EFFECT: tell the user, once for each change (SB13). ``detail``: who runs it, or what is wrong."""

    notice: Notice
    detail: str = ""


@dataclass(frozen=True, slots=True)
class TakeOver:
    """EFFECT: claim, on condition that ``after`` is still the newest generation (SB8); drain if it was draining."""

    after: Generation
    drain: bool


@dataclass(frozen=True, slots=True)
class StandDown:
    """EFFECT: there is nothing to stand by for: the run ended like this."""

    course: Course


Effect: TypeAlias = LookAtAll | LookAtBeat | Pause | Say | TakeOver | StandDown | Ignored


class Phase(Enum):
    """What the standby waits for."""

    CREATED = "Begin"
    LOOKING = "the outcome of a look"
    PAUSING = "the next look"
    TAKING = "the outcome of a takeover"
    ENDED = "nothing"


LEGAL_PHASES: dict[Phase, frozenset[Phase]] = {
    Phase.CREATED: frozenset({Phase.LOOKING}),
    Phase.LOOKING: frozenset({Phase.LOOKING, Phase.PAUSING, Phase.TAKING, Phase.ENDED}),
    Phase.PAUSING: frozenset({Phase.LOOKING}),
    Phase.TAKING: frozenset({Phase.LOOKING}),
    Phase.ENDED: frozenset(),
}

_UNTIL_STARTED = {
    Course.STOPPED: Notice.STOPPED,
    Course.FAILED_FOR_GOOD: Notice.FAILED_FOR_GOOD,
}
"""Ends after which only a person starts the pipeline again (SB6)."""


class Standby(Machine):
    """Decides when to take over."""

    LOOK_MS = 500
    """Between two looks at the beats of a running pipeline: one small read each."""

    REST_MS = 2_000
    """Between two looks where there are no beats to read: each of them reads the log."""

    SILENCE_MS = 5_000
    """Two beats and a half. One slow write is no death, and a takeover is to be done within ten seconds. The least and
    the default: on machines or storage that stand still for longer a healthy driver would be replaced."""

    UNKNOWN_MS = 60_000
    """Without any heartbeat (SB11): longer than a first start takes, or most checkpoint intervals."""

    GAP_MS = 2 * BEAT_MS
    """A longer time without a look proves nothing about what happened in it (SB7)."""

    def __init__(self, silence_ms: int | None = None) -> None:
        """``silence_ms``: how long a driver may say nothing, instead of ``SILENCE_MS``."""
        super().__init__()
        self._silence_ms = self.SILENCE_MS if silence_ms is None else silence_ms
        self._phase = Phase.CREATED
        self._known: Observed | None = None
        self._changed_ms = 0
        """End of the look that first saw what is known now."""
        self._looked_ms: int | None = None
        """End of the last look; None: it failed, or there was none."""
        self._said: Notice | None = None

    @property
    def phase(self) -> Phase:
        """What the standby waits for."""
        return self._phase

    def handle(self, event: Event) -> list[Effect]:
        """Advance by one event; return the effects to run, in order."""
        self._begin(event)
        match event:
            case Begin():
                effects = self._look()
            case PauseOver():
                effects = self._look() if self._phase is Phase.PAUSING else [Ignored("no pause")]
            case Looked():
                effects = self._on_looked(event)
            case LookFailed():
                effects = self._on_failed(event)
            case TakeoverLost():
                effects = self._on_lost()
            case _:
                assert_never(event)
        self._check()
        return effects

    # -- looking ----------------------------------------------------------------------------------------------------

    def _look(self) -> list[Effect]:
        known = self._known
        if known is None or self._looked_ms is None or not known.knows_beats or known.course in _UNTIL_STARTED:
            return self._look_at_all()
        self._enter(Phase.LOOKING)
        return [LookAtBeat(known.generation)]

    def _look_at_all(self) -> list[Effect]:
        self._enter(Phase.LOOKING)
        return [LookAtAll()]

    def _on_looked(self, event: Looked) -> list[Effect]:
        if self._phase is not Phase.LOOKING:
            raise self._violation("an answer to no look")
        found = event.observed
        if not event.is_all and self._has_slept(event):
            self._looked_ms = None
            return self._look_at_all()  # there may be another generation by now
        if not event.is_all:
            assert self._known is not None, "a look at one beat follows a look at all"
            found = replace(self._known, mark=found.mark, course=found.course)  # a beat says nothing of the rest
        self._count(event, found)
        # decided by looks at everything: how a run ended is in an object of its own, not in its beat
        if found.course in (Course.FINISHED, Course.DRAINED) and event.is_all:
            self._enter(Phase.ENDED)
            return [StandDown(found.course)]
        if found.course in _UNTIL_STARTED and event.is_all:
            return self._wait(_UNTIL_STARTED[found.course], found.reason, self.REST_MS)
        if not self._is_due(event, found):
            notice = Notice.WATCHING if found.knows_beats else Notice.NOT_STARTED
            return self._wait(notice, found.owner, self.LOOK_MS if found.knows_beats else self.REST_MS)
        # before a takeover everything is read: there may be another generation, or an end
        if not event.is_all:
            return self._look_at_all()
        if found.course is Course.STOPPING:  # SB6: it died of it
            return self._wait(Notice.STOPPED, "", self.REST_MS)
        return self._take(found)

    def _count(self, event: Looked, found: Observed) -> None:
        """Start counting the silence again if anything changed, or this standby did not look for a while (SB7)."""
        assert event.began_ms <= event.ended_ms, "silence is measured on one monotonic clock (SB7)"
        before = self._known
        is_same = before is not None and (before.generation, before.mark) == (found.generation, found.mark)
        if not is_same or self._has_slept(event):
            self._changed_ms = event.ended_ms
        self._known, self._looked_ms = found, event.ended_ms

    def _has_slept(self, event: Looked) -> bool:
        return self._looked_ms is None or event.began_ms - self._looked_ms > self.GAP_MS

    def _is_due(self, event: Looked, found: Observed) -> bool:
        if found.course is Course.FAILED or (found.is_ours and found.course is not Course.STOPPING):  # SB10
            return True
        if found.course not in (Course.RUNNING, Course.DRAINING, Course.STOPPING):
            return True  # an end that a beat tells of: everything has to be looked at
        # from the end of one look to the begin of another: it was silent for at least so long (SB7)
        patience_ms = self._silence_ms if found.knows_beats else max(self.UNKNOWN_MS, self._silence_ms)
        return event.began_ms - self._changed_ms >= patience_ms

    def _on_failed(self, event: LookFailed) -> list[Effect]:
        if self._phase is not Phase.LOOKING:
            raise self._violation("an answer to no look")
        self._looked_ms = None  # SB7: what happens meanwhile is not seen
        return self._wait(Notice.UNREACHABLE, event.problem, self.REST_MS)

    def _wait(self, notice: Notice, detail: str, pause_ms: int) -> list[Effect]:
        self._enter(Phase.PAUSING)
        return [*self._say(notice, detail), Pause(pause_ms)]

    def _say(self, notice: Notice, detail: str) -> list[Effect]:
        if self._said is notice:  # SB13
            return []
        self._said = notice
        return [Say(notice, detail)]

    # -- taking over ------------------------------------------------------------------------------------------------

    def _take(self, found: Observed) -> list[Effect]:
        self._enter(Phase.TAKING)
        notices = self._say(Notice.TAKING_OVER, found.owner)
        drain = found.course is Course.DRAINING or found.was_draining  # SB14
        return [*notices, TakeOver(found.generation, drain=drain)]

    def _on_lost(self) -> list[Effect]:
        if self._phase is not Phase.TAKING:
            raise self._violation("lost a takeover that was not under way")
        # another generation is at work: what is known of the last one says nothing of it
        self._known = self._looked_ms = None
        return [*self._say(Notice.OUTRUN, ""), *self._look_at_all()]

    def _enter(self, phase: Phase) -> None:
        assert phase in LEGAL_PHASES[self._phase], f"{self._phase} does not lead to {phase}"
        self._phase = phase

    def _check(self) -> None:
        if self._phase is Phase.TAKING:
            assert self._known is not None, "who takes over knows from whom"
            assert self._known.course in (Course.RUNNING, Course.DRAINING, Course.FAILED), "not ours to start (SB6)"
