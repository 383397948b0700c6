"""Loops with the real driver and real worker processes: what comes out is a plain function of what goes in."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from pyspark import cloudpickle
from tests.conftest import few
from tests.runtime.running import WAIT_S, definition_of, pipeline_at

import headgate as hg
from headgate.connectors.files.file_committer import read_committed
from headgate.errors import PipelineFailed
from headgate.model.progress import PipelineState

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import tests

Start = Any


def numbers(rows: int, rate: float | None = None, *, batch: int = 50, splits: int = 3) -> hg.Generator:
    return hg.Generator(
        columns={"id": hg.RowNumber(), "key": hg.Uniform(0, 20)},
        rows=rows,
        rows_per_second=rate,
        time="deterministic",
        splits=splits,
        batch_rows=batch,
        pool_rows=65_536,
    )


TRIPS = (pl.col("id") * 7) % 11
"""How often a record goes round: a pure function of it."""


def countdown(loop: hg.Stream, *, name: str = "step") -> tuple[hg.Stream, hg.Stream]:
    stepped = loop.with_columns(left=pl.col("left") - 1, trips=pl.col("trips") + 1, name=name)
    return stepped.filter(pl.col("left") > 0).rebalance(), stepped.filter(pl.col("left") <= 0)


def counted_down(rows: int) -> pl.DataFrame:
    return pl.DataFrame({"id": range(rows)}).select("id", trips=pl.max_horizontal(TRIPS, 1))


def entering(pipeline: hg.Pipeline, source: hg.Generator) -> hg.Stream:
    return pipeline.source(source).select("id", "key", left=TRIPS, trips=pl.lit(0, pl.Int64))


def same(found: pl.DataFrame, expected: pl.DataFrame) -> None:
    columns = expected.columns
    expected = expected.cast(dict(found.select(columns).schema))
    assert found.select(columns).sort(columns).rows() == expected.sort(columns).rows()


@pytest.mark.parametrize("parallelism", few([3, 1, 2], 1))
def test_every_record_goes_round_as_often_as_it_says(start: Start, tmp_path: Path, parallelism: int) -> None:
    pipeline = pipeline_at(tmp_path, parallelism=parallelism)
    out = entering(pipeline, numbers(5_000)).iterate(countdown)
    out.sink(hg.FileSink(tmp_path / "out", "parquet"), name="out")
    run = start(definition_of(pipeline))
    assert run.result().is_finished
    assert run.restarts == []
    same(read_committed(str(tmp_path / "out")), counted_down(5_000))


def test_a_loop_survives_kills_with_records_under_way(start: Start, tmp_path: Path) -> None:
    pipeline = pipeline_at(tmp_path)
    out = entering(pipeline, numbers(4_000, 4_000)).iterate(countdown)
    out.sink(hg.FileSink(tmp_path / "out", "parquet"), name="out")
    run = start(definition_of(pipeline))
    for kill in range(2):
        run.wait_checkpoints(2)
        run.kill(kill % 2)
        run.wait_restarts(kill + 1)
    assert run.result().is_finished
    same(read_committed(str(tmp_path / "out")), counted_down(4_000))


def nested(loop: hg.Stream) -> tuple[hg.Stream, hg.Stream]:
    """Each trip of the outer loop makes ``left`` trips of the inner one."""
    inner = loop.with_columns(inner=pl.col("left")).iterate(spin, name="inner")
    done = inner.select("id", "key", left=pl.col("left") - 1, trips=pl.col("trips"))
    return done.filter(pl.col("left") > 0).rebalance(), done.filter(pl.col("left") <= 0)


def spin(loop: hg.Stream) -> tuple[hg.Stream, hg.Stream]:
    stepped = loop.with_columns(inner=pl.col("inner") - 1, trips=pl.col("trips") + 1)
    return stepped.filter(pl.col("inner") > 0).rebalance(), stepped.filter(pl.col("inner") <= 0)


def test_loops_nest(start: Start, tmp_path: Path) -> None:
    pipeline = pipeline_at(tmp_path)
    records = entering(pipeline, numbers(2_000, 20_000)).filter(pl.col("left") > 0)
    records.iterate(nested, name="outer").sink(hg.FileSink(tmp_path / "out", "parquet"), name="out")
    run = start(definition_of(pipeline))
    run.wait_checkpoints(1)
    run.kill(0)
    assert run.result().is_finished
    left = pl.DataFrame({"id": range(2_000)}).select("id", left=TRIPS).filter(pl.col("left") > 0)
    same(read_committed(str(tmp_path / "out")), left.select("id", trips=pl.col("left") * (pl.col("left") + 1) // 2))


class Flip16(hg.ProcessFunction):
    """FLIP-16's own test: ADD(2) raises the counter and sends one SUBTRACT(1) round; that lowers it and comes out."""

    schema = {"key": pa.int64(), "what": pa.string(), "counter": pa.int64()}

    def open(self, state: hg.StateHandle) -> None:
        self.counter = state.value("counter", pa.int64())

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> Iterator[dict[str, Any]]:
        adds = row["what"] == "add"
        counter = (self.counter.get() or 0) + (2 if adds else -1)
        self.counter.put(counter)
        yield {"key": row["key"], "what": "subtract" if adds else "done", "counter": counter}


