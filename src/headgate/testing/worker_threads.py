"""Workers as threads of one process: the stand-in for Spark's barrier stage in users' tests.

Interprets ``runtime.driver.supervision.Launcher``, as ``spark.launcher`` does. The workers are the product's own; they
differ in their surroundings alone. Rules: docs/spec/in-process.md. Used by ``testing.in_process``.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from pyspark import cloudpickle

from headgate.model.definition import PipelineDefinition
from headgate.model.failure import Failure, FailureKind
from headgate.model.ids import WorkerIndex
from headgate.operators.sendable import sent
from headgate.runtime.process import Process, modules_being_imported
from headgate.runtime.worker.worker import Worker, WorkerStopped, WorkerTask
from headgate.threads import DaemonThread, Pool, ThreadEnded, UntilPool, until

FINGERPRINT = "in one process"
HOST = "127.0.0.1"


class _WorkerExit(ThreadEnded):
    """Ends the thread that asked for the end of its worker; not an error that anybody handles."""


def _until_exit(target: Callable[..., None], *arguments: Any) -> None:
    with suppress(_WorkerExit):
        target(*arguments)


class ThreadSurroundings(Process):
    """This process, as one worker has it: it knows the worker's threads, and ends the worker alone."""

    def __init__(self, leave: Callable[[], None]) -> None:
        super().__init__()
        self._leave = leave
        self.off = threading.Event()
        """Set when the worker is to leave: a process would be killed, and wait for no server (G16)."""
        self._threads: list[DaemonThread] = []
        self._pools: list[Pool] = []

    def thread(self, target: Callable[..., None], name: str, *arguments: Any) -> DaemonThread:
        """See ``Threads``."""
        made = super().thread(_until_exit, name, until(self.off, target), *arguments)
        self._threads.append(made)
        return made

    def pool(self, size: int, name: str, *, is_daemon: bool = False) -> Pool:
        """See ``Threads``."""
        made = UntilPool(super().pool(size, name, is_daemon=is_daemon), self.off)
        self._pools.append(made)
        return made

    def exit(self, code: int) -> NoReturn:
        """End the worker, and the thread that asks, but not the process (TR4)."""
        self._leave()
        raise _WorkerExit(code)

    def join(self) -> None:
        """Wait for every thread of the worker, which has returned (TR5)."""
        for pool in self._pools:
            pool.shutdown(wait=True)
        for thread in self._threads:
            if thread.is_alive():
                thread.join()


@dataclass
class _Stage:
    """The workers of one submission that are not gone, by index."""

    ended: Callable[[Failure | None], None]
    alive: dict[int, WorkerThread] = field(default_factory=dict)
    error: str | None = None


class ThreadLauncher:
    """Starts a thread for each worker. A stage ends when all are gone; if one fails before deployment, all leave."""

    def __init__(self, definition: PipelineDefinition, directory: Path) -> None:
        """Make it. ``directory`` is for what the workers keep on disk.

        Raises:
            UsageError: the pipeline cannot be sent to workers, so not to those of Spark either.
        """
        self._directory = directory
        self._parallelism = definition.plan.parallelism
        self._lock = threading.Lock()
        self._stages: dict[int, _Stage] = {}
        self._threads: list[DaemonThread] = []
        for module in modules_being_imported():
            cloudpickle.register_pickle_by_value(module)
        self._pickled = sent(definition, cloudpickle.dumps)  # TR2

    def submit(
        self, submission: int, address: tuple[str, int], secret: bytes, ended: Callable[[Failure | None], None]
    ) -> None:
        """Start all workers."""
        stage = self._stages[submission] = _Stage(ended)
        host, port = address
        for index in range(self._parallelism):
            attempt = len(self._threads) + 1
            definition: PipelineDefinition = cloudpickle.loads(self._pickled)
            spill = self._directory / str(attempt)
            spill.mkdir()
            task = WorkerTask(
                definition, WorkerIndex(index), submission, attempt, host, port, secret, HOST, FINGERPRINT, str(spill)
            )
            worker = WorkerThread(task, lambda error, index=index: self._gone(submission, index, error))  # type: ignore[misc]
            stage.alive[index] = worker
            self._threads.append(worker.thread)
        for worker in list(stage.alive.values()):
            worker.thread.start()

    def cancel(self, submission: int) -> None:
        """Have the workers of ``submission`` leave."""
        for worker in self._alive(submission):
            worker.leave()

    def kill(self) -> None:
        """Have worker 0 leave as if its process had been killed (TR7)."""
        for worker in self._alive(max(self._stages, default=0))[:1]:
            worker.leave()

    def give_up(self) -> list[str]:
        """Count workers as gone that do not leave; return where they are (TR6)."""
        stuck = []
        for submission in list(self._stages):
            for worker in self._alive(submission):
                stuck.append(worker.whereabouts())
                self._gone(submission, worker.index, "it did not leave")
        return stuck

    def join(self, timeout_s: float) -> None:
        """Wait for the threads of workers that are gone."""
        for thread in self._threads:
            thread.join(timeout_s)

    def _alive(self, submission: int) -> list[WorkerThread]:
        with self._lock:
            stage = self._stages.get(submission)
            return [] if stage is None else list(stage.alive.values())

    def _gone(self, submission: int, index: int, error: str | None) -> None:
        stage = self._stages[submission]
        with self._lock:
            if stage.alive.pop(index, None) is None:
                return  # it was given up
            stage.error = stage.error or error
            is_last = not stage.alive
        if error is not None:  # TR13: those that wait for a deployment, which needs all workers, would wait for ever
            for worker in self._alive(submission):
                worker.leave_undeployed()
        if is_last:
            stage.ended(None if stage.error is None else Failure(FailureKind.LOST, stage.error))


class WorkerThread:
    """One worker and the thread that is its mailbox."""

    def __init__(self, task: WorkerTask, ended: Callable[[str | None], None]) -> None:
        self.index = int(task.worker)
        self._ended = ended
        self._around = ThreadSurroundings(self.leave)
        self._worker = Worker(task, self._around)
        self.thread = DaemonThread(
            target=until(self._around.off, self._run), name=f"headgate-worker-{task.worker}", daemon=True
        )

    def leave(self) -> None:
        """Have the worker end as soon as no function of the user's runs."""
        self._around.off.set()
        self._worker.leave()

    def leave_undeployed(self) -> None:
        """Have the worker end if it serves no generation yet. One that does hears from its driver or its peers."""
        if not self._worker.is_deployed:
            self._worker.leave()

    def whereabouts(self) -> str:
        """Return what the mailbox is doing: the innermost line that runs."""
        frame = sys._current_frames().get(self.thread.ident or 0)
        if frame is None:
            return f"worker {self.index}"
        line = traceback.extract_stack(frame)[-1]
        return f"worker {self.index} in {line.name} ({line.filename}:{line.lineno})"

    def _run(self) -> None:
        error: str | None = None
        try:
            self._worker.run()
        except WorkerStopped as stopped:
            error = f"worker {self.index} stopped: {stopped}"
        except BaseException as crash:
            error = f"worker {self.index} failed: {crash!r}"
        self._around.join()
        self._ended(error)
