"""Which process of this machine runs a pipeline, by a lock that dies with it, and what other processes ask of it.

In a directory the lock is beside the checkpoints, makes the second driver stop *early* and name the first one. For
checkpoints in an object store or HDFS it is in a directory of the user on this machine: a driver takes it away from
another one, and only a reset is refused while one runs. What protects the data is the claim in the checkpoint log.

To stop a pipeline, or to request a checkpoint or savepoint, another process finds the one that holds the lock, and
signals it. A request is a file beside the lock; the pipeline's process takes it, does what it says, and writes the
outcome to another file. Never signals a process without being certain that it holds the lock: a process id in a file
may have been reused.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec
import xxhash

from headgate.codec.decodable import decodable
from headgate.codec.json_files import Ending, LockHolder, decode_holder, encode_holder
from headgate.errors import StorageError, UsageError
from headgate.model.config import Access
from headgate.model.progress import CheckpointOutcome, ControlRequest
from headgate.runtime.driver.takeover import current_takeover, record_stop_of_dead_driver
from headgate.storage.base import TEMP_PREFIX
from headgate.storage.local_files import access_in, make_directories, open_lock, user_state_directory, write_created
from headgate.storage.urls import is_remote, local_directory, open_storage

if TYPE_CHECKING:
    import psutil

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
            # any machine may claim there, so this lock only names the process; a reset, without a claimant, is refused
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
        # else a child, such as the JVM, would hold the lock after this process
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
            # first the word, then the lock: `RunningPipeline.ended` looks in the other order
            self._write(ended)
            self._file.close()
            self._file = None

    def _write(self, holder: LockHolder) -> None:
        assert self._file is not None, "a released lock is not written"
        # in place and not atomically, because the lock is on this very file; readers take half a file for none
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


ASKED, TAKEN, WRITTEN, ANSWERED = ".asked", ".taken", ".written", ".answered"


class RequestFile:
    """One question and its answer."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def leave(cls, root: str, pipeline: str, request: ControlRequest | None = None) -> RequestFile:
        """Leave a question beside the lock of ``pipeline``."""
        directory = lock_directory(root)
        assert directory is not None, "only a pipeline with a lock can be rung for"
        ask = cls(directory / pipeline / f"checkpoint-{os.getpid()}-{secrets.token_hex(8)}")
        ask._put(ASKED, b"" if request is None else msgspec.json.encode(request))
        return ask

    def _put(self, suffix: str, data: bytes) -> None:
        """Write atomically, with the permissions of the lock's directory."""
        written = self._path.with_suffix(WRITTEN)
        write_created(written, data, access_in(written.parent))
        written.rename(self._path.with_suffix(suffix))

    def take(self) -> ControlRequest | None:
        """Take the request, which only one process can; None: it was withdrawn, or taken by another one."""
        try:
            # a rename succeeds for one process only, and its file stays until there is an answer
            self._path.with_suffix(ASKED).rename(self._path.with_suffix(TAKEN))
            data = self._path.with_suffix(TAKEN).read_bytes()
        except FileNotFoundError:
            return None
        return msgspec.json.decode(data, type=decodable(ControlRequest)) if data else ControlRequest()

    @property
    def is_given_up(self) -> bool:
        """Whether the requesting process has died."""
        pid = self._path.name.split("-")[1]
        return not (pid.isdecimal() and Path(f"/proc/{pid}").exists())

    def answer(self, outcome: CheckpointOutcome) -> None:
        """Write the outcome, unless the request was withdrawn."""
        asked = self._path.with_suffix(ASKED), self._path.with_suffix(TAKEN)
        if any(path.exists() for path in asked):
            self._put(ANSWERED, msgspec.json.encode(outcome))
            for path in asked:
                path.unlink(missing_ok=True)

    def answered(self) -> CheckpointOutcome | None:
        """Return the outcome, or None before there is one."""
        try:
            return msgspec.json.decode(self._path.with_suffix(ANSWERED).read_bytes(), type=decodable(CheckpointOutcome))
        except FileNotFoundError:
            return None

    def remove(self) -> None:
        """Forget it, answered or not."""
        for suffix in (ASKED, TAKEN, WRITTEN, ANSWERED):
            self._path.with_suffix(suffix).unlink(missing_ok=True)


def waiting_requests(root: str, pipeline: str) -> list[RequestFile]:
    """Return the requests of living processes; remove the files of dead ones."""
    directory = lock_directory(root)
    paths = [] if directory is None else sorted((directory / pipeline).glob("checkpoint-*-*.*"))
    asks = {path.with_suffix(""): RequestFile(path.with_suffix("")) for path in paths}
    for ask in asks.values():
        if ask.is_given_up:
            ask.remove()
    return [RequestFile(path.with_suffix("")) for path in paths if path.suffix == ASKED and path.exists()]


def take_requests(root: str, pipeline: str, run: str) -> list[tuple[RequestFile, ControlRequest]]:
    """Take the requests to ``run``; remove those to a former run, even if their process id is in use again."""
    asks = ((ask, ask.take()) for ask in waiting_requests(root, pipeline))
    found = [(ask, request) for ask, request in asks if request is not None]
    for ask, request in found:
        if not request.is_for(run):
            ask.remove()
    return [(ask, request) for ask, request in found if request.is_for(run)]


