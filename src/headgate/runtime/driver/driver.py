"""The driver of one pipeline run, its result, and the handle in the user's hands.

One event thread (``event_loop``) decides everything: ``supervisor_host`` hosts the supervisor and the running
generation, ``workers`` the registered workers, ``takeover`` looks for another driver. Counterpart:
``runtime.worker.worker`` on the other end of the control channel.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar

from headgate.call_errors import checked_calls
from headgate.codec import messages
from headgate.codec.json_files import Ending
from headgate.display.progress import RunDisplay, late_text
from headgate.environment import CancellablePool, wait_for
from headgate.errors import BringOutputBack, FencedError, HeadgateError, PipelineFailed, Remedy, UsageError, with_remedy
from headgate.model.config import PipelineConfig, check_switches
from headgate.model.failure import Failure, FailureKind, Refusal
from headgate.model.graph import Role
from headgate.model.ids import CheckpointId, Generation, NodeName, WorkerIndex
from headgate.model.manifest import Place
from headgate.model.pipeline_identity import driver_id
from headgate.model.plan import PipelineDefinition
from headgate.model.progress import (
    CheckpointOutcome,
    CheckpointProgress,
    ControlRequest,
    LateRecords,
    Location,
    Observer,
    PendingCheckpoint,
    PipelineState,
    Progress,
    RunResult,
    SubtaskAlignment,
)
from headgate.protocol.supervision import supervisor_events
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.checkpoints.savepoints import SavepointDirectory
from headgate.runtime.driver import pipeline_lock, takeover
from headgate.runtime.driver.coordinator_host import Pools
from headgate.runtime.driver.event_loop import EventLoop
from headgate.runtime.driver.pipeline_lock import PipelineLock
from headgate.runtime.driver.progress import RunProgress
from headgate.runtime.driver.supervisor_host import Answer, Launcher, PendingRequests, SupervisorHost
from headgate.runtime.driver.takeover import HeartbeatWriter, ReplacementWatch, current_takeover
from headgate.runtime.driver.workers import Workers
from headgate.runtime.surroundings import PROCESS, Surroundings
from headgate.runtime.worker.deployment import is_window_of_windows, late_output
from headgate.storage.local_files import make_root
from headgate.storage.urls import absolute_location, local_directory, open_storage

LATE_FACTOR = 10
"""After a first warning about late records of an operator the next one follows at so many times as many."""


class RunEnd:
    """The outcome of one run, decided once."""

    def __init__(self, definition: PipelineDefinition, lock: PipelineLock, around: Surroundings) -> None:
        self._roles = {node.name: node.role for node in definition.graph.nodes}
        self._lock = lock
        self._around = around
        self._begun_ms = around.monotonic_ms()
        self.result: Future[RunResult] = Future()

    @property
    def is_over(self) -> bool:
        """Whether the run has an outcome."""
        return self.result.done()

    def fail(self, error: BaseException) -> None:
        """End with ``error``, unless the run is over."""
        if not self.is_over:
            self.result.set_exception(error)

    def succeed(
        self,
        progress: Progress,
        last_checkpoint: CheckpointId | None,
        how: RunResult,
    ) -> None:
        """End well, unless the run is over. ``how`` says all but the numbers."""
        if self.is_over:
            return
        records_in = sum(n.records_out for n in progress.nodes if self._roles.get(n.node) is Role.SOURCE)
        records_out = sum(n.records_in for n in progress.nodes if self._roles.get(n.node) is Role.SINK)
        took_ms = self._around.monotonic_ms() - self._begun_ms
        found = replace(
            how,
            records_in=records_in,
            records_out=records_out,
            last_checkpoint=None if how.has_removed_checkpoints else last_checkpoint,
            restarts=progress.restarts,
            late_records=progress.late_records,
            duration_ms=took_ms,
        )
        self.result.set_result(found)

    def release_lock(self) -> None:
        """Write the end of this run into the lock, and let others run the pipeline."""
        error = self.result.exception()
        if error is not None:
            self._lock.release(Ending.FAILED, None, str(error))
            return
        result = self.result.result()
        self._lock.release(_ending_of(result), result.last_checkpoint, "", is_in_doubt=result.is_removal_in_doubt)


def _ending_of(result: RunResult) -> Ending:
    if result.has_removed_checkpoints:
        return Ending.CANCELLED
    return Ending.DRAINED if result.is_drained else Ending.FINISHED if result.is_finished else Ending.STOPPED


def error_of(failure: Failure) -> HeadgateError:
    """Return what is raised for a run that ended with ``failure``."""
    if failure.kind is FailureKind.REPLACED:
        return FencedError(failure.reason)
    is_for_good = failure.is_permanent or failure.kind is FailureKind.USER_CODE
    return with_remedy(PipelineFailed(failure.reason, failure.detail, is_for_good), _remedy_of(failure))


def _remedy_of(failure: Failure) -> Remedy | None:
    if isinstance(failure, Refusal):
        return failure.remedy
    return BringOutputBack() if failure.kind is FailureKind.DENIED else None


PROGRESS_PERIOD_MS = 500


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
        beats: bool = False,
        around: Surroundings = PROCESS,
    ) -> None:
        """Make the driver; ``host`` is the address on which workers can reach this process.

        ``lock`` is from ``lock_for`` if the caller holds it already; the driver releases it at its end. ``beats``: it
        gives signs of life, for standbys.
        """
        config = self._config = definition.config
        self._graph = definition.graph
        self._around = around
        lock = lock or lock_for(config, around)
        self._run = lock.nonce
        storage = open_storage(config.checkpoint_root)
        log = self._log = CheckpointLog(storage, config.name)
        self._heart = HeartbeatWriter(storage, config.name, lock.claimant, around) if beats else None
        self._observer = observer
        self.run_progress = RunProgress("bad-records", around.monotonic_ns, around.wall_ms, definition.plan)
        self._latest = Progress(PipelineState.STARTING)
        self._late_warned: dict[NodeName, int] = {}
        self._end = RunEnd(definition, lock, around)
        self._answers = PendingRequests(self._end.result)
        self._loop = EventLoop(lambda: self._end.is_over, self._on_error, self._close, around)
        # set when the run ends: calls that wait in the pools or hooks, such as a claim that is tried again, give up
        off = self._off = around.event()
        names = ("storage", "commit", "savepoint")
        self._pools = Pools(*(CancellablePool(around.pool(1, f"headgate-{n}", is_daemon=True), off) for n in names))
        # no bound method: the workers are made before the supervision
        on_event: Callable[[supervisor_events.Event], None] = lambda event: self.supervision.handle(event)  # noqa: E731
        hears = on_event, self._on_report, observer.on_note
        self.workers = Workers(definition, fingerprint, self._loop, *hears, host=host, around=around)
        self.supervision = SupervisorHost(
            definition,
            launcher,
            observer,
            log,
            self._loop,
            self._pools,
            self.workers,
            self.run_progress,
            self._on_finish,
            # the lock and the claim have one name: only so a stop is recorded for the run that died (SB14)
            takeover=replace(current_takeover(), claimant=lock.claimant),
            around=around,
            off=off,
        )
        self._watch = ReplacementWatch(log, self._pools.storage, self._loop, self._on_replaced, around)

    # -- what the handle calls --------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The pipeline's."""
        return self._config.name

    @property
    def progress(self) -> Progress:
        """The latest numbers."""
        return self._latest

    @property
    def result(self) -> Future[RunResult]:
        """The outcome of the run."""
        return self._end.result

    @property
    def running_generation(self) -> Generation | None:
        """The running generation, if any (for tests and the demo)."""
        live = self.supervision.live
        return None if live is None or not live.is_started else live.number

    def worker_pids(self) -> dict[int, int]:
        """Return ``worker → process id`` of the workers registered now (for tests and the demo)."""
        return {int(record.worker): record.pid for record in self.workers.records}

    def start(self) -> None:
        """Begin."""
        self._loop.start()
        # posted, as every event: only the event thread touches the machines
        self.post(lambda: self.supervision.handle(supervisor_events.Begin()))
        self._loop.every(PROGRESS_PERIOD_MS, "progress", self._show_progress)
        self._loop.every(takeover.PERIOD_MS, "fence", self._look_for_another)
        if self._heart is not None:
            self._loop.every(takeover.LOOK_MS, "heartbeat", self._beat)

    def stop(self) -> None:
        """Take a last checkpoint, commit it, then end. From any thread."""
        self.post(self.supervision.stop)

    def drain(self) -> None:
        """End the sources, process everything in flight, take the final checkpoint, then end. From any thread."""
        self.post(self.supervision.drain)

    def take_checkpoint(self) -> Future[CheckpointOutcome]:
        """Take a checkpoint now. From any thread."""
        return self._asked(self.supervision.ask)

    def take_savepoint(self, url: str) -> Future[CheckpointOutcome]:
        """Take a savepoint now. From any thread; it looks at the place at once.

        Raises:
            UsageError: it cannot be at ``url``.
            StorageError
        """
        place = self._new_place(url)
        return self._asked(lambda answer: self.supervision.ask_for_savepoint(place, answer))

    def end_with_savepoint(self, url: str, *, drain: bool) -> Future[CheckpointOutcome]:
        """Stop or drain, with a savepoint of the last checkpoint. From any thread; it looks at the place at once.

        Raises:
            UsageError: it cannot be at ``url``; the pipeline goes on.
            StorageError
        """
        place = self._new_place(url)
        return self._asked(lambda answer: self.supervision.end_with_savepoint(place, answer, drain=drain))

    def _new_place(self, url: str) -> Place:
        """Look at a place; choose a name for the files of one try there (SV4). Nothing is ordered before."""
        local = local_directory(url)
        if local is not None:
            try:
                make_root(local, self._config.security.access, "savepoint directory")
            except OSError as error:
                raise UsageError(f"savepoint directory {local} cannot be created ({error.strerror})") from error
        return SavepointDirectory(url).place(self._around.token(8).hex())

    def _asked(self, ask: Callable[[Answer], None]) -> Future[CheckpointOutcome]:
        """Have ``ask`` run in the event thread; the end of the run answers, too."""
        asked, answer = self._answers.new()
        self.post(lambda: ask(answer))
        return asked

    def answer_asks(self) -> None:
        """Do what others ask for from their processes; returns when they are answered."""
        taken = pipeline_lock.take_requests(self._config.checkpoint_root, self._config.name, self._run)
        if any(request.cancels for _, request in taken):
            self.cancel()  # the end of the run answers all of them
        wants_checkpoint = any(not request.savepoint for _, request in taken)
        checkpoint = self.take_checkpoint() if wants_checkpoint else None  # one is for all
        outcomes = [(ask, self._requested(request) if request.savepoint else checkpoint) for ask, request in taken]
        for answer in [_answer(ask, outcome) for ask, outcome in outcomes if outcome is not None]:
            answer.result()

    def _requested(self, request: ControlRequest) -> Future[CheckpointOutcome]:
        try:
            if request.ends:
                return self.end_with_savepoint(request.savepoint, drain=request.drains)
            return self.take_savepoint(request.savepoint)
        except HeadgateError as error:  # an answer to this request only: the pipeline goes on
            refused: Future[CheckpointOutcome] = Future()
            refused.set_result(CheckpointOutcome(None, str(error), is_refused=True))
            return refused

    def cancel(self, *, retain: bool = False) -> None:
        """End without another checkpoint. From any thread. ``retain``: keep those that there are, as a stop does."""
        self.post(lambda: self.supervision.cancel(retain=retain))

    def post(self, call: Callable[[], None]) -> None:
        """Have ``call`` run in the event thread. From any thread."""
        self._loop.post(call)

    def join(self) -> None:
        """Wait until everything of this run is released (after ``result`` is done)."""
        self._loop.join()

    # -- in the event thread ----------------------------------------------------------------------------------------

    def _on_report(self, worker: WorkerIndex, message: messages.FromWorker) -> None:
        if isinstance(message, messages.MetricsReport):
            self.run_progress.add(int(worker), message)
        # without a generation at work there is nothing to report to: what still comes is of the one before
        elif self.supervision.live is not None:
            self.supervision.live.on_report(worker, message)

    def _look_for_another(self) -> None:
        # between two generations the next claim looks (R40)
        if self.supervision.live is not None:
            self._watch.look()

    def _beat(self) -> None:
        # a heartbeat is stored by generation: none before the claim
        if self._heart is not None and self._log.generation:
            self._heart.beat(self._log.generation, self.supervision.course)

    def _on_replaced(self, newer: Generation) -> None:
        live = self.supervision.live
        if live is not None and newer > live.number:  # a look that hung may report a claim of this driver itself
            live.replaced_by(newer)

    def _show_progress(self) -> None:
        supervision = self.supervision
        live, machine = supervision.live, supervision.machine
        pending: PendingCheckpoint | None = None if live is None else live.coordination.pending_checkpoint()
        generation = machine.generation or supervision.last_generation or Generation(0)
        restarts_count = supervision.restarts_before + machine.restarts_count
        found = self.run_progress.snapshot(supervision.state, generation, restarts_count, pending)
        self._latest = replace(
            found,
            lost_outputs=self._log.lost_output.count,
            failures=supervision.restarts_before + supervision.failures_count,
            workers=self.workers.progress(self.run_progress.reports()),
            drift_ms=None if live is None or live.aligner is None else live.aligner.drift_in_force_ms,
        )
        self._observer.on_progress(self._latest)
        self._warn_of_late_records(LATE_FACTOR)

    def _warn_of_late_records(self, factor: int) -> None:
        """Warn of operators that have had ``factor`` times as many late records as at the last warning."""
        for node in self._latest.nodes:
            warned = self._late_warned.get(node.node, 0)
            if node.lateness is not None and node.late_records > warned and node.late_records >= factor * warned:
                self._late_warned[node.node] = node.late_records
                output = late_output(self._graph, node.node)
                text = late_text(node, is_window_of_windows(self._graph, node.node), output)
                self._observer.on_note(LateRecords(node, text))

    def _on_finish(self, effect: supervisor_events.Finish) -> None:
        # the last numbers: the result is made of them
        self._show_progress()
        self._warn_of_late_records(1)
        if effect.failure is not None:
            # at once: a user's callback may hang, and must not keep a run that has failed
            self._end.fail(error_of(effect.failure))
        else:  # after the callbacks of the last rounds and their notes
            end = lambda: self.post(lambda: self._succeed(is_final=effect.is_final))  # noqa: E731
            self.supervision.callbacks.when_done(lambda: self._end_after_hooks(end))

    def _end_after_hooks(self, end: Callable[[], None]) -> None:
        """End when hooks have handled their last notification; a stuck one is not waited for long."""
        hooks = self.supervision.hooks
        if hooks.is_listening:
            # and `end` again when they are done: the first call counts (RunEnd)
            self._loop.arm("hooks", hooks.patience_ms, end)
        hooks.when_done(end)

    def _succeed(self, *, is_final: bool) -> None:
        supervision = self.supervision
        last = self.run_progress.checkpoints[-1].checkpoint if self.run_progress.checkpoints else supervision.begun_from
        how = RunResult(
            is_final,
            is_drained=supervision.is_drained,
            savepoint=supervision.savepoint,
            has_removed_checkpoints=supervision.has_removed_checkpoints,
            is_removal_in_doubt=supervision.is_removal_in_doubt,
            is_cancelled=supervision.is_cancelled and not is_final,
            had_finished=supervision.had_finished,
        )
        self._end.succeed(self._latest, last, how)

    def _on_error(self, error: BaseException) -> None:
        """A bug: nothing here can decide any more."""
        self._latest = replace(self._latest, state=PipelineState.FAILED)
        self._end.fail(error)
        # its workers have no driver any more, and Spark would keep their slots
        self.supervision.end_job()

    def _close(self) -> None:
        try:
            self._close_all()
        finally:
            # last, and whatever failed: the next driver may begin when the lock is free
            self._end.release_lock()

    def _close_all(self) -> None:
        # first: else the pools below would be waited for as long as storage does not answer
        self._off.set()
        self.workers.close()
        self.supervision.close()
        # A replaced driver has nothing to wait for: its successor has fenced what may hang in storage (C38).
        is_waiting = not isinstance(self._end.result.exception(), FencedError)
        for pool in (self._pools.storage, self._pools.commit, self._pools.savepoint):
            pool.shutdown(wait=is_waiting)
        self.supervision.hooks.close()  # a claim that was under way may have called them until now
        if self._heart is not None:
            course = self.supervision.course
            problem = self._heart.stop(self._log.generation, self.result, course)  # after the last commit
            if problem:
                self._observer.on_note(problem)


