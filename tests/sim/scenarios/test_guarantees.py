"""At least once and at most once in the machine room: what the verdict allows and what really happens."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from headgate.model.config import Guarantee
from headgate.sim.product.run import Run
from headgate.sim.scenarios.guarantees import RULES, Judge, draw_mode

LEAST, MOST = Guarantee.AT_LEAST_ONCE, Guarantee.AT_MOST_ONCE
SMOKE = (3, 13, 29, 33, 34, 37, 41, 54)


def test_each_mode_shows_the_anomaly_that_it_allows_and_no_other() -> None:
    lost: Counter[Guarantee] = Counter()
    repeated: Counter[Guarantee] = Counter()
    for seed in SMOKE:
        run = Run(seed, is_plain=True)
        judge = draw_mode(run, seed)
        assert run.run() is None
        lost[judge.mode] += judge.lost
        repeated[judge.mode] += judge.repeated
    assert repeated[LEAST] > 0, "records overtook a barrier and came again"
    assert lost[MOST] > 0, "records were under way when something failed"
    assert repeated[MOST] == 0


def records(*found: tuple[int, ...]) -> Counter[Any]:
    return Counter(found)


BAD = [
    (LEAST, "mapped", records((1, 1)), records((1, 1), (2, 2))),
    (LEAST, "mapped", records((1, 1), (3, 3)), records((1, 1))),
    (LEAST, "once", records((1, 1), (1, 1)), records((1, 1))),
    (LEAST, "reduced", records((0, 1)), records((0, 1), (0, 2))),
    (LEAST, "numbered", records((0, 1), (0, 3)), records((0, 1), (0, 2))),
    (LEAST, "windowed", records((0, 1, 5)), records((0, 2, 5))),
    (LEAST, "circling", records((0, 7, 1)), records((0, 7, 1), (0, 8, 1))),
    (MOST, "mapped", records((1, 1), (1, 1)), records((1, 1))),
    (MOST, "reduced", records((0, 1), (0, 2)), records((0, 1))),
    (MOST, "windowed", records((0, 2, 5)), records((0, 1, 5))),
]


@pytest.mark.parametrize(("mode", "sink", "found", "wanted"), BAD)
def test_what_a_mode_does_not_allow_is_told(mode: Guarantee, sink: str, found: Any, wanted: Any) -> None:
    assert Judge(mode).problem(sink, found, wanted, has_failed=True) is not None
    assert Judge(mode).problem(sink, wanted, wanted, has_failed=False) is None


def test_nothing_is_allowed_when_nothing_failed() -> None:
    for mode, rules in RULES.items():
        for sink in rules:
            found, wanted = records((0, 1, 1), (0, 2, 1)), records((0, 1, 1))
            few, many = (found, wanted) if mode is LEAST else (wanted, found)
            assert Judge(mode).problem(sink, few, many, has_failed=False) is not None


def test_a_record_that_a_function_was_given_twice_is_told() -> None:
    judge = Judge(MOST)
    judge.given[7] = 2
    assert judge.problem("mapped", Counter(), Counter(), has_failed=True) == "gave a user's function twice: [7]"
