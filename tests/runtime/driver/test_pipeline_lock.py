"""One driver per pipeline and directory; the second one hears who the first one is."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from headgate.codec.json_files import Ending
from headgate.errors import UsageError
from headgate.runtime.driver import pipeline_lock
from headgate.runtime.driver.pipeline_lock import AlreadyRunning, PipelineLock, read_holder, taking_signals


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
