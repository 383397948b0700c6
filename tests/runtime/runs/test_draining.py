"""Draining real pipelines: what was read comes out completely, windows included, and nothing else."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
from pyspark import cloudpickle
from tests.runtime.running import Run, definition_of, pipeline_at
from tests.runtime.runs.test_results import events, generator, windowed

import headgate as hg
from headgate.connectors.files.file_committer import read_committed
from headgate.model.manifest import Manifest
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.storage.urls import open_storage

cloudpickle.register_pickle_by_value(sys.modules[__name__])

Start = Any
RATE = 4_000.0
ROWS = 4_000_000


def newest(root: Path) -> Manifest:
    log = CheckpointLog(open_storage(str(root / "checkpoints")), "p").observe()
    return max((e.content for e in log.entries if isinstance(e.content, Manifest)), key=lambda m: m.checkpoint)


class Holding(hg.ProcessFunction):
    """Sends records on when its timer fires: tomorrow."""

    schema = {"key": int, "n": int}

    def open(self, state: hg.StateHandle) -> None:
        self.count = state.value("count", int)

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> None:
        self.count.put(self.count.get(0) + 1)
        context.timers.register_processing_time(context.timers.processing_time_ms + 86_400_000)

    def on_timer(self, timer: hg.Timer, context: hg.ProcessContext) -> Iterator[dict[str, Any]]:
        yield {"key": context.key, "n": self.count.get(0)}


def test_what_waits_for_a_timer_of_processing_time_is_not_sent_on_by_a_drain(start: Start, tmp_path: Path) -> None:
    pipeline = pipeline_at(tmp_path)
    counts = pipeline.source(generator(ROWS, RATE)).key_by("key").process(Holding(), name="hold")
    counts.sink(hg.FileSink(tmp_path / "out", "parquet", roll_interval="50ms"), name="out")
    run = start(definition_of(pipeline))
    run.wait_checkpoints(2)
    run.driver.drain()
    result = run.result()
    assert result.is_drained
    assert result.records_in > 0
    assert (newest(tmp_path).is_final, newest(tmp_path).is_draining) == (True, True)
    assert not list((tmp_path / "out").glob("**/*.parquet")), "the end neither fires it nor waits for it"


def test_a_drain_asked_before_the_workers_run_is_remembered(start: Start, tmp_path: Path) -> None:  # E7
    run = start(definition_of(windowed(tmp_path, generator(ROWS, RATE))))
    run.driver.drain()
    assert run.result().is_drained


def test_input_that_ends_while_it_drains_changes_nothing(start: Start, tmp_path: Path) -> None:  # E7
    source = generator(2_000, splits=1)
    run = start(definition_of(windowed(tmp_path, source)))
    run.wait(lambda: run.driver.running_generation is not None or run.driver.result.done(), "it runs, or has ended")
    run.driver.drain()
    assert run.result().is_finished
    found = read_committed(str(tmp_path / "out"))
    assert found["n"].sum() <= events(source).height


def test_a_worker_killed_in_mid_drain_does_not_end_the_drain(start: Start, tmp_path: Path) -> None:  # E9
    run = start(definition_of(windowed(tmp_path, generator(ROWS, RATE, splits=2))))
    run.wait_checkpoints(2)
    run.drain_and_kill(0)
    result = run.result()
    assert result.is_drained
    found = read_committed(str(tmp_path / "out"))
    assert found.select(pl.struct("key", "window_start").n_unique()).item() == found.height, "no window fired twice"


def slowly(row: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.0005)  # work that takes time: not a wait for anything
    return row


def test_a_restart_from_a_checkpoint_taken_while_draining_drains_on(start: Start, tmp_path: Path) -> None:  # E9
    pipeline = pipeline_at(tmp_path, interval="20ms")
    stream = pipeline.source(generator(ROWS, RATE, splits=2)).rebalance().map(slowly)
    stream.sink(hg.FileSink(tmp_path / "out", "parquet"), name="out")
    run = start(definition_of(pipeline, credit_bytes=64 << 10))  # a backlog of seconds, however long it grows
    run.wait_checkpoints(2)
    killed: list[int] = []

    def kill_at_the_first_marked_checkpoint(checkpoint: int, duration_ms: int, size_bytes: int) -> None:
        manifest = newest(tmp_path)
        if manifest.is_draining and not manifest.is_final and not killed:
            killed.append(checkpoint)
            os.kill(run.driver.worker_pids()[1], signal.SIGKILL)
        Run.on_checkpoint(run, checkpoint, duration_ms, size_bytes)

    run.on_checkpoint = kill_at_the_first_marked_checkpoint  # type: ignore[method-assign]
    run.driver.drain()
    result = run.result()
    assert result.is_drained
    if result.restarts:  # else, or if it was not noticed, the final checkpoint was complete before the worker died
        notes = " ".join(run.notes)
        assert f"continues from checkpoint {killed[0]}" in notes or "was drained and does not continue" in notes
    found = read_committed(str(tmp_path / "out"))
    assert found["id"].n_unique() == found.height, "nothing came out twice"
