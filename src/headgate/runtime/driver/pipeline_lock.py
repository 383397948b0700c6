"""At most one driver of a pipeline on one machine's directory: an advisory lock that dies with its process.

The lock only makes the second driver stop *early* and say who runs, and lets ``runtime.driver.stopping`` find the first
one. What protects the data, also on object stores where there is no lock, is the claim in the checkpoint log
(``runtime.checkpoints.log``).
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import IO

from headgate.codec.lock_holder import Ending, LockHolder, decode_holder, encode_holder
from headgate.errors import UsageError
from headgate.model.security import Access
from headgate.storage.access import access_in, open_lock
from headgate.storage.backends import local_directory
from headgate.storage.local import make_directories

LOCK_NAME = "lock"

_takes_signals: ContextVar[bool] = ContextVar("headgate_takes_signals", default=False)


@contextmanager
def taking_signals() -> Iterator[None]:
    """Locks taken within this block say that their process stops on SIGTERM, drains on SIGUSR1, answers on SIGUSR2."""
    token = _takes_signals.set(True)
    try:
        yield
    finally:
        _takes_signals.reset(token)


class PipelineLock:
    """Holds ``<root>/<pipeline>/lock`` while this process lives."""

    def __init__(self, file: IO[bytes] | None, holder: LockHolder | None = None) -> None:
        self._file = file
        self._holder = holder

    @classmethod
    def acquire(cls, root: str, pipeline: str, owner: str) -> PipelineLock:
        """Take the lock, if ``root`` is a local directory.

        Raises:
            UsageError: another driver runs this pipeline.
        """
        local = local_directory(root)
        if local is None:
            return cls(None)
        directory = local / pipeline
        make_directories(directory, access_in(directory) if local.is_dir() else Access.OWNER)
        file = os.fdopen(open_lock(directory / LOCK_NAME), "ab+", buffering=0)  # held as long as the pipeline runs
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            holder = read_holder(root, pipeline)
            raise UsageError(
                f"pipeline '{pipeline}' is already run by {holder.owner if holder else 'another process'} with the "
                "same checkpoint directory; stop that one first, or give this pipeline another name"
            ) from error
        os.set_inheritable(file.fileno(), False)
        signals = _takes_signals.get()
        nonce = secrets.token_hex(8)
        taken = LockHolder(owner, socket.gethostname(), os.getpid(), nonce, signals, takes_asks=signals)
        lock = cls(file, taken)
        lock._write(taken)
        return lock

    def release(
        self, ending: Ending = Ending.FAILED, checkpoint: int | None = None, reason: str = "it could not be started"
    ) -> None:
        """Let others run the pipeline; write down how this run ended (see ``LockHolder``). Idempotent."""
        if self._file is not None and self._holder is not None:
            self._write(replace(self._holder, ending=ending, checkpoint=checkpoint, reason=reason))
            self._file.close()
            self._file = None

    def _write(self, holder: LockHolder) -> None:
        assert self._file is not None
        self._file.truncate(0)
        self._file.write(encode_holder(holder))


def read_holder(root: str, pipeline: str) -> LockHolder | None:
    """Return who holds or last held the lock of a local pipeline; None when nobody did, or it is being written."""
    local = local_directory(root)
    try:
        return None if local is None else decode_holder((local / pipeline / LOCK_NAME).read_bytes())
    except OSError:
        return None
