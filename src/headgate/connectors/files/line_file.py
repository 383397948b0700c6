"""One file of lines that may still grow: its position, and its complete lines.

Lines are never touched one by one in Python. Never returns a line twice and never part of a line that may continue.
Counterpart: ``line_source``, which reads many such files. Source: docs/spec/connectors.md.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import xxhash

from headgate.connectors.base import SplitPosition
from headgate.connectors.files.file_position import FilePosition
from headgate.connectors.files.filesystem import (
    ABSENT,
    INFER,
    LOCAL,
    CompressedFile,
    FileSystem,
    Status,
    codec_of,
    failing,
)
from headgate.connectors.files.lines import (
    BOM,
    OUTSIDE,
    QUOTED,
    CsvForm,
    Lines,
    Offsets,
    RawLines,
    has_return,
    is_blank,
    line_feeds,
    record_ends,
)
from headgate.connectors.files.selection import PATTERN_DEFAULT
from headgate.dataclass import dataclass
from headgate.errors import UsageError

BLOCK_BYTES = 2 << 20
"""Read at a time at most: parsing so much takes about ten milliseconds, which a barrier may have to wait for."""

HEADER_BYTES = 16 << 10
"""Read at a time where the header of a file of CSV is looked for."""

ROWS_MAX = 65_536
"""Lines returned at a time, so that short lines make no huge batches."""

LINE_BYTES_MAX = 8 << 20
"""A line with more bytes before its line feed is a bad record, skipped without being held in memory (F17)."""

HEAD_BYTES = 1_024
"""So much of a file's beginning, and of what stands before the position, is its fingerprint."""

_REFUSED_BYTES = 4_096
_NONE: Offsets = np.empty(0, np.int64)
_NOTHING = memoryview(b"")


class FileMovedError(UsageError):
    """What is at the path is not what was read: another file, or changed. ``FileReader`` may know where it went.

    Attributes:
        inode: of the file that is there now; None: there is none.
        is_in_place: it is the same file by its inode: it was truncated or rewritten.
    """

    def __init__(self, message: str, inode: int | None, is_in_place: bool = False) -> None:
        super().__init__(message)
        self.inode = inode
        self.is_in_place = is_in_place


@dataclass(frozen=True, slots=True)
class FileOptions:
    """The options of a source of lines (``line_source.LineOptions``), checked, in milliseconds and bytes.

    ``csv``: a line is a record of CSV, with its line end, and may have line ends in it. ``encoding``: "" for UTF-8.
    """

    follow: bool = False
    pattern: str = PATTERN_DEFAULT
    include_path: bool = False
    poll_ms: int = 20
    discovery_ms: int = 1_000
    line_bytes_max: int = LINE_BYTES_MAX
    csv: CsvForm | None = None
    compression: str = INFER
    encoding: str = ""


DEFAULTS = FileOptions()


@dataclass(frozen=True, slots=True)
class RefusedLine:
    """A line that is too long or ends within quotes: its number, where it begins, why, and its first bytes."""

    number: int
    start: int
    problem: str
    head: bytes


