"""The workers that have registered with the driver: their stage attempts, messages from them and to them.

Counterpart: ``runtime.worker.worker`` at the other end of the control channel. Connections report in threads of their
own; everything here but ``broadcast`` happens in the driver's event thread. ``protocol.supervision.supervisor``
decides what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headgate.codec import messages
from headgate.dataclass import dataclass
from headgate.model.ids import Generation, WorkerIndex
from headgate.model.plan import PipelineDefinition
from headgate.model.progress import BUSY, Samples, WorkerProgress
from headgate.protocol.supervision import supervisor_events
from headgate.protocol.supervision.supervisor_events import AttemptId
from headgate.runtime.driver.event_loop import Timers
from headgate.runtime.surroundings import PROCESS, Surroundings
from headgate.runtime.wire.control import ControlServer, Loss, WorkerConnection
from headgate.tls import Tls


class StageAttempts:
    """Numbers the attempts of the newest submission."""

    def __init__(self, workers_count: int) -> None:
        self._workers_count = workers_count
        self._current = AttemptId(0, 0)
        self._members: dict[WorkerIndex, int] = {}
        self._is_broken = False

    def register(self, submission: int, worker: WorkerIndex, task_attempt: int) -> list[tuple[AttemptId, WorkerIndex]]:
        """Return the attempt that ``worker`` belongs to, with members carried over into it first (usually none)."""
        if submission < self._current.submission:
            # the supervisor refuses it: a later submission has come up since
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
        """A member of ``attempt`` is gone: the next registration opens another attempt."""
        if attempt == self._current:
            self._is_broken = True

    def _neighbours(self, worker: WorkerIndex, task_attempt: int) -> dict[WorkerIndex, int]:
        """Return the other members that were started together with ``task_attempt``."""
        # Spark numbers tasks in the order in which it starts them: those of one stage attempt are next to each other
        return {
            member: other
            for member, other in self._members.items()
            if member != worker and abs(task_attempt - other) < self._workers_count
        }

    def _open(self, attempt: AttemptId, members: dict[WorkerIndex, int]) -> None:
        assert attempt > self._current, "attempts are numbered upwards"
        self._current = attempt
        self._members = members
        self._is_broken = False


UNEXPLAINED_MAX = 256
"""Lost workers without a known exit, at most those of a few generations."""

LINES_SHOWN = 10
"""Of what a lost worker wrote last."""


@dataclass(slots=True)
class WorkerRecord:
    """A worker that has registered."""

    attempt: AttemptId
    worker: WorkerIndex
    connection: WorkerConnection
    address: messages.Address
    pid: int
    is_dismissed: bool = False
    """It was sent away, or has reported its failure: the exit of its process needs no explanation."""


class Workers:
    """All registered workers that are not lost."""

    def __init__(
        self,
        definition: PipelineDefinition,
        fingerprint: str,
        timers: Timers,
        on_event: Callable[[supervisor_events.Event], None],
        on_report: Callable[[WorkerIndex, messages.FromWorker], None],
        on_note: Callable[[str], None],
        *,
        host: str = "127.0.0.1",
        around: Surroundings = PROCESS,
    ) -> None:
        """Begin to listen; ``host`` is the address on which workers can reach this process.

        ``on_event`` gets what the supervisor must know, ``on_report`` the other messages of registered workers,
        ``on_note`` a sentence for the user.
        """
        config = definition.config
        self._fingerprint = fingerprint
        self._timers = timers
        self._on_event = on_event
        self._on_report = on_report
        self._on_note = on_note
        self._unexplained: dict[tuple[str, int], WorkerIndex] = {}
        self._around = around
        self._records: dict[WorkerConnection, WorkerRecord] = {}
        self._attempts = StageAttempts(definition.plan.parallelism)
        self.secret = around.token(32)
        self._server = ControlServer(
            self.secret,
            # each connection reports in a thread of its own: handed over to the event thread, in its order
            lambda connection, message: timers.post(lambda: self._on_message(connection, message)),
            lambda connection, loss: timers.post(lambda: self._on_lost(connection, loss)),
            heartbeat_timeout_ms=config.runtime.heartbeat_timeout_ms,
            host=host,
            tls=Tls(config.security),
            around=around,
        )

    @property
    def address(self) -> tuple[str, int]:
        """Host and port where workers register."""
        return self._server.address

    @property
    def records(self) -> list[WorkerRecord]:
        """The workers that are registered now."""
        return list(self._records.values())

    def of(self, attempt: AttemptId) -> list[WorkerRecord]:
        """Return the workers of ``attempt``, as they came."""
        return [record for record in self._records.values() if record.attempt == attempt]

    def progress(self, reports: Mapping[int, Samples]) -> tuple[WorkerProgress, ...]:
        """Return the workers for the progress display; ``reports``: the latest of each worker."""
        found = []
        for record in self.records:
            report = reports.get(int(record.worker))
            busy = 0.0 if report is None else report.value(BUSY) or 0.0
            found.append(WorkerProgress(int(record.worker), record.address.host, record.pid, busy))
        return tuple(sorted(found, key=lambda one: (one.worker, one.host, one.pid)))

    def broadcast(self, message: messages.ToWorker) -> None:
        """Send to every worker, best effort; those of another generation drop it."""
        for record in self.records:
            record.connection.send(message)

    def stop(self, attempt: AttemptId, *, is_success: bool) -> None:
        """Tell the workers of ``attempt`` to leave."""
        for record in self.of(attempt):
            record.is_dismissed = True
            record.connection.send(messages.Stop("the generation has ended", is_success))

    def refuse(self, attempt: AttemptId, worker: WorkerIndex) -> None:
        """Tell a worker that its attempt is over."""
        for record in self.of(attempt):
            if record.worker == worker:
                record.is_dismissed = True
                record.connection.send(messages.Refused("this attempt of the job is over"))

    def close(self) -> None:
        """Close the port and every connection; nothing is reported any more."""
        self._server.close()

    def _on_message(self, connection: WorkerConnection, message: messages.FromWorker) -> None:
        if isinstance(message, messages.Register):
            self._on_register(connection, message)
            return
        record = self._records.get(connection)
        # it was refused, or lost a moment ago
        if record is None:
            return
        match message:
            case messages.Obituary():
                self._explain(record.address.host, message)
            case messages.Ready():
                # first: the coordinator must know of listeners before this worker's readiness may start it
                self._on_report(record.worker, message)
                self._on_event(supervisor_events.WorkerReady(Generation(message.generation), record.worker))
            case messages.Failed():
                record.is_dismissed = True
                now_ms, jitter = self._around.monotonic_ms(), self._around.random.random()
                peer = None if message.peer is None else WorkerIndex(message.peer)
                self._on_event(
                    supervisor_events.WorkerFailed(record.attempt, record.worker, message.failure, now_ms, jitter, peer)
                )
            case _:
                self._on_report(record.worker, message)

    def _on_register(self, connection: WorkerConnection, message: messages.Register) -> None:
        if message.plan_fingerprint != self._fingerprint:
            # not recorded: a worker with another plan belongs to no attempt, and its end is no failure
            connection.send(messages.Refused("it runs another version of the pipeline"))
            return
        worker = WorkerIndex(message.worker)
        for attempt, member in self._attempts.register(message.submission, worker, message.task_attempt):
            if member == worker:
                self._records[connection] = WorkerRecord(attempt, worker, connection, message.address, message.pid)
            else:  # carried over from an attempt that turned out to hold a stale worker
                for record in self._records.values():
                    if record.worker == member and record.attempt.submission == attempt.submission:
                        record.attempt = attempt
            self._on_event(supervisor_events.WorkerRegistered(attempt, member))

    def _explain(self, host: str, death: messages.Obituary) -> None:
        """Note how the process of a lost worker ended; the first report counts, exits of other workers do not."""
        worker = self._unexplained.pop((host, death.pid), None)
        if worker is None:
            return
        lines = death.written.strip().splitlines()[-LINES_SHOWN:]
        wrote = "".join(f"\n    {line}" for line in lines)
        last = f"; the last that it wrote:{wrote}" if lines else ""
        self._on_note(f"worker {worker}, process {death.pid} on {host}, {death.how}{last}")

    def _on_lost(self, connection: WorkerConnection, loss: Loss) -> None:
        record = self._records.pop(connection, None)
        if record is None:
            return
        # first: what registers from now on belongs to the next attempt
        self._attempts.lost(record.attempt)
        now_ms, jitter = self._around.monotonic_ms(), self._around.random.random()
        host = record.address.host
        if not record.is_dismissed:
            self._unexplained[host, record.pid] = record.worker
        while len(self._unexplained) > UNEXPLAINED_MAX:
            del self._unexplained[next(iter(self._unexplained))]
        reason = f"process {record.pid} on {host}: {loss.reason}"
        lost = supervisor_events.WorkerLost(record.attempt, record.worker, reason, now_ms, jitter, loss.is_silent)
        self._on_event(lost)
