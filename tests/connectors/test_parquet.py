from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark import cloudpickle
from source_reading import context, read_all

from headgate.connectors.parquet import ParquetFiles
from headgate.errors import CorruptionError, StorageError, UsageError
from headgate.testing.sourcekit import check_source


def write(directory: Path, files: int = 3, rows: int = 10) -> list[int]:
    for number in range(files):
        numbers = list(range(number * rows, (number + 1) * rows))
        table = pa.table({"n": numbers, "s": pa.array([str(n) for n in numbers]).dictionary_encode()})
        pq.write_table(table, directory / f"{number}.parquet", row_group_size=4)
    return list(range(files * rows))


def test_it_passes_the_conformance_kit(tmp_path: Path) -> None:
    # N16, N17
    expected = write(tmp_path, files=6)
    source = ParquetFiles(tmp_path, batch_rows=3)
    assert source.schema() == pa.schema([("n", pa.int64()), ("s", pa.large_string())])
    assert sorted(row["n"] for row in check_source(source)) == expected


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
