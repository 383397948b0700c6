"""The frozen hash of keys: it decides which subtask owns a key and is part of every checkpoint.

Rules KG8 of docs/spec/key-groups.md; test vectors in tests/state/test_key_hash.py. Changing any constant here
makes existing checkpoints unreadable at another parallelism. Never uses Python's or Polars' hash. Texts are hashed by
XXH3: short ones many at once, by the XXH3 specification (github.com/Cyan4973/xxHash, ``doc/xxhash_spec.md``) for inputs
of at most 16 bytes, with its default secret and seed 0; longer ones one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from headgate.codec.text_words import MARGIN, Ints, WordText
from headgate.model.ids import key_groups_of_subtask

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


BYTES_MAX = 16

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e"
    "e03590e6813a264c"
)
"""The first 64 bytes of the default secret."""


def _secret(at: int, size: int = 8) -> int:
    return int.from_bytes(_SECRET[at : at + size], "little")


_FLIP_3 = np.uint64(_secret(0, 4) ^ _secret(4, 4))
_FLIP_8 = np.uint64(_secret(8) ^ _secret(16))
_FLIP_16_LOW, _FLIP_16_HIGH = np.uint64(_secret(24) ^ _secret(32)), np.uint64(_secret(40) ^ _secret(48))
_EMPTY = np.uint64(0x2D06800538D394C2)
_PRIME_2, _PRIME_3 = np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0x165667B19E3779F9)
_PRIME_AVALANCHE, _PRIME_MX = np.uint64(0x165667919E3779F9), np.uint64(0x9FB21C651E98DF25)
_LOW = np.uint64(0xFFFFFFFF)


def hash_short_texts(text: WordText, begins: Ints, ends: Ints) -> Hashes:
    """Return the hash of each text between begins and ends, of which none has more than ``BYTES_MAX`` bytes."""
    sizes = ends - begins
    shortest, longest = int(sizes.min()), int(sizes.max())
    for low, high, of in _BY_SIZE:
        if low <= shortest and longest <= high:
            return of(text, begins, ends)
    found = np.empty(len(sizes), np.uint64)
    for low, high, of in _BY_SIZE:
        rows = np.flatnonzero((sizes >= low) & (sizes <= high))
        if len(rows):
            found[rows] = of(text, begins[rows], ends[rows])
    return found


def _of_0(text: WordText, begins: Ints, ends: Ints) -> Hashes:
    return np.full(len(begins), _EMPTY)


def _of_1_to_3(text: WordText, begins: Ints, ends: Ints) -> Hashes:
    sizes = ends - begins
    first, middle, last = (text.bytes.take(at).astype(np.uint64) for at in (begins, begins + (sizes >> 1), ends - 1))
    word: Hashes = first << np.uint64(16) | middle << np.uint64(24) | last | sizes.view(np.uint64) << np.uint64(8)
    word ^= _FLIP_3
    word ^= word >> np.uint64(33)
    word *= _PRIME_2
    word ^= word >> np.uint64(29)
    word *= _PRIME_3
    word ^= word >> np.uint64(32)
    return word


def _of_4_to_8(text: WordText, begins: Ints, ends: Ints) -> Hashes:
    word: Hashes = (text.words(begins) << np.uint64(32)) + (text.words(ends - 4) & _LOW)
    word ^= _FLIP_8
    word ^= _rotated(word, 49) ^ _rotated(word, 24)
    word *= _PRIME_MX
    word ^= (word >> np.uint64(35)) + (ends - begins).view(np.uint64)
    word *= _PRIME_MX
    word ^= word >> np.uint64(28)
    return word


def _of_9_to_16(text: WordText, begins: Ints, ends: Ints) -> Hashes:
    low, high = text.words(begins) ^ _FLIP_16_LOW, text.words(ends - 8) ^ _FLIP_16_HIGH
    word = _folded_product(low, high)
    word += low.byteswap()
    word += high
    word += (ends - begins).view(np.uint64)
    word ^= word >> np.uint64(37)
    word *= _PRIME_AVALANCHE
    word ^= word >> np.uint64(32)
    return word


_Hash: TypeAlias = Callable[[WordText, Ints, Ints], Hashes]
_BY_SIZE: tuple[tuple[int, int, _Hash], ...] = (
    (9, 16, _of_9_to_16),
    (4, 8, _of_4_to_8),
    (1, 3, _of_1_to_3),
    (0, 0, _of_0),
)


def _rotated(words: Hashes, bits: int) -> Hashes:
    return words << np.uint64(bits) | words >> np.uint64(64 - bits)


def _folded_product(one: Hashes, other: Hashes) -> Hashes:
    """Return both halves of the product of 128 bits, combined by exclusive or."""
    shift = np.uint64(32)
    one_low, one_high, other_low, other_high = one & _LOW, one >> shift, other & _LOW, other >> shift
    lowest, highest = one_low * other_low, one_high * other_high
    middle = one_high * other_low
    carried = (lowest >> shift) + (middle & _LOW) + one_low * other_high
    highest += (middle >> shift) + (carried >> shift)
    highest ^= carried << shift | lowest & _LOW
    return highest
