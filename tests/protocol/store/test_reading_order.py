"""Reading a stream that is scaled: each event once, those of a key in order, whoever restarts when."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headgate.protocol.store.layouts import Change, Layout, Plan, first_layout, merge, resize, scale, split
from headgate.protocol.store.reading_order import FirstStart, Place, ReadingOrder, Restored, Start, passed_by
from headgate.protocol.store.truncation import Extent


@dataclass
class Log:
    """A stream: events (key, number) per segment. Keys are places in the key space."""

    layout: Layout
    events: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    written: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def write(self, key: int) -> None:
        home = next(x for x in self.layout.present if x.key_low <= key < x.key_high)
        self.events[home.segment_id].append((key, self.written[key]))
        self.written[key] += 1

    def scale(self, plan: object) -> None:
        if isinstance(plan, Plan):
            change = scale(self.layout, plan)
            assert isinstance(change, Change)
            self.layout = change.layout

    @property
    def extents(self) -> dict[int, Extent]:
        return {x.segment_id: Extent(0, len(self.events[x.segment_id])) for x in self.layout.segments}

    def is_closed(self, number: int) -> bool:
        return self.layout.segments[number].closed_epoch is not None


@dataclass
class Subtask:
    """A reader; each may have seen another layout."""

    order: ReadingOrder
    reading: dict[int, Place] = field(default_factory=dict)
    ended: dict[int, Place] = field(default_factory=dict)

    def look(self, log: Log) -> None:
        self.order.see(log.layout, log.extents)
        self.take()

    def take(self) -> None:
        self.reading |= self.order.ready()

    def read(self, number: int, log: Log) -> tuple[int, int] | None:
        place = self.reading[number]
        events = log.events[number]
        end = len(events) if place.end is None else place.end
        if place.position < end:
            self.reading[number] = Place(place.position + 1, place.end)
            return events[place.position]
        if place.end is not None or log.is_closed(number):
            self.ended[number] = self.reading.pop(number)
            self.look(log)
            self.order.end(number)
            self.take()
        return None

    def places(self) -> dict[int, Place]:
        waiting = {x: Place(-1, place.end) for x, place in self.order.waiting.items() if place.end is not None}
        return {**self.order.done, **waiting, **self.reading, **self.ended}


class Reading(RuleBasedStateMachine):
    """Some subtasks read a stream that is written to and scaled meanwhile; they restart from any checkpoint.

    What one subtask has read and no completed checkpoint covers may be anywhere in the pipeline: no other subtask may
    read a later event of that key by then.
    """

    @initialize(count=st.integers(1, 3), parallelism=st.integers(1, 3))
    def begin(self, count: int, parallelism: int) -> None:
        self.log = Log(first_layout(count))
        self.keys = [x * (1 << 28) + 5 for x in range(16)]
        self.start(FirstStart(dict.fromkeys(range(count), 0)), parallelism)
        self.checkpoint = 0
        self.saved: list[tuple[dict[int, Place], dict[int, int]]] = []
        self.seen: dict[int, int] = defaultdict(int)
        self.began_with = None

    def start(self, start: Start, parallelism: int) -> None:
        self.subtasks = [Subtask(ReadingOrder(x, parallelism, start)) for x in range(parallelism)]
        self.opened: set[int] = set()
        self.in_flight: dict[int, tuple[int, int]] = {}  # key: who read it last, since which snapshot
        self.pending: list[tuple[int, dict[int, Place], dict[int, int]]] = []

    def subtask(self, which: int) -> Subtask:
        index = which % len(self.subtasks)
        found = self.subtasks[index]
        if index not in self.opened:
            found.look(self.log)
            self.opened.add(index)
        return found

    @rule(keys=st.lists(st.integers(0, 15), max_size=6))
    def write(self, keys: list[int]) -> None:
        for key in keys:
            self.log.write(self.keys[key])

    @rule(at=st.integers(0, 9), does_split=st.booleans())
    def scale(self, at: int, does_split: bool) -> None:
        present = self.log.layout.present
        at %= len(present)
        pair = [x.segment_id for x in present[at : at + 2]]
        self.log.scale(split(self.log.layout, pair[0], 2) if does_split else merge(self.log.layout, pair))

    @rule(which=st.integers(0, 2))
    def look(self, which: int) -> None:
        self.subtask(which).look(self.log)

    @rule(which=st.integers(0, 2), times=st.integers(1, 8))
    def read(self, which: int, times: int) -> None:
        index = which % len(self.subtasks)
        subtask = self.subtask(which)
        for number in list(subtask.reading):
            for _ in range(times):
                if number not in subtask.reading:
                    break
                event = subtask.read(number, self.log)
                if event is not None:
                    self.deliver(index, *event)

    def deliver(self, index: int, key: int, number: int) -> None:
        assert number == self.seen[key], f"event {number} of key {key} where {self.seen[key]} was to follow"
        assert self.in_flight.get(key, (index, 0))[0] == index, f"key {key} may overtake itself"
        self.in_flight[key] = index, self.checkpoint
        self.seen[key] += 1

    @rule()
    def take_a_snapshot(self) -> None:
        subtasks = [self.subtask(x) for x in range(len(self.subtasks))]
        self.checkpoint += 1
        places: dict[int, Place] = {}
        for subtask in subtasks:
            mine = subtask.places()
            assert not mine.keys() & places.keys(), "a segment is with two subtasks"
            places |= mine
            subtask.order.cut(self.checkpoint)
        self.pending.append((self.checkpoint, places, dict(self.seen)))

    @precondition(lambda self: self.pending)
    @rule(is_lost=st.booleans())
    def complete_a_checkpoint(self, is_lost: bool) -> None:
        """The oldest one; or it is aborted."""
        checkpoint, places, seen = self.pending.pop(0)
        if is_lost:
            return
        self.saved.append((places, seen))
        self.in_flight = {key: told for key, told in self.in_flight.items() if told[1] >= checkpoint}
        for subtask in self.subtasks:
            passed = subtask.order.completed(checkpoint)
            subtask.order.announced(passed)
            for other in self.subtasks:
                if other is not subtask:
                    other.order.learn(passed)
                    other.take()

    @precondition(lambda self: self.saved)
    @rule(which=st.integers(0, 3), parallelism=st.integers(1, 3))
    def restart(self, which: int, parallelism: int) -> None:
        which = max(0, len(self.saved) - 1 - which)
        places, seen = self.saved[which]
        del self.saved[which + 1 :]
        self.start(Restored(places), parallelism)
        self.seen = defaultdict(int, seen)

    @invariant()
    def a_segment_is_read_by_one(self) -> None:
        reading = [x for subtask in self.subtasks for x in subtask.reading]
        assert len(reading) == len(set(reading))

    def teardown(self) -> None:
        if not hasattr(self, "log"):
            return
        for _ in range(3 * len(self.log.layout.segments) + 3):  # a merge waits for one checkpoint
            for index in range(len(self.subtasks)):
                self.look(index)
                self.read(index, 500)
            self.take_a_snapshot()
            while self.pending:
                self.complete_a_checkpoint(False)
        assert dict(self.seen) == dict(self.log.written)


TestReading = Reading.TestCase
TestReading.settings = settings(max_examples=150, stateful_step_count=40)


def drain(subtasks: list[Subtask], log: Log) -> list[tuple[int, int]]:
    found = []
    for _ in range(20):
        for subtask in subtasks:
            subtask.look(log)
            for number in list(subtask.reading):
                while number in subtask.reading and (event := subtask.read(number, log)) is not None:
                    found.append(event)
        for subtask in subtasks:
            for other in subtasks:
                other.order.learn(subtask.order.unannounced())
    return found


def opened(start: Start, parallelism: int, log: Log) -> list[Subtask]:
    subtasks = [Subtask(ReadingOrder(x, parallelism, start)) for x in range(parallelism)]
    for subtask in subtasks:
        subtask.look(log)
    return subtasks


def scaled_log(before: int = 4, after: int = 3) -> Log:
    """Two segments; then they were merged, and the one that took their keys was split."""
    log = Log(first_layout(2))
    keys = [x * (1 << 28) for x in range(16)]
    for _ in range(before):
        for key in keys:
            log.write(key)
    log.scale(merge(log.layout, [0, 1]))
    log.scale(split(log.layout, 2, 2))
    for _ in range(after):
        for key in keys:
            log.write(key)
    return log


@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_a_bounded_read_ends_at_its_moment_also_after_a_restart(parallelism: int) -> None:
    log = scaled_log()
    start = FirstStart({x: extent.end for x, extent in log.extents.items()}, is_bounded=True)
    subtasks = opened(start, parallelism, log)
    for key in (1, 1 << 31):
        log.write(key)
    log.scale(split(log.layout, 3, 2))
    log.write(2)
    places = {number: place for subtask in subtasks for number, place in subtask.places().items()}
    assert {number for number, place in places.items() if not place.is_begun} == {2, 3, 4}
    events = sorted(drain(subtasks, log))
    assert len(events) == 7 * 16
    assert sorted(drain(opened(Restored(places), parallelism % 3 + 1, log), log)) == events
    places = {number: place for subtask in subtasks for number, place in subtask.places().items()}
    assert drain(opened(Restored(places), parallelism, log), log) == []


@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_from_the_latest_event_on_nothing_before_the_moment_is_read(parallelism: int) -> None:
    log = scaled_log()
    start = FirstStart({x: extent.end for x, extent in log.extents.items()}, from_latest=True)
    first = opened(start, parallelism, log)[0]
    log.scale(split(log.layout, 3, 2))  # the others look when it was scaled once more
    log.write(2)
    log.write(1 << 31)
    others = [Subtask(ReadingOrder(x, parallelism, start)) for x in range(1, parallelism)]
    assert sorted(drain([first, *others], log)) == [(2, 0), (1 << 31, 7)]


def test_what_was_read_and_has_no_position_any_more_is_known_by_what_follows() -> None:
    log = scaled_log()
    ends = {number: extent.end for number, extent in log.extents.items()}
    assert passed_by(log.layout, log.extents, {3: Place(0), 4: Place(0)}) == {0, 1, 2}
    assert passed_by(log.layout, log.extents, {0: Place(ends[0]), 1: Place(ends[1] - 1)}) == {0}
    assert passed_by(log.layout, log.extents, {0: Place(3), 1: Place(ends[1]), 3: Place(1)}) == {1, 2}
    assert passed_by(log.layout, log.extents, {2: Place(-1, 0), 0: Place(0)}) == set()


def test_a_segment_that_nobody_asks_for_leaves_the_positions() -> None:
    log = scaled_log()
    ends = {number: extent.end for number, extent in log.extents.items()}
    waiting = {0: Place(ends[0]), 1: Place(ends[1]), 2: Place(0)}
    (subtask,) = opened(Restored(waiting), 1, log)
    assert subtask.order.done == {2: Place(0)}
    half = {0: Place(ends[0]), 1: Place(ends[1] - 1)}
    (subtask,) = opened(Restored(half), 1, log)
    assert subtask.order.done == {0: Place(ends[0])}
    assert set(subtask.places()) == {0, 1}


def test_what_is_hollow_does_not_keep_others_waiting() -> None:  # S75
    """Segments that were opened for late events alone may have none."""
    log = Log(first_layout(2))
    for _ in range(3):
        log.scale(merge(log.layout, [x.segment_id for x in log.layout.present]))
        log.scale(split(log.layout, log.layout.present[0].segment_id, 2))
    log.write(1)
    subtasks = opened(FirstStart({0: 0, 1: 0}), 2, log)
    assert [x for subtask in subtasks for x in subtask.reading if x >= len(log.layout.segments) - 2]


def history(layouts: int) -> Layout:
    """A stream that had four and five segments in turn."""
    log = Log(first_layout(4))
    for number in range(layouts):
        log.scale(resize(log.layout, 4 + (number + 1) % 2))
    return log.layout


def test_a_long_history_costs_as_much_as_it_has_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is looked at is counted, whichever machine it is."""
    layout = history(100)
    extents = {segment.segment_id: Extent(0, 1) for segment in layout.segments}
    looked: list[int] = []
    real = ReadingOrder._passed_before
    monkeypatch.setattr(
        ReadingOrder, "_passed_before", lambda self, number: looked.append(number) or real(self, number)
    )
    order = ReadingOrder(0, 1, FirstStart(dict.fromkeys(extents, 1)))
    order.see(layout, extents)
    left, read = list(order.ready()), []
    while left:
        read.append(left.pop(0))
        order.end(read[-1])
        left += order.ready()
    assert sorted(read) == sorted(extents)
    assert len(looked) <= 10 * len(extents)


def test_what_ended_is_told_once_with_the_checkpoint_that_follows() -> None:
    log = Log(first_layout(2))
    log.write(1 << 31)
    order = ReadingOrder(1, 2, FirstStart({0: 0, 1: 0}))
    order.see(log.layout, log.extents)
    assert order.ready() == {1: Place(0)}
    log.scale(merge(log.layout, [0, 1]))
    order.see(log.layout, log.extents)
    order.cut(1)
    order.end(1)
    assert order.unannounced() == {1}, "segment 2 is read by the one that read segment 0"
    order.cut(2)
    order.cut(3)
    assert order.completed(1) == set(), "it ended behind that"
    assert order.completed(3) == {1}
    assert order.completed(2) == set(), "of an older one nothing is left"
    order.announced([1])
    assert order.unannounced() == set()
