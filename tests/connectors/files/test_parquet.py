"""Parquet files as a source: positions, splits, and text that stays encoded as it is there."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark import cloudpickle
from tests.connectors.source_reading import context, read_all

from headgate.connectors.base import EncodingReader, SourceBatch, SplitPosition
from headgate.connectors.files import parquet
from headgate.connectors.files.parquet import ACTIVE_FILES_MAX, ParquetFiles, ParquetPosition
from headgate.errors import CorruptionError, StorageError, UsageError
from headgate.operators.base import as_batch, with_encoded_text
from headgate.testing.source_kit import check_source

FEW = ["", None, "a/b", "Ä\U0001f600", "a\u0000b"]
ROWS = 240


def write_text(path: Path, text: pa.DataType, first_many: int) -> pa.Table:
    """Write rows of which ``many`` has ever other values from ``first_many`` on, in row groups of 80."""
    table = pa.table(
        {
            "n": pa.array(range(ROWS)),
            "few": pa.array([FEW[n % len(FEW)] for n in range(ROWS)], pa.large_string()).cast(text),
            "many": pa.array([str(n) if n >= first_many else "same" for n in range(ROWS)], pa.large_string()),
            "nested": pa.array([[FEW[n % 3]] for n in range(ROWS)], pa.list_(pa.string())),
        }
    )
    pq.write_table(table, path, row_group_size=80)
    return table


def opened(source: ParquetFiles, positions: dict[str, bytes] | None = None) -> Any:
    reader = source.open(context(positions=positions))
    assert isinstance(reader, EncodingReader)
    reader.keep_text_encoded()
    return reader


def batches(reader: Any) -> list[pa.RecordBatch]:
    found: list[pa.RecordBatch] = []
    while not reader.is_finished():
        polled = reader.poll()
        if isinstance(polled, SourceBatch) and polled.batch.num_rows:
            found.append(polled.batch)
    return found


def rows(read: list[pa.RecordBatch]) -> list[dict[str, Any]]:
    return [row for batch in read for row in as_batch(with_encoded_text(batch)).to_pylist()]


def encoded_names(batch: pa.RecordBatch) -> list[str]:
    return [field.name for field in batch.schema if pa.types.is_dictionary(field.type)]


@pytest.mark.parametrize("text", [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())], ids=str)
@pytest.mark.parametrize("first_many", [0, 40, 110, ROWS])
def test_encoded_text_is_the_text_from_wherever_reading_goes_on(
    tmp_path: Path, text: pa.DataType, first_many: int
) -> None:
    wanted = write_text(tmp_path / "a.parquet", text, first_many).to_pylist()
    source = ParquetFiles(tmp_path, batch_rows=30)
    schema = source.schema()
    reader = opened(source)
    read: list[pa.RecordBatch] = []
    while not reader.is_finished():
        assert rows(batches(opened(source, reader.positions()))) == wanted[sum(map(len, map(rows, [read]))) :]
        polled = reader.poll()
        if polled.batch.num_rows:
            read.append(polled.batch)
            assert as_batch(with_encoded_text(polled.batch)).schema.equals(schema)
    assert rows(read) == wanted


def test_text_of_many_values_is_read_without_its_encoding_from_then_on(tmp_path: Path) -> None:
    write_text(tmp_path / "a.parquet", pa.string(), 100)
    write_text(tmp_path / "b.parquet", pa.string(), 0)
    source = ParquetFiles([tmp_path / "a.parquet", tmp_path / "b.parquet"], batch_rows=80)
    source.schema()
    found = [encoded_names(batch) for batch in batches(opened(source))]
    assert found[0] == ["few", "many"]
    assert found[2:] == [["few"]] * 4


def test_text_that_no_reader_was_asked_to_leave_encoded_is_plain(tmp_path: Path) -> None:
    wanted = write_text(tmp_path / "a.parquet", pa.string(), ROWS).to_pylist()
    source = ParquetFiles(tmp_path)
    source.schema()
    found = batches(source.open(context()))
    assert [encoded_names(batch) for batch in found] == [[]] * len(found)
    assert [row for batch in found for row in batch.to_pylist()] == wanted


def test_encoded_text_that_is_none_is_not_handed_on(tmp_path: Path) -> None:
    offsets = pa.array([0, 1, 2], pa.int32()).buffers()[1]
    text = pa.StringArray.from_buffers(2, offsets, pa.py_buffer(b"\xff\xff"))
    pq.write_table(pa.table({"text": text}), tmp_path / "0.parquet")
    source = ParquetFiles(tmp_path)
    source.schema()
    with pytest.raises(StorageError, match=r"cannot read .*0\.parquet: .*UTF8"):
        opened(source).poll()


def write(directory: Path, files: int = 3, rows: int = 10) -> list[int]:
    for number in range(files):
        numbers = list(range(number * rows, (number + 1) * rows))
        table = pa.table({"n": numbers, "s": pa.array([str(n) for n in numbers]).dictionary_encode()})
        pq.write_table(table, directory / f"{number}.parquet", row_group_size=4)
    return list(range(files * rows))


def test_a_column_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"ParquetFiles\(columns=\) names 'a' twice"):
        ParquetFiles(tmp_path, columns=["a", "b", "a"])


@pytest.mark.long
def test_it_passes_the_conformance_kit(tmp_path: Path) -> None:
    expected = write(tmp_path, files=6)
    source = ParquetFiles(tmp_path, batch_rows=3)
    assert source.schema() == pa.schema([("n", pa.int64()), ("s", pa.large_string())])
    assert sorted(row["n"] for row in check_source(source, parallelisms=(2,))) == expected


def test_four_files_at_most_are_read_in_turn_and_decoded_as_far_as_they_are_needed(tmp_path: Path) -> None:
    write(tmp_path, files=6)
    source = ParquetFiles(tmp_path, batch_rows=3)
    source.schema()
    reader = source.open(context())

    def begun() -> list[tuple[str, int, int]]:
        found = {Path(path).name: ParquetPosition.decode(path, p) for path, p in reader.positions().items()}
        return [(name, p.group, p.row) for name, p in sorted(found.items()) if p.row and not p.is_finished]

    for _ in range(4):
        reader.poll()
    assert begun() == [(f"{number}.parquet", 0, 3) for number in range(4)]
    while not reader.is_finished():
        assert len(begun()) <= ACTIVE_FILES_MAX == 4
        reader.poll()


def test_a_url_and_chosen_columns_are_read(tmp_path: Path) -> None:
    expected = write(tmp_path)
    (tmp_path / "_staging").mkdir()
    write(tmp_path / "_staging")
    source = cloudpickle.loads(cloudpickle.dumps(ParquetFiles(f"file://{tmp_path}", columns=["n"])))
    source.schema()
    rows, _ = read_all(source.open(context()))
    assert sorted(row["n"] for row in rows) == expected
    assert list(rows[0]) == ["n"]


def test_wrong_use_is_refused_in_the_driver(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no Parquet file"):
        ParquetFiles(tmp_path).schema()
    (tmp_path / "x.parquet").write_bytes(b"no parquet here")
    with pytest.raises(UsageError, match=r"x\.parquet cannot be read as Parquet"):
        ParquetFiles(tmp_path).schema()
    write(tmp_path)
    (tmp_path / "x.parquet").unlink()
    with pytest.raises(UsageError, match="has no column 'zz', only"):
        ParquetFiles(tmp_path, columns=["zz"]).schema()
    pq.write_table(pa.table({"n": ["text"]}), tmp_path / "x.parquet")
    with pytest.raises(UsageError, match="read files of one schema at a time"):
        ParquetFiles(tmp_path).schema()


def test_damage_is_reported_by_name(tmp_path: Path) -> None:
    write(tmp_path, files=1)
    source = ParquetFiles(tmp_path)
    source.schema()
    path = tmp_path / "0.parquet"
    with pytest.raises(CorruptionError, match=r"position of .*0\.parquet"):
        source.open(context(positions={str(path): b"?"}))
    reader = source.open(context())
    path.write_bytes(b"PAR1" + bytes(100))
    with pytest.raises(StorageError, match=r"cannot read .*0\.parquet"):
        reader.poll()


def test_text_that_is_none_is_not_handed_on(tmp_path: Path) -> None:
    text = pa.StringArray.from_buffers(1, pa.array([0, 1], pa.int32()).buffers()[1], pa.py_buffer(b"\xff"))
    pq.write_table(pa.table({"text": text}), tmp_path / "0.parquet")
    source = ParquetFiles(tmp_path)
    source.schema()
    with pytest.raises(StorageError, match=r"cannot read .*0\.parquet: .*UTF8"):
        source.open(context()).poll()


def positions_after(tmp_path: Path, polls: int) -> dict[str, bytes]:
    source = ParquetFiles(tmp_path, batch_rows=3)
    source.schema()
    reader = source.open(context())
    for _ in range(polls):
        reader.poll()
    return reader.positions()


def rest(tmp_path: Path, positions: dict[str, bytes], parallelism: int = 2) -> list[int]:
    source = ParquetFiles(tmp_path)
    source.schema()
    readers = [source.open(context(index, parallelism, positions)) for index in range(parallelism)]
    return sorted(row["n"] for reader in readers for row in read_all(reader)[0])


@pytest.mark.parametrize("polls", [1, 20])
def test_a_file_that_was_changed_or_replaced_is_refused_by_name(tmp_path: Path, polls: int) -> None:
    """With other row groups, another position would go on in the middle of other records."""
    write(tmp_path, files=1)
    positions = positions_after(tmp_path, polls)
    table = pq.read_table(tmp_path / "0.parquet")
    pq.write_table(table, tmp_path / "0.parquet", row_group_size=3)
    with pytest.raises(UsageError, match=r"0\.parquet was changed or replaced after reading it had begun"):
        rest(tmp_path, positions)


def test_a_file_changed_before_any_of_it_was_read_is_none_of_our_business(tmp_path: Path) -> None:
    write(tmp_path, files=1)
    positions = positions_after(tmp_path, 0)
    pq.write_table(pq.read_table(tmp_path / "0.parquet"), tmp_path / "0.parquet", row_group_size=3)
    assert rest(tmp_path, positions) == list(range(10))


@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_files_may_be_added_and_finished_ones_removed_between_two_starts(tmp_path: Path, parallelism: int) -> None:
    write(tmp_path, files=2)
    positions = positions_after(tmp_path, 40)
    (tmp_path / "0.parquet").unlink()
    pq.write_table(pa.table({"n": [100], "s": pa.array(["x"]).dictionary_encode()}), tmp_path / "00.parquet")
    assert rest(tmp_path, positions, parallelism) == [100]


def test_a_file_removed_before_it_was_read_is_an_error_that_names_it(tmp_path: Path) -> None:
    write(tmp_path, files=2)
    positions = positions_after(tmp_path, 1)
    (tmp_path / "0.parquet").unlink()
    with pytest.raises(StorageError, match=r"0\.parquet"):
        rest(tmp_path, positions)


def test_a_url_names_one_file_or_a_directory_or_is_refused(tmp_path: Path) -> None:
    expected = write(tmp_path, files=1)
    source = ParquetFiles(f"file://{tmp_path}/0.parquet")
    source.schema()
    assert sorted(row["n"] for row in read_all(source.open(context()))[0]) == expected
    with pytest.raises(UsageError, match=f"{tmp_path}/nothing does not exist"):
        ParquetFiles(f"file://{tmp_path}/nothing").schema()
    with pytest.raises(UsageError, match="files cannot be read from nowhere://bucket; give a local path, or a URL of"):
        ParquetFiles("nowhere://bucket/x")
    with pytest.raises(UsageError, match="local Parquet files cannot be followed"):
        ParquetFiles(tmp_path, follow=True)


def test_a_file_whose_footer_cannot_be_read_now_is_a_storage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, files=1)
    positions = positions_after(tmp_path, 20)

    def fails(*_: object) -> None:
        raise OSError("Input/output error")

    monkeypatch.setattr(parquet, "fingerprint", fails)
    with pytest.raises(StorageError, match=r"0\.parquet.*Input/output error"):
        rest(tmp_path, positions, 1)


@pytest.mark.parametrize("is_drained", [False, True])
def test_a_failure_after_the_first_file_was_read_and_removed_is_recovered_from(
    tmp_path: Path, is_drained: bool
) -> None:
    # a new generation opens the source of the same program again
    expected = write(tmp_path)
    source = ParquetFiles(tmp_path)
    source.schema()
    reader = source.open(context())
    rows: list[int] = []
    first = str(tmp_path / "0.parquet")
    while is_drained or not ParquetPosition.decode(first, reader.positions()[first]).is_finished:
        if reader.is_finished():
            break
        batch = reader.poll()
        rows += [] if batch is None else [row["n"] for row in batch.batch.to_pylist()]
    (tmp_path / "0.parquet").unlink()
    again = cloudpickle.loads(cloudpickle.dumps(source)).open(context(positions=reader.positions()))
    assert sorted(rows + [row["n"] for row in read_all(again)[0]]) == expected


def test_a_file_that_is_replaced_while_it_is_opened_is_read_as_one_of_the_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # its position is of the file that was read
    write(tmp_path, files=1)
    path = str(tmp_path / "0.parquet")
    source = ParquetFiles(tmp_path, batch_rows=3)
    source.schema()
    reader = source.open(context())
    print_of = parquet.fingerprint

    def replaced_after(file: pa.NativeFile) -> tuple[int, int]:
        found = print_of(file)
        pq.write_table(pa.table({"n": [7] * 9, "s": ["x"] * 9}), tmp_path / "other")
        (tmp_path / "other").rename(path)
        return found

    monkeypatch.setattr(parquet, "fingerprint", replaced_after)
    batch = reader.poll()
    assert batch is not None
    assert batch.batch["n"].to_pylist() == [0, 1, 2]
    position = ParquetPosition.decode(path, reader.positions()[path])
    with pytest.raises(UsageError, match="was changed or replaced after reading it had begun"):
        source.open(context(positions={path: position.encode()})).poll()


def test_progress_is_the_rows_read_of_the_files_that_are_open(tmp_path: Path) -> None:
    table = pa.table({"n": range(25)})
    pq.write_table(table, tmp_path / "0.parquet", row_group_size=10)
    path, source = str(tmp_path / "0.parquet"), ParquetFiles(tmp_path, batch_rows=6)
    source.schema()
    reader = source.open(context())
    assert reader.progress() == {}
    seen = []
    while (batch := reader.poll()) is not None and not batch.is_split_finished:
        seen.append(reader.progress()[path])
    assert {(one.end, one.unit) for one in seen} == {(25, "records")}
    assert [one.position for one in seen] == [6, 10, 16, 20, 25]
    assert reader.progress() == {}
    again = source.open(context(positions={path: ParquetPosition(group=1, row=6).encode()}))
    again.poll()
    assert again.progress() == {path: SplitPosition(20, 25)}


def test_times_of_int96_that_are_finer_than_microseconds_are_refused(tmp_path: Path) -> None:
    far, fine = dt.datetime(9999, 12, 31, 23, 59, 59, 999_999), np.datetime64(1_001, "ns")
    path = tmp_path / "a.parquet"

    def read(column: pa.Array) -> list[Any]:
        pq.write_table(pa.table({"x": column, "n": range(len(column))}), path, use_deprecated_int96_timestamps=True)
        source = ParquetFiles(tmp_path, batch_rows=1)
        source.schema()
        return [row["x"] for row in read_all(source.open(context()))[0]]

    plain = [dt.datetime(1, 1, 1), dt.datetime(1969, 12, 31, 23, 59, 59, 999_999), None, far]
    assert read(pa.array(plain, pa.timestamp("us"))) == [one and one.replace(tzinfo=dt.UTC) for one in plain]
    for column in (pa.array([np.datetime64(0, "ns"), fine]), pa.array([[fine], None], pa.list_(pa.timestamp("ns")))):
        with pytest.raises(UsageError, match="column 'x' has a time with a part of a microsecond"):
            read(column)
