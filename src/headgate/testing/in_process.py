"""Runs a pipeline in this process, without Spark: for users' tests.

Driver, workers, checkpoints and connections are the product's own. Each worker is a thread with an environment of its
own, as a process of Spark's would be (docs/spec/in-process.md). Counterparts: ``spark.session``, ``spark.launcher``.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import field, replace
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeAlias, TypedDict, Unpack

import pyarrow as pa
from pyspark import cloudpickle

from headgate.dataclass import dataclass
from headgate.display.progress import counted
from headgate.environment import CancellablePool, DaemonThread, Pool, ThreadEnded, cancellable
from headgate.errors import UsageError
from headgate.model.config import ExponentialDelay, FixedDelay, RestartStrategy
from headgate.model.failure import Failure, FailureKind
from headgate.model.ids import CheckpointId, WorkerIndex
from headgate.model.plan import PipelineDefinition
from headgate.model.progress import Observer, PipelineHandle, Progress, RunResult
from headgate.operators.user_functions import pickled
from headgate.runtime.driver.driver import Driver, DriverHandle
from headgate.runtime.surroundings import Process, modules_being_imported
from headgate.runtime.worker.worker import Worker, WorkerStopped, WorkerTask

FINGERPRINT = "in one process"
HOST = "127.0.0.1"


class _WorkerExit(ThreadEnded):
    """Ends the thread that ended its worker. Never handle it."""


def _until_exit(target: Callable[..., None], *arguments: Any) -> None:
    with suppress(_WorkerExit):
        target(*arguments)


class ThreadEnvironment(Process):
    """The environment of one worker thread: it knows the worker's threads, and ends only this worker."""

    def __init__(self, leave: Callable[[], None]) -> None:
        super().__init__()
        self._leave = leave
        self.off = threading.Event()
        """Set when the worker is to leave: a process would be killed, and wait for no server."""
        self._threads: list[DaemonThread] = []
        self._pools: list[Pool] = []

    def thread(self, target: Callable[..., None], name: str, *arguments: Any) -> DaemonThread:
        made = super().thread(_until_exit, name, cancellable(self.off, target), *arguments)
        self._threads.append(made)
        return made

    def pool(self, size: int, name: str, *, is_daemon: bool = False) -> Pool:
        made = CancellablePool(super().pool(size, name, is_daemon=is_daemon), self.off)
        self._pools.append(made)
        return made

    def exit(self, code: int) -> NoReturn:
        """End the worker, and the thread that asks, but not the process."""
        self._leave()
        raise _WorkerExit(code)

    def join(self) -> None:
        """Wait for every thread of the worker, which has returned."""
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
        self._pickled = pickled(definition, cloudpickle.dumps)  # as for Spark's workers: refuses what cannot be sent

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
        """Have worker 0 leave as if its process had been killed."""
        for worker in self._alive(max(self._stages, default=0))[:1]:
            worker.leave()

    def give_up(self) -> list[str]:
        """Count workers as gone that do not leave; return where they are."""
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
        if error is not None:  # those that wait for a deployment, which needs all workers, would wait for ever
            for worker in self._alive(submission):
                worker.leave_undeployed()
        if is_last:
            stage.ended(None if stage.error is None else Failure(FailureKind.LOST, stage.error))


