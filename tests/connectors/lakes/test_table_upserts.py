"""Tables of Delta with the newest row of each key: each change merged once, whatever comes between."""

from __future__ import annotations

import datetime as dt
import itertools
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from lake_program import KILLED, PATIENCE_S, ROW, committer, permit, prepared, started
from tests.conftest import IS_DEEP
from tests.connectors.committing import records
from tests.servers.objects import BUCKET, object_server

import headgate as hg
from headgate import testing
from headgate.connectors.base import SinkContext, SinkWriter
from headgate.connectors.lakes import table_upserts
from headgate.connectors.lakes.delta_log import DeltaLog
from headgate.connectors.lakes.delta_sink import DeltaSink
from headgate.connectors.registry import committable_text
from headgate.errors import CorruptionError, FencedError, UsageError
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Committable, SnapshotPart
from headgate.testing import Target, check_sink
from headgate.testing.sinks.fake_pipeline import SCHEMA
from headgate.testing.sinks.scenarios import check_commit_in_flight, check_late_commits, check_stale_generation

deltalake = pytest.importorskip("deltalake")


def rows_of(where: Any) -> list[dict[str, Any]]:
    table = DeltaLog.load(str(where), {})
    found = [] if table is None else table.table.to_pyarrow_table().to_pylist()
    return sorted(found, key=lambda row: repr(next(iter(row.values()))))


def version_of(where: Path) -> int:
    return int(deltalake.DeltaTable(str(where)).version())


def numbers_sink(where: Any, **options: Any) -> DeltaSink:
    sink = DeltaSink(where, create=True, upsert="number", **options)
    sink.check(SCHEMA)
    sink.make_target(SCHEMA)
    return sink


def changing(where: Path, schema: pa.Schema, upsert: Any = "id", **options: Any) -> DeltaSink:
    sink = DeltaSink(where, create=True, upsert=upsert, **options)
    sink = sink.for_changes(sink.keys, retractions=True)
    sink.check(schema)
    sink.make_target(schema)
    return sink


def output(sink: DeltaSink, checkpoint: int, *batches: pa.RecordBatch, subtask: int = 0) -> Committable:
    writer = sink.open(SinkContext("p", "out", subtask, 2, Generation(1), batches[0].schema))
    for batch in batches:
        writer.write(batch)
    payload = writer.seal(CheckpointId(checkpoint)).prepare()
    assert payload is not None
    writer.close()
    return Committable("out", CheckpointId(checkpoint), subtask, Generation(1), payload)


def write(sink: DeltaSink, checkpoint: int, *batches: pa.RecordBatch) -> None:
    committer(sink).commit(permit(checkpoint), [output(sink, checkpoint, *batches)])


def ops(*changes: tuple[str, int, int | None]) -> pa.RecordBatch:
    schema = pa.schema([("op", pa.large_string()), ("id", pa.int64()), ("n", pa.int64())])
    return pa.RecordBatch.from_pylist([dict(zip(schema.names, change, strict=True)) for change in changes], schema)


class MarkedSink(DeltaSink):
    """Gives each batch a key of its own, so that the table has a record twice if it is written twice."""

    def check(self, schema: pa.Schema) -> None:
        super().check(schema.append(MARK))

    def make_target(self, schema: pa.Schema) -> None:
        super().make_target(schema.append(MARK))

    def open(self, context: SinkContext) -> SinkWriter:
        writer = super().open(replace(context, schema=context.schema.append(MARK)))
        write = writer.write

        def marked(batch: pa.RecordBatch) -> None:
            mark = pa.array([self.environment.token(8).hex()] * batch.num_rows, MARK.type)
            write(batch.append_column(MARK, mark))

        writer.write = marked  # type: ignore[method-assign]
        return writer


MARK = pa.field("mark", pa.large_string())


# -- the kit, and kills ----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_sink_passes_the_kit(tmp_path: Path) -> None:
    numbers = itertools.count()

    def fresh() -> Target:
        where = tmp_path / str(next(numbers))
        sink = MarkedSink(where, create=True, upsert=("number", "mark"))
        sink.check(SCHEMA)
        return Target(sink, lambda: rows_of(where))

    rescales = ((2, 2), (5, 2)) if IS_DEEP else ((3, 2),)
    check_sink(fresh, rescales=rescales, overlaps=(2,), rows=(0, 7) if IS_DEEP else (7,))


