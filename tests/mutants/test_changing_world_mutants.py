"""Mutants of followed files in a world that changes between two looks. Each is caught by a test of its rule."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.api import test_scratch as looks
from tests.connectors.files import test_changing_world as world
from tests.connectors.files import test_parquet as reading
from tests.mutants.harness import assert_caught, patched

from headgate.connectors.files import parquet, rotation, series, system
from headgate.connectors.files import table as file_table
from headgate.connectors.files.lines import LineFile
from headgate.connectors.files.listing import FileSelection, Listing
from headgate.connectors.files.series import OlderFiles
from headgate.connectors.files.table import FileTable
from headgate.errors import StorageError
from headgate.storage import own_directory

Mutant = Callable[[], AbstractContextManager[None]]


def a_look_is_as_strict_as_a_start() -> AbstractContextManager[None]:
    def look(self: FileSelection) -> Listing:
        return Listing(self.find(skips_compressed=True), [])

    return patched(FileSelection, "look", look)


def a_start_in_a_gap_is_refused() -> AbstractContextManager[None]:
    return patched(FileSelection, "_is_rotated_away", lambda self, root: False)


def any_missing_path_is_awaited() -> AbstractContextManager[None]:
    return patched(FileSelection, "_is_rotated_away", lambda self, root: True)


def what_went_may_not_be_read() -> AbstractContextManager[None]:
    return patched(FileSelection, "_may_not_read", lambda self, path: not self.system.may_read(path))


def a_directory_is_listed_once() -> AbstractContextManager[None]:
    return patched(system, "LISTINGS_MAX", 1)


def nothing_is_awaited() -> AbstractContextManager[None]:
    return patched(file_table, "LOOKS_MAX", 0)


def everything_is_awaited_for_ever() -> AbstractContextManager[None]:
    return patched(file_table, "LOOKS_MAX", 1 << 30)


def one_listing_says_where_a_file_is() -> AbstractContextManager[None]:
    return patched(rotation, "SCANS_MAX", 1)


def a_failure_says_that_there_is_nothing() -> AbstractContextManager[None]:
    is_at = LineFile.is_at

    def sure(self: Any, path: str, inode: int | None = None) -> bool:
        try:
            return is_at(self, path, inode)
        except StorageError:
            return False

    return patched(LineFile, "is_at", sure)


def a_failed_listing_is_empty() -> AbstractContextManager[None]:
    found = rotation.siblings

    def siblings(path: str, files: Any) -> Any:
        try:
            return found(path, files)
        except StorageError:
            return []

    return patched(rotation, "siblings", siblings)


def dates_say_what_is_input() -> AbstractContextManager[None]:
    def missed(self: OlderFiles, name: str, found: Any) -> Any:
        known = [path for path, inode in found if inode in self._older.get(name, {})]
        last_ns = max((series._written_ns(path, self._system) or 0 for path in known), default=0)
        return [each for each in found if (series._written_ns(each[0], self._system) or 0) > last_ns]

    return patched(OlderFiles, "missed", missed)


def the_inode_says_what_is_older() -> AbstractContextManager[None]:
    return patched(OlderFiles, "_is", lambda self, older, path: True)


def whatever_is_beside_is_input() -> AbstractContextManager[None]:
    return patched(OlderFiles, "missed", lambda self, name, found: found)


def older_files_are_forgotten_between_two_starts() -> AbstractContextManager[None]:
    return patched(OlderFiles, "restore", lambda self, name, older: None)


def what_is_in_its_place_settles_nothing() -> AbstractContextManager[None]:
    return patched(FileTable, "_are_in_place", lambda self, files: False)


def losses_are_told_after_a_restart_only() -> AbstractContextManager[None]:
    relocate = FileTable.relocate

    def silent(self: Any, file: Any, moved: Any) -> Any:
        before = len(self.losses)
        found = relocate(self, file, moved)
        del self.losses[before:]
        return found

    return patched(FileTable, "relocate", silent)


def a_loss_is_forgotten_by_a_checkpoint() -> AbstractContextManager[None]:
    positions = FileTable.positions

    def told(self: Any) -> Any:
        pending, self.losses = self.losses, []
        found = positions(self)
        self.losses = pending
        return found

    return patched(FileTable, "positions", told)


def rotated_files_are_lost_when_they_are_compressed() -> AbstractContextManager[None]:
    def finish(self: Any, file: Any, inode: int | None) -> None:
        self.losses.append(file)
        file.finish()

    return patched(FileTable, "_finish", finish)


def a_name_of_a_removed_file_makes_a_new_one() -> AbstractContextManager[None]:
    def reappeared(self: Any, file: Any) -> None:
        inode = self._inode_of(file.path)
        is_same = inode is not None and file.has_fingerprint and file.is_at(file.path)
        position = file.position() if is_same else file_table.FilePosition()
        self.files[file.path] = self._file(file.path, replace(position, is_finished=False, inode=inode))

    return patched(FileTable, "_reappeared", reappeared)


def a_new_generation_looks_at_the_first_file_again() -> AbstractContextManager[None]:
    def opened(self: Any, context: Any) -> Any:
        schema = self._schema_of(self._files[0])
        return parquet.ParquetReader(context, self._files, schema, self._batch_rows, parquet._filesystem(self._url))

    return patched(parquet.ParquetFiles, "open", opened)


def the_directory_of_looks_is_made_once() -> AbstractContextManager[None]:
    return patched(own_directory, "make_directories", _once(own_directory.make_directories))


def _once(making: Any) -> Any:
    made: list[Path] = []

    def make(path: Path, access: Any) -> None:
        made.append(path)
        if made.count(path) == 1:
            making(path, access)
        assert made.count(path) < 9, "it is never made again"

    return make


CAUGHT: list[tuple[Mutant, Callable[..., object], tuple[object, ...]]] = [
    (a_look_is_as_strict_as_a_start, world.test_a_followed_path_is_awaited_while_it_is_missing, ("app.log",)),
    (a_start_in_a_gap_is_refused, world.test_a_start_in_the_gap_of_a_rotation_awaits_the_file, (True,)),
    (any_missing_path_is_awaited, world.test_a_start_with_a_path_that_was_never_there_is_refused, ()),
    (what_went_may_not_be_read, world.test_a_file_that_goes_while_files_are_listed_is_not_there, (True,)),
    (a_directory_is_listed_once, world.test_a_directory_that_goes_while_it_is_listed_has_nothing, ()),
    (nothing_is_awaited, world.test_a_file_that_may_not_be_read_for_a_moment_is_awaited, ("",)),
    (nothing_is_awaited, world.test_a_half_read_file_that_is_missing_for_a_moment_is_read_on, ()),
    (everything_is_awaited_for_ever, world.test_a_file_that_may_not_be_read_for_a_moment_is_awaited, ("",)),
    (everything_is_awaited_for_ever, world.test_a_half_read_file_that_is_missing_for_a_moment_is_read_on, ()),
    (one_listing_says_where_a_file_is,
     world.test_a_file_that_is_renamed_on_while_it_is_looked_for_is_found, ("app.log",)),
    (a_failure_says_that_there_is_nothing, world.test_a_failure_to_look_is_not_taken_for_a_removal, ("opened",)),
    (a_failed_listing_is_empty, world.test_a_failure_to_look_is_not_taken_for_a_removal, ("siblings",)),
    (dates_say_what_is_input,
     world.test_what_was_rotated_away_unseen_is_read_whatever_dates_and_numbers_say,
     (world.numbers_down, "rising", False)),
    (the_inode_says_what_is_older, world.test_an_inode_alone_does_not_make_a_file_an_older_one, ()),
    (whatever_is_beside_is_input,
     world.test_what_lay_beside_a_followed_file_before_is_no_input, (world.numbers_down, False)),
    (older_files_are_forgotten_between_two_starts,
     world.test_what_lay_beside_a_followed_file_before_is_no_input, (world.numbers_up, True)),
    (what_is_in_its_place_settles_nothing, world.test_what_is_put_beside_a_file_in_its_place_is_no_input, ()),
    (losses_are_told_after_a_restart_only,
     world.test_a_file_rotated_and_compressed_between_two_looks_is_a_bad_record, ("app.log", True, False)),
    (a_loss_is_forgotten_by_a_checkpoint,
     world.test_a_file_rotated_and_compressed_between_two_looks_is_a_bad_record, ("", True, True)),
    (rotated_files_are_lost_when_they_are_compressed,
     world.test_a_file_compressed_after_it_was_read_is_no_bad_record, ("", True)),
    (a_name_of_a_removed_file_makes_a_new_one,
     world.test_a_file_that_gets_the_name_of_a_removed_one_is_read_on, (False,)),
    (a_new_generation_looks_at_the_first_file_again,
     reading.test_a_failure_after_the_first_file_was_read_and_removed_is_recovered_from, (False,)),
    (the_directory_of_looks_is_made_once,
     looks.test_others_may_remove_the_directory_of_all_looks_at_any_time, (1,)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("mutant", "test", "arguments"), CAUGHT, ids=[f"{m.__name__}-{number}" for number, (m, _, _) in enumerate(CAUGHT)]
)
def test_a_mutant_of_a_changing_world_is_caught(
    tmp_path: Path, mutant: Mutant, test: Callable[..., object], arguments: tuple[object, ...]
) -> None:
    for name in ("sound", "mutated"):
        (tmp_path / name).mkdir()
    test(tmp_path / "sound", *arguments)
    assert_caught(mutant, test, tmp_path / "mutated", *arguments)
