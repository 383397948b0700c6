"""``headgate stop``: one clear sentence for every outcome; real pipelines are stopped in tests/crash."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headgate.cli import app as cli
from headgate.cli.pipelines import _outcome
from headgate.codec.json_files import Ending, LockHolder
from headgate.errors import PipelineFailed, UsageError

HOLDER = """
import signal, sys
from headgate.codec.json_files import Ending
from headgate.runtime.driver.pipeline_lock import PipelineLock, taking_signals
wanted = {signal.SIGTERM, signal.SIGUSR1}
signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
with taking_signals():
    lock = PipelineLock.acquire(sys.argv[1], "p", "a child")
print("ready", flush=True)
lock.release(Ending.DRAINED if signal.sigwait(wanted) == signal.SIGUSR1 else Ending.STOPPED, 5, "")
"""


def ended(ending: Ending, checkpoint: int | None = 5, reason: str = "") -> LockHolder:
    return LockHolder("process 1 on here", "here", 1, "n", True, ending, checkpoint, reason)


def kept(ending: Ending, reason: str = "") -> LockHolder:
    return replace(ended(ending, None, reason), keeper=7)


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ([], "p: stopped; started again, it continues from checkpoint 5\n"),
        (["--drain"], "p: drained; everything that was read is processed (final checkpoint 5)\n"),
    ],
)
def test_a_running_pipeline_is_asked_and_waited_for(tmp_path: Path, option: list[str], sentence: str) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        result = CliRunner().invoke(cli.app, ["stop", "p", "--dir", str(tmp_path), *option])
        assert child.wait(120) == 0
    assert result.exit_code == 0, result.output
    assert result.stdout == sentence
    assert re.search(r"p: (stopping|draining) a child", result.stderr)


def test_a_pipeline_that_does_not_run_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.argv", ["headgate", "stop", "p", "--dir", str(tmp_path)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    error = f"Error: no pipeline 'p' runs with its checkpoints in {tmp_path}; running there: none\n"
    assert capsys.readouterr().err == error


def test_a_lock_that_may_not_be_read_is_not_taken_for_a_pipeline_that_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests may run as root, who may read everything."""

    def refused(self: Path, *_: object) -> object:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refused)
    for command in ("stop", "cancel"):
        result = CliRunner().invoke(cli.app, [command, "p", "--dir", str(tmp_path)])
        assert isinstance(result.exception, UsageError)
        assert str(result.exception).startswith("whether pipeline 'p' runs cannot be told, because ")


def test_an_object_store_is_refused() -> None:
    result = CliRunner().invoke(cli.app, ["stop", "p", "--dir", "s3://bucket/checkpoints"])
    assert isinstance(result.exception, UsageError)
    assert "does not say which process runs the pipeline" in str(result.exception)


def test_the_help_names_every_option() -> None:
    result = CliRunner().invoke(cli.app, ["stop", "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    for word in ("--drain", "--dir", "does not continue", "Timers of processing time do not fire"):
        assert word in result.output


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        (ended(Ending.FINISHED), "finished; all its input had ended (final checkpoint 5)"),
        (ended(Ending.STOPPED, None), "stopped; started again, it continues"),
        (ended(Ending.REPLACED), "ended, and has been started again"),
    ],
)
def test_an_end_is_one_sentence(how: LockHolder, sentence: str) -> None:
    assert _outcome(how, drain=False) == sentence


@pytest.mark.parametrize(
    ("how", "drain", "sentence"),
    [
        (ended(Ending.STOPPED), True, "stopped before it had drained; started again, it continues from checkpoint 5"),
        (
            ended(Ending.FAILED, None, "operator 'map' failed"),
            False,
            "failed before it had ended: operator 'map' failed",
        ),
        (ended(Ending.NONE), False, "died before it had ended"),
        (kept(Ending.NONE), True, "the driver died before it had drained; if its supervisor starts it again, the next"),
        (kept(Ending.FAILED, "full"), True, r"the driver failed \(full\) before it had drained; if its supervisor"),
        (kept(Ending.FAILED, "full"), False, "failed before it had ended: full"),
    ],
)
def test_another_end_than_was_asked_for_is_a_failure(how: LockHolder, drain: bool, sentence: str) -> None:
    with pytest.raises(PipelineFailed, match=sentence):
        _outcome(how, drain)
