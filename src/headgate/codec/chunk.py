"""Format of a chunk file: events of one flush, for all segments it touches.

::

    header   "HGCHUNK\\n" | version u16 | 0 u16 | 0 u32            16 bytes, padded to 64
    parts    Arrow record batch messages, each at a multiple of 64 bytes
    footer   msgpack (stream id, [[segment, events, offset, size, checksum], …])
    trailer  footer size u32 | xxh3-64 of the footer u64 | "HGCEND\\n\\0"

Counterpart: ``headgate.store.chunks`` fills it; the catalogue repeats the footer's entries, so a reader needs only
one range of the file. Source: docs/spec/stream-store.md. Never does I/O.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
import xxhash

from headgate.codec.decodable import decodable
from headgate.codec.json_files import MALFORMED
from headgate.dataclass import dataclass
from headgate.errors import CorruptionError, UnknownFormat

MAGIC = b"HGCHUNK\n"
END_MAGIC = b"HGCEND\n\0"
VERSION = 1
ALIGNMENT = 64
"""Arrow's buffers are aligned within a message; aligned messages can be used without a copy."""

PART_BYTES_MAX = 64 << 20
"""A reader refuses to allocate more for one part."""

FOOTER_BYTES_MAX = 16 << 20

_HEADER = struct.Struct("<8sHHI")
_TRAILER = struct.Struct("<IQ8s")

Buffer: TypeAlias = Any
"""Anything with the buffer protocol and ``len``, such as bytes and ``pyarrow.Buffer``."""


class PartEntry(msgspec.Struct, frozen=True, array_like=True):
    """Where one part is. ``events_count`` events of ``segment``, ``size_bytes`` at ``offset``."""

    segment: int
    events_count: int
    offset: int
    size_bytes: int
    checksum: int


class Footer(msgspec.Struct, frozen=True, array_like=True):
    """What a chunk holds, in order of position."""

    stream_id: int
    parts: tuple[PartEntry, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A part to be written: one serialised record batch, in as many buffers as it comes in."""

    segment: int
    events_count: int
    payload: tuple[Buffer, ...]


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """Buffers to write one after the other, and where the parts will be."""

    buffers: tuple[Buffer, ...]
    entries: tuple[PartEntry, ...]
    size_bytes: int


def encode_chunk(stream_id: int, parts: Sequence[Part]) -> EncodedChunk:
    """Return the file of ``parts``."""
    buffers: list[Buffer] = [_padded(_HEADER.pack(MAGIC, VERSION, 0, 0))]
    offset = ALIGNMENT
    entries: list[PartEntry] = []
    for part in parts:
        views = [memoryview(buffer).cast("B") for buffer in part.payload]
        size = sum(map(len, views))
        assert 0 < size <= PART_BYTES_MAX, "a part has bytes, within its bound"
        assert part.events_count > 0, "a part has events"
        checksum = xxhash.xxh3_64()
        for view in views:
            checksum.update(view)
        entries.append(PartEntry(part.segment, part.events_count, offset, size, checksum.intdigest()))
        padding = bytes(-size % ALIGNMENT)
        buffers += [*part.payload, padding] if padding else part.payload
        offset += size + len(padding)
    footer = msgspec.msgpack.encode(Footer(stream_id, tuple(entries)))
    trailer = _TRAILER.pack(len(footer), xxhash.xxh3_64_intdigest(footer), END_MAGIC)
    buffers.append(footer + trailer)
    return EncodedChunk(tuple(buffers), tuple(entries), offset + len(footer) + len(trailer))


def decode_footer(path: str, data: bytes) -> Footer:
    """Return the footer of the whole file ``data``.

    Raises:
        CorruptionError: header, trailer or footer are not what was written.
    """
    if len(data) < ALIGNMENT + _TRAILER.size:
        raise CorruptionError(path, 0, f"a chunk of at least {ALIGNMENT + _TRAILER.size} bytes", f"{len(data)}")
    magic, version, _, _ = _HEADER.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise UnknownFormat(path, 0, f"chunk version {VERSION}", f"{magic!r} version {version}")
    at = len(data) - _TRAILER.size
    size, checksum, end = _TRAILER.unpack_from(data, at)
    if end != END_MAGIC or size > min(at - ALIGNMENT, FOOTER_BYTES_MAX):
        raise CorruptionError(path, at, "the end of a chunk", "something else (the file was cut or overwritten)")
    footer = data[at - size : at]
    found = xxhash.xxh3_64_intdigest(footer)
    if found != checksum:
        raise CorruptionError(path, at - size, f"footer checksum {checksum:016x}", f"{found:016x}")
    try:
        return msgspec.msgpack.decode(footer, type=decodable(Footer))
    except MALFORMED as error:
        raise CorruptionError(path, at - size, "a footer", str(error)) from error


def verify_part(path: str, entry: PartEntry, payload: bytes | memoryview) -> None:
    """Check the bytes of one part.

    Raises:
        CorruptionError: they are fewer than ``entry`` says, or others.
    """
    if len(payload) != entry.size_bytes:
        raise CorruptionError(path, entry.offset, f"{entry.size_bytes} bytes", f"{len(payload)} (the file was cut)")
    found = xxhash.xxh3_64_intdigest(payload)
    if found != entry.checksum:
        raise CorruptionError(path, entry.offset, f"part checksum {entry.checksum:016x}", f"{found:016x}")


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % ALIGNMENT)
