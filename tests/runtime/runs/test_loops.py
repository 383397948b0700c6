"""Loops with the real driver and real worker processes: what comes out is a plain function of what goes in."""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from pyspark import cloudpickle
from tests.conftest import IS_DEEP, few
from tests.runtime.running import WAIT_S, Run, definition_of, pipeline_at
from tests.runtime.runs.test_broadcast import RULE, apart, expected_rules, folded
from tests.support.killing import run_killing

import headgate as hg
from headgate.connectors.files.file_committer import read_committed
from headgate.errors import PipelineFailed
from headgate.model.plan import PipelineDefinition
from headgate.model.progress import PipelineState
from headgate.testing import EOF, PAUSE, Collect, FailOnce, ScriptedSource

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
    records = entering(pipeline, numbers(1_000, 10_000)).filter(pl.col("left") > 0)
    records.iterate(nested, name="outer").sink(hg.FileSink(tmp_path / "out", "parquet"), name="out")
    run = start(definition_of(pipeline))
    run.wait_checkpoints(1)
    run.kill(0)
    assert run.result().is_finished
    left = pl.DataFrame({"id": range(1_000)}).select("id", left=TRIPS).filter(pl.col("left") > 0)
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


@pytest.mark.parametrize("kills", few([2, 0], 1))
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
    records = entering(pipeline, numbers(1_000, 500))
    records.iterate(several, name="several").sink(hg.FileSink(tmp_path / "a", "parquet"), name="a")
    records.iterate(countdown, name="one").sink(hg.FileSink(tmp_path / "b", "parquet"), name="b")
    run = start(definition_of(pipeline))
    for kill in range(2):
        run.wait_checkpoints(2)
        run.kill(kill)
        run.wait_restarts(kill + 1)
    assert run.result().is_finished
    for out in ("a", "b"):
        same(read_committed(str(tmp_path / out)), counted_down(1_000))


MANY = 15
"""So often more does a record go round in ``circling``."""


