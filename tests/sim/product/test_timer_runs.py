"""Pipelines whose functions have timers, in the machine room: restored, at any parallelism, each timer fires once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tests.mutants.harness import Mutant
from tests.mutants.test_timer_mutants import (
    deleted_timers_stay,
    every_subtask_restores_all_timers,
    the_latest_timer_fires_first,
    timers_are_lost_at_a_restore,
    timers_fire_before_their_time,
    timers_fire_twice,
    what_a_snapshot_has_is_what_is_left_of_the_due,
)
from tests.sim.product.finding import assert_found
from tests.sim.product.patching import around

from headgate.operators.process.timed import TimedOperator
from headgate.sim.kinds.timed import TimedRun, run_seed

SMOKE = (0, 1, 2, 3, 4)


def test_the_simulator_restores_timers() -> None:  # SM60, TM6
    restored: Counter[bool] = Counter()

    def counting(restore: Any, self: Any, states: Any) -> None:
        restore(self, states)
        timers = self._backend.timers
        if timers is not None and len(timers.event_time):
            restored[states[0].parallelism != self.context.parallelism] += 1

    with around(TimedOperator, "restore", counting):
        for seed in SMOKE:
            assert TimedRun(seed).run() is None
    assert restored[False] > 0, "at the same parallelism"
    assert restored[True] > 0, "at another one"


MUTANTS: dict[Mutant, tuple[int, ...]] = {
    timers_are_lost_at_a_restore: (0,),
    timers_fire_twice: (0,),
    timers_fire_before_their_time: (0,),
    every_subtask_restores_all_timers: (6,),
    deleted_timers_stay: (0,),
    the_latest_timer_fires_first: (0,),
    what_a_snapshot_has_is_what_is_left_of_the_due: (0,),
}


@pytest.mark.parametrize(("mutant", "seeds"), MUTANTS.items(), ids=lambda value: getattr(value, "__name__", None))
def test_a_planted_bug_of_timers_is_found(mutant: Mutant, seeds: tuple[int, ...]) -> None:  # SM60
    assert_found(mutant, lambda seed: run_seed(seed, events_max=100_000).violation, seeds, range(60))
