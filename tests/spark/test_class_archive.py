"""The file of classes that starts of Spark use: whose it is, when it gets its name, and that it does no harm."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from headgate.environment import SYSTEM_CLOCK
from headgate.errors import PipelineFailed, UsageError
from headgate.spark import class_archive, class_dump, launcher, session
from headgate.spark.class_archive import (
    AGAIN_S,
    SETTING,
    archive_file,
    archive_options,
    options_with,
    prepare_in_background,
)
from headgate.spark.class_dump import make_archive
from headgate.spark.jvm import launch_of
from headgate.spark.prerequisites import JVM_OPTIONS
from headgate.storage.local_files import ProcessDirectory

WHOLE = b"all classes"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where files are made, for a Java and a Spark that are not real."""
    java = tmp_path / "jvm" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text("#!/bin/sh\n")
    java.chmod(0o755)
    (tmp_path / "spark" / "jars").mkdir(parents=True)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "jvm"))
    monkeypatch.setenv("SPARK_HOME", str(tmp_path / "spark"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "headgate"


def writes(data: bytes = WHOLE, before: Callable[[], object] = lambda: None) -> Callable[..., None]:
    """Return what writes a file as a JVM does, which makes it read-only."""

    def have_written(made: Path, *options: str) -> None:
        before()
        made.write_bytes(data)
        made.chmod(0o444)

    return have_written


def test_an_archive_is_named_by_its_java_and_its_spark(place: Path, tmp_path: Path) -> None:
    found = archive_file(os.environ)
    assert found == archive_file(os.environ)
    assert found is not None
    assert found.parent == place
    names = {found.name}
    (tmp_path / "jvm" / "bin" / "java").write_text("#!/bin/sh\n# an update\n")
    names.add(archive_file(os.environ).name)  # type: ignore[union-attr]
    (tmp_path / "spark" / "jars" / "spark-core.jar").touch()
    os.utime(tmp_path / "spark" / "jars", (1, 1))
    names.add(archive_file(os.environ).name)  # type: ignore[union-attr]
    (tmp_path / "other" / "jars").mkdir(parents=True)
    names.add(archive_file({**os.environ, "SPARK_HOME": str(tmp_path / "other")}).name)  # type: ignore[union-attr]
    assert len(names) == 4
    assert archive_file({**os.environ, "JAVA_HOME": str(tmp_path)}) is None, "there is no Java"


@pytest.mark.usefixtures("place")
def test_an_archive_that_others_could_have_written_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_dump, "dump_archive", writes())
    assert archive_options() == [], "there is none"
    file = make_archive()
    assert f'"-XX:SharedArchiveFile={file}"' in archive_options()
    for path in (file, file.parent):
        mode = path.stat().st_mode
        path.chmod(mode | 0o020)
        assert archive_options() == []
        path.chmod(mode)
    assert archive_options() != []
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert archive_options() == []
    file.rename(file.with_suffix(".moved"))
    file.symlink_to(file.with_suffix(".moved"))
    assert archive_options() == [], "a link may lead anywhere"


@pytest.mark.usefixtures("place")
def test_every_jvm_starts_from_the_archive_unless_its_options_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def given(options: str) -> str | None:
        return launch_of({}, {**os.environ, JVM_OPTIONS: options}).environment.get(JVM_OPTIONS)

    monkeypatch.setattr(class_dump, "dump_archive", writes())
    assert given("-Dmine") == "-Dmine", "there is none"
    file = make_archive()
    assert given("-Dmine") == " ".join([*options_with(file), "-Dmine"])
    for own in ("-XX:SharedArchiveFile=mine", '"-XX:ArchiveClassesAtExit=made"'):
        assert given(own) == own, "Java takes one, and makes none from another"


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """How processes were begun."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **given: found.append(given))
    for name in (SETTING, JVM_OPTIONS):
        monkeypatch.delenv(name, raising=False)
    return found


def test_a_run_without_an_archive_begins_to_make_one(place: Path, begun: list[dict[str, Any]]) -> None:
    environ = {**os.environ, "HEADGATE_SUPERVISED": "{}"}
    assert prepare_in_background(environ)
    assert not prepare_in_background(environ), "it is being made"
    (one,) = begun
    assert "HEADGATE_SUPERVISED" not in one["env"], "what was for that run alone"
    assert one["start_new_session"], "Ctrl-C in a terminal is for its programs"
    (tried,) = place.iterdir()
    os.utime(tried, (SYSTEM_CLOCK.wall_ms() / 1000 - AGAIN_S - 60,) * 2)
    assert prepare_in_background(environ), "it failed long ago"
    assert not prepare_in_background(environ)
    os.utime(tried, (SYSTEM_CLOCK.wall_ms() / 1000 + 2 * AGAIN_S,) * 2)
    assert prepare_in_background(environ), "the clock was set back"


@pytest.mark.usefixtures("begun")
def test_nothing_is_made_where_it_is_not_wanted(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_dump, "dump_archive", writes())
    assert not prepare_in_background({**os.environ, SETTING: "never"})
    assert not prepare_in_background({**os.environ, JVM_OPTIONS: "-XX:SharedArchiveFile=mine"})
    assert not prepare_in_background({**os.environ, "JAVA_HOME": str(tmp_path)}), "there is no Java"
    file = make_archive()
    file.parent.chmod(0o777)
    assert not prepare_in_background(os.environ), "there is one; that it is not trusted, another would not change"
    shutil.rmtree(place)
    place.write_text("in the way")
    assert not prepare_in_background(os.environ)
    place.unlink()
    assert prepare_in_background(os.environ), "everything else held it back"


def test_what_fails_in_the_background_says_nothing(place: Path, tmp_path: Path) -> None:
    done = subprocess.run(class_archive.COMMAND, env={**os.environ, "JAVA_HOME": str(tmp_path)}, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert not place.exists()


def test_an_archive_gets_its_name_when_it_is_whole(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(made: Path, *options: str) -> None:
        made.write_bytes(WHOLE[:3])
        raise PipelineFailed("Spark's JVM ended")

    monkeypatch.setattr(class_dump, "dump_archive", dies)
    with pytest.raises(PipelineFailed):
        make_archive()
    assert list(place.glob("**/*.jsa")) == []
    monkeypatch.setattr(class_dump, "dump_archive", writes())
    file = make_archive()
    monkeypatch.setattr(class_dump, "dump_archive", dies)
    with pytest.raises(PipelineFailed):
        make_archive()
    assert file.read_bytes() == WHOLE, "the one before is there until there is another one"
    assert sorted(path.name for path in place.iterdir()) == [file.name]


@pytest.mark.parametrize("end", [1, subprocess.TimeoutExpired("java", 1)])
def test_what_a_jvm_that_failed_has_written_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: Any) -> None:
    told: list[str] = []
    jvm = Mock(wait=Mock(side_effect=[end, -9]))

    def made(*_: object) -> Any:
        told.append(os.environ[JVM_OPTIONS])
        return SimpleNamespace(_gateway=SimpleNamespace(proc=jvm), stop=lambda: None)

    monkeypatch.setenv(JVM_OPTIONS, "-Dmine")
    monkeypatch.setattr(session, "make_context", made)
    for name in ("warm_up", "warm_up_sql"):
        monkeypatch.setattr(launcher, name, lambda *_: None)
    (tmp_path / "half.jsa").write_bytes(WHOLE[:3])
    with pytest.raises(PipelineFailed, match="is there room on the disk"):
        class_dump.dump_archive(tmp_path / "half.jsa", "-Dmore")
    assert told == [f'-Dmore "-XX:ArchiveClassesAtExit={tmp_path}/half.jsa" -Xlog:disable']
    assert os.environ[JVM_OPTIONS] == "-Dmine"
    assert jvm.kill.called is not isinstance(end, int)


def test_whoever_makes_an_archive_at_the_same_time_is_not_disturbed(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def another() -> None:
        monkeypatch.setattr(class_dump, "dump_archive", writes(b"another one's"))
        make_archive()

    monkeypatch.setattr(class_dump, "dump_archive", writes(before=another))
    file = make_archive()
    assert file.read_bytes() == WHOLE
    assert sorted(path.name for path in place.iterdir()) == [file.name]


def test_what_a_killed_one_left_is_removed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = ProcessDirectory(place / "making")
    (left.path / "half.jsa").write_bytes(WHOLE[:3])
    os.close(left._lock)  # as the end of its process does
    monkeypatch.setattr(class_dump, "dump_archive", writes())
    file = make_archive()
    assert [path.name for path in place.iterdir()] == [file.name]


def test_old_archives_make_room(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.mkdir(parents=True)
    for age in range(5):
        (place / f"spark-classes-{age}.jsa").touch()
        os.utime(place / f"spark-classes-{age}.jsa", (10 - age, 10 - age))
    monkeypatch.setattr(class_dump, "dump_archive", writes())
    file = make_archive()
    assert {path.name for path in place.iterdir()} == {file.name, "spark-classes-0.jsa", "spark-classes-1.jsa"}


def test_a_directory_that_cannot_be_written_is_one_sentence(
    place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(class_dump, "dump_archive", writes())
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(UsageError, match=r"spark-classes-.*\.jsa cannot be written: .*; choose another XDG_CACHE_HOME"):
        make_archive()
    assert archive_options() == []
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(UsageError, match="'headgate doctor' says which"):
        make_archive()


@pytest.mark.skipif(shutil.which("java") is None, reason="no Java")
@pytest.mark.parametrize("data", [b"", b"no archive", b"\0" * 100_000], ids=["empty", "text", "zeros"])
def test_an_archive_that_is_no_archive_does_no_harm(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "broken.jsa"
    file.write_bytes(data)
    options = [option.strip('"') for option in options_with(file)]
    done = subprocess.run(["java", *options, "-version"], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert "warning" not in done.stderr.lower()
