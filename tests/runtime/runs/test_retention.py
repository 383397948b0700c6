"""What is left of the checkpoints when a run ends in another way than asked for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from pyspark import cloudpickle
from sqlalchemy import Connection
from tests.conftest import IS_DEEP
from tests.runtime import removal_program
from tests.runtime.running import Run, definition_of, pipeline_at
from tests.runtime.runs.test_results import events, generator

import headgate as hg
from headgate import fault_points, testing
from headgate.cli.output import result_text
from headgate.codec.json_files import Ending
from headgate.codec.snapshot import FILES_PREFIX
from headgate.connectors.files.file_committer import read_committed
from headgate.connectors.streams import StreamSource
from headgate.errors import PipelineFailed, PutCheckpointsBack, StorageError, UsageError
from headgate.model.manifest import Manifest
from headgate.model.plan import PipelineDefinition
from headgate.model.progress import ControlRequest
from headgate.protocol.checkpoints.recovery import candidates
from headgate.protocol.supervision.supervisor import Phase
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.driver import coordinator_host
from headgate.runtime.driver.pipeline_lock import RequestFile, read_holder
from headgate.storage.urls import open_storage
from headgate.store.catalogue import chunk_index
from headgate.store.store import Store
from headgate.store.streams import Retention

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import tests

Start = Any


def kept(root: Path) -> list[int]:
    log = CheckpointLog(open_storage(str(root / "checkpoints")), "p")
    return [int(manifest.checkpoint) for manifest in candidates(log.observe())]


def pipeline(root: Path, *, fails_beside: Path | None = None, **options: Any) -> hg.Pipeline:
    def passed(row: dict[str, Any]) -> dict[str, Any]:
        if fails_beside is not None and fails_beside.exists():
            raise ValueError("asked to fail")
        return row

    options.setdefault("restart", hg.NoRestart())
    made = pipeline_at(root, retained=2, **options)
    made.source(generator(3_000, 2_000, batch=20)).map(passed, name="passed").sink(
        hg.FileSink(root / "out", roll_interval=0), name="out"
    )
    return made


@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_checkpoints_are_retained_when_a_pipeline_is_cancelled_or_fails(
    start: Start, tmp_path: Path, how: str
) -> None:  # C32
    marker = tmp_path / "fails"
    run = start(definition_of(pipeline(tmp_path, fails_beside=marker)))
    run.wait_checkpoints(3)
    if how == "cancelled":
        run.driver.cancel()
        assert not run.result().is_finished
    else:
        marker.touch()
        with pytest.raises(PipelineFailed, match="asked to fail"):
            run.result()
    assert len(kept(tmp_path)) == 2
    newest = kept(tmp_path)[0]  # it may have been written when nobody listened any more
    assert newest >= max(run.checkpoints)
    again = start(definition_of(pipeline(tmp_path)))
    assert again.result().is_finished
    assert any(f"continues from checkpoint {newest}" in note for note in again.notes)
    found = read_committed(str(tmp_path / "out"))["id"].sort().to_list()
    assert found == events(generator(3_000))["id"].to_list()


def written(root: Path) -> list[int]:
    return read_committed(str(root / "out"))["id"].sort().to_list()


def snapshots(root: Path) -> list[Path]:
    return sorted((root / "checkpoints" / "p").glob("chk-*/*"))


@pytest.mark.parametrize("how", ["cancelled", "cancelled while it restarts", "failed"])
def test_checkpoints_that_are_not_retained_are_removed(start: Start, tmp_path: Path, how: str) -> None:  # C32, C71
    marker = tmp_path / "fails"
    restart = hg.FixedDelay(delay="1h") if how.endswith("restarts") else hg.NoRestart()
    given = {"retain_on_cancel": False, "retain_on_failure": False, "restart": restart}
    run = start(definition_of(pipeline(tmp_path, fails_beside=marker, **given), inline_bytes_max=0))
    run.wait_checkpoints(3)
    if how == "failed":
        marker.touch()
        with pytest.raises(PipelineFailed, match="asked to fail"):
            run.result()
    else:
        if how.endswith("restarts"):
            run.kill(0)
            run.wait(lambda: bool(run.restarts), "the pause before the restart")
        run.driver.cancel()
        result = run.result()
        assert (result.is_finished, result.has_removed_checkpoints, result.last_checkpoint) == (False, True, None)
    assert any("were removed, because the pipeline does not retain them" in note for note in run.notes)
    assert kept(tmp_path) == []
    assert snapshots(tmp_path) == []
    found = written(tmp_path)
    assert len(found) == len(set(found)) > 0, "what was committed is there once"
    assert not list((tmp_path / "out").glob("_staging/*/*")), "what nobody promised is aborted"
    if how != "cancelled" and not IS_DEEP:
        return  # what comes behind it is the same
    again = start(definition_of(pipeline(tmp_path)))
    with pytest.raises(PipelineFailed, match=r"former checkpoints of the same name .* removed since") as refused:
        again.result()
    assert refused.value.remedy == PutCheckpointsBack()
    assert written(tmp_path) == found, "nothing is produced again before the sink is made to forget"
    hg.FileSink(tmp_path / "out").target("p", "out").forget()
    anew = start(definition_of(pipeline(tmp_path)))
    assert anew.result().is_finished
    assert written(tmp_path) == sorted(found + events(generator(3_000))["id"].to_list())


def test_a_cancel_in_doubt_is_told_as_one(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # C72
    def lost(*arguments: Any) -> None:
        raise StorageError("claim", "the log", "the answer was lost", is_transient=False)

    run = start(definition_of(pipeline(tmp_path, retain_on_cancel=False)))
    run.wait_checkpoints(1)
    monkeypatch.setattr(CheckpointLog, "give_up", lost)
    run.driver.cancel()
    result = run.result()
    assert (result.has_removed_checkpoints, result.is_removal_in_doubt) == (False, True)
    assert "the same command begins from nothing, or continues" in result_text(result)
    run.driver.join()
    holder = read_holder(str(tmp_path / "checkpoints"), "p")
    assert holder is not None
    assert (holder.ending, holder.is_in_doubt) == (Ending.STOPPED, True)
    assert any(note.startswith("it is not known whether the checkpoints") for note in run.notes)


def test_a_stop_keeps_the_checkpoints_that_a_cancel_would_remove(start: Start, tmp_path: Path) -> None:  # C70
    options = {"retain_on_cancel": False, "restart": hg.FixedDelay(delay="1h")}
    run = start(definition_of(pipeline(tmp_path, **options)))
    run.wait_checkpoints(2)
    run.kill(0)
    run.wait(lambda: bool(run.restarts), "the pause before the restart")
    run.driver.stop()  # between two generations there is nothing to take a last checkpoint of
    assert not run.result().has_removed_checkpoints
    assert kept(tmp_path)[0] >= max(run.checkpoints)
    second = start(definition_of(pipeline(tmp_path, **options)))
    second.wait_checkpoints(1)
    second.driver.cancel(retain=True)
    assert not second.result().has_removed_checkpoints
    assert len(kept(tmp_path)) == 2
    assert start(definition_of(pipeline(tmp_path))).result().is_finished
    assert written(tmp_path) == events(generator(3_000))["id"].to_list()


def test_a_savepoint_outlives_the_checkpoints_of_its_pipeline(start: Start, tmp_path: Path) -> None:  # SV1
    """Even one below the pipeline's own directory."""
    where = tmp_path / "checkpoints" / "p" / "mine"
    run = start(definition_of(pipeline(tmp_path, retain_on_cancel=False), inline_bytes_max=0))
    run.wait_checkpoints(1)
    outcome = run.driver.take_savepoint(str(where)).result(120)
    assert outcome.savepoint is not None, outcome.reason
    before = {path: path.read_bytes() for path in where.rglob("*") if path.is_file()}
    run.driver.cancel()
    assert run.result().has_removed_checkpoints
    assert {path: path.read_bytes() for path in where.rglob("*") if path.is_file()} == before
    assert len(before) > 1
    assert snapshots(tmp_path) == []


