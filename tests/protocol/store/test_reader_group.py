"""Reader groups: who reads what, how far, and what a checkpoint is."""

from __future__ import annotations

import pytest
from tests.protocol.store.grouping import STREAM, Log, after, answered, at, new_group

from headgate.protocol.store import layouts
from headgate.protocol.store.reader_group import (
    OPEN_CHECKPOINTS_MAX,
    CheckpointAsked,
    CheckpointForgotten,
    Committed,
    Group,
    GroupRefused,
    Joined,
    Left,
    Lived,
    Member,
    Passed,
    ResetAsked,
    Silent,
    Stale,
    Watch,
)
from headgate.protocol.store.reading_order import whole_cut

A, B = Joined("a", "a1", 1_000), Joined("b", "b1", 1_000)


def commit(reader: str, *, ended: bool = False, **positions: int) -> Committed:
    """Positions as ``s0=4``."""
    found = {at(int(name[1:])): position for name, position in positions.items()}
    return Committed(reader, f"{reader}1", found, (STREAM,) if ended else ())


def passed(reader: str, checkpoint: str, *, ended: bool = False, **positions: int) -> Passed:
    one = commit(reader, ended=ended, **positions)
    return Passed(reader, one.token, checkpoint, one.positions, one.ended)


@pytest.fixture
def log() -> Log:
    """Two segments with four events each."""
    found = Log()
    for number in range(8):
        found.write(number)
    return found


def cut(group: Group, log: Log, checkpoint: str) -> dict[int, int]:
    found = group.checkpoint(checkpoint)
    assert found is not None
    assert found.is_complete
    return whole_cut(log.view(), found.progress[STREAM])


def test_each_segment_belongs_to_one_reader(log: Log) -> None:  # RG1, RG6, RG7
    group = after(new_group(log), log, A)
    assert group.shares.of("a") == (at(0), at(1))
    group = after(group, log, B)
    assert group.shares.leaving == {at(0)}
    assert group.shares.of("b") == ()  # nothing is taken from a reader
    group = after(group, log, commit("a", s0=2, s1=3))
    assert (group.shares.of("a"), group.shares.of("b")) == ((at(1),), (at(0),))
    assert group.position(at(0)) == 2  # exactly where the other one was


def test_positions_never_go_back_and_are_those_of_who_has_the_segment(log: Log) -> None:  # RG2
    group = after(new_group(log), log, A, B, commit("a", s0=2, s1=3), commit("a", s0=4, s1=1))
    assert (group.position(at(0)), group.position(at(1))) == (2, 3)


def test_an_event_that_is_repeated_changes_nothing(log: Log) -> None:  # RG3
    group = new_group(log)
    reset = ResetAsked("r1", {STREAM: 1}, {STREAM: log.start()})
    for event in (A, B, Lived("a", "a1", 1), commit("a", s0=2), CheckpointAsked("c"), passed("a", "c", s1=2)):
        group = after(group, log, event)
        assert after(group, log, event) == group
    for event in (Silent("b", "b1", 0), Left("a", "a1"), CheckpointForgotten("c"), reset):
        group = after(group, log, event)
        assert after(group, log, event) == group
    assert group.epoch == 2


def test_a_segment_that_follows_waits_for_all_before_it(log: Log) -> None:  # RG4, RG10
    group = after(new_group(log), log, A, B, commit("a", s0=0))
    log.scale(layouts.merge(log.layout, {0, 1}))
    log.write(0)
    group = after(group, log, commit("b", s0=4, ended=True))
    assert group.readable == {at(1)}
    group = after(group, log, commit("a", s1=3, ended=True))
    assert group.readable == {at(1)}
    group = after(group, log, commit("a", s1=4, ended=True))
    assert group.readable == {at(2)}
    assert group.position(at(2)) == 0
    assert list(group.progress[STREAM].positions) == [2]  # what lies behind is not remembered
    assert whole_cut(log.view(), group.progress[STREAM]) == {0: 4, 1: 4, 2: 0}


def test_a_segment_without_events_is_passed(log: Log) -> None:  # RG4
    log.scale(layouts.split(log.layout, 0, 2))
    log.scale(layouts.merge(log.layout, {2, 3}))
    log.write(0)
    group = after(new_group(log), log, A, commit("a", s0=4, ended=True))
    assert group.readable == {at(1), at(4)}


def test_a_sealed_stream_is_read_to_its_end(log: Log) -> None:  # RG5
    log.is_sealed = True
    group = after(new_group(log), log, A, commit("a", s0=4, ended=True))
    assert group.readable == {at(1)}
    assert after(group, log, commit("a", s1=4, ended=True)).readable == frozenset()


