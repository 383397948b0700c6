"""Pipelines that are another one at the next start, in the machine room."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tests.conftest import IS_DEEP

from headgate.model.config import Guarantee
from headgate.sim.scenarios.upgrades import (
    SINK,
    ChangingCodeRun,
    ChangingModeRun,
    EditedJudge,
    EpochsJudge,
    GoingBackRun,
)

MODES = (2, 10, 12) if IS_DEEP else (2, 12)
BACK = (4, 6) if IS_DEEP else (6,)
CODE = (4, 6, 9) if IS_DEEP else (4, 6)


def test_the_guarantee_of_a_pipeline_changes_between_two_starts() -> None:
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


def test_what_no_restored_checkpoint_allows_is_told() -> None:
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


def test_a_user_goes_back_to_an_older_checkpoint_by_hand() -> None:
    back = repeated = 0
    for seed in BACK:
        run = GoingBackRun(seed)
        assert (seed, run.run()) == (seed, None)
        back += len(run.history.went_back)
        repeated += run.repeated_count
    assert back > 2
    assert repeated > 0, "a command was repeated that had gone back"


def test_operators_with_state_come_and_go() -> None:
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
def test_what_an_operator_with_state_must_not_do_is_told(found: list[Any], why: str) -> None:
    wanted: Counter[Any] = Counter([(0, 1), (0, 2)])
    judge = EditedJudge()
    assert judge.problem(SINK, Counter(found), wanted, has_failed=True) is not None, why
    assert judge.problem(SINK, Counter([(0, 1, 1, 0), (0, 2, 2, 0)]), wanted, has_failed=True) is None
