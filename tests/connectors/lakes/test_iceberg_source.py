"""Iceberg tables as sources: every row once, at any restart, and what is gone is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lake_program import PATIENCE_S, ROW
from tests.connectors.source_reading import read_over_subtasks

import headgate as hg
from headgate import testing
from headgate.connectors.base import SourceContext
from headgate.errors import UsageError
from headgate.testing import check_source

catalogs = pytest.importorskip("pyiceberg.catalog")
LongType = pytest.importorskip("pyiceberg.types").LongType


class Place:
    """A table with one integer column."""

    def __init__(self, directory: Path) -> None:
        self.properties = {
            "type": "sql",
            "uri": f"sqlite:///{directory}/catalog.db",
            "warehouse": f"file://{directory}/warehouse",
        }
        self.catalog = catalogs.load_catalog("default", **self.properties)
        self.catalog.create_namespace("shop")
        self.table = self.catalog.create_table("shop.t", pa.schema([("number", pa.int64())]))

    def append(self, *numbers: int) -> int:
        self.table.append(pa.table({"number": list(numbers)}))
        return int(self.table.current_snapshot().snapshot_id)

    def source(self, **options: Any) -> hg.Iceberg:
        return hg.Iceberg("shop.t", properties=self.properties, **options)

    def read(
        self, positions: dict[str, bytes] | None = None, polls: int = 1_000, **options: Any
    ) -> tuple[list[int], dict[str, bytes]]:
        """Return the numbers that come until there are no more for now, and the positions then."""
        source = self.source(**options)
        reader = source.open(SourceContext("p", "in", 0, 1, positions, schema=source.schema()))
        found: list[int] = []
        for _ in range(polls):
            if reader.is_finished() or (batch := reader.poll()) is None:
                break
            found += [row["number"] for row in batch.batch.to_pylist()]  # type: ignore[union-attr]
        return sorted(found), reader.positions()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_the_source_passes_the_kit(place: Place) -> None:
    for start in range(0, 20, 5):
        place.append(*range(start, start + 5))
    rows = check_source(lambda: place.source(splits=3), parallelisms=(2,))
    assert sorted(row["number"] for row in rows) == list(range(20))


def test_a_snapshot_is_read_or_what_follows_it(place: Place) -> None:
    snapshots = [place.append(*range(start, start + 5)) for start in range(0, 20, 5)]
    for options, expected in (
        ({"snapshot": snapshots[1]}, range(10)),
        ({"after": snapshots[0]}, range(5, 20)),
    ):
        for polls in range(1, 5):
            begun, positions = place.read(polls=polls, splits=2, **options)
            rest, _ = place.read(positions, splits=2, **options)
            assert sorted(begun + rest) == list(expected)


def test_a_table_is_followed_from_its_first_row(place: Place) -> None:
    found, positions = place.read(follow=True)
    assert found == []
    place.append(1)
    place.append(2, 3)
    found, positions = place.read(positions, follow=True)
    assert found == [1, 2, 3]
    place.append(4)
    assert place.read(positions, follow=True)[0] == [4]


def test_snapshots_that_delete_rows_stop_or_are_skipped(place: Place) -> None:
    place.append(1, 2)
    _, positions = place.read(follow=True)
    place.table.delete("number = 1")
    place.append(3)
    with pytest.raises(UsageError, match=r"deletes or rewrites rows, .* give skip_changes=True"):
        place.read(positions, follow=True)
    assert place.read(positions, follow=True, skip_changes=True)[0] == [3]
    assert place.read()[0] == [2, 3]


def test_expired_snapshots_below_the_position_are_an_error(place: Place) -> None:
    place.append(1)
    _, positions = place.read(follow=True)
    first = place.table.current_snapshot().snapshot_id
    second = place.append(2)
    place.append(3)
    for snapshot in (first, second):
        place.table.maintenance.expire_snapshots().by_id(snapshot).commit()
    with pytest.raises(UsageError, match="has expired, or the table was rolled back"):
        place.read(positions, follow=True)


def test_values_come_as_they_are(place: Place, tmp_path: Path) -> None:
    rows = [ROW, dict.fromkeys(ROW)]
    sink = hg.IcebergSink("shop.all", properties=place.properties, create=True, partition_by=["text", "day"])
    p = hg.Pipeline("p", checkpointing=hg.Checkpointing(dir=tmp_path / "c"))
    p.source(hg.FromRows(rows)).sink(sink, name="out")
    testing.run(p, timeout_s=PATIENCE_S)
    found = read_over_subtasks(hg.Iceberg("shop.all", properties=place.properties), 1)
    assert sorted(found, key=lambda row: row["whole"] is None) == rows


def test_what_cannot_be_is_refused(place: Place) -> None:
    with pytest.raises(UsageError, match=r"there is no Iceberg table shop\.missing"):
        hg.Iceberg("shop.missing", properties=place.properties).schema()
    with pytest.raises(UsageError, match="has no snapshot 7; it may have expired"):
        place.source(snapshot=7).schema()
    with pytest.raises(UsageError, match="give one of them"):
        place.source(snapshot=1, after=2)
    with pytest.raises(UsageError, match="has a secret"):
        hg.Iceberg("a.b", properties={"token": "hidden"})


def test_columns_are_followed_by_their_ids(place: Place) -> None:
    place.append(1)
    source = place.source(follow=True, poll_interval="1ms")
    schema = source.schema()

    def read(positions: dict[str, bytes] | None) -> tuple[list[int | None], dict[str, bytes]]:
        reader = source.open(SourceContext("p", "in", 0, 1, positions, schema=schema))
        found: list[int | None] = []
        while (batch := reader.poll()) is not None:
            found += [row["number"] for row in batch.batch.to_pylist()]  # type: ignore[union-attr]
        return found, dict(reader.positions())

    found, positions = read(None)
    assert found == [1]
    with place.table.update_schema() as update:
        update.rename_column("number", "renamed")
    place.table.append(pa.table({"renamed": [2]}))
    found, positions = read(positions)
    assert found == [2]
    with place.table.update_schema() as update:
        update.add_column("number", LongType())
    place.table.append(pa.table({"renamed": [3], "number": [99]}))
    found, positions = read(positions)
    assert found == [3]
    with place.table.update_schema(allow_incompatible_changes=True) as update:
        update.delete_column("renamed")
    place.table.append(pa.table({"number": [99]}))
    assert read(positions)[0] == [None]


def test_a_value_wider_than_the_column_was_is_an_error_with_a_remedy(place: Place) -> None:
    table = place.catalog.create_table("shop.narrow", pa.schema([("number", pa.int32())]))
    source = hg.Iceberg("shop.narrow", properties=place.properties, follow=True)
    reader = source.open(SourceContext("p", "in", 0, 1, None, schema=source.schema()))
    with table.update_schema() as update:
        update.update_column("number", LongType())
    table.append(pa.table({"number": [2**40]}))
    with pytest.raises(
        UsageError, match="'number' is int32, which cannot hold int 1099511627776; if the table was given"
    ):
        reader.poll()


def test_lists_and_maps_that_are_null_stay_so(place: Place, tmp_path: Path) -> None:
    inner = pa.struct([("x", pa.list_(pa.struct([("y", pa.int64())])))])
    schema = pa.schema([("l", pa.list_(inner)), ("m", pa.map_(pa.string(), inner))])
    rows = [
        {"l": None, "m": None},
        {"l": [], "m": []},
        {"l": [{"x": None}, {"x": []}, None], "m": [("k", {"x": None}), ("l", None)]},
        {"l": [{"x": [{"y": 1}, None]}], "m": [("k", {"x": [{"y": 1}]})]},
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema), tmp_path / "rows.parquet")
    place.catalog.create_table("shop.nested", schema).add_files([str(tmp_path / "rows.parquet")])
    source = hg.Iceberg("shop.nested", properties=place.properties, splits=1)
    found = check_source(lambda: source, parallelisms=(1,))
    as_entries = [{**row, "m": row["m"] and [{"key": key, "value": value} for key, value in row["m"]]} for row in rows]
    assert found == as_entries
