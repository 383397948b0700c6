"""A storage that fails on purpose: the disk of fault scenarios F8, F9 and F10.

Counterpart: any ``storage.Storage`` that it wraps. Used by tests and the simulator, never by a pipeline.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum

from headgate.dataclass import dataclass
from headgate.errors import StorageError
from headgate.storage.base import Bytes, Storage, Uploads


class FaultKind(Enum):
    """What goes wrong."""

    NO_SPACE = errno.ENOSPC
    IO_ERROR = errno.EIO
    TIMEOUT = errno.ETIMEDOUT
    TIMEOUT_AFTER_EFFECT = "after"
    """The operation takes effect, but its caller sees a time-out."""
    TORN = "torn"
    """Half of the object is written under its name, then an I/O error (a storage that writes parts of objects)."""
    SLOW = "slow"
    """The operation succeeds after ``Fault.delay_ms``."""


@dataclass(slots=True)
class Fault:
    """Fail matching operations number ``first`` to ``first + times - 1`` (counted from 1).

    ``operation`` is a method's name of ``Storage`` or "" for any; ``path_part`` must occur in the path.
    """

    kind: FaultKind
    operation: str = ""
    path_part: str = ""
    first: int = 1
    times: int = 1
    delay_ms: int = 0
    seen: int = 0

    def matches(self, operation: str, path: str) -> bool:
        """Count a matching operation; return whether it is one to fail."""
        if (self.operation and operation != self.operation) or self.path_part not in path:
            return False
        self.seen += 1
        return self.first <= self.seen < self.first + self.times


class FaultyStorage:
    """``inner``, with ``faults``; more can be added with ``inject`` at any time."""

    def __init__(
        self, inner: Storage, faults: Sequence[Fault] = (), wait: Callable[[float], None] = time.sleep
    ) -> None:
        self._inner = inner
        self._faults = list(faults)
        self._wait = wait
        self._lock = threading.Lock()
        self.calls: list[tuple[str, str]] = []
        """Every operation so far, with its path."""

    def inject(self, fault: Fault) -> None:
        """Add a fault; it counts operations from now on."""
        with self._lock:
            self._faults.append(fault)

    def heal(self) -> None:
        """Remove all faults."""
        with self._lock:
            self._faults.clear()

    @property
    def url(self) -> str:
        """The inner storage's."""
        return self._inner.url

    @property
    def puts_may_land_late(self) -> bool:
        """The inner storage's."""
        return self._inner.puts_may_land_late

    @property
    def is_afar(self) -> bool:
        """The inner storage's."""
        return self._inner.is_afar

    @property
    def uploads(self) -> Uploads | None:
        """The inner storage's, which do not fail."""
        return self._inner.uploads

    def draw_name(self, size_bytes: int) -> str:
        """The inner storage's."""
        return self._inner.draw_name(size_bytes)

    def put(self, path: str, parts: Sequence[Bytes]) -> None:
        late = self._before("put", path, parts)
        self._inner.put(path, parts)
        self._after("put", path, late)

    def put_if_absent(self, path: str, parts: Sequence[Bytes]) -> None:
        late = self._before("put_if_absent", path, parts)
        self._inner.put_if_absent(path, parts)
        self._after("put_if_absent", path, late)

    def get(self, path: str) -> bytes:
        late = self._before("get", path)
        data = self._inner.get(path)
        self._after("get", path, late)
        return data

    def get_range(self, path: str, offset: int, size_bytes: int) -> bytes:
        late = self._before("get_range", path)
        data = self._inner.get_range(path, offset, size_bytes)
        self._after("get_range", path, late)
        return data

    def list(self, prefix: str) -> list[str]:
        late = self._before("list", prefix)
        found = self._inner.list(prefix)
        self._after("list", prefix, late)
        return found

    def delete(self, path: str) -> None:
        late = self._before("delete", path)
        self._inner.delete(path)
        self._after("delete", path, late)

    def rename_if_absent(self, source: str, target: str) -> None:
        """See ``Storage.rename_if_absent``; faults match the source."""
        late = self._before("rename_if_absent", source)
        self._inner.rename_if_absent(source, target)
        self._after("rename_if_absent", source, late)

    def sweep_unfinished(self, prefix: str = "") -> int:
        late = self._before("sweep_unfinished", prefix)
        found = self._inner.sweep_unfinished(prefix)
        self._after("sweep_unfinished", prefix, late)
        return found

    def _before(self, operation: str, path: str, parts: Sequence[Bytes] = ()) -> bool:
        """Raise what must fail before its effect; return whether to fail after it."""
        with self._lock:
            self.calls.append((operation, path))
            hits = [fault for fault in self._faults if fault.matches(operation, path)]
        for fault in hits:
            if fault.kind is FaultKind.SLOW:
                self._wait(fault.delay_ms / 1_000)
            elif fault.kind is FaultKind.TORN:
                data = b"".join(parts)
                self._inner.put(path, [data[: len(data) // 2]])
                raise StorageError(operation, path, os.strerror(errno.EIO))
            elif fault.kind is not FaultKind.TIMEOUT_AFTER_EFFECT:
                raise StorageError(operation, path, os.strerror(fault.kind.value))
        return any(fault.kind is FaultKind.TIMEOUT_AFTER_EFFECT for fault in hits)

    def _after(self, operation: str, path: str, is_late: bool) -> None:
        if is_late:
            raise StorageError(operation, path, os.strerror(errno.ETIMEDOUT))
