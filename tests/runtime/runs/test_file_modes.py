"""Everything that a whole pipeline writes is its owner's alone, from the first byte to the end."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from tests.runtime.launching import Zygote
from tests.runtime.running import Run, definition_of, pipeline_at

import headgate as hg
from headgate.model.progress import ControlRequest
from headgate.runtime.driver.remote_control import RequestFile

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
