"""Checkpoints at an interval, asked for one by one in a pipeline that takes none by itself.

So one start of a pipeline serves every interval, and the run without checkpoints that they are compared with is the
same pipeline in the time in which nobody asks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType

from bench.harness import CpuMeter, median
from bench.running import rates, reports_after
from headgate.model.ids import CheckpointId
from headgate.model.progress import CheckpointOutcome
from headgate.spark.session import SparkHandle

SETTLE_S = 1.0
"""Between two windows, with the checkpoints of the next one: what the one before left has been processed."""

ANSWER_TIMEOUT_S = 60.0

Ask = Callable[[], Future[CheckpointOutcome]]


@dataclass(frozen=True, slots=True)
class Window:
    """What was measured while checkpoints were asked for at one interval, or were not."""

    events_per_s: float
    events_per_cpu_s: float
    """Of the whole tree of processes, driver and JVM included."""
    wanted: int
    """Asked for in the window; they may be completed behind its end."""
    completed: int
    """Fewer than ``wanted`` where a checkpoint took longer than the interval: one serves everybody who waits."""
    checkpoint_ms: float
    """Median duration, 0 without checkpoints."""


def measure(
    handle: SparkHandle,
    node: str,
    seconds: float,
    interval_ms: int | None,
    on_begin: Callable[[], object] = lambda: None,
) -> Window:
    """Return what ``node`` let out in ``seconds`` with checkpoints at ``interval_ms``, or without (None).

    ``on_begin`` is called when what was before is over.
    """
    with Pace(handle.driver.take_checkpoint, interval_ms) as pace:
        handle.wait(SETTLE_S)
        before = reports_after(handle, handle.driver.run_progress.reports())
        pace.begin()
        on_begin()
        meter = CpuMeter()
        handle.wait(seconds)
        after = reports_after(handle, handle.driver.run_progress.reports())
        cpu_s, wall_s = meter.cpu_seconds(), meter.seconds()
    wanted, completed = pace.counted()
    if handle.progress.restarts:
        raise RuntimeError("the pipeline restarted meanwhile; its rate says nothing")
    rate = sum(rates(node, before, after).values())
    took_ms = [float(c.duration_ms) for c in handle.checkpoints() if c.checkpoint in completed]
    return Window(rate, rate * wall_s / cpu_s, wanted, len(completed), median(took_ms) if took_ms else 0.0)


class Pace:
    """Asks at an interval, in a thread of its own, as long as the block lasts; then waits for the answers."""

    def __init__(self, ask: Ask, interval_ms: int | None) -> None:
        """``interval_ms`` None: asks for nothing."""
        self._ask = ask
        self._interval_s = None if interval_ms is None else interval_ms / 1_000
        self._stop = threading.Event()
        self._asked: list[Future[CheckpointOutcome]] = []
        self._counted_from = 0
        self._thread = threading.Thread(target=self._run, name="bench-pace", daemon=True)

    def __enter__(self) -> Pace:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        for asked in self._asked:
            asked.result(ANSWER_TIMEOUT_S)

    def begin(self) -> None:
        """Count from now on."""
        self._counted_from = len(self._asked)

    def counted(self) -> tuple[int, set[CheckpointId]]:
        """Return how many were asked for since ``begin``, and which were completed for that until now.

        Raises:
            RuntimeError: one was given up.
        """
        counted = self._asked[self._counted_from :]
        done = [asked.result() for asked in counted if asked.done()]
        failed = [outcome.reason for outcome in done if outcome.checkpoint is None]
        if failed:
            raise RuntimeError(f"a checkpoint was given up: {failed[0]}")
        return len(counted), {outcome.checkpoint for outcome in done if outcome.checkpoint is not None}

    def _run(self) -> None:
        if self._interval_s is None:
            return
        due_s = time.monotonic() + self._interval_s / 2  # the first and the last are inside
        while not self._stop.wait(max(due_s - time.monotonic(), 0.0)):
            self._asked.append(self._ask())
            due_s += self._interval_s
