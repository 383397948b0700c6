"""Whose turn it is to stop a context that a pipeline made, when others use it, or end beside it."""

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
from headgate.spark.session import PipelineContext, SparkHandle, find_context

WAIT_S = 300.0


class Context:
    """A context whose stop takes until it is let go on."""

    master = "local[2]"

    def __init__(self) -> None:
        self.is_stopping, self.may_stop = threading.Event(), threading.Event()
        self.is_stopped = False

    def stop(self) -> None:
        self.is_stopping.set()
        assert self.may_stop.wait(WAIT_S)
        assert not self.is_stopped, "once"
        self.is_stopped = True
        if SparkContext._active_spark_context is self:
            SparkContext._active_spark_context = None


class Handle(SparkHandle):
    """A handle of a run that has ended."""

    def __init__(self, give_back: Any) -> None:
        driver = SimpleNamespace(name="p", result=SimpleNamespace(), join=lambda: None)
        super().__init__(driver, give_back)  # type: ignore[arg-type]

    def release(self) -> None:
        self._release()


@pytest.fixture(autouse=True)
def no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PipelineContext, "current", None)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as threads:
        yield threads


def test_no_wait_for_a_run_returns_before_its_context_is_stopped(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look that has enough is stopped by one thread, while another waits for it and goes on to the next start."""
    context = Context()
    handle = Handle(PipelineContext(context).use())
    monkeypatch.setattr(SparkContext, "_active_spark_context", context)
    first = pool.submit(handle.release)
    assert context.is_stopping.wait(WAIT_S)
    second, found = pool.submit(handle.release), pool.submit(find_context, None, None)
    with pytest.raises(TimeoutError):
        second.result(0.1)  # not a wait for anything: a longer one finds nothing else
    assert not found.done(), "a start waits, too"
    context.may_stop.set()
    for done in (first, second):
        done.result(WAIT_S)
    assert found.result(WAIT_S) is None


def test_the_last_pipeline_on_a_context_that_pipelines_made_stops_it() -> None:
    context = Context()
    context.may_stop.set()
    first = PipelineContext(context).use()
    own = PipelineContext.of(context)
    assert own is not None
    second = own.use()
    first()
    first()
    assert not context.is_stopped, "the second pipeline runs"
    second()
    assert context.is_stopped
    assert PipelineContext.of(context) is None
    assert PipelineContext.of(Context()) is None, "its user's"


@pytest.mark.spark
@pytest.mark.early
@pytest.mark.xdist_group("session")  # of one process, which keeps its JVM
def test_looks_and_runs_of_one_process_follow_each_other(tmp_path: Path) -> None:
    """As cells of a notebook do, each right behind the one before, in the main thread and in others."""
    assert SparkContext._active_spark_context is None, "the context is the pipelines' own"
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
    assert SparkSession._instantiatedSession is None, "no pipeline needs Spark SQL, whose start takes a second"
