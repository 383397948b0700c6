"""Whether and when to start again (docs/spec/restart.md)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.model.config import ExponentialDelay, FailureRate, FixedDelay, NoRestart, RestartStrategy
from headgate.model.failure import Failure, FailureKind
from headgate.protocol.supervision.restart_policy import (
    Decision,
    RestartAfter,
    RestartPolicy,
    Restarts,
    StayDown,
    longest_outage_ms,
)


def decisions(strategy: RestartStrategy, *times_ms: int, jitter: float = 0.5) -> list[Decision]:
    policy = RestartPolicy(strategy)
    return [policy.on_failure(at_ms, jitter) for at_ms in times_ms]


def test_no_restart_gives_up_at_the_first_failure() -> None:  # R2
    assert decisions(NoRestart(), 0) == [StayDown("the restart strategy is 'none'")]


def test_fixed_delay_restarts_as_often_as_allowed() -> None:  # R3
    assert decisions(FixedDelay(attempts=2, delay_ms=70), 0, 1, 2) == [
        RestartAfter(70),
        RestartAfter(70),
        StayDown("it failed 3 times, and 2 restarts were allowed"),
    ]


def test_fixed_delay_without_attempts_restarts_for_ever() -> None:  # R3
    assert decisions(FixedDelay(delay_ms=5), *range(500)) == [RestartAfter(5)] * 500


def test_failure_rate_gives_up_when_too_many_failures_fall_within_the_interval() -> None:  # R4
    strategy = FailureRate(failures_max=2, interval_ms=1_000, delay_ms=9)
    again, over = RestartAfter(9), StayDown("more than 2 failures within 1 s")
    assert decisions(strategy, 0, 100, 999) == [again, again, over]
    assert decisions(strategy, 0, 100, 1_000, 1_100) == [again] * 4, "a failure is forgotten after the interval"


def test_exponential_delay_grows_up_to_its_maximum() -> None:  # R5
    strategy = ExponentialDelay(initial_ms=100, max_ms=1_000, multiplier=2.0, jitter=0.0)
    assert decisions(strategy, *range(6)) == [RestartAfter(d) for d in (100, 200, 400, 800, 1_000, 1_000)]


def test_exponential_delay_starts_over_after_a_quiet_time() -> None:  # R5
    strategy = ExponentialDelay(initial_ms=100, multiplier=2.0, reset_after_ms=5_000, jitter=0.0, attempts=2)
    assert decisions(strategy, 0, 1_000, 6_000, 7_000, 8_000) == [
        RestartAfter(100),
        RestartAfter(200),
        RestartAfter(100),
        RestartAfter(200),
        StayDown("it failed 3 times, and 2 restarts were allowed"),
    ]


def test_jitter_spreads_the_delay_around_its_middle() -> None:  # R5
    strategy = ExponentialDelay(initial_ms=1_000, jitter=0.1)
    assert decisions(strategy, 0, jitter=0.0) == [RestartAfter(900)]
    assert decisions(strategy, 0, jitter=0.5) == [RestartAfter(1_000)]
    assert decisions(strategy, 0, jitter=0.75) == [RestartAfter(1_050)]


@pytest.mark.parametrize("strategy", [ExponentialDelay(initial_ms=0), ExponentialDelay(max_ms=100, multiplier=50.0)])
def test_exponential_delay_never_overflows(strategy: ExponentialDelay) -> None:  # R5
    assert len(decisions(strategy, *range(3_000))) == 3_000


@given(st.lists(st.tuples(st.integers(0, 100_000), st.floats(0, 1, exclude_max=True)), max_size=60))
def test_an_exponential_delay_stays_within_its_bounds(gaps: list[tuple[int, float]]) -> None:  # R5
    strategy = ExponentialDelay()
    policy, now = RestartPolicy(strategy), 0
    for gap, jitter in gaps:
        now += gap
        decision = policy.on_failure(now, jitter)
        assert isinstance(decision, RestartAfter)
        assert strategy.initial_ms * 0.9 - 1 <= decision.delay_ms <= strategy.max_ms * 1.1 + 1


def test_the_policy_reads_neither_clock_nor_dice() -> None:  # R1
    times = (0, 40, 3_000, 3_001)
    assert decisions(ExponentialDelay(), *times) == decisions(ExponentialDelay(), *times)
    with pytest.raises(AssertionError):
        RestartPolicy(FixedDelay()).on_failure(0, 1.0)


@pytest.mark.parametrize(
    ("strategy", "outage_ms"),
    [
        (NoRestart(), 10_000),
        (FixedDelay(delay_ms=9_999), 10_000),
        (FixedDelay(delay_ms=12_000), 12_000),
        (FailureRate(failures_max=2, interval_ms=1_000, delay_ms=13_000), 13_000),
        (ExponentialDelay(initial_ms=100, max_ms=20_000, jitter=0.5), 30_000),
    ],
)
def test_an_outage_lasts_as_long_as_the_delay_or_a_takeover(strategy: RestartStrategy, outage_ms: int) -> None:  # CS9
    assert longest_outage_ms(strategy) == outage_ms


def test_generations_that_were_begun_again_are_counted() -> None:  # R1, R57
    restarts = Restarts(FixedDelay(attempts=1, delay_ms=5))
    damaged, lost = Failure(FailureKind.DAMAGED, "torn"), Failure(FailureKind.LOST, "gone")
    assert [restarts.after(failure, 0, 0.5) for failure in (damaged, lost)] == [RestartAfter(0), RestartAfter(5)]
    assert restarts.count == 2
    assert isinstance(restarts.after(lost, 0, 0.5), Failure)
    assert restarts.count == 2, "it stays down"
