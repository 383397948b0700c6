"""Followed files that are renamed or removed, or cannot be read, just when somebody looks at them."""

from __future__ import annotations

import errno
import os
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from tests.connectors.files.following import Following, append

from headgate.connectors.files.filesystem import LocalFiles, Status
from headgate.connectors.files.selection import owner_of_file
from headgate.errors import StorageError


def test_a_followed_file_may_be_missing_for_a_while(tmp_path: Path) -> None:  # it was renamed, and not made anew
    log = tmp_path / "app.log"
    append(log, "1")
    following = Following(log)
    assert following.poll() == ["1"]
    log.rename(tmp_path / "app.log.1")
    append(tmp_path / "app.log.1", "2")
    assert following.poll() == ["2"]
    append(log, "3")
    assert following.poll() == ["3"]
    log.unlink()
    assert following.poll() == []
    append(log, "4")
    assert following.poll() == ["4"]


class Vanishing(LocalFiles):
    """Lists a file once more that somebody has just removed."""

    gone = ""

    def is_file(self, path: str) -> bool:
        return path == self.gone or super().is_file(path)

    def siblings(self, path: str) -> list[tuple[str, int]]:
        return [*super().siblings(path), *([(self.gone, 1)] if self.gone else [])]

    def matching(self, pattern: str) -> list[str]:
        return [*super().matching(pattern), *([self.gone] if self.gone else [])]

    def may_read(self, path: str) -> bool:
        if path == self.gone:
            self.gone = ""
        return super().may_read(path)


def test_a_file_may_vanish_while_it_is_looked_at(tmp_path: Path) -> None:
    log, system = tmp_path / "app.log", Vanishing()
    append(log, "1")
    following = Following(tmp_path / "app.log*", system=system)
    assert following.poll() == ["1"]
    system.gone = str(tmp_path / "app.log.2")
    log.rename(tmp_path / "app.log.1")
    append(log, "2")
    assert following.poll() == ["2"]
    assert not system.gone


class Failing(LocalFiles):
    """Fails at one call, once."""

    call = ""

    def _may_fail(self, call: str, path: str) -> None:
        if call == self.call and path.endswith("app.log.1"):
            self.call = ""
            raise OSError(errno.EIO, "the disk did not answer", path)

    def opened(self, path: str) -> AbstractContextManager[int]:
        self._may_fail("opened", path)
        return super().opened(path)

    def stat(self, path: str) -> Status:
        self._may_fail("stat", path)
        return super().stat(path)

    def siblings(self, path: str) -> list[tuple[str, int]]:
        self._may_fail("siblings", f"{path}.1")
        return super().siblings(path)


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("call", ["opened", "stat"])
def test_a_file_that_cannot_be_looked_at_is_not_taken_for_gone(tmp_path: Path, call: str, is_restarted: bool) -> None:
    log, system = tmp_path / "app.log", Failing()
    append(log, "1")
    following = Following(tmp_path, 1, system=system)
    assert following.poll() == ["1"]
    positions = following.positions()
    append(log, "2")
    log.rename(tmp_path / "app.log.1")
    append(log, "3")
    system.call = call

    def look() -> None:
        if is_restarted:
            following.start(1, positions)
        following.poll()

    with pytest.raises(StorageError, match="the disk did not answer"):
        look()
    following.start(1, positions)
    assert sorted(following.poll()) == ["2", "3"]
    assert following.bad == []


class Rotating(LocalFiles):
    """Renames a file once more when it has just been listed."""

    renames: tuple[Path, ...] = ()

    def siblings(self, path: str) -> list[tuple[str, int]]:
        found = super().siblings(path)
        if self.renames:
            before, now = self.renames[:2]
            self.renames = self.renames[2:]
            before.rename(now)
        return found


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("times", [1, 2])
def test_a_file_that_is_renamed_again_while_it_is_looked_for_is_found(
    tmp_path: Path, times: int, is_restarted: bool
) -> None:
    log, system = tmp_path / "app.log", Rotating()
    append(log, "1")
    following = Following(log, 1, system=system)
    assert following.poll() == ["1"]
    positions = following.positions()
    names = [tmp_path / f"app.log.{number}" for number in range(1, 4)]
    log.rename(names[0])
    append(names[0], "2")
    append(log, "3")
    system.renames = (names[0], names[1], names[1], names[2])[: 2 * times]
    if is_restarted:
        following.start(1, positions)
    assert sorted(following.poll()) == ["2", "3"]
    assert following.bad == []


