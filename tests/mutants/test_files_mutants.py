"""Mutants of files as a source: lists that grow, rotation, fingerprints. Each is caught by a test of its rule."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.mutants.harness import assert_caught, patched

from headgate.connectors import filetable, parquet, rotation
from headgate.connectors.filelist import FileSelection
from headgate.connectors.filetable import FileTable
from headgate.connectors.lines import LineFile

CONNECTORS = Path(__file__).parent.parent / "connectors"
Mutant = Callable[[], AbstractContextManager[None]]


def load(name: str) -> ModuleType:
    """Load a file of tests; their helper is found beside them."""
    if str(CONNECTORS) not in sys.path:
        sys.path.append(str(CONNECTORS))
    spec = importlib.util.spec_from_file_location(f"mutated_{name}", CONNECTORS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ROTATION, PARQUET = load("test_rotation"), load("test_parquet")


def nothing(following: Any) -> None:
    """Reading goes on."""


def again(following: Any) -> None:
    following.restart(2)


def owner_is_the_index() -> AbstractContextManager[None]:
    def by_index(found: Any, known: Any) -> dict[str, int]:
        return {path: index for index, path in enumerate(sorted({*found, *known}))}

    return patched(ROTATION, "numbered", by_index)


def renamed_files_are_not_looked_for() -> AbstractContextManager[None]:
    return patched(filetable, "renamed_to", lambda file, is_free=None: None)


def a_rotated_file_is_a_new_one() -> AbstractContextManager[None]:
    def consider(self: Any, path: str, number: Any) -> None:
        if self._owns(path, number):
            self.files[path] = self._file(path, files_position(path))

    return patched(FileTable, "_consider", consider)


def files_position(path: str) -> Any:
    return filetable.FilePosition(inode=filetable.inode_of(path) or 0)


def every_name_has_its_own_owner() -> AbstractContextManager[None]:
    return patched(sys.modules["headgate.connectors.filelist"], "series_of", lambda key: key)


def the_inode_is_the_identity() -> AbstractContextManager[None]:
    return patched(LineFile, "is_at", lambda self, path: filetable.inode_of(path) == self.inode)


def files_between_two_looks_are_forgotten() -> AbstractContextManager[None]:
    return patched(filetable, "missed", lambda selection, path, now: [])


def what_stands_before_the_position_is_not_compared() -> AbstractContextManager[None]:
    def checked(self: Any, descriptor: int, at: int) -> bytes:
        status = os.fstat(descriptor)
        self._open_at(descriptor, status, self._check_same(descriptor, status))
        return os.pread(descriptor, 1 << 20, at)

    return patched(LineFile, "_checked", checked)


def losses_are_not_told() -> AbstractContextManager[None]:
    settle = FileTable._settle

    def silent(self: Any, file: Any) -> None:
        settle(self, file)
        self.losses.clear()

    return patched(FileTable, "_settle", silent)


def compressed_files_are_refused_while_following() -> AbstractContextManager[None]:
    find = FileSelection.find
    return patched(FileSelection, "find", lambda self, *, skips_compressed=False: find(self))


def others_are_forgotten() -> AbstractContextManager[None]:
    return patched(rotation.Others, "has", lambda self, path, inode: False)


def removed_files_are_never_looked_at_again() -> AbstractContextManager[None]:
    return patched(FileTable, "_reappeared", lambda self, file: None)


def grown_files_stay_finished() -> AbstractContextManager[None]:
    return patched(LineFile, "has_grown", lambda self: False)


def footers_are_not_compared() -> AbstractContextManager[None]:
    return patched(parquet, "fingerprint", lambda path, filesystem: None)


CAUGHT: list[tuple[Mutant, Callable[..., object], tuple[object, ...]]] = [
    (owner_is_the_index, ROTATION.test_a_file_keeps_its_number_when_the_list_grows, ()),
    (every_name_has_its_own_owner, ROTATION.test_files_of_a_series_have_one_owner, ()),
    (what_stands_before_the_position_is_not_compared,
     ROTATION.test_a_truncated_file_that_was_read_in_the_middle_of_a_line_is_refused, ("tmp_path",)),
    (losses_are_not_told, ROTATION.test_what_may_have_been_lost_unseen_is_a_bad_record, ("tmp_path",)),
    (compressed_files_are_refused_while_following,
     ROTATION.test_compressed_files_of_a_followed_directory_are_skipped, ("tmp_path",)),
    (removed_files_are_never_looked_at_again,
     ROTATION.test_a_file_that_was_removed_and_made_anew_is_read_from_its_start, ("tmp_path",)),
    (grown_files_stay_finished,
     ROTATION.test_between_two_starts_files_may_be_added_renamed_and_grow, ("tmp_path", 2)),
    (footers_are_not_compared, PARQUET.test_a_file_that_was_changed_or_replaced_is_refused_by_name, ("tmp_path", 1)),
    (renamed_files_are_not_looked_for,
     ROTATION.test_a_renamed_file_is_read_to_its_end_and_the_new_one_from_its_start, ("log", "tmp_path", again)),
    (a_rotated_file_is_a_new_one,
     ROTATION.test_a_renamed_file_is_read_to_its_end_and_the_new_one_from_its_start, ("dir", "tmp_path", nothing)),
    (the_inode_is_the_identity, ROTATION.test_a_longer_copy_may_take_the_place_of_a_file, ("tmp_path", False)),
    (files_between_two_looks_are_forgotten,
     ROTATION.test_several_rotations_in_a_row_lose_nothing, ("log", "tmp_path", again)),
    (others_are_forgotten, ROTATION.test_other_names_of_rotation_are_followed, ("tmp_path", "other", nothing)),
]  # fmt: skip


@pytest.mark.parametrize(("mutant", "test", "arguments"), CAUGHT, ids=[entry[0].__name__ for entry in CAUGHT])
def test_a_mutant_of_files_is_caught(
    tmp_path: Path, mutant: Mutant, test: Callable[..., object], arguments: tuple[object, ...]
) -> None:
    def given(directory: Path) -> list[object]:
        directory.mkdir()
        named = {"tmp_path": directory, "dir": directory, "log": directory / "app.log"}
        return [named.get(a, a) if isinstance(a, str) else a for a in arguments]

    test(*given(tmp_path / "sound"))
    assert_caught(mutant, test, *given(tmp_path / "mutated"))
