"""A pipeline between streams that get other columns while it runs, with real workers."""

from __future__ import annotations

import sys
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

import headgate as hg
from headgate import testing
from headgate.connectors.files.file_committer import read_committed
from headgate.model.config import MemoryState, RocksState, StateConfig
from headgate.model.plan import PipelineDefinition
from headgate.store.store import Store
from headgate.testing import EOF, PAUSE, Collect, FailOnce, ScriptedSource

FIRST = pa.schema([("key", pa.large_string()), ("n", pa.int32())])
LAST = pa.schema([("key", pa.large_string()), ("n", pa.int64()), ("note", pa.large_string())])


def copied(root: Path) -> PipelineDefinition:
    pipeline = pipeline_at(root, parallelism=2)
    source = pipeline.source(hg.StreamSource("in", store=str(root / "store")), name="source")
    source.sink(hg.StreamSink("out", store=str(root / "store"), routing_key="key", segments=2), name="out")
    return definition_of(pipeline)


def write(store: Store, of: pa.Schema, *rows: tuple[Any, ...]) -> None:
    with store.writer("in") as writer:
        writer.append(pa.RecordBatch.from_pylist([dict(zip(of.names, row, strict=True)) for row in rows], schema=of))


def read(store: Store) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for segment in range(len(store.describe("out").ends)):
        reader = store.reader("out", segment)
        while (batch := reader.read()) is not None:
            found += batch.to_pylist()
    return sorted(found, key=lambda row: int(row["n"]))


