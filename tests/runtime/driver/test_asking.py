"""Questions that other processes leave beside a lock: who takes them, and which are for nobody any more."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from headgate.codec.json_files import LockHolder
from headgate.model.progress import CheckpointOutcome, ControlRequest
from headgate.runtime.driver import remote_control
from headgate.runtime.driver.pipeline_lock import PipelineLock
from headgate.runtime.driver.remote_control import RequestFile, RunningPipeline


def test_a_question_is_for_the_run_it_names(tmp_path: Path) -> None:  # C76
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
    taken = remote_control.take_requests(root, "p", "mine")
    assert sorted(map(repr, (request for _, request in taken))) == sorted(map(repr, mine))
    assert {request.run for _, request in taken} == {"mine", ""}
    assert remote_control.take_requests(root, "p", "mine") == [], "they are taken once"
    for ask, _ in taken:
        ask.remove()
    assert list((tmp_path / "p").iterdir()) == [], "nothing is left of the others"


def test_whoever_asks_says_which_run_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # C76
    monkeypatch.setattr(remote_control.os, "kill", lambda pid, number: None)
    with_lock = PipelineLock.acquire(str(tmp_path), "p", "a program")
    holder = LockHolder("process 1 on here", "here", 1, with_lock.nonce, True)
    RunningPipeline(str(tmp_path), "p", holder).ask_for(ControlRequest(cancels=True))
    ((_, request),) = remote_control.take_requests(str(tmp_path), "p", with_lock.nonce)
    assert request.cancels
    with_lock.release()


@pytest.mark.parametrize(("directory", "expected"), [(0o700, 0o600), (0o2770, 0o660)])
@pytest.mark.parametrize("umask", [0, 0o022])
def test_questions_and_answers_are_for_who_may_write_there(
    tmp_path: Path, umask: int, directory: int, expected: int
) -> None:  # SE1, SE2
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
    assert modes == {remote_control.ASKED: expected, remote_control.ANSWERED: expected}
    assert [ask.answered() for ask in asks] == [CheckpointOutcome(None, "no room in /home/somebody")] * 2
