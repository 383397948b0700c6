"""Mutants of what a process believes to be durable of directories. Each is caught."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.mutants.harness import assert_caught, patched
from tests.storage import test_power_cut as power
from tests.storage import test_power_cut_directories as directories

from headgate.model.security import Access
from headgate.storage import durable, local
from headgate.storage.durable import Known

real_path = durable.sync_path


def every_directory_is_remembered_for_ever() -> AbstractContextManager[None]:  # O19
    return patched(Known, "see", lambda self, directory: self.seen.update({str(directory): True}))


def every_directory_is_held_open() -> AbstractContextManager[None]:  # O19
    def place(self: Known, directory: Path, descriptor: int) -> None:
        identity = durable._identity_of(os.fstat(descriptor))
        self.placed[str(directory)] = durable._Placed(identity, descriptor)

    return patched(Known, "place", place)


def what_was_removed_is_held_open() -> AbstractContextManager[None]:  # O19
    return patched(Known, "forget", lambda self, directory: self.seen.pop(str(directory), None))


def a_directory_that_was_removed_counts_as_synced() -> AbstractContextManager[None]:  # O19
    return patched(Known, "forget", lambda self, directory: None)


def a_directory_that_is_there_is_durable() -> AbstractContextManager[None]:  # O24
    def sync(directory: Path, *, is_new: bool = False) -> None:
        if is_new:
            real_path(directory, is_new=True)

    return patched(durable, "sync_path", sync)


def only_the_directory_itself_is_synced() -> AbstractContextManager[None]:  # O24
    """Not what is above it."""

    def sync(directory: Path, *, is_new: bool = False) -> None:
        durable.sync_names(directory.parent)

    return patched(durable, "sync_path", sync)


def a_directory_is_known_by_its_path() -> AbstractContextManager[None]:  # O24
    return patched(Known, "is_placed", lambda self, directory, identity: str(directory) in self.placed)


@contextmanager
def a_directory_that_failed_to_sync_counts_as_placed() -> Iterator[None]:  # O24
    def sync(directory: Path, *, is_new: bool = False) -> None:
        try:
            real_path(directory, is_new=is_new)
        except OSError:
            durable.KNOWN.place(directory, durable._opened(directory))
            raise

    with patched(durable, "sync_path", sync), patched(local, "sync_path", sync):
        yield


def every_write_syncs_what_is_above() -> AbstractContextManager[None]:  # O24
    return patched(Known, "is_placed", lambda self, directory, identity: False)


def a_parent_that_is_not_ours_is_refused() -> AbstractContextManager[None]:  # O24
    def sync(directory: Path, *, is_new: bool = False) -> None:
        real_path(directory, is_new=True)

    return patched(durable, "sync_path", sync)


SAME = directories.test_a_directory_that_was_removed_and_made_again_by_others_is_synced_again

CAUGHT = [
    (every_directory_is_remembered_for_ever, power.test_only_so_many_directories_are_remembered, ()),
    (every_directory_is_held_open, directories.test_only_so_many_directories_are_held_open, ()),
    (what_was_removed_is_held_open, directories.test_only_so_many_directories_are_held_open, ()),
    (
        a_directory_that_was_removed_counts_as_synced,
        power.test_a_directory_that_was_removed_and_made_again_is_synced_by_the_first_look,
        (),
    ),
    (
        a_directory_that_is_there_is_durable,
        directories.test_what_two_workers_write_into_a_new_directory_survives,
        ("put", Access.OWNER),
    ),
    (
        a_directory_that_is_there_is_durable,
        directories.test_a_directory_that_another_process_died_over_is_synced_by_who_looks,
        (),
    ),
    (only_the_directory_itself_is_synced, directories.test_the_directories_above_the_storage_are_synced_too, ()),
    (a_directory_is_known_by_its_path, SAME, ()),
    (
        a_directory_that_failed_to_sync_counts_as_placed,
        directories.test_a_directory_that_could_not_be_made_durable_is_not_taken_for_durable,
        (),
    ),
    (
        every_write_syncs_what_is_above,
        directories.test_a_directory_that_this_process_has_synced_is_not_synced_again,
        (),
    ),
    (
        a_parent_that_is_not_ours_is_refused,
        directories.test_a_directory_whose_parent_is_not_ours_to_sync_is_written_to,
        (pytest.MonkeyPatch,),
    ),
]


@pytest.mark.parametrize(("mutant", "test", "arguments"), CAUGHT, ids=lambda value: getattr(value, "__name__", ""))
def test_caught_in_a_power_cut(mutant: Any, test: Any, arguments: tuple[Any, ...], tmp_path: Path) -> None:
    for name in ("sound", "mutant"):
        (tmp_path / name).mkdir()
    with pytest.MonkeyPatch.context() as patch:
        test(tmp_path / "sound", *[patch if argument is pytest.MonkeyPatch else argument for argument in arguments])
    with pytest.MonkeyPatch.context() as patch:
        given = [patch if argument is pytest.MonkeyPatch else argument for argument in arguments]
        assert_caught(mutant, test, tmp_path / "mutant", *given)
