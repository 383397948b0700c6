"""Events as lines of text, from and to Arrow batches.

Counterparts: ``headgate streams write`` and ``read``; ``json_lines``. Never holds more than one batch of input.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import IO

import pyarrow as pa

from headgate.cli.json_lines import json_lines, python_rows
from headgate.errors import UsageError
from headgate.store.schemas import TEXT_SCHEMA
from headgate.store.streams import StreamInfo

BLOCK_BYTES = 4 << 20
"""Input is read in blocks of whole lines of about this size."""

TYPES = {
    "string": pa.large_string(),
    "text": pa.large_string(),
    "binary": pa.large_binary(),
    "int64": pa.int64(),
    "int": pa.int64(),
    "int32": pa.int32(),
    "float64": pa.float64(),
    "float": pa.float64(),
    "float32": pa.float32(),
    "bool": pa.bool_(),
    "timestamp": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", tz="UTC"),
    "date": pa.date32(),
}


class Format(StrEnum):
    """How events look as text."""

    AUTO = "auto"
    TEXT = "text"
    JSON = "json"


def is_json(format_: Format, stream: StreamInfo, *, as_json: bool = False) -> bool:
    """Return whether events of ``stream`` are JSON: if that was asked for, or they are not just lines of text."""
    return as_json or format_ is Format.JSON or (format_ is Format.AUTO and not stream.schema.equals(TEXT_SCHEMA))


def parse_columns(text: str) -> pa.Schema:
    """Return the schema of ``name:type,name:type``.

    Raises:
        UsageError
    """
    fields = []
    for item in text.split(","):
        name, colon, dtype = item.strip().partition(":")
        if not name or not colon or dtype not in TYPES:
            raise UsageError(f"column {item.strip()!r} must look like name:type, with a type of {', '.join(TYPES)}")
        fields.append(pa.field(name, TYPES[dtype]))
    return pa.schema(fields)


def line_blocks(file: IO[bytes]) -> Iterator[bytes]:
    """Yield blocks of whole lines; the last line may lack its end. A pipe is passed on as it comes."""
    rest = b""
    read = getattr(file, "read1", file.read)
    while block := read(BLOCK_BYTES):
        head, newline, tail = block.rpartition(b"\n")
        if not newline:
            rest += block
            continue
        yield rest + head + newline
        rest = tail
    if rest:
        yield rest


def batch_of_lines(block: bytes, schema: pa.Schema) -> pa.RecordBatch:
    """Return one event per line, in the one text column of ``schema``.

    Raises:
        UsageError: the stream has other columns.
    """
    if len(schema) != 1 or not pa.types.is_large_string(schema.field(0).type):
        raise UsageError(
            f"text lines need a stream with one text column, this one has {', '.join(schema.names)}; "
            "write --format json"
        )
    text = block.decode("utf-8", errors="replace")
    lines = text.removesuffix("\n").replace("\r\n", "\n").split("\n")
    return pa.record_batch([pa.array(lines, schema.field(0).type)], schema=schema)


def text_lines(batch: pa.RecordBatch, *, as_json: bool) -> Iterator[str]:
    """Yield one line per event: JSON, or the values separated by tabs."""
    if as_json:
        yield from json_lines(batch)
    else:
        for row in python_rows(batch):
            yield "\t".join("" if value is None else str(value) for value in row.values())


def size_text(size_bytes: int) -> str:
    """Return a size for people."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1_024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1_024
    return f"{size:.1f} TiB"