def flip16(loop: hg.KeyedStream) -> tuple[hg.Stream, hg.Stream]:
    counted = loop.process(Flip16())
    return counted.filter(pl.col("what") == "subtract"), counted.filter(pl.col("what") == "done")


def test_two_n_minus_n_is_n_after_a_kill(start: Start, tmp_path: Path) -> None:
    pipeline = pipeline_at(tmp_path)
    records = pipeline.source(numbers(4_000, 4_000)).select("key", what=pl.lit("add"), counter=pl.lit(0, pl.Int64))
    records.key_by("key").iterate(flip16).sink(hg.FileSink(tmp_path / "out", "parquet"), name="out")
    run = start(definition_of(pipeline))
    run.wait_checkpoints(3)
    run.kill(1)
    run.wait_restarts(1)
    assert run.result().is_finished
    found = read_committed(str(tmp_path / "out"))
    assert found.height == 4_000


class SumOfRound(hg.ProcessFunction):
    """Adds up round 0; at the end of each round emits the sum."""

    def open(self, state: hg.StateHandle) -> None:
        self.sum = state.value("sum", pa.int64())

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> None:
        if row["round"] == 0:
            self.sum.put((self.sum.get() or 0) + row["value"])

    def on_round(self, round: int, context: hg.ProcessContext) -> Iterator[dict[str, Any]]:
        yield {"key": context.key, "value": self.sum.get(), "round": round}


@pytest.mark.parametrize("kills", [0, 2])
def test_the_sum_of_each_round_comes_out_once(start: Start, tmp_path: Path, kills: int) -> None:
    pipeline = pipeline_at(tmp_path)
    source = numbers(4_000, 4_000 if kills else None, splits=4)
    records = pipeline.source(source).select(key=pl.lit(0, pl.Int64), value=pl.col("id") % 1_000)
    looped = records.key_by("key").iterate(rounds_body, max_rounds=5)
    looped.sink(hg.FileSink(tmp_path / "out", "parquet"), name="out")
    run = start(definition_of(pipeline))
    for kill in range(kills):
        run.wait_checkpoints(2)
        run.kill(kill % 2)
        run.wait_restarts(kill + 1)
    assert run.result().is_finished
    found = read_committed(str(tmp_path / "out"))
    assert sorted(found.select("round", "value").rows()) == [(round_, 1_998_000) for round_ in range(5)]


def rounds_body(loop: hg.KeyedStream) -> tuple[hg.Stream, hg.Stream]:
    summed = loop.process(SumOfRound())
    return summed, summed


