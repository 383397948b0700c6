"""Checkpoints in chunks of each manifest version, with every kind of state: kept in ``tests/golden``, read, and run on.

``write`` made each, with the code of that version; ``states.json`` is what that code read of it.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import polars.selectors as cs
import pyarrow as pa
import pytest
from tests.runtime.test_process_results import events

import headgate as hg
from headgate import testing
from headgate.codec.log_entry import _version
from headgate.model.manifest import Manifest
from headgate.protocol.checkpoints.recovery import candidates
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.state.memory import incremental_snapshot
from headgate.storage.urls import open_storage

GOLDEN = Path(__file__).parents[1] / "golden"
ENDINGS = {9: ".chunk", 10: ".chunk2"}
"""Of the names of chunks, by version."""
NAME = "golden"
ROWS = 600
SOURCE = hg.Generator(
    columns={"id": hg.RowNumber(), "key": hg.Uniform(0, 20), "value": hg.Uniform(0, 1_000)},
    rows=ROWS,
    time="deterministic",
    step_us=10_000,
    splits=3,
    batch_rows=20,
    pool_rows=65_536,
)
RULES = hg.Generator(
    columns={"rule": hg.Uniform(0, 5), "limit": hg.Uniform(0, 100)},
    rows=60,
    time="deterministic",
    timestamp=None,
    splits=1,
    batch_rows=5,
)
TTL = hg.TTL("36500d")
END_MS = 1 << 52
LATER_MS = 1 << 40

Row = dict[str, Any]


class ByRow(hg.ProcessFunction):
    """All kinds of state of a key; a timer at the end of all input, and one that never fires."""

    schema = {"key": pa.int64(), "fired": pa.int64()}

    def open(self, state: hg.StateHandle) -> None:
        self.count = state.value("count", pa.int64())
        self.ids = state.list("ids", pa.int64())
        self.parts = state.map("parts", pa.string(), pa.int64())
        self.fresh = state.value("fresh", pa.int64(), ttl=TTL)

    def process(self, row: Row, context: hg.ProcessContext) -> None:
        if self.count.get() is None:
            context.timers.register_event_time(END_MS)
            context.timers.register_processing_time(context.timers.processing_time_ms + LATER_MS)
        part = "even" if row["id"] % 2 == 0 else "odd"
        self.count.put(self.count.get(0) + 1)
        self.ids.append(row["id"])
        self.parts.put(part, self.parts.get(part, 0) + row["value"])
        self.fresh.put(row["id"])

    def on_timer(self, timer: hg.Timer, context: hg.ProcessContext) -> Iterator[Row]:
        yield {"key": context.key, "fired": 1}


class ByBatch(hg.BatchProcessFunction):
    """The same, many keys a call."""

    schema = ByRow.schema

    def open(self, state: hg.BatchStateHandle) -> None:
        self.count = state.value("count", pa.int64())
        self.ids = state.list("ids", pa.int64())
        self.parts = state.map("parts", pa.string(), pa.int64())
        self.fresh = state.value("fresh", pa.int64(), ttl=TTL)

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> None:
        is_new = self.count.get().is_null()
        context.timers.register_event_time(END_MS, where=is_new)
        context.timers.register_processing_time(context.timers.processing_time_ms + LATER_MS, where=is_new)
        self.count.update(1, "add")
        self.ids.append(batch["id"])
        parts = batch.group_by("key", part=pl.when(pl.col("id") % 2 == 0).then(pl.lit("even")).otherwise(pl.lit("odd")))
        sums = parts.agg(pl.col("value").sum())
        keys = context.lookup(sums)
        self.parts.put(sums["part"], self.parts.get(sums["part"], keys=keys).fill_null(0) + sums["value"], keys=keys)
        self.fresh.put(batch["id"])

    def on_timer(self, timers: hg.FiredTimers, context: hg.BatchContext) -> pl.DataFrame:
        return context.keys.frame().with_columns(fired=pl.lit(1, pl.Int64))


class Counting(hg.ProcessFunction):
    def open(self, state: hg.StateHandle) -> None:
        self.count = state.value("count", pa.int64())

    def process(self, row: Row, context: hg.ProcessContext) -> None:
        self.count.put(self.count.get(0) + 1)


class Ruled(hg.BroadcastProcessFunction):
    schema = {"key": pa.int64()}

    def open(self, state: hg.StateHandle) -> None:
        self.count = state.value("count", pa.int64())
        self.rules = state.broadcast("rules", pa.int64(), pa.int64())

    def process(self, row: Row, context: hg.ProcessContext) -> None:
        self.count.put(self.count.get(0) + 1)

    def process_broadcast(self, row: Row, context: hg.BroadcastContext) -> None:
        self.rules.put(row["rule"], self.rules.get(row["rule"], 0) + row["limit"])


class Noting(hg.CheckpointedFunction):
    """Notes the ids that came by, in a list, and how many, in a union."""

    def restore(self, context: hg.RestoreContext) -> None:
        self.seen = context.list("seen", pa.int64())
        self.told = context.union("told", pa.int64())
        self.count = 0

    def __call__(self, row: Row) -> Row:
        self.seen.append(row["id"])
        self.count += 1
        return row

    def snapshot(self, context: hg.SnapshotContext) -> None:
        self.told.clear()
        self.told.append(self.count)


def added(total: Row, row: Row) -> Row:
    return {**row, **{name: total[name] + row[name] for name in total if name != "key"}}


def golden(rate: float | None, parallelism: int, state: hg.Memory | hg.RocksDB | None = None) -> hg.Pipeline:
    """Return the pipeline; what comes out of windows and timers is added up, as state."""
    options = {"parallelism": parallelism, "checkpointing": hg.Checkpointing(interval="60ms", retained=2)}
    pipeline = hg.Pipeline(NAME, state=state or hg.Memory(), **options)
    stream = pipeline.source(replace(SOURCE, rows_per_second=rate), name="in")
    timed = stream.with_timestamps("ts", out_of_orderness="1s", name="times")
    keyed = timed.key_by("key")
    sums = timed.select("key", "value", name="values").key_by("key").reduce(added, name="sums")
    merged = keyed.window(hg.Tumbling("2s")).agg(n=pl.len(), total=pl.col("value").sum(), name="merged")
    kept = keyed.window(hg.Tumbling("2s")).agg(n=pl.len(), middle=pl.col("value").median(), name="kept")
    by_row, by_batch = keyed.process(ByRow(), name="by-row"), keyed.process(ByBatch(), name="by-batch")
    rules = pipeline.source(replace(RULES, rows_per_second=None if rate is None else rate / 10), name="rules")
    ruled = keyed.connect(rules.broadcast()).process(Ruled(), name="ruled")
    stored = keyed.process(Counting(), name="stored", state=hg.RocksDB())
    looped = stream.select("id", "key", left=pl.col("value") % 4).iterate(counted_down, name="loop")
    for name, made in (("merged", merged.select("key", "n", "total")), ("kept", kept.select("key", "n", "middle"))):
        made.key_by("key").reduce(added, name=f"{name}-sums").sink(hg.Discard(), name=f"{name}-out")
    for name, fired in (("by-row", by_row), ("by-batch", by_batch)):
        fired.key_by("key").reduce(added, name=f"{name}-sums").sink(hg.Discard(), name=f"{name}-out")
    noted = stream.map(Noting(), name="noting")
    for name, rest in (("sums", sums), ("ruled", ruled), ("stored", stored), ("loop", looped), ("noted", noted)):
        rest.sink(hg.Discard(), name=f"{name}-out")
    return pipeline


def counted_down(loop: hg.Stream) -> tuple[hg.Stream, hg.Stream]:
    stepped = loop.with_columns(left=pl.col("left") - 1, name="step")
    return stepped.filter(pl.col("left") > 0).rebalance(), stepped.filter(pl.col("left") <= 0)


def write(root: Path) -> None:
    """Write the golden checkpoint, and what is in it: four checkpoints of a pipeline that then is killed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(incremental_snapshot, "SIZE_BYTES_MIN", 1)
        with testing.running(golden(ROWS / 20, 2), checkpoint_dir=root) as handle:
            for _ in range(4):
                time.sleep(0.5)  # not a wait for anything: input comes meanwhile
                while handle.take_checkpoint().checkpoint is None:
                    time.sleep(0.05)
    found = {f"{node}/{state}": rows_of(root, node, state) for node, state in states(root)}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(rows)}" for name, rows in found.items())
    (root / "states.json").write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def states(root: Path) -> list[tuple[str, str]]:
    return sorted(hg.state_catalog(root / NAME).select("operator", "state").rows())