def test_a_cancel_that_was_meant_for_an_earlier_run_ends_no_later_one(start: Start, tmp_path: Path) -> None:
    """Whoever asked has died with that run, and another process has its number now: in a container that is usual."""
    (tmp_path / "checkpoints" / "p").mkdir(parents=True)
    stale = RequestFile.leave(str(tmp_path / "checkpoints"), "p", ControlRequest(cancels=True))
    run = start(definition_of(pipeline(tmp_path, retain_on_cancel=False)))
    run.wait_checkpoints(1)
    run.driver.is_asked_to_end = True
    run.driver.answer_asks()
    assert stale.answered() is None
    assert run.driver.supervision.machine.phase is Phase.RUNNING
    assert kept(tmp_path) != []
    assert list((tmp_path / "checkpoints" / "p").glob("checkpoint-*")) == []


SCHEMA = pa.schema([("key", pa.string()), ("value", pa.int64())])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store") as opened:
        opened.create_stream("in", SCHEMA, segments=3, routing_key="key")
        yield opened


def copied(root: Path, *, holds: bool = True, parallelism: int = 2) -> PipelineDefinition:
    pipeline = pipeline_at(root, parallelism=parallelism)
    source = pipeline.source(StreamSource("in", store=str(root / "store"), holds=holds), name="source")
    source.sink(hg.StreamSink("out", store=str(root / "store"), segments=1), name="out")
    return definition_of(pipeline)


