"""Pipelines that are another one at the next start, in the machine room; and planted bugs that are found."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tests.mutants.harness import Mutant
from tests.mutants.test_guarantee_mutants import a_stop_skips_what_is_held, positions_are_in_front_of_what_is_held
from tests.sim.product.finding import assert_found
from tests.sim.product.mutants_of_changes import (
    a_checkpoint_needs_only_what_was_written_for_it,
    a_start_that_is_repeated_goes_back_again,
    an_operator_without_a_name_starts_empty,
    state_of_any_operator_that_is_gone_is_left_behind,
)

from headgate.model.options import Guarantee
from headgate.sim.kinds.changing_back import GoingBackRun
from headgate.sim.kinds.changing_code import SINK, ChangingCodeRun, EditedJudge
from headgate.sim.kinds.changing_modes import ChangingModeRun, EpochsJudge

MODES = (2, 3, 4)
BACK = (1, 9)
CODE = (4, 6, 9)


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
    assert_found(mutant, lambda seed: ChangingModeRun(seed, events_max=100_000).run(), (seed,), range(40))


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
    a_start_that_is_repeated_goes_back_again: 1,
    a_checkpoint_needs_only_what_was_written_for_it: 1,
}


@pytest.mark.parametrize(("mutant", "seed"), BACK_MUTANTS.items(), ids=lambda value: getattr(value, "__name__", None))
def test_a_planted_bug_of_going_back_is_found(mutant: Mutant, seed: int) -> None:  # SM44
    with mutant():
        assert GoingBackRun(seed, events_max=100_000).run() is not None


def test_operators_with_state_come_and_go() -> None:  # SM46
    refused: Counter[str] = Counter()
    emptied = left = 0
    for seed in CODE:
        run = ChangingCodeRun(seed)
        assert (seed, run.run()) == (seed, None)
        refused += run.refused
        emptied, left = emptied + len(run.judge.emptied), left + run.left_count
    assert left > 1, "state was left behind"
    assert emptied > 0, "an operator started empty behind it"
    assert refused["left"], "users were told what they left behind"
    assert refused["named"], "users were told to name what is new"


BAD = [
    ([(0, 1, 1, 0)], "one record is lost"),
    ([(0, 1, 1, 0), (0, 2, 3, 0)], "a number is left out"),
    ([(0, 1, 1, 0), (0, 2, 1, 0)], "a number comes twice"),
    ([(0, 1, 1, 0), (0, 2, 1, 4)], "it starts empty, and nobody had left its state behind"),
    ([(0, 1, 1, 0), (0, 1, 2, 0)], "a record comes twice"),
]


@pytest.mark.parametrize(("found", "why"), BAD)
def test_what_an_operator_with_state_must_not_do_is_told(found: list[Any], why: str) -> None:  # SM46
    wanted: Counter[Any] = Counter([(0, 1), (0, 2)])
    judge = EditedJudge()
    assert judge.problem(SINK, Counter(found), wanted, has_failed=True) is not None, why
    assert judge.problem(SINK, Counter([(0, 1, 1, 0), (0, 2, 2, 0)]), wanted, has_failed=True) is None


CODE_MUTANTS: dict[Mutant, int] = {
    state_of_any_operator_that_is_gone_is_left_behind: 9,
    an_operator_without_a_name_starts_empty: 4,
}


@pytest.mark.parametrize(("mutant", "seed"), CODE_MUTANTS.items(), ids=lambda value: getattr(value, "__name__", None))
def test_a_planted_bug_of_changed_code_is_found(mutant: Mutant, seed: int) -> None:  # SM46
    with mutant():
        assert ChangingCodeRun(seed, events_max=100_000).run() is not None
