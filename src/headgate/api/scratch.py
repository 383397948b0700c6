"""Directories of runs whose results are only looked at: made anew for each run, gone when nobody needs them.

They lie below the checkpoint directory, which all workers reach. Whoever uses one holds a lock on it; what a process
left that died is removed by the next run.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import secrets
import shutil
from pathlib import Path

from headgate.errors import UsageError
from headgate.model.security import Access
from headgate.storage.access import access_in, open_lock
from headgate.storage.backends import local_directory
from headgate.storage.local import make_directories

SCRATCH = ".explored"
"""No pipeline can have this name."""

_LOCK = ".lock"


class ScratchDirectory:
    """One directory of this process."""

    def __init__(self, root: str) -> None:
        """Make it below the checkpoint directory ``root``, and remove what dead processes left there.

        Raises:
            UsageError: ``root`` is not a directory of this machine (or mounted on it).
        """
        local = local_directory(root)
        if local is None:
            raise UsageError(
                f"results are exchanged through the checkpoint directory, which must be a directory and not {root}; "
                "use Checkpointing(dir=) with one that all workers reach, or write to headgate.FileSink and call run()"
            )
        parent = local / SCRATCH
        access = access_in(local) if local.is_dir() else Access.OWNER
        make_directories(parent, access)
        _remove_abandoned(parent)
        self.path, self._lock = _locked(parent, access)
        make_directories(self.path, access_in(parent))

    def remove(self) -> None:
        """Remove it with everything in it. Idempotent."""
        if self._lock < 0:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.with_suffix(_LOCK).unlink(missing_ok=True)
        os.close(self._lock)
        self._lock = -1
        with contextlib.suppress(OSError):  # others use it
            self.path.parent.rmdir()

    def remove_at_exit(self) -> None:
        """Keep it as long as this process lives."""
        atexit.register(self.remove)


def _locked(parent: Path, access: Access) -> tuple[Path, int]:
    """Return the path of a new directory and its lock, which nobody took for abandoned in between.

    Whoever ends the last look removes ``parent``, which the lock then keeps.
    """
    while True:
        path = parent / secrets.token_hex(8)
        make_directories(parent, access)
        try:
            descriptor = open_lock(path.with_suffix(_LOCK))
        except FileNotFoundError:
            continue
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return path, descriptor
        os.close(descriptor)


def _remove_abandoned(parent: Path) -> None:
    for lock in parent.glob(f"*{_LOCK}"):
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(lock, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            else:
                shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
                lock.unlink()
            finally:
                os.close(descriptor)
