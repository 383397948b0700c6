"""When a standby takes over (docs/spec/standby.md)."""

from __future__ import annotations

import pytest

from headgate.errors import ProtocolViolation
from headgate.model.ids import Generation
from headgate.model.pipeline_identity import Beat, Course
from headgate.protocol.machine import Ignored
from headgate.protocol.supervision.standby import (
    BEAT_MS,
    Effect,
    HeartbeatTimer,
    LookAtAll,
    LookAtBeat,
    Looked,
    LookFailed,
    Notice,
    Observed,
    Pause,
    PauseOver,
    Phase,
    Say,
    Standby,
    StandDown,
    TakeOver,
    TakeoverLost,
)
from headgate.protocol.supervision.supervisor_events import Begin

FOURTH = Generation(4)
LOOK_MS, REST_MS, SILENCE_MS = Standby.LOOK_MS, Standby.REST_MS, Standby.SILENCE_MS
WATCHING = Say(Notice.WATCHING, "one")


def seen(mark: str = "a", course: Course = Course.RUNNING, generation: Generation = FOURTH, **more: object) -> Observed:
    return Observed(generation, mark, course, "one", **more)  # type: ignore[arg-type]


class Watched:
    """A standby whose looks take no time, and a clock."""

    def __init__(self, silence_ms: int | None = None) -> None:
        self.machine = Standby(silence_ms)
        assert self.machine.handle(Begin()) == [LookAtAll()]

    def all(self, at_ms: int, observed: Observed, took_ms: int = 0) -> list[Effect]:
        return self.machine.handle(Looked(at_ms, at_ms + took_ms, observed, is_all=True))

    def beat(self, at_ms: int, observed: Observed, took_ms: int = 0) -> list[Effect]:
        return self.machine.handle(Looked(at_ms, at_ms + took_ms, observed, is_all=False))

    def next(self) -> list[Effect]:
        return self.machine.handle(PauseOver())

    def watch(self, begin_ms: int, end_ms: int, observed: Observed) -> None:
        """Look at the same beat as often as the machine wants to, until just before ``end_ms``."""
        for at_ms in range(begin_ms, end_ms, LOOK_MS):
            assert self.next() == [LookAtBeat(observed.generation)]
            assert self.beat(at_ms, observed) == [Pause(LOOK_MS)], at_ms


def watching(observed: Observed | None = None) -> Watched:
    """Return a standby that saw ``observed`` first at 0."""
    standby = Watched()
    assert standby.all(0, observed or seen()) == [WATCHING, Pause(LOOK_MS)]
    return standby


def test_after_the_silence_it_takes_over_behind_the_silent_generation() -> None:  # SB8
    standby = watching()
    standby.watch(500, SILENCE_MS, seen())
    standby.next()
    assert standby.beat(SILENCE_MS, seen()) == [LookAtAll()], "everything is looked at once more"
    assert standby.all(SILENCE_MS + 1, seen()) == [Say(Notice.TAKING_OVER, "one"), TakeOver(FOURTH, drain=False)]
    assert standby.machine.phase is Phase.TAKING


def test_it_waits_as_long_as_it_was_told_to() -> None:  # SB8
    standby = Watched(silence_ms=20_000)
    standby.all(0, seen())
    standby.watch(500, 20_000, seen())
    standby.next()
    assert standby.beat(20_000, seen()) == [LookAtAll()]
    nobody_yet = seen("", knows_beats=False)
    patient = Watched(silence_ms=2 * Standby.UNKNOWN_MS)
    for at_ms in range(0, 2 * Standby.UNKNOWN_MS, REST_MS):
        assert patient.all(at_ms, nobody_yet)[-1] == Pause(REST_MS)
        patient.next()
    assert isinstance(patient.all(2 * Standby.UNKNOWN_MS, nobody_yet)[-1], TakeOver)


@pytest.mark.parametrize("took_ms", [0, 200])
@pytest.mark.parametrize("died_ms", range(0, LOOK_MS + 200, 50))
def test_it_takes_over_within_seven_seconds_of_the_last_beat(died_ms: int, took_ms: int) -> None:  # SB8
    """The driver dies behind a beat, at any moment between two looks: three seconds are left to run the pipeline."""
    standby, at_ms = watching(), 0
    effects: list[Effect] = [Pause(LOOK_MS)]
    while not any(isinstance(effect, TakeOver) for effect in effects):
        match effects[-1]:
            case Pause(pause_ms):
                at_ms += pause_ms
                effects = standby.next()
            case LookAtBeat():
                effects = standby.beat(at_ms, seen("last" if at_ms >= died_ms else "a"), took_ms)
                at_ms += took_ms
            case LookAtAll():
                effects = standby.all(at_ms, seen("last"), took_ms)
                at_ms += took_ms
            case other:
                raise AssertionError(other)
        assert at_ms <= died_ms + 7_000


