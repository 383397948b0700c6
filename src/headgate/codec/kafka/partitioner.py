"""Which partition a key belongs to, as Kafka's clients in Java choose it: murmur2 of the key's bytes.

Records of one key written by Headgate and by others must meet in one partition.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_SEED, _M, _R = 0x9747B28C, np.uint32(0x5BD1E995), np.uint32(24)


def partitions_of_keys(keys: pa.Array, partitions_count: int) -> npt.NDArray[np.int64]:
    """Return the partition of each key. A key that is null has the hash of an empty one: choose another way for it."""
    hashes = murmur2(keys) & np.uint32(0x7FFFFFFF)
    return (hashes % np.uint32(partitions_count)).astype(np.int64)


def murmur2(keys: pa.Array) -> npt.NDArray[np.uint32]:
    """Return the hash of each key. A step takes the next four bytes of all keys that have as many."""
    keys = keys.cast(pa.large_binary())
    offsets = np.frombuffer(keys.buffers()[1], np.int64)[keys.offset : keys.offset + len(keys) + 1]
    data = np.frombuffer(keys.buffers()[2] or b"", np.uint8)
    begin, size = offsets[:-1], np.diff(offsets)
    hashes = np.uint32(_SEED) ^ size.astype(np.uint32)
    with np.errstate(over="ignore"):
        for step in range(int(size.max(initial=0)) // 4):
            rows = np.flatnonzero(size >= 4 * (step + 1))
            at = begin[rows] + 4 * step
            word = data[at].astype(np.uint32)
            for index in (1, 2, 3):
                word |= data[at + index].astype(np.uint32) << np.uint32(8 * index)
            word *= _M
            word ^= word >> _R
            word *= _M
            hashes[rows] = hashes[rows] * _M ^ word
        rest = size % 4
        for index in (2, 1, 0):
            rows = np.flatnonzero(rest > index)
            at = begin[rows] + size[rows] - rest[rows] + index
            hashes[rows] ^= data[at].astype(np.uint32) << np.uint32(8 * index)
        rows = np.flatnonzero(rest)
        hashes[rows] *= _M
        hashes ^= hashes >> np.uint32(13)
        hashes *= _M
        hashes ^= hashes >> np.uint32(15)
    return hashes