def test_shares_follow_what_is_unread_and_come_to_rest(log: Log) -> None:  # RG6, RG7
    log = Log(layouts.first_layout(4))
    for _ in range(12):
        log.write(0)
    group = after(new_group(log), log, A, B)
    for _ in range(6):
        group = after(group, log, commit("a"), commit("b"))
    assert (group.shares.of("a"), group.shares.of("b")) == ((at(0),), (at(1), at(2), at(3)))
    assert not group.shares.leaving


def test_a_checkpoint_is_where_all_have_met_its_marker(log: Log) -> None:  # RG8, RG9
    group = after(new_group(log), log, A, B, commit("a"), CheckpointAsked("c"))
    assert (group.owed("a"), group.owed("b")) == ("c", "c")
    group = after(group, log, passed("a", "c", s1=1), commit("a", s1=4), commit("b", s0=1))
    assert group.checkpoint("c") is not None
    assert (group.owed("a"), group.owed("b")) == (None, "c")
    group = after(group, log, passed("b", "c", s0=3))
    assert cut(group, log, "c") == {0: 3, 1: 1}


def test_who_joins_later_owes_nothing_and_without_readers_it_is_complete(log: Log) -> None:  # RG8
    group = after(new_group(log), log, CheckpointAsked("at once"))
    assert cut(group, log, "at once") == {0: 0, 1: 0}
    group = after(group, log, A, CheckpointAsked("c"), B)
    assert (group.owed("a"), group.owed("b")) == ("c", None)


def test_while_a_reader_owes_it_gets_and_gives_and_ends_nothing(log: Log) -> None:  # RG9
    group = after(new_group(log), log, A, B, CheckpointAsked("c"))
    log.scale(layouts.split(log.layout, 0, 2))
    assert after(group, log, commit("a", s0=4, s1=1, ended=True)).shares == group.shares
    group = after(group, log, passed("a", "c", s0=4, s1=1, ended=True))
    assert at(0) not in group.readable
    assert group.shares.of("b") == ()
    group = after(group, log, passed("b", "c"), commit("a"))
    assert group.shares.of("b") != ()
    assert cut(group, log, "c") == {0: 4, 1: 1}


def test_a_segment_that_another_one_finds_ended_is_in_the_checkpoint_of_its_reader(log: Log) -> None:  # RG9
    group = after(new_group(log), log, A, B, commit("a"), CheckpointAsked("c"), commit("b", s0=4))
    log.scale(layouts.split(log.layout, 0, 2))
    log.scale(layouts.split(log.layout, 1, 2))
    group = after(group, log, passed("a", "c", s1=4, ended=True))
    assert at(0) not in group.readable
    assert cut(after(group, log, passed("b", "c")), log, "c") == {0: 4, 1: 4}


def test_whoever_is_gone_has_passed_at_its_durable_positions(log: Log) -> None:  # RG9, RG14
    for end in (Silent("b", "b1", 0), Left("b", "b1"), Joined("b", "b2", 1_000, takes_over=True)):
        group = after(new_group(log), log, A, B, commit("a"), CheckpointAsked("c"), commit("b", s0=1))
        group = after(group, log, passed("a", "c", s1=2), end)
        assert cut(group, log, "c") == {0: 1, 1: 2}
        assert group.position(at(0)) == 1


def test_markers_come_in_order_and_are_few(log: Log) -> None:  # RG8
    group = after(new_group(log), log, A, *(CheckpointAsked(str(n)) for n in range(OPEN_CHECKPOINTS_MAX)))
    assert isinstance(answered(group, log, CheckpointAsked("more")), GroupRefused)
    assert group.owed("a") == "0"
    group = after(group, log, passed("a", "0", s0=1))
    assert group.owed("a") == "1"
    group = after(group, log, CheckpointForgotten("1"))
    assert group.owed("a") == "2"


def test_only_the_last_completed_checkpoints_are_kept(log: Log) -> None:  # RG11
    group = after(new_group(log), log, CheckpointAsked("one"), CheckpointAsked("two"))
    assert [x.name for x in group.checkpoints] == ["two"]


def test_a_reader_that_was_taken_for_dead_is_refused_and_changes_nothing(log: Log) -> None:  # RG12
    group = after(new_group(log), log, A, B, commit("a"), CheckpointAsked("c"), Silent("b", "b1", 0))
    for event in (Lived("b", "b1", 5), commit("b", s0=4), passed("b", "c", s0=4)):
        assert isinstance(answered(group, log, event), Stale)
    group = after(group, log, Joined("b", "b2", 1_000))
    assert isinstance(answered(group, log, commit("b", s0=4)), Stale)  # of another life of it
    assert after(group, log, Left("b", "b1"), Silent("b", "b1", 0)) == group


