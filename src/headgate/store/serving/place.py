"""The store's directory as that of a server: one process serves it, and it has a number of its own.

Counterpart: ``server``. Source: SS11 of docs/spec/served-store.md. The number keeps clients of one store from going on
with another one that was put in its place.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from headgate.errors import UsageError
from headgate.storage.access import open_lock
from headgate.storage.base import AlreadyExists, NotFound, Storage
from headgate.storage.local import LocalStorage

LOCK, NUMBER = "serving.lock", "store-number"


@contextlib.contextmanager
def served_alone(root: Path) -> Iterator[str]:
    """Keep other servers from the store in ``root`` for the time of the block, which gets its number.

    Raises:
        UsageError: another process serves it.
    """
    with os.fdopen(open_lock(root / LOCK), "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another process serves the store at {root}: stop it first, or serve another store with --store"
            ) from None
        yield _number(LocalStorage(root))


def _number(storage: Storage) -> str:
    try:
        return storage.get(NUMBER).decode()
    except NotFound:
        with contextlib.suppress(AlreadyExists):
            storage.put_if_absent(NUMBER, [secrets.token_hex(16).encode()])
        return storage.get(NUMBER).decode()
