"""Objects in the memory of this process, by name: for tests and the simulator.

Counterpart: ``storage.Storage``. Never survives the process and is never seen by another one.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence

from headgate.storage.base import AlreadyExists, BasicStorage, Bytes, NotFound, checked_path, checked_prefix

_named: dict[str, MemoryStorage] = {}
_named_lock = threading.Lock()


def memory_storage(name: str) -> MemoryStorage:
    """Return the storage called ``name`` of this process, creating it when needed."""
    with _named_lock:
        return _named.setdefault(name, MemoryStorage(name))


def forget_memory_storage(name: str) -> None:
    """Drop the storage called ``name``; handles on it keep working, new ones start empty."""
    with _named_lock:
        _named.pop(name, None)


class MemoryStorage(BasicStorage):
    """A dictionary of objects with a lock."""

    def __init__(self, name: str = "") -> None:
        self._name = name
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """``memory://name``."""
        return f"memory://{self._name}"

    def draw_name(self, size_bytes: int) -> str:
        return secrets.token_hex(size_bytes)

    def put(self, path: str, parts: Sequence[Bytes]) -> None:
        """Write an object, replacing what was there."""
        data = b"".join(parts)
        with self._lock:
            self._objects[checked_path(path)] = data

    def put_if_absent(self, path: str, parts: Sequence[Bytes]) -> None:
        """Write an object unless one exists.

        Raises:
            AlreadyExists
        """
        data = b"".join(parts)
        with self._lock:
            if checked_path(path) in self._objects:
                raise AlreadyExists(path)
            self._objects[path] = data

    def get(self, path: str) -> bytes:
        """Return a whole object.

        Raises:
            NotFound
        """
        with self._lock:
            data = self._objects.get(checked_path(path))
        if data is None:
            raise NotFound(path)
        return data

    def get_range(self, path: str, offset: int, size_bytes: int) -> bytes:
        """Return part of an object (shorter at its end).

        Raises:
            NotFound
        """
        return self.get(path)[offset : offset + size_bytes]

    def list(self, prefix: str) -> list[str]:
        """Return the paths below the directory ``prefix``, sorted."""
        base = checked_prefix(prefix)
        with self._lock:
            return sorted(path for path in self._objects if not base or path.startswith(base + "/"))

    def delete(self, path: str) -> None:
        """Remove an object; missing is fine."""
        with self._lock:
            self._objects.pop(checked_path(path), None)

    def rename_if_absent(self, source: str, target: str) -> None:
        """Move an object.

        Raises:
            NotFound: no ``source``.
            AlreadyExists: ``target`` is taken (``source`` is left).
        """
        with self._lock:
            if checked_path(source) not in self._objects:
                raise NotFound(source)
            if checked_path(target) in self._objects:
                raise AlreadyExists(target)
            self._objects[target] = self._objects.pop(source)

    def sweep_unfinished(self, prefix: str = "") -> int:
        """See ``Storage.sweep_unfinished``: a put is whole or not there."""
        return 0
