"""``headgate doctor`` and ``headgate prepare``."""

from __future__ import annotations

import importlib.metadata
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from headgate import __version__
from headgate.cli import doctor, run
from headgate.cli.doctor import Finding, Verdict, check_executors, judge_executors, prepare_tip
from headgate.cli.options import RunOptions, StartPoint
from headgate.cli.supervisor import SupervisorClient
from headgate.model.progress import RunResult
from headgate.spark.session import Executor


def test_every_finding_is_one_line(tmp_path: Path) -> None:
    findings = doctor.examine(str(tmp_path / "checkpoints"), str(tmp_path / "store"))
    assert len(findings) == 10
    assert all("\n" not in finding.sentence for finding in findings)
    assert not list(tmp_path.iterdir()), "looking must leave nothing behind"


def test_an_old_python_is_missing() -> None:
    assert doctor.check_python((3, 10, 4)).verdict is Verdict.MISSING
    assert doctor.check_python((3, 11, 0)).verdict is Verdict.OK


@pytest.mark.parametrize(
    ("told", "verdict"),
    [
        ('openjdk version "17.0.15" 2025-04-15', Verdict.OK),
        ('openjdk version "21" 2023-09-19', Verdict.OK),
        ('java version "1.8.0_392"', Verdict.MISSING),
        ('openjdk version "11.0.2"', Verdict.MISSING),
        ("nonsense", Verdict.MISSING),
    ],
)
def test_java_is_judged_by_its_major_version(told: str, verdict: Verdict) -> None:
    assert doctor.judge_java(told, "java", "install it").verdict is verdict


def test_a_machine_without_java_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    finding = doctor.check_java()
    assert finding.verdict is Verdict.MISSING
    assert "apt-get install openjdk-17-jre-headless" in finding.sentence


def test_a_java_home_without_java_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    finding = doctor.check_java()
    assert finding.verdict is Verdict.MISSING
    assert str(tmp_path) in finding.sentence


def test_missing_and_old_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        return ["no-such-package>=1", "polars>=999", 'optional-thing>=1; extra == "dev"']

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    finding = doctor.check_packages()
    assert finding.verdict is Verdict.MISSING
    assert "no-such-package is not installed; polars is" in finding.sentence
    assert "optional-thing" not in finding.sentence


def test_an_unwritable_directory_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("", encoding="utf-8")
    assert doctor.check_directory("store directory", str(tmp_path / "new" / "deep")).verdict is Verdict.OK
    finding = doctor.check_directory("store directory", str(file / "below"))
    assert finding.verdict is Verdict.MISSING
    assert "choose another one" in finding.sentence
    assert os.listdir(tmp_path) == ["file"]


def test_a_directory_that_others_can_read_is_a_warning_with_the_way_out(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    found = doctor.check_directory("store directory", str(tmp_path))
    assert found.verdict is Verdict.WARNING
    assert f"other users can read it; 'chmod -R go= {tmp_path}' keeps them out." in found.sentence
    below = doctor.check_directory("store directory", str(tmp_path / "not-there-yet"))
    assert below.verdict is Verdict.OK


def test_a_dead_spark_home_and_one_of_another_version_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    assert doctor.check_spark_home().verdict is Verdict.MISSING
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "spark-submit").touch(mode=0o755)
    assert doctor.check_spark_home().verdict is Verdict.OK
    (tmp_path / "jars").mkdir()
    (tmp_path / "jars" / "spark-core_2.13-3.5.0.jar").touch()
    finding = doctor.check_spark_home()
    assert finding.verdict is Verdict.WARNING
    assert "with Spark 3.5.0, but PySpark is" in finding.sentence
    monkeypatch.delenv("SPARK_HOME")
    assert doctor.check_spark_home().verdict is Verdict.OK


SAME = Executor("a", "3.11.9", __version__, 0)


@pytest.mark.parametrize(
    ("found", "verdict", "sentence"),
    [
        ([SAME, SAME], Verdict.OK, "2 slots on a, with Python 3.11.9"),
        (
            [SAME, replace(SAME, host="b", headgate="0.0.1")],
            Verdict.MISSING,
            f"b has headgate 0.0.1, and here is {__version__}: install the same there, or set PYSPARK_PYTHON.",
        ),
        (
            [replace(SAME, python="3.12.1")],
            Verdict.MISSING,
            "a has Python 3.12.1, and here is 3.11.2: install the same there, or set PYSPARK_PYTHON.",
        ),
        (
            [SAME, replace(SAME, host="b", ahead_ms=-61_500)],
            Verdict.WARNING,
            "Clocks differ from this one (b by 61.5 s): let NTP set them.",
        ),
    ],
)
def test_executors_are_judged(found: list[Executor], verdict: Verdict, sentence: str) -> None:
    assert judge_executors(found, "3.11.2") == Finding("executors", verdict, sentence)


