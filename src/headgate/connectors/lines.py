"""Complete lines from one file that may still grow, without touching single lines in Python.

Counterpart: ``files.FileReader``, which owns many of them. Source: rules N4–N8 of docs/spec/connectors.md.
Never returns a line twice and never part of a line that may continue.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from headgate.errors import CorruptionError, StorageError, UsageError

BLOCK_BYTES = 1 << 20
"""Read at a time: parsing so much takes a few milliseconds, which a barrier may have to wait for."""

ROWS_MAX = 65_536
"""Lines returned at a time, so that short lines make no huge batches."""

LINE_BYTES_MAX = 8 << 20
"""A longer line is a bad record; it is skipped without being held in memory (F17)."""

HEAD_BYTES = 1_024
"""So much of a file's beginning is its fingerprint."""

_REFUSED_BYTES = 4_096
_BOM = b"\xef\xbb\xbf"
_POSITION = struct.Struct("<BBHQQQ")
_POSITION_VERSION = 1


@dataclass(frozen=True, slots=True)
class FilePosition:
    """Where reading of one file continues.

    Attributes:
        offset: bytes delivered; always the start of a line, or the end of the file.
        seen_bytes: the file's size when last looked at; tells a file removed too early from one read fully.
        head_bytes, head_digest: fingerprint of the beginning, ``head_bytes`` ≤ ``offset``.
    """

    offset: int = 0
    seen_bytes: int = 0
    head_bytes: int = 0
    head_digest: int = 0
    is_finished: bool = False

    def encode(self) -> bytes:
        """Return the position as fixed-size bytes."""
        return _POSITION.pack(
            _POSITION_VERSION, self.is_finished, self.head_bytes, self.offset, self.seen_bytes, self.head_digest
        )

    @staticmethod
    def decode(path: str, encoded: bytes) -> FilePosition:
        """Return the position that ``encode`` made of the file ``path``.

        Raises:
            CorruptionError: it is not one, or of an unknown version.
        """
        if len(encoded) != _POSITION.size or encoded[0] != _POSITION_VERSION:
            expected = f"{_POSITION.size} bytes, version {_POSITION_VERSION}"
            raise CorruptionError(f"position of {path}", 0, expected, f"{encoded[:8].hex()} ({len(encoded)} bytes)")
        _, finished, head_bytes, offset, seen, digest = _POSITION.unpack(encoded)
        return FilePosition(offset, seen, head_bytes, digest, bool(finished))


@dataclass(frozen=True, slots=True)
class Lines:
    """Some complete lines: ``values`` (large_binary, without line ends) and the byte each begins at."""

    values: pa.LargeBinaryArray
    starts: np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class OversizeLine:
    """A line longer than ``LINE_BYTES_MAX``: where it begins, its length, and its first bytes."""

    start: int
    size_bytes: int
    head: bytes


