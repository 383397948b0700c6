"""Pairs of measurements: what something costs, and how sure that is."""

from __future__ import annotations

import pytest
from bench.pairs import Overhead, Pair, quantile, with_first


def test_the_overhead_is_the_share_of_the_rate_without() -> None:
    assert Pair(100.0, 95.0).overhead == pytest.approx(0.05)
    assert Pair(100.0, 110.0).overhead == pytest.approx(-0.1), "noise may make it faster"


def test_the_median_is_that_of_the_pairs_own_overheads() -> None:
    # The machine grows ten times slower: medians of the rates would say nothing, each pair says 10 %.
    found = Overhead.of([Pair(100.0 / slower, 90.0 / slower) for slower in (1, 2, 4, 8, 10)])
    assert found.median == pytest.approx(0.1)
    assert found.spread == pytest.approx(0.0)


def test_the_spread_is_the_distance_of_the_quartiles() -> None:
    found = Overhead.of([Pair(100.0, 100.0 - cost) for cost in (4, 0, 1, 3, 2)])
    assert (found.least, found.low, found.median, found.high, found.most) == pytest.approx((0, 0.01, 0.02, 0.03, 0.04))
    assert found.spread == pytest.approx(0.02)


def test_quantiles_lie_between_their_neighbours() -> None:
    assert quantile([1.0], 0.25) == 1.0
    assert quantile([1.0, 2.0, 4.0], 0.5) == 2.0
    assert quantile([1.0, 2.0, 4.0], 0.75) == 3.0
    assert quantile([1.0, 2.0], 1.0) == 2.0


def test_no_pairs_have_no_overhead() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Overhead.of([])


def test_every_other_pair_begins_with_the_other_half() -> None:
    assert [with_first(number) for number in range(4)] == [False, True, False, True]
