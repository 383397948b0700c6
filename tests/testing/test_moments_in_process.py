"""Times with a zone are moments through whole pipelines, and local times stay local."""

from __future__ import annotations

import datetime as dt
import json
import time
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import headgate as hg
from headgate.cli import app as cli
from headgate.codec.arrow import LOCAL_TIME, MOMENT
from headgate.connectors.files.file_committer import read_committed
from headgate.state.key_hash import hash_column, hash_columns
from headgate.store.store import Store
from headgate.testing import EOF, PAUSE, Collect, ScriptedSource, run, running

NEW_YORK = ZoneInfo("America/New_York")
SCHEMA = pa.schema({"at": pa.timestamp("ms", "America/New_York"), "wall": pa.timestamp("s"), "n": pa.int64()})
FIRST = dt.datetime(2026, 3, 8, 1, 30)
"""In New York: half an hour later clocks go on to 3:00."""


def given(number: int) -> dict[str, Any]:
    moment = FIRST.replace(tzinfo=NEW_YORK).astimezone(dt.UTC) + dt.timedelta(minutes=20 * (number % 10))
    return {"at": moment.astimezone(NEW_YORK), "wall": FIRST + dt.timedelta(minutes=20 * (number % 10)), "n": number}


ROWS = [given(number) for number in range(60)]


def pipeline(name: str, **options: Any) -> hg.Pipeline:
    checkpointing = hg.Checkpointing(interval="20ms")
    return hg.Pipeline(name, parallelism=2, max_parallelism=8, checkpointing=checkpointing, **options)


def source() -> hg.FromRows:
    return hg.FromRows(pa.Table.from_pylist(ROWS, SCHEMA))


def by_n(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: int(row["n"]))


def seen(row: dict[str, Any]) -> dict[str, Any]:
    assert row["at"].utcoffset() == dt.timedelta(0)
    assert row["wall"].tzinfo is None
    return {**row, "at": row["at"].astimezone(NEW_YORK)}


def test_moments_and_local_times_go_through_and_come_out(tmp_path: Path) -> None:
    p, sink = pipeline("through"), Collect(tmp_path / "out")
    rows = p.source(source()).filter(pl.col("at") > dt.datetime(2026, 1, 1, tzinfo=dt.UTC)).rebalance()
    same = rows.map(seen).flat_map(lambda row: [row]).map_batches(lambda frame: frame)
    assert same.schema == rows.schema == pa.schema({"at": MOMENT, "wall": LOCAL_TIME, "n": pa.int64()})
    same.union(rows.filter(pl.col("n") < 0)).sink(sink)
    run(p)
    assert by_n(sink.rows()) == ROWS
    assert {row["at"].utcoffset() for row in sink.rows()} == {dt.timedelta(0)}


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_files_say_which_times_are_moments(tmp_path: Path, form: Any) -> None:
    p, sink = pipeline("files"), Collect(tmp_path / "read")
    p.source(source()).sink(hg.FileSink(tmp_path / "out", form))
    run(p)
    if form == "parquet":
        files: Any = hg.ParquetFiles(tmp_path / "out")
    else:
        line = json.loads((sorted((tmp_path / "out").glob("*.jsonl"))[0]).read_text().splitlines()[0])
        assert (line["at"][-6:], line["wall"][-3:]) == ("+00:00", ":00")
        files = hg.JsonLines(tmp_path / "out", {"at": pl.Datetime("us", "UTC"), "wall": dt.datetime, "n": int})
    p = pipeline("reads")
    p.source(files).sink(sink)
    run(p)
    assert by_n(sink.rows()) == ROWS


def test_int96_is_a_moment(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS, SCHEMA).drop_columns("wall")
    nested = pa.StructArray.from_arrays([table["n"].combine_chunks(), table["at"].combine_chunks()], ["n", "t"])
    lists = pa.ListArray.from_arrays(pa.array(range(61), pa.int32()), table["at"].combine_chunks())
    table = table.append_column("s", nested).append_column("l", lists)
    pq.write_table(table, tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)
    assert pq.read_schema(tmp_path / "a.parquet").field("at").type.tz is None
    p, sink = pipeline("reads"), Collect(tmp_path / "read")
    p.source(hg.ParquetFiles(tmp_path)).sink(sink)
    run(p)
    expected = [{k: v for k, v in row.items() if k != "wall"} for row in ROWS]
    assert by_n(sink.rows()) == [{**row, "s": {"n": row["n"], "t": row["at"]}, "l": [row["at"]]} for row in expected]


def written_to(store: Path, name: str = "writes") -> None:
    p = pipeline(name)
    p.source(source()).sink(hg.StreamSink("app/all", store=store))
    run(p)