@pytest.mark.long
def test_tables_in_an_object_store_fence_and_find_merges(tmp_path: Path) -> None:
    numbers = itertools.count()

    def fresh() -> Target:
        where = f"s3://{BUCKET}/merged-{next(numbers)}"
        sink = DeltaSink(where, create=True, upsert="number")
        sink.check(SCHEMA)
        return Target(sink, lambda: rows_of(where))

    with object_server(tmp_path):
        check_stale_generation(fresh())
        check_late_commits(fresh())
        check_commit_in_flight(fresh(), is_late=True)


@pytest.mark.run
def test_a_process_killed_around_its_merges_counts_each_record_once(tmp_path: Path) -> None:
    """Killed after a checkpoint completed, before the entry of the log, and after it."""
    options = {"url": str(tmp_path / "table"), "create": True, "upsert": "kind"}
    for point in ("after-manifest:2", "in-publish:2", "after-publish:2"):
        marker = tmp_path / point.partition(":")[0]
        assert started(tmp_path, 3_000, "delta", options, f"{point}:{marker}") == KILLED, point
    assert started(tmp_path, 3_000, "delta", options) == 0
    found = pl.read_delta(str(tmp_path / "table"))
    assert sorted(found["kind"].to_list()) == ["a", "b"]
    assert found["records"].sum() == 3_000


def test_a_pipeline_keeps_the_table_that_its_changes_describe(tmp_path: Path) -> None:
    p = hg.Pipeline("p", checkpointing=hg.Checkpointing(interval="20ms", dir=tmp_path / "c"))
    columns = {"auction": hg.Uniform(0, 99), "price": hg.Uniform(1, 99_999)}
    bids = p.source(hg.Generator(columns, rows=1_000, splits=2, time="deterministic"))
    counts = bids.key_by("auction").agg(bids=pl.len(), retractions=True)
    auctions = counts.key_by("bids").agg(auctions=pl.len())
    bids.sink(hg.DeltaSink(tmp_path / "log", create=True), name="log")
    auctions.sink(hg.DeltaSink(tmp_path / "t", create=True, upsert="bids"), name="out")
    testing.run(p, timeout_s=PATIENCE_S, parallelism=2)
    log = pl.read_delta(str(tmp_path / "log"))
    wanted = log.group_by("auction").agg(bids=pl.len()).group_by("bids").agg(auctions=pl.len())
    assert sorted(pl.read_delta(str(tmp_path / "t")).rows()) == sorted(wanted.rows())


# -- one merge -------------------------------------------------------------------------------------------------------


def test_of_the_changes_of_a_key_the_last_one_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_upserts, "PENDING_ROWS", 2)
    first = ops(("insert", 1, 1), ("insert", 2, 1), ("insert", 3, 1), ("insert", 4, None))
    second = ops(("update_before", 1, 1), ("update_after", 1, 2), ("delete", 2, 1), ("delete", 3, 1))
    third = ops(("insert", 3, 3), ("update_after", 4, 4), ("update_after", 4, None), ("delete", 9, None))
    sink = changing(tmp_path / "t", first.schema)
    write(sink, 1, first, second, third)
    assert rows_of(tmp_path / "t") == [{"id": 1, "n": 2}, {"id": 3, "n": 3}, {"id": 4, "n": None}]
    write(sink, 2, ops(("delete", 1, 2), ("update_after", 3, None)), ops(("update_after", 4, 5)))
    assert rows_of(tmp_path / "t") == [{"id": 3, "n": None}, {"id": 4, "n": 5}]


def test_all_subtasks_and_checkpoints_of_a_permit_are_one_version(tmp_path: Path) -> None:
    sink = changing(tmp_path / "t", ops(("insert", 1, 1)).schema)
    one = committer(sink)
    outputs = [
        output(sink, 2, ops(("delete", 1, 1), ("insert", 3, 3))),
        output(sink, 1, ops(("insert", 1, 1))),
        output(sink, 1, ops(("insert", 2, 2)), subtask=1),
    ]
    before = version_of(tmp_path / "t")
    one.commit(permit(2), outputs)
    assert version_of(tmp_path / "t") == before + 1
    assert rows_of(tmp_path / "t") == [{"id": 2, "n": 2}, {"id": 3, "n": 3}]


