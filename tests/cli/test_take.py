"""``headgate checkpoints take``: asks, waits, and says in one sentence what came of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headgate.cli import app as cli
from headgate.errors import PipelineFailed, UsageError
from headgate.runtime.driver.pipeline_lock import PipelineLock
from headgate.runtime.driver.remote_control import RunningPipeline

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
if sys.argv[2] == "ends":
    lock.release(Ending.STOPPED, 5, "")
else:
    ask.answer(CheckpointOutcome(7) if sys.argv[2] == "completes" else CheckpointOutcome(None, "it expired"))
    sys.stdin.readline()
"""


def taken(root: Path, how: str) -> str | Exception:
    """Return what the command says to a pipeline that does this; the lock's directory is clean afterwards."""
    command = [sys.executable, "-c", HOLDER, str(root), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        result = CliRunner().invoke(cli.app, ["checkpoints", "take", "p", "--dir", str(root)])
        child.communicate("\n", 120)
        assert child.returncode == 0
    assert list((root / "p").glob("checkpoint-*")) == []
    return result.exception if isinstance(result.exception, PipelineFailed) else result.stdout


def test_a_checkpoint_is_taken_on_request_and_waited_for(tmp_path: Path) -> None:  # C63
    assert taken(tmp_path, "completes") == "p: checkpoint 7 is completed\n"


@pytest.mark.parametrize(("how", "reason"), [("fails", "it expired"), ("ends", "the pipeline ended")])
def test_the_reason_why_there_is_none_is_told(tmp_path: Path, how: str, reason: str) -> None:  # C61
    assert str(taken(tmp_path, how)) == f"p: there is no new checkpoint: {reason}"


def test_a_process_that_cannot_answer_is_not_signalled(tmp_path: Path) -> None:  # C63
    lock = PipelineLock.acquire(str(tmp_path), "p", "a program")
    try:
        with pytest.raises(UsageError, match="a program that started it with start"):
            RunningPipeline.find(str(tmp_path), "p")
    finally:
        lock.release()
