"""Events of Pravega in bulk: how they stand in a segment, and which segment the key of an event chooses."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headgate.errors import CorruptionError

HEADER_BYTES = 8
"""In front of each event: its type, which is 0, and its length."""

EVENT_BYTES_MAX = 8 << 20
"""The longest event that Pravega takes, with its header."""

_HEADER = struct.Struct(">ii")
_C1, _C2 = np.uint64(0x87C37B91114253D5), np.uint64(0x4CF5AD432745937F)


def _java_hash(text: str) -> int:
    found = 0
    for sign in text:
        found = (31 * found + ord(sign)) & 0xFFFFFFFF
    return found - (1 << 32) if found >> 31 else found


_SEED = np.uint64(_java_hash("EventRouter") & 0xFFFFFFFFFFFFFFFF)


def frame(values: pa.Array) -> tuple[pa.Buffer, npt.NDArray[np.int64]]:
    """Return events as they stand in a segment, and where each begins, with the end of the last."""
    lengths = pc.binary_length(values).to_numpy(zero_copy_only=False)
    headers = np.zeros((len(values), 2), ">i4")
    headers[:, 1] = lengths
    starts = np.arange(0, HEADER_BYTES * len(values) + 1, HEADER_BYTES, dtype=np.int64)
    heads = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(values), [None, pa.py_buffer(starts), pa.py_buffer(headers.tobytes())]
    )
    framed = pc.binary_join_element_wise(heads, values, pa.scalar(b"", pa.large_binary()))
    ends = np.zeros(len(values) + 1, np.int64)
    np.cumsum(lengths + HEADER_BYTES, out=ends[1:])
    return framed.buffers()[2], ends


def unframe(data: bytes, where: str) -> tuple[pa.Array, npt.NDArray[np.int64]]:
    """Return the whole events at the beginning of ``data``, and where each begins, with the end of the last.

    Raises:
        CorruptionError: there is something else.
    """
    starts, at, size, unpack = [0], 0, len(data), _HEADER.unpack_from
    while at + HEADER_BYTES <= size:
        kind, length = unpack(data, at)
        if kind or not 0 <= length <= EVENT_BYTES_MAX:
            raise CorruptionError(where, at, "an event", f"type {kind}, length {length}")
        at += HEADER_BYTES + length
        if at > size:
            break
        starts.append(at)
    ends = np.array(starts, np.int64)
    framed = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(starts) - 1, [None, pa.py_buffer(ends), pa.py_buffer(data)]
    )
    return pc.binary_slice(framed, HEADER_BYTES, EVENT_BYTES_MAX), ends


def key_places(keys: Sequence[str]) -> npt.NDArray[np.float64]:
    """Return the place of each key in [0, 1), as every client of Pravega computes it (``StreamSegments``, Murmur3)."""
    encoded = [key.encode("utf-16-le", "surrogatepass") for key in keys]
    lengths = np.array([len(one) for one in encoded], np.int64)
    places = np.zeros(len(encoded), np.float64)
    for length in np.unique(lengths):
        rows = np.flatnonzero(lengths == length)
        padded = np.zeros((len(rows), -(-int(length) // 16) * 16), np.uint8)
        if length:
            joined = b"".join(encoded[row] for row in rows)
            padded[:, :length] = np.frombuffer(joined, np.uint8).reshape(len(rows), length)
        hashed = _murmur3(padded.view("<u8"), int(length))
        bits = (hashed >> np.uint64(12)) & np.uint64(0x000FFFFFFFFFFFFF)
        places[rows] = (bits + np.uint64(0x3FF0000000000000)).view(np.float64) - 1.0
    return places


def _murmur3(words: npt.NDArray[np.uint64], length: int) -> npt.NDArray[np.uint64]:
    """Return the lower half of Murmur3-128 of rows of one length, each padded with zeros to whole blocks."""
    h1 = np.full(len(words), _SEED, np.uint64)
    h2 = h1.copy()
    blocks = words.shape[1] // 2
    for block in range(blocks):
        k1, k2 = words[:, 2 * block].copy(), words[:, 2 * block + 1].copy()
        h1 ^= _rotated(k1 * _C1, 31) * _C2
        is_tail = block == blocks - 1 and length % 16 != 0
        if not is_tail:
            h1 = (_rotated(h1, 27) + h2) * np.uint64(5) + np.uint64(0x52DCE729)
        h2 ^= _rotated(k2 * _C2, 33) * _C1
        if not is_tail:
            h2 = (_rotated(h2, 31) + h1) * np.uint64(5) + np.uint64(0x38495AB5)
    h1 ^= np.uint64(length)
    h2 ^= np.uint64(length)
    h1 = h1 + h2
    h2 = h2 + h1
    return _mixed(h1) + _mixed(h2)


def _rotated(value: npt.NDArray[np.uint64], by: int) -> npt.NDArray[np.uint64]:
    return (value << np.uint64(by)) | (value >> np.uint64(64 - by))


def _mixed(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    value = (value ^ (value >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return value ^ (value >> np.uint64(33))
