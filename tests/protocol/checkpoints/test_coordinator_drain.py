"""Draining: the sources end where they are, and the final checkpoint follows (docs/spec/final-checkpoint.md)."""

from __future__ import annotations

import pytest
from tests.protocol.checkpoints.coordinating import (
    INTERVAL,
    STARTED,
    A,
    acked,
    begin,
    coordinator,
    finish,
    manifest,
    reserved,
    triggered,
    written,
)
from tests.protocol.checkpoints.test_coordinator_end import FINISHED, NO_MORE_PERIODIC
from tests.protocol.making import cp

from headgate.protocol.checkpoints.coordinator import Phase
from headgate.protocol.checkpoints.coordinator_events import (
    ArmTimer,
    CancelTimer,
    CheckpointRequested,
    ConcludeGeneration,
    DrainRequested,
    DrainSources,
    ExpiryTimer,
    IntervalTimer,
    NotifyComplete,
    ReserveId,
    StopRequested,
)
from headgate.protocol.machine import Ignored

DRAIN = DrainRequested()


def test_a_drain_tells_the_sources_and_the_end_is_the_final_checkpoint() -> None:  # E7
    machine = coordinator(STARTED)
    assert machine.handle(DRAIN) == [DrainSources()]
    assert machine.phase is Phase.RUNNING
    assert machine.handle(finish(A)) == [Ignored("other subtasks still process")]
    assert machine.handle(FINISHED[1]) == [NO_MORE_PERIODIC, ReserveId(cp(10))]
    assert machine.handle(reserved(10)) == triggered(10)
    machine.handle(acked(10)[0])
    assert machine.handle(acked(10)[1]) == [manifest(10, is_final=True, is_draining=True)]
    assert machine.handle(written(10))[-1] == ConcludeGeneration(cp(10), is_final=True)


def test_a_drain_before_the_start_is_remembered() -> None:  # E7
    machine = coordinator()
    assert machine.handle(DRAIN) == [Ignored("remembered until every participant runs")]
    assert machine.is_draining
    assert machine.handle(STARTED) == [DrainSources(), ArmTimer(IntervalTimer(), 300)]


def test_a_drain_before_the_start_is_remembered_without_periodic_checkpoints() -> None:  # E7
    assert coordinator(DRAIN, interval_ms=0).handle(STARTED) == [DrainSources()]


def test_a_drain_asked_for_twice_is_one() -> None:  # E7
    assert coordinator(STARTED, DRAIN).handle(DRAIN) == [Ignored("already draining")]


@pytest.mark.parametrize("wish", [INTERVAL, CheckpointRequested()])
def test_checkpoints_are_taken_while_it_drains(wish: object) -> None:  # E7
    machine = coordinator(STARTED, DRAIN, finish(A))
    assert ReserveId(cp(10)) in machine.handle(wish)  # type: ignore[arg-type]


def test_a_checkpoint_that_began_while_draining_says_so() -> None:  # E9
    machine = coordinator(STARTED, *begin(10), DRAIN, acked(10)[0])
    assert machine.handle(acked(10)[1]) == [manifest(10, is_draining=False)], "its barrier went out before the drain"
    for event in (written(10), *begin(11), acked(11)[0]):
        machine.handle(event)
    assert machine.handle(acked(11)[1]) == [manifest(11, is_draining=True)]
    assert machine.handle(written(11)) == [CancelTimer(ExpiryTimer(cp(11))), NotifyComplete(cp(11))], "it goes on"


def test_an_id_being_reserved_when_the_drain_begins_is_marked() -> None:  # E9
    machine = coordinator(STARTED, INTERVAL, DRAIN)
    assert machine.handle(reserved(10)) == triggered(10)
    machine.handle(acked(10)[0])
    assert machine.handle(acked(10)[1]) == [manifest(10, is_draining=True)]


def test_a_stop_wins_over_a_drain() -> None:  # E10
    machine = coordinator(STARTED, DRAIN)
    assert machine.handle(StopRequested()) == [NO_MORE_PERIODIC, ReserveId(cp(10))]
    for event in (reserved(10), acked(10)[0]):
        machine.handle(event)
    assert machine.handle(acked(10)[1]) == [manifest(10, is_final=False, is_draining=True)], "the next run drains on"
    assert machine.handle(written(10))[-1] == ConcludeGeneration(cp(10), is_final=False)


def test_a_drain_after_a_stop_changes_nothing() -> None:  # E10
    machine = coordinator(STARTED, StopRequested(), reserved(10), acked(10)[0])
    assert machine.handle(DRAIN) == [Ignored("already ending")]
    assert machine.handle(acked(10)[1]) == [manifest(10)]


def test_a_drain_after_all_have_finished_changes_nothing() -> None:  # E10
    machine = coordinator(STARTED, *FINISHED)
    assert machine.handle(DRAIN) == [Ignored("already ending")]
    machine.handle(reserved(10))
    machine.handle(acked(10)[0])
    assert machine.handle(acked(10)[1]) == [manifest(10, is_final=True)]
