"""Directories that only their process uses: made anew, locked while it lives, removed when nobody needs them.

What a process left that died is removed by whoever next makes one in the same place, because its lock is free. Used for
results that are only looked at, and for local state. Never lets two processes have one directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from pathlib import Path

from headgate.model.security import Access
from headgate.storage.access import access_in, open_lock, refuse_strangers
from headgate.storage.local import make_directories

_LOCK = ".lock"


class OwnDirectory:
    """One directory of this process: ``path``."""

    def __init__(
        self, parent: Path, access: Access = Access.OWNER, *, keeps_abandoned: bool = False, is_users: bool = False
    ) -> None:
        """Make it in ``parent``, which is made if it is missing, and remove what dead processes left there.

        ``keeps_abandoned``: not yet; somebody still looks at it, and calls ``remove_abandoned``.
        ``is_users``: ``parent`` is this user's alone, but where everybody may have made it.

        Raises:
            OSError
        """
        make_directories(parent, access)
        if is_users:
            refuse_strangers(parent)
        if not keeps_abandoned:
            remove_abandoned(parent)
        self.path, self._lock = _locked(parent, access)
        make_directories(self.path, access_in(parent))

    def remove(self) -> None:
        """Remove it with everything in it, and its parent if that is empty then. Idempotent."""
        if self._lock < 0:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.with_suffix(_LOCK).unlink(missing_ok=True)
        os.close(self._lock)
        self._lock = -1
        with contextlib.suppress(OSError):  # others use it
            self.path.parent.rmdir()

    def leave(self) -> None:
        """Leave it as a process does that dies: others may look at it, and it goes as what is abandoned. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _locked(parent: Path, access: Access) -> tuple[Path, int]:
    """Return the path of a new directory and its lock, which nobody took for abandoned in between.

    Whoever ends as the last one removes ``parent``, which the lock then keeps.
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


def remove_abandoned(parent: Path) -> None:
    """Remove the directories of processes that are dead.

    Nothing happens if somebody else does it meanwhile. What cannot be opened, or is no lock, stays and harms nobody.
    """
    try:
        locks = list(parent.glob(f"*{_LOCK}"))
    except FileNotFoundError:  # whoever ended as the last one removed it
        return
    for lock in locks:
        with contextlib.suppress(OSError):
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
