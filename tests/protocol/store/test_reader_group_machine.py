"""Any history of a reader group against a plain model: nothing is lost, nothing is read by two, keys keep their order.

The model is the list of all events that was written. Each reader keeps what it was given; what it had committed, or
passed a marker with, counts as processed, the rest as read in vain.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from tests.conftest import fewer
from tests.protocol.store.grouping import STREAM, Log, answered, new_group

from headgate.protocol.store import group_holds, layouts
from headgate.protocol.store.layouts import Plan
from headgate.protocol.store.reader_group import (
    CheckpointAsked,
    Committed,
    Done,
    Event,
    Group,
    GroupSegment,
    Joined,
    Left,
    Passed,
    ResetAsked,
    Silent,
    Stale,
)
from headgate.protocol.store.truncation import Hold

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
