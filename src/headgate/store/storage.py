"""Object storage as Headgate needs it: whole objects by path, with create-if-absent.

One interface over a local directory, any object store that obstore knows, and memory (tests, simulator).
Used by checkpoints, by the chunks of the stream store and by the file sink.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from headgate.model.security import Access

Bytes: TypeAlias = bytes | bytearray | memoryview


class AlreadyExists(Exception):  # noqa: N818 - expected outcome, not a fault
    """``put_if_absent`` or ``rename_if_absent`` found the path taken. Expected: not a HeadgateError."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class NotFound(Exception):  # noqa: N818 - expected outcome, not a fault
    """There is no object at the path. Expected: not a HeadgateError."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class Storage(Protocol):
    """Paths are relative, "/"-separated, without "..". Calls block; safe from several threads.

    Every method raises StorageError when the operation failed (transient: no space, I/O error, time-out).
    """

    @property
    def url(self) -> str:
        """Where this storage is, for messages."""

    def put(self, path: str, parts: Sequence[Bytes]) -> None:
        """Write an object durably (S33), replacing what was there; readers see all of it or nothing."""

    def put_if_absent(self, path: str, parts: Sequence[Bytes]) -> None:
        """Write an object durably unless one exists (S39).

        Raises:
            AlreadyExists
        """

    def get(self, path: str) -> bytes:
        """Return a whole object.

        Raises:
            NotFound
        """

    def get_range(self, path: str, offset: int, size_bytes: int) -> bytes:
        """Return part of an object (shorter at its end).

        Raises:
            NotFound
        """

    def list(self, prefix: str) -> list[str]:
        """Return the paths below the directory ``prefix``, recursively, sorted. Missing directory: empty."""

    def delete(self, path: str) -> None:
        """Remove an object; missing is fine."""

    def rename_if_absent(self, source: str, target: str) -> None:
        """Move an object.

        Raises:
            NotFound: no ``source``.
            AlreadyExists: ``target`` is taken (``source`` is left).
        """


def open_storage(url: str, access: Access | None = None) -> Storage:
    """Return the storage at ``url``: a path, ``file://…``, ``memory://name``, ``s3://`` and the like.

    ``access`` says who may read what is written to a local directory (default: see ``local.LocalStorage``).

    Raises:
        UsageError: the URL's scheme is unknown, or the directory cannot be created.
    """
    from headgate.store.backends import open_backend

    return open_backend(url, access)