class LineFile:
    """Reads one file from a position. The file is open only while it is read: thousands of them are fine (F26)."""

    def __init__(self, path: str, position: FilePosition, follow: bool, line_bytes_max: int = LINE_BYTES_MAX) -> None:
        self.path = path
        self.offset = position.offset
        self.is_finished = position.is_finished
        self.is_at_end = False
        """The last ``step`` found nothing more in the file."""
        self._follow = follow
        self._line_bytes_max = line_bytes_max
        self._seen_bytes = position.seen_bytes
        self._head = b""
        self._expected = (position.head_bytes, position.head_digest)
        self._inode: tuple[int, int] | None = None
        self._buffer = b""  # the file's bytes from ``offset`` on
        self._ends = np.empty(0, np.int64)  # where the buffer has "\n"
        self._skipped_to: int | None = None  # inside an oversize line: everything before it has no line end
        self._skipped_head = b""

    def position(self) -> FilePosition:
        """Return where reading would continue."""
        size = min(self.offset, len(self._head))
        digest = xxhash.xxh3_64_intdigest(self._head[:size])
        if self._inode is None:  # never opened since it was restored
            size, digest = self._expected
        return FilePosition(self.offset, self._seen_bytes, size, digest, self.is_finished)

    @property
    def has_lines(self) -> bool:
        """Whether the next ``step`` returns lines that were read already."""
        return len(self._ends) > 0

    def step(self) -> Lines | OversizeLine | None:
        """Return the next lines, reading at most one block; None when that block completed none.

        Raises:
            UsageError: the file was truncated or replaced.
            StorageError: it cannot be read.
        """
        self.is_at_end = False
        if self.has_lines:
            return self._take()
        skipping = self._skipped_to is not None
        at = self._skipped_to if self._skipped_to is not None else self.offset + len(self._buffer)
        block = self._read(at)
        if not block:
            return self._end_of_file()
        return self._skip(at, block) if skipping else self._fill(block)

    def _fill(self, block: bytes) -> Lines | None:
        scanned = len(self._buffer)
        self._buffer += block
        self._ends = np.flatnonzero(np.frombuffer(block, np.uint8) == 10) + scanned
        if len(self._ends):
            return self._take()
        if len(self._buffer) > self._line_bytes_max:
            self._skipped_to = self.offset + len(self._buffer)
            self._skipped_head = self._buffer[:_REFUSED_BYTES]
            self._buffer = b""
        return None

    def _take(self) -> Lines:
        """Return up to ``ROWS_MAX`` of the complete lines in the buffer; drop the buffer's part with the last."""
        ends = self._ends[:ROWS_MAX]
        size = int(ends[-1]) + 1
        lines = _split(self._buffer[:size], ends, self.offset)
        self._buffer = self._buffer[size:]
        self._ends = self._ends[len(ends) :] - size
        self.offset += size
        return lines

    def _skip(self, at: int, block: bytes) -> OversizeLine | None:
        end = block.find(b"\n")
        self._skipped_to = at + (len(block) if end < 0 else end + 1)
        return None if end < 0 else self._oversize(self._skipped_to, self._skipped_to - 1)

    def _oversize(self, next_offset: int, end: int) -> OversizeLine:
        line = OversizeLine(self.offset, end - self.offset, self._skipped_head)
        self.offset, self._skipped_to = next_offset, None
        return line

    def _end_of_file(self) -> Lines | OversizeLine | None:
        """A last line without line end is complete only if the file will not grow (N5)."""
        self.is_at_end = True
        if self._follow:
            return None
        self.is_finished = True
        if self._skipped_to is not None:
            return self._oversize(self._skipped_to, self._skipped_to)
        return self._rest()

    def _rest(self) -> Lines | None:
        if not self._buffer:
            return None
        rest, self._buffer = self._buffer, b""
        lines = _split(rest + b"\n", np.array([len(rest)], np.int64), self.offset)
        self.offset += len(rest)
        return lines

    def _read(self, at: int) -> bytes:
        try:
            with open(self.path, "rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                self._check_same(file.fileno(), status)
                return os.pread(file.fileno(), BLOCK_BYTES, at)
        except FileNotFoundError:
            if self._follow and self._seen_bytes <= at:
                self._follow = False  # read to its end, then removed: finish it (N7)
                return b""
            raise UsageError(_removed(self.path, at, self._seen_bytes)) from None
        except OSError as error:
            raise StorageError("read", self.path, error.strerror or str(error)) from error

    def _check_same(self, descriptor: int, status: os.stat_result) -> None:
        """Refuse a file that shrank or was replaced since ``position``: its bytes are not those already read (N6)."""
        known = self.offset + len(self._buffer)
        if status.st_size < known:
            raise UsageError(
                f"{self.path} has {status.st_size} bytes but was read to byte {known}: it was truncated or replaced; "
                "files that are read may only grow. Rotate to a new name, or run the pipeline under a new name"
            )
        self._seen_bytes = status.st_size
        inode = (status.st_dev, status.st_ino)
        if self._inode == inode and len(self._head) == HEAD_BYTES:
            return
        size, digest = self._expected if self._inode is None else (len(self._head), 0)
        head = os.pread(descriptor, HEAD_BYTES, 0)
        if self._inode is not None:
            digest = xxhash.xxh3_64_intdigest(self._head)
        if size and xxhash.xxh3_64_intdigest(head[:size]) != digest:
            raise UsageError(
                f"{self.path} does not begin as it did when it was read to byte {known}: it was replaced; "
                "files that are read may only grow. Rotate to a new name, or run the pipeline under a new name"
            )
        self._head, self._inode = head, inode


def _removed(path: str, at: int, size_bytes: int) -> str:
    return (
        f"{path} was removed when {at} of its {size_bytes} bytes were read; "
        "put it back, or run the pipeline under a new name"
    )


def _split(data: bytes, ends: np.ndarray[Any, np.dtype[np.int64]], base: int) -> Lines:
    """Return the lines of ``data`` (which ends with the last of the line ends at ``ends``), at file byte ``base``."""
    starts = np.empty(len(ends), np.int64)
    starts[0] = 0
    starts[1:] = ends[:-1] + 1
    removed = np.arange(1, len(ends) + 1, dtype=np.int64)
    if b"\r\n" in data:
        bytes_of = np.frombuffer(data, np.uint8)
        has_return = (ends > starts) & (bytes_of[ends - 1] == 13)
        removed += np.cumsum(has_return)
        data = data.replace(b"\r\n", b"")  # what is left of "\r\r\n" is one "\r" of content
    data = data.replace(b"\n", b"")
    offsets = np.zeros(len(ends) + 1, np.int64)
    offsets[1:] = ends + 1 - removed
    if base == 0 and data.startswith(_BOM) and offsets[1] >= len(_BOM):
        offsets[0] = len(_BOM)
    values = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(ends), [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    )
    return Lines(values, starts + base)
