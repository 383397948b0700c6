"""Inodes of removed files that other files get, between starts and while the subtasks start."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.connectors.files.test_file_tracker import Meddling
from tests.connectors.files.test_rotation import Following, append
from tests.connectors.source_reading import context

from headgate.connectors.files.filesystem import LocalFiles
from headgate.connectors.files.line_source import FileReader
from headgate.connectors.files.selection import owner_of_file


class Reusing(LocalFiles):
    """Gives files the inodes of others, which are gone by then."""

    def __init__(self) -> None:
        self.given: dict[int, int] = {}

    def keep(self, path: Path) -> int:
        """Return the inode of the file at ``path``, which no real file is given while the test runs."""
        os.link(path, path.parent.parent / f"aside-{path.parent.name}")
        return path.stat().st_ino

    def give(self, path: Path, inode: int) -> None:
        """The file at ``path`` was given this inode when it was made."""
        self.given[path.stat().st_ino] = inode

    def _told(self, status: os.stat_result) -> os.stat_result:
        inode = self.given.get(status.st_ino, status.st_ino)
        return os.stat_result((status.st_mode, inode, *status[2:]), {"st_mtime_ns": status.st_mtime_ns})

    def stat(self, path: str) -> os.stat_result:
        return self._told(os.stat(path))

    def fstat(self, descriptor: int) -> os.stat_result:
        return self._told(os.fstat(descriptor))

    def siblings(self, path: str) -> list[tuple[str, int]]:
        return [(name, self.given.get(inode, inode)) for name, inode in super().siblings(path)]


def test_what_got_the_inode_of_a_file_that_was_replaced_is_another_file(tmp_path: Path) -> None:
    """The one was replaced by a copy, the other rotated twice, both while nobody ran."""
    system, log, other = Reusing(), tmp_path / "app.log", tmp_path / "other.log"
    append(log, "1")
    append(other, "a")
    following = Following([log, other], 1, system=system)
    following.poll()
    following.restart(1)  # what lies beside them is known from here on
    following.poll()
    left = system.keep(other)
    shutil.copy(other, tmp_path / ".copy")
    append(tmp_path / ".copy", "b")
    os.replace(tmp_path / ".copy", other)
    log.rename(tmp_path / "app.log-1")
    append(log, "2")
    system.give(log, left)
    log.rename(tmp_path / "app.log-2")
    append(log, "3")
    following.restart(1)
    assert sorted(following.poll()) == ["2", "3", "b"]
    following.restart(1)
    assert following.poll() == []


def test_a_copy_that_took_the_place_of_a_file_may_be_renamed_before_it_is_read(tmp_path: Path) -> None:
    system, log = Reusing(), tmp_path / "app.log"
    append(log, "1")
    following = Following(log, 1, system=system)
    following.poll()
    shutil.copy(log, tmp_path / ".copy")
    append(tmp_path / ".copy", "2")
    os.replace(tmp_path / ".copy", log)
    following.restart(1)
    log.rename(tmp_path / "app.log.1")
    append(log, "3")
    assert sorted(following.poll()) == ["2", "3"]
    assert following.bad == []


def test_a_new_file_with_the_inode_of_an_empty_one_is_read_whoever_looks_first(tmp_path: Path) -> None:
    names = {owner_of_file(name, 2): tmp_path / name for name in ("first", "second", "third")}
    empty, new = names[0], names[1]
    system = Reusing()
    empty.touch()
    following = Following(tmp_path, system=system)
    following.poll()
    positions, left = following.positions(), system.keep(empty)
    empty.unlink()
    following.source.schema()
    following.readers = []
    for index in range(2):  # the owner of the empty file finds that it is nowhere; then there is another one
        reader = following.source.open(context(index, 2, positions, lambda: int(following.seconds * 1_000)))
        assert isinstance(reader, FileReader)
        following.readers.append(reader)
        if index == 0:
            append(new, "late")
            system.give(new, left)
    assert following.poll() == ["late"]
    following.restart(3)
    assert following.poll() == []


def test_a_file_that_nobody_had_begun_goes_to_the_owner_of_its_new_name(tmp_path: Path) -> None:  # N21
    names = {owner_of_file(name, 2): tmp_path / name for name in ("first", "second", "third")}
    before, after = names[0], names[1]
    append(before, "1")
    following = Following(tmp_path)
    following.start(2, None)
    following.take(following.readers[1])  # the other subtask is slow
    positions = following.positions()
    before.rename(after)
    append(before, "2")
    following.start(2, positions)
    assert sorted(following.poll()) == ["1", "2"]
    assert following.bad == []


def test_what_is_renamed_to_the_place_of_a_file_that_nobody_had_begun_is_no_copy_of_it(tmp_path: Path) -> None:
    """While a subtask starts, what it has just seen in its place gets the name of a file that is gone."""
    log, rotated = tmp_path / "app.log", tmp_path / "app.log.1"
    append(log, "1")
    rotated.touch()
    system = Meddling()
    following = Following(tmp_path / "app.log*", 1, system=system)
    following.poll()
    positions = following.positions()
    rotated.unlink()

    def rotate(path: str) -> None:
        if path == str(rotated) and log.exists():  # the log was seen in its place
            log.rename(rotated)

    system.before["stat"] = rotate
    following.start(1, positions)
    assert rotated.exists()
    assert following.poll() == []
    following.restart(1)
    assert following.poll() == []
