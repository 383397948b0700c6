"""XXH3 of many short texts at once: what ``xxhash.xxh3_64_intdigest`` gives for each.

Source: the XXH3 specification (github.com/Cyan4973/xxHash, ``doc/xxhash_spec.md``), for inputs of at most 16 bytes,
with its default secret and seed 0. Rule KG8 of docs/spec/key-groups.md. Longer texts are hashed one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from headgate.codec.text_words import Ints, WordText

Hashes: TypeAlias = npt.NDArray[np.uint64]

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
