"""Questions that other processes leave beside a lock: who takes them, and which are for nobody any more."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from headgate.codec.lock_holder import LockHolder
from headgate.model.progress import CheckpointOutcome
from headgate.model.run_request import RunRequest
from headgate.runtime.driver import asking, stopping
from headgate.runtime.driver.asking import Ask
from headgate.runtime.driver.pipeline_lock import PipelineLock
from headgate.runtime.driver.stopping import RunningPipeline


def test_a_question_is_for_the_run_it_names(tmp_path: Path) -> None:  # C76
    """This process, which asks, lives: as does whoever has the number of one that died."""
    (tmp_path / "p").mkdir()
    root = str(tmp_path)
    former = [
        RunRequest(cancels=True),
        RunRequest(cancels=True, run="former"),
        RunRequest(savepoint="/here", ends=True, run="former"),
        RunRequest(run="former"),
    ]
    mine = [RunRequest(run="mine"), RunRequest(cancels=True, run="mine"), RunRequest(savepoint="/here"), RunRequest()]
    for request in [*former, *mine]:
        Ask.leave(root, "p", request)
    taken = asking.taken(root, "p", "mine")
    assert sorted(map(repr, (request for _, request in taken))) == sorted(map(repr, mine))
    assert {request.run for _, request in taken} == {"mine", ""}
    assert asking.taken(root, "p", "mine") == [], "they are taken once"
    for ask, _ in taken:
        ask.remove()
    assert list((tmp_path / "p").iterdir()) == [], "nothing is left of the others"


def test_whoever_asks_says_which_run_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # C76
    monkeypatch.setattr(stopping.os, "kill", lambda pid, number: None)
    with_lock = PipelineLock.acquire(str(tmp_path), "p", "a program")
    holder = LockHolder("process 1 on here", "here", 1, with_lock.nonce, True, takes_asks=True, takes_cancels=True)
    RunningPipeline(str(tmp_path), "p", holder).ask_for(RunRequest(cancels=True))
    ((_, request),) = asking.taken(str(tmp_path), "p", with_lock.nonce)
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
        asks = [Ask.leave(str(tmp_path), "p", request) for request in (None, RunRequest(savepoint="/here"))]
        modes = {path.suffix: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "p").iterdir()}
        for ask in asks:
            ask.take()
            ask.answer(CheckpointOutcome(None, "no room in /home/somebody"))
        modes |= {path.suffix: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "p").iterdir()}
    finally:
        os.umask(before)
    assert modes == {asking.ASKED: expected, asking.ANSWERED: expected}
    assert [ask.answered() for ask in asks] == [CheckpointOutcome(None, "no room in /home/somebody")] * 2
