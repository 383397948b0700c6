"""Runs a pipeline in this process, without Spark: for users' tests.

Driver, workers, checkpoints and connections are the product's own; workers are threads (``testing.worker_threads``).
Rules: docs/spec/in-process.md. Counterpart: ``spark.session``.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypedDict, Unpack

import pyarrow as pa

from headgate.display.text import counted
from headgate.errors import UsageError
from headgate.model.config import ExponentialDelay, FixedDelay, RestartStrategy
from headgate.model.definition import PipelineDefinition
from headgate.model.ids import CheckpointId
from headgate.model.progress import Observer, PipelineHandle, Progress, RunResult
from headgate.runtime.driver.driver import Driver
from headgate.runtime.driver.handle import DriverHandle
from headgate.testing.worker_threads import FINGERPRINT, ThreadLauncher
from headgate.threads import DaemonThread

SILENCE_MS_MAX = 60_000
"""A thread dies with its process, so silence says only that the machine is busy."""

LEAVE_S = 5.0
"""How long a worker may take to leave before it counts as stuck."""

RESTART_DELAY_MS_MAX = 10
"""A delay gives what failed time to recover; in one process there is nothing to wait for (TR9)."""

Kills: TypeAlias = int | Sequence[int] | None
"""Behind which completed checkpoints of a run, counted from 1, a worker is lost (TR10)."""


class Begins(TypedDict, total=False):
    """How a run begins: the options of ``Pipeline.start`` for that."""

    restore: Any
    go_back_behind: int | None
    allow_unclaimed_state: Sequence[str]
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
        go_back_behind: int | None = None,
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
    **begins: Unpack[Begins],
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
        begins: ``restore``, ``go_back_behind``, ``allow_unclaimed_state``, ``moved``, ``fresh``: as for
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
        handle.refuse_unharmed()
    return result


@contextmanager
def running(
    pipeline: Startable,
    *,
    parallelism: int | None = None,
    checkpoint_dir: str | Path | None = None,
    observer: Observer | None = None,
    kill_worker_after_checkpoint: Kills = None,
    **begins: Unpack[Begins],
) -> Iterator[PipelineHandle]:  # TR8
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
        """Cancel what still runs, and wait; return where workers are that did not leave (TR6)."""
        stuck = []
        if not self.driver.result.done():
            self.driver.cancel(retain=True)
            wait([self.driver.result], LEAVE_S)
            stuck = self._launcher.give_up()
            wait([self.driver.result], LEAVE_S)
        return [*stuck, *self._joined(has_left=not stuck)]

    def time_is_up(self, timeout_s: float) -> str:
        """End; return a sentence that says how far it had come."""
        state, count = self.progress.state.value, len(self.driver.book.checkpoints)
        restarts = self._watcher.restarts
        restarted = f" and {counted(len(restarts), 'restart')}, the last because {restarts[-1]}" if restarts else ""
        stuck = self.end()
        hang = f"; a function did not return, and cannot be stopped: {' and '.join(stuck)}" if stuck else ""
        return (
            f"pipeline '{self._name}' had not ended after {timeout_s:g} s: it was {state}, with "
            f"{counted(count, 'completed checkpoint')}"
            f"{restarted}{hang}; give it bounded input or a longer timeout_s="
        )

    def refuse_unharmed(self) -> None:
        """Refuse a run that should have lost a worker and did not: a test of that would prove nothing (TR7).

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
    """Stands before the user's observer; loses a worker when it is time (TR7)."""

    def __init__(self, watcher: Observer, kill: Callable[[], None], kills: tuple[int, ...]) -> None:
        self._watcher = watcher
        self._kill = kill
        self._kills = kills
        self.checkpoints_count = 0
        self.restarts: list[str] = []

    @property
    def missed(self) -> int | None:
        """The last checkpoint behind which a worker was to be lost, if the run has not come so far."""
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
        made: list[InProcessHandle] = []  # also where an interrupt keeps start_with from returning (ND6)

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
    driver = Driver(definition, launcher, watching, FINGERPRINT)  # TR1
    return InProcessHandle(driver, launcher, watching, definition.config.name)


def _soon(restart: RestartStrategy) -> RestartStrategy:
    """Return ``restart`` with short delays (TR9); those of a failure rate have a say in when it gives up."""
    match restart:
        case FixedDelay():
            return replace(restart, delay_ms=min(restart.delay_ms, RESTART_DELAY_MS_MAX))
        case ExponentialDelay():
            initial, longest = min(restart.initial_ms, RESTART_DELAY_MS_MAX), min(restart.max_ms, RESTART_DELAY_MS_MAX)
            return replace(restart, initial_ms=initial, max_ms=longest)
    return restart


class _ProcessSettings:
    """What workers set for their process, which is somebody else's here, and runs in several threads at once (TR5)."""

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
