"""Mutants of local storage beside somebody who removes empty directories. Each is caught."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from tests.mutants.harness import assert_caught, patched
from tests.storage import test_vanishing as vanishing

from headgate.storage import local
from headgate.storage.local import LocalStorage


def a_directory_that_went_cannot_be_listed() -> AbstractContextManager[None]:  # O20
    return patched(local, "_ABSENT", (NotADirectoryError, IsADirectoryError))


def a_rename_fails_over_a_directory_that_needs_no_sync() -> AbstractContextManager[None]:  # O20
    return patched(local, "_unless_gone", lambda sync, directory: sync(directory))


def a_target_without_directory_is_a_source_that_is_missing() -> AbstractContextManager[None]:  # O20
    def link(self: LocalStorage, source: str, target: str) -> None:
        new = self.local_path(target)
        local.make_directories(new.parent, self._access)
        os.link(self.local_path(source), new)

    return patched(LocalStorage, "_link", link)


def a_directory_is_made_once() -> AbstractContextManager[None]:  # O20
    return patched(local, "DIRECTORY_TRIES_MAX", 1)


CAUGHT = [
    (a_directory_that_went_cannot_be_listed, vanishing.test_a_directory_that_goes_while_it_is_listed_has_nothing),
    (
        a_rename_fails_over_a_directory_that_needs_no_sync,
        vanishing.test_a_rename_is_done_although_the_directory_of_its_source_goes,
    ),
    (
        a_target_without_directory_is_a_source_that_is_missing,
        vanishing.test_a_rename_makes_the_directory_of_its_target_again,
    ),
    (a_directory_is_made_once, vanishing.test_a_target_that_was_taken_and_goes_meanwhile_is_free),
    (a_directory_is_made_once, vanishing.test_a_put_makes_its_directory_as_often_as_it_goes),
]


@pytest.mark.parametrize(("mutant", "test"), CAUGHT, ids=lambda value: getattr(value, "__name__", ""))
def test_caught_beside_somebody_who_removes(mutant: Any, test: Any, tmp_path: Path) -> None:
    test(tmp_path / "sound")
    assert_caught(mutant, test, tmp_path / "mutant")
