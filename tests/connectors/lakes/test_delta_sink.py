"""Delta tables: each record once, whatever happens to processes, to the server of objects and to the table."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from lake_program import (
    PATIENCE_S,
    ROW,
    committer,
    permit,
    prepared,
)
from lakes import DeltaTables, changing, numbers_sink, ops, output, write
from tests.servers.objects import BUCKET, ObjectServer

import headgate as hg
from headgate import testing
from headgate.connectors.base import SinkContext
from headgate.connectors.lakes.data_files import TableWriter, decode_output
from headgate.connectors.lakes.delta import DeltaSink
from headgate.errors import StorageError, UsageError
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Committable
from headgate.testing import Collect, Target, run
from headgate.testing.sinks.fake_pipeline import SCHEMA, FakePipeline

deltalake = pytest.importorskip("deltalake")


def rows_of(sink: DeltaSink) -> list[dict[str, Any]]:
    table = sink.load()
    return [] if table is None else list(table.table.to_pyarrow_table().to_pylist())


def checked(where: str | Path, schema: pa.Schema = SCHEMA, **options: Any) -> DeltaSink:
    sink = DeltaSink(where, create=True, **options)
    sink.check(schema)
    return sink


def made(where: str | Path, schema: pa.Schema = SCHEMA, **options: Any) -> DeltaSink:
    sink = checked(where, schema, **options)
    sink.make_target(schema)
    return sink


def target_at(directory: Path) -> Target:
    sink = checked(directory)
    return Target(sink, lambda: rows_of(sink))


@pytest.mark.long
def test_a_server_that_is_gone_between_the_steps_of_a_commit_is_a_passing_error(objects: ObjectServer) -> None:
    sink = made(f"s3://{BUCKET}/gone-between")
    output = decode_output(prepared(sink, 1, 1))
    table = sink.found()
    if not objects.keeps:
        pytest.skip("this server of objects forgets them when it ends")
    objects.fail()
    try:
        for step in (lambda outputs, life: table.committed(outputs, [life]), table.append):
            with pytest.raises(StorageError, match=r"Delta table s3://.*Connection refused") as caught:
                step([output], "life")
            assert caught.value.is_transient
            assert "\n" not in str(caught.value)
            assert "\x1b" not in str(caught.value)
    finally:
        objects.heal()


class LosesFirst:
    """Files of a table in a store that says of the first one that it is complete, and has it not."""

    def __init__(self, files: Any) -> None:
        self._files, self._is_lost = files, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def data_file(self, path: str, *described: Any) -> Any:
        if not self._is_lost:
            self._is_lost = True
            self._files.remove(path)
        return self._files.data_file(path, *described)


@pytest.mark.parametrize("buffer_bytes", [1 << 20, 1])
def test_a_file_that_the_store_has_not_after_all_is_not_promised(objects: ObjectServer, buffer_bytes: int) -> None:
    """As versitygw 1.8 answers a repeated request to complete an upload after it was killed during the first one."""
    sink = made(f"s3://{BUCKET}/not-after-all-{buffer_bytes}")
    context = SinkContext("p", "out", 0, 1, Generation(1), SCHEMA)
    writer = TableWriter(LosesFirst(sink.file_format()), context, buffer_bytes, 1 << 20)
    writer.write(pa.record_batch([[1], ["a"]], schema=SCHEMA))
    sealed = writer.seal(CheckpointId(1))
    with pytest.raises(StorageError, match=r"part-.*\.parquet is not there after it was written") as caught:
        sealed.prepare()
    is_in_memory = buffer_bytes > 1
    assert caught.value.is_transient == is_in_memory
    if not is_in_memory:
        with pytest.raises(StorageError, match="not there after it was written"):
            sealed.prepare()
        return
    payload = sealed.prepare()
    assert payload is not None
    committer(sink).commit(permit(1), [Committable("out", CheckpointId(1), 0, Generation(1), payload)])
    assert numbers_in(sink) == [1]


# -- one commit ------------------------------------------------------------------------------------------------------


def numbers_in(sink: Any) -> list[int]:
    return sorted(row["number"] for row in rows_of(sink))


def test_a_vacuum_in_between_is_noticed(tmp_path: Path) -> None:
    sink = made(tmp_path / "t")
    one, output = committer(sink), prepared(sink, 1, 1)
    assert one.denial(output) == ""
    deltalake.DeltaTable(str(tmp_path / "t")).vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)
    assert "is gone" in one.denial(output)
    with pytest.raises(
        UsageError, match=r"is gone .1 in all., which was written and not yet committed; a vacuum"
    ) as caught:
        one.commit(permit(1), [output])
    assert caught.value.is_output_gone
    assert numbers_in(sink) == []


def test_a_log_that_was_cleaned_up_still_says_what_is_committed(tmp_path: Path) -> None:
    sink = made(tmp_path / "t")
    output = prepared(sink, 1, 1)
    committer(sink).commit(permit(1), [output])
    table = deltalake.DeltaTable(str(tmp_path / "t"))
    table.create_checkpoint()
    for entry in (tmp_path / "t" / "_delta_log").glob("*.json"):
        if int(entry.stem) < table.version():
            entry.unlink()
    later = prepared(sink, 2, 2)
    committer(sink, 2).commit(permit(2, 2), [output, later])
    assert numbers_in(sink) == [1, 2]


def test_a_table_that_forgets_transactions_is_refused(tmp_path: Path) -> None:
    name = "delta.setTransactionRetentionDuration"
    sink = made(tmp_path / "t")
    one, output = committer(sink), prepared(sink, 1, 1)
    deltalake.DeltaTable(str(tmp_path / "t")).alter.set_table_properties({name: "interval 7 days"})
    with pytest.raises(UsageError, match=f"has the property {name}"):
        sink.check(SCHEMA)
    with pytest.raises(UsageError, match=f"has the property {name}"):
        one.commit(permit(1), [output])


def test_a_table_with_rules_for_its_rows_is_refused(tmp_path: Path) -> None:
    sink = made(tmp_path / "t")
    deltalake.DeltaTable(str(tmp_path / "t")).alter.add_constraint({"positive": "number > 0"})
    with pytest.raises(UsageError, match=r"has delta.constraints.positive, which DeltaSink does not keep"):
        sink.check(SCHEMA)


def test_a_table_that_was_replaced_is_not_written_to(tmp_path: Path) -> None:
    sink = made(tmp_path / "t")
    one, output = committer(sink), prepared(sink, 1, 1)
    deltalake.write_deltalake(str(tmp_path / "new"), pa.table({"number": [5], "text": ["x"]}))
    (tmp_path / "t").rename(tmp_path / "old")
    (tmp_path / "new").rename(tmp_path / "t")
    with pytest.raises((UsageError, StorageError)):
        one.commit(permit(1), [output])
    with pytest.raises(UsageError, match="does not know sink 'p:out' any more"):
        one.commit(permit(1), [output])


# -- files -----------------------------------------------------------------------------------------------------------


def test_files_are_as_large_as_asked_and_hold_what_was_written_early(tmp_path: Path) -> None:
    sink = made(tmp_path / "t", buffer_bytes=2_000, file_bytes=4_000)
    one = committer(sink)
    output = prepared(sink, 1, *range(2_000))
    writer = sink.open(SinkContext("p", "out", 1, 2, Generation(1), SCHEMA))
    for start in range(0, 4_000, 100):
        numbers = list(range(2_000 + start, 2_100 + start))
        writer.write(pa.record_batch([numbers, [str(n) for n in numbers]], schema=SCHEMA))
    payload = writer.seal(CheckpointId(1)).prepare()
    assert payload is not None
    many = replace(output, subtask_index=1, payload=payload)
    assert len(decode_output(many).files) > 2
    one.commit(permit(1), [output, many])
    assert numbers_in(sink) == list(range(6_000))


def test_a_disk_that_fails_while_output_is_prepared_loses_none_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written early is not in memory any more, so that a snapshot that tries again must not have the rest."""
    sink = made(tmp_path / "t", buffer_bytes=20)
    writer = sink.open(SinkContext("p", "out", 0, 1, Generation(1), SCHEMA))
    writer.write(pa.record_batch([[1, 2], ["1", "2"]], schema=SCHEMA))
    writer.write(pa.record_batch([[3], ["3"]], schema=SCHEMA))
    sealed = writer.seal(CheckpointId(1))

    def fails(path: Path) -> None:
        raise OSError("no room")

    with monkeypatch.context() as disk:
        disk.setattr("headgate.connectors.lakes.data_files.sync_file", fails)
        with pytest.raises(StorageError, match="no room"):
            sealed.prepare()
    with pytest.raises(StorageError, match="no room") as caught:
        sealed.prepare()
    assert not caught.value.is_transient
    writer.close()


