"""Files that another process writes and renames: what the sources of files read in the machine room.

Counterpart of ``connectors.files.filesystem.LocalFiles``. Opening a file takes time, and fails now and then; everything
else is at once, but for files that are listed while their owner is at work (``BusyFiles``).
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import field, replace
from fnmatch import fnmatchcase
from posixpath import basename, dirname

from headgate.dataclass import dataclass
from headgate.sim.machine.tasks import Tasks
from headgate.sim.machine.world import Fault, Faults

FAILURE_RATE = 0.2
"""Of the opportunities at which reading fails, so many do: each ends a generation."""

TURN_RATE = 0.05
"""How often others go first between two looks at busy files."""

NEW_NAME_FAILURE_RATE = 0.15
"""How often a busy file cannot be read when it is opened by a new name, if reading may fail at all."""


@dataclass(slots=True)
class SimFile:
    """One file, whatever its name; its own status."""

    st_ino: int
    data: bytes
    st_mtime_ns: int
    st_dev: int = 1
    names: set[str] = field(default_factory=set)
    """Every name that it has had."""
    known_as: str = ""
    """The name under which it was opened last."""

    @property
    def st_size(self) -> int:
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
        """Write after what is there; make the file if there is none."""
        if path not in self._files:
            self._files[path] = SimFile(self._new_inode(path), b"", 0, names={path})
        self.write(self._files[path], data)

    def write(self, file: SimFile, data: bytes) -> None:
        """Write after what is in a file, whatever its name is now."""
        file.data += data
        file.st_mtime_ns = self._tasks.world.now_ms * 1_000_000

    def rename(self, path: str, target: str) -> None:
        """Give a file another name."""
        self._files[target] = self._files.pop(path)
        self._files[target].names.add(target)

    def at(self, path: str) -> SimFile | None:
        """Return the file that has this name now."""
        return self._files.get(path)

    def _new_inode(self, path: str) -> int:
        self._count += 1
        return self._count

    @property
    def paths(self) -> list[str]:
        """All files."""
        return sorted(self._files)

    # -- ``connectors.files.system.FileSystem`` -----------------------------------------------------------------------

    @contextmanager
    def opened(self, path: str) -> Iterator[int]:
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
        """See ``FileSystem``: as it is now."""
        return replace(self._open[descriptor])

    def pread(self, descriptor: int, size_bytes: int, offset: int) -> bytes:
        return self._open[descriptor].data[offset : offset + size_bytes]

    def pread_into(self, descriptor: int, space: memoryview, offset: int) -> int:
        data = self.pread(descriptor, len(space), offset)
        space[: len(data)] = data
        return len(data)

    def stat(self, path: str) -> SimFile:
        """See ``FileSystem``: as it is now."""
        return replace(self._found(path))

    def siblings(self, path: str) -> list[tuple[str, int]]:
        return [(other, self._files[other].st_ino) for other in self.paths if dirname(other) == dirname(path)]

    def is_file(self, path: str) -> bool:
        return path in self._files

    def is_directory(self, path: str) -> bool:
        return any(other.startswith(f"{path}/") for other in self._files)

    def may_read(self, path: str) -> bool:
        return True

    def may_list(self, path: str) -> bool:
        return True

    def matching(self, pattern: str) -> Iterable[str]:
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


class BusyFiles(SimFiles):
    """Files with an owner that writes, renames, removes and replaces them between any two looks at them.

    The inode of a removed file is used again, but not for a file of the same name: that could not be noticed.
    """

    def __init__(self, tasks: Tasks, faults: Faults, step_ms: int, turns: random.Random, directory: str) -> None:
        """``turns`` says when others go first; ``directory`` is there before any file is."""
        super().__init__(tasks, faults, step_ms)
        self._turns = turns
        self._directory = directory
        self._freed: list[SimFile] = []
        self.on_listed: Callable[[], None] = lambda: None
        """Called when a user has listed the directory."""

    def remove(self, path: str) -> None:
        """Remove a file."""
        self._freed.append(self._files.pop(path))

    def replace(self, path: str, data: bytes) -> SimFile:
        """Put another file with this content in the place of one."""
        self.remove(path)
        self.append(path, data)
        return self._files[path]

    def overwrite(self, file: SimFile, data: bytes) -> None:
        """Write a file again in its place."""
        file.data = b""
        self.write(file, data)

    def _new_inode(self, path: str) -> int:
        for file in self._freed:
            if path not in file.names and self._turns.random() < 0.5:
                self._freed.remove(file)
                return file.st_ino
        return super()._new_inode(path)

    # -- ``connectors.files.system.FileSystem`` ---------------------------------------------------------------------

    @contextmanager
    def opened(self, path: str) -> Iterator[int]:
        with super().opened(path) as descriptor:
            file = self._open[descriptor]
            is_new, file.known_as = file.known_as not in ("", path), path
            if is_new and self._faults.has(Fault.GET_FAILS) and self._turns.random() < NEW_NAME_FAILURE_RATE:
                raise OSError(errno.EIO, "injected", path)
            yield descriptor

    def pread(self, descriptor: int, size_bytes: int, offset: int) -> bytes:
        self._look()
        return super().pread(descriptor, size_bytes, offset)

    def stat(self, path: str) -> SimFile:
        self._look()
        return super().stat(path)

    def siblings(self, path: str) -> list[tuple[str, int]]:
        self._look()
        found = super().siblings(path)
        self.on_listed()
        return found

    def is_file(self, path: str) -> bool:
        self._look()
        return super().is_file(path)

    def is_directory(self, path: str) -> bool:
        return path == self._directory

    def may_read(self, path: str) -> bool:
        """See ``FileSystem``: no process may read what is not there."""
        self._look()
        return path in self._files

    def _look(self) -> None:
        if self._turns.random() < TURN_RATE:
            self._tasks.park(self._turns.randint(0, 2))
