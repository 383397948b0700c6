"""Which registrations belong to the same attempt of the Spark stage.

PySpark tells a task its own attempt id (rising within the application) but not the stage's attempt number. The tasks
of one barrier stage attempt are started together, so their ids are neighbours; a worker that registers again, or
after a member was lost, opens the next attempt. A wrong guess costs a restart, never correctness: generations fence.
"""

from __future__ import annotations

from headgate.model.ids import WorkerIndex
from headgate.protocol.supervision.events import AttemptId


class Attempts:
    """Numbers the attempts of the newest submission."""

    def __init__(self, workers_count: int) -> None:
        self._workers_count = workers_count
        self._current = AttemptId(0, 0)
        self._members: dict[WorkerIndex, int] = {}
        self._is_broken = False

    def register(self, submission: int, worker: WorkerIndex, task_attempt: int) -> list[tuple[AttemptId, WorkerIndex]]:
        """Return the attempt that ``worker`` belongs to, with members carried over into it first (usually none)."""
        if submission < self._current.submission:
            return [(AttemptId(submission, 0), worker)]
        carried: list[WorkerIndex] = []
        if submission > self._current.submission:
            self._open(AttemptId(submission, 0), {})
        elif worker in self._members or self._is_broken:
            if self._members and task_attempt < min(self._members.values()):
                return [(AttemptId(submission, -1), worker)]  # a task of an earlier attempt, late
            near = {} if self._is_broken else self._neighbours(worker, task_attempt)
            self._open(AttemptId(submission, self._current.attempt + 1), near)
            carried = sorted(near)
        self._members[worker] = task_attempt
        return [*((self._current, member) for member in carried), (self._current, worker)]

    def lost(self, attempt: AttemptId) -> None:
        """A member of ``attempt`` is gone: whoever registers next belongs to another one."""
        if attempt == self._current:
            self._is_broken = True

    def _neighbours(self, worker: WorkerIndex, task_attempt: int) -> dict[WorkerIndex, int]:
        """Return the other members that were started together with ``task_attempt``."""
        return {
            member: other
            for member, other in self._members.items()
            if member != worker and abs(task_attempt - other) < self._workers_count
        }

    def _open(self, attempt: AttemptId, members: dict[WorkerIndex, int]) -> None:
        self._current = attempt
        self._members = members
        self._is_broken = False
