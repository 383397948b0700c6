"""Functions with timers, with the real driver and real workers that are killed: each timer fires once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
from pyspark import cloudpickle
from tests.runtime.running import definition_of, pipeline_at
from tests.runtime.runs.test_results import events, generator, same

import headgate as hg
from headgate.connectors.files.file_committer import read_committed
from headgate.model.plan import PipelineDefinition

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import tests

Start = Any
STEP_MS = 100


class Steps(hg.ProcessFunction):
    """Counts the records of each key and step, and tells when the step is over."""

    schema = {"key": pa.int64(), "end": pa.int64(), "n": pa.int64()}

    def open(self, state: hg.StateHandle) -> None:
        self.counts = state.map("counts", pa.int64(), pa.int64())

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> None:
        end = (row["ms"] // STEP_MS + 1) * STEP_MS
        self.counts.put(end, self.counts.get(end, 0) + 1)
        context.timers.register_event_time(end)

    def on_timer(self, timer: hg.Timer, context: hg.ProcessContext) -> Iterator[dict[str, Any]]:
        yield {"key": context.key, "end": timer.time_ms, "n": self.counts.get(timer.time_ms, -1)}
        self.counts.remove(timer.time_ms)


class StepsByBatch(hg.BatchProcessFunction):
    """The same by batch."""

    schema = Steps.schema

    def open(self, state: hg.BatchStateHandle) -> None:
        self.counts = state.map("counts", pa.int64(), pa.int64())

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> None:
        ends = (batch["ms"] // STEP_MS + 1) * STEP_MS
        counted = batch.group_by("key", ends.alias("end")).agg(n=pl.len().cast(pl.Int64))
        keys = context.lookup(counted)
        self.counts.put(
            counted["end"], self.counts.get(counted["end"], keys=keys).fill_null(0) + counted["n"], keys=keys
        )
        context.timers.register_event_time(ends)

    def on_timer(self, timers: hg.FiredTimers, context: hg.BatchContext) -> pl.DataFrame:
        counts = self.counts.get(timers.times_ms).fill_null(-1)
        self.counts.remove(timers.times_ms)
        return context.keys.frame().with_columns(end=timers.times_ms, n=counts)


class Delayed(hg.ProcessFunction):
    """Holds each record back for 30 ms of processing time."""

    schema = {"key": pa.int64(), "id": pa.int64()}

    def open(self, state: hg.StateHandle) -> None:
        self.held = state.map("held", pa.int64(), pa.int64())

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> None:
        due = context.timers.processing_time_ms + 30
        self.held.put(row["id"], due)
        context.timers.register_processing_time(due)
        context.timers.register_event_time(10**15)  # what is left at the end

    def on_timer(self, timer: hg.Timer, context: hg.ProcessContext) -> Iterator[dict[str, Any]]:
        for number, due in self.held.items():
            if timer.is_event_time or due <= timer.time_ms:
                self.held.remove(number)
                yield {"key": context.key, "id": number}


def timed(root: Path, source: hg.Generator, parallelism: int, rate: int | None) -> PipelineDefinition:
    pipeline = pipeline_at(root, parallelism=parallelism)
    stream = pipeline.source(replace(source, rows_per_second=rate)).with_timestamps("ts")
    keyed = stream.with_columns(ms=pl.col("ts").dt.epoch("ms")).key_by("key")
    for name, function in (("rows", Steps()), ("batches", StepsByBatch()), ("delayed", Delayed())):
        keyed.process(function, name=f"{name}-by").sink(hg.FileSink(root / name, "parquet"), name=name)
    return definition_of(pipeline)


def test_each_timer_fires_once_although_workers_die_and_the_parallelism_changes(start: Start, tmp_path: Path) -> None:
    source = generator(6_000, splits=None)  # TM6
    run = start(timed(tmp_path, source, 2, 1_500))
    run.wait_checkpoints(2)
    run.kill(1)
    run.wait_restarts(1)
    run.wait_checkpoints(1)
    run.driver.stop()
    assert not run.result().is_finished
    run = start(timed(tmp_path, source, 3, 3_000))
    run.wait_checkpoints(1)
    run.kill(2)
    assert run.result().is_finished
    end = (pl.col("ts").dt.epoch("ms") // STEP_MS + 1) * STEP_MS
    wanted = events(source).group_by("key", end=end).agg(n=pl.len().cast(pl.Int64))
    same(read_committed(str(tmp_path / "rows")), wanted)
    same(read_committed(str(tmp_path / "batches")), wanted)
    same(read_committed(str(tmp_path / "delayed")), events(source).select("key", "id"))


class Passing(hg.ProcessFunction):
    """Has neither state nor timers."""

    schema = Delayed.schema

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> Iterator[dict[str, Any]]:
        yield {"key": context.key, "id": row["id"]}


class PassingLater(Passing):
    """Passes records on at the end."""

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> Iterator[dict[str, Any]]:
        context.timers.register_event_time(10**15 + row["id"])
        return iter(())

    def on_timer(self, timer: hg.Timer, context: hg.ProcessContext) -> Iterator[dict[str, Any]]:
        yield {"key": context.key, "id": timer.time_ms - 10**15}


def test_a_function_without_state_is_given_timers_between_two_runs(start: Start, tmp_path: Path) -> None:  # TM6
    source = generator(6_000, splits=None)

    def passing(function: hg.ProcessFunction, parallelism: int, rate: int | None) -> PipelineDefinition:
        pipeline = pipeline_at(tmp_path, parallelism=parallelism)
        stream = pipeline.source(replace(source, rows_per_second=rate)).with_timestamps("ts").key_by("key")
        stream.process(function, name="passing").sink(hg.FileSink(tmp_path / "out", "parquet"))
        return definition_of(pipeline)

    run = start(passing(Passing(), 2, 1_500))
    run.wait_checkpoints(2)
    run.driver.stop()
    assert not run.result().is_finished
    assert start(passing(PassingLater(), 3, None)).result().is_finished
    same(read_committed(str(tmp_path / "out")), events(source).select("key", "id"))
