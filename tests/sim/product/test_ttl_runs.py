"""Pipelines whose functions have state that expires, in the machine room: restored on machines whose dates differ."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tests.mutants.harness import Mutant
from tests.mutants.test_ttl_mutants import (
    a_map_expires_as_a_whole,
    a_restore_drops_a_little_more,
    everything_is_new_again_at_a_restore,
    nobody_remembers_what_time_it_was,
    nothing_expires_while_a_pipeline_runs,
    reads_always_renew,
    reads_renew_nothing,
)
from tests.sim.product.finding import assert_found
from tests.sim.product.patching import around

from headgate.operators.process.timed import TimedOperator
from headgate.sim.kinds.expiring import ExpiringRun, Judge, run_seed

SMOKE = (0, 1, 2, 3, 4)


def test_the_simulator_restores_state_that_expires() -> None:  # SM61, TL7
    restored: Counter[bool] = Counter()
    seen: Counter[str] = Counter()

    def counting(restore: Any, self: Any, states: Any) -> None:
        restore(self, states)
        if any(self.freeze().rows().values()):
            restored[states[0].parallelism != self.context.parallelism] += 1

    with around(TimedOperator, "restore", counting):
        for seed in SMOKE:
            run = ExpiringRun(seed)
            assert run.run() is None
            assert isinstance(run.settings.judge, Judge)
            seen.update(expired=run.settings.judge.expired, lived=run.settings.judge.lived)
    assert restored[False] > 0, "at the same parallelism"
    assert restored[True] > 0, "at another one"
    assert min(seen["expired"], seen["lived"]) > 100


def test_a_seed_whose_state_expires_has_one_digest() -> None:  # SM61
    assert run_seed(1).digest == run_seed(1).digest


MUTANTS: dict[Mutant, tuple[int, ...]] = {
    a_map_expires_as_a_whole: (3,),
    a_restore_drops_a_little_more: (3,),
    everything_is_new_again_at_a_restore: (5,),
    nobody_remembers_what_time_it_was: (0,),
    nothing_expires_while_a_pipeline_runs: (0,),
    reads_always_renew: (2,),
    reads_renew_nothing: (2,),
}


@pytest.mark.parametrize(("mutant", "seeds"), MUTANTS.items(), ids=lambda value: getattr(value, "__name__", None))
def test_a_planted_bug_of_ttl_is_found(mutant: Mutant, seeds: tuple[int, ...]) -> None:  # SM61
    assert_found(mutant, lambda seed: run_seed(seed, events_max=100_000).violation, seeds, range(60))
