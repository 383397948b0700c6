"""The routine of whoever stops a pipeline with a savepoint and restores that: same name, directory and targets (SV25).

Input is a followed file that grows while nothing runs, so that what a start repeats or misses shows in the output.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import sqlite3
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from pyspark import cloudpickle
from tests.conftest import few

import headgate as hg
from headgate import fault_points
from headgate.connectors.files.file_committer import read_committed
from headgate.errors import HeadgateError, StorageError
from headgate.model.progress import PipelineHandle, Progress, RunResult, SilentObserver
from headgate.protocol.checkpoints.recovery import candidates
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.storage.local import LocalStorage
from headgate.store.store import Store
from headgate.testing import running

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers get a copy of the pipeline

WAIT_S = 300.0
KEYS = 5


class Numbering(hg.ProcessFunction):
    """Numbers the records of each key: what is repeated or missing shows for ever."""

    schema = {"id": pa.int64(), "key": pa.int64(), "n": pa.int64()}

    def open(self, state: hg.StateHandle) -> None:
        self.count = state.value("count", pa.int64())

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> Any:
        number = self.count.get(0) + 1
        self.count.put(number)
        yield {**row, "n": number}


class Watching(SilentObserver):
    """Keeps the notes of a run, and wakes who waits for its progress."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._changed = threading.Condition()

    def on_note(self, text: Any) -> None:
        with self._changed:
            self.notes.append(str(text))

    def on_progress(self, progress: Progress) -> None:
        self._wake()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def wait(self, handle: PipelineHandle, rows: int) -> None:
        """Wait until the source has delivered ``rows`` since the pipeline began; raise why the run ended before."""
        ended = threading.Event()

        def delivered() -> bool:
            return any(node.node == "in" and node.records_out >= rows for node in handle.progress.nodes)

        def end() -> None:
            ended.set()
            self._wake()

        handle.when_ended(end)
        with self._changed:
            assert self._changed.wait_for(lambda: ended.is_set() or delivered(), WAIT_S), handle.progress
        if ended.is_set() and not delivered():
            handle.wait()
            raise AssertionError(f"it ended at {handle.progress}")