def append(store: Store, first: int, count: int) -> None:
    rows = [{"key": f"k{n % 7}", "value": n} for n in range(first, first + count)]
    with store.writer("in") as writer:
        writer.append(pa.RecordBatch.from_pylist(rows, schema=SCHEMA))


@contextmanager
def producing(store: Store, is_over: threading.Event) -> Iterator[list[int]]:
    """Append until it is over, then seal the stream; gives how many events there were."""
    counts = [0]

    def produce() -> None:
        with Store.open(store.root) as own:
            while not is_over.wait(0.005):  # the pace: not a wait for anything
                append(own, counts[0], 20)
                counts[0] += 20
            own.seal("in")

    thread = threading.Thread(target=produce)
    thread.start()
    try:
        yield counts
    finally:
        is_over.set()
        thread.join()


def values(store: Store) -> list[int]:
    reader, found = store.reader("out", 0), list[int]()
    while (batch := reader.read()) is not None:
        found += batch.column("value").to_pylist()
    return sorted(found)


def test_a_stream_keeps_what_the_checkpoints_of_a_stopped_pipeline_need(
    start: Callable[..., Run], store: Store, tmp_path: Path
) -> None:
    append(store, 0, 100)
    run = start(copied(tmp_path))
    run.wait_checkpoints(2)
    run.driver.stop()
    assert not run.result().is_finished
    with pytest.raises(UsageError, match="'p/source' needs the events of segment"):
        store.truncate(store.tail("in"))
    held = store.holds("in")["p/source"]
    store.truncate(held)
    append(store, 100, 100)
    store.seal("in")
    assert start(copied(tmp_path, parallelism=3)).result().is_finished
    assert values(store) == list(range(200))


