"""Planted bugs are found by seeds of the product."""

from __future__ import annotations

import pytest
from tests.sim.product.mutants import MUTANTS, catching_seed
from tests.sim.product.patching import Mutant


@pytest.mark.parametrize(("mutant", "seed"), MUTANTS.items(), ids=lambda value: getattr(value, "__name__", None))
def test_a_planted_bug_is_found(mutant: Mutant, seed: int) -> None:  # SM6
    assert catching_seed(mutant, (seed, *range(120))) is not None
