"""Schemas of streams: what may be stored, and how two schemas differ.

Counterpart: ``streams`` keeps them in the catalogue. Source: docs/spec/stream-store.md §2. Never changes data.
"""

from __future__ import annotations

import functools
import struct

import pyarrow as pa
import xxhash

from headgate.errors import CorruptionError, UsageError

TEXT_SCHEMA = pa.schema([pa.field("line", pa.large_string())])
"""A stream of text lines."""

_MAGIC = b"HGSCHEM\n"
_TRAILER = struct.Struct("<8sQ")


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """Return ``schema`` without metadata and with every field nullable.

    Raises:
        UsageError: it has no columns, a column twice, or a dictionary in a column.
    """
    names = schema.names
    if not names:
        raise UsageError("a stream needs at least one column")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"a stream's columns need distinct names, but {', '.join(twice)} occurs twice")
    for field in schema:
        encoded = _dictionary_in(field.type)
        if encoded is not None:
            where = "" if encoded == field.type else f" within {field.type}"
            raise UsageError(
                f"column '{field.name}' is dictionary-encoded{where}, which streams do not store; "
                f"cast it to {encoded.value_type}"
            )
    return pa.schema([pa.field(field.name, field.type) for field in schema])


def _dictionary_in(dtype: pa.DataType) -> pa.DictionaryType | None:
    """Return a dictionary that ``dtype`` is, or has within: its values would be in no part of a chunk (LY2)."""
    if pa.types.is_dictionary(dtype):
        return dtype
    if isinstance(dtype, pa.BaseExtensionType):
        return _dictionary_in(dtype.storage_type)
    inner = (_dictionary_in(dtype.field(number).type) for number in range(dtype.num_fields))
    return next((found for found in inner if found is not None), None)


def schema_difference(expected: pa.Schema, found: pa.Schema) -> str:
    """Return the differing columns in one clause, or "" when there is none (order matters, nullability not)."""
    wanted = {field.name: field.type for field in expected}
    there = {field.name: field.type for field in found}
    problems = [f"'{name}' ({dtype}) is missing" for name, dtype in wanted.items() if name not in there]
    problems += [f"'{name}' ({dtype}) is unknown to it" for name, dtype in there.items() if name not in wanted]
    problems += [
        f"'{name}' is {there[name]} instead of {dtype}"
        for name, dtype in wanted.items()
        if name in there and there[name] != dtype
    ]
    if not problems and expected.names != found.names:
        problems.append(f"the order must be {', '.join(expected.names)}")
    return "; ".join(problems)


def difference_by_name(expected: pa.Schema, found: pa.Schema) -> str:
    """Return what ``schema_difference`` does, where columns are matched by name: their order does not matter."""
    if set(expected.names) == set(found.names):
        found = pa.schema([found.field(name) for name in expected.names])
    return schema_difference(expected, found)


def check_same_schema(stream: str, expected: pa.Schema, found: pa.Schema) -> None:
    """Check that events of schema ``found`` fit the stream.

    Raises:
        UsageError: they do not; the message names the columns.
    """
    if expected.equals(found):
        return
    difference = schema_difference(expected, found)
    if difference:
        raise UsageError(f"events do not fit stream '{stream}': column {difference}")


def merged_schema(present: pa.Schema, columns: pa.Schema) -> pa.Schema:
    """Return ``present`` with ``columns``: of another type where it has them, behind its own where not."""
    given = {field.name: field for field in columns}
    kept = [given.get(field.name, field) for field in present]
    return pa.schema([*kept, *(field for field in columns if field.name not in present.names)])


def check_added_may_be_null(stream: str, present: pa.Schema, wanted: pa.Schema) -> None:
    """Check that columns which a stream does not have yet may be null, as they are in what is there (S76).

    Raises:
        UsageError: one must not.
    """
    for field in wanted:
        if field.name not in present.names and not field.nullable:
            raise UsageError(
                f"stream '{stream}' cannot be updated: column '{field.name}' ({field.type}) would be added and must "
                "not be null, but the events that are there have none; let it be nullable"
            )


def encode_schema(schema: pa.Schema) -> bytes:
    """Return the bytes the catalogue keeps: those of Arrow, and behind them their checksum."""
    data = bytes(schema.serialize())
    return data + _TRAILER.pack(_MAGIC, xxhash.xxh3_64_intdigest(data))


def decode_schema(path: str, data: bytes) -> pa.Schema:
    """Return the schema of ``encode_schema``.

    Raises:
        CorruptionError
    """
    try:
        return _decoded(data)
    except (pa.ArrowException, struct.error, OSError, TypeError, ValueError, LookupError, OverflowError) as error:
        raise CorruptionError(path, 0, "an Arrow schema", str(error)) from error


@functools.lru_cache(maxsize=256)
def _decoded(data: bytes) -> pa.Schema:
    data, (magic, checksum) = data[: -_TRAILER.size], _TRAILER.unpack(data[-_TRAILER.size :])
    if magic != _MAGIC or xxhash.xxh3_64_intdigest(data) != checksum:
        raise ValueError("bytes of another checksum")
    schema = pa.ipc.read_schema(pa.py_buffer(data))
    schema.to_string()  # which reads all names: Arrow itself takes any bytes for one
    return schema