def test_a_name_that_is_in_the_group_is_taken(log: Log) -> None:  # RG12
    group = after(new_group(log), log, A)
    assert isinstance(answered(group, log, Joined("a", "a2", 1_000)), GroupRefused)
    group = after(group, log, Joined("a", "a2", 1_000, takes_over=True))
    assert isinstance(answered(group, log, commit("a", s0=1)), Stale)


def test_who_has_lived_since_is_not_dead(log: Log) -> None:  # RG13
    group = after(new_group(log), log, A, Lived("a", "a1", 3))
    assert after(group, log, Silent("a", "a1", 2)) == group
    assert after(group, log, Lived("a", "a1", 2)) == group


def test_a_watcher_counts_only_what_it_has_seen() -> None:  # RG13
    watch, member = Watch(), {"a": Member("a1", 1_000)}
    assert watch.look(member, 10_000) == []
    assert watch.look(member, 90_000) == []  # it was stopped itself
    assert watch.look(member, 90_200) == []
    assert watch.look({"a": Member("a1", 1_000, beats=1)}, 90_400) == []
    for now_ms in (90_600, 90_800, 91_000, 91_200):
        assert watch.look({"a": Member("a1", 1_000, beats=1)}, now_ms) == []
    assert watch.look({"a": Member("a1", 1_000, beats=1)}, 91_400) == [Silent("a", "a1", 1)]
    assert watch.look({"a": Member("a2", 1_000, beats=1)}, 91_600) == []
    assert watch.look({}, 91_800) == []


def test_a_reset_begins_anew_without_readers(log: Log) -> None:  # RG15
    group = after(new_group(log), log, A, commit("a", s0=4, s1=2), CheckpointAsked("c"))
    group = after(group, log, passed("a", "c"), CheckpointAsked("open"), commit("a", s1=4))
    back = after(group, log, ResetAsked("r1", {STREAM: 1}, checkpoint="c"))
    assert (back.position(at(0)), back.position(at(1)), back.epoch) == (4, 2, 2)
    assert (back.readers, back.shares.owners) == ({}, {})
    assert [x.name for x in back.checkpoints] == ["c"]
    assert isinstance(answered(back, log, commit("a", s1=4)), Stale)
    start = after(group, log, ResetAsked("r2", {STREAM: 1}, {STREAM: log.start(begin={0: 1})}))
    assert (start.position(at(0)), start.position(at(1))) == (1, 0)
    assert isinstance(answered(group, log, ResetAsked("r3", {STREAM: 1}, checkpoint="open")), GroupRefused)
    assert isinstance(answered(group, log, ResetAsked("r3", {STREAM: 2}, checkpoint="c")), GroupRefused)
    other = after(group, log, ResetAsked("r3", {STREAM: 2}, {STREAM: log.start()}))
    assert other.checkpoints == ()


def test_a_reset_to_a_checkpoint_of_before_a_scaling_reads_what_followed(log: Log) -> None:  # RG15
    group = after(new_group(log), log, A, CheckpointAsked("c"), passed("a", "c", s0=1, s1=2))
    log.scale(layouts.merge(log.layout, {0, 1}))
    group = after(group, log, commit("a", s0=4, s1=4, ended=True))
    assert group.readable == {at(2)}
    group = after(group, log, ResetAsked("r", {STREAM: 1}, checkpoint="c"))
    assert {x: group.position(x) for x in group.readable} == {at(0): 1, at(1): 2}


def test_where_a_group_begins(log: Log) -> None:  # RG10, RG15
    log.scale(layouts.split(log.layout, 0, 2))
    log.write(0)
    latest = new_group(log, log.start(from_latest=True))
    assert {x: latest.position(x) for x in latest.readable} == {at(1): 4, at(2): 1, at(3): 0}
    middle = new_group(log, log.start(begin={0: 4, 1: 2, 2: 1, 3: 0}))
    assert {x: middle.position(x) for x in middle.readable} == {at(1): 2, at(2): 1, at(3): 0}
    before = new_group(log, log.start(begin={0: 3, 1: 2}))
    assert {x: before.position(x) for x in before.readable} == {at(0): 3, at(1): 2}
    cut_of_it = whole_cut(log.view(), middle.progress[STREAM])
    assert new_group(log, log.start(begin=cut_of_it)).progress == middle.progress
