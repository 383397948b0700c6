"""Planted bugs are found by seeds of the product, or by named tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.mutants.harness import Mutant, assert_caught
from tests.sim.product.finding import assert_found
from tests.sim.product.mutants import ALL, MUTANTS, SEEDS, run_plain
from tests.sim.product.named import HARMLESS, NAMED, Given


@pytest.mark.parametrize(("mutant", "seed"), MUTANTS.items(), ids=lambda value: getattr(value, "__name__", None))
def test_a_planted_bug_is_found(mutant: Mutant, seed: int) -> None:  # SM6
    assert_found(mutant, run_plain, (seed,), range(160))


@pytest.mark.parametrize(("mutant", "test", "given"), NAMED, ids=lambda value: getattr(value, "__name__", None))
def test_a_named_test_finds_a_planted_bug(
    mutant: Mutant, test: Callable[..., object], given: tuple[Given, ...], tmp_path: Path
) -> None:  # SM6
    with pytest.MonkeyPatch.context() as patch:
        assert_caught(mutant, test, *(argument(tmp_path, patch) for argument in given))


def test_every_planted_bug_is_in_one_list() -> None:
    named = [mutant.__name__ for mutant, _, _ in NAMED if mutant.__name__ in ALL]  # type: ignore[attr-defined]
    assert sorted([*SEEDS, *named, *HARMLESS]) == sorted(ALL)
