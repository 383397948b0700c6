"""Layouts: every key is in one segment, whatever is split and merged, and late events keep their place.

When a stream is scaled by its policy (S79, S80).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headgate.protocol.store import layouts
from headgate.protocol.store.layouts import (
    KEY_SPACE,
    SEGMENTS_MAX,
    WINDOWS_MS,
    AlreadyScaled,
    Change,
    Layout,
    Lineage,
    ObservedLoad,
    Outdated,
    Plan,
    Refused,
    ScalingPolicy,
    Segment,
    Unit,
    Unscaled,
    back,
    equal_ranges,
    first_layout,
    merge,
    reopen,
    resize,
    scale,
    scaling_by_policy,
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
def any_layouts(draw: st.DrawFn) -> Layout:
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


@given(any_layouts())
def test_every_key_has_one_segment_whatever_was_scaled(layout: Layout) -> None:  # CT6, S72
    assert layout.problems() == []
    for epoch in range(layout.epoch + 1):
        found = [segment.keys for segment in layout.of_epoch(epoch)]
        assert found[0][0] == 0
        assert found[-1][1] == KEY_SPACE
        assert all(one[1] == two[0] for one, two in pairwise(found))


@given(any_layouts())
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


@given(any_layouts(), st.data())
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


MINUTE = 60_000
LONG = WINDOWS_MS[-1]
POLICY = ScalingPolicy(Unit.EVENTS, target=100, segments_min=1, segments_max=8, cool_down_ms=10 * MINUTE)


def steady(*rates: float) -> dict[int, tuple[int | None, ...]]:
    """What segments got that get so many events a second, always."""
    return {number: tuple(int(rate * window / 1_000) for window in WINDOWS_MS) for number, rate in enumerate(rates)}


def seen(amounts: dict[int, tuple[int | None, ...]], unchanged_ms: int = LONG, count: int = 2) -> ObservedLoad:
    return ObservedLoad(first_layout(count), unchanged_ms, amounts)


def test_a_segment_that_gets_more_than_its_target_is_split() -> None:  # S79
    assert scaling_by_policy(POLICY, seen(steady(150, 60))) == Plan(0, (0,), ((0, HALF // 2), (HALF // 2, HALF)))


def test_a_segment_that_gets_much_more_is_split_into_more_and_only_as_there_is_room() -> None:  # S79
    plan = scaling_by_policy(POLICY, seen(steady(1_000, 350)))
    assert isinstance(plan, Plan)
    assert (plan.close, len(plan.ranges)) == ((0, 1), 8)  # 4 of each, and 8 are all there may be
    few = ScalingPolicy(Unit.EVENTS, 100, 1, 4, 0)
    plan = scaling_by_policy(few, seen(steady(350, 1_000)))
    assert isinstance(plan, Plan)
    assert (plan.close, len(plan.ranges)) == ((1,), 3)  # the hottest first


@pytest.mark.parametrize(
    ("window", "rate", "is_split"),
    [
        (0, 500, False),
        (0, 501, True),
        (1, 200, False),
        (1, 201, True),
        (2, 100, False),
        (2, 101, True),
        (3, 1_000, False),
    ],
)
def test_the_more_it_gets_the_sooner_it_is_split(window: int, rate: int, is_split: bool) -> None:  # S79
    amounts: list[int | None] = [0] * len(WINDOWS_MS)
    amounts[window] = rate * WINDOWS_MS[window] // 1_000
    found = scaling_by_policy(POLICY, seen({0: tuple(amounts), 1: steady(60)[0]}))
    assert isinstance(found, Plan) == is_split


def test_neighbours_that_get_less_than_half_of_the_target_together_are_merged() -> None:  # S79
    assert scaling_by_policy(POLICY, seen(steady(20, 30))) == Plan(0, (0, 1), ((0, KEY_SPACE),))
    assert isinstance(scaling_by_policy(POLICY, seen(steady(20, 31))), Unscaled)


def test_the_coldest_neighbours_are_merged_and_never_below_the_least() -> None:  # S79
    amounts = steady(20, 20, 1, 1, 60)
    plan = scaling_by_policy(POLICY, seen(amounts, count=5))
    assert isinstance(plan, Plan)
    assert plan.close == (0, 1, 2, 3)
    at_least_4 = ScalingPolicy(Unit.EVENTS, 100, 4, 8, 0)
    plan = scaling_by_policy(at_least_4, seen(amounts, count=5))
    assert isinstance(plan, Plan)
    assert plan.close == (2, 3)


def test_after_a_step_there_is_none_until_it_has_cooled_down() -> None:  # S80
    for rates in ((1_000, 1_000), (0, 0)):
        assert isinstance(scaling_by_policy(POLICY, seen(steady(*rates), 10 * MINUTE - 1)), Unscaled)
    assert isinstance(scaling_by_policy(POLICY, seen(steady(1_000, 1_000), 10 * MINUTE)), Plan)


def test_nothing_is_concluded_from_a_time_that_was_not_seen() -> None:  # S80
    eager = ScalingPolicy(Unit.EVENTS, 100, 1, 8, 0)
    assert isinstance(scaling_by_policy(eager, seen(steady(1_000, 0), WINDOWS_MS[0] - 1)), Unscaled)
    assert isinstance(scaling_by_policy(eager, seen(steady(0, 0), LONG - 1)), Unscaled)  # cold, as long as it is there
    nothing: tuple[int | None, ...] = (None,) * len(WINDOWS_MS)
    assert isinstance(
        scaling_by_policy(eager, seen({0: nothing, 1: steady(0)[0]})), Unscaled
    )  # it may have been truncated


def test_a_segment_of_one_key_stays_as_it_is() -> None:  # S79
    one = layouts.Layout(0, (layouts.Segment(0, 0, 1), layouts.Segment(1, 1, KEY_SPACE)))
    assert isinstance(scaling_by_policy(POLICY, ObservedLoad(one, LONG, steady(1_000, 90))), Unscaled)


BUCKETS = 16
RATES = st.lists(st.integers(0, 400), min_size=BUCKETS, max_size=BUCKETS)


class ScalingMachine(RuleBasedStateMachine):
    """Rates over the keys that change now and then; whoever looks, looks at any time."""

    @initialize(rates=RATES, least=st.integers(1, 3), most=st.integers(4, 12), cool_down=st.integers(0, 30))
    def begin(self, rates: list[int], least: int, most: int, cool_down: int) -> None:
        self.policy = ScalingPolicy(Unit.EVENTS, 100, least, most, cool_down * MINUTE)
        self.layout = first_layout(3)
        self.rates = rates
        self.unchanged_ms = 0
        self.steps: list[int] = []

    def _amounts(self) -> dict[int, tuple[int | None, ...]]:
        width = KEY_SPACE // BUCKETS
        found = {}
        for segment in self.layout.present:
            shares = (
                max(0, min(segment.key_high, (at + 1) * width) - max(segment.key_low, at * width)) * rate / width
                for at, rate in enumerate(self.rates)
            )
            found[segment.segment_id] = steady(sum(shares))[0]
        return found

    def _look(self) -> bool:
        answer = scaling_by_policy(self.policy, ObservedLoad(self.layout, self.unchanged_ms, self._amounts()))
        if isinstance(answer, Unscaled):
            return False
        assert self.unchanged_ms >= self.policy.cool_down_ms
        before = len(self.layout.present)
        change = layouts.scale(self.layout, answer)
        assert isinstance(change, Change)
        self.layout: Layout = change.layout
        after = len(self.layout.present)
        assert after <= max(before, self.policy.segments_max)
        assert after >= min(before, self.policy.segments_min)
        self.unchanged_ms = 0
        return True

    @rule(minutes=st.integers(1, 40))
    def look(self, minutes: int) -> None:
        self.unchanged_ms += minutes * MINUTE
        self._look()

    @rule(rates=RATES)
    def other_rates(self, rates: list[int]) -> None:
        self.rates = rates

    @rule()
    def it_comes_to_rest(self) -> None:
        """What keeps its rate is not split and merged in turn (S80)."""
        for _ in range(40):
            self.unchanged_ms += 40 * MINUTE
            if not self._look():
                return
        raise AssertionError(f"it flaps: {self.rates}")

    @invariant()
    def every_key_has_one_segment(self) -> None:
        assert not hasattr(self, "layout") or self.layout.problems() == []


TestScaling = ScalingMachine.TestCase
TestScaling.settings = settings(max_examples=30, stateful_step_count=20)
