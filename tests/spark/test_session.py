"""Whose turn it is to stop a session that a pipeline made, when others use it, or end beside it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

import headgate as hg
from headgate.spark.session import PipelineSession, SparkHandle, find_session

WAIT_S = 300.0


class Session:
    """A session whose stop takes until it is let go on."""

    def __init__(self) -> None:
        self.sparkContext = SimpleNamespace(master="local[2]", defaultParallelism=2)
        self.is_stopping, self.may_stop = threading.Event(), threading.Event()
        self.is_stopped = False

    def stop(self) -> None:
        self.is_stopping.set()
        assert self.may_stop.wait(WAIT_S)
        assert not self.is_stopped, "once"
        self.is_stopped = True


class Handle(SparkHandle):
    """A handle of a run that has ended."""

    def __init__(self, give_back: Any) -> None:
        driver = SimpleNamespace(name="p", result=SimpleNamespace(), join=lambda: None)
        super().__init__(driver, give_back)  # type: ignore[arg-type]

    def release(self) -> None:
        self._release()


@pytest.fixture(autouse=True)
def no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PipelineSession, "current", None)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as threads:
        yield threads


def test_no_wait_for_a_run_returns_before_its_session_is_stopped(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look that has enough is stopped by one thread, while another waits for it and goes on to the next start."""
    session = Session()
    handle = Handle(PipelineSession(session).use())
    monkeypatch.setattr(SparkContext, "_active_spark_context", session.sparkContext)
    monkeypatch.setattr(SparkSession, "getActiveSession", lambda: None if session.is_stopped else session)
    first = pool.submit(handle.release)
    assert session.is_stopping.wait(WAIT_S)
    second, found = pool.submit(handle.release), pool.submit(find_session, None, None)
    with pytest.raises(TimeoutError):
        second.result(0.1)  # not a wait for anything: a longer one finds nothing else
    assert not found.done(), "a start waits, too"
    session.may_stop.set()
    for done in (first, second):
        done.result(WAIT_S)
    assert found.result(WAIT_S) is None


def test_the_last_pipeline_on_a_session_that_pipelines_made_stops_it() -> None:
    session = Session()
    session.may_stop.set()
    first = PipelineSession(session).use()
    own = PipelineSession.of(session)
    assert own is not None
    second = own.use()
    first()
    first()
    assert not session.is_stopped, "the second pipeline runs"
    second()
    assert session.is_stopped
    assert PipelineSession.of(session) is None
    assert PipelineSession.of(Session()) is None, "its user's"


@pytest.mark.spark
@pytest.mark.early
@pytest.mark.xdist_group("session")  # of one process, which keeps its JVM
def test_looks_and_runs_of_one_process_follow_each_other(tmp_path: Path) -> None:
    """As cells of a notebook do, each right behind the one before, in the main thread and in others."""
    assert SparkContext._active_spark_context is None, "the session is the pipelines' own"
    pipeline = hg.Pipeline("cells", parallelism=1, checkpointing=hg.Checkpointing(dir=tmp_path / "checkpoints"))
    endless = pipeline.source(hg.Generator({"id": hg.RowNumber()}, rows_per_second=500))

    def look() -> None:
        assert [row["id"] for row in endless.take(1)] == [0]

    def run(name: str) -> None:
        whole = hg.Pipeline(name, parallelism=1, checkpointing=hg.Checkpointing(dir=tmp_path / "checkpoints"))
        whole.source(hg.FromRows([{"id": 1}])).sink(hg.FileSink(str(tmp_path / name)))
        assert whole.run().is_finished

    look()
    run("first")
    with ThreadPoolExecutor(1) as cell:
        cell.submit(look).result()
        look()
    assert SparkContext._active_spark_context is None
