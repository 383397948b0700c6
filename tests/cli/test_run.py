"""``headgate run``: how its process starts Spark."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import headgate as hg
from headgate.cli import run
from headgate.cli.app import app
from headgate.cli.options import RunOptions, StartPoint
from headgate.cli.supervisor import Orders
from headgate.errors import UsageError
from headgate.model.progress import PipelineState, Progress, RunResult
from headgate.spark.jvm import QUICK_COMPILER
from headgate.spark.prerequisites import JVM_OPTIONS
from headgate.spark.py_files import Submission

PROGRAM = "import headgate as hg\np = hg.Pipeline('quick')\np.source(hg.FromRows([{'a': 1}])).sink(hg.Discard())\n"


class Ended:
    """A handle of a run that is over."""

    progress = Progress(PipelineState.FINISHED)

    def wait(self, timeout_s: float | None = None) -> RunResult:
        return RunResult(is_finished=True)


def options_of_jvm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, is_refused: bool = False) -> str | None:
    """Run the program with a pipeline that starts nothing; return what a JVM would have been given."""
    seen: list[str | None] = []

    def start(self: hg.Pipeline, *given: Any, **options: Any) -> Ended:
        seen.append(os.environ.get(JVM_OPTIONS))
        if is_refused:
            raise UsageError("another driver runs this pipeline")
        return Ended()

    monkeypatch.setattr(hg.Pipeline, "start", start)
    (tmp_path / "program.py").write_text(PROGRAM)
    result = CliRunner().invoke(app, ["run", str(tmp_path / "program.py"), "--quiet"])
    assert (result.exception is None) is not is_refused, result.output
    (found,) = seen
    return found


def test_the_jvm_of_the_command_starts_quickly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(JVM_OPTIONS, raising=False)
    assert options_of_jvm(monkeypatch, tmp_path) == QUICK_COMPILER
    assert JVM_OPTIONS not in os.environ, "other programs that this process starts are not meant"


def test_options_of_the_user_come_later_and_so_win(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(JVM_OPTIONS, "-XX:TieredStopAtLevel=4 -Dlog4j=mine")
    assert options_of_jvm(monkeypatch, tmp_path) == f"{QUICK_COMPILER} -XX:TieredStopAtLevel=4 -Dlog4j=mine"
    assert os.environ[JVM_OPTIONS] == "-XX:TieredStopAtLevel=4 -Dlog4j=mine"


def test_a_start_that_is_refused_leaves_the_options_as_they_were(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(JVM_OPTIONS, "-Dmine")
    options_of_jvm(monkeypatch, tmp_path, is_refused=True)
    assert os.environ[JVM_OPTIONS] == "-Dmine"


NAMED = ["--restore", "41", "--go-back-past", "43", "--allow-unclaimed-state", "a", "--allow-unclaimed-state", "b"]
NAMED += ["--moved", "/old=/new"]


def told(monkeypatch: pytest.MonkeyPatch, options: list[str], program: Path) -> tuple[Any, ...]:
    """Return what the pipeline is told to begin with when the command is run."""
    seen: list[tuple[Any, ...]] = []
    with monkeypatch.context() as patch:
        patch.setattr(hg.Pipeline, "begin_with", lambda self, *given: seen.append(given))
        patch.setattr(hg.Pipeline, "start", lambda self, *given, **options: Ended())
        result = CliRunner().invoke(app, ["run", *options, "--quiet", "--", str(program), "argument"])
    assert result.exception is None, result.output
    (found,) = seen
    return found


@pytest.mark.parametrize("more", [[], ["--standby"]])
def test_every_driver_of_a_supervisor_is_told_what_its_command_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, more: list[str]
) -> None:  # SV24
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    orders: list[Orders] = []

    class Kept(BaseException):
        """The process is another one now."""

    def become_supervisor(given: Orders) -> None:
        orders.append(given)
        raise Kept

    monkeypatch.setattr(run, "exec_supervisor", become_supervisor)
    given = [*NAMED, *more, "-p", "2", "--dir", str(tmp_path / "checkpoints")]
    with pytest.raises(Kept):
        CliRunner().invoke(app, ["run", "--supervised", *given, "--", str(program), "argument"])
    of_child = orders[0].command[len(run.COMMAND) + 1 :]
    assert ("--standby" in of_child) == bool(more)
    assert not {"--supervised", "--restart"} & {word.partition("=")[0] for word in of_child}
    assert of_child[-3:] == ["--", str(program), "argument"]
    named = [word for word in of_child[:-3] if word != "--standby"]
    assert (
        told(monkeypatch, named, program)
        == told(monkeypatch, NAMED, program)
        == (41, 43, ("a", "b"), {"/old": "/new"}, ())
    )


def test_what_spark_is_told_goes_to_the_start_and_to_every_driver_of_a_supervisor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program, module = tmp_path / "program.py", tmp_path / "elsewhere" / "prices_by_name.py"
    module.parent.mkdir()
    module.write_text("RATE = 7\n")
    program.write_text("import prices_by_name\n" + PROGRAM)
    seen: list[Submission] = []
    given = [f"--py-files={module}", "--conf", "spark.executor.memory=2g"]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        patch.setenv("PYTHONPATH", "")
        patch.setattr(hg.Pipeline, "submit_with", lambda self, submission: seen.append(submission))
        patch.setattr(hg.Pipeline, "start", lambda self, *given, **options: Ended())
        result = CliRunner().invoke(app, ["run", *given, "--quiet", str(program)])
        assert result.exception is None, result.output
        assert str(module.parent) in os.environ["PYTHONPATH"]
    assert seen == [Submission((("spark.executor.memory", "2g"),), (str(module),), str(tmp_path))]
    options = RunOptions(
        None, None, None, StartPoint(None, None, ()), False, False, True, False, None, py_files=("a.py",), conf=("x=y",)
    )
    assert options.of_a_driver() == ["--py-files=a.py", "--conf=x=y"]


def test_a_wrong_setting_is_wrong_use_before_the_program_is_loaded() -> None:
    result = CliRunner().invoke(app, ["run", "--conf", "executor.memory=2g", "nothing.py"])
    assert str(result.exception) == "--conf is 'executor.memory=2g', but must be like spark.executor.memory=2g"