class WorkerThread:
    """One worker and the thread that is its mailbox."""

    def __init__(self, task: WorkerTask, ended: Callable[[str | None], None]) -> None:
        self.index = int(task.worker)
        self._ended = ended
        self._around = ThreadEnvironment(self.leave)
        self._worker = Worker(task, self._around)
        self.thread = DaemonThread(
            target=cancellable(self._around.off, self._run), name=f"headgate-worker-{task.worker}", daemon=True
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


SILENCE_MS_MAX = 60_000
"""A thread dies with its process, so silence says only that the machine is busy."""

LEAVE_S = 5.0
"""How long a worker may take to leave before it counts as stuck."""

RESTART_DELAY_MS_MAX = 10
"""A delay gives what failed time to recover; in one process there is nothing to wait for."""

Kills: TypeAlias = int | Sequence[int] | None
"""After which completed checkpoints of a run, counted from 1, a worker is killed."""


class StartOptions(TypedDict, total=False):
    """How a run begins: the options of ``Pipeline.start`` for that."""

    restore: Any
    go_back_past: int | None
    allow_unclaimed_state: Sequence[str]
    moved: Mapping[str, str]
    fresh: bool


class Startable(Protocol):
    """What ``headgate.Pipeline`` is."""

    name: str

    def start_with(
        self,
        starter: Callable[[PipelineDefinition, Observer], PipelineHandle],
        *,
        checkpoint_dir: str,
        parallelism: int | None = None,
        observer: Observer | None = None,
        restore: Any = None,
        go_back_past: int | None = None,
        allow_unclaimed_state: Sequence[str] = (),
        moved: Mapping[str, str] = ...,
        fresh: bool = False,
    ) -> PipelineHandle:
        """Make the definition and give it to ``starter``."""


def run(
    pipeline: Startable,
    *,
    timeout_s: float = 30.0,
    parallelism: int | None = None,
    checkpoint_dir: str | Path | None = None,
    observer: Observer | None = None,
    kill_worker_after_checkpoint: Kills = None,
    **begins: Unpack[StartOptions],
) -> RunResult:
    """Run a pipeline in this process until its bounded input ends. You need neither Java nor Spark.

    Each worker is a thread that works on a copy of the pipeline, as on Spark. Checkpoints are in a temporary directory,
    unless the pipeline or ``checkpoint_dir`` names one; a later run then continues from them. Fixed and exponential
    delays of restarts are shortened to at most 10 ms.

    Args:
        pipeline: a ``headgate.Pipeline``.
        timeout_s: how long the run may take. A function that never returns cannot be stopped; its thread remains.
        parallelism: subtasks of every operator, instead of the parallelism of the pipeline.
        checkpoint_dir: where checkpoints are kept if the pipeline does not say.
        observer: receives progress; default logs restarts and notes to the logger ``headgate``.
        kill_worker_after_checkpoint: kills a worker when this many checkpoints of this run have completed. Several
            numbers kill several workers.
        begins: ``restore``, ``go_back_past``, ``allow_unclaimed_state``, ``moved``, ``fresh``: as for
            ``Pipeline.start``.

    Raises:
        PipelineFailed: the restart strategy gave up.
        TimeoutError: the run did not end in time.
        UsageError: the pipeline is wrong, or the run ended before a worker could be killed.
    """
    if not timeout_s > 0:
        raise UsageError(f"timeout_s must be more than zero, but is {timeout_s}")
    options = {**begins, "parallelism": parallelism, "observer": observer}
    with _running(pipeline, checkpoint_dir, kill_worker_after_checkpoint, options) as handle:
        result = handle.wait(timeout_s)
        if result is None:
            raise TimeoutError(handle.time_is_up(timeout_s))
        handle.check_kills()
    return result


@contextmanager
def running(
    pipeline: Startable,
    *,
    parallelism: int | None = None,
    checkpoint_dir: str | Path | None = None,
    observer: Observer | None = None,
    kill_worker_after_checkpoint: Kills = None,
    **begins: Unpack[StartOptions],
) -> Iterator[PipelineHandle]:
    """Run a pipeline in this process while a ``with`` block runs, which receives the handle.

    Use it for input that does not end, and for checkpoints and savepoints on demand. A pipeline that still runs at the
    end of the block is cancelled; its checkpoints stay. The arguments are those of ``run``.

    Raises:
        UsageError: the pipeline is wrong.
    """
    options = {**begins, "parallelism": parallelism, "observer": observer}
    with _running(pipeline, checkpoint_dir, kill_worker_after_checkpoint, options) as handle:
        yield handle


class InProcessHandle(DriverHandle):
    """A pipeline that runs in this process."""

    def __init__(self, driver: Driver, launcher: ThreadLauncher, watcher: _Watcher, name: str) -> None:
        super().__init__(driver)
        self._launcher = launcher
        self._watcher = watcher
        self._name = name

    def end(self) -> list[str]:
        """Cancel what still runs, and wait; return where workers are that did not leave."""
        stuck = []
        if not self.driver.result.done():
            self.driver.cancel(retain=True)
            wait([self.driver.result], LEAVE_S)
            stuck = self._launcher.give_up()
            wait([self.driver.result], LEAVE_S)
        return [*stuck, *self._joined(has_left=not stuck)]

    def time_is_up(self, timeout_s: float) -> str:
        """End; return a sentence that says how far it had come."""
        state, count = self.progress.state.value, len(self.driver.run_progress.checkpoints)
        restarts = self._watcher.restarts
        restarted = f" and {counted(len(restarts), 'restart')}, the last because {restarts[-1]}" if restarts else ""
        stuck = self.end()
        hang = f"; a function did not return, and cannot be stopped: {' and '.join(stuck)}" if stuck else ""
        return (
            f"pipeline '{self._name}' had not ended after {timeout_s:g} s: it was {state}, with "
            f"{counted(count, 'completed checkpoint')}"
            f"{restarted}{hang}; give it bounded input or a longer timeout_s="
        )

    def check_kills(self) -> None:
        """Refuse a run that should have lost a worker and did not: a test of that would prove nothing.

        Raises:
            UsageError
        """
        missed, count = self._watcher.missed, self._watcher.checkpoints_count
        if missed is not None:
            raise UsageError(
                f"pipeline '{self._name}' ended with {count} completed checkpoints, before "
                f"kill_worker_after_checkpoint={missed}; give it more input or a shorter checkpointing interval"
            )

    def _release(self) -> None:
        self._joined()

    def _joined(self, *, has_left: bool = True) -> list[str]:
        """Wait for what ends by itself, but not for ever: the driver calls sinks and hooks of the user's, too."""
        joining = DaemonThread(target=self.driver.join, name="headgate-join", daemon=True)
        joining.start()
        joining.join(LEAVE_S)
        if has_left:
            self._launcher.join(LEAVE_S)
        return ["the driver"] if joining.is_alive() else []


class _Watcher:
    """Stands before the user's observer; loses a worker when it is time."""

    def __init__(self, watcher: Observer, kill: Callable[[], None], kills: tuple[int, ...]) -> None:
        self._watcher = watcher
        self._kill = kill
        self._kills = kills
        self.checkpoints_count = 0
        self.restarts: list[str] = []

    @property
    def missed(self) -> int | None:
        """The last checkpoint after which a worker was to be killed, if the run did not reach it."""
        last = max(self._kills, default=0)
        return last if self.checkpoints_count < last else None

    def on_progress(self, progress: Progress) -> None:
        self._watcher.on_progress(progress)

    def on_restart(self, reason: str, delay_ms: int) -> None:
        self.restarts.append(reason)
        self._watcher.on_restart(reason, delay_ms)

    def on_note(self, text: str) -> None:
        self._watcher.on_note(text)

    def on_checkpoint(self, checkpoint: CheckpointId, duration_ms: int, size_bytes: int) -> None:
        self.checkpoints_count += 1
        self._watcher.on_checkpoint(checkpoint, duration_ms, size_bytes)
        if self.checkpoints_count in self._kills:
            self._kill()


@contextmanager
def _running(
    pipeline: Startable, checkpoint_dir: str | Path | None, kills: Kills, begins: dict[str, Any]
) -> Iterator[InProcessHandle]:
    kill_after = _kills(kills)
    if not hasattr(pipeline, "start_with"):
        raise UsageError(f"a headgate.Pipeline is needed, not {type(pipeline).__name__}")
    with _SETTINGS.kept(), tempfile.TemporaryDirectory(prefix="headgate-test-", ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        made: list[InProcessHandle] = []  # also where an interrupt keeps start_with from returning

        def start(definition: PipelineDefinition, watcher: Observer) -> InProcessHandle:
            made.append(_made(definition, watcher, scratch, kill_after))
            made[0].driver.start()
            return made[0]

        try:
            pipeline.start_with(start, checkpoint_dir=str(checkpoint_dir or scratch / "checkpoints"), **begins)
            yield made[0]
        finally:
            for handle in made:
                handle.end()


def _kills(given: Kills) -> tuple[int, ...]:
    kills = (given,) if isinstance(given, int) else tuple(given or ())
    for kill in kills:
        if isinstance(kill, bool) or not isinstance(kill, int) or kill < 1:
            raise UsageError(f"kill_worker_after_checkpoint must be 1 or more, but is {kill!r}")
    return kills


def _made(
    definition: PipelineDefinition, watcher: Observer, scratch: Path, kill_after: tuple[int, ...]
) -> InProcessHandle:
    config = definition.config
    runtime = replace(config.runtime, heartbeat_timeout_ms=SILENCE_MS_MAX)
    definition = replace(definition, config=replace(config, runtime=runtime, restart=_soon(config.restart)))
    launcher = ThreadLauncher(definition, scratch)
    watching = _Watcher(watcher, launcher.kill, kill_after)
    driver = Driver(definition, launcher, watching, FINGERPRINT)
    return InProcessHandle(driver, launcher, watching, definition.config.name)


def _soon(restart: RestartStrategy) -> RestartStrategy:
    """Return ``restart`` with short delays; those of a failure rate have a say in when it gives up."""
    match restart:
        case FixedDelay():
            return replace(restart, delay_ms=min(restart.delay_ms, RESTART_DELAY_MS_MAX))
        case ExponentialDelay():
            initial, longest = min(restart.initial_ms, RESTART_DELAY_MS_MAX), min(restart.max_ms, RESTART_DELAY_MS_MAX)
            return replace(restart, initial_ms=initial, max_ms=longest)
    return restart


class _ProcessSettings:
    """Saves and restores process-wide settings that workers change; several runs may share the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs_count = 0
        self._found = (0.0, 0)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """The first run that comes notes them; the last one that goes sets them back."""
        with self._lock:
            if not self._runs_count:
                self._found = sys.getswitchinterval(), pa.cpu_count()
            self._runs_count += 1
        try:
            yield
        finally:
            with self._lock:
                self._runs_count -= 1
                if not self._runs_count:
                    interval, cores = self._found
                    sys.setswitchinterval(interval)
                    pa.set_cpu_count(cores)


_SETTINGS = _ProcessSettings()
