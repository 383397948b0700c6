"""Tables of Delta with the newest row of each key: what only these tables have. See ``test_table_changes``."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from lake_program import committer, permit, prepared
from lakes import DeltaTables, changing, numbers_sink, ops, output, write

import headgate as hg
from headgate.connectors.lakes.delta import DeltaSink
from headgate.errors import UsageError
from headgate.testing import Collect, run

deltalake = pytest.importorskip("deltalake")


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