def test_what_is_abandoned_leaves_no_file(tmp_path: Path) -> None:
    sink = made(tmp_path / "t", buffer_bytes=10)
    writer = sink.open(SinkContext("p", "out", 0, 1, Generation(1), SCHEMA))
    writer.write(pa.record_batch([[1], ["1"]], schema=SCHEMA))
    sealed = writer.seal(CheckpointId(1))
    writer.write(pa.record_batch([[2], ["2"]], schema=SCHEMA))
    assert len(list((tmp_path / "t").glob("*.parquet"))) == 2
    writer.close()
    assert sealed.prepare() is None
    assert list((tmp_path / "t").glob("*.parquet")) == []


# -- types and columns -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("partitions", [(), ("text", "moment"), ("local", "day", "price", "flag", "whole")])
def test_values_come_back_as_they_were(tmp_path: Path, partitions: tuple[str, ...]) -> None:
    rows = [ROW, dict.fromkeys(ROW)]
    p = hg.Pipeline("p", checkpointing=hg.Checkpointing(dir=tmp_path / "c"))
    p.source(hg.FromRows(rows)).sink(hg.DeltaSink(tmp_path / "t", create=True, partition_by=partitions), name="out")
    testing.run(p, timeout_s=PATIENCE_S)
    key = lambda row: row["whole"] is None  # noqa: E731
    found = deltalake.DeltaTable(str(tmp_path / "t")).to_pyarrow_table().to_pylist()
    assert sorted(found, key=key) == rows
    by_polars = pl.read_delta(str(tmp_path / "t")).to_dicts()
    assert [by_polars[0].keys()] == [rows[0].keys()]
    assert sorted(by_polars, key=key) == rows


