"""Runs a pipeline with the real driver and workers in child processes, and lets a test watch and break it."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import psutil
from tests.runtime.holding import held
from tests.runtime.launching import FINGERPRINT, LEAKED, ProcessLauncher, Zygote, is_server_port, kill

import headgate as hg
from headgate.model.plan import PipelineDefinition
from headgate.model.progress import Progress, RunResult
from headgate.runtime.driver.driver import Driver
from headgate.runtime.wire.control import Loss

WAIT_S = 300.0
SILENCE_MS_MAX = 60_000
"""Longer than a busy machine keeps a process waiting; who wants silence to be noticed calls ``Run.freeze``."""


class AskedDriver(Driver):
    """A driver that knows whether its test has asked for the end."""

    is_asked_to_end = False

    def stop(self) -> None:
        self.is_asked_to_end = True
        super().stop()

    def drain(self) -> None:
        self.is_asked_to_end = True
        super().drain()

    def cancel(self, *, retain: bool = False) -> None:
        self.is_asked_to_end = True
        super().cancel(retain=retain)


class Run:
    """One driver and its workers. Also the observer: everything it hears is kept and wakes who waits.

    A generator with a rate does not end before ``result`` or ``release`` is called (``holding``); then it hurries.
    """

    def __init__(
        self,
        zygote: Zygote,
        definition: PipelineDefinition,
        *,
        faults: Sequence[Any] = (),
        prepare: Callable[[], None] | None = None,
        stage_attempts: int = 1,
    ) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="headgate-test-")
        self._gate = Path(self._directory.name) / "gate"
        definition = held(definition, self._gate, hurries=True)
        self.notes: list[str] = []
        self.restarts: list[str] = []
        self.checkpoints: list[int] = []
        self._changed = threading.Condition()
        self.launcher = ProcessLauncher(
            zygote, definition, faults=faults, prepare=prepare, stage_attempts=stage_attempts
        )
        self._before = _threads(), _sockets()
        self.driver = AskedDriver(definition, self.launcher, self, FINGERPRINT)
        # Told to leave, a worker of a busy machine takes its time: killed for that, it would not have ended well.
        self.driver.supervision.machine.job.END_TIMEOUT_MS = SILENCE_MS_MAX
        self.driver.result.add_done_callback(lambda _: self._wake())
        self.driver.start()

    # -- the observer ---------------------------------------------------------------------------------------------

    def on_progress(self, progress: Progress) -> None:
        self._wake()

    def on_restart(self, reason: str, delay_ms: int) -> None:
        self.restarts.append(reason)
        self._wake()

    def on_note(self, text: str) -> None:
        self.notes.append(text)
        self._wake()

    def on_checkpoint(self, checkpoint: int, duration_ms: int, size_bytes: int) -> None:
        self.checkpoints.append(checkpoint)
        self._wake()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # -- what tests wait for --------------------------------------------------------------------------------------

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until ``condition`` holds; fail when the run ended or much time passed before."""
        with self._changed:
            reached = self._changed.wait_for(lambda: condition() or self.driver.result.done(), WAIT_S)
        if not condition():
            error = self.driver.result.exception() if self.driver.result.done() else "no end"
            raise AssertionError(
                f"{what}: not reached ({reached}); {error}; {self.restarts}; {self.notes[-5:]}; {self.driver.progress}"
            )

    def wait_checkpoints(self, more: int) -> None:
        """Wait for ``more`` completed checkpoints, counted from now."""
        wanted = len(self.checkpoints) + more
        self.wait(lambda: len(self.checkpoints) >= wanted, f"{more} more checkpoints")

    def wait_restarts(self, count: int) -> None:
        """Wait until the pipeline runs again after ``count`` restarts since its start."""
        running = lambda: len(self.restarts) >= count and self.driver.running_generation is not None  # noqa: E731
        self.wait(running, f"{count} restarts")

    def pids(self) -> dict[int, int]:
        """Return the process of each worker, once all have registered and a generation runs."""
        count = self.launcher._definition.plan.parallelism
        found: dict[int, int] = {}

        def complete() -> bool:
            found.clear()
            alive = self.launcher.alive() - self.launcher.spared
            found.update({w: p for w, p in self.driver.worker_pids().items() if p in alive})
            return len(found) == count and self.driver.running_generation is not None

        self.wait(complete, "all workers run")
        return found

    def kill(self, worker: int, number: int = signal.SIGKILL) -> int:
        """Send a signal to a worker, which runs; return its process id."""
        pid = self.pids()[worker]
        os.kill(pid, number)
        return pid

    def release(self) -> None:
        """Let the input end."""
        self._gate.touch()

    def freeze(self, worker: int) -> int:
        """Stop a worker, which counts as gone but may wake as a zombie; have the driver find it silent at once.

        Returns:
            Its process id.
        """
        pid = self.pids()[worker]
        self.launcher.spared.add(pid)
        _stop_process(pid)
        self._silence(worker)
        return pid

    def suspend(self, worker: int) -> int:
        """Stop a worker without anybody's noticing; return its process id."""
        pid = self.pids()[worker]
        _stop_process(pid)
        return pid

    def drain_and_kill(self, worker: int) -> None:
        """Begin to drain and kill a worker in one step of the driver: at any later moment the drain may be over."""
        pid = self.pids()[worker]

        def begin() -> None:
            self.driver.supervision.drain()
            os.kill(pid, signal.SIGKILL)

        self.driver.is_asked_to_end = True
        self.driver.post(begin)

    def _silence(self, worker: int) -> None:
        connections = [r.connection for r in self.driver.workers.records if r.worker == worker]
        connections[-1].lose(Loss("it was silent for long", is_silent=True))

    def result(self) -> RunResult:
        """Let the input end, unless the pipeline was asked to end before, and wait for the end.

        Raises:
            PipelineFailed, FencedError: that was the end.
        """
        if not self.driver.is_asked_to_end:
            self.release()
        self.wait(self.driver.result.done, "the end")
        self.driver.join()
        return self.driver.result.result()

    # -- after the run --------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End whatever runs; check that nothing is left: processes, threads, ports, files."""
        if not self.driver.result.done():
            self.driver.cancel()
        self.driver.join()
        for pid in self.launcher.alive():
            kill(pid)
        deadline = time.monotonic() + WAIT_S
        while (self.launcher.alive() or any(self._left())) and time.monotonic() < deadline:
            time.sleep(0.01)  # a thread that has done everything may not have had its last turn
        self._directory.cleanup()
        print(f"workers ended with {self.launcher.codes}")  # shown when the test failed
        assert not self.launcher.alive(), "a worker outlived its pipeline"
        assert LEAKED not in self.launcher.codes.values(), "a worker returned with threads or sockets open"
        threads, sockets = self._left()
        assert threads == set(), "the driver left threads"
        assert sockets == set(), "the driver left ports open"

    def _left(self) -> tuple[set[str], set[Any]]:
        return _threads() - self._before[0], _sockets() - self._before[1]