class LineFile:
    """Reads one file from a position. The file is open only while it is read: thousands of them are fine."""

    def __init__(
        self,
        path: str,
        position: FilePosition,
        options: FileOptions = DEFAULTS,
        system: FileSystem = LOCAL,
    ) -> None:
        self.path = path
        self.system = system
        self.offset = position.offset
        self.lines = position.lines
        """So many lines are before ``offset``."""
        self.is_finished = position.is_finished
        codec = codec_of(path, options.compression)
        self._compressed = None if codec is None else CompressedFile(path, codec, system)
        self.is_at_end = False
        """The last ``step`` found nothing more in the file."""
        self._follow = options.follow
        self._line_bytes_max = line_bytes_max = options.line_bytes_max
        self._head_bytes = min(_REFUSED_BYTES, line_bytes_max)  # of a line that is too long
        self._seen_bytes = position.seen_bytes
        self._head = b""
        self._restored = position
        self._was_finished = position.is_finished
        self._inode: tuple[int, int] | None = None  # device and inode; None: not opened yet
        self._accepted_inode = 0  # of what took its place, until that is opened
        self._before = b""  # the last bytes before ``offset``
        self._skipped_before = b""  # and those before ``_skipped_to``
        self._buffer = _NOTHING  # the file's bytes from ``offset`` on
        self._ends = _NONE  # where lines end in the buffer
        self._csv = options.csv
        self._newlines = _NONE  # of CSV: where the buffer has "\n"
        self._quotes = OUTSIDE  # the state of ``record_ends`` after the buffer
        self._header: bytes | None = None  # of CSV
        self._skipped_to: int | None = None  # inside an oversize line: everything before it has no line end
        self._skipped_head = b""

    def position(self) -> FilePosition:
        """Return where reading would continue."""
        if self._inode is None:  # never opened since it was restored
            return replace(self._restored, inode=self.inode, is_finished=self.is_finished)
        size = min(self.offset, len(self._head))
        return FilePosition(
            self.offset,
            self._seen_bytes,
            size,
            _digest(self._head[:size]),
            self.is_finished,
            len(self._before),
            _digest(self._before),
            self.inode,
            self._inode[0],
            self._restored.number,
            lines=self.lines,
        )

    def progress(self) -> SplitPosition:
        """Return how many bytes were delivered; its size is not known before it was opened."""
        if self._compressed is not None:  # how far it has come is known of the compressed bytes
            return SplitPosition(self._compressed.compressed_offset, self._seen_bytes or None, "bytes")
        end = max(self._seen_bytes, self.offset) if self._inode is not None or self._seen_bytes else None
        return SplitPosition(self.offset, end, "bytes")

    @property
    def inode(self) -> int:
        """The file's inode when last looked at; 0: not known. That of a file it replaced may be used again."""
        return self._accepted_inode or self._opened_inode

    @property
    def _opened_inode(self) -> int:
        return self._restored.inode if self._inode is None else self._inode[1]

    def gone(self) -> FileMovedError:
        """Return the error for a file that is nowhere, and of which something is missing."""
        size = "decompressed" if self._compressed is not None else f"{self._seen_bytes}"
        text = f"{self.path} was removed or replaced when {self._known} of its {size} bytes were read"
        return FileMovedError(f"{text}; put it back, or run the pipeline under a new name", None)

    @property
    def has_fingerprint(self) -> bool:
        """Whether anything is known of the content."""
        return self.offset > 0

    @property
    def was_empty(self) -> bool:
        """Whether it had nothing when it went: its inode, which may be another file's now, says nothing."""
        return self.is_finished and not self.has_fingerprint

    @property
    def was_opened(self) -> bool:
        """Whether it was ever opened."""
        return self._inode is not None or self._restored.device != 0

    @property
    def unread_bytes(self) -> int:
        """So much is known to be in the file and was not read."""
        if self._compressed is not None:
            return 0 if self.is_finished else 1
        return max(self._seen_bytes - self._known, 0)

    @property
    def _known(self) -> int:
        return self._skipped_to if self._skipped_to is not None else self.offset + len(self._buffer)

    def is_at(self, path: str, inode: int | None = None) -> bool:
        """Whether the file at ``path`` is this one, or a continued copy of it: it has what was read, and all of it.

        ``inode``: it was seen there with this one; if it has another one now, it was renamed since.

        Raises:
            StorageError: it is there and cannot be read, so that it is not known.
        """
        try:
            with failing("read", path), self.system.opened(path) as descriptor:
                status = self.system.fstat(descriptor)
                self._check_same(descriptor, status, is_elsewhere=True)
        except (*ABSENT, FileMovedError):
            return False
        return inode is None or status.st_ino == inode

    def move(self, path: str) -> None:
        """Read on at ``path``, where the file is now."""
        self.path, self.is_at_end = path, False

    def accept(self, inode: int) -> None:
        """The file at the path has another inode, and is the same all the same: a continued copy took its place."""
        self._accepted_inode = inode

    def has_grown(self) -> bool:
        """Whether a file that was read to its end is there and has another size now, or is another file."""
        try:
            status = self.system.stat(self.path)
        except ABSENT:
            return False
        before = self.offset if self._compressed is None else self._seen_bytes
        return status.st_size != before or bool(self.inode and status.st_ino != self.inode)

    def reopen(self) -> None:
        """A file read to its end may have grown."""
        self.is_finished = False

    def finish(self) -> None:
        """The file is gone: nothing of it will come any more."""
        self.is_finished = True

    @property
    def has_lines(self) -> bool:
        """Whether the next ``step`` returns lines that were read already."""
        return len(self._ends) > 0

    def step(self) -> Lines | RefusedLine | None:
        """Return the next lines, reading at most one block; None when that block completed none.

        Raises:
            UsageError: the file was truncated or replaced, or has no header although it should.
            StorageError: it cannot be read.
        """
        needed = self._needs_header
        found = self._step()
        problem = found.problem if isinstance(found, RefusedLine) and self._needs_header else ""
        if needed and self._csv is not None and has_return(self._header or b"", self._csv.quote):
            problem = "its lines end with carriage returns alone, not with line feeds"
        if problem:
            raise UsageError(f"{self.path} does not begin with a header: {problem}; correct the file")
        return found

    def _step(self) -> Lines | RefusedLine | None:
        self.is_at_end = False
        if self.has_lines:
            return self._take()
        skipping, at = self._skipped_to is not None, self._known
        if self._compressed is not None and not self._pass_over(self._compressed, at - HEAD_BYTES):
            return None
        data = self._read(at)
        if len(data) == len(self._buffer):
            return self._end_of_file()
        return self._skip(at, bytes(data)) if skipping else self._fill(data)

    def _fill(self, data: memoryview) -> Lines | RefusedLine | None:
        self._scan(data)
        if len(self._ends):
            return self._take()
        if len(self._buffer) > self._line_bytes_max:
            if len(self._newlines):
                return self._refuse_unclosed(f"a quote is not closed within {self._line_bytes_max} bytes")
            self._skipped_to, self._quotes = self.offset + len(self._buffer), OUTSIDE
            self._skipped_before = bytes(self._buffer[-HEAD_BYTES:])
            self._skipped_head = bytes(self._buffer[: self._head_bytes])
            self._buffer = _NOTHING
        return None

    def _scan(self, data: memoryview) -> None:
        """Make ``data``, which begins with the buffer, the buffer, and find the line ends in what follows."""
        scanned, previous = len(self._buffer), bytes(self._buffer[-len(BOM) :])
        self._buffer, block = data, data[scanned:]
        newlines = line_feeds(block)
        if self._csv is None:
            self._ends = newlines + scanned
            return
        ends, self._quotes = record_ends(block, newlines, self._csv, previous, self._quotes)
        self._ends = ends + scanned
        self._newlines = np.concatenate([self._newlines, newlines + scanned])

    def _refuse_unclosed(self, problem: str) -> RefusedLine:
        """Refuse the first line of a record of CSV that does not end; what comes after it is read once more."""
        size = int(self._newlines[0]) + 1
        line = RefusedLine(self.lines + 1, self.offset, problem, bytes(self._buffer[: min(size - 1, self._head_bytes)]))
        rest = self._buffer[size:]
        self._pass(self._buffer[max(size - HEAD_BYTES, 0) : size])
        self.offset += size
        self.lines += 1
        self._buffer, self._newlines, self._quotes = _NOTHING, _NONE, OUTSIDE
        self._scan(rest)
        return line

    def _take(self) -> Lines | RefusedLine | None:
        """Return up to ``ROWS_MAX`` of the complete lines in the buffer, or the first one if that is too long.

        Drops the buffer's part with them. How long a line may be does not depend on where blocks end.
        """
        ends = self._ends[:ROWS_MAX]
        lines: Lines | RefusedLine | None = None
        # only then can a line be too long; else not every line is looked at
        if len(self._buffer) > self._line_bytes_max:
            too_long = np.flatnonzero(np.diff(ends, prepend=-1) - 1 > self._line_bytes_max)
            if len(too_long) and too_long[0] == 0:
                ends = ends[:1]
                if self._csv is not None and self._newlines[0] < ends[0]:
                    return self._refuse_unclosed(f"a quote is not closed within {self._line_bytes_max} bytes")
                head = bytes(self._buffer[: self._head_bytes])
                lines = RefusedLine(self.lines + 1, self.offset, self._too_long(int(ends[0])), head)
            elif len(too_long):
                ends = ends[: too_long[0]]
        if self._needs_header and lines is None:
            ends = ends[:1]
        size = int(ends[-1]) + 1
        assert size <= len(self._buffer), "lines end beyond what was read"
        if self._needs_header and lines is None:
            header = bytes(self._buffer[:size])
            self._header = None if is_blank(header) else header
        elif lines is None:
            lines = self._split(self._buffer[:size], ends)
        self._pass(self._buffer[max(size - HEAD_BYTES, 0) : size])
        self._buffer = self._buffer[size:]
        self._ends = self._ends[len(ends) :] - size
        if not len(self._ends):  # the beginning of a line must not hold the whole block in memory
            self._buffer = memoryview(bytes(self._buffer))
        self.offset += size
        if self._csv is None:
            self.lines += len(ends)
        else:
            count = int(np.searchsorted(self._newlines, size))
            self.lines += count
            self._newlines = self._newlines[count:] - size
        return lines

    @property
    def _needs_header(self) -> bool:
        return self._csv is not None and self._csv.has_header and self._header is None

    def _too_long(self, size: int) -> str:
        return f"the line has {size} bytes, more than {self._line_bytes_max}"

    def _split(self, data: bytes | memoryview, ends: Offsets) -> Lines:
        """Return the lines of ``data``, which is at the position and ends with the last of the line ends ``ends``."""
        if self._csv is None:
            raw = RawLines(data, ends, self.offset)
            return Lines(None, raw.starts(), self.lines + 1, raw=raw)
        newlines = self._newlines[: np.searchsorted(self._newlines, len(data))]
        inner = np.setdiff1d(newlines, ends, assume_unique=True) if len(newlines) > len(ends) else None
        offsets = np.zeros(len(ends) + 1, np.int64)
        offsets[1:] = ends + 1
        starts = offsets[:-1] + self.offset
        if self.offset == 0 and data[: len(BOM)] == BOM:
            offsets[0] = len(BOM)
        values = pa.LargeBinaryArray.from_buffers(
            pa.large_binary(), len(ends), [None, pa.py_buffer(offsets), pa.py_buffer(data)]
        )
        return Lines(
            values, starts, self.lines + 1, None if inner is None else inner + self.offset, self._header or b""
        )

    def _pass(self, data: bytes | memoryview) -> None:
        """Note the last bytes before the position, which moves past ``data``."""
        self._before = (self._before + bytes(data))[-HEAD_BYTES:]

    def _skip(self, at: int, block: bytes) -> RefusedLine | None:
        end = block.find(b"\n")
        skipped = block if end < 0 else block[: end + 1]
        self._skipped_before = (self._skipped_before + skipped)[-HEAD_BYTES:]
        self._skipped_to = at + (len(block) if end < 0 else end + 1)
        return None if end < 0 else self._oversize(self._skipped_to, self._skipped_to - 1)

    def _oversize(self, next_offset: int, end: int) -> RefusedLine:
        self.lines += 1
        line = RefusedLine(self.lines, self.offset, self._too_long(end - self.offset), self._skipped_head)
        self.offset, self._skipped_to, self._before = next_offset, None, self._skipped_before
        return line

    def _end_of_file(self) -> Lines | RefusedLine | None:
        """A last line without line end is complete only if the file will not grow."""
        self.is_at_end = True
        if self._follow:
            return None
        self.is_finished = True
        if self._skipped_to is not None:
            return self._oversize(self._skipped_to, self._skipped_to)
        return self._rest()

    def _rest(self) -> Lines | RefusedLine | None:
        if not self._buffer:
            return None
        if self._quotes == QUOTED and len(self._newlines):
            self.is_finished = self.is_at_end = False
            is_long = len(self._buffer) > self._line_bytes_max
            where = f"within {self._line_bytes_max} bytes" if is_long else "until the end of the file"
            return self._refuse_unclosed(f"a quote is not closed {where}")
        rest, self._buffer = bytes(self._buffer), _NOTHING
        lines: Lines | RefusedLine | None
        if len(rest) > self._line_bytes_max:
            lines = RefusedLine(self.lines + 1, self.offset, self._too_long(len(rest)), rest[: self._head_bytes])
        elif self._quotes == QUOTED:
            problem = "a quote is not closed until the end of the file"
            lines = RefusedLine(self.lines + 1, self.offset, problem, rest[: self._head_bytes])
        elif self._needs_header:
            self._header, lines = rest, None
        else:
            lines = self._split(rest + b"\n", np.array([len(rest)], np.int64))
        self._pass(rest)
        self.lines += 1
        self.offset += len(rest)
        return lines

    def _pass_over(self, compressed: CompressedFile, at: int) -> bool:
        """Decompress a part of what was read before the position; return whether that is all."""
        try:
            with failing("read", self.path), self.system.opened(self.path) as descriptor:
                return compressed.pass_to(descriptor, at)
        except ABSENT:
            raise self.gone() from None

    def _read(self, at: int) -> memoryview:
        """Return the buffer and the block at ``at``, which follows it."""
        try:
            with failing("read", self.path), self.system.opened(self.path) as descriptor:
                return self._checked(descriptor, at)
        except ABSENT:
            raise self.gone() from None

    def _checked(self, descriptor: int, at: int) -> memoryview:
        """Return the buffer and the block at ``at``, unless what stands before that is not what was read."""
        status = self.system.fstat(descriptor)
        if self.inode and status.st_ino not in (self._opened_inode, self._accepted_inode):
            raise self._moved(status, "is another file now")
        # with each block: between two of them the file may be cut, or another one put in its place
        before = self._check_same(descriptor, status)
        self._open_at(descriptor, status, before)
        expected = self._bytes_before_known()
        if self._pread(descriptor, len(expected), at - len(expected)) != expected:
            raise self._moved(status, f"does not have the bytes before byte {at} any more that were read")
        if self._compressed is not None:
            block = memoryview(self._compressed.pread(descriptor, BLOCK_BYTES, at))
            return memoryview(b"".join((self._buffer, block))) if self._buffer else block
        return self._after_buffer(descriptor, status.st_size, at)

    def _after_buffer(self, descriptor: int, size_bytes: int, at: int) -> memoryview:
        """Return the buffer and the block at ``at`` of a file of this size, read to where it stays."""
        known = len(self._buffer)
        wanted = min(BLOCK_BYTES, max(size_bytes - at, 0) + HEAD_BYTES)  # it may have grown since
        space = np.empty(known + wanted, np.uint8).data
        space[:known] = self._buffer
        count = self.system.pread_into(descriptor, space[known:], at)
        return space[: known + count].toreadonly()

    def _bytes_before_known(self) -> bytes:
        if self._skipped_to is not None:
            return self._skipped_before
        return (self._before + bytes(self._buffer[-HEAD_BYTES:]))[-HEAD_BYTES:]

    def _open_at(self, descriptor: int, status: Status, before: bytes) -> None:
        """Note what the file is; a file that was finished and has grown goes on only after a line end."""
        if self._inode is None:
            self._before = before
            if self.offset and self._needs_header:
                self._header = self._read_header(descriptor)
            size = self.offset if self._compressed is None else self._seen_bytes
            if self._was_finished and status.st_size > size and before[-1:] not in (b"", b"\n"):
                raise UsageError(
                    f"{self.path} has grown since its last line, which had no line end, was read: it is not known "
                    "where the next line begins; run the pipeline under a new name, with follow=True if files grow"
                )
        if self._inode is None or len(self._head) < HEAD_BYTES:
            self._head = self._pread(descriptor, HEAD_BYTES, 0)
        self._seen_bytes = status.st_size
        self._inode, self._accepted_inode = (status.st_dev, status.st_ino), 0

    def _read_header(self, descriptor: int) -> bytes | None:
        """Return the first record of a file of CSV that is read from another position on; None: it follows there."""
        assert self._csv is not None
        data, quotes, start = b"", OUTSIDE, 0
        while block := self._pread(descriptor, min(HEADER_BYTES, self.offset - len(data)), len(data)):
            newlines = np.flatnonzero(np.frombuffer(block, np.uint8) == 10)
            ends, quotes = record_ends(block, newlines, self._csv, data[-len(BOM) :], quotes)
            after = [len(data) + end + 1 for end in ends.tolist()]
            data += block
            for end in after:
                if not is_blank(data[start:end]):
                    return data[start:end]
                start = end
        return data[start:] or None

    def _pread(self, descriptor: int, size_bytes: int, offset: int) -> bytes:
        if self._compressed is not None:
            return self._compressed.pread(descriptor, size_bytes, offset)
        return self.system.pread(descriptor, size_bytes, offset)

    def _check_same(self, descriptor: int, status: Status, *, is_elsewhere: bool = False) -> bytes:
        """Refuse a file if its beginning, or its bytes before the position, are not those that were read.

        Returns the bytes before ``offset``.
        """
        known = self._known
        if status.st_size < (known if self._compressed is None else self._seen_bytes):
            raise self._moved(status, f"has {status.st_size} bytes")
        if self._inode is None:
            position = self._restored
            head = _digest(self._pread(descriptor, position.head_bytes, 0))
            size = position.tail_bytes if position.tail_bytes else min(self.offset, HEAD_BYTES)
            before = self._pread(descriptor, size, self.offset - size)
            if position.head_bytes and head != position.head_digest:
                raise self._moved(status, "does not begin as it did")
            if position.tail_bytes and _digest(before) != position.tail_digest:
                raise self._moved(status, f"does not have the bytes before byte {self.offset} any more that were read")
            return before
        if self._inode != (status.st_dev, status.st_ino) or is_elsewhere:
            size = min(known, len(self._head))
            if self._pread(descriptor, size, 0) != self._head[:size]:
                raise self._moved(status, "does not begin as it did")
            expected = self._bytes_before_known()
            if self._pread(descriptor, len(expected), known - len(expected)) != expected:
                raise self._moved(status, f"does not have the bytes before byte {known} any more that were read")
        return self._before

    def _moved(self, status: Status, what: str) -> FileMovedError:
        text = (
            f"{self.path} {what} but was read to byte {self._known}: it was truncated or replaced; files that are "
            "read may grow and be renamed, but not change. Rotate by renaming, not by copying and truncating, or run "
            "the pipeline under a new name"
        )
        return FileMovedError(text, status.st_ino, is_in_place=status.st_ino == self.inode)


def _digest(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data)
