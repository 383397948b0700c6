"""Pipelines in the machine room that do not retain their checkpoints; and planted bugs that are found."""

from __future__ import annotations

import pytest
from tests.mutants.harness import Mutant
from tests.sim.product.mutants_of_cancelling import ALL

from headgate.sim.kinds.cancelling import CancellingRun, run_seed

SMOKE = (1, 3, 7, 10, 11, 13)


def test_cancelled_pipelines_give_up_their_checkpoints() -> None:  # SM45
    given_up = asked = 0
    for seed in SMOKE:
        run = CancellingRun(seed)
        assert run.run() is None
        given_up, asked = given_up + run.is_given_up, asked + run.asked_count
    assert given_up > 3
    assert asked > given_up, "some cancels met nothing, or a driver that died over them"


@pytest.mark.parametrize(("mutant", "seed"), ALL.items(), ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_planted_bug_of_given_up_checkpoints_is_found(mutant: Mutant, seed: int) -> None:  # SM45
    assert run_seed(seed).violation is None
    with mutant():
        assert run_seed(seed).violation is not None
