"""Delta tables as sources: every row once, at any restart, and what is gone is said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from lake_program import PATIENCE_S, ROW, until
from tests.conftest import IS_DEEP, few
from tests.servers.objects import BUCKET, object_server

import headgate as hg
from headgate import testing
from headgate.connectors.base import SourceContext
from headgate.connectors.lakes.delta_log import DeltaLog
from headgate.connectors.lakes.table_source import TableHistory
from headgate.errors import StorageError, UsageError
from headgate.testing import check_source

deltalake = pytest.importorskip("deltalake")

PARALLELISMS = (1, 2, 3) if IS_DEEP else (2,)


def append(path: Path, *numbers: int, **options: Any) -> None:
    table = pa.table({"number": list(numbers), "kind": [n % 3 for n in numbers]})
    deltalake.write_deltalake(str(path), table, mode="append", **options)


def read_all(source: hg.Delta, positions: dict[str, bytes] | None = None, polls: int = 1_000) -> tuple[list[Any], Any]:
    """Return the rows that come until there are no more for now, and the positions then."""
    schema = source.schema()
    reader = source.open(SourceContext("p", "in", 0, 1, positions, schema=schema))
    rows: list[Any] = []
    for _ in range(polls):
        found = reader.poll()
        if found is None:
            break
        rows += found.batch.to_pylist()  # type: ignore[union-attr]
        if reader.is_finished():
            break
    return rows, reader.positions()


@pytest.mark.long
@pytest.mark.parametrize("partitions", few([["kind"], None], 1), ids=str)
def test_the_source_passes_the_kit(tmp_path: Path, partitions: list[str] | None) -> None:
    versions = 10 if IS_DEEP else 3
    for start in range(0, 20 * versions, 20):
        append(tmp_path / "t", *range(start, start + 20), partition_by=partitions)
    rows = check_source(lambda: hg.Delta(tmp_path / "t", splits=4), parallelisms=PARALLELISMS)
    assert sorted(row["number"] for row in rows) == list(range(20 * versions))
    assert all(row["kind"] == row["number"] % 3 for row in rows)


def test_a_version_is_read_or_what_follows_it(tmp_path: Path) -> None:
    for start in range(0, 60, 20):
        append(tmp_path / "t", *range(start, start + 20), partition_by=["kind"])
    for source, expected in (
        (hg.Delta(tmp_path / "t", version=1, splits=2), range(40)),
        (hg.Delta(tmp_path / "t", after=0, splits=3), range(20, 60)),
    ):
        for polls in range(1, 8):
            begun, positions = read_all(source, polls=polls)
            rest, _ = read_all(source, positions)
            assert sorted(row["number"] for row in begun + rest) == list(expected)


def test_values_come_as_they_are(tmp_path: Path) -> None:
    rows = [ROW, dict.fromkeys(ROW)]
    p = hg.Pipeline("p", checkpointing=hg.Checkpointing(dir=tmp_path / "c"))
    sink = hg.DeltaSink(tmp_path / "t", create=True, partition_by=["text", "moment", "local", "day", "price", "flag"])
    p.source(hg.FromRows(rows)).sink(sink, name="out")
    testing.run(p, timeout_s=PATIENCE_S)
    found, _ = read_all(hg.Delta(tmp_path / "t"))
    assert sorted(found, key=lambda row: row["whole"] is None) == rows


@pytest.mark.run
def test_a_followed_table_is_copied_while_it_grows(tmp_path: Path) -> None:
    append(tmp_path / "t", *range(100))
    p = hg.Pipeline("p", checkpointing=hg.Checkpointing(interval="50ms", dir=tmp_path / "c"))
    source = hg.Delta(tmp_path / "t", follow=True, poll_interval="10ms")
    p.source(source, name="in").sink(hg.DeltaSink(tmp_path / "copy", create=True), name="out")

    def copied() -> list[int]:
        path = tmp_path / "copy"
        return sorted(pl.read_delta(str(path))["number"]) if (path / "_delta_log").is_dir() else []

    with testing.running(p, parallelism=2):
        until(lambda: copied() == list(range(100)))
        append(tmp_path / "t", *range(100, 150))
        until(lambda: len(copied()) == 150)
    append(tmp_path / "t", *range(150, 170))
    deltalake.DeltaTable(str(tmp_path / "t")).optimize.compact()
    append(tmp_path / "t", *range(170, 180))
    with testing.running(p, parallelism=3):
        until(lambda: len(copied()) >= 180)
    assert copied() == list(range(180))


def test_versions_that_delete_rows_stop_or_are_skipped(tmp_path: Path) -> None:
    append(tmp_path / "t", *range(6))
    _, positions = read_all(hg.Delta(tmp_path / "t", follow=True))
    deltalake.DeltaTable(str(tmp_path / "t")).delete("number = 2")
    append(tmp_path / "t", 7)
    with pytest.raises(
        UsageError, match=r"version 1 of Delta table .* deletes or rewrites rows.*give skip_changes=True"
    ):
        read_all(hg.Delta(tmp_path / "t", follow=True), positions)
    found, _ = read_all(hg.Delta(tmp_path / "t", follow=True, skip_changes=True), positions)
    assert [row["number"] for row in found] == [7]


def test_files_that_a_vacuum_removed_are_an_error_with_a_remedy(tmp_path: Path) -> None:
    append(tmp_path / "t", *range(6))
    source = hg.Delta(tmp_path / "t")
    schema = source.schema()
    reader = source.open(SourceContext("p", "in", 0, 1, None, schema=schema))
    deltalake.DeltaTable(str(tmp_path / "t")).delete("number < 10")
    deltalake.DeltaTable(str(tmp_path / "t")).vacuum(0, dry_run=False, enforce_retention_duration=False)
    with pytest.raises(UsageError, match="is gone: a vacuum removed it before it was read; keep files for longer"):
        reader.poll()


def test_a_log_that_was_cleaned_up_below_the_position_is_an_error(tmp_path: Path) -> None:
    append(tmp_path / "t", 1)
    _, positions = read_all(hg.Delta(tmp_path / "t", follow=True))
    append(tmp_path / "t", 2)
    append(tmp_path / "t", 3)
    deltalake.DeltaTable(str(tmp_path / "t")).create_checkpoint()
    (tmp_path / "t" / "_delta_log" / f"{1:020d}.json").unlink()
    with pytest.raises(
        UsageError, match=r"version 1 of .* is not in its log any more, and was not read: raise delta.log"
    ):
        read_all(hg.Delta(tmp_path / "t", follow=True), positions)


def test_new_columns_are_left_out_and_missing_ones_are_null(tmp_path: Path) -> None:
    append(tmp_path / "t", 1)
    wider = pa.table({"number": [2], "kind": [2], "more": ["x"]})
    source = hg.Delta(tmp_path / "t", follow=True)
    _, positions = read_all(source)
    deltalake.write_deltalake(str(tmp_path / "t"), wider, mode="append", schema_mode="merge")
    schema = hg.Delta(tmp_path / "t", version=0).schema()
    reader = source.open(SourceContext("p", "in", 0, 1, positions, schema=schema))
    found = next(one for _ in range(99) if (one := reader.poll()) is not None)
    assert found.batch.to_pylist() == [{"number": 2, "kind": 2}]  # type: ignore[union-attr]
    rows, _ = read_all(hg.Delta(tmp_path / "t"))
    assert {row["number"]: row["more"] for row in rows} == {1: None, 2: "x"}


def test_a_split_far_behind_goes_on_although_another_waits_at_the_newest_version(tmp_path: Path) -> None:
    """The second split has all files: the first one passes all versions, and asks for more whenever it may."""
    append(tmp_path / "t", 0)
    source = hg.Delta(tmp_path / "t", after=0, follow=True, splits=2, poll_interval="1s")
    schema = source.schema()
    for version in range(1, 21, 2):
        append(tmp_path / "t", version)
        deltalake.DeltaTable(str(tmp_path / "t")).alter.set_table_properties({"delta.appendOnly": "false"})
    clock_ms = [0]
    reader = source.open(SourceContext("p", "in", 0, 1, None, clock_ms=lambda: clock_ms[0], schema=schema))
    found: list[Any] = []
    for _ in range(30):
        found.append(reader.poll())
        clock_ms[0] += 1_000
    rows = [row["number"] for one in found if one is not None for row in one.batch.to_pylist()]
    assert rows == list(range(1, 21, 2))


# -- the change feed -------------------------------------------------------------------------------------------------


@pytest.fixture
def fed(tmp_path: Path) -> Path:
    """A table with a change feed and four versions."""
    path = tmp_path / "t"
    append(path, 1, 2, 3, configuration={"delta.enableChangeDataFeed": "true"})
    deltalake.DeltaTable(str(path)).update(new_values={"kind": 9}, predicate="number = 2")
    deltalake.DeltaTable(str(path)).delete("number = 1")
    append(path, 4)
    return path


def test_the_change_feed_is_a_stream_with_changes(fed: Path, tmp_path: Path) -> None:
    rows = check_source(lambda: hg.Delta(fed, version=None, after=0, feed=True), parallelisms=PARALLELISMS)
    assert [(row["op"], row["number"], row["kind"]) for row in rows] == [
        ("update_before", 2, 2),
        ("update_after", 2, 9),
        ("delete", 1, 1),
        ("insert", 4, 1),
    ]
    first, positions = read_all(hg.Delta(fed, version=0, feed=True, key="number", follow=True), polls=1)
    assert {row["op"] for row in first} == {"insert"}
    rest, _ = read_all(hg.Delta(fed, version=0, feed=True, key="number", follow=True), positions)
    assert Counter(row["op"] for row in rest) == {"update_before": 1, "update_after": 1, "delete": 1, "insert": 1}
    p = hg.Pipeline("p", checkpointing=hg.Checkpointing(dir=tmp_path / "c"))
    counts = p.source(hg.Delta(fed, after=0, feed=True, key="number")).changes_as_records()
    assert counts.columns[-1] == "op"


def test_a_change_feed_whose_files_are_gone_is_an_error_with_a_remedy(fed: Path) -> None:
    for path in (fed / "_change_data").iterdir():
        path.unlink()
    source = hg.Delta(fed, after=0, feed=True)
    with pytest.raises(
        UsageError, match=r"changes of version \d+ of .* cannot be read: .* give the source another name"
    ):
        read_all(source)


@pytest.mark.long
def test_a_server_that_is_gone_between_two_versions_is_a_passing_error(tmp_path: Path) -> None:
    url, options = f"s3://{BUCKET}/followed", {"max_retries": "0"}

    class Known(hg.Delta):
        """Knows the table as it was before the server ended."""

        def log(self, version: int | None) -> DeltaLog:
            return tables[self.feed]

    with object_server(tmp_path) as objects:
        if not objects.keeps:
            pytest.skip("this server of objects forgets them when it ends")
        for number in range(2):
            table = pa.table({"number": [number]})
            properties = {"delta.enableChangeDataFeed": "true"}
            deltalake.write_deltalake(
                url,
                table,
                mode="append",
                configuration=properties,
                storage_options={"aws_conditional_put": "etag"},
            )
        tables: dict[bool, DeltaLog] = {}
        histories: list[TableHistory] = []
        for feed in (False, True):
            tables[feed] = hg.Delta(url, storage_options=options).log(None)
            source = Known(url, feed=feed, storage_options=options)
            histories.append(source.history(source.schema()))
        files, changes = histories
        (change,) = changes.added(1)
        objects.fail()
        for step in (lambda: files.added(1), lambda: list(changes.read(change, 0))):
            with pytest.raises(StorageError, match=f"version 1 of Delta table {url}.*error sending request") as caught:
                step()
            assert caught.value.is_transient
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda t: hg.Delta(t / "missing").schema(), "there is no Delta table"),
        (lambda t: hg.Delta(t, version=1, after=1), "give one of them"),
        (lambda t: hg.Delta(t, feed=True, skip_changes=True), "leave skip_changes= out"),
        (lambda t: hg.Delta(t, key="a"), "is for feed=True"),
        (lambda t: hg.Delta(t, feed=True).schema(), "has no change feed"),
        (lambda t: hg.Delta(t, version=7).schema(), "has no version 7 yet; the newest is 0"),
        (lambda t: hg.Delta(t, splits=0), "must be at least 1"),
        (lambda t: hg.Delta(t, poll_interval="0s"), "must be positive"),
        (lambda t: hg.Delta(t, storage_options={"aws_secret_access_key": "hidden"}), "has a secret"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, call: Callable[[Path], object], words: str) -> None:
    append(tmp_path / "t", 1)
    with pytest.raises(UsageError) as caught:
        call(tmp_path / "t")
    assert words in str(caught.value)
