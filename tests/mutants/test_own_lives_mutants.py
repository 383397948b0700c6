"""Mutants of lives at sinks that users write (CS20–CS22), and of what stops a generation before it begins (K5)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from examples.sqlite_sink import SqliteLedgerSink, SqliteSink
from tests.connectors.custom import test_own_lives as own_lives
from tests.connectors.custom.test_own_sinks import target_at
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.runtime.driver import test_hopeless_claims as hopeless
from tests.runtime.driver import test_owning as owning

from headgate.connectors.custom import ledger, owned, two_phase
from headgate.connectors.custom.fence import Fence
from headgate.connectors.custom.owned import RememberingSink
from headgate.errors import StorageError
from headgate.model.failure import Failure, FailureKind
from headgate.model.life import Life, Owner
from headgate.runtime.driver import claims, sink_commits, supervision
from headgate.runtime.driver import lives as driver_lives
from headgate.testing.sinks.owners import check_start_over

Kind = Callable[[str], Any]


def users_sinks_take_no_part() -> AbstractContextManager[None]:
    """What they did before there were lives."""

    @contextmanager
    def mutant() -> Iterator[None]:
        with (
            patched(RememberingSink, "owner", lambda self, pipeline, node: Owner()),
            patched(RememberingSink, "own", lambda self, pipeline, node, life: Owner(life)),
        ):
            yield

    return mutant()


def any_life_may_claim() -> AbstractContextManager[None]:
    def generations_only(self: Fence, remembered: Fence | None) -> None:
        self.refuse_if_older_than(remembered.generation if remembered else None)

    return patched(Fence, "refuse_if_replaced_by", generations_only)


def a_generation_is_claimed_without_its_life() -> AbstractContextManager[None]:
    @contextmanager
    def mutant() -> Iterator[None]:
        forgets: Callable[..., Fence] = lambda sink, fence: fence  # noqa: E731
        with patched(two_phase, "with_life", forgets), patched(ledger, "with_life", forgets):
            yield

    return mutant()


def nobody_looks_whether_a_life_was_kept() -> AbstractContextManager[None]:
    def hopes(self: RememberingSink, owner: str, problem: Exception) -> Owner:
        return self._remembered(owner)

    return patched(RememberingSink, "_known", hopes)


def a_class_without_claimed_knows_nobody() -> AbstractContextManager[None]:
    return patched(RememberingSink, "claimed", lambda self, owner: None)


def a_target_that_forgot_has_no_fence() -> AbstractContextManager[None]:
    def anew(self: RememberingSink, owner: str) -> Owner:
        found = remembered(self, owner)
        return Owner(is_forgotten=True) if found.is_forgotten else found

    remembered = RememberingSink._remembered
    return patched(RememberingSink, "_remembered", anew)


def whoever_comes_is_told() -> AbstractContextManager[None]:
    def own(self: RememberingSink, pipeline: str, node: str, life: Life) -> Owner:
        self.forget_owner(pipeline, node)
        return real(self, pipeline, node, life)

    real = RememberingSink.own
    return patched(RememberingSink, "own", own)


def users_sinks_of_other_names_are_strangers() -> AbstractContextManager[None]:
    return patched(RememberingSink, "_others", lambda self, pipeline, owner: ())


def a_class_that_lists_nobody_is_alone() -> AbstractContextManager[None]:
    return patched(RememberingSink, "all_claimed", lambda self: ())


def the_fence_listed_last_counts() -> AbstractContextManager[None]:  # CS25
    return patched(owned, "_newest", lambda fences: {fence.owner: fence for fence in fences})


def an_older_fence_of_the_same_generation_counts() -> AbstractContextManager[None]:  # CS25
    real = owned._newest
    return patched(owned, "_newest", lambda fences: real(list(fences)[::-1]))


def started_over(path: Path, kind: Kind) -> None:
    check_start_over(target_at(path / "t.db", kind))


CASES: list[tuple[Mutant, Callable[[Path, Kind], object]]] = [
    (users_sinks_take_no_part, started_over),
    (users_sinks_take_no_part, owning.test_a_target_that_knows_more_than_the_log_stops_the_pipeline),
    (any_life_may_claim, started_over),
    (any_life_may_claim, own_lives.test_of_two_pipelines_that_ask_at_once_one_gets_the_target),
    (a_generation_is_claimed_without_its_life, own_lives.test_claiming_a_generation_keeps_whose_the_target_is),
    (a_generation_is_claimed_without_its_life, started_over),
    (a_target_that_forgot_has_no_fence, owning.test_the_first_generation_after_forgetting_exceeds_all_before),
    (a_target_that_forgot_has_no_fence, started_over),
    (whoever_comes_is_told, owning.test_a_life_that_comes_between_the_answer_and_the_telling_stays),
    (users_sinks_of_other_names_are_strangers, owning.test_a_former_name_of_a_sink_belongs_to_its_life),
    (
        a_class_that_lists_nobody_is_alone,
        lambda path, kind: own_lives.test_a_class_that_does_not_say_who_else_is_there_is_told_what_to_add(path),
    ),
    (
        nobody_looks_whether_a_life_was_kept,
        lambda path, kind: own_lives.test_a_class_that_does_not_keep_the_life_is_told_so(path),
    ),
    (
        a_class_without_claimed_knows_nobody,
        lambda path, kind: own_lives.test_a_class_that_does_not_say_whose_its_target_is_is_told_what_to_add(path),
    ),
]


@pytest.mark.parametrize("kind", [SqliteSink, SqliteLedgerSink], ids=["two phases", "ledger"])
@pytest.mark.parametrize(("mutant", "test"), CASES)
def test_a_mutant_of_lives_at_a_users_sink_is_caught(
    tmp_path: Path, mutant: Mutant, test: Callable[[Path, Kind], object], kind: Kind
) -> None:
    assert_caught(mutant, test, tmp_path, kind)


def test_a_mutant_of_which_fence_counts_is_caught(tmp_path: Path) -> None:
    newest = own_lives.test_of_the_fences_of_an_owner_the_newest_counts_wherever_it_is_listed
    assert_caught(the_fence_listed_last_counts, newest, tmp_path, -1)
    last = own_lives.test_of_equal_fences_of_an_owner_the_last_one_listed_counts
    assert_caught(an_older_fence_of_the_same_generation_counts, last, tmp_path, None, own_lives.FORGOTTEN)


def trying_again(module: Any) -> Mutant:
    """K5: what cannot be cured counts as lost."""

    @contextmanager
    def nothing(problem: str) -> Iterator[None]:
        yield

    def damage_may_pass_at_a_target() -> AbstractContextManager[None]:
        return patched(module, "stopping_for_good", nothing)

    return damage_may_pass_at_a_target


@pytest.mark.parametrize("error", [hopeless.DAMAGE, hopeless.RIGHTS], ids=["damage", "rights"])
@pytest.mark.parametrize("where", hopeless.CALLS)
def test_trying_again_what_cannot_be_cured_is_caught(tmp_path: Path, where: str, error: Exception) -> None:
    module = driver_lives if where.startswith("own") else sink_commits
    test = hopeless.test_what_a_repetition_does_not_cure_at_a_target_stops_the_pipeline
    assert_caught(trying_again(module), test, tmp_path, where, error)


def test_trying_again_to_read_a_life_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test = hopeless.test_a_life_that_cannot_be_read_stops_the_pipeline
    assert_caught(trying_again(claims), test, tmp_path, monkeypatch, hopeless.DAMAGE)


@pytest.mark.parametrize("kind", [FailureKind.DETERMINISTIC, FailureKind.REPLACED])
def test_a_claim_that_failed_for_good_and_is_tried_again_is_caught(kind: FailureKind) -> None:
    real = supervision.claim_failure

    def lost(error: Exception) -> Failure:
        failure = real(error)
        return replace(failure, kind=FailureKind.LOST) if failure.kind is kind else failure

    def what_cannot_pass_may_pass() -> AbstractContextManager[None]:
        return patched(supervision, "claim_failure", lost)

    assert_caught(what_cannot_pass_may_pass, hopeless.test_how_a_claim_failed_says_what_may_be_done)


def test_a_hook_that_stops_the_pipeline_for_good_is_caught() -> None:
    real = supervision.claim_failure

    def for_good(error: Exception) -> Failure:
        is_permanent = isinstance(error, StorageError) and not error.is_transient
        return Failure(FailureKind.DETERMINISTIC, str(error)) if is_permanent else real(error)

    def a_hook_is_called_once() -> AbstractContextManager[None]:
        return patched(supervision, "claim_failure", for_good)

    assert_caught(a_hook_is_called_once, hopeless.test_how_a_claim_failed_says_what_may_be_done)
