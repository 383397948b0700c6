"""Pipelines whose barriers overtake, in the machine room: restored with what was in flight, at any parallelism."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from tests.mutants.harness import Mutant
from tests.mutants.test_overtaking_mutants import (
    a_barrier_that_arrives_late_records_nothing,
    channels_without_their_barrier_are_read_on,
    everybody_gets_all_records_of_a_shuffle,
    records_stay_with_the_number_of_their_subtask,
    what_is_behind_a_barrier_is_recorded_too,
    what_is_left_of_a_replay_is_in_no_snapshot,
    what_waits_is_not_recorded,
)
from tests.sim.product.finding import assert_found
from tests.sim.product.patching import around

from headgate.runtime.worker import deployment
from headgate.sim.kinds.overtaking import OvertakingRun, run_seed

SMOKE = (32, 37, 42, 43, 49)


def test_the_simulator_restores_what_was_in_flight() -> None:  # SM50, UA11
    replayed: Counter[bool] = Counter()

    def counting(original: Any, parts: Any, ways: Any, plan: Any, subtask: Any) -> Iterator[Any]:
        found = list(parts)
        for restored in original(found, ways, plan, subtask):
            replayed[found[0].parallelism != plan.parallelism] += 1
            yield restored

    with around(deployment, "restored_records", counting):
        for seed in SMOKE:
            assert OvertakingRun(seed).run() is None
    assert replayed[False] > 0, "at the same parallelism"
    assert replayed[True] > 0, "at another one"


MUTANTS: dict[Mutant, tuple[int, ...]] = {
    what_waits_is_not_recorded: (32,),
    what_is_behind_a_barrier_is_recorded_too: (37,),
    channels_without_their_barrier_are_read_on: (32,),
    a_barrier_that_arrives_late_records_nothing: (32,),
    what_is_left_of_a_replay_is_in_no_snapshot: (13,),
    everybody_gets_all_records_of_a_shuffle: (4,),
    records_stay_with_the_number_of_their_subtask: (21,),
}


@pytest.mark.parametrize(("mutant", "seeds"), MUTANTS.items(), ids=lambda value: getattr(value, "__name__", None))
def test_a_planted_bug_of_overtaking_is_found(mutant: Mutant, seeds: tuple[int, ...]) -> None:  # SM50
    assert_found(mutant, lambda seed: run_seed(seed, events_max=100_000).violation, seeds, range(200))
