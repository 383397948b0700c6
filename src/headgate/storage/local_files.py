"""Local files and directories that Headgate makes: their modes, their durability, and directories of one process.

Modes do not depend on the process's umask. A directory says itself whether it is shared with its group, so that
drivers, workers and command lines need no option; nothing changes the mode of what Headgate did not create, locks
apart. No directory is trusted because it is there: its maker may have failed to sync, or have died before. A process
directory is locked while its process lives; what a dead process left is removed by the next process that makes one in
the same place, because its lock is free. Counterpart: ``local``, which reads and writes objects. Source:
docs/spec/security.md and docs/spec/storage.md.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
import threading
from dataclasses import field
from pathlib import Path
from typing import TypeAlias

from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.model.config import Access

FILE_MODES = {Access.OWNER: 0o600, Access.GROUP: 0o660, Access.UMASK: 0o666}
DIRECTORY_MODES = {Access.OWNER: 0o700, Access.GROUP: 0o2770, Access.UMASK: 0o777}
SHARED_BITS = stat.S_ISGID | stat.S_IWGRP
"""What marks a directory as shared with its group. No umask sets the first bit by accident."""

_RENAME_PREFIX = ".hg-dir-"


def access_in(directory: Path) -> Access:
    """Return who may use what is created in ``directory``, or in its nearest parent that exists."""
    while True:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            is_shared = os.stat(directory).st_mode & SHARED_BITS == SHARED_BITS
            return Access.GROUP if is_shared else Access.OWNER
        if directory == directory.parent:
            return Access.OWNER
        directory = directory.parent


def refuse_foreign_directory(directory: Path) -> None:
    """Refuse a directory that another user has made in a shared place, or a link that leads away.

    Its owner may read, change and replace all that is put there.

    Raises:
        PermissionError
    """
    for found in (os.lstat(directory), os.stat(directory)):
        if found.st_uid != os.geteuid():
            said = (
                f"it belongs to user {found.st_uid}, who could read and change what is put there; have it removed, or "
                "choose another directory for such files"
            )
            raise PermissionError(errno.EPERM, said, str(directory))


def why_not_writable(directory: Path) -> str:
    """Return why this process could not write to ``directory``, or make it where it is missing; "" if it could.

    Looks only, so that a full or failing disk is not seen.
    """
    while not os.path.exists(directory):
        if directory.is_symlink():
            return f"{directory} is a link to nothing"
        directory = directory.parent
    if not directory.is_dir():
        return f"{directory} is no directory"
    return "" if os.access(directory, os.W_OK | os.X_OK) else f"no right to write in {directory}"


def has_access(path: Path, rights: int) -> bool:
    """Return whether this process has ``rights`` (``os.R_OK`` and so on) on ``path``, as the user that it is now."""
    return os.access(path, rights, effective_ids=os.access in os.supports_effective_ids)


def open_created(path: Path, flags: int, access: Access) -> int:
    """Open ``path`` with ``flags``, creating it with the mode of ``access`` where they say so."""
    mode = FILE_MODES[access]
    descriptor = os.open(path, flags | os.O_CLOEXEC, mode)
    if access is Access.GROUP and flags & os.O_CREAT:
        with contextlib.suppress(PermissionError):  # it was there, and is another member's
            os.fchmod(descriptor, mode)  # the umask has cut the group off
    return descriptor


def write_created(path: Path, data: bytes, access: Access) -> None:
    """Write ``data`` to ``path``, creating it with the mode of ``access``; not atomic, and not durable."""
    descriptor = open_created(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, access)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def open_lock(path: Path) -> int:
    """Open the lock file at ``path`` for reading and appending; only those who may write what it protects can.

    A lock can be taken through any descriptor, one that only reads too, so no other user must be able to open it.
    """
    access = access_in(path.parent)
    descriptor = open_created(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, access)
    found = os.fstat(descriptor)
    if stat.S_IMODE(found.st_mode) & ~FILE_MODES[access] and found.st_uid == os.geteuid():
        os.fchmod(descriptor, FILE_MODES[access])  # a wider mode would let others take the lock
    return descriptor


def make_directory(path: Path, access: Access) -> None:
    """Create one directory with the mode of ``access``.

    Raises:
        FileExistsError
    """
    if access is not Access.GROUP:
        path.mkdir(DIRECTORY_MODES[access])
        return
    # Another member may need it at once, so it must not be seen before it is shared.
    if path.exists():
        raise FileExistsError(path)
    hidden = path.parent / f"{_RENAME_PREFIX}{secrets.token_hex(8)}"
    hidden.mkdir(DIRECTORY_MODES[Access.OWNER])
    try:
        os.chmod(hidden, DIRECTORY_MODES[access])
        os.rename(hidden, path)  # replaces an empty one at most
    except OSError as error:
        hidden.rmdir()
        if path.is_dir():
            raise FileExistsError(path) from error
        raise


def restrict(tree: Path) -> None:
    """Give what this user owns of ``tree`` the modes of the directory that it is in."""
    access = access_in(tree.parent)
    for directory, _, names in os.walk(tree):
        for path, mode in [(directory, DIRECTORY_MODES[access])] + [
            (os.path.join(directory, name), FILE_MODES[access]) for name in names
        ]:
            # an executor's, which runs as another user; or what is there no more
            with contextlib.suppress(PermissionError, FileNotFoundError):
                os.chmod(path, mode)


def is_open_to_others(path: Path) -> bool:
    """Return whether users who are not meant to can read what is in the directory ``path``."""
    mode = os.stat(path).st_mode
    private = 0 if mode & SHARED_BITS == SHARED_BITS else stat.S_IRGRP | stat.S_IXGRP
    return bool(mode & (stat.S_IROTH | stat.S_IXOTH | private))


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

    def forget_below(self, directory: Path) -> None:
        """Hold neither ``directory`` nor one below it open any more."""
        with self._lock:
            below = [name for name in self.placed if Path(name).is_relative_to(directory)]
            gone: list[_Placed | None] = [self.placed.pop(name) for name in below]
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
    # held open from here on: its inode number cannot become that of another directory
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


def make_directories(path: Path, access: Access = Access.OWNER) -> None:
    """Create ``path`` and its missing parents for ``access``, durably.

    One that is there stays as it is, durable or not: each writer syncs its path.
    """
    if path.is_dir():
        return
    make_directories(path.parent, access)
    with contextlib.suppress(FileExistsError):
        make_directory(path, access)
    sync_path(path, is_new=True)


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
        # after the directory, and still locked: no other process takes what is left for abandoned meanwhile
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
        # removed between open and lock, by a process that took it for abandoned: a lock without a name keeps nothing
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