class Shop:
    """One pipeline, its input and its targets."""

    def __init__(self, root: Path, name: str = "shop", target: str = "out") -> None:
        self.root, self.name, self.target = root, name, target
        self.input = root / "input.jsonl"
        self.checkpoints = root / f"{name}-checkpoints"
        self.rows = 0
        self.notes: list[str] = []
        root.mkdir(exist_ok=True)

    def add(self, rows: int) -> None:
        """Append to the input."""
        with self.input.open("a") as file:
            for number in range(self.rows, self.rows + rows):
                file.write(json.dumps({"id": number, "key": number % KEYS}) + "\n")
        self.rows += rows

    def pipeline(self, *, step: str = "all", mode: str = "exactly_once", hold: Any = 0) -> hg.Pipeline:
        checkpointing = hg.Checkpointing(interval="20ms", dir=self.checkpoints, mode=mode, retained=50)
        p = hg.Pipeline(self.name, parallelism=2, checkpointing=checkpointing)
        rows = p.source(hg.JsonLines(self.input, {"id": int, "key": int}, follow=True), name="in")
        numbered = rows.filter(pl.col("id") >= 0, name=step).key_by("key").process(Numbering(), name="numbering")
        numbered.sink(hg.FileSink(self.root / self.target, roll_interval=hold), name="files")
        numbered.sink(hg.StreamSink(self.target, store=str(self.root / "store"), segments=2), name="streams")
        return p

    @contextmanager
    def running(self, **options: Any) -> Iterator[PipelineHandle]:
        """Run it until it has delivered the whole input."""
        changes = {key: options.pop(key) for key in ("step", "mode", "hold") if key in options}
        watching = Watching()
        self.notes = watching.notes
        with running(self.pipeline(**changes), observer=watching, **options) as handle:
            watching.wait(handle, self.rows)
            yield handle

    def run(self, savepoint: Path, **options: Any) -> RunResult:
        """Run it until it has delivered the whole input, and stop it with a savepoint."""
        with self.running(**options) as handle:
            result = handle.stop(savepoint=savepoint)
            assert result is not None
            assert result == handle.wait(), "whoever waits is told of the savepoint, too"
        assert result.savepoint is not None
        assert result.savepoint.savepoint == str(savepoint)
        return result

    def output(self, name: str = "files") -> list[tuple[int, int, int]]:
        if name == "files":
            frame = read_committed(str(self.root / self.target))
        else:
            frame = read_stream(self.root / "store", self.target)
        return sorted(frame.select("id", "key", "n").rows()) if frame.height else []

    def assert_exact(self) -> None:
        """Everything is there once, and the user was not told to remove any of it."""
        assert self.output() == self.wanted()
        assert self.output("streams") == self.wanted()
        assert not any(word in note for note in self.notes for word in ("again", "remove")), self.notes

    def wanted(self, first: int = 0, counted: int = 0) -> list[tuple[int, int, int]]:
        """Return what the input from ``first`` on becomes, where ``counted`` rows were numbered before it."""
        return [(n, n % KEYS, (n - first + counted) // KEYS + 1) for n in range(first, self.rows)]


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path / "shop")


def read_stream(root: Path, stream: str) -> pl.DataFrame:
    with Store.open(root) as store:
        info = store.describe(stream)
        readers = [store.reader(stream, segment) for segment in range(info.segments_count)]
        batches = [batch for reader in readers for batch in iter(reader.read, None)]
        return pl.DataFrame(pl.from_arrow(pa.Table.from_batches(batches, info.schema)))


def refused(shop: Shop, **options: Any) -> str:
    """Return with which sentence a start is refused."""
    with pytest.raises(HeadgateError) as said, shop.running(**options):
        pass
    return str(said.value)


def newest(shop: Shop) -> int:
    log = CheckpointLog(LocalStorage(shop.checkpoints), shop.name)
    return int(candidates(log.observe())[0].checkpoint)


def test_a_pipeline_is_stopped_and_restored_again_and_again(shop: Shop, tmp_path: Path) -> None:  # SV25
    """At another parallelism each time; and the command that restored it is repeated later, as by a supervisor."""
    shop.add(100)
    shop.run(tmp_path / "0")
    for number, parallelism in enumerate((3, 1)):
        shop.add(50)
        begins = {"restore": tmp_path / str(number), "parallelism": parallelism}
        shop.run(tmp_path / f"{number}-a", **begins)
        shop.assert_exact()
        shop.add(10)
        shop.run(tmp_path / str(number + 1), **begins)
        assert any("was restored before" in note for note in shop.notes)
        shop.assert_exact()
    assert f"newest checkpoint is {newest(shop)}, and what checkpoints" in refused(shop, restore=tmp_path / "1-a")


def test_held_rows_are_in_the_savepoint(shop: Shop, tmp_path: Path) -> None:
    """They wait for their file over the stop, and are written once."""
    shop.add(100)
    shop.run(tmp_path / "taken", hold="1d")
    assert shop.output() == []
    shop.add(20)
    shop.run(tmp_path / "more", restore=tmp_path / "taken")
    shop.assert_exact()


def test_rows_that_wait_in_a_checkpoint_are_found_there_after_a_restore(tmp_path: Path) -> None:  # SV25
    """A new checkpoint keeps large output in files of its own, not where the savepoint has its files."""
    place, wide = tmp_path / "input.jsonl", random.Random(1)
    database = tmp_path / "shop.db"

    def run(first: int, **options: Any) -> None:
        with place.open("a") as file:
            for number in range(first, first + 20):
                file.write(json.dumps({"id": number, "note": wide.randbytes(4_000).hex()}) + "\n")
        p = hg.Pipeline("shop", checkpointing=hg.Checkpointing(interval="20ms", dir=tmp_path / "checkpoints"))
        rows = p.source(hg.JsonLines(place, {"id": int, "note": str}, follow=True), name="in")
        rows.sink(hg.SqlSink(f"sqlite:///{database}", "notes", create=True), name="notes")
        watching = Watching()
        with running(p, observer=watching, **options) as handle:
            watching.wait(handle, first + 20)
            handle.stop(savepoint=tmp_path / f"after-{first}")

    run(0)
    run(20, restore=tmp_path / "after-0")
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("SELECT id FROM notes ORDER BY id").fetchall() == [(n,) for n in range(40)]


def test_the_program_is_changed_between_stop_and_restore(shop: Shop, tmp_path: Path) -> None:
    shop.add(60)
    shop.run(tmp_path / "taken")
    shop.add(60)
    shop.run(tmp_path / "more", restore=tmp_path / "taken", step="renamed")
    shop.assert_exact()


def test_the_savepoint_is_edited_or_moved_before_it_is_restored(shop: Shop, tmp_path: Path) -> None:  # WS10
    shop.add(60)
    shop.run(tmp_path / "taken")
    counts = hg.read_state(tmp_path / "taken", "numbering", "count")
    raised = counts.with_columns(value=pl.col("value") + 100)
    hg.edit_savepoint(tmp_path / "taken", tmp_path / "edited").replace("numbering", "count", raised).write()
    moved = shutil.move(tmp_path / "edited", tmp_path / "moved")
    before, done = shop.output(), shop.rows
    shop.add(60)
    shop.run(tmp_path / "more", restore=moved)
    assert shop.output() == [*before, *shop.wanted(done, 100 * KEYS + done)]


def test_an_edited_checkpoint_is_restored_in_its_own_place(shop: Shop, tmp_path: Path) -> None:  # WS10
    shop.add(60)
    with shop.running() as handle:
        handle.stop()
    own = shop.checkpoints / shop.name
    hg.edit_savepoint(own, tmp_path / "edited").write()
    shop.add(10)
    shop.run(tmp_path / "more", restore=tmp_path / "edited")
    shop.assert_exact()


@pytest.mark.parametrize(
    ("last", "point"), few(list(product(["edited", "taken"], ["after-adoption", "after-claim"])), 1)
)
def test_a_restore_that_failed_half_way_is_repeated(shop: Shop, tmp_path: Path, point: str, last: str) -> None:
    """By the same command, or after its user has edited the savepoint."""
    shop.add(60)
    shop.run(tmp_path / "taken")
    hg.edit_savepoint(tmp_path / "taken", tmp_path / "edited").write()

    def fail(name: str) -> None:
        if name == point:
            raise StorageError("write", "x", "the power went", is_transient=False)

    for named in dict.fromkeys(("taken", last)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fault_points, "reach", fail)
            assert "the power went" in refused(shop, restore=tmp_path / named)
    shop.add(20)
    shop.run(tmp_path / "more", restore=tmp_path / last)
    shop.assert_exact()


def test_a_worker_dies_behind_the_restore(shop: Shop, tmp_path: Path) -> None:
    shop.add(60)
    shop.run(tmp_path / "taken")
    shop.add(60)
    with shop.running(restore=tmp_path / "taken", kill_worker_after_checkpoint=1) as handle:
        while handle.progress.restarts == 0:
            handle.take_checkpoint()
        handle.stop()
    shop.assert_exact()


def test_two_starts_at_once_restore_it_once(shop: Shop, tmp_path: Path) -> None:
    shop.add(60)
    shop.run(tmp_path / "taken")
    shop.add(60)
    with shop.running(restore=tmp_path / "taken") as handle:
        assert "already run by" in refused(shop, restore=tmp_path / "taken")
        handle.stop()
    shop.assert_exact()


def test_a_copy_goes_on_beside_the_pipeline(shop: Shop, tmp_path: Path) -> None:
    """Under another name, in front of other targets; both go on from one savepoint."""
    shop.add(60)
    shop.run(tmp_path / "taken")
    copy = Shop(shop.root, "copy", "copied")
    copy.rows, done = shop.rows, shop.rows
    shop.add(40)
    copy.rows = shop.rows
    copy.run(tmp_path / "copied", restore=tmp_path / "taken")
    assert copy.output() == copy.output("streams") == copy.wanted(done, done)
    shop.run(tmp_path / "more", restore=tmp_path / "taken")
    shop.assert_exact()
    shop.add(10)
    copy.rows = shop.rows
    copy.run(tmp_path / "copied-again", restore=tmp_path / "copied")
    assert copy.output() == copy.output("streams") == copy.wanted(done, done)


def test_a_drained_pipeline_has_finished_and_says_so(shop: Shop, tmp_path: Path) -> None:
    shop.add(60)
    with shop.running() as handle:
        drained = handle.stop(drain=True, savepoint=tmp_path / "taken")
    assert drained is not None
    assert drained.is_drained
    shop.assert_exact()
    watching = Watching()
    with running(shop.pipeline(), observer=watching, restore=tmp_path / "taken") as handle:
        result = handle.wait(WAIT_S)
    assert result is not None
    assert result.is_finished
    assert any("was drained and does not continue" in note for note in watching.notes)
    shop.assert_exact()


@pytest.mark.parametrize("mode", few(["at_least_once", "at_most_once"], 1))
def test_other_guarantees_stop_and_restore_exactly(shop: Shop, tmp_path: Path, mode: str) -> None:  # GM3, GM32
    shop.add(60)
    for number in range(3):
        options = {"restore": tmp_path / str(number - 1)} if number else {}
        shop.run(tmp_path / str(number), mode=mode, **options)
        shop.assert_exact()
        shop.add(20)


def test_a_savepoint_of_a_pipeline_that_went_on_is_refused_and_says_what_comes_again(
    shop: Shop, tmp_path: Path
) -> None:  # SV25, K18
    """Whoever removes what the run names, and nothing else, has every record once."""
    shop.add(60)
    with shop.running() as handle:
        taken = handle.take_savepoint(tmp_path / "taken")
        assert taken is not None
        handle.stop()
    shop.add(40)
    shop.run(tmp_path / "later")
    shop.assert_exact()
    behind = newest(shop)
    said = refused(shop, restore=tmp_path / "taken")
    assert f"its newest checkpoint is {behind}" in said
    assert f"to {behind} committed would be produced again" in said
    with shop.running(restore=tmp_path / "taken", go_back_past=behind) as handle:
        handle.stop()
    (note,) = [note for note in shop.notes if note.startswith("going back")]
    named = re.search(r"output that checkpoints (\d+) to (\d+) committed will be produced again", note)
    assert named is not None, note
    assert len(shop.output()) > shop.rows
    first, last = int(named[1]), int(named[2])
    for file in (shop.root / shop.target).glob("part-*"):
        if first <= int(file.name.split("-")[2]) <= last:
            file.unlink()
    remaining = pl.concat([pl.read_ndjson(file) for file in (shop.root / shop.target).glob("part-*")])
    assert sorted(remaining.select("id", "key", "n").rows()) == shop.wanted()
