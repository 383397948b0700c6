"""Files of real pipelines: their modes, large output, and records that wait for a later checkpoint."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from pyspark import cloudpickle
from tests.conftest import few
from tests.runtime.launching import Zygote
from tests.runtime.running import Run, definition_of, pipeline_at
from tests.runtime.runs.test_results import events, generator, same

import headgate as hg
from headgate.connectors.files.file_committer import committed_files, read_committed
from headgate.errors import PipelineFailed
from headgate.model.manifest import Manifest
from headgate.model.progress import ControlRequest
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.driver.pipeline_lock import RequestFile
from headgate.storage.urls import open_storage

Start = Any
SOURCE = generator(8_000, 4_000, splits=2)


def copying(
    root: Path, *, parallelism: int = 2, roll_interval: str | int = "1h", sink: str = "out", **options: Any
) -> Any:
    pipeline = pipeline_at(root, parallelism=parallelism)
    stream = pipeline.source(SOURCE)
    stream.sink(hg.FileSink(root / "out", "parquet", roll_interval=roll_interval, **options), name=sink)
    return definition_of(pipeline, inline_bytes_max=0)


def finish(run: Run, root: Path) -> None:
    assert run.result().is_finished
    same(read_committed(str(root / "out")), events(SOURCE))


@pytest.mark.parametrize("roll_interval", few(["1h", "100ms", 0], 2))
def test_records_that_wait_survive_kills(start: Start, tmp_path: Path, roll_interval: str | int) -> None:
    run = start(copying(tmp_path, roll_interval=roll_interval))
    for count in (1, 2):
        run.wait_checkpoints(3)
        run.kill(count % 2)
        run.wait_restarts(count)
    finish(run, tmp_path)


def test_records_that_wait_make_few_files(start: Start, tmp_path: Path) -> None:
    run = start(copying(tmp_path))
    run.wait_checkpoints(9)
    finish(run, tmp_path)
    assert len(committed_files(str(tmp_path / "out"))) == 2


def test_what_waits_at_a_stop_is_written_by_the_next_start_at_any_parallelism(start: Start, tmp_path: Path) -> None:
    first = start(copying(tmp_path))
    first.wait_checkpoints(3)
    first.driver.stop()
    assert not first.result().is_finished
    assert committed_files(str(tmp_path / "out")) == []
    second = start(copying(tmp_path, parallelism=3))
    second.wait_checkpoints(2)
    second.driver.stop()
    second.result()
    assert committed_files(str(tmp_path / "out")) != []
    finish(start(copying(tmp_path, parallelism=1)), tmp_path)


def test_a_pipeline_without_the_sink_that_holds_records_is_refused(start: Start, tmp_path: Path) -> None:
    # D15
    first = start(copying(tmp_path))
    first.wait_checkpoints(3)
    first.driver.stop()
    first.result()
    with pytest.raises(PipelineFailed, match=r"holds \d+ records that sink 'out' has not written yet.*bring it back"):
        start(copying(tmp_path, sink="other")).result()
    other = pipeline_at(tmp_path, parallelism=2)
    other.source(SOURCE).sink(hg.Discard(), name="out")
    with pytest.raises(PipelineFailed, match="now it is of another kind"):
        start(definition_of(other)).result()
    finish(start(copying(tmp_path)), tmp_path)


cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import tests


def everything_is_large() -> None:
    from headgate.runtime.checkpoints import snapshot_writer

    snapshot_writer.PAYLOAD_BYTES_MAX = 0


def manifests(root: Path) -> list[Manifest]:
    entries = CheckpointLog(open_storage(str(root / "checkpoints")), "p").observe().counted()
    return [entry.content for entry in entries if isinstance(entry.content, Manifest)]


def test_large_output_of_a_killed_run_is_committed_once(start: Any, tmp_path: Path) -> None:
    pipeline = pipeline_at(tmp_path, parallelism=2)
    source = generator(3_000, 600)
    pipeline.source(source).sink(hg.FileSink(tmp_path / "rows", "parquet", roll_interval=0), name="rows")
    run = start(definition_of(pipeline), prepare=everything_is_large)
    run.wait_checkpoints(2)
    run.kill(0)
    run.wait_restarts(1)
    run.wait_checkpoints(1)
    assert run.result().is_finished
    same(read_committed(str(tmp_path / "rows")), events(source))
    (newest,) = (m for m in manifests(tmp_path) if m.is_final)
    assert all(c.stored is not None and not c.payload for c in newest.committables)
    left = [path for path in (tmp_path / "checkpoints" / "p").glob("chk-*/*") if ".o" in path.name]
    kept = {c.stored.path for m in manifests(tmp_path) for c in m.committables if c.stored is not None}
    assert {str(path.relative_to(tmp_path / "checkpoints" / "p")) for path in left} == kept


KINDS = (
    *("/lock", "/log/", "/ids/", "/life", "/log-hint", "/chk-", ".asked", ".answered", "/savepoint/"),
    *("/_staging/", "/_committed/", "/_claims/", "/_owners/", "/results/"),
    *("/chunks/", "catalogue.sqlite-wal"),
)
"""Parts of the paths of everything that a pipeline writes."""

FILES, DIRECTORIES = 0o600, 0o700
LOOK_S = 0.02


@pytest.fixture
def permissive() -> Iterator[Zygote]:
    """Workers and this process with a umask that takes nothing away."""
    before = os.umask(0)
    zygote = Zygote()
    yield zygote
    zygote.close()
    os.umask(before)


def look(root: Path, seen: dict[str, int]) -> None:
    """Add the modes of everything below ``root`` that is there now; what vanishes meanwhile does not count."""
    for directory, _, names in os.walk(root):
        for path in (directory, *(os.path.join(directory, name) for name in names)):
            try:
                mode = os.stat(path).st_mode
            except FileNotFoundError:
                continue
            expected = DIRECTORIES if stat.S_ISDIR(mode) else FILES
            if stat.S_IMODE(mode) != expected:
                seen[path] = stat.S_IMODE(mode)
            seen.setdefault(path, 0)


def run_and_look(zygote: Zygote, root: Path) -> dict[str, int]:
    """Run a pipeline with large state, a stream, files and a result; return path → its mode if that is too wide."""
    top = root / "top"
    pipeline = pipeline_at(top, parallelism=2, interval="200ms")
    source = hg.Generator(
        columns={"id": hg.RowNumber(), "key": hg.Uniform(0, 5_000)},
        rows=40_000,
        rows_per_second=40_000,
        time="deterministic",
        splits=2,
        batch_rows=500,
    )
    rows = pipeline.source(source).with_timestamps("ts")
    counts = rows.key_by("key").window(hg.Tumbling("1h")).agg(n=pl.len()).select("key", "n")
    counts.sink(hg.StreamSink("counts", store=top / "store"), name="stream")
    rows.sink(hg.FileSink(top / "files", access="owner"), name="files")
    rows.sink(hg.FileSink.within(str(top / "checkpoints" / "p" / "results" / "r"), "parquet"), name="result")
    run = Run(zygote, definition_of(pipeline))
    seen: dict[str, int] = {}
    try:
        run.wait_checkpoints(2)
        look(top, seen)  # while it runs: staged files, SQLite's write-ahead log
        requests = [ControlRequest(), ControlRequest(str(top / "savepoint"))]
        asks = [RequestFile.leave(str(top / "checkpoints"), "p", request) for request in requests]
        look(top, seen)
        run.driver.answer_asks()
        look(top, seen)
        assert [ask.answered() for ask in asks if ask.answered() is None] == []
        run.release()
        while not run.driver.result.done():
            look(top, seen)
            wait([run.driver.result], LOOK_S)  # the driver is a thread of this process, and must get its turn
        run.result()
    finally:
        run.close()
    look(top, seen)
    return seen


def test_everything_that_a_pipeline_writes_is_its_owners_alone(permissive: Zygote, tmp_path: Path) -> None:
    seen = run_and_look(permissive, tmp_path)
    for kind in KINDS:
        assert any(kind in path for path in seen), f"the test never saw {kind}: {sorted(seen)}"
    assert {path: oct(mode) for path, mode in seen.items() if mode} == {}


def test_output_for_others_is_what_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        hg.FileSink(tmp_path / "out").make_target(pa.schema([("id", pa.int64())]))
        hg.FileSink(tmp_path / "shared", access="group").make_target(pa.schema([("id", pa.int64())]))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o750
    assert stat.S_IMODE((tmp_path / "shared").stat().st_mode) == 0o2770
    with pytest.raises(hg.UsageError, match=r"FileSink\(access=\) must be 'owner' or 'group' or 'umask', not 'all'"):
        hg.FileSink(tmp_path / "out", access="all")
