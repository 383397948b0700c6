"""Which workers are there, and which attempt of the Spark job they belong to (rules G3, G4).

Part of the ``Supervisor``. An attempt serves at most one generation. Never decides when a generation begins or ends.
"""

from __future__ import annotations

from headgate.model.ids import WorkerIndex
from headgate.protocol.supervision.events import AttemptId


class Roster:
    """The workers of the newest attempt, and of the one that serves the generation."""

    def __init__(self, workers_count: int) -> None:
        assert workers_count >= 1
        self._workers_count = workers_count
        self._newest = AttemptId(0, 0)
        self._deployed = AttemptId(0, -1)
        """The attempt that serves the generation. Spark's retry may register before its loss is seen (G4)."""
        self._fenced = AttemptId(0, -1)
        """Newest attempt whose workers were used up by a generation: they never serve another one (G4)."""
        self._registered: set[WorkerIndex] = set()
        self._ready: set[WorkerIndex] = set()

    @property
    def newest(self) -> AttemptId:
        """The newest attempt that a worker has registered of."""
        return self._newest

    @property
    def count(self) -> int:
        """How many workers of the newest attempt are registered, and not used up."""
        return len(self._registered)

    @property
    def is_complete(self) -> bool:
        """Whether all workers of one attempt have registered (G3)."""
        return self.count >= self._workers_count

    @property
    def workers_count(self) -> int:
        """How many are wanted."""
        return self._workers_count

    def is_member(self, worker: WorkerIndex) -> bool:
        """Whether there is such a worker."""
        return worker < self._workers_count

    def is_current(self, attempt: AttemptId) -> bool:
        """Whether ``attempt`` serves the generation, or is the newest and not used up (G4)."""
        return attempt > self._fenced and attempt in (self._newest, self._deployed)

    def is_deployed(self, attempt: AttemptId) -> bool:
        """Whether ``attempt`` was the last to be given a generation."""
        return attempt == self._deployed

    def has_come_up(self, submission: int) -> bool:
        """Whether any worker of ``submission`` has registered."""
        return self._newest.submission >= submission

    def is_used_up(self, submission: int) -> bool:
        """Whether the workers that ``submission`` brought have served a generation that is over (G4)."""
        return self._newest <= self._fenced and self._newest.submission == submission

    def admit(self, attempt: AttemptId, worker: WorkerIndex) -> bool:
        """Register ``worker``; False: its attempt is used up, or not the newest (G4)."""
        if attempt <= self._fenced or attempt < self._newest:
            return False
        if attempt > self._newest:  # Spark retried the stage, or a new submission came up
            self._newest = attempt
            self._registered = set()
        self._registered.add(worker)
        return True

    def leave(self, attempt: AttemptId, worker: WorkerIndex) -> bool:
        """A worker is gone. Return whether it was of the newest attempt."""
        is_newest = attempt == self._newest
        if is_newest:
            self._registered.discard(worker)
        return is_newest

    def deploy(self) -> AttemptId:
        """Give the generation to the newest attempt; return that."""
        self._ready = set()
        self._deployed = self._newest
        return self._deployed

    def ready(self, worker: WorkerIndex) -> bool:
        """``worker`` is ready. Return whether all are."""
        self._ready.add(worker)
        return len(self._ready) >= self._workers_count

    def retire_deployed(self) -> None:
        """The generation is over: whoever served it serves no other (G4)."""
        self._fenced = max(self._fenced, self._deployed)
        if self._newest <= self._fenced:  # else they belong to the stage's retry, which may serve the next one
            self._registered = set()

    def retire_all(self) -> list[WorkerIndex]:
        """Nobody who is here serves any more; return who was registered."""
        self._fenced = max(self._fenced, self._newest)
        waiting, self._registered = sorted(self._registered), set()
        return waiting

    def check(self, *, is_serving: bool) -> None:
        """Check what always holds."""
        assert len(self._registered) <= self._workers_count
        assert not is_serving or self._deployed > self._fenced, "workers of a used-up attempt never run again (G4)"
