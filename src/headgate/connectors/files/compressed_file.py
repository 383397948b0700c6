"""A compressed file, read forward as if it were not compressed.

gzip, zstd and bz2 with any number of members or frames. Memory is bounded: a part of the file is decompressed at a
time. Reading at an offset before the last one begins again at the start of the file.
"""

from __future__ import annotations

import bz2
import io
from typing import Protocol

import pyarrow as pa

from headgate.connectors.files.filesystem import FileSystem
from headgate.errors import UsageError

CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
"""By the end of a file's name, in lower case."""

INFER, NONE = "infer", "none"
COMPRESSIONS = (INFER, NONE, *CODECS.values())

_HEAD_BYTES = 64 << 10
"""So much of the beginning is remembered: the fingerprint and the header of CSV are there."""

_TAIL_BYTES = 4 << 10
"""So much before the next byte is remembered."""

_STEP_BYTES = 1 << 20
"""Decompressed at a time where records are passed over."""


_INPUT_BYTES = 64 << 10
"""Of the file, read at a time where pyarrow does not do it."""


def codec_of(path: str, compression: str) -> str | None:
    """Return how the file at ``path`` is compressed, or None."""
    if compression == INFER:
        return next((codec for ending, codec in CODECS.items() if path.lower().endswith(ending)), None)
    return None if compression == NONE else compression


class CompressedFile:
    """Decompresses one file. The file is open only while a method is called, and comes as a descriptor."""

    def __init__(self, path: str, codec: str, system: FileSystem) -> None:
        self._path, self._codec, self._system = path, codec, system
        self._inode: int | None = None
        self._begin()

    def _begin(self) -> None:
        self._bytes = _CompressedBytes(self._system)
        self._stream: _Stream
        if self._codec == "bz2":
            self._stream = _Bz2Stream(self._bytes)
        else:
            self._stream = pa.CompressedInputStream(pa.PythonFile(self._bytes, mode="r"), self._codec)
        self._head = b""
        self._tail = b""
        self.offset = 0
        """So many decompressed bytes were read."""

    @property
    def compressed_offset(self) -> int:
        """So many bytes of the file itself were read."""
        return self._bytes.offset

    def pread(self, descriptor: int, size_bytes: int, offset: int) -> bytes:
        """Return at most ``size_bytes`` at ``offset`` of the decompressed bytes.

        Raises:
            UsageError: the file is truncated or damaged.
        """
        self._use(descriptor)
        if offset + size_bytes <= len(self._head):
            return self._head[offset : offset + size_bytes]
        if offset < self.offset - len(self._tail):
            self._begin()
            self._use(descriptor)
        while self.offset < offset:
            if not self._read(min(offset - self.offset, _STEP_BYTES)):
                return b""
        before = self._tail[len(self._tail) - (self.offset - offset) :] if offset < self.offset else b""
        return (before + self._read(size_bytes - len(before)))[:size_bytes]

    def pass_to(self, descriptor: int, offset: int) -> bool:
        """Go forward a part of the way to ``offset``; return whether it is reached."""
        self._use(descriptor)
        if self.offset < offset:
            self._read(min(offset - self.offset, _STEP_BYTES))
        return self.offset >= offset or self._bytes.is_at_end

    def _use(self, descriptor: int) -> None:
        inode = self._system.fstat(descriptor).st_ino
        if self._inode not in (None, inode):  # another file has this name
            self._begin()
        self._inode, self._bytes.descriptor = inode, descriptor

    def _read(self, size_bytes: int) -> bytes:
        if size_bytes <= 0:
            return b""
        try:
            data: bytes = self._stream.read(size_bytes)
        except (OSError, pa.ArrowException) as error:
            if getattr(error, "errno", None) is not None:  # of the file system
                raise
            raise self._damaged(str(error)) from error
        if len(self._head) < _HEAD_BYTES:
            self._head += data[: _HEAD_BYTES - len(self._head)]
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        self.offset += len(data)
        return data

    def _damaged(self, why: str) -> UsageError:
        if "Truncated" in why:
            text = f"is truncated: its {self._codec} goes on after its {self._bytes.offset} bytes"
        else:
            text = f"is not {self._codec}, or damaged, at {self.offset} decompressed bytes or later"
        return UsageError(f"{self._path} {text}; replace it by the whole file and start again")


class _Stream(Protocol):
    def read(self, size_bytes: int, /) -> bytes:
        """Return so many decompressed bytes, or fewer; none at the end of the file."""


class _Bz2Stream:
    """Decompresses streams of bz2, one after the other. pyarrow fails where an empty one is between others."""

    def __init__(self, file: io.RawIOBase) -> None:
        self._file, self._decompressor = file, bz2.BZ2Decompressor()
        self._input = b""
        self._has_begun = False

    def read(self, size_bytes: int, /) -> bytes:
        parts = []
        while size_bytes:
            if self._decompressor.eof:
                self._input = self._decompressor.unused_data
                self._decompressor, self._has_begun = bz2.BZ2Decompressor(), False
            if self._decompressor.needs_input and not self._input:
                self._input = self._file.read(_INPUT_BYTES) or b""
                if not self._input and self._has_begun:
                    raise OSError("Truncated bz2")
                if not self._input:
                    break
            parts.append(self._decompressor.decompress(self._input, size_bytes))
            self._input, self._has_begun = b"", True
            size_bytes -= len(parts[-1])
        return b"".join(parts)


class _CompressedBytes(io.RawIOBase):
    """The bytes of the file that ``descriptor`` is of, one after the other."""

    def __init__(self, system: FileSystem) -> None:
        self._system = system
        self.descriptor = -1
        self.offset = 0
        self.is_at_end = False

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        data = self._system.pread(self.descriptor, size, self.offset)
        self.offset += len(data)
        self.is_at_end = not data
        return data
