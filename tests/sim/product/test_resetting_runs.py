"""Pipelines in the machine room whose user has them start over; and planted bugs that are found."""

from __future__ import annotations

import pytest
from tests.mutants.harness import Mutant
from tests.sim.product.finding import assert_found
from tests.sim.product.mutants_of_resets import ALL

from headgate.sim.kinds.resetting import ResettingRun, run_seed

SMOKE = (2, 5, 9, 10, 13, 14, 16)


def test_pipelines_start_over_whoever_runs_them() -> None:  # SM82
    steps = carried_out = finished = given_up = 0
    for seed in SMOKE:
        run = ResettingRun(seed)
        assert run.run() is None
        steps, given_up = (
            steps + len(run.history.steps),
            given_up + sum(newest for _, newest in run.history.given_up.values()),
        )
        carried_out, finished = carried_out + run.carried_out_count, finished + run.finished_count
    assert steps > carried_out > 3, "some resets did not live to their end"
    assert finished > 0, "starts finish what was begun"
    assert given_up > steps, "there were checkpoints"


def test_a_seed_of_starting_over_has_one_digest() -> None:  # SM82
    assert run_seed(11).digest == run_seed(11).digest


@pytest.mark.parametrize(("mutant", "seed"), ALL.items(), ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_planted_bug_of_starting_over_is_found(mutant: Mutant, seed: int) -> None:  # SM82
    assert_found(mutant, lambda number: run_seed(number).violation, (seed,), range(60))