def test_a_pipeline_goes_on_through_updates_and_takes_them_up_when_it_is_built_anew(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    with Store.open(tmp_path / "store") as store:
        store.create_stream("in", FIRST, segments=2, routing_key="key")
        before = copied(tmp_path)
        write(store, FIRST, *((f"k{n}", n) for n in range(4)))
        run = start(before)
        run.wait_checkpoints(2)
        store.update_stream("in", schema=LAST)
        write(store, LAST, ("k4", 4, "left out"))
        run.kill(0)  # what takes its place was built with the columns of before, too
        run.wait_restarts(1)
        store.update_stream("out", schema=LAST)
        write(store, FIRST, ("k5", 5))
        run.wait_checkpoints(3)
        run.driver.stop()
        assert not run.result().is_finished
        write(store, LAST, ("k6", 1 << 40, "new"))
        store.seal("in")
        assert start(copied(tmp_path)).result().is_finished
        assert read(store) == [
            *({"key": f"k{n}", "n": n, "note": None} for n in range(6)),
            {"key": "k6", "n": 1 << 40, "note": "new"},
        ]
        assert [problem for problem in store.fsck() if not problem.is_harmless] == []


Row = dict[str, Any]
SCHEMA = {"k": int, "ms": int, "x": int}
GAP_MS = 6
ROWS: list[Row] = [{"k": n % 5, "ms": n + 30 * (-n % 4), "x": n % 7} for n in range(600)]
"""Out of order by less than 100 ms."""

OTHERS: list[Row] = [{"k": n % 5, "ms": 2 * n, "x": n % 11} for n in range(0, 300, 7)]

MEMORY, ROCKSDB = hg.Memory(), hg.RocksDB()


def records(path: Path, state: Any, out_of_orderness: str) -> hg.Stream:
    """Records of two splits, of which one fails on the way."""
    script = [item for at in range(0, 600, 60) for item in (ROWS[at : at + 60], PAUSE)]
    pipeline = hg.Pipeline("p", parallelism=2, state=state, checkpointing=hg.Checkpointing(interval="20ms"))
    failing = FailOnce(path / "failed")
    source = ScriptedSource(
        [*script, EOF], [*OTHERS[:20], PAUSE, failing, *OTHERS[20:], EOF], schema=SCHEMA, pause_ms=20
    )
    return pipeline.source(source).with_timestamps("ms", out_of_orderness=out_of_orderness)


def results(stream: hg.Stream, path: Path) -> Counter[tuple[Any, ...]]:
    """What is there when all changes were applied."""
    sink = Collect(path / "out")
    stream.sink(sink)
    testing.run(stream._pipeline, timeout_s=300, kill_worker_after_checkpoint=2)
    found: Counter[tuple[Any, ...]] = Counter()
    for row in sink.rows():
        found[tuple(value for name, value in row.items() if name != "op")] += (
            1 if row.get("op", "insert") in ("insert", "update_after") else -1
        )
    assert min(found.values()) >= 0, "what was not there went"
    return +found


def sessions() -> list[list[Row]]:
    found: list[list[Row]] = []
    for key in range(5):
        last: list[Row] = []
        for row in sorted((row for row in ROWS + OTHERS if row["k"] == key), key=lambda row: int(row["ms"])):
            if not last or row["ms"] >= last[-1]["ms"] + GAP_MS:
                last = []
                found.append(last)
            last.append(row)
    return found


def add_up(total: Row, row: Row) -> Row:
    return {"k": total["k"], "ms": max(total["ms"], row["ms"]), "x": total["x"] + row["x"]}


def by_value(key: int, rows: pl.DataFrame) -> list[Row]:
    return [{"value": value, "count": count} for value, count in sorted(Counter(rows["x"]).items())]


@pytest.mark.parametrize("state", few([MEMORY, ROCKSDB], 1))
def test_lost_workers_change_no_totals_of_sessions(tmp_path: Path, state: Any) -> None:
    windows = (
        records(tmp_path, state, "5ms")
        .key_by("k")
        .window(hg.Session(f"{GAP_MS}ms"), allowed_lateness="1h", retractions=True)
    )
    found = results(windows.reduce(add_up).select("k", "ms", "x", "op"), tmp_path)
    assert found == Counter(
        (one[0]["k"], max(row["ms"] for row in one), sum(row["x"] for row in one)) for one in sessions()
    )


@pytest.mark.parametrize("state", few([ROCKSDB, MEMORY], 1))
def test_lost_workers_change_no_rows_of_sessions(tmp_path: Path, state: Any) -> None:
    windows = (
        records(tmp_path, state, "5ms")
        .key_by("k")
        .window(hg.Session(f"{GAP_MS}ms"), allowed_lateness="1h", early="10ms", retractions=True)
    )
    found = results(windows.apply(by_value, {"value": int, "count": int}).select("k", "value", "count", "op"), tmp_path)
    expected: Counter[tuple[Any, ...]] = Counter()
    for one in sessions():
        counts = Counter(row["x"] for row in one)
        expected.update((one[0]["k"], value, count) for value, count in counts.items())
    assert found == expected


@pytest.mark.parametrize("state", few([MEMORY, ROCKSDB], 1))
def test_lost_workers_change_no_tops(tmp_path: Path, state: Any) -> None:
    keyed = records(tmp_path, state, "1s").key_by("k")
    top = keyed.top_per_window(2, by="x", ties=True, rank="rank", window=hg.Sliding("40ms", "20ms"))
    found = results(top.select("k", "ms", "x", "rank", at=pl.col("window_start").dt.epoch("ms")), tmp_path)
    expected: Counter[tuple[Any, ...]] = Counter()
    for start in range(-20, 720, 20):
        for key in range(5):
            inside = [row for row in ROWS + OTHERS if row["k"] == key and start <= row["ms"] < start + 40]
            for row in inside:
                rank = 1 + sum(other["x"] > row["x"] for other in inside)
                if rank <= 2:
                    expected[(*row.values(), rank, start)] += 1
    assert found == expected


def windowed(root: Path, source: hg.Generator, *, is_rebalanced: bool) -> PipelineDefinition:
    pipeline = pipeline_at(root, parallelism=2)
    stream = pipeline.source(source)
    if is_rebalanced:
        stream = stream.rebalance()
    stream = stream.with_timestamps("ts", out_of_orderness="1d")
    counts = stream.key_by("key").window(hg.Tumbling("1s")).agg(n=pl.len(), total=pl.col("value").sum())
    counts.sink(hg.FileSink(root / "out", "parquet"), name="out")
    return definition_of(pipeline)


def test_a_rebalance_between_two_runs_keeps_every_operators_state(start: Any, tmp_path: Path) -> None:  # R12
    source = generator(20_000, 10_000)
    first = start(windowed(tmp_path, source, is_rebalanced=False))
    first.wait_checkpoints(2)
    first.driver.stop()
    assert not first.result().is_finished
    second = start(windowed(tmp_path, source, is_rebalanced=True))
    assert second.result().is_finished
    assert any("continues from checkpoint" in note for note in second.notes)
    same(read_committed(str(tmp_path / "out")), recounted(source))


cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import tests

Start = Any
PLACE = pa.struct([("shop", pa.int32()), ("note", pa.large_string())])
NEW_PLACE = pa.struct([("store", pa.int64()), ("visits", pa.int32())])


class Former(hg.ProcessFunction):
    """The program before."""

    schema = {"key": pa.int64(), "id": pa.int64(), "n": pa.int64()}

    def open(self, state: hg.StateHandle) -> None:
        self.count = state.value("count", pa.int32())
        self.ids = state.list("ids", pa.int32())
        self.last = state.map("last", pa.int64(), PLACE)
        self.useless = state.value("useless", bool)

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> Iterator[dict[str, Any]]:
        self.count.put((self.count.get() or 0) + 1)
        self.ids.append(row["id"])
        self.last.put(row["id"] % 5, {"shop": row["id"], "note": "?"})
        self.useless.put(True)
        yield {"key": context.key, "id": row["id"], "n": self.count.get()}


class Changed(hg.ProcessFunction):
    """The program behind: wider, under another name, with another field and one less, and another state."""

    schema = Former.schema

    def open(self, state: hg.StateHandle) -> None:
        self.total = state.value("total", pa.int64(), evolution=hg.Evolution(renamed_from="count"))
        self.ids = state.list("ids", pa.float64())
        placed = hg.Evolution(defaults={"visits": 0}, renamed={"shop": "store"})
        self.last = state.map("last", pa.int64(), NEW_PLACE, evolution=placed)
        self.fresh = state.value("fresh", pa.int64(), evolution=hg.Evolution(starts_empty=True))
        state.forget("useless")

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> Iterator[dict[str, Any]]:
        self.total.put((self.total.get() or 0) + 1)
        self.ids.append(float(row["id"]))
        self.fresh.put((self.fresh.get() or 0) + 1)
        found = self.ids.get()
        assert len(found) == self.total.get()
        place = row["id"] % 5
        before = self.last.get(place)
        assert before is None or before["store"] == [one for one in found[:-1] if one % 5 == place][-1]
        self.last.put(place, {"store": row["id"], "visits": 0 if before is None else before["visits"] + 1})
        assert self.total.get() > self.fresh.get() or self.total.get() == sum(
            v["visits"] + 1 for _, v in self.last.items()
        )
        yield {"key": context.key, "id": row["id"], "n": self.total.get()}


class FormerBatch(hg.BatchProcessFunction):
    schema = {"key": pa.int64(), "n": pa.int64()}

    def open(self, state: hg.BatchStateHandle) -> None:
        self.n = state.value("n", pa.int32())

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame:
        changed = self.n.update(1, "add")
        return batch.select("key", n=self.n.get().cast(pl.Int64)).filter(changed)


class ChangedBatch(FormerBatch):
    def open(self, state: hg.BatchStateHandle) -> None:
        self.n = state.value("m", pa.int64(), evolution=hg.Evolution(renamed_from="n"))


def add(total: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    return {**total, "id": total["id"] + row["id"]}


def counted(
    root: Path, source: hg.Generator, parallelism: int, state: StateConfig, *, is_changed: bool
) -> PipelineDefinition:
    pipeline = pipeline_at(root, parallelism=parallelism)
    stream = pipeline.source(source, name="in").select("key", "id")
    keyed = stream.key_by("key", name="keyed")
    rows = keyed.process(Changed() if is_changed else Former(), name="rows")
    rows.sink(hg.FileSink(root / "rows", "parquet"), name="rows-out")
    batches = keyed.process(ChangedBatch() if is_changed else FormerBatch(), name="batches")
    batches.sink(hg.FileSink(root / "batches", "parquet"), name="batches-out")
    if is_changed:
        given = pl.col("id").alias("ident"), pl.lit("here").alias("place")
        wider = stream.select("key", *given).key_by("key", name="keyed-wider")
        told = hg.Evolution(defaults={"place": "before"}, renamed={"id": "ident"})
        sums = wider.reduce(
            lambda total, row: {**total, "ident": total["ident"] + row["ident"]}, name="sums", evolution=told
        )
        sums = sums.select("key", pl.col("ident").alias("id"))
    else:
        sums = keyed.reduce(add, name="sums")
    sums.sink(hg.FileSink(root / "sums", "parquet"), name="sums-out")
    definition = definition_of(pipeline)
    return replace(definition, config=replace(definition.config, state=state))


@pytest.mark.parametrize(("backend", "parallelism"), few([("rocksdb", 3), ("memory", 2)], 1))
def test_a_changed_program_goes_on_with_the_state_of_the_one_before(
    start: Start, tmp_path: Path, backend: str, parallelism: int
) -> None:  # EV1, EV2, EV6, EV7
    state: StateConfig = MemoryState() if backend == "memory" else RocksState(16 << 20, str(tmp_path / "local"))
    source = replace(generator(4_000, splits=None), rows_per_second=1_000)
    run = start(counted(tmp_path, source, 2, state, is_changed=False))
    run.wait_checkpoints(2)
    run.driver.stop()
    assert not run.result().is_finished
    run = start(counted(tmp_path, replace(source, rows_per_second=3_000), parallelism, state, is_changed=True))
    run.wait_checkpoints(1)
    run.kill(0)
    assert run.result().is_finished
    said = "\n".join(run.notes)
    for text in (
        "operator 'rows': state 'count' becomes 'total'",
        "operator 'rows': in state 'ids', int32 becomes double",
        "operator 'rows': in state 'last', 'visits' is added",
        "state 'fresh' of operator 'rows' is new: it starts empty",
        "state 'useless' of operator 'rows' is left behind",
        "operator 'sums': in state 'accumulators', 'place' is added",
    ):
        assert text in said
    wanted = events(source).select("key", "id")
    rows = read_committed(str(tmp_path / "rows"))
    same(rows.select("key", "id"), wanted)
    totals = wanted.group_by("key").agg(n=pl.len().cast(pl.Int64))
    for directory in ("rows", "batches"):
        found = read_committed(str(tmp_path / directory))
        same(found.group_by("key").agg(pl.col("n").max()), totals)
    sums = read_committed(str(tmp_path / "sums")).group_by("key").agg(pl.col("id").max())
    same(sums, wanted.group_by("key").agg(pl.col("id").sum()))