def test_partitions_may_have_any_name(tmp_path: Path) -> None:
    p = hg.Pipeline("p", checkpointing=hg.Checkpointing(dir=tmp_path / "c"))
    rows = [{"n": 1, "__row": "a", "row": 1, "1": "x"}, {"n": 2, "__row": "b", "row": 1, "1": "x"}]
    sink = hg.DeltaSink(tmp_path / "t", create=True, partition_by=("__row", "row", "1"))
    p.source(hg.FromRows(rows)).sink(sink, name="out")
    testing.run(p, timeout_s=PATIENCE_S)
    assert sorted(deltalake.DeltaTable(str(tmp_path / "t")).to_pyarrow_table().to_pylist(), key=str) == rows


@pytest.mark.parametrize("dtype", [pa.duration("us"), pa.time64("ns"), pa.large_list(pa.duration("us"))], ids=str)
def test_types_without_counterpart_are_refused(tmp_path: Path, dtype: pa.DataType) -> None:
    with pytest.raises(UsageError, match=r"cannot write column 'x' of type .*; cast it to a number or a text before"):
        checked(tmp_path / "t", pa.schema([("x", dtype)]))


def test_names_that_are_one_to_delta_are_refused_when_the_pipeline_is_built(tmp_path: Path) -> None:
    twins = pa.schema([("number", pa.int64()), ("Number", pa.int64())])
    with pytest.raises(UsageError, match="cannot write both 'number' and 'Number': to tables of Delta these are one"):
        checked(tmp_path / "t", twins)
    made(tmp_path / "t", pa.schema([("Text", pa.large_string()), ("number", pa.int64())]))
    with pytest.raises(UsageError, match="both 'Text' and 'text'"):
        checked(tmp_path / "t", evolve=True)


