"""Spark as the driver sees it.

Barrier stages with tasks that are simulated processes that run ``runtime.worker.worker``.

Models what decides something: a stage fails as a whole, may be retried under the same submission, its other tasks
linger until Spark's kill reaches them, and everything goes when the driver is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field

from headgate.dataclass import dataclass
from headgate.model.failure import Failure, FailureKind
from headgate.model.ids import WorkerIndex
from headgate.model.plan import PipelineDefinition
from headgate.runtime.wire.spill import SpillBudget
from headgate.runtime.worker.worker import Worker, WorkerStopped, WorkerTask
from headgate.sim.machine.surroundings import HOST, Network, SimSurroundings
from headgate.sim.machine.tasks import SimProcess
from headgate.sim.machine.world import Fault, Faults

FINGERPRINT = "simulated"
LINGER_MS = 2_500
IDLE_MS = 5_000
"""So long a process is kept for other tasks when its own has succeeded. Then nothing of that one is left (I6)."""
TASK_FAILED = 1


@dataclass
class Stage:
    """One submission."""

    address: tuple[str, int]
    secret: bytes
    ended: Callable[[Failure | None], None]
    attempts_left: int
    running: dict[int, SimProcess] = field(default_factory=dict)
    returned: int = 0
    error: str | None = None
    is_over: bool = False
    is_cancelled: bool = False


class SimSpark:
    """The Spark application of one driver (``runtime.driver.supervisor_host.Launcher``)."""

    def __init__(
        self,
        driver: SimProcess,
        network: Network,
        faults: Faults,
        attempts: int,
        surroundings: Callable[[SimProcess], SimSurroundings],
        on_idle: Callable[[SimProcess, SpillBudget], None],
    ) -> None:
        """``on_idle`` may look at a process some time after its task has succeeded."""
        self._surroundings = surroundings
        self._on_idle = on_idle
        self.idle: list[SimProcess] = []
        self._driver = driver
        self.definition: PipelineDefinition
        self._network = network
        self._faults = faults
        self._attempts = attempts
        self._stages: dict[int, Stage] = {}
        self._tasks_started = 0
        driver.closers.append(self._application_ends)

    @property
    def workers(self) -> list[SimProcess]:
        """The tasks that run now."""
        return [process for stage in self._stages.values() for process in stage.running.values()]

    def submit(
        self, submission: int, address: tuple[str, int], secret: bytes, ended: Callable[[Failure | None], None]
    ) -> None:
        stage = Stage(address, secret, ended, self._attempts)
        self._stages[submission] = stage
        self._at(self._faults.delay_ms(60), lambda: self._start(submission, stage))

    def cancel(self, submission: int) -> None:
        stage = self._stages[submission]
        stage.is_cancelled = True
        stage.error = stage.error or "cancelled"
        self._kill_rest(stage)
        self._settle(submission, stage)

    def _start(self, submission: int, stage: Stage) -> None:
        if stage.is_cancelled or not self._driver.is_alive:
            self._settle(submission, stage)
            return
        stage.attempts_left -= 1
        stage.returned, stage.error = 0, None
        host, port = stage.address
        for index in range(self.definition.plan.parallelism):
            self._tasks_started += 1
            task = WorkerTask(
                self.definition,
                WorkerIndex(index),
                submission,
                self._tasks_started,
                host,
                port,
                stage.secret,
                HOST,
                FINGERPRINT,
            )
            self._launch(submission, stage, task)

    def _launch(self, submission: int, stage: Stage, task: WorkerTask) -> None:
        tasks = self._network.tasks
        name = f"{self._driver.name}.w{task.worker}.{task.task_attempt}"
        process = SimProcess(tasks, name, lambda code: self._gone(submission, stage, task.task_attempt, code))
        stage.running[task.task_attempt] = process

        def main() -> None:
            worker = Worker(task, self._surroundings(process))
            try:
                worker.run()
            except WorkerStopped as stopped:
                tasks.world.tell(process.name, f"stopped: {stopped}")
                process.end(TASK_FAILED)
            self.idle.append(process)
            self._gone(submission, stage, task.task_attempt, 0)
            tasks.park(IDLE_MS)
            self._on_idle(process, worker.loop_budget)
            self.idle.remove(process)
            process.end(0)

        def begin() -> None:
            if process.is_alive:
                tasks.spawn(process, main, "main")

        self._at(self._faults.delay_ms(40), begin)

    def _gone(self, submission: int, stage: Stage, number: int, code: int) -> None:
        if stage.running.pop(number, None) is None:
            return  # its task has succeeded
        if code == 0:
            stage.returned += 1
        elif stage.error is None:
            stage.error = f"a task ended with code {code}"
            self._kill_rest(stage)
        self._settle(submission, stage)

    def _kill_rest(self, stage: Stage) -> None:
        for process in list(stage.running.values()):
            linger_ms = LINGER_MS if self._faults.strikes(Fault.LINGER) else 30
            self._at(self._network.tasks.world.random.randint(0, linger_ms), process.kill)

    def _settle(self, submission: int, stage: Stage) -> None:
        """When all tasks of an attempt are gone: retry the stage, or report its end, once."""
        if stage.is_over or stage.running:
            return
        if stage.error is not None and stage.attempts_left > 0 and not stage.is_cancelled:
            self._at(self._faults.delay_ms(40), lambda: self._start(submission, stage))
            return
        stage.is_over = True
        if self._driver.is_alive:
            failure = None if stage.error is None else Failure(FailureKind.LOST, stage.error)
            self._network.tasks.spawn(self._driver, lambda: stage.ended(failure), f"job-{submission}")

    def _application_ends(self) -> None:
        """The driver is gone, and with it the application: its tasks are killed, sooner or later."""
        for stage in self._stages.values():
            stage.is_cancelled = True
            self._kill_rest(stage)

    def _at(self, delay_ms: int, call: Callable[[], None]) -> None:
        self._network.tasks.world.at(delay_ms, call)
