"""Files that somebody else writes and renames: what the sources of files read in the machine room.

Counterpart of ``connectors.files.system.LocalFiles``. Opening a file takes time, and fails now and then; everything
else is at once. Inodes are never used again.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from posixpath import basename, dirname

from headgate.sim.machine.faults import Fault, Faults
from headgate.sim.machine.tasks import Tasks

FAILURE_RATE = 0.2
"""Of the opportunities at which reading fails, so many do: each ends a generation."""


@dataclass(slots=True)
class SimFile:
    """One file, whatever its name; its own status."""

    st_ino: int
    data: bytes
    st_mtime_ns: int
    st_dev: int = 1

    @property
    def st_size(self) -> int:
        """See ``os.stat_result``."""
        return len(self.data)


class SimFiles:
    """One file system, for all processes."""

    def __init__(self, tasks: Tasks, faults: Faults, step_ms: int) -> None:
        """``step_ms``: usual time of opening a file, at most."""
        self._tasks = tasks
        self._faults = faults
        self._step_ms = step_ms
        self._files: dict[str, SimFile] = {}
        self._open: dict[int, SimFile] = {}
        self._count = 0

    # -- what its owner does ----------------------------------------------------------------------------------------

    def append(self, path: str, data: bytes) -> None:
        """Write behind what is there; make the file if there is none."""
        if path not in self._files:
            self._count += 1
            self._files[path] = SimFile(self._count, b"", 0)
        self._files[path].data += data
        self._files[path].st_mtime_ns = self._tasks.world.now_ms * 1_000_000

    def rename(self, path: str, target: str) -> None:
        """Give a file another name."""
        self._files[target] = self._files.pop(path)

    @property
    def paths(self) -> list[str]:
        """All files."""
        return sorted(self._files)

    # -- ``connectors.files.system.FileSystem`` -----------------------------------------------------------------------

    @contextmanager
    def opened(self, path: str) -> Iterator[int]:
        """See ``FileSystem``."""
        self._tasks.park(self._faults.delay_ms(self._step_ms))
        if self._faults.strikes(Fault.GET_FAILS) and self._tasks.world.random.random() < FAILURE_RATE:
            raise OSError(errno.EIO, "injected", path)
        self._count += 1
        descriptor, self._open[self._count] = self._count, self._found(path)
        try:
            yield descriptor
        finally:
            del self._open[descriptor]

    def fstat(self, descriptor: int) -> SimFile:
        """See ``FileSystem``."""
        return self._open[descriptor]

    def pread(self, descriptor: int, size_bytes: int, offset: int) -> bytes:
        """See ``FileSystem``."""
        return self._open[descriptor].data[offset : offset + size_bytes]

    def stat(self, path: str) -> SimFile:
        """See ``FileSystem``."""
        return self._found(path)

    def siblings(self, path: str) -> list[tuple[str, int]]:
        """See ``FileSystem``."""
        return [(other, self._files[other].st_ino) for other in self.paths if dirname(other) == dirname(path)]

    def is_file(self, path: str) -> bool:
        """See ``FileSystem``."""
        return path in self._files

    def is_directory(self, path: str) -> bool:
        """See ``FileSystem``."""
        return any(other.startswith(f"{path}/") for other in self._files)

    def may_read(self, path: str) -> bool:
        """See ``FileSystem``."""
        return True

    def may_list(self, path: str) -> bool:
        """See ``FileSystem``."""
        return True

    def matching(self, pattern: str) -> Iterable[str]:
        """See ``FileSystem``."""
        return [path for path in self.paths if fnmatchcase(path, pattern)]

    def below(self, directory: str, pattern: str) -> Iterable[str]:
        """See ``FileSystem``; directories here are flat."""
        found = [path for path in self.paths if dirname(path) == directory]
        return [path for path in found if fnmatchcase(basename(path), pattern.removeprefix("**/"))]

    def link_target(self, path: str) -> str | None:
        """See ``FileSystem``: there are no links."""
        return None

    def _found(self, path: str) -> SimFile:
        if path not in self._files:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        return self._files[path]
