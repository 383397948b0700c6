"""The frozen hash of keys: it decides which subtask owns a key and is part of every checkpoint.

Rules KG8 of docs/spec/key-groups.md; test vectors in tests/state/test_key_hash.py. Changing any constant here
makes existing checkpoints unreadable at another parallelism. Never uses Python's or Polars' hash.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from headgate.codec.text_words import MARGIN, WordText
from headgate.model.ids import key_groups_of_subtask
from headgate.state.text_hash import BYTES_MAX, hash_short_texts

Hashes: TypeAlias = npt.NDArray[np.uint64]
Words: TypeAlias = npt.NDArray[np.int64]

NULL_HASH = np.uint64(0x6E756C6C6B657921)
"""Hash of a null."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1
_SHORT_ROWS_MIN = 64
"""Fewer texts are hashed one by one as fast."""
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)


def is_text(dtype: pa.DataType) -> bool:
    """Whether values of ``dtype`` are strings or binaries (hashed by content)."""
    return bool(
        pa.types.is_large_string(dtype)
        or pa.types.is_string(dtype)
        or pa.types.is_large_binary(dtype)
        or pa.types.is_binary(dtype)
    )


def is_key_type(dtype: pa.DataType) -> bool:
    """Whether ``dtype`` can be a key: integers, floats, booleans, temporal types, strings and binaries."""
    return bool(
        is_text(dtype)
        or pa.types.is_integer(dtype)
        or pa.types.is_floating(dtype)
        or pa.types.is_boolean(dtype)
        or pa.types.is_date32(dtype)
        or pa.types.is_timestamp(dtype)
        or pa.types.is_duration(dtype)
    )


KEY_TYPES = (
    "integers, floats, booleans, dates, timestamps, durations, strings and binaries can; cast it, such as to text"
)
"""Which types can be keys, for messages."""


def column_words(column: pa.Array) -> Words:
    """Return one 64-bit word per value of a fixed-width column; equal values have equal words.

    Nulls become an arbitrary word. No copy where values have 64 bits, and none is null.
    """
    if column.null_count:
        column = column.fill_null(False if pa.types.is_boolean(column.type) else 0)
    values: npt.NDArray[Any] = column.to_numpy(zero_copy_only=False)
    if pa.types.is_floating(column.type):
        return float_words(values)
    return values.view(np.int64) if values.dtype.itemsize == 8 else values.astype(np.int64)


def float_words(values: npt.NDArray[np.floating]) -> Words:
    """Return the bits of float64 values, with one NaN and one zero."""
    wide = values.astype(np.float64) + 0.0
    wide[np.isnan(wide)] = np.nan
    return wide.view(np.int64)


def mix(words: npt.NDArray[np.int64] | Hashes) -> Hashes:
    """Return splitmix64's finaliser of each word plus the golden ratio, in a new array."""
    z: Hashes = words.view(np.uint64) + _GOLDEN
    shifted = z >> _S30
    z ^= shifted
    z *= _MIX_1
    np.right_shift(z, _S27, out=shifted)
    z ^= shifted
    z *= _MIX_2
    np.right_shift(z, _S31, out=shifted)
    z ^= shifted
    return z


def text_bytes(column: pa.Array) -> list[bytes]:
    """Return strings (as UTF-8) or binaries without nulls as ``bytes``."""
    values: list[bytes] = column.cast(pa.large_binary()).to_pylist()
    return values


def _text_bounds(column: pa.Array) -> tuple[npt.NDArray[np.uint8], Words, Words]:
    """Return the bytes of strings or binaries without nulls, and the places in ``WordText`` of these."""
    values = column.cast(pa.large_binary())
    _, offsets, data = values.buffers()
    bounds = np.frombuffer(offsets, np.int64)[values.offset : values.offset + len(values) + 1]
    first = int(bounds[0])
    inside = np.frombuffer(data or b"", np.uint8)[first : int(bounds[-1])]
    places = bounds + (MARGIN - first)
    return inside, places[:-1], places[1:]


def hash_column(column: pa.Array) -> Hashes:
    """Return the hash of each value of one column."""
    if is_text(column.type):
        if len(column) >= _SHORT_ROWS_MIN and not column.null_count:
            text, begins, ends = _text_bounds(column)
            if int((ends - begins).max()) <= BYTES_MAX:
                return hash_short_texts(WordText(text), begins, ends)
        encoded = pc.dictionary_encode(column)
        distinct = [xxhash.xxh3_64_intdigest(value) for value in text_bytes(encoded.dictionary)]
        table: Hashes = np.array([*distinct, int(NULL_HASH)], dtype=np.uint64)
        codes = encoded.indices
        if codes.null_count:
            codes = codes.fill_null(len(distinct))
        rows: npt.NDArray[np.integer] = codes.to_numpy()
        hashes: Hashes = table[rows]
        return hashes
    mixed = mix(column_words(column))
    if column.null_count:
        mixed[column.is_null().to_numpy(zero_copy_only=False)] = NULL_HASH
    return mixed


def hash_columns(batch: pa.RecordBatch, names: Sequence[str]) -> Hashes:
    """Return one hash per row of the columns ``names``, combined in their order."""
    combined = hash_column(batch.column(names[0]))
    if len(names) == 1:
        return combined
    for name in names[1:]:
        combined = combined * _MIX_1
        combined ^= hash_column(batch.column(name))
    return mix(combined)


def value_hash(dtype: pa.DataType) -> Callable[[Any], int] | None:
    """Return what hashes one Python value as ``hash_column`` does; None where only a column can be hashed.

    For a few values: a column of one takes longer than the value.
    """
    if pa.types.is_large_string(dtype):
        return lambda value: xxhash.xxh3_64_intdigest(value.encode())
    return _mixed if pa.types.is_integer(dtype) else None


def _mixed(word: int) -> int:
    z = (word + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def key_groups(hashes: Hashes, max_parallelism: int) -> npt.NDArray[np.int64]:
    """Return ``hash mod max_parallelism`` per row."""
    if max_parallelism & (max_parallelism - 1) == 0:
        return (hashes & np.uint64(max_parallelism - 1)).view(np.int64)
    return (hashes % np.uint64(max_parallelism)).view(np.int64)


def owned_rows(
    batch: pa.RecordBatch, keys: Sequence[str], max_parallelism: int, parallelism: int, subtask_index: int
) -> pa.RecordBatch:
    """Return the rows of ``batch`` with key groups of this subtask."""
    owned = key_groups_of_subtask(subtask_index, max_parallelism, parallelism)
    groups = key_groups(hash_columns(batch, keys), max_parallelism)
    mask = (groups >= owned.start) & (groups < owned.stop)
    return batch if mask.all() else batch.filter(pa.array(mask))
