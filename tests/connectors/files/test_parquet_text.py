"""Text of Parquet files that stays encoded as it is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.connectors.source_reading import context

from headgate.connectors.base import EncodingReader, SourceBatch
from headgate.connectors.files.parquet import ParquetFiles
from headgate.errors import StorageError
from headgate.operators.base import as_batch, with_encoded_text

FEW = ["", None, "a/b", "Ä\U0001f600", "a\u0000b"]
ROWS = 240


def write(path: Path, text: pa.DataType, first_many: int) -> pa.Table:
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
    wanted = write(tmp_path / "a.parquet", text, first_many).to_pylist()
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
    write(tmp_path / "a.parquet", pa.string(), 100)
    write(tmp_path / "b.parquet", pa.string(), 0)
    source = ParquetFiles([tmp_path / "a.parquet", tmp_path / "b.parquet"], batch_rows=80)
    source.schema()
    found = [encoded_names(batch) for batch in batches(opened(source))]
    assert found[0] == ["few", "many"]
    assert found[2:] == [["few"]] * 4


def test_text_that_no_reader_was_asked_to_leave_encoded_is_plain(tmp_path: Path) -> None:
    wanted = write(tmp_path / "a.parquet", pa.string(), ROWS).to_pylist()
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
