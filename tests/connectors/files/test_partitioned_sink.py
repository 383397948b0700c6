"""Files of a sink that are divided by the values of columns. Rule D16 of docs/spec/connectors.md."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from tests.killing import run_killing

import headgate as hg
from headgate.connectors.base import SinkContext
from headgate.connectors.files.file_committer import committed_files, read_committed
from headgate.connectors.files.file_sink import FileSink
from headgate.connectors.files.partitions import NULL, divided, values_of
from headgate.connectors.files.publish_log import StagedFile, decode_files, encode_files
from headgate.errors import CorruptionError, UsageError
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Committable
from headgate.protocol.checkpoints.commit import CommitPermit

SCHEMA = pa.schema([("n", pa.int64()), ("day", pa.date32()), ("name", pa.large_string())])
DAYS = (dt.date(2015, 7, 15), dt.date(2015, 7, 16))
NAMES = ["a", "", None, "é", "x/y", "..", "00:01", "100%", "a=b", " ", "..\\up", "dots.", '"]', "_own", "%41"]


def rows() -> list[dict[str, Any]]:
    return [{"n": n, "day": DAYS[n % 2], "name": name} for n, name in enumerate(NAMES * 2)]


def context(generation: int = 1) -> SinkContext:
    return SinkContext("p", "out", 0, 1, Generation(generation), SCHEMA)


def prepared(sink: FileSink, checkpoint: int, records: list[dict[str, Any]], generation: int = 1) -> Committable:
    writer = sink.open(context(generation))
    writer.write(pa.RecordBatch.from_pylist(records, schema=SCHEMA))
    sealed = writer.seal(CheckpointId(checkpoint))
    payload = sealed.prepare()
    assert payload is not None
    assert sealed.prepare() == payload
    return Committable("out", CheckpointId(checkpoint), 0, Generation(generation), payload)


def commit(sink: FileSink, checkpoint: int, committable: Committable, generation: int = 1) -> None:
    committer = sink.open_committer("p", "out", Generation(generation))
    committer.recover([committable])
    for _ in range(2):  # a second time, nothing happens
        committer.commit(CommitPermit(CheckpointId(checkpoint), Generation(generation)), [committable])


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
def test_records_are_in_the_directories_of_their_values(tmp_path: Path, form: Any) -> None:
    sink = FileSink(tmp_path, form, partition_by=("day", "name"), roll_interval=0)
    commit(sink, 1, prepared(sink, 1, rows()))
    found = read_committed(str(tmp_path)).select("n", "day", "name").sort("n").rows()
    assert found == [(row["n"], row["day"].isoformat(), row["name"] or None) for row in rows()]
    directories = {path.rpartition("/")[0] for path in committed_files(str(tmp_path))}
    assert len(directories) == len({(row["day"], row["name"] or None) for row in rows()})
    assert "day=2015-07-15/name=00%3A01" in directories
    assert {Path(tmp_path, path).parent.parent.parent for path in committed_files(str(tmp_path))} == {tmp_path}


def test_duckdb_reads_the_columns_from_the_directories(tmp_path: Path) -> None:
    records = [row for row in rows() if row["name"] != "%41"]
    sink = FileSink(tmp_path, "parquet", partition_by=["day", "name"], roll_interval=0)
    commit(sink, 1, prepared(sink, 1, records))
    read = f"read_parquet('{tmp_path}/day=*/*/*.parquet', hive_partitioning = true, hive_types = {{'name': VARCHAR}})"
    found = duckdb.sql(f"SELECT n, day, name FROM {read} ORDER BY n").fetchall()
    assert found == [(row["n"], row["day"], row["name"] or None) for row in records]


def test_a_pipeline_writes_each_record_once_although_a_worker_is_killed(tmp_path: Path) -> None:
    pipeline = hg.Pipeline("divided", parallelism=2, checkpointing=hg.Checkpointing(interval="50ms"))
    records = [{"n": n, "minute": n // 100} for n in range(2_000)]
    numbers = pipeline.source(hg.FromRows(records, splits=2, batch_rows=50))
    numbers.sink(FileSink(tmp_path / "out", "jsonl", partition_by="minute", roll_interval=0))
    run_killing(pipeline, 1)
    found = read_committed(str(tmp_path / "out")).sort("n")
    assert found.rows() == [(n, str(n // 100)) for n in range(2_000)]


def test_prepared_files_of_partitions_are_swept_when_they_are_given_up(tmp_path: Path) -> None:
    sink = FileSink(tmp_path, partition_by="name", roll_interval=0)
    prepared(sink, 1, rows())
    spoof = [{"n": 1, "day": DAYS[0], "name": "x-0000000001-00000-9999999999-00000.json"}]
    prepared(sink, 1, spoof)
    kept = prepared(sink, 2, rows()[:2], generation=2)
    commit(sink, 2, kept, generation=2)
    assert sorted(read_committed(str(tmp_path))["n"].to_list()) == [0, 1]
    assert not [path for path in (tmp_path / "_staging").rglob("*") if path.is_file()]


def test_a_list_of_files_leads_nowhere_else() -> None:
    for name in ("_claims/p.out/0000000001", "a=../../x", "../x", "a=b/../x", "/etc/x", "a=b/", "=b/x", "a=/x"):
        with pytest.raises(CorruptionError, match="expected"):
            decode_files("list", encode_files([StagedFile(name, 1, 1, "0")]))
    good = [StagedFile("a=b/c=%3A/x.csv", 1, 1, "0")]
    assert decode_files("list", encode_files(good)) == good


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["no"], "names 'no'; the records have n, day, name"),
        (["n", "day", "name"], "names every column"),
        (["price"], "of type double; it takes texts"),
        (["_own"], "cannot begin the name of a directory"),
    ],
)
def test_columns_that_cannot_name_directories_are_refused(tmp_path: Path, columns: list[str], message: str) -> None:
    extra = [(name, pa.float64()) for name in columns if name in ("price", "_own")]
    schema = pa.schema([*SCHEMA, *(pa.field(*pair) for pair in extra)])
    with pytest.raises(UsageError, match=message):
        FileSink(tmp_path, partition_by=columns).check(schema)


def test_a_column_named_twice_and_a_value_too_long_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="names a column twice"):
        FileSink(tmp_path, partition_by=["n", "n"])
    with pytest.raises(UsageError, match=r"it has 305 bytes, and at most 240 are possible"):
        prepared(FileSink(tmp_path, partition_by="name", roll_interval=0), 1, [{"n": 1, "name": "x" * 300}])


def test_a_text_like_the_directory_of_nulls_is_no_null() -> None:
    table = pa.table({"p": [NULL, None, ""], "n": [1, 2, 3]})
    found = {place: part["n"].to_pylist() for place, part in divided(table, ["p"])}
    assert list(found.values()) == [[1], [2, 3]]
    assert [values_of(f"{place}/file")["p"] for place in found] == [NULL, None]