def circling(
    root: Path, parallelism: int, rows: int, rate: int, pipeline: hg.Pipeline | None = None
) -> PipelineDefinition:
    """A keyed loop whose records take many trips, so that a stop finds them under way."""
    pipeline = pipeline or pipeline_at(root, parallelism=parallelism)
    records = pipeline.source(numbers(rows, rate, batch=10)).select(
        "id", key=pl.col("key").cast(pl.Int64), left=TRIPS * MANY, trips=pl.lit(0, pl.Int64)
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
    run = start(circling(tmp_path, before, 300, 150))
    run.wait_checkpoints(3)
    run.driver.stop()
    assert not run.result().is_finished
    run = start(circling(tmp_path, after, 300, 900))
    run.wait_checkpoints(1)
    run.kill(0)
    assert run.result().is_finished
    expected = pl.DataFrame({"id": range(300)}).select("id", trips=pl.max_horizontal(TRIPS * MANY, 1))
    same(read_committed(str(tmp_path / "out")), expected)


def test_checkpoints_that_overlap_each_keep_what_circulates(start: Start, tmp_path: Path) -> None:
    overlapping = hg.Checkpointing(interval="5ms", max_concurrent=4, dir=tmp_path / "checkpoints", retained=5)
    pipeline = hg.Pipeline("p", parallelism=2, checkpointing=overlapping, restart=hg.FixedDelay(delay="20ms"))
    run = start(circling(tmp_path, 2, 300, 180, pipeline))
    for kill in range(4 if IS_DEEP else 2):
        run.wait_checkpoints(7 + kill)
        run.kill(kill % 2)
        run.wait_restarts(kill + 1)
    assert run.result().is_finished
    expected = pl.DataFrame({"id": range(300)}).select("id", trips=pl.max_horizontal(TRIPS * MANY, 1))
    same(read_committed(str(tmp_path / "out")), expected)


def test_a_drained_loop_ends_empty(start: Start, tmp_path: Path) -> None:
    run = start(circling(tmp_path, 2, 4_000_000, 100))
    run.wait_checkpoints(3)
    run.drain_and_kill(1)
    result = run.result()
    assert (result.is_finished, result.is_drained) == (True, True)
    found = read_committed(str(tmp_path / "out"))
    ids = sorted(found["id"].to_list())
    assert len(set(ids)) == len(ids), "nothing twice"
    same(found, found.select("id", trips=pl.max_horizontal(TRIPS * MANY, 1)))


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


TRIP = {"key": int, "n": int, "left": int, "trips": int, "rules": str}
EVENTS = [
    [{"key": n % 7, "n": n, "left": n % 4 + 1, "trips": 0, "rules": ""} for n in range(part * 40, part * 40 + 40)]
    for part in range(3)
]
CHANGES = [[{"rule": n % 3, "value": n} for n in range(part * 40, part * 40 + 40)] for part in range(3)]
TOLD = -1

Row = dict[str, Any]


class Around(hg.BroadcastProcessFunction):
    """Counts trips; every subtask tells what it made of all rules when it hears of the last one."""

    schema = TRIP

    def open(self, state: hg.StateHandle) -> None:
        self.trips = state.map("trips", int, int)
        self.rules = state.broadcast("rules", int, int)

    def process(self, row: Row, context: hg.ProcessContext) -> Iterator[Row]:
        number = self.trips.get(row["n"], 0) + 1
        self.trips.put(row["n"], number)
        yield {**row, "left": row["left"] - 1, "trips": number}

    def process_broadcast(self, row: Row, context: hg.BroadcastContext) -> Iterator[Row]:
        self.rules.put(row["rule"], folded(self.rules.get(row["rule"], 0), row["value"]))
        told = json.dumps(self.rules.items())
        yield {"key": context.subtask_index, "n": TOLD - row["value"], "left": 0, "trips": TOLD, "rules": told}


class AroundByBatch(hg.BatchBroadcastProcessFunction):
    """The same by batch."""

    schema = TRIP

    def open(self, state: hg.BatchStateHandle) -> None:
        self.trips = state.map("trips", int, int)
        self.rules = state.broadcast("rules", int, int)

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame:
        numbers = self.trips.get(batch["n"]).fill_null(0) + 1
        self.trips.put(batch["n"], numbers)
        return batch.with_columns(left=pl.col("left") - 1, trips=numbers)

    def process_broadcast(self, batch: pl.DataFrame, context: hg.BroadcastContext) -> pl.DataFrame:
        found = []
        for rule, value in batch.select("rule", "value").rows():
            one = pl.Series([rule])
            self.rules.put(one, folded(self.rules.get(one)[0] or 0, value))
            told = json.dumps([list(row) for row in self.rules.frame().rows()])
            found.append({"key": context.subtask_index, "n": TOLD - value, "left": 0, "trips": TOLD, "rules": told})
        return pl.DataFrame(found, schema={name: pl.String if name == "rules" else pl.Int64 for name in TRIP})


def looping(
    sink: Collect, body: Any, rules: list[Any] | None = None, pause_ms: int = 20, **options: Any
) -> hg.Pipeline:
    """Return a pipeline whose events go through a loop; ``body`` gets it, and the rules, if there are any."""
    options.setdefault("restart", hg.FixedDelay(delay="10ms"))
    options.setdefault("checkpointing", hg.Checkpointing(interval="20ms"))
    pipeline = hg.Pipeline("p", **{"parallelism": 2, **options})
    events = pipeline.source(ScriptedSource(apart(EVENTS), schema=TRIP, pause_ms=pause_ms), name="events")
    side = None
    if rules is not None:
        side = pipeline.source(ScriptedSource(rules, schema=RULE, pause_ms=20), name="rules").broadcast()
    events.iterate(lambda loop: body(loop, side), name="loop").sink(sink)
    return pipeline


def left(stream: hg.Stream) -> tuple[hg.Stream, hg.Stream]:
    """Return what goes round again, and what has ended."""
    return stream.filter(pl.col("left") > 0).rebalance(), stream.filter(pl.col("left") <= 0)


def check_events(rows: list[Row]) -> None:
    """Every event went round as often as it says."""
    trips = {row["n"]: row["trips"] for row in rows if row["n"] >= 0}
    assert Counter(row["n"] for row in rows if row["n"] >= 0) == Counter(range(120))
    assert trips == {n: n % 4 + 1 for n in range(120)}


@pytest.mark.parametrize("function", few([Around(), AroundByBatch()], 1))
def test_a_function_in_a_loop_has_rules_from_outside(tmp_path: Path, function: Any) -> None:
    def body(loop: hg.Stream, rules: Any) -> Any:
        return left(loop.key_by("key").connect(rules).process(function, name="apply"))

    sink = Collect(tmp_path / "out")
    changes = [CHANGES[0], PAUSE, CHANGES[1], PAUSE, FailOnce(tmp_path / "failed"), PAUSE, CHANGES[2], EOF]
    run_killing(looping(sink, body, changes, parallelism=3), 1)
    rows = sink.rows()
    check_events(rows)
    told = Counter((row["n"], row["key"]) for row in rows if row["n"] < 0)
    assert told == Counter((TOLD - n, subtask) for n in range(120) for subtask in range(3)), "each rule once in each"
    last = {row["rules"] for row in rows if row["n"] == TOLD - 119}
    assert last == {expected_rules(*CHANGES)}


@pytest.mark.parametrize("function", few([AroundByBatch(), Around()], 1))
def test_a_loop_tells_itself_through_a_broadcast_side(tmp_path: Path, function: Any) -> None:
    """Every record of each trip is told to all subtasks, which must make the same of them in whatever order."""

    def body(loop: hg.Stream, _: Any) -> Any:
        told = loop.select(rule=pl.col("key") % 3, value=pl.col("n") * 10 + pl.col("left"))
        return left(loop.key_by("key").connect(told.broadcast()).process(function, name="apply"))

    sink = Collect(tmp_path / "out")
    run_killing(looping(sink, body, parallelism=3), (2, 4))
    rows = sink.rows()
    check_events(rows)
    values = [n * 10 + trip for n in range(120) for trip in range(1, n % 4 + 2)]
    told = Counter((row["n"], row["key"]) for row in rows if row["n"] < 0)
    assert told == Counter((TOLD - value, subtask) for value in values for subtask in range(3))
    alike = {(row["n"], row["rules"]) for row in rows if row["n"] < 0}
    assert len(alike) == len(values), "all subtasks made the same of all that they were told before"


class Rounds(hg.BroadcastProcessFunction):
    """Ends each round with one record of each key, which says what is known of the rules."""

    schema = TRIP | {"round": int}

    def open(self, state: hg.StateHandle) -> None:
        self.seen = state.value("seen", int)
        self.rules = state.broadcast("rules", int, int)

    def process(self, row: Row, context: hg.ProcessContext) -> None:
        self.seen.put(self.seen.get(0) + 1)

    def process_broadcast(self, row: Row, context: hg.BroadcastContext) -> None:
        self.rules.put(row["rule"], self.rules.get(row["rule"], 0) + row["value"])

    def on_round(self, round: int, context: hg.ProcessContext) -> Iterator[Row]:
        seen, rules = self.seen.get(0), json.dumps(sorted(self.rules.items()))
        yield {"key": context.key, "n": seen, "left": 0, "trips": 0, "rules": rules, "round": round}


# L35, L36
def test_rounds_end_for_functions_with_a_broadcast_side(tmp_path: Path) -> None:
    """Behind the first round all input has ended; each round tells the next one how many keys it had."""

    def body(loop: hg.Stream, rules: Any) -> Any:
        told = loop.connect(rules).process(Rounds(), name="rounds")
        return told, told

    sink = Collect(tmp_path / "out")
    options = {"checkpointing": hg.Checkpointing(interval="20ms"), "restart": hg.FixedDelay(delay="10ms")}
    pipeline = hg.Pipeline("p", parallelism=2, **options)
    events = pipeline.source(ScriptedSource(apart(EVENTS), schema=TRIP, pause_ms=20), name="events").key_by("key")
    rules = pipeline.source(
        ScriptedSource([CHANGES[0], PAUSE, CHANGES[1], EOF], schema=RULE, pause_ms=20), name="rules"
    )
    side = rules.broadcast()
    events.iterate(lambda loop: body(loop, side), name="loop", max_rounds=3).sink(sink)
    run_killing(pipeline, 2)
    rows = sorted(sink.rows(), key=lambda row: (row["round"], row["key"]))
    assert [(row["round"], row["key"]) for row in rows] == [(number, key) for number in range(3) for key in range(7)]
    counts = Counter(row["key"] for part in EVENTS for row in part)
    assert [row["n"] for row in rows] == [counts[row["key"]] + row["round"] for row in rows]
    totals = Counter[int]()
    for change in (change for part in CHANGES[:2] for change in part):
        totals[change["rule"]] += change["value"]
    assert {row["rules"] for row in rows} == {json.dumps([list(item) for item in sorted(totals.items())])}


def test_nested_loops_have_broadcast_sides(tmp_path: Path) -> None:
    """The inner one is told by the outer one, the outer one from outside."""

    def spin(inner: hg.Stream, side: hg.Stream) -> Any:
        spun = inner.connect(side).process(Passing("left"), name="spin")
        return left(spun)

    def body(loop: hg.Stream, rules: Any) -> Any:
        told = loop.select(rule=pl.col("key") % 3, value=pl.col("n"))
        spun = loop.with_columns(left=pl.col("n") % 3 + 1).iterate(lambda inner: spin(inner, told.broadcast()))
        stepped = spun.connect(rules).process(Passing("trips"), name="step")
        again = stepped.filter(pl.col("trips") > -2).rebalance()
        return again, stepped.filter(pl.col("trips") <= -2)

    sink = Collect(tmp_path / "out")
    run_killing(looping(sink, body, [CHANGES[0], EOF]), 1)
    assert Counter(row["n"] for row in sink.rows()) == Counter(range(120))


class Passing(hg.BroadcastProcessFunction):
    """Takes one from a column."""

    schema = None

    def __init__(self, column: str) -> None:
        self.column = column

    def open(self, state: hg.StateHandle) -> None:
        self.rules = state.broadcast("rules", int, int)

    def process(self, row: Row, context: hg.ProcessContext) -> Iterator[Row]:
        yield {**row, self.column: row[self.column] - 1}

    def process_broadcast(self, row: Row, context: hg.BroadcastContext) -> None:
        self.rules.put(row["rule"], row["value"])
