"""Workers as plain child processes: the tests' stand-in for Spark's barrier stage
(``runtime.driver.supervision.Launcher``).

A *zygote* process imports everything once and forks a worker per request, as PySpark's daemon does, so that a
generation starts in milliseconds. This module is both ends: imported by tests, run as the zygote. What it unpickles
was written by this very test through a pipe that nobody else has.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO, Protocol

from headgate.model.failure import Failure, FailureKind

FINGERPRINT = "tests"
STOPPED, LEAKED, CRASHED = 1, 3, 4
"""Exit codes of a worker that ended otherwise than well: told to stop, left something open, raised."""

SERVERS = "HEADGATE_TEST_SERVERS"
"""Name of a variable: the ports of servers that tests have started."""

LAST_TURN_S = 20.0
PEER_GRACE_MS = 20_000
"""A busy machine may let the driver hear that a peer was missed before it hears why that one has left."""

_LENGTH = struct.Struct("<I")


class Zygote:
    """The test's end: asks for workers and hears of their ends."""

    def __init__(self, at: Sequence[str] = (), process: _Process | None = None) -> None:
        """``at``: the command that starts others where its workers are to be. ``process``: it was begun before."""
        self._process = process or _begun(at)
        self._lock = threading.Lock()
        self._waiting: list[Callable[[int], None]] = []
        self._on_exit: dict[int, Callable[[int], None]] = {}
        self._thread = threading.Thread(target=self._listen, name="zygote", daemon=True)
        self._thread.start()

    def fork(self, call: Callable[[], None], on_pid: Callable[[int], None], on_exit: Callable[[int], None]) -> None:
        """Run ``call`` in a new process; ``on_pid`` and later ``on_exit`` (exit code) run in the zygote's thread."""
        from pyspark import cloudpickle

        data = cloudpickle.dumps(call)
        assert self._process.stdin is not None

        def born(pid: int) -> None:
            self._on_exit[pid] = on_exit
            on_pid(pid)

        with self._lock:
            self._waiting.append(born)
            self._process.stdin.write(_LENGTH.pack(len(data)) + data)
            self._process.stdin.flush()

    def close(self) -> None:
        """End the zygote and whatever it started."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(120)
        self._thread.join()
        self._process.stdout.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            found = json.loads(line)
            if "code" in found:
                self._on_exit.pop(found["pid"])(found["code"])
            else:
                with self._lock:
                    born = self._waiting.pop(0)
                born(found["pid"])


class _Process(Protocol):
    """What ``subprocess.Popen`` is of a zygote."""

    stdin: Any
    stdout: Any

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""


def _begun(at: Sequence[str]) -> _Process:
    environment = {**os.environ, "POLARS_MAX_THREADS": "1"}
    command = [*at, sys.executable, __file__]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


class ForkedZygote:
    """A zygote that has what this process has imported: begun before this process has any thread."""

    def __init__(self) -> None:
        (theirs, ours), (heard, told) = os.pipe(), os.pipe()
        self._pid = os.fork()
        if not self._pid:
            try:
                os.dup2(theirs, 0)
                os.dup2(told, 1)
                os.closerange(3, 256)
                _warm_up()
                _serve(os.fdopen(os.dup(0), "rb", buffering=0), os.fdopen(os.dup(1), "wb"))
            finally:
                os._exit(0)
        os.close(theirs)
        os.close(told)
        self.stdin, self.stdout = os.fdopen(ours, "wb"), os.fdopen(heard, "rb")

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, which comes when its input is closed."""
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


@dataclass
class Stage:
    """One submission: the processes of its newest attempt."""

    submit: Callable[[], None]
    ended: Callable[[Failure | None], None]
    attempts_left: int
    unborn: int = 0
    alive: set[int] = field(default_factory=set)
    error: str | None = None
    is_cancelled: bool = False