def rows_of(root: Path, node: str, state: str) -> list[Row]:
    """Return the rows of a state as JSON has them, in an order of their own; a list's elements in theirs."""
    frame = hg.read_state(root / NAME, node, state).with_columns(cs.binary().bin.encode("hex"))
    rows: list[Row] = json.loads(frame.write_json())
    return sorted(rows, key=lambda row: json.dumps([found for name, found in row.items() if name not in ("value",)]))


def newest(root: Path) -> Manifest:
    return candidates(CheckpointLog(open_storage(str(root)), NAME).observe())[0]


def copied(version: int, to: Path) -> Path:
    return shutil.copytree(GOLDEN / f"checkpoints_{version}", to / "checkpoints")


# MC8
@pytest.mark.parametrize("version", ENDINGS)
def test_chunks_that_an_earlier_version_wrote_are_read(version: int, tmp_path: Path) -> None:
    root = copied(version, tmp_path)
    manifest = newest(root)
    assert _version(manifest) == version
    names = {part.name.partition("-")[0] for part in manifest.parts if part.name.endswith(ENDINGS[version])}
    assert len(names) > 1, "of several checkpoints"
    wanted = json.loads((root / "states.json").read_text(encoding="utf-8"))
    assert {f"{node}/{state}" for node, state in states(root)} == wanted.keys()
    for node, state in states(root):
        assert rows_of(root, node, state) == wanted[f"{node}/{state}"], (node, state)


