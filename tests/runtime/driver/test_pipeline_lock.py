"""One driver per pipeline and directory; the second one hears who the first one is."""

from __future__ import annotations

import os
import signal
import socket
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
    AlreadyRunning,
    PipelineLock,
    RequestFile,
    RunningPipeline,
    read_holder,
    running_pipelines,
    taking_signals,
    waiting_requests,
)


def test_the_second_one_is_told_who_holds_it(tmp_path: Path) -> None:
    lock = PipelineLock.acquire(str(tmp_path), "p", "process 1 on here")
    with pytest.raises(UsageError, match="'p' is already run by process 1 on here"):
        PipelineLock.acquire(f"file://{tmp_path}", "p", "process 2 on here")
    with pytest.raises(UsageError, match=r"call stop\(\) of the handle that its start returned"):
        PipelineLock.acquire(str(tmp_path), "p", "process 1 on here")
    lock.release()
    lock.release()


def test_a_released_lock_and_another_pipeline_are_free(tmp_path: Path) -> None:
    PipelineLock.acquire(str(tmp_path), "p", "a much longer description of the first").release()
    lock, other = PipelineLock.acquire(str(tmp_path), "p", "second"), PipelineLock.acquire(str(tmp_path), "q", "third")
    found = read_holder(str(tmp_path), "p")
    assert found is not None
    assert (found.owner, found.host, found.pid, found.ending) == (
        "second",
        socket.gethostname(),
        os.getpid(),
        Ending.NONE,
    )
    lock.release()
    other.release()


def test_a_released_lock_says_how_the_run_ended(tmp_path: Path) -> None:
    lock = PipelineLock.acquire(str(tmp_path), "p", "one")
    before = read_holder(str(tmp_path), "p")
    lock.release(Ending.STOPPED, 7, "")
    after = read_holder(str(tmp_path), "p")
    assert before is not None
    assert after == replace(before, ending=Ending.STOPPED, checkpoint=7)
    again = PipelineLock.acquire(str(tmp_path), "p", "one")
    found = read_holder(str(tmp_path), "p")
    assert found is not None
    assert found.nonce != before.nonce, "each run differs"
    again.release()


def test_a_lock_says_whether_its_process_takes_signals(tmp_path: Path) -> None:
    with taking_signals():
        lock = PipelineLock.acquire(str(tmp_path), "p", "one")
    other = PipelineLock.acquire(str(tmp_path), "q", "one")
    found = [read_holder(str(tmp_path), name) for name in ("p", "q")]
    assert [holder is not None and holder.takes_signals for holder in found] == [True, False]
    lock.release()
    other.release()


def test_a_lock_file_that_is_being_written_or_of_another_version_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    for content in (b"", b"headgate-lock 1 00", b"process 3 on here"):
        (tmp_path / "p" / "lock").write_bytes(content)
        assert read_holder(str(tmp_path), "p") is None
    assert read_holder(str(tmp_path), "never") is None
    assert read_holder("memory://checkpoints", "p") is None


def test_a_driver_takes_the_lock_of_remote_checkpoints_and_a_reset_does_not() -> None:
    root = "s3://bucket/checkpoints"
    first = PipelineLock.acquire(root, "p", "process 1 on here", claimant="a")
    with pytest.raises(AlreadyRunning, match="'p' is already run by process 1 on here"):
        PipelineLock.acquire(root, "p", "a reset")
    second = PipelineLock.acquire(root, "p", "process 2 on here", claimant="b")
    first.release()
    found = read_holder(root, "p")
    assert found is not None
    assert (found.owner, found.ending) == ("process 2 on here", Ending.NONE)
    assert read_holder("s3://bucket/others", "p") is None
    second.release()


def test_a_pipeline_with_remote_checkpoints_runs_without_a_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    PipelineLock.acquire("hdfs://host/checkpoints", "p", "one", claimant="a").release()
    assert read_holder("hdfs://host/checkpoints", "p") is None


def test_checkpoints_in_memory_have_no_lock() -> None:
    lock = PipelineLock.acquire("memory://checkpoints", "p", "one")
    PipelineLock.acquire("memory://checkpoints", "p", "two").release()
    lock.release()


def test_the_lock_is_where_the_checkpoints_are(tmp_path: Path) -> None:
    directory = tmp_path / "with a space"
    lock = PipelineLock.acquire(directory.as_uri(), "p", "one")
    assert (directory / "p" / "lock").is_file()
    assert read_holder(str(directory), "p") is not None
    lock.release()


def nonce(root: Path) -> str:
    holder = read_holder(str(root), "p")
    assert holder is not None
    return holder.nonce


def test_only_the_lock_of_the_silent_run_is_broken(tmp_path: Path) -> None:  # SB8
    zombie = PipelineLock.acquire(str(tmp_path), "p", "a process that is stopped")
    silent = nonce(tmp_path)
    with pytest.raises(AlreadyRunning, match="a process that is stopped"):
        PipelineLock.acquire(str(tmp_path), "p", "second", "the nonce of another run")
    heir = PipelineLock.acquire(str(tmp_path), "p", "the heir", silent)
    with pytest.raises(AlreadyRunning, match="the heir"):  # who saw the same silence comes too late
        PipelineLock.acquire(str(tmp_path), "p", "another heir", silent)
    with pytest.raises(AlreadyRunning, match="the heir"):
        PipelineLock.acquire(str(tmp_path), "p", "anybody")
    held = nonce(tmp_path)
    zombie.release(Ending.FAILED, None, "it was replaced")  # it wakes
    assert nonce(tmp_path) == held, "a zombie says nothing in the name of its heir"
    assert not list((tmp_path / "p").glob(".hg-tmp-*"))
    heir.release()
    PipelineLock.acquire(str(tmp_path), "p", "anybody").release()


def test_a_lock_of_a_dead_run_is_just_taken(tmp_path: Path) -> None:  # SB8
    PipelineLock.acquire(str(tmp_path), "p", "one").release()
    PipelineLock.acquire(str(tmp_path), "p", "two", nonce(tmp_path)).release()


def test_a_lock_that_was_broken_while_it_was_opened_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # SB8
    PipelineLock.acquire(str(tmp_path), "p", "one").release()
    opened, heirs = pipeline_lock.open_lock, []

    def open_lock(path: Path) -> int:
        descriptor = opened(path)
        if not heirs:
            heirs.append(os.fdopen(opened(path.with_name("next")), "rb"))
            os.replace(path.with_name("next"), path)
        return descriptor

    monkeypatch.setattr(pipeline_lock, "open_lock", open_lock)
    lock = PipelineLock.acquire(str(tmp_path), "p", "two")
    assert read_holder(str(tmp_path), "p") is not None, "it is the file that others see"
    lock.release()
    heirs[0].close()


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
