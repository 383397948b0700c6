"""A pipeline that starts over, or twice, is stopped by what its sinks remember, before anything is written."""

from __future__ import annotations

import shlex
import shutil
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from pyspark import cloudpickle
from tests.conftest import few
from tests.runtime.running import Run, definition_of, pipeline_at
from tests.storage.faulty import Fault, FaultKind, FaultyStorage
from tests.support import sqlite_sinks
from tests.support.sqlite_sinks import SqliteLedgerSink, SqliteSink, connect
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


cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import tests

OWN_ROWS = 4_000


def numbering(root: Path, parallelism: int, sink: Any, **options: Any) -> PipelineDefinition:
    """A pipeline that gives each number to ``sink``."""
    pipeline = pipeline_at(root, parallelism=parallelism, **options)
    numbers = hg.Generator(
        columns={"number": hg.RowNumber()}, rows=OWN_ROWS, rows_per_second=4_000, splits=3, batch_rows=50
    )
    rows = pipeline.source(numbers, name="in")
    rows.select("number", text=pl.col("number").cast(pl.String)).sink(sink, name="out")
    return definition_of(pipeline)


class Pieces(SqliteLedgerSink):
    """A ledger with a piece for each batch."""

    piece_bytes = 1


KINDS = {"two phases": SqliteSink, "ledger": SqliteLedgerSink, "ledger in pieces": Pieces}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_sink_that_a_user_wrote_has_every_record_once_whoever_is_killed(
    start: Any, tmp_path: Path, kind: Any
) -> None:
    target = str(tmp_path / "target.db")
    run = start(numbering(tmp_path, 2, kind(target)))
    run.wait_checkpoints(2)
    run.kill(0)
    run.wait_restarts(1)
    run.wait_checkpoints(1)
    run.driver.stop()
    run.result()
    again = start(numbering(tmp_path, 3, kind(target)))
    again.wait_checkpoints(1)
    again.kill(1)
    assert again.result().is_finished
    with connect(target) as connection:
        found = connection.execute("select number, text from numbers order by number").fetchall()
        waiting = connection.execute("select count(*) from waiting").fetchone()
    assert found == [(n, str(n)) for n in range(OWN_ROWS)]
    assert waiting == (0,)


class Leaving(SqliteSink):
    """A sink whose client ends its process."""

    def prepare(self, transaction: Any, name: str, fence: hg.Fence) -> None:
        sys.exit("the client gave up")


def test_a_sink_that_ends_its_process_while_it_prepares_fails_the_pipeline(start: Any, tmp_path: Path) -> None:
    run = start(numbering(tmp_path, 1, Leaving(str(tmp_path / "target.db"))))
    with pytest.raises(hg.PipelineFailed, match="SystemExit: the client gave up"):
        run.result()


class Expiring(SqliteSink):
    """A sink whose target ends what nobody decides within an hour."""

    transaction_timeout = "1h"


def unreachable(self: Any, names: Any, fence: Any) -> None:
    raise sqlite3.OperationalError("the target cannot be reached")


def with_uncommitted_output(start: Any, root: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a target that a stopped pipeline has promised output, and could not commit any."""
    target = str(root / "target.db")
    with monkeypatch.context() as patch:
        patch.setattr(Expiring, "commit", unreachable)
        run = start(numbering(root, 2, Expiring(target)))
        run.wait_checkpoints(2)
        run.driver.cancel(retain=True)
        run.result()
    return target


def test_an_outage_that_is_too_long_stops_the_pipeline_each_time_and_says_what_is_gone(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # CS9
    target = with_uncommitted_output(start, tmp_path, monkeypatch)
    with connect(target) as connection:
        assert connection.execute("delete from waiting").rowcount > 0  # an hour has passed
    for _ in range(2):
        again = start(numbering(tmp_path, 2, Expiring(target)))
        with pytest.raises(
            hg.PipelineFailed, match=r"sink 'out' cannot commit .* is neither prepared nor committed in"
        ):
            again.result()
        assert again.restarts == []
    with connect(target) as connection:
        assert connection.execute("select count(*) from numbers").fetchone() == (0,)


def test_a_pipeline_goes_on_without_what_is_gone_if_its_user_says_so(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of what was promised is gone; the other half of the same checkpoint is not."""
    target = with_uncommitted_output(start, tmp_path, monkeypatch)
    with connect(target) as connection:
        promised = connection.execute("select name, count(*) from waiting group by name order by name").fetchall()
        gone = [name for name, _ in promised[::2]]
        numbers = [
            n for name in gone for (n,) in connection.execute("select number from waiting where name = ?", [name])
        ]
        connection.executemany("delete from waiting where name = ?", [[name] for name in gone])
    again = start(numbering(tmp_path, 2, Expiring(target), on_denied_output="lose"))
    assert again.result().is_finished
    with connect(target) as connection:
        found = [n for (n,) in connection.execute("select number from numbers order by number")]
    lost = set(range(OWN_ROWS)) - set(found)
    assert len(found) == len(set(found))
    assert lost, "something that a checkpoint promised was gone"
    assert lost <= set(numbers), "and nothing else is lost"
    told = [note for note in again.notes if note.startswith("LOST: ")]
    records = list((tmp_path / "checkpoints").glob("p/lost/*.json"))
    assert len(records) == len(told) == again.driver.progress.lost_outputs
    assert all("is neither prepared nor committed" in note and "sink 'out'" in note for note in told)


STEP_MS, RECORDS = 100, 3_000


def write(directory: Path, name: str, *, every: int) -> None:
    """Write the same five minutes into each file, with more or fewer records."""
    directory.mkdir(exist_ok=True)
    times = range(0, RECORDS * STEP_MS, STEP_MS * every)
    pl.DataFrame({"at": times, "name": [name] * len(times)}).write_parquet(directory / f"{name}.parquet")


@pytest.mark.parametrize("sources", few([2, 1], 1))
def test_a_backlog_of_files_is_not_far_out_of_order_behind_a_shuffle(
    sources: int, start: Callable[..., Run], tmp_path: Path
) -> None:
    for name, every in (("a", 1), ("b", 1), ("c", 30), ("d", 30)):
        write(tmp_path / ("in" if sources == 1 or name in "ac" else "other"), name, every=every)
    # A batch has at most 15 s, of the files with the fewest records.
    pipeline = pipeline_at(tmp_path, parallelism=1, max_drift="5s")
    directories = [tmp_path / "in", tmp_path / "other"][:sources]
    streams: list[Any] = [
        pipeline.source(hg.ParquetFiles(each, batch_rows=5), name=each.name).with_timestamps("at")
        for each in directories
    ]
    rows = streams[0].union(*streams[1:]) if sources > 1 else streams[0]
    mixed = rows.rebalance().with_timestamps("at", out_of_orderness="60s", name="again")
    counts = mixed.key_by("name").window(hg.Tumbling("10s")).agg(count=pl.len())
    counts.sink(hg.FileSink(tmp_path / "counts", "parquet", roll_interval=0), name="counts")
    run = start(definition_of(pipeline))
    result = run.result()
    assert result.late_records == 0
    found = read_committed(str(tmp_path / "counts"))
    totals: Counter[str] = Counter()
    for row in found.to_dicts():
        totals[row["name"]] += row["count"]
    assert totals == {"a": 3_000, "b": 3_000, "c": 100, "d": 100}
