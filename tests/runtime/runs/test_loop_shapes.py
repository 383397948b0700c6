"""Loops of unusual shape, stopped, drained and restored at another parallelism, with real worker processes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from pyspark import cloudpickle
from tests.conftest import IS_DEEP, few
from tests.runtime.running import Run, definition_of, pipeline_at
from tests.runtime.runs.test_loops import TRIPS, Flip16, countdown, counted_down, entering, numbers, same

import headgate as hg
from headgate.connectors.files.file_committer import read_committed
from headgate.model.plan import PipelineDefinition

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import tests
cloudpickle.register_pickle_by_value(sys.modules["tests.runtime.runs.test_loops"])

Start = Any


class WithOutside:
    """A body in which an operator also reads a stream from outside."""

    def __init__(self, outside: hg.Stream) -> None:
        self.outside = outside

    def __call__(self, loop: hg.Stream) -> tuple[hg.Stream, hg.Stream]:
        both = loop.rebalance().union(self.outside.rebalance())
        return countdown(both.filter(pl.col("id") >= 0))


def test_an_operator_of_the_body_may_read_from_outside_with_hardly_any_credit(start: Start, tmp_path: Path) -> None:
    pipeline = pipeline_at(tmp_path)
    outside = entering(pipeline, numbers(2_000, 8_000, splits=1)).with_columns(id=pl.col("id") + 10_000)
    records = entering(pipeline, numbers(3_000, batch=200))
    records.iterate(WithOutside(outside)).sink(hg.FileSink(tmp_path / "out", "parquet"), name="out")
    run = start(definition_of(pipeline, credit_bytes=512))
    run.wait_checkpoints(3)
    run.kill(0)
    assert run.result().is_finished
    also = counted_down(2_000).with_columns(id=pl.col("id") + 10_000)
    same(read_committed(str(tmp_path / "out")), pl.concat([counted_down(3_000), also]))


def several(loop: hg.Stream) -> tuple[list[hg.Stream], hg.Stream]:
    """Three feedback streams, each routed in its own way."""
    stepped = loop.with_columns(left=pl.col("left") - 1, trips=pl.col("trips") + 1)
    again = stepped.filter(pl.col("left") > 0)
    ways = [again.filter(pl.col("left") % 3 == way) for way in range(3)]
    return [ways[0], ways[1].rebalance(), ways[2].map(dict)], stepped.filter(pl.col("left") <= 0)


def test_several_streams_feed_one_head_and_loops_stand_side_by_side(start: Start, tmp_path: Path) -> None:
    pipeline = pipeline_at(tmp_path, parallelism=3)
    records = entering(pipeline, numbers(3_000, 1_500))
    records.iterate(several, name="several").sink(hg.FileSink(tmp_path / "a", "parquet"), name="a")
    records.iterate(countdown, name="one").sink(hg.FileSink(tmp_path / "b", "parquet"), name="b")
    run = start(definition_of(pipeline))
    for kill in range(2):
        run.wait_checkpoints(2)
        run.kill(kill)
        run.wait_restarts(kill + 1)
    assert run.result().is_finished
    for out in ("a", "b"):
        same(read_committed(str(tmp_path / out)), counted_down(3_000))


def circling(
    root: Path, parallelism: int, rows: int, rate: int, pipeline: hg.Pipeline | None = None
) -> PipelineDefinition:
    """A keyed loop whose records take many trips, so that a stop finds them under way."""
    pipeline = pipeline or pipeline_at(root, parallelism=parallelism)
    records = pipeline.source(numbers(rows, rate)).select(
        "id", key=pl.col("key").cast(pl.Int64), left=TRIPS * 40, trips=pl.lit(0, pl.Int64)
    )
    looped = records.key_by("key").iterate(moving)
    looped.sink(hg.FileSink(root / "out", "parquet"), name="out")
    return definition_of(pipeline)


def moving(loop: hg.KeyedStream) -> tuple[hg.Stream, hg.Stream]:
    """Each trip moves the record to another key."""
    moved = loop.process(Moving())
    return moved.filter(pl.col("left") > 0), moved.filter(pl.col("left") <= 0)


class Moving(hg.ProcessFunction):
    def open(self, state: hg.StateHandle) -> None:
        self.visits = state.value("visits", pa.int64())

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> list[dict[str, Any]]:
        self.visits.put((self.visits.get() or 0) + 1)
        return [{**row, "key": (row["key"] * 7 + 1) % 101, "left": row["left"] - 1, "trips": row["trips"] + 1}]


@pytest.mark.parametrize(("before", "after"), few([(2, 3), (1, 2), (3, 1)], 1))
def test_records_under_way_are_restored_at_another_parallelism(
    start: Start, tmp_path: Path, before: int, after: int
) -> None:
    run = start(circling(tmp_path, before, 1_000, 500))
    run.wait_checkpoints(3)
    run.driver.stop()
    assert not run.result().is_finished
    run = start(circling(tmp_path, after, 1_000, 3_000))
    run.wait_checkpoints(1)
    run.kill(0)
    assert run.result().is_finished
    expected = pl.DataFrame({"id": range(1_000)}).select("id", trips=pl.max_horizontal(TRIPS * 40, 1))
    same(read_committed(str(tmp_path / "out")), expected)


def test_checkpoints_that_overlap_each_keep_what_circulates(start: Start, tmp_path: Path) -> None:
    overlapping = hg.Checkpointing(interval="5ms", max_concurrent=4, dir=tmp_path / "checkpoints", retained=5)
    pipeline = hg.Pipeline("p", parallelism=2, checkpointing=overlapping, restart=hg.FixedDelay(delay="20ms"))
    run = start(circling(tmp_path, 2, 1_000, 600, pipeline))
    for kill in range(4 if IS_DEEP else 2):
        run.wait_checkpoints(7 + kill)
        run.kill(kill % 2)
        run.wait_restarts(kill + 1)
    assert run.result().is_finished
    expected = pl.DataFrame({"id": range(1_000)}).select("id", trips=pl.max_horizontal(TRIPS * 40, 1))
    same(read_committed(str(tmp_path / "out")), expected)


def test_a_drained_loop_ends_empty(start: Start, tmp_path: Path) -> None:
    run = start(circling(tmp_path, 2, 4_000_000, 300))
    run.wait_checkpoints(3)
    run.drain_and_kill(1)
    result = run.result()
    assert (result.is_finished, result.is_drained) == (True, True)
    found = read_committed(str(tmp_path / "out"))
    ids = sorted(found["id"].to_list())
    assert len(set(ids)) == len(ids), "nothing twice"
    same(found, found.select("id", trips=pl.max_horizontal(TRIPS * 40, 1)))


def test_one_source_may_end_long_before_the_other(start: Start, tmp_path: Path) -> None:
    pipeline = pipeline_at(tmp_path)
    early = entering(pipeline, numbers(100))
    late = entering(pipeline, numbers(2_000, 2_000)).with_columns(id=pl.col("id") + 10_000)
    early.union(late).iterate(countdown).sink(hg.FileSink(tmp_path / "out", "parquet"), name="out")
    run = start(definition_of(pipeline))
    run.wait_checkpoints(5)
    run.kill(1)
    assert run.result().is_finished
    also = counted_down(2_000).with_columns(id=pl.col("id") + 10_000)
    same(read_committed(str(tmp_path / "out")), pl.concat([counted_down(100), also]))


def test_a_failing_step_in_a_loop_names_operator_and_record(start: Start, tmp_path: Path) -> None:
    pipeline = pipeline_at(tmp_path, restart=hg.NoRestart())
    records = pipeline.source(numbers(200)).select("key", what=pl.lit("add"), counter=pl.lit(0, pl.Int64))
    looped = records.key_by("key").iterate(failing)
    looped.sink(hg.FileSink(tmp_path / "out", "parquet"), name="out")
    run: Run = start(definition_of(pipeline))
    with pytest.raises(hg.PipelineFailed) as failed:
        run.result()
    assert "'counting'" in failed.value.reason
    assert "'what': 'subtract'" in failed.value.reason


class FailingBack(Flip16):
    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> Any:
        if row["what"] == "subtract":
            raise ValueError("no way back")
        return super().process(row, context)


def failing(loop: hg.KeyedStream) -> tuple[hg.Stream, hg.Stream]:
    counted = loop.process(FailingBack(), name="counting")
    return counted.filter(pl.col("what") == "subtract"), counted.filter(pl.col("what") == "done")