def test_a_column_of_another_type_is_refused(tmp_path: Path) -> None:
    narrow = pa.schema([("number", pa.int32()), ("text", pa.large_string())])
    checked(tmp_path / "t", narrow).make_target(narrow)
    with pytest.raises(UsageError, match="column 'number' of DeltaSink has type int32 in the table, and records have"):
        checked(tmp_path / "t")


def test_options_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="give create=True"):
        DeltaSink(tmp_path, partition_by="a")
    with pytest.raises(UsageError, match=r"there is no Delta table .* give create=True"):
        DeltaSink(tmp_path / "missing").check(SCHEMA)
    with pytest.raises(UsageError, match="names column 'x'; the records have number, text"):
        checked(tmp_path / "t", partition_by="x")
    with pytest.raises(UsageError, match="has a secret, 'aws_secret_access_key'; leave it out"):
        DeltaSink("s3://b/t", storage_options={"aws_secret_access_key": "hidden"})
    with pytest.raises(UsageError, match="file_bytes=0"):
        DeltaSink(tmp_path, file_bytes=0)


def test_a_partition_value_that_is_too_long_is_refused(tmp_path: Path) -> None:
    sink = made(tmp_path / "t", partition_by="text")
    writer = sink.open(SinkContext("p", "out", 0, 1, Generation(1), SCHEMA))
    writer.write(pa.record_batch([[1], ["x" * 300]], schema=SCHEMA))
    with pytest.raises(UsageError, match="too long for the name of a directory"):
        writer.seal(CheckpointId(1)).prepare()


def test_going_back_writes_what_follows(tmp_path: Path) -> None:
    """K7: a generation that went back numbers its checkpoints as an earlier one did."""
    target = target_at(tmp_path / "t")
    pipeline = FakePipeline(target, 3, "went back")
    run = pipeline.start(1)
    pipeline.advance(run)
    older = pipeline.completed
    pipeline.advance(run)
    newest = pipeline.completed.position
    pipeline.go_back_to(older)
    run = pipeline.start(1)
    run.position = newest
    run.write(3)
    done = run.prepare(pipeline.next_id())
    pipeline.complete(done)
    run.commit(done)
    assert sorted(row["number"] for row in target.read()) == list(range(9))


def written(where: Path, table: pa.Table, **options: Any) -> Any:
    sink = made(where, table.schema, **options)
    writer = sink.open(SinkContext("p", "out", 0, 1, Generation(1), table.schema))
    writer.write(table.combine_chunks().to_batches()[0])
    payload = writer.seal(CheckpointId(1)).prepare()
    committer(sink).commit(permit(1), [Committable("out", CheckpointId(1), 0, Generation(1), payload)])
    return deltalake.DeltaTable(str(where)).to_pyarrow_dataset()


