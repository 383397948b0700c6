"""A pipeline that starts over, or twice, is stopped by what its sinks remember, before anything is written."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from pyspark import cloudpickle
from tests import sqlite_sinks
from tests.conftest import few
from tests.runtime.running import Run, definition_of, pipeline_at
from tests.sqlite_sinks import SqliteLedgerSink, SqliteSink, connect
from tests.storage.faulty import Fault, FaultKind, FaultyStorage
from typer.testing import CliRunner

import headgate as hg
from headgate.cli.app import app
from headgate.connectors.files.file_committer import read_committed
from headgate.errors import CorruptionError, PipelineFailed, StorageError
from headgate.model.plan import PipelineDefinition
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.storage.local import LocalStorage
from headgate.storage.memory import MemoryStorage
from headgate.store.store import Store

cloudpickle.register_pickle_by_value(sqlite_sinks)  # workers do not import tests

ROWS = 990
STREAM = "app/out"
TABLE = pa.table({"n": list(range(ROWS)), "text": [str(n) for n in range(ROWS)]})


def piped(root: Path, sink: Any, home: str = "", name: str = "out", **options: Any) -> PipelineDefinition:
    """Return a pipeline of bounded rows with its checkpoints below ``home``."""
    pipeline = pipeline_at(root / home, **options)
    rows = hg.FromRows(TABLE, splits=2, batch_rows=50)
    pipeline.source(rows).sink(sink, name=name)
    return definition_of(pipeline)


class StreamTarget:
    """A stream, and how often each number is in it."""

    def __init__(self, root: Path) -> None:
        self.store = Store.open(root / "store")
        self.sink = hg.StreamSink(STREAM, store=str(root / "store"))

    def count(self) -> int:
        known = {info.name for info in self.store.list_streams()}
        return self.store.describe(STREAM).events_count if STREAM in known else 0

    def prepared(self) -> int:
        return sum(not x.status.is_terminal for x in self.store.list_transactions(owner="p/out"))

    def forget(self, said: str) -> None:
        run_what_was_said(said)


class FileTarget:
    """A directory, and how many rows are in its files."""

    def __init__(self, root: Path) -> None:
        self.url = str(root / "files")
        self.sink = hg.FileSink(self.url, "parquet")

    def count(self) -> int:
        return read_committed(self.url).height

    def prepared(self) -> int:
        return len(list(Path(self.url).glob("_staging/*/*")))

    def forget(self, said: str) -> None:
        run_what_was_said(said)


class OwnTarget:
    """A database, and how many rows are in it: the target of a sink that a user wrote."""

    kind: type[Any] = SqliteSink

    def __init__(self, root: Path) -> None:
        self.path = str(root / "numbers.db")
        self.sink = self.kind(self.path)

    def count(self) -> int:
        return self._ask("select count(*) from numbers")

    def prepared(self) -> int:
        return self._ask("select count(*) from waiting")

    def forget(self, said: str) -> None:
        assert "forget 'p/out' PROGRAM" in said
        self.sink.forget_owner("p", "out")

    def _ask(self, question: str) -> int:
        with connect(self.path) as connection:
            return int(connection.execute(question).fetchone()[0])


class OwnLedgerTarget(OwnTarget):
    """The same for a sink that derives from ``LedgerSink``."""

    kind = SqliteLedgerSink


def run_what_was_said(said: str) -> None:
    command = shlex.split(said.rsplit("run: headgate ", 1)[1])
    assert CliRunner().invoke(app, [*command, "--yes"]).exit_code == 0


TARGETS: list[Callable[[Path], Any]] = [StreamTarget, FileTarget, OwnTarget, OwnLedgerTarget]


def run_often(start: Callable[..., Run], definition: PipelineDefinition, times: int) -> None:
    """Run to the end, then start again what has finished: each start claims a generation."""
    for _ in range(times):
        assert start(definition).result().is_finished


def refusal(start: Callable[..., Run], definition: PipelineDefinition) -> str:
    """Start; return with which sentence it ends."""
    with pytest.raises(PipelineFailed) as failed:
        start(definition).result()
    return str(failed.value)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("before", "now"), few([(1, 0), (4, 0), (1, 4)], 1))
def test_a_start_over_is_refused_before_anything_is_written(
    start: Callable[..., Run], tmp_path: Path, target: Callable[[Path], Any], before: int, now: int
) -> None:  # LV2, whichever generation number is the higher one
    place = target(tmp_path)
    run_often(start, piped(tmp_path, place.sink), before)
    assert place.count() == ROWS
    shutil.rmtree(tmp_path / "checkpoints")
    run_often(start, piped(tmp_path, hg.Discard(), parallelism=1), now)
    for _ in range(2):
        said = refusal(start, piped(tmp_path, place.sink, parallelism=1))
        assert "sink 'out' of pipeline 'p' belongs to former checkpoints" in said
        assert str(tmp_path / "checkpoints") in said
        assert "forget 'p/out'" in said
        assert (place.count(), place.prepared()) == (ROWS, 0)


@pytest.mark.parametrize("target", few(TARGETS, 2))
def test_a_start_over_is_refused_whatever_the_sink_is_called_now(
    start: Callable[..., Run], tmp_path: Path, target: Callable[[Path], Any]
) -> None:  # as derived names become others when a sink is added before
    place = target(tmp_path)
    run_often(start, piped(tmp_path, place.sink), 2)
    shutil.rmtree(tmp_path / "checkpoints")
    for _ in range(2):
        said = refusal(start, piped(tmp_path, place.sink, name="out2"))
        assert "the target of sink 'out2' of pipeline 'p' knows its sink 'out', which belongs to former check" in said
        assert (place.count(), place.prepared()) == (ROWS, 0)
    assert place.sink.owner("p", "out2").is_unknown, "nobody was told"
    place.forget(said)
    run_often(start, piped(tmp_path, place.sink, name="out2"), 2)
    assert (place.count(), place.prepared()) == (2 * ROWS, 0)


@pytest.mark.parametrize("target", few(TARGETS, 2))
def test_a_target_that_was_made_to_forget_takes_the_next_life_and_keeps_what_it_holds(
    start: Callable[..., Run], tmp_path: Path, target: Callable[[Path], Any]
) -> None:  # LV4
    place = target(tmp_path)
    run_often(start, piped(tmp_path, place.sink), 3)
    shutil.rmtree(tmp_path / "checkpoints")
    said = refusal(start, piped(tmp_path, place.sink))
    place.forget(said)
    assert place.count() == ROWS
    second = start(piped(tmp_path, place.sink))
    assert second.result().is_finished
    assert place.count() == 2 * ROWS
    assert place.prepared() == 0


@pytest.mark.parametrize("target", few(TARGETS, 2))
def test_an_older_copy_of_the_checkpoints_is_refused_however_often_it_is_tried(
    start: Callable[..., Run], tmp_path: Path, target: Callable[[Path], Any]
) -> None:  # LV6
    place = target(tmp_path)
    run_often(start, piped(tmp_path, place.sink, "home"), 1)
    shutil.copytree(tmp_path / "home", tmp_path / "copy")
    run_often(start, piped(tmp_path, place.sink, "home"), 3)
    shutil.rmtree(tmp_path / "home")
    (tmp_path / "copy").rename(tmp_path / "home")
    for _ in range(2):
        assert "they are an older copy" in refusal(start, piped(tmp_path, place.sink, "home"))
    assert place.count() == ROWS


@pytest.mark.parametrize("target", [OwnTarget, OwnLedgerTarget])
def test_a_target_that_was_told_nothing_goes_on_once_it_was_made_to_forget(
    start: Callable[..., Run], tmp_path: Path, target: Callable[[Path], Any]
) -> None:  # the pipeline ran before its sink kept lives; what it had prepared and promised is not lost
    place = target(tmp_path)
    slow = hg.Generator(columns={"n": hg.RowNumber()}, rows=600, rows_per_second=600, batch_rows=20)

    def again() -> PipelineDefinition:
        pipeline = pipeline_at(tmp_path)
        numbers = pipeline.source(slow, name="in").select("n", text=pl.col("n").cast(pl.String))
        numbers.sink(place.sink, name="out")
        return definition_of(pipeline)

    run = start(again())
    run.wait_checkpoints(2)
    run.driver.stop()
    run.result()
    with connect(place.path) as connection:
        connection.execute("update owners set life = null")
    said = refusal(start, again())
    assert "a target that was not given fence.life does not say which" in said
    place.forget(said)
    assert start(again()).result().is_finished
    with connect(place.path) as connection:
        found = [n for (n,) in connection.execute("select number from numbers order by number")]
    assert found == list(range(600))


def test_a_start_that_is_refused_makes_no_stream(start: Callable[..., Run], tmp_path: Path) -> None:
    streams, files = StreamTarget(tmp_path), FileTarget(tmp_path)
    run_often(start, piped(tmp_path, files.sink), 1)
    pipeline = pipeline_at(tmp_path / "elsewhere")
    source = pipeline.source(hg.FromRows([{"n": 1}]))
    source.sink(streams.sink, name="more")
    source.sink(hg.StreamSink(STREAM, store=tmp_path / "no-store"), name="another")
    source.sink(files.sink, name="out")
    assert "sink 'out'" in refusal(start, definition_of(pipeline))
    assert streams.store.list_streams() == []
    assert not (tmp_path / "no-store").exists()


def test_a_stream_that_does_not_fit_any_more_stops_the_run_by_its_name(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    streams = StreamTarget(tmp_path)
    definition = piped(tmp_path, streams.sink)
    streams.store.create_stream(STREAM, pa.schema([("other", pa.int64())]))
    assert "operator 'out': records do not fit stream" in refusal(start, definition)


def test_all_drivers_get_the_same_life(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        drawn = list(pool.map(lambda n: CheckpointLog(storage, "p").identity(f"host-{n}", n), range(8)))
    assert len(set(drawn)) == 1
    assert drawn[0].home == f"{tmp_path}/p"
    assert CheckpointLog(storage, "q").identity("h", 1).id != drawn[0].id


def test_a_life_whose_answer_was_lost_is_the_one_that_counts() -> None:
    fault = Fault(FaultKind.TIMEOUT_AFTER_EFFECT, "put_if_absent", "/life")
    storage = FaultyStorage(MemoryStorage("life"), [fault])
    with pytest.raises(StorageError):
        CheckpointLog(storage, "p").identity("first", 1)
    assert CheckpointLog(storage, "p").identity("second", 2).host == "first"


def test_a_damaged_life_is_named_and_never_drawn_again(tmp_path: Path) -> None:
    CheckpointLog(LocalStorage(tmp_path), "p").identity("h", 1)
    (tmp_path / "p/life").write_bytes(b"headgate-life 1 0123\nnull")
    with pytest.raises(CorruptionError, match="p/life is damaged"):
        CheckpointLog(LocalStorage(tmp_path), "p").identity("h", 1)
