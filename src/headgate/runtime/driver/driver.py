"""The driver of one pipeline run: interprets ``supervision.supervisor`` and hosts each generation's coordination.

One event thread owns both machines; connections, storage, commits and Spark's job report to it through a queue.
Counterparts: ``runtime.worker.worker`` on the other end of the control channel, ``spark.session`` below (it launches
the workers) and above (it hands out the user's handle).
"""

from __future__ import annotations

import contextlib
import heapq
import os
import queue
import socket
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, assert_never

from headgate import fault_points
from headgate.codec import messages
from headgate.codec.lock_holder import Ending
from headgate.errors import FencedError, HeadgateError, OutputDenied, PipelineFailed, StorageError, UsageError
from headgate.model.definition import PipelineDefinition
from headgate.model.failure import Failure, FailureKind
from headgate.model.graph import Role
from headgate.model.ids import CheckpointId, Generation, SubtaskId, VertexId, WorkerIndex
from headgate.model.progress import CheckpointProgress, Observer, PipelineState, Progress, RunResult
from headgate.protocol.checkpoints import coordinator
from headgate.protocol.machine import Ignored
from headgate.protocol.supervision import supervisor
from headgate.protocol.supervision.supervisor import AttemptId
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.checkpoints.restoring import restored_by
from headgate.runtime.driver.attempts import Attempts
from headgate.runtime.driver.claims import Finished, NewGeneration, begin_generation
from headgate.runtime.driver.coordination import Coordination
from headgate.runtime.driver.looping import Looping, RoundCallbacks
from headgate.runtime.driver.pipeline_lock import PipelineLock
from headgate.runtime.driver.progress_book import ProgressBook
from headgate.runtime.process import PROCESS
from headgate.runtime.surroundings import Queue, Surroundings
from headgate.runtime.wire.control import ControlServer, Loss, WorkerConnection
from headgate.runtime.wire.tls import Tls
from headgate.storage.backends import open_storage

PROGRESS_PERIOD_MS = 500
FENCE_CHECK_PERIOD_MS = 1_000
"""How soon an idle driver notices that another one has taken over."""


class Launcher(Protocol):
    """Starts workers: in production a Spark barrier stage."""

    def submit(
        self, submission: int, address: tuple[str, int], secret: bytes, ended: Callable[[str | None], None]
    ) -> None:
        """Start all workers; call ``ended`` once, with None or an error, when every one of them is gone."""

    def cancel(self, submission: int) -> None:
        """Have the workers of this submission killed."""


@dataclass(slots=True)
class WorkerRecord:
    """A worker that has registered."""

    attempt: AttemptId
    worker: WorkerIndex
    connection: WorkerConnection
    address: messages.Address
    pid: int