def read_of(tmp_path: Path, name: str) -> tuple[pa.Schema, list[dict[str, Any]]]:
    p, sink = pipeline(name), Collect(tmp_path / name)
    rows = p.source(hg.StreamSource("app/all", store=tmp_path / "store", follow=False))
    rows.sink(sink)
    run(p)
    return rows.schema, by_n(sink.rows())


def test_a_stream_has_moments(tmp_path: Path) -> None:
    written_to(tmp_path / "store")
    assert Store.shared(tmp_path / "store").describe("app/all").schema.field("at").type == MOMENT
    assert read_of(tmp_path, "reads")[1] == ROWS


def test_moments_are_written_into_a_stream_of_local_times_until_it_is_updated(tmp_path: Path) -> None:  # S76, S77
    store = Store.shared(tmp_path / "store")
    store.create_stream("app/all", SCHEMA.set(0, pa.field("at", LOCAL_TIME)))
    written_to(tmp_path / "store")
    schema, rows = read_of(tmp_path, "reads")
    in_utc = [{**row, "at": row["at"].astimezone(dt.UTC).replace(tzinfo=None)} for row in ROWS]
    assert (schema.field("at").type, rows) == (LOCAL_TIME, in_utc)
    store.update_stream("app/all", columns=pa.schema({"at": MOMENT}))
    written_to(tmp_path / "store", "again")
    schema, rows = read_of(tmp_path, "reads-moments")
    assert (schema.field("at").type, rows) == (MOMENT, by_n([*ROWS, *ROWS]))
    readers = [
        store.reader("app/all", segment, 0, schema_version=0)
        for segment in range(len(store.describe("app/all").segments))
    ]
    batches = [batch for reader in readers for batch in iter(reader.read, None)]
    assert {batch.schema.field("at").type for batch in batches} == {LOCAL_TIME}, "newer events, too"
    assert sum(batch.num_rows for batch in batches) == 120


def test_local_times_go_into_a_stream_of_moments_as_before(tmp_path: Path) -> None:
    store = Store.shared(tmp_path / "store")
    store.create_stream("app/all", SCHEMA)
    p = pipeline("writes")
    p.source(source()).with_columns(pl.col("at").dt.replace_time_zone(None)).sink(
        hg.StreamSink("app/all", store=tmp_path / "store")
    )
    run(p)
    assert read_of(tmp_path, "reads")[1] == ROWS


# -- state -----------------------------------------------------------------------------------------------------------


class ByRow(hg.ProcessFunction):
    """Keeps moments in every kind of state."""

    schema = {"at": pl.Datetime("us", "UTC"), "n": int, "first": pa.timestamp("us", "UTC"), "ns": [int], "each": int}

    def open(self, state: hg.StateHandle) -> None:
        self.first = state.value("first", pl.Datetime("us", "UTC"))
        self.ats = state.list("ats", pa.struct({"at": pa.timestamp("us", "UTC"), "n": pa.int64()}))
        self.each = state.map("each", pa.timestamp("us", "UTC"), pa.int64())

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> Any:
        assert context.key == row["at"]
        if self.first.get() is None:
            self.first.put(row["at"].astimezone(NEW_YORK))
        assert self.first.get().utcoffset() in (None, dt.timedelta(0))
        self.ats.append({"at": row["at"], "n": row["n"]})
        self.each.put(row["at"], self.each.get(row["at"], 0) + 1)
        assert all(one["at"] == row["at"] for one in self.ats.get())
        ns = [one["n"] for one in self.ats.get()]
        yield {"at": row["at"], "n": row["n"], "first": self.first.get(), "ns": ns, "each": self.each.get(row["at"])}


ByRow.schema["ns"] = pa.list_(pa.int64())


class ByBatch(hg.BatchProcessFunction):
    schema = {"at": pl.Datetime("us", "UTC"), "n": int, "latest": pl.Datetime("us", "UTC"), "count": int}

    def open(self, state: hg.BatchStateHandle) -> None:
        self.latest = state.value("latest", pl.Datetime("us", "UTC"))
        self.count = state.value("count", pa.int64())

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame:
        self.latest.put(batch["at"])
        self.count.update(1, "add")
        return batch.select("at", "n", latest=self.latest.get(), count=self.count.get())


def latest(so_far: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "n": so_far["n"] + row["n"]}


