"""What the words of a command say of the JVM that it will need."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headgate.cli import __main__, output, run, supervisor
from headgate.cli.__main__ import environment_of, program_of, start_jvm, values_of
from headgate.cli.options import make_importable
from headgate.spark import jvm
from headgate.spark.jvm import QUICK_COMPILER, Launch, quick_jvm
from headgate.spark.prerequisites import JVM_OPTIONS
from headgate.spark.session import jvm_settings as settings_of
from headgate.spark.session import session_options

PROGRAM = "import headgate as hg\np = hg.Pipeline('p')\n"


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(jvm, "temporary_directory", lambda: tmp_path)
    for name in ("HEADGATE_MASTER", "PYSPARK_GATEWAY_PORT", "SPARK_CONF_DIR", "PYSPARK_PYTHON", JVM_OPTIONS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(__main__, "java_problem", lambda *_: None)
    return str(tmp_path / "program.py")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """What would be begun."""
    found: list[Launch] = []
    monkeypatch.setattr(__main__, "start_early", found.append)
    return found


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ([], {}),
        (["--master", "local[7]", "-p", "3", "--json"], {}),
        (["--conf", "spark.driver.memory=2g", "--conf=spark.x=a=b"], {"spark.driver.memory": "2g", "spark.x": "a=b"}),
    ],
)
def test_the_words_of_a_command_say_which_jvm_it_needs(
    program: str, launches: list[Launch], monkeypatch: pytest.MonkeyPatch, words: list[str], given: dict[str, str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    start_jvm(["run", *words, program, "--", "--master", "yarn"], os.environ)
    make_importable(str(Path(program).parent))  # what the command does, and what it asks for then
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    with quick_jvm():
        needed = jvm.launch_of(settings_of(session_options("its-name", "local[3]") | given), os.environ)
    assert launches == [needed]


@pytest.mark.parametrize(
    "words",
    [
        ["run", "--describe"],
        ["run", "--supervised"],
        ["run", "--standby"],
        ["run", "--help"],
        ["run", "--py-files=a.zip"],
        ["run", "--log-dir", "logs"],
        ["run", "--master", "spark://host:7077"],
        ["stop"],
        [],
    ],
)
def test_a_command_that_needs_no_jvm_begins_none(program: str, launches: list[Launch], words: list[str]) -> None:
    start_jvm([*words, program], os.environ)
    assert launches == []


def test_nothing_is_begun_where_it_would_be_in_vain(
    program: str, launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    start_jvm(["run", program], {**os.environ, "HEADGATE_MASTER": "yarn"})
    start_jvm(["run", program], {**os.environ, "PYSPARK_GATEWAY_PORT": "1"})
    monkeypatch.setattr(__main__, "java_problem", lambda *_: "there is no java")
    start_jvm(["run", program], os.environ)
    assert launches == []


def test_a_program_that_makes_a_session_begins_its_own_jvm(tmp_path: Path) -> None:
    made = tmp_path / "made.py"
    made.write_text("from pyspark.sql import SparkSession\n")
    assert program_of(["--json", str(made)]) is None
    assert program_of(["--json", "package.module"]) == "."


def test_what_is_for_the_command_alone_is_not_in_the_environment(program: str) -> None:
    around = {"HEADGATE_SUPERVISED": "{}", "HEADGATE_UI_TOKEN": "secret", "A": "b"}
    assert (__main__.SUPERVISED, __main__.TOKEN) == (supervisor.SUPERVISED, output.TOKEN)
    assert set(environment_of(program, around, has_page=True)) & set(around) == {"A"}
    assert set(environment_of(program, around, has_page=False)) & set(around) == {"A", "HEADGATE_UI_TOKEN"}
    assert QUICK_COMPILER in environment_of(program, around, has_page=False)[JVM_OPTIONS]


def test_the_values_of_an_option_are_found_in_both_forms() -> None:
    assert values_of("--conf", ["--conf", "a=1", "x", "--conf=b=2", "--conf"]) == ["a=1", "b=2", ""]


def test_the_command_begins_here(tmp_path: Path) -> None:
    assert run.COMMAND[-1] == "headgate.cli.__main__"
    around = {**os.environ, "PATH": str(tmp_path) + os.pathsep + (os.path.dirname(shutil.which("env") or ""))}
    done = subprocess.run([*run.COMMAND, "--version"], env=around, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("headgate ")
