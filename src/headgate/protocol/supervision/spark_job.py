"""The Spark job whose tasks are the workers: when it is submitted, and how long its end is awaited (G5, G11, G12).

Part of the ``Supervisor``. One job at a time: two submissions would fight for the same slots. Never decides whether
workers are wanted.
"""

from __future__ import annotations

from headgate.protocol.supervision.events import (
    ArmTimer,
    CancelJob,
    Effect,
    JobEndTimer,
    RegisterTimer,
    SubmitJob,
)


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
        if self._is_running:  # the register timer starts anew: the one of the first attempt may be about to fire
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
