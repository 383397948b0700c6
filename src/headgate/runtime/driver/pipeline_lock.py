"""Which process of this machine runs a pipeline: an advisory lock that dies with it.

In a directory it is beside the checkpoints, makes the second driver stop *early* and name the first one, and lets
``remote_control`` find that. For checkpoints in an object store or HDFS it is in a directory of the user on this
machine: ``remote_control`` finds the driver by it, a driver takes it away from another one, and only a reset is refused
while one runs. What protects the data is the claim in the checkpoint log.
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

import xxhash

from headgate.codec.json_files import Ending, LockHolder, decode_holder, encode_holder
from headgate.errors import UsageError
from headgate.model.config import Access
from headgate.runtime.driver.takeover import current_takeover
from headgate.storage.base import TEMP_PREFIX
from headgate.storage.local_files import access_in, make_directories, open_lock, user_state_directory
from headgate.storage.urls import is_remote, local_directory

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


def lock_directory(root: str) -> Path | None:
    """Return the directory with a directory for the lock of each pipeline with checkpoints in ``root``.

    None: they are in memory, or this user has no home on this machine.
    """
    if not is_remote(root):
        return local_directory(root)
    try:
        # homes may be shared by machines
        return user_state_directory() / "locks" / socket.gethostname() / xxhash.xxh3_64_hexdigest(root.encode())
    except RuntimeError:
        return None


class AlreadyRunning(UsageError):  # noqa: N818  says what is so
    """Another driver holds the lock of the pipeline."""


class PipelineLock:
    """Holds ``<lock_directory>/<pipeline>/lock`` while this process lives.

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
        """Take the lock, if there is a directory for it. A driver takes that of remote checkpoints from its holder.

        ``silent`` is the nonce of a run that has given no sign of life: its lock is broken (SB8). A process that is
        stopped holds it as well as one that works; the right to write does not depend on it.

        Raises:
            AlreadyRunning: another driver runs this pipeline.
        """
        found = lock_directory(root)
        if found is None:
            return cls(None, claimant)
        directory = found / pipeline
        try:
            make_directories(directory, access_in(directory) if found.is_dir() else Access.OWNER)
            file = _locked(directory / LOCK_NAME)
            if file is None and claimant and is_remote(root):
                file = _broken(directory / LOCK_NAME)
        except OSError:
            if is_remote(root):  # a home that is read-only
                return cls(None, claimant)
            raise
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
    """Return the present or last holder of a lock on this machine; None: there is none, or it is being written."""
    directory = lock_directory(root)
    try:
        return None if directory is None else decode_holder((directory / pipeline / LOCK_NAME).read_bytes())
    except OSError:
        return None
