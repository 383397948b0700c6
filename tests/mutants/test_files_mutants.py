"""Mutants of files as a source: lists that grow, rotation, fingerprints. Each is caught by a test of its rule."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.connectors.files import test_parquet as reading
from tests.connectors.files import test_reused_inodes as reusing
from tests.connectors.files import test_rotation as rotating
from tests.mutants.harness import assert_caught, patched
from tests.operators.windows import test_windows as windows
from tests.runtime.checkpoints import test_restoring as restoring
from tests.runtime.worker import test_subtask_runner as running

from headgate.codec.snapshot import FINISHED_PREFIX
from headgate.connectors.files import parquet, rotation
from headgate.connectors.files import table as file_table
from headgate.connectors.files.lines import LineFile
from headgate.connectors.files.listing import FileSelection
from headgate.connectors.files.position import FilePosition
from headgate.connectors.files.series import OlderFiles
from headgate.connectors.files.share import Share
from headgate.connectors.files.table import FileTable
from headgate.operators.base import WATERMARK_MAX_MS
from headgate.operators.windows.fired_groups import FiredGroups
from headgate.runtime.checkpoints.restoring import RestoredSnapshots
from headgate.runtime.worker.chain import Chain
from headgate.runtime.worker.subtask_parts import SubtaskParts
from headgate.runtime.worker.subtask_runner import SubtaskRunner

Mutant = Callable[[], AbstractContextManager[None]]


def nothing(following: Any) -> None:
    """Reading goes on."""


def again(following: Any) -> None:
    following.restart(2)


def owner_is_the_index() -> AbstractContextManager[None]:
    def by_index(found: Any, known: Any) -> dict[str, int]:
        return {path: index for index, path in enumerate(sorted({*found, *known}))}

    return patched(rotating, "numbered", by_index)


def renamed_files_are_not_looked_for() -> AbstractContextManager[None]:
    return patched(file_table, "renamed_to", lambda file, is_free=None: None)


def a_rotated_file_is_a_new_one() -> AbstractContextManager[None]:
    def consider(self: Any, path: str, number: Any) -> None:
        if self._share.owns(path, number):
            self.files[path] = self._file(path, files_position(path))

    return patched(FileTable, "_consider", consider)


def files_position(path: str) -> Any:
    return file_table.FilePosition(inode=file_table.inode_of(path) or 0)


def every_name_has_its_own_owner() -> AbstractContextManager[None]:
    return patched(sys.modules["headgate.connectors.files.listing"], "series_of", lambda key: key)


def the_inode_is_the_identity() -> AbstractContextManager[None]:
    return patched(LineFile, "is_at", lambda self, path, inode=None: file_table.inode_of(path) == self.inode)


def files_between_two_looks_are_forgotten() -> AbstractContextManager[None]:
    return patched(OlderFiles, "missed", lambda self, series, found: [])


def what_stands_before_the_position_is_not_compared() -> AbstractContextManager[None]:
    def checked(self: Any, descriptor: int, at: int) -> bytes:
        status = os.fstat(descriptor)
        self._open_at(descriptor, status, self._check_same(descriptor, status))
        return os.pread(descriptor, 1 << 20, at)

    return patched(LineFile, "_checked", checked)


def lines_are_counted_from_where_reading_began() -> AbstractContextManager[None]:
    encode = FilePosition.encode
    return patched(FilePosition, "encode", lambda self: encode(replace(self, lines=0)))


def losses_are_not_told() -> AbstractContextManager[None]:
    return patched(FileTable, "_finish", lambda self, file, inode: file.finish())


def compressed_files_are_refused_while_following() -> AbstractContextManager[None]:
    there = FileSelection._there
    return patched(FileSelection, "_there", lambda self, *, skips_compressed: there(self, skips_compressed=False))


def others_are_forgotten() -> AbstractContextManager[None]:
    return patched(rotation.Others, "has", lambda self, path, inode: False)


def an_unread_file_stays_with_its_owner() -> AbstractContextManager[None]:
    return patched(FileTable, "_is_for_another", lambda self, path, listed, numbers: False)


def an_unread_file_is_known_by_its_inode() -> AbstractContextManager[None]:
    def note(self: Share, path: str, position: FilePosition) -> None:
        seen = rotation.SeenFile(path, position.head_bytes, position.head_digest)
        self._others.files[position.inode] = seen

    stack = ExitStack()
    stack.enter_context(patched(Share, "note_position", note))
    is_at = rotation.SeenFile.is_at
    stack.enter_context(
        patched(rotation.SeenFile, "is_at", lambda self, path: not self.head_bytes or is_at(self, path))
    )
    return stack


def a_file_keeps_the_inode_of_the_one_it_replaced() -> AbstractContextManager[None]:
    return patched(LineFile, "inode", property(lambda self: self._opened_inode))


def what_has_the_name_of_an_unread_file_is_a_copy_of_it() -> AbstractContextManager[None]:
    return patched(FileTable, "_is_in_its_place", lambda self, file, inode: file.is_at(file.path))


def removed_files_are_never_looked_at_again() -> AbstractContextManager[None]:
    return patched(FileTable, "_reappeared", lambda self, file: None)


def grown_files_stay_finished() -> AbstractContextManager[None]:
    return patched(LineFile, "has_grown", lambda self: False)


def footers_are_not_compared() -> AbstractContextManager[None]:
    return patched(parquet, "fingerprint", lambda file: (1, 1))


def one_former_that_had_finished_is_enough() -> AbstractContextManager[None]:
    def is_finished(self: Any, vertex: Any) -> bool:
        names = [f"{FINISHED_PREFIX}{node.name}" for node in vertex.nodes]
        seen = self._seen_by(vertex, has_own_end=True)
        return any(bytes(sections.get(name, b"")) == b"\x01" for _, sections in seen for name in names)

    return patched(RestoredSnapshots, "is_finished", is_finished)


def a_drained_source_reads_on() -> AbstractContextManager[None]:
    original = SubtaskRunner.__init__

    def forgets(self: Any, parts: SubtaskParts, *others: Any) -> None:
        original(self, replace(parts, is_draining=False), *others)

    return patched(SubtaskRunner, "__init__", forgets)


def operators_are_not_told_that_input_goes_on() -> AbstractContextManager[None]:
    return patched(Chain, "resume", lambda self: None)


def what_the_end_has_fired_stays_late() -> AbstractContextManager[None]:
    return patched(FiredGroups, "resume", lambda self: WATERMARK_MAX_MS)


CAUGHT: list[tuple[Mutant, Callable[..., object], tuple[object, ...]]] = [
    (owner_is_the_index, rotating.test_a_file_keeps_its_number_when_the_list_grows, ()),
    (every_name_has_its_own_owner, rotating.test_files_of_a_series_have_one_owner, ()),
    (what_stands_before_the_position_is_not_compared,
     rotating.test_a_truncated_file_that_was_read_in_the_middle_of_a_line_is_refused, ("tmp_path",)),
    (lines_are_counted_from_where_reading_began,
     rotating.test_a_bad_line_has_its_number_in_its_own_file_after_a_rotation, ("tmp_path", True)),
    (losses_are_not_told, rotating.test_what_may_have_been_lost_unseen_is_a_bad_record, ("tmp_path",)),
    (compressed_files_are_refused_while_following,
     rotating.test_compressed_files_of_a_followed_directory_are_skipped, ("tmp_path",)),
    (removed_files_are_never_looked_at_again,
     rotating.test_a_file_that_was_removed_and_made_anew_is_read_from_its_start, ("tmp_path",)),
    (grown_files_stay_finished,
     rotating.test_between_two_starts_files_may_be_added_renamed_and_grow, ("tmp_path", 2)),
    (footers_are_not_compared, reading.test_a_file_that_was_changed_or_replaced_is_refused_by_name, ("tmp_path", 1)),
    (renamed_files_are_not_looked_for,
     rotating.test_a_renamed_file_is_read_to_its_end_and_the_new_one_from_its_start, ("log", "tmp_path", again)),
    (a_rotated_file_is_a_new_one,
     rotating.test_a_renamed_file_is_read_to_its_end_and_the_new_one_from_its_start, ("dir", "tmp_path", nothing)),
    (the_inode_is_the_identity, rotating.test_a_longer_copy_may_take_the_place_of_a_file, ("tmp_path", False)),
    (files_between_two_looks_are_forgotten,
     rotating.test_several_rotations_in_a_row_lose_nothing, ("log", "tmp_path", again)),
    (one_former_that_had_finished_is_enough,
     restoring.test_a_vertex_is_finished_only_if_all_former_subtasks_were, ({0: True}, 3, [False, False, False])),
    (a_drained_source_reads_on, running.test_a_source_of_a_drained_checkpoint_is_not_read_again, ()),
    (operators_are_not_told_that_input_goes_on, running.test_a_source_restored_as_finished_reads_what_was_added, ()),
    (what_the_end_has_fired_stays_late,
     windows.test_what_the_end_alone_has_fired_is_not_late_when_more_input_comes, ()),
    (others_are_forgotten, rotating.test_other_names_of_rotation_are_followed, ("tmp_path", "other", nothing)),
    (an_unread_file_stays_with_its_owner,
     reusing.test_a_file_that_nobody_had_begun_goes_to_the_owner_of_its_new_name, ("tmp_path",)),
    (an_unread_file_is_known_by_its_inode,
     reusing.test_a_new_file_with_the_inode_of_an_empty_one_is_read_whoever_looks_first, ("tmp_path",)),
    (a_file_keeps_the_inode_of_the_one_it_replaced,
     reusing.test_what_got_the_inode_of_a_file_that_was_replaced_is_another_file, ("tmp_path",)),
    (a_file_keeps_the_inode_of_the_one_it_replaced,
     reusing.test_a_copy_that_took_the_place_of_a_file_may_be_renamed_before_it_is_read, ("tmp_path",)),
    (what_has_the_name_of_an_unread_file_is_a_copy_of_it,
     reusing.test_what_is_renamed_to_the_place_of_a_file_that_nobody_had_begun_is_no_copy_of_it, ("tmp_path",)),
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
