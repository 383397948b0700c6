"""Mutants of pipelines that start over (SO). Each breaks one rule and is caught."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.codec import test_log_entry as entries
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.protocol.checkpoints import test_orders_in_the_log as in_the_log
from tests.runtime import test_starting_over_in_front_of_others as others
from tests.runtime import test_starting_over_killed as killed
from tests.runtime import test_starting_over_late as late
from tests.runtime import test_starting_over_leaving as leaving
from tests.runtime import test_starting_over_moved as moved
from tests.sim.product.patching import around, skipped

from headgate.codec import log_entry
from headgate.connectors import recorded
from headgate.connectors.files import starting_over as in_files
from headgate.connectors.files.commit import FileCommitter
from headgate.connectors.files.ledger import Ledger
from headgate.errors import UsageError
from headgate.model.ids import Generation
from headgate.model.life import Life
from headgate.protocol.checkpoints import recovery
from headgate.protocol.checkpoints import starting_over as deciding
from headgate.protocol.supervision import lives
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.checkpoints.records import Records
from headgate.runtime.driver import claims
from headgate.runtime.driver import starting_over as driver
from headgate.runtime.driver.fronts import Fronts
from headgate.runtime.driver.pipeline_lock import AlreadyRunning, PipelineLock
from headgate.runtime.driver.starting_over import StartingOver
from headgate.storage.backends import open_storage
from headgate.store.catalogue import owners, starting_over
from headgate.store.catalogue.values import Contents


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
        self._log.records.carried_out(number, order.token)
        call(self, order, number, generation)

    return around(StartingOver, "_finish", finish)


def nobody_finishes_it() -> AbstractContextManager[None]:
    return skipped(StartingOver, "finish", False)


def a_driver_writes_in_front_of_half_of_it() -> AbstractContextManager[None]:
    return skipped(claims, "_refuse_half_started_over")


def the_log_does_not_name_the_order() -> AbstractContextManager[None]:
    def claim(call: Any, self: Any, owner: str, wall_ms: int, mine: Any, next_of: Any, order: Any = None) -> Any:
        return call(self, owner, wall_ms, mine, next_of)

    return around(CheckpointLog, "_claim", claim)


def the_name_of_a_claim_orders() -> AbstractContextManager[None]:
    def decided(call: Any, log: Any) -> str | None:
        owner = log.counted()[0].content.owner
        return owner.removeprefix("start over ") if owner.startswith("start over ") else call(log)

    return around(deciding, "decided", decided)


def every_claim_may_order() -> AbstractContextManager[None]:
    return patched(deciding, "has_given_up", lambda log: True)


def an_order_is_of_no_version_of_its_own() -> AbstractContextManager[None]:
    return around(log_entry, "_version", lambda call, entry: 4 if entry.life else call(entry))


def every_claim_says_that_it_orders_nothing() -> AbstractContextManager[None]:
    left_out = {name: value for name, value in log_entry._LEFT_OUT.items() if name != "order"}
    return patched(log_entry, "_LEFT_OUT", left_out)


def whoever_claimed_meanwhile_is_not_noticed() -> AbstractContextManager[None]:
    def start_over(self: Any, order: str, wall_ms: int, seen: Any, above: Any) -> Any:
        return self._claim("a reset", wall_ms, None, lambda log: recovery.next_claim(log, above).ending_life(), order)

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
    return skipped(Fronts, "refuse_others")


def each_stream_is_emptied_alone() -> AbstractContextManager[None]:
    return patched(driver, "together", lambda fronts: [(front,) for front in fronts])


def a_store_is_its_name() -> AbstractContextManager[None]:
    return patched(recorded, "_real", lambda store: store)


def whoever_wakes_late_goes_on() -> AbstractContextManager[None]:
    return patched(StartingOver, "_remove", lambda self, path, order: self._storage.delete(path))


def it_asks_the_log_alone() -> AbstractContextManager[None]:
    def remove(self: Any, path: str, order: Any) -> None:
        if deciding.decided(self._log.observe()) == order.token:
            self._storage.delete(path)

    return patched(StartingOver, "_remove", remove)


def all_that_is_there_then_goes() -> AbstractContextManager[None]:
    def finish(call: Any, self: Any, order: Any, *arguments: Any) -> None:
        call(self, replace(order, beside=tuple(self._storage.list("p/inputs"))), *arguments)

    return around(StartingOver, "_finish", finish)


def all_orders_are_carried_out() -> AbstractContextManager[None]:
    def carried_out(call: Any, self: Records, life: int, token: str) -> None:
        call(self, life, token)
        self.withdraw(self.orders())

    return around(Records, "carried_out", carried_out)


def every_order_counts() -> AbstractContextManager[None]:
    def is_due(cls: Any, root: str, pipeline: str) -> bool:
        return bool(Records(open_storage(root), pipeline).orders())

    return patched(StartingOver, "is_due", classmethod(is_due))


def orders_stay() -> AbstractContextManager[None]:
    return skipped(Records, "withdraw")


def a_reset_is_no_run() -> AbstractContextManager[None]:
    def acquire(call: Any, *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except AlreadyRunning as error:
            raise UsageError(str(error)) from None

    return around(PipelineLock, "acquire", acquire)


def generations_begin_anew() -> AbstractContextManager[None]:
    def start_over(call: Any, self: Any, order: str, wall_ms: int, seen: Any, above: Any) -> Any:
        return call(self, order, wall_ms, seen, Generation(0))

    return around(CheckpointLog, "start_over", start_over)


def nothing_is_left() -> AbstractContextManager[None]:
    def init(call: Any, self: Any, *arguments: Any) -> None:
        call(self, *arguments)
        self._leave = frozenset()

    return around(StartingOver, "__init__", init)


def anything_can_be_left() -> AbstractContextManager[None]:
    return skipped(driver, "refuse_unknown")


def only_what_was_written_down_goes() -> AbstractContextManager[None]:
    return skipped(StartingOver, "_of_other_names", [])


def a_stream_is_parted() -> AbstractContextManager[None]:
    return skipped(driver, "refuse_to_part")


def a_sink_of_ones_own_has_one_place() -> AbstractContextManager[None]:
    return skipped(Fronts, "_others_at", [])


def former_lives_are_others() -> AbstractContextManager[None]:
    def mine(self: Any, log: Any, life: Any) -> Any:
        return self._fronts.mine(() if life is None else (life,))

    return patched(StartingOver, "_mine", mine)


def what_nobody_sees_is_in_nobodys_way() -> AbstractContextManager[None]:
    def without_others(call: Any, found: Any, *arguments: Any) -> Any:
        return call(replace(found, owner=replace(found.owner, others=())), *arguments)

    return around(driver, "is_in_the_way", without_others)


def what_was_begun_is_always_finished_first() -> AbstractContextManager[None]:
    def look(call: Any, self: StartingOver) -> Any:
        self.finish()
        return call(self)

    return around(StartingOver, "look", look)


@pytest.mark.parametrize(
    "mutant", [the_order_is_not_written, output_goes_before_it_is_decided, the_order_goes_before_the_output]
)
def test_a_mutant_that_a_kill_shows_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutant: Mutant) -> None:
    test = killed.test_a_reset_that_dies_anywhere_leaves_all_or_nothing
    assert_caught(mutant, test, killed.Template(tmp_path), killed.reaping(monkeypatch))


HALF: list[tuple[Mutant, Any]] = [
    (the_log_does_not_name_the_order, killed.test_the_next_start_finishes_what_was_begun),
    (nobody_finishes_it, killed.test_the_next_start_finishes_what_was_begun),
    (an_order_is_not_asked_about, others.test_an_order_asks_again_whose_a_target_is),
    (a_driver_writes_in_front_of_half_of_it, killed.test_a_driver_does_not_write_in_front_of_half_empty_targets),
]


@pytest.mark.parametrize(("mutant", "test"), HALF, ids=lambda value: getattr(value, "__name__", ""))
def test_a_mutant_of_what_is_left_half_done_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutant: Mutant, test: Any
) -> None:
    assert_caught(mutant, test, killed.Template(tmp_path), monkeypatch)


OF_THE_ENTRY: list[tuple[Mutant, Any, tuple[Any, ...]]] = [
    (the_log_does_not_name_the_order, in_the_log.test_a_reset_names_its_order_in_the_log, ()),
    (the_name_of_a_claim_orders, in_the_log.test_the_name_of_whoever_claims_orders_nothing, ("start over 5eed",)),
    (every_claim_may_order, in_the_log.test_a_claim_that_gives_nothing_up_orders_nothing, ()),
]


@pytest.mark.parametrize(
    ("mutant", "test", "arguments"), OF_THE_ENTRY, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_mutant_of_the_entry_is_caught(mutant: Mutant, test: Any, arguments: tuple[Any, ...]) -> None:
    assert_caught(mutant, test, *arguments)


@pytest.mark.parametrize("mutant", [an_order_is_of_no_version_of_its_own, every_claim_says_that_it_orders_nothing])
def test_a_mutant_of_the_bytes_is_caught(monkeypatch: pytest.MonkeyPatch, mutant: Mutant) -> None:
    assert_caught(mutant, entries.test_a_claim_that_orders_to_start_over_is_of_a_version_of_its_own, monkeypatch)


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
    (nothing_is_left, leaving.test_what_was_left_is_written_to_when_it_has_forgotten),
    (anything_can_be_left, leaving.test_only_a_sink_that_there_is_can_be_left),
]


@pytest.mark.parametrize(("mutant", "test"), OF_TARGETS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_mutant_of_targets_is_caught(tmp_path: Path, mutant: Mutant, test: Any) -> None:
    assert_caught(mutant, test, killed.Template(tmp_path))


MOVED: list[tuple[Mutant, Any, tuple[str, ...]]] = [
    (each_stream_is_emptied_alone, moved.test_all_that_a_moved_sink_wrote_goes, ("app/a", "app/b")),
    (each_stream_is_emptied_alone, moved.test_all_that_a_moved_sink_wrote_goes, ("app/b", "app/a")),
    (a_store_is_its_name, moved.test_a_store_with_two_names_is_one, ("store", "link")),
]


@pytest.mark.parametrize(("mutant", "test", "names"), MOVED)
def test_a_mutant_of_a_moved_sink_is_caught(tmp_path: Path, mutant: Mutant, test: Any, names: tuple[str, ...]) -> None:
    assert_caught(mutant, test, tmp_path, names)


LATE: list[tuple[Mutant, Any]] = [
    (whoever_wakes_late_goes_on, late.test_a_reset_that_wakes_behind_a_later_life_leaves_what_is_its_own),
    (it_asks_the_log_alone, late.test_a_start_that_captures_behind_a_finished_reset_keeps_its_capture),
    (all_that_is_there_then_goes, late.test_what_comes_behind_the_order_is_not_removed),
    (all_orders_are_carried_out, late.test_a_reset_that_wakes_behind_a_later_order_leaves_it),
]


@pytest.mark.parametrize(("mutant", "test"), LATE, ids=lambda value: getattr(value, "__name__", ""))
def test_a_mutant_of_a_late_reset_is_caught(mutant: Mutant, test: Any) -> None:
    assert_caught(mutant, test)


NEVER_COUNTED: list[tuple[Mutant, Any]] = [
    (every_order_counts, late.test_an_order_that_never_counted_stands_in_nobodys_way),
    (orders_stay, late.test_a_start_removes_orders_that_never_counted),
    (a_reset_is_no_run, late.test_a_takeover_waits_for_a_reset_that_is_under_way),
]


@pytest.mark.parametrize(("mutant", "test"), NEVER_COUNTED, ids=lambda value: getattr(value, "__name__", ""))
def test_a_mutant_of_orders_is_caught(tmp_path: Path, mutant: Mutant, test: Any) -> None:
    assert_caught(mutant, test, moved.Moved(tmp_path, ("app/a",)))


def test_only_what_was_written_down_goes_is_caught(tmp_path: Path) -> None:
    test = others.test_what_a_sink_wrote_under_a_former_name_goes_too
    assert_caught(only_what_was_written_down_goes, test, killed.Template(tmp_path), "files")


@pytest.mark.parametrize("kept", [("a", "b"), ("b",)])
def test_a_stream_that_is_parted_is_caught(tmp_path: Path, kept: tuple[str, ...]) -> None:
    assert_caught(a_stream_is_parted, leaving.test_a_stream_is_left_by_all_of_its_sinks, tmp_path, kept)


OF_ONES_OWN: list[Any] = [
    others.test_a_former_place_of_a_sink_of_ones_own_is_emptied_too,
    others.test_a_former_name_that_was_written_down_goes_by_the_present_one,
]


@pytest.mark.parametrize("test", OF_ONES_OWN)
def test_a_sink_of_ones_own_with_one_place_is_caught(tmp_path: Path, test: Any) -> None:
    assert_caught(a_sink_of_ones_own_has_one_place, test, tmp_path)


@pytest.mark.parametrize("is_moved", [False, True])
def test_former_lives_of_others_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_moved: bool) -> None:
    test = leaving.test_another_machine_or_directory_leaves_too
    assert_caught(former_lives_are_others, test, killed.Template(tmp_path), monkeypatch, is_moved)


def test_what_nobody_sees_being_in_nobodys_way_is_caught(tmp_path: Path) -> None:
    assert_caught(
        what_nobody_sees_is_in_nobodys_way, others.test_what_a_former_name_prepared_goes_too, tmp_path, "stream"
    )


def test_what_was_begun_being_finished_first_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test = leaving.test_a_program_leaves_what_only_it_could_empty
    assert_caught(what_was_begun_is_always_finished_first, test, killed.Template(tmp_path), monkeypatch)
