"""Files of real pipelines: their modes, large output, and records that wait for a later checkpoint."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark import cloudpickle
from tests.conftest import few
from tests.runtime.launching import Zygote
from tests.runtime.running import Run, definition_of, pipeline_at
from tests.runtime.runs.test_results import events, generator, same

import headgate as hg
from headgate.connectors.base import Source, SourceBatch, SourceContext, SourceReader
from headgate.connectors.files.file_committer import committed_files, read_committed
from headgate.errors import PipelineFailed
from headgate.model.manifest import Manifest
from headgate.model.plan import PipelineDefinition
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


SCHEMA = pa.schema([("file", pa.string()), ("number", pa.int64())])
PADDING = "x" * 10_000
LONG = 2_500
"""Rows of a file that is long enough to be stopped in its middle: a block has about a hundred of them."""
HALF = LONG // 2
LOOK_MS = 5


def write(root: Path, name: str, numbers: Iterable[int], kind: str = "json") -> None:
    (root / "in").mkdir(exist_ok=True)
    rows = [{"file": name, "number": number} for number in numbers]
    path = root / "in" / f"{name}.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows, SCHEMA), path)
        return
    padding = PADDING if len(rows) == LONG else ""
    path.write_text("".join(json.dumps({**row, "padding": padding}) + "\n" for row in rows))


@dataclass(frozen=True)
class HalfOfB(Source):
    """A source that is ``inner``, but never comes to the end of ``b``, however late it is stopped."""

    inner: Any

    def schema(self) -> Any:
        return self.inner.schema()

    def identity(self) -> str:
        return str(self.inner.identity())

    def open(self, context: SourceContext) -> HalfOfBReader:
        return HalfOfBReader(self.inner.open(context))


class HalfOfBReader:
    def __init__(self, inner: SourceReader) -> None:
        self._inner, self._rows_count = inner, 0
        self.splits, self.is_finished = inner.splits, inner.is_finished
        self.positions, self.close = inner.positions, inner.close

    def poll(self) -> SourceBatch | None:
        polled = None if self._rows_count >= HALF else self._inner.poll()
        if polled is not None:
            self._rows_count += polled.batch.column("file").to_pylist().count("b")
        return polled

    def wakeup_ms(self) -> int:
        return LOOK_MS if self._rows_count >= HALF else self._inner.wakeup_ms()


def source_of(root: Path, kind: str) -> Any:
    if kind == "parquet":
        return hg.ParquetFiles(root / "in", batch_rows=100)
    return hg.JsonLines(root / "in", SCHEMA)


def listed(root: Path, parallelism: int, kind: str, *, is_held: bool) -> PipelineDefinition:
    pipeline = pipeline_at(root, parallelism=parallelism)
    source = source_of(root, kind)
    rows = pipeline.source(HalfOfB(source) if is_held else source, name="source")
    rows.sink(hg.FileSink(root / "rows", "parquet", roll_interval=0), name="rows")
    return definition_of(pipeline)


def committed(root: Path) -> list[tuple[str, int]]:
    found = read_committed(str(root / "rows"))
    return sorted(found.rows()) if found.width else []


def of(name: str, count: int) -> list[tuple[str, int]]:
    return [(name, number) for number in range(count)]


def stopped_in_the_middle(start: Start, root: Path, definition: PipelineDefinition) -> None:
    """Run until all of ``a`` and a part of ``b`` are committed; then stop."""
    run: Run = start(definition)
    run.wait(lambda: len([name for name, _ in committed(root) if name == "b"]) > 0, "some of b")
    run.wait(lambda: len([name for name, _ in committed(root) if name == "a"]) == 10, "all of a")
    run.wait_checkpoints(1)
    run.driver.stop()
    assert not run.result().is_finished
    assert len(committed(root)) < 10 + LONG


@pytest.mark.parametrize(
    ("after", "added", "kind"),
    [
        *[(2, "a0", "json"), (2, "c", "parquet"), (3, "a0", "parquet"), (3, "c", "json")],
        *few([(2, "a0", "parquet"), (2, "c", "json"), (3, "a0", "json"), (3, "c", "parquet")], 0),
    ],
)
def test_a_file_that_was_added_between_two_starts_is_read_and_no_other_is_lost(
    start: Start, tmp_path: Path, after: int, added: str, kind: str
) -> None:  # T10
    write(tmp_path, "a", range(10), kind)
    write(tmp_path, "b", range(LONG), kind)
    stopped_in_the_middle(start, tmp_path, listed(tmp_path, 2, kind, is_held=True))
    write(tmp_path, added, range(20), kind)
    assert start(listed(tmp_path, after, kind, is_held=False)).result().is_finished
    assert committed(tmp_path) == sorted(of("a", 10) + of("b", LONG) + of(added, 20))


def counted(total: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "n": total["n"] + row["n"]}


def round_three_times(loop: hg.Stream) -> tuple[hg.Stream, hg.Stream]:
    again = loop.rebalance().with_columns(trip=pl.col("trip") + 1)
    return again.filter(pl.col("trip") < 3), again.filter(pl.col("trip") == 3)


def everything(root: Path, parallelism: int, rate: int | None) -> PipelineDefinition:
    """A branch of files that ends early, with windows, a reduce and a loop, beside one that takes its time."""
    pipeline = pipeline_at(root, parallelism=parallelism)
    files = pipeline.source(hg.JsonLines(root / "in", SCHEMA), name="files")
    stream = files.with_columns(at=pl.col("number") * 1_000, key=pl.col("number") % 3).with_timestamps("at")
    keyed = stream.key_by("key").window(hg.Tumbling("10s"))
    keyed.agg(n=pl.len(), total=pl.col("number").sum()).sink(
        hg.FileSink(root / "windows", "parquet", roll_interval=0), name="windows"
    )
    distinct = keyed.agg(n=pl.col("number").n_unique())
    distinct.sink(hg.FileSink(root / "distinct", "parquet", roll_interval=0), name="distinct")
    sums = stream.select("key", n=pl.lit(1)).key_by("key").reduce(counted)
    sums.sink(hg.FileSink(root / "sums", "parquet", roll_interval=0), name="sums")
    looped = stream.select("file", "number", trip=pl.lit(0)).rebalance().iterate(round_three_times)
    looped.select("file", "number").sink(hg.FileSink(root / "rows", "parquet", roll_interval=0), name="rows")
    slow = hg.Generator({"n": hg.RowNumber()}, rows=4_000, rows_per_second=rate, splits=2)
    pipeline.source(slow, name="slow").sink(hg.FileSink(root / "other", "parquet", roll_interval=0), name="other")
    return definition_of(pipeline)


def windows_of(root: Path, name: str, *values: str) -> list[tuple[Any, ...]]:
    found = read_committed(str(root / name))
    return sorted(found.group_by("key", "window_start").agg(pl.col(*values).sum()).rows()) if found.width else []


def expected_windows(numbers: list[int]) -> list[tuple[Any, ...]]:
    frame = pl.DataFrame({"number": numbers}).with_columns(
        key=pl.col("number") % 3, window_start=pl.from_epoch(pl.col("number") // 10 * 10, "s").cast(pl.Datetime("us"))
    )
    return sorted(frame.group_by("key", "window_start").agg(n=pl.len(), total=pl.col("number").sum()).rows())


@pytest.mark.parametrize("after", few([2, 1], 1))
def test_what_stands_behind_a_source_that_had_ended_goes_on_too(start: Start, tmp_path: Path, after: int) -> None:
    # T10
    first, second = list(range(35)), [*range(100, 121), 31, 33]
    write(tmp_path, "b", first)
    run = start(everything(tmp_path, 2, 300))
    run.wait(lambda: windows_of(tmp_path, "windows", "n", "total") == expected_windows(first), "the last window")
    run.wait(lambda: len(committed(tmp_path)) == len(first), "the end of the loop")
    run.wait_checkpoints(2)
    run.driver.stop()
    assert not run.result().is_finished
    write(tmp_path, "a", second)
    run = start(everything(tmp_path, after, 2_000))
    run.wait_checkpoints(1)
    run.kill(after - 1)
    assert run.result().is_finished
    everyone = first + second
    assert committed(tmp_path) == sorted([("a", n) for n in second] + [("b", n) for n in first])
    assert windows_of(tmp_path, "windows", "n", "total") == expected_windows(everyone)
    assert windows_of(tmp_path, "distinct", "n") == [row[:3] for row in expected_windows(everyone)]
    counts = sorted(read_committed(str(tmp_path / "sums")).select("key", "n").rows())
    assert counts == sorted((key, 1 + n) for key in range(3) for n in range(sum(x % 3 == key for x in everyone)))
    assert read_committed(str(tmp_path / "other")).height == 4_000


@pytest.mark.parametrize("after", few([2, 1], 1))
def test_a_drained_pipeline_stays_drained_whatever_is_added(start: Start, tmp_path: Path, after: int) -> None:
    # E9, R13
    write(tmp_path, "a", range(10))
    write(tmp_path, "b", range(LONG))
    run: Run = start(listed(tmp_path, 2, "json", is_held=True))
    run.wait(lambda: len([name for name, _ in committed(tmp_path) if name == "b"]) > 0, "some of b")
    run.driver.drain()
    assert run.result().is_finished
    found = committed(tmp_path)
    assert len(found) < 10 + LONG
    write(tmp_path, "c", range(20))
    again = start(listed(tmp_path, after, "json", is_held=False))
    assert again.result().is_finished
    assert committed(tmp_path) == found
    assert any("was drained and does not continue" in note for note in again.notes)


def test_a_pipeline_that_has_finished_says_that_it_reads_nothing_more(start: Start, tmp_path: Path) -> None:  # R13
    write(tmp_path, "a", range(10))
    assert start(listed(tmp_path, 2, "json", is_held=False)).result().is_finished
    write(tmp_path, "b", range(20))
    again = start(listed(tmp_path, 2, "json", is_held=False))
    assert again.result().is_finished
    assert committed(tmp_path) == of("a", 10)
    assert any("what was added since is not read" in note for note in again.notes)
