"""What a reader group holds, told from one of its states to the next."""

from __future__ import annotations

import pytest
from tests.protocol.store.grouping import STREAM, Log, after, at, new_group

from headgate.protocol.store import group_holds, layouts
from headgate.protocol.store.group_holds import HoldMoved
from headgate.protocol.store.reader_group import (
    CheckpointAsked,
    CheckpointForgotten,
    Committed,
    Event,
    Group,
    Joined,
    ResetAsked,
)
from headgate.protocol.store.reading_order import View
from headgate.protocol.store.truncation import Extent

JOINED = Joined("a", "a", 1_000)


@pytest.fixture
def log() -> Log:
    """Two segments with four events each."""
    found = Log()
    for number in range(8):
        found.write(number)
    return found


def commit(*, ended: bool = False, **positions: int) -> Committed:
    """Positions as ``s0=4``."""
    found = {at(int(name[1:])): position for name, position in positions.items()}
    return Committed("a", "a", found, (STREAM,) if ended else ())


def step(group: Group, log: Log, event: Event) -> tuple[Group, HoldMoved | None]:
    then = after(group, log, event)
    return then, group_holds.moved(group, then, STREAM)


def test_what_moved_is_told_and_a_checkpoint_holds_it_back(log: Log) -> None:  # RG28
    group = after(new_group(log), log, JOINED)
    group, moved = step(group, log, commit(s0=2))
    assert moved == HoldMoved({0: 2}, frozenset({0}))
    group, moved = step(group, log, CheckpointForgotten("none"))
    assert moved == HoldMoved({}, frozenset())
    group = after(group, log, CheckpointAsked("c"))
    group, moved = step(group, log, commit(s0=3, s1=1))
    assert moved == HoldMoved({}, frozenset()), "the checkpoint is still where it was asked for"
    group, moved = step(group, log, CheckpointForgotten("c"))
    assert moved == HoldMoved({0: 3, 1: 1}, frozenset({0, 1}))


def test_other_segments_have_to_be_looked_at(log: Log) -> None:  # RG28
    group = after(new_group(log), log, JOINED)
    log.scale(layouts.split(log.layout, 0, 2))
    group, moved = step(group, log, commit(s0=4))
    assert moved == HoldMoved({0: 4}, frozenset({0}))
    _, moved = step(group, log, commit(s0=4, ended=True))
    assert moved is None, "segments were released"
    _, moved = step(group, log, ResetAsked("r", {STREAM: 1}, {STREAM: log.start()}))
    assert moved is None, "a reset leads anywhere"


def test_a_checkpoint_of_before_a_scaling_keeps_what_followed_unnamed(log: Log) -> None:  # RG28
    group = after(new_group(log), log, CheckpointAsked("c"), JOINED)
    log.scale(layouts.split(log.layout, 0, 2))
    group = after(group, log, commit(s0=4, ended=True))
    assert set(group.progress[STREAM].positions) == {1, 2, 3}
    assert sorted(group_holds.needed(group, STREAM, log.view())) == [0, 1], "what the checkpoint has not begun"
    for key in range(4):
        log.write(key)
    then, moved = step(group, log, commit(s1=2, s2=1))
    assert moved == HoldMoved({2: 1}, frozenset()), "it is not held for certain"
    _, moved = step(then, log, CheckpointForgotten("c"))
    assert moved is None


def test_closed_segments_without_events_are_not_worth_holding() -> None:  # RG28
    layout = layouts.first_layout(2)
    change = layouts.scale(layout, layouts.split(layout, 0, 2))  # type: ignore[arg-type]
    assert isinstance(change, layouts.Change)
    extents = {0: Extent(4, 4), 1: Extent(4, 4), 2: Extent(0, 0), 3: Extent(1, 2)}
    wanted = {0: 4, 1: 4, 2: 0, 3: 1}
    view = View(change.layout, extents)
    assert group_holds.worth_holding(view, wanted) == {1: 4, 2: 0, 3: 1}, "others may get more events"
    view = View(change.layout, {**extents, 0: Extent(3, 4)})
    assert group_holds.worth_holding(view, wanted) == wanted


def test_who_holds_names_one_segment_at_least() -> None:  # RG17, RG28
    """Else nothing would be held, where everything behind the segments that it names is needed."""
    layout = layouts.first_layout(2)
    change = layouts.scale(layout, layouts.split(layout, 0, 2))  # type: ignore[arg-type]
    assert isinstance(change, layouts.Change)
    view = View(change.layout, {0: Extent(4, 4), 1: Extent(4, 4), 2: Extent(0, 9), 3: Extent(1, 2)})
    assert group_holds.worth_holding(view, {0: 4}) == {0: 4}
    assert group_holds.worth_holding(view, {}) == {3: 1}, "from its head on, as those that it does not name"