def kill(pid: int) -> None:
    """Kill a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):  # it has ended already; the zygote's word is on its way
        os.kill(pid, signal.SIGKILL)


class ProcessLauncher:
    """Starts one process per worker; a stage ends when all of them are gone.

    Args:
        zygote: forks them.
        definition: what the workers run.
        faults: injected into the workers' checkpoint storage.
        prepare: called in each worker before anything else.
        stage_attempts: as Spark retries a failed stage under the same submission.
    """

    def __init__(
        self,
        zygote: Zygote,
        definition: Any,
        *,
        faults: Sequence[Any] = (),
        prepare: Callable[[], None] | None = None,
        stage_attempts: int = 1,
    ) -> None:
        self._zygote = zygote
        self._definition = definition
        self._faults = tuple(faults)
        self._prepare = prepare
        self._stage_attempts = stage_attempts
        self._lock = threading.RLock()
        self._stages: dict[int, Stage] = {}
        self._task_attempts = 0
        self.codes: dict[int, int] = {}
        """Exit codes so far, by process id; negative: killed by that signal."""
        self.spared: set[int] = set()
        """Processes that count as gone but run on: zombies."""
        self.submissions = 0

    def submit(
        self, submission: int, address: tuple[str, int], secret: bytes, ended: Callable[[Failure | None], None]
    ) -> None:
        """Start all workers."""
        self.submissions += 1
        start = partial(self._start, submission, address, secret)
        self._stages[submission] = Stage(start, ended, self._stage_attempts)
        start()

    def cancel(self, submission: int) -> None:
        """Kill the workers of ``submission``, but not the zombies."""
        with self._lock:
            stage = self._stages.get(submission)
            if stage is None:
                return
            stage.is_cancelled = True
            for pid in list(stage.alive):
                if pid in self.spared:
                    self._gone(submission, pid, -signal.SIGKILL)
                else:
                    kill(pid)

    def alive(self) -> set[int]:
        """Return the processes that run, zombies included."""
        with self._lock:
            running = {pid for stage in self._stages.values() for pid in stage.alive}
            return running | {pid for pid in self.spared if pid not in self.codes}

    def _start(self, submission: int, address: tuple[str, int], secret: bytes) -> None:
        from headgate.model.ids import WorkerIndex
        from headgate.runtime.worker.worker import WorkerTask

        stage = self._stages[submission]
        parallelism = self._definition.plan.parallelism
        with self._lock:
            stage.attempts_left -= 1
            stage.unborn = parallelism
        for index in range(parallelism):
            self._task_attempts += 1
            host, port = address
            zygote, own_host = self._place(submission, index)
            task = WorkerTask(
                self._definition,
                WorkerIndex(index),
                submission,
                self._task_attempts,
                host,
                port,
                secret,
                own_host,
                FINGERPRINT,
            )
            self._fork(submission, WorkerCall(task, self._faults, self._prepare), zygote)

    def _place(self, submission: int, index: int) -> tuple[Zygote, str]:
        """Return who forks a worker, and the address that it listens on."""
        return self._zygote, "127.0.0.1"

    def _is_out_of_reach(self, zygote: Zygote) -> bool:
        """Whether nobody can kill whom it forks."""
        return False

    def _fork(self, submission: int, call: WorkerCall, zygote: Zygote) -> None:
        pids: list[int] = []

        def born(pid: int) -> None:
            pids.append(pid)
            if self._is_out_of_reach(zygote):
                self.spared.add(pid)
            with self._lock:
                stage = self._stages[submission]
                stage.unborn -= 1
                stage.alive.add(pid)
                if stage.is_cancelled:
                    kill(pid)

        zygote.fork(call, born, lambda code: self._exited(submission, pids[0], code))

    def _exited(self, submission: int, pid: int, code: int) -> None:
        with self._lock:
            self.codes[pid] = code
            if pid in self._stages[submission].alive:
                self._gone(submission, pid, code)

    def _gone(self, submission: int, pid: int, code: int) -> None:
        stage = self._stages[submission]
        stage.alive.discard(pid)
        if code != 0:
            stage.error = stage.error or f"a task ended with code {code}"
        if stage.alive or stage.unborn:
            return
        if stage.error and stage.attempts_left > 0 and not stage.is_cancelled:
            stage.error = None
            stage.submit()
        else:
            stage.ended(None if stage.error is None else Failure(FailureKind.LOST, stage.error))


@dataclass(frozen=True)
class WorkerCall:
    """What a forked process does: be a worker, then tell by its exit code how that went."""

    task: Any
    faults: tuple[Any, ...]
    prepare: Callable[[], None] | None

    def __call__(self) -> int:
        from headgate.runtime.worker import worker

        worker.PEER_GRACE_MS = PEER_GRACE_MS
        if self.prepare is not None:
            self.prepare()
        if self.faults:
            from tests.storage.faulty import FaultyStorage

            from headgate.storage.urls import open_storage

            worker.open_storage = lambda url: FaultyStorage(open_storage(url), self.faults)  # type: ignore[assignment]
        try:
            worker.Worker(self.task).run()
        except worker.WorkerStopped:
            return STOPPED
        return LEAKED if _leaks() else 0


def _leaks() -> list[str]:
    """Return what a worker that has returned holds for good: a thread that has done everything gets its last turn."""
    deadline = time.monotonic() + LAST_TURN_S
    while (found := _held()) and time.monotonic() < deadline:
        time.sleep(0.01)
    if found:
        print(f"worker {os.getpid()} leaks {found}", file=sys.stderr, flush=True)
    return found


def _held() -> list[str]:
    """Return what this process still holds: threads and sockets of ours."""
    found = [thread.name for thread in threading.enumerate() if thread.name.startswith("headgate-data")]
    found += [thread.name for thread in threading.enumerate() if thread.name.startswith("headgate-control")]
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:") and not _is_to_a_server(int(name)):
            found.append(target)
    return found


def _is_to_a_server(descriptor: int) -> bool:
    """Whether a store that the process keeps open (``Store.shared``) talks to one of its servers there."""
    with socket.socket(fileno=os.dup(descriptor)) as found:
        try:
            port = found.getpeername()[1]
        except (OSError, IndexError):
            return False
        return is_server_port(port)


def is_server_port(port: int) -> bool:
    """Whether a server of the tests listens there, to which a store stays connected as long as its process lives."""
    return str(port) in os.environ.get(SERVERS, "").split(",")


# -- the zygote's own process --------------------------------------------------------------------------------------


def _warm_up() -> None:
    import pyarrow as pa
    import pyspark.cloudpickle  # noqa: F401
    import pytest  # noqa: F401  # functions of tests refer to it
    import tests.runtime.holding  # noqa: F401

    import headgate.connectors.files.file_sink
    import headgate.connectors.files.line_source
    import headgate.connectors.generator
    import headgate.connectors.memory
    import headgate.connectors.streams
    import headgate.operators.process.connected_process
    import headgate.operators.windows.aligned_windows
    import headgate.runtime.worker.worker
    import headgate.testing.connectors  # noqa: F401

    "localhost".encode("idna")  # an encoding that each worker would import
    pa.array([0])  # imports pandas, where it is installed: half a second for each worker otherwise


def _read(requests: BinaryIO, size: int) -> bytes:
    data = b""
    while len(data) < size and (more := requests.read(size - len(data))):
        data += more
    return data


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    chosen = selectors.DefaultSelector()
    chosen.register(requests, selectors.EVENT_READ, 0)
    children: dict[int, int] = {}
    while True:
        for key, _ in chosen.select():
            if key.data:
                pid, descriptor = key.data, key.fd
                chosen.unregister(descriptor)
                os.close(descriptor)
                del children[pid]
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                answers.write(json.dumps({"pid": pid, "code": code}).encode() + b"\n")
            else:
                head = _read(requests, _LENGTH.size)
                if not head:
                    _end(children)
                    return
                data = _read(requests, _LENGTH.unpack(head)[0])
                _bring(data)
                pid = _fork(data)
                children[pid] = os.pidfd_open(pid)
                chosen.register(children[pid], selectors.EVENT_READ, pid)
                answers.write(json.dumps({"pid": pid}).encode() + b"\n")
            answers.flush()


_NAMED = re.compile(rb"(?:headgate|tests)(?:\.\w+)+")
"""A module that a pickled call names."""

_OPENED = {"headgate.connectors.streams": "headgate.store.catalogue.sql"}
"""What is imported when a connector of a package is opened: SQLAlchemy takes half a second."""


def _bring(data: bytes) -> None:
    """Import once what each worker that runs this call would import by itself."""
    for name in {found.decode() for found in _NAMED.findall(data)} - _brought:
        _brought.add(name)
        also = [opened for package, opened in _OPENED.items() if name.startswith(package)]
        for one in (name, *also):
            with contextlib.suppress(ImportError):  # the worker says so, if it needs it
                importlib.import_module(one)


_brought: set[str] = set()


def _fork(data: bytes) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = CRASHED
    try:
        os.closerange(3, 256)  # the zygote's pipes and what it watches
        os.dup2(2, 1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        from pyspark import cloudpickle

        code = cloudpickle.loads(data)()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _end(children: dict[int, int]) -> None:
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(__file__))))  # so that tests are found by name
    sys.modules["tests.runtime.launching"] = sys.modules["__main__"]
    _warm_up()
    _serve(os.fdopen(os.dup(0), "rb", buffering=0), os.fdopen(os.dup(1), "wb"))
