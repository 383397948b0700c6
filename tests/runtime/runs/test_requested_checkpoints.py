"""Checkpoints that somebody asks a running pipeline for: completed, or the reason why not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.runtime.running import WAIT_S, Run, definition_of, pipeline_at
from tests.runtime.runs.test_results import generator

import headgate as hg
from headgate.model.progress import CheckpointOutcome
from headgate.runtime.driver import pipeline_lock
from headgate.runtime.driver.pipeline_lock import RequestFile

Start = Any


def begun(start: Start, root: Path) -> Run:
    """A pipeline that takes no checkpoint by itself."""
    pipeline = pipeline_at(root, interval=None)
    pipeline.source(generator(2_000, 1_000, batch=20)).sink(hg.FileSink(root / "out"), name="out")
    run: Run = start(definition_of(pipeline))
    run.pids()
    return run


def test_a_checkpoint_is_taken_on_request(start: Start, tmp_path: Path) -> None:  # C60
    run = begun(start, tmp_path)
    first = run.driver.take_checkpoint().result(WAIT_S)
    second = run.driver.take_checkpoint().result(WAIT_S)
    assert [first.checkpoint, second.checkpoint] == run.checkpoints[:2]
    assert run.result().is_finished
    assert run.driver.take_checkpoint().result(WAIT_S) == CheckpointOutcome(None, "the pipeline ended")


def test_a_request_that_a_failure_meets_is_answered(start: Start, tmp_path: Path) -> None:  # C62
    run = begun(start, tmp_path)
    frozen = run.suspend(0)  # it acknowledges nothing
    asked = run.driver.take_checkpoint()
    run.wait(lambda: run.driver.supervision.live is not None and bool(run.driver.supervision._asked), "it was asked")
    os.kill(frozen, 9)
    assert asked.result(WAIT_S) == CheckpointOutcome(None, "the pipeline restarted")
    run.wait_restarts(1)
    assert run.driver.take_checkpoint().result(WAIT_S).checkpoint is not None, "who asks again gets one"


def test_whoever_asks_from_another_process_is_answered(start: Start, tmp_path: Path) -> None:
    run = begun(start, tmp_path)
    root = str(tmp_path / "checkpoints")
    asks = [RequestFile.leave(root, "p") for _ in range(2)]
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    (tmp_path / "checkpoints" / "p" / f"checkpoint-{int(dead.stdout)}-aa.answered").touch()
    run.driver.answer_asks()
    answers = [ask.answered() for ask in asks]
    assert answers == [CheckpointOutcome(run.checkpoints[0])] * 2, "one checkpoint is for all who wait"
    assert pipeline_lock.waiting_requests(root, "p") == []
    for ask in asks:
        ask.remove()
    assert list((tmp_path / "checkpoints" / "p").glob("checkpoint-*")) == [], "the dead one's is gone, too"
