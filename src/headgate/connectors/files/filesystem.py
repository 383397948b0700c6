"""What the sources of lines ask of a file system: which files there are, what they are, and bytes at an offset.

``LOCAL`` is the operating system's; the simulator has one of its own (``sim.machine.storage``). Decides nothing. The
world changes between any two calls: what a call says was so, and need not be so any more (docs/spec/connectors.md).
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from headgate.errors import StorageError

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
