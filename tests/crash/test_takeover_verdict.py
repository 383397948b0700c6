"""What ``make kill-drivers`` says about takeovers."""

from __future__ import annotations

from crash.takeovers import Takeover, problem, told


def awaited(*took_ms: int) -> list[Takeover]:
    return [Takeover(one, was_awaited=True) for one in took_ms]


def test_takeovers_are_judged_by_the_longest_of_them() -> None:
    assert problem(awaited(6_000, 29_999), 3) is None
    assert problem(awaited(6_000, 30_001), 3) == (
        "takeovers by a standby that was waiting: 2, median 18.0 s, longest 30.0 s (promised: 10 s); "
        "while no standby was waiting: none; allowed here: 30 s each"
    )


def test_a_takeover_of_a_minute_is_not_accepted() -> None:
    assert problem(awaited(60_000), 3) is not None


def test_where_no_standby_waits_nothing_is_promised() -> None:
    alone = Takeover(60_000, was_awaited=False)
    assert problem([*awaited(6_000), alone], 1) is None
    assert told([*awaited(6_000), alone]).endswith("while no standby was waiting: 1, median 60.0 s, longest 60.0 s")


def test_without_takeovers_there_is_nothing_to_be_content_with() -> None:
    for nothing in ([], [Takeover(5, was_awaited=False)]):
        assert (problem(nothing, 3) or "").startswith("takeovers by a standby that was waiting: none (promised: 10 s)")


def test_nobody_is_judged_by_the_clock_unless_asked() -> None:
    assert problem(awaited(60_000), 0) is None
    assert "longest 60.0 s" in told(awaited(60_000))
