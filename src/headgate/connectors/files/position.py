"""Where reading of one file of lines continues, in the bytes that checkpoints hold.

Counterpart: ``lines.LineFile``. Source: rule N3 of docs/spec/connectors.md. Formats: version 1 knows neither the bytes
before the position nor the inode; version 2 is what ``encode`` writes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from headgate.errors import CorruptionError

_VERSION_1 = struct.Struct("<BBHQQQ")
_VERSION_2 = struct.Struct("<BBHHIQQQQQQ")
_FORMATS = {1: _VERSION_1, 2: _VERSION_2}


@dataclass(frozen=True, slots=True)
class FilePosition:
    """Where reading of one file continues.

    Attributes:
        offset: bytes delivered; always the start of a line, or the end of the file.
        seen_bytes: the file's size when last looked at; tells a file removed too early from one read fully.
        head_bytes, head_digest: fingerprint of the beginning, ``head_bytes`` ≤ ``offset``.
        tail_bytes, tail_digest: fingerprint of the bytes just before ``offset``.
        inode, device: of the file when last looked at (0: not known). Alone they identify nothing: both are reused.
        number: of a fixed list: when the file was first listed; None: not known, or a growing directory.
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

    def encode(self) -> bytes:
        """Return the position as fixed-size bytes."""
        number = 0 if self.number is None else self.number + 1
        return _VERSION_2.pack(
            2,
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
        )

    @staticmethod
    def decode(path: str, encoded: bytes) -> FilePosition:
        """Return the position that ``encode`` made of the file ``path``, in this version or an earlier one.

        Raises:
            CorruptionError: it is not one, or of an unknown version.
        """
        form = _FORMATS.get(encoded[0]) if encoded else None
        if form is None or len(encoded) != form.size:
            expected = " or ".join(f"{f.size} bytes, version {version}" for version, f in _FORMATS.items())
            raise CorruptionError(f"position of {path}", 0, expected, f"{encoded[:8].hex()} ({len(encoded)} bytes)")
        if form is _VERSION_1:
            _, finished, head_bytes, offset, seen, digest = form.unpack(encoded)
            return FilePosition(offset, seen, head_bytes, digest, bool(finished))
        _, finished, head_bytes, tail_bytes, number, offset, seen, head, tail, inode, device = form.unpack(encoded)
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
        )
