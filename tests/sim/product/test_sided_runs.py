"""Pipelines with a broadcast side, in the machine room: every subtask keeps the same, also of what was in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from tests.mutants.harness import Mutant
from tests.mutants.test_broadcast_mutants import (
    copies_that_differ_are_not_written,
    everybody_replays_what_the_first_one_had_in_flight,
    nobody_restores_broadcast_state,
    others_are_not_given_the_copy_of_the_first_one,
    the_side_is_spread_over_all_subtasks,
    what_is_in_flight_to_the_side_goes_to_heirs,
)
from tests.sim.product.finding import assert_found
from tests.sim.product.patching import around

from headgate.model.graph import BROADCAST_INPUT
from headgate.runtime.worker import deployment
from headgate.sim.kinds.sided import LOOPED_EACH, LoopedRun, SidedRun, run_seed

SMOKE = (0, 1, 2, 5, 13, 23)
LOOPED_SMOKE = (4, 9, 14, 19)


def test_broadcast_sides_pass_every_smoke_seed() -> None:  # SM97, BC6
    replayed: Counter[bool] = Counter()
    forms: set[str] = set()

    def counting(original: Any, parts: Any, ways: Any, plan: Any, subtask: Any) -> Iterator[Any]:
        sides = {way.channel.channel for way in ways if way.channel.edge.input == BROADCAST_INPUT}
        for channel, batch in original(parts, ways, plan, subtask):
            replayed[channel in sides] += 1
            yield channel, batch

    with around(deployment, "restored_records", counting):
        for seed in SMOKE:
            run = SidedRun(seed)
            forms.add(run.settings.job.how)  # type: ignore[attr-defined]
            assert run.run() is None, seed
    assert replayed[True] > 0, "nothing was in flight to a broadcast side"
    assert replayed[False] > 0
    assert forms == {"row", "batch", "plain"}


def test_broadcast_sides_in_loops_pass_every_smoke_seed() -> None:  # SM97, BC13
    runs = {seed: LoopedRun(seed) for seed in LOOPED_SMOKE}
    assert {seed: run.run() for seed, run in runs.items()} == dict.fromkeys(runs)
    assert {run.settings.job.how for run in runs.values()} == {"outside", "inside"}  # type: ignore[attr-defined]


MUTANTS: dict[Mutant, tuple[int, ...]] = {
    the_side_is_spread_over_all_subtasks: (0,),
    others_are_not_given_the_copy_of_the_first_one: (2,),
    nobody_restores_broadcast_state: (23,),
    what_is_in_flight_to_the_side_goes_to_heirs: (2,),
    everybody_replays_what_the_first_one_had_in_flight: (2,),
    copies_that_differ_are_not_written: (2,),
}


LOOPED_MUTANTS: dict[Mutant, tuple[int, ...]] = {
    the_side_is_spread_over_all_subtasks: (14,),
    others_are_not_given_the_copy_of_the_first_one: (14,),
}


@pytest.mark.parametrize(
    ("mutant", "seeds"), LOOPED_MUTANTS.items(), ids=lambda value: getattr(value, "__name__", None)
)
def test_a_planted_bug_of_broadcast_sides_in_loops_is_found(mutant: Mutant, seeds: tuple[int, ...]) -> None:  # BC13
    others = range(LOOPED_EACH - 1, 200, LOOPED_EACH)
    assert_found(mutant, lambda seed: run_seed(seed, events_max=100_000).violation, seeds, others)


@pytest.mark.parametrize(("mutant", "seeds"), MUTANTS.items(), ids=lambda value: getattr(value, "__name__", None))
def test_a_planted_bug_of_broadcast_sides_is_found(mutant: Mutant, seeds: tuple[int, ...]) -> None:  # SM97
    assert_found(mutant, lambda seed: run_seed(seed, events_max=100_000).violation, seeds, range(200))