def test_what_was_merged_is_not_merged_again(tmp_path: Path) -> None:
    sink = changing(tmp_path / "t", ops(("insert", 1, 1)).schema)
    first, second = output(sink, 1, ops(("insert", 1, 1))), output(sink, 2, ops(("delete", 1, 1)))
    one = committer(sink)
    one.commit(permit(1), [first])
    one.commit(permit(2), [second])
    version = version_of(tmp_path / "t")
    one.commit(permit(2), [first, second])
    assert version_of(tmp_path / "t") == version
    another = committer(sink, 2)
    claimed = version_of(tmp_path / "t")
    another.commit(permit(2, 2), [first])
    assert version_of(tmp_path / "t") == claimed
    assert another.denial(first) == ""
    assert rows_of(tmp_path / "t") == []


def test_a_merge_that_changes_no_row_is_remembered(tmp_path: Path) -> None:
    """Merged again after a later insert, the delete would take that away."""
    sink = changing(tmp_path / "t", ops(("insert", 1, 1)).schema)
    nothing = output(sink, 1, ops(("delete", 1, None)))
    committer(sink).commit(permit(1), [nothing])
    write(sink, 2, ops(("insert", 1, 1)))
    committer(sink, 2).commit(permit(2, 2), [nothing])
    assert rows_of(tmp_path / "t") == [{"id": 1, "n": 1}]


def test_changes_without_a_new_row_leave_nothing_to_commit(tmp_path: Path) -> None:
    batch = ops(("update_before", 1, 1))
    sink = changing(tmp_path / "t", batch.schema)
    writer = sink.open(SinkContext("p", "out", 0, 1, Generation(1), batch.schema))
    writer.write(batch)
    assert writer.seal(CheckpointId(1)).prepare() is None


def test_a_newer_generation_fences_a_merge_that_was_computed_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = numbers_sink(tmp_path / "t")
    old, one = committer(sink), prepared(sink, 1, 1)
    merge = DeltaLog.merge

    def late(*arguments: Any) -> None:
        committer(sink, 2)
        monkeypatch.undo()
        merge(*arguments)

    monkeypatch.setattr(DeltaLog, "merge", late)
    with pytest.raises(FencedError):
        old.commit(permit(1), [one])
    assert rows_of(tmp_path / "t") == []


def test_a_merge_that_another_writer_beats_looks_for_its_rows_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = numbers_sink(tmp_path / "t")
    one = committer(sink)
    merge = DeltaLog.merge
    others = pa.table({"number": [1, 7], "text": ["theirs", "theirs"]})

    def late(*arguments: Any) -> None:
        monkeypatch.undo()
        deltalake.write_deltalake(str(tmp_path / "t"), others, mode="append")
        merge(*arguments)

    monkeypatch.setattr(DeltaLog, "merge", late)
    one.commit(permit(1), [prepared(sink, 1, 1, 2)])
    assert [row["text"] for row in rows_of(tmp_path / "t")] == ["1", "2", "theirs"]


def test_compaction_by_others_changes_nothing(tmp_path: Path) -> None:
    sink = numbers_sink(tmp_path / "t")
    one = committer(sink)
    for checkpoint in (1, 2, 3):
        one.commit(permit(checkpoint), [prepared(sink, checkpoint, checkpoint, 9)])
        deltalake.DeltaTable(str(tmp_path / "t")).optimize.compact()
    assert [row["number"] for row in rows_of(tmp_path / "t")] == [1, 2, 3, 9]


def test_a_table_that_was_changed_meanwhile_is_not_merged_into(tmp_path: Path) -> None:
    sink = numbers_sink(tmp_path / "t")
    one, late = committer(sink), prepared(sink, 1, 1)
    late = replace(late, payload=prepared(numbers_sink(tmp_path / "other"), 1, 1).payload)
    table = deltalake.DeltaTable(str(tmp_path / "t"))
    table.alter.set_table_properties({"delta.appendOnly": "true"})
    with pytest.raises(UsageError, match=r"has the property delta.appendOnly, with which DeltaSink\(upsert=\)"):
        one.commit(permit(1), [late])