class Driver:
    """Runs one pipeline until it has ended, failed or been stopped."""

    def __init__(
        self,
        definition: PipelineDefinition,
        launcher: Launcher,
        observer: Observer,
        fingerprint: str,
        *,
        host: str = "127.0.0.1",
        lock: PipelineLock | None = None,
        around: Surroundings = PROCESS,
    ) -> None:
        """Make the driver; ``host`` is the address on which workers can reach this process.

        ``lock`` is the pipeline's lock if the caller holds it already; the driver releases it at its end.
        """
        config = definition.config
        self._around = around
        self._definition = definition
        self._launcher = launcher
        self._observer = observer
        self._fingerprint = fingerprint
        self._owner = owner_text()
        self._claimant = f"{self._owner}, driver {around.token(4).hex()}"  # differs even within one process
        self._lock = lock or PipelineLock.acquire(config.checkpoint_root, config.name, self._owner)
        self._log = CheckpointLog(open_storage(config.checkpoint_root), config.name)
        self._secret = around.token(32)
        self._events: Queue[Callable[[], None]] = around.queue()
        self._timers: list[tuple[int, int, object, Callable[[], None]]] = []
        self._armed: dict[object, int] = {}
        self._timer_count = 0
        self._random = around.random
        self._storage_pool = around.pool(1, "headgate-storage")
        self._commit_pool = around.pool(1, "headgate-commit")
        self._machine = supervisor.Supervisor(definition.plan.parallelism, config.restart)
        self._begun: NewGeneration | None = None
        self._last_generation: Generation | None = None
        self._submission: int | None = None
        self._deployed: AttemptId | None = None
        self._is_looking = False
        self._coordination: Coordination | None = None
        self._looping: Looping | None = None
        self._callbacks = RoundCallbacks(self.note, around)
        self._workers: dict[WorkerConnection, WorkerRecord] = {}
        self._attempts = Attempts(definition.plan.parallelism)
        self._book = ProgressBook("bad-records")
        self._state = PipelineState.STARTING
        self._failed_ms: int | None = None
        self._is_stop_wanted = False
        self._is_drain_wanted = False
        self._is_drained = False
        self._begun_ms = self._around.monotonic_ms()
        self._last_progress = Progress(PipelineState.STARTING)
        self.result: Future[RunResult] = Future()
        self._server = ControlServer(
            self._secret,
            self._on_message,
            self._on_lost,
            heartbeat_timeout_ms=config.runtime.heartbeat_timeout_ms,
            host=host,
            tls=Tls(config.security),
            around=around,
        )
        self._thread = around.thread(self._loop, "headgate-driver")

    # -- what the handle calls ------------------------------------------------------------------------------------

    @property
    def progress(self) -> Progress:
        """The latest numbers."""
        return self._last_progress

    @property
    def book(self) -> ProgressBook:
        """Everything measured in this run."""
        return self._book

    @property
    def running_generation(self) -> Generation | None:
        """The generation whose coordinator is at work, if any (for tests and the demo)."""
        coordination = self._coordination
        return None if coordination is None or not coordination.is_started else coordination.generation

    def worker_pids(self) -> dict[int, int]:
        """Return ``worker → process id`` of the workers registered now (for tests and the demo)."""
        return {int(record.worker): record.pid for record in list(self._workers.values())}

    def start(self) -> None:
        """Begin."""
        self._thread.start()
        self.post(lambda: self._handle(supervisor.Begin()))
        self._arm_periodic("progress", PROGRESS_PERIOD_MS, self._show_progress)
        self._arm_periodic("fence", FENCE_CHECK_PERIOD_MS, self._check_fence)

    def stop(self) -> None:
        """Take a last checkpoint, commit it, then end. From any thread."""
        self.post(self._on_stop)

    def drain(self) -> None:
        """End the sources, process everything in flight, take the final checkpoint, then end. From any thread."""
        self.post(self._on_drain)

    def cancel(self) -> None:
        """End without another checkpoint. From any thread."""
        self.post(lambda: self._handle(supervisor.CancelRequested()))

    def join(self) -> None:
        """Wait until everything of this run is released (after ``result`` is done)."""
        if not self._thread.is_current:
            self._thread.join()

    # -- the event thread -----------------------------------------------------------------------------------------

    def post(self, call: Callable[[], None]) -> None:
        """Have ``call`` run in the event thread. From any thread."""
        self._events.put(call)

    def arm(self, timer: object, after_ms: int, fire: Callable[[], None]) -> None:
        """Call ``fire`` in the event thread after ``after_ms``; the same timer again replaces it."""

        def push() -> None:
            self._timer_count += 1
            self._armed[timer] = self._timer_count
            heapq.heappush(self._timers, (self._around.monotonic_ms() + after_ms, self._timer_count, timer, fire))

        if self._thread.is_current:
            push()
        else:
            self.post(push)

    def cancel_timer(self, timer: object) -> None:
        """Forget a timer."""
        self._armed.pop(timer, None)

    def _loop(self) -> None:
        try:
            while not self.result.done():
                self._fire_due_timers()
                wait_s = max(self._timers[0][0] - self._around.monotonic_ms(), 0) / 1000 if self._timers else 1.0
                try:
                    call = self._events.get(timeout=min(wait_s, 1.0))
                except queue.Empty:
                    continue
                call()
        except BaseException as error:
            self._finish(error)
            if self._submission is not None:  # nobody else ends the job of a driver that cannot go on
                self._launcher.cancel(self._submission)
        finally:
            self._close()

    def _fire_due_timers(self) -> None:
        while self._timers and self._timers[0][0] <= self._around.monotonic_ms():
            _, number, timer, fire = heapq.heappop(self._timers)
            if self._armed.get(timer) == number:
                del self._armed[timer]
                fire()

    def _arm_periodic(self, name: str, period_ms: int, call: Callable[[], None]) -> None:
        def fire() -> None:
            call()
            self.arm(name, period_ms, fire)

        self.arm(name, period_ms, fire)

    # -- the supervisor -------------------------------------------------------------------------------------------

    def _handle(self, event: supervisor.Event) -> None:
        for effect in self._machine.handle(event):
            self._run(effect)

    def _run(self, effect: supervisor.Effect) -> None:
        match effect:
            case supervisor.ClaimGeneration():
                self._storage_pool.submit(self._claim)
            case supervisor.SubmitJob():
                number = self._submission = effect.submission
                self._launcher.submit(
                    number, self._server.address, self._secret, lambda error: self._on_job_ended(number, error)
                )
            case supervisor.CancelJob():
                self._launcher.cancel(effect.submission)
            case supervisor.Deploy():
                self._deploy(effect)
            case supervisor.StartCoordinator():
                self._start_coordinator()
            case supervisor.EndGeneration():
                self._end_generation(effect)
            case supervisor.RefuseWorker():
                self._refuse(effect)
            case supervisor.ArmTimer():
                timer = effect.timer
                self.arm(timer, effect.after_ms, lambda: self._handle(self._timer_fired(timer)))
            case supervisor.ReportRestart():
                self._state = PipelineState.RESTARTING
                self._observer.on_restart(effect.failure.reason, effect.delay_ms)
            case supervisor.Finish():
                self._on_finish(effect)
            case Ignored():
                return
            case _:
                assert_never(effect)

    def _timer_fired(self, timer: supervisor.Timer) -> supervisor.TimerFired:
        return supervisor.TimerFired(timer, self._around.monotonic_ms(), self._random.random())

    def _claim(self) -> None:
        """Runs in the storage thread."""
        try:
            begun = begin_generation(
                self._definition, self._log, self._claimant, self.note, self._last_generation, self._around
            )
        except (UsageError, OutputDenied) as error:  # K5: in recovery as in the coordinator
            self._claim_failed(Failure(FailureKind.DETERMINISTIC, str(error)))
        except FencedError as error:
            self._claim_failed(Failure(FailureKind.REPLACED, str(error)))
        except (StorageError, HeadgateError) as error:
            self._claim_failed(Failure(FailureKind.LOST, str(error)))
        except Exception as error:
            self._claim_failed(Failure(FailureKind.DETERMINISTIC, f"{type(error).__name__}: {error}"))
        else:
            self.post(lambda: self._claimed(begun))

    def _claim_failed(self, failure: Failure) -> None:
        jitter = self._random.random()
        self.post(lambda: self._handle(supervisor.ClaimFailed(failure, self._around.monotonic_ms(), jitter)))

    def _claimed(self, begun: NewGeneration | Finished) -> None:
        if isinstance(begun, Finished):
            checkpoint = begun.manifest.checkpoint
            how = (
                "was drained and does not continue"
                if begun.manifest.is_draining
                else "has already processed all its input; what was added since is not read"
            )
            self._observer.on_note(
                f"pipeline '{self._definition.config.name}' {how} (final checkpoint "
                f"{checkpoint}); give it another name, or remove {self._log.url}, to run it again"
            )
            self._is_drained = begun.manifest.is_draining
            self._handle(supervisor.AlreadyFinished(checkpoint))
            return
        self._begun = begun
        self._last_generation = begun.generation
        # From now on, not from its start: a quick subtask reports before the last worker is ready.
        self._coordination = Coordination(
            self._definition, begun, self._log, self, self._storage_pool, self._commit_pool, self._around
        )
        self._looping = Looping(self._definition, begun.generation, self, self._callbacks)
        self._book.begin(begun.generation)
        if begun.restored is not None:
            before, now = begun.restored.parallelism, self._definition.plan.parallelism
            moved = "" if before == now else f", which parallelism {before} wrote, at parallelism {now}"
            self._observer.on_note(
                f"generation {begun.generation} continues from checkpoint {begun.restored.checkpoint}{moved}"
            )
        if self._is_drain_wanted or (begun.restored is not None and begun.restored.is_draining):  # E9
            self._coordinate(coordinator.DrainRequested())
        self._handle(supervisor.GenerationReady(begun.generation))

    def _deploy(self, effect: supervisor.Deploy) -> None:
        begun = self._begun
        assert begun is not None
        assert begun.generation == effect.generation
        self._deployed = effect.attempt
        config = self._definition.config
        records = sorted((r for r in self._workers.values() if r.attempt == effect.attempt), key=lambda r: r.worker)
        addresses = [record.address for record in records]
        for record in records:
            restored = restored_by(begun.restored, self._definition.plan, record.worker)
            record.connection.send(
                messages.Deploy(
                    effect.generation,
                    addresses,
                    restored,
                    config.runtime.credit_bytes,
                    config.runtime.flush_ms,
                    config.checkpoints.inline_bytes_max,
                    begun.restored is not None and begun.restored.is_draining,
                )
            )

    def _start_coordinator(self) -> None:
        coordination = self._coordination
        assert coordination is not None
        self._state = PipelineState.DRAINING if coordination.machine.is_draining else PipelineState.RUNNING
        interval_ms = self._definition.config.checkpoints.interval_ms
        first_delay_ms = round(interval_ms * (0.5 + self._random.random() / 2))
        coordination.start(first_delay_ms)
        if self._failed_ms is not None:
            took_ms = self._around.monotonic_ms() - self._failed_ms
            self._failed_ms = None
            self._observer.on_note(f"generation {coordination.generation} runs {took_ms} ms after the failure")
        if self._is_stop_wanted:
            self._on_stop()

    def _end_generation(self, effect: supervisor.EndGeneration) -> None:
        if not effect.is_done:
            self._failed_ms = self._around.monotonic_ms()
        if self._coordination is not None:
            self._coordination.close()
            self._coordination = None
        if self._looping is not None:
            self._looping.close()
            self._looping = None
        for record in list(self._workers.values()):
            if record.attempt == self._deployed:  # workers of Spark's own retry wait for the next generation
                record.connection.send(messages.Stop("the generation has ended", effect.is_done))
        self._begun = None

    def _refuse(self, effect: supervisor.RefuseWorker) -> None:
        for record in list(self._workers.values()):
            if record.attempt == effect.attempt and record.worker == effect.worker:
                record.connection.send(messages.Refused("this attempt of the job is over"))

    def _on_finish(self, effect: supervisor.Finish) -> None:
        self._state = PipelineState.FINISHED
        self._show_progress()
        if effect.failure is not None:
            self._finish(_error_of(effect.failure))
        else:  # behind the callbacks of the last rounds, and behind what they had to say
            self._callbacks.when_done(lambda: self.post(lambda: self._finish(None, effect.is_final)))

    # -- what coordinations ask for (``coordination.Surroundings``) -------------------------------------------------

    def broadcast(self, message: messages.ToWorker) -> None:
        """Send to every worker of the running attempt, best effort."""
        for record in list(self._workers.values()):
            record.connection.send(message)

    def generation_failed(self, effect: coordinator.FailGeneration) -> None:
        """The coordinator gave up."""
        generation = self._machine.generation
        if generation is not None:
            now_ms, jitter = self._around.monotonic_ms(), self._random.random()
            self._handle(supervisor.GenerationFailed(generation, effect.failure, now_ms, jitter))

    def generation_done(self, effect: coordinator.GenerationDone) -> None:
        """Everything is committed."""
        self._state = PipelineState.STOPPING
        if self._coordination is not None:
            self._is_drained = effect.is_final and self._coordination.machine.is_draining
            self._handle(supervisor.GenerationDone(self._coordination.generation, effect.is_final))

    def checkpoint_completed(self, progress: CheckpointProgress) -> None:
        """Tell those who watch."""
        self._book.checkpoints.append(progress)
        self._observer.on_checkpoint(progress.checkpoint, progress.duration_ms, progress.size_bytes)

    def note(self, text: str) -> None:
        """Show the user a sentence. From any thread."""
        self.post(lambda: self._observer.on_note(text))

    # -- workers --------------------------------------------------------------------------------------------------

    def _on_message(self, connection: WorkerConnection, message: messages.FromWorker) -> None:
        """Runs in the connection's thread."""
        self.post(lambda: self._on_worker_message(connection, message))

    def _on_lost(self, connection: WorkerConnection, loss: Loss) -> None:
        """Runs in the connection's thread."""
        self.post(lambda: self._on_worker_lost(connection, loss))

    def _on_worker_message(self, connection: WorkerConnection, message: messages.FromWorker) -> None:
        if isinstance(message, messages.Register):
            self._on_register(connection, message)
            return
        record = self._workers.get(connection)
        if record is None:
            return
        match message:
            case messages.Ready():
                self._handle(supervisor.WorkerReady(Generation(message.generation), record.worker))
            case messages.Acknowledge():
                fault_points.reach("before-ack")
                entry = messages.entry_of(message)
                self._coordinate(
                    coordinator.Acknowledged(
                        Generation(message.generation),
                        entry.subtask,
                        CheckpointId(message.checkpoint),
                        entry.handle,
                        entry.committables,
                    )
                )
            case messages.Decline():
                self._on_decline(message)
            case messages.Finished():
                subtask = SubtaskId(VertexId(message.vertex), message.index)
                self._coordinate(coordinator.FinishReported(Generation(message.generation), subtask))
            case messages.EntranceEnded() | messages.ProbeReturned():
                if self._looping is not None:
                    self._looping.on_message(message)
            case messages.Failed():
                failed = supervisor.WorkerFailed(
                    record.attempt, record.worker, message.failure, self._around.monotonic_ms(), self._random.random()
                )
                self._handle(failed)
            case messages.Metrics():
                self._book.add(int(record.worker), message)
            case _:
                return

    def _on_register(self, connection: WorkerConnection, message: messages.Register) -> None:
        if message.plan_fingerprint != self._fingerprint:
            connection.send(messages.Refused("it runs another version of the pipeline"))
            return
        address = messages.Address(message.host, message.port)
        worker = WorkerIndex(message.worker)
        for attempt, member in self._attempts.register(message.submission, worker, message.attempt):
            if member == worker:
                self._workers[connection] = WorkerRecord(attempt, worker, connection, address, message.pid)
            else:  # carried over from an attempt that turned out to hold a stale worker
                for record in self._workers.values():
                    if record.worker == member and record.attempt.submission == attempt.submission:
                        record.attempt = attempt
            self._handle(supervisor.WorkerRegistered(attempt, member))

    def _on_decline(self, message: messages.Decline) -> None:
        if message.text:
            self._observer.on_note(f"{message.vertex}[{message.index}] declined: {message.text}")
        subtask = SubtaskId(VertexId(message.vertex), message.index)
        generation, checkpoint = Generation(message.generation), CheckpointId(message.checkpoint)
        self._coordinate(coordinator.Declined(generation, subtask, checkpoint, message.reason))

    def _on_worker_lost(self, connection: WorkerConnection, loss: Loss) -> None:
        record = self._workers.pop(connection, None)
        if record is None:
            return
        self._attempts.lost(record.attempt)
        now_ms, jitter = self._around.monotonic_ms(), self._random.random()
        lost = supervisor.WorkerLost(record.attempt, record.worker, loss.reason, now_ms, jitter, loss.is_silent)
        self._handle(lost)

    def _on_job_ended(self, submission: int, error: str | None) -> None:
        """Runs in the launcher's thread."""
        jitter = self._random.random()
        self.post(lambda: self._handle(supervisor.JobEnded(submission, error, self._around.monotonic_ms(), jitter)))

    def _coordinate(self, event: coordinator.Event) -> None:
        if self._coordination is not None:
            self._coordination.handle(event)

    def _on_stop(self) -> None:
        self._is_stop_wanted = True
        if self._coordination is not None and self._coordination.is_started:
            self._state = PipelineState.STOPPING
            self._coordination.handle(coordinator.StopRequested())
        elif self._state is not PipelineState.STARTING:
            self._handle(supervisor.CancelRequested())  # between two generations: the last checkpoint stands

    def _on_drain(self) -> None:
        """Ask now, and every later generation of this run (E9)."""
        self._is_drain_wanted = True
        self._coordinate(coordinator.DrainRequested())
        if self._state is PipelineState.RUNNING:
            self._state = PipelineState.DRAINING

    # -- periodic -------------------------------------------------------------------------------------------------

    def _show_progress(self) -> None:
        pending = None
        if self._coordination is not None:
            for checkpoint in self._coordination.machine.pending[:1]:
                missing = tuple(str(s) for s in self._coordination.machine.missing(checkpoint))
                pending = (checkpoint, self._coordination.pending_age_ms(checkpoint), missing)
        generation = self._machine.generation or self._last_generation or Generation(0)
        self._last_progress = self._book.snapshot(self._state, generation, self._machine.restarts_count, pending)
        self._observer.on_progress(self._last_progress)

    def _check_fence(self) -> None:
        if self._coordination is None:
            return
        generation = self._coordination.generation

        def replaced(newer: Generation) -> None:
            if self._coordination is not None and self._coordination.generation < newer:
                self._coordination.handle(coordinator.GenerationReplaced(newer))

        if self._is_looking:  # storage hangs: one look at a time
            return
        self._is_looking = True

        def look() -> None:
            newer = None
            with contextlib.suppress(StorageError):  # looked at again, and at every write
                newer = self._log.newer_generation()
            self._is_looking = False
            if newer is not None and newer > generation:
                self.post(lambda: replaced(newer))

        self._storage_pool.submit(look)

    # -- the end --------------------------------------------------------------------------------------------------

    def _finish(self, error: BaseException | None, is_final: bool = False) -> None:
        if self.result.done():
            return
        if error is not None:
            self.result.set_exception(error)
            return
        roles = {node.name: node.role for node in self._definition.graph.nodes}
        nodes = self._last_progress.nodes
        last = self._book.checkpoints[-1].checkpoint if self._book.checkpoints else None
        self.result.set_result(
            RunResult(
                is_final,
                sum(n.records_out for n in nodes if roles.get(n.node) is Role.SOURCE),
                sum(n.records_in for n in nodes if roles.get(n.node) is Role.SINK),
                last,
                self._machine.restarts_count,
                self._around.monotonic_ms() - self._begun_ms,
                self._is_drained,
            )
        )

    def _close(self) -> None:
        self._server.close()
        self._callbacks.close()
        if self._coordination is not None:
            self._coordination.close()
        self._storage_pool.shutdown(wait=True)
        self._commit_pool.shutdown(wait=True)
        self._release_lock()

    def _release_lock(self) -> None:
        """Leave word for those who wait for the end of this run (``runtime.driver.stopping``)."""
        error = self.result.exception()
        if error is not None:
            self._lock.release(Ending.FAILED, None, str(error))
            return
        result = self.result.result()
        ending = Ending.DRAINED if result.is_drained else Ending.FINISHED if result.is_finished else Ending.STOPPED
        self._lock.release(ending, result.last_checkpoint, "")


def owner_text() -> str:
    """Return who runs a pipeline, for people."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def _error_of(failure: Failure) -> HeadgateError:
    if failure.kind is FailureKind.REPLACED:
        return FencedError(failure.reason)
    return PipelineFailed(failure.reason, failure.detail)
