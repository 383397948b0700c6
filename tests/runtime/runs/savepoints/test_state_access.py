"""State of a running pipeline with real workers, looked at from outside: what it shows is a cut."""

from __future__ import annotations

import fcntl
import os
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
from headgate.api.collect import SCRATCH, temporary_directory
from headgate.api.foreground import loading_only
from headgate.connectors.files.file_committer import read_committed
from headgate.errors import StorageError
from headgate.model.config import StartConfig
from headgate.model.plan import PipelineDefinition
from headgate.runtime.state_reader.lookup import find_checkpoint

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


def numbers(pipeline: hg.Pipeline, count: int = 10) -> hg.Stream:
    return pipeline.source(hg.FromRows(pa.table({"n": list(range(count))})), name="numbers")


def endless(pipeline: hg.Pipeline) -> hg.Stream:
    return pipeline.source(hg.Generator({"n": hg.RowNumber()}, rows_per_second=2_000, splits=2), name="endless")


@pytest.mark.usefixtures("started")
def test_each_look_gives_the_rows_of_this_program(tmp_path: Path) -> None:
    for least in (3, 7, 7):
        stream = numbers(pipeline_at(tmp_path)).filter(pl.col("n") >= least)
        for _ in range(2):
            assert sorted(stream.collect()["n"]) == list(range(least, 10))
    wider = numbers(pipeline_at(tmp_path)).with_columns(text=pl.col("n").cast(pl.String))
    assert wider.collect().columns == ["n", "text"], "another schema is no matter"


@pytest.mark.usefixtures("started")
def test_nothing_is_left_behind_and_the_pipeline_runs_as_if_nobody_had_looked(tmp_path: Path) -> None:
    pipeline = pipeline_at(tmp_path)
    stream = numbers(pipeline)
    small = stream.filter(pl.col("n") < 2)
    assert small.collect().height == 2
    assert list((tmp_path / "checkpoints").iterdir()) == []
    stream.sink(hg.FileSink(tmp_path / "out"))
    assert small.collect().height == 2
    assert not (tmp_path / "out").exists() or read_committed(str(tmp_path / "out")).is_empty(), "no sink is touched"
    assert [str(node.name) for node in pipeline.definition().graph.nodes] == ["numbers", "sink"], "nothing reads it"
    assert pipeline.run().is_finished
    assert read_committed(str(tmp_path / "out")).height == 10
    assert stream.collect().height == 10, "it has finished, but can be looked at"


@pytest.mark.usefixtures("started")
def test_a_stream_that_nobody_looked_at_still_has_to_lead_somewhere(tmp_path: Path) -> None:
    pipeline = pipeline_at(tmp_path)
    stream = numbers(pipeline)
    stream.sink(hg.Discard())
    stream.filter(pl.col("n") < 2, name="forgotten")
    stream.filter(pl.col("n") < 3, name="seen").take(1)
    with pytest.raises(hg.UsageError, match="nothing reads the stream of operator 'forgotten'"):
        pipeline.definition()


@pytest.mark.usefixtures("started")
def test_a_look_runs_only_what_the_stream_needs(tmp_path: Path, started: list[PipelineDefinition]) -> None:
    pipeline = pipeline_at(tmp_path)
    few = numbers(pipeline)
    endless(pipeline).sink(hg.FileSink(tmp_path / "out"), name="out")
    assert few.collect().height == 10
    assert [str(node.name) for node in started[0].graph.nodes] == ["numbers", "result"]


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize("bounds", [[{"limit": 25}], [{"seconds": 0.3 * 4**n} for n in range(5)]])
def test_input_without_end_ends_at_a_bound(tmp_path: Path, bounds: list[dict[str, Any]]) -> None:
    for bound in bounds:
        found = endless(pipeline_at(tmp_path)).filter(pl.col("n") >= 0).collect(**bound)["n"].to_list()
        assert len(found) == len(set(found))
        assert list((tmp_path / "checkpoints").iterdir()) == []
        if found:  # the workers of a busy machine may have had no turn in so short a time
            break
    assert len(found) == 25 if "limit" in bound else len(found) > 0


