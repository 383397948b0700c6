"""Planted bugs in checkpoints of RocksDB that share files, and in what is restored of them: all are caught."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.protocol.checkpoints import test_sharing as sharing
from tests.state.rocksdb import test_rocksdb_increments as increments
from tests.state.rocksdb.increments import Subtask

from headgate.codec import log_entry
from headgate.model.manifest import KeyGroups
from headgate.protocol.checkpoints.sharing import SharedFiles
from headgate.runtime.checkpoints.targets import SubtaskTarget
from headgate.state.rocksdb import database, frozen, reopening, room
from headgate.state.rocksdb import increments as written
from headgate.state.rocksdb.memory import SharedMemory
from headgate.state.rocksdb.room import LocalDatabase
from headgate.state.rocksdb.rows import CachedObjects
from headgate.storage.own_directory import OwnDirectory

subtask = increments.subtask
"""The fixture of those tests."""


@contextmanager
def nothing_is_shared() -> Iterator[None]:
    with patched(SharedFiles, "shareable", lambda self: ()):
        yield


@contextmanager
def what_was_written_last_is_shared() -> Iterator[None]:
    with patched(SharedFiles, "shareable", lambda self: tuple(self._snapshots[max(self._snapshots)].values())):
        yield


@contextmanager
def what_was_completed_last_is_shared() -> Iterator[None]:
    with patched(SharedFiles, "shareable", lambda self: tuple(self._snapshots[min(self._snapshots)].values())):
        yield


@contextmanager
def everything_that_was_ever_written_is_shared() -> Iterator[None]:
    original = SharedFiles.wrote

    def wrote(self: Any, checkpoint: Any, parts: Any) -> None:
        original(self, checkpoint, [*self._snapshots[max(self._snapshots)].values(), *parts])

    with (
        patched(SharedFiles, "wrote", wrote),
        patched(SharedFiles, "shareable", lambda self: tuple(self._snapshots[max(self._snapshots)].values())),
    ):
        yield


@contextmanager
def files_are_told_by_their_names() -> Iterator[None]:
    original = frozen.write_files

    def write(target: Any, shareable: Any, path: Any, known: Any, *others: Any) -> None:
        known |= {name: (part.size_bytes, part.checksum) for name, part in shareable.items()}
        original(target, shareable, path, known, *others)

    with patched(frozen, "write_files", write):
        yield


@contextmanager
def savepoints_have_files() -> Iterator[None]:
    with patched(SubtaskTarget, "shareable", lambda self, section: {}):
        yield


@contextmanager
def rows_are_not_counted() -> Iterator[None]:
    with patched(reopening, "check_rows", lambda *_: None):
        yield


@contextmanager
def what_is_near_is_believed() -> Iterator[None]:
    original = reopening._is_linked

    def linked(path: Path, to: Path, part: Any) -> bool:
        return original(path, to, replace(part, checksum=reopening._checksum(path)))

    with patched(reopening, "_is_linked", linked):
        yield


@contextmanager
def nothing_is_near() -> Iterator[None]:
    with patched(LocalDatabase, "near", lambda self, name: ()):
        yield


@contextmanager
def every_snapshot_stays_on_the_disk() -> Iterator[None]:
    with patched(room, "_KEPT_MAX", 1_000):
        yield


@contextmanager
def what_dead_workers_left_goes_at_once() -> Iterator[None]:
    with patched(room, "OwnDirectory", lambda parent, **_: OwnDirectory(parent)):
        yield


@contextmanager
def what_dead_workers_left_stays() -> Iterator[None]:
    with patched(room, "remove_abandoned", lambda parent: None):
        yield


@contextmanager
def a_failed_worker_removes_what_it_had() -> Iterator[None]:
    original = room.Room.close
    with patched(room.Room, "close", lambda self, *, is_left=False: original(self)):
        yield


@contextmanager
def a_failed_worker_leaves_everything() -> Iterator[None]:
    """Bug: its database, too, which nobody goes on with, takes room until the next snapshot."""
    with patched(LocalDatabase, "thin_out", lambda self: True):
        yield


@contextmanager
def what_is_no_lock_ends_a_snapshot() -> Iterator[None]:
    def remove_abandoned(parent: Path) -> None:
        for lock in parent.glob("*.lock"):
            os.close(os.open(lock, os.O_RDWR))

    with patched(room, "remove_abandoned", remove_abandoned):
        yield


@contextmanager
def other_states_are_gone_on_with() -> Iterator[None]:
    original = reopening.describe

    def described(stored: Any) -> Any:
        found = original(stored)
        return replace(found, tables=_Equal(found.tables))

    class _Equal(list[Any]):
        def __iter__(self) -> Any:
            return iter(())

    def go_on_with(place: Any, stored: Any, tables: Any, owner: Any) -> Any:
        with patched(reopening, "describe", described), patched(reopening, "check_rows", lambda *_: None):
            counts = actual(place, stored, [], owner)
        return counts if counts is None else reopening.rows_of(stored)

    actual = reopening.go_on_with
    from headgate.state.rocksdb import rows

    with patched(rows, "go_on_with", go_on_with):
        yield


@contextmanager
def missing_files_are_left_out() -> Iterator[None]:
    def describe(stored: Any) -> Any:
        found = reopening.decode_description(stored.read(stored.description), stored.where)
        return replace(found, names=[name for name in found.names if name in stored.files])

    with patched(reopening, "describe", describe), patched(reopening, "check_rows", lambda *_: None):
        yield


@contextmanager
def old_releases_take_files_for_state() -> Iterator[None]:
    with patched(log_entry, "FILES_PREFIX", "nothing/"):
        yield


@contextmanager
def every_part_has_all_rows() -> Iterator[None]:
    original = reopening.PortableRows.read

    def read(self: Any, first: int, end: int) -> memoryview:
        self._left.setdefault((0, 1 << 15), None)
        return original(self, 0, 1 << 15)

    with patched(reopening.PortableRows, "read", read):
        yield


@contextmanager
def a_rescaled_worker_reads_the_first_groups() -> Iterator[None]:
    with patched(KeyGroups, "common", lambda self, other: KeyGroups(self.first, other.count)):
        yield


@contextmanager
def local_damage_is_not_looked_for() -> Iterator[None]:
    with patched(database.Database, "check", lambda self, path: None):
        yield


@contextmanager
def a_manifest_goes_on_for_ever() -> Iterator[None]:
    original = SharedMemory.options

    def options(self: SharedMemory, **given: bool) -> Any:
        found = original(self, **given)
        found.set_max_manifest_file_size(1 << 30)
        return found

    with patched(SharedMemory, "options", options):
        yield


@contextmanager
def options_are_in_every_checkpoint() -> Iterator[None]:
    with patched(written, "OPTIONS", "none"):
        yield


@contextmanager
def rows_that_were_gone_on_with_are_not_counted() -> Iterator[None]:
    original = CachedObjects.go_on_with

    def go_on_with(self: Any, stored: Any, owner: Any) -> bool:
        found = original(self, stored, owner)
        for cells in self.cells:
            cells.rows_count = 0
        return found

    with patched(CachedObjects, "go_on_with", go_on_with):
        yield


@contextmanager
def what_is_gone_on_with_is_not_known() -> Iterator[None]:
    original = reopening.fetch

    def fetch(*arguments: Any) -> Any:
        original(*arguments)
        return {}

    with patched(reopening, "fetch", fetch):
        yield


@contextmanager
def a_half_restored_directory_stays() -> Iterator[None]:
    class Kept:
        @staticmethod
        def rmtree(path: Any, **_: Any) -> None: ...

    with patched(reopening, "shutil", Kept):
        yield


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (
            what_was_written_last_is_shared,
            increments.test_files_of_a_checkpoint_that_may_never_complete_are_written_again,
        ),
        (
            everything_that_was_ever_written_is_shared,
            increments.test_files_of_a_checkpoint_that_may_never_complete_are_written_again,
        ),
        (
            what_was_completed_last_is_shared,
            increments.test_a_file_that_the_newest_completed_checkpoint_may_not_have_is_not_shared,
        ),
        (every_snapshot_stays_on_the_disk, increments.test_only_the_last_snapshots_stay_on_the_disk),
        (old_releases_take_files_for_state, increments.test_a_manifest_with_files_is_of_a_version_of_its_own),
    ],
)
def test_bugs_of_sharing_are_caught(mutant: Mutant, test: Any, subtask: Subtask) -> None:
    assert_caught(mutant, test, subtask)


@pytest.mark.parametrize(
    "mutant",
    [what_was_written_last_is_shared, what_was_completed_last_is_shared, everything_that_was_ever_written_is_shared],
)
def test_some_story_finds_what_is_shared_wrongly(mutant: Mutant) -> None:
    assert_caught(mutant, sharing.test_what_may_be_shared_is_in_whatever_may_be_the_newest)


def test_a_story_in_which_nothing_is_shared_is_none() -> None:
    assert_caught(nothing_is_shared, sharing.test_something_is_shared)


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (nothing_is_shared, increments.test_a_checkpoint_writes_only_the_files_that_no_earlier_one_has),
        (files_are_told_by_their_names, increments.test_a_database_that_was_filled_with_rows_shares_nothing_of_another),
        (savepoints_have_files, increments.test_a_savepoint_has_no_files_of_a_database),
        (other_states_are_gone_on_with, increments.test_other_states_take_the_rows),
        (missing_files_are_left_out, increments.test_a_description_without_one_of_its_files_is_damage),
        (rows_that_were_gone_on_with_are_not_counted, increments.test_what_goes_on_with_files_shares_them),
        (what_is_gone_on_with_is_not_known, increments.test_what_goes_on_with_files_shares_them),
    ],
)
def test_bugs_of_files_are_caught(mutant: Mutant, test: Any, subtask: Subtask, tmp_path: Path) -> None:
    assert_caught(mutant, test, subtask, tmp_path)


@pytest.mark.parametrize(
    "mutant",
    [
        nothing_is_near,
        what_dead_workers_left_goes_at_once,
        what_dead_workers_left_stays,
    ],
)
def test_bugs_of_local_recovery_are_caught(
    mutant: Mutant, subtask: Subtask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_caught(
        mutant, increments.test_what_a_killed_worker_left_is_used_and_then_goes, subtask, tmp_path, monkeypatch
    )


@pytest.mark.parametrize("mutant", [a_failed_worker_removes_what_it_had, a_failed_worker_leaves_everything])
def test_bugs_of_what_failed_workers_leave_are_caught(
    mutant: Mutant, subtask: Subtask, monkeypatch: pytest.MonkeyPatch
) -> None:
    test = increments.test_what_a_failed_worker_left_is_used_and_then_goes
    assert_caught(mutant, test, subtask, monkeypatch)


def test_what_stands_about_on_the_disk_ends_nothing(subtask: Subtask, monkeypatch: pytest.MonkeyPatch) -> None:
    test = increments.test_what_is_beside_the_directories_of_workers_is_in_nobodys_way
    assert_caught(what_is_no_lock_ends_a_snapshot, test, subtask, monkeypatch)


def test_a_damaged_file_that_is_near_is_not_used(
    subtask: Subtask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test = increments.test_what_is_left_is_ignored_where_it_does_not_fit
    assert_caught(what_is_near_is_believed, test, subtask, tmp_path, monkeypatch, "flipped")


@pytest.mark.parametrize("parallelism", [1, 2])
def test_rows_are_counted_by_whoever_restores(subtask: Subtask, tmp_path: Path, parallelism: int) -> None:
    assert_caught(rows_are_not_counted, increments.test_rows_that_are_missing_are_named, subtask, tmp_path, parallelism)


def test_half_of_a_restore_does_not_stay(subtask: Subtask, tmp_path: Path) -> None:
    test = increments.test_a_damaged_file_is_named_and_nothing_is_half_restored
    assert_caught(a_half_restored_directory_stays, test, subtask, tmp_path, "flipped", 1)


@pytest.mark.parametrize("mutant", [every_part_has_all_rows, a_rescaled_worker_reads_the_first_groups])
def test_bugs_of_reading_rows_are_caught(
    mutant: Mutant, subtask: Subtask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test = increments.test_files_are_restored_at_any_parallelism_in_any_backend
    assert_caught(mutant, test, subtask, tmp_path, "memory", 2, monkeypatch)


def test_local_damage_is_not_written(subtask: Subtask) -> None:
    test = increments.test_a_local_file_that_is_damaged_is_not_written_to_a_checkpoint
    assert_caught(local_damage_is_not_looked_for, test, subtask, "missing")


def test_what_grows_with_the_age_of_a_database_is_found(
    subtask: Subtask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test = increments.test_what_describes_a_database_does_not_grow_with_its_age
    assert_caught(a_manifest_goes_on_for_ever, test, subtask, tmp_path, monkeypatch)


def test_options_in_checkpoints_are_found(subtask: Subtask) -> None:
    assert_caught(options_are_in_every_checkpoint, increments.test_options_are_in_no_checkpoint, subtask)
