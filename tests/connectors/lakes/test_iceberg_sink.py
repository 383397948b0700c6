"""Iceberg tables: each record once, whatever happens to processes, to the server of objects and to the table."""

from __future__ import annotations

import datetime
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lake_program import (
    PATIENCE_S,
    ROW,
    committer,
    permit,
    prepared,
)

import headgate as hg
from headgate import testing
from headgate.connectors.base import SinkContext
from headgate.connectors.lakes.iceberg import IcebergSink
from headgate.connectors.lakes.iceberg_files import local_path
from headgate.connectors.lakes.iceberg_log import opened_catalog
from headgate.errors import FencedError, StorageError, UsageError
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Committable
from headgate.model.pipeline_identity import PipelineIdentity
from headgate.testing.sinks.fake_pipeline import SCHEMA

pytest.importorskip("pyiceberg")


@pytest.fixture
def properties(tmp_path: Path) -> dict[str, str]:
    """Of a catalog on this machine."""
    return {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": f"file://{tmp_path}/warehouse"}


def table_of(sink: IcebergSink) -> Any:
    found = sink.load()
    assert found is not None
    return found.table


def rows_of(sink: IcebergSink) -> list[dict[str, Any]]:
    found = sink.load()
    return [] if found is None else list(found.table.scan().to_arrow().to_pylist())


def numbers_in(sink: IcebergSink) -> list[int]:
    return sorted(row["number"] for row in rows_of(sink))


def lose_uncommitted(sink: IcebergSink) -> None:
    table = table_of(sink)
    live = {local_path(task.file.file_path) for task in table.scan().plan_files()}
    directory = local_path(table.location())
    assert directory is not None
    for path in directory.glob("data/*.parquet"):
        if path not in live:
            path.unlink()


def checked(
    properties: dict[str, str], name: str = "shop.t", schema: pa.Schema = SCHEMA, **options: Any
) -> IcebergSink:
    sink = IcebergSink(name, properties=properties, create=True, **options)
    sink.check(schema)
    return sink


def made(properties: dict[str, str], name: str = "shop.t", schema: pa.Schema = SCHEMA, **options: Any) -> IcebergSink:
    sink = checked(properties, name, schema, **options)
    sink.make_target(schema)
    return sink


# -- one commit ------------------------------------------------------------------------------------------------------


def test_another_snapshot_between_look_and_commit_is_noticed(
    properties: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library would repeat the commit by itself, without a look at the fence."""
    sink = made(properties)
    one, output = committer(sink), prepared(sink, 1, 1)
    look = type(sink.found()).missing_files

    def claimed_meanwhile(*given: Any) -> Any:
        monkeypatch.undo()
        committer(sink, 2)
        return look(*given)

    monkeypatch.setattr(type(sink.found()), "missing_files", claimed_meanwhile)
    with pytest.raises(FencedError):
        one.commit(permit(1), [output])
    assert numbers_in(sink) == []


def test_removed_files_are_noticed(properties: dict[str, str]) -> None:
    sink = made(properties)
    one, output = committer(sink), prepared(sink, 1, 1)
    assert one.denial(output) == ""
    lose_uncommitted(sink)
    assert "is gone" in one.denial(output)
    with pytest.raises(UsageError, match="which was written and not yet committed") as caught:
        one.commit(permit(1), [output])
    assert caught.value.is_output_gone


def test_expired_snapshots_do_not_matter(properties: dict[str, str]) -> None:
    sink = made(properties)
    output = prepared(sink, 1, 1)
    committer(sink).commit(permit(1), [output])
    table_of(sink).append(pa.table({"number": [5], "text": ["x"]}))
    table = table_of(sink)
    for snapshot in table.metadata.snapshots[:-1]:
        table.maintenance.expire_snapshots().by_id(snapshot.snapshot_id).commit()
    later = prepared(sink, 2, 2)
    committer(sink, 2).commit(permit(2, 2), [output, later])
    assert numbers_in(sink) == [1, 2, 5]


def test_expired_snapshots_do_not_matter_to_a_life_that_took_over(properties: dict[str, str]) -> None:  # K7
    sink = made(properties)
    sink.own("p", "out", PipelineIdentity("1" * 32, "a", "here", 0))
    output = prepared(sink, 1, 1)
    committer(sink).commit(permit(1), [output])
    sink.forget_owner("p", "out")
    sink.own("p", "out", PipelineIdentity("2" * 32, "b", "here", 0))
    table = table_of(sink)
    for snapshot in table.metadata.snapshots[:-1]:
        table.maintenance.expire_snapshots().by_id(snapshot.snapshot_id).commit()
    committer(sink, 2).commit(permit(1, 2), [output])
    assert numbers_in(sink) == [1]


def test_a_table_with_other_partitions_now_is_not_written_to(properties: dict[str, str]) -> None:
    sink = made(properties)
    one, output = committer(sink), prepared(sink, 1, 1)
    with table_of(sink).update_spec() as spec:
        spec.add_identity("text")
    with pytest.raises(UsageError, match="was given other partitions while a pipeline wrote to it"):
        one.commit(permit(1), [output])


# -- types and columns -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("partitions", [(), ("text", "moment"), ("local", "day", "price", "flag", "whole")], ids=str)
def test_values_come_back_as_they_were(properties: dict[str, str], tmp_path: Path, partitions: tuple[str, ...]) -> None:
    rows = [ROW, dict.fromkeys(ROW)]
    sink = IcebergSink("shop.t", properties=properties, create=True, partition_by=partitions)
    p = hg.Pipeline("p", checkpointing=hg.Checkpointing(dir=tmp_path / "c"))
    p.source(hg.FromRows(rows)).sink(sink, name="out")
    testing.run(p, timeout_s=PATIENCE_S)
    assert sorted(rows_of(sink), key=lambda row: row["whole"] is None) == rows
    assert [row["text"] for row in table_of(sink).scan("whole = 7").to_arrow().to_pylist()] == [ROW["text"]]
    assert table_of(sink).scan("whole = 8").to_arrow().num_rows == 0


def test_partitions_by_transforms_are_those_of_the_library(properties: dict[str, str]) -> None:
    """The library computes each value of a file from its bounds when it plans a scan."""
    moments = [-1, 0, 1, 86_399_999_999, 86_400_000_000, 1_706_933_106_789_012, None]
    schema = pa.schema([("at", pa.timestamp("us", "UTC")), ("on", pa.date32()), ("by", pa.large_string())])
    days = [None if us is None else us // 86_400_000_000 for us in moments]
    texts = ["äöü", "äö", "ä", "", "äöx", "x", None]
    for number, parts in enumerate(
        (["day(at)", "month(on)"], ["hour(at)", "year(on)"], ["month(at)", "truncate(2, by)"])
    ):
        sink = checked(properties, f"shop.t{number}", schema, partition_by=[*parts])
        sink.make_target(schema)
        writer = sink.open(SinkContext("p", "out", 0, 1, Generation(1), schema))
        writer.write(
            pa.record_batch([pa.array(moments, schema[0].type), pa.array(days, pa.date32()), texts], schema=schema)
        )
        payload = writer.seal(CheckpointId(1)).prepare()
        assert payload is not None
        committer(sink).commit(permit(1), [Committable("out", CheckpointId(1), 0, Generation(1), payload)])
        table = table_of(sink)
        fields = table.spec().fields
        for task in table.scan().plan_files():
            rows = pq.read_table(local_path(task.file.file_path)).to_pylist()
            for at, part in enumerate(fields):
                source = table.schema().find_field(part.source_id)
                found = {part.transform.transform(source.field_type)(inside(row[source.name])) for row in rows}
                assert found == {task.file.partition[at]}
    if importlib.util.find_spec("pyiceberg_core") is None:
        with pytest.raises(UsageError, match="need the package pyiceberg-core"):
            made(properties, "shop.buckets", schema, partition_by="bucket(4, by)")


def inside(value: Any) -> Any:
    """Return a value as Iceberg's transforms take it."""
    from pyiceberg.utils.datetime import date_to_days, datetime_to_micros

    if isinstance(value, datetime.datetime):
        return datetime_to_micros(value)
    return date_to_days(value) if isinstance(value, datetime.date) else value


def written(sink: IcebergSink, row: dict[str, Any], schema: pa.Schema) -> list[dict[str, Any]]:
    sink.make_target(schema)
    writer = sink.open(SinkContext("p", "out", 0, 1, Generation(1), schema))
    writer.write(pa.RecordBatch.from_pylist([row], schema=schema))
    payload = writer.seal(CheckpointId(1)).prepare()
    assert payload is not None
    committer(sink).commit(permit(1), [Committable("out", CheckpointId(1), 0, Generation(1), payload)])
    return rows_of(sink)


def test_a_time_of_day_has_microseconds_and_no_less(properties: dict[str, str]) -> None:
    schema = pa.schema([("at", pa.time64("ns"))])
    row = {"at": 3_000}
    found = written(checked(properties, schema=schema), row, schema)
    assert [one["at"].microsecond for one in found] == [3]
    sink = checked(properties, "shop.fine", schema)
    with pytest.raises(UsageError, match="a value of column 'at' does not fit the table"):
        written(sink, {"at": 3_001}, schema)


def test_columns_of_other_tables_find_theirs_after_a_renaming(properties: dict[str, str]) -> None:
    sink = made(properties)
    committer(sink).commit(permit(1), [prepared(sink, 1, 1)])
    with table_of(sink).update_schema() as update:
        update.rename_column("text", "words")
    assert rows_of(sink) == [{"number": 1, "words": "1"}]


def test_a_column_that_is_never_null_gets_no_null(properties: dict[str, str]) -> None:
    required = pa.schema([pa.field("number", pa.int64(), nullable=False), pa.field("text", pa.string())])
    catalog = opened_catalog("default", tuple(sorted(properties.items())))
    catalog.create_namespace("shop")
    catalog.create_table("shop.t", required)
    sink = IcebergSink("shop.t", properties=properties)
    with pytest.raises(UsageError, match="column 'number' of the table is never null, and a record has null there"):
        written(sink, {"number": None, "text": "x"}, SCHEMA)
    with pytest.raises(UsageError, match="is never null, and the records have none"):
        sink.check(pa.schema([("text", pa.large_string())]))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: IcebergSink("orders"), "must be a table with its namespace, such as 'shop.orders'"),
        (lambda: IcebergSink("a.b", partition_by="x"), "give create=True"),
        (lambda: IcebergSink("a.b", create=True, partition_by="week(x)"), "has no such transform"),
        (lambda: IcebergSink("a.b", properties={"s3.secret-access-key": "x"}), "has a secret, 's3.secret-access-key'"),
        (
            lambda: IcebergSink("a.b", properties={"uri": "postgresql://me:hidden@host/db"}),
            "has a password or key in it",
        ),
    ],
)
def test_options_that_cannot_be_are_refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        call()
    assert words in str(caught.value)
    assert "hidden" not in str(caught.value)


