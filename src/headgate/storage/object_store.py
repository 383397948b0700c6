"""Objects in whatever obstore reaches: S3, Google Cloud Storage, Azure, HTTP, and its own local store.

Counterpart: ``storage.Storage``. Source: docs/spec/storage.md.
Never emulates create-if-absent by looking first: it is the store's conditional put.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import obstore
from obstore import exceptions as problems
from obstore.store import LocalStore, from_url

from headgate.errors import StorageError, UsageError
from headgate.storage.base import AlreadyExists, Bytes, NotFound
from headgate.storage.object_names import checked_path, checked_prefix

_PERMANENT = (
    problems.PermissionDeniedError,
    problems.UnauthenticatedError,
    problems.NotSupportedError,
    problems.UnknownConfigurationKeyError,
    problems.InvalidPathError,
)
_LIST_CHUNK = 1_000


class ObjectStorage:
    """The objects below one URL."""

    def __init__(self, url: str, **options: Any) -> None:
        """Open ``url``; ``options`` go to obstore (credentials come from the environment by default).

        Raises:
            UsageError: obstore does not accept the URL or the options.
        """
        self._url = url
        try:
            if urlsplit(url).scheme == "file":
                directory = Path(unquote(urlsplit(url).path))
                self._store: Any = LocalStore(directory, automatic_cleanup=False, mkdir=True)
            else:
                self._store = from_url(url, **options)
        except (problems.BaseError, ValueError, OSError) as error:
            raise UsageError(f"storage URL {url} is not usable: {_first_line(error)}") from error

    @property
    def url(self) -> str:
        """The URL it was opened with."""
        return self._url

    @property
    def puts_may_land_late(self) -> bool:
        """A request that timed out may still be on its way."""
        return True

    @property
    def is_afar(self) -> bool:
        """Each request is one over a network, as a rule."""
        return True

    def draw_name(self, size_bytes: int) -> str:
        """See ``Storage``."""
        return secrets.token_hex(size_bytes)

    def put(self, path: str, parts: Sequence[Bytes]) -> None:
        """Write an object durably, replacing what was there, in one request."""
        with self._errors("put", path):
            obstore.put(self._store, checked_path(path), _buffers(parts), mode="overwrite", use_multipart=False)

    def put_if_absent(self, path: str, parts: Sequence[Bytes]) -> None:
        """Write an object durably unless one exists, by conditional put.

        After a StorageError it may be there.

        Raises:
            AlreadyExists
        """
        with self._errors("put", path):
            try:
                obstore.put(self._store, checked_path(path), _buffers(parts), mode="create", use_multipart=False)
            except (problems.AlreadyExistsError, problems.PreconditionError):
                raise AlreadyExists(path) from None

    def get(self, path: str) -> bytes:
        """Return a whole object.

        Raises:
            NotFound
        """
        with self._errors("get", path):
            return bytes(obstore.get(self._store, checked_path(path)).bytes())

    def get_range(self, path: str, offset: int, size_bytes: int) -> bytes:
        """Return part of an object (shorter at its end), by one request unless it begins after the end.

        Raises:
            NotFound
        """
        with self._errors("get", path):
            where = checked_path(path)
            try:
                if size_bytes > 0:
                    return bytes(obstore.get_range(self._store, where, start=offset, end=offset + size_bytes))
            except problems.GenericError:  # what the end of an object is to obstore, among other things
                if offset < self._size(where):
                    raise
            else:
                self._size(where)  # is it there?
            return b""

    def list(self, prefix: str) -> list[str]:
        """Return the paths below the directory ``prefix``, recursively, sorted."""
        base = checked_prefix(prefix)
        with self._errors("list", prefix):
            try:
                pages = obstore.list(self._store, base or None, chunk_size=_LIST_CHUNK)
                found = [str(meta["path"]) for page in pages for meta in page]
            except FileNotFoundError:
                return []
        return sorted(path for path in found if not base or path.startswith(base + "/"))

    def delete(self, path: str) -> None:
        """Remove an object; missing is fine."""
        with self._errors("delete", path), contextlib.suppress(FileNotFoundError):
            obstore.delete(self._store, checked_path(path))

    def rename_if_absent(self, source: str, target: str) -> None:
        """Move an object; where the store cannot, copy by conditional put, then delete.

        Raises:
            NotFound: no ``source``.
            AlreadyExists: ``target`` is taken (``source`` is left).
        """
        with self._errors("rename", source):
            try:
                obstore.head(self._store, checked_path(source))
                obstore.rename(self._store, source, checked_path(target), overwrite=False)
            except problems.AlreadyExistsError:
                raise AlreadyExists(target) from None
            except (problems.NotSupportedError, NotImplementedError):
                self.put_if_absent(target, [self.get(source)])
                self.delete(source)

    def sweep_unfinished(self, prefix: str = "") -> int:
        """See ``Storage.sweep_unfinished``: uploads are single requests, whole or not there."""
        return 0

    def _size(self, path: str) -> int:
        return int(obstore.head(self._store, path)["size"])

    @contextlib.contextmanager
    def _errors(self, operation: str, path: str) -> Iterator[None]:
        where = f"{self._url.rstrip('/')}/{path}"
        try:
            yield
        except FileNotFoundError:
            raise NotFound(path) from None
        except _PERMANENT as error:
            raise StorageError(operation, where, _first_line(error), is_transient=False) from error
        except (problems.BaseError, OSError) as error:
            raise StorageError(operation, where, _first_line(error)) from error


def _buffers(parts: Sequence[Bytes]) -> bytes:
    """obstore takes one buffer (or an iterator, which it would upload in parts)."""
    return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
