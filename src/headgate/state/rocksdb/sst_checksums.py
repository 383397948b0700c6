"""Whether the bytes of a file are those that RocksDB wrote: each block by its checksum (docs/spec/rocksdb.md).

The library offers no such look at one file. A file is blocks without gaps (data, filter, index, properties), then an
index of those that hold no data, then a footer; each block has a trailer of its kind of compression and a checksum.
The index, and the filter, are either one block or many with an index of their own.
The options in ``database`` say how files are written; ``database_snapshot`` calls this before it uploads a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from struct import Struct
from typing import TypeAlias

import pyarrow as pa
import xxhash

from headgate.codec.snapshot import Buffer
from headgate.state.snapshot import LocalDamage

FORMAT_VERSION = 6
"""Of what is written: a later library may have another default, and here it could not be read."""

_FOOTER = Struct("<BIIII24xIQ")
"""Kind of checksum, a second magic number, checksum of the footer, base of the others, size of the index of what is
no data, format version, magic number."""

_MAGIC, _MAGIC_2 = 0x88E241B785F4CFF7, 0x007A003E
_XXH3 = 4
_TRAILER = Struct("<BI")
_LAST_BYTE = 0x6B9083D9
_PLAIN, _LZ4 = 0, 4
_INDEX = b"rocksdb.index"
_PROPERTIES = b"rocksdb.properties"
_INDEX_KIND = b"rocksdb.block.based.table.index.type"
_TWO_LEVELS = (2).to_bytes(4, "little")
_FILTER_IN_PARTS = b"partitionedfilter."
"""What the name of a filter begins with that is an index of its parts."""
_32_BITS = 0xFFFFFFFF

_Handle: TypeAlias = tuple[int, int]
"""Where a block begins, and its size without its trailer."""


class _Mismatch(Exception):  # noqa: N818 - it never leaves this module
    """What was expected at which byte, and what was found."""

    def __init__(self, offset: int, expected: str, found: str) -> None:
        super().__init__(offset, expected, found)


def check_blocks(data: Buffer, path: Path) -> None:
    """Make sure that every byte of ``data``, which was read from ``path``, is as it was written.

    Raises:
        LocalDamage: one is not.
    """
    try:
        _File(memoryview(data)).check()
    except _Mismatch as wrong:
        raise LocalDamage(str(path), *wrong.args) from None
    except (IndexError, ValueError, pa.ArrowException) as error:  # a bad number led astray
        raise LocalDamage(str(path), 0, "a file of a RocksDB database", f"{type(error).__name__}: {error}") from error


class _File:
    """The bytes of one file."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._end = len(data) - _FOOTER.size
        self._base = 0

    def check(self) -> None:
        """Check the footer, then all blocks, and that there is nothing else."""
        data, others = self.blocks()
        end = 0
        # in their order and without gaps, so that no byte is left out
        for handle in sorted([*data, *others]):
            if handle[0] != end:
                raise _Mismatch(end, "a block", f"the next one at {handle[0]}")
            self._checked(handle)
            end = handle[0] + handle[1] + _TRAILER.size
        if end != self._end:
            raise _Mismatch(end, "the footer", f"it at {self._end}")

    def blocks(self) -> tuple[list[_Handle], list[_Handle]]:
        """Check the footer; return the blocks that have rows, and all others."""
        metas_size = self._check_footer()
        at = self._end - metas_size - _TRAILER.size
        metas = dict(_entries(self._block((at, metas_size))))
        others = [(at, metas_size), *(_handle(value) for value in metas.values() if value)]
        for name, value in metas.items():
            if name.startswith(_FILTER_IN_PARTS):
                others += self._listed(_handle(value))
        listed = self._listed(_handle(metas[_INDEX])) if _INDEX in metas else []
        if not self._has_two_levels(metas):
            return listed, others
        return [handle for part in listed for handle in self._listed(part)], others + listed

    def _has_two_levels(self, metas: Mapping[bytes, bytes]) -> bool:
        """Return whether the index is one of other indexes."""
        properties = dict(_entries(self._block(_handle(metas[_PROPERTIES])))) if _PROPERTIES in metas else {}
        return properties.get(_INDEX_KIND) == _TWO_LEVELS

    def _listed(self, index: _Handle) -> list[_Handle]:
        """Return the blocks that an index tells."""
        return list(_handles(self._block(index)))

    def _check_footer(self) -> int:
        """Return the size of the index of what is no data."""
        if self._end < 0:
            raise _Mismatch(0, "a footer", f"{len(self._data)} bytes")
        footer = bytearray(self._data[self._end :])
        kind, second, checksum, base, metas_size, version, magic = _FOOTER.unpack(footer)
        if (kind, second, version, magic) != (_XXH3, _MAGIC_2, FORMAT_VERSION, _MAGIC):
            raise _Mismatch(self._end, "the footer of a file of this format", footer.hex())
        self._base = base
        # it was computed with zeros in its own place
        footer[5:9] = bytes(4)
        found = self._checksum(memoryview(footer)[:-1], footer[-1], self._end)
        if found != checksum:
            raise _Mismatch(self._end, f"a footer with checksum {checksum:08x}", f"{found:08x}")
        return int(metas_size)

    def _checksum(self, data: memoryview, last: int, at: int) -> int:
        """Return the checksum of ``data`` and the byte ``last`` after it; at another place it is another one."""
        found = xxhash.xxh3_64_intdigest(data) ^ last * _LAST_BYTE
        modifier = self._base ^ ((at & _32_BITS) + (at >> 32)) if self._base else 0
        return (found + modifier) & _32_BITS

    def _checked(self, handle: _Handle) -> int:
        """Return how the block is compressed."""
        at, size = handle
        end = at + size
        if not 0 <= at <= end <= self._end - _TRAILER.size:
            raise _Mismatch(at, "a block within the file", f"one of {size} bytes")
        kind, checksum = _TRAILER.unpack_from(self._data, end)
        found = self._checksum(self._data[at:end], kind, at)
        if found != checksum:
            raise _Mismatch(at, f"a block with checksum {checksum:08x}", f"{found:08x}")
        return int(kind)

    def _block(self, handle: _Handle) -> bytes:
        """Return what is in a block, once it is checked."""
        kind = self._checked(handle)
        at, size = handle
        data = bytes(self._data[at : at + size])
        if kind == _PLAIN:
            return data
        if kind != _LZ4:
            raise _Mismatch(at, "a block that LZ4 compressed", f"one of kind {kind}")
        plain_size, begin = _number(data, 0)
        return bytes(pa.decompress(data[begin:], plain_size, codec="lz4_raw", asbytes=True))


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield what is in a block."""
    at, key, end = 0, b"", _end_of_entries(block)
    while at < end:
        shared, at = _number(block, at)
        key_size, at = _number(block, at)
        value_size, at = _number(block, at)
        if shared > len(key):
            raise _Mismatch(at, "a whole key", f"one that shares {shared} bytes")
        begin = at + key_size
        key = key[:shared] + block[at:begin]
        at = begin + value_size
        yield key, block[begin:at]


def _handles(block: bytes) -> Iterator[_Handle]:
    """Yield what is in a block of an index: each value is one handle without its size, and no key is shortened."""
    at, end = 0, _end_of_entries(block)
    while at < end:
        if block[at]:
            raise _Mismatch(at, "a whole key", f"one that shares {block[at]} bytes")
        key_size, at = _number(block, at + 1)
        begins, at = _number(block, at + key_size)
        size, at = _number(block, at)
        yield begins, size


def _end_of_entries(block: bytes) -> int:
    if not block:
        return 0
    restarts = int.from_bytes(block[-4:], "little") & 0x0FFFFFFF
    return len(block) - 4 - 4 * restarts


def _handle(data: bytes) -> _Handle:
    at, end = _number(data, 0)
    return at, _number(data, end)[0]


def _number(data: bytes, at: int) -> tuple[int, int]:
    """Return the number of variable length at ``at``, and where it ends."""
    byte = data[at]
    at += 1
    found, shift = byte & 0x7F, 7
    while byte >= 0x80:
        byte = data[at]
        at += 1
        found |= (byte & 0x7F) << shift
        shift += 7
    return found, at