def test_a_run_ends_when_its_last_callback_has_returned(start: Start, tmp_path: Path) -> None:  # L35
    heard: list[int] = []
    gate = threading.Event()

    def told(round_: int) -> None:
        heard.append(round_)
        if round_ == 2:
            gate.wait(WAIT_S)
            raise ValueError("the printer is on fire")

    pipeline = pipeline_at(tmp_path)
    records = pipeline.source(numbers(20)).select("id")
    records.iterate(lambda loop: (loop.rebalance(), loop), max_rounds=3, on_round=told).sink(hg.Discard(), name="out")
    run = start(definition_of(pipeline))
    run.wait(lambda: run.driver.progress.state is PipelineState.FINISHED, "the end of the pipeline")
    assert not run.driver.result.done()
    gate.set()
    assert run.result().is_finished
    assert heard == [0, 1, 2]
    assert any("failed in round 2: ValueError: the printer is on fire" in note for note in run.notes)


def tenfold(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**row, "left": row["left"] - 1, "id": row["id"] * 10 + digit} for digit in range(10)]


def amplify(loop: hg.Stream) -> tuple[hg.Stream, hg.Stream]:
    more = loop.flat_map(tenfold)
    return more.filter(pl.col("left") > 0).rebalance(), more.filter(pl.col("left") <= 0)


def test_a_loop_that_makes_ten_of_one_completes_in_bounded_memory(start: Start, tmp_path: Path) -> None:
    pipeline = pipeline_at(tmp_path)
    records = pipeline.source(numbers(40, batch=10)).select("id", left=pl.lit(4, pl.Int64))
    records.iterate(amplify).sink(hg.FileSink(tmp_path / "out", "parquet"), name="out")
    run = start(definition_of(pipeline, loop_memory_bytes=64 << 10, credit_bytes=4_096))
    assert run.result().is_finished
    found = read_committed(str(tmp_path / "out"))
    assert found.height == 400_000
    assert found["id"].n_unique() == 400_000


def test_a_loop_that_makes_ten_of_one_survives_kills_with_a_long_queue(start: Start, tmp_path: Path) -> None:
    pipeline = pipeline_at(tmp_path)
    records = pipeline.source(numbers(40, 20, batch=1)).select("id", left=pl.lit(4, pl.Int64))
    records.iterate(amplify).sink(hg.FileSink(tmp_path / "out", "parquet"), name="out")
    run = start(definition_of(pipeline, loop_memory_bytes=64 << 10, credit_bytes=4_096))
    for kill in range(2):
        run.wait_checkpoints(2)
        run.kill(kill)
        run.wait_restarts(kill + 1)
    assert run.result().is_finished
    found = read_committed(str(tmp_path / "out"))
    assert (found.height, found["id"].n_unique()) == (400_000, 400_000)


def test_what_circulates_beyond_the_disk_limit_fails_with_a_sentence(start: Start, tmp_path: Path) -> None:
    pipeline = pipeline_at(tmp_path, restart=hg.NoRestart())
    records = pipeline.source(numbers(40, batch=10)).select("id", left=pl.lit(5, pl.Int64))
    records.iterate(amplify).sink(hg.FileSink(tmp_path / "out", "parquet"), name="out")
    run = start(definition_of(pipeline, loop_memory_bytes=8 << 10, loop_disk_bytes_max=64 << 10))
    with pytest.raises(PipelineFailed, match="the limit on disk"):
        run.result()


def forever(loop: hg.Stream) -> tuple[hg.Stream, hg.Stream]:
    moved = loop.with_columns(trips=pl.col("trips") + 1)
    return moved.rebalance(), moved.filter(pl.col("trips") == 3)


def test_checkpoints_complete_in_a_loop_that_never_ends(start: Start, tmp_path: Path) -> None:
    pipeline = pipeline_at(tmp_path)
    out = entering(pipeline, numbers(500)).iterate(forever)
    out.sink(hg.FileSink(tmp_path / "out", "parquet", roll_interval=0), name="out")
    run = start(definition_of(pipeline))
    run.wait_checkpoints(5)
    run.kill(0)
    run.wait_restarts(1)
    run.wait_checkpoints(5)
    run.wait(lambda: read_committed(str(tmp_path / "out")).height >= 500, "everybody has been round three times")
    run.driver.stop()
    assert not run.result().is_finished
    found = read_committed(str(tmp_path / "out"))
    assert sorted(found["id"].to_list()) == list(range(500))