def test_a_beat_starts_the_count_again() -> None:  # SB7
    standby = watching()
    standby.watch(500, 4_501, seen())
    standby.next()
    assert standby.beat(4_900, seen("b")) == [Pause(LOOK_MS)]
    standby.watch(5_400, 4_900 + SILENCE_MS, seen("b"))
    standby.next()
    assert standby.beat(4_900 + SILENCE_MS, seen("b")) == [LookAtAll()]


@pytest.mark.parametrize("found", [seen("", generation=Generation(5)), seen("b")], ids=["another generation", "a beat"])
def test_what_the_last_look_finds_starts_the_count_again(found: Observed) -> None:  # SB8
    standby = watching()
    standby.watch(500, SILENCE_MS, seen())
    standby.next()
    standby.beat(SILENCE_MS, seen())
    assert standby.all(SILENCE_MS, found) == [Pause(LOOK_MS)]
    standby.watch(SILENCE_MS + 500, 2 * SILENCE_MS, found)
    standby.next()
    assert standby.beat(2 * SILENCE_MS, found) == [LookAtAll()]
    assert standby.all(2 * SILENCE_MS, found)[-1] == TakeOver(found.generation, drain=False)


def test_silence_is_counted_between_looks() -> None:  # SB7: what happened during a look is not known
    standby = Watched()
    standby.all(0, seen(), took_ms=3_000)
    standby.next()
    assert standby.beat(4_000, seen(), took_ms=SILENCE_MS) == [Pause(LOOK_MS)], "it may have beaten at 4,001"
    standby.next()
    assert standby.beat(4_500 + SILENCE_MS, seen()) == [LookAtAll()]


def test_after_an_outage_the_count_starts_again() -> None:  # SB7
    standby = watching()
    standby.watch(500, 4_501, seen())
    standby.next()
    gone = Say(Notice.UNREACHABLE, "no route")
    assert standby.machine.handle(LookFailed("no route")) == [gone, Pause(REST_MS)]
    assert standby.next() == [LookAtAll()]
    assert standby.all(60_000, seen()) == [WATCHING, Pause(LOOK_MS)], "the driver had the same outage"
    standby.watch(60_500, 60_000 + SILENCE_MS, seen())
    standby.next()
    assert standby.beat(60_000 + SILENCE_MS, seen()) == [LookAtAll()]


def test_a_standby_that_slept_counts_again() -> None:  # SB7
    standby = watching()
    standby.watch(500, 1_001, seen())
    standby.next()
    assert standby.beat(90_000, seen()) == [LookAtAll()], "there may be another generation by now"
    assert standby.all(90_001, seen()) == [Pause(LOOK_MS)]
    standby.watch(90_500, 90_001 + SILENCE_MS, seen())


@pytest.mark.parametrize(
    ("course", "notice"), [(Course.STOPPED, Notice.STOPPED), (Course.FAILED_FOR_GOOD, Notice.FAILED_FOR_GOOD)]
)
def test_what_its_user_stopped_is_not_started_by_a_standby(course: Course, notice: Notice) -> None:  # SB6
    standby = watching()
    ended = seen("z", course, reason="why")
    standby.next()
    assert standby.beat(500, ended) == [LookAtAll()]
    assert standby.all(501, ended) == [Say(notice, "why"), Pause(REST_MS)]
    for at_ms in range(2_000, 600_000, REST_MS):
        assert standby.next() == [LookAtAll()], "it may be started again"
        assert standby.all(at_ms, ended) == [Pause(REST_MS)]
    again = seen("a", generation=Generation(5))
    standby.next()
    assert standby.all(601_000, again) == [WATCHING, Pause(LOOK_MS)]


def test_a_driver_that_died_while_it_stopped_is_not_started_again() -> None:  # SB6
    stopping = seen(course=Course.STOPPING)
    standby = watching(stopping)
    standby.watch(500, SILENCE_MS, stopping)
    standby.next()
    assert standby.beat(SILENCE_MS, stopping) == [LookAtAll()]
    assert standby.all(SILENCE_MS, stopping) == [Say(Notice.STOPPED), Pause(REST_MS)]


@pytest.mark.parametrize("course", [Course.FINISHED, Course.DRAINED])
def test_a_standby_of_a_finished_pipeline_ends(course: Course) -> None:  # SB6
    standby = watching()
    standby.next()
    assert standby.beat(500, seen("z", course)) == [LookAtAll()]
    assert standby.all(500, seen("z", course)) == [StandDown(course)]
    assert standby.machine.phase is Phase.ENDED
    assert Watched().all(0, seen("z", course)) == [StandDown(course)]


