"""State of a running pipeline with real workers, looked at from outside: what it shows is a cut."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
from pyspark import cloudpickle
from tests.runtime.running import WAIT_S, definition_of, pipeline_at
from tests.runtime.runs.test_results import events, generator

import headgate as hg
from headgate.errors import StorageError

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import tests

SOURCE = generator(3_000, 1_000, batch=20)


class Noting(hg.ProcessFunction):
    """Counts the records of each key, and keeps the ids that it saw."""

    schema = {"key": pa.int64()}

    def open(self, state: hg.StateHandle) -> None:
        self.count = state.value("count", pa.int64())
        self.ids = state.list("ids", pa.int64())
        self.last = state.map("last", pa.string(), pa.struct([("id", pa.int64()), ("value", pa.int64())]))

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> None:
        self.count.put(self.count.get(0) + 1)
        self.ids.append(row["id"])
        self.last.put("even" if row["id"] % 2 == 0 else "odd", {"id": row["id"], "value": row["value"]})


class Passing(hg.CheckpointedFunction):
    """Notes the ids that came by, in operator state."""

    def restore(self, context: hg.RestoreContext) -> None:
        self.seen = context.list("seen", pa.int64())

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        self.seen.append(row["id"])
        return row


def operators_or_why_not(path: Path) -> set[str]:
    """Return the operators of the newest checkpoint, which the next one may replace at any moment."""
    try:
        return set(hg.state_catalog(path)["operator"])
    except StorageError as error:
        return {str(error)}


def test_what_is_shown_of_a_running_pipeline_is_a_cut(start: Any, tmp_path: Path) -> None:
    pipeline = pipeline_at(tmp_path, parallelism=2, interval="40ms")
    rows = pipeline.source(SOURCE, name="in").map(Passing(), name="passing").with_timestamps("ts", name="times")
    keyed = rows.key_by("key")
    keyed.process(Noting(), name="noting").sink(hg.Discard(), name="nowhere")
    keyed.window(hg.Tumbling("1d")).agg(pl.col("id").median(), name="kept").sink(hg.Discard(), name="windows")
    rows.select("id").sink(hg.FileSink(tmp_path / "out", "parquet", roll_interval="1h"), name="out")
    run = start(definition_of(pipeline, inline_bytes_max=100))
    run.wait_checkpoints(5)
    live = operators_or_why_not(tmp_path / "checkpoints" / "p")
    assert {"in", "passing", "noting", "kept"} <= live or "its files were removed meanwhile" in live.pop()
    taken = tmp_path / "taken"
    assert run.driver.take_savepoint(str(taken)).result(WAIT_S).savepoint is not None
    catalog = {(row["operator"], row["state"]): row for row in hg.state_catalog(taken).rows(named=True)}
    read = {one: hg.read_state(taken, *one) for one in catalog}
    counted = {one: row["rows"] for one, row in catalog.items() if row["rows"] is not None}
    assert {one: read[one].height for one in counted} == counted
    assert {one for one, row in catalog.items() if row["kind"] != "facts"} <= counted.keys(), (
        "only those may be unknown"
    )
    positions = sum(int.from_bytes(position, "little") for position in read["in", "positions"]["position"])
    assert positions > 0
    ids = read["noting", "ids"]
    assert ids.columns == ["key", "value"]
    assert ids.height == positions, "every record that was read is in the state, once"
    made = events(SOURCE).filter(pl.col("id").is_in(ids["value"].to_list()))
    assert sorted(ids.rows()) == sorted(made.select("key", "id").rows())
    counts = read["noting", "count"]
    assert dict(counts.rows()) == dict(made.group_by("key").len().rows())
    last = read["noting", "last"]
    assert last.columns == ["key", "map_key", "value"]
    assert {(key, parity) for key, parity, _ in last.rows()} == {
        (key, "odd" if id_ % 2 else "even") for key, id_ in made.select("key", "id").rows()
    }
    for state in (read["passing", "seen"]["value"], read["kept", "records"]["id"]):
        assert sorted(state) == sorted(made["id"])
    held = read.get(("out", "records"), pl.DataFrame({"id": []}))
    assert set(held["id"]) <= set(made["id"])
    key = counts["key"][0]
    assert hg.read_state(taken, "noting", "count", keys=[key]).rows() == [counts.row(0)]
    run.driver.cancel()
