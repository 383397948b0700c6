"""Reader groups: who reads what, how far, and what a checkpoint is."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from tests.conftest import fewer
from tests.protocol.store.grouping import STREAM, Log, after, answered, at, new_group

from headgate.protocol.store import group_holds, layouts
from headgate.protocol.store.layouts import Plan
from headgate.protocol.store.reader_group import (
    OPEN_CHECKPOINTS_MAX,
    CheckpointAsked,
    CheckpointForgotten,
    Committed,
    Done,
    Event,
    Group,
    GroupRefused,
    GroupSegment,
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
from headgate.protocol.store.truncation import Hold

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


Written = tuple[int, int]


@dataclass
class Reader:
    """What a process knows: it reads by the group as it saw it last."""

    token: str
    seen: Group
    cursors: dict[GroupSegment, int] = field(default_factory=dict)
    unsettled: list[tuple[GroupSegment, int, Written]] = field(default_factory=list)
    is_stale: bool = False


class GroupHistory(RuleBasedStateMachine):
    """Readers come, read, commit, pass markers, leave, die and come back, while the stream is scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.log = Log()
        self.group = new_group(self.log)
        self.readers: dict[str, Reader] = {}
        self.zombies: list[tuple[str, Reader]] = []
        self.processed: list[Written] = []
        self.before: dict[str, set[Written]] = {}
        self.tokens = 0
        self.held = self.all_that_is_needed(self.group)

    def all_that_is_needed(self, group: Group) -> dict[int, int]:
        return group_holds.needed(group, STREAM, self.log.view())

    def move_hold(self, after: Group) -> None:
        """As the catalogue does it: only what moved, as long as it can be told without the stream (RG28)."""
        moved = group_holds.moved(self.group, after, STREAM)
        if moved is None:
            self.held = self.all_that_is_needed(after)
        else:
            assert moved.certain <= self.held.keys()
            self.held |= {x: position for x, position in moved.positions.items() if x in self.held}

    def change(self, event: Event) -> bool:
        answer = answered(self.group, self.log, event)
        if isinstance(answer, Done):
            again = answered(answer.group, self.log, event)
            assert isinstance(again, Done)
            assert again.group.progress == answer.group.progress, "repeating has moved something"
            assert again.group.checkpoints == answer.group.checkpoints
            self.move_hold(answer.group)
            self.group = answer.group
        return isinstance(answer, Done)

    def token(self) -> str:
        self.tokens += 1
        return f"t{self.tokens}"

    @rule(key=st.integers(0, 7), count=st.integers(1, 3))
    def write(self, key: int, count: int) -> None:
        for _ in range(count):
            self.log.write(key)

    @rule(pick=st.integers(0, 7), merges=st.booleans())
    def scale(self, pick: int, merges: bool) -> None:
        present = self.log.layout.present
        if merges and len(present) > 1:
            at = pick % (len(present) - 1)
            plan = layouts.merge(self.log.layout, {present[at].segment_id, present[at + 1].segment_id})
        else:
            plan = layouts.split(self.log.layout, present[pick % len(present)].segment_id, 2)
        if isinstance(plan, Plan) and len(present) < 6:
            self.log.scale(plan)

    @rule(name=st.sampled_from("abc"), takes_over=st.booleans())
    def join(self, name: str, takes_over: bool) -> None:
        token = self.token()
        if self.change(Joined(name, token, 1_000, takes_over)):
            if name in self.readers:
                self.bury(name)
            self.readers[name] = Reader(token, self.group)

    def bury(self, name: str) -> None:
        """What it had read and not settled is read again by others."""
        reader = self.readers.pop(name)
        reader.unsettled.clear()
        self.zombies.append((name, reader))

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), limit=st.integers(1, 3))
    def read(self, data: st.DataObject, limit: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.readers)))
        reader = self.readers[name]
        reader.seen = self.group
        if reader.seen.owed(name) is not None:
            return  # it is given the marker
        own = [x for x in reader.seen.shares.of(name) if x not in reader.seen.shares.leaving]
        for segment in own:
            begin = reader.cursors.get(segment, reader.seen.position(segment))
            found = self.log.events.get(segment.segment, [])[begin : begin + limit]
            reader.unsettled += [(segment, begin + n, one) for n, one in enumerate(found)]
            reader.cursors[segment] = begin + len(found)

    def positions(self, name: str) -> tuple[dict[GroupSegment, int], tuple[str, ...]]:
        reader = self.readers[name]
        own = {x: reader.cursors.get(x, self.group.position(x)) for x in self.group.shares.of(name)}
        ended = any(self.log.has_ended(x.segment) and p >= self.log.end(x.segment) for x, p in own.items())
        return own, (STREAM,) if ended else ()

    def owed(self, name: str) -> list[str]:
        return [x.name for x in self.group.checkpoints if name in x.owed_by]

    def settle(self, name: str, owed: list[str]) -> None:
        """Its events are processed: in front of the markers that it had not passed until now."""
        reader = self.readers[name]
        found = [one for _, _, one in reader.unsettled]
        for checkpoint in owed:
            self.before[checkpoint].update(found)
        self.processed += found
        reader.unsettled.clear()
        reader.cursors = {x: p for x, p in reader.cursors.items() if x in self.group.shares.of(name)}

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.readers)))
        own, ended = self.positions(name)
        owed = self.owed(name)
        assert self.change(Committed(name, self.readers[name].token, own, ended))
        self.settle(name, owed)

    @precondition(lambda self: any(self.group.owed(name) for name in self.readers))
    @rule(data=st.data())
    def meet_marker(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(x for x in self.readers if self.group.owed(x))))
        checkpoint = self.group.owed(name)
        assert checkpoint is not None
        own, ended = self.positions(name)
        owed = self.owed(name)
        assert self.change(Passed(name, self.readers[name].token, checkpoint, own, ended))
        self.settle(name, owed)

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), dies=st.booleans())
    def go(self, data: st.DataObject, dies: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.readers)))
        reader = self.readers[name]
        member = self.group.readers[name]
        assert self.change(Silent(name, reader.token, member.beats) if dies else Left(name, reader.token))
        self.bury(name)

    @precondition(lambda self: self.zombies)
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        """It goes on as if nothing had happened, and is refused."""
        name, reader = data.draw(st.sampled_from(self.zombies))
        before = self.group
        answer = answered(self.group, self.log, Committed(name, reader.token, dict(reader.cursors), (STREAM,)))
        assert isinstance(answer, Stale)
        assert self.group == before

    @rule(number=st.integers(0, 4))
    def ask_for_checkpoint(self, number: int) -> None:
        is_new = self.group.checkpoint(f"c{number}") is None
        if is_new and self.change(CheckpointAsked(f"c{number}")):
            self.before[f"c{number}"] = set(self.processed)

    @precondition(lambda self: any(x.is_complete for x in self.group.checkpoints))
    @rule()
    def go_back(self) -> None:
        """What was processed behind the checkpoint does not count any more."""
        found = next(x for x in self.group.checkpoints if x.is_complete)
        assert self.change(ResetAsked(self.token(), {STREAM: 1}, checkpoint=found.name))
        for name in sorted(self.readers):
            self.bury(name)
        left = self.unread()
        events = {one for events in self.log.events.values() for one in events}
        assert left == events - self.before[found.name], "it is not where its readers met the marker"
        self.processed = [one for one in self.processed if one not in left]

    def unread(self) -> set[Written]:
        """What lies behind the durable positions, by the layout alone: what was not begun, and does not lie before."""
        progress, lineage = self.group.progress[STREAM], layouts.Lineage(self.log.layout)
        begun, behind = list(progress.positions), set[int]()
        while begun:
            before = set(lineage.predecessors(self.log.layout.segments[begun.pop()])) - behind
            behind |= before
            begun += before
        ended = behind - progress.positions.keys()
        found = set[Written]()
        for segment, events in self.log.events.items():
            if segment not in ended:
                found |= set(events[progress.positions.get(segment, 0) :])
        return found

    @invariant()
    def each_event_is_processed_once_or_left(self) -> None:
        events = {one for found in self.log.events.values() for one in found}
        assert len(self.processed) == len(set(self.processed)), "an event was processed twice"
        assert set(self.processed) | self.unread() == events, "an event is lost"
        assert not set(self.processed) & self.unread(), "what was processed will be read again"

    @invariant()
    def what_is_held_is_what_is_needed(self) -> None:
        """Of a segment without events it makes no difference whether it is named."""
        view = self.log.view()
        held, needed = Hold("held", self.held), Hold("needed", self.all_that_is_needed(self.group))
        for segment, extent in view.extents.items():
            assert held.position(segment, extent) == needed.position(segment, extent), f"of segment {segment}"

    @invariant()
    def keys_are_in_order(self) -> None:
        latest: dict[int, int] = {}
        for key, number in self.processed:
            assert latest.get(key, -1) < number, f"key {key} is out of order"
            latest[key] = number

    def teardown(self) -> None:
        """Then one reader reads all that is left."""
        for name in sorted(self.readers):
            assert self.change(Left(name, self.readers[name].token))
            self.bury(name)
        self.readers["z"] = Reader(token := self.token(), self.group)
        assert self.change(Joined("z", token, 1_000))
        while self.unread():
            left = len(self.unread())
            for segment in self.group.shares.of("z"):
                begin, end = self.group.position(segment), self.log.end(segment.segment)
                found = self.log.events.get(segment.segment, [])[begin:end]
                self.readers["z"].unsettled += [(segment, begin, one) for one in found]
                self.readers["z"].cursors[segment] = end
            own, ended = self.positions("z")
            assert self.change(Committed("z", token, own, ended))
            self.settle("z", [])
            self.each_event_is_processed_once_or_left()
            self.keys_are_in_order()
            assert len(self.unread()) < left or ended, "reading does not go on"


SETTINGS = fewer(settings(max_examples=60, stateful_step_count=40))


@pytest.mark.hypothesis
def test_any_history_of_a_group_reads_each_event_once_and_in_order() -> None:  # RG1, RG2, RG4, RG9, RG12, RG28
    run_state_machine_as_test(GroupHistory, settings=SETTINGS)
