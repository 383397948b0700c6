"""``headgate run``: how its process starts Spark."""

from __future__ import annotations

import os
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from typer.testing import CliRunner

import headgate as hg
from headgate.cli import run
from headgate.cli.app import app
from headgate.cli.options import RunOptions, StartPoint
from headgate.cli.output import QuietObserver
from headgate.cli.run import ENDS, TEXTS, StandbyRunner, jvm_check
from headgate.cli.supervisor import Orders, SupervisorClient
from headgate.codec.json_files import beat_path, encode_beat, end_path
from headgate.errors import FencedError, PipelineFailed, UsageError
from headgate.model.ids import Generation
from headgate.model.pipeline_identity import Beat, Course
from headgate.model.progress import PipelineState, Progress, RunResult
from headgate.protocol.supervision.standby import Notice, Standby
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.driver.pipeline_lock import AlreadyRunning
from headgate.runtime.driver.takeover import current_takeover
from headgate.spark.jvm import QUICK_COMPILER
from headgate.spark.prerequisites import JVM_OPTIONS
from headgate.spark.py_files import Submission
from headgate.storage.base import Storage
from headgate.storage.memory import forget_memory_storage
from headgate.storage.urls import open_storage

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


ROOT = "memory://standby"
FIRST = Generation(1)


class Over:
    """A handle of a run that is over."""

    progress = Progress(PipelineState.FINISHED)
    drained = False

    def wait(self, timeout_s: float | None = None) -> RunResult:
        return RunResult(True)


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    monkeypatch.setattr(Standby, "LOOK_MS", 1)
    monkeypatch.setattr(Standby, "REST_MS", 1)
    monkeypatch.setattr(Standby, "SILENCE_MS", 20)
    monkeypatch.setattr(Standby, "UNKNOWN_MS", 40)
    yield open_storage(ROOT)
    forget_memory_storage("standby")


def run_of(storage: Storage, course: Course = Course.RUNNING) -> None:
    CheckpointLog(storage, "p").claim("process 1 on here, driver 12", 0)
    storage.put(beat_path("p", FIRST), [encode_beat(Beat(FIRST, "process 1 on here, driver 12", 1))])
    if course is not Course.RUNNING:
        storage.put(end_path("p", FIRST), [encode_beat(Beat(FIRST, "o", 0, course, reason="it was bad"))])


def standing_by(start: Callable[[], Any], said: list[tuple[str, str]], **options: Any) -> RunResult | None:
    return StandbyRunner(ROOT, "p", SupervisorClient(None), start, lambda *words: said.append(words), **options).run()


def test_it_takes_over_behind_the_generation_that_was_silent(storage: Storage) -> None:  # SB8
    run_of(storage)
    said: list[tuple[str, str]] = []
    seen: list[Any] = []

    def start() -> Over:
        seen.append(current_takeover())
        return Over()

    assert standing_by(start, said) == RunResult(True)
    assert seen[0].after == FIRST
    assert said == [
        ("watching", "standing by: process 1 on here runs it"),
        ("taking-over", "taking over: process 1 on here is gone"),
    ]


@pytest.mark.parametrize("lost", [FencedError("pipeline p", 1, 2), AlreadyRunning("it is run by another one")])
def test_whoever_was_too_late_waits_again(storage: Storage, lost: Exception) -> None:
    run_of(storage)
    said: list[tuple[str, str]] = []
    outcomes: list[Any] = [lost, Over()]

    def start() -> Any:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    assert standing_by(start, said) == RunResult(True)
    assert [notice for notice, _ in said] == ["watching", "taking-over", "outrun", "watching", "taking-over"]


def test_whoever_ran_and_was_replaced_ends(storage: Storage) -> None:
    run_of(storage)

    def start() -> Any:
        current_takeover().on_claim(Generation(2))
        raise FencedError("pipeline p", 2, 3)

    with pytest.raises(FencedError):
        standing_by(start, [])


