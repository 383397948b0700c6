"""Savepoints from frames, restored by real workers: history as state, and a value that is put right."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from pyspark import cloudpickle
from tests.runtime.running import WAIT_S, Run, definition_of, pipeline_at
from tests.runtime.runs.test_results import events, generator

import headgate as hg
from headgate.connectors.files.file_committer import read_committed
from headgate.model.config import StartConfig
from headgate.model.plan import PipelineDefinition
from headgate.runtime.state_reader.lookup import find_checkpoint

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import tests

Start = Any
HISTORY = generator(600, None, batch=20)
NEWS = replace(generator(400, None, batch=20), seed=7)
BACKENDS = {"memory": hg.Memory(), "rocksdb": hg.RocksDB(memory="64MB")}


class Telling(hg.ProcessFunction):
    """Tells of each record how many its key had, the last id before it, and how often its parity was there."""

    schema = {"key": pa.int64(), "n": pa.int64(), "before": pa.int64(), "alike": pa.int64()}

    def open(self, state: hg.StateHandle) -> None:
        self.count = state.value("count", pa.int64())
        self.ids = state.list("ids", pa.int64())
        self.alike = state.map("alike", pa.string(), pa.int64())

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> Any:
        number, before = self.count.get(0) + 1, list(self.ids.get())
        parity = "odd" if row["id"] % 2 else "even"
        alike = self.alike.get(parity, 0) + 1
        self.count.put(number)
        self.ids.append(row["id"])
        self.alike.put(parity, alike)
        yield {"key": row["key"], "n": number, "before": before[-1] if before else -1, "alike": alike}


def highest(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return one if one["value"] >= other["value"] else other


def telling(root: Path, source: hg.Generator, *, parallelism: int = 2, state: Any = None) -> hg.Pipeline:
    pipeline = pipeline_at(root, parallelism=parallelism, name="p", state=state or hg.Memory())
    rows = pipeline.source(source, name="in").select("id", "key", "value", name="plain").key_by("key")
    rows.process(Telling(), name="telling").sink(hg.FileSink(root / "told", "parquet"), name="told")
    rows.reduce(highest, name="highest").sink(hg.FileSink(root / "most", "parquet"), name="most")
    return pipeline


def restoring(pipeline: hg.Pipeline, place: Path) -> PipelineDefinition:
    definition = definition_of(pipeline, inline_bytes_max=0)
    return replace(definition, config=replace(definition.config, start=StartConfig(str(place))))


def told(root: Path, name: str) -> pl.DataFrame:
    found = read_committed(str(root / name))
    return found.sort(found.columns)


def of_history(rows: pl.DataFrame) -> dict[tuple[str, str], pl.DataFrame]:
    """Return what the state is that the records of history leave, as a batch job computes it."""
    parity = pl.when(pl.col("id") % 2 == 1).then(pl.lit("odd")).otherwise(pl.lit("even"))
    alike = rows.group_by("key", map_key=parity).agg(value=pl.len())
    return {
        ("telling", "count"): rows.group_by("key").agg(value=pl.len()),
        ("telling", "ids"): rows.select("key", value="id"),
        ("telling", "alike"): alike,
        ("highest", "accumulators"): rows.sort("value", "id")
        .group_by("key")
        .last()
        .select("key", pl.struct("id", "value").alias("value")),
    }


def ended(run: Run) -> Run:
    assert run.result().is_finished
    return run


@pytest.mark.parametrize(("backend", "parallelism"), [("memory", 3), ("rocksdb", 1)])
def test_state_made_of_history_is_that_of_having_processed_it(
    start: Start, tmp_path: Path, backend: str, parallelism: int
) -> None:
    history = events(HISTORY).select("id", "key", "value")
    draft = hg.new_savepoint(telling(tmp_path, NEWS), tmp_path / "made")
    for (operator, state), rows in of_history(history).items():
        draft.with_state(operator, state, rows)
    written = draft.write()
    assert written.from_the_beginning == ("in",)
    both = telling(tmp_path / "a", NEWS, parallelism=parallelism, state=BACKENDS[backend])
    ended(start(restoring(both, tmp_path / "made")))
    news = events(NEWS).select("id", "key", "value")
    wanted = pl.concat([history, news])
    found = told(tmp_path / "a", "told")
    assert found.height == news.height
    last = found.group_by("key").agg(pl.col("n").max()).sort("key")
    counts = wanted.group_by("key").agg(n=pl.len().cast(pl.Int64)).sort("key").join(last, on="key", how="semi")
    assert last.rows() == counts.rows()
    firsts = found.sort("n").group_by("key", maintain_order=True).first()
    of_key = dict(history.group_by("key", maintain_order=True).agg("id").rows())
    assert {row["key"]: row["before"] for row in firsts.to_dicts()} == {
        key: of_key.get(key, [-1])[-1] for key in firsts["key"].to_list()
    }
    state = {one: hg.read_state(tmp_path / "a" / "checkpoints" / "p", *one) for one in of_history(history)}
    for one, rows in of_history(wanted).items():
        found, made = state[one].select(rows.columns), rows
        if one == ("highest", "accumulators"):  # of equal values, any may have come first
            found, made = (frame.with_columns(pl.col("value").struct.field("value")) for frame in (found, made))
        assert sorted(found.rows()) == sorted(made.rows()), one


def test_a_wrong_value_is_put_right_and_the_run_goes_on(start: Start, tmp_path: Path) -> None:
    source = replace(HISTORY, rows_per_second=50)
    first = start(definition_of(telling(tmp_path / "a", source), inline_bytes_max=0))
    first.wait_checkpoints(2)
    taken = first.driver.take_savepoint(str(tmp_path / "taken")).result(WAIT_S)
    assert taken.savepoint is not None
    first.driver.cancel()
    wrong = hg.read_state(tmp_path / "taken", "telling", "count")
    key = wrong["key"][0]
    right = wrong.with_columns(value=pl.col("value") + pl.when(pl.col("key") == key).then(1_000).otherwise(0))
    hg.edit_savepoint(tmp_path / "taken", tmp_path / "mended").replace("telling", "count", right).write()
    others = [("telling", "ids"), ("telling", "alike"), ("highest", "accumulators"), ("in", "positions")]
    for one in others:
        assert hg.read_state(tmp_path / "mended", *one).equals(hg.read_state(tmp_path / "taken", *one)), one
    again = telling(tmp_path / "b", HISTORY, parallelism=3)
    ended(start(restoring(again, tmp_path / "mended")))
    found = hg.read_state(tmp_path / "b" / "checkpoints" / "p", "telling", "count")
    counts = events(HISTORY).group_by("key").agg(value=pl.len().cast(pl.Int64))
    wanted = counts.with_columns(value=pl.col("value") + pl.when(pl.col("key") == key).then(1_000).otherwise(0))
    assert sorted(found.rows()) == sorted(wanted.rows()), "the rest goes on as if nothing had happened"


def test_input_is_read_again_behind_a_checkpoint_that_was_final(start: Start, tmp_path: Path) -> None:  # WS10
    definition = definition_of(telling(tmp_path, HISTORY), inline_bytes_max=0)
    ended(start(definition))
    own = tmp_path / "checkpoints" / "p"
    newest = find_checkpoint(str(own)).manifest
    assert (newest.is_final, bool(newest.committables)) == (True, True)
    once = told(tmp_path, "told")
    hg.edit_savepoint(own, tmp_path / "again").drop("in", "positions").write()
    begins = StartConfig(str(tmp_path / "again"), newest.checkpoint)
    ended(start(replace(definition, config=replace(definition.config, start=begins))))
    twice = told(tmp_path, "told")
    assert twice.height == 2 * once.height
    counts = dict(events(HISTORY).group_by("key").agg(value=2 * pl.len().cast(pl.Int64)).rows())
    assert dict(hg.read_state(own, "telling", "count").rows()) == counts
