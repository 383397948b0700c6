"""Keys and values as bytes.

``key group | table | key | suffix`` and typed values (docs/spec/rocksdb.md).

The key group comes first, so that a range of key groups is a range of the database. Within a key, rows are in the
order of their suffix: the place in a list, the key of a map's entry. Values of a fixed width are their bytes, text is
its own, and structs and lists are MessagePack, structs by the names of their fields. Nothing is pickled. An expiry
stands before its value, so that it can be read without the value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.state.descriptors import KeyColumns
from headgate.state.key_hash import Hashes, Words, column_words, hash_columns, is_text, key_groups, text_bytes
from headgate.state.key_index import words_to_array
from headgate.state.ttl import EXPIRES_COLUMN
from headgate.state.values import is_fixed, storage_type, to_arrow, to_numpy

PREFIX_BYTES = 4
TIME_BYTES = 8
HASH_BYTES = 8
_LENGTH_BYTES = 4
_WORD_BYTES = 8
_SIGN = np.uint64(1 << 63)


@dataclass(frozen=True, slots=True)
class EncodedKeys:
    """Some keys, to be looked up in any table of the database."""

    hashes: Hashes
    groups: npt.NDArray[np.int64]
    keys: list[bytes]

    def in_table(self, table: int) -> list[bytes]:
        """Return what the rows of each key begin with in ``table``."""
        prefixes = np.empty(len(self.keys), [("group", ">u2"), ("table", ">u2")])
        prefixes["group"], prefixes["table"] = self.groups, table
        return [prefix + key for prefix, key in zip(prefixes.view("V4").tolist(), self.keys, strict=True)]


def encoded_keys(columns: Sequence[pa.Array], keys: KeyColumns, max_parallelism: int) -> EncodedKeys:
    """Return the keys that have these columns."""
    names = keys.section_names
    batch = pa.RecordBatch.from_arrays(list(columns), names=names)
    hashes = hash_columns(batch, names)
    assert max_parallelism <= 1 << 16, "a key group has two bytes in a row"
    return EncodedKeys(hashes, key_groups(hashes, max_parallelism), encode_columns(columns))


def disk_order(columns: Sequence[pa.Array], keys: KeyColumns, max_parallelism: int) -> npt.NDArray[np.int64]:
    """Return the places of keys in about the order of their rows: by group, numbers by their first column."""
    names = keys.section_names
    hashes = hash_columns(pa.RecordBatch.from_arrays(list(columns), names=names), names)
    groups = key_groups(hashes, max_parallelism).astype(np.uint16)  # of 16 bits: sorted in one go
    if is_text(columns[0].type):
        return np.argsort(groups, kind="stable")
    by_word = np.argsort(column_words(columns[0]))
    found: npt.NDArray[np.int64] = by_word[np.argsort(groups[by_word], kind="stable")]
    return found


def encode_columns(columns: Sequence[pa.Array]) -> list[bytes]:
    """Return one value per row, from which ``decode_columns`` finds the columns again."""
    parts = [_encode_column(column) for column in columns]
    return parts[0] if len(parts) == 1 else [b"".join(row) for row in zip(*parts, strict=True)]


def _encode_column(column: pa.Array) -> list[bytes]:
    if is_text(column.type):  # a length in front says where it ends, whatever bytes it has
        return [len(value).to_bytes(_LENGTH_BYTES, "big") + value for value in text_bytes(column)]
    found: list[bytes] = (column_words(column).view(np.uint64) ^ _SIGN).astype(">u8").view("V8").tolist()
    return found


def decode_columns(
    rows: Sequence[bytes], types: Sequence[pa.DataType], start: int = PREFIX_BYTES
) -> tuple[list[pa.Array], list[int]]:
    """Return the columns that ``rows`` hold from byte ``start`` on, and where each row goes on after them."""
    starts = [start] * len(rows)
    columns: list[pa.Array] = []
    for dtype in types:
        if is_text(dtype):
            begins = [at + _LENGTH_BYTES for at in starts]
            ends = [
                begin + int.from_bytes(row[begin - _LENGTH_BYTES : begin], "big")
                for begin, row in zip(begins, rows, strict=True)
            ]
            values = [row[begin:end] for row, begin, end in zip(rows, begins, ends, strict=True)]
            columns.append(pa.array(values, pa.large_binary()).cast(dtype))
        else:
            ends = [at + _WORD_BYTES for at in starts]
            words = b"".join([row[at:end] for row, at, end in zip(rows, starts, ends, strict=True)])
            columns.append(words_to_array(_words(words), dtype))
        starts = ends
    return columns, starts


def encode_times(times_ms: Words) -> list[bytes]:
    """Return times so that their bytes are in their order."""
    found: list[bytes] = (times_ms.view(np.uint64) ^ _SIGN).astype(">u8").view("V8").tolist()
    return found


def decode_times(rows: Sequence[bytes], start: int) -> Words:
    """Return the times that ``rows`` hold from byte ``start`` on."""
    return _words(b"".join([row[start : start + TIME_BYTES] for row in rows]))


def _words(data: bytes) -> Words:
    return (np.frombuffer(data, ">u8").astype(np.uint64) ^ _SIGN).view(np.int64)


def encode_hashes(hashes: Hashes) -> list[bytes]:
    """Return hashes so that their bytes are in their order."""
    found: list[bytes] = hashes.astype(">u8").view("V8").tolist()
    return found


def decode_hashes(rows: Sequence[bytes], start: int) -> Hashes:
    """Return the hashes that ``rows`` hold from byte ``start`` on."""
    return np.frombuffer(b"".join([row[start : start + HASH_BYTES] for row in rows]), ">u8").astype(np.uint64)


def decode_groups(rows: Sequence[bytes]) -> Words:
    """Return the key groups that ``rows`` are of."""
    return np.frombuffer(b"".join([row[:2] for row in rows]), ">u2").astype(np.int64)


def group_start(group: int) -> bytes:
    """Return where the rows of key group ``group`` begin."""
    return group.to_bytes(2, "big")


def runs(rows: Sequence[bytes]) -> Iterator[tuple[int, int, int]]:
    """Yield the table, start and end of each run of ``rows`` that are in one table. A long scan has few of them."""
    tables = np.frombuffer(b"".join([row[2:PREFIX_BYTES] for row in rows]), ">u2")
    starts = [0, *(np.flatnonzero(np.diff(tables)) + 1).tolist(), len(rows)]
    for start, end in pairwise(starts):
        yield int(tables[start]), start, end


def places(count: int) -> list[bytes]:
    """Return the suffixes of the first ``count`` elements of a list."""
    found: list[bytes] = np.arange(count, dtype=">u8").view("V8").tolist()
    return found


def places_of(numbers: npt.NDArray[np.int64]) -> list[bytes]:
    """Return the suffix of each place in a list."""
    found: list[bytes] = numbers.astype(">u8").view("V8").tolist()
    return found


_EXPIRY_BYTES = 8


class ValueCodec(Protocol):
    """Between a column without nulls and one ``bytes`` per value."""

    def encode(self, column: pa.Array) -> list[bytes]:
        """Return the bytes of each value."""

    def decode(self, values: Sequence[bytes]) -> pa.Array:
        """Return the column of which ``encode`` made ``values``."""


def value_codec(dtype: pa.DataType) -> ValueCodec:
    """Return the codec of a canonical type."""
    if is_fixed(dtype):
        return _Fixed(dtype)
    return _Text(dtype) if is_text(dtype) else _Nested(dtype)


def timed_codec(dtype: pa.DataType) -> ValueCodec:
    """Return the codec of values that expire: columns of ``timed``."""
    return _Timed(dtype)


def timed(values: pa.Array, expires_ms: pa.Array) -> pa.StructArray:
    """Return values with their expiries as one column."""
    return pa.StructArray.from_arrays([values, expires_ms], names=["value", EXPIRES_COLUMN])


def expiries_of(values: Sequence[bytes]) -> npt.NDArray[np.int64]:
    """Return when the values expire of which these are the bytes."""
    return np.frombuffer(b"".join([value[:_EXPIRY_BYTES] for value in values]), "<i8")


def expiring_at(values: Sequence[bytes], expires_ms: int) -> list[bytes]:
    """Return the bytes of the same values with another expiry."""
    front = expires_ms.to_bytes(_EXPIRY_BYTES, "little", signed=True)
    return [front + value[_EXPIRY_BYTES:] for value in values]


class _Timed:
    """Values, each preceded by its expiry."""

    def __init__(self, dtype: pa.DataType) -> None:
        self._values = value_codec(dtype)
        self._expiries = value_codec(pa.int64())

    def encode(self, column: pa.Array) -> list[bytes]:
        values, expires_ms = column.flatten()
        pairs = zip(self._expiries.encode(expires_ms), self._values.encode(values), strict=True)
        return [front + value for front, value in pairs]

    def decode(self, values: Sequence[bytes]) -> pa.Array:
        return timed(self._values.decode([value[_EXPIRY_BYTES:] for value in values]), pa.array(expiries_of(values)))


class _Fixed:
    """Numbers, booleans and times: little-endian."""

    def __init__(self, dtype: pa.DataType) -> None:
        self._dtype = dtype
        self._storage = storage_type(dtype).newbyteorder("<")

    def encode(self, column: pa.Array) -> list[bytes]:
        numbers = np.ascontiguousarray(to_numpy(column).astype(self._storage, copy=False))
        found: list[bytes] = numbers.view(f"V{self._storage.itemsize}").tolist()
        return found

    def decode(self, values: Sequence[bytes]) -> pa.Array:
        return to_arrow(np.frombuffer(b"".join(values), self._storage), self._dtype)


class _Text:
    """Strings, as UTF-8, and binaries."""

    def __init__(self, dtype: pa.DataType) -> None:
        self._dtype = dtype

    def encode(self, column: pa.Array) -> list[bytes]:
        return text_bytes(column)

    def decode(self, values: Sequence[bytes]) -> pa.Array:
        return pa.array(values, pa.large_binary()).cast(self._dtype)


class _Nested:
    """Structs, lists and decimals."""

    def __init__(self, dtype: pa.DataType) -> None:
        self._dtype = dtype
        self._plain = _plain(dtype)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder()

    def encode(self, column: pa.Array) -> list[bytes]:
        return [self._encoder.encode(value) for value in column.cast(self._plain).to_pylist()]

    def decode(self, values: Sequence[bytes]) -> pa.Array:
        return _typed(pa.array([self._decoder.decode(value) for value in values], self._plain), self._dtype)


def _typed(values: pa.Array, dtype: pa.DataType) -> pa.Array:
    """Return values of ``_plain(dtype)``, as they were just made, in ``dtype``.

    Where there are decimals that is no single cast: below what is null Arrow has empty texts, and would read them.
    """
    if not _has_decimals(dtype):
        return values.cast(dtype)
    if pa.types.is_struct(dtype):
        columns = [_typed(column, field.type) for column, field in zip(values.flatten(), dtype, strict=True)]
        return pa.StructArray.from_arrays(columns, fields=list(dtype), mask=values.is_null())
    if pa.types.is_large_list(dtype):
        elements = _typed(values.values, dtype.value_type)
        return pa.LargeListArray.from_arrays(values.offsets, elements, type=dtype, mask=values.is_null())
    return values.cast(dtype)


def _has_decimals(dtype: pa.DataType) -> bool:
    if pa.types.is_struct(dtype):
        return any(_has_decimals(field.type) for field in dtype)
    return _has_decimals(dtype.value_type) if pa.types.is_large_list(dtype) else pa.types.is_decimal(dtype)


def _plain(dtype: pa.DataType) -> pa.DataType:
    """Return ``dtype`` with its times as numbers, which have no limits and no zone, and its decimals as texts."""
    if pa.types.is_struct(dtype):
        return pa.struct([pa.field(field.name, _plain(field.type)) for field in dtype])
    if pa.types.is_large_list(dtype):
        return pa.large_list(_plain(dtype.value_type))
    if pa.types.is_decimal(dtype):
        return pa.large_string()
    if pa.types.is_date32(dtype):
        return pa.int32()
    return pa.int64() if pa.types.is_temporal(dtype) else dtype
