"""Planted bugs in which files of a database are fetched, and in what tells RocksDB of it: all are caught."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.state.rocksdb import test_rocksdb_needed as tests_of_needed
from tests.state.rocksdb import test_rocksdb_needed_histories as tests_of_histories
from tests.state.rocksdb.increments import Subtask

from headgate.model.manifest import KeyGroups
from headgate.runtime.stored_state.reading import Selection
from headgate.state.rocksdb import needed, notes, reopening

subtask, small_files = tests_of_needed.subtask, tests_of_needed.small_files
tiny_files = tests_of_histories.tiny_files
"""The fixtures of those tests."""


@contextmanager
def the_last_group_is_not_of_the_file() -> Iterator[None]:
    def may_have(file: Any, groups: KeyGroups) -> bool:
        return bool(file.first_group < groups.first + groups.count and groups.first < file.last_group)

    with patched(needed, "_may_have", may_have):
        yield


@contextmanager
def the_first_group_is_not_of_the_file() -> Iterator[None]:
    def may_have(file: Any, groups: KeyGroups) -> bool:
        return bool(file.first_group < groups.first + groups.count - 1 and groups.first <= file.last_group)

    with patched(needed, "_may_have", may_have):
        yield


@contextmanager
def the_newest_files_are_left_out() -> Iterator[None]:
    original = needed._may_have
    with patched(needed, "_may_have", lambda file, groups: file.level > 0 and original(file, groups)):
        yield


@contextmanager
def everything_is_fetched() -> Iterator[None]:
    with patched(reopening, "needed", lambda description, groups: description):
        yield


@contextmanager
def nothing_is_noted() -> Iterator[None]:
    with patched(needed, "with_removed", lambda manifest, files: manifest):
        yield


@contextmanager
def pieces_cross_the_end_of_a_block() -> Iterator[None]:
    with patched(notes, "_BLOCK_BYTES", 1 << 30):
        yield


@contextmanager
def a_header_alone_is_left_out() -> Iterator[None]:
    original = notes._piece
    with patched(notes, "_piece", lambda kind, data: original(kind, data) if data else bytes(7)):
        yield


@contextmanager
def files_are_not_compared() -> Iterator[None]:
    with patched(reopening, "check_files", lambda *_: None):
        yield


@contextmanager
def only_the_first_wanted_group_is_read() -> Iterator[None]:
    def range_in(self: Selection, piece: Any) -> KeyGroups:
        return KeyGroups(min(self._in(piece)), 1)

    with patched(Selection, "range_in", range_in):
        yield


@contextmanager
def who_looks_at_a_key_reads_everything() -> Iterator[None]:
    with patched(Selection, "range_in", lambda self, piece: piece.key_groups):
        yield


@pytest.mark.parametrize(
    "mutant",
    [
        the_newest_files_are_left_out,
        everything_is_fetched,
        nothing_is_noted,
    ],
)
def test_bugs_of_what_is_fetched_are_caught(mutant: Mutant, subtask: Subtask, tmp_path: Path) -> None:
    test = tests_of_needed.test_a_worker_fetches_only_files_with_its_key_groups
    assert_caught(mutant, test, subtask, tmp_path, "memory", 3)


@contextmanager
def files_of_removed_rows_are_left_out() -> Iterator[None]:
    """What is between the newest files and the bottom tells of rows that were changed or removed."""
    original = needed._may_have
    with patched(needed, "_may_have", lambda file, groups: file.level in (0, 6) and original(file, groups)):
        yield


@pytest.mark.parametrize(
    "mutant", [the_newest_files_are_left_out, the_last_group_is_not_of_the_file, files_of_removed_rows_are_left_out]
)
def test_bugs_of_what_is_read_in_part_are_caught(mutant: Mutant, tmp_path: Path, tiny_files: None) -> None:
    test = tests_of_histories.test_any_history_that_is_read_in_part_is_what_all_files_say
    assert_caught(mutant, test, tmp_path, tiny_files, 1, 128)


@pytest.mark.parametrize("mutant", [the_last_group_is_not_of_the_file, the_first_group_is_not_of_the_file])
def test_ranges_that_are_too_short_are_caught(mutant: Mutant) -> None:
    assert_caught(mutant, tests_of_needed.test_what_is_needed_is_what_overlaps, (2, 4))


@pytest.mark.parametrize("mutant", [pieces_cross_the_end_of_a_block, a_header_alone_is_left_out])
def test_bugs_of_notes_are_caught(mutant: Mutant, tmp_path: Path) -> None:
    def at_every_place() -> None:
        for size in range(32_730, 32_780):
            directory = tmp_path / str(size)
            directory.mkdir()
            tests_of_needed.test_rocksdb_reads_what_was_noted_wherever_it_is_in_the_manifest(directory, size)

    assert_caught(mutant, at_every_place)


def test_files_that_are_not_compared_are_caught(subtask: Subtask, tmp_path: Path) -> None:
    test = tests_of_needed.test_files_that_are_not_where_it_says_are_named
    assert_caught(files_are_not_compared, test, subtask, tmp_path, "range")


@pytest.mark.parametrize("mutant", [only_the_first_wanted_group_is_read, who_looks_at_a_key_reads_everything])
def test_bugs_of_reading_keys_are_caught(
    mutant: Mutant, tmp_path: Path, small_files: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    test = tests_of_needed.test_who_looks_at_keys_fetches_only_files_with_their_key_groups
    assert_caught(mutant, test, tmp_path, small_files, monkeypatch)
