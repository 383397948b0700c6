"""Layouts: every key is in one segment, whatever is split and merged, and late events keep their place."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.protocol.store.layouts import (
    KEY_SPACE,
    SEGMENTS_MAX,
    AlreadyScaled,
    Change,
    Layout,
    Lineage,
    Outdated,
    Plan,
    Refused,
    Segment,
    back,
    equal_ranges,
    first_layout,
    merge,
    reopen,
    resize,
    scale,
    split,
)

HALF = KEY_SPACE // 2
NARROW = Layout(0, (Segment(0, 0, 2, 0), Segment(1, 2, KEY_SPACE, 0)))
"""A segment of two keys beside one of all others."""


def scaled(layout: Layout, plan: Plan | Refused) -> Layout:
    assert isinstance(plan, Plan), plan
    change = scale(layout, plan)
    assert isinstance(change, Change), change
    assert change.layout.epoch == layout.epoch + 1
    return change.layout


def ranges(layout: Layout) -> list[tuple[int, int]]:
    return [segment.keys for segment in layout.present]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """What some splits and merges leave."""
    layout = first_layout(draw(st.integers(1, 4)))
    for _ in range(draw(st.integers(0, 5))):
        present = layout.present
        at = draw(st.integers(0, len(present) - 1))
        if draw(st.booleans()) or len(present) == 1:
            layout = scaled(layout, split(layout, present[at].segment_id, draw(st.integers(2, 3))))
        else:
            at = min(at, len(present) - 2)
            layout = scaled(layout, merge(layout, [x.segment_id for x in present[at : at + 2]]))
    return layout


@given(layouts())
def test_every_key_has_one_segment_whatever_was_scaled(layout: Layout) -> None:  # CT6, S72
    assert layout.problems() == []
    for epoch in range(layout.epoch + 1):
        found = [segment.keys for segment in layout.of_epoch(epoch)]
        assert found[0][0] == 0
        assert found[-1][1] == KEY_SPACE
        assert all(one[1] == two[0] for one, two in pairwise(found))


@given(layouts())
def test_successors_and_predecessors_are_each_others(layout: Layout) -> None:
    lineage = Lineage(layout)
    after = {(x.segment_id, y) for x in layout.segments for y in lineage.successors(x)}
    assert after == {(y, x.segment_id) for x in layout.segments for y in lineage.predecessors(x)}
    assert all(one < two for one, two in after)
    for segment in layout.segments:
        assert bool(lineage.successors(segment)) == (segment.closed_epoch is not None)
        assert bool(lineage.predecessors(segment)) == (segment.created_epoch > 0)


@given(st.integers(0, KEY_SPACE - 1), st.integers(1, 4_096), st.integers(1, 64))
def test_equal_ranges_differ_by_one_key_at_most(low: int, size: int, count: int) -> None:
    found = equal_ranges((low, low + size), count)
    sizes = [high - low for low, high in found]
    assert len(found) == count
    assert (found[0][0], found[-1][1]) == (low, low + size)
    assert max(sizes) - min(sizes) <= 1


def test_a_resized_stream_keeps_the_segments_that_fit() -> None:  # S72
    layout = scaled(first_layout(2), split(first_layout(2), 0, 2))
    again = scaled(layout, resize(layout, 2))
    assert ranges(again) == ranges(first_layout(2))
    assert [segment.segment_id for segment in again.present] == [4, 1]
    assert resize(again, 2) == Refused("it has 2 segments of equal ranges already")


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        (lambda: split(first_layout(2), 7, 2), "segment 7 takes no events; those that do are 0, 1"),
        (lambda: split(first_layout(2), 0, 1), "segment 0 cannot be split into 1"),
        (lambda: split(NARROW, 0, 3), "segment 0 cannot be split into 3"),
        (lambda: merge(first_layout(30), range(30, 99)), "segment 30 takes no events; those that do are 0, 1, 2"),
        (lambda: merge(first_layout(30), [99]), " more"),
        (lambda: merge(first_layout(3), [0, 2]), "segments 0, 2 are no neighbours: others take keys in between"),
        (lambda: merge(first_layout(3), [1, 1]), "it takes two segments to merge them"),
        (lambda: merge(first_layout(3), [1, 3]), "segment 3 takes no events"),
        (lambda: resize(first_layout(1), 0), "has 1 to 4096 segments, not 0"),
        (lambda: resize(first_layout(1), SEGMENTS_MAX + 1), "has 1 to 4096 segments, not 4097"),
        (lambda: scale(first_layout(2), Plan(0, (), ())), "no segment is named"),
        (lambda: scale(first_layout(2), Plan(0, (0,), ((0, HALF - 1),))), "exactly the keys"),
        (lambda: scale(first_layout(2), Plan(0, (0,), ((0, HALF), (5, HALF)))), "empty or overlap"),
        (lambda: scale(first_layout(2), Plan(0, (0,), ((0, HALF), (HALF, HALF)))), "empty or overlap"),
        (
            lambda: scale(first_layout(1), Plan(0, (0,), tuple(equal_ranges((0, KEY_SPACE), SEGMENTS_MAX + 1)))),
            "more than 4096 segments",
        ),
    ],
)
def test_what_cannot_be_says_why(plan: Callable[[], object], problem: str) -> None:  # S72
    refused = plan()
    assert isinstance(refused, Refused)
    assert problem in refused.problem


def test_what_just_fits_is_possible() -> None:  # S72
    assert split(NARROW, 0, 2) == Plan(0, (0,), ((0, 1), (1, 2)))
    assert resize(first_layout(2), 1) == Plan(0, (0, 1), ((0, KEY_SPACE),))
    assert isinstance(resize(first_layout(1), SEGMENTS_MAX), Plan)


def test_a_step_that_was_made_is_not_made_again() -> None:  # S72
    first = first_layout(2)
    plan = split(first, 0, 2)
    assert isinstance(plan, Plan)
    after = scaled(first, plan)
    assert scale(after, plan) == AlreadyScaled()
    later = scaled(after, split(after, 1, 2))
    assert scale(later, plan) == AlreadyScaled()
    assert scale(later, Plan(0, (1,), plan.ranges)) == Outdated()
    assert scale(later, Plan(0, (0,), ((0, HALF),))) == Outdated()


@given(layouts(), st.data())
def test_late_events_keep_their_keys_and_their_place(layout: Layout, data: st.DataObject) -> None:  # S75
    """What takes them takes all their keys, comes behind all former segments of these, and before all later ones."""
    epoch = data.draw(st.integers(0, layout.epoch))
    old = layout.of_epoch(epoch)
    touched = [x.segment_id for x in old if data.draw(st.booleans())] or [old[0].segment_id]
    found = reopen(layout, epoch, touched)
    now = layout if found.change is None else found.change.layout
    assert now.problems() == []
    present = {segment.segment_id: segment for segment in now.present}
    for number in touched:
        home = present[found.places[number]]
        assert home.key_low <= layout.segments[number].key_low
        assert layout.segments[number].key_high <= home.key_high
    change = back(now, ranges(layout))
    after = now if change is None else change.layout
    assert ranges(after) == ranges(layout)
    assert after.problems() == []
    kept = {x.segment_id for x in layout.present} & {x.segment_id for x in after.present}
    assert kept >= {x.segment_id for x in layout.present if x.is_in(epoch)}  # nothing else is touched


def test_events_of_merged_segments_go_to_the_one_that_took_their_keys() -> None:  # S75
    layout = scaled(first_layout(2), merge(first_layout(2), [0, 1]))
    found = reopen(layout, 0, [0, 1])
    assert (found.places, found.change) == ({0: 2, 1: 2}, None)


def test_a_layout_whose_step_loses_keys_is_a_problem() -> None:
    quarter = HALF // 2
    whole = (Segment(0, 0, HALF, 0, 1), Segment(1, HALF, KEY_SPACE))
    twice = (Segment(2, 0, quarter, 1, 2), Segment(3, quarter + 1, HALF, 1, 2), Segment(4, 0, HALF, 2))
    found = Layout(2, (*whole, *twice)).problems()
    assert found == [
        "the segments of layout 1 do not take exactly the keys of those that it closed",
        "the segments of layout 2 do not take exactly the keys of those that it closed",
    ]
