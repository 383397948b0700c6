"""``headgate run --standby`` in this process: what it looks at, what it starts, what it says (docs/spec/standby.md)."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from typer.testing import CliRunner

from headgate.cli import run
from headgate.cli.app import app
from headgate.cli.output import QuietObserver
from headgate.cli.run import ENDS, TEXTS, StandbyRunner, jvm_check
from headgate.cli.supervisor import SupervisorClient
from headgate.codec.json_files import beat_path, encode_beat, end_path
from headgate.errors import FencedError, PipelineFailed
from headgate.model.heartbeat import Beat, Course
from headgate.model.ids import Generation
from headgate.model.progress import PipelineState, Progress, RunResult
from headgate.protocol.supervision.standby import Notice, Standby
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.driver.pipeline_lock import AlreadyRunning
from headgate.runtime.driver.takeover import current_takeover
from headgate.storage.base import Storage
from headgate.storage.memory import forget_memory_storage
from headgate.storage.urls import open_storage

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
