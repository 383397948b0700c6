"""Pipelines that are another one at the next start, in the machine room; and planted bugs that are found."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tests.mutants.harness import Mutant
from tests.mutants.test_guarantee_mutants import a_stop_skips_what_is_held, positions_are_in_front_of_what_is_held
from tests.sim.product.mutants_of_changes import (
    a_checkpoint_needs_only_what_was_written_for_it,
    a_start_that_is_repeated_goes_back_again,
)

from headgate.model.options import Guarantee
from headgate.sim.product.changing_back import GoingBackRun
from headgate.sim.product.changing_modes import ChangingModeRun, EpochsJudge

MODES = (2, 4, 6)
BACK = (1, 12)


def test_the_guarantee_of_a_pipeline_changes_between_two_starts() -> None:  # SM43
    changed: set[Guarantee] = set()
    lost = exact = 0
    for seed in MODES:
        run = ChangingModeRun(seed)
        assert (seed, run.run()) == (seed, None)
        changed |= run.modes
        lost += run.judge.lost
        exact += bool(run.modes) and not run.judge.restored
    assert len(changed) > 1, "starts went on from checkpoints of other modes"
    assert lost > 0, "what was under way at most once was lost"
    assert exact > 0, "a pipeline whose changes came behind stops was exact"


def test_what_no_restored_checkpoint_allows_is_told() -> None:  # SM43
    few: Counter[Any] = Counter([(1, 1)])
    many: Counter[Any] = Counter([(1, 1), (2, 2)])
    judge = EpochsJudge(Guarantee.AT_MOST_ONCE)
    assert judge.problem("mapped", few, many, has_failed=True) is not None
    judge.restored.add(Guarantee.AT_MOST_ONCE)
    assert judge.problem("mapped", few, many, has_failed=True) is None
    assert judge.problem("mapped", many, few, has_failed=True) is not None
    judge.restored.add(Guarantee.AT_LEAST_ONCE)
    assert judge.problem("mapped", few + few, many, has_failed=True) is None
    assert judge.problem("mapped", many, few, has_failed=True) is not None
    judge.given[7] = 2
    assert judge.problem("mapped", few, few, has_failed=True) == "gave a user's function twice: [7]"


MODE_MUTANTS: dict[Mutant, int] = {a_stop_skips_what_is_held: 2, positions_are_in_front_of_what_is_held: 3}


@pytest.mark.parametrize(("mutant", "seed"), MODE_MUTANTS.items(), ids=lambda value: getattr(value, "__name__", None))
def test_a_planted_bug_between_two_modes_is_found(mutant: Mutant, seed: int) -> None:  # SM43
    for each in (seed, *range(40)):
        with mutant():
            if ChangingModeRun(each, events_max=100_000).run() is not None:
                return
    pytest.fail(f"no seed finds {mutant}")


def test_a_user_goes_back_to_an_older_checkpoint_by_hand() -> None:  # SM44
    back = repeated = 0
    for seed in BACK:
        run = GoingBackRun(seed)
        assert (seed, run.run()) == (seed, None)
        back += len(run.history.went_back)
        repeated += run.repeated_count
    assert back > 2
    assert repeated > 0, "a command was repeated that had gone back"


BACK_MUTANTS: dict[Mutant, int] = {
    a_start_that_is_repeated_goes_back_again: 12,
    a_checkpoint_needs_only_what_was_written_for_it: 1,
}


@pytest.mark.parametrize(("mutant", "seed"), BACK_MUTANTS.items(), ids=lambda value: getattr(value, "__name__", None))
def test_a_planted_bug_of_going_back_is_found(mutant: Mutant, seed: int) -> None:  # SM44
    with mutant():
        assert GoingBackRun(seed, events_max=100_000).run() is not None