STOP = signal.SIGTERM
DRAIN = signal.SIGUSR1
ASK = signal.SIGUSR2


class RunningPipeline:
    """A pipeline that a process of this machine runs. Make it with ``find``."""

    def __init__(self, root: str, pipeline: str, holder: LockHolder) -> None:
        self._root = root
        self._pipeline = pipeline
        self.holder = holder
        self._supervisor = _supervisor_of(holder)

    @classmethod
    def find(cls, root: str, pipeline: str) -> RunningPipeline:
        """Return the pipeline with its checkpoints below ``root``.

        Raises:
            UsageError: it does not run, runs on another machine, or cannot be stopped from outside.
        """
        directory = lock_directory(root)
        if directory is None:
            raise UsageError(
                f"the checkpoints of '{pipeline}' are in {root}, which does not say which process runs the pipeline; "
                "on its machine send that process SIGTERM to stop it or SIGUSR1 to drain it"
            )
        _refuse_unreadable(directory / pipeline / LOCK_NAME, pipeline)
        holder = read_holder(root, pipeline)
        is_elsewhere = holder is not None and holder.host != socket.gethostname()
        is_over = holder is None or holder.ending is not Ending.NONE
        if holder is None or is_over or not (is_elsewhere or _has_open(holder.pid, directory / pipeline / LOCK_NAME)):
            raise UsageError(_not_running(root, directory, pipeline))
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

        A supervisor gets it, if there is one: else it would start the driver again if that dies over it.

        Raises:
            UsageError: the process belongs to another user, or has just ended.
        """
        try:
            os.kill(self.holder.pid if self._supervisor is None else self._supervisor.pid, DRAIN if drain else STOP)
        except (PermissionError, ProcessLookupError) as error:
            raise UsageError(f"cannot signal {self.holder.owner}, which runs '{self._pipeline}': {error}") from None

    def ask_for(self, request: ControlRequest) -> RequestFile:
        """Leave a question and ring. Call at once after ``find``.

        Raises:
            UsageError: the process belongs to another user, or has just ended.
        """
        ask = RequestFile.leave(self._root, self._pipeline, replace(request, run=self.holder.nonce))
        try:
            os.kill(self.holder.pid, ASK)
        except (PermissionError, ProcessLookupError) as error:
            ask.remove()
            raise UsageError(f"cannot signal {self.holder.owner}, which runs '{self._pipeline}': {error}") from None
        return ask

    def insist(self, ended: LockHolder, *, drain: bool) -> None:
        """Repeat the request to supervisor and standbys of a driver that has died or failed: they may start it again.

        The supervisor is the one that it had (KR15): any other process was started on purpose.
        """
        drains_on = self._signal_supervisor(DRAIN if drain else STOP) and drain  # a standby would be in its way
        if ended.ending is not Ending.REPLACED and not drains_on:
            with suppress(StorageError):
                record_stop_of_dead_driver(open_storage(self._root), self._pipeline, self.holder, drain=drain)

    def _signal_supervisor(self, number: int) -> bool:
        """Return whether there is one."""
        import psutil

        if self._supervisor is None:
            return False
        try:
            self._supervisor.send_signal(number)
        except psutil.Error:  # it has ended; the process that has its number now is left alone
            return False
        return True

    def ended(self) -> LockHolder | None:
        """Return how this run ended, or None while it goes on.

        ``ending`` is ``NONE`` when it died without a word, and ``REPLACED`` when another run has overwritten it.
        """
        directory = lock_directory(self._root)
        assert directory is not None, "find() accepts only pipelines with a lock"
        is_there = _has_open(self.holder.pid, directory / self._pipeline / LOCK_NAME)  # first: it writes, then leaves
        found = read_holder(self._root, self._pipeline)
        if found is not None and found.nonce == self.holder.nonce:
            return found if found.ending is not Ending.NONE or not is_there else None
        if found is None:  # being written, by this run or the next
            return None if is_there else self.holder
        return replace(self.holder, ending=Ending.REPLACED)


def _supervisor_of(holder: LockHolder) -> psutil.Process | None:
    """Return the supervisor of a running driver. It must be its parent: a process id in a file may have been reused."""
    import psutil

    try:
        parent = psutil.Process(holder.pid).parent() if holder.supervisor_pid else None
    except psutil.Error:
        return None
    return parent if parent is not None and parent.pid == holder.supervisor_pid else None


def _refuse_unreadable(lock: Path, pipeline: str) -> None:
    """Refuse a lock that only another user may read: the pipeline may well run."""
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
    """Return whether a process of this machine runs the pipeline with its checkpoints below ``root``.

    Raises:
        UsageError: the process belongs to another user.
    """
    directory, holder = lock_directory(root), read_holder(root, pipeline)
    if directory is None or holder is None or holder.ending is not Ending.NONE:
        return False
    return holder.host == socket.gethostname() and _has_open(holder.pid, directory / pipeline / LOCK_NAME)


def _not_running(root: str, directory: Path, pipeline: str) -> str:
    if is_remote(root):
        return (
            f"no process of this user and machine runs a pipeline '{pipeline}' with its checkpoints in {root}; "
            "if it runs on another one, give the command there"
        )
    there = ", ".join(running_pipelines(directory)) or "none"
    return f"no pipeline '{pipeline}' runs with its checkpoints in {directory}; running there: {there}"


def _has_open(pid: int, lock: Path) -> bool:
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
