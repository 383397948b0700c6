"""One driver per pipeline and directory; the second one hears who the first one is."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from headgate.codec.lock_holder import Ending
from headgate.errors import UsageError
from headgate.runtime.driver.pipeline_lock import PipelineLock, read_holder, taking_signals


def test_the_second_one_is_told_who_holds_it(tmp_path: Path) -> None:
    lock = PipelineLock.acquire(str(tmp_path), "p", "process 1 on here")
    with pytest.raises(UsageError, match="'p' is already run by process 1 on here"):
        PipelineLock.acquire(f"file://{tmp_path}", "p", "process 2 on here")
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
    assert read_holder("s3://bucket/checkpoints", "p") is None


def test_object_stores_have_no_lock() -> None:
    lock = PipelineLock.acquire("s3://bucket/checkpoints", "p", "one")
    PipelineLock.acquire("s3://bucket/checkpoints", "p", "two").release()
    lock.release()


def test_the_lock_is_where_the_checkpoints_are(tmp_path: Path) -> None:
    directory = tmp_path / "with a space"
    lock = PipelineLock.acquire(directory.as_uri(), "p", "one")
    assert (directory / "p" / "lock").is_file()
    assert read_holder(str(directory), "p") is not None
    lock.release()
