"""Tables of Delta and Iceberg with the newest row of each key: each change merged once, whatever comes between."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from lake_program import PATIENCE_S, ROW, committer, permit, prepared
from lakes import Tables, changing, numbers_sink, ops, output, write
from tests.connectors.committing import records

import headgate as hg
from headgate import testing
from headgate.connectors.base import SinkContext
from headgate.connectors.lakes import table_changes
from headgate.connectors.registry import committable_text
from headgate.errors import CorruptionError, FencedError, UsageError
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Committable, SnapshotPart
from headgate.testing.sinks.fake_pipeline import SCHEMA

pytest.importorskip("deltalake")
pytest.importorskip("pyiceberg")


def test_a_pipeline_keeps_the_table_that_its_changes_describe(tables: Tables, tmp_path: Path) -> None:
    p = hg.Pipeline("p", checkpointing=hg.Checkpointing(interval="20ms", dir=tmp_path / "c"))
    columns = {"auction": hg.Uniform(0, 99), "price": hg.Uniform(1, 99_999)}
    bids = p.source(hg.Generator(columns, rows=1_000, splits=2, time="deterministic"))
    counts = bids.key_by("auction").agg(bids=pl.len(), retractions=True)
    auctions = counts.key_by("bids").agg(auctions=pl.len())
    bids.sink(tables.sink("log", create=True), name="log")
    auctions.sink(tables.sink(create=True, upsert="bids"), name="out")
    testing.run(p, timeout_s=PATIENCE_S, parallelism=2)
    log = tables.frame("log")
    wanted = log.group_by("auction").agg(bids=pl.len()).group_by("bids").agg(auctions=pl.len())
    assert sorted(tables.frame().rows()) == sorted(wanted.rows())


# -- one merge -------------------------------------------------------------------------------------------------------


def test_of_the_changes_of_a_key_the_last_one_counts(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_changes, "PENDING_ROWS", 2)
    first = ops(("insert", 1, 1), ("insert", 2, 1), ("insert", 3, 1), ("insert", 4, None))
    second = ops(("update_before", 1, 1), ("update_after", 1, 2), ("delete", 2, 1), ("delete", 3, 1))
    third = ops(("insert", 3, 3), ("update_after", 4, 4), ("update_after", 4, None), ("delete", 9, None))
    sink = changing(tables, first.schema)
    write(sink, 1, first, second, third)
    assert tables.rows() == [{"id": 1, "n": 2}, {"id": 3, "n": 3}, {"id": 4, "n": None}]
    write(sink, 2, ops(("delete", 1, 2), ("update_after", 3, None)), ops(("update_after", 4, 5)))
    assert tables.rows() == [{"id": 3, "n": None}, {"id": 4, "n": 5}]


def test_all_subtasks_and_checkpoints_of_a_permit_are_one_version(tables: Tables) -> None:
    sink = changing(tables, ops(("insert", 1, 1)).schema)
    one = committer(sink)
    outputs = [
        output(sink, 2, ops(("delete", 1, 1), ("insert", 3, 3))),
        output(sink, 1, ops(("insert", 1, 1))),
        output(sink, 1, ops(("insert", 2, 2)), subtask=1),
    ]
    before = tables.version()
    one.commit(permit(2), outputs)
    assert tables.version() == before + 1
    assert tables.rows() == [{"id": 2, "n": 2}, {"id": 3, "n": 3}]


def test_what_was_merged_is_not_merged_again(tables: Tables) -> None:
    sink = changing(tables, ops(("insert", 1, 1)).schema)
    first, second = output(sink, 1, ops(("insert", 1, 1))), output(sink, 2, ops(("delete", 1, 1)))
    one = committer(sink)
    one.commit(permit(1), [first])
    one.commit(permit(2), [second])
    version = tables.version()
    one.commit(permit(2), [first, second])
    assert tables.version() == version
    another = committer(sink, 2)
    claimed = tables.version()
    another.commit(permit(2, 2), [first])
    assert tables.version() == claimed
    assert another.denial(first) == ""
    assert tables.rows() == []


def test_a_merge_that_changes_no_row_is_remembered(tables: Tables) -> None:
    """Merged again after a later insert, the delete would take that away."""
    sink = changing(tables, ops(("insert", 1, 1)).schema)
    nothing = output(sink, 1, ops(("delete", 1, None)))
    committer(sink).commit(permit(1), [nothing])
    write(sink, 2, ops(("insert", 1, 1)))
    committer(sink, 2).commit(permit(2, 2), [nothing])
    assert tables.rows() == [{"id": 1, "n": 1}]


def test_changes_without_a_new_row_leave_nothing_to_commit(tables: Tables) -> None:
    batch = ops(("update_before", 1, 1))
    sink = changing(tables, batch.schema)
    writer = sink.open(SinkContext("p", "out", 0, 1, Generation(1), batch.schema))
    writer.write(batch)
    assert writer.seal(CheckpointId(1)).prepare() is None


def test_a_newer_generation_fences_a_merge_that_was_computed_before(
    tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = numbers_sink(tables)
    old, one = committer(sink), prepared(sink, 1, 1)
    merge = tables.log.merge

    def late(*arguments: Any) -> None:
        committer(sink, 2)
        monkeypatch.undo()
        merge(*arguments)

    monkeypatch.setattr(tables.log, "merge", late)
    with pytest.raises(FencedError):
        old.commit(permit(1), [one])
    assert tables.rows() == []


def test_a_merge_that_another_writer_beats_looks_for_its_rows_again(
    tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = numbers_sink(tables)
    one = committer(sink)
    merge = tables.log.merge
    others = pa.table({"number": [1, 7], "text": ["theirs", "theirs"]})

    def late(*arguments: Any) -> None:
        monkeypatch.undo()
        tables.append(others)
        merge(*arguments)

    monkeypatch.setattr(tables.log, "merge", late)
    one.commit(permit(1), [prepared(sink, 1, 1, 2)])
    assert [row["text"] for row in tables.rows()] == ["1", "2", "theirs"]


def test_compaction_by_others_changes_nothing(tables: Tables) -> None:
    sink = numbers_sink(tables)
    one = committer(sink)
    for checkpoint in (1, 2, 3):
        one.commit(permit(checkpoint), [prepared(sink, checkpoint, checkpoint, 9)])
        tables.compact()
    assert [row["number"] for row in tables.rows()] == [1, 2, 3, 9]


def test_large_output_is_in_pieces_of_the_checkpoint(tables: Tables) -> None:
    sink = numbers_sink(tables, buffer_bytes=100)
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
    assert [int(row["text"]) for row in sorted(tables.rows(), key=lambda row: row["number"])] == [0] * 10 + [
        10
    ] * 10 + [20] * 15


def test_a_damaged_committable_is_noticed(tables: Tables) -> None:
    sink = numbers_sink(tables)
    one = committer(sink)
    with pytest.raises(CorruptionError, match="changes of version 1"):
        one.commit(permit(1), [replace(prepared(sink, 1, 1), payload=b"changes-1 7\nname\n")])


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
def test_keys_of_each_type_are_found_again(tables: Tables, name: str, is_partition: bool) -> None:
    dtype, values = KEYS[name]
    ids = pa.array(values, dtype)
    schema = pa.schema([("op", pa.large_string()), (name, dtype), ("n", pa.int64())])

    def batch(op: list[str], rows: list[int], n: list[int | None]) -> pa.RecordBatch:
        return pa.record_batch([pa.array(op, pa.large_string()), ids.take(pa.array(rows)), n], schema=schema)

    appender = tables.sink(create=True, partition_by=(name,) if is_partition else ())
    appender.make_target(schema.remove(0))
    files = [batch(["x"], [row], [row]).select([1, 2]) for row in range(3)]
    first = [output(appender, 1, file, subtask=at, pipeline="q") for at, file in enumerate(files)]
    appending = appender.open_committer("q", "out", Generation(1))
    appending.recover(())
    appending.commit(permit(1), first)
    sink = changing(tables, schema, name)
    merging = committer(sink)

    def merge(checkpoint: int, changes: pa.RecordBatch) -> None:
        merging.commit(permit(checkpoint), [output(sink, checkpoint, changes)])

    for checkpoint, row in enumerate((0, 1, 2, 3), 1):  # alone, so that its file is found by minima and maxima
        merge(checkpoint, batch(["update_after"], [row], [row + 10]))
    merge(5, batch(["delete", "update_after", "update_after"], [0, 1, 3], [None, None, 99]))
    found = {row[name]: row["n"] for row in tables.rows()}
    assert found == {values[1]: None, values[2]: 12, values[3]: 99}
    assert len(tables.rows()) == 3


def test_values_come_back_as_they_were(tables: Tables) -> None:
    first = {"id": 1} | ROW
    rows = [first, {"id": 2} | dict.fromkeys(ROW)]
    swapped = [{**rows[1], "id": 1}, {**rows[0], "id": 2}]
    sink = tables.sink(create=True, upsert="id")
    schema = records(rows).schema
    sink.check(schema)
    sink.make_target(schema)
    for checkpoint, now in enumerate((rows, swapped, rows), 1):
        write(sink, checkpoint, pa.RecordBatch.from_pylist(now, schema=schema))
        assert tables.rows() == now


def test_a_row_may_move_to_another_partition(tables: Tables) -> None:
    schema = records([{"op": "insert", "day": "a", "id": 1, "n": 1}]).schema
    sink = changing(tables, schema, ("id",), partition_by="day")
    batch = lambda *rows: pa.RecordBatch.from_pylist(  # noqa: E731
        [dict(zip(schema.names, row, strict=True)) for row in rows], schema=schema
    )
    write(sink, 1, batch(("insert", "a", 1, 1), ("insert", "b/ü%=", 2, 2), ("insert", None, 3, 3)))
    write(sink, 2, batch(("update_after", "b/ü%=", 1, 10), ("update_after", None, 2, 20), ("delete", None, 3, None)))
    assert [tuple(row.values()) for row in tables.frame().sort("id").to_dicts()] == [
        ("b/ü%=", 1, 10),
        (None, 2, 20),
    ]


def test_keys_may_be_several_columns_and_others_of_the_table_stay(tables: Tables) -> None:
    there = pa.table(
        {"a": [1, 1, 1, 2], "b": ["x", "x", "y", "x"], "n": [0, 1, 2, 3], "note": ["as", "one", "two", None]}
    )
    tables.create(there.schema)
    tables.append(there)
    batch = records([{"op": "update_after", "a": 1, "b": "x", "n": 9}, {"op": "insert", "a": 2, "b": "y", "n": 4}])
    sink = changing(tables, batch.schema, ("b", "a"))
    write(sink, 1, batch)
    assert [tuple(row.values()) for row in tables.frame().sort("a", "b", "note").to_dicts()] == [
        (1, "x", 9, "as"),  # others wrote two rows of this key
        (1, "x", 9, "one"),
        (1, "y", 2, "two"),
        (2, "x", 3, None),
        (2, "y", 4, None),
    ]


def test_columns_that_are_never_null_may_be_so_in_deletes(tables: Tables) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("n", pa.int64(), nullable=False)])
    tables.create(schema)
    first = ops(("insert", 1, 1), ("insert", 2, 2))
    sink = changing(tables, first.schema)
    write(sink, 1, first)
    write(sink, 2, ops(("delete", 1, None), ("update_after", 2, 3)))
    assert tables.rows() == [{"id": 2, "n": 3}]
    with pytest.raises(UsageError, match="column 'n' of the table is never null, and a record has null there"):
        output(sink, 3, ops(("update_after", 2, None)))


def test_columns_are_added_on_request(tables: Tables) -> None:
    there = pa.table({"id": [1, 2]})
    tables.create(there.schema)
    tables.append(there)
    batch = ops(("update_after", 1, 5), ("insert", 3, 6))
    with pytest.raises(UsageError, match="has no column 'n'; give evolve=True"):
        changing(tables, batch.schema)
    write(changing(tables, batch.schema, evolve=True), 1, batch)
    assert tables.rows() == [{"id": 1, "n": 5}, {"id": 2, "n": None}, {"id": 3, "n": 6}]


def test_only_files_with_changed_keys_are_written_again(tables: Tables) -> None:
    sink = numbers_sink(tables)
    for start in (0, 100, 200):
        tables.append(pa.table({"number": list(range(start, start + 100)), "text": ["x"] * 100}))
    before = tables.files()
    committer(sink).commit(permit(1), [prepared(sink, 1, 150)])
    after = tables.files()
    assert len(before & after) == 2
    assert len(after) == 3


# -- another program at the next start -------------------------------------------------------------------------------


def test_output_of_a_former_program_is_committed_as_it_was_written(tables: Tables) -> None:
    """Appended first, then merged by one key, then by two and with another column; each commit is known."""
    plain = pa.schema([("id", pa.int64()), ("n", pa.int64())])
    wide = pa.schema([("id", pa.int64()), ("n", pa.int64()), ("note", pa.large_string())])
    outputs = []
    for checkpoint, keys, batch in (
        (1, (), pa.record_batch([[1, 2, 2], [1, 2, 3]], schema=plain)),
        (2, ("id",), pa.record_batch([[1, 3], [10, 3]], schema=plain)),
        (3, ("id", "n"), pa.record_batch([[2, 3], [2, 4], ["x", "y"]], schema=wide)),
    ):
        sink = tables.sink(create=True, upsert=keys, evolve=True)
        sink.check(batch.schema)
        sink.make_target(batch.schema)
        outputs.append(output(sink, checkpoint, batch))
    last = tables.sink()
    committer(last).commit(permit(3), outputs)
    wanted = [(1, 10, None), (2, 2, "x"), (2, 3, None), (3, 3, None), (3, 4, "y")]
    assert tables.frame().sort("id", "n").rows() == wanted
    another = committer(last, 2)
    before = tables.version()
    another.commit(permit(3, 2), outputs)
    assert (tables.version(), tables.frame().sort("id", "n").rows()) == (before, wanted)


def test_going_back_to_an_older_checkpoint_writes_what_follows_again(tables: Tables) -> None:
    sink = changing(tables, ops(("insert", 1, 1)).schema)
    first = output(sink, 1, ops(("insert", 1, 1), ("insert", 2, 1)))
    one = committer(sink)
    one.commit(permit(1), [first])
    one.commit(permit(2), [output(sink, 2, ops(("update_after", 1, 2), ("delete", 2, None)))])
    another = committer(sink, 2)
    another.commit(permit(1, 2), [first])
    assert rows(tables) == {1: 2}
    again = output(sink, 2, ops(("update_after", 1, 3), ("insert", 4, 4)))
    again = replace(again, generation=Generation(2), payload=again.payload.replace(b"-0000000001\n", b"-0000000002\n"))
    another.commit(permit(2, 2), [first, again])
    another.commit(permit(2, 2), [again])
    assert rows(tables) == {1: 3, 4: 4}


def rows(tables: Tables) -> dict[int, int]:
    return dict(tables.frame().select("id", "n").rows())
