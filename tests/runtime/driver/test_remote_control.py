"""Finding and signalling the process that runs a pipeline, and request files beside its lock."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headgate.codec.json_files import Ending, LockHolder, encode_holder
from headgate.errors import UsageError
from headgate.model.progress import CheckpointOutcome, ControlRequest
from headgate.runtime.driver import pipeline_lock
from headgate.runtime.driver.pipeline_lock import (
    DRAIN,
    STOP,
    PipelineLock,
    RequestFile,
    RunningPipeline,
    read_holder,
    running_pipelines,
    taking_signals,
    waiting_requests,
)

HOLDER = """
import signal, sys
wanted = {signal.SIGTERM, signal.SIGUSR1}
signal.pthread_sigmask(signal.SIG_BLOCK, wanted)  # before a library starts a thread, which would take the signal
from headgate.codec.json_files import Ending
from headgate.runtime.driver.pipeline_lock import PipelineLock, taking_signals
with taking_signals():
    lock = PipelineLock.acquire(sys.argv[1], "p", "a child", claimant="a")
print("ready", flush=True)
number = signal.sigwait(wanted)
if sys.argv[2] == "word":
    lock.release(Ending.DRAINED if number == signal.SIGUSR1 else Ending.STOPPED, 5, "")
"""

REMOTE = "s3://bucket/checkpoints"

Hold = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Hold]:
    """Have a child hold the lock of pipeline ``p`` until a signal comes; it then leaves a word, or not.

    ``root``: where its checkpoints are, by default in ``tmp_path``.
    """
    children: list[subprocess.Popen[str]] = []

    def begin(how: str, root: str = "") -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLDER, root or str(tmp_path), how]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        return child

    yield begin
    for child in children:
        child.kill()
        child.communicate()


@pytest.mark.parametrize(("drain", "ending"), [(False, Ending.STOPPED), (True, Ending.DRAINED)])
def test_the_holder_is_asked_and_leaves_word(tmp_path: Path, hold: Hold, drain: bool, ending: Ending) -> None:
    child = hold("word")
    running = RunningPipeline.find(str(tmp_path), "p")
    assert running.holder.pid == child.pid
    assert running.ended() is None
    running.ask(drain=drain)
    child.wait(120)
    assert running.ended() == replace(running.holder, ending=ending, checkpoint=5)
    with pytest.raises(UsageError, match="no pipeline 'p' runs"):
        RunningPipeline.find(str(tmp_path), "p")


def test_the_holder_of_remote_checkpoints_is_asked_on_its_machine(hold: Hold) -> None:
    child = hold("word", REMOTE)
    running = RunningPipeline.find(REMOTE, "p")
    assert (running.holder.pid, running.ended()) == (child.pid, None)
    ask = RequestFile.leave(REMOTE, "p", ControlRequest("/savepoint"))
    assert [one.take() for one in waiting_requests(REMOTE, "p")] == [ControlRequest("/savepoint")]
    ask.remove()
    running.ask(drain=False)
    child.wait(120)
    ended = running.ended()
    assert ended is not None
    assert ended.ending is Ending.STOPPED
    with pytest.raises(UsageError, match=r"no process of this user and machine runs a pipeline 'p' .* in s3://bucket/"):
        RunningPipeline.find(REMOTE, "p")


def test_a_holder_that_dies_leaves_no_word(tmp_path: Path, hold: Hold) -> None:
    child = hold("silent")
    running = RunningPipeline.find(f"file://{tmp_path}", "p")
    running.ask(drain=True)
    child.wait(120)
    ended = running.ended()
    assert ended is not None
    assert ended.ending is Ending.NONE
    with pytest.raises(UsageError, match=r"no pipeline 'p' runs with its checkpoints in .*; running there: none"):
        RunningPipeline.find(str(tmp_path), "p")


def test_a_run_that_was_started_again_is_another_one(tmp_path: Path, hold: Hold) -> None:
    first = hold("word")
    running = RunningPipeline.find(str(tmp_path), "p")
    running.ask(drain=False)
    first.wait(120)
    hold("word")
    ended = running.ended()
    assert ended is not None
    assert ended.ending is Ending.REPLACED


def test_others_that_run_are_named(tmp_path: Path, hold: Hold) -> None:
    hold("word")
    with pytest.raises(UsageError, match=r"no pipeline 'other' runs with its checkpoints in .*; running there: p$"):
        RunningPipeline.find(str(tmp_path), "other")


def test_a_process_that_got_the_number_of_a_dead_holder_is_left_alone(tmp_path: Path) -> None:
    with taking_signals():
        lock = PipelineLock.acquire(str(tmp_path), "p", "one")
    content = (tmp_path / "p" / "lock").read_bytes()
    lock.release()
    (tmp_path / "p" / "lock").write_bytes(content)  # as a holder leaves it that was killed; its number is ours now
    assert running_pipelines(tmp_path) == []
    with pytest.raises(UsageError, match="no pipeline 'p' runs"):
        RunningPipeline.find(str(tmp_path), "p")


def test_a_pipeline_on_another_machine_is_stopped_there(tmp_path: Path) -> None:
    lock = PipelineLock.acquire(str(tmp_path), "p", "process 7 on elsewhere")
    holder = read_holder(str(tmp_path), "p")
    assert holder is not None
    (tmp_path / "p" / "lock").write_bytes(encode_holder(replace(holder, host="elsewhere")))
    with pytest.raises(UsageError, match="run by process 7 on elsewhere; stop it on that machine"):
        RunningPipeline.find(str(tmp_path), "p")
    lock.release()


def test_a_program_that_takes_no_signals_is_not_killed_by_one(tmp_path: Path) -> None:
    lock = PipelineLock.acquire(str(tmp_path), "p", "process 7 on here")
    with pytest.raises(UsageError, match=r"call stop\(\) or stop\(drain=True\) of its handle there"):
        RunningPipeline.find(str(tmp_path), "p")
    lock.release()


def test_checkpoints_in_memory_do_not_say_who_runs() -> None:
    with pytest.raises(UsageError, match="SIGTERM to stop it or SIGUSR1 to drain it"):
        RunningPipeline.find("memory://checkpoints", "p")


def test_the_signals_are_those_that_are_documented() -> None:
    assert (STOP, DRAIN) == (signal.SIGTERM, signal.SIGUSR1)


# -- questions that other processes leave beside a lock -----


def test_a_question_is_for_the_run_it_names(tmp_path: Path) -> None:
    """This process, which asks, lives: as does whoever has the number of one that died."""
    (tmp_path / "p").mkdir()
    root = str(tmp_path)
    former = [
        ControlRequest(cancels=True),
        ControlRequest(cancels=True, run="former"),
        ControlRequest(savepoint="/here", ends=True, run="former"),
        ControlRequest(run="former"),
    ]
    mine = [
        ControlRequest(run="mine"),
        ControlRequest(cancels=True, run="mine"),
        ControlRequest(savepoint="/here"),
        ControlRequest(),
    ]
    for request in [*former, *mine]:
        RequestFile.leave(root, "p", request)
    taken = pipeline_lock.take_requests(root, "p", "mine")
    assert sorted(map(repr, (request for _, request in taken))) == sorted(map(repr, mine))
    assert {request.run for _, request in taken} == {"mine", ""}
    assert pipeline_lock.take_requests(root, "p", "mine") == [], "they are taken once"
    for ask, _ in taken:
        ask.remove()
    assert list((tmp_path / "p").iterdir()) == [], "nothing is left of the others"


def test_whoever_asks_says_which_run_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_lock.os, "kill", lambda pid, number: None)
    with_lock = PipelineLock.acquire(str(tmp_path), "p", "a program")
    holder = LockHolder("process 1 on here", "here", 1, with_lock.nonce, True)
    RunningPipeline(str(tmp_path), "p", holder).ask_for(ControlRequest(cancels=True))
    ((_, request),) = pipeline_lock.take_requests(str(tmp_path), "p", with_lock.nonce)
    assert request.cancels
    with_lock.release()


@pytest.mark.parametrize(("directory", "expected"), [(0o700, 0o600), (0o2770, 0o660)])
@pytest.mark.parametrize("umask", [0, 0o022])
def test_questions_and_answers_are_for_who_may_write_there(
    tmp_path: Path, umask: int, directory: int, expected: int
) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p").chmod(directory)
    before = os.umask(umask)
    try:
        asks = [RequestFile.leave(str(tmp_path), "p", request) for request in (None, ControlRequest(savepoint="/here"))]
        modes = {path.suffix: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "p").iterdir()}
        for ask in asks:
            ask.take()
            ask.answer(CheckpointOutcome(None, "no room in /home/somebody"))
        modes |= {path.suffix: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "p").iterdir()}
    finally:
        os.umask(before)
    assert modes == {pipeline_lock.ASKED: expected, pipeline_lock.ANSWERED: expected}
    assert [ask.answered() for ask in asks] == [CheckpointOutcome(None, "no room in /home/somebody")] * 2
