"""A JVM that is begun before it is needed: taken if it is the right one, ended if it is not. None of these is real."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from pyspark import SparkContext

from headgate.environment import SYSTEM_CLOCK
from headgate.spark import jvm, session
from headgate.spark.jvm import (
    JvmProcess,
    Launch,
    adopt_environment,
    discard_early,
    launch_of,
    start_early,
    take_or_start,
)

TELLS = r"""
printf '\0\0\0\7\0\0\0\6secret' > "$_PYSPARK_DRIVER_CONN_INFO_PATH.tmp"
mv "$_PYSPARK_DRIVER_CONN_INFO_PATH.tmp" "$_PYSPARK_DRIVER_CONN_INFO_PATH"
cat
"""
"""What a JVM does: it says where it can be talked to, and ends when its input closes."""


def home_of_spark(directory: Path, script: str) -> Path:
    """Return a home of Spark whose ``spark-submit`` is this script."""
    submit = directory / "bin" / "spark-submit"
    submit.parent.mkdir(parents=True)
    submit.write_text(f"#!/bin/sh\n{script}\n")
    submit.chmod(0o755)
    return directory


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return home_of_spark(tmp_path / "spark", TELLS)


@pytest.fixture
def launch(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    """How a JVM is begun in the process as it is then."""
    monkeypatch.setenv("SPARK_HOME", str(home))
    monkeypatch.setattr(jvm, "_ahead", [])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield lambda **settings: launch_of({"spark.x": "1", **settings}, os.environ)
    discard_early()


def is_running(process: JvmProcess) -> bool:
    return process.process.poll() is None


def close(process: JvmProcess) -> None:
    process.end()
    assert not is_running(process)


def test_what_a_command_left_that_was_killed_at_its_start_is_removed_later(
    launch: Callable[..., Launch], tmp_path: Path
) -> None:  # OM11
    old, young = tmp_path / f"{jvm.PLACE}old", tmp_path / f"{jvm.PLACE}young"
    for place, age_s in ((old, jvm.OLD_S + 60), (young, 60)):
        place.mkdir()
        (place / "address").touch()
        os.utime(place, (SYSTEM_CLOCK.wall_ms() / 1000 - age_s,) * 2)
    close(JvmProcess(launch()))
    assert not old.exists()
    assert young.exists(), "its JVM may be starting"


def test_a_jvm_that_was_begun_ahead_is_taken(launch: Callable[..., Launch], tmp_path: Path) -> None:  # OM10
    start_early(launch())
    (ahead,) = jvm._ahead
    found = take_or_start(launch())
    try:
        assert found is ahead
        assert found.address() == (7, "secret")
        assert not list(tmp_path.glob("headgate-gateway-*")), "the secret does not stay"
        discard_early()
        assert is_running(found), "it has been taken"
        other = take_or_start(launch())
        assert other is not ahead
        close(other)
    finally:
        close(found)


def changed_directory(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    os.chdir(tmp_path / "elsewhere")


def changed_mask(_: Path) -> None:
    os.umask(0o077)


def changed_environment(_: Path) -> None:
    os.environ["HADOOP_CONF_DIR"] = "/etc/other"


@pytest.mark.parametrize("change", [changed_directory, changed_mask, changed_environment])
def test_what_a_program_changes_while_it_is_loaded_counts(
    launch: Callable[..., Launch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:  # OM10
    monkeypatch.setenv("HADOOP_CONF_DIR", "/etc/hadoop")
    mask = os.umask(0o022)
    try:
        start_early(launch())
        (ahead,) = jvm._ahead
        change(tmp_path)
        found = take_or_start(launch())
        assert found is not ahead
        assert not is_running(ahead)
        close(found)
    finally:
        os.umask(mask)


def test_what_the_commands_own_imports_set_does_not_count(
    launch: Callable[..., Launch], monkeypatch: pytest.MonkeyPatch
) -> None:  # OM10
    start_early(launch())
    (ahead,) = jvm._ahead
    before = dict(os.environ)
    monkeypatch.setenv("OF_A_LIBRARY", "1")
    adopt_environment(before, os.environ)
    found = take_or_start(launch())
    assert found is ahead
    close(found)


def test_a_jvm_with_other_settings_is_another_one(launch: Callable[..., Launch]) -> None:  # OM10
    start_early(launch())
    (ahead,) = jvm._ahead
    found = take_or_start(launch(**{"spark.driver.memory": "2g"}))
    assert found is not ahead
    assert "spark.driver.memory=2g" in found.launch.command
    assert not is_running(ahead)
    close(found)


def test_a_jvm_that_died_before_it_was_needed_is_replaced(launch: Callable[..., Launch]) -> None:  # OM10
    start_early(launch())
    (ahead,) = jvm._ahead
    ahead.process.kill()
    ahead.process.wait()
    found = take_or_start(launch())
    assert found is not ahead
    assert found.address() == (7, "secret")
    close(found)


def test_a_fork_leaves_the_jvm_to_its_parent(launch: Callable[..., Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    # OM11
    start_early(launch())
    (ahead,) = jvm._ahead
    with monkeypatch.context() as patch:
        patch.setattr(jvm.os, "getpid", lambda: -1)
        found = take_or_start(launch())
        assert found is not ahead, "it is not the fork's"
        close(found)
    assert is_running(ahead)
    close(ahead)


def test_a_jvm_can_say_its_address_when_its_process_is_dead_and_swept(
    launch: Callable[..., Launch], tmp_path: Path
) -> None:  # OM11
    """One that cannot write would never come to read its input, whose end is its own."""
    start_early(launch())
    assert [path.parent for path in tmp_path.rglob("headgate-gateway-*")] == [tmp_path]


LEFT = """
import sys
from headgate.spark import jvm_process
from headgate.spark.jvm import begin_ahead, launch_of
jvm_process.begin_ahead(launch_of({}, __import__("os").environ))
print(jvm_process._ahead[0].process.pid, flush=True)
"""


def test_a_jvm_that_nobody_takes_ends_with_its_process(home: Path, tmp_path: Path) -> None:  # OM11
    around = {**os.environ, "SPARK_HOME": str(home), "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", LEFT], env=around, stdout=subprocess.PIPE, check=True, timeout=300)
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)
    assert [path.name for path in tmp_path.iterdir()] == ["spark"], "nothing is left"


def test_a_session_of_the_programs_own_ends_the_jvm_that_was_begun_ahead(
    launch: Callable[..., Launch], monkeypatch: pytest.MonkeyPatch
) -> None:  # OM11
    start_early(launch())
    (ahead,) = jvm._ahead
    monkeypatch.setattr(SparkContext, "_gateway", SimpleNamespace())
    jvm.ensure_jvm({})
    assert not is_running(ahead)
    start_early(launch())
    (ahead,) = jvm._ahead

    class Ended(BaseException):
        """As far as this goes."""

    def check_slots(*_: object) -> None:
        raise Ended

    monkeypatch.setattr(session, "lock_for", lambda _: SimpleNamespace(release=lambda: None))
    monkeypatch.setattr(session, "find_session", lambda *_: SimpleNamespace())
    monkeypatch.setattr(session, "_check_slots", check_slots)
    monkeypatch.setattr(session, "has_finished", lambda _: False)
    plan = SimpleNamespace(config=SimpleNamespace(name="p"), plan=SimpleNamespace(parallelism=1))
    with pytest.raises(Ended):
        session.start_pipeline(plan)  # type: ignore[arg-type]
    assert not is_running(ahead)