AT = dt.datetime(2024, 1, 1, 0, 0, 0, 999_999)
LONG = "x" * 100


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (pa.float64(), [1.5, float("nan")]),
        (pa.float64(), [-0.0, float("inf")]),
        (pa.bool_(), [True, None]),
        (pa.timestamp("us"), [AT, dt.datetime(1, 1, 1)]),
        (
            pa.timestamp("us", "UTC"),
            [AT.replace(tzinfo=dt.UTC), dt.datetime(1969, 12, 31, 23, 59, 59, 1, tzinfo=dt.UTC)],
        ),
        (pa.timestamp("us"), [dt.datetime.max, None]),
        (pa.decimal128(9, 2), [Decimal("1.23"), Decimal("-9999999.99")]),
        (pa.decimal128(37, 2), [Decimal("1.23"), Decimal(-(10**34))]),
        (pa.large_string(), [LONG, LONG + "z"]),
        (pa.large_string(), ["\U0010ffff" * 40, "a"]),
        (pa.large_string(), [None, None]),
        (pa.large_binary(), [b"a", b""]),
        (pa.struct([("x", pa.int64())]), [{"x": 1}, {"x": None}]),
        (pa.struct([("x", pa.float64())]), [{"x": 1.0}, None]),
        (pa.struct([("x", pa.large_list(pa.int64()))]), [{"x": [1]}, None]),
        (pa.large_list(pa.struct([("x", pa.int64())])), [[{"x": 1}], None]),
        (pa.date32(), [dt.date(1, 1, 1), dt.date.max]),
    ],
    ids=lambda value: str(value) if isinstance(value, pa.DataType) else "",
)
def test_readers_that_look_at_statistics_miss_no_row(dtype: pa.DataType, values: list[Any], tmp_path: Path) -> None:
    table = pa.table({"number": pa.array([1, 2]), "x": pa.array(values, dtype)})
    found = written(tmp_path / "t", table)
    assert found.to_table(filter=pc.field("number") == 1).num_rows == 1
    if pa.types.is_nested(dtype):
        return
    for value in values:
        if value is not None and value == value:
            literal = pa.scalar(value, found.schema.field("x").type)
            assert found.to_table(filter=pc.field("x") == literal).num_rows == 1, value
            by_polars = pl.scan_delta(str(tmp_path / "t")).filter(pl.col("x") == pl.lit(value)).collect()
            assert by_polars.height == 1, value


def test_times_of_all_years_and_dates_of_later_ones_are_written(tmp_path: Path) -> None:
    moments = [dt.datetime(1, 1, 1), dt.datetime(999, 1, 1)]
    written(tmp_path / "t", pa.table({"at": pa.array(moments, pa.timestamp("us")), "n": [1, 2]}), partition_by="at")
    assert sorted(pl.read_delta(str(tmp_path / "t"))["at"].to_list()) == moments
    far = pa.array([3_000_000], pa.int32()).cast(pa.date32())
    assert written(tmp_path / "far", pa.table({"day": far})).to_table().column("day").cast(pa.int32()).to_pylist() == [
        3_000_000
    ]


@pytest.fixture
def tables(tmp_path: Path) -> DeltaTables:
    return DeltaTables(tmp_path)


def test_a_table_that_was_changed_meanwhile_is_not_merged_into(tables: DeltaTables, tmp_path: Path) -> None:
    sink = numbers_sink(tables)
    one, late = committer(sink), prepared(sink, 1, 1)
    late = replace(late, payload=prepared(numbers_sink(tables, "other"), 1, 1).payload)
    table = deltalake.DeltaTable(str(tmp_path / "t"))
    table.alter.set_table_properties({"delta.appendOnly": "true"})
    with pytest.raises(UsageError, match=r"has the property delta.appendOnly, with which DeltaSink\(upsert=\)"):
        one.commit(permit(1), [late])


def test_a_change_feed_has_what_a_merge_did(tables: DeltaTables, tmp_path: Path) -> None:
    first = ops(("insert", 1, 1), ("insert", 2, 2))
    sink = changing(tables, first.schema, settings={"delta.enableChangeDataFeed": "true"})
    write(sink, 1, first)
    write(sink, 2, ops(("update_after", 1, 3), ("delete", 2, None), ("insert", 3, 3)))
    p = hg.Pipeline("feed")
    feed = p.source(hg.Delta(tmp_path / "t", feed=True, key="id", after=tables.version() - 1))
    found = Collect(tmp_path / "found")
    feed.sink(found)
    run(p)
    assert sorted((row["op"], row["id"], row["n"]) for row in found.rows()) == [
        ("delete", 2, 2),
        ("insert", 3, 3),
        ("update_after", 1, 3),
        ("update_before", 1, 1),
    ]