@pytest.mark.usefixtures("started")
def test_bounded_input_that_ends_before_its_bound_gives_all_there_is(tmp_path: Path) -> None:
    stream = numbers(pipeline_at(tmp_path))
    assert stream.collect(limit=1_000, seconds=3_600).height == 10
    assert sorted(row["n"] for row in stream.take(99)) == list(range(10))
    assert stream.collect(limit=0).schema == {"n": pl.Int64}


@pytest.mark.usefixtures("started")
def test_a_loop_can_be_looked_at(tmp_path: Path) -> None:
    pipeline = pipeline_at(tmp_path)

    def body(rows: hg.Stream) -> tuple[hg.Stream, hg.Stream]:
        more = rows.with_columns(n=pl.col("n") + 1)
        return more.filter(pl.col("n") < 20), more.filter(pl.col("n") >= 20)

    assert numbers(pipeline).iterate(body).collect()["n"].to_list() == [20] * 10


@pytest.mark.usefixtures("started")
def test_show_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers(pipeline_at(tmp_path), 2).with_columns(word=pl.lit("x" * 50)).show()
    shown = capsys.readouterr().out
    assert "word" in shown
    assert shown.count("x" * 50) == 2


@pytest.mark.usefixtures("started")
def test_bad_records_are_left_out_where_the_pipeline_would_divert_them(tmp_path: Path) -> None:
    (tmp_path / "in").write_text('{"n": 1}\nnonsense\n')
    dead = hg.FileSink(tmp_path / "dead")
    for policy in (hg.DeadLetter(dead), hg.Fail()):
        stream = pipeline_at(tmp_path, bad_records=policy, restart=hg.NoRestart()).source(
            hg.JsonLines(tmp_path / "in", {"n": pa.int64()})
        )
        if isinstance(policy, hg.Fail):
            with pytest.raises(hg.PipelineFailed, match="JSON"):
                stream.collect()
        else:
            assert stream.collect()["n"].to_list() == [1]
    assert not list((tmp_path / "dead").glob("*")) or read_committed(str(tmp_path / "dead")).is_empty()
    assert list((tmp_path / "checkpoints").iterdir()) == [], "a failed look leaves nothing either"


@pytest.mark.usefixtures("started")
def test_a_program_that_looks_is_not_for_the_command_line(tmp_path: Path) -> None:
    with (
        loading_only(),
        pytest.raises(hg.UsageError, match=r"calls take\(\), which runs by itself: start it with python"),
    ):
        numbers(pipeline_at(tmp_path)).take(1)


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize(
    ("bound", "problem"),
    [
        ({"limit": -1}, "limit must not be negative, but is -1"),
        ({"limit": 1.5}, "limit must be a number of records, not 1.5"),
        ({"seconds": 0}, "seconds must be more than zero, but is 0"),
        ({"seconds": "5s"}, "seconds must be a number, not '5s'"),
    ],
)
def test_a_bound_that_makes_no_sense_is_refused(tmp_path: Path, bound: dict[str, Any], problem: str) -> None:
    with pytest.raises(hg.UsageError, match=problem):
        numbers(pipeline_at(tmp_path)).collect(**bound)


@pytest.mark.usefixtures("started")
def test_what_a_dead_process_left_is_removed_and_what_a_living_one_uses_is_not(tmp_path: Path) -> None:
    living = temporary_directory(str(tmp_path))
    abandoned = tmp_path / SCRATCH / "0123456789abcdef"
    (abandoned / "p").mkdir(parents=True)
    abandoned.with_suffix(".lock").touch()
    other = temporary_directory(str(tmp_path))
    assert not abandoned.exists()
    assert not abandoned.with_suffix(".lock").exists()
    assert living.path.is_dir()
    with open(living.path.with_suffix(".lock")) as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for made in (living, other, other):
        made.remove()
    assert os.listdir(tmp_path) == []
