"""Routing: key column → 64-bit hash → fraction of [0, 1) → segment.

Counterpart: ``store.chunks`` splits batches by it. Source: S2; frozen by the vectors in docs/spec/stream-store.md and
tests/store/test_routing.py, because written events lie where this hash put them.
Never uses Python's ``hash`` and never loops over events (distinct strings are looped over).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from headgate.errors import UsageError

NULL_HASH = 0x9AE16A3B2F90404F
NAN_BITS = 0x7FF8000000000000

Hashes = npt.NDArray[np.uint64]
Segments = npt.NDArray[np.int64]


def check_key_type(dtype: pa.DataType, column: str) -> None:
    """Refuse types that have no frozen hash.

    Raises:
        UsageError: the column cannot be a routing key.
    """
    if not (_is_text(dtype) or _is_integral(dtype) or pa.types.is_floating(dtype)):
        raise UsageError(f"column '{column}' of type {dtype} cannot be a routing key; use a text or number column")


def segments_of(column: pa.Array, segments_count: int) -> Segments:
    """Return the segment of each value: the one of ``segments_count`` equal ranges that its fraction falls in."""
    return ((places_of(column) * np.uint64(segments_count)) >> np.uint64(32)).astype(np.int64)


def ranges_of(column: pa.Array, lows: Sequence[int]) -> Segments:
    """Return in which range the place of each value is, counted from 0; ``lows`` are the first places of the ranges."""
    return np.searchsorted(np.asarray(lows, dtype=np.uint64), places_of(column), side="right").astype(np.int64) - 1


def places_of(column: pa.Array) -> Hashes:
    """Return where each value is among all keys: the upper half of its hash, a fixed-point number below 1."""
    return hash_column(column) >> np.uint64(32)


def hash_column(column: pa.Array) -> Hashes:
    """Return the frozen 64-bit hash of each value."""
    dtype = column.type
    if _is_text(dtype):
        return _hash_text(column)
    bits = _float_bits(column) if pa.types.is_floating(dtype) else _integer_bits(column)
    hashes = _splitmix64(bits)
    if column.null_count:
        hashes[pc.is_null(column).to_numpy(zero_copy_only=False)] = np.uint64(NULL_HASH)
    return hashes


def hash_text(value: str) -> int:
    """Return the hash of one text: what ``hash_column`` gives for it."""
    return xxhash.xxh3_64_intdigest(value.encode())


def _hash_text(column: pa.Array) -> Hashes:
    encoded = column.dictionary_encode()
    distinct = encoded.dictionary.cast(pa.large_binary()).to_pylist()
    table = np.empty(len(distinct) + 1, dtype=np.uint64)
    table[:-1] = [xxhash.xxh3_64_intdigest(value) for value in distinct]
    table[-1] = NULL_HASH
    indices = pc.fill_null(encoded.indices, len(distinct)) if column.null_count else encoded.indices
    return np.asarray(table[indices.to_numpy()], dtype=np.uint64)


def _integer_bits(column: pa.Array) -> Hashes:
    dtype = column.type
    if pa.types.is_boolean(dtype):
        plain = pc.cast(column, pa.uint8())
    elif pa.types.is_date32(dtype):
        plain = column.view(pa.int32())
    elif pa.types.is_integer(dtype):
        plain = column
    else:
        plain = column.view(pa.int64())  # timestamps and durations
    values = pc.fill_null(plain, 0).to_numpy()
    if values.dtype == np.uint64:
        return np.asarray(values, dtype=np.uint64)
    return np.asarray(values.astype(np.int64).view(np.uint64), dtype=np.uint64)


def _float_bits(column: pa.Array) -> Hashes:
    values = pc.fill_null(pc.cast(column, pa.float64()), 0.0).to_numpy()
    bits = (values + 0.0).view(np.uint64)  # -0.0 + 0.0 is 0.0
    return np.where(np.isnan(values), np.uint64(NAN_BITS), bits)


def _splitmix64(bits: Hashes) -> Hashes:
    with np.errstate(over="ignore"):
        mixed = bits + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _is_text(dtype: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(dtype)
        or pa.types.is_large_string(dtype)
        or pa.types.is_binary(dtype)
        or pa.types.is_large_binary(dtype)
    )


def _is_integral(dtype: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(dtype)
        or pa.types.is_boolean(dtype)
        or pa.types.is_date32(dtype)
        or pa.types.is_timestamp(dtype)
        or pa.types.is_duration(dtype)
    )
