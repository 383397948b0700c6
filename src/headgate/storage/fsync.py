"""Which directories are durable: the names in them, and their own names in their parents.

Counterpart: ``local``, which reads and writes the files. Source: docs/spec/storage.md.
Never trusts a directory because it is there: its maker may have failed to sync, or have died before.
"""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import field
from pathlib import Path
from typing import TypeAlias

from headgate.dataclass import dataclass

PERMANENT = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL})
"""Errors that no repetition cures: lack of rights, and impossible names."""

SEEN_MAX = 1_024
"""Directories that a process remembers as synced. Every checkpoint has some of its own, and a run takes millions; one
that is forgotten is synced once more when it is next read."""

PLACED_MAX = 128
"""Directories that a process remembers as placed, each with a descriptor; as above."""

_Identity: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Placed:
    """A directory with a durable path. While the descriptor is open, no other one gets its inode number."""

    identity: _Identity
    descriptor: int


@dataclass(slots=True)
class SyncedDirectories:
    """What one process has synced, last synced last."""

    seen: dict[str, bool] = field(default_factory=dict)
    """Directories in which all names were durable, and that this process has not failed to sync since."""
    placed: dict[str, _Placed] = field(default_factory=dict)
    """Directories with durable paths."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def see(self, directory: Path) -> None:
        """Remember that the names in ``directory`` are durable."""
        with self._lock:
            self.seen[str(directory)] = True
            while len(self.seen) > SEEN_MAX:
                del self.seen[next(iter(self.seen))]

    def is_placed(self, directory: Path, identity: _Identity) -> bool:
        """Whether the path of this very directory is durable. It may have been removed and made again."""
        with self._lock:
            found = self.placed.get(str(directory))
            if found is None or found.identity != identity:
                return False
            self.placed[str(directory)] = self.placed.pop(str(directory))  # asked for last, forgotten last
            return True

    def place(self, directory: Path, descriptor: int) -> None:
        """Remember that the path of the directory that ``descriptor`` holds open is durable; close it in the end."""
        placed = _Placed(_identity_of(os.fstat(descriptor)), descriptor)
        with self._lock:
            gone = [self.placed.pop(str(directory), None)]
            self.placed[str(directory)] = placed
            while len(self.placed) > PLACED_MAX:
                gone.append(self.placed.pop(next(iter(self.placed))))
        _close(gone)

    def doubt(self, directory: Path) -> bool:
        """Forget that the names in ``directory`` are durable; return whether they were."""
        with self._lock:
            return self.seen.pop(str(directory), False)

    def forget(self, directory: Path) -> None:
        """``directory`` was removed."""
        with self._lock:
            self.seen.pop(str(directory), None)
            gone = [self.placed.pop(str(directory), None)]
        _close(gone)


SYNCED = SyncedDirectories()
"""Of this process."""


def sync_file(path: Path) -> None:
    """Make what another process wrote to ``path`` durable; its name is that of its directory (``sync_directory``)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_names(directory: Path) -> None:
    """Make names created in or removed from ``directory`` durable, if its own path is."""
    was_durable = SYNCED.doubt(directory)  # until the sync succeeds
    descriptor = _opened(directory)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if was_durable:
        SYNCED.see(directory)


def sync_directory(directory: Path) -> None:
    """Make names created in or removed from ``directory`` durable, and its own path."""
    sync_path(directory)
    sync_names(directory)
    SYNCED.see(directory)


def sync_before_reading(directory: Path) -> None:
    """Make the names in ``directory`` durable before they are acted on.

    Their maker may have failed to sync, or have died before. Once per process, and again after a failed sync;
    a process without the right to sync only reads, and decides nothing.
    """
    if str(directory) in SYNCED.seen:
        return
    try:
        sync_directory(directory)
    except OSError as error:
        if error.errno not in PERMANENT:
            raise


def sync_path(directory: Path, *, is_new: bool = False) -> None:
    """Make the name of ``directory`` in its parent durable, and those of all above it, unless this process did.

    Ask while something of ours is in it, so that it cannot be removed and made again meanwhile. Where we have no
    right to sync a parent, another user made it; but for ``is_new``: then we have just made ``directory`` in it.
    """
    if directory == directory.parent or SYNCED.is_placed(directory, _identity_of(os.stat(directory))):
        return
    descriptor = _opened(directory)
    try:
        try:
            sync_directory(directory.parent)
        except OSError as error:
            if is_new or error.errno not in PERMANENT:
                raise
        SYNCED.place(directory, descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def _opened(directory: Path) -> int:
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY)


def _identity_of(found: os.stat_result) -> _Identity:
    return found.st_dev, found.st_ino


def _close(forgotten: list[_Placed | None]) -> None:
    for placed in forgotten:
        if placed is not None:
            os.close(placed.descriptor)