def test_large_output_is_in_pieces_of_the_checkpoint(tmp_path: Path) -> None:
    sink = numbers_sink(tmp_path / "t", buffer_bytes=100)
    writer = sink.open(SinkContext("p", "out", 0, 1, Generation(1), SCHEMA))
    for start in (0, 10, 20):
        numbers = list(range(start, start + 15))
        writer.write(pa.record_batch([numbers, [f"{start}"] * 15], schema=SCHEMA))
    sealed = writer.seal(CheckpointId(1))
    pieces = [sealed.piece(number) for number in range(sealed.pieces_count)]
    payload = sealed.prepare()
    assert payload is not None
    assert committable_text(payload) == "p:out-0000000001-00000-0000000001"
    one = sink.open_committer("p", "out", Generation(1))
    stored = dict(enumerate(pieces))
    one.read_pieces_with(lambda piece: memoryview(stored[int(piece.path)]))
    one.recover(())
    parts = tuple(SnapshotPart(len(data), 0, str(number)) for number, data in stored.items())
    one.commit(permit(1), [Committable("out", CheckpointId(1), 0, Generation(1), payload, pieces=parts)])
    assert [int(row["text"]) for row in sorted(rows_of(tmp_path / "t"), key=lambda row: row["number"])] == [0] * 10 + [
        10
    ] * 10 + [20] * 15


def test_a_damaged_committable_is_noticed(tmp_path: Path) -> None:
    sink = numbers_sink(tmp_path / "t")
    one = committer(sink)
    with pytest.raises(CorruptionError, match="changes of version 1"):
        one.commit(permit(1), [replace(prepared(sink, 1, 1), payload=b"1\nname\n")])


# -- keys, values and tables -----------------------------------------------------------------------------------------

KEYS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "text": (pa.large_string(), ["it's", 'é"\\', "x" * 100, "x" * 100 + "z"]),
    "Sel ect`\".a'": (pa.large_string(), ["a", "b", "A", ""]),
    "raw": (pa.large_binary(), [b"", b"\x00\xff", b"a", b"b"]),
    "small": (pa.int8(), [-128, 0, 1, 127]),
    "large": (pa.int64(), [-(2**63), 2**53 + 1, 2**63 - 2, 2**63 - 1]),
    "unsigned": (pa.uint64(), [0, 1, 2**63, 2**64 - 1]),
    "price": (pa.decimal128(20, 2), [Decimal("-2.20"), Decimal("0.00"), Decimal("1.10"), Decimal(10**17)]),
    "day": (pa.date32(), [dt.date(1, 1, 1), dt.date(1969, 12, 31), dt.date(2024, 2, 29), dt.date.max]),
    "moment": (
        pa.timestamp("us", "UTC"),
        [dt.datetime(2024, 1, 1, 0, 0, 0, micros, dt.UTC) for micros in (1, 2, 999, 999_999)],
    ),
    "local": (pa.timestamp("us"), [dt.datetime(1, 1, 1, 0, 0, 0, micros) for micros in (1, 2, 999, 999_999)]),
}


PARTITIONS = ["text", "small", "day", "moment", "local"]


@pytest.mark.parametrize(
    ("name", "is_partition"), [*((name, False) for name in KEYS), *((name, True) for name in PARTITIONS)]
)
def test_keys_of_each_type_are_found_again(tmp_path: Path, name: str, is_partition: bool) -> None:
    dtype, values = KEYS[name]
    ids = pa.array(values, dtype)
    schema = pa.schema([("op", pa.large_string()), (name, dtype), ("n", pa.int64())])

    def batch(op: list[str], rows: list[int], n: list[int | None]) -> pa.RecordBatch:
        return pa.record_batch([pa.array(op, pa.large_string()), ids.take(pa.array(rows)), n], schema=schema)

    where = tmp_path / "t"
    appender = DeltaSink(where, create=True, partition_by=(name,) if is_partition else ())
    appender.make_target(schema.remove(0))
    for checkpoint, row in enumerate((0, 1, 2), 1):  # a file each
        one = batch(["x"], [row], [row]).select([1, 2])
        writer = appender.open(SinkContext("q", "out", 0, 1, Generation(1), one.schema))
        writer.write(one)
        payload = writer.seal(CheckpointId(checkpoint)).prepare()
        found = appender.open_committer("q", "out", Generation(1))
        found.recover(())
        found.commit(permit(checkpoint), [Committable("out", CheckpointId(checkpoint), 0, Generation(1), payload)])
    sink = changing(where, schema, name)
    for checkpoint, row in enumerate((0, 1, 2, 3), 1):  # alone, so that its file is found by minima and maxima
        write(sink, checkpoint, batch(["update_after"], [row], [row + 10]))
    write(sink, 5, batch(["delete", "update_after", "update_after"], [0, 1, 3], [None, None, 99]))
    found = {row[name]: row["n"] for row in rows_of(where)}
    assert found == {values[1]: None, values[2]: 12, values[3]: 99}
    assert len(rows_of(where)) == 3


