"""Modes of the files and directories that Headgate creates, whatever the process's umask is.

Used by everything that creates one: ``local``, ``catalogue``, ``runtime.driver``, ``spark.dataframes``.
Source: docs/spec/security.md. A directory says itself whether it is shared with its group, so that
drivers, workers and command lines need no option. Never changes the mode of what it did not create, locks apart.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path

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
