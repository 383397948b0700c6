"""Whether and when a driver is started again (docs/spec/driver-supervisor.md)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.errors import ProtocolViolation
from headgate.model.config import ExponentialDelay, FixedDelay, NoRestart, RestartStrategy
from headgate.model.failure import ExitCode
from headgate.model.ids import Generation
from headgate.model.pipeline_identity import Course
from headgate.protocol.machine import Ignored
from headgate.protocol.supervision.driver_supervisor import (
    ArmDelay,
    ChildClaimed,
    ChildEnded,
    ChildHeard,
    ChildListens,
    Command,
    CommandReceived,
    DelayOver,
    DriverSupervisor,
    Effect,
    Event,
    ExitWith,
    Phase,
    ReportRestart,
    StartChild,
    Tell,
)
from headgate.protocol.supervision.supervisor_events import Begin

LEFT = (
    "the driver was asked to stop and ended before it had said that it was done, so its last checkpoint may be "
    "missing; it is not started again, and the same command continues from the newest checkpoint there is"
)

KILLED = -9


def ended(status: int | None, at_ms: int = 0, problem: str = "") -> ChildEnded:
    return ChildEnded(status, at_ms, 0.5, problem)


def running(strategy: RestartStrategy | None = None, *events: Event, is_standby: bool = False) -> DriverSupervisor:
    supervisor = DriverSupervisor(strategy or FixedDelay(delay_ms=70), is_standby=is_standby)
    assert supervisor.handle(Begin()) == [StartChild(None)]
    for event in events:
        supervisor.handle(event)
    return supervisor


@pytest.mark.parametrize("status", [KILLED, -6, -15, ExitCode.FAILED, 137, 5])
def test_a_driver_that_died_is_started_again_after_the_delay_of_the_strategy(status: int) -> None:  # KR2
    supervisor = running()
    assert supervisor.handle(ended(status)) == [ReportRestart(ended(status), 70, 1), ArmDelay(70)]
    assert supervisor.handle(DelayOver()) == [StartChild(None)]
    assert supervisor.handle(ended(status)) == [ReportRestart(ended(status), 70, 2), ArmDelay(70)]


@pytest.mark.parametrize("code", [ExitCode.DONE, ExitCode.USAGE, ExitCode.FOR_GOOD, ExitCode.REPLACED])
def test_an_end_that_starting_again_does_not_cure_ends_the_supervisor(code: ExitCode) -> None:  # KR3
    supervisor = running()
    assert supervisor.handle(ended(code)) == [ExitWith(code)]
    assert supervisor.phase is Phase.ENDED


def test_a_standby_that_was_replaced_stands_by_again() -> None:  # KR3
    replaced = ended(ExitCode.REPLACED)
    assert running(is_standby=True).handle(replaced) == [ReportRestart(replaced, 70, 1), ArmDelay(70)]
    assert running(is_standby=True).handle(ended(ExitCode.DONE)) == [ExitWith(ExitCode.DONE)]
    assert running(is_standby=True).handle(ended(ExitCode.FOR_GOOD)) == [ExitWith(ExitCode.FOR_GOOD)]


@pytest.mark.parametrize(("status", "code"), [(KILLED, 137), (ExitCode.FAILED, 1), (None, 1)])
def test_a_strategy_that_gives_up_ends_the_supervisor_with_the_last_code(status: int | None, code: int) -> None:  # KR5
    assert running(NoRestart()).handle(ended(status)) == [ExitWith(code, "the restart strategy is 'none'")]
    supervisor = running(FixedDelay(attempts=1, delay_ms=5), ended(KILLED), DelayOver())
    assert supervisor.handle(ended(status)) == [ExitWith(code, "it failed 2 times, and 1 restarts were allowed")]


def test_a_quiet_time_makes_an_exponential_delay_start_over() -> None:  # KR2: the ends of children are its failures
    strategy = ExponentialDelay(initial_ms=100, multiplier=3.0, jitter=0.0, reset_after_ms=1_000)
    supervisor = running(strategy)
    delays = []
    for at_ms in (0, 500, 5_000):
        delays += [e.after_ms for e in supervisor.handle(ended(KILLED, at_ms)) if isinstance(e, ArmDelay)]
        supervisor.handle(DelayOver())
    assert delays == [100, 300, 100]


@pytest.mark.parametrize("command", [Command.STOP, Command.INTERRUPT])
@pytest.mark.parametrize(("status", "code"), [(0, 0), (KILLED, 137), (-15, 143), (1, 1)])
def test_after_a_stop_nothing_is_started_again(command: Command, status: int, code: int) -> None:  # KR6
    supervisor = running(None, ChildListens())
    assert supervisor.handle(CommandReceived(command)) == [Tell(command)]
    assert supervisor.handle(CommandReceived(command)) == [Tell(command)], "the second one is passed on, too"
    assert supervisor.handle(ended(status)) == [ExitWith(code, "" if status == ExitCode.DONE else LEFT)]


@pytest.mark.parametrize(("status", "code"), [(KILLED, 137), (ExitCode.FAILED, 1), (None, 1), (-15, 143)])
def test_a_driver_that_was_asked_to_stop_itself_is_not_started_again(status: int | None, code: int) -> None:  # KR13
    supervisor = running(None, ChildListens())
    told = [Ignored("kept in case the child dies")]
    assert supervisor.handle(ChildHeard(Course.STOPPING)) == told
    assert supervisor.handle(ChildHeard(Course.STOPPING)) == told, "it was asked twice"
    assert supervisor.handle(ended(status)) == [ExitWith(code, LEFT)]


@pytest.mark.parametrize("code", [ExitCode.DONE, ExitCode.USAGE, ExitCode.FOR_GOOD, ExitCode.REPLACED])
@pytest.mark.parametrize("is_standby", [False, True])
def test_what_a_driver_said_itself_about_its_stop_is_the_last_word(
    code: ExitCode, is_standby: bool
) -> None:  # KR3, KR13
    supervisor = running(None, ChildHeard(Course.STOPPING), is_standby=is_standby)
    assert supervisor.handle(ended(code)) == [ExitWith(code)]


def test_a_driver_that_was_asked_to_drain_itself_is_started_again_and_drains() -> None:  # KR7, KR13
    supervisor = running(None, ChildListens(), ChildHeard(Course.DRAINING))
    supervisor.handle(ended(KILLED))
    assert supervisor.handle(DelayOver()) == [StartChild(None)]
    assert supervisor.handle(ChildListens()) == [Tell(Command.DRAIN)]
    supervisor.handle(ChildHeard(Course.STOPPING))
    assert supervisor.handle(ended(KILLED)) == [ExitWith(137, LEFT)], "a stop ends a drain"


def test_a_stop_reaches_a_driver_that_does_not_listen_yet() -> None:  # KR6
    assert running().handle(CommandReceived(Command.STOP)) == [Tell(Command.STOP)]


def test_a_wish_to_drain_waits_until_the_driver_listens_and_outlives_it() -> None:  # KR7
    supervisor = running()
    assert supervisor.handle(CommandReceived(Command.DRAIN)) == [Ignored("sent when the child listens")]
    assert supervisor.handle(ChildListens()) == [Tell(Command.DRAIN)]
    supervisor.handle(ended(KILLED))
    supervisor.handle(DelayOver())
    assert supervisor.handle(ChildListens()) == [Tell(Command.DRAIN)], "the next driver goes on draining"


def test_a_wish_between_two_drivers_is_for_the_next_one() -> None:  # KR7
    supervisor = running(None, ChildListens(), ended(KILLED))
    waits = [Ignored("sent when the child listens")]
    assert supervisor.handle(CommandReceived(Command.DRAIN)) == waits
    assert supervisor.handle(CommandReceived(Command.CHECKPOINT)) == waits
    supervisor.handle(DelayOver())
    assert supervisor.handle(ChildListens()) == [Tell(Command.DRAIN), Tell(Command.CHECKPOINT)]


def test_a_wish_for_a_checkpoint_is_told_once() -> None:  # KR7
    supervisor = running(None, CommandReceived(Command.CHECKPOINT))
    assert supervisor.handle(ChildListens()) == [Tell(Command.CHECKPOINT)]
    assert supervisor.handle(CommandReceived(Command.CHECKPOINT)) == [Tell(Command.CHECKPOINT)]
    supervisor.handle(ended(KILLED))
    supervisor.handle(DelayOver())
    assert supervisor.handle(ChildListens()) == [Ignored("nothing was requested")]


@pytest.mark.parametrize("command", [Command.STOP, Command.INTERRUPT])
def test_a_stop_between_two_drivers_ends_at_once(command: Command) -> None:  # KR8
    supervisor = running(None, ended(KILLED))
    (effect,) = supervisor.handle(CommandReceived(command))
    assert effect == ExitWith(
        ExitCode.DONE, "stopped between two drivers; the same command continues from the last completed checkpoint"
    )
    assert supervisor.handle(DelayOver()) == [Ignored("no restart is due")]


def test_the_next_driver_is_told_what_the_last_one_claimed() -> None:  # KR10
    supervisor = running(None, ChildClaimed(Generation(4)), ChildClaimed(Generation(6)), ended(KILLED))
    assert supervisor.handle(DelayOver()) == [StartChild(Generation(6))]
    supervisor.handle(ended(KILLED))
    assert supervisor.handle(DelayOver()) == [StartChild(Generation(6))], "one that claimed nothing changes nothing"


def test_a_driver_that_cannot_be_started_counts_as_one_that_died() -> None:  # KR11
    supervisor = running()
    failed = ended(None, problem="no more processes")
    assert supervisor.handle(failed) == [ReportRestart(failed, 70, 1), ArmDelay(70)]


def test_what_cannot_happen_is_refused() -> None:
    with pytest.raises(ProtocolViolation):
        running().handle(Begin())
    with pytest.raises(ProtocolViolation):
        running(None, ended(KILLED)).handle(ended(KILLED))


STATUSES = st.sampled_from([KILLED, -15, -6, 0, 1, 2, 3, 4, 137, None])
STRATEGIES = st.sampled_from([NoRestart(), FixedDelay(2, 50), FixedDelay(None, 0), ExponentialDelay()])


@given(STRATEGIES, st.booleans(), st.data())
def test_there_is_never_more_than_one_child(strategy: RestartStrategy, is_standby: bool, data: st.DataObject) -> None:
    """KR1–KR8 in any history: one child at a time, none after a stop or an end, delays waited out."""
    supervisor = DriverSupervisor(strategy, is_standby=is_standby)
    now, is_alive, is_delayed, is_stopped, over = 0, False, False, False, None
    effects: list[Effect] = supervisor.handle(Begin())
    for _ in range(40):
        for effect in effects:
            assert over is None
            match effect:
                case StartChild():
                    assert not is_alive, "KR1"
                    assert not is_stopped, "KR6"
                    is_alive = True
                case ArmDelay():
                    assert not is_alive
                    is_delayed = True
                case Tell():
                    assert is_alive
                case ExitWith():
                    over = effect.code
        if over is not None:
            break
        legal: list[Event] = [CommandReceived(data.draw(st.sampled_from(list(Command))))]
        if is_alive:
            legal += [ended(data.draw(STATUSES), now), ended(KILLED, now), ChildListens()]
            legal += [ChildHeard(data.draw(st.sampled_from([Course.STOPPING, Course.DRAINING])))]
        if is_delayed:
            legal.append(DelayOver())
        event = data.draw(st.sampled_from(legal))
        now += data.draw(st.integers(0, 100_000))
        if isinstance(event, ChildEnded):
            is_alive = False
        if isinstance(event, DelayOver):
            is_delayed = False
        is_stopped |= isinstance(event, CommandReceived) and event.command in (Command.STOP, Command.INTERRUPT)
        is_stopped |= event == ChildHeard(Course.STOPPING)
        effects = supervisor.handle(event)
        if isinstance(event, ChildEnded) and not is_stopped and event.status in (0, 2, 3):
            assert effects == [ExitWith(event.status)], "KR3"
    if over is not None:
        assert supervisor.phase is Phase.ENDED
