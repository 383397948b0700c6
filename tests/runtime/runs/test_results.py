"""Whole pipelines with the real driver and real worker processes: what comes out equals a plain recount."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from pyspark import cloudpickle
from tests.conftest import few
from tests.runtime.running import Run, definition_of, pipeline_at

import headgate as hg
from headgate import testing
from headgate.connectors.base import SourceContext
from headgate.connectors.files.file_committer import read_committed
from headgate.connectors.streams import checkpoint_of, transaction_name
from headgate.errors import PipelineFailed
from headgate.model.ids import CheckpointId, Generation
from headgate.model.plan import PipelineDefinition
from headgate.model.progress import RunResult
from headgate.runtime.driver import coordinator_host
from headgate.store.catalogue import transaction_rows
from headgate.store.store import Store
from headgate.testing.connectors import PAUSE, ScriptedSource

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import tests

Start = Any


def generator(
    rows: int, rate: float | None = None, *, keys: int = 20, splits: int | None = 3, batch: int = 500
) -> hg.Generator:
    return hg.Generator(
        columns={"id": hg.RowNumber(), "key": hg.Uniform(0, keys), "value": hg.Uniform(0, 1_000)},
        rows=rows,
        rows_per_second=rate,
        time="deterministic",
        splits=splits,
        batch_rows=batch,
        pool_rows=65_536,
    )


def events(source: hg.Generator) -> pl.DataFrame:
    reader = source.open(SourceContext("p", "source", 0, 1, None))
    batches = []
    while not reader.is_finished():
        polled = reader.poll()
        if polled is not None:
            batches.append(polled.batch)
    return pl.from_arrow(pa.Table.from_batches(batches)).sort("id")


def same(found: pl.DataFrame, expected: pl.DataFrame) -> None:
    columns = expected.columns
    assert found.select(columns).sort(columns).rows() == expected.sort(columns).rows()


def windowed(root: Path, source: hg.Generator, **options: Any) -> hg.Pipeline:
    pipeline = pipeline_at(root, **options)
    stream = pipeline.source(source).with_timestamps("ts")
    counts = stream.key_by("key").window(hg.Tumbling("1s")).agg(n=pl.len(), total=pl.col("value").sum())
    counts.sink(hg.FileSink(root / "out", "parquet", roll_interval="50ms"), name="out")
    return pipeline


def recounted(source: hg.Generator) -> pl.DataFrame:
    start = pl.col("ts").dt.truncate("1s").alias("window_start")
    return events(source).group_by("key", start).agg(n=pl.len().cast(pl.Int64), total=pl.col("value").sum())


@pytest.mark.parametrize("parallelism", few([3, 1, 2], 1))
def test_a_windowed_count_equals_a_recount(start: Start, tmp_path: Path, parallelism: int) -> None:
    source = generator(20_000)
    run = start(definition_of(windowed(tmp_path, source, parallelism=parallelism)))
    result = run.result()
    assert result.is_finished
    assert run.restarts == []
    same(read_committed(str(tmp_path / "out")), recounted(source))
    assert set(run.launcher.codes.values()) == {0}


def copied(row: dict[str, Any]) -> dict[str, Any]:
    return {"id": row["id"], "key": row["key"]}


def last_of(so_far: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    return {**so_far, "n": so_far["n"] + row["n"]}


@pytest.mark.parametrize("partitioner", ["forward", "hash", "rebalance", "broadcast"])
def test_every_partitioner_delivers_every_record(start: Start, tmp_path: Path, partitioner: str) -> None:
    source = generator(3_000)
    pipeline = pipeline_at(tmp_path)
    stream = pipeline.source(source)
    expected = events(source).select("id", "key")
    if partitioner == "hash":
        ones = stream.select("key", n=pl.lit(1, pl.Int64)).key_by("key").reduce(last_of)
        ones.sink(hg.FileSink(tmp_path / "out", "parquet"), name="out")
        expected = expected.select("key", n=pl.int_range(1, pl.len() + 1).over("key").cast(pl.Int64))
    else:
        if partitioner == "rebalance":
            stream = stream.rebalance()
        elif partitioner == "broadcast":
            stream, expected = stream.broadcast(), pl.concat([expected, expected])  # one copy for each subtask
        types = {"id": pa.int64(), "key": pa.int64()}
        stream.map(copied, types).sink(hg.FileSink(tmp_path / "out", "parquet"), name="out")
    result = start(definition_of(pipeline)).result()
    same(read_committed(str(tmp_path / "out")), expected)
    assert result.records_out == expected.height


def test_a_union_of_sources_that_end_at_different_times_reaches_two_sinks_of_two_kinds(
    start: Start, tmp_path: Path
) -> None:
    quick, slow = generator(500, splits=1), generator(2_000, 4_000, splits=2, batch=50)
    pipeline = pipeline_at(tmp_path)
    both = pipeline.source(quick, name="quick").union(pipeline.source(slow, name="slow"))
    both.sink(hg.FileSink(tmp_path / "files", "parquet"), name="files")
    store = str(tmp_path / "store")
    both.filter(pl.col("id") < 100).select("id").sink(hg.StreamSink("few", store=store), name="few")
    run = start(definition_of(pipeline))
    result = run.result()
    everything = pl.concat([events(quick), events(slow)])
    same(read_committed(str(tmp_path / "files")), everything.select("id", "key", "value"))
    assert ids_in_stream(store, "few") == sorted(everything.filter(pl.col("id") < 100)["id"].to_list())
    assert result.records_in == everything.height
    assert result.last_checkpoint == run.checkpoints[-1]


def ids_in_stream(store: str, stream: str) -> list[int]:
    with hg.Store.open(store) as opened:
        found: list[int] = []
        for segment in range(opened.describe(stream).segments_count):
            reader = opened.reader(stream, segment)
            while (batch := reader.read()) is not None and batch.num_rows:
                found += batch.column("id").to_pylist()
    return sorted(found)


def test_bad_records_are_diverted_and_the_others_go_on(start: Start, tmp_path: Path) -> None:
    source = generator(2_000)
    pipeline = pipeline_at(tmp_path, bad_records=hg.DeadLetter(hg.FileSink(tmp_path / "bad", "parquet")))
    nulls = pl.when(pl.col("id") % 10 == 0).then(None).otherwise(pl.col("key"))
    stream = pipeline.source(source).with_columns(key=nulls).select("key", n=pl.lit(1, pl.Int64))
    stream.key_by("key").reduce(last_of).sink(hg.FileSink(tmp_path / "out", "parquet"), name="out")
    start(definition_of(pipeline)).result()
    good = events(source).filter(pl.col("id") % 10 != 0)
    expected = good.select("key", n=pl.int_range(1, pl.len() + 1).over("key").cast(pl.Int64))
    same(read_committed(str(tmp_path / "out")), expected)
    bad = read_committed(str(tmp_path / "bad"))
    assert bad.height == 200
    assert set(bad["node"]) == {"key-by"}


def test_the_final_checkpoint_commits_everything_when_periodic_ones_are_off(start: Start, tmp_path: Path) -> None:
    source = generator(1_000)
    run = start(definition_of(windowed(tmp_path, source, interval=None)))
    assert run.result().is_finished
    assert len(run.checkpoints) == 1
    same(read_committed(str(tmp_path / "out")), recounted(source))
    again = start(definition_of(windowed(tmp_path, source, interval=None)))
    assert again.result().is_finished
    assert again.checkpoints == []
    same(read_committed(str(tmp_path / "out")), recounted(source))


def test_a_pipeline_that_was_stopped_continues_where_it_was(start: Start, tmp_path: Path) -> None:
    source = generator(4_000, 4_000, batch=50)
    first = start(definition_of(windowed(tmp_path, source)))
    first.wait_checkpoints(3)
    first.driver.stop()
    stopped = first.result()
    assert not stopped.is_finished
    assert set(first.launcher.codes.values()) == {0}, "Spark must see a clean stop as a success"
    second = start(definition_of(windowed(tmp_path, source)))
    finished = second.result()
    assert finished.is_finished
    assert stopped.records_in < 4_000
    assert finished.records_in == 4_000, "what the first run had read is neither read again nor forgotten"
    same(read_committed(str(tmp_path / "out")), recounted(source))


def test_nothing_deadlocks_with_many_keys_and_a_tiny_credit(start: Start, tmp_path: Path) -> None:
    source = generator(100_000, keys=100_000, batch=5_000)
    pipeline = windowed(tmp_path, source, parallelism=3)
    start(definition_of(pipeline, credit_bytes=4_096)).result()
    same(read_committed(str(tmp_path / "out")), recounted(source))


FACTOR = 2_000


def many(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"id": row["id"], "copy": copy} for copy in range(FACTOR)]


def test_an_operator_that_makes_thousands_of_records_from_one_passes_a_tiny_credit(
    start: Start, tmp_path: Path
) -> None:
    pipeline = pipeline_at(tmp_path)
    types = {"id": pa.int64(), "copy": pa.int64()}
    stream = pipeline.source(generator(60, batch=20)).flat_map(many, types)
    stream.rebalance().filter(pl.col("copy") >= 0).sink(hg.FileSink(tmp_path / "out", "parquet"), name="out")
    assert start(definition_of(pipeline, credit_bytes=4_096)).result().records_out == 60 * FACTOR
    found = read_committed(str(tmp_path / "out"))
    assert sorted(found.group_by("id").len().rows()) == [(one, FACTOR) for one in range(60)]
    assert found.unique().height == 60 * FACTOR


def counted(root: Path) -> int:
    """Return how many records the windows that were committed so far hold."""
    found = read_committed(str(root / "out"))
    return int(found["n"].sum()) if found.width else 0


def test_an_idle_split_blocks_neither_windows_nor_checkpoints(start: Start, tmp_path: Path) -> None:
    rows = [{"key": second % 2, "ts": second * 1_000} for second in range(20)]
    types = {"key": pa.int64(), "ts": pa.int64()}
    talking = [*({**row} for row in rows), PAUSE]
    pipeline = pipeline_at(tmp_path)
    stream = pipeline.source(ScriptedSource(talking, [PAUSE], schema=types))
    counts = stream.with_timestamps("ts", idle_timeout="100ms").key_by("key").window(hg.Tumbling("5s")).agg(n=pl.len())
    counts.sink(hg.FileSink(tmp_path / "out", "parquet", roll_interval=0), name="out")
    run = start(definition_of(pipeline))
    run.wait(lambda: counted(tmp_path) >= 15, "windows fire")  # the source gives one record at a time
    run.wait_checkpoints(1)
    run.driver.stop()
    run.result()
    out = read_committed(str(tmp_path / "out"))
    assert out["n"].sum() == 15, "the last window is open"


def slowly(gate: Path, row: dict[str, Any]) -> dict[str, Any]:
    if not gate.exists():
        time.sleep(0.002)  # work that takes time: not a wait for anything
    return row


def test_a_barrier_gets_through_a_slow_operator_under_back_pressure(start: Start, tmp_path: Path) -> None:
    source = generator(30_000, splits=2, batch=50)
    pipeline, gate = pipeline_at(tmp_path), tmp_path / "gate"
    slow = pipeline.source(source).rebalance().map(partial(slowly, gate))
    slow.sink(hg.FileSink(tmp_path / "out", "parquet"), name="out")
    run = start(definition_of(pipeline, credit_bytes=4_096))
    run.wait_checkpoints(3)
    assert not run.driver.result.done(), "checkpoints complete while records still wait"
    gate.touch()
    assert run.result().is_finished
    same(read_committed(str(tmp_path / "out")), events(source).select("id", "key", "value"))


STREAM = "app/out"
SCHEMA = pa.schema([("n", pa.int64())])


def piped(root: Path, rows: int, stream: str = STREAM, **options: object) -> PipelineDefinition:
    pipeline = pipeline_at(root, **options)  # type: ignore[arg-type]
    source = hg.Generator(columns={"n": hg.RowNumber()}, rows=rows, rows_per_second=300, batch_rows=20)
    pipeline.source(source).select("n").sink(hg.StreamSink(stream, store=str(root / "store")), name="out")
    return definition_of(pipeline)


def count(store: Store, stream: str = STREAM) -> int:
    return store.describe(stream).events_count


def commit_one(store: Store, name: str, owner: str) -> None:
    transaction = store.transactions.begin(STREAM, owner=owner, epoch=0, name=name)
    transaction.write(pa.record_batch([[0]], schema=SCHEMA))
    transaction.prepare()
    store.commit_transactions([(STREAM, name)], owner=owner, epoch=0)


def test_a_busy_owner_does_not_keep_a_quiet_pipeline_from_starting(
    start: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction_rows, "OUTCOMES_RETAINED", 3)
    monkeypatch.setattr(transaction_rows, "OUTCOME_CLEANUP_INTERVAL", 1)
    assert start(piped(tmp_path, 60)).result().is_finished
    with Store.open(tmp_path / "store") as store:
        for n in range(9):
            commit_one(store, f"busy-{n}", "busy")
        assert start(piped(tmp_path, 60)).result().is_finished  # commits again what its checkpoint promised
        assert count(store) == 60 + 9


def test_a_long_run_leaves_outcomes_that_its_checkpoints_may_ask_for_and_few_others(
    start: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # K20
    monkeypatch.setattr(coordinator_host, "DROPS_BETWEEN_FORGETTING", 1)
    run = start(piped(tmp_path, 600, retained=2))
    run.wait_checkpoints(9)
    assert run.result().is_finished
    assert len(run.checkpoints) > 8
    with Store.open(tmp_path / "store") as store:
        left = {checkpoint_of(info.name) for info in store.list_transactions(owner="p/out")}
        assert None not in left
        assert len(left) < len(run.checkpoints) - 2
        assert run.checkpoints[-1] >= max(c for c in left if c is not None)
        assert run.checkpoints[0] not in left
        assert start(piped(tmp_path, 600, retained=2)).result().is_finished
        assert count(store) == 600


def test_a_target_that_knows_other_output_under_a_name_stops_the_pipeline_for_good(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    with Store.open(tmp_path / "store") as store:
        store.create_stream(STREAM, SCHEMA, segments=1)
        for subtask in (0, 1):
            for checkpoint in (1, 2, 3):
                commit_one(store, transaction_name("p/out", CheckpointId(checkpoint), subtask, Generation(1)), "p/out")
        run = start(piped(tmp_path, 600))
        with pytest.raises(PipelineFailed, match=r"sink 'out' cannot prepare .* cannot be prepared with other content"):
            run.result()
        assert run.restarts == []
        assert count(store) == 6


def test_a_sink_that_is_moved_to_another_stream_leaves_nothing_prepared_in_the_former_one(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    with Store.open(tmp_path / "store") as store:
        first = start(piped(tmp_path, 6_000))
        first.wait_checkpoints(2)
        first.driver.cancel()  # what is prepared for the next checkpoint stays prepared
        first.driver.join()
        transaction = store.transactions.begin(
            STREAM, owner="p/out", epoch=1, name="p/out/checkpoint-999/subtask-0/generation-1"
        )
        transaction.write(pa.record_batch([[1]], schema=SCHEMA))
        transaction.prepare()
        second = start(piped(tmp_path, 6_000, stream="app/elsewhere"))
        second.wait_checkpoints(1)
        store.seal(STREAM)
        assert store.describe(STREAM).prepared_count == 0
        second.driver.cancel()
        second.driver.join()


ROWS = 6_000

Starts = Callable[..., Run]


def last_of_each_key(root: Path) -> hg.Pipeline:
    pipeline = pipeline_at(root, interval="100ms")
    columns = {"key": hg.Uniform(0, 20), "n": hg.RowNumber()}
    source = hg.Generator(columns=columns, rows=ROWS, rows_per_second=3_000, splits=3, batch_rows=50)
    last = pipeline.source(source).key_by("key").reduce(lambda so_far, record: record)
    last.filter(pl.col("n") >= 0).sink(hg.FileSink(root / "out", "parquet"), name="out")
    return pipeline


def test_a_finished_pipeline_that_is_started_again_reports_what_it_had_counted(tmp_path: Path) -> None:  # OM1
    def run(least: int) -> RunResult:
        pipeline = pipeline_at(tmp_path)
        rows = pipeline.source(hg.FromRows([{"n": n} for n in range(7)]))
        rows.filter(pl.col("n") >= least).sink(hg.FileSink(tmp_path / "out", "parquet"))
        return testing.run(pipeline)

    first, again, changed = run(2), run(2), run(4)
    assert (first.is_finished, first.records_in, first.records_out) == (True, 7, 5)
    for later in (again, changed):
        assert (later.is_finished, later.records_in, later.records_out) == (True, 7, 5)


def test_totals_survive_kills_of_workers_and_the_end_of_a_driver(start: Starts, tmp_path: Path) -> None:  # OM1
    first = start(definition_of(last_of_each_key(tmp_path)))
    first.wait_checkpoints(2)
    first.kill(0)
    first.wait_restarts(1)
    first.wait_checkpoints(2)
    first.driver.stop()
    stopped = first.result()
    second = start(definition_of(last_of_each_key(tmp_path)))
    second.wait_checkpoints(1)
    second.kill(1)
    result = second.result()
    assert result.is_finished
    assert stopped.records_in < ROWS
    assert (result.records_in, result.records_out) == (ROWS, ROWS)
    found = {str(node.node): (node.records_in, node.records_out) for node in second.driver.progress.nodes}
    assert found["reduce"] == (ROWS, ROWS)
    assert (second.driver.progress.failures, second.driver.progress.restarts) == (1, 1)


def test_what_flows_over_the_edges_of_a_run_is_told(start: Starts, tmp_path: Path) -> None:
    pipeline = pipeline_at(tmp_path)
    rows = pipeline.source(hg.FromRows([{"n": n} for n in range(10)]), name="rows")
    kept = rows.filter(pl.col("n") > 3, name="kept").with_columns(m=pl.col("n") * 2, name="doubled").key_by("n")
    kept.reduce(lambda so_far, record: record, name="last").sink(hg.Discard(), name="end")
    run = start(definition_of(pipeline))
    assert run.result().is_finished
    found = run.driver.progress
    counts = {str(node.node): (node.records_in, node.records_out, node.runs_with) for node in found.nodes}
    assert counts["kept"] == (10, 6, "doubled")
    assert counts["doubled"] == (6, 6, None)
    assert [(edge.source, edge.target) for edge in found.edges] == [("key-by", "last")]
