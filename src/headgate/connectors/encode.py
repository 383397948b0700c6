"""Records as bytes of a file: JSON lines, CSV or Parquet.

Counterpart: ``files.sink`` and ``memory.Print``. Never touches a single row in Python.
"""

from __future__ import annotations

import io
import re
from typing import Any, Literal, TypeAlias

import polars as pl
import pyarrow as pa
import pyarrow.csv as pv
import pyarrow.parquet as pq

from headgate.errors import UsageError

FileFormat: TypeAlias = Literal["jsonl", "csv", "parquet"]
FORMATS = ("jsonl", "csv", "parquet")


def check_format(file_format: str, schema: pa.Schema) -> None:
    """Refuse a schema that files of ``file_format`` cannot hold.

    Raises:
        UsageError
    """
    if not len(schema):
        raise UsageError("records without columns cannot be written to files; select at least one column")
    if file_format == "jsonl":
        check_json(schema)
        return
    for field in schema if file_format == "csv" else ():
        if pa.types.is_nested(field.type) or pa.types.is_duration(field.type) or pa.types.is_large_binary(field.type):
            raise UsageError(
                f"column '{field.name}' has type {field.type}, which CSV cannot hold; drop it, cast it, or write JSON "
                "lines or Parquet"
            )
    for field in schema:
        if _has_empty_struct(field.type):
            raise UsageError(f"column '{field.name}' has a struct without fields, which Parquet cannot hold; drop it")


def _has_empty_struct(dtype: pa.DataType) -> bool:
    if pa.types.is_struct(dtype) and not dtype.num_fields:
        return True
    return any(_has_empty_struct(dtype.field(at).type) for at in range(dtype.num_fields))


def encode(file_format: str, table: pa.Table) -> bytes | memoryview:
    """Return the content of a file that holds ``table``.

    Raises:
        UsageError: it is CSV, and a line would be blank.
    """
    if file_format == "jsonl":
        return json_lines(table)
    sink = pa.BufferOutputStream()
    if file_format == "csv":
        pv.write_csv(table, sink)
        if table.num_columns == 1 and table.column(0).null_count:
            return _without_blank_lines(table, bytes(sink.getvalue()))
    else:
        pq.write_table(table, sink, compression="zstd")
    return memoryview(sink.getvalue())


class FileEncoder:
    """Encodes one file table by table; what is returned one after the other is its content."""

    def __init__(self, file_format: str) -> None:
        self._format = file_format
        self._is_begun = False
        self._out = _Written()
        self._parquet: pq.ParquetWriter | None = None

    def add(self, table: pa.Table) -> bytes | memoryview:
        """Return how the file goes on with ``table``, which has the columns of the tables before it.

        Raises:
            UsageError: as for ``encode``.
        """
        if self._format == "parquet":
            if self._parquet is None:
                self._parquet = pq.ParquetWriter(self._out, table.schema, compression="zstd")
            self._parquet.write_table(table)
            return self._out.take()
        data = encode(self._format, table)
        if self._format == "csv" and self._is_begun:
            data = memoryview(data)[len(encode("csv", table.schema.empty_table())) :]  # without a second header
        self._is_begun = True
        return data

    def finish(self) -> bytes:
        """Return the end of the file."""
        if self._parquet is None:
            return b""
        self._parquet.close()
        return self._out.take()


class _Written(io.RawIOBase):
    """A file that gives away what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[bytes] = []
        self._size_bytes = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size_bytes

    def write(self, data: Any) -> int:
        part = bytes(data)
        self._parts.append(part)
        self._size_bytes += len(part)
        return len(part)

    def take(self) -> bytes:
        """Return what was written since the last call."""
        data = b"".join(self._parts)
        self._parts.clear()
        return data


def _without_blank_lines(table: pa.Table, data: bytes) -> bytes:
    """Return CSV of one column with ``""`` for nulls: readers leave blank lines out. It would be an empty text, too."""
    field = table.schema.field(0)
    if pa.types.is_string(field.type) or pa.types.is_large_string(field.type):
        raise UsageError(
            f"column '{field.name}' has a null, and is the only column: its line in CSV would be blank, and readers "
            "leave it out; fill it, add a column, or write JSON lines or Parquet"
        )
    return re.sub(rb"(?m)^\n", b'""\n', data)


def decode(file_format: str, data: bytes) -> pl.DataFrame:
    """Return the records of a file that ``encode`` made; types of JSON and CSV are inferred."""
    source = io.BytesIO(data)
    if file_format == "csv":
        return pl.read_csv(source)
    return pl.read_ndjson(source, infer_schema_length=None) if file_format == "jsonl" else pl.read_parquet(source)


def check_json(schema: pa.Schema) -> None:
    """Refuse a schema with columns that JSON lines cannot hold.

    Raises:
        UsageError
    """
    for field in schema:
        if _has_binary(field.type):
            raise UsageError(f"column '{field.name}' has type {field.type}, which JSON cannot hold; drop or encode it")


def _has_binary(dtype: pa.DataType) -> bool:
    if pa.types.is_binary(dtype) or pa.types.is_large_binary(dtype):
        return True
    return any(_has_binary(dtype.field(i).type) for i in range(dtype.num_fields))


def json_lines(data: pa.RecordBatch | pa.Table) -> bytes:
    """Return records as JSON, one a line. NaN and infinities become null; timestamps are ISO text."""
    out = io.BytesIO()
    _frame_of(data).write_ndjson(out)
    return out.getvalue()


def _frame_of(data: pa.RecordBatch | pa.Table) -> pl.DataFrame:
    """Return it as a frame. A small one that is made of several pieces costs ten times as much as of one."""
    if isinstance(data, pa.Table):
        batches = data.combine_chunks().to_batches()
        data = batches[0] if len(batches) == 1 else data
    return pl.DataFrame(data)
