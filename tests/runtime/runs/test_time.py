"""Functions with timers, with the real driver and real workers that are killed: each timer fires once."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
from pyspark import cloudpickle
from tests.runtime.running import Run, definition_of, pipeline_at
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


class Numbering(hg.ProcessFunction):
    """Numbers the records of each key, and forgets each of them at once in another state."""

    schema = {"key": pa.int64(), "number": pa.int64(), "left": pa.int64()}

    def __init__(self, ttl: hg.TTL | None) -> None:
        self.ttl = ttl

    def open(self, state: hg.StateHandle) -> None:
        self.count = state.value("count", pa.int64(), ttl=self.ttl)
        self.short = state.list("short", pa.int64(), ttl=hg.TTL("1ms"))

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> Iterator[dict[str, Any]]:
        number = self.count.get(0) + 1
        self.count.put(number)
        self.short.append(number)
        yield {"key": context.key, "number": number, "left": 0}


def test_a_ttl_is_given_and_taken_away_between_runs(start: Start, tmp_path: Path) -> None:
    source = generator(6_000, splits=None)

    def numbered(ttl: hg.TTL | None, parallelism: int, rate: int | None) -> PipelineDefinition:
        pipeline = pipeline_at(tmp_path, parallelism=parallelism)
        stream = pipeline.source(replace(source, rows_per_second=rate)).key_by("key")
        stream.process(Numbering(ttl), name="numbering").sink(hg.FileSink(tmp_path / "out", "parquet"))
        return definition_of(pipeline)

    for ttl, parallelism in ((None, 2), (hg.TTL("1h", "read_and_write"), 3), (hg.TTL("2h"), 2)):
        run = start(numbered(ttl, parallelism, 2_000))
        run.wait_checkpoints(2)
        if ttl is not None and ttl.update == "read_and_write":
            run.kill(1)
            run.wait_restarts(1)
            run.wait_checkpoints(1)
        run.driver.stop()
        assert not run.result().is_finished
        newest = next(tmp_path.rglob("log")).parent
        assert hg.read_state(newest, "numbering", "short").height < 3_000, "what expired is in no snapshot"
    assert start(numbered(None, 3, None)).result().is_finished
    wanted = events(source).with_columns(number=pl.int_range(1, pl.len() + 1).over("key"), left=pl.lit(0))
    same(read_committed(str(tmp_path / "out")), wanted.select("key", "number", "left"))


SCHEMA = pa.schema([("key", pa.string()), ("at", pa.int64())])


def append(root: Path, name: str, *times_ms: int) -> None:
    (root / "in").mkdir(exist_ok=True)
    with (root / "in" / name).open("a") as file:
        file.writelines(json.dumps({"key": "k", "at": at_ms}) + "\n" for at_ms in times_ms)


def counts(root: Path) -> list[int]:
    found = read_committed(str(root / "counts"))
    return found["count"].to_list() if found.width else []


def test_a_followed_directory_with_fewer_files_than_subtasks_has_event_time(
    start: Callable[..., Run], tmp_path: Path
) -> None:  # W7
    append(tmp_path, "a.json", 100, 200, 1_100)
    pipeline = pipeline_at(tmp_path, parallelism=2)
    rows = pipeline.source(hg.JsonLines(tmp_path / "in", SCHEMA, follow=True, discovery_interval="20ms"))
    timed = rows.with_timestamps("at", out_of_orderness="0s")
    windows = timed.key_by("key").window(hg.Tumbling("1s")).agg(count=pl.len())
    windows.sink(hg.FileSink(tmp_path / "counts", "parquet", roll_interval=0), name="counts")
    run = start(definition_of(pipeline))
    run.wait(lambda: counts(tmp_path) == [2], "the first window")
    append(tmp_path, "b.json", 2_300)  # the other subtask's, which counts from now on
    append(tmp_path, "a.json", 2_100)
    run.wait(lambda: sorted(counts(tmp_path)) == [1, 2], "the second window")
    run.driver.stop()
    run.result()


def test_windows_of_silent_input_fire_with_the_clock(start: Callable[..., Run], tmp_path: Path) -> None:  # W27, W28
    class HalfASecondBehind(hg.WatermarkGenerator):
        def __init__(self) -> None:
            self.latest = 0

        def on_batch(self, times: npt.NDArray[np.int64]) -> int | None:
            self.latest = max(self.latest, int(times.max()))
            return self.latest - 500

        def snapshot(self) -> int:
            return self.latest

        def restore(self, state: int) -> None:
            self.latest = state

    append(tmp_path, "a.json", 100, 200, 1_100, 7 * 10**12)
    dead = hg.DeadLetter(hg.FileSink(tmp_path / "bad", "jsonl", roll_interval=0))
    pipeline = pipeline_at(tmp_path, parallelism=2, bad_records=dead)
    rows = pipeline.source(hg.JsonLines(tmp_path / "in", SCHEMA, follow=True, discovery_interval="20ms"))
    timed = rows.with_timestamps("at", watermark=HalfASecondBehind(), silent_after="200ms", max_ahead="1h")
    windows = timed.key_by("key").window(hg.Tumbling("1s")).agg(count=pl.len())
    windows.sink(hg.FileSink(tmp_path / "counts", "parquet", roll_interval=0), name="counts")
    run = start(definition_of(pipeline))
    run.wait(lambda: sorted(counts(tmp_path)) == [1, 2], "both windows, although nothing comes after them")
    append(tmp_path, "a.json", 50, 90_000)
    run.wait(lambda: read_committed(str(tmp_path / "bad"))["problem"].to_list() != [], "the bad record")
    run.driver.stop()
    run.result()
    (problem,) = read_committed(str(tmp_path / "bad"))["problem"]
    assert "more than 3600 s ahead of the clock" in problem