def taken(handle: Any, is_enough: Callable[[], object] = lambda: True) -> None:
    """Take checkpoints of a pipeline in this process, from when it runs until there is enough in one."""
    deadline = time.monotonic() + WAIT_S
    while handle.take_checkpoint().checkpoint is None or not is_enough():
        assert time.monotonic() < deadline, "no checkpoint was completed that has it"
        time.sleep(0.005)


def in_flight(directory: Path, where: str) -> int:
    """Return how many records are in flight in the newest checkpoint."""
    states = hg.state_catalog(directory / "p").filter(pl.col("state").str.starts_with(f"in-flight/{where}"))
    return int(states["rows"].sum())


def _stop_process(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + WAIT_S
    while not _is_stopped(pid):  # until then other threads than the one that got the signal run on
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _is_stopped(pid: int) -> bool:
    try:
        stats = [(path / "stat").read_text() for path in Path(f"/proc/{pid}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):  # a thread ended between the two looks
        return False
    return {stat.rpartition(")")[2].split()[0] for stat in stats} == {"T"}


def _threads() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name.startswith("headgate")}


def _sockets() -> set[Any]:
    return {
        (c.laddr, c.raddr)
        for c in psutil.Process().net_connections("tcp")
        if not (c.raddr and is_server_port(c.raddr.port))
    }


def definition_of(pipeline: hg.Pipeline, *, inline_bytes_max: int | None = None, **runtime: Any) -> PipelineDefinition:
    """Return what the pipeline runs, with limits that the public API does not offer."""
    runtime.setdefault("heartbeat_timeout_ms", SILENCE_MS_MAX)
    found = pipeline.definition()
    checkpoints = found.config.checkpoints
    if inline_bytes_max is not None:
        checkpoints = replace(checkpoints, inline_bytes_max=inline_bytes_max)
    config = replace(found.config, checkpoints=checkpoints, runtime=replace(found.config.runtime, **runtime))
    return replace(found, config=config)


CHECKPOINTING = (
    "retained",
    "min_pause",
    "max_concurrent",
    "tolerable_failures",
    "timeout",
    "alignment_timeout",
    "mode",
    "retain_on_cancel",
    "retain_on_failure",
)
"""Options of ``pipeline_at`` that are about checkpoints."""


def pipeline_at(
    root: Path, *, parallelism: int = 2, interval: str | None = "40ms", name: str = "p", **options: Any
) -> hg.Pipeline:
    """Return an empty pipeline whose checkpoints are below ``root``."""
    checkpointing = {k: options.pop(k) for k in CHECKPOINTING if k in options}
    options.setdefault("restart", hg.FixedDelay(delay="20ms"))
    return hg.Pipeline(
        name,
        parallelism=parallelism,
        checkpointing=hg.Checkpointing(interval=interval, dir=root / "checkpoints", **checkpointing),
        **options,
    )
