"""Spark as far as a barrier stage is concerned: attempts, stage retries, kills that take a while, job ends.

A stage fails as a whole: when one task fails, Spark kills the others, but a killed worker may linger. Then Spark
itself retries the stage, up to ``stage_attempts`` attempts, or the job fails.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headgate.protocol.supervision.supervisor import AttemptId
from headgate.sim.faults import Fault
from headgate.sim.marks import Mark
from headgate.sim.worker import Worker

if TYPE_CHECKING:
    from headgate.sim.driver import Driver
    from headgate.sim.env import Env


@dataclass(slots=True)
class Job:
    """One submitted job."""

    submission: int
    attempt: int = 0
    workers: list[Worker] = field(default_factory=list)
    returned: set[int] = field(default_factory=set)
    is_failing: bool = False
    is_cancelled: bool = False
    is_over: bool = False


class SparkApp:
    """The Spark application of one driver."""

    def __init__(self, env: Env, driver: Driver) -> None:
        self._env = env
        self._driver = driver
        self._jobs: dict[int, Job] = {}
        self._is_stopped = False

    @property
    def workers(self) -> list[Worker]:
        """All workers ever started that live."""
        return [w for w in self._all if w.is_alive]

    @property
    def _all(self) -> list[Worker]:
        return [w for job in self._jobs.values() for w in job.workers]

    def submit(self, submission: int) -> None:
        """Start the tasks of a job."""
        job = Job(submission)
        self._jobs[submission] = job
        self._env.world.at(self._env.faults.delay_ms(20), self._start_attempt, job)

    def _start_attempt(self, job: Job) -> None:
        if self._is_stopped or job.is_over or job.is_cancelled:
            return
        job.is_failing = False
        job.returned.clear()
        attempt = AttemptId(job.submission, job.attempt)
        for index in range(self._driver.plan.parallelism):
            worker = Worker(self._env, self._driver, attempt, index)
            job.workers.append(worker)
            worker.post(self._env.faults.delay_ms(10), worker.start)

    def on_task_ended(self, worker: Worker, is_success: bool) -> None:
        """A worker's process is gone."""
        job = self._jobs[worker.attempt.submission]
        if job.is_over or job.is_failing or worker.attempt.attempt != job.attempt:
            return
        if is_success:
            job.returned.add(worker.index)
            if len(job.returned) == self._driver.plan.parallelism:
                self._end(job, None)
            return
        job.is_failing = True
        self._kill(job)
        is_retried = job.attempt + 1 < self._env.options.stage_attempts and not job.is_cancelled
        if is_retried:
            self._env.marks.reach(Mark.STAGE_RETRY)
            self._env.world.tell("spark", f"retries stage of job {job.submission} of {self._driver.name}")
            job.attempt += 1
            self._env.world.at(self._env.faults.delay_ms(30), self._start_attempt, job)
        else:
            self._env.world.at(self._env.rng.randint(0, 30), self._end, job, "a task failed")

    def cancel(self, submission: int) -> None:
        """Kill the tasks of a job."""
        job = self._jobs.get(submission)
        if job is None or job.is_over:
            return
        job.is_cancelled = job.is_failing = True
        self._kill(job)
        self._env.world.at(self._env.rng.randint(0, 30), self._end, job, "cancelled")

    def _kill(self, job: Job) -> None:
        for worker in job.workers:
            if worker.is_alive:
                is_slow = self._env.faults.strikes(Fault.LINGER)
                delay = self._env.rng.randint(0, 3_000 if is_slow else 60)
                self._env.world.at(delay, worker.kill, "killed by Spark")

    def _end(self, job: Job, error: str | None) -> None:
        if not job.is_over:
            job.is_over = True
            self._driver.post(self._env.rng.randint(0, 10), self._driver.on_job_ended, job.submission, error)

    def stop(self) -> None:
        """The driver is gone: its application ends, and its workers with it."""
        self._is_stopped = True
        for job in self._jobs.values():
            job.is_over = True
            self._kill(job)
