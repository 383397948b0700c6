"""The asynchronous part of snapshots, as ``checkpoints.uploads`` does it: one write after another (X7), in small steps.

A step either prepares one sealed transaction, or writes the snapshot, or reports it; crashes, pauses and cancels
come in between. A write that fails or is cancelled leaves its sealed output to the next one (C17).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headgate.errors import FencedError, StorageError
from headgate.model.ids import CheckpointId
from headgate.model.manifest import Committable, StateHandle
from headgate.protocol.subtasks.subtask import SnapshotFailed, SnapshotWritten
from headgate.sim.faults import Fault
from headgate.sim.marks import Mark
from headgate.sim.storemodel import Transaction, payload_of

if TYPE_CHECKING:
    from headgate.sim.subtaskhost import SubtaskHost


@dataclass(slots=True)
class Job:
    """One snapshot to write."""

    checkpoint: CheckpointId
    data: bytes
    sealed: list[Transaction]
    is_cancelled: bool = False


class Uploads:
    """The writes of one subtask."""

    STEP_MS = 8
    """Most time one step usually takes."""

    def __init__(self, host: SubtaskHost) -> None:
        self._host = host
        self._env = host.worker.env
        self._jobs: deque[Job] = deque()
        self._unprepared: deque[tuple[CheckpointId, Transaction]] = deque()
        self._prepared: list[Committable] = []

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being written."""
        return not self._jobs

    def start(self, job: Job) -> None:
        """Queue ``job``; its sealed transactions wait behind those of earlier jobs."""
        self.keep(job.checkpoint, job.sealed)
        self._jobs.append(job)
        if len(self._jobs) == 1:
            self._later(self._step)

    def keep(self, checkpoint: CheckpointId, sealed: list[Transaction]) -> None:
        """Leave what was sealed for a snapshot that is not written to the next write, in order of checkpoints (C17)."""
        waiting = [*self._unprepared, *((checkpoint, transaction) for transaction in sealed)]
        self._unprepared = deque(sorted(waiting, key=lambda waits: waits[0]))

    def cancel(self, checkpoint: CheckpointId) -> None:
        """Stop the write of ``checkpoint`` at its next step."""
        for job in self._jobs:
            if job.checkpoint == checkpoint:
                job.is_cancelled = True
                self._env.marks.reach(Mark.WRITE_CANCELLED)

    def _later(self, call: object, *args: object) -> None:
        self._host.worker.post(self._env.faults.delay_ms(self.STEP_MS), call, *args)  # type: ignore[arg-type]

    def _step(self) -> None:
        job = self._jobs[0]
        if job.is_cancelled:
            self._next()
            return
        self._env.faults.crash_point(self._host.worker, Fault.WORKER_CRASH)
        try:
            if self._unprepared and self._unprepared[0][0] <= job.checkpoint:
                self._prepare(*self._unprepared[0])
                self._later(self._step)
            else:
                handle = self._write(job)
                self._later(self._report, job, handle)
        except StorageError as error:
            self._host.worker.tell(f"{self._host.subtask} snapshot {job.checkpoint} failed: {error}")
            self._next()
            self._host.handle(SnapshotFailed(job.checkpoint))
        except FencedError as error:
            self._env.marks.reach(Mark.PREPARE_REFUSED_FENCED)
            self._host.worker.leave(str(error))

    def _prepare(self, checkpoint: CheckpointId, transaction: Transaction) -> None:
        faults = self._env.faults
        if faults.strikes(Fault.PREPARE_FAILS):
            raise StorageError("prepare", str(transaction.id), "injected before effect")
        self._env.store.prepare(transaction, checkpoint)
        if faults.strikes(Fault.PREPARE_FAILS_AFTER):
            raise StorageError("prepare", str(transaction.id), "injected after effect")
        self._unprepared.popleft()
        who = transaction.id
        committable = Committable(who.sink, checkpoint, who.subtask_index, who.generation, payload_of(who))
        self._prepared.append(committable)

    def _write(self, job: Job) -> StateHandle:
        host = self._host
        limit = self._env.options.checkpoints.inline_bytes_max
        return self._env.disk.write_snapshot(host.subtask, job.checkpoint, host.worker.generation, job.data, limit)

    def _report(self, job: Job, handle: StateHandle) -> None:
        self._env.faults.crash_point(self._host.worker, Fault.WORKER_CRASH)
        committables, self._prepared = tuple(self._prepared), []
        if job.is_cancelled:
            self._env.marks.reach(Mark.WRITTEN_AFTER_ABORT)
        self._next()
        self._host.handle(SnapshotWritten(job.checkpoint, handle, committables))

    def _next(self) -> None:
        self._jobs.popleft()
        if self._jobs:
            self._later(self._step)
