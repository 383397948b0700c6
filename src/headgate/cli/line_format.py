"""Events and rows as lines of text or JSON, from and to Arrow batches.

JSON has text for what it lacks: NaN and infinities, decimals, times, durations, and bytes as hexadecimal digits.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterator
from datetime import date, datetime, timedelta
from enum import StrEnum
from typing import IO, Any

import pyarrow as pa
import pyarrow.json as pj

from headgate.codec.exact_values import MisfitError
from headgate.errors import UsageError
from headgate.operators.schemas import MAP_FIELDS, canonical_type, has_map, to_canonical
from headgate.store.streams import TEXT_SCHEMA, StreamInfo

_NAMED = re.compile(rb'"(NaN|-?Infinity)"')


class _Digits(str):
    """A number as it is written."""

    __slots__ = ()


# -- out ---------------------------------------------------------------------------------------------------------------


def json_lines(batch: pa.RecordBatch) -> Iterator[str]:
    """Yield an object for each row. None of its values is another one than the row has."""
    return map(_json_line, python_rows(batch))


def python_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return rows for people; times that Python does not have, such as of the year 10000, are texts."""
    batch = to_canonical(batch, pa.schema([field.with_type(_with_entries(field.type)) for field in batch.schema]))
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
    except (OverflowError, ValueError):
        schema = pa.schema([field.with_type(_timeless(field.type)) for field in batch.schema])
        rows = batch.cast(schema).to_pylist()
    return rows


def _with_entries(dtype: pa.DataType) -> pa.DataType:
    """Return a map as the list of its entries, which is how Headgate carries it."""
    return canonical_type(dtype) if has_map(dtype) else dtype


def _timeless(dtype: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(dtype):
        return pa.struct([field.with_type(_timeless(field.type)) for field in dtype])
    if pa.types.is_list(dtype) or pa.types.is_large_list(dtype):
        return pa.large_list(_timeless(dtype.value_type))
    return pa.large_string() if pa.types.is_timestamp(dtype) or pa.types.is_date(dtype) else dtype


def _json_line(row: dict[str, Any]) -> str:
    try:
        return json.dumps(row, default=_json_value, ensure_ascii=False, allow_nan=False)
    except ValueError:  # a NaN or an infinity, which JSON does not have
        return json.dumps(_with_named_floats(row), default=_json_value, ensure_ascii=False)


def _with_named_floats(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_named_floats(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_with_named_floats(inner) for inner in value]
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _json_value(value: object) -> str:
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, timedelta):
        return _duration_text(value)
    if isinstance(value, bytes):
        return value.hex()
    return str(value)


def _duration_text(value: timedelta) -> str:
    """Return a duration as ISO 8601 has it, with all of its digits."""
    size = abs(value)
    seconds = size.days * 86_400 + size.seconds
    digits = f".{size.microseconds:06}".rstrip("0") if size.microseconds else ""
    return f"{'-' if value < timedelta(0) else ''}PT{seconds}{digits}S"


# -- in ----------------------------------------------------------------------------------------------------------------


def batch_of_json(block: bytes, schema: pa.Schema) -> pa.RecordBatch:
    """Return one event per JSON line; missing columns are null, others than the stream's are an error.

    Raises:
        UsageError: not JSON, or a value of another type.
    """
    text = _with_literals(block, schema) if _NAMED.search(block) else block
    parsed = pa.schema([field.with_type(_read_type(field.type, is_parsed=True)) for field in schema])
    read = pa.schema([field.with_type(_read_type(field.type)) for field in schema])
    try:
        table = pj.read_json(
            io.BytesIO(text),
            read_options=pj.ReadOptions(use_threads=False, block_size=len(text) + 1),
            parse_options=pj.ParseOptions(explicit_schema=parsed, unexpected_field_behavior="error"),
        )
        batch = table.select(schema.names).combine_chunks().to_batches()
        if not batch:
            return pa.RecordBatch.from_pylist([], schema=schema)
        return to_canonical(batch[0].cast(read), schema)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, MisfitError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"input is not JSON lines with the columns {', '.join(schema.names)}: {reason}") from error


def _read_type(dtype: pa.DataType, *, is_parsed: bool = False) -> pa.DataType:
    """Return the type in which values of ``dtype`` are read from JSON, before it is looked at whether they fit.

    ``is_parsed``: return the type for pyarrow's JSON reader, which reads dates and times as text.
    """
    if is_parsed and (pa.types.is_date32(dtype) or pa.types.is_time(dtype)):
        return pa.string()
    if pa.types.is_float32(dtype):
        return pa.float64()  # the reader makes infinity of what is too large
    if pa.types.is_struct(dtype):
        return pa.struct([field.with_type(_read_type(field.type, is_parsed=is_parsed)) for field in dtype])
    if pa.types.is_map(dtype):
        pair = zip(MAP_FIELDS, (dtype.key_type, dtype.item_type), strict=True)
        return pa.list_(pa.struct([pa.field(name, _read_type(inner, is_parsed=is_parsed)) for name, inner in pair]))
    if pa.types.is_list(dtype) or pa.types.is_large_list(dtype) or pa.types.is_fixed_size_list(dtype):
        return pa.list_(_read_type(dtype.value_type, is_parsed=is_parsed))
    return dtype


def _with_literals(block: bytes, schema: pa.Schema) -> bytes:
    """Return the lines with NaN and infinities as numbers, as Arrow reads them, where ``schema`` has numbers."""
    try:
        rows = [json.loads(line, parse_float=_Digits) for line in block.splitlines() if line.strip()]
    except ValueError:
        return block  # Arrow says what is wrong
    whole = pa.struct(list(schema))
    return "\n".join(json.dumps(_literal(row, whole)) for row in rows).encode()


def _literal(value: Any, dtype: pa.DataType) -> Any:
    if isinstance(value, dict) and pa.types.is_struct(dtype):
        types = {field.name: field.type for field in dtype}
        return {name: _literal(inner, types.get(name, pa.null())) for name, inner in value.items()}
    if isinstance(value, list):
        inner = getattr(_read_type(dtype), "value_type", pa.null())
        return [_literal(element, inner) for element in value]
    is_number = isinstance(value, _Digits) or value in ("NaN", "Infinity", "-Infinity")
    return float(value) if is_number and pa.types.is_floating(dtype) else value


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
