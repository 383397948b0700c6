"""Planted bugs in the removal of orphans while somebody writes (S89)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.store import test_removed_orphans as tests
from tests.store.storing import KEYED, STREAM

from headgate.store.catalogue import positions
from headgate.store.catalogue.values import AppendFound
from headgate.store.store import Store


def what_was_removed_can_be_recorded() -> AbstractContextManager[None]:
    return patched(positions, "_is_condemned", lambda connection, path: False)


def nothing_is_condemned() -> AbstractContextManager[None]:
    def condemn(connection: Any, paths: list[str]) -> set[str]:
        return set(paths) - positions.known_chunks(connection, paths)

    return patched(positions, "condemn", condemn)


@contextmanager
def what_was_removed_counts_as_truncated() -> Iterator[None]:
    real = positions.recorded_starts

    def found(*given: Any) -> AppendFound:
        told = real(*given)
        return replace(told, is_condemned=False, is_truncated=told.is_truncated or told.is_condemned)

    with patched(positions, "recorded_starts", found):
        yield


@contextmanager
def what_was_recorded_is_condemned() -> Iterator[None]:
    with patched(positions, "known_chunks", lambda connection, paths: set()):
        yield


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store") as opened:
        opened.create_stream(STREAM, KEYED, segments=3, routing_key="key")
        yield opened


CAUGHT: list[tuple[Mutant, Any]] = [
    (what_was_removed_can_be_recorded, tests.test_a_writer_writes_again_what_was_removed_before_it_was_recorded),
    (what_was_removed_can_be_recorded, tests.test_a_participant_writes_again_what_was_removed_before_it_was_recorded),
    (nothing_is_condemned, tests.test_a_writer_writes_again_what_was_removed_before_it_was_recorded),
    (what_was_recorded_is_condemned, tests.test_what_is_recorded_while_orphans_are_looked_for_stays),
    (
        what_was_removed_counts_as_truncated,
        tests.test_an_append_whose_file_was_removed_is_not_taken_for_one_that_was_truncated,
    ),
]


@pytest.mark.parametrize(("mutant", "test"), CAUGHT)
def test_a_planted_bug_is_noticed(mutant: Mutant, test: Any, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, test, store, monkeypatch)


def test_a_transaction_that_lost_a_part_is_noticed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    test = tests.test_a_transaction_of_which_a_file_was_removed_is_not_prepared
    assert_caught(what_was_removed_can_be_recorded, test, store, monkeypatch)
