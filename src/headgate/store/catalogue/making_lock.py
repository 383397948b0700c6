"""The lock under which a store is created: waited for, but not for ever, and whoever holds it is named.

Counterpart: ``opening``, which takes it only to create a store or to raise one of an older version. Source: CT5 of
docs/spec/stream-store.md. Never waits without a bound: whoever can open the file can hold the lock.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import IO

from headgate.errors import StorageError

LOCK_TIMEOUT_S = 60.0
"""Creating a store takes some milliseconds."""

_PAUSE_S = 0.02


def wait_for_lock(lock: IO[bytes], catalogue: Path) -> None:
    """Take ``lock``, which guards the making of ``catalogue``; it is free again when the file is closed.

    Raises:
        StorageError: somebody holds it for too long; says who.
    """
    deadline_s = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() >= deadline_s:
                path = catalogue.with_suffix(".lock")
                raise StorageError(
                    "open",
                    str(catalogue),
                    f"{holder_of(lock)} has held the lock {path} for more than {LOCK_TIMEOUT_S:g} s; end that process "
                    "and try again",
                ) from error
        time.sleep(_PAUSE_S)


def holder_of(lock: IO[bytes]) -> str:
    """Return who holds a lock on the file, for people, as far as the system tells."""
    file = os.fstat(lock.fileno())
    device = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    try:
        lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        pid = next(int(words[4]) for words in lines if words[1] == "FLOCK" and words[5] == device)
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (OSError, StopIteration, ValueError, IndexError):
        return "another process"
    return f"process {pid} ({command[:200]})"
