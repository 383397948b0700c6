"""Mutants of pipelines that start over (SO). Each breaks one rule and is caught."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.runtime import test_starting_over_in_front_of_others as others
from tests.runtime import test_starting_over_killed as killed
from tests.sim.product.patching import around, skipped

from headgate.connectors.files import starting_over as in_files
from headgate.connectors.files.commit import FileCommitter
from headgate.connectors.files.ledger import Ledger
from headgate.model.ids import Generation
from headgate.model.life import Life
from headgate.protocol.checkpoints import recovery
from headgate.protocol.supervision import lives
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.checkpoints.records import Records
from headgate.runtime.driver import claims
from headgate.runtime.driver.starting_over import StartingOver
from headgate.store.catalogue import owners, starting_over
from headgate.store.catalogue.base import Contents


def the_order_is_not_written() -> AbstractContextManager[None]:
    return skipped(Records, "give")


def output_goes_before_it_is_decided() -> AbstractContextManager[None]:
    def carry_out(call: Any, self: StartingOver, plan: Any) -> None:
        for found in plan.targets:
            early = Life("early", plan.home, "here", 0)
            found.sink.start_over("p", found.target.sink, Generation(9), early, lambda owner: True)
        call(self, plan)

    return around(StartingOver, "carry_out", carry_out)


def the_order_goes_before_the_output() -> AbstractContextManager[None]:
    def finish(call: Any, self: Any, order: Any, number: int, generation: Generation) -> None:
        self._log.records.carried_out(number)
        call(self, order, number, generation)

    return around(StartingOver, "_finish", finish)


def nobody_finishes_it() -> AbstractContextManager[None]:
    return skipped(StartingOver, "finish", False)


def a_driver_writes_in_front_of_half_of_it() -> AbstractContextManager[None]:
    return skipped(claims, "_refuse_half_started_over")


def whoever_claimed_meanwhile_is_not_noticed() -> AbstractContextManager[None]:
    def start_over(self: Any, owner: str, wall_ms: int, seen: Any, above: Any) -> Any:
        return self._claim(owner, wall_ms, None, lambda log: recovery.next_claim(log, above).ending_life())

    return patched(CheckpointLog, "start_over", start_over)


def files_are_not_fenced() -> AbstractContextManager[None]:
    return skipped(FileCommitter, "recover")


def the_stream_has_no_new_owner() -> AbstractContextManager[None]:
    return skipped(owners, "hand_over")


def the_former_life_may_have_it_again() -> AbstractContextManager[None]:
    return around(in_files.FileOwner, "hand_over", lambda call, self, life, check: self.forget())


def a_stream_is_emptied_once_more() -> AbstractContextManager[None]:
    return skipped(starting_over, "is_over", False)


def all_files_are_its_own() -> AbstractContextManager[None]:
    def empty(call: Any, self: Any, check: Any) -> None:
        call(self, check)
        for path in self._storage.list(""):
            if not path.startswith("_"):
                self._storage.delete(path)

    return around(Ledger, "empty", empty)


def a_stream_is_never_shared() -> AbstractContextManager[None]:
    return patched(Contents, "is_shared", False)


def all_targets_are_its_own() -> AbstractContextManager[None]:
    return patched(lives, "may_empty", lambda life, home, host, owner: True)


def every_machine_is_this_one() -> AbstractContextManager[None]:
    return patched(lives, "is_former", lambda owner, home, host: owner.life is not None and owner.life.home == home)


def a_copy_is_as_the_original() -> AbstractContextManager[None]:
    return skipped(StartingOver, "_refuse_a_copy")


def all_events_below_its_name_are_its_own() -> AbstractContextManager[None]:
    def contents(call: Any, connection: Any, stream: str, of: str, mine: Any, where: str) -> Contents:
        found: Contents = call(connection, stream, of, lambda owner: True, where)
        return found

    return around(starting_over, "contents", contents)


def what_was_forgotten_is_its_own() -> AbstractContextManager[None]:
    def contents(call: Any, *arguments: Any) -> Contents:
        found: Contents = call(*arguments)
        return replace(found, forgotten=False)

    return around(starting_over, "contents", contents)


def nobody_looks_again() -> AbstractContextManager[None]:
    return skipped(StartingOver, "_refuse_if_changed")


def an_order_is_not_asked_about() -> AbstractContextManager[None]:
    def empty(self: Any, sink: Any, target: Any, generation: Generation, life: Life, mine: Any) -> None:
        sink.start_over("p", target.sink, generation, life, mine)

    return patched(StartingOver, "_empty", empty)


def generations_begin_anew() -> AbstractContextManager[None]:
    def start_over(call: Any, self: Any, owner: str, wall_ms: int, seen: Any, above: Any) -> Any:
        return call(self, owner, wall_ms, seen, Generation(0))

    return around(CheckpointLog, "start_over", start_over)


def only_what_was_written_down_goes() -> AbstractContextManager[None]:
    return skipped(StartingOver, "_of_other_names", [])


@pytest.mark.parametrize(
    "mutant", [the_order_is_not_written, output_goes_before_it_is_decided, the_order_goes_before_the_output]
)
def test_a_mutant_that_a_kill_shows_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutant: Mutant) -> None:
    test = killed.test_a_reset_that_dies_anywhere_leaves_all_or_nothing
    assert_caught(mutant, test, killed.Template(tmp_path), killed.reaping(monkeypatch))


HALF: list[tuple[Mutant, Any]] = [
    (nobody_finishes_it, killed.test_the_next_start_finishes_what_was_begun),
    (an_order_is_not_asked_about, others.test_an_order_asks_again_whose_a_target_is),
    (a_driver_writes_in_front_of_half_of_it, killed.test_a_driver_does_not_write_in_front_of_half_empty_targets),
]


@pytest.mark.parametrize(("mutant", "test"), HALF, ids=lambda value: getattr(value, "__name__", ""))
def test_a_mutant_of_what_is_left_half_done_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutant: Mutant, test: Any
) -> None:
    assert_caught(mutant, test, killed.Template(tmp_path), monkeypatch)


OF_TARGETS: list[tuple[Mutant, Any]] = [
    (whoever_claimed_meanwhile_is_not_noticed, killed.test_whoever_claimed_meanwhile_goes_on),
    (files_are_not_fenced, killed.test_a_driver_that_wakes_behind_a_reset_writes_nothing),
    (the_stream_has_no_new_owner, killed.test_a_driver_that_wakes_behind_a_reset_writes_nothing),
    (the_former_life_may_have_it_again, killed.test_a_driver_that_wakes_behind_a_reset_writes_nothing),
    (a_stream_is_emptied_once_more, killed.test_a_reset_that_wakes_late_deletes_nothing_new),
    (all_files_are_its_own, killed.test_a_reset_keeps_what_others_wrote_beside_it),
    (a_stream_is_never_shared, killed.test_a_reset_keeps_what_others_wrote_beside_it),
    (all_targets_are_its_own, killed.test_a_reset_keeps_what_another_directory_wrote),
    (every_machine_is_this_one, others.test_another_machine_may_have_a_directory_of_the_same_name),
    (a_copy_is_as_the_original, others.test_a_copy_of_a_directory_does_not_delete_what_the_original_wrote),
    (
        all_events_below_its_name_are_its_own,
        others.test_a_stream_of_another_directory_is_kept_whatever_the_sinks_are_called,
    ),
    (what_was_forgotten_is_its_own, others.test_what_was_made_to_forget_keeps_what_it_holds),
    (nobody_looks_again, others.test_nothing_goes_that_was_not_shown),
    (generations_begin_anew, killed.test_a_reset_fences_whoever_lost_its_checkpoints),
]


@pytest.mark.parametrize(("mutant", "test"), OF_TARGETS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_mutant_of_targets_is_caught(tmp_path: Path, mutant: Mutant, test: Any) -> None:
    assert_caught(mutant, test, killed.Template(tmp_path))


def test_only_what_was_written_down_goes_is_caught(tmp_path: Path) -> None:
    test = others.test_what_a_sink_wrote_under_a_former_name_goes_too
    assert_caught(only_what_was_written_down_goes, test, killed.Template(tmp_path), "files")
