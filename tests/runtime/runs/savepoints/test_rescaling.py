"""A checkpoint restored at another parallelism, with the real driver and real workers: nothing lost, nothing twice."""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from pyspark import cloudpickle
from tests.conftest import few
from tests.runtime.running import Run, definition_of, pipeline_at
from tests.runtime.runs.test_results import events, generator, recounted, same
from tests.store.traffic import KEYS, SCHEMA, Traffic, flowing, rows_of

import headgate as hg
from headgate.connectors.files.file_committer import read_committed
from headgate.model.plan import PipelineDefinition
from headgate.store.store import Store

# Rules: F1, F21


cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import tests

Start = Any

SLOW = 1_000
"""Rows each second of a run that is stopped: it must not end before, however busy the machine is."""


def added(total: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "n": total["n"] + row["n"], "value": total["value"] + row["value"]}


def everything(root: Path, source: hg.Generator, parallelism: int, rate: int | None) -> PipelineDefinition:
    """Windows with partial results, windows that keep their records, a reduce, and the rows themselves."""
    pipeline = pipeline_at(root, parallelism=parallelism)
    source = replace(source, rows_per_second=rate)
    stream = pipeline.source(source).with_timestamps("ts")
    keyed = stream.key_by("key").window(hg.Tumbling("1s"))
    counts = keyed.agg(n=pl.len(), total=pl.col("value").sum())
    counts.sink(hg.FileSink(root / "windows", "parquet"), name="windows")
    distinct = keyed.agg(distinct=pl.col("value").n_unique())
    distinct.sink(hg.FileSink(root / "distinct", "parquet"), name="distinct")
    sums = stream.select("key", "value", n=pl.lit(1)).key_by("key").reduce(added)
    sums.sink(hg.FileSink(root / "sums", "parquet"), name="sums")
    stream.sink(hg.FileSink(root / "rows", "parquet", roll_interval=0), name="rows")
    return definition_of(pipeline)


def check_everything(root: Path, source: hg.Generator) -> None:
    made = events(source)
    same(read_committed(str(root / "rows")), made)
    same(read_committed(str(root / "windows")), recounted(source))
    start = pl.col("ts").dt.truncate("1s").alias("window_start")
    same(
        read_committed(str(root / "distinct")),
        made.group_by("key", start).agg(distinct=pl.col("value").n_unique().cast(pl.UInt32)),
    )
    sums = read_committed(str(root / "sums"))
    numbers = made.group_by("key").agg(n=pl.int_range(1, pl.len() + 1)).explode("n")
    same(sums.select("key", "n"), numbers)
    same(sums.group_by("key").agg(value=pl.col("value").max()), made.group_by("key").agg(value=pl.col("value").sum()))


def stopped(run: Run) -> None:
    run.wait_checkpoints(2)
    run.driver.stop()
    assert not run.result().is_finished


@pytest.mark.parametrize(("before", "after"), few([(1, 3), (1, 2), (2, 1), (2, 3), (3, 1), (3, 2)], 1))
def test_a_pipeline_continues_at_another_parallelism(start: Start, tmp_path: Path, before: int, after: int) -> None:
    source = generator(4_000, splits=None, batch=100)
    stopped(start(everything(tmp_path, source, before, SLOW)))
    run = start(everything(tmp_path, source, after, 3_000))
    run.wait_checkpoints(1)
    run.kill(after - 1)
    assert run.result().is_finished
    said = f"which parallelism {before} wrote, at parallelism {after}"
    assert len([note for note in run.notes if said in note]) == 1, "from then on its own checkpoints are restored"
    check_everything(tmp_path, source)


def test_the_parallelism_may_change_again_and_again(start: Start, tmp_path: Path) -> None:  # R15
    source = generator(6_000, splits=4, batch=100)
    for parallelism in (2, 3, 1):
        stopped(start(everything(tmp_path, source, parallelism, SLOW)))
    assert start(everything(tmp_path, source, 2, None)).result().is_finished
    check_everything(tmp_path, source)


def followed(root: Path, parallelism: int) -> PipelineDefinition:
    pipeline = pipeline_at(root, parallelism=parallelism)
    schema = pa.schema([("file", pa.string()), ("number", pa.int64())])
    rows = pipeline.source(hg.JsonLines(root / "in", schema, follow=True, discovery_interval="20ms"))
    rows.sink(hg.FileSink(root / "rows", "parquet", roll_interval=0), name="rows")
    return definition_of(pipeline)


