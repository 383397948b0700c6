"""Planted bugs are found by seeds of the product."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.mutants.harness import assert_caught
from tests.sim.product import mutants_of_checkpoints, mutants_of_workers, test_graphs, test_product_runs
from tests.sim.product.mutants import MUTANTS, catching_seed
from tests.sim.product.patching import Mutant

from headgate.sim.machine.faults import Fault


@pytest.mark.parametrize(("mutant", "seed"), MUTANTS.items(), ids=lambda value: getattr(value, "__name__", None))
def test_a_planted_bug_is_found(mutant: Mutant, seed: int) -> None:  # SM6
    assert catching_seed(mutant, (seed, *range(120))) is not None


NAMED: tuple[tuple[Mutant, Callable[..., object], tuple[object, ...]], ...] = (
    (
        mutants_of_workers.the_end_of_one_channel_ends_an_idle_one,
        test_product_runs.test_the_end_of_one_input_does_not_close_the_windows_of_an_idle_one,
        (),
    ),
    (
        mutants_of_checkpoints.the_newest_damage_is_skipped_unasked,
        test_graphs.test_harm_is_made_good_by_doing_what_the_error_says,
        (Fault.DAMAGE,),
    ),
)
"""Those that few seeds find."""


@pytest.mark.parametrize(("mutant", "test", "arguments"), NAMED, ids=lambda value: getattr(value, "__name__", None))
def test_a_named_test_finds_a_planted_bug(
    mutant: Mutant, test: Callable[..., object], arguments: tuple[object, ...]
) -> None:
    assert_caught(mutant, test, *arguments)
