"""One driver per pipeline and directory; the second one hears who the first one is."""

from __future__ import annotations

from pathlib import Path

import pytest

from headgate.errors import UsageError
from headgate.runtime.pipelinelock import PipelineLock, local_path


def test_the_second_one_is_told_who_holds_it(tmp_path: Path) -> None:
    lock = PipelineLock.acquire(str(tmp_path), "p", "process 1 on here")
    with pytest.raises(UsageError, match="'p' is already run by process 1 on here"):
        PipelineLock.acquire(f"file://{tmp_path}", "p", "process 2 on here")
    lock.release()
    lock.release()


def test_a_released_lock_and_another_pipeline_are_free(tmp_path: Path) -> None:
    PipelineLock.acquire(str(tmp_path), "p", "a much longer description of the first").release()
    lock, other = PipelineLock.acquire(str(tmp_path), "p", "second"), PipelineLock.acquire(str(tmp_path), "q", "third")
    assert (tmp_path / "p" / "lock").read_text() == "second"
    lock.release()
    other.release()


def test_object_stores_have_no_lock() -> None:
    assert local_path("s3://bucket/checkpoints") is None
    lock = PipelineLock.acquire("s3://bucket/checkpoints", "p", "one")
    PipelineLock.acquire("s3://bucket/checkpoints", "p", "two").release()
    lock.release()