def append(root: Path, name: str, numbers: range) -> None:
    (root / "in").mkdir(exist_ok=True)
    with (root / "in" / name).open("a") as file:
        file.writelines(json.dumps({"file": name, "number": number}) + "\n" for number in numbers)


def committed(root: Path) -> list[tuple[str, int]]:
    found = read_committed(str(root / "rows"))
    return found.rows() if found.width else []


def test_a_growing_directory_is_read_on_at_another_parallelism(start: Start, tmp_path: Path) -> None:
    for name in "abcde":
        append(tmp_path, name, range(100))
    run = start(followed(tmp_path, 1))
    run.wait(lambda: len(committed(tmp_path)) == 500, "the first records")
    run.driver.stop()
    run.result()
    for name in "abcdefgh":  # files that grew, and new ones
        append(tmp_path, name, range(100, 200))
    run = start(followed(tmp_path, 3))
    run.wait(lambda: len(committed(tmp_path)) >= 1_300, "what came between the runs")
    run.kill(0)
    for name in "afi":
        append(tmp_path, name, range(200, 300))
    run.wait(lambda: len(committed(tmp_path)) >= 1_600, "what came after the kill")
    run.driver.stop()
    run.result()
    found = committed(tmp_path)
    assert len(found) == len(set(found)) == 1_600


def listed(root: Path, parallelism: int, rate: int | None) -> PipelineDefinition:
    pipeline = pipeline_at(root, parallelism=parallelism)
    schema = pa.schema([("file", pa.string()), ("number", pa.int64())])
    rows = pipeline.source(hg.JsonLines(root / "in", schema))
    paced = pipeline.source(generator(5_000, rate, splits=2)).select(file=pl.lit("generated"), number=pl.col("id"))
    rows.union(paced).sink(hg.FileSink(root / "rows", "parquet", roll_interval=0), name="rows")
    return definition_of(pipeline)


@pytest.mark.parametrize("after", few([2, 3], 1))
def test_a_list_of_files_that_grew_between_two_runs_shifts_nobodys_position(
    start: Start, tmp_path: Path, after: int
) -> None:
    """The new file comes first in the list: every other file gets another owner, at the same parallelism too."""
    for name in "bcd":
        append(tmp_path, name, range(100))
    stopped(start(listed(tmp_path, 2, SLOW)))
    append(tmp_path, "a", range(100))
    assert start(listed(tmp_path, after, None)).result().is_finished
    found = committed(tmp_path)
    assert len(found) == len(set(found))
    assert {name for name, _ in found} == {"a", "b", "c", "d", "generated"}
    assert len([name for name, _ in found if name in "abcd"]) == 400
    assert len([name for name, _ in found if name == "generated"]) == 5_000


@pytest.fixture
def segments() -> int:
    return 2


@pytest.fixture
def store(tmp_path: Path, segments: int) -> Iterator[Store]:
    with Store.open(tmp_path / "store") as opened:
        opened.create_stream("in", SCHEMA, segments=segments, routing_key="key")
        yield opened


def windowed(root: Path) -> PipelineDefinition:
    pipeline = pipeline_at(root, parallelism=2)
    events = pipeline.source(hg.StreamSource("in", store=str(root / "store")), name="source")
    counts = (
        events.with_timestamps("at", out_of_orderness="0s")
        .key_by("key")
        .window(hg.Tumbling("100ms"))
        .agg(count=pl.len())
    )
    counts.sink(hg.StreamSink("out", store=str(root / "store"), segments=2), name="out")
    return definition_of(pipeline)


def scaled(run: Run, traffic: Traffic, times: int) -> None:
    """Wait until streams were scaled so often, between checkpoints."""
    while traffic.scaled_count < times:
        run.wait_checkpoints(1)


@pytest.mark.parametrize("segments", few([1, 2], 1))
def test_windows_are_right_when_a_stream_is_scaled(start: Callable[..., Run], store: Store, tmp_path: Path) -> None:
    is_over = threading.Event()
    run = start(windowed(tmp_path))
    run.wait_checkpoints(1)  # with one segment, the other subtask has begun without any
    with flowing(store, is_over, "in", rounds=4, most=4, pause_s=0.03) as traffic:
        scaled(run, traffic, 4)
        while not rows_of(store, "out"):  # event time goes on, also with a subtask that has no segment
            run.wait_checkpoints(1)
        is_over.set()
    assert run.result().is_finished
    found: Counter[str] = Counter()
    for row in rows_of(store, "out"):
        found[str(row["key"])] += int(str(row["count"]))
    assert found == {f"k{key}": traffic.rounds_count for key in range(KEYS)}
