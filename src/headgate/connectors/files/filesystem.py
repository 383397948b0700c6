"""Files as the sources of lines see them: which there are, what they are, and bytes at an offset, compressed or not.

``LOCAL`` is the operating system's file system; the simulator has one of its own (``sim.machine.files``). It decides
nothing. The world changes between any two calls: what a call says was so, and need not be so any more
(docs/spec/connectors.md).

A compressed file (gzip, zstd, bz2, with any number of members or frames) is read forward as if it were not compressed.
Memory is bounded: a part of the file is decompressed at a time. Reading at an offset before the last one begins again
at the start of the file.
"""

from __future__ import annotations

import bz2
import glob
import io
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from headgate.errors import StorageError, UsageError

ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""What says that there is no such file. Any other failure says nothing about whether there is one."""

LISTINGS_MAX = 8
"""A directory that goes while it is listed is a reason to list again; more in a row is something else."""


@contextmanager
def failing(operation: str, path: str) -> Iterator[None]:
    """Raise what fails as a StorageError, which another start may mend; but not what is absent."""
    try:
        yield
    except ABSENT:
        raise
    except OSError as error:
        raise StorageError(operation, path, error.strerror or str(error)) from error


class Status(Protocol):
    """Of a file, as ``os.stat_result``."""

    @property
    def st_ino(self) -> int:
        """Its inode."""

    @property
    def st_dev(self) -> int:
        """Its device."""

    @property
    def st_size(self) -> int:
        """Its size in bytes."""

    @property
    def st_mtime_ns(self) -> int:
        """When it was last written to."""


class FileSystem(Protocol):
    """Files by absolute path. What is not there raises ``FileNotFoundError``, whatever else fails ``OSError``."""

    def opened(self, path: str) -> AbstractContextManager[int]:
        """Open a file for reading; return a descriptor."""

    def fstat(self, descriptor: int) -> Status:
        """Return the status of an open file."""

    def pread(self, descriptor: int, size_bytes: int, offset: int) -> bytes:
        """Return at most ``size_bytes`` at ``offset``; nothing means the end of the file."""

    def pread_into(self, descriptor: int, space: memoryview, offset: int) -> int:
        """Read at most as much as ``space`` has room for, at ``offset``; return how much. 0 means the end."""

    def stat(self, path: str) -> Status:
        """Return the status of a file."""

    def siblings(self, path: str) -> list[tuple[str, int]]:
        """Return the files of the directory of ``path``, by name, with their inodes."""

    def is_file(self, path: str) -> bool:
        """Whether there is a file."""

    def is_directory(self, path: str) -> bool:
        """Whether there is a directory."""

    def may_read(self, path: str) -> bool:
        """Whether this user may read a file."""

    def may_list(self, path: str) -> bool:
        """Whether this user may list a directory."""

    def matching(self, pattern: str) -> Iterable[str]:
        """Return what a glob finds."""

    def below(self, directory: str, pattern: str) -> Iterable[str]:
        """Return what a glob finds relative to a directory, as absolute paths."""

    def link_target(self, path: str) -> str | None:
        """Return what a symbolic link leads to; None: it is none."""


class LocalFiles:
    """The files of this machine, and what is mounted there. See ``FileSystem``."""

    @contextmanager
    def opened(self, path: str) -> Iterator[int]:
        with open(path, "rb", buffering=0) as file:
            yield file.fileno()

    def fstat(self, descriptor: int) -> Status:
        return os.fstat(descriptor)

    def pread(self, descriptor: int, size_bytes: int, offset: int) -> bytes:
        return os.pread(descriptor, size_bytes, offset)

    def pread_into(self, descriptor: int, space: memoryview, offset: int) -> int:
        return os.preadv(descriptor, [space], offset)

    def stat(self, path: str) -> Status:
        return os.stat(path)

    def siblings(self, path: str) -> list[tuple[str, int]]:
        with os.scandir(os.path.dirname(path)) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
            return [(entry.path, entry.inode()) for entry in found if entry.is_file()]

    def is_file(self, path: str) -> bool:
        return os.path.isfile(path)

    def is_directory(self, path: str) -> bool:
        return os.path.isdir(path)

    def may_read(self, path: str) -> bool:
        return os.access(path, os.R_OK)

    def may_list(self, path: str) -> bool:
        return os.access(path, os.R_OK | os.X_OK)

    def matching(self, pattern: str) -> Iterable[str]:
        return glob.iglob(pattern, recursive=True)

    def below(self, directory: str, pattern: str) -> Iterable[str]:
        for _ in range(LISTINGS_MAX):
            try:
                return [str(path) for path in Path(directory).glob(pattern)]
            except ABSENT:  # a directory below it went meanwhile
                continue
        raise StorageError("list", directory, "directories in it come and go all the time")

    def link_target(self, path: str) -> str | None:
        return os.path.realpath(path) if os.path.islink(path) else None


LOCAL = LocalFiles()


def inode_of(path: str, system: FileSystem = LOCAL) -> int | None:
    """Return the inode of the file at ``path``, or None if there is none.

    Raises:
        StorageError: it is not known.
    """
    with failing("look at", path):
        try:
            return system.stat(path).st_ino
        except ABSENT:
            return None


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
        # further back than what is remembered: there is no way but from the start
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
