"""The directory of a JVM's temporary files: of living processes nobody removes it, of dead ones the next start does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headgate.spark import jvm

STARTED = """
import sys
from headgate.spark.jvm import temporary_directory
path = temporary_directory()
(path / "blockmgr-1").mkdir()
(path / "blockmgr-1" / "block").write_text("x")
assert temporary_directory() == path
print(path, flush=True)
sys.stdin.read()
"""


def begun(tmp_path: Path) -> tuple[subprocess.Popen[str], Path]:
    """Start a process that has a directory, until its input closes."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    child = subprocess.Popen(
        [sys.executable, "-c", STARTED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert child.stdout is not None
    return child, Path(child.stdout.readline().strip())


def ended(child: subprocess.Popen[str], number: int = 0) -> None:
    if number:
        child.send_signal(number)
    child.communicate(timeout=120)


def test_nobody_removes_the_directory_of_a_living_process(tmp_path: Path) -> None:
    first, mine = begun(tmp_path)
    second, other = begun(tmp_path)
    assert mine != other
    assert (mine / "blockmgr-1" / "block").exists()
    for child in (first, second):
        ended(child)
        assert child.returncode == 0
    assert list(tmp_path.iterdir()) == [], "whoever ends well leaves nothing"


def test_what_a_killed_process_left_goes_with_the_next_start(tmp_path: Path) -> None:
    killed, left = begun(tmp_path)
    frozen, kept = begun(tmp_path)
    ended(killed, signal.SIGKILL)
    frozen.send_signal(signal.SIGSTOP)
    assert (left / "blockmgr-1").exists()
    third, _ = begun(tmp_path)
    assert not left.exists()
    assert kept.exists(), "a process that stands still is not dead"
    frozen.send_signal(signal.SIGCONT)
    for child in (third, frozen):
        ended(child)
    assert list(tmp_path.iterdir()) == []


def test_a_fork_leaves_the_directory_to_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jvm, "_own", [])
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    registered: list[tuple[object, ...]] = []
    monkeypatch.setattr(jvm.atexit, "register", lambda *call: registered.append(call))
    path = jvm.temporary_directory()
    assert path is not None
    ((remove, _, own),) = registered
    remove(os.getpid() + 1, own)  # type: ignore[operator]
    assert path.is_dir()
    remove(os.getpid(), own)  # type: ignore[operator]
    assert not path.exists()


def test_without_a_directory_spark_does_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jvm, "_own", [])
    (tmp_path / "file").touch()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "file"))
    assert jvm.temporary_directory() is None
    assert jvm.temporary_file_options(None) == ({}, "")


def test_headgate_may_be_installed_in_a_directory_with_a_space(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark takes options of a JVM apart at spaces, and log4j decodes the URL."""
    monkeypatch.setattr(jvm, "__file__", "/opt/a b%/headgate/spark/jvm.py")
    url = "file:///opt/a%20b%25/headgate/spark/log4j2-quiet.properties"
    found = jvm.log_options(None, is_local=False)
    assert found == [f"-Dlog4j2.configurationFile={url}", f"-Dlog4j.configurationFile={url}"]
