"""The MANIFEST of a database: a log of notes, to which one is added that files are no longer part of it (RB29).

The library offers no way to open a database of which only some files are there. Its format is that of LevelDB: records
in blocks of 32 KiB, none of whose pieces crosses the end of a block, each with a checksum (Castagnoli's CRC of 32
bits, rotated and shifted); in a note, tag 6 says "at this level, the file with this number was removed".
Source: the pages "MANIFEST" and "Write-Ahead-Log-File-Format" of RocksDB's wiki. Counterpart: ``needed``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from struct import Struct

_BLOCK_BYTES = 32 << 10
_HEADER = Struct("<IHB")
"""Checksum of the kind and the piece, length of the piece, kind."""

_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_REMOVED = 6
_POLYNOMIAL = 0x82F63B78
_MASK_DELTA = 0xA282EAD8
_32_BITS = 0xFFFFFFFF


def with_removed(manifest: bytes, files: Iterable[tuple[int, int]]) -> bytes:
    """Return ``manifest`` with a note that ``files`` were removed: the level and the number of each."""
    note = b"".join(bytes(chain.from_iterable(map(_varint, (_REMOVED, *file)))) for file in files)
    return manifest + b"".join(_pieces(note, len(manifest))) if note else manifest


def _pieces(record: bytes, written_bytes: int) -> Iterator[bytes]:
    """Yield ``record`` as it is stored behind ``written_bytes`` of others."""
    at, is_first = 0, True
    while at < len(record):
        room = _BLOCK_BYTES - written_bytes % _BLOCK_BYTES
        if room <= _HEADER.size:  # not even a byte behind a header; a header alone would be a piece of nothing
            yield bytes(room) if room < _HEADER.size else _piece(_FIRST if is_first else _MIDDLE, b"")
            is_first = is_first and room < _HEADER.size
            written_bytes += room
            continue
        piece = record[at : at + room - _HEADER.size]
        at += len(piece)
        yield _piece(_kind(is_first=is_first, is_last=at == len(record)), piece)
        written_bytes += _HEADER.size + len(piece)
        is_first = False


def _kind(*, is_first: bool, is_last: bool) -> int:
    if is_first:
        return _FULL if is_last else _FIRST
    return _LAST if is_last else _MIDDLE


def _piece(kind: int, data: bytes) -> bytes:
    checksum = _checksum(bytes([kind]) + data)
    masked = ((checksum >> 15 | checksum << 17) + _MASK_DELTA) & _32_BITS
    return _HEADER.pack(masked, len(data), kind) + data


def _varint(number: int) -> Iterator[int]:
    while number >= 0x80:
        yield number & 0x7F | 0x80
        number >>= 7
    yield number


def _made_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _made_table()


def _checksum(data: bytes) -> int:
    """Return CRC-32C. The standard library has only the other polynomial; notes are short."""
    found = _32_BITS
    for byte in data:
        found = _TABLE[(found ^ byte) & 0xFF] ^ found >> 8
    return found ^ _32_BITS