def _answer(ask: pipeline_lock.RequestFile, outcome: Future[CheckpointOutcome]) -> Future[None]:
    """Answer ``ask`` in the thread that decides, as soon as there is an outcome: the process may end soon after."""
    answered: Future[None] = Future()

    def tell(done: Future[CheckpointOutcome]) -> None:
        try:
            ask.answer(done.result())
        finally:
            # also if the file could not be written: answer_asks() waits for this
            answered.set_result(None)

    outcome.add_done_callback(tell)
    return answered


def lock_for(config: PipelineConfig, around: Surroundings = PROCESS) -> PipelineLock:
    """Take the lock of a pipeline for the driver that is made next; it says under which name that one claims.

    Raises:
        UsageError: another driver runs this pipeline.
    """
    given, owner = current_takeover(), f"process {around.process_id} on {around.host}"
    claimant = given.claimant or driver_id(owner, around.token(4).hex())  # differs even within one process
    return PipelineLock.acquire(config.checkpoint_root, config.name, owner, given.lock_nonce, claimant=claimant)


_T = TypeVar("_T")


class DriverHandle(RunDisplay):
    """A started pipeline (``model.progress.PipelineHandle``)."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        super().__init__(driver.name, driver.result)

    @property
    def progress(self) -> Progress:
        """The latest snapshot."""
        return self.driver.progress

    def wait(self, timeout_s: float | None = None) -> RunResult | None:
        """Wait until the pipeline ended; None when ``timeout_s`` passed before.

        An interrupt (Ctrl-C, a notebook's cell) ends only the waiting: the run goes on.

        Raises:
            PipelineFailed: the restart strategy gave up.
            FencedError: another driver of the same pipeline took over.
        """
        try:
            result = wait_for(self.driver.result, timeout_s)
        except BaseException:
            if self.driver.result.done():  # the run's own failure; else only the waiting ends
                self._release()
            raise
        if result is not None:
            self._release()
        return result

    def stop(
        self, timeout_s: float | None = None, *, drain: bool = False, savepoint: Location | None = None
    ) -> RunResult | None:
        """Take a last checkpoint, then stop; a later run of the same pipeline continues from it.

        With ``drain`` the sources end as if their input had ended: windows fire, everything in flight is processed,
        and the last checkpoint is final. A drained pipeline has finished: it does not continue. ``savepoint``: a place
        at which a savepoint of the last checkpoint is written; ``RunResult.savepoint`` says what came of it.

        Raises:
            UsageError: the savepoint cannot be there; the pipeline goes on.
            PipelineFailed, FencedError: see ``wait``.
        """
        check_switches("stop: ", drain=drain)
        if savepoint is not None:
            asked = self.driver.end_with_savepoint(absolute_location(savepoint), drain=drain)
            result = self.wait(timeout_s)
            # this hardly waits: the end of the run has answered every request
            return None if result is None else replace(result, savepoint=asked.result())
        if drain:
            self.driver.drain()
        else:
            self.driver.stop()
        return self.wait(timeout_s)

    def take_checkpoint(self, timeout_s: float | None = None) -> CheckpointOutcome | None:
        """Take a checkpoint now, whatever interval and pause say. None: ``timeout_s`` passed; it may still complete."""
        return wait_for(self.driver.take_checkpoint(), timeout_s)

    def take_savepoint(self, path: Location, timeout_s: float | None = None) -> CheckpointOutcome | None:
        """Write a savepoint at ``path``; return what came of it, with ``savepoint``, or None: ``timeout_s`` passed.

        Raises:
            UsageError: it cannot be there.
        """
        return wait_for(self.driver.take_savepoint(absolute_location(path)), timeout_s)

    def answer_requests(self) -> None:
        """Carry out the requests of other processes, and write their outcomes."""
        self.driver.answer_asks()

    def cancel(self, *, retain: bool = False) -> None:
        """Stop at once, without a last checkpoint; a later run continues from the latest completed one.

        With ``Checkpointing(retain_on_cancel=False)`` the checkpoints are removed, unless ``retain`` is given.
        """
        check_switches("cancel: ", retain=retain)
        self.driver.cancel(retain=retain)

    def when_ended(self, call: Callable[[], None]) -> None:
        """Make ``call`` once, as soon as the run has ended, however; before ``wait`` returns."""
        self.driver.result.add_done_callback(lambda _: call())

    def checkpoints(self) -> tuple[CheckpointProgress, ...]:
        """Return the completed checkpoints of this run, oldest first (bounded)."""
        return tuple(self.driver.run_progress.checkpoints)

    def alignments(self) -> dict[CheckpointId, tuple[SubtaskAlignment, ...]]:
        """Return how long the latest checkpoints held up each subtask, by checkpoint (bounded).

        Workers report twice a second, so the newest may be missing or not whole yet.
        """
        return self.driver.run_progress.alignments.latest()

    def metrics(self) -> dict[str, dict[str, int | float]]:
        """Return ``node → metric → number`` of the latest snapshot: what ``NodeProgress`` has, but for what is None."""
        return {str(node.node): node.numbers() for node in self.driver.progress.nodes}

    def _release(self) -> None:
        """Give up what the run needed; it has ended. May be called again."""
        self.driver.join()
        self.close_display()


checked_calls(DriverHandle, "PipelineHandle")
