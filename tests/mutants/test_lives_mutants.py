"""Mutants of lives: who owns a sink's target (docs/spec/lives.md). Each breaks one rule and is caught."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.cli import test_sinks_list
from tests.connectors.files import test_file_owner
from tests.mutants.harness import assert_caught, patched
from tests.runtime.driver import test_owning
from tests.store import test_store_transactions
from tests.store.storing import KEYED, STREAM

import headgate as hg
from headgate.cli import sinks
from headgate.connectors.files.layout import SinkIdentity
from headgate.connectors.files.owner import FileOwner, owners_in
from headgate.model.life import NO_GENERATION, Life, Owner
from headgate.protocol.supervision import lives
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.checkpoints.records import Records
from headgate.runtime.driver import lives as driver_lives
from headgate.runtime.driver.lives import SinkOwners
from headgate.storage.base import Storage
from headgate.store.catalogue import owners
from headgate.store.store import Store


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


def sinks_of_other_names_are_strangers() -> AbstractContextManager[None]:
    return patched(FileOwner, "_sinks", lambda self, *known: [self._identity])


def every_pipeline_is_the_same() -> AbstractContextManager[None]:
    def sinks(self: Any, *known: SinkIdentity) -> list[SinkIdentity]:
        return sorted({self._identity, *known})

    return patched(FileOwner, "_sinks", sinks)


def every_sink_of_a_list_is_another_look() -> AbstractContextManager[None]:  # LV10
    def one_by_one(storage: Storage) -> dict[SinkIdentity, Owner]:
        return {sink: FileOwner(storage, sink).owner() for sink in owners_in(storage)}

    return patched(sinks, "owners_in", one_by_one)


def every_sink_is_asked_for_itself() -> AbstractContextManager[None]:  # LV11
    return patched(driver_lives, "NeighbouringSink", Store)


def the_one_that_was_asked_is_no_neighbour() -> AbstractContextManager[None]:  # LV11
    real = lives.of_neighbour
    return patched(lives, "of_neighbour", lambda sink, asked, owner: real(sink, "", replace(owner, life=None)))


def neighbours_have_one_owner() -> AbstractContextManager[None]:  # LV11
    return patched(lives, "of_neighbour", lambda sink, asked, owner: owner)


def other_names_are_asked_for_nothing() -> AbstractContextManager[None]:
    def check(self: Any, found: dict[str, Owner], following: Any) -> None:
        real(self, {name: replace(owner, others=()) for name, owner in found.items()}, following)

    real = SinkOwners.check
    return patched(SinkOwners, "check", check)


def a_stream_is_its_whole_store() -> AbstractContextManager[None]:
    return patched(owners, "_has_written", lambda connection, info, owner: True)


def a_stream_knows_nobody_else() -> AbstractContextManager[None]:
    return patched(owners, "_has_written", lambda connection, info, owner: False)


def only_the_first_process_writes_targets_down() -> AbstractContextManager[None]:
    def note(self: Any, life: int, targets: Any) -> None:
        if self.targets() is None:
            real(self, life, targets)

    real = Records.note
    return patched(Records, "note", note)


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
    (sinks_of_other_names_are_strangers, test_owning.test_a_former_name_of_a_sink_belongs_to_its_life),
    (sinks_of_other_names_are_strangers, test_owning.test_an_older_copy_is_told_by_a_former_name_too),
    (other_names_are_asked_for_nothing, test_owning.test_a_former_name_of_a_sink_belongs_to_its_life),
    (
        every_pipeline_is_the_same,
        test_owning.test_what_was_made_to_forget_and_other_pipelines_stand_in_nobodys_way,
    ),
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


@pytest.mark.parametrize("mutant", [a_stream_is_its_whole_store, a_stream_knows_nobody_else])
def test_a_mutant_of_who_else_wrote_to_a_stream_is_caught(
    tmp_path: Path, mutant: Callable[[], AbstractContextManager[None]]
) -> None:
    with Store.open(tmp_path / "store") as store:
        store.create_stream(STREAM, KEYED, segments=3, routing_key="key")
        test = test_store_transactions.test_a_stream_knows_who_else_of_a_pipeline_has_written_to_it
        assert_caught(mutant, test, store)


def test_only_the_first_process_writes_targets_down_is_caught(tmp_path: Path) -> None:
    test = test_owning.test_whoever_goes_on_for_another_process_writes_down_its_targets
    assert_caught(only_the_first_process_writes_targets_down, test, tmp_path)


def test_a_list_with_a_look_for_each_sink_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test = test_sinks_list.test_a_list_of_many_sinks_is_one_look
    assert_caught(every_sink_of_a_list_is_another_look, test, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "mutant", [every_sink_is_asked_for_itself, the_one_that_was_asked_is_no_neighbour, neighbours_have_one_owner]
)
def test_a_mutant_of_sinks_that_share_a_directory_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutant: Callable[[], AbstractContextManager[None]]
) -> None:
    assert_caught(mutant, test_owning.test_a_directory_of_many_sinks_is_asked_once, tmp_path, monkeypatch)
