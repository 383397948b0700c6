"""At most one driver of a pipeline on one machine's directory: an advisory lock that dies with its process.

The lock only makes the second driver stop *early* and name the first one, and lets ``remote_control`` find that. The
claim in the checkpoint log protects the data, also on object stores, where there is no lock.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import IO

from headgate.codec.json_files import Ending, LockHolder, decode_holder, encode_holder
from headgate.errors import UsageError
from headgate.model.config import Access
from headgate.runtime.driver.takeover import current_takeover
from headgate.storage.local import make_directories
from headgate.storage.object_names import TEMP_PREFIX
from headgate.storage.permissions import access_in, open_lock
from headgate.storage.urls import local_directory

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


class AlreadyRunning(UsageError):  # noqa: N818  says what is so
    """Another driver holds the lock of the pipeline."""


class PipelineLock:
    """Holds ``<root>/<pipeline>/lock`` while this process lives.

    ``claimant`` is the name under which the holder claims; "" if it does not claim as a driver.
    """

    def __init__(self, file: IO[bytes] | None, claimant: str, holder: LockHolder | None = None) -> None:
        self.claimant = claimant
        self._file = file
        self._holder = holder

    @classmethod
    def acquire(
        cls, root: str, pipeline: str, owner: str, silent: str | None = None, *, claimant: str = ""
    ) -> PipelineLock:
        """Take the lock, if ``root`` is a local directory.

        ``silent`` is the nonce of a run that has given no sign of life: its lock is broken (SB8). A process that is
        stopped holds it as well as one that works; the right to write does not depend on it.

        Raises:
            AlreadyRunning: another driver runs this pipeline.
        """
        local = local_directory(root)
        if local is None:
            return cls(None, claimant)
        directory = local / pipeline
        make_directories(directory, access_in(directory) if local.is_dir() else Access.OWNER)
        file = _locked(directory / LOCK_NAME)
        if file is None:
            holder = read_holder(root, pipeline)
            if silent is None or holder is None or holder.nonce != silent:
                is_mine = holder is not None and (holder.host, holder.pid) == (socket.gethostname(), os.getpid())
                end = "call stop() of the handle that its start returned" if is_mine else "stop that one first"
                raise AlreadyRunning(
                    f"pipeline '{pipeline}' is already run by {holder.owner if holder else 'another process'} with the "
                    f"same checkpoint directory; {end}, or give this pipeline another name"
                )
            file = _broken(directory / LOCK_NAME)
        os.set_inheritable(file.fileno(), False)
        signals = _takes_signals.get()
        nonce = secrets.token_hex(8)
        taken = LockHolder(
            owner,
            socket.gethostname(),
            os.getpid(),
            nonce,
            signals,
            supervisor_pid=current_takeover().supervisor_pid,
            claimant=claimant,
        )
        lock = cls(file, claimant, taken)
        lock._write(taken)
        return lock

    @property
    def nonce(self) -> str:
        """Differs for every run; "" where there is no lock."""
        return "" if self._holder is None else self._holder.nonce

    def release(
        self,
        ending: Ending = Ending.FAILED,
        checkpoint: int | None = None,
        reason: str = "it could not be started",
        *,
        is_in_doubt: bool = False,
    ) -> None:
        """Let others run the pipeline; write down how this run ended (see ``LockHolder``). Idempotent."""
        if self._file is not None and self._holder is not None:
            ended = replace(self._holder, ending=ending, checkpoint=checkpoint, reason=reason, is_in_doubt=is_in_doubt)
            self._write(ended)
            self._file.close()
            self._file = None

    def _write(self, holder: LockHolder) -> None:
        assert self._file is not None, "a released lock is not written"
        self._file.truncate(0)
        self._file.write(encode_holder(holder))


def _locked(path: Path) -> IO[bytes] | None:
    """Return the lock file if this process got the lock, else None."""
    while True:
        file = os.fdopen(open_lock(path), "ab+", buffering=0)  # held as long as the pipeline runs
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            return None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
        file.close()  # it was broken between the two: the one that is there now counts


def _broken(path: Path) -> IO[bytes]:
    """Replace the lock file of another process; its holder goes on writing to an unlinked file."""
    mine = path.with_name(f"{TEMP_PREFIX}{secrets.token_hex(8)}")  # swept at the next start if this process dies now
    file = os.fdopen(open_lock(mine), "ab+", buffering=0)
    fcntl.flock(file, fcntl.LOCK_EX)
    os.replace(mine, path)
    return file


def read_holder(root: str, pipeline: str) -> LockHolder | None:
    """Return the present or last holder of a local pipeline's lock; None: there is none, or it is being written."""
    local = local_directory(root)
    try:
        return None if local is None else decode_holder((local / pipeline / LOCK_NAME).read_bytes())
    except OSError:
        return None