def test_files_of_a_merge_are_durable_before_it_counts(
    tables: DeltaTables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[Path] = set()
    sink = numbers_sink(tables, partition_by="text")
    one, late = committer(sink), prepared(sink, 1, 1, 2)
    monkeypatch.setattr("headgate.connectors.lakes.delta_log.sync_file", synced.add)
    monkeypatch.setattr("headgate.connectors.lakes.delta_log.sync_directory", synced.add)
    one.commit(permit(1), [late])
    log = tmp_path / "t" / "_delta_log"
    files = set((tmp_path / "t").glob("text=*/*.parquet"))
    assert len(files) == 2
    assert files | {path.parent for path in files} | {log} <= synced
    assert log / f"{tables.version():020d}.json" in synced


def test_a_merge_that_a_power_cut_tore_is_noticed_and_can_be_repeated(tables: DeltaTables, tmp_path: Path) -> None:
    sink = numbers_sink(tables)
    outputs = [prepared(sink, 1, 1), prepared(sink, 2, 2)]
    one = committer(sink)
    one.commit(permit(1), outputs[:1])
    before = set((tmp_path / "t").glob("*.parquet"))
    one.commit(permit(2), outputs[1:])
    (torn,) = set((tmp_path / "t").glob("*.parquet")) - before
    torn.write_bytes(b"")
    with pytest.raises(UsageError, match=r"damaged file: .*parquet has 0 bytes, and the log says \d+; if a power cut"):
        committer(sink, 2)
    (tmp_path / "t" / "_delta_log" / f"{tables.version():020d}.json").unlink()
    committer(sink, 2).commit(permit(2, 2), outputs)
    assert [row["number"] for row in tables.rows()] == [1, 2]


def test_what_cannot_be_is_refused_when_the_pipeline_is_built(tmp_path: Path) -> None:
    p = hg.Pipeline("p")
    rows = p.source(hg.FromRows([{"id": 1, "group": 2, "share": 0.5, "price": Decimal("1.50")}]))
    counts = rows.key_by("id").agg(n=pl.len())
    for name, setting in (("fixed", "delta.appendOnly"), ("vectors", "delta.enableDeletionVectors")):
        table = pa.table({"id": [1], "n": [1]})
        deltalake.write_deltalake(str(tmp_path / name), table, configuration={setting: "true"})
    where = tmp_path / "t"
    for stream, given, said in (
        (counts, {"upsert": "n"}, r"DeltaSink\(upsert=\['n'\]\) needs changes with this key, and .* is id"),
        (rows, {"upsert": "share"}, "'share' has type double, which cannot be a key"),
        (rows, {"upsert": "other"}, "there is no column 'other'; the columns are id, group, share, price"),
        (rows, {"upsert": "id", "partition_by": "price"}, "partitioned by 'price', a decimal"),
        (counts, {"upsert": "id", "url": tmp_path / "fixed"}, "has the property delta.appendOnly"),
        (counts, {"upsert": "id", "url": tmp_path / "vectors"}, "has the property delta.enableDeletionVectors"),
    ):
        with pytest.raises(UsageError, match=said):
            stream.sink(DeltaSink(**({"url": where, "create": True} | given)))
    with pytest.raises(UsageError, match="names a column twice"):
        DeltaSink(where, upsert=("id", "id"))


def test_keys_that_could_not_be_found_again_are_refused_before_the_checkpoint(
    tables: DeltaTables, tmp_path: Path
) -> None:
    schema = pa.schema([("id", pa.large_string()), ("n", pa.int64())])
    sink = DeltaSink(tmp_path / "t", create=True, upsert="id", partition_by="id")
    sink.check(schema)
    sink.make_target(schema)
    for key, said in ((None, "a record has a null in 'id'"), ("", "an empty text in 'id', which is a key and a part")):
        with pytest.raises(UsageError, match=said):
            output(sink, 1, pa.record_batch([pa.array([key], pa.large_string()), [1]], schema=schema))
