"""At least once and at most once in the machine room: what the verdict allows and what really happens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from tests.conftest import IS_DEEP
from tests.mutants.harness import around

from headgate.model.config import Guarantee
from headgate.model.graph import BROADCAST_INPUT
from headgate.runtime.worker import deployment
from headgate.sim.product.run import Run
from headgate.sim.scenarios.guarantees import RULES, Judge, draw_mode
from headgate.sim.scenarios.unaligned import LoopedRun, OvertakingRun, SidedRun

LEAST, MOST = Guarantee.AT_LEAST_ONCE, Guarantee.AT_MOST_ONCE
SMOKE = (13, 29, 3, 33, 34, 37, 41, 54)
"""These and those below: without ``IS_DEEP`` only until what they are for was reached."""


def test_each_mode_shows_the_anomaly_that_it_allows_and_no_other() -> None:
    lost: Counter[Guarantee] = Counter()
    repeated: Counter[Guarantee] = Counter()
    for seed in SMOKE:
        run = Run(seed, is_plain=True)
        judge = draw_mode(run, seed)
        assert run.run() is None
        lost[judge.mode] += judge.lost
        repeated[judge.mode] += judge.repeated
        if not IS_DEEP and min(repeated[LEAST], lost[MOST]) > 0:
            break
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


UNALIGNED_SMOKE = (37, 32, 42, 43, 49)


def test_the_simulator_restores_what_was_in_flight() -> None:
    replayed: Counter[bool] = Counter()

    def counting(original: Any, parts: Any, ways: Any, plan: Any, subtask: Any) -> Iterator[Any]:
        found = list(parts)
        for restored in original(found, ways, plan, subtask):
            replayed[found[0].parallelism != plan.parallelism] += 1
            yield restored

    with around(deployment, "restored_records", counting):
        for seed in UNALIGNED_SMOKE:
            assert OvertakingRun(seed).run() is None
            if not IS_DEEP and min(replayed[False], replayed[True]) > 0:
                break
    assert replayed[False] > 0, "at the same parallelism"
    assert replayed[True] > 0, "at another one"


BROADCAST_SMOKE = (23, 1, 5, 0, 2, 13)
LOOPED_SMOKE = (9, 4, 14, 19) if IS_DEEP else (9, 4)


def test_broadcast_sides_pass_every_smoke_seed() -> None:
    replayed: Counter[bool] = Counter()
    forms: set[str] = set()

    def counting(original: Any, parts: Any, ways: Any, plan: Any, subtask: Any) -> Iterator[Any]:
        sides = {way.channel.channel for way in ways if way.channel.edge.input == BROADCAST_INPUT}
        for channel, batch in original(parts, ways, plan, subtask):
            replayed[channel in sides] += 1
            yield channel, batch

    with around(deployment, "restored_records", counting):
        for seed in BROADCAST_SMOKE:
            run = SidedRun(seed)
            forms.add(run.settings.job.how)  # type: ignore[attr-defined]
            assert run.run() is None, seed
            if not IS_DEEP and len(forms) == 3 and min(replayed[False], replayed[True]) > 0:
                break
    assert replayed[True] > 0, "nothing was in flight to a broadcast side"
    assert replayed[False] > 0
    assert forms == {"row", "batch", "plain"}


def test_broadcast_sides_in_loops_pass_every_smoke_seed() -> None:
    runs = {seed: LoopedRun(seed) for seed in LOOPED_SMOKE}
    assert {seed: run.run() for seed, run in runs.items()} == dict.fromkeys(runs)
    assert {run.settings.job.how for run in runs.values()} == {"outside", "inside"}  # type: ignore[attr-defined]