class Shifting(LocalFiles):
    """Rotates by numbers when it has just been listed for the second time."""

    shifts: tuple[tuple[Path, Path], ...] = ()
    listings_count = 0

    def siblings(self, path: str) -> list[tuple[str, int]]:
        found = super().siblings(path)
        self.listings_count += bool(self.shifts)
        if self.listings_count == 2:
            for before, now in self.shifts:
                before.rename(now)
            self.shifts = ()
        return found


@pytest.mark.parametrize("is_restarted", [False, True])
def test_what_was_rotated_unseen_is_found_while_it_is_rotated_again(tmp_path: Path, is_restarted: bool) -> None:
    log, system = tmp_path / "app.log", Shifting()
    names = [tmp_path / f"app.log.{number}" for number in range(1, 4)]
    append(log, "1")
    following = Following(log, 1, system=system)
    assert following.poll() == ["1"]
    positions = following.positions()
    log.rename(names[1])
    append(log, "2")
    log.rename(names[0])
    append(log, "3")
    system.shifts = ((names[1], names[2]), (names[0], names[1]))
    if is_restarted:
        following.start(1, positions)
    assert sorted(following.poll()) == ["2", "3"]


class RotatingAtALook(LocalFiles):
    """Renames files when one of them has just been found in its place."""

    trigger: Path | None = None

    def stat(self, path: str) -> Status:
        found = super().stat(path)
        if self.trigger == Path(path):
            log, self.trigger = self.trigger.with_suffix(""), None
            log.with_name("app.log.1").rename(log.with_name("app.log.2"))
            log.rename(log.with_name("app.log.1"))
        return found


@pytest.mark.parametrize("is_alone", [False, True])
def test_files_that_are_rotated_while_a_start_looks_for_them_are_found(tmp_path: Path, is_alone: bool) -> None:
    log, system = tmp_path / "app.log", RotatingAtALook()
    append(log, "1")
    following = Following(log if is_alone else tmp_path, 1, system=system)
    assert following.poll() == ["1"]
    log.rename(tmp_path / "app.log.1")
    append(log, "2")
    assert following.poll() == ["2"]
    positions = dict(sorted(following.positions().items(), reverse=True))
    append(tmp_path / "app.log.1", "3")
    append(log, "4")
    system.trigger = tmp_path / "app.log.1"
    following.start(1, positions)
    append(log, "5")
    assert sorted(following.poll()) == ["3", "4", "5"]
    assert following.bad == []


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("names", [("app.log-20260101", "app.log-20260102"), ("app.log.1", "app.log.0")])
def test_a_file_that_was_made_and_rotated_between_two_looks_is_read(
    tmp_path: Path, names: tuple[str, str], is_restarted: bool
) -> None:  # by its name alone; what was rotated first stays where it is
    log = tmp_path / "app.log"
    append(tmp_path / "app.log.7", "0")  # of before anybody followed it
    os.utime(tmp_path / "app.log.7", (1_000, 1_000))
    append(log, "1")
    following = Following(log, 2)
    assert following.poll() == ["1"]
    log.rename(tmp_path / names[0])
    assert following.poll() == []
    append(log, "2")
    log.rename(tmp_path / names[1])
    append(log, "3")
    if is_restarted:
        following.restart()
    assert sorted(following.poll()) == ["2", "3"]
    following.restart(3)
    assert following.poll() == []


def test_a_removed_file_that_is_put_back_under_another_name_is_read_on(tmp_path: Path) -> None:
    log, aside = tmp_path / "app.log", tmp_path.parent / f"aside-{tmp_path.name}"
    append(log, "1")
    following = Following(log, 1)
    following.poll()
    log.rename(tmp_path / "app.log.1")
    following.poll()
    (tmp_path / "app.log.1").rename(aside)
    append(log, "2")
    assert following.poll() == ["2"]
    append(aside, "3")
    aside.rename(tmp_path / "app.log.5")
    following.restart(1)
    assert following.poll() == ["3"]


class Reusing(LocalFiles):
    """Has a file whose inode another one had that was removed."""

    def __init__(self) -> None:
        self.inodes: dict[int, int] = {}

    def _as_shown(self, status: Status) -> Status:
        inode = self.inodes.get(status.st_ino, status.st_ino)
        return cast(
            Status, SimpleNamespace(st_ino=inode, st_dev=1, st_size=status.st_size, st_mtime_ns=status.st_mtime_ns)
        )

    def stat(self, path: str) -> Status:
        return self._as_shown(super().stat(path))

    def fstat(self, descriptor: int) -> Status:
        return self._as_shown(super().fstat(descriptor))

    def siblings(self, path: str) -> list[tuple[str, int]]:
        return [(other, self.inodes.get(inode, inode)) for other, inode in super().siblings(path)]


