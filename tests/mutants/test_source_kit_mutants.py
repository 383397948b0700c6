"""Mutants of the kit for sources: weaker, it no longer finds the sources that are wrong (KT1, KT2)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import tests.testing.test_kits as kits
import tests.testing.test_source_crashes as crashes
from tests.mutants.harness import Mutant, assert_caught, patched

from headgate.testing import source_kit
from headgate.testing.source_crashes import SourceRun
from headgate.testing.source_lives import SourceCheckpoint, SourceLife

EARLY = crashes.test_a_source_that_acknowledges_too_early_is_caught
RESCALED = crashes.test_a_source_that_cannot_be_rescaled_is_caught


@contextmanager
def nobody_dies() -> Iterator[None]:
    """Every start begins where the readers are, not with the last completed checkpoint."""
    start = SourceRun.start

    def stopped(self: Any, parallelism: int) -> None:
        if hasattr(self, "life"):
            self._completed = self.life.checkpoint(0, is_polled=False)
        start(self, parallelism)

    with patched(SourceRun, "start", stopped):
        yield


@contextmanager
def nobody_is_told() -> Iterator[None]:
    with patched(SourceLife, "tell_completed", lambda self, number: None):
        yield


@contextmanager
def nobody_is_told_of_what_is_given_up() -> Iterator[None]:
    with patched(SourceLife, "tell_aborted", lambda self, number: None):
        yield


@contextmanager
def nothing_is_polled_behind_a_checkpoint() -> Iterator[None]:
    with patched(SourceRun, "poll_on", lambda self: None):
        yield


@contextmanager
def the_parallelism_stays() -> Iterator[None]:
    start = SourceRun.start
    with patched(
        SourceRun, "start", lambda self, p: start(self, self.life.parallelism if hasattr(self, "life") else p)
    ):
        yield


@pytest.mark.parametrize(
    ("mutant", "acknowledges"),
    [
        (nobody_dies, "at poll"),
        (nobody_dies, "at positions"),
        (nobody_is_told, "all when told"),
        (nothing_is_polled_behind_a_checkpoint, "all when told"),
        (nobody_is_told_of_what_is_given_up, "when given up"),
    ],
)
def test_a_kit_that_lets_early_acknowledgements_pass_is_caught(mutant: Mutant, acknowledges: str) -> None:
    assert_caught(mutant, EARLY, acknowledges, "lost")


@pytest.mark.parametrize("problem", ["begins anew", "passes over"])
def test_a_kit_that_never_rescales_is_caught(problem: str) -> None:
    assert_caught(the_parallelism_stays, RESCALED, problem, "")


@contextmanager
def generations_begin_at_the_newest_checkpoint() -> Iterator[None]:
    """KT4."""
    with patched(source_kit, "BACK_EVERY", 1_000_000):
        yield


def test_a_kit_that_never_goes_back_behind_the_newest_marker_is_caught() -> None:
    refused = kits.test_the_kit_refuses_sources_that_set_their_barrier_wrongly
    assert_caught(
        generations_begin_at_the_newest_checkpoint,
        refused,
        "newest",
        "parallelism 1, restart behind every marker: lost",
    )


@contextmanager
def restarts_change_nothing(holds_the_same: bool) -> Iterator[None]:
    """KT5."""
    with patched(SourceCheckpoint, "holds_the_same_as", lambda self, other: holds_the_same):
        yield


def test_a_kit_that_restarts_too_often_or_too_rarely_is_caught() -> None:
    never_ends = kits.test_a_source_that_tells_each_end_by_itself_comes_to_its_end
    assert_caught(partial(restarts_change_nothing, False), never_ends)
    assert_caught(
        partial(restarts_change_nothing, True), kits.test_every_poll_that_changes_something_is_restarted_behind
    )