def stateful(name: str, root: Path, more: int, **options: Any) -> hg.Pipeline:
    """A pipeline that reads so many rows more than the first twenty, and does not end without any."""
    p = pipeline(name, **options)
    script: list[Any] = [ROWS[:20], *[PAUSE] * 5]
    script += [ROWS[20 : 20 + more], EOF] if more else []
    rows = p.source(ScriptedSource(script, schema=SCHEMA, pause_ms=10), name="in").with_timestamps("at", name="times")
    keyed = rows.key_by("at", name="keyed")
    keyed.process(ByRow(), name="rows").sink(Collect(root / "rows"), name="rows-out")
    keyed.process(ByBatch(), name="batches").sink(Collect(root / "batches"), name="batches-out")
    keyed.reduce(latest, name="sums").sink(Collect(root / "sums"), name="sums-out")
    windows = keyed.window(hg.Tumbling("1d"))
    merged = windows.agg(n=pl.col("n").sum(), first=pl.col("at").min(), name="merged")
    merged.sink(Collect(root / "merged"), name="merged-out")
    kept = windows.agg(n=pl.col("n").median(), first=pl.col("at").first(), name="kept")
    kept.sink(Collect(root / "kept"), name="kept-out")
    rows.sink(hg.FileSink(root / "held", "parquet", roll_interval="1h"), name="held-out")
    return p


def results(root: Path) -> dict[str, list[Any]]:
    found = {}
    for name in ("rows", "batches", "sums", "merged", "kept", "held"):
        frame = read_committed(str(root / name))
        found[name] = sorted(map(repr, frame.drop("latest", strict=False).to_dicts()))
    return found


def stopped(p: hg.Pipeline, root: Path, checkpoints: Path) -> None:
    """Run until a checkpoint has the first rows, then stop."""
    with running(p, checkpoint_dir=checkpoints) as handle:
        deadline = time.monotonic() + 300
        while read_committed(str(root / "rows")).height < 20 and time.monotonic() < deadline:
            time.sleep(0.05)
        handle.stop()
        assert handle.wait(300) is not None


@pytest.mark.parametrize("state", ["memory", "rocksdb"])
def test_state_of_moments_is_restored(tmp_path: Path, state: str) -> None:
    backend = hg.Memory() if state == "memory" else hg.RocksDB(memory="64MB")
    if state == "rocksdb":
        pytest.importorskip("rocksdict")
    stopped(stateful("s", tmp_path / "out", 0, state=backend), tmp_path / "out", tmp_path / "checkpoints")
    run(stateful("s", tmp_path / "out", 40, state=backend), checkpoint_dir=tmp_path / "checkpoints")
    run(stateful("whole", tmp_path / "whole", 40))
    assert results(tmp_path / "out") == results(tmp_path / "whole")


def test_a_moment_has_the_hash_of_its_number() -> None:
    batch = pa.record_batch({"at": pa.array([0, 1, None, -5], MOMENT), "wall": pa.array([0, 1, None, -5], LOCAL_TIME)})
    assert hash_column(batch["at"]).tolist() == hash_column(batch["wall"]).tolist()
    assert hash_columns(batch, ["at", "wall"]).tolist() == hash_columns(batch, ["wall", "at"]).tolist()


def test_state_of_moments_is_read_and_edited(tmp_path: Path) -> None:
    p = pipeline("s")
    p.source(source(), name="in").key_by("at").process(ByRow(), name="rows").sink(hg.Discard(), name="out")
    moment = dt.datetime(2026, 11, 1, 5, 30, tzinfo=dt.UTC)
    rows = pl.DataFrame({"at": [moment], "value": [moment]})
    hg.new_savepoint(p, tmp_path / "old").with_state("rows", "first", rows).write()
    entries = pl.DataFrame({"at": [moment], "map_key": [moment], "value": [7]})
    hg.edit_savepoint(tmp_path / "old", tmp_path / "new", pipeline=p).with_state("rows", "each", entries).write()
    assert hg.read_state(tmp_path / "new", "rows", "first", keys=[moment]).rows() == [(moment, moment)]
    assert hg.read_state(tmp_path / "new", "rows", "each").rows() == [(moment, moment, 7)]
    for text in ("2026-11-01 05:30:00", "2026-11-01T01:30:00-04:00"):
        given = ["state", "show", str(tmp_path / "new"), "rows", "first", "--key", text, "--json"]
        (line,) = CliRunner().invoke(cli.app, given).stdout.splitlines()
        assert json.loads(line) == {"at": "2026-11-01T05:30:00+00:00", "value": "2026-11-01T05:30:00+00:00"}
    given = ["state", "show", str(tmp_path / "new"), "rows", "first", "--json", "--where"]
    for text, count in (("at > '2026-11-01'", 1), ("value > '2026-11-02' or at = '2026-11-01 05:30:01'", 0)):
        assert len(CliRunner().invoke(cli.app, [*given, text]).stdout.splitlines()) == count
