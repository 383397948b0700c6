"""Files that are added to a fixed list between two starts, with the real driver and real workers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark import cloudpickle
from tests.conftest import few
from tests.runtime.running import Run, definition_of, pipeline_at

import headgate as hg
from headgate.connectors.base import Source, SourceBatch, SourceContext, SourceReader
from headgate.connectors.files.file_committer import read_committed
from headgate.model.plan import PipelineDefinition

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import tests

Start = Any

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