def test_a_table_that_is_missing_is_refused(properties: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"there is no Iceberg table shop\.t of catalog default; give create=True"):
        IcebergSink("shop.t", properties=properties).check(SCHEMA)


def test_a_catalog_that_is_configured_nowhere_is_not_asked_again() -> None:
    with pytest.raises(StorageError, match=r"cannot read Iceberg table shop.orders of catalog nowhere") as caught:
        IcebergSink("shop.orders", catalog="nowhere").load()
    assert not caught.value.is_transient


@pytest.mark.parametrize("partition", ["text", "truncate(4, text)"])
def test_a_null_and_the_text_null_are_partitions_of_their_own(properties: dict[str, str], partition: str) -> None:
    sink = IcebergSink("shop.t", properties=properties, create=True, partition_by=partition)
    sink.check(SCHEMA)
    sink.make_target(SCHEMA)
    writer = sink.open(SinkContext("p", "out", 0, 1, Generation(1), SCHEMA))
    writer.write(pa.record_batch([[1, 2, 3], ["null", None, "null"]], schema=SCHEMA))
    payload = writer.seal(CheckpointId(1)).prepare()
    committer(sink).commit(permit(1), [Committable("out", CheckpointId(1), 0, Generation(1), payload)])
    assert sorted(table_of(sink).scan("text = 'null'").to_arrow().column("number").to_pylist()) == [1, 3]
    assert table_of(sink).scan("text is null").to_arrow().column("number").to_pylist() == [2]


def test_a_date_that_the_library_does_not_know_is_refused_by_name(properties: dict[str, str]) -> None:
    schema = pa.schema([("day", pa.date32())])
    sink = IcebergSink("shop.t", properties=properties, create=True)
    sink.check(schema)
    sink.make_target(schema)
    writer = sink.open(SinkContext("p", "out", 0, 1, Generation(1), schema))
    writer.write(pa.record_batch([pa.array([3_000_000], pa.int32()).cast(pa.date32())], schema=schema))
    with pytest.raises(UsageError, match="is not in the years 1 to 9999"):
        writer.seal(CheckpointId(1)).prepare()