def test_a_master_that_is_none_is_a_finding() -> None:
    finding = check_executors("nonsense")
    assert finding.verdict is Verdict.MISSING
    assert finding.sentence.startswith("'nonsense' is not the URL of a Spark master")


def test_a_store_on_a_server_is_looked_at_and_a_password_is_not_shown() -> None:
    finding = doctor.check_store("postgresql://u:very-secret@127.0.0.1/db")
    assert finding.verdict is Verdict.MISSING
    assert "password" in finding.sentence
    assert "very-secret" not in finding.sentence


with_java = pytest.mark.skipif(doctor.archive_file(os.environ) is None, reason="there is no Java here")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HEADGATE_MASTER", raising=False)
    return tmp_path


@pytest.fixture
def is_being_made(home: Path) -> None:
    """A run has begun to make the archive."""
    archive = doctor.archive_file(os.environ)
    assert archive is not None
    archive.parent.mkdir(parents=True, mode=0o700)
    doctor.tried_mark(archive).touch()


def tip(master: str | None = None, *, is_terminal: bool = True) -> str | None:
    return prepare_tip(master, os.environ, is_terminal=is_terminal)


@with_java
@pytest.mark.usefixtures("is_being_made")
def test_it_is_told_once_on_a_machine(home: Path) -> None:
    told = tip()
    assert told is not None
    assert "HEADGATE_PREPARE=never" in told
    assert str(home / "cache" / "headgate") in told
    assert tip() is tip("local[4]") is None


@with_java
@pytest.mark.usefixtures("is_being_made")
def test_of_commands_that_end_at_one_moment_one_tells_it() -> None:
    with ThreadPoolExecutor(8) as pool:
        told = list(pool.map(lambda _: tip(), range(8)))
    assert sum(one is not None for one in told) == 1


@with_java
@pytest.mark.usefixtures("is_being_made")
def test_it_is_told_only_where_it_helps(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tip(is_terminal=False) is None
    assert tip("spark://host:7077") is None
    monkeypatch.setenv("HEADGATE_MASTER", "spark://host:7077")
    assert tip() is None
    monkeypatch.delenv("HEADGATE_MASTER")
    file = doctor.archive_file(os.environ)
    assert file is not None
    doctor.tried_mark(file).unlink()
    assert tip() is None, "none is made: the session was the program's, for example"
    doctor.tried_mark(file).touch()
    file.touch(0o600)
    assert tip() is None, "starts are prepared"
    file.unlink()
    assert tip() is not None, "nothing of this counted as told"


@with_java
@pytest.mark.usefixtures("is_being_made")
def test_where_nothing_can_be_remembered_nothing_is_told(home: Path) -> None:
    (home / "state").touch()
    assert tip() is None


@pytest.mark.parametrize(
    ("options", "supervisor", "is_told"),
    [({}, 0, True), ({"quiet": True}, 0, False), ({"as_json": True}, 0, False), ({}, 7, False)],
)
@with_java
@pytest.mark.usefixtures("is_being_made")
def test_a_run_tells_it_behind_its_result(
    options: dict[str, bool],
    supervisor: int,
    is_told: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    class Named:
        name = "p"

    monkeypatch.setattr(SupervisorClient, "supervisor_pid", property(lambda self: supervisor))
    monkeypatch.setattr(run, "_run_now", lambda *given: RunResult(True))
    monkeypatch.setattr(run, "_is_terminal", lambda: True)
    given = {"quiet": False, "as_json": False, **options}
    made = RunOptions(
        None, None, None, StartPoint(None, None, ()), supervised=False, standby=False, restart=None, **given
    )
    run.run_here(Named(), made, SupervisorClient(None))  # type: ignore[arg-type]
    told = capfd.readouterr().err
    assert ("pipelines will start sooner" in told) is is_told
    if is_told:
        assert told.index("finished") < told.index("note:")