@pytest.mark.parametrize("first", ["1\n", ""])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_file_between_two_looks_may_have_the_inode_of_one_that_was_removed(
    tmp_path: Path, first: str, is_restarted: bool
) -> None:
    log, system = tmp_path / "app.log", Reusing()
    log.write_text(first)
    freed = log.stat().st_ino
    following = Following(log, 1, system=system)
    following.poll()
    log.rename(tmp_path / "app.log-20260101")
    following.poll()
    (tmp_path / "app.log-20260101").rename(tmp_path.parent / f"aside-{tmp_path.name}")
    append(log, "2")
    assert following.poll() == ["2"]
    log.rename(tmp_path / "app.log-20260102")
    append(log, "3")
    system.inodes[log.stat().st_ino] = freed
    log.rename(tmp_path / "app.log-20260103")
    append(log, "4")
    if is_restarted:
        following.restart(1)
    assert sorted(following.poll()) == ["3", "4"]


def test_a_file_may_have_the_inode_of_an_empty_one_that_another_subtask_had(tmp_path: Path) -> None:
    names = {owner_of_file(f"{letter}.log", 2): tmp_path / f"{letter}.log" for letter in "abcdefgh"}
    gone, there, system = names[0], names[1], Reusing()
    append(tmp_path / "z.log", "0")
    gone.touch()
    freed = gone.stat().st_ino
    following = Following(tmp_path, 2, system=system)
    assert following.poll() == ["0"]
    gone.rename(tmp_path.parent / f"aside-{tmp_path.name}")
    following.poll()
    append(there, "1")
    system.inodes[there.stat().st_ino] = freed
    following.restart(2)
    assert following.poll() == ["1"]


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_file_between_two_looks_may_have_the_name_of_one_that_was_removed(tmp_path: Path, is_restarted: bool) -> None:
    log, rotated = tmp_path / "app.log", [tmp_path / "app.log.1", tmp_path / "app.log.2"]
    append(log, "1")
    following = Following(log, 1)
    following.poll()
    log.rename(rotated[0])
    following.poll()
    rotated[0].unlink()
    append(log, "2")
    assert following.poll() == ["2"]
    log.rename(rotated[1])
    append(log, "3")
    log.rename(rotated[0])
    append(log, "4")
    if is_restarted:
        following.restart(1)
    assert sorted(following.poll()) == ["3", "4"]


@pytest.mark.parametrize("pattern", ["", "app.log*", "app.log"])
def test_a_file_that_is_renamed_to_the_name_of_one_that_was_removed_is_read_on(tmp_path: Path, pattern: str) -> None:
    # as numbered rotation does that keeps one file
    log, rotated = tmp_path / "app.log", tmp_path / "app.log.1"
    append(log, "0")
    following = Following(tmp_path / pattern)
    assert following.poll() == ["0"]
    for number in range(1, 6):
        append(log, f"{number}a")
        assert following.poll() == [f"{number}a"]
        rotated.unlink(missing_ok=True)
        following.poll()
        append(log, f"{number}b")
        log.rename(rotated)
        assert following.poll() == [f"{number}b"]
        append(log, f"{number}c")
        assert following.poll() == [f"{number}c"]
    following.restart(3)
    assert following.poll() == []


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_a_file_that_is_renamed_may_have_the_inode_of_one_that_was_removed(tmp_path: Path, names: str) -> None:
    # whoever owns its new name knows it by what was read of it, not by what was read of the removed one
    gone, there, system = tmp_path / f"{names[0]}.log", tmp_path / f"{names[1]}.log", Reusing()
    append(gone, "0")
    freed = gone.stat().st_ino
    following = Following(tmp_path, 3, system=system)
    assert following.poll() == ["0"]
    gone.rename(tmp_path.parent / f"aside-{tmp_path.name}-{names}")
    following.poll()
    append(there, "1")
    system.inodes[there.stat().st_ino] = freed
    assert following.poll() == ["1"]
    for number in range(8):
        now = tmp_path / f"other{number}x.log"
        there.rename(now)
        there = now
        positions = following.positions()
        for order in (False, True):
            following.start(3, dict(sorted(positions.items(), reverse=order)))
            assert following.poll() == []
