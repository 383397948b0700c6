"""Tables of Iceberg with the newest row of each key: what only these tables have. See ``test_table_changes``."""

from __future__ import annotations

import datetime as dt
import random
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lake_program import committer, permit, prepared
from lakes import IcebergTables, changing, numbers_sink, ops, output, write

import headgate as hg
from headgate.connectors.lakes import iceberg_files
from headgate.connectors.lakes.iceberg_files import local_path
from headgate.errors import FencedError, StorageError, UsageError

pytest.importorskip("pyiceberg")


@pytest.fixture
def tables(tmp_path: Path) -> IcebergTables:
    return IcebergTables.below(tmp_path)


def numbers(tables: IcebergTables) -> list[int]:
    return [row["number"] for row in tables.rows()]


def data_files(tables: IcebergTables) -> set[Path]:
    where = local_path(tables.table().location())
    assert where is not None
    return set(where.glob("data/**/*.parquet"))


# -- the result ------------------------------------------------------------------------------------------------------

START = dt.datetime(1969, 12, 30, 22, tzinfo=dt.UTC)
"""Hours, days and months on both sides of zero follow."""


@pytest.mark.parametrize(
    ("keys", "partition_by"),
    [
        ("id", ()),
        (("id", "at"), ("day(at)",)),
        (("at", "name"), ("hour(at)", "truncate(1, name)")),
        ("id", ("month(at)", "name")),
        (("price", "id"), ("price",)),
        (("name", "id"), ("truncate(10, id)",)),
    ],
    ids=str,
)
def test_a_table_is_what_its_changes_say_in_all_partitions(
    tables: IcebergTables, keys: Any, partition_by: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more changed keys than manifests are asked for one by one, and with fewer."""
    monkeypatch.setattr(iceberg_files, "LISTED_MAX", 4)
    draw = random.Random(7)
    schema = pa.schema(
        [
            ("op", pa.large_string()),
            ("id", pa.int64()),
            ("at", pa.timestamp("us", "UTC")),
            ("name", pa.large_string()),
            ("price", pa.decimal128(9, 2)),
            ("n", pa.int32()),
        ]
    )
    names = ["", "a", "a b", "ä=/%", "null", "zz"]
    sink = changing(tables, schema, keys, partition_by=partition_by, file_bytes=2_000)
    wanted: dict[Any, dict[str, Any]] = {}
    one = committer(sink)
    for checkpoint in range(1, 9):
        rows = []
        for _ in range(draw.choice((1, 3, 12))):
            number = draw.randrange(12)
            row = {
                "op": draw.choice(("insert", "update_after", "update_after", "delete", "update_before")),
                "id": number - 6,
                "at": START + dt.timedelta(hours=number)
                if "at" in sink.keys
                else START + dt.timedelta(hours=len(rows)),
                "name": names[number % 6] if "name" in sink.keys else draw.choice([*names, None]),
                "price": (number - 6) / 4 if "price" in sink.keys else None,
                "n": draw.randrange(100),
            }
            rows.append(row)
        batch = pl.DataFrame(rows, infer_schema_length=None).to_arrow()
        batch = (
            pa.table([batch.column(field.name).cast(field.type) for field in schema], schema=schema)
            .combine_chunks()
            .to_batches()[0]
        )
        for row in batch.to_pylist():
            key = tuple(row[name] for name in sink.keys)
            op = row.pop("op")
            if op == "delete":
                wanted.pop(key, None)
            elif op != "update_before":
                wanted[key] = row
        if all(row["op"] == "update_before" for row in rows):
            continue
        one.commit(permit(checkpoint), [output(sink, checkpoint, batch)])
        found = {tuple(row[name] for name in sink.keys): row for row in tables.frame().to_dicts()}
        assert found == wanted
        assert len(tables.rows()) == len(wanted)


@pytest.mark.parametrize("has_bounds", [True, False])
def test_rows_that_others_deleted_by_position_do_not_come_back(tables: IcebergTables, has_bounds: bool) -> None:
    sink = changing(tables, ops(("insert", 1, 1)).schema)
    tables.append(pa.table({"id": [1, 2, 3, 4], "n": pa.array([1, 2, 3, 4], pa.int64())}))
    tables.append(pa.table({"id": [11, 12], "n": pa.array([11, 12], pa.int64())}))
    (path,) = [path for path in tables.files() if len(rows_in(tables, path)) == 4]
    tables.delete_rows(path, [1, 3], has_bounds=has_bounds)
    assert [row["id"] for row in tables.rows()] == [1, 11, 12, 3]
    write(sink, 1, ops(("update_after", 1, 10), ("update_after", 4, 40)))
    wanted = {1: 10, 3: 3, 4: 40, 11: 11, 12: 12}
    assert {row["id"]: row["n"] for row in tables.rows()} == wanted
    (path,) = [path for path in tables.files() if 3 in rows_in(tables, path)]
    tables.delete_rows(path, [rows_in(tables, path).index(3)], has_bounds=has_bounds)
    write(sink, 2, ops(("insert", 5, 5), ("update_after", 4, None), ("delete", 12, None)))
    found = tables.frame().to_dicts() if has_bounds else tables.rows()
    assert {row["id"]: row["n"] for row in found} == {1: 10, 4: None, 5: 5, 11: 11}
    assert len(found) == 4


def rows_in(tables: IcebergTables, path: str) -> list[int]:
    found: list[int] = pq.read_table(local_path(path)).column("id").to_pylist()
    return found


def test_a_table_with_equality_deletes_is_refused(tables: IcebergTables) -> None:
    sink = changing(tables, ops(("insert", 1, 1)).schema)
    one, late = committer(sink), output(sink, 1, ops(("insert", 9, 9)))
    tables.append(pa.table({"id": [1, 2], "n": pa.array([1, 2], pa.int64())}))
    (path,) = tables.files()
    tables.delete_rows(path, (), by_key=[2])
    with pytest.raises(UsageError, match="has equality deletes, which another program wrote and IcebergSink"):
        one.commit(permit(1), [late])
    with pytest.raises(UsageError, match="has equality deletes"):
        changing(tables, ops(("insert", 1, 1)).schema)


def test_columns_that_others_renamed_keep_their_values(tables: IcebergTables) -> None:
    there = pa.table({"old": [1, 2, 3], "note": ["a", "b", None], "n": pa.array([1, 2, 3], pa.int64())})
    tables.create(there.schema)
    tables.append(there)
    with tables.table().update_schema() as update:
        update.rename_column("old", "id").move_first("n").add_column("late", pa_type("string"))
    sink = changing(tables, ops(("insert", 1, 1)).schema)
    write(sink, 1, ops(("update_after", 2, 20), ("delete", 3, None), ("insert", 4, 4)))
    assert sorted(tables.frame().select("id", "n", "note", "late").rows()) == [
        (1, 1, "a", None),
        (2, 20, "b", None),
        (4, 4, None, None),
    ]


def test_a_column_that_became_wider_meanwhile_takes_what_was_prepared(tables: IcebergTables) -> None:
    schema = pa.schema([("id", pa.int32()), ("n", pa.int64())])
    tables.create(schema)
    sink = tables.sink(upsert="id")
    sink.check(schema)
    late = output(sink, 1, pa.record_batch([pa.array([1], pa.int32()), [1]], schema=schema))
    tables.append(pa.table({"id": pa.array([1, 2], pa.int32()), "n": [0, 0]}))
    with tables.table().update_schema() as update:
        update.update_column("id", pa_type("long"))
    tables.append(pa.table({"id": [0, 2**40], "n": [0, 0]}))
    committer(sink).commit(permit(1), [late])
    assert sorted(tables.frame().rows()) == [(0, 0), (1, 1), (2, 0), (2**40, 0)]


def pa_type(name: str) -> Any:
    from pyiceberg.types import LongType, StringType

    return {"string": StringType(), "long": LongType()}[name]


def test_nested_values_of_rows_that_stay_are_the_same(tables: IcebergTables, tmp_path: Path) -> None:
    schema = pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False),
            ("tags", pa.list_(pa.struct([pa.field("a", pa.int32(), nullable=False), ("b", pa.list_(pa.string()))]))),
            ("map", pa.map_(pa.string(), pa.struct([("x", pa.decimal128(5, 1))]))),
            ("time", pa.time64("us")),
            ("n", pa.int64()),
        ]
    )
    rows = [
        {"id": 1, "tags": None, "map": None, "time": None, "n": 1},
        {"id": 2, "tags": [], "map": [], "time": dt.time(1, 2, 3, 4), "n": 2},
        {
            "id": 3,
            "tags": [{"a": 1, "b": None}, {"a": 2, "b": ["x", None]}],
            "map": [("k", None)],
            "time": None,
            "n": 3,
        },
        {"id": 5, "tags": None, "map": None, "time": None, "n": 5},
        {"id": 4, "tags": [None], "map": [("k", {"x": None}), ("l", {"x": 1})], "time": None, "n": 4},
    ]
    tables.create(schema)
    pq.write_table(pa.Table.from_pylist(rows, schema), tmp_path / "rows.parquet")
    tables.table().add_files([str(tmp_path / "rows.parquet")])  # its own writer makes nulls empty
    before = tables.frame().sort("id")
    write(changing(tables, ops(("insert", 1, 1)).schema), 1, ops(("update_after", 3, 30), ("delete", 1, None)))
    wanted = before.with_columns(n=pl.Series([1, 2, 30, 4, 5]))[1:]
    assert tables.frame().sort("id").equals(wanted, null_equal=True)
    write(changing(tables, ops(("insert", 1, 1)).schema), 2, ops(("insert", 1, 1)))
    assert tables.frame().sort("id").drop("n")[1:].equals(wanted.drop("n"))


def test_files_of_former_partitions_are_found_and_written_in_those_of_today(tables: IcebergTables) -> None:
    rows = pa.table({"id": [1, 2, 3], "n": pa.array([1, 2, 3], pa.int64()), "kind": ["a", "b", None]})
    tables.create(rows.schema)
    tables.append(rows)
    for number, (added, removed) in enumerate((("kind", ()), ("id", ("kind",))), 1):
        with tables.table().update_spec() as spec:
            spec.add_identity(added)
            for name in removed:
                spec.remove_field(name)
        tables.append(rows.set_column(0, "id", pa.array([one + 3 * number for one in (1, 2, 3)], pa.int64())))
    sink = changing(tables, ops(("insert", 1, 1)).schema)
    write(sink, 1, ops(("delete", 1, None), *(("update_after", one, 10 * one) for one in (2, 3, 5, 6, 9, 10))))
    wanted = [(2, 20, "b"), (3, 30, None), (4, 1, "a"), (5, 50, "b"), (6, 60, None), (7, 1, "a"), (8, 2, "b")]
    assert tables.frame().sort("id").rows() == [*wanted, (9, 90, None), (10, 100, None)]
    write(sink, 2, ops(("update_after", 3, 31), ("delete", 4, None), ("update_after", 10, None)))
    assert tables.frame().sort("id").rows()[1:3] == [(3, 31, None), (5, 50, "b")]
    assert len(tables.rows()) == 8


def test_names_may_be_odd(tables: IcebergTables) -> None:
    schema = pa.schema([("Sel ect`\".a'", pa.large_string()), ("a.b", pa.int64()), ("ä", pa.int64())])
    sink = tables.sink("odd na-me", create=True, upsert=(schema.names[0], "a.b"), partition_by=schema.names[0])
    sink.check(schema)
    sink.make_target(schema)
    batch = lambda *rows: pa.record_batch(list(zip(*rows, strict=True)), schema=schema)  # noqa: E731
    write(sink, 1, batch(("x y", 1, 1), ("", 2, 2)))
    write(sink, 2, batch(("x y", 1, 10), ("z", 3, 3)))
    assert sorted(tables.frame("odd na-me").rows()) == [("", 2, 2), ("x y", 1, 10), ("z", 3, 3)]


# -- which files -----------------------------------------------------------------------------------------------------


def test_files_without_changed_keys_are_not_even_read(tables: IcebergTables, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = numbers_sink(tables)
    for start in (0, 100, 200):
        tables.append(pa.table({"number": range(start, start + 100, 2), "text": ["x"] * 50}))
    one, late = committer(sink), prepared(sink, 1, 101, 150)
    read: list[tuple[str, ...]] = []
    read_rows = iceberg_files.read_rows

    def counted(table: Any, task: Any, columns: Any) -> Any:
        read.append(tuple(columns))
        return read_rows(table, task, columns)

    monkeypatch.setattr(iceberg_files, "read_rows", counted)
    one.commit(permit(1), [late])
    assert read == [("number",), ("number", "text")]
    read.clear()
    one.commit(permit(2), [prepared(sink, 2, 3, 297)])  # between minimum and maximum, and in none
    assert set(read) == {("number",)}
    assert len(tables.rows()) == 153


def test_large_files_are_written_again_each_by_itself(tables: IcebergTables) -> None:
    sink = numbers_sink(tables, file_bytes=4_000)
    for start in (0, 1_000):
        tables.append(pa.table({"number": range(start, start + 1_000), "text": [str(n * n) for n in range(1_000)]}))
    for number in (5_000, 6_000, 7_000):
        committer(sink).commit(permit(number), [prepared(sink, number, number)])
    committer(sink).commit(permit(8_000), [prepared(sink, 8_000, 1, 1_001, 5_000, 6_000, 9_000)])
    ranges = sorted((min(found), max(found)) for found in file_numbers(tables))
    assert ranges == [(0, 999), (1_000, 1_999), (5_000, 9_000), (7_000, 7_000)]


def file_numbers(tables: IcebergTables) -> list[list[int]]:
    table = tables.table()
    return [
        iceberg_files.read_rows(table, task, ["number"]).column(0).to_pylist() for task in table.scan().plan_files()
    ]


def test_manifests_do_not_pile_up(tables: IcebergTables) -> None:
    sink = numbers_sink(tables)
    one = committer(sink)
    for checkpoint in range(1, 9):
        one.commit(permit(checkpoint), [prepared(sink, checkpoint, 1, 2)])
    snapshot = tables.table().current_snapshot()
    assert len(snapshot.manifests(tables.table().io)) <= 2
    with tables.table().transaction() as change:
        change.set_properties({"commit.manifest-merge.enabled": "true", "commit.manifest.min-count-to-merge": "2"})
    for checkpoint in range(11, 19):
        one.commit(permit(checkpoint), [prepared(sink, checkpoint, 1, checkpoint)])
    snapshot = tables.table().current_snapshot()
    assert len(snapshot.manifests(tables.table().io)) <= 2
    assert numbers(tables) == [1, *range(11, 19), 2]
    summary = snapshot.summary.additional_properties
    assert (summary["total-records"], summary["total-data-files"]) == ("10", str(len(tables.files())))


# -- commits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["append", "compact", "delete", "claim"])
def test_what_others_commit_between_read_and_commit_is_not_lost(
    tables: IcebergTables, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = numbers_sink(tables)
    tables.append(pa.table({"number": [1, 5, 6], "text": ["x"] * 3}))
    one, late = committer(sink), prepared(sink, 1, 1, 2)
    rewrite = iceberg_files.Rewriter.rewrite

    def slow(*arguments: Any) -> Any:
        monkeypatch.undo()
        found = rewrite(*arguments)
        match change:
            case "append":
                tables.append(pa.table({"number": [2, 7], "text": ["theirs"] * 2}))
            case "compact":
                tables.compact()
            case "delete":
                tables.delete("number = 5")
            case _:
                committer(sink, 2)
        return found

    monkeypatch.setattr(iceberg_files.Rewriter, "rewrite", slow)
    if change == "claim":
        with pytest.raises(FencedError):
            one.commit(permit(1), [late])
        assert numbers(tables) == [1, 5, 6]
    else:
        one.commit(permit(1), [late])
        wanted = {"append": [1, 2, 5, 6, 7], "compact": [1, 2, 5, 6], "delete": [1, 2, 6]}[change]
        assert numbers(tables) == wanted
        assert {row["number"]: row["text"] for row in tables.rows()}[2] == "2"
    snapshots = tables.table().metadata.snapshots
    assert sum("headgate.outputs" in one.summary.additional_properties for one in snapshots) == (change != "claim")
    known = {local_path(path) for one in snapshots for path in paths_of(tables, one)}
    assert data_files(tables) == known, "what a failed try wrote is removed"


def paths_of(tables: IcebergTables, snapshot: Any) -> set[str]:
    return {task.file.file_path for task in tables.table().scan(snapshot_id=snapshot.snapshot_id).plan_files()}


def test_a_commit_of_unknown_outcome_keeps_its_files_and_is_found(
    tables: IcebergTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = numbers_sink(tables)
    one, late = committer(sink), prepared(sink, 1, 1, 2)
    sync = tables.log._sync

    def lost(*given: Any) -> None:
        monkeypatch.undo()
        raise StorageError("commit to", "the table", "the answer was lost", is_transient=True)

    monkeypatch.setattr(tables.log, "_sync", lost)
    with pytest.raises(StorageError):
        one.commit(permit(1), [late])
    assert sync is not None
    before = tables.version()
    one.commit(permit(1), [late])
    assert (tables.version(), numbers(tables)) == (before, [1, 2])


def test_files_are_durable_before_the_snapshot_names_them(
    tables: IcebergTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = numbers_sink(tables, partition_by="text")
    one, late = committer(sink), prepared(sink, 1, 1, 2)
    synced: set[Path] = set()
    for name in ("sync_file", "sync_directory"):
        monkeypatch.setattr(f"headgate.connectors.lakes.data_files.{name}", synced.add)
    rewrite = iceberg_files.Rewriter.rewrite

    def checked(*arguments: Any) -> Any:
        found = rewrite(*arguments)
        files = data_files(tables)
        assert len(files) == 2
        assert files | {path.parent for path in files} <= synced
        return found

    monkeypatch.setattr(iceberg_files.Rewriter, "rewrite", checked)
    one.commit(permit(1), [late])


# -- refusals --------------------------------------------------------------------------------------------------------


def test_what_cannot_be_is_refused_when_the_pipeline_is_built(tables: IcebergTables) -> None:
    p = hg.Pipeline("p")
    rows = p.source(hg.FromRows([{"id": 1, "group": 2, "share": 0.5}]))
    counts = rows.key_by("id").agg(n=pl.len())
    tables.create(pa.schema([("id", pa.int64()), ("n", pa.int64()), ("share", pa.float64())]), "real", ["share"])
    for stream, name, given, said in (
        (counts, "t", {"upsert": "n"}, r"IcebergSink\(upsert=\['n'\]\) needs changes with this key, and .* is id"),
        (rows, "t", {"upsert": "share"}, "'share' has type double, which cannot be a key"),
        (rows, "t", {"upsert": "other"}, "there is no column 'other'; the columns are id, group, share"),
        (rows, "t", {"upsert": "id", "partition_by": "share"}, "partitioned by 'share', a floating number"),
        (counts, "real", {"upsert": "id"}, "partitioned by 'share', a floating number"),
    ):
        with pytest.raises(UsageError, match=said):
            stream.sink(tables.sink(name, create=True, **given))
    with pytest.raises(UsageError, match="names a column twice"):
        tables.sink(upsert=("id", "id"))