@pytest.mark.parametrize("course", [Course.FINISHED, Course.DRAINED])
def test_it_ends_with_the_pipeline(storage: Storage, course: Course) -> None:  # SB6
    run_of(storage, course)
    said: list[tuple[str, str]] = []
    assert standing_by(lambda: pytest.fail("it started"), said) is None
    assert said == [("ended", f"p {ENDS[course]}")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("course", [Course.STOPPED, Course.FAILED_FOR_GOOD])
def test_it_waits_where_its_user_has_ended_it_until_it_is_told_to_end(
    storage: Storage, number: signal.Signals, course: Course
) -> None:  # SB6
    run_of(storage, course)
    said: list[tuple[str, str]] = []
    looks: list[int] = []

    def check() -> None:
        looks.append(1)
        if len(looks) == 100:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    assert standing_by(lambda: pytest.fail("it started"), said, check=check) is None
    assert signal.getsignal(number) is before
    assert len(said) == 1
    assert ("it was bad" in said[0][1]) is (course is Course.FAILED_FOR_GOOD)


def test_nobody_has_run_it_yet(storage: Storage) -> None:  # SB11
    said: list[tuple[str, str]] = []
    assert standing_by(Over, said) == RunResult(True)
    assert [notice for notice, _ in said] == ["not-started", "taking-over"]


def test_a_standby_without_its_jvm_ends(storage: Storage) -> None:
    run_of(storage)
    with pytest.raises(PipelineFailed, match="the JVM that this standby kept ready has ended") as caught:
        standing_by(lambda: pytest.fail("it started"), [], check=jvm_check(lambda: False))
    assert not caught.value.is_for_good, "its supervisor starts it again"


class Warm:
    """A session that is not needed."""

    spark = None
    is_alive = True

    def __init__(self, *given: object) -> None:
        pass

    def close(self) -> None:
        pass


def test_the_progress_of_a_takeover_that_came_too_late_is_not_shown_any_more(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_of(storage)
    opened: list[int] = []
    outcomes: list[Any] = [AlreadyRunning("it is run by another one"), Over()]

    class Shown(QuietObserver):
        def __enter__(self) -> Self:
            opened.append(1)
            assert sum(opened) == 1, "two of them draw on one terminal"
            return self

        def __exit__(self, *error: object) -> None:
            opened.append(-1)

    def start(self: Any, *given: Any, **options: Any) -> Any:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    program = tmp_path / "program.py"
    program.write_text(
        "import headgate as hg\np = hg.Pipeline('p')\np.source(hg.FromRows([{'n': 1}])).sink(hg.Discard())"
    )
    monkeypatch.setattr(run, "WarmContext", Warm)
    monkeypatch.setattr(run, "_make_observer", lambda *given, **named: Shown())
    monkeypatch.setattr(run.Pipeline, "start", start)
    result = CliRunner().invoke(app, ["run", "--standby", "--dir", ROOT, str(program)])
    assert result.exit_code == 0, (result.output, result.exception)
    assert opened == [1, -1, 1, -1]
    assert "p: another process was quicker; standing by again" in result.stderr


def test_the_directory_is_made_for_whom_the_pipeline_wants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import headgate as hg\np = hg.Pipeline('p', security=hg.Security(access='group'))\n"
        "p.source(hg.FromRows([{'n': 1}])).sink(hg.Discard())\n"
    )
    monkeypatch.setattr(run, "WarmContext", Warm)
    monkeypatch.setattr(StandbyRunner, "run", lambda self: open_storage(self.root).list("p") or None)
    where = tmp_path / "checkpoints"
    result = CliRunner().invoke(app, ["run", "--standby", "--dir", str(where), str(program)])
    assert result.exit_code == 0, result.output
    assert stat.S_IMODE(where.stat().st_mode) & 0o2770 == 0o2770


def test_every_notice_has_a_sentence() -> None:
    assert set(TEXTS) == set(Notice)
