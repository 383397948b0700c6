"""The workers of a generation (rules G3, G4), and the Spark job with a task for each (G5, G11, G12).

Parts of the ``Supervisor``. An attempt of the job serves at most one generation. One job at a time: two submissions
would fight for the same slots. Never decides when a generation begins or ends.
"""

from __future__ import annotations

from headgate.model.ids import WorkerIndex
from headgate.protocol.supervision.supervisor_events import (
    ArmTimer,
    AttemptId,
    CancelJob,
    Effect,
    JobEndTimer,
    RegisterTimer,
    SubmitJob,
)


class WorkerRegistry:
    """The workers of the newest attempt, and of the one that serves the generation."""

    def __init__(self, workers_count: int) -> None:
        assert workers_count >= 1, "a pipeline has workers"
        self._workers_count = workers_count
        self._newest = AttemptId(0, 0)
        self._deployed = AttemptId(0, -1)
        """The attempt that serves the generation. Spark's retry may register before its loss is seen (G4)."""
        self._fenced = AttemptId(0, -1)
        """Newest attempt with workers that served a generation: they never serve another one (G4)."""
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
        assert self.is_complete, "a generation gets all its workers (G3)"
        assert self._newest > self._deployed, "an attempt serves one generation at most (G4)"
        self._ready = set()
        self._deployed = self._newest
        return self._deployed

    def ready(self, worker: WorkerIndex) -> bool:
        """``worker`` is ready. Return whether all are."""
        self._ready.add(worker)
        return len(self._ready) >= self._workers_count

    def retire_deployed(self) -> None:
        """End the generation: its workers serve no other (G4)."""
        self._fenced = max(self._fenced, self._deployed)
        if self._newest <= self._fenced:  # else they belong to the stage's retry, which may serve the next one
            self._registered = set()

    def retire_all(self) -> list[WorkerIndex]:
        """Retire every worker of the attempt; return those that were registered."""
        self._fenced = max(self._fenced, self._newest)
        waiting, self._registered = sorted(self._registered), set()
        return waiting

    def check(self, *, is_serving: bool) -> None:
        """Check what always holds."""
        assert len(self._registered) <= self._workers_count, "no more workers than slots are registered (G3)"
        assert not is_serving or self._deployed > self._fenced, "workers of a used-up attempt never run again (G4)"


class SparkJob:
    """The last submission, as far as it is known to run."""

    REGISTER_TIMEOUT_MS = 120_000
    """A cluster may have to start executors first; an endless wait would be a silent hang (G12, I5)."""

    CANCELS_MAX = 3
    """Times that Spark is asked in vain to end the job before the run ends without it."""

    END_TIMEOUT_MS = 10_000
    """Spark kills a lingering Python worker after 2 s; five times that is a hang."""

    def __init__(self) -> None:
        self._submission = 0
        self._is_running = False
        self._cancels_count = 0

    @property
    def submission(self) -> int:
        """The number of the last one; 0: none."""
        return self._submission

    @property
    def is_running(self) -> bool:
        """Whether it has been submitted and has not ended."""
        return self._is_running

    @property
    def is_deaf(self) -> bool:
        """Whether Spark was asked in vain often enough: what hangs must not hang the run (I5)."""
        return self._cancels_count > self.CANCELS_MAX

    def is_newest(self, submission: int) -> bool:
        """Whether ``submission`` is the last one."""
        return submission == self._submission

    def want_workers(self) -> list[Effect]:
        """Submit unless Spark itself is still retrying the stage of the last submission (G5)."""
        if self._is_running:  # the register timer starts again: the one of the first attempt may be about to fire
            return [self._end_timer(), self._register_timer()]
        self._submission += 1
        self._is_running = True
        return [SubmitJob(self._submission), self._register_timer()]

    def let_go(self, *, is_killed: bool) -> list[Effect]:
        """The run is over: wait for the job's end, which comes by itself unless the workers must be killed (G11)."""
        self._cancels_count = 0
        cancel: list[Effect] = [CancelJob(self._submission)] if is_killed else []
        return [*cancel, self._end_timer()]

    def cancel_again(self) -> list[Effect]:
        """It neither ended nor came back (G12)."""
        self._cancels_count += 1
        return [CancelJob(self._submission), self._end_timer()]

    def ended(self) -> None:
        """Spark is done with it."""
        self._is_running = False

    def _register_timer(self) -> ArmTimer:
        return ArmTimer(RegisterTimer(self._submission), self.REGISTER_TIMEOUT_MS)

    def _end_timer(self) -> ArmTimer:
        return ArmTimer(JobEndTimer(self._submission), self.END_TIMEOUT_MS)
