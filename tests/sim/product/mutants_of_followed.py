"""Bugs planted where files are followed; seeds of ``sim.kinds.followed`` find them.

``tests/mutants/test_files_mutants.py`` has those that need a file system that fails at one very call.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from tests.mutants.harness import Mutant, patched
from tests.sim.product.patching import around, skipped

from headgate.connectors.files import rotation
from headgate.connectors.files import table as file_table
from headgate.connectors.files.lines import LineFile
from headgate.connectors.files.position import FilePosition
from headgate.connectors.files.series import OlderFiles
from headgate.connectors.files.share import Share
from headgate.connectors.files.source import FileReader
from headgate.connectors.files.system import inode_of
from headgate.connectors.files.table import FileTable


def renamed_files_are_not_looked_for() -> AbstractContextManager[None]:  # N18
    return skipped(file_table, "renamed_to")


def a_renamed_file_is_a_new_one() -> AbstractContextManager[None]:  # N18
    def consider(self: Any, path: str, number: Any) -> None:
        inode = self._inode_of(path)
        if inode is not None and self._share.owns(path, number):
            self.files[path] = self._file(path, FilePosition(inode=inode))

    return patched(FileTable, "_consider", consider)


def every_name_has_its_own_owner() -> AbstractContextManager[None]:  # N2, N18
    return patched(sys.modules["headgate.connectors.files.listing"], "series_of", lambda key: key)


def files_between_two_looks_are_forgotten() -> AbstractContextManager[None]:  # N18
    return skipped(OlderFiles, "missed", [])


def files_of_others_are_forgotten() -> AbstractContextManager[None]:  # N20
    return skipped(rotation.Others, "has", False)


def the_inode_is_the_identity() -> AbstractContextManager[None]:  # N19
    def is_at(call: Any, self: Any, path: str, *inode: Any) -> bool:
        return inode_of(path, self.system) == self.inode or bool(call(self, path, *inode))

    return around(LineFile, "is_at", is_at)


def a_longer_copy_is_another_file() -> AbstractContextManager[None]:  # N19
    def is_at(call: Any, self: Any, path: str, *inode: Any) -> bool:
        return bool(call(self, path, *inode)) and inode_of(path, self.system) == self.inode

    return around(LineFile, "is_at", is_at)


def what_was_truncated_is_read_from_its_start() -> AbstractContextManager[None]:  # N6
    def relocate(call: Any, self: Any, file: Any, moved: Any) -> bool:
        if not moved.is_in_place:
            return bool(call(self, file, moved))
        self.files[file.path] = self._file(file.path, FilePosition(inode=moved.inode))
        return True

    return around(FileTable, "relocate", relocate)


def what_was_read_is_not_compared() -> AbstractContextManager[None]:  # N6
    def restored(call: Any, self: Any, path: str, position: FilePosition) -> Any:
        return call(self, path, replace(position, head_bytes=0, tail_bytes=0))

    return around(FileTable, "_file", restored)


def a_file_that_is_there_again_is_done() -> AbstractContextManager[None]:  # N7
    return skipped(FileTable, "_reappeared")


def half_a_line_is_a_line() -> AbstractContextManager[None]:  # N5
    def end(self: Any) -> Any:
        self.is_at_end = True
        return self._rest()

    return patched(LineFile, "_end_of_file", end)


def a_file_that_was_read_is_not_looked_at_again() -> AbstractContextManager[None]:  # N5
    def look(call: Any, self: Any) -> None:
        self._waiting.clear()
        call(self)

    return around(FileReader, "_look_around", look)


def positions_count_what_is_in_memory() -> AbstractContextManager[None]:  # N3
    return around(LineFile, "position", lambda call, self: replace(call(self), offset=self._known, tail_bytes=0))


def one_look_is_enough() -> AbstractContextManager[None]:  # N50
    def renamed_to(file: Any, is_free: Any) -> str | None:
        others = [(path, inode) for path, inode in rotation.neighbours(file.path, file.system) if is_free(path)]
        return rotation._among(others, file)

    return patched(file_table, "renamed_to", renamed_to)


def who_was_found_in_its_place_stays_there() -> AbstractContextManager[None]:  # N50
    return patched(FileTable, "_is_free_for", lambda self, file: lambda path: path not in self.files)


class _Unknowing(dict[int, Any]):
    def __contains__(self, key: object) -> bool:
        return False


def who_is_gone_is_known_by_its_inode() -> AbstractContextManager[None]:  # N19, N20
    def init(call: Any, self: Any, *arguments: Any, **options: Any) -> None:
        call(self, *arguments, **options)
        self._others.files = _Unknowing()

    return around(Share, "__init__", init)


def whoever_has_the_inode_was_renamed() -> AbstractContextManager[None]:  # N19
    return patched(Share, "is_of_another", lambda self, before, path: False)


ALL: dict[Mutant, int] = {
    renamed_files_are_not_looked_for: 11,
    a_renamed_file_is_a_new_one: 11,
    every_name_has_its_own_owner: 49,
    files_between_two_looks_are_forgotten: 49,
    files_of_others_are_forgotten: 13,
    the_inode_is_the_identity: 11,
    a_longer_copy_is_another_file: 2,
    what_was_truncated_is_read_from_its_start: 12,
    what_was_read_is_not_compared: 2,
    a_file_that_is_there_again_is_done: 59,
    half_a_line_is_a_line: 11,
    a_file_that_was_read_is_not_looked_at_again: 11,
    positions_count_what_is_in_memory: 11,
    one_look_is_enough: 35,
    who_was_found_in_its_place_stays_there: 11,
    who_is_gone_is_known_by_its_inode: 407,
    whoever_has_the_inode_was_renamed: 55,
}
"""Each with a seed that finds it."""
