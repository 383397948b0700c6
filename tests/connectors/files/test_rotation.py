"""Files that are renamed, made anew, replaced and truncated: real ones, while reading and between starts."""

from __future__ import annotations

import gzip
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import few
from tests.connectors.files.following import Following, Meddling, append, assert_each_once, rotate
from tests.connectors.source_reading import context, read_all

from headgate.connectors.files.file_position import FilePosition
from headgate.connectors.files.filesystem import LocalFiles
from headgate.connectors.files.line_source import FileReader, TextFiles
from headgate.connectors.files.selection import numbered_files, owner_of_file, series_of
from headgate.errors import UsageError


@pytest.fixture(params=["app.log", "app.log*", ""])
def paths(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """What is followed: the file alone, all files of its series, or the directory."""
    return tmp_path / request.param


@pytest.fixture(params=[None, 1, 2, 3])
def go_on(request: pytest.FixtureRequest) -> Callable[[Following], None]:
    """What happens after a rotation: reading goes on, or the pipeline starts again, perhaps with more subtasks."""
    return lambda following: None if request.param is None else following.restart(request.param)


Next = Callable[[Following], None]


def test_a_renamed_file_is_read_to_its_end_and_the_new_one_from_its_start(
    paths: Path, tmp_path: Path, go_on: Next
) -> None:
    log = tmp_path / "app.log"
    append(log, "1", "2")
    following = Following(paths)
    assert following.poll() == ["1", "2"]
    append(log, "3")
    log.rename(tmp_path / "app.log.1")
    append(tmp_path / "app.log.1", "4")
    append(log, "5")
    go_on(following)
    assert sorted(following.poll()) == ["3", "4", "5"]
    append(tmp_path / "app.log.1", "6")  # a writer that has not noticed yet
    append(log, "7")
    assert sorted(following.poll()) == ["6", "7"]
    following.restart()
    assert following.poll() == []


def test_several_rotations_in_a_row_lose_nothing(paths: Path, tmp_path: Path, go_on: Next) -> None:
    log = tmp_path / "app.log"
    append(log, "0")
    following = Following(paths)
    assert following.poll() == ["0"]
    for number in range(1, 7):
        append(log, f"{number}a")
        for old in range(5, 0, -1):
            if (tmp_path / f"app.log.{old}").exists():
                (tmp_path / f"app.log.{old}").rename(tmp_path / f"app.log.{old + 1}")
        log.rename(tmp_path / "app.log.1")
        append(log, f"{number}b")
    go_on(following)
    assert sorted(following.poll(40)) == sorted(f"{n}{x}" for n in range(1, 7) for x in "ab")
    following.restart()
    assert following.poll() == []


@pytest.mark.parametrize("name", ["app.log-20260131", "app.log.2026-01-31_10", "app.log.old", "other"])
def test_other_names_of_rotation_are_followed(tmp_path: Path, name: str, go_on: Next) -> None:
    log = tmp_path / "app.log"
    append(log, "1")
    following = Following(tmp_path, 3)
    assert following.poll() == ["1"]
    append(log, "2")
    log.rename(tmp_path / name)
    append(log, "3")
    go_on(following)
    assert sorted(following.poll()) == ["2", "3"]
    following.restart()
    assert following.poll() == []


def test_files_of_a_series_have_one_owner() -> None:
    rotated = ["app.log.1", "app.log.12", "app.log-20260131", "app.log.2026-01-31_10-00-00", "app.log.old", "app.log-1"]
    assert {series_of(f"d/{name}") for name in rotated} == {"d/app.log"}
    for name in ("a.json", "part-00000-c000.json", "2026-01-31", "1", "x1.log", "d.1/x"):
        assert series_of(name) == name
    assert {owner_of_file(f"d/{name}", 7) for name in rotated} == {owner_of_file("d/app.log", 7)}


def test_files_that_begin_alike_are_told_apart_by_their_inodes(paths: Path, tmp_path: Path, go_on: Next) -> None:
    # the same heartbeat line again and again
    log = tmp_path / "app.log"
    append(log, *["tick"] * 200)
    following = Following(paths)
    assert len(following.poll()) == 200
    log.rename(tmp_path / "app.log.1")
    append(log, *["tick"] * 300)
    go_on(following)
    assert len(following.poll()) == 300


def test_a_file_that_was_removed_and_made_anew_is_read_from_its_start(tmp_path: Path) -> None:
    log = tmp_path / "app.log"
    append(log, "1")
    keep = tmp_path / "keep"
    append(keep, "k")
    following = Following(tmp_path)
    assert sorted(following.poll()) == ["1", "k"]
    log.unlink()
    assert following.poll() == []
    append(log, "2", "3")
    assert following.poll() == ["2", "3"]
    log.rename(tmp_path.parent / "aside")
    following.poll()
    (tmp_path.parent / "aside").rename(log)
    assert following.poll() == [], "put back"
    append(log, "4")
    assert following.poll() == ["4"]


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_longer_copy_may_take_the_place_of_a_file(tmp_path: Path, is_restarted: bool) -> None:  # as rsync does
    log = tmp_path / "app.log"
    append(log, "1")
    following = Following(tmp_path, 3)
    following.poll()
    for number in range(2, 6):
        shutil.copy(log, tmp_path / ".copy")
        append(tmp_path / ".copy", str(number))
        os.replace(tmp_path / ".copy", log)
        if is_restarted:
            following.restart(number)
        assert following.poll() == [str(number)]


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("size", ["shorter", "longer", "equal"])
def test_a_file_that_was_truncated_in_place_is_refused_by_name(tmp_path: Path, size: str, is_restarted: bool) -> None:
    log = tmp_path / "app.log"
    append(log, *(f"line {number}" for number in range(3_000)))
    length = log.stat().st_size
    following = Following(tmp_path)
    following.poll()
    head = log.read_bytes()[:1_200]
    other = {"shorter": b"", "longer": b"y" * length + b"\n", "equal": b"y" * (length - 1_201) + b"\n"}[size]
    with log.open("r+b") as file:
        file.truncate(0)
        file.write(head + other)
    if is_restarted:
        following.restart()
    with pytest.raises(UsageError, match=r"app\.log .* it was truncated or replaced; .* Rotate by renaming"):
        following.poll()


def test_a_truncated_file_that_was_read_in_the_middle_of_a_line_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "app.log"
    log.write_bytes(b"one\nhalf")
    following = Following(tmp_path)
    assert following.poll() == ["one"]
    with log.open("r+b") as file:
        file.write(b"one\nHALF a line\n")
    with pytest.raises(UsageError, match="does not have the bytes before byte 8 any more"):
        following.poll()


def test_what_may_have_been_lost_unseen_is_a_bad_record(tmp_path: Path) -> None:  # N21
    log = tmp_path / "app.log"
    append(log, "1")
    following = Following(tmp_path)
    following.poll()
    rotated = tmp_path / "app.log.1"
    append(log, "nobody sees this")
    log.rename(rotated)
    (tmp_path / "app.log.1.gz").write_bytes(gzip.compress(rotated.read_bytes()))
    append(tmp_path / "_new", "2")  # while the inode is in use: it has another one
    rotated.unlink()
    (tmp_path / "x").write_text("takes the inode\n")
    (tmp_path / "_new").rename(log)
    following.restart()
    assert sorted(following.poll()) == ["2", "takes the inode"]
    assert [(bad["problem"], bad["position"]) for bad in following.bad] == [
        (
            "it was replaced between two looks; lines that were appended to it last may not have been read",
            f"{log} line 2 (byte 2)",
        )
    ]


def test_a_file_that_vanished_with_unread_bytes_is_an_error(tmp_path: Path) -> None:
    log = tmp_path / "app.log"
    log.write_bytes(b"one\nhalf a line")
    following = Following(tmp_path)
    following.poll()
    log.unlink()
    with pytest.raises(UsageError, match=r"app\.log was removed or replaced when 4 of its 15 bytes were read"):
        following.start(1, {str(log): FilePosition(4, 15, inode=7).encode()})


def test_compressed_files_of_a_followed_directory_are_skipped(tmp_path: Path) -> None:
    append(tmp_path / "app.log", "1")
    (tmp_path / "app.log.1.gz").write_bytes(gzip.compress(b"0\n"))
    following = Following(tmp_path)
    assert following.poll() == ["1"]
    (tmp_path / "app.log.2.gz").write_bytes(gzip.compress(b"0\n"))
    assert following.poll() == []


def test_a_link_to_a_listed_file_is_not_read_again(tmp_path: Path) -> None:
    append(tmp_path / "a.log", "1")
    (tmp_path / "latest.log").symlink_to(tmp_path / "a.log")
    for follow in (True, False):
        assert Following(tmp_path, follow=follow).poll() == ["1"]


def test_a_rotated_file_that_was_read_does_not_hold_event_time_back(tmp_path: Path) -> None:
    log = tmp_path / "app.log"
    append(log, "1")
    following = Following(tmp_path, 1)
    following.poll()
    log.rename(tmp_path / "app.log.1")
    append(log, "2")
    following.poll()
    assert list(following.readers[0].splits()) == [str(log)]
    append(tmp_path / "app.log.1", "late")
    assert following.poll() == ["late"]


@pytest.mark.long
@pytest.mark.parametrize("seed", few(range(25), 8))
def test_any_history_of_rotations_and_restarts_delivers_every_line_once(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    names = ["a.log", "b.log", "sub/c.log"]
    (tmp_path / "sub").mkdir()
    following = Following(tmp_path, dice.randint(1, 3))
    written = 0
    for _ in range(60):
        log = tmp_path / dice.choice(names)
        action = dice.random()
        if action < 0.5:
            for _ in range(dice.randint(1, 4)):
                append(log, f"{log.name} {written}")
                written += 1
        elif action < 0.7 and log.exists():
            rotate(log, count=30)
        elif action < 0.8:
            following.restart(dice.randint(1, 3))
        else:
            following.poll(dice.randint(1, 3))
    following.poll(300)
    assert_each_once(following, written)


# -- fixed lists ----------------------------------------------------------------------------------------------------


def read_partly(source: TextFiles, parallelism: int, polls: int) -> dict[str, bytes]:
    source.schema()
    positions: dict[str, bytes] = {}
    for index in range(parallelism):
        reader = source.open(context(index, parallelism))
        for _ in range(polls):
            reader.poll()
        positions |= reader.positions()
    return positions


def read_rest(paths: Any, parallelism: int, positions: dict[str, bytes]) -> list[object]:
    source = TextFiles(paths)
    source.schema()
    readers = [source.open(context(index, parallelism, positions)) for index in range(parallelism)]
    return sorted(row["line"] for reader in readers for row in read_all(reader)[0])


def test_a_file_keeps_its_number_when_the_list_grows() -> None:
    first = numbered_files(["b", "d"], {})
    assert first == {"b": 0, "d": 1}
    second = numbered_files(["a", "b", "c", "d"], dict(first))
    assert second == {"b": 0, "d": 1, "a": 2, "c": 3}
    assert numbered_files(["d", "e"], dict(second)) == {**second, "e": 4}
    assert numbered_files(["a", "b"], {"b": None, "c": None}) == {"b": 0, "c": 1, "a": 2}, "their numbers are not known"


@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_between_two_starts_files_may_be_added_renamed_and_grow(tmp_path: Path, parallelism: int) -> None:
    for name in ("a", "b", "c"):
        append(tmp_path / name, f"{name}1")
    positions = read_partly(TextFiles(tmp_path), 2, 10)
    append(tmp_path / "a", "a2")
    (tmp_path / "b").rename(tmp_path / "moved")
    (tmp_path / "c").unlink()
    append(tmp_path / "0", "new")
    assert read_rest(tmp_path, parallelism, positions) == ["a2", "new"]


@pytest.mark.parametrize("parallelism", [1, 2, 3])
@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("others", [0, 1, 2])
def test_a_file_of_which_nothing_was_read_is_read_once_when_it_is_renamed(
    tmp_path: Path, parallelism: int, grows: bool, others: int
) -> None:
    """No content says that it is the same file, so whoever owns its name of today reads it."""
    (tmp_path / "empty").touch()
    for number in range(others):
        append(tmp_path / f"file{number}", f"line {number}")
    positions = read_partly(TextFiles(tmp_path), 2, 10)
    (tmp_path / "empty").rename(tmp_path / "moved")
    if grows:
        append(tmp_path / "moved", "late")
    fixed = Following(tmp_path, follow=False)
    fixed.start(parallelism, positions)
    assert fixed.poll() == (["late"] if grows else [])
    assert str(tmp_path / "moved") in fixed.positions()
    fixed.restart(3)
    assert fixed.poll() == []


@pytest.mark.parametrize("parallelism", [1, 2, 3])
@pytest.mark.parametrize("polls", [0, 1, 10])
def test_files_that_nobody_had_begun_may_be_renamed_between_two_starts(
    tmp_path: Path, parallelism: int, polls: int
) -> None:
    for name in "abcd":
        append(tmp_path / name, name)
    source = TextFiles(tmp_path)
    source.schema()
    readers = [source.open(context(index, 2)) for index in range(2)]
    for _ in range(polls):
        readers[0].poll()
    for name in "abcd":
        (tmp_path / name).rename(tmp_path / f"moved {name}")
    fixed = Following(tmp_path, follow=False)
    fixed.start(parallelism, readers[0].positions() | readers[1].positions())
    fixed.poll()
    assert sorted(fixed.found) == {0: list("abcd"), 1: list("bcd"), 10: list("bd")}[polls]
    fixed.restart(3)
    assert fixed.poll() == []


@pytest.mark.parametrize("name", ["moved", "other", "third", "fourth"])
def test_a_followed_file_of_which_nothing_was_read_has_one_owner_after_a_start(tmp_path: Path, name: str) -> None:
    following = Following(tmp_path)  # names with different owners
    (tmp_path / "empty").touch()
    following.poll()
    positions = following.positions()
    (tmp_path / "empty").rename(tmp_path / name)
    append(tmp_path / name, "late")
    following.start(2, positions)
    assert following.poll() == ["late"]
    following.restart(3)
    assert following.poll() == []


def test_an_unread_file_of_another_directory_is_read(tmp_path: Path) -> None:  # its owner does not look there
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "in" / "empty").touch()
    append(tmp_path / "in" / "full", "one")
    paths = [tmp_path / "in", tmp_path / "out"]
    source = TextFiles(paths)
    positions = read_partly(source, 1, 10)
    (tmp_path / "in" / "empty").rename(tmp_path / "out" / "moved")
    append(tmp_path / "out" / "moved", "late")
    assert read_rest(paths, 3, positions) == ["late"]


def test_a_finished_file_that_was_changed_is_refused(tmp_path: Path) -> None:
    append(tmp_path / "a", "one", "two")
    positions = read_partly(TextFiles(tmp_path), 1, 10)
    (tmp_path / "a").write_text("ONE\ntwo\nthree\n")
    with pytest.raises(UsageError, match="does not begin as it did"):
        read_rest(tmp_path, 1, positions)


def test_a_finished_file_whose_last_line_had_no_end_must_not_grow(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one\ntw")
    positions = read_partly(TextFiles(tmp_path), 1, 10)
    assert read_rest(tmp_path, 1, positions) == []
    (tmp_path / "a").write_text("one\ntwo\n")
    with pytest.raises(UsageError, match=r"a has grown since its last line, which had no line end"):
        read_rest(tmp_path, 1, positions)


def test_the_same_files_by_a_link_to_their_directory_are_not_read_again(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    append(tmp_path / "in" / "a", "one")
    positions = read_partly(TextFiles(tmp_path / "in"), 1, 10)
    (tmp_path / "link").symlink_to(tmp_path / "in")
    assert read_rest(tmp_path / "link", 2, positions) == []


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_bad_line_has_its_number_in_its_own_file_after_a_rotation(tmp_path: Path, is_restarted: bool) -> None:
    log = tmp_path / "app.log"
    append(log, "one", "two")
    following = Following(tmp_path)
    assert following.poll() == ["one", "two"]
    rotated = tmp_path / "app.log.1"
    log.rename(rotated)
    for path, good in ((rotated, "three"), (log, "a")):
        append(path, good)
        with path.open("ab") as file:
            file.write(b"\xff\n")
    if is_restarted:
        following.restart()
    assert sorted(following.poll()) == ["a", "three"]
    places = sorted(str(bad["position"]) for bad in following.bad)
    assert places == [f"{log} line 2 (byte 2)", f"{rotated} line 4 (byte 14)"]


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
