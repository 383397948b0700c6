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
from headgate.storage.access import access_in, open_lock, write_created
from headgate.storage.base import AlreadyExists, NotFound, Storage
from headgate.storage.local import LocalStorage
from headgate.storage.paths import TEMP_PREFIX

LOCK, NUMBER, TOKEN = "serving.lock", "store-number", "token"


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


def own_token_file(root: Path) -> Path:
    """Return the file with the token of the store in ``root``, made if there is none: who may open the store reads it.

    Raises:
        UsageError: it cannot be made.
    """
    file = root / TOKEN
    made = root / f"{TEMP_PREFIX}{secrets.token_hex(8)}"
    try:
        if not file.exists():
            write_created(made, f"{secrets.token_urlsafe(32)}\n".encode(), access_in(root))
            try:
                with contextlib.suppress(FileExistsError):  # another one was quicker
                    os.link(made, file)
            finally:
                made.unlink()
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"the token of the store at {root} cannot be written: {reason}; give --token-file") from error
    return file


def _number(storage: Storage) -> str:
    try:
        return storage.get(NUMBER).decode()
    except NotFound:
        with contextlib.suppress(AlreadyExists):
            storage.put_if_absent(NUMBER, [secrets.token_hex(16).encode()])
        return storage.get(NUMBER).decode()
