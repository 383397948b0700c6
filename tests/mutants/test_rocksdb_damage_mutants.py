"""Planted bugs in what is done about damaged files of RocksDB, here and in checkpoints: all are caught."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.runtime.driver import test_removing as removing
from tests.runtime.driver import test_unsound_checkpoints as claiming
from tests.state.rocksdb import test_rocksdb_blocks as blocks
from tests.state.rocksdb import test_rocksdb_unsound as unsound
from tests.state.rocksdb.increments import Subtask

from headgate.errors import CorruptionError
from headgate.model.failure import Failure, FailureKind
from headgate.protocol.checkpoints import passed_over
from headgate.protocol.checkpoints import unsound as found_by_workers
from headgate.protocol.supervision import restart
from headgate.runtime.checkpoints import snapshot_files
from headgate.runtime.checkpoints.snapshot_files import SnapshotFiles
from headgate.runtime.driver import claims
from headgate.runtime.worker import worker
from headgate.state.files import UnsoundFiles
from headgate.state.rocksdb import blocks as file_blocks
from headgate.state.rocksdb import increments, reopening
from headgate.state.rocksdb.blocks import _File, check_blocks
from headgate.storage.base import AlreadyExists

subtask = blocks.subtask
"""The fixture of those tests."""
place = claiming.place


REMOVED = claiming.test_who_removes_what_is_aside_does_not_bring_back_what_was_gone_back_behind


@contextmanager
def new_files_are_believed() -> Iterator[None]:
    with patched(increments, "check_blocks", lambda data, path: None):
        yield


@contextmanager
def files_that_were_written_before_are_believed() -> Iterator[None]:
    def check(path: Path, data: bytes, known: Any) -> None:
        if known is None:
            check_blocks(data, path)

    with patched(increments, "_check", check):
        yield


@contextmanager
def every_file_must_be_of_this_format() -> Iterator[None]:
    with patched(increments, "_check", lambda path, data, known: check_blocks(data, path)):
        yield


@contextmanager
def options_of_the_former_are_taken() -> Iterator[None]:
    with patched(reopening, "OPTIONS", "nothing"):
        yield


@contextmanager
def parts_of_an_index_are_taken_for_rows() -> Iterator[None]:
    with patched(_File, "_has_two_levels", lambda self, metas: False):
        yield


@contextmanager
def parts_of_filters_are_forgotten() -> Iterator[None]:
    with patched(file_blocks, "_FILTER_IN_PARTS", b"none"):
        yield


@contextmanager
def blocks_in_the_middle_are_believed() -> Iterator[None]:
    original = _File._checked

    def checked(self: Any, handle: tuple[int, int]) -> int:
        is_data = handle[0] < self._end // 2
        return 0 if is_data else original(self, handle)

    with patched(_File, "_checked", checked):
        yield


@contextmanager
def a_disk_is_taken_for_the_checkpoint() -> Iterator[None]:
    with patched(reopening, "_changed", lambda stored, description, directory: None):
        yield


@contextmanager
def small_files_are_believed() -> Iterator[None]:
    original = reopening._changed

    def changed(stored: Any, description: Any, directory: Path) -> Path | None:
        return original(stored, replace(description, small={}), directory)

    with patched(reopening, "_changed", changed):
        yield


@contextmanager
def all_small_files_are_to_stay_as_they_are() -> Iterator[None]:
    with patched(reopening, "_KEPT", ""):
        yield


@contextmanager
def what_rocksdb_opens_is_believed() -> Iterator[None]:
    original = reopening.judged

    @contextmanager
    def judged(stored: Any, description: Any, directory: Path) -> Iterator[None]:
        with original(stored, replace(description, small={}), directory):
            yield

    with patched(reopening, "judged", judged):
        yield


@contextmanager
def what_is_near_is_taken_again() -> Iterator[None]:
    original = reopening._fetched

    def fetched(place: Any, stored: Any, description: Any, path: Path, near: Any) -> Any:
        return original(place, stored, description, path, place.near)

    with patched(reopening, "_fetched", fetched):
        yield


@contextmanager
def one_bad_read_is_believed() -> Iterator[None]:
    original = reopening.judged

    @contextmanager
    def judged(*arguments: Any) -> Iterator[None]:
        try:
            with original(*arguments):
                yield
        except UnsoundFiles as error:
            raise CorruptionError(error.path, error.offset, error.expected, error.found) from error

    with patched(reopening, "judged", judged):
        yield


@contextmanager
def a_checkpoint_is_taken_for_the_disk() -> Iterator[None]:
    with patched(reopening, "_changed", lambda stored, description, directory: directory):
        yield


@contextmanager
def only_states_that_are_there_are_counted() -> Iterator[None]:
    original = reopening.check_rows

    def check(rows: Any, tables: Any, wanted: Any, where: str) -> None:
        names = {table.section.name for table in tables}
        original(rows, tables, {name: count for name, count in wanted.items() if name in names}, where)

    with patched(reopening, "check_rows", check):
        yield


@contextmanager
def nobody_listens_to_workers() -> Iterator[None]:
    with patched(found_by_workers.UnsoundCheckpoints, "of", lambda self, manifest: []):
        yield


@contextmanager
def files_are_of_one_checkpoint_only() -> Iterator[None]:
    with patched(found_by_workers, "_has", lambda manifest, restored, path: False):
        yield


@contextmanager
def what_was_gone_back_behind_is_forgotten() -> Iterator[None]:
    with patched(passed_over, "gone_back_behind", lambda *_: []):
        yield


@contextmanager
def what_was_left_by_hand_is_as_good_as_any() -> Iterator[None]:
    with patched(passed_over, "left_by_its_user", lambda *_: []):
        yield


@contextmanager
def who_removes_what_is_aside_forgets_why() -> Iterator[None]:
    with patched(snapshot_files, "_is_about", lambda path, manifests: False):
        yield


@contextmanager
def notes_never_go() -> Iterator[None]:
    with patched(snapshot_files, "_is_about", lambda path, manifests: True):
        yield


@contextmanager
def a_note_that_has_gone_ends_the_run() -> Iterator[None]:
    with patched(snapshot_files, "NotFound", AlreadyExists):
        yield


@contextmanager
def older_damage_was_gone_back_behind() -> Iterator[None]:
    with patched(SnapshotFiles, "gone_back_behind", SnapshotFiles.aside):
        yield


@contextmanager
def who_removes_checkpoints_asks_no_worker() -> Iterator[None]:
    chosen = claims.chosen
    with patched(claims, "chosen", lambda *arguments: chosen(*arguments[:4])):
        yield


@contextmanager
def damage_is_a_failure_of_user_code() -> Iterator[None]:
    class NeverError(Exception): ...

    with patched(worker, "UnsoundFiles", NeverError):
        yield


@contextmanager
def a_bad_disk_is_a_failure_of_user_code() -> Iterator[None]:
    class NeverError(Exception): ...

    with patched(worker, "LocalDamage", NeverError):
        yield


@contextmanager
def a_strategy_counts_damage() -> Iterator[None]:
    original = restart.Restarts.after

    def after(self: Any, failure: Any, at_ms: int, jitter: float) -> Any:
        lost = Failure(FailureKind.LOST, failure.reason)
        return original(self, lost, at_ms, jitter)

    with patched(restart.Restarts, "after", after):
        yield


@contextmanager
def no_strategy_ever_counts_damage() -> Iterator[None]:
    original = restart.Restarts.after

    def after(self: Any, failure: Any, at_ms: int, jitter: float) -> Any:
        self._was_damage = False
        return original(self, failure, at_ms, jitter)

    with patched(restart.Restarts, "after", after):
        yield


@contextmanager
def damage_long_ago_is_the_one_before() -> Iterator[None]:
    original = restart.Restarts.after

    def after(self: Any, failure: Any, at_ms: int, jitter: float) -> Any:
        was_damage = self._was_damage
        found = original(self, failure, at_ms, jitter)
        self._was_damage = self._was_damage or was_damage
        return found

    with patched(restart.Restarts, "after", after):
        yield


@pytest.mark.parametrize(
    ("mutant", "test", "others"),
    [
        (new_files_are_believed, blocks.test_a_bit_that_flips_before_the_first_upload_is_in_no_checkpoint, ("data",)),
        (
            files_that_were_written_before_are_believed,
            blocks.test_a_bit_that_flips_before_a_file_is_written_again_is_in_no_checkpoint,
            (),
        ),
        (blocks_in_the_middle_are_believed, blocks.test_a_sound_file_is_sound_and_any_bit_of_it_counts, ()),
        (blocks_in_the_middle_are_believed, blocks.test_blocks_that_changed_places_are_damage, ()),
    ],
)
def test_damage_of_the_disk_is_written_nowhere(
    mutant: Mutant, test: Any, others: tuple[Any, ...], subtask: Subtask
) -> None:
    assert_caught(mutant, test, subtask, *others)


@pytest.mark.parametrize("mutant", [parts_of_an_index_are_taken_for_rows, parts_of_filters_are_forgotten])
def test_parts_of_indexes_and_filters_are_looked_at(
    mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_caught(mutant, blocks.test_filters_and_indexes_are_in_parts, tmp_path, monkeypatch)


@pytest.mark.parametrize("mutant", [every_file_must_be_of_this_format, options_of_the_former_are_taken])
def test_files_of_other_releases_stay_usable(
    mutant: Mutant, subtask: Subtask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test = blocks.test_files_of_another_release_are_known_by_their_checksums
    assert_caught(mutant, test, subtask, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("mutant", "file"),
    [
        (a_disk_is_taken_for_the_checkpoint, ".sst"),
        (small_files_are_believed, "MANIFEST"),
        (small_files_are_believed, "CURRENT"),
    ],
)
@pytest.mark.parametrize("parallelism", [1, 2])
def test_damage_of_a_disk_is_not_the_checkpoints(
    mutant: Mutant, file: str, parallelism: int, subtask: Subtask, tmp_path: Path
) -> None:
    test = unsound.test_a_disk_that_spoils_what_is_fetched_says_nothing_of_the_checkpoint
    assert_caught(mutant, test, subtask, tmp_path, parallelism, file)


@pytest.mark.parametrize("parallelism", [1, 2])
def test_small_files_are_looked_at_in_any_case(parallelism: int, subtask: Subtask, tmp_path: Path) -> None:
    test = unsound.test_what_rocksdb_takes_for_a_torn_end_is_damage_of_the_disk
    assert_caught(what_rocksdb_opens_is_believed, test, subtask, tmp_path, parallelism)
    other = unsound.test_what_rocksdict_writes_anew_is_no_damage
    assert_caught(all_small_files_are_to_stay_as_they_are, other, subtask, tmp_path / "other", parallelism)


@pytest.mark.parametrize("parallelism", [1, 2])
def test_files_are_fetched_again_before_anything_is_said_of_them(
    parallelism: int, subtask: Subtask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test = unsound.test_one_bad_read_says_nothing_of_the_checkpoint
    assert_caught(one_bad_read_is_believed, test, subtask, tmp_path, monkeypatch, parallelism, reopening, "check_rows")


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (a_checkpoint_is_taken_for_the_disk, unsound.test_an_unsound_checkpoint_is_named_by_its_own_file),
        (only_states_that_are_there_are_counted, unsound.test_a_state_that_only_the_manifest_names_is_missed),
    ],
)
@pytest.mark.parametrize("parallelism", [1, 2])
def test_damage_is_told_by_whose_it_is(
    mutant: Mutant, test: Any, parallelism: int, subtask: Subtask, tmp_path: Path
) -> None:
    assert_caught(mutant, test, subtask, tmp_path, parallelism)


def test_what_is_near_is_fetched_first(subtask: Subtask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test = unsound.test_what_is_near_and_goes_bad_is_fetched_before_anything_is_judged
    assert_caught(what_is_near_is_taken_again, test, subtask, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (nobody_listens_to_workers, claiming.test_what_a_worker_could_not_restore_is_gone_back_behind),
        (nobody_listens_to_workers, claiming.test_what_a_worker_could_not_restore_refuses_the_start_if_configured_so),
        (files_are_of_one_checkpoint_only, claiming.test_a_file_that_checkpoints_share_is_damage_of_all_of_them),
        (
            what_was_gone_back_behind_is_forgotten,
            claiming.test_a_later_driver_does_not_return_to_what_was_gone_back_behind,
        ),
        (who_removes_what_is_aside_forgets_why, REMOVED),
        (notes_never_go, REMOVED),
        (older_damage_was_gone_back_behind, claiming.test_a_checkpoint_whose_entry_was_mended_is_gone_back_to),
    ],
)
def test_the_next_claim_knows(mutant: Mutant, test: Any, place: Any) -> None:
    assert_caught(mutant, test, place)


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (damage_is_a_failure_of_user_code, claiming.test_damage_of_a_checkpoint_is_another_failure_than_that_of_a_disk),
        (
            a_bad_disk_is_a_failure_of_user_code,
            claiming.test_damage_of_a_checkpoint_is_another_failure_than_that_of_a_disk,
        ),
        (a_strategy_counts_damage, claiming.test_damage_is_no_failure_that_a_restart_strategy_counts),
        (
            no_strategy_ever_counts_damage,
            claiming.test_damage_again_and_again_counts_because_a_worker_may_see_it_everywhere,
        ),
        (damage_long_ago_is_the_one_before, claiming.test_damage_after_another_failure_is_the_first_again),
    ],
)
def test_damage_has_a_kind_of_its_own(mutant: Mutant, test: Any) -> None:
    assert_caught(mutant, test)


@pytest.mark.parametrize(
    "test",
    [
        claiming.test_damage_of_an_adopted_checkpoint_does_not_restore_what_was_left_for_it,
        claiming.test_without_a_checkpoint_that_was_not_left_nothing_starts,
    ],
)
def test_what_was_left_stays_left(test: Any, tmp_path: Path) -> None:
    assert_caught(what_was_left_by_hand_is_as_good_as_any, test, tmp_path)


def test_a_note_that_goes_is_caught(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    test = claiming.test_a_note_that_goes_while_it_is_read_is_none
    assert_caught(a_note_that_has_gone_ends_the_run, test, place, monkeypatch)


def test_who_removes_checkpoints_knows(place: Any) -> None:
    test = removing.test_damage_that_only_workers_found_is_left_to_the_user
    assert_caught(who_removes_checkpoints_asks_no_worker, test, removing.with_checkpoints(place))