def test_a_run_that_said_that_it_failed_is_taken_over_at_once() -> None:  # SB10
    standby = watching()
    failed = seen("z", Course.FAILED)
    standby.next()
    assert standby.beat(500, failed) == [LookAtAll()]
    assert standby.all(500, failed)[-1] == TakeOver(FOURTH, drain=False)


def test_the_dead_driver_of_ones_own_supervisor_is_followed_at_once() -> None:  # SB10
    assert Watched().all(0, seen(is_ours=True))[-1] == TakeOver(FOURTH, drain=False)
    assert Watched().all(0, seen(course=Course.STOPPING, is_ours=True)) == [WATCHING, Pause(LOOK_MS)]


def test_a_run_that_was_draining_is_drained_on() -> None:  # SB10
    assert Watched().all(0, seen(course=Course.DRAINING, is_ours=True))[-1] == TakeOver(FOURTH, drain=True)


def test_a_run_that_failed_while_it_drained_is_drained_on_at_once() -> None:  # SB14
    standby = watching()
    failed = seen("z", Course.FAILED, was_draining=True)
    standby.next()
    assert standby.beat(500, seen("z", Course.FAILED)) == [LookAtAll()]
    assert standby.all(500, failed)[-1] == TakeOver(FOURTH, drain=True)


@pytest.mark.parametrize("generation", [Generation(0), Generation(3)], ids=["no run", "claimed"])
def test_without_any_heartbeat_it_waits_longer(generation: Generation) -> None:  # SB11
    silent = seen("7", generation=generation, knows_beats=False)
    standby = Watched()
    assert standby.all(0, silent) == [Say(Notice.NOT_STARTED, "one"), Pause(REST_MS)]
    for at_ms in range(REST_MS, 60_000, REST_MS):
        assert standby.next() == [LookAtAll()]
        assert standby.all(at_ms, silent) == [Pause(REST_MS)], at_ms
    standby.next()
    assert standby.all(60_000, silent)[-1] == TakeOver(generation, drain=False)


def test_a_log_that_grows_is_a_sign_of_life() -> None:  # SB11
    standby = Watched()
    for at_ms in range(0, 5 * Standby.UNKNOWN_MS, REST_MS):
        found = standby.all(at_ms, seen(str(at_ms // 50_000), knows_beats=False))
        assert found[-1] == Pause(REST_MS)
        standby.next()


def test_whoever_loses_the_race_goes_on_waiting() -> None:
    standby = Watched()
    standby.all(0, seen("z", Course.FAILED))
    assert standby.machine.handle(TakeoverLost()) == [Say(Notice.OUTRUN), LookAtAll()]
    heir = seen("", generation=Generation(5))
    assert standby.all(10, heir) == [WATCHING, Pause(LOOK_MS)]
    standby.watch(510, 10 + SILENCE_MS, heir)


def test_each_change_is_said_once() -> None:  # SB13
    standby = Watched()
    said = [standby.machine.handle(LookFailed("gone"))]
    for at_ms, found in ((9_000, seen()), (9_500, seen("b")), (20_000, seen("c")), (60_000, seen("d"))):
        standby.next()
        said.append(standby.all(at_ms, found))
    assert [e for effects in said for e in effects if isinstance(e, Say)] == [Say(Notice.UNREACHABLE, "gone"), WATCHING]


def test_what_cannot_happen_is_refused() -> None:
    with pytest.raises(ProtocolViolation):
        watching().machine.handle(TakeoverLost())
    with pytest.raises(ProtocolViolation):
        watching().machine.handle(LookFailed("gone"))
    assert Watched().machine.handle(PauseOver()) == [Ignored("no pause")]


def test_a_beat_is_due_at_a_claim_a_wish_and_every_period() -> None:  # SB1
    pulse = HeartbeatTimer("me")
    first = pulse.beat(0, FOURTH, Course.RUNNING)
    assert first == Beat(FOURTH, "me", 1)
    assert pulse.beat(BEAT_MS - 1, FOURTH, Course.RUNNING) is None
    assert pulse.beat(BEAT_MS, FOURTH, Course.RUNNING) == Beat(FOURTH, "me", 2)
    assert pulse.beat(BEAT_MS + 1, FOURTH, Course.STOPPING) == Beat(FOURTH, "me", 3, Course.STOPPING)
    assert pulse.beat(BEAT_MS + 2, Generation(5), Course.STOPPING) == Beat(Generation(5), "me", 4, Course.STOPPING)
    assert pulse.beat(BEAT_MS + 3, Generation(5), Course.STOPPING) is None


def test_silence_is_longer_than_a_beat_that_comes_late() -> None:  # SB8: one slow write is no death
    assert SILENCE_MS >= 2 * BEAT_MS + 2 * LOOK_MS
    assert Standby.GAP_MS > REST_MS
