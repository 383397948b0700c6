"""Mutants of checkpoints that are not retained (C32, LV7). Each breaks one rule and is caught."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from tests.api import test_possible_guarantees as possible
from tests.api import test_running as running
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.protocol.supervision import test_supervisor as supervision
from tests.runtime.driver import test_asking as asking
from tests.runtime.driver import test_removing as removals
from tests.runtime.driver.test_claims import Place
from tests.sim.product.patching import around, skipped

from headgate.api import guarantees
from headgate.api import running as api_running
from headgate.codec import log_entry
from headgate.model.config import CheckpointConfig
from headgate.model.failure import Failure, FailureKind
from headgate.model.manifest import MANIFEST_VERSION
from headgate.model.run_request import RunRequest
from headgate.operators import catalog
from headgate.protocol.checkpoints import recovery
from headgate.protocol.checkpoints.lineage import Lineage
from headgate.protocol.checkpoints.recovery import NextClaim
from headgate.protocol.supervision.removal import Removal
from headgate.protocol.supervision.supervisor import Supervisor
from headgate.runtime.checkpoints import log as checkpoint_log
from headgate.runtime.checkpoints.life import LifeObjects
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.driver import claims, lookout, removing
from headgate.threads import ThreadEnded


def what_is_promised_is_not_committed() -> AbstractContextManager[None]:
    class Nothing:
        def close(self) -> None:
            """Of nothing."""

    return patched(claims, "recovered_sinks", lambda *arguments: Nothing())


def it_is_given_up_before_it_is_committed() -> AbstractContextManager[None]:
    def recovered(call: Any, definition: Any, log: Any, generation: Any, *more: Any) -> Any:
        log.give_up("test", 0, generation)
        return call(definition, log, generation, *more)

    return around(claims, "recovered_sinks", recovered)


def checkpoints_go_one_after_another() -> AbstractContextManager[None]:
    """The files first: a crash leaves a log that names what is gone."""

    def give_up(call: Any, self: CheckpointLog, *arguments: Any) -> None:
        self.files.restored(())
        self.files.sweep()
        call(self, *arguments)

    return around(CheckpointLog, "give_up", give_up)


def a_claim_that_gives_up_follows_what_was_there() -> AbstractContextManager[None]:
    def ending(self: NextClaim) -> NextClaim:
        return NextClaim(self.sequence, self.generation, self.follows, self.sequence)

    return patched(NextClaim, "ending_life", ending)


def the_life_goes_on() -> AbstractContextManager[None]:
    return patched(LifeObjects, "_path", lambda self, number: f"{self._pipeline}/life")


def manifests_do_not_say_their_life() -> AbstractContextManager[None]:
    def placed(call: Any, self: Lineage, *arguments: Any) -> Any:
        return call(Lineage(self.kept), *arguments)

    return around(Lineage, "placed", placed)


def a_start_claims_for_whatever_life_it_saw() -> AbstractContextManager[None]:
    def claim(call: Any, self: Any, owner: str, wall_ms: int, mine: Any = None, above: Any = 0, life: Any = 0) -> Any:
        return call(self, owner, wall_ms, mine, above, None)

    return around(CheckpointLog, "claim", claim)


def a_keeper_begins_a_cancelled_pipeline_anew() -> AbstractContextManager[None]:
    return patched(checkpoint_log, "was_given_up", lambda log, mine: False)


def a_standby_begins_a_cancelled_pipeline_anew() -> AbstractContextManager[None]:
    return patched(lookout, "has_given_up", lambda log: False)


def whoever_took_over_is_not_noticed() -> AbstractContextManager[None]:
    def give_up(call: Any, self: CheckpointLog, owner: str, wall_ms: int, mine: Any) -> Any:
        return self._claim(owner, wall_ms, None, lambda log: recovery.next_claim(log).ending_life())

    return around(CheckpointLog, "give_up", give_up)


def damage_beside_is_passed_over() -> AbstractContextManager[None]:
    return patched(recovery, "damage_behind", lambda log, manifest: ())


def another_pipeline_is_not_looked_for() -> AbstractContextManager[None]:
    return skipped(removing, "check_nobody_needs")


def only_the_path_tells_who_was_restored_from_here() -> AbstractContextManager[None]:
    def is_from(newest: Any, url: str, life: str) -> bool:
        place = newest.place
        return place is not None and removing.is_same_directory(f"{place.url}/{place.prefix}", url)

    return patched(removing, "_is_from", is_from)


def damage_and_ends_are_removed_too() -> AbstractContextManager[None]:
    return skipped(removing, "_check_whole")


def a_later_life_looks_like_the_first() -> AbstractContextManager[None]:
    return skipped(log_entry, "_version", MANIFEST_VERSION)


def whoever_starts_may_remove_what_is_anothers() -> AbstractContextManager[None]:
    """A run that never claimed claims now, and replaces whoever runs the pipeline."""

    def settled(definition: Any, log: CheckpointLog, succession: Any, around_: Any) -> Any:
        claimed = claims.claim(definition, log, succession.claimant, log.generation or succession.after, around_)
        restored, _ = claims.chosen(definition, log, claimed, around_)
        claims.recovered_sinks(definition, log, claimed.next.generation, restored, around_).close()
        return claimed.next

    return patched(removing, "_settled", settled)


def a_sweep_may_raise() -> AbstractContextManager[None]:
    return patched(removing, "_sweep", lambda log, note, around_: claims.tidy_up(log.files.sweep, around_, note))


def whoever_was_replaced_says_that_all_is_kept() -> AbstractContextManager[None]:
    return patched(removing, "_was_given_up", lambda log, settled, error, note, doubt, around_: False)


def a_doubt_is_kept_to_itself() -> AbstractContextManager[None]:
    return patched(removing, "_tell_nobody_knows", lambda log, error, doubt: None)


OF_THE_LOG: list[tuple[Mutant, Any]] = [
    (what_is_promised_is_not_committed, removals.test_what_was_promised_is_committed_before_anything_is_removed),
    (a_claim_that_gives_up_follows_what_was_there, removals.test_a_removal_that_is_repeated_changes_nothing),
    (manifests_do_not_say_their_life, removals.test_a_removal_begins_another_life_of_which_all_later_entries_tell),
    (a_keeper_begins_a_cancelled_pipeline_anew, removals.test_a_driver_of_a_run_that_was_cancelled_does_not_begin_anew),
    (another_pipeline_is_not_looked_for, removals.test_what_another_pipeline_was_restored_from_stays),
    (damage_beside_is_passed_over, removals.test_what_another_pipeline_may_have_been_restored_from_stays),
    (
        only_the_path_tells_who_was_restored_from_here,
        removals.test_what_another_pipeline_was_restored_from_by_another_path_stays,
    ),
    (a_doubt_is_kept_to_itself, removals.test_what_nobody_can_tell_is_told_as_a_doubt),
    (damage_and_ends_are_removed_too, removals.test_a_pipeline_that_has_finished_keeps_saying_so),
    (a_later_life_looks_like_the_first, lambda place: removals.test_entries_of_the_first_life_are_what_they_were()),
]


@pytest.mark.parametrize(("mutant", "test"), OF_THE_LOG, ids=lambda value: getattr(value, "__name__", ""))
def test_a_mutant_of_removals_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutant: Mutant, test: Any
) -> None:
    monkeypatch.setattr(claims, "RETRY_PAUSES_S", (0.0, 0.0))
    assert_caught(mutant, test, removals.with_checkpoints(Place(tmp_path)))


WITH_PATCHES: list[tuple[Mutant, Any]] = [
    (a_start_claims_for_whatever_life_it_saw, removals.test_a_start_that_saw_the_former_life_does_not_begin_with_it),
    (
        whoever_was_replaced_says_that_all_is_kept,
        removals.test_what_somebody_begins_behind_a_lost_answer_does_not_count_as_kept,
    ),
    (whoever_took_over_is_not_noticed, removals.test_a_driver_that_takes_over_behind_the_commits_keeps_everything),
]


@pytest.mark.parametrize(("mutant", "test"), WITH_PATCHES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_mutant_of_what_happens_meanwhile_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutant: Mutant, test: Any
) -> None:
    monkeypatch.setattr(claims, "RETRY_PAUSES_S", (0.0, 0.0))
    assert_caught(mutant, test, removals.with_checkpoints(Place(tmp_path)), monkeypatch)


@pytest.mark.parametrize(
    "mutant", [it_is_given_up_before_it_is_committed, checkpoints_go_one_after_another, the_life_goes_on]
)
def test_a_mutant_that_a_kill_shows_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutant: Mutant) -> None:
    test = removals.test_a_removal_that_dies_anywhere_leaves_all_or_nothing
    assert_caught(mutant, test, tmp_path, monkeypatch, False)


def test_a_removal_by_a_run_that_never_claimed_is_caught(tmp_path: Path) -> None:
    test = removals.test_a_run_that_never_claimed_removes_nothing
    assert_caught(whoever_starts_may_remove_what_is_anothers, test, removals.with_checkpoints(Place(tmp_path)))


def test_a_sweep_that_raises_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test = removals.test_a_sweep_that_fails_oddly_ends_the_removal_all_the_same
    assert_caught(a_sweep_may_raise, test, removals.with_checkpoints(Place(tmp_path)), monkeypatch, "delete")


def test_a_standby_that_begins_anew_is_caught(tmp_path: Path) -> None:
    test = removals.test_a_standby_takes_a_removal_for_the_wish_of_the_user
    place = removals.with_checkpoints(Place(tmp_path))
    assert_caught(a_standby_begins_a_cancelled_pipeline_anew, test, place, True)


# -- when -------------------------------------------------------------------------------------------------------------


def everybody_who_cancels_removes() -> AbstractContextManager[None]:
    def cancel(call: Any, self: Supervisor, event: Any) -> Any:
        return call(self, type(event)())

    return around(Supervisor, "_on_cancel", cancel)


def the_workers_may_still_write() -> AbstractContextManager[None]:
    def end(call: Any, self: Supervisor, outcome: Any, **options: Any) -> Any:
        effects = call(self, outcome, **options)
        return [*effects, supervision.RemoveCheckpoints()] if self._removal.is_due else effects

    return around(Supervisor, "_end", end)


def every_failure_removes() -> AbstractContextManager[None]:
    def removed(self: Removal, failure: Failure, *, has_run: bool) -> bool:
        return not self._retain_on_failure and has_run

    return patched(Removal, "_is_after", removed)


def a_start_that_fails_removes() -> AbstractContextManager[None]:
    def removed(self: Removal, failure: Failure, *, has_run: bool) -> bool:
        return not self._retain_on_failure and failure.kind is not FailureKind.LOST

    return patched(Removal, "_is_after", removed)


def the_second_signal_removes() -> AbstractContextManager[None]:
    def wait(call: Any, handle: Any, received: Any) -> Any:
        cancel = handle.cancel
        handle.cancel = lambda *, retain: cancel()
        return call(handle, received)

    return around(api_running, "_wait_for_end_or_signal", wait)


def nothing_is_retained_by_default() -> AbstractContextManager[None]:
    def to_config(call: Any, self: Any) -> CheckpointConfig:
        config: CheckpointConfig = call(self)
        return type(config)(config.interval_ms, retain_on_cancel=False, retain_on_failure=False)

    return around(possible.hg.Checkpointing, "to_config", to_config)


def a_claim_that_failed_removes() -> AbstractContextManager[None]:
    def end(call: Any, self: Supervisor, outcome: Any, **options: Any) -> Any:
        return call(self, outcome, **{**options, "is_of_claim": False})

    return around(Supervisor, "_end", end)


def what_a_target_denies_is_a_failure_like_any_other() -> AbstractContextManager[None]:
    def removed(self: Removal, failure: Failure, *, has_run: bool) -> bool:
        return not self._retain_on_failure and has_run and failure.is_hopeless

    return patched(Removal, "_is_after", removed)


def a_second_thought_is_not_heard() -> AbstractContextManager[None]:
    def cancel(call: Any, self: Supervisor, event: Any) -> Any:
        return [supervision.Ignored("the run is ending")] if self._is_over() else call(self, event)

    return around(Supervisor, "_on_cancel", cancel)


def every_question_is_for_whoever_finds_it() -> AbstractContextManager[None]:
    return patched(RunRequest, "is_for", lambda self, run: True)


def hooks_lose_what_they_wait_for() -> AbstractContextManager[None]:
    return patched(guarantees, "_is_listening", lambda hook: False)


def listeners_lose_what_they_wait_for() -> AbstractContextManager[None]:
    return patched(catalog, "is_listening", lambda spec: False)


WHEN: list[tuple[Mutant, Any, tuple[Any, ...]]] = [
    (everybody_who_cancels_removes, supervision.test_who_cancels_may_retain_all_the_same, ()),
    (
        the_workers_may_still_write,
        supervision.test_checkpoints_of_a_cancelled_run_are_removed_when_nobody_writes_any_more,
        (),
    ),
    (
        every_failure_removes,
        supervision.test_only_what_starting_again_does_not_help_is_removed,
        (Failure(FailureKind.LOST, "the cluster is away"), False),
    ),
    (a_start_that_fails_removes, supervision.test_a_program_that_never_ran_removes_nothing, ()),
    (the_second_signal_removes, running.test_a_second_signal_waits_for_no_checkpoint_and_removes_none, ()),
    (nothing_is_retained_by_default, possible.test_checkpoints_are_retained_unless_somebody_says_otherwise, ()),
    (a_claim_that_failed_removes, supervision.test_a_claim_that_failed_removes_nothing, ()),
    (what_a_target_denies_is_a_failure_like_any_other, supervision.test_a_commit_that_was_denied_removes_nothing, ()),
    (a_second_thought_is_not_heard, supervision.test_whoever_says_retain_before_anything_is_removed_is_heard, ()),
    (hooks_lose_what_they_wait_for, possible.test_what_a_hook_has_yet_to_do_is_not_removed, ("retain_on_failure",)),
    (listeners_lose_what_they_wait_for, possible.test_what_waits_to_be_published_is_not_removed, ("retain_on_cancel",)),
]


@pytest.mark.parametrize(("mutant", "test", "arguments"), WHEN, ids=lambda value: getattr(value, "__name__", ""))
def test_a_mutant_of_when_checkpoints_are_removed_is_caught(
    mutant: Mutant, test: Any, arguments: tuple[Any, ...]
) -> None:
    assert_caught(mutant, test, *arguments)


def test_a_question_that_outlives_its_run_is_caught(tmp_path: Path) -> None:
    assert_caught(every_question_is_for_whoever_finds_it, asking.test_a_question_is_for_the_run_it_names, tmp_path)


def only_errors_keep_checkpoints() -> AbstractContextManager[None]:
    def settled(call: Any, *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except SystemExit as error:
            raise ThreadEnded from error  # as if nobody caught it

    return around(removing, "_settled", settled)


def test_a_sink_that_ends_the_thread_of_a_removal_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "RETRY_PAUSES_S", (0.0, 0.0))
    place = removals.with_checkpoints(Place(tmp_path))
    with only_errors_keep_checkpoints(), pytest.raises(ThreadEnded):
        removals.test_checkpoints_stay_while_what_they_promise_is_not_committed(place, monkeypatch, SystemExit("gone"))