def test_values_come_back_as_they_were(tmp_path: Path) -> None:
    first = {"id": 1} | ROW
    rows = [first, {"id": 2} | dict.fromkeys(ROW)]
    swapped = [{**rows[1], "id": 1}, {**rows[0], "id": 2}]
    sink = DeltaSink(tmp_path / "t", create=True, upsert="id")
    schema = records(rows).schema
    sink.check(schema)
    sink.make_target(schema)
    for checkpoint, now in enumerate((rows, swapped, rows), 1):
        write(sink, checkpoint, pa.RecordBatch.from_pylist(now, schema=schema))
        assert rows_of(tmp_path / "t") == now


def test_a_row_may_move_to_another_partition(tmp_path: Path) -> None:
    schema = records([{"op": "insert", "day": "a", "id": 1, "n": 1}]).schema
    sink = changing(tmp_path / "t", schema, ("id",), partition_by="day")
    batch = lambda *rows: pa.RecordBatch.from_pylist(  # noqa: E731
        [dict(zip(schema.names, row, strict=True)) for row in rows], schema=schema
    )
    write(sink, 1, batch(("insert", "a", 1, 1), ("insert", "b/ü%=", 2, 2), ("insert", None, 3, 3)))
    write(sink, 2, batch(("update_after", "b/ü%=", 1, 10), ("update_after", None, 2, 20), ("delete", None, 3, None)))
    assert [tuple(row.values()) for row in pl.read_delta(str(tmp_path / "t")).sort("id").to_dicts()] == [
        ("b/ü%=", 1, 10),
        (None, 2, 20),
    ]


def test_a_change_feed_has_what_a_merge_did(tmp_path: Path) -> None:
    first = ops(("insert", 1, 1), ("insert", 2, 2))
    sink = changing(tmp_path / "t", first.schema, settings={"delta.enableChangeDataFeed": "true"})
    write(sink, 1, first)
    write(sink, 2, ops(("update_after", 1, 3), ("delete", 2, None), ("insert", 3, 3)))
    p = hg.Pipeline("feed")
    feed = p.source(hg.Delta(tmp_path / "t", feed=True, key="id", after=version_of(tmp_path / "t") - 1))
    assert sorted(feed.collect().select("op", "id", "n").rows()) == [
        ("delete", 2, 2),
        ("insert", 3, 3),
        ("update_after", 1, 3),
        ("update_before", 1, 1),
    ]


def test_keys_may_be_several_columns_and_others_of_the_table_stay(tmp_path: Path) -> None:
    there = pa.table(
        {"a": [1, 1, 1, 2], "b": ["x", "x", "y", "x"], "n": [0, 1, 2, 3], "note": ["as", "one", "two", None]}
    )
    deltalake.write_deltalake(str(tmp_path / "t"), there)
    batch = records([{"op": "update_after", "a": 1, "b": "x", "n": 9}, {"op": "insert", "a": 2, "b": "y", "n": 4}])
    sink = changing(tmp_path / "t", batch.schema, ("b", "a"))
    write(sink, 1, batch)
    assert [tuple(row.values()) for row in pl.read_delta(str(tmp_path / "t")).sort("a", "b", "note").to_dicts()] == [
        (1, "x", 9, "as"),  # others wrote two rows of this key
        (1, "x", 9, "one"),
        (1, "y", 2, "two"),
        (2, "x", 3, None),
        (2, "y", 4, None),
    ]


