"""Values of one type as bytes, thousands at once (RB2 of docs/spec/rocksdb.md).

What has a fixed width is its bytes, text is its own, and structs and lists are MessagePack, structs by the names of
their fields. Values are typed: nothing is pickled, and nothing but values comes out of bytes. In front of what expires
stands when it does, so that this can be told without the value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headgate.state.columns import is_fixed, storage_type, to_arrow, to_numpy
from headgate.state.key_hash import is_text, text_bytes
from headgate.state.ttl import EXPIRES_COLUMN

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
    """Values behind their expiries."""

    def __init__(self, dtype: pa.DataType) -> None:
        self._values = value_codec(dtype)
        self._expiries = value_codec(pa.int64())

    def encode(self, column: pa.Array) -> list[bytes]:
        """See ``ValueCodec``."""
        values, expires_ms = column.flatten()
        pairs = zip(self._expiries.encode(expires_ms), self._values.encode(values), strict=True)
        return [front + value for front, value in pairs]

    def decode(self, values: Sequence[bytes]) -> pa.Array:
        """See ``ValueCodec``."""
        return timed(self._values.decode([value[_EXPIRY_BYTES:] for value in values]), pa.array(expiries_of(values)))


class _Fixed:
    """Numbers, booleans and times: little-endian."""

    def __init__(self, dtype: pa.DataType) -> None:
        self._dtype = dtype
        self._storage = storage_type(dtype).newbyteorder("<")

    def encode(self, column: pa.Array) -> list[bytes]:
        """See ``ValueCodec``."""
        numbers = np.ascontiguousarray(to_numpy(column).astype(self._storage, copy=False))
        found: list[bytes] = numbers.view(f"V{self._storage.itemsize}").tolist()
        return found

    def decode(self, values: Sequence[bytes]) -> pa.Array:
        """See ``ValueCodec``."""
        return to_arrow(np.frombuffer(b"".join(values), self._storage), self._dtype)


class _Text:
    """Strings, as UTF-8, and binaries."""

    def __init__(self, dtype: pa.DataType) -> None:
        self._dtype = dtype

    def encode(self, column: pa.Array) -> list[bytes]:
        """See ``ValueCodec``."""
        return text_bytes(column)

    def decode(self, values: Sequence[bytes]) -> pa.Array:
        """See ``ValueCodec``."""
        return pa.array(values, pa.large_binary()).cast(self._dtype)


class _Nested:
    """Structs, lists and decimals."""

    def __init__(self, dtype: pa.DataType) -> None:
        self._dtype = dtype
        self._plain = _plain(dtype)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder()

    def encode(self, column: pa.Array) -> list[bytes]:
        """See ``ValueCodec``."""
        return [self._encoder.encode(value) for value in column.cast(self._plain).to_pylist()]

    def decode(self, values: Sequence[bytes]) -> pa.Array:
        """See ``ValueCodec``."""
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
