"""``headgate savepoints`` and ``headgate stop --savepoint``: what they say, and what they ask for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.test_checkpoints import manifest
from typer.testing import CliRunner

from headgate.cli import app as cli
from headgate.errors import HeadgateError, PipelineFailed, UsageError
from headgate.model.manifest import Savepoint
from headgate.runtime.checkpoints.savepoints import SavepointDirectory

HOLDER = """
import signal, sys
from headgate.codec.json_files import Ending
from headgate.model.progress import CheckpointOutcome
from headgate.runtime.driver import remote_control
from headgate.runtime.driver.pipeline_lock import PipelineLock, taking_signals
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
with taking_signals():
    lock = PipelineLock.acquire(sys.argv[1], "p", "a child")
print("ready", flush=True)
assert signal.sigwait({signal.SIGUSR2}) == signal.SIGUSR2
(ask,) = remote_control.waiting_requests(sys.argv[1], "p")
request = ask.take()
assert ask.take() is None, "it is taken once"
print(request, flush=True)
if sys.argv[2] == "completes":
    ask.answer(CheckpointOutcome(7, savepoint=request.savepoint))
else:
    ask.answer(CheckpointOutcome(None, "the place is taken", is_refused=sys.argv[2] == "refused"))
if request.ends and sys.argv[2] != "refused":
    lock.release(Ending.DRAINED if request.drains else Ending.STOPPED, 7, "")
sys.stdin.readline()
"""


def said(root: Path, how: str, *command: str) -> tuple[str, str | HeadgateError]:
    """Return what a command asks for, and what it says to a pipeline that does this."""
    started = [sys.executable, "-c", HOLDER, str(root), how]
    with subprocess.Popen(started, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        result = CliRunner().invoke(cli.app, [*command, "--dir", str(root)])
        asked = child.communicate("\n", 120)[0]
        assert child.returncode == 0
    assert list((root / "p").glob("checkpoint-*")) == []
    assert result.exception is None or isinstance(result.exception, HeadgateError)
    return asked.strip(), result.exception or result.stdout


def test_a_savepoint_is_taken_on_request_and_waited_for(tmp_path: Path) -> None:
    asked, sentence = said(tmp_path, "completes", "savepoints", "take", "p", "/backup/here")
    assert asked == "RunRequest(savepoint='/backup/here', ends=False, drains=False, cancels=False)"
    assert sentence == "p: savepoint /backup/here is complete (checkpoint 7)\n"
    _, problem = said(tmp_path, "refused", "savepoints", "take", "p", "/backup/here")
    assert str(problem) == "p: there is no savepoint: the place is taken"


@pytest.mark.parametrize(
    ("option", "drains", "sentence"),
    [
        ([], False, "p: stopped; started again, it continues from checkpoint 7\n"),
        (["--drain"], True, "p: drained; everything that was read is processed (final checkpoint 7)\n"),
    ],
)
def test_a_pipeline_is_stopped_with_a_savepoint(
    tmp_path: Path, option: list[str], drains: bool, sentence: str
) -> None:  # SV10
    command = ["stop", "p", "--savepoint", "/backup/here", *option]
    asked, found = said(tmp_path, "completes", *command)
    assert asked == f"RunRequest(savepoint='/backup/here', ends=True, drains={drains}, cancels=False)"
    assert found == f"{sentence}p: savepoint /backup/here is complete\n"
    _, problem = said(tmp_path, "fails", *command)
    assert isinstance(problem, PipelineFailed)
    assert str(problem) == "p: there is no savepoint: the place is taken", "and the pipeline has stopped"
    _, problem = said(tmp_path, "refused", *command)
    assert isinstance(problem, UsageError)
    assert str(problem) == "p goes on, because the savepoint cannot be there: the place is taken"  # SV11


@pytest.fixture
def place(tmp_path: Path) -> Path:
    SavepointDirectory(str(tmp_path / "here")).write(
        Savepoint("drawn", "counts", 1_700_000_000_000, "files-00", manifest(2))
    )
    return tmp_path / "here"


def run(*command: str) -> str:
    result = CliRunner().invoke(cli.app, list(command))
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_a_savepoint_says_what_it_holds(place: Path) -> None:
    shown = run("savepoints", "show", str(place))
    assert shown.startswith("savepoint of pipeline counts, complete since 2023-11-14 22:13:20.000 UTC\n")
    for line in (
        "checkpoint: 2",
        "parallelism: 1",
        "key groups: 128",
        "mode: exactly_once",
        "rows of window/windows: 250,000",
    ):
        assert line in shown
    assert "state of window: window(keys a)" in shown
    fields = json.loads(run("savepoints", "show", str(place), "--json"))
    assert (fields["pipeline"], fields["checkpoint"], fields["subtasks"][0]["subtask"]) == ("counts", 2, "window[0]")


def test_savepoints_below_a_path_are_listed(place: Path) -> None:
    (place.parent / "torn").mkdir()
    (place.parent / "torn" / "savepoint").write_bytes(b"headgate-savepoint 1 00\n{}")
    (found, torn) = json.loads(run("savepoints", "list", str(place.parent), "--json"))
    assert (found["path"], found["pipeline"], found["id"]) == ("here", "counts", "drawn")
    assert "is damaged" in torn["problem"]
    assert "counts" in run("savepoints", "list", str(place.parent))
    (place.parent / "empty").mkdir()
    assert "There are no savepoints" in run("savepoints", "list", str(place.parent / "empty"))


def test_where_there_is_none_it_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no savepoint at"):
        run("savepoints", "show", str(tmp_path))
    with pytest.raises(UsageError, match="there is no directory"):
        run("savepoints", "show", str(tmp_path / "nowhere"))
    assert not (tmp_path / "nowhere").exists(), "looking makes nothing"