# MC7 MC8
@pytest.mark.parametrize(
    ("version", "parallelism", "state"),
    [(9, 2, hg.Memory()), (9, 3, hg.Memory()), (9, 3, hg.RocksDB()), (10, 2, hg.Memory()), (10, 3, hg.RocksDB())],
)
def test_a_pipeline_goes_on_from_chunks_that_an_earlier_version_wrote(
    version: int, parallelism: int, state: Any, tmp_path: Path
) -> None:
    root = copied(version, tmp_path)
    before = newest(root)
    testing.run(golden(None, parallelism, state), timeout_s=300, checkpoint_dir=root)
    assert newest(root).checkpoint > before.checkpoint
    made = events(SOURCE)
    check_totals(root, made)
    assert sorted(row["value"] for row in rows_of(root, "noting", "seen")) == list(range(ROWS))
    parts = made.group_by("key", (pl.col("id") % 2 == 0).alias("even")).agg(pl.col("value").sum()).rows()
    for node in ("by-row", "by-batch"):
        found = {(row["key"], row["map_key"] == "even"): row["value"] for row in rows_of(root, node, "parts")}
        assert found == {(key, is_even): total for key, is_even, total in parts}
        assert {row["key"] for row in rows_of(root, node, "fresh")} == set(made["key"])
        assert sorted(row["value"] for row in rows_of(root, node, "ids")) == list(range(ROWS))
        assert {row["fired"] for row in rows_of(root, f"{node}-sums", "accumulators")} == {1}
        assert len(rows_of(root, node, "headgate.timers.processing_time")) == made["key"].n_unique()
        assert not rows_of(root, node, "headgate.timers.event_time")


def check_totals(root: Path, made: pl.DataFrame) -> None:
    """Every record is counted once by each operator, whatever was in flight, in a window or waiting."""
    totals = {key: (n, total) for key, n, total in made.group_by("key").agg(pl.len(), pl.col("value").sum()).rows()}
    counts = {key: n for key, (n, _) in totals.items()}
    for node in ("by-row", "by-batch", "ruled", "stored"):
        assert {row["key"]: row["value"] for row in rows_of(root, node, "count")} == counts, node
    for node in ("merged-sums", "kept-sums"):
        assert {row["key"]: row["n"] for row in rows_of(root, node, "accumulators")} == counts, node
    sums = {row["key"]: row["total"] for row in rows_of(root, "merged-sums", "accumulators")}
    assert sums == {key: total for key, (_, total) in totals.items()}
    assert {row["key"]: row["value"] for row in rows_of(root, "sums", "accumulators")} == sums
