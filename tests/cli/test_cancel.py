"""``headgate cancel``: asks, waits for the end, and says in one sentence what is left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headgate.cli import app as cli
from headgate.errors import PipelineFailed
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.storage.urls import open_storage

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
assert ask.take() == remote_control.ControlRequest(cancels=True)
ask.answer(CheckpointOutcome(None, "the pipeline does not run at the moment"))
ending, _, doubt = sys.argv[2].partition(" ")
lock.release(Ending[ending], 5, "it failed before", is_in_doubt=bool(doubt))
"""


def cancelled(root: Path, ending: str) -> str | Exception:
    """Return what the command says of a pipeline that ends so; nothing is left beside its lock."""
    command = [sys.executable, "-c", HOLDER, str(root), ending]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        result = CliRunner().invoke(cli.app, ["cancel", "p", "--dir", str(root)])
        assert child.wait(120) == 0
    assert list((root / "p").glob("checkpoint-*")) == []
    return result.exception if isinstance(result.exception, PipelineFailed) else result.stdout


@pytest.mark.parametrize(
    ("ending", "sentence"),
    [
        ("CANCELLED", "p: cancelled, and its checkpoints are removed\n"),
        ("STOPPED", "p: cancelled; started again, it continues from checkpoint 5\n"),
        (
            "STOPPED in doubt",
            "p: cancelled; it is not known whether its checkpoints are removed: the next start begins anew, or "
            "continues from checkpoint 5\n",
        ),
    ],
)
def test_a_pipeline_is_cancelled_and_waited_for(tmp_path: Path, ending: str, sentence: str) -> None:  # C70
    assert cancelled(tmp_path, ending) == sentence


def test_a_pipeline_that_failed_instead_is_told(tmp_path: Path) -> None:
    assert "failed before it had ended: it failed before" in str(cancelled(tmp_path, "FAILED"))


def test_list_says_that_checkpoints_were_removed(tmp_path: Path) -> None:  # C70
    log = CheckpointLog(open_storage(str(tmp_path)), "p")
    log.claim("one", 0)
    log.give_up("one", 0, log.generation)
    result = CliRunner().invoke(cli.app, ["checkpoints", "list", "p", "--dir", str(tmp_path)])
    said = "Its checkpoints were removed when it was cancelled or had failed; another start begins anew."
    assert " ".join(result.stdout.split()) == said