def test_a_retention_that_keeps_nothing_costs_a_running_pipeline_nothing(
    start: Callable[..., Run], store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # S71
    monkeypatch.setattr(coordinator_host, "DROPS_BETWEEN_FORGETTING", 1)
    is_over = threading.Event()
    run = start(copied(tmp_path))
    run.wait_checkpoints(1)
    store.set_retention("in", Retention(age="1ms"))
    with producing(store, is_over) as counts:
        for kill in (0, 1):
            before = sum(store.head("in").positions.values())
            while sum(store.retain("in").positions.values()) == before:
                run.wait_checkpoints(1)
            run.kill(kill)
            run.wait_restarts(kill + 1)
        is_over.set()
    assert run.result().is_finished
    assert values(store) == list(range(counts[0]))
    assert store.describe("in").events_count < counts[0]


def test_a_pipeline_that_needs_what_is_gone_says_so_at_once(
    start: Callable[..., Run], store: Store, tmp_path: Path
) -> None:
    append(store, 0, 100)
    run = start(copied(tmp_path))
    run.wait_checkpoints(2)
    run.driver.stop()
    run.result()
    append(store, 100, 100)
    store.truncate(store.tail("in"), force=True)
    again = start(copied(tmp_path))
    with pytest.raises(PipelineFailed, match=r"segment \d of stream 'in' begins at position \d+ now, and events from"):
        again.result()
    assert again.restarts == []


def test_a_first_start_begins_with_what_is_there(start: Callable[..., Run], store: Store, tmp_path: Path) -> None:
    append(store, 0, 100)
    cut = store.tail("in")
    append(store, 100, 100)
    store.truncate(cut)
    store.seal("in")
    assert start(copied(tmp_path)).result().is_finished
    assert values(store) == list(range(100, 200))


def test_whoever_only_looks_at_a_stream_or_does_without_holds_nothing(
    start: Callable[..., Run], started: list[PipelineDefinition], store: Store, tmp_path: Path
) -> None:
    append(store, 0, 10)
    store.seal("in")
    looked = hg.Pipeline("looked").source(StreamSource("in", store=store.root)).collect()
    assert looked.height == 10
    assert len(started) == 1, "on child processes"
    assert start(copied(tmp_path, holds=False)).result().is_finished
    assert store.holds("in") == {}


# Rules: F3


ROWS, KEYS = 9_000, 9
"""So many that the input does not end before the last death: on a busy machine checkpoints are further apart."""


def started(root: Path, kill_at: str | None = None) -> int:
    """Run the program; return how it ended."""
    environment = {**os.environ} if kill_at is None else {**os.environ, fault_points.VARIABLE: kill_at}
    words = [sys.executable, removal_program.__file__, str(root), str(ROWS), str(KEYS)]
    return subprocess.run(words, env=environment, timeout=600, check=False).returncode


def manifests(root: Path) -> list[Manifest]:
    observed = CheckpointLog(open_storage(str(root / "checkpoints")), "p").observe()
    return [entry.content for entry in observed.counted() if isinstance(entry.content, Manifest)]


def files_there(root: Path) -> set[str]:
    own = root / "checkpoints" / "p"
    return {str(path.relative_to(own)) for path in own.glob("chk-*/*")}


def check_files(root: Path) -> None:
    """Whatever was removed, every file is there that a checkpoint needs which a start may restore."""
    needed = {path for manifest in manifests(root)[-2:] for path in manifest.files}
    assert needed <= files_there(root)


@pytest.mark.timeout(900)
@pytest.mark.early
def test_a_pipeline_dies_between_any_two_files_that_it_removes(tmp_path: Path) -> None:  # KP31, SF4, SF8
    shared = 0
    for count in (1, 2, 3, 5, 9, 14, 22) if IS_DEEP else (5,):
        marker = tmp_path / f"killed-{count}"
        assert started(tmp_path, f"in-removal:{count}:{marker}") == -signal.SIGKILL, (
            f"it did not die at removal {count}"
        )
        assert marker.exists()
        check_files(tmp_path)
        own = [f"chk-{manifest.checkpoint:010d}/" for manifest in manifests(tmp_path)]
        parts = [part for manifest in manifests(tmp_path)[-1:] for part in manifest.parts]
        shared += sum(part.section.startswith(FILES_PREFIX) and not part.path.startswith(own[-1]) for part in parts)
    assert shared, "no checkpoint shared a file when it died"
    assert started(tmp_path) == 0
    check_files(tmp_path)
    assert files_there(tmp_path) == {path for manifest in manifests(tmp_path) for path in manifest.files}, "files leak"
    found = read_committed(str(tmp_path / "rows"))
    expected = pl.DataFrame({"key": [n % KEYS for n in range(ROWS)], "n": [n // KEYS + 1 for n in range(ROWS)]})
    assert found.sort("key", "n").equals(expected.sort("key", "n"))


ORPHAN_ROWS = 20_000


def test_a_pipeline_whose_output_was_removed_starts_again_and_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, checkpoints = str(tmp_path / "store"), str(tmp_path / "checkpoints")
    removed: list[str] = []
    original = chunk_index._is_condemned

    def is_condemned(connection: Connection, path: str) -> bool:
        if len(removed) < 2:
            removed.append(path)
            return True
        return original(connection, path)

    with hg.Store.open(store) as opened:
        opened.create_stream("a/out", pa.schema({"n": pa.int64()}), routing_key="n")
        monkeypatch.setattr(chunk_index, "_is_condemned", is_condemned)
        pipeline = hg.Pipeline(
            "p",
            checkpointing=hg.Checkpointing(interval="20ms", dir=checkpoints),
            restart=hg.FixedDelay(delay="10ms", attempts=5),
        )
        numbers = hg.Generator({"n": hg.RowNumber()}, rows=ORPHAN_ROWS, rows_per_second=40_000, timestamp=None)
        pipeline.source(numbers).sink(hg.StreamSink("a/out", store=store, routing_key="n"))
        result = testing.run(pipeline, timeout_s=300)
        assert result is not None
        assert result.restarts >= 1
        assert len(removed) == 2
        opened.seal("a/out")
        found = [n for part in opened.follow("a/out") for n in part.batch["n"].to_pylist()]
    assert sorted(found) == list(range(ORPHAN_ROWS))
