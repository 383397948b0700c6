"""Where reading of one file of lines continues, as checkpoints store it. Counterpart: ``line_file``."""

from __future__ import annotations

import struct

from headgate.dataclass import dataclass
from headgate.errors import CorruptionError

_VERSION = 1
_FIXED = struct.Struct("<BBHHIQQQQQQQ")
_OLDER = struct.Struct("<QQQ")
_OLDER_FROM = _FIXED.size + 1


@dataclass(frozen=True, slots=True)
class OlderFile:
    """A file that was rotated away before its series was followed, and so is no input.

    Its size and the digest of its first bytes tell it from a later file that was given its inode.
    """

    inode: int
    size_bytes: int
    head_digest: int


@dataclass(frozen=True, slots=True)
class FilePosition:
    """Where reading of one file continues.

    Attributes:
        offset: bytes delivered; always the start of a line, or the end of the file. Of a compressed file, decompressed.
        seen_bytes: the file's size when last looked at; tells a file removed too early from one read fully. Of a
            compressed file, compressed.
        head_bytes, head_digest: fingerprint of the beginning, ``head_bytes`` ≤ ``offset``.
        tail_bytes, tail_digest: fingerprint of the bytes just before ``offset``.
        inode, device: of the file when last looked at (0: not known). Alone they identify nothing: both are reused.
        number: of a fixed list: when the file was first listed; None: not known, or a growing directory.
        older: the files of the same series that are no input; None: not known, or another position says it.
        is_settled: with ``older``: nothing that came before the file of today was left out.
        lines: so many lines are before ``offset``.
    """

    offset: int = 0
    seen_bytes: int = 0
    head_bytes: int = 0
    head_digest: int = 0
    is_finished: bool = False
    tail_bytes: int = 0
    tail_digest: int = 0
    inode: int = 0
    device: int = 0
    number: int | None = None
    older: tuple[OlderFile, ...] | None = None
    is_settled: bool = False
    lines: int = 0

    def encode(self) -> bytes:
        """Return the position as bytes."""
        number = 0 if self.number is None else self.number + 1
        fixed = _FIXED.pack(
            _VERSION,
            self.is_finished,
            self.head_bytes,
            self.tail_bytes,
            number,
            self.offset,
            self.seen_bytes,
            self.head_digest,
            self.tail_digest,
            self.inode,
            self.device,
            self.lines,
        )
        if self.older is None:
            return fixed
        older = [_OLDER.pack(each.inode, each.size_bytes, each.head_digest) for each in self.older]
        return b"".join([fixed, bytes([self.is_settled]), *older])

    @staticmethod
    def decode(path: str, encoded: bytes) -> FilePosition:
        """Return the position that ``encode`` made of the file ``path``.

        Raises:
            CorruptionError: it is not one, or of another version.
        """
        more = len(encoded) - _OLDER_FROM
        is_whole = more == -1 or (more >= 0 and more % _OLDER.size == 0)
        if encoded[:1] != bytes([_VERSION]) or not is_whole:
            expected = f"{_FIXED.size} bytes or more, version {_VERSION}"
            raise CorruptionError(f"position of {path}", 0, expected, f"{encoded[:8].hex()} ({len(encoded)} bytes)")
        older = None if more < 0 else tuple(OlderFile(*each) for each in _OLDER.iter_unpack(encoded[_OLDER_FROM:]))
        _, finished, head_bytes, tail_bytes, number, offset, seen, head, tail, inode, device, lines = (
            _FIXED.unpack_from(encoded)
        )
        return FilePosition(
            offset,
            seen,
            head_bytes,
            head,
            bool(finished),
            tail_bytes,
            tail,
            inode,
            device,
            number - 1 if number else None,
            older,
            older is not None and bool(encoded[_FIXED.size]),
            lines,
        )
