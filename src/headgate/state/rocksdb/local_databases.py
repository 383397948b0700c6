"""Where the databases of one worker are: a directory of its own, which is gone when the worker has ended well.

Counterpart: ``state.worker_backends``, through which a worker gets it. Two workers on one machine have two directories.
What a worker left that was killed, or failed, may serve the next ones: a restore takes what fits. The first
worker of that machine that takes a snapshot removes it: by then all have restored.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from headgate.state.rocksdb.database import Database, SharedMemory, Use, directory_error
from headgate.storage.local_files import ProcessDirectory, remove_abandoned

_PARENT = f"headgate-state-{os.getuid()}"
"""Of this user: the directory for temporary files is shared, and no other user may read what is below (0700)."""


_CHANGED_SHARE = 4
"""One part in so many of a cache may differ from the database."""


_KEPT_MAX = 2
"""So many of the snapshots that were written as files are kept: most likely one of them is the newest completed one."""


class LocalDatabase:
    """A database, and the checkpoints of it that are still held.

    Attributes:
        directory: of this database alone.
        known: its files that are in snapshots (``database_snapshot.KnownFiles``).
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        memory: SharedMemory,
        before_checkpoint: Callable[[], None],
        use: Use,
    ) -> None:
        """``name``: the same one in every life of the worker."""
        self.directory = directory
        self.known: dict[str, tuple[int, int]] = {}
        self._name = name
        self._memory = memory
        self._before_checkpoint = before_checkpoint
        self._kept: list[Path] = []
        self._checkpoints_count = 0
        directory.mkdir(0o700)
        self.database = Database(directory / "db", memory, use)

    @property
    def cache_bytes(self) -> int:
        """What the cache in front of it may hold."""
        return self._memory.cache_bytes

    def needs_write_back(self, changed_rows: int, changed_bytes: int, rows_max: int) -> bool:
        """Whether so many rows that differ from the database are to be written back.

        The first ones are, however few: their size is not known yet.
        """
        is_large = changed_bytes > self.cache_bytes // _CHANGED_SHARE
        return changed_rows > rows_max or is_large or (changed_rows > 0 and not self.database.sizes.is_known)

    def row_bytes(self, least: int, copies: int) -> int:
        """Return what a row in the cache takes, about: ``least``, and its value ``copies`` times."""
        return least + copies * self.database.sizes.mean_bytes

    def checkpoint(self) -> Path:
        """Return the directory of a new checkpoint.

        Raises:
            StorageError
        """
        self._before_checkpoint()
        # never the same name again: an upload thread may still read an older one
        self._checkpoints_count += 1
        path = self.directory / f"checkpoint-{self._checkpoints_count}"
        self.database.checkpoint(path)
        return path

    def keep(self, checkpoint: Path) -> None:
        """Keep the files of a snapshot for the process that restores after this one; of older ones they go."""
        assert checkpoint not in self._kept, "a snapshot is released once"
        self._kept.append(checkpoint)
        while len(self._kept) > _KEPT_MAX:
            shutil.rmtree(self._kept.pop(0), ignore_errors=True)

    def remove_all_but_kept(self) -> bool:
        """Remove all but the snapshots that are kept; return whether there are any. The database is closed."""
        for path in self.directory.iterdir():
            if path not in self._kept:
                shutil.rmtree(path, ignore_errors=True)
        return bool(self._kept)

    def near(self, file_name: str) -> Iterator[Path]:
        """Yield files of this name that databases of this name have, or have left, on this machine."""
        mine = self.directory.parent
        with suppress(OSError):  # its process has just ended; or it cannot be read, and files are fetched
            for path in mine.parent.glob(f"*/*-{self._name}/*/{file_name}"):
                if mine not in path.parents:
                    yield path


class LocalDatabases:
    """All databases of one worker. Made when the first operator asks for one."""

    def __init__(self, memory_bytes: int, directory: str | None) -> None:
        """``directory``: on a local disk; None is the system's for temporary files."""
        self._parent = Path(directory or tempfile.gettempdir()) / _PARENT
        self._memory_bytes = memory_bytes
        self._own: ProcessDirectory | None = None
        self._memory: SharedMemory | None = None
        self._open: list[LocalDatabase] = []
        self._is_tidy = False

    def new_database(self, name: str, use: Use = Use.SEARCHED) -> LocalDatabase:
        """Return an empty database.

        Args:
            name: of the operator and subtask, for people who look into the directory.
            use: what it is for.

        Raises:
            StorageError: the directory cannot be made or written.
        """
        if self._own is None or self._memory is None:
            try:
                self._own = ProcessDirectory(self._parent, keeps_abandoned=True, is_users=True)
            except OSError as error:
                raise directory_error(self._parent, error) from error
            self._memory = SharedMemory(self._memory_bytes)
        self._memory.joined(use)
        directory = self._own.path / f"{len(self._open)}-{name}"
        try:
            made = LocalDatabase(directory, name, self._memory, self._tidy, use)
        except OSError as error:  # full, or removed
            raise directory_error(directory, error) from error
        self._open.append(made)
        return made

    def _tidy(self) -> None:
        """Remove what dead workers left, once: a barrier has come, so all subtasks have restored."""
        if not self._is_tidy:
            self._is_tidy = True
            remove_abandoned(self._parent)

    def close(self, *, is_left: bool = False) -> None:
        """Close everything, and remove it. Idempotent. Snapshots that are still being written fail.

        ``is_left``: not the last snapshots, which a restore on this machine may use.
        """
        # all of them before any file goes: an upload thread that still reads fails with a plain error
        for local in self._open:
            local.database.close()
        kept = [local.remove_all_but_kept() for local in self._open] if is_left else []
        self._open.clear()
        if self._own is None:
            return
        if not is_left:
            self._tidy()
        if any(kept):
            self._own.leave()
        else:
            self._own.remove()
        self._own = None
