"""Mutants of savepoints and of restores by name that named tests find."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.protocol.checkpoints import test_recovery, test_restoring_by_name, test_when_savepoints_count
from tests.runtime.checkpoints import test_savepoint_files
from tests.runtime.driver import test_adopting
from tests.runtime.worker import test_ahead_reader

from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import HookState, Manifest
from headgate.protocol.checkpoints import restoring_by_name
from headgate.protocol.checkpoints.commit import CommitQueue
from headgate.protocol.checkpoints.pending import PendingCheckpoints
from headgate.protocol.checkpoints.recovery import incompatibility
from headgate.protocol.checkpoints.restoring_by_name import Adopt
from headgate.protocol.checkpoints.savepoints import Savepoints
from headgate.protocol.checkpoints.triggering import Triggering
from headgate.runtime.checkpoints import snapshot_files
from headgate.runtime.checkpoints.savepoints import SavepointDirectory
from headgate.runtime.driver import adopting, claims
from headgate.runtime.driver.adopting import Adoption
from headgate.runtime.worker.ahead_reader import AheadReader
from headgate.storage.backends import open_storage

Context = AbstractContextManager[None]


def output_is_not_waited_for() -> Context:  # SV2
    return patched(CommitQueue, "has_confirmed", lambda self, checkpoint: True)


def copies_that_failed_count() -> Context:  # SV7
    advance = Savepoints.advance

    def careless(self: Any, commits: Any) -> Any:
        for taken in self._taken.values():
            taken.copies = {s: c for s, c in taken.copies.items() if not c.problem}
        return advance(self, commits)

    return patched(Savepoints, "advance", careless)


def the_limit_holds_savepoints_back() -> Context:  # SV8
    begin = Triggering.begin

    def limited(self: Any, pending: Any) -> Any:
        if len(pending) >= self._config.max_concurrent:
            return []
        return begin(self, pending)

    return patched(Triggering, "begin", limited)


def the_newest_is_written_first() -> Context:  # SV8
    write_next = PendingCheckpoints.write_next

    def newest(self: Any, carried: Any) -> Any:
        kept = {c: p.savepoint for c, p in self._pending.items()}
        for pending in self._pending.values():
            pending.savepoint = None
        try:
            return write_next(self, carried)
        finally:
            for checkpoint, savepoint in kept.items():
                self._pending[checkpoint].savepoint = savepoint

    return patched(PendingCheckpoints, "write_next", newest)


def the_end_does_not_wait() -> Context:  # SV10
    return patched(Savepoints, "is_idle", property(lambda self: True))


def any_last_checkpoint_is_the_end() -> Context:  # SV10
    completed = Savepoints.completed
    return patched(Savepoints, "completed", lambda self, c, copies, is_end: completed(self, c, copies, is_end=True))


def a_failed_last_checkpoint_gives_the_savepoint_up() -> Context:  # SV10
    failed = Savepoints.failed

    def give_up(self: Any, checkpoint: Any, reason: str) -> Any:
        self._end = None
        return failed(self, checkpoint, reason)

    return patched(Savepoints, "failed", give_up)


PROTOCOL = [
    (output_is_not_waited_for, test_when_savepoints_count.test_a_savepoint_is_written_when_its_output_is_committed),
    (output_is_not_waited_for, test_when_savepoints_count.test_a_savepoint_waits_for_output_of_earlier_checkpoints_too),
    (copies_that_failed_count, test_when_savepoints_count.test_a_savepoint_that_cannot_be_written_fails_alone),
    (the_limit_holds_savepoints_back, test_when_savepoints_count.test_a_savepoint_waits_for_nothing),
    (the_newest_is_written_first, test_when_savepoints_count.test_a_checkpoint_with_a_savepoint_is_not_subsumed),
    (the_end_does_not_wait, test_when_savepoints_count.test_a_stop_with_a_savepoint_ends_when_it_is_written),
    (
        any_last_checkpoint_is_the_end,
        test_when_savepoints_count.test_the_savepoint_of_a_stop_goes_with_the_checkpoint_that_is_the_last,
    ),
    (
        a_failed_last_checkpoint_gives_the_savepoint_up,
        test_when_savepoints_count.test_a_last_checkpoint_that_is_tried_again_carries_the_savepoint_again,
    ),
]


@pytest.mark.parametrize(("mutant", "named"), PROTOCOL)
def test_mutants_of_when_a_savepoint_counts_are_caught(mutant: Mutant, named: Callable[[], None]) -> None:
    assert_caught(mutant, named)


# -- restoring ------------------------------------------------------------------------------------------------------


def everything_is_gone_back_to() -> Context:  # SV25
    return patched(test_restoring_by_name, "decide", lambda log, life, named: Adopt(CheckpointId(9)))


def a_place_is_an_identity() -> Context:  # SV24
    def by_url(newest: Any, life: str, named: Any) -> bool:
        return newest.origin is not None and newest.origin.url == named.url

    return patched(restoring_by_name, "_was_restored", by_url)


def what_was_committed_since_does_not_matter() -> Context:  # SV25
    return patched(restoring_by_name, "_stands_there", lambda newest, life, wanted, named: True)


def nothing_of_its_own_is_known() -> Context:  # SV25
    return patched(restoring_by_name, "_stands_there", lambda newest, life, wanted, named: False)


def damage_is_overlooked() -> Context:  # SV25
    return patched(restoring_by_name, "damage_behind", lambda log, newest: ())


def all_state_may_be_left_behind() -> Context:  # SV30
    def lenient(manifest: Any, texts: Any, count: int, unclaimed: Any = (), derived: Any = ()) -> Any:
        return incompatibility(manifest, texts, count, manifest.state_texts, derived)

    return patched(test_recovery, "incompatibility", lenient)


def derived_names_are_names() -> Context:  # SV31
    def lenient(manifest: Any, texts: Any, count: int, unclaimed: Any = (), derived: Any = ()) -> Any:
        return incompatibility(manifest, texts, count, unclaimed)

    return patched(test_recovery, "incompatibility", lenient)


DECIDING: list[tuple[Mutant, Callable[[], None]]] = [
    (everything_is_gone_back_to, test_restoring_by_name.test_a_second_start_goes_on),
    (a_place_is_an_identity, test_restoring_by_name.test_another_savepoint_at_the_same_place_is_another_one),
    (
        what_was_committed_since_does_not_matter,
        test_restoring_by_name.test_going_back_is_refused_unless_the_newest_checkpoint_is_named,
    ),
    (nothing_of_its_own_is_known, test_restoring_by_name.test_where_a_pipeline_stopped_it_is_restored),
    (damage_is_overlooked, lambda: test_restoring_by_name.test_a_damaged_log_is_not_left_for_anything(8)),
    (all_state_may_be_left_behind, test_recovery.test_state_without_an_operator_is_refused_unless_it_is_named),
    (derived_names_are_names, test_recovery.test_an_added_operator_without_a_name_is_refused),
]


@pytest.mark.parametrize(("mutant", "named"), DECIDING)
def test_mutants_of_what_is_restored_are_caught(mutant: Mutant, named: Callable[[], None]) -> None:
    assert_caught(mutant, named)


def nothing_is_checked_before() -> Context:  # SV20
    return patched(Adoption, "check", lambda self: None)


def the_newest_that_can_be_read_is_the_newest() -> Context:  # SV20
    return patched(adopting, "refuse_unless_newest_is_known", lambda observed: None)


def its_own_damage_is_another_ones() -> Context:  # SV24
    return patched(adopting, "is_same_directory", lambda url, other: False)


def ids_go_on_below() -> Context:  # SV22
    return patched(Adoption, "floor", property(lambda self: Generation(0)))


def a_missing_place_is_made() -> Context:  # SV5
    return patched(snapshot_files, "storage_at", lambda place: open_storage(place.url))


def removed_sinks_are_recovered() -> Context:  # SV30
    return patched(claims, "promised_here", lambda restored, definition: restored.committables)


def every_start_adopts() -> Context:  # SV24
    decide = adopting.decide

    def again(log: Any, life: str, named: Any) -> Any:
        found = decide(log, life, named)
        return found if isinstance(found, restoring_by_name.Refuse) else Adopt()

    return patched(adopting, "decide", again)


def hooks_go_back_to_an_id_that_they_do_not_know() -> Context:  # EI38
    return patched(Manifest, "hooks_as_called", lambda self: self.hooks)


def each_restore_by_name_renumbers_hooks() -> Context:  # EI38
    def renumbered(self: Manifest) -> tuple[HookState, ...]:
        return tuple(replace(state, checkpoint=self.checkpoint) for state in self.hooks)

    return patched(Manifest, "hooks_as_called", renumbered)


ADOPTED_HOOKS = test_adopting.test_a_hook_goes_back_to_the_checkpoint_that_it_was_called_for


ADOPTING = [
    (nothing_is_checked_before, test_adopting.test_a_damaged_savepoint_is_refused_before_anything_is_written),
    (
        the_newest_that_can_be_read_is_the_newest,
        partial(test_adopting.test_an_older_checkpoint_is_never_restored_as_the_newest, is_lost=False),
    ),
    (
        the_newest_that_can_be_read_is_the_newest,
        partial(test_adopting.test_an_older_checkpoint_is_never_restored_as_the_newest, is_lost=True),
    ),
    (
        its_own_damage_is_another_ones,
        test_adopting.test_damage_at_its_own_newest_checkpoint_is_judged_as_without_a_name,
    ),
    (ids_go_on_below, test_adopting.test_ids_go_on_above_what_is_restored),
    (a_missing_place_is_made, test_adopting.test_what_was_restored_may_be_removed_later),
    (hooks_go_back_to_an_id_that_they_do_not_know, ADOPTED_HOOKS),
    (each_restore_by_name_renumbers_hooks, ADOPTED_HOOKS),
    (removed_sinks_are_recovered, test_adopting.test_a_removed_operator_is_left_behind_by_name),
    (every_start_adopts, test_adopting.test_a_second_start_goes_on_from_the_pipelines_own_checkpoint),
]


@pytest.mark.parametrize(("mutant", "named"), ADOPTING)
def test_mutants_of_adopting_are_caught(mutant: Mutant, named: Callable[[Path], None], tmp_path: Path) -> None:
    assert_caught(mutant, named, tmp_path)


# -- files ----------------------------------------------------------------------------------------------------------


def giving_up_removes_whatever_is_there() -> Context:  # SV4
    return patched(SavepointDirectory, "give_up", lambda self, place: self._remove(place.prefix, ()))


def a_place_is_not_looked_at() -> Context:  # SV4
    def place(self: Any, token: str) -> Any:
        return test_savepoint_files.Place(self.url, f"files-{token}")

    return patched(SavepointDirectory, "place", place)


def test_mutants_of_places_are_caught(tmp_path: Path) -> None:
    taken = test_savepoint_files.test_a_place_that_is_taken_is_refused
    assert_caught(a_place_is_not_looked_at, taken, str(tmp_path / "a"))
    one = test_savepoint_files.test_of_two_tries_at_one_place_one_gets_it
    assert_caught(giving_up_removes_whatever_is_there, one, str(tmp_path / "b"))


def a_savepoint_begins_behind_what_is_held() -> Context:  # SV9
    return patched(AheadReader, "unprocessed_from", property(lambda self: self.positions()))


def test_positions_behind_what_is_held_are_caught() -> None:
    named = test_ahead_reader.test_the_positions_of_a_savepoint_are_in_front_of_what_is_held
    assert_caught(a_savepoint_begins_behind_what_is_held, named)
