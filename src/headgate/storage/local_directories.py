"""Local directories that Headgate makes: the user's state directory, roots of file systems, and process directories.

A process directory is locked while its process lives. What a dead process left is removed by the next process that
makes one in the same place, because its lock is free. Never lets two processes have one directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from pathlib import Path

from headgate.errors import UsageError
from headgate.model.config import Access
from headgate.storage.local import make_directories
from headgate.storage.permissions import access_in, open_lock, refuse_foreign_directory


def user_state_directory() -> Path:
    """Return ``headgate`` in ``$XDG_STATE_HOME``, or in ``~/.local/state``; it may not be there.

    Raises:
        RuntimeError: this user has no home.
    """
    return _directory("XDG_STATE_HOME", ".local/state")


def user_cache_directory() -> Path:
    """Return ``headgate`` in ``$XDG_CACHE_HOME``, or in ``~/.cache``; it may not be there.

    Raises:
        RuntimeError: this user has no home.
    """
    return _directory("XDG_CACHE_HOME", ".cache")


def _directory(variable: str, default: str) -> Path:
    given = os.environ.get(variable, "")
    return (Path(given) if os.path.isabs(given) else Path.home() / default) / "headgate"


def make_root(directory: Path, access: Access, what: str) -> None:
    """Create ``directory``, which is a ``what``, unless it exists.

    Raises:
        UsageError: it exists and is not shared with its group although ``access`` says so.
        OSError: it cannot be created.
    """
    if not directory.is_dir():
        make_directories(directory, access)
    elif access is Access.GROUP and access_in(directory) is not Access.GROUP:
        raise UsageError(
            f"{what} {directory} exists and is not shared with its group, as access='group' asks; share it once with "
            f"'chmod -R g+rwX {directory}; find {directory} -type d -exec chmod g+s {{}} +', or choose a new directory"
        )


def checked_access(access: str, what: str, *choices: Access) -> Access:
    """Return what the text ``access`` means.

    Raises:
        UsageError: it is not one of ``choices``.
    """
    found = next((choice for choice in choices if choice.value == access), None)
    if found is None:
        names = " or ".join(f"'{choice.value}'" for choice in choices)
        raise UsageError(f"{what} must be {names}, not {access!r}")
    return found


_LOCK = ".lock"

_REMOVED_MAX = 100
"""So often others may remove a place while it is made."""


class ProcessDirectory:
    """One directory of this process: ``path``."""

    def __init__(
        self, parent: Path, access: Access = Access.OWNER, *, keeps_abandoned: bool = False, is_users: bool = False
    ) -> None:
        """Make it in ``parent``, which is made if it is missing, and remove what dead processes left there.

        ``keeps_abandoned``: not yet; it is still in use, and ``remove_abandoned`` is called later.
        ``is_users``: ``parent`` is this user's alone, but others may have made it.

        Raises:
            OSError
        """
        self.path, self._lock = _locked(parent, access, is_users=is_users)
        if not keeps_abandoned:
            remove_abandoned(parent)
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


def _locked(parent: Path, access: Access, *, is_users: bool) -> tuple[Path, int]:
    """Return the path of a new directory and its lock, which was not taken for abandoned in between.

    The last process to end removes ``parent``, at any moment until the lock keeps it.
    """
    removed = 0
    while True:
        path = parent / secrets.token_hex(8)
        try:
            make_directories(parent, access)
            if is_users:
                refuse_foreign_directory(parent)
            descriptor = open_lock(path.with_suffix(_LOCK))
        except FileNotFoundError:
            removed += 1
            if removed == _REMOVED_MAX:
                raise  # not others, but what the place is, such as a link to nowhere
            continue
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return path, descriptor
        os.close(descriptor)


def remove_abandoned(parent: Path) -> None:
    """Remove the directories of processes that are dead.

    Nothing happens if another process does it meanwhile. What cannot be opened, or is no lock, stays.
    """
    try:
        locks = list(parent.glob(f"*{_LOCK}"))
    except FileNotFoundError:  # the last process to end removed it
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
