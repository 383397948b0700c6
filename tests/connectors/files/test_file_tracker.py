"""Followed files while the world changes between any two looks at it: a file system that acts in between."""

from __future__ import annotations

import errno
import gzip
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import few
from tests.connectors.files.following import Following, Meddling, append, assert_each_once, rotate, source_of

from headgate.connectors.files.file_position import FilePosition, OlderFile
from headgate.connectors.files.filesystem import LOCAL, FileSystem, LocalFiles
from headgate.connectors.files.rotation import OlderFiles, seen_at
from headgate.errors import CorruptionError, StorageError, UsageError

REPLACED = "it was replaced between two looks; lines that were appended to it last may not have been read"


def once(when: dict[str, Callable[[str], object]], name: str, act: Callable[[], object]) -> None:
    """Have ``act`` happen at the next call of ``name``."""

    def acting(path: str) -> None:
        del when[name]
        act()

    when[name] = acting


def following(paths: object, system: FileSystem = LOCAL, parallelism: int = 2) -> Following:
    return Following(paths, parallelism, system=system)


def compress(path: Path) -> None:
    Path(f"{path}.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()


# -- what is not there just now ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["app.log", "app.log*", ""])
def test_a_followed_path_is_awaited_while_it_is_missing(tmp_path: Path, name: str) -> None:
    (tmp_path / "in").mkdir()
    log = tmp_path / "in" / "app.log"
    append(log, "1")
    reading = following(tmp_path / "in" / name)
    assert reading.poll() == ["1"]
    append(log, "2")
    rotate(log)
    assert reading.poll() == ["2"]
    append(log, "3")
    assert reading.poll() == ["3"]
    log.unlink()
    Path(f"{log}.1").unlink()
    (tmp_path / "in").rmdir()
    assert reading.poll() == []
    (tmp_path / "in").mkdir()
    append(log, "4")
    assert reading.poll() == ["4"]
    assert reading.bad == []


@pytest.mark.parametrize("is_compressed", [False, True])
def test_a_start_in_the_gap_of_a_rotation_awaits_the_file(tmp_path: Path, is_compressed: bool) -> None:
    log = tmp_path / "app.log"
    append(log, "1")
    reading = following(log)
    assert reading.poll() == ["1"]
    append(log, "2")
    reading.poll()
    rotate(log)
    reading.poll()
    if is_compressed:
        compress(tmp_path / "app.log.1")
    reading.restart()
    assert reading.poll() == []
    append(log, "3")
    assert reading.poll() == ["3"]
    assert reading.bad == []


def test_a_start_with_a_path_that_was_never_there_is_refused(tmp_path: Path) -> None:
    append(tmp_path / "app.log.1", "1")
    for follow, name in ((True, "ap.log"), (True, "log"), (False, "app.log")):
        with pytest.raises(UsageError, match="does not exist; give a file, a directory or a glob that does"):
            source_of(tmp_path / name, LOCAL, follow=follow).schema()
    source_of(tmp_path / "app.log", LOCAL).schema()


@pytest.mark.parametrize("follow", [False, True])
def test_a_file_that_goes_while_files_are_listed_is_not_there(tmp_path: Path, follow: bool) -> None:
    append(tmp_path / "a", "1")
    append(tmp_path / "b", "2")
    system = Meddling()
    once(system.before, "may_read", (tmp_path / "b").unlink)
    source = source_of(tmp_path, system, follow=follow)
    source.schema()
    assert source._files == (str(tmp_path / "a"),)


def test_a_directory_that_goes_while_it_is_listed_has_nothing(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / "in" / name).mkdir(parents=True)
    append(tmp_path / "in" / "c" / "x", "1")
    scandir, going = os.scandir, [tmp_path / "in" / "b", tmp_path / "in" / "a"]

    def scanning(path: Any) -> Any:
        if going and str(path) == str(going[-1]):
            going.pop().rmdir()
        return scandir(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "scandir", scanning)
        assert list(LOCAL.below(str(tmp_path / "in"), "**/x")) == [str(tmp_path / "in" / "c" / "x")]
    assert not going
    system = Meddling()
    append(tmp_path / "other", "2")
    reading = following([tmp_path / "in", tmp_path / "other"], system)
    assert sorted(reading.poll()) == ["1", "2"]
    once(system.before, "may_list", lambda: (tmp_path / "in").rename(tmp_path / "aside"))
    append(tmp_path / "other", "3")
    assert reading.poll() == ["3"]


def test_directories_that_never_stand_still_are_an_error_that_may_pass(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()

    def scanning(path: Any) -> Any:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "scandir", scanning)
        if not isinstance(_outcome(lambda: list(Path(tmp_path).glob("**/*"))), Exception):
            pytest.skip("this Python's glob passes over what goes")
        with pytest.raises(StorageError, match="come and go all the time"):
            LOCAL.below(str(tmp_path), "**/*")


def _outcome(act: Callable[[], object]) -> object:
    try:
        return act()
    except Exception as error:
        return error


class Forbidding(LocalFiles):
    """Some files may not be read, even by root."""

    def __init__(self) -> None:
        self.forbidden: set[str] = set()

    def may_read(self, path: str) -> bool:
        return path not in self.forbidden and super().may_read(path)

    def opened(self, path: str) -> Any:
        if path in self.forbidden:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return super().opened(path)


@pytest.mark.parametrize("name", ["app.log", ""])
def test_a_file_that_may_not_be_read_for_a_moment_is_awaited(tmp_path: Path, name: str) -> None:
    log, system = tmp_path / "app.log", Forbidding()
    append(log, "1")
    reading = following(tmp_path / name, system)
    assert reading.poll() == ["1"]
    rotate(log)
    reading.poll()
    append(log, "2")
    system.forbidden = {str(log)}  # as logrotate makes it before it has its owner and mode
    reading.poll(2)
    system.forbidden = set()
    assert reading.poll() == ["2"]
    append(tmp_path / "app.log.9", "3")
    system.forbidden = {f"{log}.9", f"{log}.10"}
    if not name:
        with pytest.raises(UsageError, match=r"app\.log\.9 cannot be read; allow this user to read it"):
            reading.poll(8)
    else:
        assert reading.poll(8) == [], "it is not selected"
        rotate(log)
        append(log, "4")
        assert reading.poll() == ["4"]


def test_a_half_read_file_that_is_missing_for_a_moment_is_read_on(tmp_path: Path) -> None:
    log = tmp_path / "app.log"
    append(log, "1")
    with log.open("a") as file:
        file.write("half")
    reading = following(log)
    assert reading.poll() == ["1"]
    aside = tmp_path.parent / f"{tmp_path.name}-aside"
    for reader in reading.readers:
        for each in reader._tracker.files.values():
            each._seen_bytes += 3  # it had more when it was last looked at
    with log.open("a") as file:
        file.write(" a line\n")
    log.rename(aside)
    reading.poll(2)
    aside.rename(log)
    assert reading.poll() == ["half a line"]
    for reader in reading.readers:
        for each in reader._tracker.files.values():
            each._seen_bytes += 3
    log.unlink()
    with pytest.raises(UsageError, match=r"app\.log was removed or replaced when"):
        reading.poll(8)


# -- where a file went -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["app.log", "app.log*", ""])
def test_a_file_that_is_renamed_on_while_it_is_looked_for_is_found(tmp_path: Path, name: str) -> None:
    log, system = tmp_path / "app.log", Meddling()
    append(log, "1")
    reading = following(tmp_path / name, system)
    assert reading.poll() == ["1"]
    append(log, "2")
    rotate(log)
    append(log, "3")

    def rotating() -> None:
        rotate(log)
        append(log, "4")

    if name:
        once(system.after, "siblings", rotating)
    else:
        once(system.before, "opened", rotating)
    assert sorted(reading.poll()) == ["2", "3", "4"]
    assert not system.after
    assert not system.before
    rotate(log)
    append(log, "5")

    def rotating_again(path: str) -> None:
        if Path(path).name == "app.log.3":  # where the first one was just seen
            system.before.pop("opened")
            rotate(log)

    system.before["opened"] = rotating_again
    assert sorted(reading.poll()) == ["5"]
    reading.restart()
    assert reading.poll() == []
    assert reading.bad == []


@pytest.mark.parametrize("call", ["siblings", "opened", "stat"])
def test_a_failure_to_look_is_not_taken_for_a_removal(tmp_path: Path, call: str) -> None:
    log, system = tmp_path / "app.log", Meddling()
    append(log, "1")
    reading = following(log, system, 1)
    assert reading.poll() == ["1"]
    positions = reading.positions()
    append(log, "2")
    rotate(log)

    def failing(path: str) -> None:
        if call == "siblings" or path != str(log):
            system.before.pop(call)
            raise OSError(errno.EMFILE, "Too many open files", path)

    system.before[call] = failing
    if call == "stat":
        append(log, "3")
        positions = {str(tmp_path / "app.log"): positions[str(log)]}
        system.before[call] = lambda path: failing("")
    with pytest.raises(StorageError, match="Too many open files"):
        reading.poll()
    system.before.clear()
    reading.start(2, positions)
    assert sorted(reading.poll()) == (["2", "3"] if call == "stat" else ["2"])
    assert reading.bad == []


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_file_that_gets_the_name_of_a_removed_one_is_read_on(tmp_path: Path, is_restarted: bool) -> None:
    # logrotate with "rotate 2"
    log = tmp_path / "app.log"
    append(log, "0")
    reading = following(tmp_path)
    assert reading.poll() == ["0"]
    for number in range(1, 7):
        Path(f"{log}.2").unlink(missing_ok=True)
        if number % 2:
            reading.poll()
        append(log, str(number))
        rotate(log)
        append(log, f"{number} and")
        if is_restarted:
            reading.restart(number % 3 + 1)
        assert sorted(reading.poll()) == sorted([str(number), f"{number} and"])
    aside = tmp_path.parent / f"{tmp_path.name}-aside"
    log.rename(aside)
    assert reading.poll() == []
    append(aside, "late")
    aside.rename(tmp_path / "app.log.7")
    assert reading.poll() == ["late"], "it was put back under another name"
    assert reading.bad == []


# -- what was rotated away unseen --------------------------------------------------------------------------------------


def numbers_down(log: Path, number: int) -> None:
    rotate(log, count=99)


def numbers_up(log: Path, number: int) -> None:
    log.rename(f"{log}.{number}")


def dates(log: Path, number: int) -> None:
    log.rename(f"{log}-{20260131 - number}")  # the clock is set back each time


SCHEMES = [numbers_down, numbers_up, dates]


def following_after_rotations(log: Path, scheme: Callable[[Path, int], None]) -> Following:
    """Follow a file that was rotated three times before; its first line was read."""
    for number in range(1, 4):
        append(log, f"long ago {number}")
        scheme(log, number)
    append(log, "1")
    reading = following(log)
    assert reading.poll() == ["1"]
    return reading


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("order", ["falling", "rising", "equal"])
def test_what_was_rotated_away_unseen_is_read_whatever_dates_and_numbers_say(
    tmp_path: Path, scheme: Callable[[Path, int], None], order: str, is_restarted: bool
) -> None:
    log = tmp_path / "app.log"
    reading = following_after_rotations(log, scheme)
    for number in range(4, 8):
        append(log, f"{number}")
        scheme(log, number)
    append(log, "8")
    for index, path in enumerate(sorted(tmp_path.iterdir(), key=Path.read_text)):  # what is no input comes last
        at = {"falling": 1_000 - index, "rising": 1_000 + index, "equal": 1_000}[order]
        os.utime(path, (at, at))
    if is_restarted:
        reading.restart(3)
    assert sorted(reading.poll(20)) == ["4", "5", "6", "7", "8"]
    reading.restart()
    assert reading.poll() == []
    assert reading.bad == []


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_lay_beside_a_followed_file_before_is_no_input(
    tmp_path: Path, scheme: Callable[[Path, int], None], is_restarted: bool
) -> None:
    log = tmp_path / "app.log"
    reading = following_after_rotations(log, scheme)
    for number in range(4, 7):
        for path in tmp_path.glob("app.log?*"):
            if "long ago" in path.read_text():
                append(path, "and written again by somebody who has it open")
                os.utime(path, (2_000_000_000, 2_000_000_000))  # later than anything else, whatever clocks can tell
        append(log, str(number))
        scheme(log, number)
        append(log, f"and {number}")
        if is_restarted:
            reading.restart(number % 3 + 1)
        assert sorted(reading.poll()) == sorted([str(number), f"and {number}"])
    assert reading.bad == []


def test_what_is_put_beside_a_file_in_its_place_is_no_input(tmp_path: Path) -> None:
    log = tmp_path / "app.log"
    append(log, "1")
    reading = following(log)
    assert reading.poll() == ["1"]
    append(tmp_path / "app.log.7", "unpacked")
    assert reading.poll() == []
    append(log, "2")
    rotate(log)
    append(log, "3")
    assert sorted(reading.poll()) == ["2", "3"]


def test_a_file_rotated_away_before_it_was_ever_seen_is_read(tmp_path: Path) -> None:
    append(tmp_path / "app.log.1", "long ago")
    log = tmp_path / "app.log"
    reading = following(log)
    assert reading.poll() == []
    append(log, "1")
    rotate(log)
    append(log, "2")
    assert sorted(reading.poll()) == ["1", "2"]


@pytest.mark.long
def test_rotations_while_a_rotation_is_noticed_lose_nothing(tmp_path: Path) -> None:
    log, system = tmp_path / "app.log", Meddling()
    append(log, "0")
    reading = following(log, system, 1)
    assert reading.poll() == ["0"]
    for number in range(1, 14):
        append(log, f"{number}")
        rotate(log, count=99)
        append(log, f"{number} and")

        def rotating(number: int = number) -> None:
            rotate(log, count=99)
            append(log, f"{number} unseen")
            rotate(log, count=99)
            append(log, f"{number} last")

        once(system.after if number % 2 else system.before, ["siblings", "opened", "stat"][number % 3], rotating)
        if number % 2:
            once(system.after, "siblings", rotating)
            system.after.pop("opened", None)
            system.after.pop("stat", None)
        assert sorted(reading.poll(16)) == sorted([str(number), *(f"{number} {x}" for x in ("and", "unseen", "last"))])
    assert reading.bad == []


def test_an_inode_alone_does_not_make_a_file_an_older_one(tmp_path: Path) -> None:
    append(tmp_path / "app.log.1", "1")
    (tmp_path / "app.log.2").touch()
    found = LOCAL.siblings(str(tmp_path / "app.log.1"))
    series = str(tmp_path / "app.log")

    def unknown(**changes: int) -> list[str]:
        older = OlderFiles(LOCAL)
        for path, _ in found:
            seen = seen_at(path, LOCAL)
            assert seen is not None
            older.restore(series, [OlderFile(**{name: getattr(seen, name) for name in seen.__slots__} | changes)])
        return [Path(path).name for path, _ in older.missed(series, found)]

    assert unknown() == []
    assert unknown(head_digest=7) == ["app.log.1", "app.log.2"]
    assert "app.log.1" in unknown(size_bytes=100)
    append(tmp_path / "app.log.1", "2")
    assert unknown() == []
    assert unknown(inode=7) == ["app.log.1", "app.log.2"]


def test_a_position_says_which_files_of_its_series_are_no_input(tmp_path: Path) -> None:
    position = FilePosition(3, 4, 2, 5, True, 6, 7, 8, 9, 10, lines=11)
    for older in (None, (), (OlderFile(1, 2, 3), OlderFile(4, 5, 6))):
        whole = replace(position, older=older, is_settled=older is not None)
        assert FilePosition.decode("x", whole.encode()) == whole
        assert len(whole.encode()) == (66 if older is None else 67 + 24 * len(older))
    with pytest.raises(CorruptionError, match="position of x"):
        FilePosition.decode("x", whole.encode()[:-1])
    log = tmp_path / "app.log"
    append(tmp_path / "app.log.1", "0")
    append(log, "1")
    reading = following(log)
    reading.poll()
    assert len(FilePosition.decode("x", reading.positions()[str(log)]).older or ()) == 1
    whole_directory = following(tmp_path)
    whole_directory.poll()
    older = {FilePosition.decode("x", each).older for each in whole_directory.positions().values()}
    assert older == {None}, "all of it is listed"


def test_positions_without_older_files_go_by_dates_once(tmp_path: Path) -> None:
    log = tmp_path / "app.log"
    append(tmp_path / "app.log.1", "long ago")
    os.utime(tmp_path / "app.log.1", (1_000, 1_000))
    append(log, "1")
    reading = following(log)
    reading.poll()
    known = {path: FilePosition.decode(path, encoded) for path, encoded in reading.positions().items()}
    old = {path: replace(position, older=None, is_settled=False).encode() for path, position in known.items()}
    for number in (2, 3):
        append(log, str(number))
        rotate(log)
    append(log, "4")
    reading.start(2, old)
    assert sorted(reading.poll()) == ["2", "3", "4"]


# -- what may have been lost -------------------------------------------------------------------------------------------


def bad_of(reading: Following) -> list[tuple[object, object]]:
    return [(bad["problem"], bad["position"]) for bad in reading.bad]


@pytest.mark.parametrize("name", ["app.log", "app.log*", ""])
@pytest.mark.parametrize("is_made_anew", [False, True])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_file_rotated_and_compressed_between_two_looks_is_a_bad_record(
    tmp_path: Path, name: str, is_made_anew: bool, is_restarted: bool
) -> None:  # N21
    log = tmp_path / "app.log"
    append(log, "1")
    reading = following(tmp_path / name)
    assert reading.poll() == ["1"]
    append(log, "nobody sees this")
    rotate(log)
    if is_made_anew:
        append(log, "2")  # while the inode is in use: it has another one
    compress(tmp_path / "app.log.1")
    if is_restarted:
        reading.restart()
        reading.restart(1)  # a checkpoint, and a failure before anything was read
    assert reading.poll() == (["2"] if is_made_anew else [])
    assert bad_of(reading) == [(REPLACED, f"{log} line 2 (byte 2)")]
    reading.restart()
    append(log, "3")
    assert reading.poll() == ["3"]
    assert len(reading.bad) == 1, "it is told once"


@pytest.mark.parametrize("name", ["app.log", "app.log*", ""])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_file_compressed_after_it_was_read_is_no_bad_record(tmp_path: Path, name: str, is_restarted: bool) -> None:
    # N21: delaycompress
    log = tmp_path / "app.log"
    append(log, "0")
    reading = following(tmp_path / name)
    assert reading.poll() == ["0"]
    for number in range(1, 5):
        append(log, str(number))
        rotate(log)
        append(log, f"{number} and")
        if Path(f"{log}.2").exists():
            compress(Path(f"{log}.2"))
        if is_restarted:
            reading.restart(number % 3 + 1)
        assert sorted(reading.poll()) == sorted([str(number), f"{number} and"])
    assert reading.bad == []


def test_a_file_that_somebody_removes_or_compresses_in_its_place_is_no_bad_record(tmp_path: Path) -> None:  # N21
    for name in ("a.json", "b.json"):
        append(tmp_path / name, name)
    reading = following(tmp_path)
    assert sorted(reading.poll()) == ["a.json", "b.json"]
    (tmp_path / "a.json").unlink()
    compress(tmp_path / "b.json")
    assert reading.poll() == []
    append(tmp_path / "a.json", "again")
    assert reading.poll() == ["again"]
    reading.restart()
    assert reading.poll() == []
    assert reading.bad == []


# -- all of it at once -------------------------------------------------------------------------------------------------


class Restless(LocalFiles):
    """Before each call the world may change."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_"):
            object.__getattribute__(self, "_act")()
        return object.__getattribute__(self, name)


@pytest.mark.long
@pytest.mark.parametrize("selected", ["", "files", "*.log"])
@pytest.mark.parametrize("seed", few(range(12), 3))
def test_any_history_delivers_every_line_once_while_the_world_changes_between_any_two_calls(
    tmp_path: Path, selected: str, seed: int
) -> None:
    dice = random.Random(f"{seed} {selected}")
    logs = [tmp_path / "a.log", tmp_path / "b.log"]
    written, rate = 0, 0.0
    rotations = dict.fromkeys(logs, 0)

    def write(log: Path) -> None:
        nonlocal written
        append(log, f"{log.name} {written}")
        written += 1

    def act() -> None:
        if dice.random() >= rate:
            return
        log = dice.choice(logs)
        if dice.random() < 0.6:
            write(log)
        elif log.exists() and rotations[log] < 25:
            rotations[log] += 1
            rotate(log, count=30)

    for log in logs:
        for _ in range(3):
            append(log, "no input" if selected else f"{log.name} {(written := written + 1) - 1}")
            rotate(log)
        write(log)
    reading = following(logs if selected == "files" else tmp_path / selected, Restless(act), dice.randint(1, 3))
    for _ in range(25):
        rate = dice.choice((0.0, 0.02, 0.1))
        if dice.random() < 0.3:
            reading.restart(dice.randint(1, 3))
        reading.poll(dice.randint(1, 4))
    rate = 0.0
    while reading.poll(20):
        pass
    assert_each_once(reading, written)
