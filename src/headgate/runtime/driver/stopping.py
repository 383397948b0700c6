"""Stops a pipeline that another process of this machine runs, or asks it for a checkpoint.

Finds that process by the lock, and signals it. Counterparts: ``runtime.driver.pipeline_lock`` (says who holds it),
``api.running`` (takes the signals). Never signals a process of which it is not certain that it holds the lock: a number
in a file may have become somebody else's.
"""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from headgate.codec.lock_holder import Ending, LockHolder
from headgate.errors import StorageError, UsageError
from headgate.model.run_request import RunRequest
from headgate.runtime.driver.asking import Ask
from headgate.runtime.driver.last_wish import tell_standbys
from headgate.runtime.driver.pipeline_lock import LOCK_NAME, read_holder
from headgate.storage.backends import local_directory, open_storage

if TYPE_CHECKING:
    import psutil

STOP = signal.SIGTERM
DRAIN = signal.SIGUSR1
ASK = signal.SIGUSR2


class RunningPipeline:
    """A pipeline that a process of this machine runs. Make it with ``find``."""

    def __init__(self, root: str, pipeline: str, holder: LockHolder) -> None:
        self._root = root
        self._pipeline = pipeline
        self.holder = holder
        self._keeper = _keeper_of(holder)

    @classmethod
    def find(cls, root: str, pipeline: str) -> RunningPipeline:
        """Return the pipeline whose checkpoints are below ``root``.

        Raises:
            UsageError: it does not run, runs on another machine, or cannot be stopped from outside.
        """
        local = local_directory(root)
        if local is None:
            raise UsageError(
                f"the checkpoints of '{pipeline}' are in {root}, which does not say which process runs the pipeline; "
                "on its machine send that process SIGTERM to stop it or SIGUSR1 to drain it"
            )
        _refuse_unreadable(local / pipeline / LOCK_NAME, pipeline)
        holder = read_holder(root, pipeline)
        is_elsewhere = holder is not None and holder.host != socket.gethostname()
        is_over = holder is None or holder.ending is not Ending.NONE
        if holder is None or is_over or not (is_elsewhere or _holds(holder.pid, local / pipeline / LOCK_NAME)):
            raise UsageError(f"no pipeline '{pipeline}' runs with its checkpoints in {local}; {_others(local)}")
        if is_elsewhere:
            raise UsageError(f"pipeline '{pipeline}' is run by {holder.owner}; stop it on that machine")
        if not holder.takes_signals:
            raise UsageError(
                f"pipeline '{pipeline}' is run by {holder.owner}, a program that started it with start(); call stop() "
                "or stop(drain=True) of its handle there"
            )
        return cls(root, pipeline, holder)

    def ask(self, *, drain: bool) -> None:
        """Send the signal that stops, or drains. Call at once after ``find``.

        Of a pipeline with a keeper, that one gets it: else it would start the driver again if that dies over it (KR14).

        Raises:
            UsageError: the process belongs to somebody else, or has just ended.
        """
        try:
            os.kill(self.holder.pid if self._keeper is None else self._keeper.pid, DRAIN if drain else STOP)
        except (PermissionError, ProcessLookupError) as error:
            raise UsageError(f"cannot signal {self.holder.owner}, which runs '{self._pipeline}': {error}") from None

    def ask_for(self, request: RunRequest) -> Ask:
        """Leave a question and ring. Call at once after ``find``.

        Raises:
            UsageError: the process does not know how to answer, belongs to somebody else, or has just ended.
        """
        understood, what = self.holder.takes_asks, "checkpoint on request"
        if request.savepoint:
            understood, what = self.holder.takes_savepoints, "savepoint"
        if request.cancels:
            understood, what = self.holder.takes_cancels, "request to cancel"
        if not understood:
            raise UsageError(
                f"pipeline '{self._pipeline}' is run by {self.holder.owner} with an older release, which takes no "
                f"{what}; start it again with this one"
            )
        ask = Ask.leave(self._root, self._pipeline, replace(request, run=self.holder.nonce))
        try:
            os.kill(self.holder.pid, ASK)
        except (PermissionError, ProcessLookupError) as error:
            ask.remove()
            raise UsageError(f"cannot signal {self.holder.owner}, which runs '{self._pipeline}': {error}") from None
        return ask

    def insist(self, ended: LockHolder, *, drain: bool) -> None:
        """Tell whoever may start it again what was asked of a driver that has died or failed: keeper and standbys.

        The keeper is the one that it had (KR15): whoever runs the pipeline otherwise was started on purpose.
        """
        drains_on = self._tell_keeper(DRAIN if drain else STOP) and drain  # a standby would be in its way
        if ended.ending is not Ending.REPLACED and not drains_on:
            with suppress(StorageError):
                tell_standbys(open_storage(self._root), self._pipeline, self.holder, drain=drain)

    def _tell_keeper(self, number: int) -> bool:
        """Return whether there is one."""
        import psutil

        if self._keeper is None:
            return False
        try:
            self._keeper.send_signal(number)
        except psutil.Error:  # it has ended; whoever has its number now is left alone
            return False
        return True

    def ended(self) -> LockHolder | None:
        """Return how this run ended, or None while it goes on.

        ``ending`` is ``NONE`` when it died without a word, and ``REPLACED`` when another run has overwritten it.
        """
        local = local_directory(self._root)
        assert local is not None
        is_there = _holds(self.holder.pid, local / self._pipeline / LOCK_NAME)  # first: it writes, then leaves
        found = read_holder(self._root, self._pipeline)
        if found is not None and found.nonce == self.holder.nonce:
            return found if found.ending is not Ending.NONE or not is_there else None
        if found is None:  # being written, by this run or the next
            return None if is_there else self.holder
        return replace(self.holder, ending=Ending.REPLACED)


