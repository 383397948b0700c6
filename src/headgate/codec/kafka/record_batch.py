"""The header of a record batch (format v2), and the compression of its records, in ``Fetch`` and ``Produce``.

Layout: Kafka's documentation, "Record Batch". Used by ``record_decoder`` and ``record_encoder``. Records are compressed
by gzip, snappy, lz4 and zstd, as Kafka's clients frame them. Snappy comes as one raw block (librdkafka) or in the
blocks of snappy-java (Java's clients). LZ4 frames are written here with independent blocks, the only ones that Kafka's
brokers read. What decompressed records may take is bounded.
"""

from __future__ import annotations

import struct
import zlib
from enum import IntEnum
from typing import NamedTuple

import pyarrow as pa
import xxhash

from headgate.codec.arrow import MOMENT
from headgate.codec.kafka.wire import Buffer
from headgate.distribution import install_command
from headgate.errors import UsageError

try:
    import crc32c
except ImportError:
    crc32c = None  # type: ignore[assignment]

MAGIC, MAGIC_BEGIN = 2, 16
"""The number of the format, and where it is in a batch, also of older formats."""
HEADER = struct.Struct(">qiibIhiqqqhii")
CRC_BEGIN = 21
"""The checksum is of everything after itself."""
LENGTH_BEGIN = 12
"""The length is of everything after itself."""

CODEC_MASK, APPEND_TIME, TRANSACTIONAL, CONTROL = 0x07, 0x08, 0x10, 0x20
"""Bits of the attributes."""

NO_TIMESTAMP, NO_PRODUCER_ID, NO_SEQUENCE, NO_EPOCH = -1, -1, -1, -1
SEQUENCES = 1 << 31
"""How many sequence numbers there are: after the last one comes 0."""

RECORD_BYTES_MIN = 7
"""A record without key, value and headers."""

ABORT, COMMIT = 0, 1
"""Types of control records."""


class BatchHeader(NamedTuple):
    """The fields in front of the records of a batch."""

    base_offset: int
    batch_length: int
    partition_leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    records_count: int


HEADERS_TYPE = pa.large_list(pa.struct([("key", pa.large_string()), ("value", pa.large_binary())]))

RECORDS = pa.schema(
    [("value", pa.large_binary()), ("key", pa.large_binary()), ("offset", pa.int64()), ("timestamp", MOMENT)]
)
"""The columns of records. A timestamp is null where a record has none, or one that is no date."""

RECORDS_WITH_HEADERS = RECORDS.append(pa.field("headers", HEADERS_TYPE))


def checksum(data: Buffer, begin: int = 0) -> int:
    """Return the CRC-32C of ``data`` after what has the checksum ``begin``.

    Raises:
        UsageError: the package that computes it is not installed.
    """
    if crc32c is None:
        raise UsageError(f"Kafka needs the package crc32c: {install_command('kafka')}, on every worker")
    return crc32c.crc32c(data, begin)


DECOMPRESSED_BYTES_MAX = 256 << 20
"""The largest batch, once it is decompressed: by default, brokers take 1 MB of compressed bytes."""

_PIECE_BYTES = 1 << 20
_XERIAL = b"\x82SNAPPY\x00"
_XERIAL_BYTES = 16
_GZIP_WINDOW = 31
"""Of zlib: the format of gzip."""

_LZ4_MAGIC = b"\x04\x22\x4d\x18"
_LZ4_DESCRIPTOR = b"\x60\x70"
"""Version 1, independent blocks, no checksums; blocks of at most 4 MB."""
_LZ4_BLOCK_BYTES = 4 << 20
_LZ4_IS_PLAIN = 1 << 31


class Compression(IntEnum):
    """The codecs, with their numbers in the attributes of a batch."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4


class UnreadableError(ValueError):
    """Compressed records are damaged, or become too large; the message is a clause."""


def compress(codec: Compression, data: Buffer) -> Buffer:
    """Return ``data`` compressed."""
    match codec:
        case Compression.NONE:
            return data
        case Compression.LZ4:
            return _lz4_frame(data)
        case _:
            return _packed(codec.name.lower(), data)


def decompress(codec: Compression, data: Buffer) -> Buffer:
    """Return what was compressed.

    Raises:
        UnreadableError
    """
    try:
        match codec:
            case Compression.NONE:
                return data
            case Compression.GZIP:
                return _gunzip(data)
            case Compression.SNAPPY:
                return _unsnap(memoryview(data))
            case _:
                return _stream(codec.name.lower(), data)
    except (zlib.error, pa.ArrowException, OSError, struct.error) as error:
        raise UnreadableError(f"{codec.name.lower()} cannot decompress it: {error}") from error


def _check(size: int) -> int:
    if not 0 <= size <= DECOMPRESSED_BYTES_MAX:
        raise UnreadableError(f"decompressed it has {size} bytes, and {DECOMPRESSED_BYTES_MAX} are read at most")
    return size


def _gunzip(data: Buffer) -> bytes:
    decoder = zlib.decompressobj(_GZIP_WINDOW)
    found = decoder.decompress(data, DECOMPRESSED_BYTES_MAX)
    if decoder.unconsumed_tail:
        _check(DECOMPRESSED_BYTES_MAX + 1)
    if not decoder.eof:
        raise UnreadableError("its gzip is cut off")
    return found


def _stream(name: str, data: Buffer) -> bytes:
    pieces: list[bytes] = []
    left = DECOMPRESSED_BYTES_MAX
    with pa.CompressedInputStream(pa.BufferReader(pa.py_buffer(data)), name) as stream:
        while piece := stream.read(_PIECE_BYTES):
            pieces.append(piece)
            left -= len(piece)
            if left < 0:
                _check(DECOMPRESSED_BYTES_MAX + 1)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _unsnap(data: memoryview) -> Buffer:
    if data[: len(_XERIAL)] != _XERIAL:
        return _raw_snappy(data)
    pieces: list[Buffer] = []
    position, size = _XERIAL_BYTES, 0
    while position < len(data):
        (length,) = struct.unpack_from(">i", data, position)
        position += 4
        if not 0 < length <= len(data) - position:
            raise UnreadableError(f"a block of {length} bytes with {len(data) - position} left")
        pieces.append(_raw_snappy(data[position : position + length]))
        position += length
        size = _check(size + len(pieces[-1]))
    return b"".join(pieces)


def _raw_snappy(data: memoryview) -> Buffer:
    size = shift = 0
    for byte in data[:5]:
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    found: bytes = pa.Codec("snappy").decompress(pa.py_buffer(data), decompressed_size=_check(size), asbytes=True)
    return found


def _packed(name: str, data: Buffer) -> bytes:
    # as bytes: a view of the buffer that Arrow returns keeps the length from before it was shortened
    packed: bytes = pa.Codec(name).compress(pa.py_buffer(data), asbytes=True)
    return packed


def _lz4_frame(data: Buffer) -> bytes:
    view = memoryview(data)
    check = xxhash.xxh32_intdigest(_LZ4_DESCRIPTOR) >> 8 & 0xFF
    parts: list[Buffer] = [_LZ4_MAGIC, _LZ4_DESCRIPTOR, bytes([check])]
    for begin in range(0, len(view), _LZ4_BLOCK_BYTES):
        block = view[begin : begin + _LZ4_BLOCK_BYTES]
        packed = _packed("lz4_raw", block)
        if len(packed) < len(block):
            parts += [struct.pack("<I", len(packed)), packed]
        else:
            parts += [struct.pack("<I", len(block) | _LZ4_IS_PLAIN), block]
    return b"".join([*parts, b"\0\0\0\0"])
