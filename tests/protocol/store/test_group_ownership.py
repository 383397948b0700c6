"""Reader groups of pipelines: whose a group is, and who reads what (docs/spec/group-source.md)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.protocol.store.grouping import STREAM, Log, after, answered, at, new_group

from headgate.protocol.store import layouts
from headgate.protocol.store.group_ownership import Claim, Claimant, Replaced
from headgate.protocol.store.reader_group import (
    OPEN_CHECKPOINTS_MAX,
    CheckpointAsked,
    CheckpointForgotten,
    Event,
    Group,
    GroupRefused,
    Joined,
    Passed,
    ResetAsked,
    Silent,
    Stale,
)
from headgate.protocol.store.reading_order import whole_cut

CLAIM = Claim("p/source", "life", "file:///checkpoints", 1)
US = Claimant("p/source", "life", 1)
READERS = 2


def joins(reader: str, claimant: Claimant | None = US, expected: int = READERS) -> Joined:
    return Joined(reader, f"{reader}1", 0, claimant=claimant, expected=expected)


def reset(log: Log, claim: Claim | None, token: str = "r1", positions: dict[int, int] | None = None) -> ResetAsked:
    return ResetAsked(token, {STREAM: 1}, {STREAM: log.start(begin=positions)}, claim=claim)


def passes(reader: str, checkpoint: str, *, ended: bool = False, **positions: int) -> Passed:
    """Positions as ``s0=4``."""
    found = {at(int(name[1:])): position for name, position in positions.items()}
    return Passed(reader, f"{reader}1", checkpoint, found, (STREAM,) if ended else ())


def asks(name: str, claimant: Claimant | None = US) -> CheckpointAsked:
    return CheckpointAsked(name, claimant)


def claimed(log: Log, *events: Event) -> Group:
    return after(replace(new_group(log), claim=CLAIM), log, *events)


def gathered(log: Log, *events: Event) -> Group:
    return claimed(log, joins("a"), joins("b"), *events)


def problem(group: Group, log: Log, event: Event) -> str:
    answer = answered(group, log, event)
    assert isinstance(answer, GroupRefused), answer
    return answer.problem


@pytest.fixture
def log() -> Log:
    """Two segments with four events each."""
    found = Log()
    for number in range(8):
        found.write(number)
    return found


# -- whose it is ------------------------------------------------------------------------------------------------------


def test_a_group_of_a_pipeline_is_nobody_elses(log: Log) -> None:  # GS1
    group = gathered(log)
    for event in (joins("c", None), asks("c", None), CheckpointForgotten("c"), reset(log, None)):
        assert "source 'source' of pipeline 'p' with its checkpoints in file:///checkpoints" in problem(
            group, log, event
        )
    for other in (Claimant("q/source", "life", 1), Claimant("p/source", "other", 1)):
        assert "belongs to source" in problem(group, log, joins("c", other))
        assert "belongs to source" in problem(group, log, asks("c", other))


def test_a_group_that_programs_read_by_is_no_pipelines(log: Log) -> None:  # GS1
    group = after(new_group(log), log, Joined("x", "x1", 1_000))
    assert "1 readers are in it" in problem(group, log, reset(log, CLAIM))
    assert "programs that join it" in problem(new_group(log), log, reset(log, CLAIM))
    assert "created again" in problem(new_group(log), log, joins("a"))


def test_a_newer_generation_takes_the_group_and_an_older_one_is_fenced(log: Log) -> None:  # GS2
    second = replace(CLAIM, generation=2)
    group = after(gathered(log), log, reset(log, second))
    assert (group.readers, group.claim, group.epoch) == ({}, second, 2)
    assert answered(group, log, reset(log, CLAIM, "r2")) == Replaced(1, 2)
    assert answered(group, log, joins("a")) == Replaced(1, 2)
    assert answered(group, log, asks("c")) == Replaced(1, 2)
    assert isinstance(answered(group, log, passes("a", "c")), Stale)


def test_another_pipeline_does_not_get_the_group_and_another_life_at_home_does(log: Log) -> None:  # GS2
    group = after(gathered(log), log, reset(log, replace(CLAIM, generation=9)))
    elsewhere = Claim("p/source", "other", "file:///elsewhere", 10)
    for wanted in (replace(CLAIM, source="q/source", generation=10), elsewhere):
        assert "give this source a group of its own" in problem(group, log, reset(log, wanted, "r2"))
    at_home = replace(elsewhere, home=CLAIM.home, generation=1)  # somebody removed the checkpoints by hand
    assert after(group, log, reset(log, at_home, "r2")).claim == at_home


def test_nobody_is_taken_for_dead_in_the_group_of_a_pipeline(log: Log) -> None:  # GS2
    group = gathered(log)
    assert after(group, log, Silent("a", "a1", 0)) == group


# -- who reads what ---------------------------------------------------------------------------------------------------


def test_nothing_is_dealt_out_before_all_have_joined(log: Log) -> None:  # GS3, GS4
    group = claimed(log, joins("a"))
    assert group.shares.owners == {}
    assert "not all readers" in problem(group, log, asks("c"))
    group = after(group, log, joins("b"))
    assert group.shares.owners == {at(0): "a", at(1): "b"}
    assert after(group, log, joins("b")) == group, "the answer was lost"
    assert isinstance(answered(group, log, joins("c")), Stale), "whoever came later would have nothing"
    again = Joined("a", "a2", 0, claimant=US, expected=READERS)
    assert isinstance(answered(group, log, again), Stale), "only a new generation begins anew"


def test_segments_stay_with_their_readers() -> None:  # GS4
    log = Log(layouts.first_layout(4))
    group = gathered(log)
    assert group.shares.of("a") == (at(0), at(2))
    for number in range(40):
        log.write(4 if number % 4 == 0 else 0)  # all of it in what the one has
    group = after(group, log, asks("c"), passes("a", "c", s0=1, s2=1), passes("b", "c"))
    assert (group.shares.of("a"), group.shares.leaving) == ((at(0), at(2)), frozenset())


def test_what_follows_is_released_when_nobody_owes_a_checkpoint(log: Log) -> None:  # GS6
    group = gathered(log)
    log.scale(layouts.split(log.layout, 0, 2))
    group = after(group, log, asks("c"), passes("a", "c", ended=True, s0=4))
    assert group.readable == {at(0), at(1)}, "the other one owes the marker"
    group = after(group, log, passes("b", "c", s1=2))
    assert (group.shares.of("a"), group.shares.of("b")) == ((at(2), at(3)), (at(1),))
    found = group.checkpoint("c")
    assert found is not None
    assert whole_cut(log.view(), found.progress[STREAM]) == {0: 4, 1: 2}, "nothing of what follows"


def test_what_follows_goes_to_who_read_the_last_before_it(log: Log) -> None:  # GS7
    group = gathered(log)
    log.scale(layouts.merge(log.layout, {0, 1}))
    group = after(group, log, asks("c"), passes("a", "c", ended=True, s0=4), passes("b", "c", s1=2))
    assert group.shares.owners == {at(1): "b"}
    group = after(group, log, asks("d"), passes("b", "d", ended=True, s1=4), passes("a", "d"))
    assert group.shares.owners == {at(2): "b"}, "whoever passes last has read nothing of it"


def test_what_follows_segments_without_events_goes_the_same_way(log: Log) -> None:  # GS7
    group = gathered(log)
    log.scale(layouts.split(log.layout, 0, 2))
    log.scale(layouts.split(log.layout, 2, 2))
    group = after(group, log, asks("c"), passes("a", "c", ended=True, s0=4), passes("b", "c", s1=4))
    assert group.shares.of("b") == (at(1),)
    assert set(group.shares.of("a")) == group.readable - {at(1)}


# -- checkpoints ------------------------------------------------------------------------------------------------------


def test_more_than_three_checkpoints_may_be_open(log: Log) -> None:  # GS14
    names = [f"c{number}" for number in range(OPEN_CHECKPOINTS_MAX + 2)]
    group = gathered(log, *(asks(name) for name in names))
    group = after(group, log, *(CheckpointForgotten(name, US) for name in names[:-1]))
    assert [(x.name, x.is_complete) for x in group.checkpoints] == [(names[-1], False)]
    group = after(group, log, passes("b", names[-1]), passes("a", names[-1], s0=2))
    assert group.checkpoints[-1].is_complete


def test_a_generation_begins_without_the_checkpoints_of_the_group(log: Log) -> None:  # GS5
    group = gathered(log, asks("c"), passes("a", "c", s0=2), passes("b", "c"), asks("d"))
    group = after(group, log, reset(log, replace(CLAIM, generation=2), positions={0: 1, 1: 3}))
    assert group.checkpoints == ()
    assert group.progress[STREAM].positions == {0: 1, 1: 3}