def _keeper_of(holder: LockHolder) -> psutil.Process | None:
    """Return the keeper of a driver that runs. It is its parent: a number in a file may have become somebody else's."""
    import psutil

    try:
        parent = psutil.Process(holder.pid).parent() if holder.keeper else None
    except psutil.Error:
        return None
    return parent if parent is not None and parent.pid == holder.keeper else None


def _refuse_unreadable(lock: Path, pipeline: str) -> None:
    """Refuse a lock that nobody but another user may read: the pipeline may well run."""
    try:
        lock.open("rb").close()
    except PermissionError:
        raise UsageError(
            f"whether pipeline '{pipeline}' runs cannot be told, because {lock} may not be read; ask as its owner"
        ) from None
    except OSError:  # there is none
        return


def running_pipelines(root: Path) -> list[str]:
    """Return the names of the pipelines below ``root`` that a process of this machine runs."""
    found = []
    for lock in sorted(root.glob(f"*/{LOCK_NAME}")):
        with suppress(UsageError):  # of another user: not one that could be meant
            found += [lock.parent.name] if is_running_here(str(root), lock.parent.name) else []
    return found


def is_running_here(root: str, pipeline: str) -> bool:
    """Return whether a process of this machine runs the pipeline whose checkpoints are below ``root``.

    Raises:
        UsageError: the process belongs to another user.
    """
    local, holder = local_directory(root), read_holder(root, pipeline)
    if local is None or holder is None or holder.ending is not Ending.NONE:
        return False
    return holder.host == socket.gethostname() and _holds(holder.pid, local / pipeline / LOCK_NAME)


def _others(root: Path) -> str:
    return f"running there: {', '.join(running_pipelines(root)) or 'none'}"


def _holds(pid: int, lock: Path) -> bool:
    """Whether process ``pid`` has this very file open: so it is the holder, and not one that got its number later.

    Raises:
        UsageError: the process belongs to another user.
    """
    import psutil

    try:
        opened = [file.path for file in psutil.Process(pid).open_files()]
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        raise UsageError(f"process {pid} holds {lock} and belongs to another user; stop it as that user") from None
    wanted = os.path.realpath(lock)
    return any(os.path.realpath(path) == wanted for path in opened)
