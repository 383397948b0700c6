"""Workers whose snapshots are not written before the test says so: storage as slow as needed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.runtime.running import WAIT_S, Run

from headgate import fault_points
from headgate.runtime.checkpoints.snapshot_writer import SnapshotWriter

LOOK_S = 0.005


@dataclass(frozen=True)
class HeldWrites:
    """Prepares a worker: what it writes for ``checkpoint`` waits for ``gate``, a file, behind prepared output.

    Attributes:
        index: of the subtasks that wait; None: all.
    """

    gate: Path
    checkpoint: int = 1
    index: int | None = None

    def __call__(self) -> None:
        write, held = SnapshotWriter._write_state, self

        def waiting(self: Any, job: Any, *how: Any) -> Any:
            if job.checkpoint == held.checkpoint and held.index in (None, self._subtask.index):
                while not held.gate.exists() and not self._stop.wait(LOOK_S):
                    pass
            return write(self, job, *how)

        SnapshotWriter._write_state = waiting  # type: ignore[method-assign]  # this process is a worker of one test


@dataclass(frozen=True)
class DyingInARow:
    """Prepares a worker: in each of so many generations in a row, one worker dies when it gets to ``point``."""

    root: Path
    point: str
    times: int

    def __call__(self) -> None:
        so_far = len(self.deaths())  # all workers of a generation are here before any of them can get there
        if so_far < self.times:
            os.environ[fault_points.VARIABLE] = f"{self.point}:1:{self.root}/death-{so_far}"

    def deaths(self) -> list[Path]:
        return sorted(self.root.glob("death-*"))


def under_way(run: Run) -> tuple[int, ...]:
    """Return the checkpoints that are neither completed nor given up."""
    live = run.driver.supervision.live
    return () if live is None else tuple(int(c) for c in live.coordination.machine.pending)


def awaited(run: Run, checkpoint: int) -> set[int]:
    """Return the indexes of the subtasks that have not acknowledged a checkpoint under way."""
    assert run.driver.supervision.live is not None
    return {s.index for s in run.driver.supervision.live.coordination.machine.missing(checkpoint)}  # type: ignore[arg-type]


def until(run: Run, condition: Callable[[], bool], what: str) -> None:
    """Look again and again: nobody tells a test what coordinators think."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: never; {under_way(run)}; {run.restarts}; {run.notes[-5:]}"
        time.sleep(LOOK_S)
