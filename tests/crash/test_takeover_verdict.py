"""What ``make kill-drivers`` says about takeovers."""

from __future__ import annotations

from crash.takeovers import problem, told


def test_takeovers_are_judged_by_the_longest_of_them() -> None:
    assert problem([6_000, 29_999], 3) is None
    assert problem([6_000, 30_001], 3) == (
        "2 takeovers, each to its first completed checkpoint: median 18.0 s, longest 30.0 s (promised: 10 s); "
        "allowed here: 30 s each"
    )


def test_a_takeover_of_a_minute_is_not_accepted() -> None:
    assert problem([60_000], 3) is not None


def test_without_takeovers_there_is_nothing_to_be_content_with() -> None:
    assert problem([], 3) == "no takeovers; allowed here: 30 s each"


def test_nobody_is_judged_by_the_clock_unless_asked() -> None:
    assert problem([60_000], 0) is None
    assert "longest 60.0 s" in told([60_000])