def test_columns_that_are_never_null_may_be_so_in_deletes(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("n", pa.int64(), nullable=False)])
    deltalake.DeltaTable.create(str(tmp_path / "t"), schema)
    first = ops(("insert", 1, 1), ("insert", 2, 2))
    sink = changing(tmp_path / "t", first.schema)
    write(sink, 1, first)
    write(sink, 2, ops(("delete", 1, None), ("update_after", 2, 3)))
    assert rows_of(tmp_path / "t") == [{"id": 2, "n": 3}]
    with pytest.raises(UsageError, match="column 'n' of the table is never null, and a record has null there"):
        output(sink, 3, ops(("update_after", 2, None)))


def test_columns_are_added_on_request(tmp_path: Path) -> None:
    deltalake.write_deltalake(str(tmp_path / "t"), pa.table({"id": [1, 2]}))
    batch = ops(("update_after", 1, 5), ("insert", 3, 6))
    with pytest.raises(UsageError, match="has no column 'n'; give evolve=True"):
        changing(tmp_path / "t", batch.schema)
    write(changing(tmp_path / "t", batch.schema, evolve=True), 1, batch)
    assert rows_of(tmp_path / "t") == [{"id": 1, "n": 5}, {"id": 2, "n": None}, {"id": 3, "n": 6}]


def test_only_files_with_changed_keys_are_written_again(tmp_path: Path) -> None:
    for start in (0, 100, 200):
        rows = pa.table({"number": list(range(start, start + 100)), "text": ["x"] * 100})
        deltalake.write_deltalake(str(tmp_path / "t"), rows, mode="append")
    before = set(deltalake.DeltaTable(str(tmp_path / "t")).file_uris())
    sink = numbers_sink(tmp_path / "t")
    committer(sink).commit(permit(1), [prepared(sink, 1, 150)])
    after = set(deltalake.DeltaTable(str(tmp_path / "t")).file_uris())
    assert len(before & after) == 2
    assert len(after) == 3


def test_files_of_a_merge_are_durable_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[Path] = set()
    sink = numbers_sink(tmp_path / "t", partition_by="text")
    one, late = committer(sink), prepared(sink, 1, 1, 2)
    monkeypatch.setattr("headgate.connectors.lakes.delta_log.sync_file", synced.add)
    monkeypatch.setattr("headgate.connectors.lakes.delta_log.sync_directory", synced.add)
    one.commit(permit(1), [late])
    log = tmp_path / "t" / "_delta_log"
    files = set((tmp_path / "t").glob("text=*/*.parquet"))
    assert len(files) == 2
    assert files | {path.parent for path in files} | {log} <= synced
    assert log / f"{version_of(tmp_path / 't'):020d}.json" in synced


def test_a_merge_that_a_power_cut_tore_is_noticed_and_can_be_repeated(tmp_path: Path) -> None:
    sink = numbers_sink(tmp_path / "t")
    outputs = [prepared(sink, 1, 1), prepared(sink, 2, 2)]
    one = committer(sink)
    one.commit(permit(1), outputs[:1])
    before = set((tmp_path / "t").glob("*.parquet"))
    one.commit(permit(2), outputs[1:])
    (torn,) = set((tmp_path / "t").glob("*.parquet")) - before
    torn.write_bytes(b"")
    with pytest.raises(UsageError, match=r"damaged file: .*parquet has 0 bytes, and the log says \d+; if a power cut"):
        committer(sink, 2)
    (tmp_path / "t" / "_delta_log" / f"{version_of(tmp_path / 't'):020d}.json").unlink()
    committer(sink, 2).commit(permit(2, 2), outputs)
    assert [row["number"] for row in rows_of(tmp_path / "t")] == [1, 2]


# -- refusals --------------------------------------------------------------------------------------------------------


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


def test_keys_that_could_not_be_found_again_are_refused_before_the_checkpoint(tmp_path: Path) -> None:
    schema = pa.schema([("id", pa.large_string()), ("n", pa.int64())])
    sink = DeltaSink(tmp_path / "t", create=True, upsert="id", partition_by="id")
    sink.check(schema)
    sink.make_target(schema)
    for key, said in ((None, "a record has a null in 'id'"), ("", "an empty text in 'id', which is a key and a part")):
        with pytest.raises(UsageError, match=said):
            output(sink, 1, pa.record_batch([pa.array([key], pa.large_string()), [1]], schema=schema))
