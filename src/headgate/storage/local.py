"""Objects as files below a local (or mounted) directory.

Counterparts: ``storage.Storage``, ``local_files``. Source: docs/spec/storage.md.
Never shows a file that is not complete and durable: data goes to a hidden temporary file, is synced, and gets
its name by rename or link; then the directory is synced.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NoReturn

from headgate import fault_points
from headgate.errors import StorageError, UsageError
from headgate.model.config import Access
from headgate.storage import local_files
from headgate.storage.base import (
    TEMP_PREFIX,
    AlreadyExists,
    BasicStorage,
    Bytes,
    NotFound,
    checked_path,
    checked_prefix,
)
from headgate.storage.local_files import (
    PERMANENT,
    access_in,
    make_directories,
    open_created,
    sync_before_reading,
    sync_directory,
    sync_names,
)

_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)

DIRECTORY_TRIES_MAX = 8
"""A concurrent delete may remove the directory just made while it is empty; more than a few times is a bug."""


def storage_error(operation: str, path: str, error: OSError) -> StorageError:
    """Return ``error`` as a StorageError; only lack of rights and impossible names are permanent."""
    cause = error.strerror or str(error)
    return StorageError(operation, path, cause, is_transient=error.errno not in PERMANENT)


def _unless_gone(sync: Callable[[Path], None], directory: Path) -> None:
    """Call ``sync``; where there is no directory any more, no name is left to make durable."""
    with contextlib.suppress(FileNotFoundError):
        sync(directory)


def write_fully(descriptor: int, parts: Iterable[Bytes]) -> None:
    """Write all of ``parts``; one ``write`` call may take less than it was given."""
    for part in parts:
        view = memoryview(part).cast("B")
        while view:
            view = view[os.write(descriptor, view) :]


class LocalStorage(BasicStorage):
    """The files below ``root``."""

    def __init__(self, root: str | Path, access: Access | None = None) -> None:
        """Create ``root`` when it is missing.

        Args:
            root: the directory.
            access: who may read what is written; default: what ``root`` says, its owner when it is missing.

        Raises:
            UsageError: it cannot be created or is not a directory.
        """
        self._root = Path(root).expanduser().absolute()
        try:
            make_directories(self._root, access or Access.OWNER)
            self._access = access or access_in(self._root)
        except OSError as error:
            raise UsageError(
                f"storage directory {self._root} cannot be created ({error.strerror}); choose a writable directory"
            ) from error

    @property
    def url(self) -> str:
        """The directory."""
        return str(self._root)

    def draw_name(self, size_bytes: int) -> str:
        return secrets.token_hex(size_bytes)

    def local_path(self, path: str) -> Path:
        """Return the file of an object; for memory-mapping what is complete."""
        return self._root / checked_path(path)

    def put(self, path: str, parts: Iterable[Bytes]) -> None:
        """Write an object durably, replacing what was there. After an error either content may be there.

        ``parts`` may be given as they come, once; if they raise, nothing is left.
        """
        target = self.local_path(path)
        with self._errors("put", path), self._written(target, parts) as temp:
            fault_points.reach("in-put")
            os.replace(temp, target)
            _unless_gone(sync_directory, target.parent)

    def put_if_absent(self, path: str, parts: Iterable[Bytes]) -> None:
        """Write an object durably unless one exists. After a StorageError it may be there.

        Raises:
            AlreadyExists
        """
        target = self.local_path(path)
        # saves writing the data; the link below decides
        if target.exists():
            self._refuse_taken(path, target)
        with self._errors("put", path), self._written(target, parts) as temp:
            fault_points.reach("in-put-if-absent")
            try:
                # a link refuses a name that is taken, in one step; a rename would replace it
                os.link(temp, target)
            except FileExistsError:
                self._refuse_taken(path, target)
            # before the directory is synced, which then covers both names
            os.unlink(temp)
            _unless_gone(sync_directory, target.parent)

    def _refuse_taken(self, path: str, target: Path) -> NoReturn:
        """Make sure of the name first: its writer may have failed to sync it, or have died before."""
        with self._errors("put", path):
            _unless_gone(sync_directory, target.parent)
        raise AlreadyExists(path)

    def get(self, path: str) -> bytes:
        """Return a whole object.

        Raises:
            NotFound
        """
        with self._errors("get", path):
            data = self.local_path(path).read_bytes()
            sync_before_reading(self.local_path(path).parent)
            return data

    def make_durable(self, path: str) -> None:
        """What was read of an object is durable, whatever process wrote it.

        Raises:
            NotFound
        """
        with self._errors("get", path):
            sync_before_reading(self.local_path(path).parent)

    def get_range(self, path: str, offset: int, size_bytes: int) -> bytes:
        """Return part of an object (shorter at its end).

        Raises:
            NotFound
        """
        with self._errors("get", path), open(self.local_path(path), "rb", buffering=0) as file:
            pieces: list[bytes] = []
            missing = size_bytes
            while missing > 0:
                piece = os.pread(file.fileno(), missing, offset + size_bytes - missing)
                if not piece:
                    break
                pieces.append(piece)
                missing -= len(piece)
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def list(self, prefix: str) -> list[str]:
        """Return the paths below the directory ``prefix``, recursively, sorted."""
        top = self._root / checked_prefix(prefix)
        found: list[str] = []
        with self._errors("list", prefix):
            for directory, _, names in os.walk(top, onerror=_raise_unless_absent):
                try:
                    sync_before_reading(Path(directory))
                except _ABSENT:  # removed meanwhile, and so is what was in it
                    continue
                base = Path(directory).relative_to(self._root)
                found += [(base / name).as_posix() for name in names if not name.startswith(TEMP_PREFIX)]
        return sorted(found)

    def delete(self, path: str) -> None:
        """Remove an object and the directories that became empty; missing is fine."""
        target = self.local_path(path)
        with self._errors("delete", path):
            try:
                os.unlink(target)
                sync_names(target.parent)
            except _ABSENT:
                return
        for parent in target.parents:
            if parent == self._root:
                return
            try:
                os.rmdir(parent)
            except OSError:
                return
            # made again, it is another directory, of which nothing was synced
            local_files.SYNCED.forget(parent)

    def rename_if_absent(self, source: str, target: str) -> None:
        """Move an object. Repeating it after a crash half-way finishes it.

        Raises:
            NotFound: no ``source``.
            AlreadyExists: ``target`` is taken (``source`` is left).
        """
        old, new = self.local_path(source), self.local_path(target)
        with self._errors("rename", source):
            # the new name is durable before the old one goes: after a crash there are both, and a repeat ends here
            self._link(source, target)
            _unless_gone(sync_directory, new.parent)
            os.unlink(old)
            _unless_gone(sync_names, old.parent)

    def _link(self, source: str, target: str) -> None:
        """Give the object ``source`` the name ``target``, too, unless it has it already."""
        old, new = self.local_path(source), self.local_path(target)
        for _ in range(DIRECTORY_TRIES_MAX):
            if not old.is_file():
                raise NotFound(source)
            with contextlib.suppress(FileNotFoundError):
                make_directories(new.parent, self._access)
                try:
                    os.link(old, new)
                except FileExistsError:
                    # the same file: an earlier try came as far as this
                    if not os.path.samefile(old, new):
                        raise AlreadyExists(target) from None
                return
        raise StorageError("rename", str(new), "its directory is removed again and again", is_transient=True)

    def sweep_unfinished(self, prefix: str = "") -> int:
        """Remove unfinished writes that crashes left below ``prefix``; return how many. Those under way stay."""
        count = 0
        with self._errors("sweep", prefix):
            for directory, _, names in os.walk(self._root / checked_prefix(prefix)):
                for name in names:
                    if name.startswith(TEMP_PREFIX):
                        count += _swept(os.path.join(directory, name))
        return count

    @contextlib.contextmanager
    def _errors(self, operation: str, path: str) -> Iterator[None]:
        where = f"{self._root}/{path}"
        try:
            yield
        except _ABSENT as error:
            if operation in ("get", "rename"):
                raise NotFound(path) from None
            raise storage_error(operation, where, error) from error
        except OSError as error:
            raise storage_error(operation, where, error) from error

    @contextlib.contextmanager
    def _written(self, target: Path, parts: Iterable[Bytes]) -> Iterator[Path]:
        """Yield a synced temporary file beside ``target``; it is gone afterwards, whatever happens."""
        temp, descriptor = _created(target.parent, self._access)
        try:
            write_fully(descriptor, parts)
            os.fsync(descriptor)
            yield temp
        finally:
            # before it is closed: while it is open it is locked, and no sweep meets it
            with contextlib.suppress(OSError):
                os.unlink(temp)
            os.close(descriptor)


def _created(directory: Path, access: Access) -> tuple[Path, int]:
    """Create a temporary file in ``directory`` that no sweep takes while it is open."""
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    tries_left = DIRECTORY_TRIES_MAX
    while True:
        tries_left -= 1
        temp = directory / f"{TEMP_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        try:
            descriptor = open_created(temp, flags, access)
        except FileNotFoundError:
            # it is missing, or another process has removed it with the last object in it
            if tries_left < 0:
                raise
            with contextlib.suppress(FileNotFoundError):
                make_directories(directory, access)
            continue
        if tries_left < 0 or _is_held(descriptor, temp):
            return temp, descriptor
        os.close(descriptor)


def _is_held(descriptor: int, temp: Path) -> bool:
    """Lock a temporary file that was just created; return False if a sweep had it first."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), os.stat(temp))
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError:  # a file system without locks
        return True


def _swept(temp: str) -> bool:
    """Remove a temporary file unless it is being written; return whether it was removed."""
    descriptor = -1
    try:
        with contextlib.suppress(PermissionError):  # then it is unknown, and a process with the right removes it
            descriptor = os.open(temp, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if descriptor >= 0 and _is_locked(descriptor):
            return False
        os.unlink(temp)  # under the lock: its creator makes another one
    except FileNotFoundError:
        return False
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return True


def _is_locked(descriptor: int) -> bool:
    """Whether another process writes a file; if not, keep others from it until it is closed."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # over NFS, an exclusive one needs the right to write
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    return False


def _raise_unless_absent(error: OSError) -> None:
    if not isinstance(error, _ABSENT):
        raise error
