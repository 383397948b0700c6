"""When a stream is scaled by its policy (S79, S80)."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headgate.protocol.store import layouts
from headgate.protocol.store.layouts import (
    KEY_SPACE,
    WINDOWS_MS,
    Change,
    Layout,
    ObservedLoad,
    Plan,
    ScalingPolicy,
    Unit,
    Unscaled,
    first_layout,
    scaling_by_policy,
)

MINUTE = 60_000
LONG = WINDOWS_MS[-1]
POLICY = ScalingPolicy(Unit.EVENTS, target=100, segments_min=1, segments_max=8, cool_down_ms=10 * MINUTE)
HALF = KEY_SPACE // 2


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
