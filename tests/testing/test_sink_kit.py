"""What the kit for sinks could not check is said, so that nobody takes it for checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.testing.staged import StagedSink, at

from headgate.testing import Target, check_sink

NEVER_FORGETS = "forgetting: the sink has nothing that forgets"
NEVER_REMOVES = "remove output: the sink has no method remove_output, so a pipeline with it cannot start over"
SAYS_LITTLE = [
    "the order of the output: Target(is_ordered=...) is not given",
    "what is left behind: Target(leftovers=...) is not given",
    NEVER_FORGETS,
    "lost prepared: Target(lose_prepared=...) is not given",
    "lost prepared in recovery: Target(lose_prepared=...) is not given",
    "taken away: Target(take=...) is not given",
    NEVER_REMOVES,
    "outages: Target(advance_clock=...) is not given",
]


def quickly(fresh: Callable[[], Target]) -> list[str]:
    return check_sink(fresh, rescales=[(2, 1)], overlaps=[2], rows=[6])


def says_little() -> Target:
    made = at(StagedSink)
    return Target(made.sink, made.read)


def test_what_the_kit_left_out_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert quickly(says_little) == SAYS_LITTLE
    assert capsys.readouterr().out == "".join(f"left out: {one}\n" for one in SAYS_LITTLE)


def test_what_a_target_says_is_not_left_out() -> None:
    def fresh() -> Target:
        made = at(StagedSink)
        assert isinstance(made.sink, StagedSink)
        place = made.sink.place

        def lose() -> None:
            for name in list(place.opened):
                place.drop(name)

        return replace(made, lose_prepared=lose, take=place.shown.clear)

    assert quickly(fresh) == [NEVER_FORGETS, NEVER_REMOVES]
