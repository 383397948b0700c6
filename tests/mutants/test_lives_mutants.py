"""Mutants of lives: who owns a sink's target (docs/spec/lives.md). Each breaks one rule and is caught."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from tests.connectors.files import test_file_owner
from tests.mutants.harness import assert_caught, patched
from tests.runtime.driver import test_owning

import headgate as hg
from headgate.connectors.files.owner import FileOwner
from headgate.model.life import NO_GENERATION, Life, Owner
from headgate.protocol.supervision import lives
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.driver.lives import SinkOwners


def nobody_is_asked() -> AbstractContextManager[None]:
    return patched(SinkOwners, "ask", lambda self: {})


def what_was_answered_when_told_is_ignored() -> AbstractContextManager[None]:
    return patched(SinkOwners, "tell", lambda self: list(self._told()))


def a_life_is_drawn_at_every_start() -> AbstractContextManager[None]:
    def life(self: Any, host: str, wall_ms: int) -> Life:
        self._storage.delete(f"{self._pipeline}/life")
        return real(self, host, wall_ms)

    real = CheckpointLog.life
    return patched(CheckpointLog, "life", life)


def generations_begin_anew_after_forgetting() -> AbstractContextManager[None]:
    return patched(lives, "floor", lambda owners: NO_GENERATION)


def an_older_copy_of_the_log_goes_on() -> AbstractContextManager[None]:
    def objection(life: Life, owner: Owner, following: int) -> lives.Objection | None:
        return None if lives.may_own(life, owner) else lives.Objection.OTHER_LIFE

    return patched(lives, "objection", objection)


def forgetting_drops_the_fence() -> AbstractContextManager[None]:
    def forget(self: Any) -> Owner:
        for path in self._storage.list(self._identity.claims):
            self._storage.delete(path)
        return real(self)

    real = FileOwner.forget
    return patched(FileOwner, "forget", forget)


def the_last_one_gets_the_directory() -> AbstractContextManager[None]:
    def put_over(self: Any, number: int, life: Life | None) -> bool:
        return real(self, number, life) or real(self, number + 1, life)

    real = FileOwner._put
    return patched(FileOwner, "_put", put_over)


MUTANTS: list[tuple[Callable[[], AbstractContextManager[None]], Callable[..., object]]] = [
    (
        nobody_is_asked,
        test_owning.test_nobody_is_told_and_nothing_claimed_when_one_target_belongs_to_somebody_else,
    ),
    (
        what_was_answered_when_told_is_ignored,
        test_owning.test_a_life_that_comes_between_the_answer_and_the_telling_stays,
    ),
    (a_life_is_drawn_at_every_start, test_owning.test_a_life_that_is_told_stays_told_when_the_start_dies_behind_it),
    (
        generations_begin_anew_after_forgetting,
        test_owning.test_the_first_generation_after_forgetting_exceeds_all_before,
    ),
    (an_older_copy_of_the_log_goes_on, test_owning.test_a_target_that_knows_more_than_the_log_stops_the_pipeline),
    (forgetting_drops_the_fence, test_file_owner.test_forgetting_keeps_the_fence),
]


@pytest.mark.parametrize(("mutant", "test"), MUTANTS)
def test_a_mutant_of_lives_is_caught(
    tmp_path: Path, mutant: Callable[[], AbstractContextManager[None]], test: Callable[..., object]
) -> None:
    kinds = [] if test is test_file_owner.test_forgetting_keeps_the_fence else [hg.FileSink]
    assert_caught(mutant, test, tmp_path, *kinds)


def test_the_last_one_gets_the_directory_is_caught() -> None:
    assert_caught(
        the_last_one_gets_the_directory, test_file_owner.test_of_two_lives_that_come_at_once_one_gets_the_directory
    )
